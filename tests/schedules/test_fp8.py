"""FP8 attention: scales of inputs and of P, where they cancel, and what is refused or warned of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.problem import Problem
from npusim.errors import SpecError, TilingError
from npusim.run import run
from npusim.simulation.tensor_files import quantise
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")

E4M3 = "float8_e4m3fn"
SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 100, "seq_kv": 200, "head_dim": 64}


def tensors(gain: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs whose V is in float16's range but, amplified, beyond E4M3's 448."""
    rng = np.random.default_rng(3)
    found = {}
    for name in ("q", "k", "v"):
        heads, rows = (2, 100) if name == "q" else (1, 200)
        values = rng.standard_normal((1, heads, rows, 64))
        found[name] = (values * (gain if name == "v" else 1.0)).astype(np.float16)
    return found


def fp8(**fields: Any) -> RunData:
    tiling = declared_tiling("fp8_attention", "h200")
    return run("fp8_attention", hw="h200", rows="all", causal=False, trace_groups=(), **{"tiling": tiling, **fields})


def test_amax_scales_map_the_largest_value_to_448() -> None:
    given = tensors(gain=600.0)
    found, scales = quantise(given)
    for name, values in given.items():
        largest = float(np.abs(values.astype(np.float64)).max())
        assert scales[f"{name}_scale"] == np.float32(largest / 448)
        assert float(np.abs(found[name].astype(np.float64)).max()) == 448
        error = found[name].astype(np.float64) * scales[f"{name}_scale"] - values.astype(np.float64)
        # Half a step of the top binade is 1/28 of 448.
        assert np.abs(error).max() <= largest / 28 * 1.0001
    again, ones = quantise(found)
    assert all(again[n] is found[n] for n in found)
    assert set(ones.values()) == {1.0}
    assert quantise({"q": np.zeros((1, 1, 1, 16), np.float16)})[1] == {"q_scale": 1.0}


@pytest.mark.parametrize("precision", ["hpc_ops_s1", "hpc_ops", "fa3", "flashinfer"])
def test_inputs_with_scales_give_attention_of_the_values_they_stand_for(precision: str) -> None:
    """Amplified V: without its scale every value above 448 would be lost."""
    given = tensors(gain=600.0)
    result = fp8(tensors=given, dtype=E4M3, precision=precision)
    problem = result.problem
    assert isinstance(problem, Problem)
    assert problem.v_scale > 1
    assert result.numerics is not None
    # Against float64 on the quantised inputs only P's cast is lost; each P within 2^-4.
    assert result.numerics.error.rmse < 2**-4
    exact = fp8(tensors={n: x.astype(np.float32) for n, x in given.items()}, precision=precision)
    distance = np.linalg.norm(result.output - exact.output) / np.linalg.norm(exact.output)
    # Q, K and V rounded to 2^-4 each.
    assert 0.01 < distance < 3 * 2**-4


def test_scales_by_powers_of_two_change_nothing_but_the_size() -> None:
    plain = Problem(**SIZES, dtype=E4M3)
    scaled = Problem(**SIZES, dtype=E4M3, q_scale=4.0, k_scale=0.25, v_scale=8.0)
    rng = np.random.default_rng(5)
    import ml_dtypes

    data = {
        n: rng.standard_normal((1, h, r, 64)).astype(ml_dtypes.float8_e4m3fn)
        for n, h, r in (("q", 2, 100), ("k", 1, 200), ("v", 1, 200))
    }
    from npusim.program.numerics.evaluate import evaluate
    from npusim.program.numerics.input_tensors import array_source
    from reports.parts.values import GPU, program_of

    one, other = (
        evaluate(program_of("fp8_attention", p, "hpc_ops", hw=GPU), p, array_source(data), rows="all")
        for p in (plain, scaled)
    )
    np.testing.assert_array_equal(other.output, one.output * np.float32(8))
    assert other.error.rmse == pytest.approx(one.error.rmse)


def test_scales_are_refused_where_nothing_undoes_them() -> None:
    with pytest.raises(SpecError, match="only float8_e4m3fn and float8_e5m2 have scales, not float16"):
        Problem(**SIZES, q_scale=2.0)
    with pytest.raises(SpecError, match="schedule flash does not apply the scales of float8 inputs"):
        run("flash", hw="h200", problem=Problem(**SIZES, dtype=E4M3, k_scale=2.0))
    with pytest.raises(SpecError, match="v_scale"):
        Problem(**SIZES, dtype=E4M3, v_scale=0.0)


