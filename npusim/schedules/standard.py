"""Unfused attention: four kernels, scores and probabilities through global memory.

S = Q K^T, then scale and mask, then softmax, then P V, each over the whole matrix; a causal mask
saves no work.  This is what frameworks run without a fused operator, and the baseline of
FastAttention's figure 7.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import TilingError
from npusim.ir.program import TileProgram
from npusim.ir.tile import GlobalTensor
from npusim.schedules.ascend_gemm import AscendGemm, GemmOperands, GemmTiling
from npusim.schedules.ascend_rows import ElementWise, Softmax
from npusim.schedules.attention_tensors import attention_tensors
from npusim.schedules.on_ascend import AscendGroup
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.attention import for_inputs
from npusim.schedules.steps.unfused import SCALE_MASK, UnfusedPrecision
from npusim.schedules.tiling_mask import TilingMask
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem


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
    p, group = problem, AscendGroup(device)
    choice = for_inputs(precision, p.dtype)
    choice = replace(choice, sum_order=choice.sum_order or group.row_sum)
    if not choice.exp_variant.startswith("exp."):
        raise TilingError(
            f"exp_variant: unfused softmax takes exponentials to the base e, not {choice.exp_variant}"
        )
    io = attention_tensors(p, choice.output)
    raw, scores, weights = (
        GlobalTensor(name, p.batch, p.heads, p.seq_q, p.seq_kv, fmt, "workspace")
        for name, fmt in (("s", choice.scores), ("s_masked", choice.scores), ("p", choice.operand))
    )
    gemm = GemmTiling(tiling.block_m, tiling.block_n, tiling.block_k)
    mask = TilingMask(max(tiling.block_rows, p.seq_kv)) if p.causal else None
    cut = (lambda r, n, c, w: mask.cut(r, n, c, w, p.causal_offset)) if mask else None
    phases = []
    for make in (
        lambda: AscendGemm(
            "scores",
            group,
            GemmOperands(io.q, io.k, raw, transpose_b=True, name="S_in"),
            gemm,
            choice.arithmetic,
        ),
        lambda: ElementWise(
            "scale_mask",
            group,
            raw,
            scores,
            tiling.block_rows,
            SCALE_MASK,
            "S",
            {"scale": p.scale, "masked": -math.inf},
            mask=cut,
        ),
        lambda: Softmax(group, scores, weights, tiling.block_rows, choice.choices()),
        lambda: AscendGemm(
            "values", group, GemmOperands(weights, io.v, io.o), gemm, choice.arithmetic
        ),
    ):
        group.allocator.start_phase()
        phases.append(make().phase())
        group.allocator.check()
    listed = [io.q, io.k, io.v, raw, scores, weights, io.o, *([mask.tensor()] if mask else [])]
    return TileProgram(
        name="standard", queues=group.queues(), rings=tuple(group.allocator.rings),
        spaces=dict(group.allocator.spaces), used_bytes=dict(group.allocator.peak_bytes),
        tensors={t.name: t for t in listed}, phases=tuple(phases), flops=p.flops(),
        constants={"mask": mask.values} if mask else {},
    )  # fmt: skip


SCHEDULES = (
    Schedule(
        name="standard", family="ascend", summary="unfused: scores, scale and mask, softmax, values",
        tiling=StandardTiling, precisions=PRECISIONS, default_precision="framework", build=build,
    ),
)  # fmt: skip
