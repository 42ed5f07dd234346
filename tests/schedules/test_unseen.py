"""Queries that see no key: 0, NaN or the mean of V, by the call's choice; without one they are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.config.problem import Problem
from npusim.errors import NpusimError, ProgramError, TilingError
from npusim.kernel import FlashPrecision, attention, flash
from npusim.program.numerics.input_tensors import recipe_source
from npusim.program.numerics.reference import summarise_errors
from npusim.run import run
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.evaluation import bits_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from reports.parts.kernel import declared_tiling
from tests.turns import in_turn

#: By name: a causal mask over more queries than keys, a window that late queries leave behind, and both.
CALLS: dict[str, dict[str, Any]] = {
    "early": {"seq_q": 200, "seq_kv": 72},
    "late": {"seq_q": 96, "seq_kv": 64, "causal_offset": 0, "window": 20},
    "both": {"seq_q": 224, "seq_kv": 130, "causal_offset": -70, "window": 16},
}
NONE = {"early": range(128), "late": range(83, 96), "both": [*range(70), *range(70 + 145, 224)]}
RUNS = [
    *((hw, s, t) for hw in ("h200", "ascend_910b2") for s, t in (("flash", {}), ("standard", {}))),
    ("h200", "standard", {"operators": "eager_float32"}),
    ("h200", "flash", {"kernel": "fa3"}),
    ("h200", "fa4", {}),
    ("h200", "fp8_attention", {}),
    ("v100", "volta_flash", {}),
    ("ascend_950", "flash", {}),
]


def problem_of(call: str, unseen: str | None, dtype: str = "float16") -> Problem:
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 64, "causal": True, **CALLS[call]}
    return Problem(**sizes, unseen=unseen, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hw", "schedule", "tiling", "unseen"), in_turn([pytest.param(*run) for run in RUNS], ("zero", "nan", "mean"))
)
def test_a_query_without_a_key_gives_the_choice(hw: str, schedule: str, tiling: dict[str, Any], unseen: str) -> None:
    """Of float64 too, so that the error is that of the queries that see keys; blocks of such queries alone also."""
    call = list(CALLS)[RUNS.index((hw, schedule, tiling)) % 2] if schedule != "flash" else "both"
    p = problem_of(call, unseen, "float8_e4m3fn" if schedule == "fp8_attention" else "float16")
    tile = declared_tiling(schedule, hw, **tiling)
    result = run(schedule, hw=hw, problem=p, tiling=tile, rows="all", heads="all", trace_groups=())
    limit = 0.03 if schedule == "fp8_attention" else 1e-3
    assert result.numerics.error.is_finite
    assert result.numerics.error.rmse < limit
    output = result.output.astype(np.float64)[0]
    rows, others = list(NONE[call]), [r for r in range(p.seq_q) if r not in NONE[call]]
    assert np.isfinite(output[:, others]).all()
    v = np.asarray(recipe_source(p)("v", 0, 0)).astype(np.float64)
    wanted = {"zero": 0 * v[0], "nan": v[0] + math.nan, "mean": v.mean(axis=0)}[unseen]
    np.testing.assert_allclose(output[:, rows], np.broadcast_to(wanted, output[:, rows].shape), atol=0.003)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tiling", [{"splits": 1}, {"splits": 3}])
def test_parts_of_keys_give_0(call: str, tiling: dict[str, Any]) -> None:
    tile = declared_tiling("split_kv", "h200", **tiling)
    found = run("split_kv", hw="h200", problem=problem_of(call, "zero"), tiling=tile, rows="all", trace_groups=())
    assert found.numerics.error.rmse < 1e-3
    assert not found.output[0, 0, list(NONE[call])].any()
    for other in ("nan", "mean"):
        with pytest.raises(
            NpusimError, match=f"unseen: {other}, but a split in which a query sees no key contributes 0"
        ):
            run("split_kv", hw="h200", problem=problem_of(call, other), tiling=tiling)


@pytest.mark.parametrize("call", CALLS)
def test_without_the_choice_such_a_call_is_refused(call: str) -> None:
    with pytest.raises(NpusimError, match=r"sees? none|without a key|without one"):
        problem_of(call, None)


def test_a_schedule_whose_kernel_has_no_choice_refuses_it() -> None:
    with pytest.raises(
        NpusimError, match="unseen: schedule pasa does not have this choice: its kernel has no parameter `unseen`"
    ):
        run("pasa", hw="h200", problem=problem_of("early", "zero"))


@pytest.mark.parametrize("unseen", ["zero", "nan", "mean"])
def test_a_mask_function_of_ones_own_may_show_a_query_nothing(unseen: str) -> None:
    def even(_problem: Any, _tiling: Any) -> Any:
        return lambda q, k: (k <= q) & (q % 8 != 3)

    p = Problem(heads=1, seq_q=64, head_dim=64, causal=True, unseen=unseen)
    (made,) = (s for s in attention("odd", flash, precisions=[FlashPrecision("p")], sees=even) if s.family == "nvidia")
    plan, program = program_of(plan_of(Request("flash", hw="h200", problem=p), is_bare=True))
    program = made.program(p, plan.tiling, plan.device, made.precision())
    bits = bits_of(plan, program, rows="all", heads="all")
    rows = np.concatenate([block for _, block in sorted(bits.rows.items())]).astype(np.float64)
    assert np.isfinite(rows[[r for r in range(64) if r % 8 != 3]]).all()
    v = np.asarray(recipe_source(p)("v", 0, 0)).astype(np.float64)
    wanted = {"zero": 0.0, "nan": math.nan, "mean": v.mean(axis=0)}[unseen]
    np.testing.assert_allclose(rows[3::8], np.broadcast_to(wanted, (8, 64)), atol=0.003)


def test_a_number_where_there_is_to_be_none_is_no_number() -> None:
    """NaN in the place of NaN is right; what else is there counts, and has no error."""
    exact, right = np.array([[1.0, 2.0], [math.nan, math.nan]]), np.array([[1.0, 2.0], [math.nan, math.nan]])
    wrong = np.array([[1.0, 2.0], [0.0, 0.0]])
    good, bad = (summarise_errors([x.astype(np.float16)], [exact], "float16") for x in (right, wrong))
    assert (good.nan_count, good.rmse) == (0, 0.0)
    assert (bad.nan_count, bad.rmse) == (2, None)


def test_a_command_says_it() -> None:
    how: dict[str, Any] = {"hw": "h200", "seq_q": 128, "seq_kv": 64, "rows": "all", "trace_groups": ()}
    result = npusim.run("flash", unseen="zero", **how)
    assert not result.output[0, 0, :64].any()
    assert result.problem.unseen == "zero"


def test_a_format_without_infinity_cannot_hold_hidden_scores() -> None:
    options: dict[str, Any] = {"workload": "opt_30b", "seq": 64, "hw": "l40s", "dtype": "float8_e4m3fn", "rows": "all"}
    with pytest.raises(TilingError, match=r"scores of float8_e4m3fn have no -Inf .* framework,scores=float16"):
        run("standard", causal=True, heads=0, **options)
    for precision, causal in (("framework,scores=float16", True), ("framework", False)):
        computed = run("standard", causal=causal, heads=0, precision=precision, **options).numerics
        assert computed is not None
        assert computed.error.nan_count == 0
    with pytest.raises(ProgramError, match=r"float8_e4m3fn has no infinity; give a finite number"):
        run("flash", seq=64, hw="h100", causal=True, precision="fa2_fp32,softmax=float8_e4m3fn")


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
@pytest.mark.parametrize("window", [(40, 20), (-1, 5), (0, 2)])
def test_keys_after_a_window_are_hidden_from_queries_before_the_first_key(window: tuple[int, int], hw: str) -> None:
    """A window that is wider than all keys hides them nevertheless, if the query is far before the first key."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, s, 16)).astype(np.float16) for s in (60, 3, 3))
    how: dict[str, Any] = {"hw": hw, "tensors": {"q": q, "k": k, "v": v}, "rows": "all", "presets": False}
    how |= {"causal": False, "window": window}
    with pytest.raises(NpusimError, match=r"the first query sees none; must be larger, or set the output with unseen"):
        npusim.run("flash", **how)
    output = npusim.run("flash", unseen="zero", **how).output
    assert output is not None
    before, after = window
    place, key = np.arange(60)[:, None] - 57, np.arange(3)
    seen = (key <= place + after) & ((before < 0) | (key >= place - before))
    weights = np.where(seen, np.exp(q[0, 0].astype(float) @ k[0, 0].astype(float).T / 4), 0)
    expected = weights @ v[0, 0] / np.maximum(weights.sum(1, keepdims=True), 1e-30)
    np.testing.assert_allclose(output[0, 0].astype(float), expected, atol=4e-3)


def test_alibi_of_keys_after_their_query_is_said() -> None:
    notes = Problem(heads=1, seq_q=16, head_dim=16, alibi=True).notes()
    assert any("FlashAttention subtracts the slope times |key - query|" in note for note in notes)
    assert Problem(heads=1, seq_q=16, head_dim=16, alibi=True, causal=True).notes() == ()


@pytest.mark.parametrize("sizes", [{"chunk": 33}, {"chunk": 8, "window": 3, "sinks": 2}, {"chunk": 8, "prefix": 2}])
def test_a_chunk_before_the_first_key_has_no_keys(sizes: dict[str, int]) -> None:
    p = Problem(heads=1, seq_q=100, seq_kv=20, head_dim=16, causal=True, unseen="zero", **sizes)  # type: ignore[arg-type]
    for query in range(100):
        found = p.seen.union(query - 80, query - 80)
        assert all(start >= 0 for start, _ in found)
        assert bool(found) == (query >= 80)
    assert p.seen.union(-80, 19) == ((0, 20),)
    rows = npusim.run("flash", hw="h200", problem=p, rows="all", presets=False).output
    assert rows is not None
    assert not rows[0, 0, :80].any()
