"""One resident block of a multiprocessor: its queues, registers and shared memory, and its operations.

Operands come tile by tile: a loader, a queue of its own since it waits for nobody, brings them into
registers ahead of time, from which every warp group stores its share to shared memory (*staged*), or
straight into shared memory.  Every group multiplies all of them.  What products and rows hand to one
another never leaves the registers.

Left out: with FP16 scores and FP32 outputs a lane rescales rows whose factor another lane has, one
shuffle a tile; products and sums of softmax are two steps, but where the kernel has them as one multiply-add.

Where warp groups run concurrently (`GroupBlock`) and there are ``stages``, an iteration ends with the issue of a later
tile's copies, which frees its operands' slots: two stages wait for each load from there on, three run one tile ahead.
One stage goes through registers.  Every operation is a run of all instructions of its stage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from npusim.algorithms.phase import WHOLE, bind
from npusim.errors import TilingError
from npusim.ir.op import Attributes, GroupWork, Opcode, Step, TileOp
from npusim.ir.program import Item
from npusim.ir.tile import Tile
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.core import FENCE, FMA, LDG, LSU, MUFU, RF, SM, SMEM, STEP, TENSOR, WARPS, barriers
from npusim.machines.sm.group_cost import ACCESS_BYTES
from npusim.machines.sm.groups import GROUP_WARPS
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.algorithms.phase import Stage, TileLoop, Visit, WorkTile
    from npusim.ir.buffers import Ring
    from npusim.ir.op import Due, Source, WarpPlan
    from npusim.ir.tile import GlobalTile, Operand, RingTile
    from npusim.machines.frame import Frame, Span
    from npusim.machines.sm.core import SmCore, SmTiling


#: What an operation without steps of its own takes or hands on.
Slots = tuple["RingTile", ...]


class ResidentBlock:
    """The ``number``-th resident block.

    A warp group without rows of a ragged tile has operations without steps: it keeps step.
    """

    def __init__(self, number: int, frame: Frame, core: SmCore, tiling: SmTiling) -> None:
        self.frame, self.core, self.tiling = frame, core, tiling
        self.loader = f"{SM}.B{number}{LDG}"
        self.warps = tuple(f"{SM}.B{number}W{g}" for g in range(tiling.groups))
        is_product = tiling.work is not None and tiling.work.is_specialised and not tiling.work.consumers
        #: Of a library's product: the copies of A wait for none of B.
        self.loaders = {n: f"{self.loader}{i or ''}" for i, n in enumerate(frame.visited) if is_product}
        for n in frame.operands:
            if len({s.is_product for s in frame.stages if n in s.read}) > 1:
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is read by a product and by rows, but a load serves one of "
                    "them here; give the kernel the tensor twice, under two names"
                )
        #: Operands of the loop that are loaded.
        self.visited = tuple(n for n in frame.visited if n not in frame.views)
        #: Whether slots in shared memory are released only at the end of an iteration, or of a block without any.
        self.keeps_operands = tiling.stages > 1 or (tiling.work is not None and not frame.phase.loop_axis)
        #: Read by products: in shared memory.  Others are read where the loader leaves them.
        products = [s for s in frame.stages if s.is_product]
        staged = (*frame.held, *self.visited) if tiling.slice_elements else self.visited
        self.shared = tuple(n for n in staged if any(n in s.read for s in products))
        #: Loaded once a block.
        self.held = tuple(n for n in frame.held if n not in self.shared)
        #: Read by products too: what rows make of a tile's operands.
        self.prepared = tuple(n for n in frame.places if frame.is_of_operands(n))
        self.how = {s: frame.product_attributes(s, core.arithmetic) for s in products}
        self._check_transposed()
        self.tables = frame.tables(core.row_sum)
        self._place_operands(f"{frame.prefix}B{number}", has_products=bool(products))
        # One function a loop for all blocks: bodies are shared by what they are made of.
        self.tiles = {loop: partial(self._tile, loop.stages) for loop in frame.phase.loops}
        self.parts = [self._place_tiles(f"{frame.prefix}B{number}W{g}") for g in range(tiling.groups)]

    def _check_transposed(self) -> None:
        """Raise `TilingError` for a transposed left operand that tensor cores cannot read: of other than 16 bits.

        Source: PTX ISA, wgmma.mma_async (imm-trans-a) and ldmatrix (.trans); Volta's m8n8k4 has float16 alone.
        """
        frame = self.frame
        for s, how in self.how.items():
            n, unit = s.rows[0].srcs[0], self.core.device.matrix_engine(SM)
            if how.transpose_a and frame.fmt(n) in unit.fractals and frame.size_bytes(n, 1) != 2:
                raise TilingError(
                    f"{s.name}: {frame.label(n)}^T in {frame.fmt(n)}: tensor cores read a left operand along its rows "
                    "alone unless it has 16 bits; store it transposed, or take --dtype float16"
                )

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues of the block."""
        return *dict.fromkeys((self.loader, *self.loaders.values())), *self.warps

    @property
    def readers(self) -> tuple[str, ...]:
        """Queues that read what the loader brings."""
        return self.warps

    # ---------------------------------------------------------------- memory

    def _place_operands(self, who: str, *, has_products: bool) -> None:
        frame, tiling = self.frame, self.tiling
        sums = {frame.phase.product_axes(s.rows[0])[1] for s in self.how} if tiling.slice_elements else ()

        def ring(
            n: str, name: str, space: str, depth: int, producers: tuple[str, ...], others: tuple[str, ...] = ()
        ) -> Ring:
            rows, pitch = frame.phase.sizes[frame.axes(n)[0]], self._pitch(n, space)
            if n in self.shared and sums:
                is_row = frame.axes(n)[0] in sums and frame.axes(n)[1] not in sums
                rows, pitch = (tiling.slice_elements, pitch) if is_row else (rows, tiling.slice_elements)
            is_viewed = n in frame.views.values() and name == label(n)
            return self.core.allocator.ring(
                space,
                f"{who} {name}",
                frame.size_bytes(n, rows * pitch),
                depth,
                producers=producers,
                consumers=(*self.readers, *others),
                peeks=self.readers if is_viewed else (),
            )

        label = frame.label
        is_staged = self.core.is_staged or tiling.stages == 1
        home = RF if tiling.holds_in_registers else SMEM
        self.loaded: dict[str, Ring] = {
            n: ring(n, label(n), home, tiling.held_depth, (self.loader,)) for n in self.held
        }
        for n in dict.fromkeys((*self.visited, *self.shared)):
            loader = (self.loaders.get(n, self.loader),)
            if n not in self.shared and self._is_copied(n):
                self.loaded[n] = ring(n, label(n), SMEM, tiling.depth, loader)
            elif n not in self.shared:
                # Without products nothing covers a load but the rows before it.
                self.loaded[n] = ring(n, label(n), RF, 1 if has_products else tiling.loaded_tiles, loader)
            elif is_staged:
                # The load of the next operand may wait for this one.
                others = loader if tiling.stages == 1 and n != self.shared[-1] and not tiling.slice_elements else ()
                self.loaded[n] = ring(n, f"{label(n)} loaded", RF, 1, loader, others)
        self.near = dict(self.loaded)
        for n in self.shared:
            loader = (self.loaders.get(n, self.loader),)
            depth = 2 if tiling.slice_elements else tiling.depth
            self.near[n] = ring(n, label(n), SMEM, depth, self.warps if is_staged else loader)
            self.loaded.setdefault(n, self.near[n])
        for n in self.prepared:
            self.near[n] = ring(n, label(n), SMEM, 1, self.warps)
        self.near |= {n: self.near[whole] for n, whole in frame.views.items()}

    def _is_copied(self, n: str) -> bool:
        """Return whether an operand of the loop is copied to shared memory: what products need, or is made for them."""
        makes = any(n in s.read for m in self.prepared for s in self.frame.stages if m in s.written)
        return n in self.shared or (makes and not (self.core.is_staged or self.tiling.stages == 1))

    def _pitch(self, n: str, space: str) -> int:
        """Return the elements from a row of an operand to the next."""
        return self.frame.width(self.frame.views.get(n, n)) + (self.tiling.padding if space == SMEM else 0)

    def _place_tiles(self, who: str) -> dict[str, Tile]:
        """Return a warp group's tiles by name.

        Where registers are counted, what rows leave for a product takes the place of what a product left
        for rows, and a result that of a state, if that is read no longer and as large.
        """
        frame, core = self.frame, self.core
        tiles: dict[str, Tile] = {}
        served: dict[str, list[str]] = {}
        names = [n for n in dict.fromkeys(frame.storage.values()) if frame.places[n] not in ("global", "mask")]
        late = [n for n in names if core.has_warps and frame.places[n] in ("up", "out")]
        for n in sorted(names, key=late.__contains__):
            rows, below = ceil_div(frame.height(n), self.tiling.groups), self._below(n, served) if n in late else None
            if below is not None:
                served[below].append(n)
                at = tiles[below]
                tiles[n] = Tile(RF, at.offset_bytes, rows, at.cols, at.cols, frame.fmt(n))
                continue
            is_kept = n in late or frame.places[n] in ("down", "state") or len(frame.axes(n)) == 1
            space, served[n] = RF if is_kept else core.passing, [n]
            tiles[n] = core.allocator.tile(space, f"{who} {frame.label(n)}", rows, frame.width(n), frame.fmt(n))
        self._place_accumulators(who, frame.phase.sizes[frame.row_axis] // self.tiling.groups, tiles)
        return tiles

    def _below(self, n: str, served: dict[str, list[str]]) -> str | None:
        """Return the name whose registers another can take: of a product's tile, or for a result a state."""
        frame, size = self.frame, self.frame.size_bytes(n, 1)
        wanted = "down" if frame.places[n] == "up" else "state"
        return next(
            (
                m
                for m, names in served.items()
                if frame.places[m] == wanted
                and frame.axes(m) == frame.axes(n)
                and frame.size_bytes(m, 1) >= size
                and all(frame.may_share(n, other) for other in names)
            ),
            None,
        )

    def _place_accumulators(self, who: str, rows: int, tiles: dict[str, Tile]) -> None:
        """Add accumulators of products that are kept in another format than they add up in."""
        for s, how in self.how.items():
            n = s.rows[0].dst
            if how.accumulator_format != self.frame.fmt(n):
                tiles[_accumulator(s)] = self.core.allocator.tile(
                    RF, f"{who} {_accumulator(s)}", rows, self.frame.width(n), how.accumulator_format
                )

    # ---------------------------------------------------------------- order

    def items(self, block: WorkTile) -> Iterator[Item]:
        """Yield one block in program order."""
        frame, shares = self.frame, self._shares(block.rows)
        for n in self.held:
            yield self._load(n, block, WHOLE)
        yield from self._start(shares)
        for loop in frame.phase.loops:
            yield from self._loop(loop, block)
        yield from self._finish(block, shares)

    def _loop(self, loop: TileLoop, block: WorkTile) -> Iterator[Item]:
        return self.frame.loop(loop, self.tiles[loop], block)

    def _shares(self, rows: int) -> list[Span]:
        """Return first row and rows of each warp group; none where there are more groups than rows."""
        count = self.tiling.groups
        edges = [rows * g // count for g in range(count + 1)]
        return [(a, b - a) for a, b in pairwise(edges)]

    def _tile(self, stages: tuple[Stage, ...], block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield the stages of one tile.

        A product's operands go to shared memory when what rows leave for it is there, or just before it.
        """
        read = {n for s in stages for n in s.read}
        for n in self.visited:
            if n in read:
                yield self._load(n, block, tile)
        for s in stages:
            if s.is_product and not any(self.frame.places[n] == "up" for n in s.rows[0].srcs):
                yield from self._stage_operands(s, block, tile)
            yield from self._stage(s, block, tile)
            for product in stages if not s.is_product else ():
                if product.is_product and set(s.written) & set(product.rows[0].srcs):
                    yield from self._stage_operands(product, block, tile)
        if self.tiling.lanes and tile.cols and self.how:
            step = GroupWork(GROUP_WARPS, generation="mma")
            step = step.charged(STEP, *barriers(step))
            yield from (TileOp("next", warps, WARPS, (), (), group=step) for warps in self.warps)

    def _stage(self, s: Stage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield a stage of all groups, each on its share of the rows."""
        for group, share in enumerate(self._shares(self.frame.shape(s.written[0], block, tile)[0])):
            yield from (self._product if s.is_product else self._rows)(s, block, tile, group, share)

    def _start(self, shares: list[Span]) -> Iterator[TileOp]:
        names = self.frame.phase.names
        starts = {n: w.start for n, w in names.items() if w.start is not None}
        plan_of = self.frame.phase.finish[0] if self.frame.phase.finish else self.frame.stages[0]
        for group, (_, rows) in enumerate(shares):
            fills = [
                Step(Opcode.FILL, self._part(group, n, rows, self.frame.width(n)), (start,))
                for n, start in starts.items()
            ]
            held = self._held(rows, first=True)
            if held or (rows and fills):
                yield self._op("start", plan_of, group, FMA, tuple(fills) if rows else (), held)

    def _finish(self, block: WorkTile, shares: list[Span]) -> Iterator[TileOp]:
        stages = self.frame.phase.finish
        for group, share in enumerate(shares):
            held = self._held(share[1], last=True)
            operations = [op for s in stages for op in self._rows(s, block, WHOLE, group, share)]
            if not operations and held:
                yield self._op("finish", self.frame.stages[-1], group, FMA, (), held)
            for index, op in enumerate(operations):
                is_last = index == len(operations) - 1
                yield TileOp(op.label, op.queue, op.engine, op.steps, held) if is_last and held else op

    def _held(self, rows: int, *, first: bool = False, last: bool = False) -> Slots:
        """Return a group's view of what stays in its place for the whole block."""
        frame = self.frame
        return tuple(self.near[n].front(rows, frame.width(n), frame.fmt(n), first=first, last=last) for n in self.held)

    # ---------------------------------------------------------------- operands

    def _slot(
        self, ring: Ring, n: str, block: WorkTile, tile: Visit, *, first: bool = True, last: bool = True
    ) -> RingTile:
        """Return what a consumer sees of an operand's slot."""
        shape, pitch = self.frame.shape(n, block, tile), self._pitch(n, ring.space)
        return ring.front(*shape, first=first, last=last, stride=pitch)

    def _load(self, n: str, block: WorkTile, tile: Visit, handshake: Slots = ()) -> TileOp:
        source, ring = self.frame.cut(n, block, tile), self.loaded[n]
        slot = ring.fill(source.rows, source.cols, source.fmt, stride=self._pitch(n, ring.space))
        step = Step(Opcode.COPY, slot, (source,), name=n)
        return TileOp(f"{self.frame.label(n)}.load", self.loaders.get(n, self.loader), LDG, (step,), handshake)

    def _stage_operands(self, s: Stage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield the way of a product's operands to shared memory, where they are not loaded there."""
        for n in s.rows[0].srcs:
            if n in self.shared and self.loaded[n] is not self.near[n] and self._ends(n, s)[0]:
                yield from self._store(n, block, tile)

    def _store(self, n: str, block: WorkTile, tile: Visit, *, last: bool = True) -> Iterator[TileOp]:
        """Yield every group's share of an operand on its way to shared memory; ``last``: its registers are released."""
        shape = self.frame.shape(n, block, tile)
        for group, (row, count) in enumerate(self._shares(shape[0])):
            src = self._slot(self.loaded[n], n, block, tile, last=last).part(row, count)
            yield self._put(n, block, tile, group, (row, count), src)

    def _put(self, n: str, block: WorkTile, tile: Visit, group: int, share: Span, src: RingTile | Tile) -> TileOp:
        """Return the store of a group's share of an operand to shared memory."""
        shape = self.frame.shape(n, block, tile)
        dst = self.near[n].fill(*shape, stride=self._pitch(n, SMEM)).part(*share)
        steps = (Step(Opcode.COPY, dst, (src,)),) if share[1] else ()
        slots = (dst,) if isinstance(src, Tile) else (src, dst)
        # Whose lanes read it decides nothing here: the first product's plan says how wide lanes access.
        label = f"{self.frame.label(n)}.store"
        return self._op(label, self.frame.stages[0], group, LSU, steps, () if share[1] else slots)

    def _ends(self, n: str, s: Stage) -> tuple[bool, bool]:
        """Return whether a product is the first, and the last, of those that read an operand's tile."""
        readers = [p for p in self.how if n in p.rows[0].srcs]
        return s is readers[0], s is readers[-1]

    def _awaited(self, s: Stage, block: WorkTile, tile: Visit) -> Slots:
        """Return what a product waits for beside its operands."""
        return ()

    def _operand(self, n: str, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Operand:
        """Return an operand of a product: of the group's own rows where it has the axis of rows."""
        frame, (row, rows) = self.frame, share
        if n not in self.near:
            return self._part(group, n, rows, frame.cols(n, block, tile))
        ring, axis = self.near[n], frame.axes(n)[0]
        if n in self.frame.held:
            height = frame.phase.sizes[axis] if axis == frame.row_axis else frame.size(block, axis, tile)
            pitch = self._pitch(n, ring.space)
            slot = ring.front(height, frame.width(n), frame.fmt(n), first=False, last=False, stride=pitch)
        elif n in frame.views.values():
            # Another product reads a part of it, and releases it.
            slot = ring.peek(*frame.shape(n, block, tile), stride=self._pitch(n, SMEM))
        else:
            first, last = self._ends(n, s)
            is_kept = self.keeps_operands and n not in self.prepared
            slot = self._slot(ring, n, block, tile, first=first, last=last and not is_kept)
        if s.rows[0].attributes.transpose_a and n == s.rows[0].srcs[0]:
            return slot.part(0, slot.rows, row, rows)
        return slot.part(row, rows) if axis == frame.row_axis else slot

    # ---------------------------------------------------------------- stages

    def _product(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a product on a group's rows: in the accumulator of its name, or converted from its own."""
        (row,), rows, how = s.rows, share[1], self.how[s]
        if not rows:
            near = set(self.near).difference(self.frame.held)
            views = [self._operand(n, s, block, tile, group, share) for n in row.srcs if n in near]
            yield self._op(f"{s.name}.mma", s, group, TENSOR, (), tuple(views))  # type: ignore[arg-type]
            return
        cols = self.frame.cols(row.dst, block, tile)
        dst = self._part(group, row.dst, rows, cols)
        operands = tuple(self._operand(n, s, block, tile, group, share) for n in row.srcs)
        accumulator = self.parts[group].get(_accumulator(s))
        total = dst if accumulator is None else accumulator.part(0, rows, 0, cols)
        if accumulator is not None and how.accumulate:  # it goes on from what is kept
            yield self._op(f"{s.name}.widen", s, group, FMA, (Step(Opcode.CAST, total, (dst,)),))
        step = Step(Opcode.MATMUL, total, operands, how, row.dst if accumulator is None else "")
        yield self._op(f"{s.name}.mma", s, group, TENSOR, (step,), self._awaited(s, block, tile))
        if accumulator is not None:
            step = Step(Opcode.CAST, dst, (total,), name=row.dst)
            yield self._op(f"{s.name}.convert", s, group, FMA, (step,))
        yield from self._stores(s, block, tile, group, share)

    def _rows(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a table's rows as runs on FMA and, where there is one, exponentials of tiles on MUFU.

        What a mask keeps follows from row and column: lanes compare and select, nothing is loaded.
        """
        if not share[1]:
            return
        run: list[Step] = []
        steps = bind(self.tables[s], self._bindings(s, block, tile, group, share), s.name)
        for step in self.frame.with_computed_masks(steps):
            if self.tiling.lanes and step.opcode is Opcode.EXP and step.dst.cols > 1:
                yield self._op(s.name, s, group, FMA, tuple(run))
                yield self._op(step.name, s, group, MUFU, (step,))
                run = []
            else:
                run.append(step)
        yield self._op(s.name, s, group, FMA, tuple(run))
        for n in s.written if self.tiling.exchanges else ():
            if self.frame.places[n] == "up":
                p, plan = self._part(group, n, share[1], self.frame.cols(n, block, tile)), self._plan(s)
                assert plan is not None
                how = Attributes(warp=replace(plan, exchange=True))
                step = Step(Opcode.COPY, p, (p,), how)
                yield TileOp(f"{self.frame.label(n)}.exchange", self.warps[group], LSU, (step,))
        yield from self._stores(s, block, tile, group, share)

    def _bindings(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> dict[str, Source]:
        frame = self.frame
        bound: dict[str, Source] = dict(frame.phase.constants)
        for n in (*s.written, *s.read):
            root = frame.storage.get(n, n)
            if root in self.near and root not in s.written:
                once = root not in self.held  # what is held is taken and released at the block's ends
                slot = self._slot(self.near[root], n, block, tile, first=once, last=once)
                bound[n] = slot.part(*frame.rows_of(n, share))
            elif n in frame.phase.masks:
                if n in tile.only or frame.is_everywhere(n):
                    bound[n] = frame.mask_cut(n, block, tile, share)
            elif n in frame.phase.names:
                bound[n] = self._part(group, n, frame.rows_of(n, share)[1], frame.cols(n, block, tile))
        bound.update(frame.phase.per_tile(tile) if tile.cols else {})
        return bound

    def _stores(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        for n in s.written:
            if n in self.prepared:
                made = self._part(group, n, share[1], self.frame.cols(n, block, tile))
                yield self._put(n, block, tile, group, share, made)
            if self.frame.places[n] == "out":
                where: GlobalTile = self.frame.cut(n, block, tile, share)
                part = self._part(group, n, share[1], where.cols)
                yield self._op(f"{self.frame.label(n)}.store", s, group, LDG, (Step(Opcode.COPY, where, (part,)),))

    # ---------------------------------------------------------------- operations

    def _part(self, group: int, n: str, rows: int, cols: int) -> Tile:
        return self.parts[group][self.frame.storage[n]].part(0, rows, 0, cols)

    def _op(
        self, label: str, s: Stage, group: int, engine: str, steps: tuple[Step, ...], handshake: Slots = ()
    ) -> TileOp:
        """Return an operation of a group's queue, its steps laid out in the lanes of the stage's plan."""
        if (plan := self._plan(s)) is not None:
            steps = tuple([Step(x.opcode, x.dst, x.srcs, _in_lanes(x.attributes, plan), x.name) for x in steps])
        return TileOp(label, self.warps[group], engine, steps, handshake)

    def _plan(self, s: Stage) -> WarpPlan | None:
        """Return the plan of a stage's lanes: that of the axis of columns it works on first."""
        if not self.tiling.lanes:
            return None
        names = (s.rows[0].dst,) if s.is_product else (*s.read, *s.written)
        axes = (self.frame.axes(n) for n in names if n in self.frame.phase.names)
        return next((self.tiling.lanes[a[1]] for a in axes if len(a) > 1), None)


@lru_cache
def _in_lanes(attributes: Attributes, plan: WarpPlan) -> Attributes:
    """Return attributes of a step whose tiles lie in the lanes of a plan."""
    return replace(attributes, warp=plan)


def _accumulator(s: Stage) -> str:
    return f"{s.name} accumulator"


#: A line of the cache that loads of global memory come through (CUDA C++ Programming Guide, global memory).
LINE_BYTES = 128


class GroupBlock(ResidentBlock):
    """The ``number``-th resident block of a core with concurrent warp groups: software stages, warps' other work."""

    @property
    def work(self) -> GroupWork:
        """How a group of warps executes operations by default."""
        work = self.tiling.work or GroupWork(GROUP_WARPS)
        return work if self.how else replace(work, is_even=True)

    def _tile(self, stages: tuple[Stage, ...], block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        products = [s for s in stages if s.is_product]
        operands = tuple(dict.fromkeys(n for s in products for n in s.rows[0].srcs if n in self.shared))
        if not tile.cols or not products:
            yield from super()._tile(stages, block, tile)
            if operands and not self.frame.phase.loop_axis:  # the next block takes their place once this one has ended
                held = tuple(self._slot(self.near[n], n, block, tile, first=False) for n in operands)
                yield from (self._op("end", stages[-1], g, FMA, (), held) for g in range(len(self.warps)))
            return
        if self.tiling.slice_elements:
            yield from self._sliced_tile(stages, block, tile)
        elif self.tiling.stages == 1 and operands:
            yield from self._staged_tile(stages, operands, block, tile)
        else:
            yield from super()._tile(stages, block, tile)
        if self.work.is_specialised:
            return
        slots: Slots = ()
        if self.tiling.stages == 1 and operands and not self.tiling.slice_elements:
            n = operands[0]
            slots = (self._slot(self.loaded[n], n, block, tile, first=False, last=True),)
        spilled = self.work.charged(*self.tiling.due("local"))
        ends_here = not self._waits_at_once  # else after the last product, before what follows it
        if self.keeps_operands and ends_here:
            slots = tuple(self._slot(self.near[n], n, block, tile, first=False, last=True) for n in operands)
        copies = 0 if self.tiling.stages == 1 else self._copies(block, tile)
        step = replace(self._step(), copies=copies)
        for warps in self.warps:
            if spilled.charges:
                yield TileOp("spill", warps, WARPS, (), (), group=spilled)
            if ends_here:
                yield TileOp("next", warps, WARPS, (), slots, group=step)

    def _stage(self, s: Stage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield a stage, and after the last product of a tile the copies of a later one into the slots that it leaves.

        They go beside the arithmetic that follows it, where there is any.
        """
        stages = self._loop_of(s)
        last = max((i for i, p in enumerate(stages) if p.is_product), default=-1)
        operations = super()._stage(s, block, tile)
        if last < 0 or not tile.cols or not self._waits_at_once:
            yield from operations
            return
        follows, copies = stages[last + 1 :], self._copies(block, tile)
        for op in operations:
            if op.group is not None and op.engine == FMA and s in follows[:1]:
                yield replace(op, group=replace(op.group, copies=copies))
            else:
                yield op
        if s is not stages[last]:
            return
        read = {n: None for p in stages if p.is_product for n in p.rows[0].srcs if n in self.shared}
        slots = tuple(self._slot(self.near[n], n, block, tile, first=False, last=True) for n in read)
        for warps in self.warps:
            yield TileOp("next", warps, WARPS, (), slots, group=self._step())
            if not follows:
                yield TileOp("copies", warps, WARPS, (), (), group=self._beside(s, replace(self.work, copies=copies)))

    def _loop_of(self, s: Stage) -> tuple[Stage, ...]:
        """Return the stages of the loop that a stage is in; none outside loops."""
        return next((loop.stages for loop in self.frame.phase.loops if s in loop.stages), ())

    def _step(self) -> GroupWork:
        """Return what else warps do in an iteration."""
        return self.work.charged(*self.tiling.due("tile"))

    def _copies(self, block: WorkTile, tile: Visit) -> int:
        """Return how often each thread copies 16 bytes of a tile."""
        return sum(self._accesses(n, block, tile) for n in self.visited if self._is_copied(n))

    @property
    def _waits_at_once(self) -> bool:
        """Whether warps wait for all copies of a tile at its begin, as compilers' loops of several stages do."""
        return self.tiling.stages > 1 and not self.work.is_specialised and not self.tiling.slice_elements

    def _leads(self, s: Stage) -> bool:
        """Return whether a product is the first of a tile whose copies it waits for, all of them."""
        return self._waits_at_once and s is next((p for p in self._loop_of(s) if p.is_product), None)

    def _ends(self, n: str, s: Stage) -> tuple[bool, bool]:
        first, last = super()._ends(n, s)
        return self._leads(s) if self._waits_at_once else first, last

    def _awaited(self, s: Stage, block: WorkTile, tile: Visit) -> Slots:
        """Return the tile's other operands, where a product is the first that waits for its copies."""
        if not self._leads(s):
            return ()
        others = dict.fromkeys(n for p in self.how for n in p.rows[0].srcs if n in self.visited and n in self.shared)
        return tuple(self._slot(self.near[n], n, block, tile, last=False) for n in others if n not in s.rows[0].srcs)

    def _beside(self, s: Stage, work: GroupWork) -> GroupWork:
        """Return work beside which a product goes on, if the warps waited for its start alone."""
        product, (left, _), frame = self._product_work(s), s.rows[0].srcs, self.frame
        if product.generation != "wgmma" or product.is_awaited or product.is_serial:
            return work
        rows = self.work.rows or frame.phase.sizes[frame.row_axis] // self.tiling.groups
        columns, depth = (max(n, frame.width(t)) for n, t in ((product.columns, s.rows[0].dst), (product.depth, left)))
        size = rows, columns, frame.size_bytes(left, depth)
        return replace(work, behind=size, across=product.across, repeats=product.repeats)

    def _staged_tile(
        self, stages: tuple[Stage, ...], operands: tuple[str, ...], block: WorkTile, tile: Visit
    ) -> Iterator[TileOp]:
        """Yield a tile whose operands go through registers: each is loaded once the one before is stored.

        The first one's registers are free when the iteration ends, so that its load is waited for.
        """
        shares = self._shares(block.rows)
        for n in self.visited:
            if n not in operands:
                yield self._load(n, block, tile)
        before: Slots = ()
        for n in operands:
            yield self._load(n, block, tile, before)
            before = (self._slot(self.loaded[n], n, block, tile),)
        left = list(operands)
        for s in stages:
            while s.is_product and left and left[0] in s.rows[0].srcs:
                yield from self._store(n := left.pop(0), block, tile, last=n != self.shared[0])
            for group, rows in enumerate(shares):
                yield from (self._product if s.is_product else self._rows)(s, block, tile, group, rows)
            if s.is_product and left:
                yield from self._store(n := left.pop(0), block, tile, last=n != self.shared[0])

    def _sliced_tile(self, stages: tuple[Stage, ...], block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield a tile whose products add up slice by slice, each loaded while the one before is multiplied."""
        for n in self.frame.visited:
            if n not in self.shared:
                yield self._load(n, block, tile)
        for s in stages:
            if s.is_product:
                yield from self._sliced_product(s, block, tile)
            else:
                yield from self._stage(s, block, tile)

    def _sliced_product(self, s: Stage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        frame, how, row, queue = self.frame, self.how[s], s.rows[0], self.warps[0]
        charges = self.tiling.due("slice")
        dst = self._part(0, row.dst, block.rows, frame.cols(row.dst, block, tile))
        k_axis = frame.phase.product_axes(row)[1]
        for span in chunks(frame.size(block, k_axis, tile), self.tiling.slice_elements):
            operands: list[Operand] = []
            for n in row.srcs:
                if n not in self.near:
                    operands.append(self._part(0, n, block.rows, frame.cols(n, block, tile)).part(0, block.rows, *span))
                    continue
                is_row = frame.axes(n)[0] == k_axis
                source = frame.cut(n, block, tile, *((span, None) if is_row else (None, span)))
                shape = source.rows, source.cols, source.fmt
                step = Step(Opcode.COPY, self.loaded[n].fill(*shape), (source,), name=n)
                yield TileOp(f"{frame.label(n)}.load", self.loader, LDG, (step,))
                step = Step(Opcode.COPY, self.near[n].fill(*shape), (self.loaded[n].front(*shape),))
                work = self._slice_work(step.dst).charged(*charges if n == row.srcs[1] else ())
                yield TileOp(f"{frame.label(n)}.store", queue, LSU, (step,), group=work)
                operands.append(self.near[n].front(*shape))
            step = Step(Opcode.MATMUL, dst, tuple(operands), replace(how, accumulate=how.accumulate or span[0] > 0))
            yield TileOp(f"{s.name}.mma", queue, TENSOR, (step,), group=self._product_work(s))

    def _slice_work(self, slot: Operand) -> GroupWork:
        """Return what warps do to bring a slice to shared memory: its rows are parts of a line of the cache."""
        loads = ceil_div(slot.payload_bytes, ACCESS_BYTES * WARP_LANES * self.work.warps)
        passes = 1 + ceil_div(LINE_BYTES, max(1, slot.payload_bytes // slot.rows))
        return replace(self.work, loads=loads, passes=passes)

    def _accesses(self, n: str, block: WorkTile, tile: Visit) -> int:
        """Return how often each thread of a block accesses a tile of an operand."""
        rows, cols, _ = self.frame.shape(n, block, tile)
        each = ACCESS_BYTES * WARP_LANES * self.work.warps * self.tiling.groups
        return ceil_div(self.frame.size_bytes(n, rows * cols), each)

    def _op(
        self, label: str, s: Stage, group: int, engine: str, steps: tuple[Step, ...], handshake: Slots = ()
    ) -> TileOp:
        work: GroupWork | None = None
        if engine == TENSOR:
            work = self._product_work(s)
        elif engine == LSU:
            work = self._store_work(steps)
        elif engine != LDG:
            work = self._rows_work(s)
            if label == "start":
                work = work.charged(*self.tiling.due("block"))
        return TileOp(label, self.warps[group], engine, steps, handshake, group=work)

    def _product_work(self, s: Stage) -> GroupWork:
        left, work = s.rows[0].srcs[0], self.work
        if work.repeats > 1 and left not in self.near:
            work = replace(work, repeats=1, across=work.repeats)
        awaited = not self.how[s].accumulate or self.tiling.stages == 1
        if self.tiling.slice_elements:
            return work.charged(*barriers(work), FENCE)
        columns, depth = self._width(s.rows[0].dst), self._width(left)
        work = replace(work, is_awaited=awaited, columns=columns, depth=depth)
        met = () if work.is_specialised or left not in self.near else barriers(work)
        return work.charged(*met, *self.tiling.due("multiply_add"))

    def _rows_work(self, s: Stage) -> GroupWork:
        """Return how rows are worked on: what has no axis of the loop is repeated by nobody."""
        due: list[Due] = ["element"]
        due += ["output"] if s in self.frame.phase.finish else []
        due += ["score"] if s is next((x for x in self.frame.stages if not x.is_product), None) else []
        names = [n for n in (*s.written, *s.read) if n in self.frame.phase.names]
        work = replace(self.work, columns=max((self._width(n) for n in names), default=0))
        work = work.charged(*self.tiling.due(*due))
        if work.repeats == 1:
            return work
        if any(self.frame.loop_axis in self.frame.axes(n) for n in names):
            return replace(work, is_serial=False)
        return replace(work, repeats=1, across=work.repeats)

    def _width(self, n: str) -> int:
        """Return the columns that are computed of a name, whatever a ragged tile has."""
        axes = self.frame.axes(n)
        return self.tiling.widths.get(axes[1], 0) if len(axes) > 1 else 0

    def _store_work(self, steps: tuple[Step, ...]) -> GroupWork:
        """Return what a warp group does where an operand goes to shared memory through its registers.

        What rows make of it is there for single warps' products as it is: fragments are loaded as they would be of B.
        """
        if self.work.generation == "mma" and any(isinstance(step.srcs[0], Tile) for step in steps):
            return self.work
        size = sum(step.dst.payload_bytes for step in steps)
        loads = ceil_div(size, ACCESS_BYTES * WARP_LANES * self.work.warps)
        return replace(self.work, loads=loads).charged(*barriers(self.work), FENCE)
