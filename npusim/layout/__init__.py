"""Coordinate to index functions: layouts and their algebra, fractals, fragments, banks.

* ``algebra``: layouts (shape:stride), tilings, swizzles.
* ``instruction``, ``fragment``: which lane of a warp holds what; warps' arrangement.
* ``execute``: products from registers to registers; ``chain``: one into the next.
* ``memory``: ND, NZ, ZN, ZZ of the Ascend; wavefronts of shared-memory banks.

Importing it imports no numpy.
"""

from npusim.layout.algebra import (
    Layout,
    Swizzle,
    SwizzledLayout,
    bundle,
    coalesce,
    complement,
    composition,
    fitted,
    logical_divide,
    logical_product,
    right_inverse,
    row_major,
)
from npusim.layout.chain import Chain, ChainCost, Shuffle, chain
from npusim.layout.execute import chained_product, from_registers, gather, scatter, to_registers
from npusim.layout.fragment import REGISTER_BITS, WARP_LANES, Arrangement, Fragment, arrangement
from npusim.layout.instruction import INSTRUCTIONS, FragmentStep, MmaInstruction, instruction, variants
from npusim.layout.memory import (
    VOLTA_BANKS,
    BankModel,
    fragment_addresses,
    nd,
    nz,
    padded,
    phases,
    return_cycles,
    swizzled,
    wavefronts,
    zn,
    zz,
)

__all__ = [
    "INSTRUCTIONS",
    "REGISTER_BITS",
    "VOLTA_BANKS",
    "WARP_LANES",
    "Arrangement",
    "BankModel",
    "Chain",
    "ChainCost",
    "Fragment",
    "FragmentStep",
    "Layout",
    "MmaInstruction",
    "Shuffle",
    "Swizzle",
    "SwizzledLayout",
    "arrangement",
    "bundle",
    "chain",
    "chained_product",
    "coalesce",
    "complement",
    "composition",
    "fitted",
    "fragment_addresses",
    "from_registers",
    "gather",
    "instruction",
    "logical_divide",
    "logical_product",
    "nd",
    "nz",
    "padded",
    "phases",
    "return_cycles",
    "right_inverse",
    "row_major",
    "scatter",
    "swizzled",
    "to_registers",
    "variants",
    "wavefronts",
    "zn",
    "zz",
]
