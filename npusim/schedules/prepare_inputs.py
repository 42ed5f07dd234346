"""PASA's inputs before its own phases: cast to float16 and Q scaled, each tensor in a kernel of its own.

The matrix unit reads what lies in global memory, so that neither can be done on the way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.op import Opcode, Step, TileOp
from npusim.ir.program import Phase, Touch
from npusim.schedules.ascend_rows import ElementWise, RowBlock
from npusim.schedules.on_ascend import L0_EDGE, AscendGroup
from npusim.schedules.on_gpu import FMA, LSU, QUEUE, RF, GpuGroup
from npusim.schedules.steps.table import bind
from npusim.schedules.steps.unfused import CAST_INPUT, SCALE_INPUT
from npusim.units import chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.ir.op import Source
    from npusim.ir.program import Item, Serves
    from npusim.ir.tile import GlobalTensor, Tile
    from npusim.schedules.steps.table import Table


@dataclass(frozen=True, slots=True)
class Preparation:
    """One input and what becomes of it: another format, or ``scale`` times it, or both."""

    source: GlobalTensor
    out: GlobalTensor
    scale: float | None
    serves: Serves

    @property
    def table(self) -> Table:
        """The step table: out of ``X_in`` through ``X_wide`` where the format changes."""
        return SCALE_INPUT if self.source.fmt == self.out.fmt else CAST_INPUT

    @property
    def work(self) -> dict[str, str]:
        """Formats of the table's work tiles."""
        return {} if self.source.fmt == self.out.fmt else {"X_wide": "float32"}

    @property
    def constants(self) -> dict[str, float]:
        """Values bound by name."""
        return {} if self.scale is None else {"scale": self.scale}

    def phase(self, group: AscendGroup | GpuGroup) -> Phase:
        """Return the kernel as a phase on one core group's mapping."""
        name = f"prepare_{self.source.name}"
        group.allocator.start_phase()
        if isinstance(group, GpuGroup):
            return _OnGpu(self, group).phase(name)
        kernel = ElementWise(
            name, group, self.source, self.out, L0_EDGE, self.table, "X", self.constants, work=self.work
        )  # fmt: skip
        group.allocator.check()
        return kernel.phase(self.serves)


class _OnGpu:
    """Rows through an SM's registers."""

    def __init__(self, what: Preparation, group: GpuGroup) -> None:
        self.what = what
        formats = {"X_in": what.source.fmt, "X": what.out.fmt, **what.work}
        self.tiles: dict[str, Tile] = {
            name: group.allocator.tile(RF, name, L0_EDGE, what.source.cols, fmt)
            for name, fmt in formats.items()
        }
        group.allocator.check()

    def phase(self, name: str) -> Phase:
        t = self.what.source
        blocks = tuple(
            RowBlock(batch, head, row, rows)
            for batch in range(t.batch)
            for head in range(t.heads)
            for row, rows in chunks(t.rows, L0_EDGE)
        )
        return Phase(name, blocks, self.block, _shape, self.touches, serves=self.what.serves)

    def touches(self, blocks: Sequence[RowBlock]) -> Iterator[Touch]:
        for block in blocks:
            at = (block.batch, block.head, block.row, block.rows)
            yield Touch(self.what.source.tile(*at))
            yield Touch(self.what.out.tile(*at), 0)

    def block(self, block: RowBlock) -> Iterator[Item]:
        at = (block.batch, block.head, block.row, block.rows)
        tiles = {name: tile.part(0, block.rows) for name, tile in self.tiles.items()}
        bound: dict[str, Source] = {**self.what.constants, **tiles}
        load = Step(Opcode.COPY, tiles["X_in"], (self.what.source.tile(*at),))
        store = Step(Opcode.COPY, self.what.out.tile(*at), (tiles["X"],))
        yield TileOp("X.load", QUEUE, LSU, (load,))
        yield TileOp("prepare", QUEUE, FMA, bind(self.what.table, bound))
        yield TileOp("X.store", QUEUE, LSU, (store,))


def _shape(block: RowBlock) -> int:
    return block.rows
