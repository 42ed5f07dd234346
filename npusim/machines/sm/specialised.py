"""Blocks whose warps specialise (Hopper): one group copies, the others take turns as a published kernel says.

A persistent block goes from tile of work to tile of work, its copies ahead of it.  Groups take turns around their
exponentials, so that one multiplies while the other computes, or at issuing products; Q K^T of a tile may be issued
before P V of the one before: its softmax runs beside that P V.
Left out: lanes keep their parts of row sums till the block ends, where a sum here is one number a row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.flow import views
from npusim.errors import BufferOverflowError, TilingError
from npusim.formats import get_format
from npusim.ir.op import Charge, GroupWork, Opcode, TileOp
from npusim.ir.tile import Tile
from npusim.machines.published import kernels
from npusim.machines.published.kernel import GpuKernel, KernelUse
from npusim.machines.sm.block import GroupBlock
from npusim.machines.sm.core import REDUCTIONS, RF, SM, WARPS, SmTiling, barriers, warp_issue
from npusim.machines.sm.groups import GROUP_ROWS, GROUP_WARPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.algorithms.phase import Phase, Stage, TileLoop, Visit, WorkTile
    from npusim.config.device import DeviceSpec
    from npusim.ir.buffers import Ring
    from npusim.ir.op import Step
    from npusim.ir.program import Item
    from npusim.ir.tile import RingTile
    from npusim.machines.frame import Frame, Span
    from npusim.machines.sm.core import SmCore

#: Registers of a thread by the number of groups that consume (setmaxnreg of FlashAttention-3), and those for addresses.
REGISTERS, ADDRESS_REGISTERS = MappingProxyType({1: 240, 2: 240, 3: 160}), 24
#: Columns of B that one product takes at most; keys are a multiple of what P V adds up at once (PTX ISA, wgmma).
MOST_COLUMNS, KEYS_MULTIPLE = 256, 16


def check_layout(called: str, rows: int, keys: int, dim: int) -> None:
    """Raise `TilingError` where groups have no layout for a tile: rows of whole groups, scores and O in registers."""
    groups = rows // GROUP_ROWS
    if rows % GROUP_ROWS or groups not in REGISTERS:
        allowed = ", ".join(str(GROUP_ROWS * n) for n in REGISTERS)
        raise TilingError(f"block_q: {rows}; kernel={called} has layouts for {allowed} rows: {GROUP_ROWS} a warp group")
    if keys % KEYS_MULTIPLE or keys > MOST_COLUMNS:
        allowed = f"multiples of {KEYS_MULTIPLE} up to {MOST_COLUMNS}"
        raise TilingError(f"block_kv: {keys}; kernel={called} has layouts for {allowed} keys")
    # Scores and O of 64 rows in float32; P goes through shared memory where it does not fit beside them.
    count = keys // 2 + dim // 2 + ADDRESS_REGISTERS
    if count > REGISTERS[groups]:
        raise TilingError(
            f"block_kv: {keys}; kernel={called} has no layout for {rows} x {keys} with head_dim {dim}: scores and O "
            f"take {count} registers a thread of {REGISTERS[groups]}; fewer keys"
        )


def specialised_tiling(kernel: GpuKernel, phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warps of a kernel execute attention, and a note: what a block takes of a core.

    Raises `TilingError` where a tensor is added to scores and the kernel has no room for its tiles beside a product
    that runs on, ``BufferOverflowError`` where its buffers do not fit shared memory.
    """
    warps, called, sizes, names = kernel.specialised, kernel.name, phase.sizes, phase.names
    assert warps is not None
    if warps.ahead and (added := [n for n in phase.values if names[n].axes == ("row", phase.loop_axis)]):
        others = {name: one.specialised for name, one in kernels(GpuKernel).items()}
        able = ", ".join(name for name, one in others.items() if one is not None and not one.ahead)
        raise TilingError(
            f"kernel: {called} adds no tensor to scores, and {added[0]} is one; leave kernel out, or take {able}"
        )
    rows, keys = sizes["row"], sizes[phase.loop_axis]
    size = get_format(names["q"].fmt).size_bytes
    dims = {axis: kernel.head_dim(names["q"].fmt, sizes[axis]) for axis in ("head", "value")}
    least, most_dim = warps.turn_dims[size]
    groups, issue = rows // GROUP_ROWS, warp_issue(device)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    loaded = dims["head"] if views(phase, phase.loop_axis) else sum(dims.values())
    q, kv = rows * dims["head"] * size, keys * loaded * size
    fits = [
        (n, m) for n in range(warps.depth[0], 0, -1) for m in range(warps.depth[1], 0, -1) if n * kv + m * q <= most
    ]
    if not fits:
        raise BufferOverflowError(
            f"shared memory: Q of {rows} and K and V of {keys} rows take {q + kv:,} of {most:,} bytes"
        )
    depth, held = fits[0]
    tiling = SmTiling(
        groups=groups,
        depth=depth,
        held_depth=held,
        work=GroupWork(GROUP_WARPS, is_specialised=True, consumers=groups),
        widths={phase.loop_axis: keys, **dims},
        specialised=warps if least <= max(dims.values()) <= most_dim else replace(warps, turns=None),
        charges=kernel.paid(KernelUse(phase, device, rows, keys, dims["head"], dims["value"])),
    )
    return (
        tiling,
        f"kernel={called}: {groups} warp groups on tiles of {rows} x {keys}, {depth} of K and of V, {held} of Q",
    )


