"""What cells that run in step read and write in global tensors: of the plan, not of the algorithm alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.algorithms.phase import WHOLE, Visit
from npusim.algorithms.tiling_mask import SeenMask
from npusim.ir.program import Touch
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.algorithms.phase import WorkTile
    from npusim.machines.frame import Frame


def once(_name: str, _cell: WorkTile) -> int:
    """Return 1: every operand is read once a tile."""
    return 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """The footprint of cells in a phase; of ``reread`` operands, so many rows of a cell at a time read all."""

    frame: Frame
    reread: tuple[tuple[str, int], ...] = ()

    def __call__(self, cells: Sequence[WorkTile]) -> Iterator[Touch]:
        """Yield regions read and written by cells that run in step."""
        return footprint(self.frame, self._times, cells)

    def _times(self, name: str, cell: WorkTile) -> int:
        rows = dict(self.reread).get(name)
        return ceil_div(cell.rows, rows) if rows else 1


def footprint(frame: Frame, times: Callable[[str, WorkTile], int], cells: Sequence[WorkTile]) -> Iterator[Touch]:
    """Yield regions read and written, of all cells together where they share them.

    With products and a loop, neighbouring cells are one region of what has rows, and cells of a head
    share what the loop visits.  Rows alone read their inputs once a pass.
    """
    has_products = any(s.is_product for s in frame.stages)
    is_joined = has_products and bool(frame.loop_axis)
    passes = 1 if has_products else len(frame.phase.loops)
    yield from _masks(frame, cells)
    for n, place in frame.places.items():
        if place not in ("global", "out"):
            continue
        each = 0 if place == "out" else passes
        if is_joined and frame.is_visited(n):
            yield from _visited(frame, times, n, cells)
        elif is_joined:
            for cell, rows in neighbours(cells):
                yield Touch(frame.cut(n, cell, WHOLE, (0, rows)), each)
        else:
            for cell in cells:
                for tile in _tiles(frame, n, cell):
                    yield Touch(frame.cut(n, cell, tile), each)


def _masks(frame: Frame, cells: Sequence[WorkTile]) -> Iterator[Touch]:
    """Yield what cells read of masks that are whole matrices; a small one from which all are cut stays on the chip."""
    regions: dict[tuple[str, int, int, int], tuple[WorkTile, Visit, int]] = {}
    for n, mask in frame.phase.masks.items():
        if not isinstance(mask, SeenMask):
            continue
        for cell in cells:
            for tile in (t for t in frame.tiles(cell) if n in t.only):
                key = n, cell.row, cell.rows, tile.col
                regions[key] = cell, tile, regions.get(key, (cell, tile, 0))[2] + 1
    for (n, *_), (cell, tile, count) in regions.items():
        region = frame.mask_cut(n, cell, tile, (0, cell.rows))
        yield Touch(region, 1, region.payload_bytes * count)


def _tiles(frame: Frame, n: str, cell: WorkTile) -> Iterator[Visit]:
    """Yield visits that together touch all that a cell does of a name's tensor."""
    if not cell.runs or any(n in s.written for s in frame.phase.finish):
        yield WHOLE
    elif frame.stack(n) and frame.is_visited(n):
        yield from (Visit(0, at, 1) for at in range(cell.first, cell.last))
    else:
        yield Visit(0, cell.first, cell.last - cell.first)


def _visited(frame: Frame, times: Callable[[str, WorkTile], int], n: str, cells: Sequence[WorkTile]) -> Iterator[Touch]:
    """Yield what the loops of cells visit: a region a head, read once a cell or oftener by the plan.

    Where cells begin at various tiles or leave some out (windows), a region is a tile: cells share what they meet.
    """
    share = frame.sharing(n)
    largest: dict[tuple[int, int, int, object], tuple[int, int, int, WorkTile]] = {}
    for cell in cells:
        each, spans = times(n, cell), tuple(cell.span(a) for a in frame.axes(n))
        tiles = [(tile.col, tile.cols) for tile in frame.tiles(cell)] if frame.is_scattered else []
        for col, cols in tiles or [(cell.first, cell.last - cell.first)]:
            key = cell.batch, cell.head // share, col, spans
            most_cols, most, total, _ = largest.get(key, (0, 0, 0, cell))
            largest[key] = max(most_cols, cols), max(most, each), total + each * cols, cell
    for (_, _, col, _), (cols, most, total, cell) in largest.items():
        region = frame.cut(n, cell, Visit(0, col, cols))
        yield Touch(region, most, region.payload_bytes // cols * total)


def _place(cell: WorkTile, rows: int) -> object:
    """Return the head, the row after so many, and what else says where a cell lies."""
    return cell.batch, cell.head, cell.row + rows, cell.spans[1:]


def neighbours(cells: Sequence[WorkTile]) -> Iterator[tuple[WorkTile, int]]:
    """Yield cells, and rows from theirs on: those that follow one another in a head as one."""
    first: WorkTile | None = None
    rows = 0
    for cell in cells:
        if first and _place(cell, 0) == _place(first, rows):
            rows += cell.rows
            continue
        if first:
            yield first, rows
        first, rows = cell, cell.rows
    if first:
        yield first, rows
