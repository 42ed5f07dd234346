"""Regions of global tensors that the blocks of a phase access, computed for all blocks at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.kernels.form.phase import WHOLE, Visit
from npusim.kernels.form.work_table import BATCH, HEAD, SPANS
from npusim.program.ir.columns import Touches, distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.kernels.form.phase import WorkTile
    from npusim.kernels.form.work_table import Integers, WorkTable
    from npusim.machines.frame import Frame


def touches_of(
    frame: Frame, rereads: Mapping[str, int], views: frozenset[str], blocks: WorkTable, group_count: int
) -> list[Touches]:
    """Return the regions that blocks access, ``group_count`` blocks in step, in the form in which `Footprint` yields
    the regions of a step.
    """
    has_products = any(s.is_product for s in frame.stages)
    is_joined = has_products and bool(frame.loop_axis)
    read = [{n for s in loop.stages for n in s.read} for loop in frame.phase.loops]
    steps = np.arange(len(blocks)) // group_count
    joined = _neighbours(blocks, steps) if is_joined else None
    touches = list[Touches]()
    for name, (n, place) in enumerate(frame.places.items()):
        if place not in ("global", "out") or n in views:
            continue
        each = 0 if place == "out" else 1 if has_products else max(1, sum(n in names for names in read))
        is_visited = is_joined and frame.is_visited(n)
        if is_joined and n in frame.phase.by_tile:
            touches += _of_tiles(frame, n, name, blocks, steps, each)
        elif is_visited and place == "out":
            for numbers, block in blocks.in_columns():
                visit = Visit(0, block.first, block.last - block.first)
                touches.append(_touched(frame, n, name, steps[numbers], numbers, block, visit, 0))
        elif is_visited:
            touches += _visited(frame, n, name, blocks, steps, rereads.get(n))
        elif joined is not None:
            touches += _held(frame, n, name, blocks, steps, joined, each)
        else:
            for numbers, block in blocks.in_columns():
                for at, tile in enumerate(tiles_of(frame, n, block)):
                    touches.append(_touched(frame, n, name, steps[numbers], numbers, block, tile, each, at=at))
    return touches


def _touched(
    frame: Frame,
    n: str,
    name: int,
    steps: Integers,
    order: Integers,
    block: WorkTile,
    tile: Visit,
    each: int,
    *spans: tuple[int, int] | None,
    at: int = 0,
) -> Touches:
    cut = frame.cut(n, block, tile, *spans)
    payload = cut.payload_bytes
    return Touches(steps, order, name, at, cut.tensor, cut.corner, cut.rows, cut.cols, payload, each, payload * each)


def _of_tiles(frame: Frame, n: str, name: int, blocks: WorkTable, steps: Integers, each: int) -> Iterator[Touches]:
    """Yield the matrices of a stack that a loop visits, one for each of its tiles: the next batch of the tensor."""
    for numbers, block in blocks.in_columns():
        first = _touched(frame, n, name, steps[numbers], numbers, block, Visit(0, block.first, 1), each)
        batch, head, row, col = first.corner
        for at, behind in enumerate(frame.matrices_behind(n, first.tensor, block.tile_count)):
            yield first._replace(tile=at, corner=(batch + behind, head, row, col))


class _Joined(NamedTuple):
    """Runs of blocks that follow one another in a head: the first block of each run, and the run's number of rows."""

    firsts: Integers
    rows: Integers


def _neighbours(blocks: WorkTable, steps: Integers) -> _Joined:
    numbers = blocks.numbers
    same = [BATCH, HEAD, *range(SPANS + 2, numbers.shape[1])]
    before, after = numbers[:-1], numbers[1:]
    follows = (before[:, same] == after[:, same]).all(1) & (steps[:-1] == steps[1:])
    follows &= before[:, SPANS] + before[:, SPANS + 1] == after[:, SPANS]
    firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return _Joined(firsts, np.add.reduceat(numbers[:, SPANS + 1], firsts))


def _held(
    frame: Frame, n: str, name: int, blocks: WorkTable, steps: Integers, joined: _Joined, each: int
) -> Iterator[Touches]:
    """Yield the parts of an operand or result that stay for a whole block; parts of neighbouring blocks are
    combined.
    """
    sizes, which = distinct(joined.rows[:, None])
    for numbers, block in blocks.in_columns(joined.firsts, which):
        # From a separate matrix, a walk reads as many elements as its largest tile has.
        largest = max((r.cols, r.col) for r in block.runs) if n in frame.phase.still else None
        tile = Visit(0, largest[1], largest[0]) if largest else WHOLE
        rows = int(sizes[which[numbers[0]], 0])
        spans = [(0, rows) if axis == frame.row_axis else None for axis in frame.axes(n)]
        firsts = joined.firsts[numbers]
        yield _touched(frame, n, name, steps[firsts], firsts, block, tile, each, *spans)


