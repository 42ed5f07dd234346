"""Rows stages on the vector cores: loads into UB, one operation for all steps of the table, and stores.

A vector core processes its share of a tile's rows, slice by slice.  A product's results come from a slot in global
memory, or are in UB; operands of a product are stored in a slot there or in L1.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from npusim.errors import ProgramError, TilingError
from npusim.kernels.form.language import ONE
from npusim.kernels.form.phase import WHOLE, bind
from npusim.late_methods import dataclass
from npusim.machines.ascend.group import GM, PING_PONG, SLICE_ELEMENTS, RowSlice, VectorWork, compute, move, pass_on
from npusim.machines.ascend.joint_slots import JointSlot, joint_slots
from npusim.machines.transfers import BLOCK_BYTES
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.tile import Tile
from npusim.program.ir.tile_program import repeated
from npusim.units import ceil_div, chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from npusim.kernels.form.phase import Stage, Table, Visit, WorkTile
    from npusim.machines.ascend.group import AscendGroup, VectorCore
    from npusim.machines.ascend.product_plan import AscendTiling
    from npusim.machines.decisions import VectorCode
    from npusim.machines.frame import Frame
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import Source, TileOp
    from npusim.program.ir.tile import Operand, RingTile
    from npusim.program.ir.tile_program import Loop


@dataclass(frozen=True, slots=True)
class RowsStage:
    """A rows stage with its inputs and results, and the rows of its slices.

    ``table`` has the machine's choices where the stage's rows make none.  ``moved`` has the results if each equals an
    input, so that no vector instruction processes them.
    """

    stage: Stage
    table: Table
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    masks: tuple[str, ...]
    names: tuple[str, ...]
    moved: Mapping[str, str]
    height: int
    code: VectorCode | None

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.stage.name


def rows_stage(
    frame: Frame, stage: Stage, table: Table, group: AscendGroup, tiling: AscendTiling, direct: Mapping[str, bool]
) -> RowsStage:
    """Return the needs of a stage; a slice has the number of elements that the tiling states, at most a core's share of
    rows.
    """
    grain = frame.phase.row_grain
    share = group.largest_share(frame.height(frame.led_by(stage)), grain)
    inputs = tuple(n for n in stage.read if frame.places.get(n) in ("down", "global"))
    outputs = tuple(n for n in stage.written if frame.places[n] in ("up", "out"))
    copies = (r for r in stage.rows if r.opcode is Opcode.COPY)
    moved = {r.dst: r.srcs[0] for r in copies if r.dst in outputs and r.srcs[0] in inputs}
    # if vector instructions compute other results, they also process the copied ones
    if len({*moved.values()}) < len(stage.rows):
        moved = {}
    names = tuple(dict.fromkeys(n for n in (*stage.written, *stage.read) if n in frame.phase.names))
    is_of_rows = frame.phase.is_recurrent or frame.axes(frame.led_by(stage))[0] == frame.row_axis
    elements = tiling.elements if is_of_rows else SLICE_ELEMENTS
    height = min(share, max(1, elements // max(frame.width(n) for n in names) // grain) * grain)
    masks = tuple(n for n in frame.phase.masks if n in stage.read)
    code = tiling.decided.code and _code(frame, stage, tiling.decided.code, direct)
    return RowsStage(stage, table, inputs, outputs, masks, names, moved, height, code)


def _code(frame: Frame, stage: Stage, code: VectorCode, direct: Mapping[str, bool]) -> VectorCode:
    """Return the form of a stage's code: only tiles along the loop, which products write, can be transposed."""
    names = [n for n in (*stage.written, *stage.read) if n in frame.phase.names]
    has_products = any(s.is_product for s in frame.stages)
    along = has_products and any(frame.loop_axis in frame.axes(n)[1:] for n in names)
    return code._replace(
        layout=code.layout if along else "nd",
        leaves=frozenset(n for n in stage.written if frame.places[n] != "work"),
        blocks=any(direct.get(n, False) for n in stage.written),
    )


@dataclass(frozen=True, slots=True)
class Spilled:
    """A state outside UB: its place in global memory, the slots through which it is moved, and the rows of a slice."""

    memory: Ring
    slot: Ring
    back: Ring
    height: int


