"""Tiles in the lanes of Volta's warps: fragments, open fields, and the number of blocks of attention that fit a
multiprocessor.

A tile of a chained attention is in the accumulators of m8n8k4, Volta's only matrix instruction; rows' results for a
product move from there to its A operand, across lanes where necessary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import LayoutError, TilingError
from npusim.formats import get_format
from npusim.formats.layout.chain import Chain, chain
from npusim.formats.layout.fragment import WARP_LANES, Arrangement, Fragment, arrangement
from npusim.formats.layout.instruction import instruction
from npusim.formats.layout.wavefronts import fragment_addresses, padded, swizzled
from npusim.kernels.form.flow import conflicts, flow, storage, views
from npusim.kernels.form.phase import BySize, tensor_of
from npusim.late_methods import dataclass
from npusim.machines.decisions import GpuDecisions
from npusim.machines.frame import attention_products
from npusim.machines.sm.core import (
    COMPILED,
    REGISTER_BYTES,
    SM,
    STEP,
    GroupFields,
    SmFields,
    SmTiling,
    barriers,
    occupancy,
    warp_issue,
)
from npusim.machines.sm.live_registers import has_more, live_registers, staged_bytes
from npusim.program.ir.op import Accumulator, WarpPlan
from npusim.program.ir.tile_program import Occupancy
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.kernels.form.phase import Phase

#: The only matrix instruction of Volta (PTX ISA).
MMA = "m8n8k4"
#: Warps of a group: one on each sub-core (volta.md section 4.2).
GROUP_WARPS = 4
#: Numbers of keys of a step that are tried, the largest first: multiples of the keys that every arrangement covers.
_KEYS = (64, 32, 16)
#: Fields of schedules that set the rows of a block along an axis.
_ROWS = MappingProxyType({"row": ("block_q", "tile_q", "chunk"), "key": ("tile_kv", "block_key", "block_kv")})


# ---------------------------------------------------------------- fragments


def accumulator(plan: WarpPlan) -> Fragment:
    """Return the fragment of accumulators in which quad pairs hold a tile."""
    return instruction(MMA, acc=plan.accumulator).c


@cache
def arranged(plan: WarpPlan) -> Arrangement:
    """Return how the quad pairs of a warp share its tile."""
    return arrangement(plan.arrangement, "lane")


def fragments(plan: WarpPlan, held: Fragment, rows: int, columns: int) -> tuple[int, int]:
    """Return the number of fragments like ``held`` that a quad pair has along the rows and along the
    columns of a tile.
    """
    where = arranged(plan)
    return ceil_div(rows, held.rows * where.m * plan.warps), ceil_div(columns, held.columns * where.n)


@cache
def lane_values(plan: WarpPlan, rows: int, columns: int) -> int:
    """Return the number of elements of a tile in a lane; for a row vector, the number of rows."""
    held = accumulator(plan)
    down, across = fragments(plan, held, rows, columns)
    if columns == 1:
        return down * len({held.coordinate(0, v)[0] for v in range(held.values)})
    return down * across * held.values


@cache
def chained(plan: WarpPlan, *, allow_exchange: bool = True) -> Chain:
    """Return how a tile moves from the accumulators of one product to the A operand of the next."""
    operand = instruction(MMA, b="row").a
    return chain(accumulator(plan), operand, arrangement=arranged(plan), allow_exchange=allow_exchange)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class ChainTile:
    """Properties of a chained attention that determine its lanes: formats, head sizes, rows of a KV head, live row
    vectors.
    """

    dtype: str
    head_dim: int
    value_dim: int
    rows: int
    scores: str
    running: str
    product: str
    is_chained: bool
    is_viewed: bool = False  # V is a part of K's tile
    vectors: int = 4  # FlashAttention has four: the states m and l, the new maximum, and the rescaling factor

    @classmethod
    def asked(cls, problem: Problem, p: Any) -> ChainTile:
        """Return the tile of a problem in a precision; it needs no blocks."""
        return cls(
            problem.dtype,
            problem.head_dim,
            problem.value_head_dim,
            problem.seq_q * problem.group_size,
            p.scores,
            p.running,
            p.product,
            p.accumulate == "chained",
            problem.values_in_keys,
        )

    @classmethod
    def of(cls, phase: Phase) -> ChainTile | None:
        """Return the chain of a phase with two products, where the second reads the results that rows compute from the
        first; None for any other phase.
        """
        products = attention_products(phase)
        if products is None or has_more(phase):
            return None
        first, last = products
        names = phase.names
        q, k = (tensor_of(t) for n in first.srcs if not isinstance(t := phase.tensors[n], BySize))
        held = (w for w in names.values() if w.start is not None and w.axes == names[last.dst].axes)
        total = next(held, names[last.dst])
        return cls(
            names[first.srcs[0]].fmt,
            phase.sizes[names[first.srcs[0]].axes[1]],
            phase.sizes[names[last.dst].axes[1]],
            q.rows * (q.heads // k.heads),
            names[first.dst].fmt,
            total.fmt,
            names[last.dst].fmt,
            last.attributes.accumulate,
            last.srcs[1] in views(phase, phase.loop_axis),
            live_vectors(phase),
        )


def live_vectors(phase: Phase) -> int:
    """Return the number of row vectors that are alive at one time: states always, others from their first row to their
    last.
    """
    names, roots = phase.names, storage(phase, flow(phase), conflicts(phase))
    states = {roots[n] for n, what in names.items() if what.start is not None and len(what.axes) == 1}
    most = 0
    for loop in phase.loops:
        rows = [r for s in loop.stages for r in s.rows]
        spans: dict[str, tuple[int, int]] = {}
        for at, r in enumerate(rows):
            for n in (r.dst, *r.srcs):
                if n in names and len(names[n].axes) == 1 and roots[n] not in states:
                    spans[roots[n]] = (spans.get(roots[n], (at, at))[0], at)
        live = (sum(begin <= at < end for begin, end in spans.values()) for at in range(len(rows)))
        most = max(most, len(states) + max(live, default=0))
    return most


def fields_of(phase: Phase, tiling: Any) -> SmFields:
    """Return the fields that describe an attention's phase with existing blocks, from a schedule's ``tiling``."""
    rows, keys = phase.sizes[phase.row_axis], phase.sizes[phase.loop_axis]
    return SmFields(block_q=rows, block_kv=keys, arrangement=quad_pairs(phase, tiling))


def plain_lanes(phase: Phase, asked: Any, groups: int = 1) -> SmTiling:
    """Return the layout in lanes of a phase other than attention, with ``groups`` of warps down its rows; ``asked``:
    the schedule's tiling.
    """
    fields, result = SmFields(), phase.names[phase.stages[-1].rows[-1].dst]
    plan = WarpPlan(GROUP_WARPS, quad_pairs(phase, asked, groups), _kind(result.fmt), access_bytes=fields.access_bytes)
    axes = {what.axes[-1] for what in phase.names.values()}
    return SmTiling(lanes=dict.fromkeys(axes, plan), decided=_of_lanes(groups)._replace(padding=fields.padding))


def _of_lanes(groups: int) -> GpuDecisions:
    """Return the decisions of a block in lanes, whose warps wait for one another at the end of an iteration with
    products.
    """
    decided = GpuDecisions(groups=groups, warps=GROUP_WARPS, generation="mma")
    return decided._replace(charges=(STEP, *barriers(decided)))


def live_lanes(phase: Phase, fields: GroupFields, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return the layout in lanes of a loop with more products than that of an attention, and a note on the number of
    blocks that a core holds.

    Registers hold the values that are alive at a time, and the tiles in transfer to shared memory.  Raises
    `TilingError` (or its ``BufferOverflowError``) if a block does not fit.
    """
    issue, memory = warp_issue(device), device.core(SM).buffer("SMEM").capacity_bytes.value
    if (fields.stages or 1) > 1 and "stages" in fields.model_fields_set:
        raise TilingError(
            f"stages: {fields.stages} tiles in flight need asynchronous copies, which {device.name} does not have"
        )
    if wrong := sorted(fields.model_fields_set & (COMPILED - {"residents"})):
        raise TilingError(f"{', '.join(wrong)}: no effect on {device.name}, whose lanes are simulated; remove it")
    groups = max(1, fields.warps // GROUP_WARPS)
    tiling, shared = plain_lanes(phase, fields, groups), staged_bytes(phase, 1, leaves=False)
    moved = shared - staged_bytes(phase, 0, leaves=False)
    registers = {
        "alive": live_registers(phase, fields.warps, tiling.decided),
        "tiles in flight": ceil_div(moved, fields.warps * WARP_LANES * REGISTER_BYTES),
    }
    room = occupancy(issue, memory, fields.warps, registers, {"tiles": shared})
    if fields.residents and fields.residents > room.blocks:
        raise TilingError(f"residents: {fields.residents} blocks, but {room}")
    blocks = min(fields.residents or room.blocks, ceil_div(len(phase.cells), device.group_count.value))
    return replace(tiling, residents=blocks, occupancy=room), str(room)


def fitted(tile: ChainTile, tiling: SmFields, device: DeviceSpec) -> tuple[SmFields, SmTiling, Occupancy]:
    """Return the fields with values chosen for the open ones, the machine's needs for these fields, and the number of
    blocks on a core.

    Raises `TilingError` if no choice fits.
    """
    issue, memory = warp_issue(device), device.core(SM).buffer("SMEM").capacity_bytes.value
    if tile.dtype != "float16":
        raise TilingError(f"dtype: m8n8k4 multiplies float16, not {tile.dtype}; --dtype float16 rounds to it")
    tiling = _for_rows(tiling, tile)
    keys = _KEYS if tiling.block_kv is None else (tiling.block_kv,)
    homes = ("registers", "shared") if tiling.q == "auto" else (tiling.q,)
    fault: TilingError | None = None
    for block_kv, home in product(keys, homes):
        chosen = tiling.model_copy(update={"block_kv": block_kv, "q": home})
        try:
            lanes = lanes_of(chosen, tile)
            room = occupancy(issue, memory, chosen.warps, *_needs(tile, chosen, lanes))
        except TilingError as error:
            fault = fault or error
        else:
            blocks = chosen.residents or room.blocks
            return chosen, replace(lanes, residents=blocks, occupancy=room), room
    assert fault is not None
    raise fault


def _for_rows(tiling: SmFields, tile: ChainTile) -> SmFields:
    """Return the fields with the smallest block that contains the rows of a KV head, if the user has chosen none of the
    block's sizes.

    Adjacent quad pairs cover fewer rows: a block of 128 would multiply padding for a decoding step.
    """
    if tiling.model_fields_set & {"block_q", "warps", "arrangement"}:
        return tiling
    held = instruction(MMA, acc=_kind(tile.scores)).c
    for pairs in ("1x4", "2x2"):
        where = arrangement(pairs)
        height = held.rows * where.m * tiling.warps
        if tile.rows <= height < tiling.block_q and tile.value_dim % (held.columns * where.n) == 0:
            return tiling.model_copy(update={"arrangement": pairs, "block_q": height})
    return tiling


def quad_pairs(phase: Phase, tiling: Any, groups: int = 1) -> Literal["4x1", "2x2", "1x4"]:
    """Return how the quad pairs of warps cover a phase's rows: as many of them stacked as possible, with the fewest
    copies of A.

    Raises `TilingError` for rows that no arrangement covers evenly; names the field of the tiling, or the size of the
    problem, that sets them.
    """
    rows, axis, warps = phase.sizes[phase.row_axis], phase.row_axis, SmFields().warps * groups
    least = instruction(MMA).c.rows * warps
    pairs: Literal["4x1", "2x2", "1x4"]
    for pairs in ("4x1", "2x2", "1x4"):
        if rows % (least * arrangement(pairs).m) == 0:
            return pairs
    fields = (n for n in _ROWS.get(axis, ()) if getattr(tiling, n, None) == rows)
    field = next(fields, axis)
    raise TilingError(f"{field}: {rows} rows cannot be distributed to {warps} warps; use a multiple of {least}")


def lanes_of(tiling: SmFields, tile: ChainTile) -> SmTiling:
    """Return the machine's needs with one resident block; raise `TilingError` if lanes do not fit."""
    padding = tiling.padding if tiling.smem == "padded" else 0
    plan = WarpPlan(
        GROUP_WARPS,
        tiling.arrangement,
        _kind(tile.scores),
        access_bytes=tiling.access_bytes,
        swizzle=tiling.smem == "swizzled",
    )
    values = replace(plan, accumulator=_kind(tile.product))
    try:
        moved = chained(plan, allow_exchange=tiling.exchange == "shuffle").moved
        for lanes, columns in ((plan, tiling.step_keys), (values, tile.value_dim)):
            arrangement(tiling.arrangement).repeats(
                accumulator(lanes), tiling.block_q, columns, warps=(tiling.warps, 1)
            )
        for width in (tile.head_dim, tile.value_dim):
            _check_shared(width, padding, tiling)
    except LayoutError as error:
        raise TilingError(f"tile {tiling.block_q}x{tiling.step_keys}: {error}") from None
    decided = _of_lanes(tiling.warps // GROUP_WARPS)._replace(
        padding=padding, depth=tiling.stages or 1, exchanges=bool(moved), holds_in_registers=tiling.q == "registers"
    )
    return SmTiling(lanes={"key": plan, "value": values}, decided=decided)


def _check_shared(width: int, padding: int, tiling: SmFields) -> None:
    """Raise `LayoutError` for rows of K or V that lanes cannot read with one access each."""
    size = get_format("float16").size_bytes
    row_bytes, narrowest = (width + padding) * size, instruction(MMA).b.values * size
    if row_bytes % tiling.access_bytes:
        raise LayoutError(
            f"shared memory: rows of {width} + {padding} elements are {row_bytes} bytes, so that accesses of "
            f"{tiling.access_bytes} bytes (LDS.{8 * tiling.access_bytes}) would be misaligned: "
            f"pad by a multiple of {tiling.access_bytes // size} elements"
            + ("" if row_bytes % narrowest else f", or use access_bytes={narrowest}")
        )
    if tiling.smem == "swizzled":
        try:
            swizzled(tiling.step_keys, width)
        except LayoutError as error:
            raise LayoutError(f"smem=swizzled: {error}; use smem=padded") from None
    _key_addresses(width, padding, tiling.arrangement, tiling.access_bytes)


@cache
def _key_addresses(width: int, padding: int, pairs: str, access_bytes: int) -> tuple[int, ...]:
    memory, keys = padded(width, width, padding=padding), instruction(MMA, b="row").b
    return fragment_addresses(keys, arrangement(pairs), memory, access_bytes=access_bytes)


def _needs(tile: ChainTile, tiling: SmFields, fields: SmTiling) -> tuple[dict[str, int], dict[str, int]]:
    """Return the registers of a thread and the shared memory of a block, by tenant."""
    decided = fields.decided
    size = {n: get_format(getattr(tile, n)).size_bytes for n in ("scores", "running", "product")}
    q, kv, d, dv = tiling.block_q, tiling.step_keys, tile.head_dim, tile.value_dim
    half = get_format(tile.dtype).size_bytes
    # Adjacent quad pairs need the same rows: each has a copy of the A operands Q and P.
    copies = arrangement(tiling.arrangement).n
    bytes_of = {
        "Q": q * d * half * copies,
        "S and P": q * kv * max(size["scores"], half * copies),
        "O": q * dv * size["product" if tile.is_chained else "running"],
        **({} if tile.is_chained else {"P V": q * dv * size["product"]}),
        "K in flight": kv * d * half,
        "V in flight": kv * dv * half,
    }
    registers = {name: ceil_div(n, tiling.warps * WARP_LANES * REGISTER_BYTES) for name, n in bytes_of.items()}
    registers["rows"] = tile.vectors * lane_values(replace(fields.lanes["key"], warps=tiling.warps), q, 1)
    shared = {
        "K": decided.depth * kv * (d + decided.padding) * half,
        "V": decided.depth * kv * (dv + decided.padding) * half,
    }
    if tile.is_viewed:
        del registers["V in flight"], shared["V"]
    if not decided.holds_in_registers:
        del registers["Q"]
        shared["Q"] = q * (d + decided.padding) * half
    return registers, shared


def _kind(fmt: str) -> Accumulator:
    if fmt not in ("float16", "float32"):
        raise TilingError(f"accumulator {fmt}: m8n8k4 accumulates in float16 or float32")
    return "f16" if fmt == "float16" else "f32"
