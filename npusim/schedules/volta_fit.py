"""What of `volta_flash` fits: lanes, registers, shared memory; and the fields that were left open."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from npusim.errors import LayoutError, TilingError
from npusim.formats import get_format
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
from npusim.schedules.attention_tensors import AttentionTensors, attention_tensors
from npusim.schedules.occupancy import BlockNeeds, Occupancy, occupancy, thread_registers
from npusim.schedules.steps.volta import VoltaPrecision, volta_steps
from npusim.schedules.volta_warps import SM, WARPS, VoltaTile
from npusim.spec.gpu_engine import WarpIssue

if TYPE_CHECKING:
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.volta_flash import VoltaTiling
    from npusim.spec.device import DeviceSpec
    from npusim.spec.problem import Problem

#: Keys of a step to try, the most first: a multiple of what every arrangement covers.
_KEYS = (64, 32, 16)


def fitted(
    problem: Problem, tiling: VoltaTiling, device: DeviceSpec, precision: VoltaPrecision
) -> tuple[VoltaTiling, Occupancy]:
    """Return the fields with those left open chosen, and how many blocks of them a core holds.

    Raises `TilingError` where none fits.
    """
    if problem.dtype != "float16":
        raise TilingError(f"dtype: m8n8k4 multiplies float16, not {problem.dtype}; --dtype float16 rounds to it")
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


def keys_of(tiling: VoltaTiling) -> int:
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
        for acc, columns in zip((precision.acc_qk, precision.acc_pv), (keys_of(tiling), dims[1]), strict=True):
            held = instruction("m8n8k4", acc=_kind(acc)).c
            arrangement(tiling.arrangement).repeats(held, tiling.block_q, columns, warps=(tiling.warps, 1))
        for width in dims:
            _check_shared(width, padding, tiling)
    except LayoutError as error:
        raise TilingError(f"tile {tiling.block_q}x{keys_of(tiling)}: {error}") from None
    return VoltaTile(
        tiling.block_q, keys_of(tiling), tiling.warps // group, 1, padding, tiling.stages, plan,
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
    row_bytes, narrowest = (width + padding) * size, instruction("m8n8k4").b.values * size
    if row_bytes % tiling.access_bytes:
        raise LayoutError(
            f"shared memory: rows of {width} + {padding} elements are {row_bytes} bytes, so that accesses of "
            f"{tiling.access_bytes} bytes (LDS.{8 * tiling.access_bytes}) would be misaligned: "
            f"pad by a multiple of {tiling.access_bytes // size} elements"
            + ("" if row_bytes % narrowest else f", or take access_bytes={narrowest}")
        )
    if tiling.smem == "swizzled":
        try:
            swizzled(keys_of(tiling), width)
        except LayoutError as error:
            raise LayoutError(f"smem=swizzled: {error}; take smem=padded") from None
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
    q, kv, d, dv = tiling.block_q, keys_of(tiling), tensors.q.cols, tensors.v.cols
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
