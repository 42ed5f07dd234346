"""A phase on an Ascend core group: its products and rows, emitted in the machine's order.

`AscendPhase` decides only the order.  In a phase with products, lasting operands are loaded first; then the loop's
stages run as a pipeline whose earlier parts are ``ahead`` tiles ahead, so that matrix and vector units work at the same
time.  In a phase without products, each vector core processes its own slices.  Other modules decide the rest:

- `loop_parts.Parts`: the cuts of the loop, the distance of parts, the states that outlive a tile;
- `slots.Slots`: the slots between products and rows, and the rings that products share;
- `product.CubeProduct`, `vector_rows.VectorShare`: operations of a stage on the AIC and on a vector core, and their
  memory;
- `succession`: the blocks that are in progress when a block begins, if blocks overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from npusim.identity import Itself
from npusim.kernels.attention.call_blocks import SERIES, as_free
from npusim.kernels.form.flow import summed
from npusim.kernels.form.phase import WHOLE, Visit, WorkTile
from npusim.machines.ascend.group import FIXP, MTE2, RowSlice, pass_on
from npusim.machines.ascend.loop_parts import Parts
from npusim.machines.ascend.product import CubeProduct
from npusim.machines.ascend.slots import Slots
from npusim.machines.ascend.succession import overlapping
from npusim.machines.ascend.vector_rows import VectorShare, rows_stage
from npusim.machines.base import program_phase
from npusim.machines.frame import Frame, block_at, body, shape_and_place
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.tile_program import Body, Item
from npusim.program.ir.tile_program import Loop as Repeat

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from npusim.kernels.form.phase import Phase, Stage
    from npusim.machines.ascend.group import AscendGroup
    from npusim.machines.ascend.joint_slots import JointSlot
    from npusim.machines.ascend.product_plan import AscendTiling
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import ProgramPhase


class AscendPhase:
    """One phase on one core group."""

    def __init__(self, group: AscendGroup, phase: Phase, tiling: AscendTiling) -> None:
        self.group, self.tiling = group, tiling
        frame, kept = _frame(Itself(phase))
        self.frame = frame
        self.phase = frame.phase
        self.parts = Parts(frame, tiling)
        slots = Slots(frame, group, tiling, self.parts)
        self.products = {
            s: CubeProduct(frame, s, group, tiling, slots.direct, slots.cross, kept)
            for s in frame.stages
            if s.is_product
        }
        # Row sums that state no order have the vector unit's order, and casts that state no rounding have its rounding.
        rounding = group.device.rounding_choices.get("rounding")
        tables = frame.tables(group.row_sum(tiling.decided.code), "" if rounding is None else rounding.value)
        self.rows = {s: rows_stage(frame, s, table, group, tiling, slots.direct) for s, table in tables.items()}
        #: The slot that the core acquires before it loads, and releases when the other cores have finished.
        self.turn = slots.turn()
        if self.products:
            slots.place(self.products, self.rows.values())
        listed, generations, lasting = tuple(self.rows.values()), self.parts.generations, self.parts.lasting
        self.vectors = [
            VectorShare(frame, core, group, listed, tiling, slots.cross, generations, lasting)
            for core in (group.vector_cores if listed else ())
        ]
        group.allocator.check()
        self.parts.check()
        cuts = self.parts.cuts
        # One function per part for all blocks: blocks with equal contents share a body.
        emits = [partial(self._stages, cut, self.vectors) for cut in cuts]
        #: The work of a block in each part, and the number of tiles by which the part is later than the first.
        self.lagging = list(zip(emits, self.parts.lags, strict=True))
        self.opens = [partial(self._open, part=n) for n in range(len(cuts))]
        self.closes = [partial(self._close, part=n) for n in range(len(cuts))]

    @property
    def parts_of_loop(self) -> tuple[Stage, ...]:
        """Stages of the loop over tiles; empty if products have no loop."""
        return self.phase.loops[0].stages if self.frame.loop_axis else ()

    @property
    def joint_slots(self) -> dict[str, list[JointSlot]]:
        """The shared slots of a vector core, by what they contain: inputs or results; only those that it has."""
        of = {"inputs": self.vectors[0].joint, "results": self.vectors[0].joint_outs} if self.vectors else {}
        return {what: list({id(slot): slot for slot in slots.values()}.values()) for what, slots in of.items() if slots}

    def build(self, blocks: Sequence[WorkTile]) -> ProgramPhase:
        """Return the phase of the program; ``blocks`` are in the order in which core groups get them."""
        reread = tuple((p.right, p.plan.m) for p in self.products.values() if p.rereads)
        shares = tuple[tuple[int, ...], ...]()
        count, more = self.group.device.group_count.value, dict[str, Any]()
        if self.tiling.is_work_list or blocks[0].span(SERIES):
            blocks, shares = as_free(blocks, count)
        if self.parts.is_continuous:
            blocks, more = overlapping(blocks, shares or count, self.parts.lag)
        return program_phase(
            self.frame,
            self.items,
            reread,
            [p.right for p in self.products.values() if p.plan.right == "view"],
            *self._pieces(),
            blocks=blocks,
            dealt=shares,
            body_counts=self._body_counts if self.lagging else None,
            bits=self._bits,
            **more,
        )

    def _pieces(self) -> tuple[tuple[tuple[str, int], ...], list[str]]:
        """Return the pieces of a block of one product without a loop, the outer ones first, and its earlier loads."""
        streaming = [p for p in self.products.values() if "piece" in p.modes.values()]
        if len(self.products) != 1 or not streaming or self.frame.loop_axis:
            return (), []
        (p,) = streaming
        bands, panels = (p.m_axis, p.plan.m), (p.n_axis, p.plan.n)
        order = (panels, bands) if p.plan.panels_outside else (bands, panels)
        return order, [n for n, mode in p.modes.items() if mode != "piece"]

    def _body_counts(self, blocks: Sequence[WorkTile]) -> Iterator[tuple[Hashable, Body, Sequence[int]]]:
        """Yield the work of blocks tile after tile, stage by stage, with the number of repetitions."""
        for number, stage in enumerate(self.parts_of_loop):
            # Products run on the AIC; rows run on the first vector core, which has the most of them.
            work = partial(self._stages, (stage,), self.vectors[:1], is_work=True)
            is_masked = stage in self.rows and bool(self.rows[stage].masks)
            for key, block, visit, counts in _visits(Itself(blocks), is_masked):
                yield (number, key), body(work, block, visit), counts

    def _bits(self) -> Hashable:
        """Return the properties that affect values: tables, blocks, and the division of sums, but not slices, depths,
        or cores.
        """
        sums = tuple((p.name, p.plan.k) for p in self.products.values())
        return self.frame.content, frozenset(self.phase.cells), sums

    # ---------------------------------------------------------------- order

    def items(self, block: WorkTile) -> Iterator[Item]:
        """Yield one block in program order."""
        if not self.products:
            yield from self._alone(block)
        elif self.parts.is_continuous:
            yield from self._onward(block)
        elif self.frame.loop_axis:
            yield Repeat("start", (0,), body(self._open, block, WHOLE))
            is_rolling = self.tiling.decided.order == "rolling"
            yield from self.frame.pipelined(self.lagging, block) if is_rolling else self._grouped(block)
            yield Repeat("finish", (0,), body(self._close, block, WHOLE))
        else:
            yield from self._open(block, WHOLE)
            yield from self._stages(self.phase.loops[0].stages, self.vectors, block, WHOLE)
            yield from self._close(block, WHOLE)

    def _height(self, block: WorkTile) -> int:
        return self.frame.size(block, self.frame.row_axis, WHOLE)

    def _open(self, block: WorkTile, tile: Visit, part: int | None = None) -> Iterator[TileOp]:
        """Yield the beginning of a block; if parts of the pipeline begin separately, of one ``part``."""
        for s, p in self.products.items():
            if part in (None, self.parts.part_of(s)):
                yield from p.open(block, tile)
        states = [n for n, first in self.parts.of_states.items() if part in (None, first)]
        for v in self.vectors:
            yield from v.start({n: v.mine(self.frame.shape(n, block, WHOLE)[0]) for n in states}, block)

    def _close(self, block: WorkTile, tile: Visit, part: int | None = None) -> Iterator[Item]:
        for s, p in self.products.items():
            if part in (None, self.parts.part_of(s)):
                yield from p.close(block, tile)
        lasting = [n for n in self.parts.lasting if self.parts.of_states[n] == part]
        for v in self.vectors if lasting else ():
            yield from v.keep(v.mine(self._height(block)), lasting)
        if part in (None, len(self.lagging) - 1):
            yield from self._stages(self.phase.finish, self.vectors, block, tile)

    def _stages(
        self, stages: Sequence[Stage], cores: list[VectorShare], block: WorkTile, tile: Visit, *, is_work: bool = False
    ) -> Iterator[Item]:
        """Yield stages of a tile: products run on the AIC, and rows on some of the vector cores.

        ``is_work``: yield only their work; neighbouring blocks with equal work are yielded once.
        """
        turn, loop = self.turn, self.parts_of_loop
        if self.parts.is_loopless:  # other blocks identify a block by its tiles
            loop = (*self.phase.loops[0].stages, *self.phase.finish)
        by_product = turn is not None and turn.consumers == (FIXP,)
        for s in stages:
            if turn is not None and (s.is_product if by_product else s in loop[:1]):
                yield pass_on("turn.take", MTE2, turn.fill(1, 1, "int8"))
            if s.is_product:
                product = self.products[s]
                yield from (product.work if is_work else product.items)(block, tile)
                if turn is not None and by_product:
                    yield pass_on("turn.give", FIXP, turn.front(1, 1, "int8"))
                continue
            for v in cores:
                mine = v.mine_of(self.rows[s], block, tile)
                yield from (v.work if is_work else v.items)(self.rows[s], block, tile, mine)
                if turn is not None and not by_product and s in loop[-1:]:
                    yield pass_on("turn.give", v.core.vector, turn.front(1, 1, "int8"))

    def _grouped(self, block: WorkTile) -> Iterator[Repeat]:
        """Yield the parts over groups of tiles, each part for all tiles of a group before the next."""
        size, (shape, at), emits = self.tiling.ahead + 1, shape_and_place(block), [emit for emit, _ in self.lagging]
        for first, run in self.frame.placed(block):
            whole, rest = divmod(run.count, size)
            for start, count, each in ((0, whole, size), (whole * size, 1, rest)):
                if count and each:
                    static = tuple(emits), shape, each, run.step, run.cols, run.only
                    where = at, first + start, run.col + start * run.step
                    yield Repeat(self.frame.loop_axis, range(count), Body(_group, static, where))

    def _onward(self, block: WorkTile) -> Iterator[Repeat]:
        """Yield a block's tiles in the first part of the pipeline, and the work of later parts on it and on earlier
        blocks.

        Step n runs tile n of the first part.  A later part is delayed by a fixed number of tiles, and runs the core
        group's tiles in sequence, across blocks.  A part's work on a block begins and ends with the block's tiles in
        this part.
        """
        firsts = [*accumulate((b.tile_count for b in block.before), initial=0)]
        cells = [(at - firsts[-1], b) for at, b in zip(firsts, (*block.before, block), strict=True)]
        end = block.tile_count + (0 if block.leaves_open else self.parts.lag)
        lags = self.parts.lags
        for start, stop, loop in self.frame.stretches_of_steps(self.lagging, cells, end):
            for lag, opens in zip(lags, self.opens, strict=True):
                yield from (Repeat("start", (0,), body(opens, b, WHOLE)) for at, b in cells if at + lag == start)
            yield from [loop] if loop else ()
            for lag, closes in zip(lags, self.closes, strict=True):
                yield from (
                    Repeat("finish", (0,), body(closes, b, WHOLE)) for at, b in cells if at + b.tile_count + lag == stop
                )

    def _alone(self, block: WorkTile) -> Iterator[Item]:
        """Yield each vector core's slices: loops run inside a slice, and no core waits for another."""
        loops, finish, states = self.phase.loops, self.phase.finish, list(self.parts.of_states)
        height = next(iter(self.rows.values())).height
        for v in self.vectors:
            share = v.mine(self._height(block))
            for part in v.slices(share, height) if share else ():
                one = RowSlice(part.row, part.rows, 0, part.rows)
                yield from v.start(dict.fromkeys(states, one), block)
                for loop in loops:
                    for tile in self.frame.tiles(block) if loop.axis else (WHOLE,):
                        for s in loop.stages:
                            yield from v.items(self.rows[s], block, tile, v.within(self.rows[s], one))
                for s in finish:
                    yield from v.items(self.rows[s], block, WHOLE, v.within(self.rows[s], one))


