from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import RaceError
from npusim.library import find_schedule
from npusim.machines.ascend import ascend_machine
from npusim.machines.ascend.group import AscendGroup
from npusim.program.ir.check import check
from npusim.program.ir.structure import Builder, LoopPart, Operation, Piece, condensed

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

FLASH = find_schedule("flash", "ascend")
DEVICE = load_device("ascend_910b2")


def program(seq: int = 1024, **tiling: object) -> TileProgram:
    problem = Problem(heads=2, seq_q=seq, head_dim=128, causal=True)
    return FLASH.program(problem, FLASH.tiling(**tiling), DEVICE, FLASH.precision())


def operations(parts: tuple[object, ...]) -> int:
    return sum(len(p.operations) if isinstance(p, Piece) else operations(p.parts) for p in parts)


def unrolled(parts: object, widened: bool) -> list[tuple[object, ...]]:
    """Return what operations do, loops of slices gone through, without the bytes that were widened."""
    found: list[tuple[object, ...]] = []
    for part in parts:
        if isinstance(part, LoopPart):
            found += unrolled(part.parts, widened) * (len(part.indices) if not part.name and widened else 1)
        else:
            found += [(o.queue, o.uses, len(o.regions)) for o in part.operations]
    return found


def test_slices_become_loops_that_say_the_same() -> None:
    built = program(block_q=256, block_kv=256, vector_rows=4)
    phase = replace(built.phases[0], family=None)
    exact, short = (Builder(built, *how).shapes(phase) for how in ((), (condensed,)))
    assert sum(operations(s.parts) for s in short) < sum(operations(s.parts) for s in exact) / 3
    for a, b in zip(exact, short, strict=True):
        assert unrolled(a.parts, widened=False) == unrolled(b.parts, widened=True)


def test_a_repeated_run_is_a_loop_and_the_rest_stays() -> None:
    op, other = (Operation(label, 0, (), (), (), (), "") for label in "ab")
    (head, loop, tail) = condensed([other, op, op, op, op, other])
    assert isinstance(loop, LoopPart)
    assert (head, len(loop.indices), loop.parts, tail) == (Piece((other,)), 4, (Piece((op,)),), Piece((other,)))


def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check(program(block_q=256, block_kv=256, vector_rows=4))
    kept = AscendGroup.ub_kept
    monkeypatch.setattr(AscendGroup, "ub_kept", lambda *given: kept(*given[:-1], 1))
    # Phases that are stored have the slots of the check above; those of the race are stored nowhere.
    monkeypatch.setattr(ascend_machine, "_written", ascend_machine._written.__wrapped__)
    with pytest.raises(RaceError, match="fills a slot of ring alpha again"):
        check(program(block_q=256, block_kv=256, vector_rows=4))
