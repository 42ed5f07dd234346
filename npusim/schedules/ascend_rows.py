"""Element-wise and row-wise kernels on the AIVs: rows stream from GM through UB and back.

Rows of a matrix are cut into slices of what fits into UB; a slice is loaded, worked on by one step
table and stored.  Rows too long for UB are worked on in chunks of columns, in two passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode, Step, TileOp
from npusim.ir.program import Item, Phase, Serves, Touch
from npusim.schedules.on_ascend import (
    PING_PONG,
    SLICE_ELEMENTS,
    UB_BLOCK_BYTES,
    AscendGroup,
    RowSlice,
    VectorCore,
    compute,
    move,
)  # fmt: skip
from npusim.schedules.steps.table import Table, bind, choose
from npusim.schedules.steps.unfused import NORMALISE, SOFTMAX, STATISTICS
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.ir.buffers import Ring
    from npusim.ir.op import Source
    from npusim.ir.tile import GlobalTensor, GlobalTile, Tile


@dataclass(frozen=True, slots=True)
class RowBlock:
    """``rows`` rows of one head from ``row``, shared by a group's vector cores."""

    batch: int
    head: int
    row: int
    rows: int

    def __str__(self) -> str:
        return f"batch {self.batch} head {self.head} rows {self.row}..{self.row + self.rows - 1}"


MaskCut = Callable[[int, int, int, int], "GlobalTile | None"]


