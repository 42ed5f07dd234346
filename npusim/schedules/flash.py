"""FlashAttention-2 on the decoupled Ascend core, as the vendor's kernels run it.

Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth
2, rows split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.schedules.ascend_attention import AscendAttentionTiling, slice_rows
from npusim.schedules.attention_program import attention_program
from npusim.schedules.on_ascend import AscendGroup
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.flash import FlashPrecision, flash_steps
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem


class FlashTiling(Tiling):
    """Tiling fields of FlashAttention-2 on Ascend."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=512, ge=16, multiple_of=16, description="keys of a tile")
    vector_rows: int | None = Field(
        default=None, ge=1, description="rows of a softmax slice on an AIV; default: 8192 elements a slice"
    )
    depth: int = Field(
        default=2, ge=0, le=14,
        description="tiles that Q K^T and softmax run ahead of P V; the flag counter allows 15 slots",
    )  # fmt: skip


PRECISIONS = MappingProxyType(
    {
        "fa2_fp32": FlashPrecision(
            "fa2_fp32", scores="float32", softmax="float32", exponential="float32",
            operand="input", running="float32", product="float32", output="input",
        ),
    }
)  # fmt: skip


def build(problem: Problem, tiling: FlashTiling, device: DeviceSpec, precision: FlashPrecision) -> TileProgram:
    """Return FlashAttention-2 of ``problem`` as a tile program for one Ascend device."""
    steps = flash_steps(precision.for_inputs(problem.dtype), problem.scale)
    return attention_program(
        "flash", AscendGroup(device), problem, steps,
        AscendAttentionTiling(
            tiling.block_q, tiling.block_kv, slice_rows(tiling.vector_rows, tiling.block_kv), tiling.depth
        ),
    )  # fmt: skip


SCHEDULE = Schedule(
    name="flash", family="ascend", summary="FlashAttention-2: S, P and O_tmp through slots in global memory",
    tiling=FlashTiling, precisions=PRECISIONS, default_precision="fa2_fp32", causal=True, build=build,
)  # fmt: skip
