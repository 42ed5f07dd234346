"""Float64 attention on the same inputs, and the distance of outputs from it.

Sums run from left to right and add each product by a fused multiply-add, and the exponential is `npusim.formats`' own:
digits do not depend on the CPU, its vector width or the installed BLAS.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.config.head_scores import alibi_slopes, sink_logits
from npusim.program.numerics.bits_result import ErrorSummary

if TYPE_CHECKING:
    from npusim.config.problem import Problem
    from npusim.config.seen import Seen

Array = NDArray[Any]
#: Upper edges of the ULP histogram's bins.
ULP_BINS = (("0", 0), ("1", 1), ("2", 2), ("3-4", 4), ("5-8", 8))


def multiplied(a: Array, b: Array) -> NDArray[np.float64]:
    """Return the float64 product of ``a`` (m, n) and ``b`` (n, p), in any formats; its sums run from left to right."""
    from npusim.formats import reduction_kernels

    left, right = (np.ascontiguousarray(x, np.float64) for x in (a, b))
    rows, tail = len(left), -len(right) % 4
    if tail or rows % 2:  # zeros change no sum
        left, right = np.pad(left, ((0, rows % 2), (0, tail))), np.pad(right, ((0, tail), (0, 0)))
    out = np.zeros((len(left), right.shape[1]))
    reduction_kernels.sum_products(left, right, out)
    return out[:rows]


def summed(x: Array) -> NDArray[np.float64]:
    """Return float64 sums along the last axis, from left to right."""
    total: NDArray[np.float64] = formats.reduce_sum(x, "float64", "sequential", start=0.0)
    return total


def attention_scores(
    q: Array, k: Array, problem: Problem, row: int, head: int = 0, seen: Seen | None = None
) -> NDArray[np.float64]:
    """Return float64 ``scale Q K^T`` (rows, keys) for query rows from ``row``, -Inf where the mask hides a key.

    ``seen``: the keys that a query sees, by default the problem's.

    ``q`` (rows, d), ``k`` (keys, d) as stored, in any format; scales of float8 inputs are applied.
    """
    # k is the larger matrix, and is read in its memory order
    scores = np.ascontiguousarray(multiplied(k, np.asarray(q).T).T)
    scores *= problem.score_scale
    position = problem.causal_offset + row
    if problem.softcap is not None:
        scores = formats.tanh(scores / problem.softcap, "float64") * problem.softcap
    if problem.alibi:
        distance = np.arange(len(k))[None] - (position + np.arange(len(scores)))[:, None]
        scores = scores + alibi_slopes(problem.heads)[head] * distance
    if problem.bias:
        added = [problem.bias_row(head, row + n, len(k)) for n in range(len(scores))]
        scores = scores + formats.cast(np.array(added), problem.dtype)
    visible = (problem.seen if seen is None else seen).matrix(position, len(scores), 0, len(k))
    return np.where(visible, scores, -np.inf)


def attention(
    q: Array, k: Array, v: Array, problem: Problem, row: int, head: int = 0, seen: Seen | None = None
) -> NDArray[np.float64]:
    """Return float64 ``softmax(scale Q K^T + mask) V`` for query rows from ``row``.

    ``q`` (rows, d), ``k`` (keys, d), ``v`` (keys, dv) as stored, in any format, finite except for keys that no row
    sees. ``seen``: the keys that a query sees, by default the problem's; a query without keys gives the value that the
    problem states.
    """
    scores = attention_scores(q, k, problem, row, head, seen)
    sees_none = (scores == -np.inf).all(axis=1, keepdims=True) & bool(problem.unseen)
    if problem.unseen == "mean":
        scores = np.where(sees_none, 0.0, scores)
    if problem.sink_logits:  # a column next to the columns of the keys, with value 0
        scores = np.append(scores, np.full((len(scores), 1), sink_logits(problem.heads)[head]), axis=1)
    weights = softmax_weights(scores)
    v = np.where((scores[:, : len(k)] == -np.inf).all(axis=0)[:, None], 0, v)  # NaN of keys that no row sees
    with np.errstate(invalid="ignore"):
        out: NDArray[np.float64] = multiplied(weights[:, : len(k)], v) / summed(weights)[:, None] * problem.v_scale
    return np.where(sees_none, 0.0, out) if problem.unseen == "zero" else out


def softmax_weights(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(scores - the row's maximum), (rows, keys) in both."""
    with np.errstate(invalid="ignore"):  # a row without a score has no maximum: NaN
        weights: NDArray[np.float64] = formats.exp(scores - scores.max(axis=1, keepdims=True), "float64")
    return weights


