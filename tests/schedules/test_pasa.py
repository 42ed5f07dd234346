"""PASA's options: where the scale goes, inputs in bfloat16, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npusim import formats
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, TilingError
from npusim.library import find_schedule
from npusim.library.pasa import ShiftingMatrix, optimal_beta
from npusim.program.ir.check import check
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.walk import Walker, walk
from npusim.run import run
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")

SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 100, "seq_kv": 197, "head_dim": 64}
TILINGS = {"ascend_910b2": {"block_q": 64, "block_kv": 64}, "h200": {"block_q": 64, "block_kv": 64}}


def pasa(hw: str, fields: dict[str, Any] | None = None, **changes: Any) -> RunData:
    tensors = changes.pop("tensors", None)
    problem = None if tensors is not None else Problem(**{**SIZES, **changes})
    return run(
        "pasa",
        hw=hw,
        problem=problem,
        tensors=tensors,
        tiling=declared_tiling("pasa", hw, **TILINGS[hw], **(fields or {})),
        rows="all",
        trace_groups=(),
    )


@pytest.mark.parametrize("hw", list(TILINGS))
def test_queries_scaled_first_are_what_the_products_read(hw: str) -> None:
    """A head size of 64: 1/8 is a power of two, so that scaling Q, M or S' differs in no bit."""
    found = {where: pasa(hw, {"scale_in": where}) for where in ("queries", "matrix", "scores")}
    names = [p.name for p in found["queries"].program.phases]
    assert names == ["prepare_q", "shift_keys", "attention"]
    assert [p.name for p in found["matrix"].program.phases] == names[1:]
    outputs = {where: result.output.view(np.uint16) for where, result in found.items()}
    # Scaled before or after the product: the same significands everywhere, as nothing is subnormal.
    np.testing.assert_array_equal(outputs["queries"], outputs["scores"])
    assert found["matrix"].numerics is not None
    assert found["matrix"].numerics.error.rmse < 1e-2


@pytest.mark.parametrize("hw", list(TILINGS))
def test_inputs_in_bfloat16_are_cast_to_float16_first(hw: str) -> None:
    rng = np.random.default_rng(0)
    wide = {
        n: rng.normal(1.0, 1.0, (1, 2 if n == "q" else 1, 100, 64)).astype(ml_dtypes.bfloat16) for n in ("q", "k", "v")
    }
    half = {n: formats.cast(x.astype(np.float32), "float16") for n, x in wide.items()}
    cast, plain = (pasa(hw, tensors=t) for t in (wide, half))
    names = ["prepare_q", "prepare_k", "prepare_v", "shift_keys", "attention"]
    assert [p.name for p in cast.program.phases] == names
    np.testing.assert_array_equal(cast.output.view(np.uint16), plain.output.view(np.uint16))
    assert any("cast to float16" in note for note in cast.notes)
    if cast.timing is not None:
        assert plain.timing is not None
        assert cast.cycles > plain.cycles


def test_a_bfloat16_value_beyond_float16_is_an_overflow_of_the_cast() -> None:
    tensors = {n: np.ones((1, 1, 64, 64), ml_dtypes.bfloat16) for n in ("q", "k", "v")}
    tensors["v"][0, 0, 3, 5] = 1e5
    result = pasa("ascend_910b2", tensors=tensors)
    assert result.numerics is not None
    assert result.numerics.overflow_counts == {"prepare_v.cast": 1}
    (event,) = (e for e in result.numerics.first_events if e.kind == "overflow")
    assert (event.phase, event.row, event.col) == ("prepare_v", 3, 5)


@pytest.mark.parametrize("hw", list(TILINGS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_preparing_phases_are_legal_and_touch_what_they_say(hw: str, dtype: str) -> None:
    program = pasa(hw, {"scale_in": "queries"}, dtype=dtype).program
    check(program, load_device(hw).flags)
    for phase in program.phases[:-2]:
        block = phase.blocks[-1]
        steps = [s for r in walk(Walker(program), phase.body(block)) for s in r.op.steps]
        read = sum(o.payload_bytes for s in steps for o in s.srcs if isinstance(o, GlobalTile))
        written = sum(s.dst.payload_bytes for s in steps if isinstance(s.dst, GlobalTile))
        touches = list(phase.footprint([block]))
        assert read == sum(t.region.payload_bytes * t.times for t in touches)
        assert written == sum(t.region.payload_bytes for t in touches if t.is_write)


def test_beta_1_is_refused_with_the_reason() -> None:
    with pytest.raises(TilingError, match=r"beta: 1\.0 must be below 1"):
        pasa("ascend_910b2", {"beta": 1.0})


@pytest.mark.parametrize("correction", ["rounded", "ideal"])
@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.9999},  # a power of two for alpha: the entries of M round to those of beta = 1
        {"beta": 0.9999, "scale_in": "scores"},
        {"beta": 0.9999, "optimise": True},  # the optimum next to it is 1
    ],
)
def test_a_beta_that_rounds_to_1_in_the_matrix_is_refused(fields: dict[str, Any], correction: str) -> None:
    with pytest.raises(
        TilingError, match=r"beta: 0\.9999 is 1 or more once the entries of M\d+ are rounded to float16"
    ):
        pasa("ascend_910b2", {**fields, "correction": correction})


