"""The gated delta rule (Yang et al. 2025) in its WY form, chunk by chunk, with the kernels of flash-linear-attention.

S_t = a_t S_(t-1) + beta_t k_t^T (v_t - k_t a_t S_(t-1)) and o_t = q_t S_t.  K with rows of length 1, sums of log
decays, A and (I + A)^-1 (one kernel on GPUs, two on Ascend, as PTO has them), W and U, the states before the chunks,
results.  Sizes: ``--problem``, missing ones `SIZES`; ``unit=0`` leaves K unchanged.  Errors are against the recurrence,
token after token in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from npusim.algorithms import recurrence
from npusim.algorithms.blocks import grid
from npusim.algorithms.phase import Ends
from npusim.algorithms.recurrence import F32, Chunks, StatePrecision
from npusim.config.problem import KernelProblem
from npusim.config.tiling import Field, one_of, power_of_two
from npusim.ir.tile import GlobalTensor
from npusim.machines.published import find_kernel, kernels
from npusim.machines.published.kernel import AscendKernel
from npusim.schedules import retention
from npusim.schedules.retention import GATES_SLICE, SLICE, GatedFields, sizes_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from npusim.schedules.define import Phases


class DeltaFields(GatedFields):
    """The same with whose kernels they are."""

    kernel: Annotated[str, one_of(partial(kernels, AscendKernel))] | None = Field(
        default=None, description="published kernels whose decisions hold, or your own FILE.py:NAME; default: none"
    )

    @property
    def published(self) -> AscendKernel | None:
        """The published kernel that the fields name."""
        return find_kernel(AscendKernel, self.kernel, "recurrence")


class SolvedFields(GatedFields):
    """The same with the warps of the kernel that inverts, each of which does all of a block of 16."""

    solve_warps: Annotated[int, power_of_two()] = Field(
        default=1, ge=1, le=4, description="of the kernel of (I + A)^-1: one does as much as four"
    )


#: Sizes that a problem leaves out; ``unit``: whether rows of K are brought to length 1.
SIZES: Mapping[str, int] = MappingProxyType({**retention.SIZES, "tokens": 1024, "unit": True})


def log_decays(problem: KernelProblem, _inputs: Any, batch: int, head: int) -> NDArray[np.float64]:
    """Return drawn log decays of a head, (1, tokens), as `retention.log_gate` draws them."""
    _batches, _heads, tokens, *_ = sizes_of(problem, SIZES)
    return retention.log_gate(problem.seed, batch, head, tokens, 1).T


def strengths(problem: KernelProblem, _inputs: Any, batch: int, head: int) -> NDArray[np.float64]:
    """Return drawn beta of a head, (1, tokens): the sigmoid of normal entries."""
    _batches, _heads, tokens, *_ = sizes_of(problem, SIZES)
    drawn: NDArray[np.float64] = 1 / (1 + np.exp(-retention.normal(problem.seed, "beta", batch, head, 1, tokens)))
    return drawn


def first_state(sizes: Mapping[str, int], problem: KernelProblem, *_of: Any) -> NDArray[np.float64]:
    """Return the state before the first token, (channels of keys, of values): 0."""
    _batch, _heads, _tokens, key, value, *_ = sizes_of(problem, sizes)
    return np.zeros((key, value))


def gated_delta(problem: KernelProblem, tiling: Any, p: StatePrecision, machine: Any) -> Phases:
    """Return the kernels; a block has all columns of W and U, or ``block_value`` of the state and of results."""
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
        phases.append(recurrence.normalised.phase("unit", grid(k, ("row", rows)), sized, [k], k=tokens["k"], p=p))
    a = one("a", role="input")
    phases.append(recurrence.decay_sums(recurrence.decays, of, tiling.block_sums, [g], a=a))
    blocks, more = of.blocks(of.value), {"p": p, "arithmetic": p.arithmetic}
    as_pto = tiling.published is not None

    def phase(kernel: Any, called: str, cells: Any, spans: Any, results: Any, **bound: Any) -> None:
        masks = {t.name for n, t in bound.items() if n == "below"}  # tokens before one, and for results itself
        known = {n: retention.below_diagonal(of.chunk, n == "seen") for n in masks}
        phases.append(kernel.phase(called, cells, spans, results, values=known, **bound, **more))

    met = {"ki": k, "kj": k, "beta": beta, "g": g, "gt": g, "below": below}
    if machine.row_cores > 1:  # cores that share the rows of a product, of which one alone inverts
        whole = of.stack("A", of.chunk, of.chunk, p.factor)
        phase(recurrence.kkt, "kkt", blocks, wide, [whole], **met, as_pto=as_pto)
        phase(recurrence.solved, "solve", blocks, wide, [t], a=whole)
    else:
        phase(recurrence.kkt_inverse, "kkt", blocks, wide, [t], **met)
    phase(recurrence.wy, "wy", blocks, wide, [made["w"], made["u"]], t=t, k=k, v=tokens["v"], beta=beta, g=g)
    last, first = state("last", role="output"), state("first", role="input")
    walk = {"k": k, "w": made["w"], "u": made["u"], "g": g, "end": Ends("row", g), "first": first, "as_pto": as_pto}
    phase(recurrence.delta_states, "states", of.panels(), of.spans(), [h, made["x"], last], **walk)
    seen = replace(below, name="seen")
    read = {"q": tokens["q"], "k": k, "v": made["x"], "h": h, "below": seen, "g": g, "gt": g, "as_pto": as_pto}
    phase(recurrence.gated_outputs, "outputs", of.blocks(), of.spans(), [o], **read)
    return [replace(each, slice_elements=each.slice_elements or SLICE) for each in phases]


def recurrence_of(problem: KernelProblem, _b: int, _h: int, read: Any) -> NDArray[np.float64]:
    """Return o, (tokens, channels of values), of a head's inputs by name, token after token in float64."""
    q, k, v, state = map(read, ("q", "k", "v", "first"))
    a, beta, rows = np.exp(read("a")[0]), read("beta")[0], []
    if dict(zip(SIZES, sizes_of(problem, SIZES), strict=True))["unit"]:
        k = k / np.sqrt((k * k).sum(1, keepdims=True) + recurrence.LEAST_LENGTH)
    for at in range(len(q)):
        state = a[at] * state
        state = state + beta[at] * np.outer(k[at], v[at] - k[at] @ state)
        rows.append(q[at] @ state)
    return np.array(rows)


SCHEDULES = retention.declared(
    "gated_delta",
    gated_delta,
    recurrence_of,
    "the gated delta rule in its WY form, chunk by chunk",
    SIZES,
    MappingProxyType({"npu": DeltaFields, "gpu": SolvedFields}),
    {"a": log_decays, "beta": strengths, "first": partial(first_state, SIZES)},
)
