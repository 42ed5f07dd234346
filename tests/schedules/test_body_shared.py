"""Operations of stages that depend on no place are one sequence for all blocks and tiles of a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.machines.frame import Frame
from npusim.program.ir.tile_program import Loop
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import Item, TileProgram

#: Masks by position and windows, numbers of a tile (pasa), groups that alternate, splits with packed heads, rows alone.
CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("flash", "h200", {"seq": 320}),
    ("flash", "h200", {"seq": 320, "window": 100}),
    ("flash", "v100", {"seq": 200}),
    ("pasa", "a100", {"seq": 300, "causal": False}),
    ("split_kv", "h100", {"seq_q": 1, "seq_kv": 700}),
    ("gated_delta", "h100", {"problem": {"batch": 1, "heads": 1, "tokens": 200, "key": 64, "value": 64}}),
)


def _program(schedule: str, hw: str, options: dict[str, Any]) -> TileProgram:
    tiling = declared_tiling(schedule, hw)
    return npusim.run(schedule, hw=hw, tiling=tiling, numerics=False, **options).program


def _operations(items: Iterable[Item]) -> Iterator[TileOp]:
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                yield from _operations(item.body(index))
        else:
            yield item


def _of(program: TileProgram) -> Iterator[TileOp]:
    for phase in program.phases:
        for block in phase.blocks:
            yield from _operations(phase.body(block))


@pytest.mark.parametrize(("schedule", "hw", "options"), CALLS)
def test_shared_operations_are_those_that_each_tile_would_have(
    schedule: str, hw: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = list(_of(_program(schedule, hw, options)))
    monkeypatch.setattr(Frame, "is_placed", lambda *_: True)
    assert shared == list(_of(_program(schedule, hw, options)))


def test_a_tile_without_a_mask_has_the_operations_of_another() -> None:
    program = _program("flash", "h200", {"seq": 1024, "causal": False, "q_heads": 1, "kv_heads": 1})
    products = [op for op in _of(program) if op.label == "S.mma"]
    resident = max(phase.place_count for phase in program.phases)
    assert len({id(op) for op in products}) <= resident * len(program.queues) < len(products)
