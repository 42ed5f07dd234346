"""Work of warp groups in an operation in addition to its steps, if they run concurrently.

`Works` decides nothing about order or places: for each kind of operation (a product, rows, a store to shared memory,
the start of a block, the end of an iteration) it states how warps execute the operation, as a `GroupWork`. This
contains the kernel's decisions, and `group_cost` prices it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npusim.formats import get_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.machines.decisions import CodeWork, Due, GpuDecisions, LoopWork
from npusim.machines.sm.core import FENCE, LDG, LSU, TENSOR, barriers, fill_passes
from npusim.machines.sm.group_cost import ACCESS_BYTES, FRAGMENT_ROWS
from npusim.program.ir.tile import Tile
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.kernels.form.phase import Stage, Visit, WorkTile
    from npusim.machines.decisions import Charge
    from npusim.machines.frame import Frame
    from npusim.machines.sm.core import SmTiling
    from npusim.machines.sm.name_places import BlockPlaces
    from npusim.program.ir.op import Step, TileOp
    from npusim.program.ir.tile import Operand

#: Size of a line of the cache through which loads of global memory pass (CUDA C++ Programming Guide, global memory).
LINE_BYTES = 128
#: Number of passes of a store of pairs of an accumulator's values (CUTLASS's layout of operands for sm_70,
#: VoltaTensorOp- MultiplicandCrosswise, at the rows and columns of mma.m8n8k4's accumulator: two lanes' words lie in
#: each bank).
PAIR_PASSES = 2


class GroupWork(NamedTuple):
    """The work of a group of warps in an operation in addition to its steps, if groups run concurrently.

    decided
        Decisions of its kernel.
    pays, barriers, is_fenced
        Events of the kernel's charges that the operation includes; number of barriers that it passes; whether its
        readers must see the data that it has just stored.
    is_awaited
        Whether the warps wait for a product's last result.
    is_spread
        Whether warps share the columns of an operation that a kernel would otherwise repeat.
    sharers
        For a tile's own result: number of groups, or warps, that share its columns, because together they compute more
        rows at once than the tile has; 0: the result has the block's rows.
    is_even
        Whether elements are distributed evenly, since no product needs them in fragments.
    copies, loads
        Transfers of 16 bytes per thread: asynchronous copies, and loads whose registers the warps wait for.
    passes
        Passes of each transfer through shared memory, which shares its storage with the cache of loads.
    columns, depth, rows
        Sizes of complete tiles, which a kernel computes even for a ragged tile: the columns of results, the length of a
        product's sum, and the rows of a group's product.
    behind
        The product that is in progress during the operation, because the warps wait only for its start: rows and
        columns of its result, bytes of a row of its left operand, and whether this operand is in shared memory; none:
        ().
    is_coded
        Whether this operation has the work of a block's, or a tile's, machine code; otherwise another operation has it.
    is_of_tile
        Whether the machine code of a loop's tile has the work of the operation's stage.
    loads_left
        Whether a product's left operand comes from shared memory into registers for every tile: rows before the loop
        computed it, and compilers store it there (Triton 3.6: ``local_load`` of the scaled Q in the loop, before
        wgmma).
    loop
        Work of an iteration from its machine code that belongs to this operation; empty: it belongs to another
        operation; None: the work of the steps.
    """

    decided: GpuDecisions
    pays: tuple[Due, ...] = ()
    barriers: int = 0
    is_fenced: bool = False
    is_awaited: bool = True
    is_spread: bool = False
    sharers: int = 0
    is_even: bool = False
    copies: int = 0
    loads: int = 0
    passes: int = 1
    columns: int = 0
    depth: int = 0
    rows: int = 0
    behind: tuple[int, ...] = ()
    is_coded: bool = False
    is_of_tile: bool = False
    loads_left: bool = False
    loop: LoopWork | None = None

    @property
    def across(self) -> int:
        """Number of warps that share the columns; the others share the rows."""
        return self.decided.repeats if self.is_spread else self.decided.across

    @property
    def repeats(self) -> int:
        """How often the complete operation is computed."""
        return 1 if self.is_spread else self.decided.repeats

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Costs of the operation in addition to its steps."""
        paid = self.decided.due(*self.pays) if self.pays else ()
        paid += barriers(self.decided, self.barriers)
        return (*paid, FENCE) if self.is_fenced else paid

    @property
    def code(self) -> CodeWork | None:
        """The work according to the machine code, whatever the steps are; None: the work follows from the steps."""
        code = self.decided.tile_code if self.is_of_tile else self.decided.code
        return code if code is None or self.is_coded else CodeWork()

    def paying(self, *due: Due) -> GroupWork:
        """Return the same work with the charges that are ``due`` added."""
        return self._replace(pays=self.pays + due)

    def meeting(self, count: int = 1) -> GroupWork:
        """Return the same work with this number of additional barriers before it."""
        return self._replace(barriers=self.barriers + count)


def work_of(op: TileOp) -> GroupWork:
    """Return the work of an operation of warps."""
    assert isinstance(op.work, GroupWork), op.label
    return op.work


