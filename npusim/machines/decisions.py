"""The decisions of kernels: one value a kernel, which a phase's tiling and its operations carry and pricing reads.

A decision that a tiling names replaces the kernel's; nothing else copies a field.  They are named tuples, since they
are part of the key of each price.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Barriers between a vector core's instructions: PTO's kernels have them where needed, CANN 8.0's and CATLASS's
#: behind every one (pto_macro_fa_softmax.hpp; block_epilogue_online_softmax_no_mask.hpp).
Barriers = Literal["needed", "every"]
#: In which order the stages of tiles follow one another.
StageOrder = Literal["rolling", "groups", "serial"]
#: Which way a tile goes from vector cores to the matrix unit.
Route = Literal["chip", "gm"]


class VectorCode(NamedTuple):
    """The form of a rows stage's code for a vector unit with registers.

    functions
        ``fused``: the stage is one vector function; ``stages``: casts of results are a separate one; ``calls``: every
        instruction is one.
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
        Whether the kernel is the vendor's own, whose task has a cost of its own (``launch.attention_s``).
    expands
        Whether a row or a column becomes a whole tile first, by an instruction a row.
    one_slot
        Whether each operand of a phase with products has one slot, in L1 and in UB.
    handed, period, until_left
        Slots of a hand-over at least; releases of such a slot that one flag acknowledges; whether rows' slot is
        released once its product has left L0C.
    order
        ``rolling``: each stage some tiles before the next.  ``groups``: groups of tiles, stage after stage.
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
