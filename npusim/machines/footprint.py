"""Regions of global tensors that blocks running in step read and write: a property of the machine's plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from npusim.kernels.form.phase import WHOLE, Visit
from npusim.kernels.form.work_table import table_of
from npusim.late_methods import dataclass
from npusim.machines.footprint_columns import tiles_of, touches_of
from npusim.program.ir.columns import ColumnScan, Touches
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.tile_program import Touch
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from npusim.kernels.form.phase import WorkTile
    from npusim.machines.frame import Frame


@dataclass(frozen=True, slots=True, eq=False)
class Footprint(ColumnScan):
    """The global-memory footprint of the blocks of a phase.

    Two footprints are equal if they give the same regions for the same blocks (`Frame.regions_key`).

    reread
        Every group of this number of rows of a block reads the operand completely.
    views
        Operands that are loaded as parts of other operands.
    parts
        Axes of the grid, each with the extent that a block processes at a time.
    held
        Operands that a block loads first, for all of its parts.
    """

    frame: Frame
    reread: tuple[tuple[str, int], ...] = ()
    views: frozenset[str] = frozenset()
    parts: tuple[tuple[str, int], ...] = ()
    held: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash((self.frame.phase.name, self.reread, self.parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Footprint):
            return False
        same = (self.reread, self.views, self.parts, self.held) == (other.reread, other.views, other.parts, other.held)
        return same and (self.frame is other.frame or self.frame.regions_key == other.frame.regions_key)

    def __call__(self, blocks: Sequence[WorkTile]) -> Iterator[Touch]:
        """Yield regions that blocks running in step read and write; a region that blocks share is one entry.

        With products and a loop, the rows of neighbouring blocks are one region, and blocks of a head
        share the operands that the loop visits.  Phases without products read their inputs once per pass.
        """
        frame, rereads = self.frame, dict(self.reread)
        has_products = any(s.is_product for s in frame.stages)
        is_joined = has_products and bool(frame.loop_axis)
        read = [{n for s in loop.stages for n in s.read} for loop in frame.phase.loops]
        yield from _masks(frame, blocks)
        in_rows = list(neighbours(blocks)) if is_joined else []
        visits: dict[Hashable, list[_Stretch]] = {}  # the names whose tiles all blocks visit in the same way
        for n, place in frame.places.items():
            if place not in ("global", "out") or n in self.views:
                continue
            each = 0 if place == "out" else 1 if has_products else max(1, sum(n in names for names in read))
            if is_joined and n in frame.phase.by_tile:
                for block in blocks:
                    yield from _of_tiles(frame, n, block, each)
            elif is_joined and place == "out" and frame.is_visited(n):  # a tile of the result for each tile of the loop
                yield from (Touch(frame.cut(n, b, Visit(0, b.first, b.last - b.first)), 0) for b in blocks)
            elif is_joined and frame.is_visited(n):
                axes = tuple([a for a in frame.reading_axes(n) if blocks[0].span(a)])
                alike = frame.sharing(n), rereads.get(n), axes
                if alike not in visits:
                    visits[alike] = _stretches(frame, *alike, blocks)
                yield from _visited(frame, n, visits[alike])
            elif is_joined:
                for block, rows in in_rows:
                    spans = ((0, rows) if axis == frame.row_axis else None for axis in frame.axes(n))
                    # From a stack of matrices, a walk reads as many elements as its largest tile has.
                    largest = max((r.cols, r.col) for r in block.runs) if n in frame.phase.still else None
                    tile = Visit(0, largest[1], largest[0]) if largest else WHOLE
                    yield Touch(frame.cut(n, block, tile, *spans), each)
            else:
                tiles: dict[int, list[Visit]] = {}  # results by the runs of tiles that blocks share
                for block in blocks:
                    if id(block.runs) not in tiles:
                        tiles[id(block.runs)] = tiles_of(frame, n, block)
                    is_whole = not self.parts or n in self.held
                    for turn, part in enumerate((block,) if is_whole else self._parts(block)):
                        for tile in tiles[id(block.runs)]:
                            yield Touch(frame.cut(n, part, tile), each, turn=turn)

    def of_columns(self, blocks: Sequence[WorkTile], group_count: int) -> list[Touches] | None:
        """Return the regions in columns; None for blocks in parts and for masks that are matrices in memory."""
        if self.parts or not blocks or self.frame.masks_in_memory:
            return None
        table = table_of(blocks)
        return None if table is None else touches_of(self.frame, dict(self.reread), self.views, table, group_count)

    def _parts(self, block: WorkTile) -> Iterator[WorkTile]:
        """Yield the parts of a block; the first axis of `parts` is the outermost loop."""
        sizes = dict(self.parts)
        cut = {a: [(a, at + i, n) for i, n in chunks(size, sizes.get(a, size))] for a, at, size in block.spans}
        axes = [*(a for a in cut if a not in sizes), *(a for a in sizes if a in cut)]
        for chosen in product(*(cut[a] for a in axes)):
            spans = {span[0]: span for span in chosen}
            yield replace(block, spans=tuple(spans[a] for a in cut))


def _of_tiles(frame: Frame, n: str, block: WorkTile, each: int) -> Iterator[Touch]:
    """Yield the matrices of a stack that a loop visits, one for each of its tiles: the next batch of the tensor."""
    first = frame.cut(n, block, Visit(0, block.first, 1))
    of, batch, head, *place = first.tensor, first.batch, first.head, first.row, first.rows, first.col, first.cols
    behind = frame.matrices_behind(n, of, block.tile_count)
    yield from (Touch(GlobalTile(of, batch + at, head, *place), each) for at in behind)


def _masks(frame: Frame, blocks: Sequence[WorkTile]) -> Iterator[Touch]:
    """Yield the reads of masks that are matrices; a small matrix from which all masks are cut stays on the chip."""
    regions: dict[tuple[str, int, int, int, int], tuple[WorkTile, Visit, int]] = {}
    for n, mask in frame.masks_in_memory.items():
        for block in blocks:
            for tile in (t for t in frame.tiles(block) if n in t.only):
                key = n, block.batch if len(mask.seen) > 1 else 0, block.row, block.rows, tile.col
                regions[key] = block, tile, regions.get(key, (block, tile, 0))[2] + 1
    for (n, *_), (block, tile, count) in regions.items():
        region = frame.mask_cut(n, block, tile, (0, block.rows))
        yield Touch(region, 1, region.payload_bytes * count)


#: A range that loops visit: its first coordinate, its size, the number of its reads, the bytes of all reads, and a
#: block.
_Stretch = tuple[int, int, int, int, "WorkTile"]


def _stretches(
    frame: Frame, share: int, rows: int | None, axes: tuple[str, ...], blocks: Sequence[WorkTile]
) -> list[_Stretch]:
    """Return the stretches (`Frame.stretches`) that the loops of blocks visit, by head; each ``share`` heads count as
    one head.

    Every ``rows`` rows of a block read a stretch once; None: all rows of a block together. ``axes`` of the grid: blocks
    with other spans along these read other data.
    """
    alike: dict[tuple[object, ...], tuple[int, int, WorkTile]] = {}
    for block in blocks:
        each = ceil_div(block.rows, rows) if rows else 1
        visitors = block.batch, block.head // share, tuple([block.span(a) for a in axes]), id(block.runs)
        most, total, _ = alike.get(visitors, (0, 0, block))
        alike[visitors] = max(most, each), total + each, block
    largest: dict[tuple[tuple[object, ...], int], tuple[int, int, int, WorkTile]] = {}
    for (*position, _), (each, count, block) in alike.items():
        for col, cols in frame.stretches(block.runs):
            key = tuple(position), col
            most_cols, most, total, _ = largest.get(key, (0, 0, 0, block))
            largest[key] = max(most_cols, cols), max(most, each), total + count * cols, block
    return [(col, *of_stretch) for (_, col), of_stretch in largest.items()]


def _visited(frame: Frame, n: str, stretches: Sequence[_Stretch]) -> Iterator[Touch]:
    """Yield the parts of a name's tensor that the loops of blocks visit."""
    widest = frame.widest(n)
    for col, cols, most, total, block in stretches:
        visit = Visit(0, col, cols)
        region = frame.cut(widest, block, visit)
        cut = region if widest == n else frame.cut(n, block, visit)
        yield Touch(region, most, cut.payload_bytes // cols * total)


def _place(block: WorkTile, rows: int) -> object:
    return block.batch, block.head, block.row + rows, block.spans[1:]


def neighbours(blocks: Sequence[WorkTile]) -> Iterator[tuple[WorkTile, int]]:
    """Yield blocks with their number of rows; consecutive blocks of a head are combined."""
    first: WorkTile | None = None
    rows = 0
    for block in blocks:
        if first and _place(block, 0) == _place(first, rows):
            rows += block.rows
            continue
        if first:
            yield first, rows
        first, rows = block, block.rows
    if first:
        yield first, rows
