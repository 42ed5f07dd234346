"""FlashAttention's backward pass: dQ, dK and dV of softmax(scale Q K^T) V, given dO.

Sizes: ``--problem batch=..,heads=..,tokens=..,key=..,value=..,causal=1``, and ``kv_heads=..``, ``window=..``,
``softcap=..`` as in `Problem`; missing sizes have the values of `SIZES`, and 0 means none.  O and LSE of the forward
pass are inputs, as in the paper; if they are not given, they follow from Q, K and V.  Errors are relative to the
gradient of softmax in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    AS_FAMILY,
    FRACTAL,
    Accumulate,
    Field,
    GlobalTensor,
    GpuKernel,
    KernelProblem,
    MaskKind,
    NamedFormats,
    Phase,
    Phases,
    Problem,
    Product,
    Repeated,
    SpecError,
    Stacked,
    Tiling,
    TilingError,
    Turned,
    Value,
    attention_cells,
    below_one_another,
    ceil_div,
    exp,
    exponent_factor,
    filled,
    format_bytes,
    full,
    grid,
    kernel,
    lightest,
    mask_of,
    on,
    one_of,
    part_of,
    query_cells,
    schedule,
    tanh,
    tiles,
    where,
    with_columns,
)
from npusim.machine import GradientKernel, Machine, find_kernel, kernels

F32 = "float32"


#: The kernel that adds up dQ: either a separate kernel with blocks of queries, or the kernel with blocks of keys, which
#: adds in memory.  The latter adds into one sum by atomic additions, or into one sum per launched block, where each
#: launched block processes several blocks of keys in turn, and the launched blocks fill the cores once
#: (FlashAttention-2 without and with ``deterministic``: flash_api.cpp, mha_bwd).
Method = Literal["apart", "added", "deterministic"]


@dataclass(frozen=True, slots=True)
class BackwardPrecision(NamedFormats):
    """Formats between products; ``input`` stands for the format of Q, K, V and dO.

    scores
        Format of both products of a tile, of P and dS, and of the sums dQ, dK and dV.
    factor
        Format in which products read P and dS.
    output
        Format of the gradients.
    exp_variant, sum_order, accumulate, arithmetic
        Named choices, as in `FlashPrecision`; ``accumulate`` applies to the three gradients.
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
def row_sums(do: Value, forward: Value, p: BackwardPrecision) -> Any:
    """Return delta, the sum over a row of dO O."""
    return (do.to(p.scores) * forward.to(p.scores)).sum().to(F32)


@kernel(results="delta clear", do="row value", forward="row value")
def row_sums_and_zeros(do: Value, forward: Value, p: BackwardPrecision) -> Any:
    """Return delta, and the zeros to which parts of dQ are added."""
    return (do.to(p.scores) * forward.to(p.scores)).sum().to(F32), filled("row key_dim", 0.0, F32)


@kernel(results="clear", parts="row key_dim")
def zeros(parts: Value | None = None) -> Any:
    """Return the zeros to which parts are added; reads nothing."""
    return filled("row key_dim", 0.0, F32)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scale and soft-cap (0: none) of scores, and the factor of exponents."""

    scale: float
    cap: float
    base: float

    def capped(self, s: Value) -> Value:
        """Return scores in units of the soft-cap; unchanged if there is no soft-cap."""
        return tanh(s * (self.scale / self.cap)) if self.cap else s

    def weights(self, s: Value, lse: Value, mask: Value) -> Value:
        """Return P of `capped` scores: their exponential without division by the row's sum; hidden scores give 0."""
        factor = (self.cap or self.scale) * self.base
        return exp(where(mask, s * factor - (lse if self.base == 1 else lse * self.base), -inf))

    def slopes(self, weight: Value, difference: Value, s: Value) -> Value:
        """Return dS from P, dP - delta and `capped` scores, for scores that are scaled and not capped."""
        return weight * difference * (1.0 - s * s) if self.cap else weight * difference


def added(total: Value, product: Product, p: BackwardPrecision) -> Value:
    """Return a gradient plus the next tile's part of the gradient, added in the matrix unit, or stored and then
    added.
    """
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
    q: Value, k: Value, v: Value, do: Value, lse: Value, delta: Value, mask: Value, of: Scores, p: BackwardPrecision
) -> Any:
    """Return dQ of a block of queries, from tiles of keys."""
    total = full("row key_dim", 0.0, p.scores)
    for kj, vj in tiles(k, v):
        s, dp = of.capped((q @ kj.T).to(p.scores)), (do @ vj.T).to(p.scores)
        ds = of.slopes(of.weights(s, lse, mask), dp - delta, s).to(p.factor)
        total = added(total, ds @ kj, p)
    return (total * of.scale).to(p.output)