class VectorShare:
    """One vector core's part of a phase: its memory, and stages bound to slices of its rows."""

    def __init__(
        self,
        frame: Frame,
        core: VectorCore,
        group: AscendGroup,
        stages: Sequence[RowsStage],
        tiling: AscendTiling,
        cross: Mapping[str, tuple[Ring, ...]],
        generations: Callable[[str], int],
        lasting: Mapping[str, int],
    ) -> None:
        self.frame, self.core, self.group = frame, core, group
        self.tiling, self.generations = tiling, generations
        #: Slots between products and rows, and those slots in the core's UB that contain only the core's own share.
        self.cross = {n: rings[core.index % len(rings)] for n, rings in cross.items()}
        self.dropped = {n for n, ring in self.cross.items() if ring.space == core.ub}
        self.is_alone = not any(s.is_product for s in frame.stages)
        #: Number of slots for slices that follow one another.
        self.depth = tiling.buffers if self.is_alone else 1 if tiling.decided.one_slot else PING_PONG
        self.ins: dict[str, Ring] = {}
        self.outs: dict[str, Ring] = {}
        self.masks: dict[str, Ring] = {}
        self.single = self._single(stages)
        self.joint = {n: slot for slot in self._joint_inputs(stages) for n in slot.offsets}
        self.joint_outs = {n: slot for slot in self._joint_outputs(stages) for n in slot.offsets}
        for s in stages:
            self._place_ends(s, stages)
        for s in stages:
            for n in filter(frame.is_loaded, s.masks):
                # In phases with products there is one slot, because only the tiles on the diagonal need a mask.
                depth = self.depth if self.is_alone else 1
                ring = core.ub, frame.prefix + n, s.height * frame.width(n), depth, core.load, core.vector
                if n not in self.masks:
                    self.masks[n] = group.ring(*ring)
        self.spilled = {n: self._place_spilled(n, stages) for n in tiling.spilled}
        #: States that the end of a block reads while those of the next block are already in use.
        self.lasting = {
            frame.storage[n]: group.ub_kept(core, n, frame.row_bytes(n, self.share(n)), depth)
            for n, depth in lasting.items()
        }
        self._place_kept(stages, tiling)
        #: For states that start as an operand: the slot through which the operand's slices pass, and their rows.
        self.firsts = {n: self._place_first(n, stages) for n, what in frame.phase.names.items() if what.first}

    def share(self, n: str) -> int:
        """Return the rows of a name's largest tile that this core processes."""
        return self.group.largest_share(self.frame.height(n), self.frame.phase.row_grain)

    def _single(self, stages: Sequence[RowsStage]) -> set[str]:
        """Return inputs with one slot, in phases with products: small vectors, and inputs without a second flag."""
        frame, flags = self.frame, self.group.device.flags
        inputs = list(dict.fromkeys(n for s in stages for n in s.inputs if n not in self.dropped))
        tiles = [n for n in inputs if len(frame.axes(n)) > 1 and frame.axes(n)[0] != ONE]
        twice = [n for n in tiles if self.depth > 1 and any(n in s.inputs and s.outputs for s in stages)]
        masks = {n for s in stages for n in s.masks if frame.is_loaded(n)}
        spare = flags.usable_event_ids_count.value - len(inputs) - len(masks) if flags else len(twice)
        return {n for n in inputs if n not in twice[: max(0, spare)]}

    def _joint_inputs(self, stages: Sequence[RowsStage]) -> list[JointSlot]:
        """Return the slots that inputs share if inputs and masks, one slot each, need more flags than the device
        has.
        """
        frame = self.frame
        others = len({n for s in stages for n in s.masks if frame.is_loaded(n)}) + len(self.tiling.spilled)
        others += sum(bool(what.first) for what in frame.phase.names.values())
        moved = {n for s in stages for n in s.moved.values()}
        sizes = {n: frame.row_bytes(n, self._tallest(n, stages)) for s in stages for n in s.inputs}
        sizes = {n: size for n, size in sizes.items() if n not in self.dropped}
        return self._joint([s.inputs for s in stages], sizes, moved, others)

    def _joint_outputs(self, stages: Sequence[RowsStage]) -> list[JointSlot]:
        """Return the slots that results share if results, one slot each, need more flags than the device has."""
        made = [[n for n in s.outputs if n not in s.moved] for s in stages]
        sizes = {n: 0 for names in made for n in names}
        for s, names in zip(stages, made, strict=True):
            sizes |= {n: max(sizes[n], self.frame.row_bytes(n, s.height)) for n in names}
        return self._joint(made, sizes, set(), len(self.tiling.spilled))

    def _joint(
        self, lists: Sequence[Sequence[str]], sizes: Mapping[str, int], moved: Collection[str], others: int
    ) -> list[JointSlot]:
        """Return the slots that names share; ``lists``: those of each stage, ``others``: other rings of the queues."""
        flags = self.group.device.flags
        if not flags or len(sizes) + others <= flags.usable_event_ids_count.value:
            return []
        groups = dict[tuple[int, ...], list[str]]()
        for n in sizes:
            if n not in moved:
                groups.setdefault(tuple(i for i, names in enumerate(lists) if n in names), []).append(n)
        orders = [[[n for n in lists[i] if n in group] for i in at] for at, group in groups.items()]
        alike = [first for first, *more in orders if all(x == first for x in more)]
        most = flags.usable_event_ids_count.value // self._joint_depth - others
        return joint_slots(sizes, alike, most, BLOCK_BYTES)

    @property
    def _joint_depth(self) -> int:
        return self.depth if self.is_alone else 1

    def _tallest(self, n: str, stages: Sequence[RowsStage]) -> int:
        """Return the largest number of rows of an input in a slice."""
        tallest = max(x.height for x in stages if n in x.inputs)
        return int(self.frame.rows_of(n, (0, tallest))[1])

    def _place_ends(self, s: RowsStage, stages: Sequence[RowsStage]) -> None:
        """Allocate the rings of a stage's inputs and outputs, with the size that the largest slice of
        ``stages`` needs.
        """
        frame, core, ring = self.frame, self.core, self.group.ring
        for n in s.inputs:
            if n in self.dropped:
                continue
            if slot := self.joint.get(n):
                if n not in self.ins:
                    ends = core.load, core.vector
                    shared = ring(core.ub, self._ring(n, "in"), slot.size_bytes, self._joint_depth, *ends)
                    self.ins |= dict.fromkeys(slot.offsets, shared)
                continue
            size = frame.row_bytes(n, self._tallest(n, stages))
            self._share_ring(self.ins, n, size, s.inputs)
            if n in s.moved.values():
                self.ins[n] = ring(core.ub, self._ring(n), size, self.depth, core.load, core.store)
            elif n not in self.ins:
                # Two slots (ping-pong) if one slice follows another; one slot in an update (CATLASS).
                depth = self.depth if self.is_alone or (s.outputs and n not in self.single) else 1
                self.ins[n] = ring(core.ub, self._ring(n, "in"), size, depth, core.load, core.vector)
        for n in s.outputs:
            depth = 1 if s.stage in frame.phase.finish or frame.phase.is_recurrent else self.depth
            size = frame.row_bytes(n, s.height)
            if n in s.moved or n in self.outs:
                continue
            if slot := self.joint_outs.get(n):
                ends = core.vector, core.store
                shared = ring(core.ub, self._ring(n, "out"), slot.size_bytes, min(depth, self._joint_depth), *ends)
                self.outs |= dict.fromkeys(slot.offsets, shared)
                continue
            self._share_ring(self.outs, n, size, s.outputs)
            if n not in self.outs:
                self.outs[n] = ring(core.ub, self._ring(n, "out"), size, depth, core.vector, core.store)

    def _share_ring(self, rings: dict[str, Ring], n: str, size: int, together: Collection[str]) -> None:
        """Let rows that compute operands of products share rings: one for K and V, and one for their scales."""
        axis, *cols = self.frame.axes(n)
        if axis != self.frame.row_axis and n not in rings and not self.frame.phase.is_recurrent:
            # one operation needs all of the names in `together` at once; a joint slot has an order of its own names
            joint = self.joint if rings is self.ins else self.joint_outs
            others = {m: self.frame.axes(m) for m in rings if m not in together and m not in joint}
            alike = (rings[m] for m, (a, *c) in others.items() if a == axis and len(c) == len(cols))
            if ring := next((ring for ring in alike if ring.slot_bytes >= size), None):
                rings[n] = ring

    def _place_spilled(self, n: str, stages: Sequence[RowsStage]) -> Spilled:
        """Allocate a state in global memory, and the slots in UB through which its slices pass.

        There are two generations, because slices of the next one are stored while slices of the current one are still
        loaded.
        """
        core, ring, row_bytes = self.core, self.group.ring, self.frame.row_bytes
        height = min(s.height for s in stages if n in s.names)
        return Spilled(
            ring(GM, f"{core.name} {n}", row_bytes(n, self.share(n)), PING_PONG, core.store, core.load),
            ring(core.ub, f"{n} in", row_bytes(n, height), 1, core.load, core.vector),
            ring(core.ub, f"{n} back", row_bytes(n, height), 1, core.vector, core.store),
            height,
        )

    def _place_first(self, n: str, stages: Sequence[RowsStage]) -> tuple[Ring, int]:
        if n in self.spilled:
            raise TilingError(
                f"{self.frame.phase.name}: {self.frame.label(n)} starts as {self.frame.phase.names[n].first}, but "
                "does not fit into UB as a whole; use fewer of its columns in a block"
            )
        height = min(self.share(n), *(s.height for s in stages))
        size = self.frame.row_bytes(n, height)
        return self.group.ring(self.core.ub, f"{n} first", size, 1, self.core.load, self.core.vector), height

    def _place_kept(self, stages: Sequence[RowsStage], tiling: AscendTiling) -> None:
        """Allocate states, work tiles, and results of one stage for another, in the order of the names."""
        frame, ub, tile = self.frame, self.core.ub, self.group.allocator.tile
        self.tiles: dict[str, Tile] = self._work_on_operands(stages)
        shapes = self._kept_shapes(max(s.height for s in stages), tiling)
        carried = {
            n: frame.row_bytes(n, self.share(n))
            for n, place in frame.places.items()
            if place == "carried" and frame.storage[n] == n
        }
        depths = {n: self.generations(n) for n in carried}
        summed = ((s, r) for s in stages for r in reversed(s.stage.rows) if r.opcode is Opcode.ROW_SUM)
        sums = next(((s.height, r.srcs[0]) for s, r in summed), None)
        # Block reduction produces one value per block before the next pass.
        blocks = ceil_div(frame.row_bytes(sums[1], 1), self.group.block_bytes) if sums else 0
        rest = sum(round_up(size, BLOCK_BYTES) * depths[n] for n, size in carried.items())
        rest += sums[0] * blocks * frame.size_bytes(sums[1], 1) if sums else 0
        first_of = self._taking_turns(shapes, rest)
        for n in shapes:
            first = first_of.get(n, n)
            if first not in self.tiles:
                self.tiles[first] = tile(ub, frame.label(first), *shapes[first], frame.fmt(first))
            rows, width = shapes[n]
            self.tiles[n] = Tile(ub, self.tiles[first].offset_bytes, rows, width, width, frame.fmt(n))
        self.carried = {n: self.group.ub_kept(self.core, self._kept(n), size, depths[n]) for n, size in carried.items()}
        if sums:
            tile(ub, "reduction", sums[0], blocks, frame.fmt(sums[1]))

    def _kept_shapes(self, tallest: int, tiling: AscendTiling) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the tiles of states and of values within a stage."""
        frame, shapes = self.frame, dict[str, tuple[int, int]]()
        for n in dict.fromkeys(frame.storage.values()):
            width = frame.width(n)
            if n in self.spilled or n in self.lasting or n in self.tiles:
                continue
            if frame.places[n] == "state" and not self.is_alone:
                shapes[n] = self.share(n), width
            elif frame.places[n] in ("state", "work"):
                is_vector = len(frame.axes(n)) == 1
                few = max(frame.phase.row_grain, min(self.share(n), tiling.elements // width))
                shapes[n] = tallest if is_vector else few, width
        return shapes

    def _taking_turns(self, shapes: Mapping[str, tuple[int, int]], rest: int) -> dict[str, str]:
        """Return the names of values within a stage that use the tile of another name after its last use, each with
        that name; none if all tiles, and ``rest`` bytes, fit, or if the kernel's author placed them.
        """
        frame, allocator, ub = self.frame, self.group.allocator, self.core.ub
        if not frame.phase.is_compiled:
            return {}
        sizes = {n: round_up(frame.size_bytes(n, rows * width), BLOCK_BYTES) for n, (rows, width) in shapes.items()}
        if allocator.used_bytes[ub] + sum(sizes.values()) + rest <= allocator.spaces[ub].capacity_bytes:
            return {}
        groups: list[list[str]] = []
        for n in sorted((n for n in sizes if frame.places[n] == "work"), key=lambda n: -sizes[n]):
            group = next((g for g in groups if all(frame.may_take_turns(n, m) for m in g)), None)
            if group is None:
                groups.append([n])
            else:
                group.append(n)
        return {n: first for first, *others in groups for n in others}

    def _kept(self, n: str) -> str:
        return n if len(self.frame.axes(n)) == 1 else f"{self.frame.prefix}{n} kept"

    def _work_on_operands(self, stages: Sequence[RowsStage]) -> dict[str, Tile]:
        """Allocate the tiles of rows that compute operands of products; the stages use the same bytes, one after
        another.
        """
        frame, ub, ends, most = self.frame, self.core.ub, dict[str, tuple[int, int]](), 0
        for s in stages:
            end, written = 0, dict.fromkeys(frame.storage[n] for n in s.stage.written)
            for n in (n for n in written if frame.places[n] == "work" and frame.axes(n)[0] != frame.row_axis):
                ends[n], end = (end, s.height), end + round_up(frame.row_bytes(n, s.height), BLOCK_BYTES)
            most = max(most, end)
        begin = self.group.allocator.tile(ub, "operands", 1, most, "int8").offset_bytes if most else 0
        cols = {n: frame.width(n) for n in ends}
        return {n: Tile(ub, begin + at, h, cols[n], cols[n], frame.fmt(n)) for n, (at, h) in ends.items()}

    def _ring(self, n: str, side: str = "") -> str:
        if self.is_alone:
            return f"{self.frame.prefix}{self.frame.label(n)}" + (f" {side}" if side else "")
        return self.frame.prefix + (n if self.frame.places[n] == "out" else self.frame.label(n))

    # ---------------------------------------------------------------- slices

    def mine(self, rows: int) -> RowSlice | None:
        """Return this core's share of a tile's rows; None if it has no share."""
        start, count = self.group.share(self.core, rows, self.frame.phase.row_grain)
        return RowSlice(start, count, 0, count) if count else None

    def mine_of(self, s: RowsStage, block: WorkTile, tile: Visit) -> RowSlice | None:
        """Return this core's share of a tile's rows in a stage; a single row that all rows read belongs to
        every core.
        """
        mine = self.mine(self.frame.shape(self.frame.led_by(s.stage), block, tile)[0])
        return self.within(s, mine)

    def within(self, s: RowsStage, rows: RowSlice | None) -> RowSlice | None:
        """Return the rows of a stage for some rows of a tile: a single row that all rows read is computed once."""
        is_single = self.frame.axes(self.frame.led_by(s.stage))[0] == ONE != self.frame.row_axis and not s.outputs
        return RowSlice(0, 1, 0, 1) if is_single else rows

    def slices(self, mine: RowSlice, height: int) -> list[RowSlice]:
        """Return a share divided into slices of ``height`` rows."""
        share = mine.rows
        return [RowSlice(mine.row + r, n, r, share, r == 0, r + height >= share) for r, n in chunks(share, height)]

    def start(self, states: Mapping[str, RowSlice | None], block: WorkTile) -> Iterator[TileOp]:
        """Yield the operations that set states to their starts, for this core's share of their rows."""
        names = self.frame.phase.names
        fills = [
            Step(Opcode.FILL, self._state(n, mine.rows), (start,))
            for n, mine in states.items()
            if mine is not None and (start := names[n].start) is not None and n not in (*self.spilled, *self.firsts)
        ]
        if fills:
            yield compute("state.start", self.core.vector, fills)
        for n, (ring, height) in self.firsts.items():
            mine = states.get(n)
            for part in self.slices(mine, height) if mine else ():
                yield from self._first(n, ring, block, part, self._state(n, part.share))
        for n, at in self.spilled.items():
            mine, start = states.get(n), names[n].start
            assert start is not None
            for part in self.slices(mine, at.height) if mine else ():
                back = at.back.fill(part.rows, self.frame.width(n), self.frame.fmt(n))
                yield compute(f"{n}.start", self.core.vector, (Step(Opcode.FILL, back, (start,)),))
                yield self._spill(n, part)

    def _first(self, n: str, ring: Ring, block: WorkTile, part: RowSlice, state: Tile | RingTile) -> Iterator[TileOp]:
        """Yield the load of some rows of a state's start, and the copy of these rows to the state."""
        first = self.frame.phase.names[n].first
        cut = self.frame.cut(first, block, WHOLE, (part.row, part.rows))
        yield move(f"{self.frame.label(first)}.load", self.core.load, ring.fill(cut.rows, cut.cols, cut.fmt), cut)
        mine, loaded = state.part(part.at, part.rows, 0, cut.cols), ring.front(cut.rows, cut.cols, cut.fmt)
        step = Step(Opcode.COPY, mine, (loaded,))
        yield compute(f"{self.frame.label(n)}.start", self.core.vector, (step,))

    def _state(self, n: str, rows: int) -> Tile | RingTile:
        return self._lasts(n, first=True).part(0, rows) if n in self.lasting else self.tiles[n].part(0, rows)

    def _lasts(self, n: str, *, first: bool = False, last: bool = False) -> RingTile:
        width, fmt = self.frame.width(n), self.frame.fmt(n)
        return self.lasting[n].fill(self.share(n), width, fmt, first=first, last=last)

    def keep(self, mine: RowSlice | None, states: Sequence[str]) -> Iterator[TileOp]:
        """Yield the end of the work on lasting states, which do not change until the block is finished."""
        if mine is not None:
            yield pass_on("state.keep", self.core.vector, *(self._lasts(n, last=True) for n in states))

    def items(self, s: RowsStage, block: WorkTile, tile: Visit, mine: RowSlice | None) -> Iterator[TileOp]:
        """Yield one stage on this core's share: loads, work and stores, slice by slice."""
        if mine is None:
            yield from self._skip(s, block, tile)
            return
        for part in self.slices(mine, s.height):
            yield from self._slice(s, block, tile, part)

    def work(self, s: RowsStage, block: WorkTile, tile: Visit, mine: RowSlice | None) -> Iterator[Loop]:
        """Yield the work of one stage; neighbouring slices with equal costs form one loop."""
        alike: dict[Hashable, list[RowSlice]] = {}
        for part in self.slices(mine, s.height) if mine else ():
            alike.setdefault((part.rows, self._work(s, part)), []).append(part)
        for parts in alike.values():
            yield repeated(len(parts), partial(self._slice, s, block, tile, parts[0]))

    def _slice(self, s: RowsStage, block: WorkTile, tile: Visit, part: RowSlice) -> Iterator[TileOp]:
        views: dict[str, Operand] = {}
        for n in s.inputs:
            if n in self.dropped:
                views[n] = self._share(n, block, tile, part)
                continue
            ring, shape = self.ins[n], self._shape(n, block, tile, part)
            joint, source = self.joint.get(n) or JointSlot({n: 0}), self._outside(n, block, tile, part)
            views[n], loaded = (of(ring, n, shape, is_load=True) for of in (joint.work, joint.transfer))
            yield move(f"{self.frame.label(n)}.load", self.core.load, loaded, source)
        again = [n for n in self.spilled if n in s.stage.read]
        for n in again:
            whole = self._held(n, part, is_write=False)
            slot = self.spilled[n].slot
            yield move(f"{n}.reload", self.core.load, slot.fill(part.rows, whole.cols, whole.fmt), whole)
            views[n] = slot.front(part.rows, whole.cols, whole.fmt)
        for n in s.outputs:
            if n not in s.moved:
                joint, shape = self.joint_outs.get(n) or JointSlot({n: 0}), self._shape(n, block, tile, part)
                views[n] = joint.work(self.outs[n], n, shape, is_load=False)
        for n in s.masks:
            if self.frame.is_everywhere(n) or (n in tile.only and not self.frame.is_loaded(n)):
                views[n] = self.frame.mask_cut(n, block, tile, (part.row, part.rows))
            elif n in tile.only:
                cut = self.frame.mask_cut(n, block, tile, (part.row, part.rows))
                shape = (part.rows, tile.cols, "int8")
                yield move(f"{n}.load", self.core.load, self.masks[n].fill(*shape), cut)
                views[n] = self.masks[n].front(*shape)
        if not s.moved:
            bound = self._bindings(s, part, views, block, tile)
            steps = self.frame.with_computed_masks(self._steps(s, bound, again, part))
            self._refuse_unmade(s, bound)
            yield compute(s.name, self.core.vector, steps, self._work(s, part))
        for n in again:
            if n in s.stage.written:
                yield self._spill(n, part)
        for n in s.outputs:
            joint, shape = self.joint_outs.get(n) or JointSlot({n: 0}), self._shape(n, block, tile, part)
            done = views[s.moved[n]] if n in s.moved else joint.transfer(self.outs[n], n, shape, is_load=False)
            target = self._outside(n, block, tile, part)
            yield move(f"{self.frame.label(n)}.store", self.core.store, target, done)

    def _work(self, s: RowsStage, part: RowSlice) -> VectorWork:
        """Return a slice's work; the first slice of a tile for a product passes the tile on."""
        up = (x for x in self.frame.stages if any(self.frame.places[n] == "up" for n in x.written))
        hands_on = part.first and s.stage is next(up, None)
        return VectorWork(self.tiling.decided, s.code, self.frame.phase.name if hands_on else "")

    def _steps(self, s: RowsStage, bound: dict[str, Source], again: Sequence[str], part: RowSlice) -> tuple[Step, ...]:
        """Return a stage's rows as steps; from its first write on, a spilled state is in the slot from which it is
        stored.
        """
        moved = next((n for n in again if n in s.stage.written), None)
        if moved is None:
            return bind(s.table, bound, s.name)
        at = next(i for i, r in enumerate(s.table) if r.dst == moved)
        first = s.table[at]
        back = self.spilled[moved].back.fill(part.rows, self.frame.width(moved), self.frame.fmt(moved))
        turn = Step(first.opcode, back, tuple(bound[n] for n in first.srcs), first.attributes, first.dst)
        after = bind(s.table[at + 1 :], {**bound, moved: back}, s.name, at + 2)
        return (*bind(s.table[:at], bound, s.name), turn, *after)

    def _refuse_unmade(self, s: RowsStage, bound: Mapping[str, Source]) -> None:
        """Raise `ProgramError` for a result whose only row is omitted in this tile because it has no mask."""
        for r in s.table:
            is_alone = r.dst in s.outputs and sum(x.dst == r.dst for x in s.table) == 1
            if is_alone and r.only in self.frame.phase.masks and r.only not in bound and r.dst not in r.srcs:
                why = (
                    "a tl.where with a mask of indices computes a factor of a product, but on Ascend the masks of "
                    "a loop apply only to a product's"
                )
                raise ProgramError(
                    f"{self.frame.phase.name}: {why} results: mask the factor's load instead, with other=0.0"
                )

    def _held(self, n: str, part: RowSlice, *, is_write: bool) -> RingTile:
        ring = self.spilled[n].memory
        view = ring.fill if is_write else ring.front
        whole = view(self.share(n), self.frame.width(n), self.frame.fmt(n), first=part.first, last=part.last)
        return whole.part(part.at, part.rows)

    def _spill(self, n: str, part: RowSlice) -> TileOp:
        back = self.spilled[n].back.front(part.rows, self.frame.width(n), self.frame.fmt(n))
        return move(f"{n}.spill", self.core.store, self._held(n, part, is_write=True), back)

    def _shape(self, n: str, block: WorkTile, tile: Visit, part: RowSlice) -> tuple[int, int, str]:
        rows = self.frame.rows_of(n, (part.row, part.rows))[1]
        return rows, self.frame.cols(n, block, tile), self.frame.fmt(n)

    def _outside(self, n: str, block: WorkTile, tile: Visit, part: RowSlice) -> Operand:
        if n not in self.cross:
            return self.frame.cut(n, block, tile, self.frame.rows_of(n, (part.row, part.rows)))
        slot = self._cross(n, block, tile).held(first=part.first, last=part.last)
        return slot.part(part.row, part.rows, 0, self.frame.cols(n, block, tile))

    def _share(self, n: str, block: WorkTile, tile: Visit, part: RowSlice) -> RingTile:
        cols = self.frame.cols(n, block, tile)
        slot = self.cross[n].front(part.share, cols, self.frame.fmt(n), first=part.first, last=part.last)
        return slot.part(part.at, part.rows)

    def _cross(self, n: str, block: WorkTile, tile: Visit) -> RingTile:
        """Return the complete slot of a hand-over between rows and a product."""
        ring, frame = self.cross[n], self.frame
        view = ring.front if frame.places[n] == "down" else ring.fill
        return view(frame.shape(n, block, tile)[0], frame.width(n), frame.fmt(n))

    def _skip(self, s: RowsStage, block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield the operations of a core without rows of a ragged tile: it acquires and releases every slot."""
        label, core = self.frame.label, self.core
        for n in s.inputs:
            if n in self.cross and n not in self.dropped:
                yield pass_on(f"{label(n)}.skip", core.load, self._cross(n, block, tile))
        written = [n for n in self.carried if n in s.stage.written]
        read = [n for n in self.carried if n in s.stage.read and n not in written]
        for what, names in (("rescale.skip", written), ("rescale.release", read)):
            if names:
                yield pass_on(what, core.vector, *(self._carried(n, s) for n in names))
        for n in s.outputs:
            if n in self.cross:
                yield pass_on(f"{label(n)}.skip", core.store, self._cross(n, block, tile))

    def _carried(self, n: str, s: RowsStage) -> RingTile:
        if n in s.stage.written:
            return self.carried[n].fill(self.share(n), self.frame.width(n), self.frame.fmt(n))
        readers = [x for x in self.frame.stages if n in x.read and n not in x.written]
        first, last = s.stage is readers[0], s.stage is readers[-1]
        return self.carried[n].front(self.share(n), self.frame.width(n), self.frame.fmt(n), first=first, last=last)

    def _lasting(self, n: str, s: RowsStage, part: RowSlice) -> RingTile:
        """Return the place of a lasting state for a stage: the working place, or, for stages that finish a block, the
        place where it is stored.
        """
        finish, storage = self.frame.phase.finish, self.frame.storage
        if s.stage not in finish:
            return self._lasts(n)
        readers = [x for x in finish if any(storage.get(r) == n for r in x.read)]
        first, last = part.first and s.stage is readers[0], part.last and s.stage is readers[-1]
        return self.lasting[n].front(self.share(n), self.frame.width(n), self.frame.fmt(n), first=first, last=last)

    def _bindings(
        self, s: RowsStage, part: RowSlice, views: Mapping[str, Source], block: WorkTile, tile: Visit
    ) -> dict[str, Source]:
        """Return ``{name: operand}`` for a slice."""
        frame, at = self.frame, 0 if self.is_alone else part.at
        bound: dict[str, Source] = dict(frame.phase.constants)
        for n in s.names:
            root = frame.storage[n]
            if root in views:
                bound[n] = views[root]
            elif root in self.carried:
                whole = self._carried(root, s)
                whole = whole.held(first=part.first and whole.first, last=part.last and whole.last)
                bound[n] = whole.part(*frame.rows_of(root, (at, part.rows)), 0, frame.cols(root, block, tile))
            elif root in self.lasting:
                bound[n] = self._lasting(root, s, part).part(at, part.rows)
            elif root in self.tiles:
                row, rows = frame.rows_of(root, (at if frame.places[root] == "state" else 0, part.rows))
                bound[n] = self.tiles[root].part(row, rows, 0, frame.cols(root, block, tile))
        bound.update(views)
        bound.update(frame.phase.per_tile(tile) if tile.cols else {})
        return bound
