"""FlashAttention-2 on the decoupled Ascend core, as the vendor's kernels run it.

Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth
2, rows split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.cells import Deal, dealt
from npusim.algorithms.flash import FlashPrecision
from npusim.algorithms.precision import for_inputs
from npusim.config.tiling import Field, Tiling
from npusim.machines.ascend import AscendMachine, AscendTiling, Barriers
from npusim.machines.sm.fields import SmFields, left_alone
from npusim.schedules.attention import Make, ascend_tiling, flash_phase, kernel_of
from npusim.schedules.flash_gpu import build_on_gpu
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram


class FlashTiling(Tiling):
    """Tiling fields of FlashAttention-2 on Ascend."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=512, ge=16, multiple_of=16, description="keys of a tile")
    vector_rows: int | None = Field(
        default=None, ge=1, description="rows of a softmax slice on an AIV; default: 8192 elements a slice"
    )
    deal: Deal = Field(default="round_robin", description="blocks to cores: as vendor kernels do, or longest first")
    barriers: Barriers | None = Field(
        default=None, description="between vector instructions; default: needed for fa2_fp32 (PTO), else every"
    )
    together: int | None = Field(
        default=None, ge=1, description="tiles that cores hand one another at a time; default: 2 for fa16_32, else 1"
    )
    depth: int = Field(
        default=2, ge=0, le=14,
        description="tiles that Q K^T and softmax run ahead of P V; the flag counter allows 15 slots",
    )  # fmt: skip
    running: Literal["core", "gm"] = Field(
        default="core", description="where O stays between tiles: on the core, or in global memory: larger blocks fit"
    )


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
    {"fa2_fp32": replace(FA2_FP32, exp_variant="exp2.exp2p", sum_order="sequential", accumulate="chained")}
)
#: The host's cores: Q, K, V and O in float16, all else float32; sums of lanes by halves.
CPU_PRECISIONS = MappingProxyType(
    {"host_fp32": replace(FA2_FP32, name="host_fp32", operand="float32", sum_order="tree_halves")}
)


def build_on_ascend(
    problem: Problem, tiling: FlashTiling, device: DeviceSpec, precision: FlashPrecision, name: str = "flash",
    make: Make | None = None,
) -> TileProgram:  # fmt: skip
    """Return FlashAttention-2 of ``problem`` as a tile program for one Ascend device."""
    p, sizes, groups = for_inputs(precision, problem.dtype), (tiling.block_q, tiling.block_kv), device.group_count.value
    (first, *rest), notes = make(problem, sizes, p, groups) if make else ((flash_phase(problem, sizes, p),), ())
    machine = AscendMachine(device)
    spilled = ("o",) if tiling.running == "gm" else ()
    fields = ascend_tiling(machine, sizes, tiling.vector_rows, tiling.depth, spilled=spilled)
    fields = kernel_of(name, precision.name, tiling.vector_rows).of(fields, tiling.barriers, tiling.together)
    cells = dealt(first.cells, groups, tiling.deal)
    first = first if cells is first.cells else replace(first, cells=cells)
    phases = [(first, fields), *((phase, AscendTiling()) for phase in rest)]
    return machine.build(name, phases, problem.flops(), notes)


SUMMARY = "FlashAttention-2, online softmax"
ASCEND = Schedule(
    name="flash", family="ascend", summary=SUMMARY, tiling=FlashTiling, precisions=PRECISIONS,
    default_precision="fa2_fp32", build=build_on_ascend,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=SmFields, precisions=GPU_PRECISIONS, build=build_on_gpu, left=left_alone
)
CPU = replace(
    GPU, family="cpu", summary="FlashAttention-2 on a host's cores, for its values", precisions=CPU_PRECISIONS,
    default_precision="host_fp32",
)  # fmt: skip
SCHEDULES = (ASCEND, GPU, CPU)
