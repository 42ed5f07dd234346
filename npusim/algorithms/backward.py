"""The backward pass of attention, tile by tile (Dao et al. 2022, algorithm 4; Dao 2023, algorithm 2).

With P = exp(scale Q K^T - LSE) and dS = P (dO V^T - delta), delta = rowsum(dO O), the gradients are dQ = scale dS K,
dK = scale dS^T Q and dV = P^T dO.  Blocks of queries walk keys for dQ; blocks of keys walk queries for dK and dV, with
scores computed transposed.  With a soft-cap c of scores s, P has t = c tanh(s / c) in their place, and dS a factor
1 - (t / c)^2.  The rows of query heads that share keys follow one another: dK and dV are sums over these heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.blocks import attention_cells, below_one_another, grid, query_cells, with_columns
from npusim.algorithms.flash import Accumulate, NamedFormats
from npusim.algorithms.language import exp, filled, full, tanh, tiles, where
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import Stacked
from npusim.algorithms.scores import exponent_factor
from npusim.algorithms.tiling_mask import Repeated, Turned, mask_of
from npusim.ir.tile import GlobalTensor
from npusim.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tiling_mask import MaskKind
    from npusim.config.problem import Problem

F32 = "float32"
#: Who adds up dQ: a kernel of its own, whose blocks are of queries, or blocks of keys in memory: into one sum by atomic
#: additions, or into a sum of each launched block, which works off several blocks of keys in turn; as many are launched
#: as fill the cores once (FlashAttention-2 without ``deterministic`` and with it: flash_api.cpp, mha_bwd).
Method = Literal["apart", "added", "deterministic"]


@dataclass(frozen=True, slots=True)
class BackwardPrecision(NamedFormats):
    """Formats between products; ``input`` stands for the format of Q, K, V and dO.

    scores
        Both products of a tile, P, dS and the sums dQ, dK and dV.
    factor
        P and dS as products read them.
    output
        The gradients.
    exp_variant, sum_order, accumulate, arithmetic
        Named choices, as in `FlashPrecision`; ``accumulate``: that of the three gradients.
    """

    name: str
    scores: str = F32
    factor: str = "input"
    output: str = "input"
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""
    intermediates = ("scores", "factor", "output")


@kernel(results="delta", do="row value", forward="row value")
def row_sums(do: Any, forward: Any, p: BackwardPrecision) -> Any:
    """Return delta, the sum over a row of dO O."""
    return (do.to(p.scores) * forward.to(p.scores)).sum().to(F32)


@kernel(results="delta clear", do="row value", forward="row value")
def row_sums_and_zeros(do: Any, forward: Any, p: BackwardPrecision) -> Any:
    """Return delta, and the zeros to which parts of dQ are added."""
    return (do.to(p.scores) * forward.to(p.scores)).sum().to(F32), filled("row key_dim", 0.0, F32)


@kernel(results="clear", parts="row key_dim")
def zeros(parts: Any = None) -> Any:
    """Return the zeros to which parts are added; reads nothing."""
    return filled("row key_dim", 0.0, F32)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scale and soft-cap (0: none) of scores, and the factor of exponents."""

    scale: float
    cap: float
    base: float

    def capped(self, s: Any) -> Any:
        """Return scores in units of the soft-cap, or unchanged without one."""
        return tanh(s * (self.scale / self.cap)) if self.cap else s

    def weights(self, s: Any, lse: Any, mask: Any) -> Any:
        """Return P of `capped` scores: their exponential, without the row's sum; hidden ones are 0."""
        factor = (self.cap or self.scale) * self.base
        return exp(where(mask, s * factor - (lse if self.base == 1 else lse * self.base), -inf))

    def slopes(self, weight: Any, difference: Any, s: Any) -> Any:
        """Return dS of P, dP - delta and `capped` scores, by scores that are scaled and not capped."""
        return weight * difference * (1.0 - s * s) if self.cap else weight * difference


def added(total: Any, product: Any, p: BackwardPrecision) -> Any:
    """Return a gradient and the next tile's part of it: in the matrix unit, or stored and added."""
    return total + (product if p.accumulate == "chained" else product.to(p.scores))


@kernel(
    results="dq",
    q="row key_dim",
    k="key key_dim",
    v="key value",
    do="row value",
    lse="row",
    delta="row",
    mask="row key",
)
def queries(q: Any, k: Any, v: Any, do: Any, lse: Any, delta: Any, mask: Any, of: Scores, p: BackwardPrecision) -> Any:
    """Return dQ of a block of queries, from tiles of keys."""
    total = full("row key_dim", 0.0, p.scores)
    for kj, vj in tiles(k, v):
        s, dp = of.capped((q @ kj.T).to(p.scores)), (do @ vj.T).to(p.scores)
        ds = of.slopes(of.weights(s, lse, mask), dp - delta, s).to(p.factor)
        total = added(total, ds @ kj, p)
    return (total * of.scale).to(p.output)


