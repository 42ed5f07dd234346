"""A phase on an Ascend core group: rings and tiles placed, stages emitted in the machine's order.

With products: what stays is loaded, then the loop's stages run as a pipeline, cut before each product
that reads what rows left; earlier parts run ``ahead`` tiles ahead, so that matrix and vector units
work at the same time.  Without products each vector core goes through its own slices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from npusim.algorithms.blocks import as_free
from npusim.algorithms.phase import WHOLE, TileRun, Visit, WorkTile
from npusim.errors import TilingError
from npusim.ir.content import Itself, kept_by_blocks
from npusim.ir.program import Body, Item, Succession
from npusim.ir.program import Loop as Repeat
from npusim.machines.ascend.group import FIXP, GM, L1, MTE1, MTE2, PING_PONG, RowSlice, pass_on
from npusim.machines.ascend.product import CubeProduct, cube_rings
from npusim.machines.ascend.rows import VectorShare, rows_stage
from npusim.machines.base import program_phase
from npusim.machines.frame import Frame, block_at, body, shape_and_place
from npusim.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from npusim.algorithms.phase import Instruction, Phase, Stage
    from npusim.ir.buffers import FlagKind, Ring
    from npusim.ir.op import TileOp
    from npusim.ir.program import ProgramPhase
    from npusim.machines.ascend.group import AscendGroup, VectorCore
    from npusim.machines.ascend.plan import AscendTiling, Staging


class AscendPhase:
    """One phase on one core group."""

    def __init__(self, group: AscendGroup, phase: Phase, tiling: AscendTiling) -> None:
        self.group, self.phase, self.tiling = group, phase, tiling
        first_ring = len(group.allocator.rings)
        self.frame = frame = _frame(Itself(phase))
        products = [s for s in frame.stages if s.is_product]
        #: Whether a hand-over goes past global memory, and its slots: those of each vector core, or of all.
        self.direct = {
            n: group.is_direct(frame.label(n), place, tiling.route if place == "up" else None)
            for n, place in frame.places.items()
            if place in ("down", "up")
        }
        self.cross: dict[str, tuple[Ring, ...]] = {}
        self.products = {s: CubeProduct(frame, s, group, tiling, self.direct, self.cross) for s in products}
        # Row sums and casts without an order or a rounding of their own take the vector unit's.
        rounding = group.device.rounding_choices.get("rounding")
        tables = frame.tables(group.row_sum(tiling.code), "" if rounding is None else rounding.value)
        self.rows = {s: rows_stage(frame, s, table, group, tiling, self.direct) for s, table in tables.items()}
        self.cuts = self._cut() if products and frame.loop_axis else []
        self.turn = self._place_turn() if products else None
        #: Tiles that the pipeline's last part is behind its first; whether the next block begins in between.
        self.lag = tiling.ahead * max(0, len(self.cuts) - 1)
        is_visited = self.lag > 0 and all(b.runs for b in phase.cells)
        self.is_continuous = tiling.is_continuous and is_visited and self._holds_for_one_part()
        if products:
            self._place_products(frame.views, first_ring)
        self.vectors = [
            VectorShare(
                frame, core, group, tuple(self.rows.values()), tiling, self.cross, self._generations, self._lasting()
            )
            for core in (group.vector_cores if self.rows else ())
        ]
        group.allocator.check()
        self._check_states()
        self._check_handed()
        # One function a part for all blocks: bodies are shared by what they are made of.
        self.parts = [partial(self._stages, cut, self.vectors) for cut in self.cuts]
        #: With the tiles by which each is behind the first.
        self.lagging = [(part, tiling.ahead * i) for i, part in enumerate(self.parts)]
        numbers = range(len(self.cuts))
        self.opens = [partial(self._open, part=n) for n in numbers]
        self.closes = [partial(self._close, part=n) for n in numbers]

    @property
    def parts_of_loop(self) -> tuple[Stage, ...]:
        """Stages of the loop over tiles; none where products have no loop."""
        return self.phase.loops[0].stages if self.frame.loop_axis else ()

    def _place_turn(self) -> Ring | None:
        """Place the slot that the core takes before it loads, and that is given back when others are through."""
        ends = {"serial": [v.vector for v in self.group.vector_cores]}.get(self.tiling.order)
        if ends is None and self.tiling.slots == 1:
            ends = [FIXP]
        if ends is None or not self.parts_of_loop:
            return None
        kind: FlagKind = "binary" if ends == [FIXP] else "counter"
        return self.group.allocator.ring(L1, "turn", 1, 1, producers=[MTE2], consumers=ends, flag=kind)

    def _place_products(self, views: Mapping[str, str], first_ring: int) -> None:
        """Place what products read and leave; ``views`` last: loaded once where L1 holds tiles till they are read."""
        listed = list(self.products.values())
        operands: dict[tuple[str, Staging, int, int, int], Ring] = {}
        rings = cube_rings(listed, self.group, self.frame.prefix, self.tiling.slots)
        for p in listed:
            p.l0 = rings
            p.place(operands, {*views, *views.values()})
        self._place_cross()
        for part, whole in views.items():
            first, second = (next(s for s, p in self.products.items() if p.right == n) for n in (whole, part))
            lag = (self._part_of(second) - self._part_of(first)) * self.tiling.ahead
            self._share(self.products[first], self.products[second], lag, first_ring)
        for p in listed:
            p.place(operands)

    def _share(self, first: CubeProduct, second: CubeProduct, lag: int, first_ring: int) -> None:
        """Let two products read one ring, ``lag`` tiles apart, if there is room for its tiles, and a flag for each."""
        allocator, flags, n = self.group.allocator, self.group.device.flags, first.right
        size = round_up(self.frame.row_bytes(n, self.frame.height(n)), allocator.spaces[L1].alignment_bytes)
        used = sum(r.depth for r in allocator.rings[first_ring:] if r.producers == (MTE2,) and r.consumers == (MTE1,))
        room = (self.group.capacity_bytes("L1") - allocator.used_bytes[L1]) // size
        depth = min(lag + PING_PONG, room, flags.usable_event_ids_count.value - used if flags else room)
        if depth > lag:
            name = self.frame.prefix + self.frame.label(n)
            ring = allocator.ring(L1, name, size, depth, producers=[MTE2], consumers=[MTE1], peeks=[MTE1])
            first.share(second, ring)

    def _place_cross(self) -> None:
        """Place the slots through which products and rows hand over: in UB and L1 where the device leads there.

        A slot is as wide as the largest tile, whatever the tile.
        """
        frame, cores = self.frame, self.group.vector_cores
        stores = [v.store for v in cores]
        for n in (n for s in frame.stages for n in s.written):
            height = frame.height(n)
            match frame.places[n], self.direct.get(n):
                case "down", True:
                    self.cross[n] = tuple(self._slots_in_ub(n, core) for core in cores)
                case "down", False:
                    depth = self._generations(n)
                    self.cross[n] = (self._slots(n, GM, height, depth, [FIXP], [v.load for v in cores]),)
                case "up", is_direct:
                    space, reader = (L1, MTE1) if is_direct else (GM, MTE2)
                    readers = [reader, MTE2] if is_direct and self.tiling.takes_turns else [reader]
                    self.cross[n] = (self._slots(n, space, height, self._generations(n), stores, readers),)

    def _slots_in_ub(self, n: str, core: VectorCore) -> Ring:
        """Place slots for a vector core's share of what a product leaves: in ping-pong where its readers go on."""
        readers = [s for s in self.rows.values() if n in s.inputs]
        reader = core.store if any(n in s.moved.values() for s in readers) else core.vector
        depth = self._parts_between(n) * self.tiling.ahead + (PING_PONG if any(s.outputs for s in readers) else 1)
        depth = max(depth, self.tiling.ahead + 1) if self.tiling.order == "groups" else depth
        rows = self.group.largest_share(self.phase.sizes[self.frame.row_axis])
        return self._slots(n, core.ub, rows, depth, [FIXP], [reader], f"{core.name} ")

    def _slots(
        self, n: str, space: str, rows: int, depth: int, producers: list[str], consumers: list[str], prefix: str = ""
    ) -> Ring:
        """Place a ring of slots between AIC and AIVs, with counter flags."""
        return self.group.allocator.ring(
            space,
            f"{prefix}{self.frame.label(n)} slots",
            self.frame.row_bytes(n, rows),
            depth,
            producers=producers,
            consumers=consumers,
            flag="counter",
            period=min(self.tiling.period, depth),
        )

    def _parts_between(self, n: str) -> int:
        """Return how many parts of the pipeline after its writer a name is read last."""
        stages = self.frame.stages
        written = self._part_of(next(s for s in stages if n in s.written))
        return max((self._part_of(s) for s in stages if n in s.read), default=0) - written

    def _generations(self, n: str) -> int:
        """Return how many tiles of a name there are at a time, from its writer to its last reader."""
        return max(1, self._parts_between(n)) * self.tiling.ahead + 1

    def build(self) -> ProgramPhase:
        """Return the phase of the program."""
        body_counts = self._body_counts if self.parts else None
        reread = tuple((p.right, p.plan.m) for p in self.products.values() if p.rereads)
        blocks: Sequence[WorkTile] = self.phase.cells
        shares = tuple[tuple[int, ...], ...]()
        count, linked = self.group.device.group_count.value, dict[str, Any]()
        if self.tiling.is_work_list:
            blocks, shares = as_free(blocks, count)
        if self.is_continuous:
            meets, family = _linked(self.lag)
            linked = {"succession": Succession(_by_itself, meets, blocks), "family": family}
            blocks = _successive(Itself(blocks), shares or count, self.lag)
        return program_phase(
            self.frame,
            self.items,
            reread,
            [p.right for p in self.products.values() if p.plan.right == "view"],
            *self._parts(),
            blocks=blocks,
            dealt=shares,
            body_counts=body_counts,
            bits=self._bits,
            **linked,
        )

    def _parts(self) -> tuple[tuple[tuple[str, int], ...], list[str]]:
        """Return what a block of one product without a loop works on at a time, and what it loads before."""
        streaming = [p for p in self.products.values() if "piece" in p.modes.values()]
        if len(self.products) != 1 or not streaming or self.frame.loop_axis:
            return (), []
        (p,) = streaming
        return ((p.m_axis, p.plan.m), (p.n_axis, p.plan.n)), [n for n, mode in p.modes.items() if mode != "piece"]

    def _body_counts(self, blocks: Sequence[WorkTile]) -> Iterator[tuple[Hashable, Body, Sequence[int]]]:
        """Yield what blocks do tile after tile, stage by stage, and how often each of them does it."""
        for number, stage in enumerate(self.parts_of_loop):
            # Products on the AIC, rows on the first vector core, which has most.
            work = partial(self._stages, (stage,), self.vectors[:1], is_work=True)
            is_masked = stage in self.rows and bool(self.rows[stage].masks)
            for key, block, visit, counts in _visits(Itself(blocks), is_masked):
                yield (number, key), body(work, block, visit), counts

    def _bits(self) -> Hashable:
        """Return what values depend on: tables, blocks and where sums are cut; not slices, depths, or who runs what."""
        sums = tuple((p.name, p.plan.k) for p in self.products.values())
        return self.frame.content, frozenset(self.phase.cells), sums

    # ---------------------------------------------------------------- order

    def items(self, block: WorkTile) -> Iterator[Item]:
        """Yield one block in program order."""
        if not self.products:
            yield from self._alone(block)
        elif self.is_continuous:
            yield from self._onward(block)
        elif self.frame.loop_axis:
            yield Repeat("start", (0,), body(self._open, block, WHOLE))
            yield from self._pipelined(block)
            yield Repeat("finish", (0,), body(self._close, block, WHOLE))
        else:
            yield from self._open(block, WHOLE)
            yield from self._stages(self.phase.loops[0].stages, self.vectors, block, WHOLE)
            yield from self._close(block, WHOLE)

    def _height(self, block: WorkTile) -> int:
        return self.frame.size(block, self.frame.row_axis, WHOLE)

    def _open(self, block: WorkTile, tile: Visit, part: int | None = None) -> Iterator[TileOp]:
        """Yield what a block begins with; of one ``part`` of the pipeline alone, where parts begin apart."""
        for s, p in self.products.items():
            if part in (None, self._part_of(s)):
                yield from p.open(block, tile)
        states = [n for n, first in self._parts_of_states.items() if part in (None, first)]
        for v in self.vectors:
            yield from v.start(v.mine(self._height(block)), states)

    def _close(self, block: WorkTile, tile: Visit, part: int | None = None) -> Iterator[Item]:
        for s, p in self.products.items():
            if part in (None, self._part_of(s)):
                yield from p.close(block, tile)
        lasting = [n for n in self._lasting() if self._parts_of_states[n] == part]
        for v in self.vectors if lasting else ():
            yield from v.keep(v.mine(self._height(block)), lasting)
        if part in (None, len(self.cuts) - 1):
            yield from self._stages(self.phase.finish, self.vectors, block, tile)

    @cached_property
    def _parts_of_states(self) -> dict[str, int]:
        """The part of the pipeline that uses each state."""
        parts: dict[str, int] = {}
        for state, what in self.phase.names.items():
            if what.start is not None:
                used = (i for i, cut in enumerate(self.cuts) for s in cut if self._is_used(state, s))
                parts[state] = next(used, 0)
        return parts

    def _is_used(self, state: str, stage: Stage) -> bool:
        storage = self.frame.storage
        return any(storage.get(n) == storage[state] for n in (*stage.read, *stage.written))

    def _lasting(self) -> dict[str, int]:
        """Return the states that end before the block does, with their copies: so many blocks may be under way."""
        if not self.is_continuous:
            return {}
        read = {n for n in self._parts_of_states if any(self._is_used(n, s) for s in self.phase.finish)}
        return {n: self.lag + 2 for n in read if self._parts_of_states[n] < len(self.cuts) - 1}

    def _stages(
        self, stages: Sequence[Stage], cores: list[VectorShare], block: WorkTile, tile: Visit, *, is_work: bool = False
    ) -> Iterator[Item]:
        """Yield stages of a tile: products on the AIC, rows on some of the vector cores.

        ``is_work``: what they do alone, in whatever order, what costs the same once.
        """
        turn, loop = self.turn, self.parts_of_loop
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
                mine = v.mine(self.frame.shape(s.written[0], block, tile)[0])
                yield from (v.work if is_work else v.items)(self.rows[s], block, tile, mine)
                if turn is not None and not by_product and s in loop[-1:]:
                    yield pass_on("turn.give", v.core.vector, turn.front(1, 1, "int8"))

    def _cut(self) -> list[tuple[Stage, ...]]:
        """Return the loop's stages, cut before each product that reads what rows left."""
        parts: list[list[Stage]] = [[]]
        for s in self.phase.loops[0].stages:
            if s.is_product and any(self.frame.places[n] == "up" for n in s.read):
                parts.append([])
            parts[-1].append(s)
        return [tuple(part) for part in parts]

    def _part_of(self, stage: Stage) -> int:
        """Return which part of the pipeline a stage is in: the last for what is in none."""
        return next((i for i, cut in enumerate(self.cuts) if stage in cut), len(self.cuts) - 1)

    def _holds_for_one_part(self) -> bool:
        """Return whether what stays for a block is read in one part of the pipeline: else blocks end together."""
        readers = {
            n: {self._part_of(s) for s, p in self.products.items() if n in (p.left, p.right)} for n in self.frame.held
        }
        return all(len(parts) < 2 for parts in readers.values())

    def _check_states(self) -> None:
        """Raise `TilingError` for a state that two parts use: one would meet another tile's value."""
        frame, storage = self.frame, self.frame.storage
        for state, what in self.phase.names.items():
            if what.start is None or not self.tiling.ahead:
                continue
            used = [
                (i, r)
                for i, cut in enumerate(self.cuts)
                for s in cut
                for r in s.rows
                if storage[state] in {storage.get(n) for n in (r.dst, *r.srcs)}
            ]
            if used and used[0][0] != used[-1][0]:
                (_, first), (at, last) = used[0], used[-1]
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(state)} is used by {_named(first)} and by {_named(last)}, but "
                    f"what comes before product {self.cuts[at][0].name} runs {self.tiling.ahead} tiles ahead of what "
                    "comes after it; use the state on one side of the product, or depth=0"
                )

    def _check_handed(self) -> None:
        """Raise `TilingError` for what several stages read of what one leaves, and for tiles kept past a product."""
        frame = self.frame
        for n, place in frame.places.items():
            readers = [s for s in frame.stages if n in s.read and n not in s.written]
            parts = {self._part_of(s) for s in readers}
            if place == "carried" and self.products and len(frame.axes(n)) > 1:
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is a tile that {readers[-1].name} reads behind a product, "
                    "past which vectors of rows alone are kept; make it there, from what the product leaves or a state"
                )
            is_read_twice = place in ("down", "carried") and len(parts) > 1 and self.tiling.ahead
            if (place == "up" and len(readers) > 1) or is_read_twice:
                what = " and ".join(s.name for s in readers)
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is read by {what}, but what one unit leaves for another is "
                    "read once; make it twice under two names" + ("" if place == "up" else ", or depth=0")
                )

    def _pipelined(self, block: WorkTile) -> Iterator[Repeat]:
        """Yield the parts over the block's tiles, each ``ahead`` tiles before the next.

        Step n does tile n of the first part, n - ahead of the second, and so on.  Consecutive steps whose
        tiles lie in the same runs are one loop.
        """
        if self.tiling.order != "rolling":
            yield from self._grouped(block)
            return
        yield from self.frame.pipelined(self.lagging, block)

    def _grouped(self, block: WorkTile) -> Iterator[Repeat]:
        """Yield the parts over groups of tiles, each part for all tiles of a group before the next."""
        size, (shape, at) = self.tiling.ahead + 1, shape_and_place(block)
        for first, run in self.frame.placed(block):
            whole, rest = divmod(run.count, size)
            for start, count, each in ((0, whole, size), (whole * size, 1, rest)):
                if count and each:
                    static = tuple(self.parts), shape, each, run.step, run.cols, run.only
                    where = at, first + start, run.col + start * run.step
                    yield Repeat(self.frame.loop_axis, range(count), Body(_group, static, where))

    def _onward(self, block: WorkTile) -> Iterator[Repeat]:
        """Yield a block's tiles in the first part of the pipeline, and what later parts do of it and of those before.

        Step n does tile n of the first part; a later part, so many tiles behind, works on the core group's tiles in
        one row, whosever they are.  Where a block's tiles begin or end in a part, so does what that part does of it.
        """
        firsts = [*accumulate((b.tile_count for b in block.before), initial=0)]
        cells = [(at - firsts[-1], b) for at, b in zip(firsts, (*block.before, block), strict=True)]
        end = block.tile_count + (0 if block.leaves_open else self.lag)
        lags = [lag for _, lag in self.lagging]
        for start, stop, loop in self.frame.stretches_of_steps(self.lagging, cells, end):
            for lag, opens in zip(lags, self.opens, strict=True):
                yield from (Repeat("start", (0,), body(opens, b, WHOLE)) for at, b in cells if at + lag == start)
            yield from [loop] if loop else ()
            for lag, closes in zip(lags, self.closes, strict=True):
                yield from (
                    Repeat("finish", (0,), body(closes, b, WHOLE)) for at, b in cells if at + b.tile_count + lag == stop
                )

    def _alone(self, block: WorkTile) -> Iterator[Item]:
        """Yield each vector core's slices: loops run inside a slice, no core waits for another."""
        loops, finish, states = self.phase.loops, self.phase.finish, list(self._parts_of_states)
        height = next(iter(self.rows.values())).height
        for v in self.vectors:
            mine = v.mine(self._height(block))
            for part in v.slices(mine, height) if mine else ():
                one = RowSlice(part.row, part.rows, 0, part.rows)
                yield from v.start(one, states)
                for loop in loops:
                    for tile in self.frame.tiles(block) if loop.axis else (WHOLE,):
                        for s in loop.stages:
                            yield from v.items(self.rows[s], block, tile, one)
                for s in finish:
                    yield from v.items(self.rows[s], block, WHOLE, one)


