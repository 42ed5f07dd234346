"""Kernels for :func:`npusim.formats.cast`: they round bit patterns once, with integer operations only.

Both kernels take the target as one tuple, see ``CastPlan.numbers`` in ``cast.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.jit import bits_float32, float32_bits, inline, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, FLOOR, CEIL, ODD = range(6)
ADD, SUBTRACT, MULTIPLY, DIVIDE = range(4)


@inline
def narrowed_float32(pattern: Any, plan: Any) -> Any:
    """Return a float32 pattern (int32) rounded to nearest even; branch-free, so that loops over it vectorise.

    All normal results drop the same number of bits.  A subnormal result is rounded by adding a number whose last bit
    has the value of a subnormal's last bit.  If float32 has no lower exponent than the target, its subnormals need no
    separate case.
    """
    width = np.int32(plan[0])
    least = np.int32(plan[1] + 127)
    top = np.int32(plan[2])
    over = np.int32(plan[3])
    nan = np.int32(plan[4])
    sign_shift = np.int32(plan[5])
    over_sign = np.int32(plan[6])
    nan_sign = np.int32(plan[7])
    pad = np.int32(plan[8])
    base = np.int32(np.int32(23) - width)
    normal = np.int32(least << np.int32(23)) if least > np.int32(1) else np.int32(0)
    ruler = np.int32(np.int32(least + base) << np.int32(23))
    magnitude = np.int32(pattern & np.int32(0x7FFFFFFF))
    sign = np.int32(np.int32(pattern >> np.int32(31)) & np.int32(1))
    last = np.int32(np.int32(magnitude >> base) & np.int32(1))
    below_half = np.int32(np.int32(np.int32(1) << np.int32(base - np.int32(1))) - np.int32(1))
    rounded = np.int32(np.int32(magnitude + np.int32(below_half + last)) >> base)
    code = np.int32(rounded - np.int32(np.int32(least - np.int32(1)) << width))
    total = np.float32(bits_float32(np.uint32(magnitude)) + bits_float32(np.uint32(ruler)))
    code = np.int32(np.int32(float32_bits(total)) - ruler) if magnitude < normal else code
    sign = np.int32(sign & over_sign) if code > top else sign
    code = over if code > top else code
    is_nan = magnitude > np.int32(0x7F800000)
    code = nan if is_nan else code
    sign = np.int32(sign & nan_sign) if is_nan else sign
    return np.int32(np.int32(code | np.int32(sign << sign_shift)) << pad)


@kernel
def narrow_float32_nearest(source: NDArray[Any], out: NDArray[Any], plan: Any) -> None:
    """Round float32 patterns (int32) to nearest even."""
    for i in range(source.size):
        out[i] = narrowed_float32(np.int32(source[i]), plan)


@kernel
def narrow_float64(source: NDArray[Any], out: NDArray[Any], plan: Any, rounding: int) -> None:
    """Round float64 patterns (int64) in any mode; the only rounding between source and target."""
    width, floor_exponent = plan[0], plan[1] + 1023
    top, over, nan, sign_shift, over_sign, nan_sign, pad = plan[2:]
    base = 52 - width
    for i in range(source.size):
        magnitude = source[i] & 0x7FFFFFFFFFFFFFFF
        sign = (source[i] >> 63) & 1
        field = magnitude >> 52
        hidden = 1 << 52 if field > 0 else 0
        exponent = max(field, 1)
        significand = (magnitude & 0xFFFFFFFFFFFFF) | hidden
        # 54 places drop a 53-bit significand completely, and a shift by 54 is still defined.
        shift = min(base + max(floor_exponent - exponent, 0), 54)
        kept = significand >> shift
        lost = significand & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        if rounding == NEAREST_EVEN:
            up = lost > half or (lost == half and (kept & 1) == 1)
        elif rounding == NEAREST_AWAY:
            up = lost >= half
        elif rounding == FLOOR:
            up = sign == 1 and lost > 0
        elif rounding == CEIL:
            up = sign == 0 and lost > 0
        else:
            up = rounding == ODD and lost > 0 and (kept & 1) == 0
        code = (max(exponent - floor_exponent, 0) << width) + kept + (1 if up else 0)
        if magnitude > 0x7FF0000000000000:
            code = nan
            sign &= nan_sign
        elif magnitude == 0x7FF0000000000000:
            code = over
            sign &= over_sign
        elif code > top:
            inward = rounding in (TOWARD_ZERO, ODD) or rounding == (CEIL if sign else FLOOR)
            code = top if inward else over
            sign = sign if inward else sign & over_sign
        out[i] = (code | (sign << sign_shift)) << pad


@inline
def widened_float16(pattern: Any) -> Any:
    """Return the float32 pattern (int32) of a float16 pattern (int32); exact."""
    magnitude = np.int32(pattern & np.int32(0x7FFF))
    sign = np.int32(pattern & np.int32(-0x80000000))
    moved = np.int32(np.int32(magnitude << np.int32(13)) + np.int32((127 - 15) << 23))
    special = np.int32(np.int32(magnitude << np.int32(13)) | np.int32(0x7F800000))
    tiny = np.int32(float32_bits(np.float32(np.float32(magnitude) * np.float32(2.0**-24))))
    value = special if magnitude >= np.int32(0x7C00) else moved
    value = tiny if magnitude < np.int32(0x400) else value
    return np.int32(value | sign)


@kernel
def widen_float16(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Write the float32 pattern (int32) of every float16 pattern (int16); exact."""
    for i in range(source.size):
        out[i] = widened_float16(np.int32(source[i]))


@inline
def widen_row(row: NDArray[Any], out: NDArray[Any]) -> None:
    """Write float32 values of float16 patterns (int16); the same kernel is used for all sizes."""
    if row.size == 1:
        value = bits_float32(np.uint32(widened_float16(np.int32(row[0]))))
        for i in range(out.size):
            out[i] = value
    else:
        for i in range(out.size):
            out[i] = bits_float32(np.uint32(widened_float16(np.int32(row[i]))))


@kernel
def combine_float16(
    x: NDArray[Any], y: NDArray[Any], out: NDArray[Any], scratch: NDArray[Any], plan: Any, operation: int
) -> None:
    """Add, subtract, multiply or divide rows of float16 patterns (int16), each result rounded once.

    An operand of one row is used for all rows, and an operand of one column for all columns; ``scratch`` has two rows
    of float32.
    """
    left, right = scratch[0], scratch[1]
    for i in range(out.shape[0]):
        widen_row(x[min(i, x.shape[0] - 1)], left)
        widen_row(y[min(i, y.shape[0] - 1)], right)
        if operation == ADD:
            for j in range(left.size):
                left[j] += right[j]
        elif operation == SUBTRACT:
            for j in range(left.size):
                left[j] -= right[j]
        elif operation == MULTIPLY:
            for j in range(left.size):
                left[j] *= right[j]
        else:
            for j in range(left.size):
                left[j] /= right[j]
        for j in range(left.size):
            out[i, j] = narrowed_float32(np.int32(float32_bits(left[j])), plan)
