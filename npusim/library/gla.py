"""Gated linear attention (Yang et al. 2024), chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    F32,
    GATES_SLICE,
    Chunks,
    GlobalTensor,
    KernelProblem,
    Phases,
    StatePrecision,
    Value,
    as_stored,
    chunk_tensors,
    chunked,
    exp,
    grid,
    in_slices,
    kernel,
    log_gates,
    recurrence_schedule,
    reference_with_gates,
    sizes_of,
)
from npusim.machine import Machine

#: Costs that the times of this schedule do not include.  source: measurements/h100_recurrences.csv, operation gla
ANOTHER = (
    "gates: here they are multiplied into Q and K, whose product then gives the scores; flash-linear-attention "
    "uses another algorithm, whose time this is not: it computes scores by sub-blocks of 16 tokens and sums gates "
    "in float32, in three kernels that need 250 us of 472 on an H100 (1 x 8192 tokens, 16 heads of 128)"
)


@kernel(results="qe ke kd", q="row key", k="row key", b="row key", rest="row key")
def gated(q: Value, k: Value, b: Value, rest: Value, p: StatePrecision) -> Any:
    """Q e^b, K e^-b and K e^(last - b), where b are the sums of a chunk's log gates: both factors of the scores contain
    them.
    """
    wide = k.to(F32)
    return (q.to(F32) * exp(b)).to(p.factor), (wide * exp(-b)).to(p.factor), (wide * exp(rest)).to(p.factor)


def _sums(gates: NDArray[np.float64], chunk: int) -> NDArray[np.float64]:
    """Return the running sums of log gates within each chunk."""
    return np.concatenate([gates[:, :, at : at + chunk].cumsum(2) for at in range(0, gates.shape[2], chunk)], 2)


def _lasts(sums: NDArray[np.float64], chunk: int) -> NDArray[np.float64]:
    """Return each chunk's last sums, (batch * chunks, heads, channels, 1)."""
    ends = [min(at + chunk, sums.shape[2]) - 1 for at in range(0, sums.shape[2], chunk)]
    batch, heads, _, key = sums.shape
    return sums[:, :, ends].swapaxes(1, 2).reshape(batch * len(ends), heads, key, 1)


def gla(problem: KernelProblem, tiling: Any, p: StatePrecision, machine: Machine) -> Phases:
    """Return the kernel that multiplies gates into Q and K, and the two kernels that follow it; sums of a chunk's log
    gates are inputs.
    """
    sizes, chunk = sizes_of(problem), tiling.chunk
    (batch, heads, tokens, key, _), at = sizes, np.arange(chunk)
    tensors = chunk_tensors(sizes, chunk, problem.dtype, p.output)
    like = tensors["q"]
    result = {n: replace(like, name=n, fmt=p.factor, role="workspace") for n in ("qe", "ke", "kd")}
    b, rest = (replace(like, name=n, fmt=F32) for n in ("b", "rest"))
    sums = cache(lambda: _sums(log_gates(problem.seed, batch, heads, tokens, key), chunk))
    spread = cache(lambda: _lasts(sums(), chunk).reshape(batch, -1, heads, key).swapaxes(1, 2))
    rows = min(tokens, max(1, GATES_SLICE // key) * machine.row_cores)
    before = gated.phase(
        "gates",
        grid(like, ("row", rows)),
        {"row": rows, "key": key},
        list(result.values()),
        q=like,
        k=tensors["k"],
        b=b,
        rest=rest,
        p=p,
        values={"b": as_stored(sums), "rest": as_stored(lambda: np.repeat(spread(), chunk, 2)[:, :, :tokens] - sums())},
    )
    tensors |= {"q": result["qe"], "k": result["ke"], "k_h": result["kd"]}
    tensors["decay"] = GlobalTensor("decay", 1, 1, chunk, chunk, F32, "constant")
    values = {
        "decay": as_stored(lambda: ((at[:, None] >= at) * 1.0)[None, None]),
        "keep": as_stored(lambda: np.exp(_lasts(sums(), chunk))),
    }
    of_chunks = chunked(Chunks.of(sizes, tiling), p, tensors, values)
    return [replace(before, slice_elements=GATES_SLICE, notes=(*before.notes, ANOTHER)), *in_slices(of_chunks)]


def _drawn_gates(problem: KernelProblem) -> NDArray[np.float64]:
    batch, heads, tokens, key, _ = sizes_of(problem)
    return log_gates(problem.seed, batch, heads, tokens, key)


SCHEDULES = recurrence_schedule(
    "gla",
    gla,
    partial(reference_with_gates, _drawn_gates),
    "gated linear attention, a gate of each token and channel, chunk by chunk",
)