@kept_by_blocks(lambda _frame, phase: len(phase.thing.cells))  # in each order of their blocks
def _frame(phase: Itself) -> Frame:
    return Frame(phase.thing)


@kept_by_blocks(lambda _shapes, blocks, _is_masked: len(blocks.thing))
def _visits(blocks: Itself, is_masked: bool) -> list[tuple[Hashable, WorkTile, Visit, list[int]]]:
    """Return the shapes of tiles: each with a tile in a block that has it, and how many of them each of the blocks has.

    Tiles that differ in their masks alone have one shape unless ``is_masked``.
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


class Successive(Sequence[WorkTile]):
    """Blocks that know what is under way when they begin; those of a core group do once somebody asks for one.

    ``shares``: numbers of those of each core group, in order; or how many groups they are dealt to in turn.
    """

    def __init__(self, blocks: Sequence[WorkTile], shares: Sequence[Sequence[int]] | int, lag: int) -> None:
        self._alone, self._lag = blocks, lag
        self._linked: list[WorkTile | None] = [None] * len(blocks)
        self._mates: list[Sequence[int]] = [()] * len(blocks)
        listed = [range(n, len(blocks), shares) for n in range(shares)] if isinstance(shares, int) else shares
        for numbers in listed:
            for number in numbers:
                self._mates[number] = numbers

    def __len__(self) -> int:
        return len(self._alone)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        if self._linked[at] is None:
            self._link(self._mates[at])
        return self._linked[at]

    def __iter__(self) -> Iterator[WorkTile]:
        return (self[n] for n in range(len(self)))

    def _link(self, numbers: Sequence[int]) -> None:
        before: tuple[WorkTile, ...] = ()
        for left, number in enumerate(numbers, 1 - len(numbers)):
            b = self._alone[number]
            self._linked[number] = WorkTile(
                b.batch, b.head, b.spans, b.runs, b.causal_offset, b.place, before, leaves_open=left < 0
            )
            before = _under_way((*before, b), self._lag)


@kept_by_blocks(lambda blocks, *_: len(blocks))
def _successive(blocks: Itself, shares: Sequence[Sequence[int]] | int, lag: int) -> Successive:
    """Return blocks that know one another, one object for all tilings that have them."""
    return Successive(blocks.thing, shares, lag)


def _under_way(blocks: tuple[WorkTile, ...], lag: int) -> tuple[WorkTile, ...]:
    """Return the last of a core group's blocks, with the tiles that are less than ``lag`` back, and one more.

    That one keeps apart a block that has begun and one that begins.
    """
    left, count = lag, 0
    while count < len(blocks) and left > 0:
        count += 1
        left -= blocks[-count].tile_count
    under_way = blocks[len(blocks) - count :]
    return (_cut_to(under_way[0], under_way[0].tile_count + left + 1), *under_way[1:]) if left < -1 else under_way


def _cut_to(block: WorkTile, count: int) -> WorkTile:
    return WorkTile(block.batch, block.head, block.spans, _last(block.runs, count), block.causal_offset, block.place)


@lru_cache(maxsize=1024)  # blocks of the heads have the same, a few of these at a time
def _last(runs: tuple[TileRun, ...], count: int) -> tuple[TileRun, ...]:
    kept: list[TileRun] = []
    for run in reversed(runs):
        taken = min(run.count, count)
        left = run.count - taken
        kept += [TileRun(run.col + left * run.step, run.cols, taken, run.step, run.only)] if taken else []
        count -= taken
    return tuple(reversed(kept))


def _by_itself(block: WorkTile) -> WorkTile:
    """Return a block as it is where no other overlaps it."""
    return replace(block, before=(), leaves_open=False)


def _meets(lag: int, block: WorkTile) -> tuple[Hashable, Hashable]:
    """Return keys of what is under way when a block begins, and when it hands on."""
    after = _under_way((*block.before, _by_itself(block)), lag) if block.leaves_open else ()
    return tuple(b.shape for b in block.before), tuple(b.shape for b in after)


def _family(lag: int, block: WorkTile) -> Hashable:
    """Return what blocks share that differ in how many tiles they visit, and meet and leave the same."""
    return block.family, block.leaves_open, *_meets(lag, block)


@cache
def _linked(lag: int) -> tuple[Callable[[WorkTile], tuple[Hashable, Hashable]], Callable[[WorkTile], Hashable]]:
    """Return what tells apart blocks that overlap so far: what they meet, and their families."""
    return partial(_meets, lag), partial(_family, lag)


def _group(static: Any, at: Any, index: int) -> Iterator[Repeat]:
    """Yield each part's body at the tiles of one group."""
    (parts, shape, size, pitch, cols, only), (position, number, col) = static, at
    block = block_at(shape, position)
    for part in parts:
        for n in range(size):
            tile = index * size + n
            yield Repeat("", (0,), body(part, block, Visit(tile + number, tile * pitch + col, cols, only)))


def _named(row: Instruction) -> str:
    """Return an instruction in words, with its line where it is known."""
    return f"{row.opcode.name} {row.dst}" + (f" (line {row.line})" if row.line else "")
