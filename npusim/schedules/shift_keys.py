"""PASA's pre-processing: K' = M K, block of keys by block of keys, as a batched GEMM of its own.

One block of keys is multiplied by the shifting matrix of its length (ragged tails have their own),
accumulated in the matrix unit and stored once in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Item, Phase, Touch
from npusim.ir.tile import GlobalTensor, RingTile
from npusim.schedules.on_ascend import FIXP, L0_EDGE, MTE2, AscendGroup, move, product
from npusim.schedules.on_gpu import LSU, QUEUE, RF, SMEM, TENSOR, GpuGroup
from npusim.units import chunks

if TYPE_CHECKING:
    from npusim.ir.buffers import Ring
    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """``keys`` keys of one KV head from ``row``."""

    batch: int
    head: int
    row: int
    keys: int

    def __str__(self) -> str:
        return f"batch {self.batch} KV head {self.head} keys {self.row}..{self.row + self.keys - 1}"


def key_blocks(problem: Problem, keys: int) -> tuple[KeyBlock, ...]:
    """Return the blocks of keys of every KV head."""
    return tuple(
        KeyBlock(batch, head, row, count)
        for batch in range(problem.batch)
        for head in range(problem.kv_heads)
        for row, count in chunks(problem.seq_kv, keys)
    )


@dataclass(frozen=True, slots=True)
class ShiftedKeys:
    """Tensors of the pre-processing: K in, K' out, and M by length of block."""

    keys: GlobalTensor
    shifted: GlobalTensor
    matrices: dict[int, GlobalTensor]

    def phase(
        self, problem: Problem, block: int, group: AscendGroup | GpuGroup, arithmetic: str
    ) -> Phase:
        """Return the phase that computes K' on one core group's mapping."""
        how = Attributes(arithmetic=arithmetic or group.arithmetic(self.keys.fmt))
        mapping: _OnAscend | _OnGpu
        if isinstance(group, AscendGroup):
            mapping = _OnAscend(self, block, group, how)
        else:
            mapping = _OnGpu(self, block, group, how)
        return Phase(
            "shift_keys",
            key_blocks(problem, block),
            mapping.block,
            _shape,
            self.touches,
            serves="kv_head",
        )

    def touches(self, blocks: Sequence[KeyBlock]) -> Iterator[Touch]:
        """Yield the block of keys, the shifting matrix, and the shifted keys."""
        for block in blocks:
            at = (block.batch, block.head, block.row, block.keys)
            yield Touch(self.keys.tile(*at))
            yield Touch(self.matrices[block.keys].tile(0, 0, 0, block.keys))
            yield Touch(self.shifted.tile(*at), 0)


def _shape(block: KeyBlock) -> int:
    return block.keys


class _OnAscend:
    """K' on the AIC: both operands through L1, products in bands of 128 rows, FIXP to GM."""

    def __init__(
        self, tensors: ShiftedKeys, block: int, group: AscendGroup, how: Attributes
    ) -> None:
        self.tensors, self.how = tensors, how
        self.rings = group.cube_rings(
            "shift ", min(L0_EDGE, block), min(L0_EDGE, tensors.keys.cols), min(L0_EDGE, block),
            operand=tensors.keys.fmt, accumulator=how.accumulator_format,
        )  # fmt: skip
        self.m_l1 = group.l1_ring("M", block, block, tensors.keys.fmt, depth=1)
        self.k_l1 = group.l1_ring("K block", block, tensors.keys.cols, tensors.keys.fmt)

    def block(self, block: KeyBlock) -> Iterator[Item]:
        t, n, d, fmt = self.tensors, block.keys, self.tensors.keys.cols, self.tensors.keys.fmt
        yield move("M.load", MTE2, self.m_l1.fill(n, n, fmt), t.matrices[n].tile(0, 0, 0, n))
        source = t.keys.tile(block.batch, block.head, block.row, n)
        yield move("K.load", MTE2, self.k_l1.fill(n, d, fmt), source)
        corners = [(band, part) for band in chunks(n, L0_EDGE) for part in chunks(d, L0_EDGE)]
        for index, ((row, rows), (col, cols)) in enumerate(corners):
            last = index == len(corners) - 1
            left = self._held(self.m_l1, n, n, index == 0, last)
            right = self._held(self.k_l1, n, d, index == 0, last)
            yield from product(
                "shift", self.rings, rows, cols, n,
                left=partial(_cut_left, left, row, rows), right=partial(_cut_right, right, col, cols),
                attributes=self.how,
            )  # fmt: skip
            done = self.rings.accumulator.front(rows, cols, self.how.accumulator_format)
            target = t.shifted.tile(block.batch, block.head, block.row + row, rows, col, cols)
            yield move("K'.drain", FIXP, target, done, name="k_shifted")

    def _held(self, ring: Ring, rows: int, cols: int, first: bool, last: bool) -> Held:
        def held(k: int, size: int) -> RingTile:
            starts, ends = first and k == 0, last and k + size == rows
            return ring.front(rows, cols, self.tensors.keys.fmt, first=starts, last=ends)

        return held


Held = Callable[[int, int], RingTile]


def _cut_left(held: Held, row: int, rows: int, k: int, size: int) -> RingTile:
    return held(k, size).part(row, rows, k, size)


def _cut_right(held: Held, col: int, cols: int, k: int, size: int) -> RingTile:
    return held(k, size).part(k, size, col, cols)


class _OnGpu:
    """K' on an SM: one product a block."""

    def __init__(self, tensors: ShiftedKeys, block: int, group: GpuGroup, how: Attributes) -> None:
        self.tensors, self.how = tensors, how
        place, d, fmt = group.allocator.tile, tensors.keys.cols, tensors.keys.fmt
        self.m, self.k = place(SMEM, "M", block, block, fmt), place(SMEM, "K block", block, d, fmt)
        self.accumulator = place(RF, "K' accumulator", block, d, how.accumulator_format)
        self.out = place(RF, "K'", block, d, tensors.shifted.fmt)

    def block(self, block: KeyBlock) -> Iterator[Item]:
        t, n = self.tensors, block.keys
        m, k = self.m.part(0, n, 0, n), self.k.part(0, n)
        source = t.keys.tile(block.batch, block.head, block.row, n)
        target = t.shifted.tile(block.batch, block.head, block.row, n)
        total, out = self.accumulator.part(0, n), self.out.part(0, n)
        yield TileOp(
            "M.load", QUEUE, LSU, (Step(Opcode.COPY, m, (t.matrices[n].tile(0, 0, 0, n),)),)
        )
        yield TileOp("K.load", QUEUE, LSU, (Step(Opcode.COPY, k, (source,)),))
        yield TileOp("shift.mma", QUEUE, TENSOR, (Step(Opcode.MATMUL, total, (m, k), self.how),))
        convert = Step(Opcode.CAST, out, (total,), name="k_shifted")
        yield TileOp("K'.convert", QUEUE, TENSOR, (convert,))
        yield TileOp("K'.store", QUEUE, LSU, (Step(Opcode.COPY, target, (out,)),))
