"""Constants fitted to times: those that the data can distinguish, their values and intervals, and left-out cases.

All quantities are logarithms: ``x`` are the logarithms of factors on constants, a residual is the logarithm of
predicted over measured.  Nothing here depends on a device: predictions are a function of ``x``.  A bundle has a number
for each constant: 1 or -1 for constants that change together (-1 for a change in the other direction), 0 for all
others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: Returns the logarithm of the predicted time of each measurement, from the logarithm of each constant's factor.
Predict = Callable[["Array"], "Array"]

#: Steps of finite differences, as factors on a constant; a fit begins with the second one.
STEP, COARSE = 1.05, 1.2
#: A constant is not fitted if d ln t / d ln x is below this share for every time t.
LEAST = 0.02
#: Cosine of two constants' columns of the Jacobian above which such data do not distinguish them.
ALIKE = 0.98
#: Largest ratio of singular values of the chosen columns, each of length 1.
CONDITION = 30.0
#: Largest factor by which a constant may rise or fall; the logarithm of predicted over measured if there is no
#: prediction.
BOUND, FAR = 3.0, 5.0
#: Relative distance from a bound within which a value counts as at the bound.
ALMOST = 1e-3
#: Largest number of predictions of a descent, in addition to the predictions for slopes.
MOST_TRIALS = 25
#: Largest number of fitted constants; the number of measurements that each constant needs; and the least reduction of
#: the sum by an additional constant, in mean errors of a measurement (Akaike: chance alone gives one).
MOST, EACH, GAIN = 8, 3, 2.0
#: Coverage of an interval.
COVERAGE = 0.90
TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True)
class Fitted:
    """Logarithms of factors, their Jacobian and residuals, and half of the sum of squares."""

    x: Array
    jac: Array
    fun: Array
    cost: float


def jacobian(predict: Predict, x: Array, which: NDArray[np.bool_], factor: float = STEP) -> Array:
    """Return d ln t / d ln constant at ``x``, (measurements, constants), 0 except for ``which``: one prediction each.

    ``factor``: the factor on each constant for the finite difference.
    """
    base, steps = predict(x), np.log(factor) * np.eye(len(x))
    slopes = np.zeros((len(x), len(base)))
    slopes[which] = [(predict(x + step) - base) / np.log(factor) for step in steps[which]]
    return np.where(np.isfinite(slopes), slopes, 0.0).T


def bundles(jac: Array) -> Array:
    """Return the bundles of constants that change any time, the strongest first, (constants, bundles).

    A bundle contains constants that no measurement distinguishes.
    """
    strength = np.abs(jac).max(axis=0, initial=0.0)
    unit = jac / np.maximum(np.linalg.norm(jac, axis=0), TINY)
    alike, left = unit.T @ unit, strength >= LEAST
    listed: list[Array] = []
    while left.any():
        first = int(np.argmax(np.where(left, strength, 0.0)))
        together = left & (np.abs(alike[first]) >= ALIKE)
        listed.append(np.where(together, np.sign(alike[first]), 0.0))
        left &= ~together
    return np.array(listed).reshape(-1, jac.shape[1]).T


def solve(jac: Array, residuals: Array) -> Array:
    """Return the bounded x for which ``residuals + jac x`` is least, by scipy's bounded least squares."""
    limit = np.log(BOUND)
    return np.asarray(scipy_part("optimize").lsq_linear(jac, -residuals, bounds=(-limit, limit)).x)


def scipy_part(part: str) -> Any:
    """Return a part of scipy, which nothing else needs; raise `SpecError` where it is missing."""
    from importlib import import_module

    try:
        return import_module(f"scipy.{part}")
    except ModuleNotFoundError:
        raise SpecError("calibrate needs scipy: pip install npusim[calibrate]") from None


