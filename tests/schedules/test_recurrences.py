"""The gated delta rule and Mamba-2's chunk scan: packaged schedules against the recurrence, token after token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ir.oracle import unrolled

import npusim
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TilingError
from npusim.schedules import find_schedule, gated_delta, ssd
from npusim.schedules.define import machine_of
from npusim.schedules.registry import for_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

#: A last chunk that is ragged, several heads, and a width of values that is another than that of keys.
PROBLEM = {"heads": 2, "tokens": 80, "key": 32, "value": 48}
TILING = {"chunk": 32, "block_value": 32}
DEVICES = ("ascend_910b2", "ascend_950", "h200", "a100", "v100")
Array = np.ndarray[Any, Any]


def _run(name: str, hw: str, problem: dict[str, int] | None = None, **more: Any) -> Any:
    chosen = {"problem": {**PROBLEM, **(problem or {})}, "tiling": TILING, "rows": "all", "heads": "all"}
    return npusim.run(name, hw=hw, **chosen, **more)


def _integers(draw: np.random.Generator, groups: int, density: float) -> dict[str, Array]:
    """Return Q, K and V of -1, 0 and 1, few enough that every value of the recurrence is exact in float16."""
    heads, tokens = PROBLEM["heads"], PROBLEM["tokens"]
    shapes = {n: (1, h, tokens, width) for n, h, width in (("q", groups, 32), ("k", groups, 32), ("v", heads, 48))}
    return {n: (draw.integers(-1, 2, x) * (draw.random(x) < density)).astype(np.float16) for n, x in shapes.items()}


def _always(values: Array) -> Callable[..., Array]:
    return lambda *_of: values


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("name", ["gated_delta", "ssd"])
def test_results_are_those_of_the_recurrence(name: str, hw: str) -> None:
    result = _run(name, hw)
    assert result.timing.cycles > 0
    assert 0 < result.numerics.error.rmse < 1e-3


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_of_the_delta_rule_are_exact(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beta is 0, 1 or -1, and the state before the first token is no zero: sums, inverse and products are exact."""
    draw = np.random.default_rng(2)
    beta = draw.integers(-1, 2, (1, 2, PROBLEM["tokens"])).astype(float)
    first = (draw.integers(-1, 2, (1, 2, 32, 48)) * (draw.random((1, 2, 32, 48)) < 0.1)).astype(float)
    monkeypatch.setattr(gated_delta, "log_decays", _always(np.zeros(beta.shape)))
    monkeypatch.setattr(gated_delta, "strengths", _always(beta))
    monkeypatch.setattr(gated_delta, "first_state", _always(first))
    tensors = _integers(draw, 2, 0.06)
    error = _run("gated_delta", hw, {"unit": 0}, tensors=tensors).numerics.error
    assert error.max_abs_error == 0
    assert np.abs(tensors["k"][0, 0].astype(int) @ tensors["k"][0, 0].T.astype(int)).sum() > 160  # tokens do meet