class Works:
    """The work of a block's warp groups; ``usual``: the work of an operation that needs nothing else."""

    def __init__(self, frame: Frame, tiling: SmTiling, places: BlockPlaces) -> None:
        self.frame, self.tiling, self.places, self.decided = frame, tiling, places, tiling.decided
        self.usual = GroupWork(tiling.decided, is_even=not places.how)
        self._of_rows: dict[Stage, GroupWork] = {}

    def of(self, s: Stage, engine: str, steps: tuple[Step, ...]) -> GroupWork | None:
        """Return the work of an operation of a stage on an engine; None for copies from and to global memory."""
        if engine == TENSOR:
            return self.product(s)
        if engine == LSU:
            return self._store(steps)
        return None if engine == LDG else self._rows(s)

    def start(self, s: Stage) -> GroupWork:
        """Return the work of a block's first operation, in the layout of a stage."""
        return (self.usual if self.decided.code else self._rows(s)).paying("block")

    def begin(self, loaders: int) -> GroupWork:
        """Return the work of one of a block's queues of loads before its first load: its share of the block's costs."""
        charges = tuple(c._replace(times=c.times / loaders) if c.due == "begin" else c for c in self.decided.charges)
        return self.usual._replace(decided=self.decided._replace(charges=charges), pays=("begin",))

    def iteration(self, copies: int = 0) -> GroupWork:
        """Return the work at an iteration's end; ``copies``: number of copies of a later tile that each
        thread issues.
        """
        return self.usual._replace(copies=copies, pays=("tile",))

    def put(self) -> GroupWork:
        """Return the work of passing a result to the warp that stores it; a result for another warp goes through shared
        memory.
        """
        if self.decided.state_loop:  # lanes store their values, or exchange them among themselves
            return self.usual._replace(barriers=self.decided.state_loop.barriers)
        return self.usual if self.decided.code else self.usual._replace(barriers=1, is_fenced=True)

    def spills(self) -> list[GroupWork]:
        """Return the work of storing registers to local memory and loading them, both within L2 and beyond it, if there
        are such registers.
        """
        listed: tuple[Due, ...] = ("local", "beyond")
        return [self.usual.paying(due) for due in listed if self.decided.due(due)]

    def copies(self, block: WorkTile, tile: Visit) -> int:
        """Return how many times each thread of a block copies 16 bytes of a tile, or, if one thread copies, how many
        tiles of operands it copies.
        """
        threads, count = WARP_LANES * self.decided.warps * self.decided.groups, 0
        for n in filter(self.places.is_copied, self.places.visited):
            rows, cols, _ = self.frame.shape(n, block, tile)
            size = self.frame.size_bytes(n, rows * cols)
            count += 1 if self.decided.copies_in_bulk else ceil_div(size, ACCESS_BYTES * threads)
        return count

    def product(self, s: Stage) -> GroupWork:
        """Return the work of a product; repeated products whose left operand is in registers are distributed over the
        columns.
        """
        left, decided, columns = s.rows[0].srcs[0], self.decided, self._width(s.rows[0].dst)
        is_near = left in self.places.near
        loads_left = not is_near and self._is_made_before(left, s)
        is_spread = decided.repeats > 1 and not is_near and not loads_left
        rows = ceil_div(self.tiling.widths.get(self.frame.axes(s.rows[0].dst)[0], 0), decided.groups)
        work = self.usual._replace(columns=columns, rows=rows, is_spread=is_spread)
        if decided.slice_elements:  # whatever the head dim, slices and tiles are complete: missing columns are zero
            return work._replace(depth=decided.slice_elements, barriers=1, is_fenced=True)
        adds_up = self.places.how[s].accumulate and self.frame.places[s.rows[0].dst] == "state"
        is_awaited = not adds_up or decided.stages == 1
        if decided.alternates:  # only the last of successive products is awaited
            is_awaited = not decided.ahead and not self._is_followed(s)
        met = int(is_near and decided.roles == "alike")
        depth, sharers = self.tiling.widths.get(self._sum_axis(s), 0), self._sharers(s.rows[0].dst)
        work = work._replace(is_awaited=is_awaited, depth=depth, barriers=met, sharers=sharers, loads_left=loads_left)
        return work.paying("multiply_add")

    def _is_made_before(self, n: str, s: Stage) -> bool:
        """Return whether rows compute a name before the loop of a stage that multiplies it in every tile."""
        loop = next((loop for loop in self.frame.phase.loops if s in loop.stages), None)
        return loop is not None and bool(loop.axis) and not any(n in x.written for x in loop.stages)

    def _sum_axis(self, s: Stage) -> str:
        """Return the axis of a product's sum, however a compiled kernel's left operand is stored.

        For a gradient and a recurrence this is the axis of the stored columns, as in the fit of the constants.
        """
        phase, (left, _) = self.frame.phase, s.rows[0].srcs
        return phase.product_axes(s.rows[0])[1] if phase.compiled else phase.names[left].axes[-1]

    def _is_followed(self, s: Stage) -> bool:
        """Return whether a product follows a product in its loop, without rows between them."""
        loop = next((loop.stages for loop in self.frame.phase.loops if s in loop.stages), (s,))
        return any(n.is_product for n in loop[loop.index(s) + 1 :][:1])

    def _sharers(self, n: str) -> int:
        """Return how many groups or warps share the columns of a result that the tile itself stores; 0 for other
        results.
        """
        decided, frame = self.decided, self.frame
        if frame.axes(n)[0] != frame.loop_axis or frame.places[n] != "out":
            return 0
        down = decided.groups * decided.warps // (decided.across * decided.repeats)
        return max(1, down * FRAGMENT_ROWS // frame.height(n))

    def beside(self, s: Stage, work: GroupWork) -> GroupWork:
        """Return work that overlaps with a product, if the warps waited only for the start of the product."""
        product, (left, _), frame = self.product(s), s.rows[0].srcs, self.frame
        if self.decided.generation != "wgmma" or product.is_awaited or self.decided.is_serial:
            return work
        rows = self.decided.rows or frame.phase.sizes[frame.row_axis] // self.decided.groups
        rows = max(rows, product.rows)
        columns = max(product.columns, frame.width(s.rows[0].dst))
        depth = max(product.depth, frame.phase.sizes[self._sum_axis(s)])
        size = rows, columns, frame.size_bytes(left, depth), left in self.places.near
        return work._replace(behind=size, is_spread=product.is_spread)

    def slice(self, n: str, slot: Operand, *, is_made: bool = False) -> GroupWork:
        """Return the work of loading a slice of a name into shared memory, through the cache that shares its storage.

        L2 fills the cache at the rate of its port.  Rows are read as parts of lines and stored as complete lines, with
        zeros beyond the end of a row.  ``is_made``: whether rows computed it in registers; a warp stores pairs of
        values, two to a bank.
        """
        whole = max(slot.cols, self._width(n) or self.decided.slice_elements)
        row_bytes = get_format(slot.fmt).size_bytes * whole
        loads = ceil_div(slot.rows * row_bytes, ACCESS_BYTES * WARP_LANES * self.decided.warps)
        come = ceil_div(LINE_BYTES, row_bytes) + fill_passes(self.places.core.device)
        return self.usual._replace(loads=loads, passes=PAIR_PASSES if is_made else 1 + come)

    def _rows(self, s: Stage) -> GroupWork:
        """Return the work of a stage's rows, which is the same for all tiles."""
        if s not in self._of_rows:
            self._of_rows[s] = self._computed_rows(s)
        return self._of_rows[s]

    def _computed_rows(self, s: Stage) -> GroupWork:
        """Return the work of rows: without an axis of the loop, no warp repeats it."""
        frame, usual = self.frame, self.usual
        if self.decided.code is not None:  # the code of the block's first stage is the code of the block
            return usual._replace(is_coded=s is next(iter((*frame.stages, *frame.phase.finish))))
        if self.decided.tile_code is not None and (loop := frame.phase.loops[0]).axis and s in loop.stages:
            return usual._replace(is_of_tile=True, is_coded=s is loop.stages[0])
        names = [n for n in (*s.written, *s.read) if n in frame.phase.names]
        # Groups that take turns detect the end of keys in the part of a stage before its exponentials (`WarpTurns`).
        is_first = not self.decided.alternates and s is next((x for x in frame.stages if not x.is_product), None)
        columns = max((self._width(n) for n in names), default=0)
        due: list[Due] = ["element", "access"]
        due += ["output"] if s in frame.phase.finish else []
        due += ["score"] if is_first else []
        is_spread = self.decided.repeats > 1 and not any(frame.loop_axis in frame.axes(n) for n in names)
        stores = self.decided.stores and any(frame.places[n] == "up" for n in s.written)
        return usual._replace(columns=columns, pays=tuple(due), is_spread=is_spread, is_fenced=stores)

    def _width(self, n: str) -> int:
        """Return the columns that are computed for a name, whatever a ragged tile has."""
        axes = self.frame.axes(n)
        return self.tiling.widths.get(axes[1], 0) if len(axes) > 1 else 0

    def _store(self, steps: tuple[Step, ...]) -> GroupWork:
        """Return a warp group's work for an operand that moves to shared memory through its registers.

        The results that rows compute for a product serve single warps' products unchanged: fragments are loaded like
        fragments of B.  In a recurrence these results are the right factor, whose rows several warps read, so that they
        are in shared memory.  In a compiled kernel they are too if their layout differs from the product's.
        """
        is_single, is_made = self.decided.generation == "mma", any(isinstance(step.srcs[0], Tile) for step in steps)
        if is_single and is_made and (self.places.leaves or not self._makes_right_factors()):
            return self.put() if self.places.leaves else self.usual
        size = sum(step.dst.payload_bytes for step in steps)
        loads = ceil_div(size, ACCESS_BYTES * WARP_LANES * self.decided.warps)
        return self.usual._replace(loads=loads, barriers=1, is_fenced=not (is_single and is_made))

    def _makes_right_factors(self) -> bool:
        """Return whether rows of a compiled kernel compute only right factors of products."""
        rights = {s.rows[0].srcs[1] for s in self.places.how}
        return bool(self.frame.phase.compiled) and {*self.places.prepared} <= rights
