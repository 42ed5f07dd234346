"""A matrix product on the AICs, tile by tile: C = A B, or A B^T, for every head of a batch.

Each block is one tile of C.  Operands stream through L1 in pieces of ``block_k`` and accumulate in
L0C in ascending k; the fixpipe stores the tile once, cast on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.op import Attributes, TileOp
from npusim.ir.program import Item, Loop, Phase, Touch
from npusim.schedules.fit import check_operands
from npusim.schedules.on_ascend import FIXP, MTE2, AscendGroup, move, product, whole
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from npusim.ir.tile import GlobalTensor, GlobalTile


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """Tile of C and the piece of k that is loaded at once."""

    block_m: int
    block_n: int
    block_k: int
    l1_depth: int = 2


@dataclass(frozen=True, slots=True)
class GemmBlock:
    """One tile of C of one head."""

    batch: int
    head: int
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True, slots=True)
class GemmOperands:
    """C = A B; with ``transpose_b`` the tensor ``b`` holds B^T.  A's heads may share B's.

    ``name`` is what an algorithm calls C (`npusim.ir.op.Step`).
    """

    a: GlobalTensor
    b: GlobalTensor
    c: GlobalTensor
    transpose_b: bool = False
    name: str = ""

    @property
    def depth(self) -> int:
        """Length of the sums."""
        return self.a.cols

    def right(self, block: GemmBlock, k: int, size: int) -> GlobalTile:
        """Return the piece of B (or of B^T as stored) that a tile of C needs."""
        head = block.head // (self.a.heads // self.b.heads)
        if self.transpose_b:
            return self.b.tile(block.batch, head, block.col, block.cols, k, size)
        return self.b.tile(block.batch, head, k, size, block.col, block.cols)


class AscendGemm:
    """Emits the tiles of one product as a phase of a program."""

    def __init__(
        self,
        name: str,
        group: AscendGroup,
        operands: GemmOperands,
        tiling: GemmTiling,
        arithmetic: str = "",
    ) -> None:
        self.name, self.operands, self.tiling = name, operands, tiling
        t, fmt = tiling, operands.a.fmt
        self.how = Attributes(
            transpose_b=operands.transpose_b, arithmetic=arithmetic or group.arithmetic(fmt)
        )
        check_operands(name, self.how.arithmetic, operands.a.fmt, operands.b.fmt)
        self.rings = group.cube_rings(
            f"{name} ", t.block_m, t.block_n, t.block_k,
            operand=fmt, accumulator=self.how.accumulator_format,
        )  # fmt: skip
        self.a_l1 = group.l1_ring(f"{name} A", t.block_m, t.block_k, fmt, t.l1_depth)
        self.b_l1 = group.l1_ring(f"{name} B", t.block_k, t.block_n, fmt, t.l1_depth)

    def phase(self) -> Phase:
        """Return the product as a phase: tiles of C row by row, head by head."""
        c, t = self.operands.c, self.tiling
        blocks = tuple(
            GemmBlock(batch, head, row, rows, col, cols)
            for batch in range(c.batch)
            for head in range(c.heads)
            for row, rows in chunks(c.rows, t.block_m)
            for col, cols in chunks(c.cols, t.block_n)
        )
        return Phase(self.name, blocks, self.block, _shape, self.touches)

    def touches(self, blocks: Sequence[GemmBlock]) -> Iterator[Touch]:
        """Yield the panels of A and B a tile of C needs, and the tile."""
        o = self.operands
        for block in blocks:
            yield Touch(o.a.tile(block.batch, block.head, block.row, block.rows))
            yield Touch(o.right(block, 0, o.depth))
            yield Touch(
                o.c.tile(block.batch, block.head, block.row, block.rows, block.col, block.cols), 0
            )

    def block(self, block: GemmBlock) -> Iterator[Item]:
        """Yield one tile of C, k ascending."""
        depth, size = self.operands.depth, self.tiling.block_k
        last = ceil_div(depth, size) - 1
        yield from self._piece(block, 0, min(size, depth), start=True, end=last == 0)
        if last > 1:
            yield Loop("k", range(1, last), lambda i: self._piece(block, i * size, size))
        if last > 0:
            yield from self._piece(block, last * size, depth - last * size, end=True)
        done = self.rings.accumulator.front(block.rows, block.cols, self.how.accumulator_format)
        target = self.operands.c.tile(
            block.batch, block.head, block.row, block.rows, block.col, block.cols
        )
        yield move(f"{self.name}.store", FIXP, target, done, name=self.operands.name)

    def _piece(
        self, block: GemmBlock, k: int, size: int, *, start: bool = False, end: bool = False
    ) -> Iterator[TileOp]:
        o = self.operands
        left = o.a.tile(block.batch, block.head, block.row, block.rows, k, size)
        right = o.right(block, k, size)
        yield move(
            f"{self.name}.load_a", MTE2, self.a_l1.fill(left.rows, left.cols, left.fmt), left
        )
        yield move(
            f"{self.name}.load_b", MTE2, self.b_l1.fill(right.rows, right.cols, right.fmt), right
        )
        a, b = (
            self.a_l1.front(left.rows, left.cols, left.fmt),
            self.b_l1.front(right.rows, right.cols, right.fmt),
        )
        yield from product(
            self.name, self.rings, block.rows, block.cols, size,
            left=whole(a), right=whole(b), attributes=self.how,
            start=start, end=end, piece=size,
        )  # fmt: skip


def _shape(block: GemmBlock) -> Hashable:
    return block.rows, block.cols