def test_a_scale_of_p_beyond_448_is_warned_of_by_name() -> None:
    for hw in ("ascend_910b2", "h200"):
        dtype = "float32" if hw == "h200" else "float16"
        result = run(
            "fp8_attention",
            hw=hw,
            problem=Problem(**SIZES, dtype=dtype),
            precision="scale=512",
            trace_groups=(),
            diagnose=True,
        )
        assert any(n.startswith("saturation: P reaches 512") for n in result.notes)
        assert result.numerics is not None
        assert result.numerics.diagnosis is not None
        assert result.numerics.diagnosis.saturated_count
    plain = run("fp8_attention", problem=Problem(**SIZES), precision="scale=448", trace_groups=())
    assert not any(n.startswith("saturation") for n in plain.notes)


@pytest.mark.parametrize("scale", ["0", "-1", "inf", "nan", "1e300", "1e-300"])
def test_a_scale_of_p_that_is_none_is_refused(scale: str) -> None:
    with pytest.raises(TilingError, match=r"scale: .* must be positive and finite"):
        run("fp8_attention", problem=Problem(**SIZES), precision=f"scale={scale}")


def test_an_operand_that_the_matrix_unit_does_not_read_is_refused() -> None:
    plain, named = (
        run("fp8_attention", problem=Problem(**SIZES), precision=p, trace_groups=()).output
        for p in ("hpc_ops", "operand=float16")
    )
    np.testing.assert_array_equal(plain, named)
    with pytest.raises(TilingError, match=r"operand: P in float32, .* use operand=float16"):
        run("fp8_attention", problem=Problem(**SIZES), precision="operand=float32")


def test_the_910b2_says_that_it_is_a_study_and_takes_no_fp8_inputs() -> None:
    result = run("fp8_attention", problem=Problem(**SIZES), trace_groups=())
    assert any("no FP8 matrix unit" in n and "study of numerics" in n for n in result.notes)
    with pytest.raises(TilingError, match="no FP8 matrix unit; float16 holds all values"):
        run("fp8_attention", problem=Problem(**SIZES, dtype=E4M3))


def test_a_gpu_takes_fp8_or_isolating_float32_inputs_only() -> None:
    with pytest.raises(TilingError, match="needs inputs of 8 bits, not float16"):
        run("fp8_attention", hw="h200", problem=Problem(**SIZES))


@pytest.mark.parametrize(("hw", "dtype"), [("h200", E4M3), ("ascend_950", E4M3), ("ascend_910b2", "float16")])
def test_inputs_are_fp8_where_products_are_and_a_call_says_nothing(hw: str, dtype: str) -> None:
    found = run("fp8_attention", hw=hw, seq=256, numerics=False, trace_groups=())
    assert found.problem.dtype == dtype


@pytest.mark.parametrize("precision", ["fa3", "flashinfer", "fa3,accumulate=fresh"])
@pytest.mark.parametrize("size", [1.0, 2e19])
def test_a_mask_does_not_win_where_keys_come_last_first(precision: str, size: float) -> None:
    """The first tiles that a row meets are masked wholly; its own score may be as low as -2e38."""
    q, k = np.zeros((128, 16)), np.zeros((128, 16))
    q[:, 0], k[0, 0] = 1e19, -size
    v = np.broadcast_to(np.arange(128)[:, None], (128, 16))
    given = {n: x[None, None].astype(np.float32) for n, x in (("q", q), ("k", k), ("v", v))}
    problem = Problem(heads=1, seq_q=128, head_dim=16, dtype="float32", causal=True, scale=1.0)
    found = run(
        "fp8_attention",
        hw="h200",
        problem=problem,
        tensors=given,
        precision=precision,
        rows="all",
        trace_groups=(),
        tiling={"block_kv": 32},
    )
    np.testing.assert_array_equal(found.output[0, 0, 0], 0)
    np.testing.assert_allclose(found.output[0, 0, 1:, 0], (np.arange(1, 128) + 1) / 2, rtol=0.07)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float32"])
def test_a_v100_has_no_fp8_and_says_who_has(dtype: str) -> None:
    with pytest.raises(
        TilingError, match=r"v100 has neither an FP8 matrix unit nor .*; use h200, which has FP8, or flash"
    ):
        run("fp8_attention", hw="v100", seq=256, dtype=dtype, numerics=False)
