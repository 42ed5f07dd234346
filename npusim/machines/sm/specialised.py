"""Blocks whose warps specialise (Hopper): one group copies, the others take turns; published kernels are settings.

A persistent block goes from tile of work to tile of work, its copies ahead of it.  cuDNN's groups take turns around
their exponentials, so that one multiplies while the other computes.  FlashAttention-3's take turns at issuing products,
and Q K^T of a tile is issued before P V of the one before: its softmax runs beside that P V.

Sources: NVIDIA/cudnn-frontend 3929da2, generated/sdpa/sm90/prefill (head dims 64 and 128; that others differ in
buffers alone is inferred); Dao-AILab/flash-attention 0251105, hopper/tile_size.h, mainloop_fwd_sm90_tma_gmma_ws.hpp.
Left out: lanes keep their parts of row sums till the block ends, where a sum here is one number a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.flow import views
from npusim.algorithms.phase import with_finite_starts
from npusim.config.load import list_devices, load_device
from npusim.errors import BufferOverflowError, TilingError
from npusim.formats import get_format
from npusim.ir.op import Charge, GroupWork, Opcode, TileOp
from npusim.ir.tile import Tile
from npusim.machines.sm.block import GroupBlock
from npusim.machines.sm.core import (
    COMPARISON,
    REDUCTIONS,
    RF,
    SM,
    SPECIALISED,
    TENSOR,
    WARPS,
    SmTiling,
    barriers,
    has_warps,
    warp_issue,
)
from npusim.machines.sm.groups import GROUP_ROWS, GROUP_WARPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.algorithms.phase import Phase, Stage, TileLoop, Visit, WorkTile
    from npusim.config.device import DeviceSpec
    from npusim.ir.buffers import Ring
    from npusim.ir.op import Step
    from npusim.ir.program import Item
    from npusim.ir.tile import RingTile
    from npusim.machines.frame import Frame, Span
    from npusim.machines.sm.core import SmCore, Turns

Size = tuple[int, int]
#: Registers of a thread by the number of groups that consume (setmaxnreg of FlashAttention-3), and those for addresses.
REGISTERS, ADDRESS_REGISTERS = MappingProxyType({1: 240, 2: 240, 3: 160}), 24
#: Columns of B that one product takes at most; keys are a multiple of what P V adds up at once (PTX ISA, wgmma).
MOST_COLUMNS, KEYS_MULTIPLE = 256, 16
#: Bytes of the heads whose K and V share L2: of these the longest blocks start first (hopper/tile_scheduler.hpp).
L2_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SpecialisedKernel:
    """What a published kernel does beside its formats.

    tiles
        By the bytes of an element, then by head dim as it is computed (others are filled up to the next): rows and
        keys plain, causal, and with any other mask.
    narrow
        The same where V has 128 columns or fewer.
    depth
        Tiles of K and of V, and of Q, in shared memory; fewer where they do not fit.
    turns, turn_dims
        What groups do one after the other, and at which head dims, by the bytes of an element.
    ahead
        Tiles by which Q K^T is issued before P V.
    meets
        Whether groups begin each tile of work together.
    is_flexible
        Whether it is compiled for other tiles than its own.
    starts_longest
        Whether causal blocks start with the longest, and keys with the last; else both ascend.
    counts
        Whether blocks take their work from a counter, which a memset clears: always, or where a mask makes them differ.
    bounds
        Instructions for each score where keys end within a tile and nothing is masked.
    """

    tiles: Mapping[int, Mapping[int, tuple[Size, Size, Size]]]
    depth: tuple[int, int]
    turns: Turns
    turn_dims: Mapping[int, tuple[int, int]]
    ahead: int = 0
    meets: bool = False
    is_flexible: bool = False
    starts_longest: bool = False
    counts: Literal["always", "masked"] = "masked"
    bounds: float = 0.0
    narrow: Mapping[int, tuple[Size, Size, Size]] = field(default_factory=dict)

    def head_dim(self, called: str, fmt: str, dim: int) -> int:
        """Return the head dim that it computes; raise `TilingError` where it has no layout for one."""
        layouts = self.tiles.get(get_format(fmt).size_bytes, {})
        if not any(d >= dim for d in layouts):
            most = f"the largest is {max(layouts)}" if layouts else "none in this format"
            raise TilingError(f"kernel: {called} has no layout for head_dim {dim} in {fmt}; {most}")
        return min(d for d in layouts if d >= dim)


def _sizes(rows: int, plain: int, causal: int = 0, masked: int = 0) -> tuple[Size, Size, Size]:
    return (rows, plain), (rows, causal or plain), (rows, masked or causal or plain)


#: By the name that ``kernel`` takes.  cuDNN's tiles are in its kernels' names (64x128x{64,128,256}); FlashAttention-3's
#: in hopper/tile_size.h, its turns in mainloop_fwd_sm90_tma_gmma_ws.hpp (UseSchedulerBarrier).
KERNELS: Mapping[str, SpecialisedKernel] = MappingProxyType(
    {
        "cudnn": SpecialisedKernel(
            tiles={2: dict.fromkeys((64, 128, 192, 256), _sizes(128, 128))},
            depth=(2, 2),
            turns="exponentials",
            turn_dims={2: (0, 256)},
            meets=True,
            counts="always",
            bounds=2.0,  # fitted, decided by three of h200_cudnn's cases (s1000, s3000, s5676)
        ),
        "fa3": SpecialisedKernel(
            tiles={
                2: {
                    64: _sizes(192, 192, 128),
                    96: _sizes(192, 144, 144, 128),
                    128: _sizes(128, 176, 128),
                    192: _sizes(128, 112, 112, 96),
                    256: _sizes(128, 80, 80, 64),
                },
                1: {
                    64: _sizes(192, 160),
                    96: _sizes(192, 128),
                    128: _sizes(128, 224),
                    192: _sizes(128, 160),
                    256: _sizes(128, 128),
                },
            },
            depth=(2, 1),
            turns="products",
            turn_dims={2: (0, 128), 1: (128, 256)},
            ahead=1,
            is_flexible=True,
            starts_longest=True,
            narrow={192: _sizes(128, 128, 128, 96)},
        ),
    }
)


def check_device(called: str, device: DeviceSpec) -> None:
    """Raise `TilingError` where a device has no copies of whole tiles (TMA) or no products of warp groups (wgmma)."""
    if not _specialises(device):
        names = [name for name in list_devices() if _specialises(load_device(name))]
        raise TilingError(
            f"kernel: {called} needs asynchronous copies of whole tiles (TMA) and products of warp groups (wgmma), "
            f"which {device.name} has not; devices that have: {', '.join(names)}"
        )


def _specialises(device: DeviceSpec) -> bool:
    if not has_warps(device) or warp_issue(device).sharing.specialised is None:
        return False
    return getattr(device.engine(SM, TENSOR), "wgmma", None) is not None


def chosen_tile(called: str, tiling: Any, problem: Any, device: DeviceSpec) -> Any:
    """Return a tiling with the kernel's own tile; raise `TilingError` for what the kernel decides, or has not."""
    check_device(called, device)
    kernel, named = KERNELS[called], tiling.model_fields_set
    if fixed := sorted(named & {"warps", "stages", "registers", "spilled_registers", "residents", "launch"}):
        raise TilingError(f"{', '.join(fixed)}: without effect on kernel={called}, which decides them; leave them out")
    dim = kernel.head_dim(called, problem.dtype, max(problem.head_dim, problem.value_head_dim))
    # As in hopper/tile_size.h, for 16 bits.
    is_narrow = problem.value_head_dim <= 128 and get_format(problem.dtype).size_bytes == 2
    whole = kernel.tiles[get_format(problem.dtype).size_bytes][dim]
    sizes = kernel.narrow.get(dim, whole) if is_narrow else whole
    rows, keys = sizes[int(problem.causal) if problem.seen.is_plain else 2]
    wanted = tiling.block_q if "block_q" in named else rows, tiling.block_kv or keys
    if wanted != (rows, keys) and not kernel.is_flexible:
        raise TilingError(f"block_q, block_kv: kernel={called} has tiles of {rows} x {keys} alone; leave them out")
    _check_layout(called, *wanted, dim)
    return tiling.model_copy(update={"block_q": wanted[0], "block_kv": wanted[1]})