def _of_tile(k: Any, v: Any, tile: Any, mask: Any, sums: Any, of: Scores, p: BackwardPrecision) -> Any:
    """Return the sums dK and dV with a tile's parts, and dS of the tile, keys by queries."""
    (qi, oi, li, di), (dk, dv) = tile, sums
    s, dp = of.capped((k @ qi.T).to(p.scores)), (v @ oi.T).to(p.scores)
    e = of.weights(s, li, mask)
    weight = e.to(p.factor)
    dv = added(dv, weight @ oi, p)
    ds = of.slopes(e, dp - di, s).to(p.factor)
    return added(dk, ds @ qi, p), dv, ds


_OF_KEYS: Mapping[str, Any] = MappingProxyType(
    {
        "k": "key key_dim",
        "v": "key value",
        "q": "row key_dim",
        "do": "row value",
        "lse": "1 row",
        "delta": "1 row",
        "mask": "key row",
    }
)


@kernel(results="dk dv", **_OF_KEYS)
def keys_values(
    k: Any, v: Any, q: Any, do: Any, lse: Any, delta: Any, mask: Any, of: Scores, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys, from tiles of queries."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv = _of_tile(k, v, tile, mask, (dk, dv), of, p)[:2]
    return (dk * of.scale).to(p.output), dv.to(p.output)


@kernel(results="part dk dv", **_OF_KEYS)
def all_parts(
    k: Any, v: Any, q: Any, do: Any, lse: Any, delta: Any, mask: Any, of: Scores, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys, and for each tile of queries the block's part of dQ without its factor."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv, ds = _of_tile(k, v, tile, mask, (dk, dv), of, p)
        yield (ds.T @ k).to(F32)
    return (dk * of.scale).to(p.output), dv.to(p.output)


@kernel(results="dq", parts="row key_dim")
def scaled(parts: Any, scale: float, p: BackwardPrecision) -> Any:
    """Return dQ of the sum of its parts."""
    return (parts * scale).to(p.output)


@kernel(results="total", parts="row column")
def summed(parts: Any, scale: float, p: BackwardPrecision) -> Any:
    """Return a gradient as the sum of stored parts, in order: of series of blocks, or of query heads."""
    total = full("row column", 0.0, F32)
    for part in tiles(parts, axis="place"):
        total = total + part.to(F32)
    return (total if scale == 1 else total * scale).to(p.output)


@dataclass(frozen=True, slots=True)
class BackwardTensors:
    """Q, K, V, dO, the forward's O and LSE, delta, and the gradients."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    do: GlobalTensor
    forward: GlobalTensor
    lse: GlobalTensor
    delta: GlobalTensor
    dq: GlobalTensor
    dk: GlobalTensor
    dv: GlobalTensor


def backward_tensors(problem: Problem, output: str, judged: str) -> BackwardTensors:
    """Return the tensors of a call; the gradient whose errors a run reports is called o."""
    group, sizes = problem.group_size, (problem.head_dim, problem.dtype, "input")
    q = GlobalTensor("q", problem.batch, problem.kv_heads, group * problem.seq_q, *sizes, packed=group)  # type: ignore[arg-type]
    k = replace(q, name="k", rows=problem.seq_kv, packed=1)
    v, do = (replace(x, name=n, cols=problem.value_head_dim) for n, x in (("v", k), ("do", q)))
    lse = replace(q, name="lse", rows=1, cols=q.rows, fmt=F32, packed=1)  # read as a column and as a row
    like = {"dq": q, "dk": k, "dv": v}
    gradients = {n: replace(x, name="o" if n == judged else n, fmt=output, role="output") for n, x in like.items()}
    forward, delta = replace(do, name="forward"), replace(lse, name="delta", role="workspace")
    return BackwardTensors(q, k, v, do, forward, lse, delta, **gradients)


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Queries and keys of a tile for blocks of queries, then for blocks of keys; rows of blocks of delta."""

    block_q: int
    block_kv: int
    tile_q: int
    tile_kv: int
    rows: int


def backward(
    problem: Problem,
    tile: BackwardTile,
    p: BackwardPrecision,
    t: BackwardTensors,
    kind: MaskKind | None,
    method: Method,
    places: int,
) -> list[Phase]:
    """Return the kernels: of delta, then of dQ and of dK and dV, or of all three, of which dQ is added up in memory.

    ``places``: blocks that a device runs at a time, which decide the number of sums of ``deterministic``.
    """
    widths = {"key_dim": problem.head_dim, "value": problem.value_head_dim}
    of = Scores(problem.scale, problem.softcap or 0.0, exponent_factor(p.exp_variant))
    more: dict[str, Any] = {"p": p, "of": of, "q": t.q, "k": t.k, "v": t.v, "do": t.do}
    mask = mask_of(problem, (tile.tile_q, tile.tile_kv), kind)
    of_keys: dict[str, Any] = {
        "sizes": {**widths, "row": tile.tile_q, "key": tile.tile_kv},
        "mask": None if mask is None else Turned(mask, problem.seq_q),
        "lse": t.lse,
        "delta": t.delta,
        **more,
    }
    if method != "apart":
        is_series = method == "deterministic"
        sums = ceil_div(places, problem.batch * problem.heads) if is_series else 1
        return list(_in_memory(problem, tile, p, t, of_keys, sums, is_series=is_series))
    mask = mask_of(problem, (tile.block_q, tile.block_kv), kind)
    of_queries = queries.phase(
        "dq",
        below_one_another(attention_cells(problem, tile.block_q, tile.block_kv), problem.group_size, problem.seq_q),
        {**widths, "row": tile.block_q, "key": tile.block_kv},
        [t.dq],
        mask=mask if mask is None or problem.group_size == 1 else Repeated(mask, problem.seq_q),
        lse=t.lse,
        delta=t.delta,
        **more,
    )
    cells = query_cells(problem, tile.tile_kv, tile.tile_q)
    last = keys_values.phase("dkdv", cells, results=[t.dk, t.dv], **of_keys)
    of_rows: dict[str, Any] = {"do": t.do, "forward": t.forward, "p": p, "results": [t.delta]}
    delta = row_sums.phase("delta", grid(t.do, ("row", tile.rows)), {**widths, "row": tile.rows}, **of_rows)
    return [delta, replace(of_queries, is_named=True), replace(last, is_named=True)]


def _in_memory(
    problem: Problem,
    tile: BackwardTile,
    p: BackwardPrecision,
    t: BackwardTensors,
    of_keys: Mapping[str, Any],
    sums: int,
    *,
    is_series: bool,
) -> Iterator[Phase]:
    """Yield the kernels of delta, of all three gradients, and of the sums of several blocks' parts.

    Parts are added to zeros, which the kernel of delta writes for one sum, a separate kernel for several. A block of
    keys has one query head; dK and dV of each head are stored, and a kernel adds those of a group.
    """
    turns, group = ceil_div(ceil_div(problem.seq_kv, tile.tile_kv), sums), problem.group_size
    parts = replace(t.q, name="parts", batch=problem.batch * sums * turns, fmt=F32, role="workspace", added=turns)
    stack, size = Stacked("part", sums * turns, parts), f"{format_bytes(parts.size_bytes)} of float32"
    rows, sizes = grid(t.do, ("row", tile.rows)), {**of_keys["sizes"], "row": tile.rows}
    places = [replace(b, spans=(*b.spans, (stack.axis, n * turns, 1))) for n in range(sums) for b in rows]
    of_rows: dict[str, Any] = {"do": t.do, "forward": t.forward, "p": p}
    if is_series:
        note = f"deterministic: {sums} sums of dQ, {size}; each in the order of keys, then one after the other"
        yield zeros.phase("clear", tuple(places), sizes, [stack])
        yield row_sums.phase("delta", rows, sizes, [t.delta], **of_rows)
    else:
        note = f"added: one sum of dQ, {size}, in the order of keys; atomic additions have none, and bits of dQ vary"
        yield row_sums_and_zeros.phase("delta", tuple(places), sizes, [t.delta, stack], **of_rows)
    results: list[GlobalTensor | Stacked] = [stack, t.dk, t.dv]
    if group > 1:
        of_heads = (replace(x, name=f"{n}_heads", role="workspace") for n, x in (("dk", t.dk), ("dv", t.dv)))
        results[1:] = (Stacked("member", group, replace(x, batch=x.batch * group)) for x in of_heads)
    cells = query_cells(problem, tile.tile_kv, tile.tile_q, part=stack.axis, sums=sums, is_series=is_series)
    yield replace(all_parts.phase("dkdvdq", cells, results=results, **of_keys), notes=(note,))
    total = replace(parts, name="sum", batch=problem.batch * sums, added=0, of=parts)
    yield _summed("scaled", t.dq, Stacked("place", sums, total), problem.scale, tile.rows, p)
    for name, gradient, of_members in zip(("sum_dk", "sum_dv"), (t.dk, t.dv), results[1:], strict=True):
        if isinstance(of_members, Stacked):
            yield _summed(name, gradient, replace(of_members, axis="place"), 1.0, tile.rows, p)


def _summed(name: str, result: GlobalTensor, parts: Stacked, scale: float, rows: int, p: BackwardPrecision) -> Phase:
    cells, sizes = grid(result, ("row", rows)), {"row": rows, "key_dim": result.cols, "column": result.cols}
    more: dict[str, Any] = {"sizes": sizes, "results": [result], "scale": scale, "p": p}
    if parts.count == 1:
        return scaled.phase(name, cells, parts=parts.tensor, **more)
    return summed.phase(name, with_columns(cells, parts.count, 1), parts=parts, **more)