def kept_out(jac: Array, residuals: Array, groups: Sequence[object]) -> Array:
    """Return each measurement's residual with constants fitted on the other groups, to first order."""
    errors = residuals.copy()
    for one in dict.fromkeys(groups) if jac.size else ():
        inside = np.array([group == one for group in groups])
        errors[inside] += jac[inside] @ solve(jac[~inside], residuals[~inside])
    return errors


def choose(jac: Array, residuals: Array, groups: Sequence[object], chosen: Array) -> Array:
    """Return the bundles to fit: ``chosen``, and then, one at a time, the bundle that reduces the left-out error most.

    ``residuals``: at x = 0, to first order.  A bundle is not chosen if it makes the columns hard to distinguish (by
    their singular values), reduces the error little, or has its best value outside the bounds: it would replace another
    bundle, and would seem stable for all left-out cases because the bound fixes it.
    """

    def is_inside(listed: Array) -> bool:
        return bool(abs(solve(jac @ listed, residuals)[-1]) < np.log(BOUND) * (1 - ALMOST))

    def error(listed: Array) -> float:
        return float(np.mean(kept_out(jac @ listed, residuals, groups) ** 2))

    least = error(chosen)
    while chosen.shape[1] < min(MOST, len(residuals) // EACH):
        more = [np.column_stack([chosen, b]) for b in bundles(jac).T if not b[chosen.any(axis=1)].any()]
        able = [n for n, listed in enumerate(more) if condition(jac @ listed) <= CONDITION and is_inside(listed)]
        tried = [(error(more[n]), n) for n in able]
        best, number = min(tried, default=(np.inf, 0))
        if best > least * (1 - GAIN / len(residuals)):
            break
        least, chosen = best, more[number]
    return chosen


def condition(jac: Array) -> float:
    """Return the largest over the smallest singular value of a Jacobian whose columns are scaled to one length."""
    values = np.linalg.svd(jac / np.maximum(np.linalg.norm(jac, axis=0), TINY), compute_uv=False)
    return float(values[0] / max(values[-1], TINY))


def fit(predict: Predict, measured: Array, start: Array, step: float = STEP) -> Fitted:
    """Return the least squares of ``predict(x) - measured``, by scipy's trust regions.

    ``measured``: logarithms; ``step``: the factor for the slopes at the start, which are updated from then on
    (Broyden), and for the returned slopes: since cycles are rounded to integers, small changes would falsify the
    derivatives.

    Raises `SpecError` if there are not more measurements than constants.
    """
    limit, width = np.log(BOUND), len(start)
    if len(measured) <= width:
        raise SpecError(
            f"{len(measured)} measured times for {width} constants: there must be more times than constants"
        )

    def off(x: Array) -> Array:
        return np.clip(predict(x) - measured, -FAR, FAR)

    every = np.full(width, True)
    start = np.clip(start, -limit, limit)
    at, was, jac = start, off(start), jacobian(off, start, every, step)

    def learnt(x: Array) -> Array:
        nonlocal at, was, jac
        moved, now = x - at, off(x)
        jac = jac + np.outer(now - was - jac @ moved, moved) / max(float(moved @ moved), TINY)
        at, was = x, now
        return jac

    least_squares = scipy_part("optimize").least_squares
    solution = least_squares(off, start, learnt, (-limit, limit), xtol=1e-4, ftol=1e-4, max_nfev=MOST_TRIALS)
    return Fitted(solution.x, jacobian(off, solution.x, every, step), solution.fun, solution.cost)


def intervals(fitted: Fitted) -> Array:
    """Return the ends of each constant's interval, (constants, 2).

    The interval covers `COVERAGE` if errors are independent and have one width, and if times are nearly linear within
    the interval.
    """
    free = len(fitted.fun) - len(fitted.x)
    variances = np.diag(np.linalg.pinv(fitted.jac.T @ fitted.jac)) * 2 * fitted.cost / free
    half = scipy_part("stats").t.ppf((1 + COVERAGE) / 2, free) * np.sqrt(variances)
    return np.array([fitted.x - half, fitted.x + half]).T
