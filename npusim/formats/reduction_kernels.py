"""Kernels of sums in a given order: one rounding after every addition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.jit import bits_float64, float64_bits, fma64, inline, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Number of rows that are summed at the same time, one per vector lane.
ROWS = 64
#: Rows and columns of a product that are processed while they are in a cache.
NEAR_ROWS, NEAR_COLUMNS = 8, 256


@inline
def round_lane(value: Any, mantissa_bits: Any, min_exponent: Any, limit: Any) -> Any:
    """Round a float64 to nearest even in a narrower format, as float64; Inf beyond ``limit``.

    Adding 1.5 * 2**52 units of the result leaves no bit below a unit, so that the hardware rounds; below
    ``2**min_exponent`` the unit is that of the subnormals.
    """
    magnitude = abs(value)
    exponent = (np.int64(float64_bits(magnitude)) >> 52) - 1023
    # The upper limit keeps the constant finite for Inf and NaN, which pass through.
    unit = min(max(exponent, min_exponent), 900) - mantissa_bits
    big = 1.5 * bits_float64(np.uint64((unit + 52 + 1023) << 52))
    rounded = (magnitude + big) - big
    rounded = np.inf if rounded > limit else rounded
    return np.copysign(rounded, value)


@inline
def two_sum(x: Any, y: Any) -> Any:
    """Return the float64 sum and its rounding error, exactly (Knuth)."""
    high = x + y
    back = high - x
    return high, (x - (high - back)) + (y - back)


@inline
def round_sum(x: Any, y: Any, z: Any) -> Any:
    """Return x + y + z rounded once to float32; an exact 0 is +0.

    The float64 nearest to the sum is moved to the odd neighbour on the side of its rounding error, which the last
    rounding then respects.
    """
    x, y = two_sum(x, y)
    y, z = two_sum(y, z)
    x, y = two_sum(x, y)
    high, rest = two_sum(x, y + z)  # if y is not 0, its sign is that of both
    bits = np.int64(float64_bits(high))
    step = np.int64(1) if (rest > 0.0) == (high > 0.0) else np.int64(-1)
    step = step if rest != 0.0 and (bits & 1) == 0 else np.int64(0)
    odd = bits_float64(np.uint64(bits + step))
    return np.float32(odd) if high != 0.0 else np.float32(0.0)


@kernel
def sum_rows(x: NDArray[Any], start: NDArray[Any], out: NDArray[Any]) -> None:
    """Compute ((start + x0) + x1) ... of each row, in the dtype of the arrays."""
    for row in range(x.shape[0]):
        total = start[row]
        for column in range(x.shape[1]):
            total += x[row, column]
        out[row] = total


@kernel
def sum_rows_rounded(
    x: NDArray[Any], start: NDArray[Any], out: NDArray[Any], plan: Any, scratch: tuple[NDArray[Any], NDArray[Any]]
) -> None:
    """As :func:`sum_rows`, but each sum of float32 values is rounded to the narrower format of ``plan``.

    ``plan`` = (mantissa bits, smallest exponent, largest finite value). The sum is rounded twice (to float64, then to
    the format) only where this does no harm: where 53 bits exceed 2p + 2.
    """
    mantissa_bits, min_exponent, limit = plan
    totals, turned = scratch
    for first in range(0, x.shape[0], ROWS):
        rows = min(ROWS, x.shape[0] - first)
        for row in range(rows):
            totals[row] = np.float64(start[first + row])
            for column in range(x.shape[1]):
                turned[column, row] = x[first + row, column]
        for column in range(x.shape[1]):
            for row in range(ROWS):
                exact = totals[row] + np.float64(turned[column, row])
                totals[row] = round_lane(exact, mantissa_bits, min_exponent, limit)
        for row in range(rows):
            out[first + row] = np.float32(totals[row])


@inline
def add_products(
    left: tuple[NDArray[Any], ...], right: tuple[NDArray[Any], ...], upper: NDArray[Any], lower: NDArray[Any]
) -> None:
    """Add four products to each element of two rows of the result."""
    (a, c), (b0, b1, b2, b3) = left, right
    a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
    c0, c1, c2, c3 = c[0], c[1], c[2], c[3]
    for i in range(upper.size):
        x0, x1, x2, x3 = b0[i], b1[i], b2[i], b3[i]
        upper[i] = fma64(a3, x3, fma64(a2, x2, fma64(a1, x1, fma64(a0, x0, upper[i]))))
        lower[i] = fma64(c3, x3, fma64(c2, x2, fma64(c1, x1, fma64(c0, x0, lower[i]))))


@kernel
def sum_products(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """Add a b to out, all float64: the products of each element in the order of a's columns, by fused multiply-adds.

    a's rows are a multiple of two and its columns a multiple of four, because as many of them are processed at a time.
    """
    rows, columns = out.shape
    for left in range(0, columns, NEAR_COLUMNS):
        right = min(left + NEAR_COLUMNS, columns)
        for first in range(0, rows, NEAR_ROWS):
            for k in range(0, a.shape[1], 4):
                b0, b1, b2, b3 = b[k, left:right], b[k + 1, left:right], b[k + 2, left:right], b[k + 3, left:right]
                for row in range(first, min(first + NEAR_ROWS, rows), 2):
                    upper, lower = out[row, left:right], out[row + 1, left:right]
                    add_products((a[row, k : k + 4], a[row + 1, k : k + 4]), (b0, b1, b2, b3), upper, lower)


@inline
def narrowed(value: Any, plan: Any) -> Any:
    """Return a lane in the format of ``plan``; unchanged if that is None."""
    if plan is None:
        return value
    mantissa_bits, min_exponent, limit = plan
    return round_lane(value, mantissa_bits, min_exponent, limit)


@kernel
def fold_rows(x: NDArray[Any], row: NDArray[Any], out: NDArray[Any], of_neighbours: Any, plan: Any) -> None:
    """Sum each row as a tree until one element is left, each sum `narrowed`; ``row`` has the lanes in which it is
    computed.

    The sums are x[i] + x[i + half], or with ``of_neighbours`` x[2i] + x[2i + 1]; an element without a partner waits for
    the next step.
    """
    for r in range(x.shape[0]):
        count = row.size
        for i in range(count):
            row[i] = x[r, i]
        while count > 1:
            half = (count + 1) // 2
            if of_neighbours:
                for i in range(count - half):
                    row[i] = narrowed(row[2 * i] + row[2 * i + 1], plan)
                if count % 2:
                    row[half - 1] = row[count - 1]
            else:
                for i in range(count - half):
                    row[i] = narrowed(row[i] + row[i + half], plan)
            count = half
        out[r] = row[0]