def summarise_errors(outputs: list[Array], references: list[NDArray[np.float64]], fmt: str) -> ErrorSummary:
    """Return the distance of ``outputs`` (each (rows, dv)) from ``references``, pooled.

    An output with NaN or Inf has no distance: it has counts, but no figures (`ErrorSummary`).  NaN in the place of NaN
    is correct, and another number there counts as NaN.
    """
    output = np.concatenate([o.reshape(-1, o.shape[-1]) for o in outputs])
    output, reference = _compared(output, np.concatenate(references))
    wide = output.astype(np.float64)
    is_nan, is_inf = np.isnan(wide) | np.isnan(reference), np.isinf(wide)
    summary = ErrorSummary(
        rmse=None,
        max_abs_error=None,
        max_ulp=None,
        ulp_histogram={},
        nan_count=int(is_nan.sum()),
        inf_count=int(is_inf.sum()),
        nan_row_fraction=float(is_nan.any(axis=1).mean()),
        count=output.size,
    )
    if not summary.is_finite:
        return summary
    error = wide - reference
    norm = _norm(reference)
    ulps = _ulp_distance(output, formats.cast(reference, fmt), fmt)
    return replace(
        summary,
        rmse=_relative(_norm(error), norm),
        max_abs_error=float(np.abs(error).max(initial=0.0)),
        max_ulp=int(ulps.max(initial=0)),
        ulp_histogram=_histogram(ulps),
    )


def _compared(output: Array, reference: NDArray[np.float64]) -> tuple[Array, NDArray[np.float64]]:
    """Return both with 0 where both are NaN: such a NaN is correct."""
    are_nan = np.isnan(reference) & np.isnan(output.astype(np.float64).reshape(reference.shape))
    if not are_nan.any():
        return output, reference
    return np.where(are_nan.reshape(output.shape), output.dtype.type(0), output), np.where(are_nan, 0.0, reference)


def row_errors(output: Array, reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each row's distance from the reference divided by the reference's norm; NaN or Inf if it is not finite."""
    output, reference = _compared(output, reference)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        distance = np.sqrt(_squares(output.astype(np.float64) - reference))
        norm = np.sqrt(_squares(reference))
        errors: NDArray[np.float64] = np.where(distance == 0, 0.0, distance / norm)
    return errors


def _squares(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return summed(x * x)


def _norm(x: NDArray[np.float64]) -> float:
    return math.sqrt(float(summed(_squares(x))))


def _relative(distance: float, norm: float) -> float:
    """Return distance / norm; Inf for an error if the reference is 0."""
    if norm:
        return distance / norm
    return math.inf if distance else 0.0


def _ulp_distance(a: Array, b: Array, fmt: str) -> NDArray[np.int64]:
    bits = formats.get_format(fmt).bits_dtype

    def ordered(x: Array) -> NDArray[np.int64]:
        raw = np.ascontiguousarray(x).view(bits).astype(np.int64)
        half = np.int64(1) << (8 * bits.itemsize - 1)
        # maps sign-magnitude numbers to a line, and -0 and +0 to one point
        return np.where(raw & half, half - raw, raw)

    distance: NDArray[np.int64] = np.abs(ordered(a) - ordered(b))
    return distance


def _histogram(ulps: NDArray[np.int64]) -> dict[str, int]:
    counts: dict[str, int] = {}
    lower = -1
    for name, upper in ULP_BINS:
        counts[name] = int(((ulps > lower) & (ulps <= upper)).sum())
        lower = upper
    counts[f">{lower}"] = int((ulps > lower).sum())
    return counts
