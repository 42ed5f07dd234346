"""How one row of an output comes about: what is done to it, in structure and in values.

Two programs with one structure of a row give it the same bits, whatever the inputs: the same steps on the
same columns and depths in the same order, since no operation looks from one row at another.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import get_format
from npusim.ir.op import Opcode
from npusim.ir.program import Loop
from npusim.ir.tile import GlobalTile
from npusim.numerics.evaluate import execute_rows, needed_blocks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from npusim.ir.op import Source, Step
    from npusim.ir.program import Item, TileProgram
    from npusim.numerics.executor import HeadSource, Moment


@dataclass(frozen=True, slots=True)
class Place:
    """One row of a program's output: ``head`` and ``row`` of sequence ``batch``."""

    row: int
    head: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step, in program order, at which two computations of a row differ.

    ``other`` is None where the other computation has no such step any more.
    """

    phase: str
    operation: str
    step: str
    tile: str
    column: int
    value: float
    other: float | None

    def __str__(self) -> str:
        other = "none" if self.other is None else f"{self.other:.9g}"
        step = f" {self.step}" if self.step else ""
        return f"{self.phase}: {self.operation}{step}, {self.tile}, column {self.column}: {self.value:.9g} | {other}"


@dataclass(frozen=True, slots=True)
class PathEvent:
    """A row of what one step wrote, and where."""

    phase: str
    operation: str
    step: str
    tile: str
    values: NDArray[Any]


@dataclass(slots=True)
class Computed:
    """Blocks of output rows from a place on, by head, and the steps of the place's own row in program order."""

    rows: dict[int, NDArray[Any]]
    events: list[PathEvent]


# ---------------------------------------------------------------- structure


def structure(program: TileProgram, place: Place, group_size: int) -> Hashable:
    """Return what is done to a row, phase by phase, block by block: operations of each label in their order.

    Addresses, queues and the number of rows that are worked on together are left out: they decide no bit.
    """
    out, found = program.tensors["o"], []
    needed = needed_blocks(program, [place.row], {place.head}, group_size, batches={place.batch})
    for phase in program.phases:
        for block in needed[phase.name]:
            steps: dict[str, list[Hashable]] = defaultdict(list)
            _collect(phase.body(block), out.batch, steps)
            found.append(tuple(sorted((label, tuple(done)) for label, done in steps.items())))
    return tuple(found)


def _collect(items: Iterable[Item], sequences: int, into: dict[str, list[Hashable]]) -> None:
    """Add operations by label; those that differ in their rows alone (slices, bands, cores) count once a body."""
    seen: set[Hashable] = set()
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                _collect(item.body(index), sequences, into)
        else:
            what = tuple(_step(step, sequences) for step in item.steps)
            if what and (item.label, what) not in seen:
                seen.add((item.label, what))
                into[item.label].append(what)


def _step(step: Step, sequences: int) -> Hashable:
    right = 1 if step.opcode is Opcode.MATMUL else -1
    sources = tuple(_operand(s, sequences, is_right=i == right) for i, s in enumerate(step.srcs))
    how = replace(step.attributes, warp=None)
    return step.opcode.value, step.name, str(how), _operand(step.dst, sequences), sources


def _operand(source: Source, sequences: int, *, is_right: bool = False) -> Hashable:
    """Return what of an operand decides a row's bits: columns, and all of what a product contracts with."""
    if isinstance(source, float | int):
        return float(source).hex()
    if isinstance(source, GlobalTile):
        tensor = source.tensor
        place = source.batch % max(1, tensor.batch // sequences)  # which of the partial results of a sequence
        has_rows_of_output = tensor.name == "q" or tensor.role in ("output", "workspace")
        rows = (-1, -1) if has_rows_of_output else (source.row, source.rows)
        return tensor.name, tensor.fmt, place, *rows, source.col, source.cols
    at = source.offset_bytes // get_format(source.fmt).size_bytes if hasattr(source, "ring") else 0
    if is_right:
        return source.fmt, source.rows, source.cols, source.stride, at
    return source.fmt, source.cols, at % source.stride


# ---------------------------------------------------------------- values


@dataclass
class _Recorder:
    """Keeps the first row of what each step of each block writes, the first slice of a tile alone."""

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
        phase = self.phases.index(moment.phase)
        visited = ", ".join(f"{axis} tile {index}" for axis, index in path if axis and axis not in ("start", "finish"))
        for lane, block in enumerate(moment.blocks):
            if (moment.phase, id(block)) not in self.order:
                continue
            spans = "".join(f", {axis} {start}" for axis, start, _ in block.spans[1:])
            tile = f"{block}{spans}" + (f", {visited}" if visited else "")
            result = moment.result
            values = np.array(result[lane if len(result) > 1 else 0, 0])  # a constant is one for all lanes
            event = PathEvent(moment.phase, op.label, moment.step.name, tile, values)
            self.events[phase, self.order[moment.phase, id(block)]].append(event)

    def in_order(self) -> list[PathEvent]:
        return [event for key in sorted(self.events) for event in self.events[key]]


def compute(program: TileProgram, place: Place, group_size: int, source: HeadSource, heads: int = 1) -> Computed:
    """Return the bits of the blocks that hold a row, in so many heads from its own on, and how its row came about."""
    needed = needed_blocks(program, [place.row], {place.head}, group_size, batches={place.batch})
    order = {(name, id(block)): at for name, blocks in needed.items() for at, block in enumerate(blocks)}
    recorder = _Recorder(order, [phase.name for phase in program.phases])
    wanted = range(place.head, place.head + heads)
    _, written = execute_rows(
        program, source, [place.row], wanted, group_size, batches={place.batch}, observers=(recorder,)
    )
    found = {h: rows[place.row - r :] for (_, h, r), rows in sorted(written.items()) if r <= place.row < r + len(rows)}
    return Computed(found, recorder.in_order())


def first_difference(one: Mapping[int, NDArray[Any]], two: Mapping[int, NDArray[Any]]) -> tuple[int, int, int] | None:
    """Return head, row and column of the first value whose bits differ, of what both have; None for none."""
    for head in (h for h in one if h in two):
        count = min(len(one[head]), len(two[head]))
        at = first_unlike(one[head][:count], two[head][:count])
        if at is not None:
            return head, *at
    return None


def first_unlike(one: NDArray[Any], two: NDArray[Any]) -> tuple[int, int] | None:
    """Return row and column of the first value of two matrices of one format whose bits differ; None for none."""
    rows, columns = np.nonzero(bits_of(one) != bits_of(two))
    return (int(rows[0]), int(columns[0])) if len(rows) else None


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of values, as unsigned integers of their size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def parting(one: list[PathEvent], two: list[PathEvent]) -> Parting | None:
    """Return the first step of ``one`` that differs from its counterpart: as many steps of its name before it."""
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
            same = event.values[:count].astype(np.float64) == twin.values[:count].astype(np.float64)
            if same.all():
                continue
            column = int(np.argmin(same))
        value, other = float(event.values[column]), None if twin is None else float(twin.values[column])
        return Parting(event.phase, event.operation, event.step, event.tile, column, value, other)
    return None
