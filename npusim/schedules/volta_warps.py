"""How FlashAttention-2 runs on a Volta multiprocessor: blocks, warps, registers, shared memory.

A block computes ``block_q`` queries of a head with some warps, four to a *warp group* (one on each
sub-core), which is a queue.  K and V come tile by tile: loads put them into registers ahead of time
(a queue of their own, since they wait for nobody), warps store them to shared memory, and every
group multiplies all of them.  S, P and O never leave the registers.  Several blocks are resident at
a time; whenever one ends, its place takes the next block of the launch (:func:`dealt_out`).

Element-wise runs work through their tile fragment by fragment: their float32 values live in a few
registers (the overhead of the device file), not in tiles.  Here they are tiles of ``sm.FUSED``,
which has no size of its own.

Left out: with FP16 scores and FP32 outputs a lane rescales rows whose factor another lane has, one
shuffle a tile; products and sums of softmax are two steps where a kernel has one FFMA.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator
from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Body, Item, Loop, Queue
from npusim.ir.tile import RingTile, Tile
from npusim.schedules.attention_blocks import (
    AttentionBlock,
    KvRun,
    KvTile,
    StageCorner,
    StageShape,
    stage_at,
    stage_of,
)
from npusim.schedules.steps.table import bind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.ir.buffers import Ring
    from npusim.ir.op import Source
    from npusim.ir.tile import GlobalTile
    from npusim.ir.warps import WarpPlan
    from npusim.schedules.attention_tensors import AttentionTensors
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.steps.table import Table
    from npusim.schedules.tiling_mask import TilingMask
    from npusim.spec.device import DeviceSpec

SM = "sm"
RF, SMEM, FUSED = "sm.RF", "sm.SMEM", "sm.FUSED"
TENSOR, FMA, MUFU, LSU, LDG, WARPS = "TENSOR", "FMA", "MUFU", "LSU", "LDG", "WARPS"


@dataclass(frozen=True, slots=True)
class VoltaTile:
    """What the mapping needs of a schedule's fields.

    ``groups`` warp groups of ``plan.warps`` each; K and V have ``depth`` slots in shared memory, with
    ``padding`` elements after each row; so has Q, if ``shares_q``, else it stays in registers.  ``plan``
    is that of S, ``plan_out`` that of O.
    """

    block_q: int
    block_kv: int
    groups: int
    residents: int
    padding: int
    depth: int
    plan: WarpPlan
    plan_out: WarpPlan
    exchanges: bool
    shares_q: bool


@dataclass(frozen=True, slots=True)
class ResidentBlock(AttentionBlock):
    """A block with its place on the core."""

    place: int = 0

    @property
    def shape(self) -> object:
        """Key that blocks with the same operations on the same queues share."""
        return (self.place, self.rows, tuple((r.cols, r.count, r.is_masked) for r in self.runs))


def dealt_out(
    blocks: Sequence[AttentionBlock], cores: int, residents: int
) -> tuple[tuple[ResidentBlock, ...], tuple[tuple[int, ...], ...]]:
    """Return the blocks with their places, and the numbers of each core's blocks in order.

    Blocks start in the order given, each at the place that is free first (the first place of every
    core before any second one), as the hardware's dispatcher does it.  How long a block takes is
    estimated: one unit a key tile, and one for its start and end.
    """
    free = [(0, place, core) for place in range(residents) for core in range(cores)]
    found: list[ResidentBlock] = []
    shares: list[list[int]] = [[] for _ in range(cores)]
    for number, b in enumerate(blocks):
        work, place, core = free[0]
        tiles = sum(run.count for run in b.runs)
        heapq.heapreplace(free, (work + tiles + 1, place, core))
        shares[core].append(number)
        found.append(
            ResidentBlock(b.batch, b.head, b.kv_head, b.row, b.rows, b.causal_offset, b.runs, place)
        )
    return tuple(found), tuple(tuple(share) for share in shares)


class VoltaCore:
    """One multiprocessor: its memories and the places of its resident blocks."""

    def __init__(
        self, device: DeviceSpec, tensors: AttentionTensors, steps: AttentionSteps, tile: VoltaTile,
        mask: TilingMask | None,
    ) -> None:  # fmt: skip
        buffers = device.core(SM).buffers
        sizes = {f"{SM}.{n}": (b.capacity_bytes.value, b.alignment_bytes.value) for n, b in buffers.items()}
        # No memory of its own: as large as the registers, of which it is a few at a time.
        sizes[FUSED] = (tile.residents * tile.groups * device.memory.gm.capacity_bytes.value, 1)
        spaces = {name: AddressSpace(name, *size) for name, size in sizes.items()}
        self.allocator = Allocator(spaces)
        self.allocator.start_phase()
        self.places = tuple(
            VoltaPlace(number, self.allocator, tensors, steps, tile, mask)
            for number in range(tile.residents)
        )
        self.allocator.check()

    def queues(self) -> tuple[Queue, ...]:
        """Return every queue of the core: a loader and the warp groups of each place."""
        names = (name for place in self.places for name in (place.loader, *place.warps))
        return tuple(Queue(name, SM, WARPS, name) for name in names)

    def block(self, block: ResidentBlock) -> Iterator[Item]:
        """Yield the items of a block at its place."""
        return self.places[block.place].block(block)


class VoltaPlace:
    """One resident block: its queues, registers and shared memory, and its items in program order.

    A warp group without rows of a ragged tile has operations without steps: it keeps step.
    """

    def __init__(
        self, number: int, allocator: Allocator, tensors: AttentionTensors, steps: AttentionSteps,
        tile: VoltaTile, mask: TilingMask | None,
    ) -> None:  # fmt: skip
        self.tensors, self.steps, self.tile, self.mask = tensors, steps, tile, mask
        self.loader = f"{SM}.B{number}LDG"
        self.warps = tuple(f"{SM}.B{number}W{g}" for g in range(tile.groups))
        d, dv, fmt = tensors.q.cols, tensors.v.cols, tensors.q.fmt
        size = get_format(fmt).size_bytes

        def ring(name: str, space: str, size_bytes: int, depth: int, *, is_loaded: bool) -> Ring:
            return allocator.ring(
                space, f"B{number} {name}", size_bytes, depth,
                producers=(self.loader,) if is_loaded else self.warps, consumers=self.warps,
            )  # fmt: skip

        rows, keys = tile.block_q, tile.block_kv
        self.q_pitch = d + tile.padding if tile.shares_q else d
        q_space = SMEM if tile.shares_q else RF
        self.q = ring("Q", q_space, rows * self.q_pitch * size, 1, is_loaded=True)
        self.k_loaded = ring("K loaded", RF, keys * d * size, 1, is_loaded=True)
        self.v_loaded = ring("V loaded", RF, keys * dv * size, 1, is_loaded=True)
        self.k = ring("K", SMEM, keys * (d + tile.padding) * size, tile.depth, is_loaded=False)
        self.v = ring("V", SMEM, keys * (dv + tile.padding) * size, tile.depth, is_loaded=False)
        self._storage = steps.storage()
        self.parts = [self._tiles(allocator, f"B{number}W{g}") for g in range(tile.groups)]

    def _tiles(self, allocator: Allocator, who: str) -> dict[str, Tile]:
        """Return a warp group's tiles by name; P takes the place of S, the result that of O."""
        steps, rows = self.steps, self.tile.block_q // self.tile.groups
        found: dict[str, Tile] = {}
        for name in dict.fromkeys(self._storage.values()):
            if name in ("P_out", "T_in", "out"):
                continue
            is_row = name in steps.row_vectors()
            width = 1 if is_row else self._width(name)
            space = RF if name in ("S_in", "O") or is_row else FUSED
            found[name] = allocator.tile(space, f"{who} {name}", rows, width, steps.formats[name])
        for name, below in (("P_out", found["S_in"]), ("out", found["O"])):
            found[name] = Tile(RF, below.offset_bytes, rows, below.cols, below.cols, steps.formats[name])
        return found

    def _width(self, name: str) -> int:
        return self.tile.block_kv if name in self.steps.score_tiles else self.tensors.v.cols

    # ---------------------------------------------------------------- items

    def block(self, block: AttentionBlock) -> Iterator[Item]:
        """Yield one Q block of one head in program order."""
        t, shares = self.tensors, self._shares(block.rows)
        q = t.q.tile(block.batch, block.head, block.row, block.rows)
        yield self._load("Q.load", self.q, q, self.q_pitch)
        for group, (_, rows) in enumerate(shares):
            yield from self._start(group, rows)
        at = 0
        for run in block.runs:
            body = partial(self._step, block, run, at)
            yield Loop("kv", range(at, at + run.count), body)
            at += run.count
        for group, (row, rows) in enumerate(shares):
            yield from self._finish(block, group, row, rows)

    def _shares(self, rows: int) -> list[tuple[int, int]]:
        """Return first row and rows of each warp group; none where there are more groups than rows."""
        count = self.tile.groups
        edges = [rows * g // count for g in range(count + 1)]
        return [(a, b - a) for a, b in pairwise(edges)]

    def _start(self, group: int, rows: int) -> Iterator[TileOp]:
        q = self.q.front(rows, self.tensors.q.cols, self.tensors.q.fmt, last=False)
        if not rows:
            yield self._run("start", group, FMA, (), self.tile.plan_out, handshake=(q,))
            return
        fills = {"O": 0.0, **self.steps.state}
        steps = tuple(Step(Opcode.FILL, self._part(group, n, rows), (v,)) for n, v in fills.items())
        yield self._run("start", group, FMA, steps, self.tile.plan_out, handshake=(q,))

    def _step(self, block: AttentionBlock, run: KvRun, first: int, index: int) -> Iterator[Loop]:
        """Yield one tile of keys, as a body that blocks and tiles of the same shape share."""
        yield Loop("", (0,), Body(self._tile, *stage_of(block, run.tile(first, index))))

    def _tile(self, static: StageShape, corner: StageCorner, _index: int) -> Iterator[TileOp]:
        block, tile = stage_at(static, corner)
        t, head, shares = self.tensors, (block.batch, block.kv_head), self._shares(block.rows)
        for name, ring, tensor in (("K", self.k_loaded, t.k), ("V", self.v_loaded, t.v)):
            source = tensor.tile(*head, tile.col, tile.cols)
            yield self._load(f"{name}.load", ring, source, tensor.cols)
        for group in range(self.tile.groups):
            yield self._store("K.store", group, self.k_loaded, self.k, tile.cols, t.k.cols)
        for group, (row, rows) in enumerate(shares):
            yield from self._scores(block, group, row, rows, tile)
        for group in range(self.tile.groups):
            yield self._store("V.store", group, self.v_loaded, self.v, tile.cols, t.v.cols)
        for group, (_, rows) in enumerate(shares):
            yield from self._output(group, rows, tile)

    def _scores(
        self, block: AttentionBlock, group: int, row: int, rows: int, tile: KvTile
    ) -> Iterator[TileOp]:
        """Yield Q Kᵀ and its softmax, and P's way to the lanes that need it.

        What a mask keeps follows from row and column: lanes compare and select, nothing is loaded.
        """
        d, fmt, plan = self.tensors.q.cols, self.tensors.q.fmt, self.tile.plan
        k = self.k.front(tile.cols, d, fmt, stride=d + self.tile.padding)
        if not rows:
            yield self._run("S.mma", group, TENSOR, (), plan, handshake=(k,))
            return
        s = self._part(group, "S_in", rows, tile.cols)
        whole = self.q.front(
            self.tile.block_q, d, fmt, first=False, last=False, stride=self.q_pitch
        )
        q = whole.part(row, rows)
        product = Attributes(transpose_b=True, arithmetic=_arithmetic(s.fmt))
        step = Step(Opcode.MATMUL, s, (q, k), product, "S_in")
        yield self._run("S.mma", group, TENSOR, (step,), plan)
        extra: dict[str, Source] = dict(self.steps.per_tile(tile.index, tile.cols))
        if tile.is_masked and self.mask:
            extra["mask"] = self.mask.cut(
                block.row + row, rows, tile.col, tile.cols, block.causal_offset
            )
        yield from self._table("softmax", group, self.steps.softmax, plan, rows, tile.cols, extra)
        p = self._part(group, "P_out", rows, tile.cols)
        if self.tile.exchanges:
            step = Step(Opcode.COPY, p, (p,))
            yield self._run("P.exchange", group, LSU, (step,), replace(plan, exchange=True))

    def _output(self, group: int, rows: int, tile: KvTile) -> Iterator[TileOp]:
        """Yield the running output's rescaling and P V on top of it."""
        dv, fmt, plan = self.tensors.v.cols, self.tensors.v.fmt, self.tile.plan_out
        v = self.v.front(tile.cols, dv, fmt, stride=dv + self.tile.padding)
        if not rows:
            yield self._run("PV.mma", group, TENSOR, (), plan, handshake=(v,))
            return
        yield from self._table("rescale", group, self.steps.update, plan, rows, tile.cols, {})
        o, p = self._part(group, "O", rows), self._part(group, "P_out", rows, tile.cols)
        chained = Attributes(accumulate=True, arithmetic=_arithmetic(o.fmt))
        yield self._run("PV.mma", group, TENSOR, (Step(Opcode.MATMUL, o, (p, v), chained),), plan)

    def _finish(self, block: AttentionBlock, group: int, row: int, rows: int) -> Iterator[TileOp]:
        t, plan = self.tensors, self.tile.plan_out
        q = self.q.front(rows, t.q.cols, t.q.fmt, first=False)
        if not rows:
            yield self._run("O.store", group, FMA, (), plan, handshake=(q,))
            return
        yield from self._table("finish", group, self.steps.finish, plan, rows, 1, {})
        out = self._part(group, "out", rows)
        where = t.o.tile(block.batch, block.head, block.row + row, rows)
        step = Step(Opcode.COPY, where, (out,))
        yield self._run("O.store", group, LDG, (step,), plan, handshake=(q,))

    # ---------------------------------------------------------------- operations

    def _load(self, label: str, ring: Ring, source: GlobalTile, pitch: int) -> TileOp:
        slot = ring.fill(source.rows, source.cols, source.fmt, stride=pitch)
        step = Step(Opcode.COPY, slot, (source,), name=label.partition(".")[0].lower())
        return TileOp(label, self.loader, LDG, (step,))

    def _store(
        self, label: str, group: int, loaded: Ring, shared: Ring, rows: int, cols: int
    ) -> TileOp:
        """Return a group's share of a tile on its way from registers to shared memory."""
        fmt = self.tensors.k.fmt
        row, count = self._shares(rows)[group]
        src = loaded.front(rows, cols, fmt).part(row, count)
        dst = shared.fill(rows, cols, fmt, stride=cols + self.tile.padding).part(row, count)
        if not count:
            return self._run(label, group, LSU, (), self.tile.plan, handshake=(src, dst))
        return self._run(label, group, LSU, (Step(Opcode.COPY, dst, (src,)),), self.tile.plan)

    def _table(
        self, label: str, group: int, table: Table, plan: WarpPlan, rows: int, cols: int,
        extra: dict[str, Source],
    ) -> Iterator[TileOp]:  # fmt: skip
        """Yield a table's rows as runs on FMA and, for exponentials of whole tiles, on MUFU."""
        bound: dict[str, Source] = dict(self.steps.constants)
        bound.update({n: self._part(group, n, rows, cols) for n in self._storage if n != "T_in"})
        run: list[Step] = []
        for step in bind(table, {**bound, **extra}):
            if step.opcode is Opcode.EXP and step.dst.cols > 1:
                yield self._run(label, group, FMA, tuple(run), plan)
                yield self._run(step.name, group, MUFU, (step,), plan)
                run = []
            else:
                run.append(step)
        yield self._run(label, group, FMA, tuple(run), plan)

    def _run(
        self, label: str, group: int, engine: str, steps: tuple[Step, ...], plan: WarpPlan,
        handshake: tuple[RingTile, ...] = (),
    ) -> TileOp:  # fmt: skip
        planned = tuple(replace(s, attributes=replace(s.attributes, warp=plan)) for s in steps)
        return TileOp(label, self.warps[group], engine, planned, handshake)

    def _part(self, group: int, name: str, rows: int, cols: int | None = None) -> Tile:
        place = self._storage[name]
        is_score = place in self.steps.score_tiles
        return self.parts[group][place].part(0, rows, 0, cols if is_score else None)


def _arithmetic(accumulator: str) -> str:
    """Return the registry name of Volta's products with accumulators of a format."""
    return f"volta.mma.k4.f16.{'f16' if accumulator == 'float16' else 'f32'}"
