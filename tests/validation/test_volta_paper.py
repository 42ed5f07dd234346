"""FastAttention figure 8 on the V100: FP16 against FP32 accumulators (papers.yaml, cases v100_*)."""

from __future__ import annotations

from functools import cache

import pytest

import npusim
from npusim.config.problem import Problem

#: Tokens -> the paper's speed-up over xformers, no mask, batch 8, 32 heads, d = 64.
FIGURE_8 = {2048: 1.03, 4096: 1.06, 8192: 1.12, 16384: 1.17}

#: The kernel's own tile in both formats; a run that names none takes what is fastest for each.
DECLARED: dict[str, int | str] = {"block_q": 128, "block_kv": 64, "arrangement": "4x1", "launch": "in_order"}


@cache
def microseconds(tokens: int, precision: str, residents: int | None = None, *, causal: bool = False) -> float:
    problem = Problem(
        batch=8, heads=32, kv_heads=32, seq_q=tokens, seq_kv=tokens, head_dim=64, causal=causal, dtype="float16"
    )
    tiling = DECLARED | ({"residents": residents} if residents else {})
    found = npusim.run(
        "volta_flash", problem=problem, precision=precision, tiling=tiling, numerics=False, trace_groups=()
    )
    return float(found.latency_us)


def speedup(tokens: int, *, causal: bool = False) -> float:
    return microseconds(tokens, "acc_fp32", causal=causal) / microseconds(tokens, "acc_fp16", causal=causal)


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_long_sequences_gain_what_the_paper_says(tokens: int) -> None:
    assert speedup(tokens) == pytest.approx(FIGURE_8[tokens], rel=0.1)


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_short_sequences_gain_more_than_the_paper_says_and_why(tokens: int) -> None:
    # Too much by 22 and 12 %: a third resident block, which the paper's FP32 baseline has as well
    # (CUTLASS example 41 intends 12 warps).  As many blocks each: within 10 %.
    assert 1.1 < speedup(tokens) / FIGURE_8[tokens] < 1.25
    equal = microseconds(tokens, "acc_fp32") / microseconds(tokens, "acc_fp16", 2)
    assert equal == pytest.approx(FIGURE_8[tokens], rel=0.1)


def test_a_causal_mask_gains_more_but_no_more_than_the_paper_says() -> None:
    assert speedup(2048) < speedup(2048, causal=True) < 1.43


def test_time_grows_with_the_square_of_the_length_and_stays_below_the_peak() -> None:
    for tokens in (2048, 4096, 8192):
        grown = microseconds(2 * tokens, "acc_fp16") / microseconds(tokens, "acc_fp16")
        # Heads whose K and V leave L2 meanwhile cost more.
        assert grown == pytest.approx(4, rel=0.08)
        # 4 B H S^2 d operations at 125.3 TFLOP/s (volta.md section 6: 2.19 ms at 2 K).
        assert microseconds(tokens, "acc_fp16") > 2190 * (tokens / 2048) ** 2
