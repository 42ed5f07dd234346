"""A resident block where warp groups work beside one another: software stages, warps, and what they do besides.

With ``stages`` an iteration ends with the issue of a later tile's copies, which is what lets its
operands' places go: two stages wait for each load from there on, three run one tile ahead.  One stage
goes through registers.  Every operation is a run of all instructions of its stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.ir.op import GroupWork, TileOp
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.block import ResidentBlock
from npusim.machines.sm.core import LDG, LSU, TENSOR, WARPS
from npusim.machines.sm.group_cost import ACCESS_BYTES
from npusim.machines.sm.groups import GROUP_WARPS
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.algorithms.phase import Stage, Visit, WorkTile
    from npusim.ir.op import Step
    from npusim.ir.tile import RingTile


class GroupBlock(ResidentBlock):
    """The ``number``-th resident block of such a core."""

    @property
    def work(self) -> GroupWork:
        """How a group of warps executes what says nothing else."""
        work = self.tiling.work or GroupWork(GROUP_WARPS)
        return work if self.how else replace(work, is_even=True)

    def _tile(self, stages: tuple[Stage, ...], cell: WorkTile, tile: Visit) -> Iterator[TileOp]:
        products = [s for s in stages if s.is_product]
        if not tile.cols or not products:
            yield from super()._tile(stages, cell, tile)
            return
        operands = tuple(dict.fromkeys(n for s in products for n in s.rows[0].srcs if n in self.shared))
        if self.tiling.stages == 1:
            yield from self._staged_tile(stages, operands, cell, tile)
        else:
            yield from super()._tile(stages, cell, tile)
        if self.work.is_specialised:
            return
        slots: tuple[RingTile, ...] = ()
        copies = 0 if self.tiling.stages == 1 else sum(self._accesses(n, cell, tile) for n in operands)
        if self.keeps_operands:
            slots = tuple(self._slot(self.near[n], n, cell, tile, first=False, last=True) for n in operands)
        elif self.tiling.stages == 1:
            n = operands[0]
            slots = (self._slot(self.loaded[n], n, cell, tile, first=False, last=True),)
        work = replace(self.work, copies=copies, is_step=True, barriers=1)
        spilled = replace(self.work, spilled_bytes=self.tiling.spilled_bytes, far_bytes=self.tiling.far_bytes)
        for warps in self.warps:
            if spilled.spilled_bytes or spilled.far_bytes:
                yield TileOp("spill", warps, WARPS, (), (), group=spilled)
            yield TileOp("next", warps, WARPS, (), slots, group=work)

    def _staged_tile(
        self, stages: tuple[Stage, ...], operands: tuple[str, ...], cell: WorkTile, tile: Visit
    ) -> Iterator[TileOp]:
        """Yield a tile whose operands go through registers: each is loaded once the one before is stored.

        The first one's registers are free when the iteration ends, so that its load is waited for.
        """
        shares = self._shares(cell.rows)
        for n in self.frame.visited:
            if n not in operands:
                yield self._load(n, cell, tile)
        before: tuple[RingTile, ...] = ()
        for n in operands:
            yield self._load(n, cell, tile, before)
            before = (self._slot(self.loaded[n], n, cell, tile),)
        left = list(operands)
        for s in stages:
            while s.is_product and left and left[0] in s.rows[0].srcs:
                yield from self._store(n := left.pop(0), cell, tile, last=n != self.shared[0])
            for group, rows in enumerate(shares):
                yield from (self._product if s.is_product else self._rows)(s, cell, tile, group, rows)
            if s.is_product and left:
                yield from self._store(n := left.pop(0), cell, tile, last=n != self.shared[0])

    def _accesses(self, n: str, cell: WorkTile, tile: Visit) -> int:
        """Return how often each thread of a block accesses a tile of an operand."""
        rows, cols, _ = self.frame.shape(n, cell, tile)
        each = ACCESS_BYTES * WARP_LANES * self.work.warps * self.tiling.groups
        return ceil_div(self.frame.size_bytes(n, rows * cols), each)

    def _op(
        self,
        label: str,
        s: Stage,
        group: int,
        engine: str,
        steps: tuple[Step, ...],
        handshake: tuple[RingTile, ...] = (),
    ) -> TileOp:
        work: GroupWork | None = None
        if engine == TENSOR:
            work = self._product_work(s)
        elif engine == LSU:
            work = self._store_work(steps)
        elif engine != LDG:
            work = self._rows_work(s)
            if label == "start":
                held = sum(
                    self.frame.row_bytes(n, self.frame.phase.sizes[self.frame.row_axis])
                    for n, place in self.frame.places.items()
                    if n in self.frame.held or place == "out"
                )
                work = replace(work, cell_bytes=max(1, held // self.tiling.groups))
        return TileOp(label, self.warps[group], engine, steps, handshake, group=work)

    def _product_work(self, s: Stage) -> GroupWork:
        left, work = s.rows[0].srcs[0], self.work
        if work.repeats > 1 and left not in self.near:
            work = replace(work, repeats=1, across=work.repeats)
        awaited = not self.how[s].accumulate or self.tiling.stages == 1
        barriers = 0 if work.is_specialised or left not in self.near else 1
        return replace(work, is_awaited=awaited, barriers=barriers)

    def _rows_work(self, s: Stage) -> GroupWork:
        """Return how rows are worked on: what has no axis of the loop is repeated by nobody."""
        if self.work.repeats == 1:
            return self.work
        axes = {a for n in (*s.written, *s.read) if n in self.frame.phase.names for a in self.frame.axes(n)}
        if self.frame.loop_axis in axes:
            return replace(self.work, is_serial=False)
        return replace(self.work, repeats=1, across=self.work.repeats)

    def _store_work(self, steps: tuple[Step, ...]) -> GroupWork:
        """Return what a warp group does where an operand goes to shared memory through its registers."""
        size = sum(step.dst.payload_bytes for step in steps)
        loads = ceil_div(size, ACCESS_BYTES * WARP_LANES * self.work.warps)
        return replace(self.work, loads=loads, fences=1, barriers=1)
