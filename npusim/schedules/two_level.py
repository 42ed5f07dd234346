"""FastAttention on the decoupled core: two-level tiling, and the unified tiling it improves on.

First level: Q in blocks of B_r rows, K and V in tiles of B_c keys for the matrix unit.  Second
level: the vector cores take each B_r x B_c tile of scores in slices of B_b rows.  Both levels are
double buffered: the slots between the cores in global memory, and the slices in UB.  Unified tiling
has one block b for both units, so that cores hand over after every b x b tile.  (FastAttention
section 4.1 and appendix B; without the inverse printed in equation 12.)  Both are `flash` with
fields of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from npusim.config.tiling import Field, Tiling
from npusim.machines.ascend import Barriers
from npusim.schedules import flash

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram


class TwoLevelTiling(flash.FlashTiling):
    """B_r x B_c for the matrix unit, B_b rows for the vector cores."""

    # One tile of scores ahead: two slots between the cores, the paper's double buffering.
    depth: int = Field(
        default=1, ge=0, le=14, description="tiles that Q K^T and softmax run ahead of P V"
    )
    barriers: Barriers | None = Field(
        default="every", description="between vector instructions: every, as in CANN 8.0, or where needed"
    )


class UnifiedTiling(Tiling):
    """One block size for both units."""

    block: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows and keys of a block"
    )


def build_unified(
    problem: Problem, tiling: UnifiedTiling, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return unified tiling of ``problem``: a vector core takes its share of a block in one piece."""
    block = tiling.block
    fields = TwoLevelTiling(block_q=block, block_kv=block, vector_rows=block)
    return flash.build_on_ascend(problem, fields, device, precision, "unified")


TWO_LEVEL = replace(
    flash.ASCEND, name="two_level", summary="FastAttention: large blocks for matrix units, slices for vector units",
    tiling=TwoLevelTiling, build=partial(flash.build_on_ascend, name="two_level"),
)  # fmt: skip
SCHEDULES = (
    TWO_LEVEL,
    replace(
        TWO_LEVEL, name="unified", summary="FastAttention's single-level tiling: one block for both units",
        tiling=UnifiedTiling, build=build_unified,
    ),
)  # fmt: skip
