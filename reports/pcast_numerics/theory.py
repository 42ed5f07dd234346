"""P-Cast's claims in exact terms: thresholds, the sawtooth, and expectations over its model.

The model (P-Cast section 3.1): scores of normal keys N(0, 1), of ``sinks`` keys Delta + N(0, 1).
Constants and the better form of equation 7 follow from E4M3's least subnormal (pcast_numerics.md, thresholds).
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim.formats import get_format

__all__ = [
    "Expectation",
    "Scaling",
    "closed_form",
    "collapse_error",
    "correction",
    "coverage",
    "critical_gap",
    "e4m3_values",
    "expectation",
    "largest_zero",
    "normal_exponent",
    "scaling",
    "sink_shift",
    "underflow_exponent",
    "worst_step",
    "zeroed_deviation",
    "zeroed_fraction",
]

Doubles = NDArray[np.float64]
E4M3 = get_format("float8_e4m3fn")
#: Points of the rules below; doubling them moves no printed digit.
LEGENDRE_POINTS = 8
GRID_POINTS = 401
GRID_END = 6.0


@cache
def e4m3_values() -> tuple[float, ...]:
    """Return the positive finite E4M3 values, ascending, by decoding all codes."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3.dtype).astype(np.float64)
    return tuple(sorted(float(v) for v in codes if np.isfinite(v) and v > 0))


def largest_zero() -> float:
    """Return the largest value that E4M3 rounds to zero: half the smallest subnormal, a tie to even."""
    return E4M3.min_subnormal / 2


def underflow_exponent(scale: float) -> float:
    """Return -(s - m) from which on P becomes zero: ln(1024 S) (equations 5 and 6)."""
    return math.log(scale / largest_zero())


def worst_step(scale: float) -> float:
    """Return d_p(S), the widest spacing of E4M3 that S P meets for P <= 1, divided by S.

    Above the largest finite value the one-sided error of saturation counts twice (remark 3).
    """
    gaps = [high - low for low, high in pairwise((0.0, *e4m3_values())) if low < scale]
    step = max(gaps) / scale
    over = 2 * (1 - E4M3.max_finite / scale)
    return max(step, over)


def sink_shift(sinks: int) -> float:
    """Return delta_k, the expected maximum of ``sinks`` standard normals."""
    at = _grid()
    density = sinks * _phi(at) * _cdf(at) ** (sinks - 1)
    return float(np.trapezoid(at * density, at))


def critical_gap(scale: float, sinks: int) -> float:
    """Return the gap at which half of the normal keys underflow, by the closed form."""
    return underflow_exponent(scale) - sink_shift(sinks)


def closed_form(gap: float, scale: float, sinks: int) -> float:
    """Return the fraction zeroed in forward order by equation 7: Phi(Delta + delta_k - ln(1024 S))."""
    return float(_cdf(np.array(gap - critical_gap(scale, sinks))))


class Scaling(NamedTuple):
    """What a scale S does to float32, over a whole binade: shares, and the largest relative error of S x."""

    rounded: float  #: S x is no float32 number
    lost: float  #: (S x) / S, by the rounded reciprocal as kernels have it, is not x
    error: float
    recast: float  #: E4M3 of the rounded S x is another than of the exact one


def scaling(scale: float) -> Scaling:
    """Return proposition 5 in numbers, over every float32 of [1/2, 1): bits repeat in each binade that stays normal."""
    x = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(126 << 23)).view(np.float32)
    exact = x.astype(np.float64) * scale
    rounded = x * np.float32(scale)
    back = rounded * np.float32(1 / np.float64(scale))
    codes = (values.astype(E4M3.dtype).view(np.uint8) for values in (rounded.astype(np.float64), exact))
    return Scaling(
        float(np.mean(rounded != exact)),
        float(np.mean(back != x)),
        float(np.max(np.abs(rounded - exact) / exact)),
        float(np.mean(np.not_equal(*codes))),
    )


def correction(gap: float, sinks: int, keys: int) -> float:
    """Return the mean of equation 15's exp(m_pre - m_sink): the sinks come last, after all other keys."""
    at = _grid()
    others = keys - sinks
    before = np.trapezoid(others * _phi(at) * _cdf(at) ** (others - 1) * np.exp(at), at)
    return float(before) * _over_largest(np.exp(-gap - at), sinks)


class Expectation(NamedTuple):
    """Expected fractions over one query row, in forward order once the sinks have been seen."""

    zeroed: float  #: of normal keys
    other_mass: float  #: softmax mass of normal keys
    zeroed_mass: float  #: softmax mass of those that are zeroed

    @property
    def product(self) -> float:
        """The paper's "effective information loss": fraction zeroed times mass."""
        return self.zeroed * self.other_mass