def _of_tile(
    k: Value,
    v: Value,
    tile: tuple[Value, ...],
    mask: Value,
    sums: tuple[Value, Value],
    of: Scores,
    p: BackwardPrecision,
) -> tuple[Value, Value, Value]:
    """Return the sums dK and dV with a tile's parts added, and dS of the tile, keys by queries."""
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
    k: Value, v: Value, q: Value, do: Value, lse: Value, delta: Value, mask: Value, of: Scores, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys, from tiles of queries."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv = _of_tile(k, v, tile, mask, (dk, dv), of, p)[:2]
    return (dk * of.scale).to(p.output), dv.to(p.output)


@kernel(results="part dk dv", **_OF_KEYS)
def all_parts(
    k: Value, v: Value, q: Value, do: Value, lse: Value, delta: Value, mask: Value, of: Scores, p: BackwardPrecision
) -> Any:
    """Return dK and dV of a block of keys and, for each tile of queries, the block's part of dQ without its factor."""
    dk, dv = full("key key_dim", 0.0, p.scores), full("key value", 0.0, p.scores)
    for tile in tiles(q, do, lse, delta):
        dk, dv, ds = _of_tile(k, v, tile, mask, (dk, dv), of, p)
        yield (ds.T @ k).to(F32)
    return (dk * of.scale).to(p.output), dv.to(p.output)


@kernel(results="dq", parts="row key_dim")
def scaled(parts: Value, scale: float, p: BackwardPrecision) -> Any:
    """Return dQ of the sum of its parts."""
    return (parts * scale).to(p.output)


@kernel(results="total", parts="row column")
def summed(parts: Value, scale: float, p: BackwardPrecision) -> Any:
    """Return a gradient as the sum of stored parts, in order: of series of blocks, or of query heads."""
    total = full("row column", 0.0, F32)
    for part in tiles(parts, axis="place"):
        total = total + part.to(F32)
    return (total if scale == 1 else total * scale).to(p.output)


