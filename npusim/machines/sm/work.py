"""Work of warp groups in an operation besides its steps, where they run concurrently.

`Works` decides nothing about order or places: for each kind of operation (a product, rows, a store to shared
memory, a block's start, an iteration's end) it gives the execution by warps, as a `GroupWork`, which `group_cost`
prices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.ir.op import CodeWork
from npusim.ir.tile import Tile
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.core import FENCE, LDG, LSU, TENSOR, barriers, fill_passes
from npusim.machines.sm.group_cost import ACCESS_BYTES
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.phase import Stage, Visit, WorkTile
    from npusim.ir.op import Due, GroupWork, Step
    from npusim.ir.tile import Operand
    from npusim.machines.frame import Frame
    from npusim.machines.sm.core import SmTiling
    from npusim.machines.sm.places import BlockPlaces

#: A line of the cache that loads of global memory come through (CUDA C++ Programming Guide, global memory).
LINE_BYTES = 128
#: Passes of a store of pairs of an accumulator's values (CUTLASS's layout of operands for sm_70, VoltaTensorOp-
#: MultiplicandCrosswise, at the rows and columns of mma.m8n8k4's accumulator: two lanes' words lie in each bank).
PAIR_PASSES = 2


class Works:
    """The work of a block's warp groups; ``usual``: of an operation that needs nothing else."""

    def __init__(self, frame: Frame, tiling: SmTiling, usual: GroupWork, places: BlockPlaces) -> None:
        self.frame, self.tiling, self.places = frame, tiling, places
        self.usual = usual if places.how else replace(usual, is_even=True)

    def of(self, s: Stage, engine: str, steps: tuple[Step, ...]) -> GroupWork | None:
        """Return the work of an operation of a stage on an engine; copies from and to global memory have none."""
        if engine == TENSOR:
            return self.product(s)
        if engine == LSU:
            return self._store(steps)
        return None if engine == LDG else self._rows(s)

    def start(self, s: Stage) -> GroupWork:
        """Return the work of a block's first operation, laid out as a stage's."""
        work = self.idle() if self.tiling.code else self._rows(s)
        return work.charged(*self.tiling.due("block"))

    def idle(self) -> GroupWork:
        """Return the work of an operation of compiled rows whose instructions stand in another's."""
        return replace(self.usual, code=CodeWork())

    def iteration(self, copies: int = 0) -> GroupWork:
        """Return the work at an iteration's end, with so many copies a thread of a later tile."""
        return replace(self.usual, copies=copies).charged(*self.tiling.due("tile"))

    def spills(self) -> list[GroupWork]:
        """Return the work of storing registers to local memory and loading them, near and beyond L2, if any."""
        return [self.usual.charged(charge) for charge in self.tiling.due("local")]

    def copies(self, block: WorkTile, tile: Visit) -> int:
        """Return how often each thread of a block copies 16 bytes of a tile."""
        threads, count = WARP_LANES * self.usual.warps * self.tiling.groups, 0
        for n in filter(self.places.is_copied, self.places.visited):
            rows, cols, _ = self.frame.shape(n, block, tile)
            count += ceil_div(self.frame.size_bytes(n, rows * cols), ACCESS_BYTES * threads)
        return count

    def product(self, s: Stage) -> GroupWork:
        """Return the work of a product; repeated ones whose left operand is in registers are spread over the
        columns.
        """
        left, work, tiling = s.rows[0].srcs[0], self.usual, self.tiling
        if work.repeats > 1 and left not in self.places.near:
            work = replace(work, repeats=1, across=work.repeats)
        if tiling.slice_elements:  # whatever the head dim, slices and tiles are whole: what is missing is zero
            work = replace(work, columns=self._width(s.rows[0].dst), depth=tiling.slice_elements)
            return work.charged(*barriers(work), FENCE)
        adds_up = self.places.how[s].accumulate and self.frame.places[s.rows[0].dst] == "state"
        is_awaited = not adds_up or tiling.stages == 1
        if tiling.specialised is not None:
            is_awaited = not tiling.specialised.ahead
        met = () if work.is_specialised or left not in self.places.near else barriers(work)
        columns, depth = self._width(s.rows[0].dst), self._width(left)
        work = replace(work, is_awaited=is_awaited, columns=columns, depth=depth)
        return work.charged(*met, *tiling.due("multiply_add"))

    def beside(self, s: Stage, work: GroupWork) -> GroupWork:
        """Return work that overlaps with a product, if the warps waited for its start alone."""
        product, (left, _), frame = self.product(s), s.rows[0].srcs, self.frame
        if product.generation != "wgmma" or product.is_awaited or product.is_serial:
            return work
        rows = self.usual.rows or frame.phase.sizes[frame.row_axis] // self.tiling.groups
        columns, depth = (max(n, frame.width(t)) for n, t in ((product.columns, s.rows[0].dst), (product.depth, left)))
        size = rows, columns, frame.size_bytes(left, depth), left in self.places.near
        return replace(work, behind=size, across=product.across, repeats=product.repeats)

    def slice(self, n: str, slot: Operand, *, is_made: bool = False) -> GroupWork:
        """Return the work of loading a slice of a name into shared memory, through the cache that shares its storage.

        L2 fills the cache at the rate of its port, rows are read as parts of lines, and stored whole, with zeros
        beyond their end.  ``is_made``: rows computed it in registers; a warp stores pairs of values, two to a bank.
        """
        whole = max(slot.cols, self._width(n) or self.tiling.slice_elements)
        row_bytes = get_format(slot.fmt).size_bytes * whole
        loads = ceil_div(slot.rows * row_bytes, ACCESS_BYTES * WARP_LANES * self.usual.warps)
        come = ceil_div(LINE_BYTES, row_bytes) + fill_passes(self.places.core.device)
        return replace(self.usual, loads=loads, passes=PAIR_PASSES if is_made else 1 + come)

    def _rows(self, s: Stage) -> GroupWork:
        """Return the work of rows: without an axis of the loop, no warp repeats it."""
        frame, usual = self.frame, self.usual
        if self.tiling.code is not None:  # the whole block's is that of its first stage
            is_begin = s is next(iter((*frame.stages, *frame.phase.finish)))
            return replace(usual, code=self.tiling.code) if is_begin else self.idle()
        names = [n for n in (*s.written, *s.read) if n in frame.phase.names]
        # Groups that take turns see where keys end in the part of a stage before its exponentials (`WarpTurns`).
        is_first = self.tiling.specialised is None and s is next((x for x in frame.stages if not x.is_product), None)
        columns = max((self._width(n) for n in names), default=0)
        due: list[Due] = ["element"]
        due += ["output"] if s in frame.phase.finish else []
        due += ["score"] if is_first else []
        work = replace(usual, columns=columns).charged(*self.tiling.due(*due))
        if work.repeats == 1:
            return work
        if any(frame.loop_axis in frame.axes(n) for n in names):
            return replace(work, is_serial=False)
        return replace(work, repeats=1, across=work.repeats)

    def _width(self, n: str) -> int:
        """Return the columns that are computed of a name, whatever a ragged tile has."""
        axes = self.frame.axes(n)
        return self.tiling.widths.get(axes[1], 0) if len(axes) > 1 else 0

    def _store(self, steps: tuple[Step, ...]) -> GroupWork:
        """Return a warp group's work for an operand that moves to shared memory through its registers.

        Rows' results for it serve single warps' products unchanged: fragments are loaded like those of B.
        """
        if self.usual.generation == "mma" and any(isinstance(step.srcs[0], Tile) for step in steps):
            return self.usual
        size = sum(step.dst.payload_bytes for step in steps)
        loads = ceil_div(size, ACCESS_BYTES * WARP_LANES * self.usual.warps)
        return replace(self.usual, loads=loads).charged(*barriers(self.usual), FENCE)
