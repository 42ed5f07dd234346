"""The backward pass of attention, tile by tile (Dao et al. 2022, algorithm 4; Dao 2023, algorithm 2).

With P = exp(scale Q K^T - LSE) and dS = P (dO V^T - delta), delta = rowsum(dO O), the gradients are dQ = scale dS K,
dK = scale dS^T Q and dV = P^T dO.  Blocks of queries walk keys for dQ; blocks of keys walk queries for dK and dV, with
scores that are made transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from npusim.algorithms.blocks import attention_cells, grid, query_cells
from npusim.algorithms.flash import Accumulate, NamedFormats
from npusim.algorithms.language import exp, full, tiles, where
from npusim.algorithms.lowering import kernel
from npusim.algorithms.scores import exponent_factor
from npusim.algorithms.tiling_mask import Turned, mask_of
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tiling_mask import MaskKind
    from npusim.config.problem import Problem

F32 = "float32"


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
    results="dq", q="row key_dim", k="key key_dim", v="key value", do="row value", lse="row", delta="row", mask="row key"
)
def queries(
    q: Any, k: Any, v: Any, do: Any, lse: Any, delta: Any, mask: Any, scale: float, base: float, p: BackwardPrecision
) -> Any:
    """Return dQ of a block of queries, from tiles of keys."""
    dq = full("row key_dim", 0.0, p.scores)
    for kj, vj in tiles(k, v):
        s, dp = (q @ kj.T).to(p.scores), (do @ vj.T).to(p.scores)
        ds = (weights(s, lse, mask, scale * base, base) * (dp - delta)).to(p.factor)
        dq = added(dq, ds @ kj, p)
    return (dq * scale).to(p.output)


@kernel(
    results="dk dv",
    k="key key_dim",
    v="key value",
    q="row key_dim",
    do="row value",
    lse="1 row",
    delta="1 row",
    mask="key row",
)
def keys_values(
    k: Any, v: Any, q: Any, do: Any, lse: Any, delta: Any, mask: Any, scale: float, base: float, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys, from tiles of queries."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for qi, oi, li, di in tiles(q, do, lse, delta):
        s, dp = (k @ qi.T).to(p.scores), (v @ oi.T).to(p.scores)
        pij = weights(s, li, mask, scale * base, base)
        dv = added(dv, pij.to(p.factor) @ oi, p)
        ds = (pij * (dp - di)).to(p.factor)
        dk = added(dk, ds @ qi, p)
    return (dk * scale).to(p.output), dv.to(p.output)


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
    lse = replace(q, name="lse", cols=1, fmt=F32)
    like = {"dq": q, "dk": k, "dv": v}
    gradients = {n: replace(x, name="o" if n == judged else n, fmt=output, role="output") for n, x in like.items()}
    forward, delta = replace(do, name="forward"), replace(lse, name="delta", role="workspace")
    return BackwardTensors(q, k, v, do, forward, lse, delta, **gradients)


def _across(vector: GlobalTensor) -> GlobalTensor:
    """Return a vector of rows as the one row that tiles across it read."""
    return replace(vector, name=f"{vector.name}^T", rows=1, cols=vector.rows, of=vector.name)


def backward(
    problem: Problem,
    sizes: tuple[int, int, int, int],
    p: BackwardPrecision,
    t: BackwardTensors,
    mask: MaskKind | None,
    delta_rows: int,
) -> tuple[Phase, Phase, Phase]:
    """Return the kernels of delta, of dQ, and of dK and dV.

    ``sizes``: queries and keys of a tile where blocks are of queries, then where they are of keys; ``delta_rows``: of a
    block of delta.
    """
    rows, keys, rows_of_keys, keys_of_keys = sizes
    widths = {"key_dim": problem.head_dim, "value": problem.value_head_dim}
    more: dict[str, Any] = {"p": p, "scale": problem.scale, "base": exponent_factor(p.exp_variant)}
    read: dict[str, Any] = {"q": t.q, "k": t.k, "v": t.v, "do": t.do}
    delta = row_sums.phase(
        "delta", grid(t.delta, ("row", delta_rows)), {**widths, "row": delta_rows}, [t.delta], do=t.do, forward=t.forward, p=p
    )
    spans = {**widths, "row": rows, "key": keys}
    of_queries = queries.phase(
        "dq",
        attention_cells(problem, rows, keys),
        spans,
        [t.dq],
        mask=mask_of(problem, (rows, keys), mask),
        lse=t.lse,
        delta=t.delta,
        **read,
        **more,
    )
    turned = mask_of(problem, (rows_of_keys, keys_of_keys), mask)
    spans = {**widths, "row": rows_of_keys, "key": keys_of_keys}
    of_keys = keys_values.phase(
        "dkdv",
        query_cells(problem, keys_of_keys, rows_of_keys),
        spans,
        [t.dk, t.dv],
        mask=None if turned is None else Turned(turned),
        lse=_across(t.lse),
        delta=_across(t.delta),
        **read,
        **more,
    )
    return delta, replace(of_queries, is_named=True), replace(of_keys, is_named=True)
