"""Elementary functions in float64 by fixed sequences of IEEE operations.

Only ``+ - * /``, square root and exact scaling are used, in the written order, so that the bits are the same on every
machine (the results of numpy's own ``exp`` and ``log`` depend on the CPU).  Each function states a bound of its
relative error; callers that claim correct rounding test against that bound and pass undecided inputs to
:mod:`npusim.formats.exact_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: Every function here has at most this relative error (tests find a quarter of it).
RELATIVE_ERROR = 2.0**-49

LOG2_E = float.fromhex("0x1.71547652b82fep+0")
#: ln 2 in two parts; the first has 32 trailing zero bits, so its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
#: Absolute error of n * ln 2 in these two parts is below n times this (rounding included).
LN2_ERROR = 2.0**-84
LN2 = float.fromhex("0x1.62e42fefa39efp-1")


def expm1_polynomial(r: Array) -> Array:
    """Return exp(r) - 1 for abs(r) <= 0.35: the Taylor series to degree 13 (the next term is below 2**-57)."""
    tail: Any = 1.0 / 6227020800.0
    tail = tail * r + 1.0 / 479001600.0
    tail = tail * r + 1.0 / 39916800.0
    tail = tail * r + 1.0 / 3628800.0
    tail = tail * r + 1.0 / 362880.0
    tail = tail * r + 1.0 / 40320.0
    tail = tail * r + 1.0 / 5040.0
    tail = tail * r + 1.0 / 720.0
    tail = tail * r + 1.0 / 120.0
    tail = tail * r + 1.0 / 24.0
    tail = tail * r + 1.0 / 6.0
    tail = tail * r + 0.5
    result: Array = r + (r * r) * tail
    return result


def exp64(x: Array) -> Array:
    """Return exp(x), float64 in and out; NaN stays NaN, large arguments give Inf or 0."""
    limited = np.clip(x, -800.0, 800.0)
    whole = np.rint(limited * LOG2_E)
    r = (limited - whole * LN2_HIGH) - whole * LN2_LOW
    return _scaled(1.0 + expm1_polynomial(r), whole)


def exp2_64(x: Array) -> Array:
    """Return 2**x, float64 in and out; exact for whole x."""
    limited = np.clip(x, -1200.0, 1200.0)
    whole = np.rint(limited)
    return _scaled(1.0 + expm1_polynomial((limited - whole) * LN2), whole)


def _scaled(value: Array, whole: Array) -> Array:
    """Return value * 2**whole; a NaN exponent keeps the NaN of ``value``."""
    steps = np.where(np.isnan(whole), 0.0, whole).astype(np.int32)
    return np.asarray(np.ldexp(value, steps))


def _log_parts(x: Array) -> tuple[Array, Array]:
    """Return the exponent of positive x, and the natural logarithm of its mantissa in [sqrt(1/2), sqrt(2))."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < float.fromhex("0x1.6a09e667f3bcdp-1")
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    power = (exponent - small).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    tail: Any = 1.0 / 25.0
    for odd in range(23, 1, -2):
        tail = tail * square + 1.0 / odd
    return power, 2.0 * s + 2.0 * s * (square * tail)


def _log(x: Array, joined: Callable[[Array, Array], Array]) -> Array:
    """Return ``joined``, the logarithm, if x is positive and finite; -Inf for 0, NaN for negative numbers."""
    value = joined(*_log_parts(np.where((x > 0) & np.isfinite(x), x, 1.0)))
    out = np.where(x > 0, value, np.where(x == 0, -np.inf, np.nan))
    return np.asarray(np.where(np.isposinf(x), np.inf, out))


def log64(x: Array) -> Array:
    """Return the natural logarithm, float64 in and out."""
    return _log(x, lambda power, fraction: power * LN2_HIGH + (fraction + power * LN2_LOW))


def log2_64(x: Array) -> Array:
    """Return the binary logarithm, float64 in and out; exact for powers of two."""
    return _log(x, lambda power, fraction: power + fraction * LOG2_E)


def log1p64(x: Array) -> Array:
    """Return the natural logarithm of 1 + x, float64 in and out; -0 stays -0, -Inf for -1, NaN below it.

    What the sum 1 + x lost is a factor of the logarithm (Kahan): log(u) x / (u - 1).
    """
    sum_ = 1.0 + x
    is_one = sum_ == 1.0
    value = log64(sum_) * np.where(is_one, 1.0, x / np.where(is_one, 1.0, sum_ - 1.0))
    return np.asarray(np.where(is_one, x, np.where(np.isposinf(x), np.inf, value)))


def tanh64(x: Array) -> Array:
    """Return the hyperbolic tangent, float64 in and out; -0 stays -0."""
    magnitude = np.minimum(np.abs(x), 30.0)  # tanh(30) equals 1 to 86 bits; NaN passes through
    doubled = 2.0 * magnitude
    near = expm1_polynomial(np.minimum(doubled, 0.34))
    growth = np.where(doubled < 0.34, near, exp64(doubled) - 1.0)
    return np.asarray(np.copysign(growth / (growth + 2.0), x))


def erf64(x: Array) -> Array:
    """Return the error function, float64 in and out; -0 stays -0.

    Below 0.85 the Taylor series is used; above it 1 - erfc, by the trapezoidal rule in steps of 1/2 (Chiarella and
    Reichel 1968), whose truncation error is less than 2**-56: sums of terms with one sign, and the contribution of the
    integrand's pole.
    """
    magnitude = np.minimum(np.abs(x), 6.0)  # erf(6) equals 1 to 55 bits; NaN passes through
    near, far = np.minimum(magnitude, 0.85), np.maximum(magnitude, 0.85)
    square, series = near * near, np.zeros_like(near)
    for n in range(17, -1, -1):
        series = 1.0 / (2 * n + 1) - square / (n + 1) * series
    total, square = np.zeros_like(far), far * far
    for n in range(14, 0, -1):
        total = total + exp64(np.array(-n * n / 4)) / (n * n / 4 + square)
    rest = 0.5 / np.pi * far * exp64(-square) * (1.0 / square + 2.0 * total) + 2.0 / (1.0 - exp64(4.0 * np.pi * far))
    return np.asarray(np.copysign(np.where(magnitude < 0.85, 2.0 / np.sqrt(np.pi) * near * series, 1.0 - rest), x))