def _as_pto(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Return a run of PTO's kernels on integers: beta, whose logarithm they take, is 1."""
    ones = np.ones((1, 2, PROBLEM["tokens"]))
    monkeypatch.setattr(gated_delta, "log_decays", _always(0 * ones))
    monkeypatch.setattr(gated_delta, "strengths", _always(ones))
    tiling, tensors = {**TILING, "kernel": "pto_chunks"}, _integers(np.random.default_rng(2), 2, 0.06)
    chosen = {"problem": {**PROBLEM, "unit": 0}, "tiling": tiling, "rows": "all", "heads": "all", "tensors": tensors}
    return npusim.run("gated_delta", hw="ascend_910b2", **chosen, **more)


def test_integers_of_ptos_kernels_are_exact_and_products_left_in_16_bits_move_fewer_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide, half = (_as_pto(monkeypatch, precision=f"stored,product={fmt}") for fmt in ("float32", "float16"))
    for made in (wide, half):
        assert made.numerics.error.max_abs_error == 0
        assert any("kernel=pto_chunks" in note for note in made.notes)
    left = [sum(r.slot_bytes for r in made.program.rings if r.producers == ("aic.FIXP",)) for made in (wide, half)]
    assert left[0] == 2 * left[1] > 0


def test_ptos_kernels_give_a_slot_back_when_the_product_has_left_and_take_turns_by_chunks() -> None:
    device = load_device("ascend_910b2")
    declared = find_schedule("gated_delta", device.family)
    tiling = build_tiling(declared.tiling, {**TILING, "kernel": "pto_chunks"})
    program = declared.program(KernelProblem.of(PROBLEM), tiling, device, declared.precision())
    phases = {p.name: [op.label for _, op in unrolled(p.body(p.blocks[0]))] for p in program.phases}
    assert [x for x in phases["wy"] if x.endswith(".give")] == ["W.give", "U.give"]
    assert phases["outputs"][0] == "turn.take"
    assert [x for x in phases["outputs"] if x == "turn.give" or x.startswith("O.store")][1::2] == ["turn.give"] * 2
    assert {r.depth for r in program.rings if r.name.startswith("kkt ") and r.name.endswith("slots")} == {2}


def test_ptos_kernels_are_refused_where_vector_units_work_on_registers() -> None:
    with pytest.raises(TilingError, match="kernel=pto_chunks: it is of vector units that work from UB to UB"):
        npusim.run("gated_delta", hw="ascend_950", problem=PROBLEM, tiling={"kernel": "pto_chunks"}, numerics=False)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("hw", DEVICES)
def test_integers_of_the_chunk_scan_are_exact(hw: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1, A = 0 and D = -3, heads of one group or of their own, and a state before the first token."""
    draw = np.random.default_rng(3)
    first = draw.integers(-1, 2, (1, 2, 32, 48)).astype(float)
    monkeypatch.setattr(ssd, "steps", _always(np.ones((1, 2, PROBLEM["tokens"]))))
    monkeypatch.setattr(ssd, "rates", np.zeros)
    monkeypatch.setattr(ssd, "skips", lambda heads: np.full(heads, -3.0))
    monkeypatch.setattr(ssd, "first_state", _always(first))
    error = _run("ssd", hw, {"groups": groups}, tensors=_integers(draw, groups, 0.2)).numerics.error
    assert error.max_abs_error == 0


def test_a_chunk_changes_no_sum_but_its_order() -> None:
    errors = [
        npusim.run("gated_delta", hw="h200", problem=PROBLEM, tiling={"chunk": c, "block_value": 16}).numerics.error
        for c in (16, 64)
    ]
    assert all(0 < e.rmse < 1e-3 for e in errors)
    assert errors[0].rmse != errors[1].rmse


def test_one_warp_group_has_all_rows_of_a_tile_that_is_inverted() -> None:
    device = load_device("h200")
    machine, schedule = machine_of(device), find_schedule("gated_delta", "nvidia")
    problem, tiling = KernelProblem(**PROBLEM), build_tiling(schedule.tiling, {"chunk": "64"})
    listed = gated_delta.gated_delta(problem, tiling, for_inputs(schedule.precision(), "float16", None), machine)
    kkt = next(phase for phase in listed if phase.name == "kkt")
    fields, _ = machine.compiled("gated_delta", kkt, tiling.model_copy(update={"warps": 8}))
    with pytest.raises(TilingError, match=r"kkt: line \d+ inverts A, whose rows 2 warp groups share"):
        machine.build("gated_delta", [(kkt, fields)], 1)


def test_named_warps_of_a_kernel_change_its_time() -> None:
    """They are a compiler's: before, blocks had four whatever was named."""
    cycles = {
        w: npusim.run("gated_delta", hw="h100", problem=PROBLEM, tiling={"solve_warps": w}, numerics=False).cycles
        for w in (1, 4)
    }
    assert cycles[1] != cycles[4]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gated_delta", {"unit": 2}, r"gated_delta has no size unit=2; whole numbers from 1 on for .*unit \(0 or 1\)"),
        ("ssd", {"group": 1}, "ssd has no size group=1"),
        ("ssd", {"groups": 3}, "ssd: 2 heads are no whole number of 3 groups"),
    ],
)
def test_other_sizes_are_refused(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _run(name, "h200", sizes)


def test_drawn_rates_and_steps_are_those_that_are_said() -> None:
    assert ssd.rates(2).tolist() == [-1, -16]
    dt = ssd.steps(0, 1, 1, 4096)
    assert dt.min() > 0
    assert abs(dt.mean() - 0.0806) < 0.003  # a tenth of the mean of softplus(x), x normal
    beta = gated_delta.strengths(0, 1, 1, 4096)
    assert 0 < beta.min() < beta.max() < 1


def test_both_are_listed_for_both_families() -> None:
    for name in ("gated_delta", "ssd"):
        for family in ("ascend", "nvidia"):
            assert find_schedule(name, family).has_bits
