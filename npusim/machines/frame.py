"""A phase as a machine reads it: spans, sizes and parts of its names, independent of their storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.errors import ProgramError, TilingError
from npusim.formats import get_arithmetic, stored_format
from npusim.formats.mma_arithmetic import row_for
from npusim.identity import Itself
from npusim.kernels.attention.tiling_mask import SeenMask
from npusim.kernels.form.flow import conflicts, flow, is_visited, storage, views, widest
from npusim.kernels.form.language import ONE
from npusim.kernels.form.phase import WHOLE, BySize, Ends, Stacked, Visit, WorkTile, choose, tensor_of
from npusim.program.ir.op import Attributes, Opcode
from npusim.program.ir.opaque import indices, varying
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.tile_program import Body
from npusim.program.ir.tile_program import Loop as ProgramLoop

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from npusim.kernels.form.phase import Instruction, Phase, Stage, Table, TileLoop, TileRun
    from npusim.program.ir.op import Step
    from npusim.program.ir.tile import GlobalTensor
    from npusim.program.ir.tile_program import Item

Span = tuple[int, int]
#: A run of tiles, and the index of its first tile among the tiles of its block.
Placed = tuple[int, "TileRun"]


class Along(NamedTuple):
    """How a core works along a tile: the order of cumulative sums, the order of an inverse, and the arithmetic of its
    products.
    """

    scan: str = "sequential"
    inverse: str = "rows"
    arithmetic: str = ""


#: The work on one tile of a block.
Emit = Callable[["WorkTile", Visit], "Iterable[Item]"]


class Frame:
    """A phase as a machine uses it: place and storage of each name, and the position of a block's tiles in
    the tensors.
    """

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.places = flow(phase)
        self._apart = conflicts(phase)
        self.storage = storage(phase, self.places, self._apart)
        self.stages = phase.stages
        self.row_axis, self.loop_axis = phase.row_axis, phase.loop_axis
        self.walked = phase.walked
        self.label = phase.label
        self.roles = {n: what.role for n, what in phase.names.items()}
        self._heads = max(t.heads for t in phase.all_tensors())
        self._stretches: dict[tuple[TileRun, ...], list[Span]] = {}

    @property
    def prefix(self) -> str:
        """Prefix that makes the names of the phase's rings unique in the program.

        The rings of the phase with the program's main loop over tiles have no prefix.
        """
        is_main = self.loop_axis and any(s.is_product for s in self.stages)
        return "" if is_main else f"{self.phase.name} "

    def may_share(self, one: str, other: str) -> bool:
        """Return whether two names of `storage` may share a place, because neither is written while the other is still
        needed.
        """
        mine, others = ({n for n, place in self.storage.items() if place == at} for at in (one, other))
        return not any(self._apart[n] & others for n in mine)

    def may_take_turns(self, one: str, other: str) -> bool:
        """Return whether two names of `storage` of any size and format may use the same bytes one after the other.

        They may not if a row reads one of them to write the other: it would overwrite elements that it still reads.
        """
        if not self.may_share(one, other):
            return False
        both = {one, other}
        rows = ((self.storage.get(r.dst), {self.storage.get(s) for s in r.srcs}) for x in self.stages for r in x.rows)
        return not any(dst in both and both - {dst} <= sources for dst, sources in rows)

    def fmt(self, n: str) -> str:
        """Return the format of a name."""
        return self.phase.names[n].fmt

    def size_bytes(self, n: str, elements: int) -> int:
        """Return the bytes of some elements of a name."""
        return stored_format(self.phase.names[n].fmt).bytes_of(elements)

    def row_bytes(self, n: str, rows: int) -> int:
        """Return the bytes of some rows of the largest tile of a name."""
        return self.size_bytes(n, rows * self.width(n))

    def axes(self, n: str) -> tuple[str, ...]:
        """Return the axes of a name."""
        return self.phase.names[n].axes

    def width(self, n: str) -> int:
        """Return the columns of the largest tile of a name; 1 for a row vector."""
        axes = self.phase.names[n].axes
        return 1 if len(axes) == 1 else self.phase.sizes[axes[1]]

    def span(self, block: WorkTile, axis: str, tile: Visit) -> Span:
        """Return start and size of a block's tile along an axis."""
        if axis in self.walked and tile.cols:
            return tile.col, tile.cols
        return block.span(axis) or (0, self.phase.sizes[axis])

    def size(self, block: WorkTile, axis: str, tile: Visit) -> int:
        """Return the size of a block's tile along an axis."""
        return self.span(block, axis, tile)[1]

    def cols(self, n: str, block: WorkTile, tile: Visit) -> int:
        """Return the columns of a block's tile of a name; 1 for a row vector."""
        axes = self.phase.names[n].axes
        return 1 if len(axes) == 1 else self.size(block, axes[1], tile)

    def shape(self, n: str, block: WorkTile, tile: Visit) -> tuple[int, int, str]:
        """Return rows, columns and format of a block's tile of a name."""
        names = self.phase.names[n]
        return self.size(block, names.axes[0], tile), self.cols(n, block, tile), names.fmt

    def height(self, n: str) -> int:
        """Return the rows of the largest tile of a name."""
        return self.phase.sizes[self.phase.names[n].axes[0]]

    def led_by(self, stage: Stage) -> str:
        """Return the first name that a stage writes row by row and that is not a single row for all rows.

        If there is no such name, the first name whose columns the stage reduces.
        """
        reduced = (n for r in stage.rows if r.is_down for n in r.srcs if n in self.phase.names)
        return next((n for n in (*stage.written, *reduced) if self.axes(n)[0] != ONE), stage.written[0])

    def rows_of(self, n: str, rows: Span) -> Span:
        """Return the rows of a name for some rows of a tile: the same rows, or the only row of the name."""
        return (0, 1) if self.axes(n)[0] == ONE != self.row_axis else rows

    def is_of_operands(self, n: str) -> bool:
        """Return whether a stage of rows computes an operand of a product only from operands of the tile, without rows
        of the block.
        """
        return self.places.get(n) == "up" and n in self.phase.factors

    def sharing(self, n: str) -> int:
        """Return the number of heads of the phase that share one head of a name's tensor."""
        bound = self.phase.tensors[n]
        return 1 if isinstance(bound, BySize) else self._heads // tensor_of(bound).heads

    def tensor(self, n: str, block: WorkTile) -> GlobalTensor:
        """Return the tensor that an operand or result is bound to."""
        bound = self.phase.tensors[n]
        return bound.of(block) if isinstance(bound, BySize) else tensor_of(bound)

    def stack(self, n: str) -> Stacked | None:
        """Return the stack of matrices that a name represents; None if the name represents none."""
        bound = self.phase.tensors.get(n)
        return bound if isinstance(bound, Stacked) else None

    def reading_axes(self, n: str) -> tuple[str, ...]:
        """Return the axes along which blocks at different places read different parts of a name's tensor.

        The axis of a stack of matrices is one of these axes.
        """
        stack = self.stack(n)
        return (*self.axes(n), *([stack.axis] if stack and n not in self.phase.by_tile else []))

    def widest(self, n: str) -> str:
        """Return the operand that reads the most rows of an operand's tensor; the other operands of the tensor read a
        part of these rows.
        """
        return widest(self.phase, n)

    def is_visited(self, n: str) -> bool:
        """Return whether the loop visits an operand or result tile by tile."""
        return is_visited(self.phase, n, self.loop_axis)

    def is_start_alone(self, n: str) -> bool:
        """Return whether a state starts with an operand that no stage reads: a block loads it once."""
        return n not in self.operands and any(name.first == n for name in self.phase.names.values())

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of tensors that stages read, in the order of reading."""
        return tuple(dict.fromkeys(n for s in self.stages for n in s.read if self.places.get(n) == "global"))

    @cached_property
    def held(self) -> tuple[str, ...]:
        """Operands that stay until a block ends, because its loop does not run along them."""
        return tuple(n for n in self.operands if self.loop_axis and not self.is_visited(n))

    @cached_property
    def visited(self) -> tuple[str, ...]:
        """Operands that are loaded tile after tile."""
        return tuple(n for n in self.operands if n not in self.held)

    @cached_property
    def views(self) -> dict[str, str]:
        """Operands of the loop that need no load, with the operands that contain them (`kernels.form.flow.views`)."""
        return views(self.phase, self.loop_axis)

    @cached_property
    def _cuts(self) -> list[int]:
        """The beginnings and ends of runs of tiles, if the visited tiles have gaps or overlaps; else empty."""
        visited = {block.runs for block in self.phase.cells if block.runs}
        spans = {runs: [span for run in runs for span in run.stretches] for runs in visited}
        hulls = sorted({(min(spans[r])[0], max(end for _, end in spans[r])) for r in visited})
        has_gaps = any(a[1] < b[0] for of in spans.values() for a, b in pairwise(sorted(of)))
        overlaps = any(a[0] < b[0] < a[1] for a, b in pairwise(_longest(hulls)))
        return sorted({edge for of in spans.values() for span in of for edge in span}) if has_gaps or overlaps else []

    def stretches(self, runs: tuple[TileRun, ...]) -> list[Span]:
        """Return first coordinate and size of the stretches that runs of tiles visit; blocks share complete stretches.

        If a block visits all tiles from one tile on, it has one stretch. If blocks begin at different tiles or omit
        tiles (windows, block-sparse masks), every run is cut where a run of another block begins or ends.
        """
        if runs not in self._stretches:
            spans, cuts = [span for run in runs for span in run.stretches], self._cuts
            if cuts:
                edges = (cuts[bisect_left(cuts, a) : bisect_left(cuts, b) + 1] for a, b in spans)
                cut = [(a, b - a) for of in edges for a, b in pairwise(of)]
            else:  # a block that visits no tile has no range
                first, last = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)
                cut = [(first, last - first)] if spans else []
            self._stretches[runs] = cut
        return self._stretches[runs]

    @cached_property
    def masks_in_memory(self) -> dict[str, SeenMask]:
        """Masks that are matrices in memory, so that blocks read parts of them; comparisons of indices compute the
        other masks.
        """
        masks = self.phase.masks.items()
        return {n: mask for n, mask in masks if isinstance(mask, SeenMask) and mask.is_loaded}

    @cached_property
    def regions_key(self) -> tuple[Any, ...]:
        """The properties of the phase that decide, with a block, which regions of tensors it accesses.

        Masks in memory are equal only to themselves; the size of blocks is also a part of the comparison of tensors.
        """
        phase = self.phase
        loops = tuple([(loop.axis, tuple([s.rows for s in loop.stages])) for loop in phase.loops])
        bound = tuple([(n, Itself(t) if isinstance(t, BySize) else t) for n, t in phase.tensors.items()])
        names = tuple([(n, what.role, what.axes, what.first) for n, what in phase.names.items()])
        axes = phase.name, self.row_axis, self.loop_axis, self.walked, phase.walks, tuple(phase.sizes.items())
        sets = phase.still, phase.by_tile, frozenset(self.places.items()), tuple(self._cuts), self._heads
        masks = tuple([(n, Itself(mask)) for n, mask in self.masks_in_memory.items()])
        return axes, names, bound, masks, sets, loops, tuple([s.rows for s in phase.finish])

    @cached_property
    def _bound(self) -> dict[str, tuple[GlobalTensor | None, tuple[str, ...], int, Stacked | None]]:
        """The part that all cuts of a name share: the tensor (if it does not depend on the block), axes, `sharing` and
        `stack`.
        """
        return {
            n: (None if isinstance(of, BySize) else tensor_of(of), self.axes(n), self.sharing(n), self.stack(n))
            for n, of in self.phase.tensors.items()
        }

    def cut(self, n: str, block: WorkTile, tile: Visit, row: Span | None = None, col: Span | None = None) -> GlobalTile:
        """Return a part of a name's tensor; ``row`` and ``col`` are spans within the spans of block and tile."""
        common, axes, share, stack = self._bound[n]
        tensor = common or self.tensor(n, block)
        is_shared = tensor.role == "constant"
        top, height = self.span(block, axes[0], tile)
        left, width = self.span(block, axes[1], tile) if len(axes) > 1 else (0, 1)
        bound = self.phase.tensors[n]
        if isinstance(bound, Ends):
            at, size = self.span(block, bound.axis, tile)
            top = at + size - 1
        # one matrix for each tile; a ragged tile has its first rows and columns
        if stack or n in self.phase.still:
            top, left = (0 if a in self.phase.walks else at for a, at in zip_longest(axes, (top, left)))
        lies_along = len(axes) == 1 and tensor.rows == 1 < tensor.cols  # a vector of rows in a tensor of one row
        first = top + row[0] if row else top
        if tensor.shared_rows >= tensor.rows:  # one row in memory for all blocks
            top, row = 0, row and (0, row[1])
        if is_shared:  # one matrix for all blocks
            batch = head = top = left = 0
        else:
            # The number of a shared head cannot be written as a sum of a block's coordinates; only inputs are shared.
            head = block.head if share == 1 else varying(lambda h: h // share, block.head)
            layer = 0
            if stack:
                if n in self.phase.by_tile:
                    layer = (block.span(stack.axis) or (0, 1))[0] + stack.after(tile.index)
                else:
                    layer = self.span(block, stack.axis, tile)[0]
            count = stack.count if stack else 1
            batch = (block.batch * count if tensor.batch > count else 0) + layer if tensor.batch > 1 else 0
        r, rows = row or (0, height)
        c, cols = col or (0, width)
        if lies_along:
            return tensor.tile(batch, head, 0, 1, 0 if is_shared else first, rows)
        return tensor.tile(batch, head, top + r, rows, left + c, cols)

    def matrices_behind(self, n: str, tensor: GlobalTensor, count: int) -> list[int]:
        """Return, for each of a loop's ``count`` tiles, the distance of the tile's matrix from the first tile's, in
        batches of a name's tensor as `cut` counts them; 0 for tensors of one matrix.
        """
        stack = self.stack(n) if tensor.batch > 1 and tensor.role != "constant" else None
        return [stack.after(at) if stack else 0 for at in range(count)]

    def tables(self, row_sum: str, rounding: str = "", along: Along | None = None) -> dict[Stage, Table]:
        """Return the table of each rows stage; row sums without an order have the order ``row_sum``.

        Cumulative sums and inverses without an order have the orders of ``along``; casts without a rounding have
        ``rounding``.
        """
        order = {Opcode.ROW_SUM: Attributes(order=row_sum), Opcode.CAST: Attributes(rounding=rounding)}
        along = along or Along()
        of = {Opcode.CUMSUM: (along.scan, ""), Opcode.INVERSE: (along.inverse, along.arithmetic)}

        def chosen(r: Instruction) -> Instruction:
            how = r.attributes
            if r.opcode is Opcode.ROW_SUM and r.is_down and not how.order:  # whole rows are added one after another
                return replace(r, attributes=replace(how, order="sequential"))
            if how.order or r.opcode not in of:
                return r
            name, unit = of[r.opcode]
            return replace(r, attributes=replace(how, order=name, arithmetic=how.arithmetic or unit))

        return {s: tuple(map(chosen, choose(s.rows, order))) for s in self.stages if not s.is_product}

    def product_attributes(self, stage: Stage, arithmetic_of: Callable[[str, str], str]) -> Attributes:
        """Return the arithmetic of a product: the arithmetic of the phase, or the result of ``arithmetic_of``.

        ``arithmetic_of`` is called with the format of A and the format of the result. If B has another format, the
        matrix unit's entry for both formats applies. Raises `TilingError` if the unit does not multiply operands in
        these formats.
        """
        (row,) = stage.rows
        a, b = map(self.fmt, row.srcs)
        arithmetic = self.phase.arithmetic
        if not arithmetic:
            of_unit = self.phase.arithmetic_by_format.get(a) or arithmetic_of(a, self.fmt(row.dst))
            arithmetic = row_for(of_unit, a, b)
        self.check_operands(stage, arithmetic)
        return replace(row.attributes, arithmetic=arithmetic)

    def check_operands(self, stage: Stage, unit: str) -> None:
        """Raise `TilingError` if a matrix unit does not multiply the formats of a stage's operands."""
        (left, right), how = stage.rows[0].srcs, stage.rows[0].attributes
        a, b, wanted = self.fmt(left), self.fmt(right), get_arithmetic(unit)
        dtypes = [s.dtype["element"] if s.scale_block else s.dtype for s in map(stored_format, (a, b))]
        scales = {s.scale_block for s in map(stored_format, (a, b))}
        if dtypes != [wanted.a.dtype, wanted.b.dtype] or scales != {wanted.scale_block}:
            name = f"{self.label(left)}{'^T' * how.transpose_a} {self.label(right)}{'^T' * how.transpose_b}"
            raise TilingError(
                f"{name}: {a} by {b}, but {unit} multiplies {wanted.a.name} by {wanted.b.name}; use inputs in that "
                f"format (--dtype {wanted.b.name}), or another --precision or --arithmetic"
            )

    def mask_cut(self, n: str, block: WorkTile, tile: Visit, row: Span) -> GlobalTile:
        """Return the mask of some rows of a tile; raise an error for blocks that do not state the position of their
        queries.
        """
        top = self.span(block, self.row_axis, tile)[0]
        mask = self.phase.masks[n]
        if block.causal_offset is None and not self.is_everywhere(n):
            raise ProgramError(f"{self.phase.name}: {self.label(n)} of {block}: its causal_offset is missing")
        cut = mask.cut(top + row[0], row[1], tile.col, tile.cols, block.causal_offset)
        batch, head = (block.batch if cut.tensor.batch > 1 else 0), (block.head if cut.tensor.heads > 1 else 0)
        return replace(cut, batch=batch, head=head)

    def is_loaded(self, n: str) -> bool:
        """Return whether a mask is cut from a matrix in memory; other masks are computed from indices."""
        return bool(getattr(self.phase.masks[n], "is_loaded", True))

    def is_everywhere(self, n: str) -> bool:
        """Return whether the mask applies to every tile, like a bias."""
        return bool(getattr(self.phase.masks[n], "is_everywhere", False))

    def with_computed_masks(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Return the steps with the steps on indices that compute the masks which are not loaded."""
        result = {m.tensor().name: m for n, m in self.phase.masks.items() if not self.is_loaded(n)}

        def computed(s: Step) -> Step:
            cut = next((x for x in s.srcs if isinstance(x, GlobalTile) and x.tensor.name in result), None)
            if cut is None:
                return s
            how = result[cut.tensor.name]
            comparisons, lookups = getattr(how, "index_work", (0, 0))
            return replace(s, attributes=replace(s.attributes, comparisons=comparisons, lookups=lookups))

        return tuple(map(computed, steps)) if result else steps

    @cached_property
    def _placing(self) -> dict[Stage, tuple[bool, frozenset[str]]]:
        """For each stage, whether its operands depend on places in all tiles, and the masks that cause
        the dependence.
        """
        masks = self.phase.masks

        def of(s: Stage) -> tuple[bool, frozenset[str]]:
            names = frozenset(masks.keys() & s.read)
            return any(self.places.get(n) == "out" for n in s.written) or any(map(self.is_everywhere, names)), names

        return {s: of(s) for s in self.stages}

    def is_placed(self, s: Stage, tile: Visit) -> bool:
        """Return whether a stage of the tile depends on the places of block and tile, and not only on their sizes.

        This is so if the stage stores a result, if a mask is cut for it, or if its rows use numbers of a tile.
        """
        is_always, masks = self._placing[s]
        return is_always or not masks.isdisjoint(tile.only) or bool(tile.cols and self.phase.per_tile(tile))

    def placed(self, block: WorkTile) -> list[Placed]:
        """Return the block's runs, each with the number of its first tile."""
        firsts = accumulate((run.count for run in block.runs), initial=0)
        return list(zip(firsts, block.runs, strict=False))

    def loop(self, loop: TileLoop, function: Emit, block: WorkTile, first_tile: Emit | None = None) -> Iterator[Item]:
        """Yield a loop with the body ``function`` for each of the block's runs of tiles; without an axis, the body
        once.  ``first_tile``: the body for the block's first tile, if that differs.
        """
        if not loop.axis:
            yield from function(block, WHOLE)
            return
        for at, run in self.placed(block):
            begin = at
            if first_tile is not None and at == 0:
                begin = 1
                yield ProgramLoop(loop.axis, indices(0, 1), partial(_step, first_tile, block, at, run))
            if begin < at + run.count:
                yield ProgramLoop(loop.axis, indices(begin, at + run.count), partial(_step, function, block, at, run))

    def pipelined(self, parts: Sequence[tuple[Emit, int]], block: WorkTile) -> Iterator[ProgramLoop]:
        """Yield the parts of a software pipeline over the block's tiles; step n processes tile n - lag of each part.

        Consecutive steps are one loop if the tiles of each part belong to one run.
        """
        end = block.tile_count + max(lag for _, lag in parts)
        yield from (loop for _, _, loop in self.stretches_of_steps(parts, [(0, block)], end) if loop)

    def stretches_of_steps(
        self, parts: Sequence[tuple[Emit, int]], blocks: Sequence[tuple[int, WorkTile]], end: int
    ) -> Iterator[tuple[int, int, ProgramLoop | None]]:
        """Yield the stretches of steps, from 0 to ``end``, in which every part stays within one run of tiles of a
        block.

        ``parts`` as for `pipelined`. ``blocks`` follow one another; each comes with the step at which its first part
        begins. A stretch consists of its first step, the step after its last step, and the loop over its steps, or None
        if no part runs.
        """
        placed = [(at + first, at, run, b) for at, b in blocks for first, run in self.placed(b)]
        ends = [at + b.tile_count for at, b in blocks]
        edges = sorted([0, end, *(at + lag for _, lag in parts for at in (*(p[0] for p in placed), *ends))])
        for start, stop in pairwise(edges):
            if start == stop or not 0 <= start < end:
                continue
            running = [
                (part, lag, *next(p for p in reversed(placed) if p[0] <= start - lag))
                for part, lag in parts
                if blocks[0][0] <= start - lag < ends[-1]
            ]
            loop = ProgramLoop(self.loop_axis, indices(start, stop), _steps(running)) if running else None
            yield start, stop, loop

    def tiles(self, block: WorkTile) -> list[Visit]:
        """Return the block's tiles, one by one."""
        return [run.visit(first + i, i) for first, run in self.placed(block) for i in range(run.count)]

    @cached_property
    def content(self) -> Hashable:
        """The part of the phase on which operations can depend, apart from blocks and the lengths of tensors.

        An object without content (a function, a mask) represents itself.
        """
        p = self.phase
        tensors: list[Hashable] = []
        for n, bound in p.tensors.items():
            if isinstance(bound, BySize):
                by_size = sorted(bound.tensors.items())
                tensors.append((n, bound.axis, tuple((size, _alike(t)) for size, t in by_size)))
            else:
                stack = (bound.axis, bound.count) if isinstance(bound, Stacked) else ()
                tensors.append((n, stack, _alike(tensor_of(bound))))
        stages = tuple((loop.axis, tuple((s.name, s.rows) for s in loop.stages)) for loop in p.loops)
        tables = (tuple(p.names.items()), stages, tuple((s.name, s.rows) for s in p.finish))
        parameters = (
            tuple(p.constants.items()),
            tuple(p.masks.items()),
            p.per_tile,
            p.arithmetic,
            tuple(p.arithmetic_by_format.items()),
        )
        return p.name, *tables, tuple(p.sizes.items()), tuple(tensors), parameters, p.walks, p.still, p.is_compiled


def _longest(hulls: list[Span]) -> Iterator[Span]:
    yield from (a for a, b in zip_longest(hulls, hulls[1:]) if b is None or a[0] != b[0])


def _alike(t: GlobalTensor) -> Hashable:
    """Return the properties of a tensor apart from its batch and lengths."""
    layout = t.is_interleaved, t.packed, t.stretch_rows, t.shared_rows, t.column
    return t.name, t.heads, t.cols, t.fmt, t.role, *layout


def body(function: Emit, block: WorkTile, tile: Visit) -> Body:
    """Return a loop's body that runs ``function`` on one tile of a block.

    Blocks and tiles of one shape share the body: it may read their sizes and conditions, not their positions.
    """
    shape, at = shape_and_place(block)
    return Body(_tile, (function, shape, tile.shape), (at, tile.index, tile.col))


def _steps(running: Iterable[tuple[Emit, int, int, int, TileRun, WorkTile]]) -> Body:
    """Return the body of a step, in which each part is later than the first by a number of tiles; each run and each
    block begins at
    its first tile.
    """
    static, where = [], []
    for part, lag, first, begin, run, block in running:
        shape, at = shape_and_place(block)
        static.append((part, run.step, run.cols, run.only, shape))
        where.append((at, -lag - begin, run.col - (lag + first) * run.step))
    return Body(_together, tuple(static), tuple(where))


def _together(static: Any, at: Any, index: int) -> Iterator[ProgramLoop]:
    for (part, pitch, cols, only, shape), (position, number, col) in zip(static, at, strict=True):
        tile = Visit(index + number, index * pitch + col, cols, only)
        yield ProgramLoop("", (0,), body(part, block_at(shape, position), tile))


def _tile(static: Any, at: Any, _index: int) -> Iterable[Item]:
    (function, shape, (cols, only)), (position, index, col) = static, at
    items: Iterable[Item] = function(block_at(shape, position), Visit(index, col, cols, only))
    return items


def _step(function: Emit, block: WorkTile, first: int, run: TileRun, index: int) -> Iterator[ProgramLoop]:
    """Yield the body for one tile of a run; blocks and tiles of the same shape share it."""
    yield ProgramLoop("", (0,), body(function, block, run.visit(index, index - first)))


def shape_and_place(block: WorkTile) -> tuple[Any, Any]:
    """Return the properties on which operations of a block's tile may depend, and the block's place, for
    :func:`block_at`.
    """
    shape = tuple((axis, n) for axis, _, n in block.spans), block.causal_offset, block.place
    return shape, (block.batch, block.head, tuple(start for _, start, _ in block.spans))


def block_at(shape: Any, position: Any) -> WorkTile:
    """Return a block without runs; coordinates may be opaque."""
    (sizes, offset, number), (batch, head, starts) = shape, position
    spans = tuple((axis, start, n) for (axis, n), start in zip(sizes, starts, strict=True))
    return WorkTile(batch, head, spans, (), offset, number)


def attention_products(phase: Phase) -> tuple[Instruction, Instruction] | None:
    """Return the first product of a loop, and the last one, which reads results of rows, as in attention; None for
    other phases.
    """
    products = [s.rows[0] for s in phase.stages if s.is_product]
    fed = [r for r in products if r.srcs[0] not in phase.tensors]
    is_plain = not any(r.attributes.transpose_a for r in products)  # kernels store Q row by row
    return (products[0], fed[-1]) if is_plain and fed and len(products) > 1 and phase.loop_axis else None
