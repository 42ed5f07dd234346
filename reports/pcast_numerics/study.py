"""Figures of the P-Cast page, measured on the product's own FP8 schedule.

Inputs are float32 and the kernels' GPU mapping is used (blocks of 64 queries and 64 keys), so that
nothing but the cast of P is lost.  Heads are independent samples of keys; the head size is small,
since scores are N(0, 1) at any (`SinkData`).  Errors are exact expectations over V ~ N(0, 1): the
sum over keys of squared differences between the weights that multiply V and softmax.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim.config.load import load_workload
from npusim.config.problem import Problem, SinkData
from npusim.program.numerics.input_tensors import array_source, recipe_source
from npusim.simulation.tensor_files import load_tensors
from reports.parts.values import GPU, observe, values
from reports.pcast_numerics.weights import EffectiveWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.program.numerics.bits_result import Diagnosis
    from npusim.program.numerics.executor import HeadSource

__all__ = [
    "PRECISIONS",
    "Mean",
    "by_head",
    "diagnose",
    "error_by_head",
    "errors_by_head",
    "exact_mass",
    "exact_weights",
    "mean_of",
    "mean_of_rows",
    "ratio_of",
    "real_figures",
    "real_tensors",
    "reverse_hole",
    "sink_problem",
    "softmax",
]

Doubles = NDArray[np.float64]
#: The configurations of P-Cast section 6.2, as precisions of the schedule ``fp8_attention``.
PRECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "forward, S=1": "hpc_ops_s1",
        "reverse, S=1": "hpc_ops_s1,is_reverse=true",
        "forward, S=448": "hpc_ops,scale=448",
        "forward, S=256": "hpc_ops",
        "reverse, S=256": "hpc_ops,is_reverse=true",
    }
)
QUERIES = 64
HEAD_DIM = 32
VALUE_DIM = 16


class Mean(NamedTuple):
    """A mean over independent heads and its standard error."""

    value: float
    error: float


def mean_of(by_head: Doubles) -> Mean:
    """Return mean and standard error over heads."""
    return Mean(float(by_head.mean()), float(by_head.std(ddof=1) / np.sqrt(len(by_head))))


def mean_of_rows(draws: Sequence[tuple[float, ...]]) -> list[Mean]:
    """Return mean and standard error of each figure over independent draws of all of them."""
    return [mean_of(column) for column in np.array(draws).T]


def ratio_of(a: Doubles, b: Doubles) -> Mean:
    """Return the ratio of two means over the same heads, and its standard error (delta method)."""
    ratio = float(a.mean() / b.mean())
    residual = mean_of(a - ratio * b)
    return Mean(ratio, residual.error / float(b.mean()))


def sink_problem(gap: float, keys: int, heads: int, *, seed: int = 0, sinks: int = 4) -> Problem:
    """Return ``heads`` samples of 64 query rows over ``keys`` keys, the first few of them sinks."""
    return Problem(
        heads=heads,
        seq_q=QUERIES,
        seq_kv=keys,
        head_dim=HEAD_DIM,
        value_head_dim=VALUE_DIM,
        dtype="float32",
        data=SinkData(kind="sink", gap=gap, sinks=sinks, seed=seed),
    )


def error_by_head(problem: Problem, precision: str, *, source: HeadSource | None = None, block: int = 64) -> Doubles:
    """Return each head's mean squared error of the output, in units of V's variance."""
    (found,) = errors_by_head(problem, {"": precision}, source=source, block=block).values()
    return found


def errors_by_head(
    problem: Problem, precisions: Mapping[str, str], *, source: HeadSource | None = None, block: int = 64
) -> dict[str, Doubles]:
    """Return each head's mean squared error for several precisions, on the same inputs."""
    inputs = source if source is not None else recipe_source(problem)
    squared = squared_against(exact_weights(problem, inputs))
    return {
        name: by_head(problem, precision, squared, source=inputs, block=block)[:, 0]
        for name, precision in precisions.items()
    }


