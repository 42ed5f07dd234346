"""Mamba-2's chunk scan (Dao and Gu 2024, state-space duality), with the steps of their listing 1 as kernels.

S_t = e^(dt_t A) S_(t-1) + B_t^T dt_t x_t and y_t = C_t S_t + D x_t; A and D are numbers by head, a group of heads has
one B and C.  Kernels: sums of dt A, each chunk's addend to the state, the states before the chunks, results.  In names
of tensors C is q, B is k and x is v. Sizes: ``--problem``, missing ones `SIZES`.  Errors are against the recurrence,
token after token in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.algorithms import recurrence
from npusim.algorithms.phase import Ends
from npusim.algorithms.recurrence import F32, Chunks, StatePrecision
from npusim.errors import SpecError
from npusim.ir.tile import GlobalTensor
from npusim.schedules import retention
from npusim.schedules.gated_delta import first_state
from npusim.schedules.retention import SLICE, GatedFields, GpuGatedFields, as_stored, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from npusim.config.problem import KernelProblem
    from npusim.schedules.define import Phases

#: Drawn steps lie about here.  source: state-spaces/mamba, ``Mamba2``: dt_max=0.1
STEP = 0.1
#: Sizes that a problem leaves out: Mamba-2's heads of 64 channels, a state of 128, B and C of one group.
SIZES: Mapping[str, int] = MappingProxyType(
    {"batch": 1, "heads": 16, "tokens": 2048, "key": 128, "value": 64, "groups": 1}
)


def steps(seed: int, batch: int, heads: int, tokens: int) -> NDArray[np.float64]:
    """Return drawn dt, (batch, heads, tokens): `STEP` times the softplus of normal entries."""
    return STEP * np.logaddexp(0, retention.normal(seed, "dt", batch, heads, tokens))


def rates(heads: int) -> NDArray[np.float64]:
    """Return A by head: -1 - 15 u, u the fraction of h (sqrt(5) - 1) / 2: a head has the same A among more heads.

    source: state-spaces/mamba, ``Mamba2``: A_init_range=(1, 16), drawn uniformly there.
    """
    return -1 - 15 * (np.arange(heads) * (math.sqrt(5) - 1) / 2 % 1)


def skips(heads: int) -> NDArray[np.float64]:
    """Return D by head: 1.  source: as `rates`."""
    return np.ones(heads)


def inputs_of(problem: KernelProblem) -> dict[str, Callable[[], Any]]:
    """Return functions of the inputs besides C, B and x, of A and D, and of the state before the first token."""
    batch, heads, tokens, key, value, _ = sizes_of(problem, SIZES)
    return {
        "dt": as_stored(lambda: steps(problem.seed, batch, heads, tokens)[:, :, None]),
        "by": as_stored(lambda: rates(heads)[None, :, None, None]),
        "skip": as_stored(lambda: skips(heads)[None, :, None, None]),
        "first": as_stored(lambda: first_state(batch, heads, key, value)),
    }


def ssd(problem: KernelProblem, tiling: Any, p: StatePrecision, _machine: Any) -> Phases:
    """Return the kernels, ``block_value`` columns of the state a block."""
    (*sizes, groups), fmt = sizes_of(problem, SIZES), problem.dtype
    of = Chunks.of(sizes, tiling)
    if of.heads % groups:
        raise SpecError(f"problem: ssd: {of.heads} heads are no whole number of {groups} groups")
    q, k = (GlobalTensor(n, of.batch, groups, of.tokens, of.key, fmt, "input") for n in "qk")  # C and B
    v = of.tensor("v", of.tokens, of.value, fmt, "input")
    g, gd = (of.tensor(n, 1, of.tokens, F32) for n in ("g", "gd"))
    dt, end = of.tensor("dt", 1, of.tokens, F32, "input"), Ends("token", g)
    by, skip = (GlobalTensor(n, 1, of.heads, 1, 1, F32, "input") for n in ("by", "skip"))
    first, last = of.tensor("first", of.key, of.value, F32, "input"), of.tensor("last", of.key, of.value, F32, "output")
    s, h = of.stack("s", of.key, of.value, F32), of.stack("h", of.key, of.value, p.factor)
    o = of.tensor("o", of.tokens, of.value, p.output, "output")
    below = GlobalTensor("below", 1, 1, of.chunk, of.chunk, F32, "constant")
    drawn, spans = inputs_of(problem), of.spans()
    known = {**drawn, "below": retention.below_diagonal(of.chunk, is_seen=True)}

    def phase(kernel: Any, called: str, cells: Any, results: Any, **bound: Any) -> Any:
        values = {n: f for n, f in known.items() if n in bound}
        return kernel.phase(called, cells, spans, results, values=values, p=p, arithmetic=p.arithmetic, **bound)

    added = {"k": k, "v": v, "g": gd, "end": end}
    read = {"q": q, "k": k, "v": v, "h": h, "below": below, "g": g, "gt": gd, "x": v, "skip": skip}
    phases = [
        recurrence.decay_sums(recurrence.stepped, of, tiling.block_sums, [g, gd], drawn, dt=dt, by=by),
        phase(recurrence.chunk_states, "chunk states", of.blocks(is_walked=True), [s], **added),
        phase(recurrence.passed, "states", of.panels(), [h, last], s=s, end=end, first=first),
        phase(recurrence.gated_outputs, "outputs", of.blocks(), [o], **read),
    ]
    return [replace(each, slice_elements=each.slice_elements or SLICE) for each in phases]


def recurrence_of(problem: KernelProblem, b: int, h: int, q: Any, k: Any, v: Any) -> NDArray[np.float64]:
    """Return y, (tokens, channels of values), of a head, token after token in float64."""
    drawn = {n: np.asarray(function(), np.float64) for n, function in inputs_of(problem).items()}
    dt, a, d = drawn["dt"][b, h, 0], drawn["by"][0, h, 0, 0], drawn["skip"][0, h, 0, 0]
    state, rows = drawn["first"][b, h], []
    for at in range(len(q)):
        state = np.exp(dt[at] * a) * state + dt[at] * np.outer(k[at], v[at])
        rows.append(q[at] @ state + d * v[at])
    return np.array(rows)


SCHEDULES = retention.declared(
    "ssd", ssd, recurrence_of, "Mamba-2's chunk scan, state-space duality", SIZES, (GatedFields, GpuGatedFields)
)
