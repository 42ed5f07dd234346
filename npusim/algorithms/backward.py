"""The backward pass of attention, tile by tile (Dao et al. 2022, algorithm 4; Dao 2023, algorithm 2).

With P = exp(scale Q K^T - LSE) and dS = P (dO V^T - delta), delta = rowsum(dO O), the gradients are dQ = scale dS K,
dK = scale dS^T Q and dV = P^T dO.  Blocks of queries walk keys for dQ; blocks of keys walk queries for dK and dV, with
scores that are made transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.blocks import attention_cells, grid, query_cells
from npusim.algorithms.flash import Accumulate, NamedFormats
from npusim.algorithms.language import exp, full, tiles, where
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import Stacked
from npusim.algorithms.scores import exponent_factor
from npusim.algorithms.tiling_mask import Turned, mask_of
from npusim.ir.tile import GlobalTensor
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tiling_mask import MaskKind
    from npusim.config.problem import Problem

F32 = "float32"
#: Who adds up dQ: a kernel of its own, whose blocks are of queries, or blocks of keys in memory, one after the other.
Method = Literal["apart", "added"]


@dataclass(frozen=True, slots=True)
class BackwardPrecision(NamedFormats):
    """What lies between products; ``input`` stands for the format of Q, K, V and dO.

    scores
        Both products of a tile, P, dS and the sums dQ, dK and dV.
    factor
        P and dS as products read them.
    output
        The gradients.
    exp_variant, sum_order, accumulate, arithmetic
        Named choices, as in `FlashPrecision`; ``accumulate``: of the three gradients.
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


def weights(s: Any, lse: Any, mask: Any, factor: float, base: float) -> Any:
    """Return P of a tile of scores: their exponential, without the row's sum; hidden ones are 0."""
    return exp(where(mask, s * factor - (lse if base == 1 else lse * base), -inf))


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
def queries(
    q: Any, k: Any, v: Any, do: Any, lse: Any, delta: Any, mask: Any, scale: float, base: float, p: BackwardPrecision
) -> Any:
    """Return dQ of a block of queries, from tiles of keys."""
    total = full("row key_dim", 0.0, p.scores)
    for kj, vj in tiles(k, v):
        s, dp = (q @ kj.T).to(p.scores), (do @ vj.T).to(p.scores)
        ds = (weights(s, lse, mask, scale * base, base) * (dp - delta)).to(p.factor)
        total = added(total, ds @ kj, p)
    return (total * scale).to(p.output)


def _of_tile(k: Any, v: Any, tile: Any, mask: Any, sums: Any, scale: float, base: float, p: BackwardPrecision) -> Any:
    """Return the sums dK and dV with a tile's parts, and dS of the tile, keys by queries."""
    (qi, oi, li, di), (dk, dv) = tile, sums
    s, dp = (k @ qi.T).to(p.scores), (v @ oi.T).to(p.scores)
    e = weights(s, li, mask, scale * base, base)
    weight = e.to(p.factor)
    dv = added(dv, weight @ oi, p)
    ds = (e * (dp - di)).to(p.factor)
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
    k: Any, v: Any, q: Any, do: Any, lse: Any, delta: Any, mask: Any, scale: float, base: float, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys, from tiles of queries."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv = _of_tile(k, v, tile, mask, (dk, dv), scale, base, p)[:2]
    return (dk * scale).to(p.output), dv.to(p.output)


@kernel(results="part dk dv", **_OF_KEYS)
def all_parts(
    k: Any, v: Any, q: Any, do: Any, lse: Any, delta: Any, mask: Any, scale: float, base: float, p: BackwardPrecision
) -> Any:
    """Return the same, and for each tile of queries the block's part of dQ without its factor."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv, ds = _of_tile(k, v, tile, mask, (dk, dv), scale, base, p)
        yield (ds.T @ k).to(F32)
    return (dk * scale).to(p.output), dv.to(p.output)


@kernel(results="dq", parts="row key_dim")
def scaled(parts: Any, scale: float, p: BackwardPrecision) -> Any:
    """Return dQ of the sum of its parts."""
    return (parts * scale).to(p.output)


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
    """Return the tensors of a call; the gradient that a run's errors are of is called o."""
    q = GlobalTensor("q", problem.batch, problem.heads, problem.seq_q, problem.head_dim, problem.dtype, "input")
    k = replace(q, name="k", rows=problem.seq_kv)
    v, do = (replace(x, name=n, cols=problem.value_head_dim) for n, x in (("v", k), ("do", q)))
    lse = replace(q, name="lse", rows=1, cols=problem.seq_q, fmt=F32)  # read as a column and as a row
    like = {"dq": q, "dk": k, "dv": v}
    gradients = {n: replace(x, name="o" if n == judged else n, fmt=output, role="output") for n, x in like.items()}
    forward, delta = replace(do, name="forward"), replace(lse, name="delta", role="workspace")
    return BackwardTensors(q, k, v, do, forward, lse, delta, **gradients)


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Queries and keys of a tile where blocks are of queries, then where they are of keys; rows of blocks of delta."""

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
) -> list[Phase]:
    """Return the kernels: of delta, then of dQ and of dK and dV, or of all three, of which dQ is added up in memory."""
    widths = {"key_dim": problem.head_dim, "value": problem.value_head_dim}
    more: dict[str, Any] = {"p": p, "scale": problem.scale, "base": exponent_factor(p.exp_variant)}
    more |= {"q": t.q, "k": t.k, "v": t.v, "do": t.do}
    of_rows: dict[str, Any] = {"cells": grid(t.do, ("row", tile.rows)), "sizes": {**widths, "row": tile.rows}}
    delta = row_sums.phase("delta", results=[t.delta], do=t.do, forward=t.forward, p=p, **of_rows)
    mask = mask_of(problem, (tile.tile_q, tile.tile_kv), kind)
    of_keys: dict[str, Any] = {
        "sizes": {**widths, "row": tile.tile_q, "key": tile.tile_kv},
        "mask": None if mask is None else Turned(mask),
        "lse": t.lse,
        "delta": t.delta,
        **more,
    }
    if method == "added":
        count = ceil_div(problem.seq_kv, tile.tile_kv)
        parts = replace(t.q, name="parts", batch=problem.batch * count, fmt=F32, role="workspace", added=count)
        cells = query_cells(problem, tile.tile_kv, tile.tile_q, "part")
        results: list[GlobalTensor | Stacked] = [Stacked("part", count, parts), t.dk, t.dv]
        total = replace(parts, name="sum", batch=problem.batch, added=0, of=parts)
        return [
            delta,
            all_parts.phase("dkdvdq", cells, results=results, **of_keys),
            scaled.phase("scaled", results=[t.dq], parts=total, scale=problem.scale, p=p, **of_rows),
        ]
    of_queries = queries.phase(
        "dq",
        attention_cells(problem, tile.block_q, tile.block_kv),
        {**widths, "row": tile.block_q, "key": tile.block_kv},
        [t.dq],
        mask=mask_of(problem, (tile.block_q, tile.block_kv), kind),
        lse=t.lse,
        delta=t.delta,
        **more,
    )
    cells = query_cells(problem, tile.tile_kv, tile.tile_q)
    last = keys_values.phase("dkdv", cells, results=[t.dk, t.dv], **of_keys)
    return [delta, replace(of_queries, is_named=True), replace(last, is_named=True)]
