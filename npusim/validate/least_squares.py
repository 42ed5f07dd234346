"""Constants fitted to times: which the data can tell apart, their values and intervals, and cases kept out.

Everything is in logarithms: ``x`` are the logarithms of factors on constants, a residual is the logarithm of predicted
over measured.  Nothing here knows a device: predictions are a function of ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: Logarithms of predicted times, one a measurement, of the logarithms of factors, one a constant.
Predict = Callable[["Array"], "Array"]

#: Steps of finite differences: the factor on a constant.
STEP = 1.05
#: A constant that moves no time by this share, if doubled by it once over, is not looked at: d ln t / d ln x.
LEAST = 0.02
#: Cosine of two constants' columns of the Jacobian from which on no data of this kind tells them apart.
ALIKE = 0.98
#: Largest ratio of singular values of the chosen columns, each of length 1.
CONDITION = 30.0
#: Largest factor on a constant either way; largest logarithm of predicted over measured, of what cannot be predicted.
BOUND, FAR = 3.0, 5.0
#: Predictions of a fit at most, but for those of slopes; how often it begins, again at a refit that lies lower;
#: predictions of a refit; the share of a sum of squares by which a lower one is less, and the square of no step.
MOST_TRIALS, MOST_FITS, MOST_REFITS, LOWER, TINY = 25, 3, 4, 1e-4, 1e-12
#: Steps of a profile, in widths of the interval to first order; share of the sum's rise that is within, and beyond all.
NEAR, BEYOND = 0.8, 2.0
STRIDE = 1.6
WIDTHS = tuple(STRIDE**n for n in range(4))
#: Constants fitted at most; measurements that each needs; by how many measurements' mean error one more lessens the sum
#: at least (Akaike: chance alone gives one).
MOST, EACH, GAIN = 8, 3, 2.0
#: What an interval covers.
COVERAGE = 0.90


@dataclass(frozen=True)
class Fitted:
    """Logarithms of factors on the chosen columns, with the ends of their intervals, (columns, 2), and the Jacobian."""

    x: Array
    ends: Array
    jacobian: Array
    residuals: Array


def jacobian(predict: Predict, x: Array, columns: Sequence[int], base: Array) -> Array:
    """Return d ln t / d ln constant at ``x``, (measurements, columns): one prediction a column."""
    h, found = np.log(STEP), []
    for column in columns:
        moved = x.copy()
        moved[column] += h
        slopes = (predict(moved) - base) / h
        found.append(np.where(np.isfinite(slopes), slopes, 0.0))
    return np.array(found).T.reshape(len(base), len(columns))


def bundles(jac: Array) -> list[tuple[int, ...]]:
    """Return the columns that move any time, those that no data tells apart together, the strongest first in each."""
    strength = np.abs(jac).max(axis=0, initial=0.0)
    columns = [int(c) for c in np.argsort(-strength, kind="stable") if strength[c] >= LEAST]
    unit = jac / np.maximum(np.linalg.norm(jac, axis=0), np.finfo(float).tiny)
    taken: list[list[int]] = []
    for column in columns:
        home = next((b for b in taken if abs(unit[:, b[0]] @ unit[:, column]) >= ALIKE), None)
        if home is None:
            taken.append([column])
        else:
            home.append(column)
    return [tuple(b) for b in taken]


def bundled(jac: Array, chosen: Sequence[tuple[int, ...]]) -> Array:
    """Return how times move with a common factor on each bundle (the inverse where a column points the other way)."""
    return np.array([sum(sign(jac, b[0], c) * jac[:, c] for c in b) for b in chosen]).T.reshape(len(jac), len(chosen))


def spread(jac: Array, chosen: Sequence[tuple[int, ...]], x: Array) -> Array:
    """Return factors of all columns from those of bundles."""
    whole = np.zeros(jac.shape[1])
    for value, bundle in zip(x, chosen, strict=True):
        for column in bundle:
            whole[column] = sign(jac, bundle[0], column) * value
    return whole


def sign(jac: Array, first: int, column: int) -> float:
    """Return -1 where a column points away from the first of its bundle, else 1."""
    return 1.0 if jac[:, first] @ jac[:, column] >= 0 else -1.0


def solve(jac: Array, residuals: Array) -> Array:
    """Return the bounded x for which ``residuals + jac x`` is least, by scipy's bounded least squares."""
    limit = np.log(BOUND)
    return np.asarray(_scipy("optimize").lsq_linear(jac, -residuals, bounds=(-limit, limit)).x)


