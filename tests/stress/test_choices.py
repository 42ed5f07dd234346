"""Choices of precision that libraries make, as fields: growth, formats apart, the factor's place, E5M2 inputs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import npusim
from npusim import formats
from npusim.config.head_scores import alibi_slopes
from npusim.config.problem import Problem
from npusim.errors import NpusimError

pytestmark = pytest.mark.usefixtures("declared_tiles")

RNG = np.random.default_rng(0)
TENSORS = {n: RNG.standard_normal((1, 1, 64, 64)) for n in "qkv"}
UNIT = "hopper.wgmma.k16.f16.f32"
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
    with pytest.raises(NpusimError, match="h200: its matrix unit does not multiply nvfp4"):
        run("flash", hw="h200", precision="values=nvfp4,operand=nvfp4")


def test_tensors_are_quantised_to_e5m2_with_a_scale_each() -> None:
    result = npusim.run("fp8_attention", hw="h200", tensors=tensors("float32"), dtype="float8_e4m3fn", **HOW)
    assert result.problem.is_scaled
    wide = npusim.run("fp8_attention", hw="h200", tensors=tensors("float32"), dtype="float8_e5m2", **HOW)
    assert wide.problem.is_scaled
    assert result.numerics.rmse < wide.numerics.rmse < 2 * result.numerics.rmse
    assert run("flash", "float8_e5m2", hw="h200").numerics.arithmetic == {"hopper.wgmma.k32.e5m2.f32": "measured"}


@pytest.mark.parametrize(
    ("hw", "unit"), [("h200", "hopper.wgmma"), ("l40s", "ada.mma"), ("rtx_5090", "rtx_blackwell.mma")]
)
def test_p_in_e4m3_is_multiplied_with_v_in_e5m2_by_the_units_row_for_both(hw: str, unit: str) -> None:
    found = run("fp8_attention", "float8_e5m2", hw=hw).numerics
    assert found.arithmetic.keys() == {f"{unit}.k32.e5m2.f32", f"{unit}.k32.e4m3e5m2.f32"}
    assert found.rmse < 0.05
    same = run("flash", hw=hw, precision="operands=float8_e4m3fn,values=float8_e5m2,operand=float8_e4m3fn").numerics
    assert same.arithmetic.keys() == {f"{unit}.k32.e4m3.f32", f"{unit}.k32.e4m3e5m2.f32"}


def test_a_pair_of_formats_that_a_unit_has_no_row_for_is_refused() -> None:
    with pytest.raises(NpusimError, match=r"P V: float8_e4m3fn by float8_e5m2, but ascend\.cube\.k32\.e4m3\.f32"):
        run("fp8_attention", "float8_e5m2", hw="ascend_950")
    with pytest.raises(NpusimError, match="needs inputs of 8 bits, not bfloat16; use float8_e4m3fn or float8"):
        run("fp8_attention", "bfloat16", hw="h200")


@pytest.mark.parametrize("precision", ["sage_fp8", "sage_fp8,smooth="])
def test_what_is_beyond_e4m3_becomes_its_largest_number(precision: str) -> None:
    """SageAttention converts by cvt.rn.satfinite (numeric_conversion.cuh); no instruction of a GPU gives NaN there."""
    large = tensors("float16")
    large["q"][..., 0], large["k"][..., ::2, 0], large["k"][..., 1::2, 0] = 1000, 600, -600
    cut = {n: np.clip(x, -448, 448) for n, x in large.items()}
    found, same = (
        npusim.run("flash", hw="h200", tensors=given, precision=precision, **HOW).output for given in (large, cut)
    )
    assert np.isfinite(found.astype(np.float64)).all()
    np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize(
    "change", [{"softcap": 20.0}, {"alibi": True}, {"bias": "head"}, {"softcap": 5.0, "alibi": True}]
)
def test_fa4_scales_scores_before_they_are_changed_bit_for_bit(change: dict[str, Any]) -> None:
    """flash_attn/cute: scores times the scale, then score_mod, then log2 e alone in the multiply-add."""
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=64, seq_kv=64, head_dim=64, causal=False, **change)
    given = {n: np.repeat(x, 2, axis=1) if n == "q" else x for n, x in tensors("float16").items()}
    bias = np.stack([[problem.bias_row(h, q, 64) for q in range(64)] for h in range(2)]) if problem.bias else None
    more = {} if bias is None else {"bias": bias.astype(np.float16)}
    result = npusim.run(
        "fa4", hw="h200", tensors={**given, **more}, problem=problem, tiling={"block_q": 64, "block_kv": 64}, rows="all"
    )
    add, mul = (partial(getattr(formats, n), fmt="float32") for n in ("add", "mul"))
    c, log2_e = (np.float32(x) for x in (problem.scale, math.log2(math.e)))
    distance = (np.arange(64)[None] - np.arange(64)[:, None]).astype(np.float64)
    for head in range(2):
        s = mul(formats.matmul(given["q"][0, head], given["k"][0, 0].T, arithmetic=UNIT), c)
        if problem.softcap:
            s = mul(formats.tanh(formats.div(s, problem.softcap, "float32"), "float32"), problem.softcap)
        if problem.alibi:
            s = add(s, formats.cast(alibi_slopes(2)[head] * distance, "float32"))
        if bias is not None:
            s = add(s, bias[head].astype(np.float16).astype(np.float32))
        m = s.max(axis=1, keepdims=True)
        e = formats.exp2(formats.fma(s, log2_e, mul(m, -log2_e), "float32"), "float32", variant="fa4_degree3")
        l = formats.reduce_sum(e, "float32", "sequential")[:, None]
        o = formats.matmul(
            formats.cast(e, "float16"), given["v"][0, 0], np.zeros((64, 64), np.float32), arithmetic=UNIT
        )
        np.testing.assert_array_equal(result.output[0, head], formats.cast(formats.div(o, l, "float32"), "float16"))