@kept_by_blocks(lambda _frame, phase: len(phase.thing.cells))  # stored once for each order of the blocks
def _frame(phase: Itself) -> tuple[Frame, frozenset[str]]:
    """Return a phase in the form that the machine uses, and the sums that stay in L0C for a block."""
    of, kept = summed(phase.thing)
    return Frame(of), kept


@kept_by_blocks(lambda _shapes, blocks, _is_masked: len(blocks.thing))
def _visits(blocks: Itself, is_masked: bool) -> list[tuple[Hashable, WorkTile, Visit, list[int]]]:
    """Return the shapes of tiles, each with an example (a tile and its block) and with the number of such tiles in each
    block.

    Tiles that differ only in their masks have one shape unless ``is_masked``.
    """
    shapes: dict[Hashable, tuple[WorkTile, Visit, list[int]]] = {}
    for at, block in enumerate(blocks.thing):
        shape, _ = shape_and_place(block)
        for run in block.runs:
            visit = run.visit(0, 0)
            key = shape, visit.shape if is_masked else visit.cols
            _, _, counts = shapes.setdefault(key, (block, visit, [0] * len(blocks.thing)))
            counts[at] += run.count
    return [(key, *shape) for key, shape in shapes.items()]


def _group(static: Any, at: Any, index: int) -> Iterator[Repeat]:
    """Yield each part's body at the tiles of one group."""
    (parts, shape, size, pitch, cols, only), (position, number, col) = static, at
    block = block_at(shape, position)
    for part in parts:
        for n in range(size):
            tile = index * size + n
            yield Repeat("", (0,), body(part, block, Visit(tile + number, tile * pitch + col, cols, only)))
