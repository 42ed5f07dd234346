"""Figures of the PASA page, measured on the product's own schedules.

Blocks of 128 queries and 128 keys on the Ascend mapping; the CUBE's arithmetic is the assumed one
(exact sum over a fractal, one rounding), as everywhere.  Errors are relative Frobenius errors
against float64 attention on the same inputs.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.config.load import load_workload
from npusim.config.problem import AmplifiedData, HybridData, Problem, UniformData
from npusim.library.pasa import ShiftingMatrix, optimal_beta
from npusim.program.numerics.input_tensors import array_source, recipe_source
from npusim.simulation.tensor_files import load_tensors
from reports.parts.document import number, scattered
from reports.parts.values import GPU, values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.executor import HeadSource

__all__ = [
    "ALLOCATIONS",
    "PAPER_SHAPE",
    "Allocation",
    "BetaRow",
    "Drawn",
    "allocate",
    "beta_row",
    "drawn",
    "drift_errors",
    "drifting",
    "finite_rmse",
    "flat_scores",
    "float64_error",
    "given",
    "largest_scores",
    "nan_percent",
    "opposed",
    "qwen_like",
    "real",
    "recipe",
    "vanishing_exponent",
]

Doubles = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]
#: (heads, tokens, head size) of the paper's random cases (section 3.3).
PAPER_SHAPE = (16, 1280, 128)
BLOCK = 128
#: The betas of the paper: 0.984497 is the one it validates with, 0.9375 the first of its solutions.
BETA, SMALL_BETA = 0.984497, 0.9375
#: A case of the paper's figures: distribution, x0, amplitude.
Case = tuple[str, float, float]
#: Independent draws of all inputs, of which tables show mean and scatter.
DRAWS = 4
#: Sample of the RMSE table, a draw: errors are common to blocks of keys, so many heads and few queries.
SAMPLE_HEADS, SAMPLE_QUERIES = 5, 64
MAIN = ("FA32", "FA16-32", "FA16", "PASA, mean FP16", "PASA, mean FP32", "PASA, fixed reference")
#: From here on float16 rounds to infinity: halfway from 65504 to 65536.
HALF_OVERFLOW = 65520.0


class Drawn(NamedTuple):
    """A figure over independent draws: mean, standard deviation of one draw, smallest and largest."""

    value: float
    deviation: float
    low: float
    high: float


def drawn(figures: Iterable[float | str]) -> Drawn | str:
    """Return mean and deviation over draws; ``NaN`` or ``Inf`` if any draw is that."""
    found = list(figures)
    told = [f for f in found if isinstance(f, str)]
    if told:
        return told[0]
    numbers = np.array(found, np.float64)
    ends = float(numbers.min()), float(numbers.max())
    return Drawn(float(numbers.mean()), float(numbers.std(ddof=1)), *ends)


class Allocation(NamedTuple):
    """A precision allocation of the paper as a schedule of the product."""

    schedule: str
    precision: str
    beta: float = BETA

    @property
    def tiling(self) -> dict[str, object]:
        """Tiling fields: blocks of 128, and PASA's beta."""
        blocks: dict[str, object] = {"block_q": BLOCK, "block_kv": BLOCK}
        return {**blocks, "beta": self.beta} if self.schedule == "pasa" else blocks


ALLOCATIONS: Mapping[str, Allocation] = MappingProxyType(
    {
        "FA32": Allocation("flash", "fa2_fp32"),
        "FA16-32": Allocation("flash", "fa16_32"),
        "FA16": Allocation("flash", "fa16"),
        "PASA, mean FP16": Allocation("pasa", "fp16_mean"),
        "PASA, mean FP32": Allocation("pasa", "fp32_mean"),
        "PASA, fixed reference": Allocation("pasa", "fixed_reference"),
        "PASA, mean FP32, beta 0.9375": Allocation("pasa", "fp32_mean", SMALL_BETA),
        "PASA, fixed reference, beta 0.9375": Allocation("pasa", "fixed_reference", SMALL_BETA),
    }
)


def recipe(kind: str, x0: float, amplitude: float, seed: int = 0) -> UniformData | HybridData:
    """Return the paper's uniform (``U``) or hybrid (``H``) recipe."""
    if kind == "U":
        return UniformData(kind="uniform", x0=x0, amplitude=amplitude, seed=seed)
    return HybridData(kind="hybrid", x0=x0, amplitude=amplitude, seed=seed)


def allocate(
    allocation: Allocation, problem: Problem, source: HeadSource | None = None, *, diagnose: bool = False
) -> NumericResult:
    """Return the values of a problem under one allocation."""
    return values(
        allocation.schedule, problem, allocation.precision, tiling=allocation.tiling, source=source, diagnose=diagnose
    )


def finite_rmse(run: NumericResult) -> float | str:
    """Return the RMSE, or ``NaN``/``Inf`` if some output is not finite."""
    if run.error.rmse is None:
        return "NaN" if run.error.nan_count else "Inf"
    return run.error.rmse


