"""Equal programs: a search merges those that take the same time and pass the same checks, on any core family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from npusim.program.ir.check import check
from npusim.program.ir.sameness import ProgramContent
from npusim.program.timing import METHODS
from npusim.simulation.request import Request
from npusim.simulation.variants import Variants

if TYPE_CHECKING:
    from npusim.simulation.simulate import BuiltPlan


def built(hw: str, seq: int = 512, schedule: str = "flash", **tiling: object) -> BuiltPlan:
    request = Request(schedule, hw=hw, heads=2, seq=seq, numerics=False, tiling=tiling)
    return Variants(request).built(())


def contents(hw: str, one: dict[str, object], other: dict[str, object]) -> tuple[ProgramContent, ProgramContent]:
    first, second = (ProgramContent(built(hw, **how).program) for how in (one, other))
    return first, second


SAME = [
    # Slices are no larger than the share of a vector core: half of the block's rows.
    ("ascend_910b2", {"block_q": 64, "block_kv": 128, "vector_rows": 32}, {"vector_rows": 64}),
    ("ascend_910b2", {"block_q": 64, "block_kv": 128, "pipeline": "core", "vector_rows": 32}, {"vector_rows": 64}),
    ("h200", {"block_q": 128, "block_kv": 128}, {}),
    ("v100", {"block_q": 128, "block_kv": 32}, {}),
]
OTHER = [
    ("ascend_910b2", {"block_q": 64, "block_kv": 128, "depth": 1}, {"depth": 2}),
    ("ascend_910b2", {"block_q": 64, "block_kv": 128}, {"seq": 1024}),
    ("ascend_910b2", {"block_q": 64, "block_kv": 128, "together": 8}, {"together": 16}),
    ("ascend_910b2", {"block_q": 64, "block_kv": 128, "deal": "balanced", "seq": 4096}, {"deal": "round_robin"}),
    ("h200", {"block_q": 128, "block_kv": 128}, {"block_kv": 64}),
    ("v100", {"block_q": 128, "block_kv": 32}, {"seq": 1024}),
]


@pytest.mark.parametrize(("hw", "one", "change"), SAME)
def test_equal_programs_take_the_same_time(hw: str, one: dict[str, object], change: dict[str, object]) -> None:
    first, second = contents(hw, one, one | change)
    assert first == second
    assert len({first, second}) == 1
    device = built(hw, **one).plan.device
    cycles = []
    for content in (first, second):
        check(content.program, device.flags)
        cycles.append(METHODS["auto"](content.program, device).cycles)
    assert cycles[0] == cycles[1]


@pytest.mark.parametrize(("hw", "one", "change"), OTHER)
def test_other_programs_are_not_equal(hw: str, one: dict[str, object], change: dict[str, object]) -> None:
    first, second = contents(hw, one, one | change)
    assert first != second


def test_masks_that_are_not_in_memory_do_not_make_footprints_unlike() -> None:
    sizes: Any = {"heads": 2, "tokens": 256, "key": 64, "value": 64, "causal": 1}
    fields = {"method": "added", "tile_q": 64, "tile_kv": 64, "warps": 4, "stages": 2}
    phases: list[Any] = []
    for block_q in (64, 128):  # no block of `added` reads this field
        tiling = {**fields, "block_q": block_q, "block_kv": 64}
        request = Request("flash_backward", hw="h100", problem=sizes, numerics=False, tiling=tiling)
        phases.append(Variants(request).built(()).program.phases)
    masked = [one for one in phases[0] if one.footprint.frame.phase.masks]
    assert masked
    assert [one.footprint for one in phases[0]] == [one.footprint for one in phases[1]]


def test_operations_tell_apart_what_the_outline_does_not() -> None:
    first, second = contents("ascend_910b2", *({"block_q": 64, "block_kv": 128, "together": n} for n in (8, 16)))
    assert first.outline == second.outline
    assert first.operations != second.operations
