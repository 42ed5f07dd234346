"""Choices of precision that libraries make, as fields: growth, formats apart, the factor's place, E5M2 inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import npusim
from npusim import formats
from npusim.errors import NpusimError

RNG = np.random.default_rng(0)
TENSORS = {n: RNG.standard_normal((1, 1, 64, 64)) for n in "qkv"}
HOW: dict[str, Any] = {"causal": False, "rows": "all"}


def tensors(dtype: str) -> dict[str, Any]:
    return {n: formats.cast(values, dtype) for n, values in TENSORS.items()}


def run(schedule: str, dtype: str = "float16", **options: Any) -> Any:
    return npusim.run(schedule, **{"tensors": tensors(dtype), **HOW, **options})


@pytest.mark.parametrize(("dtype", "growth"), [("float16", "8"), ("float8_e4m3fn", "0")])
def test_fa4_follows_a_maximum_as_it_did_unless_a_growth_is_named(dtype: str, growth: str) -> None:
    usual, named, other = (
        run("fa4", dtype, precision=p, tiling={"block_kv": 16}).output for p in (None, f"growth={growth}", "growth=0.5")
    )
    assert np.array_equal(usual, named)
    assert not np.array_equal(usual, other)


def test_a_growth_that_e4m3_cannot_hold_is_no_trouble_in_e5m2() -> None:
    """flash-attention#2717: E5M2 ends at 57344, so that P up to 2^12 is rounded, not cut."""
    sharp = {**TENSORS, "q": 8 * TENSORS["q"]}
    cut = {}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        given = {n: formats.cast(values, dtype, overflow="saturate") for n, values in sharp.items()}
        for growth in (0, 4):
            precision = f"growth={growth},operand={dtype}"
            result = npusim.run(
                "fa4", tensors=given, precision=precision, tiling={"block_kv": 16}, diagnose=True, **HOW
            )
            cut[dtype, growth] = result.numerics.diagnosis.saturated_count
            assert result.output.dtype == formats.get_format("bfloat16").dtype
    assert cut.pop(("float8_e4m3fn", 4)) > 0
    assert not any(cut.values())


@pytest.mark.parametrize(("schedule", "hw"), [("flash", "ascend_910b2"), ("flash", "h200"), ("standard", "h200")])
def test_the_factor_goes_onto_q_before_the_product(schedule: str, hw: str) -> None:
    """The bits are those of Q times 1/8, exact in float16, and no factor after."""
    scaled = npusim.run(schedule, tensors=tensors("float16"), hw=hw, precision="scale_in=queries", **HOW)
    given = tensors("float16")
    before = {**given, "q": (given["q"] * np.float16(1 / 8)).astype(np.float16)}
    problem = {"heads": 1, "seq_q": 64, "head_dim": 64, "scale": 1.0, "dtype": "float16"}
    unscaled = npusim.run(schedule, tensors=before, problem=problem, hw=hw, rows="all")
    assert np.array_equal(scaled.output, unscaled.output)


def test_the_factor_onto_q_keeps_float16_scores_finite() -> None:
    large = {n: np.full((1, 1, 32, 64), 40, np.float16) for n in "qk"}  # 40^2 times 64 is beyond 65504
    given = {**large, "v": TENSORS["v"][:, :, :32].astype(np.float16)}
    late, early = (
        npusim.run("flash", tensors=given, precision=f"fa16_32{p}", **HOW) for p in ("", ",scale_in=queries")
    )
    assert not np.isfinite(late.output.astype(np.float64)).any()
    assert early.numerics.rmse < 1e-3


def test_v_and_p_have_formats_apart_from_q_and_k() -> None:
    narrow, mixed, wide = (
        run("flash", hw="rtx_5090", precision=f"nvfp4{p}").numerics.rmse
        for p in (
            "",
            ",values=float8_e4m3fn,operand=float8_e4m3fn,p_scale=256",
            ",values=input,operand=input,p_scale=1",
        )
    )
    assert wide < mixed < narrow
    with pytest.raises(NpusimError, match="by float8_e4m3fn"):
        run("flash", hw="h200", precision="values=float8_e4m3fn")
    with pytest.raises(NpusimError, match="h200: its matrix unit is not known to multiply nvfp4"):
        run("flash", hw="h200", precision="values=nvfp4,operand=nvfp4")


def test_tensors_are_quantised_to_e5m2_with_a_scale_each() -> None:
    result = npusim.run("fp8_attention", hw="h200", tensors=tensors("float32"), dtype="float8_e4m3fn", **HOW)
    assert result.problem.is_scaled
    with pytest.raises(NpusimError, match="reads E4M3 inputs, not float8_e5m2"):
        npusim.run("fp8_attention", hw="h200", tensors=tensors("float32"), dtype="float8_e5m2", **HOW)
    assert run("flash", "float8_e5m2", hw="h200").numerics.arithmetic == {"hopper.wgmma.k32.e5m2.f32": "measured"}
