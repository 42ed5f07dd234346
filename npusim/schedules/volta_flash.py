"""FlashAttention-2 on Volta: m8n8k4 products chained from accumulators, as FastAttention runs it.

Q Kᵀ is TN and P V is TT (volta.md section 1.1): both operands are read as they lie, by rows of the
head.  With float16 accumulators and quad pairs stacked 4x1 P lies where P V needs it; everything
else moves values across lanes (FastAttention section 4.3 and appendix C; `npusim.layout.chain`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.errors import LayoutError, TilingError
from npusim.formats import get_format
from npusim.ir.program import Phase, TileProgram
from npusim.ir.warps import Accumulator, WarpPlan
from npusim.layout import (
    Chain,
    arrangement,
    chain,
    fragment_addresses,
    instruction,
    padded,
    swizzled,
)
from npusim.schedules.attention_blocks import attention_blocks
from npusim.schedules.attention_program import causal_mask
from npusim.schedules.attention_tensors import AttentionTensors, attention_tensors
from npusim.schedules.occupancy import BlockNeeds, Occupancy, occupancy, thread_registers
from npusim.schedules.registry import Schedule
from npusim.schedules.steps.volta import VoltaPrecision, volta_steps
from npusim.schedules.volta_warps import SM, WARPS, VoltaCore, VoltaTile, dealt_out
from npusim.spec.gpu_engine import WarpIssue
from npusim.spec.tiling import Field, Tiling

if TYPE_CHECKING:
    from npusim.schedules.steps.attention import AttentionSteps
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
    block_kv = _keys(tiling)
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
    if any(b.rows < tile.groups for b in blocks):
        raise TilingError(f"warps: a block of {blocks[-1].rows} rows is too small for {tiling.warps} warps")
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
#: Keys of a step to try, the most first: a multiple of what every arrangement covers.
_KEYS = (64, 32, 16)


def fitted(
    problem: Problem, tiling: VoltaTiling, device: DeviceSpec, precision: VoltaPrecision
) -> tuple[VoltaTiling, Occupancy]:
    """Return the fields with those left open chosen, and how many blocks of them a core holds.

    Raises `TilingError` where none fits.
    """
    if problem.dtype != "float16":
        raise TilingError(f"dtype: m8n8k4 multiplies float16, not {problem.dtype}; give float16 inputs")
    keys = _KEYS if tiling.block_kv is None else (tiling.block_kv,)
    places = ("registers", "shared") if tiling.q == "auto" else (tiling.q,)
    fault: TilingError | None = None
    for block_kv, place in product(keys, places):
        chosen = tiling.model_copy(update={"block_kv": block_kv, "q": place})
        try:
            return chosen, _resident(problem, chosen, device, precision)
        except TilingError as error:
            fault = fault or error
    assert fault is not None
    raise fault


def _resident(
    problem: Problem, tiling: VoltaTiling, device: DeviceSpec, precision: VoltaPrecision
) -> Occupancy:
    steps = volta_steps(precision, problem.scale, problem.dtype)
    tensors = attention_tensors(problem, problem.dtype)
    tile = volta_tile(tiling, precision, problem)
    return _occupancy(device, tensors, steps, tiling, tile)


def _keys(tiling: VoltaTiling) -> int:
    """Return the keys of a step of fields that are chosen."""
    assert tiling.block_kv is not None
    return tiling.block_kv


def volta_tile(tiling: VoltaTiling, precision: VoltaPrecision, problem: Problem) -> VoltaTile:
    """Return what the mapping needs, with one resident block; raise `TilingError` where lanes do not fit."""
    dims = (problem.head_dim, problem.value_head_dim)
    swizzle = tiling.smem == "swizzled"
    padding = tiling.padding if tiling.smem == "padded" else 0
    group = 4  # warps of a group: one on each sub-core (volta.md section 4.2)
    plan = WarpPlan(
        group, tiling.arrangement, _kind(precision.acc_qk), access_bytes=tiling.access_bytes,
        swizzle=swizzle,
    )  # fmt: skip
    try:
        found = chained(tiling.arrangement, _kind(precision.acc_qk), tiling.exchange)
        for acc, columns in zip((precision.acc_qk, precision.acc_pv), (_keys(tiling), dims[1]), strict=True):
            held = instruction("m8n8k4", acc=_kind(acc)).c
            arrangement(tiling.arrangement).repeats(held, tiling.block_q, columns, warps=(tiling.warps, 1))
        for width in dims:
            _check_shared(width, padding, tiling)
    except LayoutError as error:
        raise TilingError(f"tile {tiling.block_q}x{_keys(tiling)}: {error}") from None
    return VoltaTile(
        tiling.block_q, _keys(tiling), tiling.warps // group, 1, padding, tiling.stages, plan,
        replace(plan, accumulator=_kind(precision.acc_pv)), exchanges=bool(found.moved),
        shares_q=tiling.q == "shared",
    )  # fmt: skip


@cache
def chained(quad_pairs: str, accumulator: Accumulator, exchange: str) -> Chain:
    """Return how P goes from the accumulators of Q Kᵀ to the A operand of P V."""
    first, second = instruction("m8n8k4", acc=accumulator), instruction("m8n8k4", b="row")
    return chain(
        first.c, second.a, arrangement=arrangement(quad_pairs, "lane"),
        allow_exchange=exchange == "shuffle",
    )  # fmt: skip


def _check_shared(width: int, padding: int, tiling: VoltaTiling) -> None:
    """Raise `LayoutError` for rows of K or V that lanes cannot read with one access each."""
    size = get_format("float16").size_bytes
    row_bytes = (width + padding) * size
    if row_bytes % tiling.access_bytes:
        raise LayoutError(
            f"shared memory: rows of {width} + {padding} elements are {row_bytes} bytes, so that accesses of "
            f"{tiling.access_bytes} bytes (LDS.{8 * tiling.access_bytes}) would be misaligned: "
            "pad by a multiple of 8 elements, or take access_bytes=8"
        )
    if tiling.smem == "swizzled":
        swizzled(_keys(tiling), width)
    memory = padded(width, width, padding=padding)
    keys = instruction("m8n8k4", b="row").b
    fragment_addresses(keys, arrangement(tiling.arrangement), memory, access_bytes=tiling.access_bytes)


def _occupancy(
    device: DeviceSpec, tensors: AttentionTensors, steps: AttentionSteps, tiling: VoltaTiling, tile: VoltaTile
) -> Occupancy:
    issue = device.engine(SM, WARPS)
    if not isinstance(issue, WarpIssue):
        raise TilingError(f"{device.name}: {SM}.{WARPS} says nothing of warps; volta_flash needs it")
    sizes = {name: get_format(fmt).size_bytes for name, fmt in steps.formats.items()}
    q, kv, d, dv = tiling.block_q, _keys(tiling), tensors.q.cols, tensors.v.cols
    half = get_format(tensors.q.fmt).size_bytes
    # Quad pairs side by side need the same rows: each holds its own copy of the A operands Q and P.
    copies = arrangement(tiling.arrangement).n
    bytes_of = {
        "Q": q * d * half * copies, "S and P": q * kv * max(sizes["S_in"], half * copies), "O": q * dv * sizes["O"],
        "K in flight": kv * d * half, "V in flight": kv * dv * half,
    }  # fmt: skip
    tenants = {name: thread_registers(size, tiling.warps) for name, size in bytes_of.items()}
    # Row vectors that live together: the state m and l, the new maximum, the rescaling factor.
    tenants["rows"] = (len(steps.state) + 2) * _rows_of_lane(tiling, tile.plan)
    shared = {
        "K": tile.depth * kv * (d + tile.padding) * half, "V": tile.depth * kv * (dv + tile.padding) * half,
    }  # fmt: skip
    if tile.shares_q:
        del tenants["Q"]
        shared["Q"] = q * (d + tile.padding) * half
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    return occupancy(BlockNeeds(tiling.warps, tenants, shared), issue, memory)


def _rows_of_lane(tiling: VoltaTiling, plan: WarpPlan) -> int:
    """Return how many rows of a warp's scores a lane holds values of."""
    held = instruction("m8n8k4", acc=plan.accumulator).c
    down = tiling.block_q // (held.rows * arrangement(plan.arrangement).m * tiling.warps)
    return down * len({held.coordinate(0, value)[0] for value in range(held.values)})


def _kind(fmt: str) -> Accumulator:
    """Return the accumulator's short name; raise `TilingError` for a format that has none."""
    if fmt not in ("float16", "float32"):
        raise TilingError(f"accumulator {fmt}: m8n8k4 adds up in float16 or float32")
    return "f16" if fmt == "float16" else "f32"


SCHEDULES = (
    Schedule(
        name="volta_flash", family="nvidia", summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
        tiling=VoltaTiling, precisions=PRECISIONS, default_precision=ACC_FP16.name, causal=True, build=build, hw="v100",
    ),
)  # fmt: skip
