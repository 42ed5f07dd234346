"""FP8 attention: P cast to E4M3, with the choices of scale, key order and accumulator of real kernels.

The presets follow the kernels' sources where they were seen (papers.md section 1.5; for
``trtllm_xqa`` and ``sage2`` only the P-Cast paper's Table 3).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.fp8 import E4M3, E4M3_MAX, Fp8Precision
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.ascend import SLICE_ELEMENTS, AscendMachine
from npusim.machines.sm import SmMachine, SmTiling
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.fields import GroupFields, left_alone
from npusim.machines.sm.groups import group_tiling
from npusim.schedules.attention import ascend_tiling
from npusim.schedules.fp8_phases import fp8_phase, scale_warnings
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Dtype, Problem
    from npusim.ir.program import TileProgram


class _GpuBlock(Tiling):
    """A block on a GPU."""

    block_q: int = Field(default=64, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=64, ge=32, multiple_of=32, description="keys of a step (one FP8 product: 32)")


class GpuFp8Tiling(GroupFields, _GpuBlock):
    """Tiling fields of FP8 attention on a GPU."""


class Fp8Tiling(Tiling):
    """Tiling fields of the same steps on Ascend."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=256, ge=16, multiple_of=16, description="keys of a tile")
    vector_rows: int | None = Field(
        default=None, ge=1, description="rows of a softmax slice on an AIV; default: 4096 elements a slice"
    )
    depth: int = Field(default=2, ge=0, le=14, description="tiles that Q K^T and softmax run ahead of P V")


#: 2^8: the scale of P in hpc-ops and FlashAttention-3 (papers.md section 1.5).
P_SCALE = 256.0
PRESETS = (
    Fp8Precision("hpc_ops_s1"),
    Fp8Precision("hpc_ops", scale=P_SCALE),
    Fp8Precision("fa3", scale=P_SCALE, fold=True, is_reverse=True, accumulate="chained"),
    Fp8Precision("flashinfer", scale=E4M3_MAX, is_reverse=True, accumulate="chained"),
    Fp8Precision("trtllm_xqa", scale=E4M3_MAX, accumulate="chained"),
    Fp8Precision("sage2", scale=E4M3_MAX),
)
#: On a GPU powers of two come from a polynomial, as FlashAttention-4 computes them.
GPU_PRECISIONS = MappingProxyType({p.name: replace(p, exp_variant="exp2.exp2p") for p in PRESETS})
#: The 910B has no path for a chained P V, and row sums are in its vector unit's own order.
ASCEND_PRECISIONS = MappingProxyType(
    {
        p.name: replace(p, accumulate="fresh", sum_order="", output="float16")
        for p in PRESETS
    }
)


def build_on_gpu(
    problem: Problem, tiling: GpuFp8Tiling, device: DeviceSpec, precision: Fp8Precision
) -> TileProgram:
    """Return FP8 attention of ``problem`` for one GPU: E4M3 inputs, E4M3 P, float32 out.

    Float32 inputs isolate the cast of P, as P-Cast section 6.1 does: both products are plain IEEE.
    """
    warnings = scale_warnings(precision)
    if device.is_timed and not _has_fp8(device):
        raise TilingError(
            f"fp8_attention: {device.name} has no FP8 matrix unit, nor one for float32, to isolate P's cast; "
            "h200 has FP8, flash runs here in float16"
        )
    if problem.dtype not in (E4M3, "float32"):
        raise TilingError(
            f"fp8_attention on {device.name} reads E4M3 inputs, not {problem.dtype}; give them as {E4M3}, "
            "or as float32 to isolate the cast of P"
        )
    if problem.dtype != E4M3:
        warnings += ("inputs in float32 isolate the cast of P: no FP8 product is computed",)
    phase, fields, room = fp8_phase(problem, (tiling.block_q, tiling.block_kv), precision), SmTiling(), ""
    if works_beside(device):
        fields, room = group_tiling(f"fp8_attention_{precision.accumulate}", phase, tiling, device)
    said = (room, *warnings) if room else warnings
    return SmMachine(device).build("fp8_attention", [(phase, fields)], problem.flops(), said)


def build_on_ascend(
    problem: Problem, tiling: Fp8Tiling, device: DeviceSpec, precision: Fp8Precision
) -> TileProgram:
    """Return the same steps on Ascend: with FP8 products, or a study of P's cast, its product in the inputs' format."""
    warnings = scale_warnings(precision)
    if problem.dtype == E4M3 and not _has_fp8(device):
        raise TilingError(f"dtype: {device.name} has no FP8 matrix unit; float16 holds all values of {E4M3}")
    machine, sizes = AscendMachine(device), (tiling.block_q, tiling.block_kv)
    # Slices of half the usual size: the cast P needs room in UB beside P itself.
    fields = ascend_tiling(machine, sizes, tiling.vector_rows, tiling.depth, SLICE_ELEMENTS // 2)
    phases = [(fp8_phase(problem, sizes, precision), fields)]
    return machine.build("fp8_attention", phases, problem.flops(), warnings)


def _has_fp8(device: DeviceSpec) -> bool:
    return any(E4M3 in unit.arithmetic for unit in device.matrix_engines.values())


def study(problem: Problem, device: DeviceSpec) -> str:
    """Return why the time on an Ascend device is that of no real kernel; empty where products are FP8."""
    if problem.dtype == E4M3:
        return ""
    why = f"was given {problem.dtype}, not {E4M3}" if _has_fp8(device) else "has no FP8 matrix unit"
    what = f"P is cast to E4M3 and multiplied as {problem.dtype}, anew for each tile; a study of numerics"
    return f"{device.name} {why}: {what}, its time that of no real kernel"


def inputs(device: DeviceSpec) -> Dtype | None:
    """Return the format that Q, K and V have where a call does not say: E4M3 where products are FP8."""
    return "float8_e4m3fn" if _has_fp8(device) else None


SUMMARY = "P cast to E4M3 with a scale, forward or reverse key order"
ASCEND = Schedule(
    name="fp8_attention", family="ascend", summary=SUMMARY, tiling=Fp8Tiling, precisions=ASCEND_PRECISIONS,
    default_precision="hpc_ops", build=build_on_ascend, reads_scales=True, study=study, inputs=inputs,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuFp8Tiling, precisions=GPU_PRECISIONS, build=build_on_gpu, study=None,
    left=left_alone,
)
SCHEDULES = (ASCEND, GPU)