class AscendRows:
    """Emits one kernel over the rows of a tensor: ``out`` = table(``source``)."""

    def __init__(
        self, name: str, group: AscendGroup, source: GlobalTensor, out: GlobalTensor, block_rows: int,
        constants: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.group, self.source, self.out = name, group, source, out
        self.block_rows, self.constants = block_rows, constants or {}
        self.passes = 1
        self.cols = min(source.cols, SLICE_ELEMENTS)
        self.slice_rows = max(1, min(group.largest_share(block_rows), SLICE_ELEMENTS // self.cols))

    def phase(self, serves: Serves = "rows") -> Phase:
        """Return the kernel as a phase of a program; ``serves`` as in `Phase`."""
        blocks = tuple(
            RowBlock(batch, head, row, rows)
            for batch in range(self.source.batch)
            for head in range(self.source.heads)
            for row, rows in chunks(self.source.rows, self.block_rows)
        )
        return Phase(self.name, blocks, self.block, _shape, self.touches, serves=serves)

    def touches(self, blocks: Sequence[RowBlock]) -> Iterator[Touch]:
        """Yield the rows a block reads (twice where they do not fit UB whole) and writes."""
        for block in blocks:
            at = (block.batch, block.head, block.row, block.rows)
            yield Touch(self.source.tile(*at), self.passes)
            yield Touch(self.out.tile(*at), 0)

    def block(self, block: RowBlock) -> Iterator[Item]:
        """Yield the slices of every vector core's share."""
        shares = self.group.row_slices(block.rows, self.slice_rows)
        for core, slices in zip(self.group.vector_cores, shares, strict=True):
            for part in slices:
                yield from self.slice(core, block, part)

    def slice(self, core: VectorCore, block: RowBlock, part: RowSlice) -> Iterator[TileOp]:
        """Yield one slice of rows; kernels define it."""
        raise NotImplementedError

    @staticmethod
    def _stored(tensor: GlobalTensor, elements: int) -> int:
        return elements * get_format(tensor.fmt).size_bytes

    def _cut(
        self, tensor: GlobalTensor, block: RowBlock, part: RowSlice, col: int, cols: int
    ) -> GlobalTile:
        return tensor.tile(block.batch, block.head, block.row + part.row, part.rows, col, cols)


class ElementWise(AscendRows):
    """One step table over all elements, chunk by chunk: ``what`` from ``what_in``.

    ``work`` gives the formats of further tiles the table names; with ``mask`` it has a mask to select by.
    """

    def __init__(
        self, name: str, group: AscendGroup, source: GlobalTensor, out: GlobalTensor, block_rows: int,
        table: Table, what: str, constants: dict[str, float], *,
        work: Mapping[str, str] | None = None, mask: MaskCut | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, group, source, out, block_rows, constants)
        self.table, self.what, self.mask_cut = table, what, mask
        size = self.slice_rows * self.cols
        self.rings = {
            core.index: (
                group.ub_in(core, f"{name} in", self._stored(source, size), PING_PONG),
                group.ub_out(core, f"{name} out", self._stored(out, size), PING_PONG),
                group.ub_in(core, f"{name} mask", size, PING_PONG) if mask else None,
            )
            for core in group.vector_cores
        }
        self.work = {
            core.index: {
                n: group.allocator.tile(core.ub, n, self.slice_rows, self.cols, fmt)
                for n, fmt in (work or {}).items()
            }
            for core in group.vector_cores
        }

    def slice(self, core: VectorCore, block: RowBlock, part: RowSlice) -> Iterator[TileOp]:
        """Yield the columns of one slice of rows, chunk by chunk."""
        ring_in, ring_out, mask = self.rings[core.index]
        what, out_fmt = self.what, self.out.fmt
        for col, cols in chunks(self.source.cols, self.cols):
            shape = (part.rows, cols)
            source = self._cut(self.source, block, part, col, cols)
            yield move(f"{what}.load", core.load, ring_in.fill(*shape, source.fmt), source)
            bound: dict[str, Source] = {
                **self.constants,
                f"{what}_in": ring_in.front(*shape, source.fmt),
                what: ring_out.fill(*shape, out_fmt),
                **{n: t.part(0, part.rows, 0, cols) for n, t in self.work[core.index].items()},
            }
            if mask is not None and self.mask_cut is not None:
                cut = self.mask_cut(block.row + part.row, part.rows, col, cols)
                assert cut is not None
                yield move("mask.load", core.load, mask.fill(*shape, "int8"), cut)
                bound["mask"] = mask.front(*shape, "int8")
            yield compute(self.name, core.vector, bind(self.table, bound))
            target = self._cut(self.out, block, part, col, cols)
            yield move(f"{what}.store", core.store, target, ring_out.front(*shape, out_fmt))


class Softmax(AscendRows):
    """Softmax of stored scores, float32 inside, with ``choices`` of exponential and row sum."""

    def __init__(
        self, group: AscendGroup, source: GlobalTensor, out: GlobalTensor, block_rows: int,
        choices: Mapping[Opcode, Attributes],
    ) -> None:  # fmt: skip
        super().__init__("softmax", group, source, out, block_rows)
        self.choices = choices
        self.passes = 1 if source.cols <= self.cols else 2
        size = self.slice_rows * self.cols
        tile = group.allocator.tile
        self.rings: dict[int, tuple[Ring, Ring]] = {}
        self.kept: dict[int, dict[str, Tile]] = {}
        blocks = ceil_div(self.cols * get_format("float32").size_bytes, UB_BLOCK_BYTES)
        for core in group.vector_cores:
            ub = core.ub
            self.rings[core.index] = (
                group.ub_in(core, "softmax S", self._stored(source, size), PING_PONG),
                group.ub_out(core, "softmax P", self._stored(out, size), PING_PONG),
            )
            self.kept[core.index] = {
                "X": tile(ub, "X", self.slice_rows, self.cols, "float32"),
                **{
                    n: tile(ub, n, self.slice_rows, 1, "float32")
                    for n in ("m", "m_new", "m_part", "l", "l_part")
                },
            }
            tile(ub, "reduction", self.slice_rows, blocks, "float32")

    def slice(self, core: VectorCore, block: RowBlock, part: RowSlice) -> Iterator[TileOp]:
        """Yield one slice of rows: in one pass if whole rows fit, else in two over chunks."""
        columns = list(chunks(self.source.cols, self.cols))
        if len(columns) == 1:
            yield from self._pass(core, block, part, columns, SOFTMAX)
            return
        kept = self.kept[core.index]
        fills = (
            Step(Opcode.FILL, kept["m"].part(0, part.rows), (-math.inf,)),
            Step(Opcode.FILL, kept["l"].part(0, part.rows), (0.0,)),
        )
        yield compute("state.start", core.vector, fills)
        yield from self._pass(core, block, part, columns, STATISTICS)
        yield from self._pass(core, block, part, columns, NORMALISE)

    def _pass(
        self,
        core: VectorCore,
        block: RowBlock,
        part: RowSlice,
        columns: list[tuple[int, int]],
        table: Table,
    ) -> Iterator[TileOp]:
        s_in, p_out = self.rings[core.index]
        writes = any(r.dst == "P" for r in table)
        for col, cols in columns:
            shape = (part.rows, cols)
            source = self._cut(self.source, block, part, col, cols)
            yield move("S.load", core.load, s_in.fill(*shape, source.fmt), source)
            bound: dict[str, Source] = {
                name: t.part(0, part.rows, 0, cols if name == "X" else 1)
                for name, t in self.kept[core.index].items()
            }
            bound["S_in"] = s_in.front(*shape, source.fmt)
            if writes:
                bound["P"] = p_out.fill(*shape, self.out.fmt)
            yield compute("softmax", core.vector, bind(choose(table, self.choices), bound))
            if writes:
                target = self._cut(self.out, block, part, col, cols)
                yield move("P.store", core.store, target, p_out.front(*shape, self.out.fmt))


def _shape(block: RowBlock) -> Hashable:
    return block.rows
