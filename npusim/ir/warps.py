"""How the tiles of a step lie in the lanes of the warps that execute it: what a GPU's steps carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Accumulator = Literal["f16", "f32"]


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """Warps stacked down the rows of a step's tiles, and the fragments in which each holds its part.

    warps
        That execute the step together, each on its own rows.
    arrangement, row_order
        Of the quad pairs in a warp, as `npusim.layout.fragment` reads them.
    accumulator
        Format of the accumulators whose fragment C the tile in registers has.
    access_bytes
        Of one lane's access to shared memory.
    swizzle
        Whether tiles in shared memory have their 16-byte chunks XORed by row mod 8.
    exchange
        The step turns accumulators into the A operand of the next product, across lanes.
    """

    warps: int
    arrangement: str
    accumulator: Accumulator
    row_order: Literal["group", "lane"] = "lane"
    access_bytes: int = 16
    swizzle: bool = False
    exchange: bool = False


#: Generations of matrix instructions: of one warp, operands in its registers; of a warp group, from shared memory.
Generation = Literal["mma", "wgmma"]


@dataclass(frozen=True, slots=True)
class GroupWork:
    """How a group of warps executes an operation where groups work beside one another, and what else it does.

    warps, across
        That execute it together; so many of them beside each other along the columns, the others down the rows.
    generation
        Of the matrix instructions.
    repeats
        How often all of it is computed: eight warps on 64 rows compute S twice.
    is_awaited, is_serial
        Whether the warps wait for a product's last result; whether for that of every instruction.
    barriers, fences
        That all warps of the block pass, and of shared memory before products read it.
    copies, loads
        Of 16 bytes a thread: asynchronous ones it issues, and those that it waits for in registers.
    spilled_bytes, far_bytes
        Registers that are stored to local memory and loaded: in the cache, and beyond it.
    cell_bytes
        That a block moves at its start and end; none but in its first operation.
    is_step
        Whether an iteration ends here.
    is_even
        Whether elements are dealt out evenly, as no product asks for them in fragments.
    element_cycles, product_cycles
        Of a whole core for an element, and for a multiply-add, where a library's kernel is timed whole; none: what
        instructions take.  ``constant`` is the device file's key behind the first.
    is_specialised
        Whether warps of their own copy, so that products follow one another without a gap.
    """

    warps: int
    across: int = 1
    generation: Generation = "wgmma"
    repeats: int = 1
    is_awaited: bool = True
    is_serial: bool = False
    barriers: int = 0
    fences: int = 0
    copies: int = 0
    loads: int = 0
    spilled_bytes: int = 0
    far_bytes: int = 0
    cell_bytes: int = 0
    is_step: bool = False
    is_even: bool = False
    element_cycles: float = 0.0
    product_cycles: float = 0.0
    constant: str = ""
    is_specialised: bool = False
