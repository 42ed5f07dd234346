"""Fast kernel of matrix units that add a block exactly and round once (Ascend Cube).

Works in float64 lanes.  A block's sum is certainly right if every term is a multiple of one power of two and the terms
span at most 51 bits (then no addition rounds), or if the error bound cannot move it across a float32 rounding boundary.
Other rows are summed again together with the rounding error of every addition, and the errors of those sums; outputs
that are still undecided (outliers that cancel at three scales, with a ratio of 2**53 between them) are added in as many
parts as necessary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.jit import bits_float64, float64_bits, fma64, inline, kernel
from npusim.formats.reduction_kernels import round_sum, two_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Relative error bound of adding 33 terms in float64, in units of the sum of their magnitudes: 33 * 2**-53 with a
#: margin of almost a factor of 4.
ERROR_BOUND = 2.0**-46
#: Below this share of doubtful outputs, single outputs are cheaper to compute than rows.
FEW = 16
#: Number of parts of an exact sum: all of float64's exponents, in parts 53 bits apart.
PARTS = 40


@inline
def lowest_bit(x: Any) -> Any:
    """Return the value of the lowest set bit of a normal float64; for Inf and NaN the result has no meaning."""
    bits = np.int64(float64_bits(x))
    significand = (bits & 0xFFFFFFFFFFFFF) | 0x10000000000000
    field = (bits >> 52) & 0x7FF
    unit: Any = max(field - 52, 1)
    return np.float64(significand & -significand) * bits_float64(np.uint64(unit << 52))


@inline
def is_multiple(x: Any, unit: Any) -> Any:
    """Whether a float32 value is a multiple of a power of two."""
    big = unit * (1.5 * 2.0**52)
    return (abs(x) + big) - big == abs(x)


@kernel
def block_ranges(x: NDArray[Any], block: int, largest: NDArray[Any], unit: NDArray[Any]) -> None:
    """Compute the largest magnitude, and the largest common power of two, of each column's blocks of ``x`` (matrices,
    K, N).

    NaN counts as Inf; a block of zeros has unit 1.
    """
    for n in range(x.shape[0]):
        for kb in range(x.shape[1] // block):
            for j in range(x.shape[2]):
                largest[n, kb, j] = 0.0
                unit[n, kb, j] = np.inf
            for k in range(kb * block, (kb + 1) * block):
                for j in range(x.shape[2]):
                    value = x[n, k, j]
                    size = np.inf if np.isnan(value) else abs(value)
                    largest[n, kb, j] = max(largest[n, kb, j], size)
                    unit[n, kb, j] = min(unit[n, kb, j], lowest_bit(value) if value != 0.0 else np.inf)
            for j in range(x.shape[2]):
                unit[n, kb, j] = unit[n, kb, j] if largest[n, kb, j] > 0.0 else 1.0


@inline
def sum_again(row: Any, b: Any, old: NDArray[Any], out: Any, block: int) -> Any:
    """Sum the doubtful outputs of a row in three parts; return how many stay doubtful.

    ``row`` = (its block of A, unit of A), ``b`` = (the block of B, units of B), ``out`` = (sums, which of them are
    doubtful, the parts of each); ``old`` are the earlier values of c.
    """
    (a, a_unit), (columns, b_units), (c, doubtful, sums) = row, b, out
    totals, errors, lost, rest, sizes = sums
    for j in range(c.size):
        totals[j], lost[j], rest[j], sizes[j] = np.float64(old[j]), 0.0, 0.0, 0.0
    for k in range(block):  # loops over columns, on few arrays: the compiler processes several columns at a time
        x = a[k]
        for j in range(c.size):
            totals[j], errors[j] = two_sum(totals[j], x * columns[k, j])
        for j in range(c.size):
            lost[j], error = two_sum(lost[j], errors[j])
            rest[j] += error
            sizes[j] += abs(error)
    count = 0
    for j in range(c.size):
        unit = a_unit * b_units[j]
        narrow = sizes[j] <= unit * 2.0**51 and is_multiple(np.float64(old[j]), unit)
        error = 0.0 if narrow else sizes[j] * ERROR_BOUND
        low = round_sum(totals[j], lost[j], rest[j] - error)
        high = round_sum(totals[j], lost[j], rest[j] + error)
        settled = low == high and (low != np.float32(0.0) or error == 0.0)
        c[j] = high if doubtful[j] else c[j]
        doubtful[j] = doubtful[j] and not settled
        count += 1 if doubtful[j] else 0
    return count


@inline
def exact_block(operands: Any, where: Any, c: Any, parts: Any) -> Any:
    """Return the exact sum of finite c and products, rounded once to the nearest even float32.

    The running sum is stored in ``parts``, whose bits do not overlap, with the largest part last (Shewchuk 1997,
    grow-expansion, as in ``math.fsum``).  There are at most `PARTS` parts, because each is at least 53 bits above the
    previous one.
    """
    (a, b), (i, j, first, last) = operands, where
    count = 0
    for k in range(first - 1, last):
        x = np.float64(c) if k < first else np.float64(a[i, k]) * np.float64(b[k, j])
        kept = 0
        for n in range(count):
            x, lost = two_sum(x, parts[n])
            if lost != 0.0:
                parts[kept] = lost
                kept += 1
        parts[kept] = x
        count = kept + 1
    high, low = 0.0, 0.0
    while count > 0 and low == 0.0:  # terms below the first two cannot change the sign of the second
        count -= 1
        high, low = two_sum(high, parts[count])
    return round_sum(high, low, 0.0)


def scratch(columns: int) -> tuple[Any, ...]:
    """Return the scratch arrays of the kernel for this number of columns."""
    of_columns = np.empty(columns, np.float32), np.empty(columns), np.empty(columns, np.bool_)
    return *of_columns, tuple(np.empty((5, columns))), np.empty(PARTS)


@functools.cache
def exact_kernel(block: int) -> Callable[..., None]:
    """Return the kernel of exact sums of ``block`` products; see the module's first lines.

    Its arguments are A and B with the ranges of their blocks, each (matrices, ...); a contiguous C (matrices, M, N);
    and ``which`` (2, matrices), which has the indices of the A and the B of each C.
    """

    @kernel
    def exact(
        operands: tuple[NDArray[Any], ...],
        a_ranges: tuple[NDArray[Any], ...],
        b_ranges: tuple[NDArray[Any], ...],
        out: NDArray[Any],
        which: NDArray[Any],
        scratch: tuple[NDArray[Any], ...],
    ) -> None:
        before, totals, doubtful, sums, parts = scratch
        columns = out.shape[2]
        for n in range(out.shape[0]):
            p, q, c = which[0, n], which[1, n], out[n]
            a, b, a_range, a_unit = operands[0][p], operands[1][q], a_ranges[0][p], a_ranges[1][p]
            b_range, b_unit = b_ranges[0][q], b_ranges[1][q]
            for kb in range(a.shape[1] // block):
                k0 = kb * block
                right = (b[k0 : k0 + block], b_unit[kb])
                widest, least = 0.0, np.inf  # over all columns: a row whose terms span few bits needs no further check
                for j in range(columns):
                    widest, least = max(widest, b_range[kb, j]), min(least, b_unit[kb, j])
                for i in range(c.shape[0]):
                    reach, step = block * a_range[kb, i], a_unit[kb, i]
                    limit = step * least * 2.0**51
                    room, count = limit - reach * widest, 0
                    for j in range(columns):
                        old = np.float64(c[i, j])
                        total, size = old, abs(old)
                        for k in range(block):
                            total = fma64(a[i, k0 + k], b[k0 + k, j], total)
                        before[j], totals[j] = c[i, j], total
                        count += 0 if size <= room and (size + 3.0 * limit) - 3.0 * limit == size else 1
                        c[i, j] = np.float32(total + 0.0)  # never -0
                    if count > 0:
                        count = 0
                        for j in range(columns):
                            old, unit = np.float64(before[j]), step * b_unit[kb, j]
                            bound = abs(old) + reach * b_range[kb, j]
                            narrow = bound <= unit * 2.0**51 and is_multiple(old, unit)
                            error = bound * ERROR_BOUND
                            low, high = np.float32(totals[j] - error), np.float32(totals[j] + error)
                            # The bound is NaN if the sum is NaN or Inf; such a sum is right in any order.
                            doubt = low < high or (low == np.float32(0.0) and error != 0.0)
                            doubtful[j] = doubt and not narrow
                            count += 1 if doubt and not narrow else 0
                    if count > columns // FEW:
                        left = (a[i, k0 : k0 + block], step)
                        count = sum_again(left, right, before, (c[i], doubtful, sums), block)
                    if count > 0:
                        for j in range(columns):
                            if doubtful[j]:
                                where = (i, j, k0, k0 + block)
                                c[i, j] = exact_block((a, b), where, before[j], parts)

    result: Callable[..., None] = exact
    return result
