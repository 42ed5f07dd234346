"""How attention runs on a streaming multiprocessor, tile by tile and without time.

One instruction queue; tiles sit in registers and shared memory and every product starts from the
accumulator's registers, so that P V may be chained onto the running output.  Lanes, warps, copies
that overlap and their cycles are not modelled here: values only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.ir.buffers import AddressSpace, Allocator
from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Body, Item, Loop, Queue, Touch
from npusim.schedules.attention_blocks import (
    AttentionBlock,
    KvRun,
    StageCorner,
    StageShape,
    stage_at,
    stage_of,
)
from npusim.schedules.steps.table import bind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.ir.op import Source
    from npusim.ir.tile import Tile
    from npusim.schedules.attention_tensors import AttentionTensors
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.steps.table import Table
    from npusim.schedules.tiling_mask import TilingMask
    from npusim.spec.device import DeviceSpec

SM = "sm"
QUEUE = "sm.warps"
RF, SMEM = "sm.RF", "sm.SMEM"
TENSOR, FMA, LSU = "TENSOR", "FMA", "LSU"


class GpuGroup:
    """One streaming multiprocessor: allocates tiles, knows the device's matrix arithmetic."""

    def __init__(self, device: DeviceSpec) -> None:
        if device.is_timed:
            raise SpecError(
                f"{device.name}: this schedule has no warps, which the device's timing needs; "
                "volta_flash has, and devices for values only (h200) take this one"
            )
        self.device = device
        spaces = {
            f"{SM}.{name}": AddressSpace(
                f"{SM}.{name}", b.capacity_bytes.value, b.alignment_bytes.value
            )
            for name, b in device.core(SM).buffers.items()
        }
        self.allocator = Allocator(spaces)
        self.allocator.start_phase()

    def queues(self) -> tuple[Queue, ...]:
        """Return the one queue."""
        return (Queue(QUEUE, SM, TENSOR, SM),)

    def arithmetic(self, fmt: str) -> str:
        """Return the registry name of the tensor core's arithmetic for operands of ``fmt``."""
        return self.device.matrix_engine(SM).arithmetic_of(fmt)


