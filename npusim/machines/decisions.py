"""The decisions of kernels: one value for each kernel. A phase's tiling and its operations contain the value; pricing
reads it.

A decision that a tiling names replaces the kernel's; no other class repeats a decision.  Decisions are named tuples:
they are part of the key of a price, and named tuples are cheap to compare.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# ---------------------------------------------------------------- an Ascend device


#: Barriers between a vector core's instructions: PTO's kernels have barriers where they are needed, kernels of CANN 8.0
#: and of CATLASS have one after every instruction (pto_macro_fa_softmax.hpp;
#: block_epilogue_online_softmax_no_mask.hpp).
Barriers = Literal["needed", "every"]
#: The order in which the stages of tiles follow one another.
StageOrder = Literal["rolling", "groups", "serial"]
#: The route of a tile from vector cores to the matrix unit.
Route = Literal["chip", "gm"]


class VectorCode(NamedTuple):
    """The form of the code of a stage of rows on a vector unit with registers.

    functions
        ``fused``: the stage is one vector function. ``stages``: a second function casts the results. ``calls``: every
        instruction is a separate call.
    layout
        ``dn``: a register holds rows of one column. ``nd``: a register holds columns of one row.
    chains
        Number of accumulators of a maximum along columns.
    leaves
        Names whose values are in UB at the end of the function.
    blocks
        Whether cast results are stored as rows of fractals.
    """

    functions: Literal["fused", "stages", "calls"] = "calls"
    layout: Literal["dn", "nd"] = "nd"
    chains: int = 1
    leaves: frozenset[str] = frozenset()
    blocks: bool = False


class AscendDecisions(NamedTuple):
    """Decisions of a kernel on an Ascend device.

    barriers
        Barriers between the instructions of a vector core. ``needed``: between dependent instructions only; ``every``:
        after every instruction.
    together
        Number of tiles that one core passes to another at a time. These tiles share the cost of one tile
        (``flags.tile_cycles``).
    extra
        Whether each tile that one core passes to another also costs ``flags.tile_extra_cycles``; read only if the
        kernel sets the barriers.
    is_vendors
        Whether the kernel is the vendor's. Its task then has the additional cost ``launch.attention_s``.
    expands
        Whether a separate instruction per row first expands a row vector or a column vector to a tile.
    one_slot
        Whether each operand has a single slot in L1 and in UB.
    handed
        Least number of slots of a ring between two cores.
    period
        Number of releases of such a ring that one flag acknowledges.
    until_left
        Whether the slot of an operand that vector stages compute is released when its product has left L0C.
    sums
        Form of cumulative sums. ``transposed``: Ascend C's ``CumSum``, which adds rows of the transposed tile.
        ``rows``: a row is added to a row of sums, which is then copied to the result, with a barrier after each.
    order
        Order of the stages. ``rolling``: each stage runs some tiles ahead of the next stage. ``groups``: each stage
        processes several tiles, then the next stage does. ``serial``: one tile after another; a tile begins when all
        cores have finished the previous tile.
    pipeline
        ``core``: stages continue with the tiles of the next block while the last tiles of a block are still in flight.
        ``block``: they do not.
    slots
        Largest number of slots of L0A, L0B and L0C. With one slot, the core waits until L0C is drained before it loads
        more.
    route
        Route of a tile from vector stages to products: ``chip`` or ``gm``. None: on the chip if the device has such a
        route.
    code
        Form of the vector stages on a vector unit with registers. None: the unit reads from UB and writes to UB.
    """

    barriers: Barriers = "every"
    together: int = 1
    extra: bool = False
    is_vendors: bool = False
    expands: bool = False
    one_slot: bool = False
    handed: int = 1
    period: int = 1
    until_left: bool = False
    sums: Literal["transposed", "rows"] = "transposed"
    order: StageOrder = "rolling"
    pipeline: Literal["block", "core"] = "block"
    slots: int = 2
    route: Route | None = None
    code: VectorCode | None = None

    @property
    def takes_turns(self) -> bool:
        """Whether a core waits until its current work is done before it loads more."""
        return self.order == "serial" or self.slots == 1


# ---------------------------------------------------------------- a GPU


#: Generations of matrix instructions: of one warp, with operands in its registers; of a warp group, with operands in
#: shared memory.
Generation = Literal["mma", "wgmma"]
#: The roles of a block's warps: all are equal; or some copy, so that products follow one another without a gap; or one
#: group copies, and the others alternate.
Roles = Literal["alike", "copying", "alternating"]
#: Operations that alternating warp groups do one after the other.
Turns = Literal["exponentials", "products"]
#: The event at which a kernel has a cost: before a block's first load, the beginning of its warps, its start or its
#: end; an iteration, one with registers in local memory or with data beyond L2, or a slice of a sum; an element
#: that rows compute, an element that the end of a block computes, or an element of the scores; a multiply-add.
Due = Literal[
    "begin",
    "warps",
    "block",
    "end",
    "tile",
    "access",
    "local",
    "beyond",
    "slice",
    "element",
    "output",
    "score",
    "multiply_add",
]


class Charge(NamedTuple):
    """A cost that a kernel has in addition to its steps: ``times`` multiples of a constant of the device file.

    key
        Key of the constant, relative to ``cores.sm.engines``. If the constant belongs to an engine other than the
        warps, the charge occupies that engine.
    times
        Factor of the constant. For a rate in bytes per cycle: the number of bytes.
    due
        Event at which the charge is due (`Due`). A charge per ``element`` or per ``multiply_add`` replaces the cost of
        the operation; a charge per ``score`` is a number of instructions of the kind ``key``.
    """

    key: str
    times: float = 1.0
    due: Due = "tile"


class CodeWork(NamedTuple):
    """Work of the warps of a compiled kernel for one block, counted in its machine code.

    alone_cycles
        Cycles of the block if no other block is resident, without its first loads.
    issued
        Number of all instructions of a warp.
    narrow, special
        Those of these instructions that use the pipe of half the width, and those that are special functions.
    shared, local
        Accesses to shared memory, and accesses to spilled registers.
    barriers
        Number of barriers of the block.
    is_ahead
        Whether a loop loads the next row while it computes the current row.
    goes_on
        Whether a program continues with further rows.

    If all counts are 0, another operation includes the work of this one.
    """

    alone_cycles: float = 0.0
    issued: int = 0
    narrow: int = 0
    special: int = 0
    shared: int = 0
    barriers: int = 0
    local: int = 0
    is_ahead: bool = False
    goes_on: bool = False


class StateLoop(NamedTuple):
    """A compiled loop without products that stores a result for each tile and loads no tile ahead.

    waits
        How often its warps wait, one time after the other, for the places from which a tile is loaded, by machine
        code.
    near_waits
        How often they also wait for a number that L2 has.
    barriers
        Number of barriers of an iteration.
    """

    waits: int = 1
    near_waits: int = 0
    barriers: int = 0


class LoopWork(NamedTuple):
    """Work of a block in an iteration of a compiled loop around products, from its machine code.

    ``before``, ``after``: cycles of a block that is alone on its core, before the first copy of a later tile and from
    this copy on; ``held``: cycles for which the block occupies the core if blocks share the core.  Cycles of a
    sub-core: ``issued`` instructions, the pipe of half the width (``narrow``), ``special`` functions, products
    (``product``); of the multiprocessor: shared memory, spilled registers (``local``).  ``lookups``: how often the
    block waits, one time after the other, for places that may come from memory; the cycles above do not contain these
    waits.
    """

    before: float = 0.0
    after: float = 0.0
    held: float = 0.0
    issued: float = 0.0
    narrow: float = 0.0
    special: float = 0.0
    product: float = 0.0
    memory: float = 0.0
    local: float = 0.0
    lookups: int = 0

    def part(self, cycles: float) -> LoopWork:
        """Return the part of the work for which a block that is alone on its core needs this number of cycles."""
        share = cycles / max(1.0, self.before + self.after)
        return LoopWork(
            cycles,
            0.0,
            self.held * share,
            self.issued * share,
            self.narrow * share,
            self.special * share,
            self.product * share,
            self.memory * share,
            self.local * share,
        )


class GpuDecisions(NamedTuple):
    """Decisions of a kernel on a GPU. The warps, registers and charges of a block follow from its tile and the device.

    groups, warps
        Number of warp groups of a block, each with its own queue and a share of the rows, and number of warps of a
        group, which execute an operation together. 0 warps: the device file does not describe warps.
    across
        Number of warps of a group that share the columns of a tile; the other warps share its rows.
    repeats
        Number of times that a group computes the complete operation: eight warps compute S twice if a tile has 64 rows.
    generation
        Generation of the matrix instructions.
    is_serial
        Whether the warps wait for the result of every product before they continue.
    is_transposed
        Whether the kernel computes the transpose of a product, from exchanged and transposed operands. Rows and columns
        are then the rows and columns of the transpose.
    warp_rows
        Least number of rows of a warp.
    is_whole
        Whether the kernel computes complete tiles even if some rows of a tile do not exist.
    rows
        Rows of a complete tile of a group. A group also computes all of these rows for a ragged tile.
    stages
        Number of tiles in progress in a software pipeline. 1: operands pass through registers. 0: no pipeline; an
        operand's slot is released when the operand has been read.
    copies_in_bulk
        Whether one thread copies a tile of each operand (TMA). If not, every thread copies its share.
    depth, held_depth
        Number of slots in shared memory of each operand of the loop, and of each operand that a block reads until it
        ends (while one slot is read, the operand of the next block is loaded into another). An operand has fewer slots
        if they do not fit.
    loaded_tiles
        Number of tiles in progress in a loop without products: operations on one tile run while the next tile is
        loaded.
    access_bytes
        Number of bytes that a lane loads before it waits for them and loads more, for operands in registers. 0: all.
    slice_elements
        Number of elements along the sum of a product that are loaded at a time. 0: all.
    awaits_places
        Whether loads of operands wait for the loop to load the integers that locate the operands, in a pipeline of one
        or two stages.
    awaited
        The loads for which each iteration of a loop without products waits: ``copies`` to shared memory, each of which
        begins when the slot's last tile has been read, or ``loads`` to registers, where warps meet at barriers in each
        iteration and load no tile ahead. Empty: other loops.
    padding
        Number of unused elements after each row in shared memory.
    exchanges
        Whether lanes exchange the results of rows before a product reads these results.
    stores
        Whether the results of rows pass through shared memory before a product reads them.
    holds_in_registers
        Whether operands that a block reads until it ends are in registers. If not, they are in shared memory.
    roles
        Roles of the warps of a block.
    turns
        Operations that alternating groups execute one group after the other. None: the groups take no turns.
    ahead
        Number of tiles, 0 or 1, by which an alternating group issues Q K^T ahead of P V.
    meets
        Whether alternating groups begin each block together.
    counts
        Whether blocks get their work from a counter that a memset clears: ``always``, ``never``, or only if a mask
        makes the blocks differ (``masked``).
    sums_in_products
        Whether V has an additional column of ones in the product P V, so that the product gives the row sums. The
        results equal ordinary row sums.
    stores_wide_at_once
        Whether an output of 32 bits is stored from registers. Other outputs pass through shared memory.
    from_last
        Whether a block visits its keys from the last tile to the first tile.
    mask_block
        Side of the squares of queries and keys for which the kernel decides whether to visit and whether to mask. 0:
        the tile.
    charges
        Costs in addition to the steps.
    code
        Work of a warp for a block according to its machine code, for compiled rows. None: the work follows from the
        steps.
    tile_code
        The same for a tile of the first loop of a block whose iterations wait for ``loads``. None: other loops.
    state_loop
        The loop over tiles according to its machine code, if it stores a state in each iteration. None: other loops.
    loops
        Work of a block in an iteration according to its machine code, for a compiled loop around products: one value
        for all tiles, or one for tiles without masks and one for masked tiles. Empty: the work follows from the steps.
    """

    groups: int = 1
    warps: int = 0
    across: int = 1
    repeats: int = 1
    generation: Generation = "wgmma"
    is_serial: bool = False
    is_transposed: bool = False
    warp_rows: int = 16  # rows of a fragment (PTX ISA, mma)
    is_whole: bool = False
    rows: int = 0
    stages: int = 0
    copies_in_bulk: bool = False
    depth: int = 1
    held_depth: int = 1
    loaded_tiles: int = 2
    access_bytes: int = 0
    slice_elements: int = 0
    awaits_places: bool = False
    awaited: Literal["", "copies", "loads"] = ""
    padding: int = 0
    exchanges: bool = False
    stores: bool = False
    holds_in_registers: bool = False
    roles: Roles = "alike"
    turns: Turns | None = None
    ahead: int = 0
    meets: bool = False
    counts: Literal["always", "masked", "never"] = "masked"
    sums_in_products: bool = False
    stores_wide_at_once: bool = False
    from_last: bool = False
    mask_block: int = 0
    charges: tuple[Charge, ...] = ()
    code: CodeWork | None = None
    tile_code: CodeWork | None = None
    state_loop: StateLoop | None = None
    loops: tuple[LoopWork, ...] = ()

    @property
    def alternates(self) -> bool:
        """Whether one warp group copies and the other groups alternate."""
        return self.roles == "alternating"

    @property
    def consumers(self) -> int:
        """Number of groups that alternate; 0 if no groups alternate."""
        return self.groups if self.alternates else 0

    def clears(self, *, is_masked: bool) -> bool:
        """Return whether a memset clears a counter before a phase."""
        return self.alternates and (self.counts == "always" or (self.counts == "masked" and is_masked))

    def due(self, *when: Due) -> tuple[Charge, ...]:
        """Return the charges that are due at the event ``when``."""
        return tuple([c for c in self.charges if c.due in when])