def _scipy(part: str) -> Any:
    """Return a part of scipy, which nothing else needs."""
    from importlib import import_module

    try:
        return import_module(f"scipy.{part}")
    except ModuleNotFoundError:
        raise SpecError("calibrate needs scipy: pip install npusim[calibrate]") from None


def kept_out(jac: Array, residuals: Array, groups: Sequence[object]) -> Array:
    """Return each measurement's residual with constants fitted on the other groups, to first order."""
    kept = residuals.copy()
    for inside in _folds(groups):
        kept[inside] += jac[inside] @ solve(jac[~inside], residuals[~inside])
    return kept


def _folds(groups: Sequence[object]) -> list[NDArray[np.bool_]]:
    return [np.array([g == one for g in groups]) for one in dict.fromkeys(groups)]


def choose(
    jac: Array, residuals: Array, groups: Sequence[object], chosen: Sequence[tuple[int, ...]] = ()
) -> list[tuple[int, ...]]:
    """Return the bundles to fit: ``chosen``, and one after the other that which takes most of the kept-out error away.

    ``residuals``: at x = 0, to first order.  None is taken that makes the chosen columns hard to tell apart (their
    singular values), or takes away little.
    """
    taken = {column for bundle in chosen for column in bundle}
    left, chosen = [b for b in bundles(jac) if not taken & set(b)], list(chosen)
    error = float(np.mean((kept_out(bundled(jac, chosen), residuals, groups) if chosen else residuals) ** 2))
    while left and len(chosen) < min(MOST, len(residuals) // EACH):
        tried = [
            (float(np.mean(kept_out(bundled(jac, b), residuals, groups) ** 2)), b) for b in _more(jac, chosen, left)
        ]
        best, bundle = min(tried, default=(error, chosen), key=lambda pair: pair[0])
        if not tried or best > error * (1 - GAIN / len(residuals)):
            break
        error, chosen = best, bundle
        left = [b for b in left if b not in chosen]
    return chosen


def _more(jac: Array, chosen: list[tuple[int, ...]], left: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    longer = [[*chosen, one] for one in left]
    return [b for b in longer if condition(bundled(jac, b)) <= CONDITION]


def condition(jac: Array) -> float:
    """Return the largest over the smallest singular value of a Jacobian whose columns are made as long as another."""
    values = np.linalg.svd(jac / np.maximum(np.linalg.norm(jac, axis=0), np.finfo(float).tiny), compute_uv=False)
    return float(values[0] / max(values[-1], np.finfo(float).tiny))


def fit(predict: Predict, measured: Array, start: Array | None = None, width: int = 1) -> Fitted:
    """Return the least squares of ``predict(x) - measured``, by scipy's trust regions, with profiles as intervals.

    ``measured``: logarithms; ``width``: how many x are.  An interval covers `COVERAGE` where errors are independent and
    of one width: at its ends the least sum of squares, all other constants fitted again, has grown as the quantile
    says.  A refit that comes out lower than the fit is where the fit begins again.  Predictions: up to
    ``MOST_TRIALS (1 + 2 width)`` a fit, and for each x up to ``2 len(WIDTHS) (1 + MOST_REFITS)``, `MOST_FITS` times.

    Raises `SpecError` where measurements are not more than constants.
    """
    limit = np.log(BOUND)
    x = np.zeros(width) if start is None else np.clip(start, -0.99 * limit, 0.99 * limit)
    free = len(measured) - len(x)
    if free <= 0:
        raise SpecError(f"{len(measured)} measured times for {len(x)} constants: there must be more times")

    def off(x: Array) -> Array:
        return np.clip(predict(x) - measured, -FAR, FAR)

    def slopes(x: Array) -> Array:
        h = np.log(STEP) * np.eye(len(x))
        return np.asarray([(off(x + one) - off(x - one)) / (2 * np.log(STEP)) for one in h]).T

    for last in range(MOST_FITS - 1, -1, -1):
        found = _scipy("optimize").least_squares(
            off, x, jac=slopes, bounds=(-limit, limit), xtol=1e-4, ftol=1e-5, max_nfev=MOST_TRIALS
        )
        rise = _scipy("stats").t.ppf((1 + COVERAGE) / 2, free) ** 2 * 2 * found.cost / free
        ends, lower = list[tuple[float, float]](), None
        while len(ends) < len(x) and (lower is None or not last):
            both, lower = _profile(off, found, len(ends), rise)
            ends.append(both)
        if lower is None:
            break
        x = np.clip(lower, -0.99 * limit, 0.99 * limit)
    return Fitted(found.x, np.array(ends), found.jac, found.fun)


def _profile(off: Predict, found: Any, at: int, rise: float) -> tuple[tuple[float, float], Array | None]:
    """Return the ends of a constant's interval, where the least sum of squares has grown by ``rise``.

    The outermost such places: times are no smooth functions.  At least the ends to first order.  With them an x of a
    lower sum, where one is met: then the fit begins again.
    """
    limit, least, ends, lower = np.log(BOUND), 2 * found.cost, list[float](), None
    slope = np.linalg.pinv(found.jac.T @ found.jac)[at]
    width = float(np.sqrt(slope[at] * rise))
    for way in (-1.0, 1.0):
        end = width
        for step in (width * factor for factor in WIDTHS if width):
            moved = np.clip(found.x + way * step * slope / slope[at], -limit, limit)
            total, x = _refit(off, moved, found.jac, at)
            if total < least * (1 - LOWER):
                lower, least = x, total
            if total > least + BEYOND * rise:
                break
            end = step * STRIDE if total < least + NEAR * rise else end
        ends.append(float(found.x[at] + way * end))
    return (ends[0], ends[1]), lower


def _refit(off: Predict, x: Array, jac: Array, at: int) -> tuple[float, Array]:
    """Return the least sum of squares with one x as it is, and where: the Jacobian is learnt by Broyden's updates."""
    residuals, free = off(x), np.arange(len(x)) != at
    best = float(residuals @ residuals), x
    for _ in range(MOST_REFITS if free.any() else 0):
        step = np.zeros(len(x))
        step[free] = -np.linalg.lstsq(jac[:, free], residuals, rcond=None)[0]
        step = np.clip(x + step, -np.log(BOUND), np.log(BOUND)) - x
        if step @ step < TINY:
            break
        moved = off(x + step)
        jac = jac + np.outer(moved - residuals - jac @ step, step) / (step @ step)
        x, residuals, before = x + step, moved, best[0]
        best = min(best, (float(residuals @ residuals), x), key=lambda trial: trial[0])
        if abs(before - best[0]) < LOWER * before:
            break
    return best


def barely_apart(fitted: Fitted) -> list[tuple[int, int, float]]:
    """Return the pairs of columns whose fitted values depend on one another, with their correlation."""
    covariance = np.linalg.pinv(fitted.jacobian.T @ fitted.jacobian)
    width = np.sqrt(np.diag(covariance))
    pairs = combinations(range(len(width)), 2)
    return [(a, b, float(r)) for a, b in pairs if abs(r := covariance[a, b] / (width[a] * width[b])) >= 0.9]
