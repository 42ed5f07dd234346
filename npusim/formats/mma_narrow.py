"""Kernel of truncating fused dot-adds in 32 bits: sums of a block as integers, results in float32's normal range.

The terms of a block are whole numbers of the unit 2**(E - F).  If all terms and C together fit 32 bits and a sign, and
no power of two leaves float32's normal range, float64 is not needed, and twice as many columns are processed at a time.
Other products are computed by `mma_kernels`, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.jit import bits_float32, float32_bits, inline, kernel
from npusim.formats.mma_kernels import ZERO_EXPONENT, power_of_two, replace_specials, row_exponent, special_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The least exponent to which terms may be aligned: neither 2**(F - E) nor a result that is not 0 is subnormal.
LEAST_EXPONENT = -100
#: The largest exponent of a factor in float32: the product of two is below 2**126.
LARGEST_EXPONENT = 62


def is_narrow(block: int, fraction: int) -> bool:
    """Return whether a block's terms, each below 4 units of 2**F, and C together fit 32 bits and a sign."""
    return (4 * block + 2) << fraction <= 1 << 32


@inline
def added_up(products: np.int32, own: np.int32) -> tuple[np.int32, np.uint32]:
    """Return an int32 sum of products plus C: the mask of its sign (-1 or 0), and its magnitude in 32 bits."""
    total = np.int32(products + own)
    sign = np.int32(total ^ ((products ^ total) & (own ^ total)))  # wrong if the sum overflowed
    mask = np.int32(sign >> np.int32(31))
    return mask, np.uint32(np.int32((total ^ mask) - mask))


@inline
def toward_zero(magnitude: np.uint32) -> tuple[np.int32, bool]:
    """Return 32 bits rounded toward zero to a float32's pattern, and whether this changed their value."""
    nearest = np.float32(magnitude)
    back = np.uint32(nearest)
    pattern = np.int32(float32_bits(nearest))
    return (np.int32(pattern - np.int32(1)) if back > magnitude else pattern), back != magnitude


@inline
def scaled_float32(mask: np.int32, magnitude: np.uint32, down: np.float32, keep: np.int32) -> np.float32:
    """Return a sum times a power of two, rounded toward zero to float32 and to the fraction bits of ``keep``."""
    pattern, _ = toward_zero(magnitude)
    size = bits_float32(np.uint32(np.int32(pattern & keep))) * down
    sign = np.uint32(np.int32(mask)) & np.uint32(0x80000000)
    result: np.float32 = bits_float32(np.uint32(float32_bits(size) | sign))
    return result


@inline
def scaled_float16(mask: np.int32, magnitude: np.uint32, down: np.float32) -> np.float32:
    """Return a sum times a power of two, rounded once to the nearest even float16, as float32; a zero is +0.

    The sum is rounded to odd first, which the second rounding respects.
    """
    pattern, is_inexact = toward_zero(magnitude)
    odd = np.int32(pattern | np.int32(1)) if is_inexact else pattern
    size = bits_float32(np.uint32(odd)) * down
    exponent = np.int32(np.int32(float32_bits(size)) >> np.int32(23))
    unit = np.int32(max(exponent, np.int32(127 - 14)) - np.int32(10))
    big = np.float32(1.5) * bits_float32(np.uint32(np.int32((unit + np.int32(23)) << np.int32(23))))
    rounded = (size + big) - big
    rounded = np.float32(np.inf) if rounded > np.float32(65504.0) else rounded
    return (-rounded if mask != np.int32(0) else rounded) + np.float32(0.0)


def scratch(columns: int) -> tuple[Any, ...]:
    """Return the scratch arrays of the kernel for this number of columns."""
    return np.empty(columns, np.int16), *np.empty((2, columns), np.float32)


@functools.cache
def narrow_kernel(block: int, is_half: bool) -> Callable[..., int]:
    """Return the kernel of fused dot-adds of ``block`` products with results in float16 or float32.

    Its arguments are those of `fused_kernel`.

    Lanes are float32.  The kernel returns the least exponent to which terms were aligned; if it is below
    `LEAST_EXPONENT`, the contents of C are wrong.
    """
    part = min(block, 16)

    @kernel
    def narrow(
        left: tuple[NDArray[Any], ...],
        right: tuple[NDArray[Any], ...],
        out: NDArray[Any],
        which: NDArray[Any],
        plan: tuple[int, int, int, int],
        scratch: tuple[NDArray[Any], ...],
    ) -> Any:
        fraction, floor, keep, _ = plan
        columns = out.shape[2]
        largest, special, after = scratch
        bits, kept, lowest = np.int32(fraction), np.int32(keep), np.int32(0)
        limits = (np.int32(floor), np.int32(-14 if is_half else -126))
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
                    has_specials = a_marks[i, k0] or b_marks[0, k0]
                    if has_specials:
                        special_row((a_all, b_all), (i, k0, k0 + block), c[i], special)
                    for j in range(columns):
                        old = c[i, j]
                        exponent = row_exponent(largest[j], old, limits)
                        lowest = min(lowest, exponent)
                        up = power_of_two(np.int32(bits - exponent))
                        total = np.int32(0)
                        for k in range(part):
                            total = np.int32(total + np.int32((a[i, k0 + k] * b[k0 + k, j]) * up))
                        for k in range(part, block):  # a loop of 32 is not written out
                            total = np.int32(total + np.int32((a[i, k0 + k] * b[k0 + k, j]) * up))
                        mask, magnitude = added_up(total, np.int32(old * up))
                        down = power_of_two(np.int32(exponent - bits))
                        if is_half:
                            result = scaled_float16(mask, magnitude, down)
                        else:
                            result = scaled_float32(mask, magnitude, down, kept)
                        after[j] = result if abs(old) < np.float32(np.inf) else old
                    for j in range(columns):
                        c[i, j] = after[j]
                    if has_specials:
                        replace_specials(special, c[i])
        return np.int64(lowest)

    result: Callable[..., int] = narrow
    return result
