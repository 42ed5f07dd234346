from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import RaceError
from npusim.ir import content, walk
from npusim.ir.check import check
from npusim.ir.structure import Builder, LoopPart, Operation, Piece, condensed
from npusim.machines.ascend.group import AscendGroup
from npusim.schedules import find_schedule
from npusim.timing import METHODS

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram

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


def test_a_planted_race_is_found_and_told_whether_bodies_are_known_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check(program(block_q=256, block_kv=256, vector_rows=4))
    kept = AscendGroup.ub_kept
    monkeypatch.setattr(AscendGroup, "ub_kept", lambda *given: kept(*given[:-1], 1))
    broken = program(block_q=256, block_kv=256, vector_rows=4)
    said = []
    for _ in range(2):
        with pytest.raises(RaceError, match="fills a slot of ring alpha again") as told:
            check(broken)
        said.append(str(told.value))
        content.memo.cache_clear()
    assert said[0] == said[1]


def test_what_programs_share_changes_no_cycle() -> None:
    lengths = (512, 1024, 640)
    shared = [METHODS["steady"](program(n), DEVICE) for n in lengths]
    for n, found in zip(lengths, shared, strict=True):
        content.memo.cache_clear()
        alone = METHODS["steady"](program(n), DEVICE)
        assert (alone.cycles, alone.link_bytes) == (found.cycles, found.link_bytes)
        assert alone.term_cycles == found.term_cycles


def test_another_length_makes_no_body_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8, 16 and 40 blocks: how many core groups work at once is nothing that a body depends on.
    content.memo.cache_clear()
    METHODS["steady"](program(1024), DEVICE)
    made: list[object] = []
    monkeypatch.setattr(walk, "_op_template", lambda _walker, op: made.append(op))
    for n in (512, 2560):
        checked = program(n)
        assert checked.phases[0].memo_key is program(1024).phases[0].memo_key
        METHODS["steady"](checked, DEVICE)
    assert made == []
