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
        Of the quad pairs in a warp, as `npusim.layout.arrangement` reads them.
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
