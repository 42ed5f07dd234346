"""One resident block of a multiprocessor: the loop of its warps, tile after tile.

Operands arrive tile by tile. The loader is a separate queue, because it does not wait for other work.  It loads
operands directly into shared memory, or ahead of time into registers, from which every warp group stores its share to
shared memory (*staged*).  Every group multiplies all operands.  Values between products and rows never leave the
registers.  Every operation is the sequence of all instructions of its stage.

`ResidentBlock` decides the order: the times of loads and stores, and the sequence of stages and rows.  Three parts
decide the rest, each of them independently:

- `name_places.BlockPlaces`: the place of each name, in the view of each stage, and the users of slots;
- `group_work.Works`: the work of warps in an operation besides its steps, where warp groups run concurrently;
- `group_turns.WarpTurns`: the waits of groups, where warps have different roles.

With ``stages``, an iteration ends when a later tile's copies are issued, and the slots of its operands become free:
from two stages on each load is awaited, and with three, loads run one tile ahead.  With one stage, operands pass
through registers: the registers of the first operand become free when the iteration ends, so that its load is awaited.

Not modelled: with FP16 scores and FP32 outputs a lane rescales rows whose factor another lane has, which takes one
shuffle per tile.  Products and sums of softmax are two steps, unless the kernel computes them as one multiply-add.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise, takewhile
from math import prod
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.formats.layout.fragment import WARP_LANES
from npusim.kernels.form.phase import WHOLE, bind
from npusim.machines.decisions import LoopWork
from npusim.machines.sm.core import FMA, LDG, LSU, MUFU, RF, SM, SMEM, TENSOR, WARPS
from npusim.machines.sm.group_turns import SIGNAL, WarpTurns
from npusim.machines.sm.group_work import GroupWork, Works, work_of
from npusim.machines.sm.name_places import BlockPlaces, accumulator
from npusim.program.ir.op import COMPARED, Attributes, Opcode, Step, TileOp
from npusim.program.ir.tile import RingTile, Tile
from npusim.units import ceil_div, chunks

#: Largest number of keys of a tile with which compilers write masks among other instructions: from 64 on they pack the
#: predicates (LOP3, SEL) before the first exponential.  source: SASS of Triton 3.6 for sm_90, flash tiles of 16 to 256
#: keys
PREDICATED_KEYS = 32

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping

    from npusim.kernels.form.phase import Stage, TileLoop, Visit, WorkTile
    from npusim.machines.frame import Frame, Span
    from npusim.machines.sm.core import SmCore, SmTiling
    from npusim.machines.sm.name_places import Handshake
    from npusim.program.ir.op import WarpPlan
    from npusim.program.ir.tile import Operand
    from npusim.program.ir.tile_program import Item


class ResidentBlock:
    """The ``number``-th resident block.

    A warp group that has no rows of a ragged tile has operations without steps, so that it stays in step with the
    others.
    """

    def __init__(self, number: int, frame: Frame, core: SmCore, tiling: SmTiling) -> None:
        self.frame, self.tiling, self.decided = frame, tiling, tiling.decided
        self.warps = tuple(f"{SM}.B{number}W{g}" for g in range(tiling.decided.groups))
        self.turns = WarpTurns(number, frame, core, tiling.decided, self.warps) if tiling.decided.alternates else None
        self.how = {s: frame.product_attributes(s, core.arithmetic) for s in frame.stages if s.is_product}
        _check_transposed(frame, core, self.how)
        _check_whole(frame, tiling)
        self.tables = frame.tables(core.row_sum, along=core.along)
        readers = self.turns.mma if self.turns else self.warps
        self.places = BlockPlaces(number, frame, core, tiling, self.how, self.warps, readers)
        #: All queues of the block.
        storers = (self.places.storer,) if self.places.left else ()
        self.queues = tuple(dict.fromkeys((*self.places.loaders.values(), *storers, *self.warps, *readers)))
        self.works = Works(frame, tiling, self.places) if tiling.has_groups else None
        is_coded = self.decided.code is not None or self.decided.state_loop is not None
        has_turnover = is_coded and bool(self.decided.due("begin"))
        #: The block's place on its core, for each queue of loads: a compiled block loads nothing before it begins.
        self.begun = {
            loader: core.allocator.ring(
                RF, f"{frame.prefix}{loader} begun", 1, 1, producers=(loader,), consumers=self.warps
            )
            for loader in dict.fromkeys(self.places.loaders.values() if has_turnover else ())
        }
        keys = tiling.widths.get(frame.loop_axis or "", 0)
        #: Whether no exponentials of the block run during a tile's masks. There are two cases: a block alone on its
        #: core, whose warps synchronise in each tile, and groups that alternate, which mask all scores before their
        #: maxima.
        self.masks_apart = tiling.masks_apart and keys > PREDICATED_KEYS
        #: Operations of stages that depend only on the shapes of block and tile. The key contains everything on which
        #: they depend.
        self._known: dict[Hashable, tuple[TileOp, ...]] = {}
        # One function for each loop, or for each part of a loop, serves all blocks: blocks with equal contents share a
        # body.
        tile = self._coded_tile if self.decided.loops else self._tile
        self.tiles = {loop: partial(tile, loop.stages) for loop in frame.phase.loops}
        #: How often loads wait for the places of their rows; and a block's first tile if it has waits of its own: its
        #: loads come before the loop, where all places are read together.
        self.lookups = self.decided.loops[0].lookups if self.decided.loops else int(self.decided.awaits_places)
        #: The operand of the loop with the most bytes.
        sizes = {n: frame.size_bytes(n, prod(frame.phase.sizes[a] for a in frame.axes(n))) for n in self.places.visited}
        self.widest = max(sizes, key=lambda n: sizes[n], default="")
        self.firsts = (
            {loop: partial(self._coded_tile, loop.stages, lookups=1) for loop in frame.phase.loops}
            if self.decided.loops and self.lookups > 1
            else {}
        )
        parts = self.turns.cuts if self.turns and self.decided.ahead else ()
        self.cuts, self.alone = (
            [(partial(self._tile, stages, groups=groups, alone=alone), lag) for stages, lag, groups in parts]
            for alone in (False, True)
        )

    # ---------------------------------------------------------------- order

    def items(self, block: WorkTile) -> Iterator[Item]:
        """Yield one block in program order."""
        frame, turns, works = self.frame, self.turns, self.works
        for loader, ring in self.begun.items():
            yield TileOp(
                "begin", loader, WARPS, (), (ring.fill(*SIGNAL),), works.begin(len(self.begun)) if works else None
            )
        if works and self.decided.due("warps"):
            yield from (TileOp("warps", warps, WARPS, (), (), works.usual.paying("warps")) for warps in self.warps)
        for n in self.places.held:
            yield self._load(n, block, WHOLE)
        start, finish = self._start(block), self._finish(block)
        yield from turns.started(start) if turns else start
        for loop in frame.phase.loops:
            yield from self._pipelined(block) if self.cuts else self._loop(loop, block)
        yield from turns.finished(finish) if turns else finish
        if works and self.begun:
            slots = tuple(ring.front(*SIGNAL) for ring in self.begun.values())
            for warps in self.warps:
                yield TileOp("end", warps, WARPS, (), slots, works.usual.paying("end"))

    def _pipelined(self, block: WorkTile) -> Iterator[Item]:
        """Yield the loop in parts; the slots of the block's operands become free after their last product, before the
        last part of the loop.
        """
        turns, frame, end = self.turns, self.frame, block.tile_count + 1
        assert turns is not None
        both = (frame.stretches_of_steps(cuts, [(0, block)], end) for cuts in (self.cuts, self.alone))
        loops = [
            (here if 0 < start < end - 1 else by_itself)
            for (start, _, here), (*_, by_itself) in zip(*both, strict=True)
        ]
        yield from filter(None, loops[:-1])
        yield from turns.freed([self.places.held_slots(n, last=True) for _, n in self._shares(block.rows)])
        yield from filter(None, loops[-1:])

    def _loop(self, loop: TileLoop, block: WorkTile) -> Iterator[Item]:
        return self.frame.loop(loop, self.tiles[loop], block, self.firsts.get(loop))

    def _shares(self, rows: int) -> list[Span]:
        """Return the first row and the number of rows of each warp group; none if there are more groups than rows."""
        count = self.decided.groups
        edges = [rows * g // count for g in range(count + 1)]
        return [(a, b - a) for a, b in pairwise(edges)]

    def _tile(
        self,
        stages: tuple[Stage, ...],
        block: WorkTile,
        tile: Visit,
        *,
        groups: range | None = None,
        alone: bool = False,
        lookups: int | None = None,
    ) -> Iterator[TileOp]:
        """Yield one tile: loads, then each stage between the stores of its products' operands, then the end of an
        iteration. ``groups``: only these groups (loads come with the first group); None: all groups.  ``alone``: its
        product is the first or the last of a block whose products overlap.  ``lookups``: as in `_coded_tile`.
        """
        chain, groups = self._chain(stages, tile), range(self.decided.groups) if groups is None else groups
        before, after = self._stores_around(stages, chain)
        held: Handshake = ()
        if not groups.start:
            yield from self._loads(stages, chain, block, tile, self.lookups if lookups is None else lookups)
        for run in self.turns.runs(stages) if self.turns else [(s,) for s in stages]:
            s = run[-1]
            yield from self._late_loads(s, block, tile)
            for n in before.get(s, ()):
                yield from self._store(n, block, tile, last=n not in chain[:1])
            if s.is_product and self.decided.slice_elements:
                held = yield from self._sliced_product(s, block, tile, held)
                continue
            yield from self._once(run, stages, block, tile, groups, alone=alone)
            for n in after.get(s, ()):
                yield from self._store(n, block, tile, last=n not in chain[:1])
        if self.works:
            yield from self._end(stages, self.works, block, tile, held)
        elif self.tiling.lanes and tile.cols and self.how:
            step = GroupWork(self.decided, pays=("tile",))
            yield from (TileOp("next", warps, WARPS, (), (), step) for warps in self.warps)

    def _coded_tile(
        self, stages: tuple[Stage, ...], block: WorkTile, tile: Visit, *, lookups: int | None = None
    ) -> Iterator[TileOp]:
        """Yield one tile whose work is that of its machine code: one part at the first product, where copies are
        awaited, and the rest after the last product, when the copies of a later tile have begun.

        ``lookups``: how often its loads wait for places; None: as in the loop.
        """
        work = self.decided.loops[-1 if tile.only else 0]
        begun, behind, first = set[str](), set[str](), next((s for s in stages if s.is_product), None)
        for op in self._tile(stages, block, tile, lookups=lookups):
            if not isinstance(op.work, GroupWork) or not tile.cols or first is None:
                yield op
                continue
            loop = LoopWork()
            if op.engine == TENSOR and op.queue not in begun:
                begun.add(op.queue)
                loop = work.part(work.before)
            elif op.queue in behind:
                behind.discard(op.queue)
                loop = work.part(work.after)
            if op.label == "next":
                behind.add(op.queue)
            yield replace(op, work=op.work._replace(loop=loop))

    def _once(
        self,
        run: tuple[Stage, ...],
        stages: tuple[Stage, ...],
        block: WorkTile,
        tile: Visit,
        groups: range,
        *,
        alone: bool,
    ) -> Iterable[TileOp]:
        """Return stages of some groups, and the copies next to them. All blocks and tiles of one shape have one
        sequence, if none of the stages depends on a place.
        """
        if any(self.frame.is_placed(s, tile) for s in run):
            return self._run(run, stages, block, tile, groups, alone=alone)
        key = run, stages, groups, alone, block.sizes, tile.shape
        if key not in self._known:
            self._known[key] = tuple(self._run(run, stages, block, tile, groups, alone=alone))
        return self._known[key]

    def _run(
        self,
        run: tuple[Stage, ...],
        stages: tuple[Stage, ...],
        block: WorkTile,
        tile: Visit,
        groups: range,
        *,
        alone: bool,
    ) -> Iterable[TileOp]:
        """Return stages of some groups, and the copies next to the last of them."""
        ops = self._of_groups(run, block, tile, groups, alone=alone)
        return self._with_copies(run[-1], stages, ops, self.works, block, tile) if self.works else ops

    def _of_groups(
        self, run: tuple[Stage, ...], block: WorkTile, tile: Visit, groups: range, *, alone: bool
    ) -> Iterator[TileOp]:
        """Yield stages of some groups, group by group, each on its share of the rows."""
        for group in groups:
            for s in run:
                share = self._share(self.frame.led_by(s), block, tile, group)
                ops = (self._product if s.is_product else self._rows)(s, block, tile, group, share)
                if self.turns and s.is_product:
                    ops = self.turns.product(s, group, ops, alone=alone)
                elif self.turns and tile.cols:
                    ops = self.turns.rows(s, group, ops, self.places.tiles[group])
                yield from ops

    def _share(self, n: str, block: WorkTile, tile: Visit, group: int) -> Span:
        """Return the rows of a name that belong to a warp group."""
        return self._shares(self.frame.shape(n, block, tile)[0])[group]

    def _start(self, block: WorkTile) -> Iterator[TileOp]:
        names = self.frame.phase.names
        starts = {n: w.start for n, w in names.items() if w.start is not None and not w.first}
        firsts = {n: w.first for n, w in names.items() if w.first}
        like = self.frame.phase.finish[0] if self.frame.phase.finish else self.frame.stages[0]
        for group, (_, rows) in enumerate(self._shares(block.rows)):
            counts = [(n, start, self._share(n, block, WHOLE, group)[1]) for n, start in starts.items()]
            fills = [
                Step(Opcode.FILL, self.places.part(group, n, count, self.frame.width(n)), (start,))
                for n, start, count in counts
                if count
            ]
            held = self.places.held_slots(rows, first=True)
            if held or fills:
                op = self._op("start", like, group, FMA, tuple(fills), held)
                yield replace(op, work=self.works.start(like)) if self.works else op
            for n, first in firsts.items():
                source = self.frame.cut(first, block, WHOLE, self._share(n, block, WHOLE, group))
                state = self.places.part(group, n, source.rows, source.cols)
                if source.rows:
                    step = Step(Opcode.COPY, state, (source,))
                    yield self._op(f"{self.frame.label(first)}.load", like, group, LDG, (step,))

    def _finish(self, block: WorkTile) -> Iterator[TileOp]:
        stages = self.frame.phase.finish
        for group, (_, rows) in enumerate(self._shares(block.rows)):
            held = () if self.cuts else self.places.held_slots(rows, last=True)
            operations = [
                op
                for s in stages
                for op in self._rows(s, block, WHOLE, group, self._share(self.frame.led_by(s), block, WHOLE, group))
            ]
            if not operations and (held or self.cuts):
                yield self._op("finish", self.frame.stages[-1], group, FMA, (), held)
            yield from operations[:-1]
            yield from (replace(op, handshake=held) for op in operations[-1:])

    def _with_copies(
        self, s: Stage, stages: tuple[Stage, ...], ops: Iterable[TileOp], works: Works, block: WorkTile, tile: Visit
    ) -> Iterator[TileOp]:
        """Yield a stage, and after a tile's last product the copies of a later tile into the freed slots.

        The copies overlap with the arithmetic that follows, if there is any; so does the rest of the product.
        """
        last = max((i for i, p in enumerate(stages) if p.is_product), default=-1)
        if last < 0 or not tile.cols or not self.places.waits_at_once:
            yield from ops
            return
        follows, copies = stages[last + 1 :], works.copies(block, tile)
        for op in ops:
            is_beside = op.engine == FMA and s in follows[:1]
            work = works.beside(stages[last], work_of(op)._replace(copies=copies)) if is_beside else op.work
            yield replace(op, work=work) if is_beside else op
        if s is not stages[last]:
            return
        slots = self.places.released((*self.places.operands_of(stages), *self.places.for_rows), block, tile)
        for warps in self.warps:
            yield TileOp("next", warps, WARPS, (), slots, works.iteration())
            if not follows:
                beside = works.beside(s, works.usual._replace(copies=copies))
                yield TileOp("copies", warps, WARPS, (), (), beside)

    def _end(
        self, stages: tuple[Stage, ...], works: Works, block: WorkTile, tile: Visit, held: Handshake
    ) -> Iterator[TileOp]:
        """Yield the operations after the stages of a tile, or of a block without a loop: slots are released, and
        registers are spilled.
        """
        places, operands, stage_count = self.places, self.places.operands_of(stages), self.decided.stages
        if not self.frame.loop_axis and operands:  # the next block uses their place when this block has ended
            slots, work = places.released(operands, block, tile), works.of(stages[-1], FMA, ())
            yield from (TileOp("end", warps, FMA, (), slots, work) for warps in self.warps)
        if not tile.cols or self.decided.roles != "alike" or not any(s.is_product for s in stages):
            return
        slots = places.released(operands, block, tile) if places.keeps_operands else held
        if chain := self._chain(stages, tile):
            slots = (places.slot(places.loaded[chain[0]], chain[0], block, tile, first=False),)
        step, spills = works.iteration(0 if stage_count == 1 else works.copies(block, tile)), works.spills()
        for warps in self.warps:
            yield from (TileOp("spill", warps, WARPS, (), (), work) for work in spills)
            if not places.waits_at_once:  # otherwise after the last product, before the operations that follow
                yield TileOp("next", warps, WARPS, (), slots, step)

    # ---------------------------------------------------------------- operands

    def _chain(self, stages: tuple[Stage, ...], tile: Visit) -> tuple[str, ...]:
        """Return the operands of one stage, each of which is loaded when the previous one has been stored."""
        is_chained = self.decided.stages == 1 and tile.cols and not self.decided.slice_elements
        return self.places.operands_of(stages) if is_chained else ()

    def _loads(
        self, stages: tuple[Stage, ...], chain: tuple[str, ...], block: WorkTile, tile: Visit, lookups: int
    ) -> Iterator[TileOp]:
        """Yield the loads of a tile; slices of a product's sum are loaded during the product."""
        read, places = {n for s in stages for n in s.read}, self.places
        before: Handshake = ()
        late = {n for names in places.late.values() for n in names}
        for n in places.visited:
            if n in read - late and n not in chain and not (self.decided.slice_elements and n in places.shared):
                yield from self._in_pieces(n, block, tile, lookups)
        for n in chain:
            yield self._load(n, block, tile, before, lookups=lookups if n == chain[0] or not self.decided.loops else 0)
            before = (places.slot(places.loaded[n], n, block, tile),)

    def _late_loads(self, s: Stage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield the loads of operands that wait until all warps are at a product."""
        names, places = self.places.late.get(s, ()), self.places
        if not names or self.works is None:
            return
        begun = places.begun.fill(1, 1, "int8")
        yield from (TileOp("begun", warps, WARPS, (), (begun,), self.works.usual) for warps in self.warps)
        for n in names:
            yield self._load(n, block, tile, (places.begun.front(1, 1, "int8"),) if n == names[0] else ())

    def _stores_around(
        self, stages: tuple[Stage, ...], chain: tuple[str, ...]
    ) -> tuple[dict[Stage, list[str]], dict[Stage, list[str]]]:
        """Return the stores to shared memory before each stage, and after it, for operands that are not loaded there.

        A product's operands are stored when the corresponding result of rows exists, or just before that; operands of a
        chain are stored one after a product whose own operands are stored before it.
        """
        before: dict[Stage, list[str]] = {}
        after: dict[Stage, list[str]] = {}
        places, left = self.places, list(chain)
        for s in stages if not self.decided.slice_elements else ():
            srcs = s.rows[0].srcs if s.is_product else ()
            if chain:
                before[s] = list(takewhile(srcs.__contains__, left))
                after[s] = left[len(before[s]) :][:1] if srcs else []
                del left[: len(before[s]) + len(after[s])]
                continue
            # The result that rows pass to the product contains the product's operands.
            fed = [p for p in stages if p.is_product and set(s.written) & set(p.rows[0].srcs) and not s.is_product]
            is_first = s.is_product and not any(self.frame.places[n] == "up" for n in srcs)
            before[s] = places.stored_for(s) if is_first else []
            after[s] = [n for p in fed for n in places.stored_for(p)]
        return before, after

    def _load(
        self, n: str, block: WorkTile, tile: Visit, handshake: Handshake = (), *, lookups: int | None = None
    ) -> TileOp:
        source, ring = self.frame.cut(n, block, tile), self.places.loaded[n]
        shape = (source.rows * source.cols, 1) if len(self.frame.axes(n)) == 1 else (source.rows, source.cols)
        slot = ring.fill(*shape, source.fmt, stride=self.places.pitch(n, ring.space))
        waits = (self.lookups if lookups is None else lookups) if n in self.frame.phase.looked_up else 0
        how, state = Attributes(lookups=waits), self.decided.state_loop
        if state is not None and n == self.widest:
            how = replace(how, memory_waits=state.waits, near_waits=state.near_waits)
        if self.decided.awaited and n in self.places.visited:
            how = replace(how, awaited=self.decided.awaited)
        if self.decided.access_bytes and ring.space == RF:
            each = self.decided.access_bytes * WARP_LANES * self.decided.warps
            how = replace(how, accesses=ceil_div(source.payload_bytes, each))
        step = Step(Opcode.COPY, slot, (source,), how, name=n)
        return TileOp(f"{self.frame.label(n)}.load", self.places.loaders[n], LDG, (step,), handshake)

    def _in_pieces(self, n: str, block: WorkTile, tile: Visit, lookups: int | None) -> Iterator[TileOp]:
        """Yield the loads of an operand: one, or one for each piece that the kernel copies at a time."""
        whole, axes, pieces = self._load(n, block, tile, lookups=lookups), self.frame.axes(n), self.frame.phase.pieces
        axis = next((a for a in axes if a in pieces and n in self.places.shared), None)
        size = self.frame.size(block, axis, tile) if axis else 0
        if axis is None or size <= pieces[axis]:
            yield whole
            return
        (step,), is_down = whole.steps, axes[0] == axis
        assert isinstance(step.dst, RingTile)
        for at, count in chunks(size, pieces[axis]):
            span = (at, count)
            source = self.frame.cut(n, block, tile, *((span, None) if is_down else (None, span)))
            part = step.dst.part(*span) if is_down else step.dst.part(0, step.dst.rows, *span)
            slot = part.held(first=at == 0, last=at + count == size)
            yield replace(whole, steps=(replace(step, dst=slot, srcs=(source,)),))

    def _store(self, n: str, block: WorkTile, tile: Visit, *, last: bool = True) -> Iterator[TileOp]:
        """Yield the move of every group's share of an operand to shared memory; ``last``: its registers are
        released.
        """
        shape = self.frame.shape(n, block, tile)
        for group, (row, count) in enumerate(self._shares(shape[0])):
            src = self.places.slot(self.places.loaded[n], n, block, tile, last=last).part(row, count)
            yield self._put(n, block, tile, group, (row, count), src)

    def _put(self, n: str, block: WorkTile, tile: Visit, group: int, share: Span, src: RingTile | Tile) -> TileOp:
        """Return the store of a group's share of an operand to shared memory."""
        shape = self.frame.shape(n, block, tile)
        dst = self.places.near[n].fill(*shape, stride=self.places.pitch(n, SMEM)).part(*share)
        steps = (Step(Opcode.COPY, dst, (src,)),) if share[1] else ()
        slots = (dst,) if isinstance(src, Tile) else (src, dst)
        # The reading lanes have no effect here: the first product's plan decides the width of an access of a lane.
        label = f"{self.frame.label(n)}.store"
        return self._op(label, self.frame.stages[0], group, LSU, steps, () if share[1] else slots)

    # ---------------------------------------------------------------- stages

    def _product(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a product on a group's rows: in the accumulator of its name, or converted from another."""
        (row,), rows, how, places = s.rows, share[1], self.how[s], self.places
        if not rows:
            near = set(places.near).difference(self.frame.held)
            views = [places.operand(n, s, block, tile, group, share) for n in row.srcs if n in near]
            awaited = places.awaited(s, block, tile)
            yield self._op(f"{s.name}.mma", s, group, TENSOR, (), (*views, *awaited))  # type: ignore[arg-type]
            return
        cols = self.frame.cols(row.dst, block, tile)
        dst = places.part(group, row.dst, rows, cols)
        operands = tuple(places.operand(n, s, block, tile, group, share) for n in row.srcs)
        own = places.tiles[group].get(accumulator(s))
        total = dst if own is None else own.part(0, rows, 0, cols)
        if own is not None and how.accumulate:  # the product continues from the stored sum
            yield self._op(f"{s.name}.widen", s, group, FMA, (Step(Opcode.CAST, total, (dst,)),))
        step = Step(Opcode.MATMUL, total, operands, how, row.dst if own is None else "")
        yield self._op(f"{s.name}.mma", s, group, TENSOR, (step,), places.awaited(s, block, tile))
        if own is not None:
            step = Step(Opcode.CAST, dst, (total,), name=row.dst)
            yield self._op(f"{s.name}.convert", s, group, FMA, (step,))
        yield from self._results(s, block, tile, group, share)

    def _sliced_product(
        self, s: Stage, block: WorkTile, tile: Visit, held: Handshake
    ) -> Generator[TileOp, None, Handshake]:
        """Yield a product that adds up slice by slice; each slice is loaded while the previous one is multiplied.

        Operands that rows compute are stored first, which releases ``held``; no slice is loaded before that. Return the
        registers of its last slices, which the next operation releases.
        """
        frame, places, works, how = self.frame, self.places, self.works, self.how[s]
        (row,), queue = s.rows, self.warps[0]
        assert works is not None
        dst = places.part(0, row.dst, block.rows, frame.cols(row.dst, block, tile))
        k_axis = frame.phase.product_axes(row)[1]
        result = [n for n in row.srcs if n not in places.near]
        wholes = {n: places.part(0, n, block.rows, frame.cols(n, block, tile)) for n in result}
        for n, whole in wholes.items():
            put = works.slice(n, whole, is_made=True)
            yield TileOp(f"{frame.label(n)}.put", queue, LSU, (), held, put)
        size = frame.size(block, k_axis, tile)
        for span in chunks(size, self.decided.slice_elements):
            operands: list[Operand] = []
            held, is_last = (), sum(span) == size
            for n in row.srcs:
                if n in wholes:
                    operands.append(wholes[n].part(0, block.rows, *span))
                    continue
                is_row = frame.axes(n)[0] == k_axis
                source = frame.cut(n, block, tile, *((span, None) if is_row else (None, span)))
                shape, ring = (source.rows, source.cols, source.fmt), places.loaded[n]
                step = Step(Opcode.COPY, ring.fill(*shape), (source,), name=n)
                yield TileOp(f"{frame.label(n)}.load", places.loaders[n], LDG, (step,))
                step = Step(Opcode.COPY, places.near[n].fill(*shape), (ring.front(*shape, last=not is_last),))
                work = works.slice(n, step.dst)
                work = work.paying("slice") if n == row.srcs[1] else work
                yield TileOp(f"{frame.label(n)}.store", queue, LSU, (step,), work=work)
                operands.append(places.near[n].front(*shape))
                held += (ring.front(*shape, first=False),) if is_last else ()
            step = Step(Opcode.MATMUL, dst, tuple(operands), replace(how, accumulate=how.accumulate or span[0] > 0))
            yield TileOp(f"{s.name}.mma", queue, TENSOR, (step,), work=works.product(s))
        return held

    def _rows(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a table's rows as runs on FMA, and the exponentials of tiles on MUFU if there is such a pipe.

        A mask follows from row and column: lanes compare and select, no mask is loaded.
        """
        if not share[1]:
            if slots := self.places.slots_of_rows(s, block, tile):
                yield self._op(s.name, s, group, FMA, (), slots)
            for n in s.written:
                if n in self.places.prepared:
                    yield self._put(
                        n, block, tile, group, share, self.places.part(group, n, 0, self.frame.cols(n, block, tile))
                    )
            return
        run: list[Step] = []
        steps = bind(self.tables[s], self.places.bindings(s, block, tile, group, share), s.name)
        for step in self.frame.with_computed_masks(steps):
            if self.tiling.lanes and step.opcode is Opcode.EXP and step.dst.cols > 1:
                yield self._op(s.name, s, group, FMA, tuple(run))
                yield self._op(step.name, s, group, MUFU, (step,))
                run = []
            else:
                run.append(step)
        if at := self._masks_end(run):
            masks = self._op(s.name, s, group, FMA, tuple(run[:at]))
            op = self._op(s.name, s, group, FMA, tuple(run[at:]))
            work = work_of(op)
            left = tuple(due for due in work.pays if due != "score")  # the masks have the cost of scores
            yield from (masks, replace(op, work=work._replace(pays=left)))
        else:
            yield self._op(s.name, s, group, FMA, tuple(run))
        for n in s.written if self.decided.exchanges else ():
            if self.frame.places[n] == "up":
                p, plan = self.places.part(group, n, share[1], self.frame.cols(n, block, tile)), self._plan(s)
                assert plan is not None
                how = Attributes(warp=replace(plan, exchange=True))
                step = Step(Opcode.COPY, p, (p,), how)
                yield TileOp(f"{self.frame.label(n)}.exchange", self.warps[group], LSU, (step,))
        yield from self._results(s, block, tile, group, share)

    def _masks_end(self, steps: list[Step]) -> int:
        """Return the number of a softmax's steps up to its last mask if masks are a separate operation, otherwise 0."""
        begin = next((i for i, x in enumerate(steps) if x.opcode is Opcode.ROW_MAX), 0) if self.masks_apart else 0
        masks = (i + 1 for i, x in enumerate(steps[:begin]) if x.opcode is Opcode.SELECT)
        return max((i for i in masks if steps[i - 1].attributes.variant != COMPARED), default=0)

    def _results(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield the stores of a stage's results: to shared memory for products, or to the output."""
        for n in s.written:
            if n in self.places.prepared:
                result = self.places.part(group, n, share[1], self.frame.cols(n, block, tile))
                yield self._put(n, block, tile, group, share, result)
            if self.frame.places[n] == "out":
                where = self.frame.cut(n, block, tile, share)
                part = self.places.part(group, n, share[1], self.frame.cols(n, block, tile))
                if (n, group) in self.places.left and self.works:  # warps continue after the copy
                    shape, ring = (where.rows, where.cols, where.fmt), self.places.left[n, group]
                    step, put = Step(Opcode.COPY, ring.fill(*shape), (part,)), self.works.put()
                    yield TileOp(f"{self.frame.label(n)}.put", self.warps[group], FMA, (step,), work=put)
                    step = Step(Opcode.COPY, where, (ring.front(*shape),))
                    yield TileOp(f"{self.frame.label(n)}.store", self.places.storer, LDG, (step,))
                    continue
                step = Step(Opcode.COPY, where, (part,))
                yield self._op(f"{self.frame.label(n)}.store", s, group, LDG, (step,))

    # ---------------------------------------------------------------- operations

    def _op(
        self, label: str, s: Stage, group: int, engine: str, steps: tuple[Step, ...], handshake: Handshake = ()
    ) -> TileOp:
        """Return an operation of a group's queue: its steps in the lanes of the stage's plan, or with the work of the
        operation.
        """
        if (plan := self._plan(s)) is not None:
            steps = tuple([Step(x.opcode, x.dst, x.srcs, _in_lanes(x.attributes, plan), x.name) for x in steps])
        work = self.works.of(s, engine, steps) if self.works else None
        return TileOp(label, self.warps[group], engine, steps, handshake, work)

    def _plan(self, s: Stage) -> WarpPlan | None:
        """Return the plan of a stage's lanes: that of the first axis of columns that it processes; for vectors alone,
        any plan.
        """
        if not self.tiling.lanes:
            return None
        names = (s.rows[0].dst,) if s.is_product else (*s.read, *s.written)
        axes = (self.frame.axes(n) for n in names if n in self.frame.phase.names)
        lanes = self.tiling.lanes
        return next((lanes[a[1]] for a in axes if len(a) > 1), next(iter(lanes.values())))


@lru_cache
def _in_lanes(attributes: Attributes, plan: WarpPlan) -> Attributes:
    return replace(attributes, warp=plan)


def _check_whole(frame: Frame, tiling: SmTiling) -> None:
    """Raise `TilingError` for an inverse, or a reduction of columns, of a tile whose rows several warp groups share."""
    whole = [r for s in frame.stages for r in s.rows if r.opcode is Opcode.INVERSE or r.is_down]
    if whole and tiling.decided.groups > 1:
        does = "inverts" if whole[0].opcode is Opcode.INVERSE else "reduces the columns of"
        raise TilingError(
            f"{frame.phase.name}: line {whole[0].line} {does} {frame.label(whole[0].srcs[0])}, whose rows are "
            f"shared by {tiling.decided.groups} warp groups, but one group must have all of them; use fewer warps"
        )


def _check_transposed(frame: Frame, core: SmCore, how: Mapping[Stage, Attributes]) -> None:
    """Raise `TilingError` for a transposed left operand that tensor cores cannot read, because it does not have 16
    bits.

    Source: PTX ISA, wgmma.mma_async (imm-trans-a) and ldmatrix (.trans); Volta's m8n8k4 has only float16.
    """
    for s, attributes in how.items():
        n, unit = s.rows[0].srcs[0], core.device.matrix_engine(SM)
        if attributes.transpose_a and frame.fmt(n) in unit.fractals and frame.size_bytes(n, 1) != 2:
            raise TilingError(
                f"{s.name}: {frame.label(n)}^T in {frame.fmt(n)}: tensor cores can read a left operand only along "
                "its rows unless it has 16 bits; store it transposed, or use --dtype float16"
            )