def label(case: Case) -> str:
    """Return the name of a case in tables."""
    kind, x0, amplitude = case
    return f"{kind} {x0:g}, {amplitude:g}"


def shown(found: Drawn | str) -> str:
    """Return a cell: mean and scatter of a draw in percent, or what is not finite.

    Where draws scatter by more than half of their mean, that says little: smallest and largest instead.
    """
    if isinstance(found, str):
        return found
    if found.deviation > found.value / 2:
        return f"{number(found.low)} to {number(found.high)}"
    return scattered(found.value, found.deviation)


def sampled(case: Case, draw: int, allocations: Mapping[str, Allocation]) -> dict[str, float | str]:
    """Return the RMSE of allocations on one draw of a case: some heads of few queries, all keys."""
    _, tokens, head_dim = PAPER_SHAPE
    problem = Problem(
        heads=SAMPLE_HEADS, seq_q=SAMPLE_QUERIES, seq_kv=tokens, head_dim=head_dim, data=recipe(*case, seed=draw)
    )
    source = recipe_source(problem)
    return {n: finite_rmse(allocate(a, problem, source)) for n, a in allocations.items()}


# ------------------------------------------------------------------ table 3


class BetaRow(NamedTuple):
    """One row of the paper's table 3."""

    beta: float
    ideal: float  #: Inva = beta / (1 - beta)
    realised: float  #: Inva_1 of equation 20 from the float16 entries of M
    error_percent: float  #: of the realised one against the ideal
    rounded_percent: float  #: the same of the realised one as printed, rounded to four digits
    optimal: float
    exact: float  #: bn / (a - bn) of the same entries: what leaves softmax unchanged


def beta_row(beta: float, keys: int = BLOCK, fmt: str = "float16") -> BetaRow | None:
    """Return table 3's figures for one initial beta and format of M; 1/sqrt(d) is not in M there.

    None if the rounded entries remove the whole mean or more, so that no correction exists.
    """
    matrix = ShiftingMatrix(keys, beta, 1.0, fmt)
    if matrix.mean_kept <= 0:
        return None
    ideal, realised = beta / (1 - beta), 1 / matrix.mean_kept - 1
    error, rounded = (100 * abs(x - ideal) / ideal for x in (realised, float(f"{realised:.4g}")))
    return BetaRow(
        beta, ideal, realised, error, rounded, optimal_beta(beta, keys, fmt), matrix.correction(is_ideal=False)
    )


def vanishing_exponent(fmt: str) -> float:
    """Return the largest value of ``fmt`` whose exponential is zero there, by trying them all.

    float16 only: of float64 there is ln 2^-1075, below which e^x is nearer to 0 than to 2^-1074.
    """
    if fmt == "float64":
        return -1075 * math.log(2.0)
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    return float(values[formats.exp(values, fmt) == 0].max())


# ------------------------------------------------------------------ float64


def float64_error(x0: float, amplitude: float, head_dim: int, precision: str = "float64") -> float:
    """Return the largest difference of PASA in float64 from softmax attention, over the largest output."""
    data = UniformData(kind="uniform", x0=x0, amplitude=amplitude)
    problem = Problem(heads=1, seq_q=64, seq_kv=328, head_dim=head_dim, dtype="float64", data=data)
    tiling = {"block_q": 16, "block_kv": 32}
    found = values("pasa", problem, precision, hw=GPU, tiling=tiling)
    assert found.error.max_abs_error is not None
    return found.error.max_abs_error / float(np.abs(found.output).max())


# ------------------------------------------------------------------ table 4


def largest_scores(data: UniformData | HybridData) -> Doubles:
    """Return the largest Q K^T, unscaled, of every query row in the paper's shape, (heads * tokens)."""
    heads, tokens, head_dim = PAPER_SHAPE
    problem = Problem(heads=heads, seq_q=tokens, head_dim=head_dim, data=data)
    source = recipe_source(problem)
    tops = []
    for head in range(heads):
        q, k = (source(n, 0, head).astype(np.float64) for n in ("q", "k"))
        tops.append((q @ k.T).max(axis=1))
    return np.concatenate(tops)


def nan_percent(largest: Doubles) -> float:
    """Return the percentage of rows with a float16 score of +Inf, from their largest scores.

    Such a row becomes NaN: e^(Inf - Inf).
    """
    return 100 * float((largest >= HALF_OVERFLOW).mean())


# ------------------------------------------------------------------ other inputs


#: Of the stand-in for Qwen2-7B: tokens and head size are the paper's (section 3.3.2).
QWEN_SHAPE = (5676, 128)


