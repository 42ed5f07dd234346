"""The gated delta rule (Yang et al. 2025) in its WY form, chunk by chunk, with the kernels of flash-linear-attention.

S_t = a_t S_(t-1) + beta_t k_t^T (v_t - k_t a_t S_(t-1)) and o_t = q_t S_t.  The kernels compute K with rows of norm 1,
sums of log decays, A and (I + A)^-1 (one kernel on GPUs; two on Ascend, as in PTO), W and U, the states before the
chunks, and the results.  Sizes: ``--problem``; missing sizes have the values of `SIZES`; ``unit=0`` leaves K unchanged.
Errors are relative to the recurrence, computed token by token in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    F32,
    GATES_SLICE,
    STATE_SIZES,
    STATE_SLICE,
    Chunks,
    Ends,
    Field,
    GatedFields,
    GlobalTensor,
    Kernel,
    KernelProblem,
    Phases,
    Stacked,
    StatePrecision,
    Value,
    WorkTile,
    below_diagonal,
    decay_sums,
    decays,
    exp,
    first_state,
    gated_outputs,
    grid,
    initial,
    inverse,
    kernel,
    log,
    log_gate,
    normal_entries,
    one_of,
    power_of_two,
    recurrence_schedule,
    rsqrt,
    sizes_of,
    tiles,
)
from npusim.machine import AscendKernel, Machine, find_kernel, kernels

#: Added to the squared length of a row before the division.  source: flash-linear-attention, ``l2norm``: eps
LEAST_LENGTH = 1e-6


@kernel(results="n", k="row key")
def normalised(k: Value, p: StatePrecision) -> Any:
    """Return K with rows of length 1."""
    wide = k.to(F32)
    return (wide * rsqrt((wide * wide).sum() + LEAST_LENGTH)).to(p.factor)


_of_a_chunk = kernel(
    results="t",
    ki="row key",
    kj="token key",
    beta="row",
    g="row",
    gt="1 token",
    below="row token",
    walks="row token",
    still="below",
)


def _kkt(ki: Value, kj: Value, beta: Value, g: Value, gt: Value, below: Value, p: StatePrecision) -> Any:
    return p.left(ki @ kj.T) * exp(below + (g - gt)) * beta


@_of_a_chunk
def kkt_inverse(ki: Value, kj: Value, beta: Value, g: Value, gt: Value, below: Value, p: StatePrecision) -> Any:
    """Return (I + A)^-1 of a chunk, A_ij = beta_i e^(g_i - g_j) k_i k_j where ``below`` is 0, not -Inf."""
    a = _kkt(ki, kj, beta, g, gt, below, p)
    return inverse(a).to(p.factor)


@_of_a_chunk
def kkt(
    ki: Value, kj: Value, beta: Value, g: Value, gt: Value, below: Value, p: StatePrecision, as_pto: bool = False
) -> Any:
    """Return A of a chunk; a separate kernel inverts I + A; ``as_pto``: beta is applied by adding its logarithm to
    g.
    """
    if as_pto:
        return (p.left(ki @ kj.T) * exp(below + ((g + log(beta)) - gt))).to(p.factor)
    return _kkt(ki, kj, beta, g, gt, below, p).to(p.factor)


@kernel(results="t", a="row token", walks="row token")
def solved(a: Value, p: StatePrecision) -> Any:
    """Return (I + A)^-1 of a chunk."""
    return inverse(a.to(F32)).to(p.factor)


@kernel(results="w u", t="row token", k="token key", v="token value", beta="1 token", g="1 token", walks="row token")
def wy(t: Value, k: Value, v: Value, beta: Value, g: Value, p: StatePrecision) -> Any:
    """Return W = T (beta e^g K) and U = T (beta V) of a chunk: the columns of T are multiplied, and not the rows of K
    and V.
    """
    scaled = t.to(F32) * beta
    of_v, of_k = scaled.to(p.factor), (scaled * exp(g)).to(p.factor)
    return (of_k @ k).to(p.factor), (of_v @ v).to(p.factor)


@kernel(results="h x last", k="row key", w="row key", u="row value", g="row", end="1", first="key value", walks="row")
def delta_states(
    k: Value, w: Value, u: Value, g: Value, end: Value, first: Value, p: StatePrecision, as_pto: bool = False
) -> Any:
    """Return S before each chunk, X = U - W S of its tokens, and S after the last chunk.

    ``end``: g of a chunk's last token; ``first``: S before the first chunk; ``as_pto``: the decays are multiplied into
    K while W S is computed, not into X.
    """
    s = initial(first)
    for kj, wj, uj, gj, ej in tiles(k, w, u, g, end):
        h, kept = s.to(p.factor), s.to(p.factor)
        keys = (kj.to(F32) * exp(ej - gj)).to(p.factor) if as_pto else kj
        x = uj.to(F32) - p.left(wj @ h)
        yield kept, x.to(p.factor)
        fed = (x if as_pto else x * exp(ej - gj)).to(p.factor)
        s = s * exp(ej) + p.left(keys.T @ fed, p.state)
    return s


class DeltaFields(GatedFields):
    """Tiling fields with the published kernel that the schedule follows."""

    kernel: Annotated[str, one_of(partial(kernels, AscendKernel))] | None = Field(
        default=None, description="published kernel whose decisions apply, or your own FILE.py:NAME; default: none"
    )

    @property
    def published(self) -> AscendKernel | None:
        """The published kernel that the fields name."""
        return find_kernel(AscendKernel, self.kernel, "recurrence")


class SolvedFields(GatedFields):
    """Tiling fields with the number of warps of the inverting kernel; each warp computes a complete block of 16."""

    solve_warps: Annotated[int, power_of_two()] = Field(
        default=1, ge=1, le=4, description="warps of the kernel for (I + A)^-1: one warp is as fast as four"
    )


#: Default sizes of a problem; ``unit``: whether rows of K are normalised to length 1.
SIZES: Mapping[str, int] = MappingProxyType({**STATE_SIZES, "tokens": 1024, "unit": True})


def log_decays(problem: KernelProblem, _inputs: object, batch: int, head: int) -> NDArray[np.float64]:
    """Return drawn log decays of a head, (1, tokens), as `log_gate` draws them."""
    _batches, _heads, tokens, *_ = sizes_of(problem, SIZES)
    return log_gate(problem.seed, batch, head, tokens, 1).T


def strengths(problem: KernelProblem, _inputs: object, batch: int, head: int) -> NDArray[np.float64]:
    """Return drawn beta of a head, (1, tokens): the sigmoid of normal entries."""
    _batches, _heads, tokens, *_ = sizes_of(problem, SIZES)
    drawn: NDArray[np.float64] = 1 / (1 + np.exp(-normal_entries(problem.seed, "beta", batch, head, 1, tokens)))
    return drawn


def gated_delta(problem: KernelProblem, tiling: Any, p: StatePrecision, machine: Machine) -> Phases:
    """Return the kernels; a block computes all columns of W and U, or ``block_value`` columns of the state and of the
    results.
    """
    (*sizes, unit), fmt = sizes_of(problem, SIZES), problem.dtype
    of = Chunks.of(sizes, tiling)
    wide, one = of.spans(of.value), partial(of.tensor, rows=1, cols=of.tokens, fmt=F32)
    tokens = {n: of.tensor(n, of.tokens, c, fmt, "input") for n, c in (("q", of.key), ("k", of.key), ("v", of.value))}
    g, beta, k = one("g"), one("beta", role="input"), tokens["k"]
    made = {n: of.tensor(n, of.tokens, c, p.factor) for n, c in (("w", of.key), ("u", of.value), ("x", of.value))}
    t, h = of.stack("t", of.chunk, of.chunk, p.factor), of.stack("h", of.key, of.value, p.factor)
    state = partial(of.tensor, rows=of.key, cols=of.value, fmt=F32)
    o = of.tensor("o", of.tokens, of.value, p.output, "output")
    below = GlobalTensor("below", 1, 1, of.chunk, of.chunk, F32, "constant")
    phases = []
    if unit:
        k = of.tensor("n", of.tokens, of.key, p.factor)
        rows = min(of.tokens, max(1, GATES_SLICE // of.key) * machine.row_cores)
        sized = {"row": rows, "key": of.key}
        phases.append(normalised.phase("unit", grid(k, ("row", rows)), sized, [k], k=tokens["k"], p=p))
    a, published = one("a", role="input"), tiling.published
    as_pto = published is not None
    by_rows = as_pto and published.of_phase("decays").sums == "rows"
    phases.append(decay_sums(decays, of, of.of_all_heads if by_rows else tiling.block_sums, [g], a=a))
    blocks = of.blocks(of.value)

    def phase(
        kernel: Kernel,
        called: str,
        cells: tuple[WorkTile, ...],
        spans: Mapping[str, int],
        results: Sequence[GlobalTensor | Stacked],
        **bound: Any,
    ) -> None:
        # masks: the tokens before each token; for results also the token itself
        masks = {t.name for n, t in bound.items() if n == "below"}
        known = {n: below_diagonal(of.chunk, n == "seen") for n in masks}
        phases.append(kernel.phase(called, cells, spans, results, values=known, p=p, arithmetic=p.arithmetic, **bound))

    met = {"ki": k, "kj": k, "beta": beta, "g": g, "gt": g, "below": below}
    if machine.row_cores > 1:  # cores that share the rows of a product; only one core inverts
        whole = of.stack("A", of.chunk, of.chunk, p.factor)
        phase(kkt, "kkt", blocks, wide, [whole], **met, as_pto=as_pto)
        phase(solved, "solve", blocks, wide, [t], a=whole)
    else:
        phase(kkt_inverse, "kkt", blocks, wide, [t], **met)
    # K has a separate name for each kernel, because a later kernel finds another share of K in L2
    of_wy, of_states, of_outputs = (k.under(f"{k.name}_{n}") for n in ("wy", "states", "outputs"))
    phase(wy, "wy", blocks, wide, [made["w"], made["u"]], t=t, k=of_wy, v=tokens["v"], beta=beta, g=g)
    last, first = state("last", role="output"), state("first", role="input")
    walk = {"k": of_states, "w": made["w"], "u": made["u"], "g": g, "end": Ends("row", g)}
    phase(delta_states, "states", of.panels(), of.spans(), [h, made["x"], last], first=first, as_pto=as_pto, **walk)
    seen = replace(below, name="seen")
    read = {"q": tokens["q"], "k": of_outputs, "v": made["x"], "h": h, "below": seen, "g": g, "gt": g, "as_pto": as_pto}
    spans = of.spans()
    phase(gated_outputs, "outputs", of.blocks(), spans, [o], **read)
    # FLA's list of configurations pairs BK with BV (fla/ops/common/chunk_o.py, _O_CONFIGS).
    phases[-1] = replace(phases[-1], pieces={"key": spans["value"]})
    return [replace(each, slice_elements=each.slice_elements or STATE_SLICE) for each in phases]


def recurrence_of(
    problem: KernelProblem, _b: int, _h: int, read: Callable[[str], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return o, (tokens, channels of values), from a head's inputs by name, token by token in float64."""
    q, k, v, state = map(read, ("q", "k", "v", "first"))
    a, beta, rows = np.exp(read("a")[0]), read("beta")[0], []
    if dict(zip(SIZES, sizes_of(problem, SIZES), strict=True))["unit"]:
        k = k / np.sqrt((k * k).sum(1, keepdims=True) + LEAST_LENGTH)
    for at in range(len(q)):
        state = a[at] * state
        state = state + beta[at] * np.outer(k[at], v[at] - k[at] @ state)
        rows.append(q[at] @ state)
    return np.array(rows)


SCHEDULES = recurrence_schedule(
    "gated_delta",
    gated_delta,
    recurrence_of,
    "the gated delta rule in its WY form, chunk by chunk",
    SIZES,
    MappingProxyType({"npu": DeltaFields, "gpu": SolvedFields}),
    {"a": log_decays, "beta": strengths, "first": partial(first_state, SIZES)},
)
