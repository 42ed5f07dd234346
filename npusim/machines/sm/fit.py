"""What of a chained attention fits a multiprocessor: lanes, registers, shared memory; and the fields left open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flow import conflicts, flow, storage
from npusim.algorithms.phase import BySize, tensor_of
from npusim.config.engine import WarpIssue
from npusim.errors import LayoutError, TilingError
from npusim.formats import get_format
from npusim.ir.op import Accumulator, WarpPlan
from npusim.layout import Chain, arrangement, chain, fragment_addresses, instruction, padded, swizzled
from npusim.machines.sm.fields import SmFields
from npusim.machines.sm.occupancy import BlockNeeds, Occupancy, occupancy, thread_registers
from npusim.machines.sm.plan import SM, WARPS, SmTiling

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem


@dataclass(frozen=True, slots=True)
class ChainTile:
    """What of a chained attention decides its lanes: formats, head sizes, rows of a KV head, live row vectors."""

    dtype: str
    head_dim: int
    value_dim: int
    rows: int
    scores: str
    running: str
    product: str
    is_chained: bool
    vectors: int = 4  # of FlashAttention: the state m and l, the new maximum, the rescaling factor

    @classmethod
    def asked(cls, problem: Problem, p: Any) -> ChainTile:
        """Return the tile of a problem in a precision, before there are blocks."""
        return cls(
            problem.dtype,
            problem.head_dim,
            problem.value_head_dim,
            problem.seq_q * problem.group_size,
            p.scores,
            p.running,
            p.product,
            p.accumulate == "chained",
        )

    @classmethod
    def of(cls, phase: Phase) -> ChainTile | None:
        """Return that of a phase: two products, the second of what rows make of the first; None for any other."""
        products = [s.rows[0] for s in phase.stages if s.is_product]
        fed = [r for r in products if r.srcs[0] not in phase.tensors]
        if not fed or len(products) < 2 or not phase.loop_axis:
            return None
        names, first, last = phase.names, products[0], fed[-1]
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
            live_vectors(phase),
        )


def live_vectors(phase: Phase) -> int:
    """Return how many row vectors live at a time: states throughout, others from their first row to their last."""
    names, kept = phase.names, storage(phase, flow(phase), conflicts(phase))
    states = {kept[n] for n, what in names.items() if what.start is not None and len(what.axes) == 1}
    most = 0
    for loop in phase.loops:
        rows = [r for s in loop.stages for r in s.rows]
        spans: dict[str, tuple[int, int]] = {}
        for at, r in enumerate(rows):
            for n in (r.dst, *r.srcs):
                if n in names and len(names[n].axes) == 1 and kept[n] not in states:
                    spans[kept[n]] = (spans.get(kept[n], (at, at))[0], at)
        live = (sum(begin <= at < end for begin, end in spans.values()) for at in range(len(rows)))
        most = max(most, len(states) + max(live, default=0))
    return most


def lanes_of_phase(phase: Phase, device: DeviceSpec) -> tuple[SmTiling, str]:
    """Return how a phase whose blocks are there lies in the lanes of warps, and what is to be said."""
    tile, fields, rows = ChainTile.of(phase), SmFields(), phase.sizes[phase.row_axis]
    pairs = quad_pairs(rows, fields.warps, {"row": "block_q", "key": "block_kv"}.get(phase.row_axis, phase.row_axis))
    if tile is None:
        made = phase.names[phase.stages[-1].rows[-1].dst]
        # Warps of a group: one on each sub-core (volta.md section 4.2).
        plan = WarpPlan(4, pairs, _kind(made.fmt), access_bytes=fields.access_bytes)
        axes = {what.axes[-1] for what in phase.names.values()}
        return SmTiling(lanes=dict.fromkeys(axes, plan), padding=fields.padding), ""
    keys = phase.sizes[phase.loop_axis]
    fields, found = fitted(tile, SmFields(block_q=rows, block_kv=keys, arrangement=pairs), device)
    return replace(lanes_of(fields, tile), residents=found.blocks), f"{found}; tiles of {rows} x {keys}"


#: Keys of a step to try, the most first: a multiple of what every arrangement covers.
_KEYS = (64, 32, 16)


def fitted(tile: ChainTile, tiling: SmFields, device: DeviceSpec) -> tuple[SmFields, Occupancy]:
    """Return the fields with those left open chosen, and how many blocks of them a core holds.

    Raises `TilingError` where none fits.
    """
    issue = device.engine(SM, WARPS)
    if not isinstance(issue, WarpIssue):
        raise TilingError(f"{device.name}: {SM}.{WARPS} says nothing of warps")
    if tile.dtype != "float16":
        raise TilingError(f"dtype: m8n8k4 multiplies float16, not {tile.dtype}; --dtype float16 rounds to it")
    tiling = _for_rows(tiling, tile)
    keys = _KEYS if tiling.block_kv is None else (tiling.block_kv,)
    places = ("registers", "shared") if tiling.q == "auto" else (tiling.q,)
    memory = device.core(SM).buffer("SMEM").capacity_bytes.value
    fault: TilingError | None = None
    for block_kv, place in product(keys, places):
        chosen = tiling.model_copy(update={"block_kv": block_kv, "q": place})
        try:
            needs = _needs(tile, chosen, lanes_of(chosen, tile))
            return chosen, occupancy(needs, issue, memory)
        except TilingError as error:
            fault = fault or error
    assert fault is not None
    raise fault


def _for_rows(tiling: SmFields, tile: ChainTile) -> SmFields:
    """Return the fields with the smallest block that a KV head's rows fit in, where none of its sizes is chosen.

    Quad pairs side by side cover fewer rows: a block of 128 would multiply padding for a decoding step.
    """
    if tiling.model_fields_set & {"block_q", "warps", "arrangement"}:
        return tiling
    held, rows = instruction("m8n8k4", acc=_kind(tile.scores)).c, tile.rows
    for quad_pairs in ("1x4", "2x2"):
        found = arrangement(quad_pairs)
        height = held.rows * found.m * tiling.warps
        if rows <= height < tiling.block_q and tile.value_dim % (held.columns * found.n) == 0:
            return tiling.model_copy(update={"arrangement": quad_pairs, "block_q": height})
    return tiling


def quad_pairs(rows: int, warps: int, what: str) -> str:
    """Return how the quad pairs of warps cover ``rows``: as many as can below one another, fewest copies of A.

    Raises `TilingError` for rows that no arrangement covers evenly; ``what`` is their field.
    """
    least = instruction("m8n8k4").c.rows * warps
    for pairs in ("4x1", "2x2", "1x4"):
        if rows % (least * arrangement(pairs).m) == 0:
            return pairs
    raise TilingError(f"{what}: {rows} rows cannot be dealt to {warps} warps; take a multiple of {least}")


def lanes_of(tiling: SmFields, tile: ChainTile) -> SmTiling:
    """Return what the machine needs, with one resident block; raise `TilingError` where lanes do not fit."""
    dims = (tile.head_dim, tile.value_dim)
    padding = tiling.padding if tiling.smem == "padded" else 0
    group = 4  # warps of a group: one on each sub-core (volta.md section 4.2)
    scores, product_acc = _kind(tile.scores), _kind(tile.product)
    plan = WarpPlan(
        group, tiling.arrangement, scores, access_bytes=tiling.access_bytes, swizzle=tiling.smem == "swizzled"
    )
    try:
        found = chained(tiling.arrangement, scores, tiling.exchange)
        for acc, columns in ((scores, tiling.keys), (product_acc, dims[1])):
            held = instruction("m8n8k4", acc=acc).c
            arrangement(tiling.arrangement).repeats(held, tiling.block_q, columns, warps=(tiling.warps, 1))
        for width in dims:
            _check_shared(width, padding, tiling)
    except LayoutError as error:
        raise TilingError(f"tile {tiling.block_q}x{tiling.keys}: {error}") from None
    return SmTiling(
        groups=tiling.warps // group,
        lanes={"key": plan, "value": replace(plan, accumulator=product_acc)},
        padding=padding,
        depth=tiling.stages or 1,
        exchanges=bool(found.moved),
        holds_in_registers=tiling.q == "registers",
    )


@cache
def chained(quad_pairs: str, accumulator: Accumulator, exchange: str) -> Chain:
    """Return how P goes from the accumulators of Q Kᵀ to the A operand of P V."""
    first, second = instruction("m8n8k4", acc=accumulator), instruction("m8n8k4", b="row")
    return chain(first.c, second.a, arrangement=arrangement(quad_pairs, "lane"), allow_exchange=exchange == "shuffle")


def _check_shared(width: int, padding: int, tiling: SmFields) -> None:
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
            swizzled(tiling.keys, width)
        except LayoutError as error:
            raise LayoutError(f"smem=swizzled: {error}; take smem=padded") from None
    memory = padded(width, width, padding=padding)
    keys = instruction("m8n8k4", b="row").b
    fragment_addresses(keys, arrangement(tiling.arrangement), memory, access_bytes=tiling.access_bytes)


def _needs(tile: ChainTile, tiling: SmFields, fields: SmTiling) -> BlockNeeds:
    """Return the registers and the shared memory of a block, by what takes them."""
    size = {n: get_format(getattr(tile, n)).size_bytes for n in ("scores", "running", "product")}
    q, kv, d, dv = tiling.block_q, tiling.keys, tile.head_dim, tile.value_dim
    half = get_format(tile.dtype).size_bytes
    # Quad pairs side by side need the same rows: each holds its own copy of the A operands Q and P.
    copies = arrangement(tiling.arrangement).n
    bytes_of = {
        "Q": q * d * half * copies,
        "S and P": q * kv * max(size["scores"], half * copies),
        "O": q * dv * size["product" if tile.is_chained else "running"],
        **({} if tile.is_chained else {"P V": q * dv * size["product"]}),
        "K in flight": kv * d * half,
        "V in flight": kv * dv * half,
    }
    tenants = {name: thread_registers(n, tiling.warps) for name, n in bytes_of.items()}
    tenants["rows"] = tile.vectors * _rows_of_lane(tiling, fields.lanes["key"])
    shared = {
        "K": fields.depth * kv * (d + fields.padding) * half,
        "V": fields.depth * kv * (dv + fields.padding) * half,
    }
    if not fields.holds_in_registers:
        del tenants["Q"]
        shared["Q"] = q * (d + fields.padding) * half
    return BlockNeeds(tiling.warps, tenants, shared)


def _rows_of_lane(tiling: SmFields, plan: WarpPlan) -> int:
    """Return how many rows of a warp's scores a lane holds values of."""
    held = instruction("m8n8k4", acc=plan.accumulator).c
    down = tiling.block_q // (held.rows * arrangement(plan.arrangement).m * tiling.warps)
    return down * len({held.coordinate(0, value)[0] for value in range(held.values)})


def _kind(fmt: str) -> Accumulator:
    """Return the accumulator's short name; raise `TilingError` for a format that has none."""
    if fmt not in ("float16", "float32"):
        raise TilingError(f"accumulator {fmt}: m8n8k4 adds up in float16 or float32")
    return "f16" if fmt == "float16" else "f32"