@lru_cache(maxsize=1)
def exact_weights(problem: Problem, inputs: HeadSource) -> Callable[[Any], NDArray[np.float32]]:
    """Return a function that returns the softmax of a block, which is computed once, in float64.

    float32 keeps 7 digits of what is compared to 2 (a P in E4M3).
    """
    known: dict[tuple[int, int], NDArray[np.float32]] = {}

    def exact(where: Any) -> NDArray[np.float32]:
        key = where.head, where.row
        if key not in known:
            q = inputs("q", where.batch, where.head)[where.row : where.row + where.rows]
            k = inputs("k", where.batch, where.head // problem.group_size)
            wide = softmax(problem, np.asarray(q, np.float64), np.asarray(k, np.float64), where.row)
            known[key] = wide.astype(np.float32)
        return known[key]

    return exact


def squared_against(exact: Callable[[Any], NDArray[np.float32]]) -> Callable[[Any, Doubles], tuple[float, ...]]:
    """Return a measure of `by_head`: the squared differences between a block's weights and exact ones, summed."""

    def squared(where: Any, weights: Doubles) -> tuple[float, ...]:
        weights -= exact(where)
        return (float(np.vdot(weights, weights)),)

    return squared


def by_head(
    problem: Problem,
    precision: str,
    measure: Callable[[Any, Doubles], tuple[float, ...]],
    *,
    source: HeadSource,
    block: int = 64,
    recast: Callable[[NDArray[np.float32]], Doubles] | None = None,
) -> Doubles:
    """Return the results of ``measure`` for the weights of each block, summed and divided by a head's rows.

    ``measure`` gets a block and its weights (rows, keys), which it may change; the result is (heads,
    figures).  ``recast`` is that of `EffectiveWeights`.
    """
    sums: dict[int, Doubles] = {}

    def add(where: Any, weights: Doubles) -> None:
        sums[where.head] = sums.get(where.head, 0.0) + np.array(measure(where, weights))

    observer = EffectiveWeights(problem.seq_kv, add, recast)
    observe("fp8_attention", problem, precision, observer, tiling={"block_kv": block}, source=source)
    return np.array([sums[head] for head in range(problem.heads)]) / problem.seq_q


def softmax(problem: Problem, q: Doubles, k: Doubles, row: int = 0) -> Doubles:
    """Return the softmax of scaled scores of queries from ``row`` on, (rows, keys) float64."""
    scores = q @ k.T * problem.scale
    if problem.causal:
        last = np.arange(row, row + len(q))[:, None] + problem.causal_offset
        scores[np.arange(len(k))[None, :] > last] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Doubles = weights / weights.sum(axis=1, keepdims=True)
    return result


def diagnose(problem: Problem, precision: str, *, block: int = 64) -> Diagnosis:
    """Return the diagnosis of FP8 attention on the problem's recipe."""
    tiling = {"block_kv": block}
    found = values("fp8_attention", problem, precision, hw=GPU, tiling=tiling, diagnose=True).diagnosis
    assert found is not None
    return found


def reverse_hole(gap: float, scale: float, block: int, *, keys: int, heads: int, seed: int = 0) -> float:
    """Return the fraction of pairs zeroed in reverse order: those inside the sinks' own block."""
    precision = f"hpc_ops_s1,is_reverse=true,scale={scale:g}"
    found = diagnose(sink_problem(gap, keys, heads, seed=seed), precision, block=block)
    assert found.underflow_percent is not None
    return found.underflow_percent / 100


@lru_cache(maxsize=2)
def exact_mass(problem: Problem, source: HeadSource, *, is_reverse: bool, block: int = 64) -> float:
    """Return the mean softmax mass on keys that are their row's running maximum when they are cast.

    Their P is 1, which no power of two as a scale rounds: what the order of keys decides besides
    underflow.
    """
    masses = []
    for head in range(problem.heads):
        q = np.asarray(source("q", 0, head), np.float64)
        k = np.asarray(source("k", 0, head // problem.group_size), np.float64)
        weights = softmax(problem, q, k)
        top, exact = np.zeros((len(q), 1)), np.zeros(len(q))
        starts = range(0, problem.seq_kv, block)
        for start in reversed(starts) if is_reverse else starts:
            tile = weights[:, start : start + block]
            top = np.maximum(top, tile.max(axis=1, keepdims=True))
            exact += np.where(tile == top, tile, 0.0).sum(axis=1)
        masses.append(exact)
    return float(np.mean(masses))


class RealFigures(NamedTuple):
    """One configuration on real tensors."""

    error: float  #: mean squared error over V's variance 1
    exact_mass: float  #: mass on keys that were the running maximum when cast
    rmse: float  #: relative to the output, real V
    underflow_percent: float
    zeroed_mass_percent: float
    product_mass_percent: float
    sink_mass_percent: float


@cache
def real_tensors(tensors: str = "") -> tuple[Problem, HeadSource]:
    """Return the causal problem that real Q, K and V pose in float32, and their source.

    ``tensors`` is a file with the keys of the packaged one, which is the default.
    """
    workload = load_workload("smollm2")
    assert workload.tensors is not None
    loaded = load_tensors(tensors or workload.tensors.file, prefix=workload.tensors.prefix)
    wide = {name: array.astype(np.float32) for name, array in loaded.items()}
    q, k = wide["q"], wide["k"]
    problem = Problem(
        heads=q.shape[1], kv_heads=k.shape[1], seq_q=q.shape[2], head_dim=q.shape[3], dtype="float32", causal=True
    )
    return problem, array_source(wide)


def real_figures(precision: str, tensors: str = "") -> RealFigures:
    """Return figures of one configuration on real Q, K and V, causal, in float32."""
    problem, source = real_tensors(tensors)
    error = float(error_by_head(problem, precision, source=source).mean())
    exact = exact_mass(problem, source, is_reverse="is_reverse=true" in precision)
    bits = values("fp8_attention", problem, precision, hw=GPU, source=source, diagnose=True)
    found = bits.diagnosis
    assert found is not None
    assert found.underflow_percent is not None
    assert found.zeroed_mass_percent is not None
    assert found.product_mass_percent is not None
    assert bits.error.rmse is not None
    return RealFigures(
        error,
        exact,
        bits.error.rmse,
        found.underflow_percent,
        found.zeroed_mass_percent,
        found.product_mass_percent,
        found.sink_mass_percent,
    )
