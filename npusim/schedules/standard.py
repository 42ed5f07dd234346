"""Unfused attention: scores and probabilities through global memory.

S = Q K^T, then scale and mask, then softmax, then P V, each over the whole matrix; a causal mask
saves no work.  As four kernels, the fewest passes there can be; or eager, as frameworks run it: every
operator is a kernel (`npusim.algorithms.unfused.OPERATORS`).  The values are the same.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.precision import for_inputs
from npusim.algorithms.unfused import UnfusedPrecision, unfused
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.ascend import (
    SLICE_ELEMENTS,
    AscendMachine,
    AscendTiling,
    gemm_tiling,
    loaded_k,
)
from npusim.machines.sm.core import works_beside
from npusim.schedules.registry import Schedule
from npusim.schedules.standard_gpu import GpuStandardFields, build_on_gpu

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram


class StandardTiling(Tiling):
    """Tile of the two products, and rows of a block of the kernels between them."""

    block_m: int = Field(
        default=128, ge=16, le=128, multiple_of=16, description="rows of a tile of a product"
    )
    block_n: int = Field(
        default=128, ge=16, le=256, multiple_of=16, description="columns of a tile of a product"
    )
    block_k: int = Field(
        default=128, ge=16, le=128, multiple_of=16, description="piece of a sum loaded at once"
    )
    block_rows: int = Field(
        default=128, ge=2, description="rows of a block of the element-wise kernels"
    )
    operators: Literal["fused", "added", "eager", "eager_float32"] = Field(
        default="fused",
        description="four kernels of fused passes; eager (--eager): every operator a kernel; added: a mask is "
        "added, not filled into a copy; eager_float32: softmax in float32 too, between two casts",
    )


PRECISIONS = MappingProxyType(
    {
        # Every kernel stores what the framework keeps: the inputs' format.
        "framework": UnfusedPrecision("framework"),
    }
)  # fmt: skip


def build(
    problem: Problem, tiling: StandardTiling, device: DeviceSpec, precision: UnfusedPrecision
) -> TileProgram:
    """Return unfused attention of ``problem`` as a tile program for one Ascend device."""
    p, t = problem, tiling
    choice = for_inputs(precision, p.dtype)
    if not choice.exp_variant.startswith("exp."):
        raise TilingError(
            f"exp_variant: unfused softmax takes exponentials to the base e, not {choice.exp_variant}"
        )
    tile = t.block_m, t.block_n
    phases = unfused(p, t.operators, tile, t.block_rows, choice, SLICE_ELEMENTS)
    machine = AscendMachine(device)
    load = loaded_k(*tile, t.block_k, p.dtype, machine.group)
    fields = [gemm_tiling(ph.name, *tile, t.block_k, load) if ph.loop_axis == "" else AscendTiling() for ph in phases]
    return machine.build("standard", list(zip(phases, fields, strict=True)), p.flops())


ASCEND = Schedule(
    name="standard", family="ascend", summary="unfused: scores, scale and mask, softmax, values",
    tiling=StandardTiling, precisions=PRECISIONS, default_precision="framework", build=build,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuStandardFields, build=build_on_gpu, hw="h200", runs_on=works_beside
)
SCHEDULES = (ASCEND, GPU)