def _visited(
    frame: Frame, n: str, name: int, blocks: WorkTable, steps: Integers, rows: int | None
) -> Iterator[Touches]:
    """Yield the stretches of a name's tensor that loops visit, once for all blocks that share a stretch.

    Every ``rows`` rows of a block read a stretch once; None: all rows of a block together.
    """
    share, numbers = frame.sharing(n), blocks.numbers
    read = frame.reading_axes(n)
    spans = [SPANS + 2 * i + end for i, axis in enumerate(blocks.axes) if axis in read for end in (0, 1)]
    each = -(-numbers[:, SPANS + 1] // rows) if rows else np.ones(len(blocks), np.int64)
    position = np.column_stack([steps, numbers[:, BATCH], numbers[:, HEAD] // share, numbers[:, spans]])
    alike = _Merged.of(np.column_stack([position, blocks.sharing]))
    most, total = alike.most(each), alike.total(each)
    listed = [frame.stretches(kind.runs) if kind.runs else [] for kind in blocks.kinds]
    counts = np.array([len(of_kind) for of_kind in listed], np.int64)
    kinds = blocks.which[alike.last]
    group = np.repeat(np.arange(len(kinds)), counts[kinds])
    cut = np.array([span for kind in kinds.tolist() for span in listed[kind]], np.int64).reshape(-1, 2)
    shared = _Merged.of(np.column_stack([position[alike.last][group], cut[:, 0]]))
    cols, most = shared.most(cut[:, 1]), shared.most(most[group])
    total, block_of, col = shared.total(total[group] * cut[:, 1]), alike.last[group[shared.last]], cut[shared.last, 0]
    sizes, which = distinct(cols[:, None])
    widest = frame.widest(n)
    for at, block in blocks.in_columns(block_of, which):
        width = int(sizes[which[at[0]], 0])
        visit = Visit(0, col[at], width)
        region = frame.cut(widest, block, visit)
        own = region if widest == n else frame.cut(n, block, visit)
        size = region.rows, region.cols, region.payload_bytes
        read_bytes = own.payload_bytes // width * total[at]
        yield Touches(steps[block_of[at]], at, name, 0, region.tensor, region.corner, *size, most[at], read_bytes)


class _Merged(NamedTuple):
    """Result of combining equal rows, in the order of their first occurrences: the last one of the equal rows, and, for
    each row, the index of its combined row.
    """

    last: Integers
    which: Integers

    @classmethod
    def of(cls, rows: Integers) -> _Merged:
        """Return equal rows combined."""
        _, which = distinct(rows)
        count = int(which.max(initial=-1)) + 1
        first, last = np.full(count, len(rows), np.int64), np.zeros(count, np.int64)
        np.minimum.at(first, which, np.arange(len(rows)))
        np.maximum.at(last, which, np.arange(len(rows)))
        order = np.argsort(first, kind="stable")
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        return cls(last[order], place[which])

    def most(self, values: Integers) -> Integers:
        """Return the largest of the values of equal rows."""
        most = np.zeros(len(self.last), np.int64)
        np.maximum.at(most, self.which, values)
        return most

    def total(self, values: Integers) -> Integers:
        """Return the sum of the values of equal rows."""
        total = np.zeros(len(self.last), np.int64)
        np.add.at(total, self.which, values)
        return total


def tiles_of(frame: Frame, n: str, block: WorkTile) -> list[Visit]:
    """Return visits that together access everything that a block accesses of a name's tensor."""
    if not block.runs or any(n in s.written for s in frame.phase.finish):
        return [WHOLE]
    if n in frame.phase.by_tile:
        return [Visit(at, block.first, 1) for at in range(block.tile_count)]
    if (stack := frame.stack(n)) and stack.axis in frame.walked:
        if frame.is_start_alone(n):
            return [Visit(0, block.runs[0].col, 1)]
        # some blocks may be omitted in a step
        visited = {at for run in block.runs for span in run.stretches for at in range(*span)}
        return [Visit(0, at, 1) for at in sorted(visited)]
    if frame.is_visited(n) and any(len(run.stretches) > 1 for run in block.runs):  # tiles with gaps between them
        spans = list[tuple[int, int]]()
        for at, end in sorted({span for run in block.runs for span in run.stretches}):
            if spans and at <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((at, end))
        return [Visit(0, at, end - at) for at, end in spans]
    return [Visit(0, block.first, block.last - block.first)]
