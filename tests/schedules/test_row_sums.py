"""The order of row sums: one for the Ascend vector unit, stated by its device file, and its spread."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError
from npusim.library import SCHEDULES
from npusim.program.ir.op import Opcode
from npusim.program.ir.walk import Walker, walk
from npusim.report.result_json import record_of
from npusim.report.tables import run_table
from npusim.report.text import plain
from npusim.run import run

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.simulation.run_result import RunData

ATTENTION = ("standard", "flash", "two_level", "unified", "pasa", "fp8_attention")
DEVICE = load_device("ascend_910b2")
PRESETS = [(s, p) for s in ATTENTION for p in SCHEDULES[s, "ascend"].presets(DEVICE) if p != "float64"]


@cache
def device_of(hw: str) -> DeviceSpec:
    return load_device(hw)


def orders(schedule: str, preset: str, hw: str = "ascend_910b2") -> set[str]:
    """Return the orders of all row sums of a small program."""
    device = device_of(hw)
    chosen = SCHEDULES[schedule, device.family]
    problem = Problem(heads=1, seq_q=64, seq_kv=256, head_dim=64)
    program = chosen.program(problem, build_tiling(chosen.tiling, {}), device, chosen.precision(preset))
    return {
        step.attributes.order
        for phase in program.phases
        for resolved in walk(Walker(program), phase.body(phase.blocks[0]))
        for step in resolved.op.steps
        if step.opcode is Opcode.ROW_SUM
    }


@pytest.mark.parametrize(("schedule", "preset"), PRESETS)
def test_every_preset_on_ascend_sums_rows_as_the_vector_unit_does(schedule: str, preset: str) -> None:
    stated = device_of("ascend_910b2").row_sum
    assert stated is not None
    assert orders(schedule, preset) == {stated.value}


@pytest.mark.parametrize("preset", ["fp16_mean", "fp32_mean", "fixed_reference"])
def test_silicons_kernels_keep_their_tree(preset: str) -> None:
    assert orders("pasa", preset, "h200") == {"tree_halves"}


def pasa(**fields: Any) -> RunData:
    problem = Problem(heads=1, seq_q=64, seq_kv=256, head_dim=64)
    return run("pasa", problem=problem, **fields)


def test_an_assumed_order_is_printed_with_how_far_the_bits_hang_on_it() -> None:
    found = pasa()
    by_name = {s.arithmetic: s for s in found.spread}
    other = pasa(precision="sum_order=tree_halves")
    # The one block of the one head is what the spread looks at.
    differing = float((found.output != other.output).mean())
    assert by_name["row sums in tree_halves"].differing == differing > 0.1
    text = plain(run_table(record_of(found), is_full=True))
    assert "row sums in vector_lanes (assumed)" in text
    assert f"with row sums in tree_halves {differing:.1%}".replace("%", " %") in text
    (note,) = (n for n in found.notes if n.startswith("order of row sums vector_lanes is assumed"))
    assert "BlockReduceSum" in note


def test_a_chosen_order_has_no_alternatives() -> None:
    found = pasa(precision="sum_order=tree_halves")
    assert not any("row sums" in s.arithmetic for s in found.spread)
    assert "row sums in tree_halves (chosen)" in plain(run_table(record_of(found)))


def test_the_devices_file_decides() -> None:
    key = "cores.aiv.engines.VECTOR.row_sum"
    found = pasa(overrides={key: "tree_halves"})
    other = pasa(precision="sum_order=tree_halves")
    np.testing.assert_array_equal(found.output.view(np.uint16), other.output.view(np.uint16))


def test_how_casts_round_is_a_choice_whose_alternative_is_printed() -> None:
    def flash(**fields: Any) -> RunData:
        return run("flash", hw="ascend_950", problem=Problem(heads=1, seq_q=128, seq_kv=256, head_dim=32), **fields)

    plain_bits, away = flash(), flash(precision="rounding=nearest_away")
    (spread,) = (s for s in plain_bits.spread if s.arithmetic == "casts rounded nearest_away")
    computed = ~np.isnan(away.output)
    assert spread.differing == float((plain_bits.output != away.output)[computed].mean()) > 0
    (note,) = (n for n in plain_bits.notes if n.startswith("casts rounded nearest_even: assumed"))
    assert "CAST_ROUND" in note
    assert not any("casts rounded" in s.arithmetic for s in away.spread)
    assert not any("casts rounded" in n for n in away.notes)
    key = "cores.aiv.engines.VECTOR.cast_rounding"
    assert np.array_equal(flash(overrides={key: "nearest_away"}).output, away.output, equal_nan=True)
    with pytest.raises(SpecError, match="rounding: 'up' is not one of nearest_even, nearest_away"):
        flash(precision="rounding=up")


def test_products_that_are_added_to_something_round_once_or_twice() -> None:
    def flash(hw: str, choice: str, **fields: Any) -> RunData:
        problem = Problem(heads=1, seq_q=128, seq_kv=512, head_dim=32)
        return run("flash", hw=hw, problem=problem, precision=f"fa2_fp32,output=float32{choice}", **fields)

    once, twice = (flash("ascend_950", f",multiply_add={n}") for n in ("once", "twice"))
    left_open = flash("ascend_950", "")
    assert np.array_equal(left_open.output, twice.output, equal_nan=True)
    (spread,) = (s for s in left_open.spread if s.arithmetic == "multiply-adds rounded once")
    assert spread.differing == float((once.output != twice.output)[~np.isnan(once.output)].mean()) > 0.1
    assert left_open.timing.cycles == twice.timing.cycles == once.timing.cycles  # one instruction either way
    key = "cores.aiv.engines.VECTOR.multiply_add"
    assert np.array_equal(flash("ascend_950", "", overrides={key: "once"}).output, once.output, equal_nan=True)
    fewer, more = (flash("v100", f",multiply_add={n}").timing for n in ("once", "twice"))
    assert fewer.cycles < more.cycles  # a product and a sum are two instructions there
