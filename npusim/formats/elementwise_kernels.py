"""Kernels of elementwise functions: the same bits on every CPU, and speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.exponential import LN2, LN2_ERROR, LN2_HIGH, LN2_LOW, LOG2_E, RELATIVE_ERROR, expm1_polynomial
from npusim.formats.jit import bits_float64, float32_bits, fma32, fma64, inline, kernel
from npusim.formats.reduction_kernels import round_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

_expm1 = inline(expm1_polynomial)


@kernel
def fma_float64(x: NDArray[Any], y: NDArray[Any], z: NDArray[Any], out: NDArray[Any]) -> None:
    """Compute the fused multiply-add of flat float64 arrays."""
    for i in range(out.size):
        out[i] = fma64(x[i], y[i], z[i])


@kernel
def exp2_polynomial(x: NDArray[Any], out: NDArray[Any], coefficients: Any, lowest: Any) -> None:
    """Compute the polynomial of 2**x of flat float32 arrays as int32 patterns; 0 unless x > ``lowest``.

    ``coefficients`` are float32, highest power first; the last fused multiply-add adds 1.
    """
    for i in range(out.size):
        value = x[i]
        inside = value > lowest
        safe = min(value, np.float32(128.0)) if inside else np.float32(0.0)
        whole = np.float32(np.floor(safe))
        f = np.float32(safe - whole)
        p = coefficients[0]
        for k in range(1, coefficients.size):
            p = fma32(p, f, coefficients[k])
        p = fma32(p, f, np.float32(1.0))
        power = np.int32(np.int32(whole) << np.int32(23))
        bits = np.int32(np.int32(float32_bits(p)) + power)
        out[i] = bits if inside else np.int32(0)


@inline
def reduce_argument(value: Any, binary: Any) -> Any:
    """Return (n, r, 2**n): exp (or 2**x) of a number is 2**n * exp(r), abs(r) <= 0.35."""
    # Beyond these limits the result is 0 or Inf; NaN fails both comparisons, and remains NaN.
    limited = -160.0 if value < -160.0 else value
    limited = 160.0 if limited > 160.0 else limited
    if binary:
        whole = np.rint(limited)
        r = (limited - whole) * LN2
    else:
        whole = np.rint(limited * LOG2_E)
        r = (limited - whole * LN2_HIGH) - whole * LN2_LOW
    steps = np.int64(0) if np.isnan(value) else np.int64(whole)
    return whole, r, bits_float64(np.uint64((steps + 1023) << 52))


@kernel
def exp_float32(x: NDArray[Any], out: NDArray[Any], undecided: NDArray[Any], binary: bool) -> None:
    """Compute exp (or 2**x) of flat float32 arrays; flag results that the error bound leaves undecided."""
    for i in range(out.size):
        value = np.float64(x[i])
        _, r, scale = reduce_argument(value, binary)
        result = (1.0 + _expm1(r)) * scale
        low = np.float32(result * (1.0 - RELATIVE_ERROR))
        high = np.float32(result * (1.0 + RELATIVE_ERROR))
        out[i] = np.float32(result)
        undecided[i] = not np.isnan(value) and low != high


@kernel
def exp_float32_closer(x: NDArray[Any], out: NDArray[Any], undecided: NDArray[Any], binary: bool) -> None:
    """Compute like :func:`exp_float32`, but only for numbers, and with 1 and exp(r) - 1 as separate terms: near 1 this
    decides all cases.
    """
    for i in range(out.size):
        whole, r, scale = reduce_argument(np.float64(x[i]), binary)
        change = _expm1(r)
        # Errors of the polynomial and of r; the second one includes the error of the two parts of ln 2.
        error = abs(change) * RELATIVE_ERROR + (0.0 if binary else abs(whole) * LN2_ERROR)
        low = round_sum(scale, (change - error) * scale, 0.0)
        out[i] = round_sum(scale, (change + error) * scale, 0.0)
        undecided[i] = low != out[i]


@kernel
def exp_float64(x: NDArray[Any], out: NDArray[Any]) -> None:
    """Compute exp of flat float64 arrays, within 2**-49 (not claimed to be correctly rounded)."""
    for i in range(out.size):
        value = x[i]
        limited = -800.0 if value < -800.0 else value
        limited = 800.0 if limited > 800.0 else limited
        whole = np.rint(limited * LOG2_E)
        r = (limited - whole * LN2_HIGH) - whole * LN2_LOW
        steps = np.int64(0) if np.isnan(value) else np.int64(whole)
        # Two factors, because 2**whole by itself can exceed the float64 range.
        half = steps >> 1
        first = bits_float64(np.uint64((half + 1023) << 52))
        second = bits_float64(np.uint64((steps - half + 1023) << 52))
        out[i] = ((1.0 + _expm1(r)) * first) * second


@kernel
def gather(table: NDArray[Any], patterns: NDArray[Any], out: NDArray[Any]) -> None:
    """Look up ``table[pattern]`` for flat unsigned patterns; the table covers every pattern."""
    for i in range(patterns.size):
        out[i] = table[patterns[i]]


@kernel
def select_patterns(x: NDArray[Any], y: NDArray[Any], out: NDArray[Any], limits: Any, rules: Any) -> None:
    """Compute the larger (or smaller) of signed sign-magnitude patterns; ``rules`` = (largest, propagate).

    Patterns compare as integers after the magnitude of negative numbers is inverted, and
    +0 is above -0.  ``limits`` = (all magnitude bits, Inf or largest number, NaN).
    """
    largest, propagate = rules
    top, infinity, nan = limits
    for i in range(out.size):
        first, second = np.int64(x[i]), np.int64(y[i])
        first_nan = (first & top) > infinity
        second_nan = (second & top) > infinity
        first_key = first ^ top if first < 0 else first
        second_key = second ^ top if second < 0 else second
        takes_first = first_key >= second_key if largest else first_key <= second_key
        takes_first = (takes_first or second_nan) and not first_nan
        chosen = first if takes_first else second
        lost = first_nan or second_nan if propagate else first_nan and second_nan
        out[i] = nan if lost else chosen


@kernel
def max_rows(x: NDArray[Any], out: NDArray[Any], limits: Any) -> None:
    """Compute the largest pattern of each row of a 2-D array of signed patterns; it is NaN only if all are."""
    top, infinity, nan = limits
    lowest = -top - 1
    for row in range(x.shape[0]):
        best = np.int64(lowest)
        for column in range(x.shape[1]):
            pattern = np.int64(x[row, column])
            key = pattern ^ top if pattern < 0 else pattern
            key = lowest if (pattern & top) > infinity else key
            best = max(best, key)
        pattern = best ^ top if best < 0 else best
        out[row] = nan if best == lowest else pattern