def _check_layout(called: str, rows: int, keys: int, dim: int) -> None:
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


def ordered_as(called: str, phase: Phase) -> Phase:
    """Return the phase with keys and blocks in the kernel's order."""
    if not KERNELS[called].starts_longest:
        return phase
    blocks = tuple(replace(b, runs=tuple(r.reversed() for r in b.runs[::-1])) for b in phase.cells)
    if phase.masks:
        blocks = tuple(sorted(blocks, key=lambda b: (_section(phase, b), -b.tile_count)))
    return with_finite_starts(replace(phase, cells=blocks))


def _section(phase: Phase, block: WorkTile) -> int:
    """Return which of the heads whose K and V lie in L2 together a block is of."""
    tensors: list[Any] = [phase.tensors[n] for n in "kv"]
    head = sum(t.cols * t.rows * get_format(t.fmt).size_bytes for t in tensors)
    q: Any = phase.tensors["q"]
    number = block.batch * q.heads + block.head
    return int(number // max(1, L2_BYTES // max(1, head)))


def specialised_tiling(called: str, phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how warps of a kernel execute attention, and a note: what a block takes of a core.

    Raises `TilingError` where a tensor is added to scores and the kernel has no room for its tiles beside a product
    that runs on, ``BufferOverflowError`` where its buffers do not fit shared memory.
    """
    kernel, sizes, names = KERNELS[called], phase.sizes, phase.names
    if kernel.ahead and (added := [n for n in phase.values if names[n].axes == ("row", phase.loop_axis)]):
        able = ", ".join(name for name, one in KERNELS.items() if not one.ahead)
        raise TilingError(
            f"kernel: {called} adds no tensor to scores, and {added[0]} is one; leave kernel out, or take {able}"
        )
    rows, keys = sizes["row"], sizes[phase.loop_axis]
    size = get_format(names["q"].fmt).size_bytes
    dims = {axis: kernel.head_dim(called, names["q"].fmt, sizes[axis]) for axis in ("head", "value")}
    least, most_dim = kernel.turn_dims[size]
    groups, issue = rows // GROUP_ROWS, warp_issue(device)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    most = min(issue.block_memory_bytes.value, memory)
    loaded = dims["head"] if views(phase, phase.loop_axis) else sum(dims.values())
    q, kv = rows * dims["head"] * size, keys * loaded * size
    fits = [
        (n, m) for n in range(kernel.depth[0], 0, -1) for m in range(kernel.depth[1], 0, -1) if n * kv + m * q <= most
    ]
    if not fits:
        raise BufferOverflowError(
            f"shared memory: Q of {rows} and K and V of {keys} rows take {q + kv:,} of {most:,} bytes"
        )
    depth, held = fits[0]
    is_ragged = kernel.bounds and not phase.masks and any(r.cols % keys for b in phase.cells for r in b.runs)
    tiling = SmTiling(
        groups=groups,
        depth=depth,
        held_depth=held,
        work=GroupWork(GROUP_WARPS, is_specialised=True, consumers=groups),
        widths={phase.loop_axis: keys, **dims},
        turns=kernel.turns if least <= max(dims.values()) <= most_dim else None,
        ahead=kernel.ahead,
        meets=kernel.meets,
        charges=(
            Charge(f"{SPECIALISED}.step_cycles"),
            Charge(f"{SPECIALISED}.element_cycles", dims["value"] // 2, "end"),
            *((Charge(COMPARISON, kernel.bounds, "score"),) if is_ragged else ()),
        ),
        clears=int(kernel.counts == "always" or bool(phase.masks)),
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
        if tiling.ahead and (len(products), loop[0], loop[-1]) != (2, products[0], products[-1]):
            raise TilingError(
                f"{frame.phase.name}: softmax runs beside P V of the tile before, which adds up in O itself: a loop of "
                "two products with rows between them; kernel=cudnn, or a precision with accumulate=chained"
            )
        warps = [f"{SM}.B{number}W{g}" for g in groups]
        #: Queues of products: of their own where a group goes on beside them.
        self.mma = tuple(f"{w}MMA" for w in warps) if tiling.ahead else tuple(warps)

        def signal(name: str, producer: str, *consumers: str) -> Ring:
            return core.allocator.ring(RF, f"{who} {name}", 1, 1, producers=[producer], consumers=consumers)

        pairs = {*pairwise(groups), *([(0, tiling.groups - 1)] if tiling.groups > 1 else [])}
        #: A turn goes from each group to the next, and from the last to the first.
        self.turn = {
            (a, b): signal(f"turn {a} {b}", warps[a], warps[b]) for a, b in sorted(pairs) if tiling.turns is not None
        }
        self.met = [
            signal(f"group {g} is there", warps[g], *(w for w in warps if w != warps[g]))
            for g in groups
            if tiling.meets and tiling.groups > 1
        ]
        sides = list(zip(warps, self.mma, strict=True)) if tiling.ahead else []
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
        return None if self.tiling.ahead and self.frame.places[n] == "up" else super()._below(n, served)

    # ---------------------------------------------------------------- order

    def _loop(self, loop: TileLoop, block: WorkTile) -> Iterator[Item]:
        return self.frame.pipelined(self.parts_of_loop, block) if self.tiling.ahead else super()._loop(loop, block)

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
            if self.tiling.ahead:  # no product of the block before runs on
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
            if self.tiling.ahead:
                if slots:
                    yield TileOp("end", self.mma[group], WARPS, (), slots, group=self.work)
                slots = () if group in begun else (self.done[self.last][group].front(*SIGNAL),)
            if work is not None and group not in begun:
                work = work.charged(*self.tiling.due("end"))
            begun.add(group)
            yield replace(op, handshake=slots, group=work)

    def _take_turn(self, group: int, *, takes: bool, gives: bool) -> tuple[RingTile, ...]:
        """Return the slots in which a group takes its turn, and gives it to the next."""
        return tuple(
            (ring.fill if group == a else ring.front)(*SIGNAL, first=takes, last=gives)
            for (a, b), ring in self.turn.items()
            if group in (a, b)
        )

    def _wait(self, label: str, group: int, slots: tuple[RingTile, ...], *charges: Charge) -> TileOp:
        """Return an operation of a group that waits or hands on alone."""
        return TileOp(label, self.warps[group], WARPS, (), slots, group=self.work.charged(*charges))

    def _product(self, s: Stage, block: WorkTile, tile: Visit, group: int, share: Span) -> Iterator[TileOp]:
        """Yield a product: waited for, or beside what follows; its turn is that of issuing the first and the next."""
        ops = list(super()._product(s, block, tile, group, share))
        if not self.tiling.ahead:
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
        is_ahead, has_turn = bool(self.tiling.ahead), self.tiling.turns == "exponentials"
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
        if self.tiling.ahead:
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
        return replace(self.work, is_awaited=not self.tiling.ahead, columns=columns, depth=depth)

    def _rows_work(self, s: Stage) -> GroupWork:
        names = [n for n in (*s.written, *s.read) if n in self.frame.phase.names]
        return replace(self.work, columns=max((self._width(n) for n in names), default=0))


#: The view of a ring without bytes.
SIGNAL = 1, 1, "int8"
