"""Mamba-2's chunk scan (Dao and Gu 2024, state-space duality), with the steps of their listing 1 as kernels.

S_t = e^(dt_t A) S_(t-1) + B_t^T dt_t x_t and y_t = C_t S_t + D x_t; A and D are one number per head, and a group of
heads has one B and one C.  The kernels compute, in this order, sums of dt A, each chunk's addend to the state, the
states before the chunks, and the results.  In the names of tensors C is q, B is k and x is v. Sizes: ``--problem``;
missing sizes have the values of `SIZES`.  Errors are relative to the recurrence, computed token by token in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    F32,
    STATE_SLICE,
    Chunks,
    Ends,
    GatedFields,
    GlobalTensor,
    Kernel,
    KernelProblem,
    Phase,
    Phases,
    SpecError,
    Stacked,
    StatePrecision,
    Value,
    WorkTile,
    below_diagonal,
    decay_sums,
    exp,
    first_state,
    full,
    gated_outputs,
    initial,
    kernel,
    normal_entries,
    recurrence_schedule,
    sizes_of,
    stepped,
    tiles,
)


@kernel(results="s", k="token key", v="token value", g="token", end="1")
def chunk_states(k: Value, v: Value, g: Value, end: Value, p: StatePrecision) -> Any:
    """Return the addend of a chunk to the state, with each token decayed to the chunk's end."""
    s = full("key value", 0.0, p.state)
    for kj, vj, gj, ej in tiles(k, v, g, end, axis="token"):
        s = s + p.left(kj.T @ (vj.to(F32) * exp(ej - gj)).to(p.factor), p.state)
    return s


@kernel(results="h last", s="key value", end="1", first="key value")
def passed(s: Value, end: Value, first: Value, p: StatePrecision) -> Any:
    """Return the state before each chunk, and the state after the last chunk, from the chunks' addends."""
    state = initial(first)
    for sj, ej in tiles(s, end, axis="token"):
        yield state.to(p.factor)
        state = state * exp(ej) + sj
    return state


#: Typical size of drawn steps.  source: state-spaces/mamba, ``Mamba2``: dt_max=0.1
STEP = 0.1


#: Default sizes of a problem: Mamba-2's heads of 64 channels, a state of 128, and one group of B and C.
SIZES: Mapping[str, int] = MappingProxyType(
    {"batch": 1, "heads": 16, "tokens": 2048, "key": 128, "value": 64, "groups": 1}
)


def steps(problem: KernelProblem, _inputs: object, batch: int, head: int) -> NDArray[np.float64]:
    """Return drawn dt of a head, (1, tokens): softplus of normal entries, times `STEP`."""
    _batches, _heads, tokens, *_ = sizes_of(problem, SIZES)
    drawn: NDArray[np.float64] = STEP * np.logaddexp(0, normal_entries(problem.seed, "dt", batch, head, 1, tokens))
    return drawn


def rate(_problem: KernelProblem, _inputs: object, _batch: int, head: int) -> NDArray[np.float64]:
    """Return head h's A, (1, 1): -1 - 15 u, where u is the fractional part of h (sqrt(5) - 1) / 2.

    source: state-spaces/mamba, ``Mamba2``: A_init_range=(1, 16), drawn uniformly there.
    """
    return np.array([[-1 - 15 * (head * (math.sqrt(5) - 1) / 2 % 1)]])


def skip(_problem: KernelProblem, _inputs: object, _batch: int, _head: int) -> NDArray[np.float64]:
    """Return a head's D, (1, 1): 1.  source: as `rate`."""
    return np.ones((1, 1))


def ssd(problem: KernelProblem, tiling: GatedFields, p: StatePrecision, _machine: object) -> Phases:
    """Return the kernels, with ``block_value`` columns of the state per block."""
    (*sizes, groups), fmt = sizes_of(problem, SIZES), problem.dtype
    of = Chunks.of(sizes, tiling)
    if of.heads % groups:
        raise SpecError(f"problem: ssd: {of.heads} heads are not a multiple of {groups} groups")
    q, k = (GlobalTensor(n, of.batch, groups, of.tokens, of.key, fmt, "input") for n in "qk")  # C and B
    v = of.tensor("v", of.tokens, of.value, fmt, "input")
    g, gd = (of.tensor(n, 1, of.tokens, F32) for n in ("g", "gd"))
    dt, end = of.tensor("dt", 1, of.tokens, F32, "input"), Ends("token", g)
    by, by_head = (GlobalTensor(n, 1, of.heads, 1, 1, F32, "input") for n in ("by", "skip"))
    first, last = of.tensor("first", of.key, of.value, F32, "input"), of.tensor("last", of.key, of.value, F32, "output")
    s, h = of.stack("s", of.key, of.value, F32), of.stack("h", of.key, of.value, p.factor)
    o = of.tensor("o", of.tokens, of.value, p.output, "output")
    below = GlobalTensor("below", 1, 1, of.chunk, of.chunk, F32, "constant")
    spans, mask = of.spans(), below_diagonal(of.chunk, is_seen=True)

    def phase(
        kernel: Kernel,
        called: str,
        cells: tuple[WorkTile, ...],
        results: Sequence[GlobalTensor | Stacked],
        **bound: Any,
    ) -> Phase:
        values = {n: mask for n in bound if n == "below"}
        return kernel.phase(called, cells, spans, results, values=values, p=p, arithmetic=p.arithmetic, **bound)

    added = {"k": k, "v": v, "g": gd, "end": end}
    # one name of each tensor for each kernel that reads it: a later one finds another share of it in L2
    of_outputs = {n: t.under(f"{n}_outputs") for n, t in {"k": k, "v": v, "g": g, "gt": gd}.items()}
    of_outputs["x"] = of_outputs["v"]
    read = {"q": q, "h": h, "below": below, "skip": by_head, **of_outputs}
    phases = [
        decay_sums(stepped, of, tiling.block_sums, [g, gd], dt=dt, by=by),
        phase(chunk_states, "chunk states", of.blocks(is_walked=True), [s], **added),
        phase(passed, "states", of.panels(), [h, last], s=s, end=end, first=first),
        phase(gated_outputs, "outputs", of.blocks(), [o], **read),
    ]
    return [replace(each, slice_elements=each.slice_elements or STATE_SLICE) for each in phases]


def recurrence_of(
    _problem: KernelProblem, _b: int, _h: int, read: Callable[[str], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return y, (tokens, channels of values), from a head's inputs by name, token by token in float64."""
    q, k, v, state = map(read, ("q", "k", "v", "first"))
    dt, a, d, rows = read("dt")[0], read("by").item(), read("skip").item(), []
    for at in range(len(q)):
        state = np.exp(dt[at] * a) * state + dt[at] * np.outer(k[at], v[at])
        rows.append(q[at] @ state + d * v[at])
    return np.array(rows)


SCHEDULES = recurrence_schedule(
    "ssd",
    ssd,
    recurrence_of,
    "Mamba-2's chunk scan, state-space duality",
    SIZES,
    GatedFields,
    {"dt": steps, "by": rate, "skip": skip, "first": partial(first_state, SIZES)},
)
