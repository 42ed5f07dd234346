"""The steps that produce one row of an output, and the first step at which two computations of it differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Step(NamedTuple):
    """One step of blocks that run together, with the first row of each block, or one for all."""

    operation: str
    name: str
    path: Path
    rows: NDArray[Any]


class _Together:
    """The steps of blocks that run together, in program order, and by operation and name."""

    def __init__(self, phase: str, blocks: Sequence[Any]) -> None:
        self.phase, self.blocks = phase, blocks
        self.steps: list[_Step] = []
        self.by_name: dict[tuple[str, str], list[_Step]] = defaultdict(list)
        self.seen: set[Hashable] = set()

    def add(self, step: _Step) -> None:
        self.steps.append(step)
        self.by_name[step.operation, step.name].append(step)

    def event(self, step: _Step, lane: int) -> PathEvent:
        values = step.rows[lane if len(step.rows) > 1 else 0]  # a constant has one value for all lanes
        return PathEvent(self.phase, step.operation, step.name, self.blocks[lane], step.path, values)


class RowPath:
    """The steps of a row in program order, block by block; each is created as an object when it is requested.

    The class observes an execution, and stores the first row of each step's result, only for the first slice of a tile.
    ``order``: the position of each block by phase and identity.
    """

    def __init__(self, order: Mapping[tuple[str, int], int], phases: Sequence[str]) -> None:
        self._order, self._phases = order, phases
        #: Groups by the identity of their blocks. The blocks are stored too, so that no other object gets the same
        #: identity. None: no block has the row.
        self._groups: dict[int, tuple[Sequence[Any], _Together | None]] = {}
        self._places: dict[tuple[int, int], tuple[_Together, int]] = {}

    def __call__(self, moment: Moment) -> None:
        """Store a step."""
        key = id(moment.blocks)
        group = self._groups[key][1] if key in self._groups else self._begun(moment)
        if group is None:
            return
        op, path = moment.resolved.op, moment.resolved.path
        if (op.label, moment.index, path) not in group.seen:
            group.seen.add((op.label, moment.index, path))
            group.add(_Step(op.label, moment.step.name, path, np.array(moment.result[:, 0])))

    def _begun(self, moment: Moment) -> _Together | None:
        group, phase = _Together(moment.phase, moment.blocks), self._phases.index(moment.phase)
        places = ((self._order.get((moment.phase, id(block))), lane) for lane, block in enumerate(moment.blocks))
        known = {(phase, at): (group, lane) for at, lane in places if at is not None}
        self._places |= known
        self._groups[id(moment.blocks)] = moment.blocks, group if known else None
        return group if known else None

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[PathEvent]:
        for _, (group, lane) in sorted(self._places.items(), key=itemgetter(0)):
            yield from (group.event(step, lane) for step in group.steps)

    def named(self, operation: str, step: str) -> Iterator[PathEvent]:
        """Yield the steps of one name of one operation."""
        for _, (group, lane) in sorted(self._places.items(), key=itemgetter(0)):
            yield from (group.event(x, lane) for x in group.by_name.get((operation, step), ()))


@dataclass(slots=True)
class Computed:
    """Blocks of output rows from a given row on, by head, and the steps of that row."""

    rows: dict[int, NDArray[Any]]
    events: RowPath


def compute(
    program: TileProgram,
    place: Place,
    source: HeadSource,
    heads: int = 1,
    *,
    has_path: bool = True,
    memories: dict[str, NDArray[Any]] | None = None,
) -> Computed:
    """Return the bits of rows from the place's row on, to the ends of their blocks, in this number of heads from the
    place's head on.

    With ``has_path`` the blocks are executed completely, and the steps of the row are recorded.  ``memories``: as for
    `execute`.
    """
    wanted, how = range(place.head, place.head + heads), {"batches": {place.batch}, "memories": memories}
    if not has_path:
        written = rows_alone(program, source, [place.row], wanted, since=place.row, **how)
        return Computed(_from_place(written, place), RowPath({}, ()))
    needed = needed_blocks(program, [place.row], {place.head}, batches={place.batch})
    order = {(name, id(block)): at for name, blocks in needed.items() for at, block in enumerate(blocks)}
    path = RowPath(order, [phase.name for phase in program.phases])
    written = rows_alone(program, source, [place.row], wanted, observers=(path,), **how)
    return Computed(_from_place(written, place), path)


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


def parting(one: RowPath, two: RowPath) -> str:
    """Return the first step of ``one`` that differs from the step of ``two`` with the same name and the same position
    among steps of this name.

    The text has both values ("none" if the other computation has no such step); empty if no step differs.
    """
    counterparts: dict[tuple[str, str], Iterator[PathEvent]] = {}
    for event in one:
        name = event.operation, event.step
        twin = next(counterparts.setdefault(name, two.named(*name)), None)
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
