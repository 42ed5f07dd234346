"""FlashAttention-2 on the decoupled Ascend core, as the vendor's kernels run it.

Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth
2, rows split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.schedules.attention_blocks import Deal
from npusim.schedules.attention_program import ascend_program, gpu_program
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.attention import for_inputs
from npusim.schedules.steps.flash import FlashPrecision, flash_steps
from npusim.schedules.vector_share import AscendAttentionTiling, slice_rows
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem


class GpuFlashTiling(Tiling):
    """Tiling fields of FlashAttention-2 on a GPU."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=64, ge=16, multiple_of=16, description="keys of a step")


class FlashTiling(Tiling):
    """Tiling fields of FlashAttention-2 on Ascend."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=512, ge=16, multiple_of=16, description="keys of a tile")
    vector_rows: int | None = Field(
        default=None,
        ge=1,
        description="rows of a softmax slice on an AIV; default: 8192 elements a slice",
    )
    deal: Deal = Field(
        default="round_robin", description="blocks to cores: as vendor kernels do, or longest first"
    )
    depth: int = Field(
        default=2, ge=0, le=14,
        description="tiles that Q K^T and softmax run ahead of P V; the flag counter allows 15 slots",
    )  # fmt: skip


FA2_FP32 = FlashPrecision(
    "fa2_fp32", scores="float32", softmax="float32", exponential="float32", operand="input", running="float32",
    product="float32", output="input",
)  # fmt: skip
PRECISIONS = MappingProxyType(
    {
        "fa2_fp32": FA2_FP32,
        # PASA figure 2: S leaves the matrix unit unscaled in float16; that store is where it overflows.
        "fa16_32": replace(FA2_FP32, name="fa16_32", scores="float16"),
        # PASA figure 3: float16 throughout, unscaled float16 S, then a float16 scale.
        "fa16": FlashPrecision(
            "fa16", scores="float16", softmax="float16", exponential="float16", operand="float16",
            running="float16", product="float16", output="float16",
        ),
    }
)  # fmt: skip
# What the golden kernel of an H200 does: powers of two by a polynomial, P V chained on the tensor
# core, the row sum left to right (golden/README.md).
GPU_PRECISIONS = MappingProxyType(
    {
        "fa2_fp32": replace(
            FA2_FP32, exp_variant="exp2.exp2p", sum_order="sequential", accumulate="chained"
        ),
    }
)


def build_on_ascend(
    problem: Problem, tiling: FlashTiling, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return FlashAttention-2 of ``problem`` as a tile program for one Ascend device."""
    steps = flash_steps(for_inputs(precision, problem.dtype), problem.scale)
    rows = slice_rows(tiling.vector_rows, tiling.block_kv)
    mapping = AscendAttentionTiling(
        tiling.block_q, tiling.block_kv, rows, tiling.depth, deal=tiling.deal
    )
    return ascend_program("flash", device, problem, steps, mapping)


def build_on_gpu(
    problem: Problem, tiling: GpuFlashTiling, device: DeviceSpec, precision: FlashPrecision
) -> TileProgram:
    """Return FlashAttention-2 of ``problem`` as a tile program for one GPU, values only."""
    steps = flash_steps(for_inputs(precision, problem.dtype), problem.scale)
    return gpu_program("flash", device, problem, steps, tiling.block_q, tiling.block_kv)


SUMMARY = "FlashAttention-2, online softmax"
ASCEND = Schedule(
    name="flash", family="ascend", summary=SUMMARY, tiling=FlashTiling, precisions=PRECISIONS,
    default_precision="fa2_fp32", build=build_on_ascend,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuFlashTiling, precisions=GPU_PRECISIONS, default_precision="fa2_fp32",
    build=build_on_gpu,
)  # fmt: skip
SCHEDULES = (ASCEND, GPU)
