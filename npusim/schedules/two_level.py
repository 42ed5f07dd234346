"""FastAttention on the decoupled core: two-level tiling, and the unified tiling it improves on.

First level: Q in blocks of B_r rows, K and V in tiles of B_c keys for the matrix unit.  Second
level: the vector cores take each B_r x B_c tile of scores in slices of B_b rows.  Both levels are
double buffered: the slots between the cores in global memory, and the slices in UB.  Unified tiling
has one block b for both units, so that cores hand over after every b x b tile.  (FastAttention
section 4.1 and appendix B; without the inverse printed in equation 12.)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.schedules.attention_blocks import Deal
from npusim.schedules.attention_program import ascend_program
from npusim.schedules.flash import FA2_FP32, PRECISIONS
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.attention import for_inputs
from npusim.schedules.steps.flash import FlashPrecision, flash_steps
from npusim.schedules.vector_share import AscendAttentionTiling, slice_rows
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem

#: One tile of scores ahead: two slots between the cores, the paper's double buffering.
DOUBLE_BUFFER = 1


class TwoLevelTiling(Tiling):
    """B_r x B_c for the matrix unit, B_b rows for the vector cores."""

    block_q: int = Field(
        default=128, ge=16, multiple_of=16, description="B_r, query rows of a first-level block"
    )
    block_kv: int = Field(
        default=512, ge=16, multiple_of=16, description="B_c, keys of a first-level tile"
    )
    vector_rows: int | None = Field(
        default=None,
        ge=1,
        description="B_b, rows of a second-level slice; default: 8192 elements a slice",
    )
    deal: Deal = Field(
        default="round_robin", description="blocks to cores: as vendor kernels do, or longest first"
    )


class UnifiedTiling(Tiling):
    """One block size for both units."""

    block: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows and keys of a block"
    )


def build_two_level(
    problem: Problem, tiling: TwoLevelTiling, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return two-level tiling of ``problem`` as a tile program for one Ascend device."""
    steps = flash_steps(for_inputs(precision, problem.dtype), problem.scale)
    rows = slice_rows(tiling.vector_rows, tiling.block_kv)
    mapping = AscendAttentionTiling(
        tiling.block_q, tiling.block_kv, rows, DOUBLE_BUFFER, deal=tiling.deal
    )
    return ascend_program("two_level", device, problem, steps, mapping)


def build_unified(
    problem: Problem, tiling: UnifiedTiling, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return unified tiling of ``problem``: a vector core takes its share of a block in one piece."""
    steps = flash_steps(for_inputs(precision, problem.dtype), problem.scale)
    mapping = AscendAttentionTiling(tiling.block, tiling.block, tiling.block, DOUBLE_BUFFER)
    return ascend_program("unified", device, problem, steps, mapping)


SCHEDULES = (
    Schedule(
        name="two_level", family="ascend", summary="FastAttention: large blocks for the CUBE, slices for the Vector",
        tiling=TwoLevelTiling, precisions=PRECISIONS, default_precision=FA2_FP32.name,
        build=build_two_level,
    ),
    Schedule(
        name="unified", family="ascend", summary="FastAttention's single-level tiling: one block for both units",
        tiling=UnifiedTiling, precisions=MappingProxyType(dict(PRECISIONS)), default_precision=FA2_FP32.name,
        build=build_unified,
    ),
)  # fmt: skip