class GpuAttention:
    """Emits the items of attention blocks on one SM."""

    def __init__(
        self, group: GpuGroup, tensors: AttentionTensors, steps: AttentionSteps, block_q: int, block_kv: int,
        mask: TilingMask | None = None,
    ) -> None:  # fmt: skip
        self.tensors, self.steps, self.mask = tensors, steps, mask
        f, chosen = steps.formats, steps.arithmetic
        self.qk = Attributes(transpose_b=True, arithmetic=chosen or group.arithmetic(tensors.q.fmt))
        self.pv = Attributes(arithmetic=chosen or group.arithmetic(f["P_out"]))
        place, d, dv = group.allocator.tile, tensors.q.cols, tensors.v.cols
        self.q = place(SMEM, "Q", block_q, d, tensors.q.fmt)
        self.k = place(SMEM, "K", block_kv, d, tensors.k.fmt)
        self.v = place(SMEM, "V", block_kv, dv, tensors.v.fmt)
        self.cut = place(SMEM, "mask", block_q, block_kv, "int8") if mask else None
        self.scores = place(RF, "S accumulator", block_q, block_kv, self.qk.accumulator_format)
        self.product = place(RF, "P V accumulator", block_q, dv, self.pv.accumulator_format)
        self.tiles: dict[str, Tile] = {}
        self._storage = steps.storage()
        for name in dict.fromkeys(self._storage.values()):
            if not (name == "T_in" and steps.accumulate == "chained"):
                self.tiles[name] = place(
                    RF, name, block_q, self._width(name, block_kv, dv), f[name]
                )

    def _width(self, name: str, block_kv: int, value_dim: int) -> int:
        if name in self.steps.row_vectors():
            return 1
        return block_kv if name in self.steps.score_tiles else value_dim

    def touches(self, blocks: Sequence[AttentionBlock]) -> Iterator[Touch]:
        """Yield what blocks in step read and write."""
        return self.tensors.touches(blocks)

    def block(self, block: AttentionBlock) -> Iterator[Item]:
        """Yield one Q block of one head in program order."""
        t = self.tensors
        q = self.q.part(0, block.rows)
        yield _op(
            "Q.load",
            LSU,
            Step(Opcode.COPY, q, (t.q.tile(block.batch, block.head, block.row, block.rows),)),
        )
        fills = {"O": 0.0, **self.steps.state}
        yield TileOp(
            "state.start", QUEUE, FMA,
            tuple(Step(Opcode.FILL, self._part(n, block.rows), (v,)) for n, v in fills.items()),
        )  # fmt: skip
        at = 0
        for run in block.runs:
            body = partial(self._step, block, run, at)
            yield Loop("kv", range(at, at + run.count), body)
            at += run.count
        yield self._steps("finish", self.steps.finish, block.rows, {})
        out = t.o.tile(block.batch, block.head, block.row, block.rows)
        yield _op("O.store", LSU, Step(Opcode.COPY, out, (self._part("out", block.rows),)))

    def _step(self, block: AttentionBlock, run: KvRun, first: int, index: int) -> Iterator[Loop]:
        """Yield one tile of keys, as a body that blocks and tiles of the same shape share."""
        yield Loop("", (0,), Body(self._tile, *stage_of(block, run.tile(first, index))))

    def _tile(self, static: StageShape, at: StageCorner, _index: int) -> Iterator[TileOp]:
        block, tile = stage_at(static, at)
        t, rows, head = self.tensors, block.rows, (block.batch, block.kv_head)
        k, v = self.k.part(0, tile.cols), self.v.part(0, tile.cols)
        keys = t.k.tile(*head, tile.col, tile.cols)
        yield _op("K.load", LSU, Step(Opcode.COPY, k, (keys,), name="k"))
        yield _op("V.load", LSU, Step(Opcode.COPY, v, (t.v.tile(*head, tile.col, tile.cols),)))
        scores = self.scores.part(0, rows, 0, tile.cols)
        yield _op("S.mma", TENSOR, Step(Opcode.MATMUL, scores, (self.q.part(0, rows), k), self.qk))
        stored = self._part("S_in", rows, tile.cols)
        yield _op("S.convert", FMA, replace(_convert(stored, scores), name="S_in"))
        extra: dict[str, Source] = dict(self.steps.per_tile(tile.index, tile.cols))
        if tile.is_masked and self.mask and self.cut:
            cut = self.mask.cut(block.row, rows, tile.col, tile.cols, block.causal_offset)
            extra["mask"] = self.cut.part(0, rows, 0, tile.cols)
            yield _op(
                "mask.load", LSU, Step(Opcode.COPY, self.cut.part(0, rows, 0, tile.cols), (cut,))
            )
        yield self._steps("softmax", self.steps.softmax, rows, extra, tile.cols)
        p = self._part("P_out", rows, tile.cols)
        if self.steps.accumulate == "chained":
            yield self._steps("update", self.steps.update, rows, {})
            chained = replace(self.pv, accumulate=True)
            yield _op("PV.mma", TENSOR, Step(Opcode.MATMUL, self._part("O", rows), (p, v), chained))
            return
        product = self.product.part(0, rows)
        yield _op("PV.mma", TENSOR, Step(Opcode.MATMUL, product, (p, v), self.pv))
        yield _op("PV.convert", FMA, _convert(self._part("T_in", rows), product))
        yield self._steps("update", self.steps.update, rows, {})

    def _part(self, name: str, rows: int, cols: int | None = None) -> Tile:
        place = self._storage[name]
        return self.tiles[place].part(0, rows, 0, cols if place in self.steps.score_tiles else None)

    def _steps(
        self, label: str, table: Table, rows: int, extra: dict[str, Source], cols: int | None = None
    ) -> TileOp:
        bound: dict[str, Source] = dict(self.steps.constants)
        bound.update(
            {n: self._part(n, rows, cols) for n, p in self._storage.items() if p in self.tiles}
        )
        return TileOp(label, QUEUE, FMA, bind(table, {**bound, **extra}))


def _convert(dst: Tile, src: Tile) -> Step:
    """Return the accumulator's way into the format it is kept in."""
    return Step(Opcode.COPY if dst.fmt == src.fmt else Opcode.CAST, dst, (src,))


def _op(label: str, engine: str, step: Step) -> TileOp:
    return TileOp(label, QUEUE, engine, (step,))
