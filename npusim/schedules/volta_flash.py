"""FlashAttention-2 on Volta: m8n8k4 products chained from accumulators, as FastAttention runs it.

Q Kᵀ is TN and P V is TT (volta.md section 1.1): both operands are read as they lie, by rows of the
head.  With float16 accumulators and quad pairs stacked 4x1 P lies where P V needs it; everything
else moves values across lanes (FastAttention section 4.3 and appendix C; `npusim.layout.chain`).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.errors import TilingError
from npusim.ir.program import Phase, TileProgram
from npusim.schedules.attention_blocks import attention_blocks
from npusim.schedules.attention_program import causal_mask
from npusim.schedules.attention_tensors import attention_tensors
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.volta import VoltaPrecision, volta_steps
from npusim.schedules.volta_fit import fitted, keys_of, volta_tile
from npusim.schedules.volta_warps import VoltaCore, dealt_out
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem


class VoltaTiling(Tiling):
    """Tile, warps and layouts of FlashAttention-2 on Volta."""

    block_q: int = Field(default=128, ge=8, multiple_of=8, description="query rows of a block")
    block_kv: int | None = Field(
        default=None, ge=8, multiple_of=8,
        description="keys of a step; default: the most of 64, 32 and 16 that fit",
    )  # fmt: skip
    q: Literal["auto", "registers", "shared"] = Field(
        default="auto", description="where Q stays; auto: in registers if they suffice"
    )
    warps: int = Field(
        default=4, ge=4, le=32, multiple_of=4,
        description="of a block, stacked down its rows; each sub-core has as many",
    )  # fmt: skip
    arrangement: Literal["4x1", "2x2", "1x4"] = Field(
        default="4x1", description="quad pairs of a warp, down x across its tile"
    )
    smem: Literal["plain", "padded", "swizzled"] = Field(
        default="padded", description="how rows of K and V lie in shared memory"
    )
    padding: int = Field(default=8, ge=2, multiple_of=2, description="elements after each padded row")
    access_bytes: int = Field(
        default=16, ge=8, le=16, multiple_of=8, description="of a lane's access to shared memory"
    )
    stages: int = Field(default=1, ge=1, le=4, description="tiles of K, and of V, in shared memory")
    exchange: Literal["shuffle", "none"] = Field(
        default="shuffle", description="whether P may cross lanes on its way to P V"
    )
    residents: int | None = Field(
        default=None, ge=1, description="blocks resident on a core; default: as many as fit"
    )
    launch: Literal["in_order", "longest_first"] = Field(
        default="in_order", description="blocks start head by head, or those with most keys first"
    )


ACC_FP16 = VoltaPrecision("acc_fp16", acc_qk="float16", acc_pv="float16")
PRECISIONS = MappingProxyType(
    {
        "acc_fp16": ACC_FP16,
        "acc_fp32": VoltaPrecision("acc_fp32", acc_qk="float32", acc_pv="float32"),
    }
)
EXPONENTIAL = "MUFU.EX2's bits are not public: powers of two are taken as correctly rounded"


def build(
    problem: Problem, tiling: VoltaTiling, device: DeviceSpec, precision: VoltaPrecision
) -> TileProgram:
    """Return FlashAttention-2 of ``problem`` as a tile program for a Volta device.

    Raises :class:`~npusim.errors.TilingError` (or its ``BufferOverflowError``) where tile, lanes,
    registers or shared memory do not fit.
    """
    tiling, found = fitted(problem, tiling, device, precision)
    block_kv = keys_of(tiling)
    if tiling.residents and tiling.residents > found.blocks:
        raise TilingError(f"residents: {tiling.residents} blocks, but {found}")
    steps = volta_steps(precision, problem.scale, problem.dtype)
    tensors = attention_tensors(problem, problem.dtype)
    mask = causal_mask(problem, tiling.block_q, block_kv)
    residents = tiling.residents or found.blocks
    tile = replace(volta_tile(tiling, precision, problem), residents=residents)
    core = VoltaCore(device, tensors, steps, tile, mask)
    cores = device.group_count.value
    blocks = attention_blocks(problem, tiling.block_q, block_kv)
    if tiling.launch == "longest_first":
        blocks = tuple(sorted(blocks, key=lambda b: b.first_key - b.last_key))
    ordered, shares = dealt_out(blocks, cores, tile.residents)
    listed = [tensors.q, tensors.k, tensors.v, tensors.o, *([mask.tensor()] if mask else [])]
    return TileProgram(
        name="volta_flash", queues=core.queues(), rings=tuple(core.allocator.rings),
        spaces=dict(core.allocator.spaces), used_bytes=dict(core.allocator.peak_bytes),
        tensors={t.name: t for t in listed},
        phases=(
            Phase("attention", ordered, core.block, lambda b: b.shape, tensors.touches, dealt=shares),
        ),
        flops=problem.flops(), constants={"mask": mask.values} if mask else {},
        notes=(f"{found}; tiles of {tiling.block_q} x {block_kv}, Q in {_Q_PLACES[tiling.q]}", EXPONENTIAL),
    )  # fmt: skip


_Q_PLACES = MappingProxyType({"registers": "registers", "shared": "shared memory"})

SCHEDULES = (
    Schedule(
        name="volta_flash", family="nvidia", summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
        tiling=VoltaTiling, precisions=PRECISIONS, default_precision=ACC_FP16.name, build=build, hw="v100",
    ),
)  # fmt: skip
