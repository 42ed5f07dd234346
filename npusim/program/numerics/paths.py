"""The steps that produce one row of an output, and the first step at which two computations of it differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.cast import widen
from npusim.late_methods import dataclass
from npusim.program.ir.content import record
from npusim.program.numerics.evaluate import needed_blocks, rows_alone

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.ir.walk import Path
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.program.numerics.executor import HeadSource, Moment


@dataclass(frozen=True, slots=True)
class Place:
    """One row of a program's output: ``head`` and ``row`` of sequence ``batch``."""

    row: int
    head: int = 0
    batch: int = 0


@record
class PathEvent:
    """A row written by one step of a ``block``, at the indices ``path`` of the loops around it."""

    phase: str
    operation: str
    step: str
    block: Any
    path: Path
    values: NDArray[Any]

    @property
    def tile(self) -> str:
        """The position of the row, in words: its block and the tiles that the loops visit."""
        visited = [f"{axis} tile {index}" for axis, index in self.path if axis and axis not in ("start", "finish")]
        spans = "".join(f", {axis} {start}" for axis, start, _ in self.block.spans[1:])
        return f"{self.block}{spans}" + (f", {', '.join(visited)}" if visited else "")


@dataclass(slots=True)
class Computed:
    """Blocks of output rows from a given row on, by head, and the steps of that row in program order."""

    rows: dict[int, NDArray[Any]]
    events: list[PathEvent]


@dataclass
class _Recorder:
    """Stores the first row of the result of each step of each block, only for the first slice of a tile."""

    order: dict[tuple[str, int], int]
    phases: list[str]
    events: dict[tuple[int, int], list[PathEvent]] = field(default_factory=lambda: defaultdict(list))
    seen: set[Hashable] = field(default_factory=set)

    def __call__(self, moment: Moment) -> None:
        op, path = moment.resolved.op, moment.resolved.path
        key = (moment.phase, id(moment.blocks[0]), op.label, moment.index, path)
        if key in self.seen:
            return
        self.seen.add(key)
        phase, name = self.phases.index(moment.phase), moment.step.name
        rows = np.array(moment.result[:, 0])
        for lane, block in enumerate(moment.blocks):
            at = self.order.get((moment.phase, id(block)))
            if at is not None:  # a constant is the same for all lanes
                values = rows[lane if len(rows) > 1 else 0]
                self.events[phase, at].append(PathEvent(moment.phase, op.label, name, block, path, values))

    def in_order(self) -> list[PathEvent]:
        return [event for key in sorted(self.events) for event in self.events[key]]


def compute(
    program: TileProgram,
    place: Place,
    source: HeadSource,
    heads: int = 1,
    *,
    has_path: bool = True,
    memories: dict[str, NDArray[Any]] | None = None,
) -> Computed:
    """Return the bits of rows from a row on, to the ends of their blocks, in this number of heads from its own on.

    With ``has_path`` the blocks are executed completely, and the steps of the row are recorded.  ``memories``: as for
    `execute`.
    """
    wanted, how = range(place.head, place.head + heads), {"batches": {place.batch}, "memories": memories}
    if not has_path:
        written = rows_alone(program, source, [place.row], wanted, since=place.row, **how)
        return Computed(_from_place(written, place), [])
    needed = needed_blocks(program, [place.row], {place.head}, batches={place.batch})
    order = {(name, id(block)): at for name, blocks in needed.items() for at, block in enumerate(blocks)}
    recorder = _Recorder(order, [phase.name for phase in program.phases])
    written = rows_alone(program, source, [place.row], wanted, observers=(recorder,), **how)
    return Computed(_from_place(written, place), recorder.in_order())


def _from_place(written: Mapping[BlockRows, NDArray[Any]], place: Place) -> dict[int, NDArray[Any]]:
    """Return, by head, the rows of the blocks that contain a given row, from that row on."""
    return {h: rows[place.row - r :] for (_, h, r), rows in sorted(written.items()) if r <= place.row < r + len(rows)}


def first_difference(one: Mapping[int, NDArray[Any]], two: Mapping[int, NDArray[Any]]) -> tuple[int, int, int] | None:
    """Return head, row and column of the first value whose bits differ, over their common part; None if all
    bits agree.
    """
    for head in (h for h in one if h in two):
        count = min(len(one[head]), len(two[head]))
        at = first_unlike(one[head][:count], two[head][:count])
        if at is not None:
            return head, *at
    return None


def first_unlike(one: NDArray[Any], two: NDArray[Any]) -> tuple[int, int] | None:
    """Return row and column of the first value of two matrices of one format whose bits differ; None if all
    bits agree.
    """
    rows, columns = np.nonzero(bits_of(one) != bits_of(two))
    return (int(rows[0]), int(columns[0])) if len(rows) else None


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of values, as unsigned integers of their size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def parting(one: list[PathEvent], two: list[PathEvent]) -> str:
    """Return the first step of ``one`` that differs from its counterpart, the step with the same name and position
    among steps of this name.

    The text has both values ("none" if the other computation has no such step); empty if no step differs.
    """
    counterparts: dict[tuple[str, str], Iterator[PathEvent]] = {}
    by_name: dict[tuple[str, str], list[PathEvent]] = defaultdict(list)
    for event in two:
        by_name[event.operation, event.step].append(event)
    for event in one:
        name = event.operation, event.step
        twin = next(counterparts.setdefault(name, iter(by_name[name])), None)
        column = 0
        if twin is not None:
            count = min(len(event.values), len(twin.values))
            same = np.equal(*(widen(e.values[:count]).astype(np.float64) for e in (event, twin)))
            if same.all():
                continue
            column = int(np.argmin(same))
        other = "none" if twin is None else f"{widen(twin.values[column : column + 1]).item():.9g}"
        where = f"{event.phase}: {event.operation}{event.step and ' '}{event.step}, {event.tile}, column {column}"
        return f"{where}: {widen(event.values[column : column + 1]).item():.9g} | {other}"
    return ""
