"""Fast kernels of the matrix units: whole rows of outputs, no branch in an inner loop.

Operands are decoded (:func:`decode_operand`): exact lane values and int16 exponents.  Once the
largest exponent E of a block is known, ``trunc(s * 2**(F + e - E))`` of a product is the integer
conversion of ``(a * b) * 2**(F - E)``: the product of two operands is exact in the lane type, the
scale is a power of two, and the conversion truncates toward zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.jit import bits_float32, bits_float64, float32_bits, fma32, fma64, inline, kernel
from npusim.formats.reduction_kernels import round_lane

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Exponent of zero operands: the sum of two such exponents, or of one and any other exponent, is below ``NO_PRODUCT``.
ZERO_EXPONENT = -1000
NO_PRODUCT = -500
#: Number of columns that are processed at a time: 16 rows of operands and exponents fit into a 32 KiB L1 cache.
COLUMNS = 256


@kernel
def sequential_float32(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], which: NDArray[Any]) -> None:
    """Overwrite each C with a chain of float32 fused multiply-adds, ascending k; ``which``: indices of its A and B."""
    for n in range(out.shape[0]):
        a, b, c = left[which[0, n]], right[which[1, n]], out[n]
        for i in range(c.shape[0]):
            for k in range(a.shape[1]):
                x = a[i, k]
                for j in range(c.shape[1]):
                    c[i, j] = fma32(x, b[k, j], c[i, j])


@kernel
def sequential_float64(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], which: NDArray[Any]) -> None:
    """Overwrite each C with a chain of float64 fused multiply-adds, ascending k; ``which``: indices of its A and B."""
    for n in range(out.shape[0]):
        a, b, c = left[which[0, n]], right[which[1, n]], out[n]
        for i in range(c.shape[0]):
            for k in range(a.shape[1]):
                x = a[i, k]
                for j in range(c.shape[1]):
                    c[i, j] = fma64(x, b[k, j], c[i, j])


@kernel
def decode_operand(x: NDArray[Any], min_exponent: int, values: NDArray[Any], exponents: NDArray[Any]) -> int:
    """Split flat float32 operands; return how many are NaN or Inf (decoded as zeros)."""
    floor = np.int32(min_exponent)
    special = 0
    for i in range(x.size):
        magnitude = np.int32(np.int32(float32_bits(x[i])) & np.int32(0x7FFFFFFF))
        exponent = np.int32(np.int32(magnitude >> np.int32(23)) - np.int32(127))
        exponent = max(exponent, floor)
        finite = magnitude < np.int32(0x7F800000)
        present = finite and magnitude != np.int32(0)
        special += 0 if finite else 1
        values[i] = x[i] if finite else np.float32(0.0)
        exponents[i] = np.int16(exponent) if present else np.int16(ZERO_EXPONENT)
    return special


@inline
def power_of_two(n: Any) -> Any:
    """Return 2**n as float32 for an int32 n in the normal range."""
    return bits_float32(np.uint32(np.int32(np.int32(n + np.int32(127)) << np.int32(23))))


@inline
def power_of_two_wide(n: Any) -> Any:
    """Return 2**n as float64 for n in the normal range."""
    return bits_float64(np.uint64((np.int64(n) + 1023) << 52))


@inline
def row_exponent(largest: np.int16, c: np.float32, limits: tuple[np.int32, np.int32]) -> np.int32:
    """Return the exponent to which the products of an output and C are aligned; 0 if all products and C are 0.

    ``limits`` = (smallest alignment exponent, smallest exponent of C's format).
    """
    pattern = np.int32(np.int32(float32_bits(c)) & np.int32(0x7FFFFFFF))
    own = max(np.int32(np.int32(pattern >> np.int32(23)) - np.int32(127)), limits[1])
    own = own if pattern != np.int32(0) else np.int32(NO_PRODUCT)
    top = max(np.int32(largest), own)
    return max(top, limits[0]) if top > np.int32(NO_PRODUCT) else np.int32(0)


@inline
def align_row(
    largest: NDArray[Any], c: NDArray[Any], exponents: NDArray[Any], scales: NDArray[Any], limits: Any
) -> None:
    """Convert the largest product exponents of a row to exponents of blocks and scales of products.

    ``limits`` = (F, smallest alignment exponent, smallest exponent of c's format).
    """
    fraction, floor, c_floor = limits
    wide = scales.itemsize == 8
    for j in range(c.size):
        exponent = row_exponent(largest[j], c[j], (floor, c_floor))
        exponents[j] = exponent
        # If the limits apply, the truncation leaves nothing of any product, or there is no product.
        if wide:
            scales[j] = power_of_two_wide(np.int32(fraction - exponent))
        else:
            limited = min(max(np.int32(fraction - exponent), np.int32(-100)), np.int32(100))
            scales[j] = power_of_two(limited)


@inline
def exact_value(sum0: Any, sum1: Any, c: Any, exponent: Any, fraction: Any) -> Any:
    """Return (sum of the truncated terms) * 2**(E - F), exact in float64."""
    up = power_of_two_wide(np.int32(fraction - exponent))
    own = np.float64(np.int64(np.float64(c) * up))
    total = (np.float64(sum0) + np.float64(sum1)) + own
    return total * power_of_two_wide(np.int32(exponent - fraction))


@inline
def finish_float32(sums: NDArray[Any], exponents: NDArray[Any], c: NDArray[Any], fraction: Any, keep: Any) -> None:
    """Round a row toward zero into float32; ``keep`` masks the fraction bits (E8M13)."""
    infinity = np.float32(np.inf)
    for j in range(c.size):
        old = c[j]
        value = exact_value(sums[0, j], sums[1, j], old, exponents[j], fraction)
        nearest = np.float32(value)
        bits = np.int32(float32_bits(nearest))
        away = abs(np.float64(nearest)) > abs(value)
        bits = np.int32(bits - np.int32(1)) if away else bits
        result = bits_float32(np.uint32(np.int32(bits & keep)))
        result = nearest if abs(value) >= 2.0**128 else result
        # Adding 0 turns an underflowed -0 into the +0 of the hardware. If c is Inf or NaN, it is unchanged, because
        # every product here is finite.
        c[j] = result + np.float32(0.0) if abs(old) < infinity else old


@inline
def finish_float16(sums: NDArray[Any], exponents: NDArray[Any], c: NDArray[Any], fraction: Any) -> None:
    """Round a row to nearest even float16 values, directly from the exact sums."""
    infinity = np.float32(np.inf)
    for j in range(c.size):
        old = c[j]
        value = exact_value(sums[0, j], sums[1, j], old, exponents[j], fraction)
        result = np.float32(round_lane(value, 10, -14, 65504.0))
        c[j] = result + np.float32(0.0) if abs(old) < infinity else old


@inline
def special_row(operands: tuple[NDArray[Any], ...], where: Any, c: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the IEEE sum of a row's NaN and Inf terms to ``out``; the sum is 0 if the row has no such terms.

    ``where`` = (row of A, first k, last k + 1); products of finite lanes are finite.
    """
    (a, b), (i, first, last) = operands, where
    for j in range(c.size):
        out[j] = np.float32(0.0) if abs(c[j]) < np.inf else c[j]
    for k in range(first, last):
        x = a[i, k]
        for j in range(c.size):
            term = x * b[k, j]
            out[j] += np.float32(0.0) if abs(term) < np.inf else np.float32(term)


@inline
def replace_specials(special: NDArray[Any], c: NDArray[Any]) -> None:
    """Overwrite c if NaN or Inf terms determine the sum."""
    for j in range(c.size):
        c[j] = special[j] if special[j] != np.float32(0.0) else c[j]


def scratch(columns: int, lane: type[np.floating[Any]]) -> tuple[Any, ...]:
    """Return the scratch arrays of the kernel for this number of columns; ``lane`` is the dtype of its operands."""
    names = np.int16, np.int32, lane
    sums = np.zeros((2, columns), np.int32)
    return *(np.empty(columns, dtype) for dtype in names), sums, np.empty(columns, np.float32)


@functools.cache
def fused_kernel(block: int) -> Callable[..., None]:
    """Return the kernel of fused dot-adds of ``block`` products (4, 8, 16 or 32).

    The kernel takes A (matrices, M, K) and B (matrices, K, N) as (values with 0 for NaN and Inf, exponents, the values
    themselves, whether the block that starts at a k has NaN or Inf: (M, K) and (1, K)), contiguous C (matrices, M, N),
    for each C the indices of its A and B: (2, matrices), and (F, smallest alignment exponent, mask of the result's
    pattern, 1 for float16 results).  The block length is a constant of the compiled code, so that its loops unroll and
    the loops over columns become the innermost, vectorised ones.
    """
    part = min(block, 16)  # 16 truncated products of at most 27 bits fit an int32 sum
    parts = block // part

    @kernel
    def fused(
        left: tuple[NDArray[Any], ...],
        right: tuple[NDArray[Any], ...],
        out: NDArray[Any],
        which: NDArray[Any],
        plan: Any,
        scratch: tuple[NDArray[Any], ...],
    ) -> None:
        fraction, floor, keep, half = plan
        columns = out.shape[2]
        largest, exponents, scales, sums, special = scratch
        bits, mask = np.int32(fraction), np.int32(keep)
        limits = (bits, np.int32(floor), np.int32(-14 if half == 1 else -126))
        for n in range(out.shape[0]):
            p, q, c = which[0, n], which[1, n], out[n]
            a, ea, a_all, a_marks = left[0][p], left[1][p], left[2][p], left[3][p]
            b, eb, b_all, b_marks = right[0][q], right[1][q], right[2][q], right[3][q]
            for k0 in range(0, a.shape[1], block):
                for i in range(c.shape[0]):
                    for j in range(columns):
                        largest[j] = np.int16(2 * ZERO_EXPONENT)
                    for first in range(k0, k0 + block, part):
                        for j in range(columns):
                            top = largest[j]
                            for k in range(part):
                                both = np.int16(ea[i, first + k] + eb[first + k, j])
                                top = both if both > top else top
                            largest[j] = top
                    align_row(largest, c[i], exponents, scales, limits)
                    for at in range(parts):
                        first = k0 + at * part
                        for j in range(columns):
                            scale = scales[j]
                            total = np.int32(0)
                            for k in range(part):
                                term = (a[i, first + k] * b[first + k, j]) * scale
                                total = np.int32(total + np.int32(term))
                            sums[at, j] = total
                    has_specials = a_marks[i, k0] or b_marks[0, k0]
                    if has_specials:
                        special_row((a_all, b_all), (i, k0, k0 + block), c[i], special)
                    if half == 1:
                        finish_float16(sums, exponents, c[i], bits)
                    else:
                        finish_float32(sums, exponents, c[i], bits, mask)
                    if has_specials:
                        replace_specials(special, c[i])

    result: Callable[..., None] = fused
    return result