@given(st.floats(0.0, 0.99999), st.sampled_from([16, 64, 128, 256]), st.sampled_from([64, 128]))
def test_a_matrix_keeps_what_its_correction_says(beta: float, keys: int, size: int) -> None:
    """Every row of M sums to ``mean_kept``, and 1 + Inva is what the block's mean was divided by."""
    matrix = ShiftingMatrix(keys, beta, size**0.5)
    rows = matrix.values()[0, 0].astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(rows, matrix.mean_kept, rtol=0, atol=1e-12)
    if matrix.mean_kept > 0:
        whole = matrix.diagonal - matrix.off_diagonal
        found = 1 + matrix.correction(is_ideal=False)
        assert found == pytest.approx(whole / matrix.mean_kept, rel=1e-9)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_the_papers_setting_is_a_preset_that_nothing_beside_it_contradicts(hw: str) -> None:
    named = {"correction": "ideal", "optimise": True}
    fields = find_schedule("pasa", load_device(hw).family).tiling
    built = build_tiling(fields, {"preset": "paper"})
    assert built == build_tiling(fields, {"preset": "paper", **named})
    assert build_tiling(fields, named) == built.model_copy(update={"preset": None})
    assert build_tiling(fields, {}) == fields()
    with pytest.raises(TilingError, match="preset=paper means correction=ideal, but correction=rounded is set too"):
        build_tiling(fields, {"preset": "paper", "correction": "rounded"})


def test_an_optimised_beta_is_told() -> None:
    notes = pasa("ascend_910b2", {"optimise": True}).notes
    moved = f"beta: optimise moved it from 0.984497 to {optimal_beta(0.984497, 64)}, "
    assert any(n.startswith(moved) for n in notes)
    assert not any(n.startswith("beta") for n in pasa("ascend_910b2").notes)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_inputs_of_other_formats_are_refused(dtype: str) -> None:
    with pytest.raises(TilingError, match=f"pasa reads float16, or bfloat16 .* not {dtype}"):
        pasa("h200", dtype=dtype)


@pytest.mark.parametrize("hw", list(TILINGS))
def test_chained_products_are_refused_with_the_reason(hw: str) -> None:
    with pytest.raises(TilingError, match="PASA multiplies P V of each tile by a separate factor"):
        run("pasa", hw=hw, problem=Problem(**SIZES), precision="accumulate=chained")


def test_a_shifting_matrix_that_the_matrix_unit_cannot_read_is_refused() -> None:
    with pytest.raises(NpusimError, match=r"shifted: M and K' in float32, .* use shifted=float16"):
        run("pasa", problem=Problem(**SIZES), precision="shifted=float32", trace_groups=())


def test_the_optimum_is_that_of_the_inputs_format() -> None:
    """Equation 21: bfloat16 inputs round M's entries to bfloat16, another optimum than float16's."""
    assert optimal_beta(0.99, 64) != optimal_beta(0.99, 64, "bfloat16")
    problem = Problem(**{**SIZES, "dtype": "bfloat16"})
    tiling = {**TILINGS["ascend_910b2"], "optimise": True, "beta": 0.99}
    found = run("pasa", problem=problem, tiling=tiling, numerics=False)
    (note,) = (n for n in found.notes if n.startswith("beta"))
    assert note == (
        f"beta: optimise moved it from 0.99 to {optimal_beta(0.99, 64, 'bfloat16')}, the optimum where "
        "M is rounded to bfloat16, the inputs' format (equation 21)"
    )
    with pytest.raises(TilingError, match=r"beta: 0\.999 is 1 or more once .* rounded to bfloat16"):
        pasa("ascend_910b2", {"optimise": True, "beta": 0.999}, dtype="bfloat16")


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize("beta", [0.9, 0.9375, 0.96875, 0.984375, 0.99])
def test_an_optimum_needs_the_correction_that_its_own_entries_make(beta: float, fmt: str) -> None:
    """Equations 20 to 22, unsimplified: f(beta) of the rounded entries is beta / (1 - beta) there."""
    found = optimal_beta(beta, 128, fmt)
    b = float(formats.cast(np.float64(found / 128), fmt))
    a = float(formats.cast(np.float64(1 - found / 128), fmt)) + b
    practical = 128 * b / (a * (a - 128 * b)) + (1 - a) / a
    assert practical == pytest.approx(found / (1 - found), rel=1e-9)


@pytest.mark.parametrize("fields", [{"block_q": 64, "block_kv": 64}, {"block_q": 32, "block_kv": 32}])
def test_on_a_v100_it_is_timed_and_lanes_do_not_change_a_bit(fields: dict[str, int]) -> None:
    """The H200's file has no lanes: with the V100's arithmetic its whole tiles give the same bits."""
    sizes = {"problem": Problem(heads=1, seq_q=72, seq_kv=104, head_dim=64, causal=True), "tiling": fields}
    ours = run("pasa", hw="v100", rows="all", method="des", **sizes)
    whole = run("pasa", hw="h200", rows="all", arithmetic="volta.mma.k4.f16.f16", **sizes)
    assert np.array_equal(ours.output.view(np.uint16), whole.output.view(np.uint16))
    assert ours.numerics is not None
    assert ours.numerics.error.rmse is not None
    assert ours.cycles == run("pasa", hw="v100", numerics=False, **sizes).cycles


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        ({"block_kv": 16}, "block_kv: 16 rows cannot be distributed to 4 warps; use a multiple of 32"),
        ({"block_kv": 256}, "registers: Q .* thread; allowed: 255;"),
        (
            {"scale_in": "queries"},
            "scale_in=queries: v100 has no separate kernel that scales or casts; use scale_in=matrix",
        ),
    ],
)
def test_what_does_not_fit_a_v100_is_refused(tiling: dict[str, object], message: str) -> None:
    with pytest.raises(TilingError, match=message):
        run("pasa", hw="v100", seq=256, tiling=tiling, numerics=False)