class SpecialisedBlock(GroupBlock):
    """The resident block of a core whose warps specialise.

    Turns, meetings, and products that warps go on beside are rings without bytes, so that time and the check of races
    see the same order.
    """

    def __init__(self, number: int, frame: Frame, core: SmCore, tiling: SmTiling) -> None:
        loop, who, groups = frame.phase.loops[0].stages, f"{frame.prefix}B{number}", range(tiling.groups)
        products = tuple(s for s in loop if s.is_product)
        assert tiling.specialised is not None
        self.way = tiling.specialised
        if self.way.ahead and (len(products), loop[0], loop[-1]) != (2, products[0], products[-1]):
            raise TilingError(
                f"{frame.phase.name}: softmax runs beside P V of the tile before, which adds up in O itself: a loop of "
                "two products with rows between them; kernel=cudnn, or a precision with accumulate=chained"
            )
        warps = [f"{SM}.B{number}W{g}" for g in groups]
        #: Queues of products: of their own where a group goes on beside them.
        self.mma = tuple(f"{w}MMA" for w in warps) if self.way.ahead else tuple(warps)

        def signal(name: str, producer: str, *consumers: str) -> Ring:
            return core.allocator.ring(RF, f"{who} {name}", 1, 1, producers=[producer], consumers=consumers)

        pairs = {*pairwise(groups), *([(0, tiling.groups - 1)] if tiling.groups > 1 else [])}
        #: A turn goes from each group to the next, and from the last to the first.
        self.turn = {
            (a, b): signal(f"turn {a} {b}", warps[a], warps[b]) for a, b in sorted(pairs) if self.way.turns is not None
        }
        self.met = [
            signal(f"group {g} is there", warps[g], *(w for w in warps if w != warps[g]))
            for g in groups
            if self.way.meets and tiling.groups > 1
        ]
        sides = list(zip(warps, self.mma, strict=True)) if self.way.ahead else []
        self.issued = {s: [signal(f"{s.name} issued", w, m) for w, m in sides] for s in products}
        self.done = {s: [signal(f"{s.name} done", m, w) for w, m in sides] for s in products}
        super().__init__(number, frame, core, tiling)
        self.first, self.last = products[0], products[-1]
        begin = next((s for s in loop if any(r.opcode in REDUCTIONS for r in s.rows)), loop[0])
        rest = loop[loop.index(begin) :]
        #: Stages of rows in which exponentials begin and end, before the next product.
        self.section = begin, rest[next((i for i, s in enumerate(rest) if s.is_product), len(rest)) - 1]
        cuts = (loop[:1], 0), (loop[-1:], 1), (loop[1:-1], 0)
        #: Q K^T of a tile, P V of the one before, and the rows of the first.
        self.parts_of_loop = [(partial(self._tile, stages), lag) for stages, lag in cuts]

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues of the block."""
        return tuple(dict.fromkeys((*super().queues, *self.mma)))

    @property
    def readers(self) -> tuple[str, ...]:
        """Queues that read what the loader brings."""
        return self.mma

    def _below(self, n: str, served: dict[str, list[str]]) -> str | None:
        """Return the name whose registers another can take: P's product runs while the next scores come."""
        return None if self.way.ahead and self.frame.places[n] == "up" else super()._below(n, served)

    # ---------------------------------------------------------------- order

    def _loop(self, loop: TileLoop, block: WorkTile) -> Iterator[Item]:
        return self.frame.pipelined(self.parts_of_loop, block) if self.way.ahead else super()._loop(loop, block)

    def _tile(self, stages: tuple[Stage, ...], block: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield stages of a tile; rows group by group, as they take turns."""
        for n in self.visited:
            if any(n in s.read for s in stages):
                yield self._load(n, block, tile)
        for _, together in groupby(stages, lambda s: s.rows if s.is_product else ()):
            listed = list(together)
            for group, rows in enumerate(self._shares(block.rows)):
                for s in listed:
                    yield from (self._product if s.is_product else self._rows)(s, block, tile, group, rows)

    def _start(self, shares: list[Span]) -> Iterator[TileOp]:
        for group, op in enumerate(super()._start(shares)):
            handshake = op.handshake
            if self.way.ahead:  # no product of the block before runs on
                slots = *handshake, self.done[self.last][group].fill(*SIGNAL)
                yield TileOp(op.label, self.mma[group], WARPS, (), slots, group=self.work)
                handshake = ()
            yield replace(op, handshake=(*handshake, *(ring.fill(*SIGNAL) for ring in self.met[group : group + 1])))
        for group, warps in enumerate(self.warps if self.met else ()):
            others = tuple(ring.front(*SIGNAL) for g, ring in enumerate(self.met) if g != group)
            yield TileOp("meet", warps, WARPS, (), others, group=self.work.charged(*barriers(self.work)))

    def _finish(self, block: WorkTile, shares: list[Span]) -> Iterator[TileOp]:
        begun: set[int] = set()
        for op in super()._finish(block, shares):
            group, slots, work = self.warps.index(op.queue), op.handshake, op.group
            if self.way.ahead:
                if slots:
                    yield TileOp("end", self.mma[group], WARPS, (), slots, group=self.work)
                slots = () if group in begun else (self.done[self.last][group].front(*SIGNAL),)
            if work is not None and group not in begun:
                work = work.charged(*self.tiling.due("end"))
            begun.add(group)
            yield replace(op, handshake=slots, group=work)

    def _take_turn(self, group: int, *, takes: bool, gives: bool) -> tuple[RingTile, ...]:
        return tuple(
            (ring.fill if group == a else ring.front)(*SIGNAL, first=takes, last=gives)
            for (a, b), ring in self.turn.items()
            if group in (a, b)
        )

    def _wait(self, label: str, group: int, slots: tuple[RingTile, ...], *charges: Charge) -> TileOp:
        return TileOp(label, self.warps[group], WARPS, (), slots, group=self.work.charged(*charges))

    def _product(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a product: waited for, or beside what follows; its turn is that of issuing the first and the next."""
        ops = list(super()._product(s, block, tile, group, share))
        if not self.way.ahead:
            yield from ops
            if s is self.last:
                yield self._wait("next", group, (), *self.tiling.due("tile"))
            return
        if len(ops) > 1:
            raise TilingError(f"{s.name}: a product that runs on is not converted: accumulators as the precision's")
        turn = self._take_turn(group, takes=True, gives=True) if s is self.first else ()
        met = barriers(self.work, bool(turn))
        yield self._wait(f"{s.name}.issue", group, (self.issued[s][group].fill(*SIGNAL), *turn), *met)
        (op,) = ops
        slots = *op.handshake, self.issued[s][group].front(*SIGNAL), self.done[s][group].fill(*SIGNAL)
        yield replace(op, queue=self.mma[group], handshake=slots)

    def _rows(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield rows of a tile: exponentials in the group's turn, or what a running product uses once it is done."""
        ops, (begin, end) = list(super()._rows(s, block, tile, group, share)), self.section
        if not tile.cols:
            yield from ops
            return
        is_ahead, has_turn = bool(self.way.ahead), self.way.turns == "exponentials"
        ops = ops or [self._wait(s.name, group, ())]
        if s is begin:
            scores = (self.done[self.first][group].front(*SIGNAL),) if is_ahead else ()
            later = (self.done[self.last][group].front(*SIGNAL),) if is_ahead else ()
            turn = self._take_turn(group, takes=True, gives=False) if has_turn else ()
            op, at = ops[0], self._cut(ops[0].steps, group)
            assert op.group is not None
            head = op.group.charged(*self.tiling.due("score"))
            tail = op.group.charged(*barriers(op.group, has_turn))
            ops[:1] = [
                replace(op, steps=op.steps[:at], handshake=scores, group=head),
                replace(op, steps=op.steps[at:], handshake=(*later, *turn), group=tail),
            ]
        if s is end and has_turn:
            ops[-1] = replace(ops[-1], handshake=ops[-1].handshake + self._take_turn(group, takes=False, gives=True))
        yield from ops
        if s is end and is_ahead:
            yield self._wait("next", group, (), *self.tiling.due("tile"))

    def _cut(self, steps: tuple[Step, ...], group: int) -> int:
        """Return the step with which exponentials begin, or the first one on what a running product reads or writes."""
        if self.way.ahead:
            (row,) = self.last.rows
            tiles = [self.parts[group][self.frame.storage[n]] for n in (row.srcs[0], row.dst)]
            places = {tile.offset_bytes for tile in tiles}
            touching = (any(isinstance(o, Tile) and o.offset_bytes in places for o in s.operands()) for s in steps)
            return next((i for i, touches in enumerate(touching) if touches), len(steps))
        begin = next((i for i, s in enumerate(steps) if s.opcode is Opcode.ROW_MAX), 0)
        return next((i for i, s in enumerate(steps) if i > begin and s.dst.cols > 1), len(steps))

    # ---------------------------------------------------------------- what costs depend on

    def _product_work(self, s: Stage) -> GroupWork:
        (row,) = s.rows
        columns, depth = (self._width(n) for n in (row.dst, row.srcs[0]))
        return replace(self.work, is_awaited=not self.way.ahead, columns=columns, depth=depth)

    def _rows_work(self, s: Stage) -> GroupWork:
        names = [n for n in (*s.written, *s.read) if n in self.frame.phase.names]
        return replace(self.work, columns=max((self._width(n) for n in names), default=0))


#: The view of a ring without bytes.
SIGNAL = 1, 1, "int8"