def qwen_like(*, seed: int = 0) -> Arrays:
    """Return one head with ranges of K, Q K^T, K' and S' like those the paper prints for Qwen2-7B.

    The constants were chosen for the four ranges; nothing else is claimed.  All keys share one vector
    ``common``: two channels that end K's range, the others small and alternating.  Queries are out of
    phase with it, by a strength that differs from token to token (some have none), plus normal entries,
    which give the scores of the other sign.  The first key alone lies off the others in every
    small channel: what is left of it after the shift is the low end of S'.
    """
    tokens, head_dim = QWEN_SHAPE
    rng = np.random.default_rng([seed, 5])
    sign = np.where(np.arange(head_dim) % 2 == 0, 1.0, -1.0)
    strength, common_score, key_noise, query_noise, idle = 48.5, 151000.0, 0.85, 16.0, 0.3
    common = np.empty(head_dim)
    common[:2] = -409.0, 231.0
    common[2:] = -sign[2:] * (common_score / strength + common[:2] @ sign[:2]) / (head_dim - 2)
    first = np.where(sign > 0, -10.4, 7.5)
    first[:2] = 0.0
    share = np.maximum(0.0, rng.uniform(-idle, 1.0, (tokens, 1)))
    q = query_noise * rng.standard_normal((tokens, head_dim))
    # Without a part along the first key's offset, so that no query is far in phase with it.
    q += share * strength * sign - np.outer(q @ first, first) / (first @ first)
    k = common + key_noise * rng.standard_normal((tokens, head_dim))
    k[0] += first
    return _half(*(x[None, None] for x in (q, k, rng.standard_normal((tokens, head_dim)))))


def opposed(x0: float, tokens: int, *, seed: int = 0) -> Arrays:
    """Return Q near -x0, K and V near +x0: every score a large negative number."""
    rng = np.random.default_rng([seed, 1])
    shape = (1, 1, tokens, BLOCK)
    q, k, v = (c + rng.uniform(-0.5, 0.5, shape) for c in (-x0, x0, x0))
    return _half(q, k, v)


def flat_scores(keys: int, *, seed: int = 0) -> Arrays:
    """Return nearly equal scores and V near 30: O before its division is about 30 keys."""
    rng = np.random.default_rng([seed, 2])
    q = rng.uniform(-0.5, 0.5, (1, 1, BLOCK, BLOCK))
    k = rng.uniform(-0.5, 0.5, (1, 1, keys, BLOCK))
    return _half(q, k, 30 + rng.uniform(-0.5, 0.5, k.shape))


#: Blocks of keys, and how far their mean scores and values move from first to last.
DRIFT_BLOCKS, DRIFT_SCORE, DRIFT_VALUE = 10, 7.0, 2.0


def drifting(head_dim: int, *, seed: int = 0) -> Arrays:
    """Return keys whose block means drift so that mean scores move by 7, and values that drift too."""
    rng = np.random.default_rng([seed, 3, head_dim])
    keys = DRIFT_BLOCKS * BLOCK
    along = np.ones(head_dim) / np.sqrt(head_dim)
    steps = np.repeat(np.linspace(0.0, 1.0, DRIFT_BLOCKS), BLOCK)[:, None]
    # q . along = sqrt(d) on average, so a key moved by c along it gains c in its scaled score.
    q = rng.standard_normal((1, 1, BLOCK, head_dim)) + np.sqrt(head_dim) * along
    k = rng.standard_normal((1, 1, keys, head_dim)) + DRIFT_SCORE * steps * along
    v = rng.standard_normal((1, 1, keys, head_dim)) + DRIFT_VALUE * steps
    return _half(q, k, v)


def drift_errors(head_dim: int, fields: dict[str, object], *, seeds: int = 3) -> list[float | str]:
    """Return PASA's RMSE on draws of drifting keys, means in float32, with some tiling fields set."""
    found = []
    for seed in range(seeds):
        problem, source = given(drifting(head_dim, seed=seed))
        tiling = {"block_kv": BLOCK, **fields}
        found.append(finite_rmse(values("pasa", problem, "fp32_mean", tiling=tiling, source=source)))
    return found


def _half(q: Doubles, k: Doubles, v: Doubles) -> Arrays:
    return {name: array.astype(np.float16) for name, array in (("q", q), ("k", k), ("v", v))}


def given(arrays: Arrays, *, causal: bool = False) -> tuple[Problem, HeadSource]:
    """Return the problem that arrays pose, and their source."""
    q, k = arrays["q"], arrays["k"]
    problem = Problem(
        heads=q.shape[1], kv_heads=k.shape[1], seq_q=q.shape[2], seq_kv=k.shape[2], head_dim=q.shape[3], causal=causal
    )
    return problem, array_source(arrays)


def real(gain: float | None = None, tensors: str = "") -> tuple[Problem, HeadSource]:
    """Return SmolLM2's packaged tensors, causal; with a gain they are amplified, not real."""
    workload = load_workload("smollm2")
    assert workload.tensors is not None
    loaded = load_tensors(tensors or workload.tensors.file, prefix=workload.tensors.prefix)
    problem, source = given(loaded, causal=True)
    if gain is None:
        return problem, source
    return problem, array_source(loaded, AmplifiedData(kind="amplified", gain=gain))
