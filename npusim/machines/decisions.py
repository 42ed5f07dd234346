"""The decisions of kernels: one value a kernel, which a phase's tiling and its operations carry and pricing reads.

A decision that a tiling names replaces the kernel's; no other class repeats a decision.  They are named tuples, which
are cheap to compare: they are part of the key of a price.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# ---------------------------------------------------------------- an Ascend device


#: Barriers between a vector core's instructions: PTO's kernels have them where needed, CANN 8.0's and CATLASS's
#: behind every one (pto_macro_fa_softmax.hpp; block_epilogue_online_softmax_no_mask.hpp).
Barriers = Literal["needed", "every"]
#: In which order the stages of tiles follow one another.
StageOrder = Literal["rolling", "groups", "serial"]
#: The route of a tile from vector cores to the matrix unit.
Route = Literal["chip", "gm"]


class VectorCode(NamedTuple):
    """The form of a rows stage's code for a vector unit with registers.

    functions
        ``fused``: the stage is one vector function; ``stages``: casts of results are a separate one; ``calls``: every
        instruction is a call.
    layout
        ``dn``: a register holds rows of one column; ``nd``: columns of one row.
    chains
        Accumulators of a maximum along columns.
    leaves
        Names that are in UB at its end.
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
        Barriers between the instructions of a vector core: ``needed``, only between dependent ones, or ``every``.
    together
        Tiles that cores hand over at a time: they share the cost of a tile (``flags.tile_cycles``).
    extra
        Whether a tile that is handed over costs ``flags.tile_extra_cycles`` too, if the kernel sets the barriers.
    is_vendors
        Whether it is the vendor's kernel, whose task has an additional cost (``launch.attention_s``).
    expands
        Whether a row or a column is expanded to a tile first, by an instruction a row.
    one_slot
        Whether each operand of a phase with products has one slot, in L1 and in UB.
    handed, period, until_left
        Slots of a hand-over at least; releases of such a slot that one flag acknowledges; whether rows' slot is
        released once its product has left L0C.
    order
        ``rolling``: each stage some tiles before the next.  ``groups``: several tiles at a time, stage by stage.
        ``serial``: tile after tile; the next tile begins when all cores have finished.
    pipeline
        ``core``: stages continue with the next block's tiles while the last tiles of a block are still in flight.
    slots
        Largest number of slots of L0A, L0B and L0C; with one, the core waits until L0C is drained before it loads more.
    route
        Route from vector stages to products; None: on the chip if the device has such a route.
    code
        Code of vector stages for a vector unit with registers; None: the unit works from UB to UB.
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


#: Generations of matrix instructions: of one warp, operands in its registers; of a warp group, from shared memory.
Generation = Literal["mma", "wgmma"]
#: The roles of a block's warps: all equal; some copy, so that products follow one another without a gap; or one group
#: copies, and the others alternate.
Roles = Literal["alike", "copying", "alternating"]
#: Operations that alternating warp groups do one after the other.
Turns = Literal["exponentials", "products"]
#: When a kernel pays: at a block's start or end; in an iteration, there for registers in local memory or beyond L2, or
#: for each slice of a sum; for each element that rows make, that a block's end makes, or of scores; for each
#: multiply-add.
Due = Literal[
    "block", "end", "tile", "access", "local", "beyond", "slice", "element", "output", "score", "multiply_add"
]  # fmt: skip


class Charge(NamedTuple):
    """A cost of a kernel in addition to its steps: ``times`` a constant of the device file.

    ``key`` is the constant's key, below ``cores.sm.engines``; for a rate in bytes per cycle ``times`` is the number of
    bytes.  A constant of another engine than the warps occupies that engine.  A charge for each element or
    multiply-add replaces the cost of the operation; a charge for each score counts instructions of the kind ``key``.
    """

    key: str
    times: float = 1.0
    due: Due = "tile"


class CodeWork(NamedTuple):
    """Work of the warps of a compiled kernel for a block, by its machine code.

    ``alone_cycles``: the time of the block if no other works, without its first loads.  Counts of a warp's
    instructions: ``issued`` in total; among these ``narrow`` ones on the pipe of half the width and ``special``
    functions, accesses to ``shared`` memory and to spilled registers (``local``), and ``barriers``.  ``is_ahead``: a
    loop loads a row while it works on the one before.  ``goes_on``: a program continues with further rows.  All 0:
    another operation contains the work of this one.
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


class GpuDecisions(NamedTuple):
    """Decisions of a kernel on a GPU; a block's warps, registers and charges follow from its tile and the device.

    groups, warps
        Warp groups of a block, each a queue with a share of the rows; warps of a group, which execute an operation
        together.  0 warps: the device's file does not describe them.
    across, repeats
        Warps of a group that share the columns, the others the rows; how often a group computes the complete operation:
        eight warps on 64 rows compute S twice.
    generation, is_serial, is_transposed
        Generation of the matrix instructions; whether the warps wait for the result of every product; whether a product
        is computed as that of its exchanged and transposed operands: rows and columns are the transposed result's.
    warp_rows, is_whole, rows
        Least rows of a warp; whether the kernel computes complete tiles, however few rows are live; rows of a
        group's complete tile, which it computes even for a ragged one.
    stages
        Tiles in progress of a software pipeline: 1 passes through registers; 0: operands are released when read.
    copies_in_bulk
        Whether one thread copies a tile of each operand (TMA), where else every thread copies its share.
    depth, held_depth, loaded_tiles
        Tiles in shared memory of each operand of the loop, and of lasting operands (the next block's are loaded while
        this one's are read), fewer where they do not fit; tiles in progress of a loop without products, in which rows
        of one tile cover the load of the next.
    slice_elements
        Elements of a product's sum that are loaded at once; 0: all.
    awaits_places
        Whether loads of operands at places that a loop loads wait for these: with a pipeline of one or two stages.
    padding, exchanges, stores, holds_in_registers
        Elements after each row in shared memory; whether rows' results for a product cross lanes; whether they go to
        it through shared memory; whether operands that stay until the block ends are in registers, not there.
    roles
        What the warps of a block are for.
    turns, ahead, meets, counts
        Of groups that alternate: operations that they do one after the other (None: no turns); tiles by which Q K^T is
        issued before P V, 0 or 1; whether they begin each tile of work together; whether blocks draw their work from a
        counter, which a memset clears: always, if a mask makes them differ, or never.
    sums_in_products
        Whether the product of weights and values has a column of ones beside V, which gives the sums of rows; values
        are those of sums of rows all the same.
    stores_wide_at_once
        Whether an output of 32 bits is stored from registers, where others pass through shared memory.
    from_last, mask_block
        Whether a block visits its keys from the last tile to the first; side of the squares of queries and keys for
        which the kernel decides visits and masks (0: the tile).
    charges
        Costs besides its steps.
    code
        Work of a warp for a block by its machine code, where rows were compiled; None: the work of the steps.
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
    slice_elements: int = 0
    awaits_places: bool = False
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

    @property
    def alternates(self) -> bool:
        """Whether one group copies and the others alternate."""
        return self.roles == "alternating"

    @property
    def consumers(self) -> int:
        """Groups that alternate; 0: the work of other groups does not matter."""
        return self.groups if self.alternates else 0

    def clears(self, *, is_masked: bool) -> bool:
        """Return whether a memset clears a counter before a phase."""
        return self.alternates and (self.counts == "always" or (self.counts == "masked" and is_masked))

    def due(self, *when: Due) -> tuple[Charge, ...]:
        """Return the charges that are due ``when``."""
        return tuple([c for c in self.charges if c.due in when])