@dataclass(frozen=True, slots=True)
class BackwardTensors:
    """Q, K, V, dO, O and LSE of the forward pass, delta, and the gradients."""

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
    """Return the tensors of a call; the gradient whose errors a run reports is named o."""
    group, sizes = problem.group_size, (problem.head_dim, problem.dtype, "input")
    q = GlobalTensor("q", problem.batch, problem.kv_heads, group * problem.seq_q, *sizes, packed=group)  # type: ignore[arg-type]
    k = replace(q, name="k", rows=problem.seq_kv, packed=1)
    v, do = (replace(x, name=n, cols=problem.value_head_dim) for n, x in (("v", k), ("do", q)))
    lse = replace(q, name="lse", rows=1, cols=q.rows, fmt=F32, packed=1)  # read both as a column and as a row
    like = {"dq": q, "dk": k, "dv": v}
    gradients = {n: replace(x, name="o" if n == judged else n, fmt=output, role="output") for n, x in like.items()}
    forward, delta = replace(do, name="forward"), replace(lse, name="delta", role="workspace")
    return BackwardTensors(q, k, v, do, forward, lse, delta, **gradients)


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Queries and keys of a tile in the kernel of dQ, then in the kernel of dK and dV; rows of a block in the kernels
    of delta and of sums, and in the kernel that converts dQ.
    """

    block_q: int
    block_kv: int
    tile_q: int
    tile_kv: int
    rows: int
    dq_rows: int


def backward(
    problem: Problem,
    tile: BackwardTile,
    p: BackwardPrecision,
    t: BackwardTensors,
    kind: MaskKind | None,
    method: Method,
    places: int,
) -> list[Phase]:
    """Return the kernels: first the kernel of delta; then either a kernel of dQ and a kernel of dK and dV, or one
    kernel of all three gradients that adds up dQ in memory.

    ``places``: number of blocks that a device runs concurrently, which is the number of sums with ``deterministic``.
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
    of_rows: dict[str, Any] = {"do": t.do.under("do_rows"), "forward": t.forward, "p": p, "results": [t.delta]}
    delta = row_sums.phase("delta", grid(t.do, ("row", tile.rows)), {**widths, "row": tile.rows}, **of_rows)
    of_queries = replace(of_queries, is_named=True, flops=_operations(problem, "key_dim", "value", "key_dim"))
    flops = _operations(problem, "key_dim", "value", "value", "key_dim")
    return [delta, of_queries, replace(last, is_named=True, flops=flops)]


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

    Parts are added to zeros, which the kernel of delta writes for one sum, and a separate kernel for several sums. A
    block of keys has one query head; dK and dV of each head are stored, and a kernel adds the results of the heads of a
    group.
    """
    turns, group = ceil_div(ceil_div(problem.seq_kv, tile.tile_kv), sums), problem.group_size
    parts = replace(t.q, name="parts", batch=problem.batch * sums * turns, fmt=F32, role="workspace", added=turns)
    stack, size = Stacked("part", sums * turns, parts), f"{format_bytes(parts.size_bytes)} of float32"
    # the zeros have another name, because L2 holds a larger share of the lines to which parts are added than of the
    # lines that are cleared
    cleared = replace(stack, tensor=parts.under("zeros"))
    rows, sizes = grid(t.do, ("row", tile.rows)), {**of_keys["sizes"], "row": tile.rows}
    places = [replace(b, spans=(*b.spans, (stack.axis, n * turns, 1))) for n in range(sums) for b in rows]
    of_rows: dict[str, Any] = {"do": t.do.under("do_rows"), "forward": t.forward, "p": p}
    if is_series:
        note = (
            f"deterministic: {sums} sums of dQ, {size}; each adds its tiles in the order of keys, and then the "
            "sums are added one after the other"
        )
        yield zeros.phase("clear", tuple(places), sizes, [cleared])
        yield row_sums.phase("delta", rows, sizes, [t.delta], **of_rows)
    else:
        note = (
            f"added: one sum of dQ, {size}, in the order of keys; atomic additions on hardware have no fixed "
            "order, so that bits of dQ vary"
        )
        yield row_sums_and_zeros.phase("delta", tuple(places), sizes, [t.delta, cleared], **of_rows)
    results: list[GlobalTensor | Stacked] = [stack, t.dk, t.dv]
    if group > 1:
        of_heads = (replace(x, name=f"{n}_heads", role="workspace") for n, x in (("dk", t.dk), ("dv", t.dv)))
        results[1:] = (Stacked("member", group, replace(x, batch=x.batch * group)) for x in of_heads)
    cells = query_cells(problem, tile.tile_kv, tile.tile_q, part=stack.axis, sums=sums, is_series=is_series)
    of_all = all_parts.phase("dkdvdq", cells, results=results, **of_keys)
    flops = _operations(problem, "key_dim", "value", "value", "key_dim", "key_dim")
    yield replace(of_all, notes=(note,), flops=flops)
    total = replace(parts, name="sum", batch=problem.batch * sums, added=0, of=parts)
    scaled_dq = _summed("scaled", t.dq, Stacked("place", sums, total), problem.scale, tile.dq_rows, p)
    yield replace(scaled_dq, sums="accesses")
    for name, gradient, of_members in zip(("sum_dk", "sum_dv"), (t.dk, t.dv), results[1:], strict=True):
        if isinstance(of_members, Stacked):
            summed_heads = _summed(name, gradient, replace(of_members, axis="place"), 1.0, tile.rows, p)
            yield replace(summed_heads, sums="outputs")


def _operations(problem: Problem, *channels: str) -> int:
    """Return the operations of a product along each axis of ``channels``, over the pairs that the mask does not
    hide.
    """
    widths = {"key_dim": problem.head_dim, "value": problem.value_head_dim}
    return 2 * problem.heads * problem.pairs() * sum(widths[axis] for axis in channels)


def _summed(name: str, result: GlobalTensor, parts: Stacked, scale: float, rows: int, p: BackwardPrecision) -> Phase:
    cells, sizes = grid(result, ("row", rows)), {"row": rows, "key_dim": result.cols, "column": result.cols}
    more: dict[str, Any] = {"sizes": sizes, "results": [result], "scale": scale, "p": p}
    if parts.count == 1:
        return scaled.phase(name, cells, parts=parts.tensor, **more)
    return summed.phase(name, with_columns(cells, parts.count, 1), parts=parts, **more)


#: Default sizes of a problem: a layer of 2048 channels, and a number of tokens whose bits are computed in a few
#: seconds.
SIZES: Mapping[str, float] = MappingProxyType(
    {"batch": 1, "heads": 16, "tokens": 1024, "key": 128, "value": 128, "causal": False}
    | {"kv_heads": 0, "window": 0, "softcap": 0.0}
)


#: Number of elements in a vector core's slice: UB then holds two tiles of scores and two tiles of product operands.
SLICE = 4096


#: Number of elements of dO, and the same number of O, in a block that sums the products of the two.
DELTA_ELEMENTS = 8192


class BackwardFields(Tiling):
    """Tiles of both kernels; the gradient whose bits and errors a run reports.

    The default on a GPU is the fastest of 11 tiles in Triton on an H100 (reports/recurrences).
    """

    block_q: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows of a block of dQ", json_schema_extra=on("gpu", 64)
    )
    block_kv: int = Field(
        default=128, ge=16, multiple_of=16, description="keys of a tile of dQ", json_schema_extra=on("gpu", 64)
    )
    tile_q: int = Field(
        default=128,
        ge=16,
        multiple_of=16,
        description="query rows of a tile of dK and dV",
        json_schema_extra=on("gpu", 64),
    )
    tile_kv: int = Field(default=64, ge=16, multiple_of=16, description="keys of a block of dK and dV")
    method: Method = Field(
        default="apart",
        description=(
            "kernel that adds up dQ: one whose blocks are queries, or one whose blocks are keys, which adds in memory"
        ),
        json_schema_extra=part_of("source"),
    )
    gradient: Literal["dq", "dk", "dv"] = Field(
        default="dq",
        description="gradient whose bits and errors the run shows; all gradients are computed",
        json_schema_extra=part_of("model"),
    )

    def dq_rows(self, _head_dim: int, rows: int) -> int:
        """Return the rows of a block that converts dQ: ``rows``, as many as in the kernel of delta."""
        return rows


class GpuBackwardFields(BackwardFields):
    """Fields of a GPU's backward pass: the common fields, and the published kernel that computes all gradients."""

    kernel: Annotated[str, one_of(partial(kernels, GpuKernel))] | None = Field(
        default=None, description="published kernel, or your own FILE.py:NAME, with blocks of keys; default: none"
    )

    def dq_rows(self, head_dim: int, rows: int) -> int:
        """Return the rows of a block that converts dQ; ``rows`` if a published kernel does not state its elements.

        A block of FlashAttention-2 has the rows of a tile (flash_bwd_launch_template.h).
        """
        published = self.published
        if published is None:
            return self.tile_q
        return rows if published.sum_block is None else max(1, published.sum_block[1] // head_dim)

    @property
    def published(self) -> GradientKernel | None:
        """The gradient kernel of the published kernel that the fields name."""
        named = find_kernel(GpuKernel, self.kernel)
        if named is None:
            return None
        if named.gradients is not None:
            return named.gradients
        raise TilingError(f"kernel: {self.kernel} has no gradients=; a GradientKernel is needed")


#: Number of tiles computed ahead; an NPU's L0C has space for scores in addition to dK and dV of a block of keys.
DEPTH = Field(
    default=1,
    ge=0,
    le=14,
    description="number of tiles by which scores and their rows run ahead of the products that read them",
    json_schema_extra=lightest("least"),
)


def problem_of(problem: KernelProblem) -> Problem:
    """Return the attention whose gradients are requested; raise `SpecError` for other sizes."""
    sizes = {**SIZES, **problem.sizes}
    for name in ("key", "value"):
        if sizes[name] % FRACTAL:
            raise SpecError(
                f"problem: flash_backward {name}={sizes[name]} is not a multiple of {FRACTAL}; tensors are not padded"
            )
    known: dict[str, Any] = {name: sizes[name] for name in ("batch", "heads")}
    known |= {name: size for name in ("kv_heads", "window", "softcap") if (size := sizes[name])}
    known |= {"seq_q": sizes["tokens"], "head_dim": sizes["key"], "value_head_dim": sizes["value"]}
    return Problem(**known, causal=bool(sizes["causal"]), dtype=problem.dtype)


def flash_backward(problem: KernelProblem, tiling: BackwardFields, p: BackwardPrecision, machine: Machine) -> Phases:
    """Return the kernels."""
    call = problem_of(problem)
    rows = min(call.seq_q, max(1, DELTA_ELEMENTS // call.value_head_dim) * machine.row_cores)
    dq_rows = tiling.dq_rows(call.head_dim, rows)
    tile = BackwardTile(tiling.block_q, tiling.block_kv, tiling.tile_q, tiling.tile_kv, rows, dq_rows)
    tensors = backward_tensors(call, p.output, tiling.gradient)
    kernels = backward(call, tile, p, tensors, machine.mask_kind(tiling), tiling.method, machine.places)
    # a kernel that also writes zeros needs one more tile in UB
    whole = ("clear", "delta") if tiling.method != "added" else ()
    return [k if k.name in whole else replace(k, slice_elements=SLICE) for k in kernels]


#: A head's tensor in float64, by name, batch and head.
HeadInputs = Callable[[str, int, int], NDArray[np.float64]]


def _scores(call: Problem, inputs: HeadInputs, batch: int, head: int) -> NDArray[np.float64]:
    """Return a query head's scores in float64: capped, and -Inf where a mask hides them."""
    scores = call.scale * inputs("q", batch, head) @ inputs("k", batch, head // call.group_size).T
    scores = scores if call.softcap is None else call.softcap * np.tanh(scores / call.softcap)
    seen = call.seen.matrix(call.causal_offset, call.seq_q, 0, call.seq_kv)
    return np.where(seen, scores, -np.inf)


def log_sums(problem: KernelProblem, inputs: HeadInputs, batch: int, head: int) -> NDArray[np.float64]:
    """Return LSE of the query heads of a KV head, (1, queries of all heads, head by head), in float64."""
    call = problem_of(problem)
    heads = range(head * call.group_size, (head + 1) * call.group_size)
    return np.concatenate([np.logaddexp.reduce(_scores(call, inputs, batch, h), 1) for h in heads])[None]


def forward(problem: KernelProblem, inputs: HeadInputs, batch: int, head: int) -> NDArray[np.float64]:
    """Return O of a query head, (queries, columns of values), in float64."""
    call = problem_of(problem)
    scores = _scores(call, inputs, batch, head)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    result: NDArray[np.float64] = weights @ inputs("v", batch, head // call.group_size) / weights.sum(1, keepdims=True)
    return result


def gradients(call: Problem, inputs: HeadInputs, batch: int, head: int) -> dict[str, NDArray[np.float64]]:
    """Return dQ of a query head and its parts of dK and dV, in float64: the gradients of softmax(scores) V, given
    dO.
    """
    q, do = (inputs(n, batch, head) for n in ("q", "do"))
    k, v = (inputs(n, batch, head // call.group_size) for n in "kv")
    scores = _scores(call, inputs, batch, head)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    slopes = weights * (do @ v.T - (do * (weights @ v)).sum(1, keepdims=True))
    if call.softcap:
        slopes *= 1 - np.where(weights > 0, scores / call.softcap, 0) ** 2
    return {"dq": call.scale * slopes @ k, "dk": call.scale * slopes.T @ q, "dv": weights.T @ do}


def gradient(problem: KernelProblem, output: Any, inputs: HeadInputs, tiling: BackwardFields) -> NDArray[np.float64]:
    """Return the requested gradient, (batch, heads, rows, columns), in float64; dK and dV are summed over groups."""
    call = problem_of(problem)
    heads = [[gradients(call, inputs, b, h)[tiling.gradient] for h in range(call.heads)] for b in range(call.batch)]
    each = np.array(heads)
    whole: NDArray[np.float64] = each.reshape(output.batch, output.heads, -1, *each.shape[2:]).sum(2)
    return whole


def grows(problem: KernelProblem, tiling: BackwardFields) -> tuple[str, ...]:
    """Return the sizes by which a call may grow without a change of its queries' gradients, because only later queries
    see the new keys.

    The gradient of a key has a part from every later query; without ``causal`` the gradient of a query has a part from
    every key.
    """
    is_prefix = tiling.gradient == "dq" and bool({**SIZES, **problem.sizes}["causal"])
    return "batch", "heads", *(("tokens",) if is_prefix else ())


SCHEDULES = schedule(
    "flash_backward",
    flash_backward,
    problem=KernelProblem,
    sizes=SIZES,
    precisions=[BackwardPrecision("fp32", exp_variant=AS_FAMILY, accumulate="chained")],
    tiling=MappingProxyType({"gpu": GpuBackwardFields, "": BackwardFields, "npu": BackwardFields}),
    kind="stages",
    usual={"depth": DEPTH},
    reference=gradient,
    follows={"lse": log_sums, "forward": forward},
    grows=grows,
    summary="FlashAttention's backward pass: dQ, dK and dV",
)