def expectation(gap: float, scale: float, sinks: int, keys: int) -> Expectation:
    """Return expected fractions for ``keys`` keys, over the distribution of the sinks' scores.

    There are many normal keys, so that their sum of exponentials is replaced by its mean.  The integral runs over the
    largest sink score m, of density ``k phi(m) Phi(m)^(k-1)``; the other sinks are below it; a Gauss-Legendre rule
    computes their share of the mass in each.
    """
    threshold = _grid() + gap - underflow_exponent(scale)
    share = _shares(gap, sinks, keys, power=1)
    # E[e^s; s < t] = e^(1/2) Phi(t - 1) for a standard normal s.
    zeroed, mass, lost = _cdf(threshold), share, share * _cdf(threshold - 1)
    return Expectation(*(_over_largest(values, sinks) for values in (zeroed, mass, lost)))


def zeroed_fraction(gap: float, scale: float, sinks: int) -> float:
    """Return the expected fraction of normal keys zeroed once ``sinks`` sinks have been seen; 0 before."""
    if not sinks:
        return 0.0
    return _over_largest(_cdf(_grid() + gap - underflow_exponent(scale)), sinks)


def zeroed_deviation(gap: float, scale: float, sinks: int) -> float:
    """Return the standard deviation of that fraction over rows: that of the sinks' maximum."""
    fractions = _cdf(_grid() + gap - underflow_exponent(scale))
    mean = _over_largest(fractions, sinks)
    return math.sqrt(_over_largest(fractions**2, sinks) - mean**2)


def normal_exponent(scale: float) -> float:
    """Return the largest distance of a score below the running maximum for which S P is a normal number: ln(64 S)."""
    return math.log(scale / E4M3.min_normal)


def coverage(gap: float, scale: float, sinks: int) -> float:
    """Return the expected fraction of normal keys whose S P is a normal E4M3 number, in forward order."""
    return 1 - _over_largest(_cdf(_grid() + gap - normal_exponent(scale)), sinks)


def collapse_error(gap: float, scale: float, sinks: int, keys: int) -> float:
    """Return the expectation of proposition 3 (equation 9) for V of variance 1: the sum of p_j^2 over Z.

    E[e^2s; s < t] = e^2 Phi(t - 2) for a standard normal s.
    """
    threshold = _grid() + gap - underflow_exponent(scale)
    total = (keys - sinks) * math.exp(0.5)
    squares = (keys - sinks) * math.exp(2.0) * _cdf(threshold - 2) / total**2
    return _over_largest(squares * _shares(gap, sinks, keys, power=2), sinks)


def _over_largest(values: Doubles, sinks: int) -> float:
    """Return the mean of values given for each largest sink score m, of density k phi(m) Phi(m)^(k-1)."""
    at = _grid()
    density = sinks * _phi(at) * _cdf(at) ** (sinks - 1)
    return float(np.trapezoid(density * values, at))


def _shares(gap: float, sinks: int, keys: int, *, power: int) -> Doubles:
    """Return the mean of (the normal keys' mass)^power for each largest sink score on the grid."""
    at = _grid()
    total, raised = (keys - sinks) * math.exp(0.5), math.exp(gap)
    pairs = zip(at, _cdf(at), strict=True)
    found = [_mean_share(total, raised, float(m), float(p), sinks - 1, power) for m, p in pairs]
    return np.array(found)


def _mean_share(total: float, raised: float, largest: float, below: float, others: int, power: int) -> float:
    """Return E[(total / (total + raised sum of e^g))^power], the largest g given, the others below it."""
    points, weights = np.polynomial.legendre.leggauss(LEGENDRE_POINTS)
    terms = np.array([math.exp(NormalDist().inv_cdf(below * (1 + x) / 2)) for x in points])
    sums, probability = np.array([math.exp(largest)]), np.array([1.0])
    for _ in range(others):
        sums = np.add.outer(sums, terms).ravel()
        probability = np.multiply.outer(probability, weights / 2).ravel()
    return float((probability * (total / (total + raised * sums)) ** power).sum())


def _grid() -> Doubles:
    return np.linspace(-GRID_END, GRID_END, GRID_POINTS)


def _phi(x: Doubles) -> Doubles:
    density: Doubles = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return density


def _cdf(x: Doubles) -> Doubles:
    flat = [0.5 * math.erfc(-v / math.sqrt(2)) for v in np.ravel(x)]
    return np.array(flat).reshape(np.shape(x))
