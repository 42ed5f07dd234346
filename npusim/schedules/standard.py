"""Unfused attention: scores and probabilities through global memory.

S = Q K^T, then scale and mask, then softmax, then P V, each over the whole matrix; a causal mask
saves no work.  As four kernels, the fewest passes there can be; or eager, as frameworks run it: every
operator is a kernel (scale, mask, a cast to float32 and back around softmax).  The values are the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.gemm import gemm
from npusim.algorithms.precision import for_inputs
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.tiling_mask import TilingMask
from npusim.algorithms.unfused import (
    MASK,
    NARROW,
    SCALE,
    SCALE_MASK,
    WIDEN,
    UnfusedPrecision,
    element_wise,
    softmax,
)
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.ir.tile import GlobalTensor
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
    operators: Literal["fused", "eager"] = Field(
        default="fused", description="four kernels of fused passes, or eager: every operator a kernel (--eager)"
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
    io = attention_tensors(p, choice.output)

    def between(name: str, fmt: str) -> GlobalTensor:
        return GlobalTensor(name, p.batch, p.heads, p.seq_q, p.seq_kv, fmt, "workspace")

    raw, scores, weights = between("s", choice.scores), between("s_masked", choice.scores), between("p", choice.operand)
    mask = TilingMask(max(t.block_rows, p.seq_kv)) if p.causal else None
    tile, rows = (t.block_m, t.block_n), (t.block_rows, min(p.seq_kv, SLICE_ELEMENTS))
    constants = {"scale": p.scale, "masked": -math.inf}
    if t.operators == "eager":
        scaled, wide = between("s_scaled", choice.scores), between("s_wide", "float32")
        shares = between("p_wide", "float32")
        masked = (element_wise("mask", MASK, scaled, scores, rows, constants, mask=mask, offset=p.causal_offset),)
        middle = (
            element_wise("scale", SCALE, raw, scaled, rows, constants), *(masked if mask else ()),
            element_wise("widen", WIDEN, scores if mask else scaled, wide, rows, constants),
            softmax(wide, shares, rows, choice), element_wise("narrow", NARROW, shares, weights, rows, constants),
        )  # fmt: skip
    else:
        middle = (
            element_wise("scale_mask", SCALE_MASK, raw, scores, rows, constants, mask=mask, offset=p.causal_offset),
            softmax(scores, weights, rows, choice),
        )
    phases = (
        gemm(
            "scores", io.q, io.k, raw, tile, is_transposed=True, arithmetic=choice.arithmetic, result="S_in",
            role="score",
        ),
        *middle,
        gemm("values", weights, io.v, io.o, tile, arithmetic=choice.arithmetic),
    )
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
