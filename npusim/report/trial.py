"""Values of a tiling field that a run could try: they fit, and they change what is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import NpusimError
from npusim.ir.program import Loop
from npusim.schedules import find_schedule
from npusim.schedules.registry import effective
from npusim.simulation.request import command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npusim.ir.op import TileOp
    from npusim.ir.program import Item, ProgramPhase, TileProgram
    from npusim.simulation.result import RunData

#: Shapes of blocks of a phase that are compared; more only repeat them with other lengths.
_SHAPES = 4


class Trial:
    """Tries other values of one tiling field on the schedule, problem and device of a run."""

    def __init__(self, result: RunData) -> None:
        self._result = result
        self._now: object = None

    def value(self, field: str) -> int | None:
        """Return the number that a field has, or that its default stands for; None if it is none."""
        return effective(self._result.tiling, field)

    def useful(self, field: str, values: Iterable[int]) -> list[int]:
        """Return those of ``values`` that fit and whose program differs from the run's own."""
        if self._now is None:
            self._now = _structure(self._result.program)
        found = []
        for value in values:
            program = self._program(field, value)
            if program is not None and _structure(program) != self._now:
                found.append(value)
        return found

    def explore(self, field: str, values: Sequence[int]) -> str:
        """Return the command that tries ``values`` on this very run; empty where none can say it."""
        r = self._result
        if r.asked is None:
            return ""
        options = [(o, v) for o, v in r.asked if (o, v.partition("=")[0]) != ("-t", field)]
        listed = f"{field}={','.join(str(value) for value in values)}"
        return command("explore", r.schedule, options, ["--field", listed])

    def _program(self, field: str, value: int) -> TileProgram | None:
        r = self._result
        schedule = find_schedule(r.schedule, r.device.family)
        try:
            # Not a copy of the model: the field's own limits count too.
            tiling = type(r.tiling).model_validate({**r.tiling.model_dump(), field: value})
            return schedule.build(r.problem, tiling, r.device, schedule.precision(r.precision))
        except (NpusimError, ValueError):
            return None


def _structure(program: TileProgram) -> object:
    """Return what is run: blocks, and the operations with their shapes; not where their tiles lie."""
    return tuple((phase.name, len(phase.blocks), _blocks(phase)) for phase in program.phases)


def _blocks(phase: ProgramPhase) -> object:
    found: dict[object, object] = {}
    for block in phase.blocks:
        shape = phase.shape(block)
        if shape not in found:
            found[shape] = _items(phase.body(block))
            if len(found) == _SHAPES:
                break
    return tuple(found.values())


def _items(items: Iterable[Item]) -> tuple[object, ...]:
    found: list[object] = []
    for item in items:
        if isinstance(item, Loop):
            # Stages that run further ahead than there are tiles leave loops without operations.
            body = _items(item.body(item.indices[0]))
            found += [(len(item.indices), body)] if body else []
        else:
            found.append(_operation(item))
    return tuple(found)


def _operation(op: TileOp) -> object:
    return op.label, op.queue, tuple((s.opcode, s.dst.rows, s.dst.cols) for s in op.steps)
