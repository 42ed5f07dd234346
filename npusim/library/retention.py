"""Retention (Sun et al. 2023), chunk by chunk."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    F32,
    Chunks,
    GlobalTensor,
    KernelProblem,
    Phases,
    StatePrecision,
    as_stored,
    chunk_tensors,
    chunked,
    in_slices,
    recurrence_schedule,
    reference_with_gates,
    sizes_of,
)


def log_decay(heads: int) -> NDArray[np.float64]:
    """Return the logarithm of each head's decay.  source: Sun et al. 2023, equation 8: 1 - 2^(-5 - head)."""
    decay: NDArray[np.float64] = np.log1p(-(2.0 ** (-5 - np.arange(heads))))
    return decay


def retention(problem: KernelProblem, tiling: Any, p: StatePrecision, _machine: object) -> Phases:
    """Return both kernels; the decay within a chunk is one matrix per head, which is loaded."""
    sizes, chunk = sizes_of(problem), tiling.chunk
    (_, heads, _, key, _), at = sizes, np.arange(chunk)
    gamma = log_decay(heads)[None, :, None, None]
    tensors = chunk_tensors(sizes, chunk, problem.dtype, p.output)
    for n, rows, cols in (("decay", chunk, chunk), ("out", chunk, 1), ("into", chunk, 1), ("keep", key, 1)):
        tensors[n] = GlobalTensor(n, 1, heads, rows, cols, F32, "input")
    since = np.maximum(at[:, None] - at, 0)
    values = {
        "decay": as_stored(lambda: np.exp(gamma * since) * (at[:, None] >= at)),
        "out": as_stored(lambda: np.exp(gamma * (at[:, None] + 1))),
        "into": as_stored(lambda: np.exp(gamma * (chunk - 1 - at[:, None]))),
        "keep": as_stored(lambda: np.broadcast_to(np.exp(gamma * chunk), (1, heads, key, 1))),
    }
    return in_slices(chunked(Chunks.of(sizes, tiling), p, tensors, values, is_even=True))


def _constant_gates(problem: KernelProblem) -> NDArray[np.float64]:
    batch, heads, tokens, key, _ = sizes_of(problem)
    return np.broadcast_to(log_decay(heads)[None, :, None, None], (batch, heads, tokens, key))


SCHEDULES = recurrence_schedule(
    "retention",
    retention,
    partial(reference_with_gates, _constant_gates),
    "linear attention with a decay of each head, chunk by chunk",
)
