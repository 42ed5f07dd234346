"""One output at a time: the numba path that is right for every operand, NaN and Inf included.

The kernel of exact sums hands over what it cannot decide; small problems use it directly.
Operands are float32 values (exact for every input format), accumulators float32 values, B is (K, N).
``plan`` is ``MmaPlan.numbers`` of ``matmul.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npusim.formats.jit import bits_float32, bits_float64, float32_bits, float64_bits, inline, kernel
from npusim.formats.reduction_kernels import round_lane

(
    BLOCK,
    STEP,
    FRACTION,
    A_MIN,
    B_MIN,
    OUT_BITS,
    OUT_MIN,
    OUT_TOP,
    NEAREST,
    KEPT_DROP,
    ZERO_EXPONENT,
    MIN_ALIGNMENT,
    LATE,
    EXACT,
) = range(14)
#: Marks "no exponent": below every real one.
NOTHING = -100000
#: Fixed-point sums: limbs of 32 bits; limb 0 holds float64 exponent fields from 32 * FIRST_LIMB,
#: below that of the smallest float32 product (2**-298) and its low half.
FIRST_LIMB = 21
LIMBS = 24


@inline
def decode(value: Any, min_exponent: Any) -> Any:
    """Return (significand with 23 fraction bits, exponent) of abs(value), finite float32."""
    magnitude = np.int64(float32_bits(value)) & 0x7FFFFFFF
    field: Any = magnitude >> 23
    significand = magnitude & 0x7FFFFF
    if field > 0:
        significand |= 0x800000
    exponent: Any = max(field, 1) - 127
    if exponent < min_exponent:  # a subnormal of the narrow format; the lost bits are zeros
        significand >>= min(min_exponent - exponent, 63)
        exponent = np.int64(min_exponent)
    return significand, exponent


@inline
def special_sum(operands: Any, where: Any, c: Any) -> Any:
    """Return the IEEE sum of c and the products if one of them is NaN or Inf, else 0."""
    (a, b), (i, j, first, last) = operands, where
    total = np.float32(0.0) if np.isfinite(c) else c
    for k in range(first, last):
        x, y = a[i, k], b[k, j]
        if not (np.isfinite(x) and np.isfinite(y)):
            total += x * y
    return total


@inline
def round_integer(total: Any, unit: Any, plan: Any) -> Any:
    """Return ``total * 2**unit`` rounded once to the output format, as float32."""
    if total == 0:
        return np.float32(0.0)
    magnitude = abs(total)
    exponent = np.int64(unit)
    probe = magnitude
    while probe > 1:
        probe >>= 1
        exponent += 1
    exponent = max(exponent, plan[OUT_MIN])
    drop = exponent - plan[OUT_BITS] - unit
    if drop <= 0:
        kept = magnitude << -drop
    else:
        drop = min(drop, 62)
        kept = magnitude >> drop
        if plan[NEAREST] == 1:
            lost = magnitude & ((np.int64(1) << drop) - 1)
            half = np.int64(1) << (drop - 1)
            if lost > half or (lost == half and (kept & 1) == 1):
                kept += 1
    code = ((exponent - plan[OUT_MIN]) << plan[OUT_BITS]) + kept
    result = np.float32(np.inf)
    if code <= plan[OUT_TOP]:
        # As a float32: the same fraction and exponent, or a subnormal that float32 can hold.
        power = bits_float64(np.uint64((exponent - plan[OUT_BITS] + 1023) << 52))
        result = np.float32(np.float64(kept) * power)
    bits = np.int64(float32_bits(result)) >> plan[KEPT_DROP] << plan[KEPT_DROP]
    result = bits_float32(np.uint32(bits))
    # A negative sum that rounds to zero gives +0 (measured on H200).
    return np.float32(-result) if total < 0 and result != 0 else result


@inline
def fused_block(operands: Any, where: Any, c: Any, plan: Any) -> Any:
    """One fused dot-add of finite operands: align, truncate, add, round once."""
    (a, b), (i, j, first, last) = operands, where
    top = np.int64(NOTHING)
    for k in range(first, last):
        sa, ea = decode(a[i, k], plan[A_MIN])
        sb, eb = decode(b[k, j], plan[B_MIN])
        top = max(top, ea + eb if sa != 0 and sb != 0 else np.int64(plan[ZERO_EXPONENT]))
    sc, ec = decode(c, plan[OUT_MIN])
    top = max(top, ec if sc != 0 else np.int64(plan[ZERO_EXPONENT]))
    top = max(top, np.int64(plan[MIN_ALIGNMENT]))
    fraction = plan[FRACTION]
    total = np.int64(0)
    for k in range(first, last):
        sa, ea = decode(a[i, k], plan[A_MIN])
        sb, eb = decode(b[k, j], plan[B_MIN])
        term = (sa * sb) >> min(46 - fraction + top - ea - eb, 63)
        negative = (a[i, k] < 0) != (b[k, j] < 0)
        total += -term if negative else term
    shift = 23 - fraction + top - ec
    term = sc >> min(shift, 63) if shift >= 0 else sc << -shift
    total += -term if c < 0 else term
    return round_integer(total, top - fraction, plan)


@inline
def round_limbs(limbs: Any, first: Any, last: Any) -> Any:
    """Return the sum in ``limbs`` rounded once to nearest even float32, and clear them."""
    leading = np.int64(0)
    for limb in range(first, last + 1):  # carry: each into [0, 2**32), the sign is left over
        whole = limbs[np.uint64(limb)] + leading
        limbs[np.uint64(limb)] = whole & 0xFFFFFFFF
        leading = whole >> 32
    limb = last
    while -1 <= leading <= 0 and limb >= first:  # nothing but the sign so far
        leading = (leading << 32) | limbs[np.uint64(limb)]
        limbs[np.uint64(limb)] = 0
        limb -= 1
    weight = np.int64(32) * (limb + 1 + FIRST_LIMB) - 1046 - 28
    following = np.int64(0)
    if limb >= first:
        following = limbs[np.uint64(limb)]
        limbs[np.uint64(limb)] = 0
    lost = following & 0xF
    while limb > first:
        limb -= 1
        lost |= limbs[np.uint64(limb)]
        limbs[np.uint64(limb)] = 0
    # The last bit says that the sum goes on below it; 53 bits are what float64 takes.
    total = (leading << 28) | (following >> 4) | (1 if lost != 0 else 0)
    if abs(total) >= np.int64(1) << 52:
        total = (total >> 9) | (1 if (total & 0x1FF) != 0 else 0)
        weight += 9
    return np.float32(np.float64(total) * bits_float64(np.uint64((weight + 1023) << 52)))


@inline
def exact_block(operands: Any, where: Any, c: Any, limbs: Any) -> Any:
    """Exact sum of finite c and products, rounded once to nearest even float32.

    The running sum is a fixed-point number that covers every exponent of a product: ``limbs``
    (``LIMBS`` zeros of int64, and zeros again afterwards), 32 bits apart, each with room for
    the carries of 33 terms.
    """
    (a, b), (i, j, first, last) = operands, where
    lowest, highest = np.int64(LIMBS), np.int64(0)
    for k in range(first - 1, last):
        x = np.float64(c) if k < first else np.float64(a[i, k]) * np.float64(b[k, j])
        bits = np.int64(float64_bits(x))
        field: Any = (bits >> 52) & 0x7FF
        if field == 0:  # of float64, so that the product is 0
            continue
        sign: Any = bits >> 63
        limb: Any = (field >> 5) - FIRST_LIMB
        high = ((bits >> 29) & 0x7FFFFF) | 0x800000
        limbs[np.uint64(limb)] += ((high ^ sign) - sign) << (field & 31)
        highest = max(highest, limb)
        low = (bits >> 5) & 0xFFFFFF
        if low != 0:  # more than 24 bits: none of 16-bit operands, whose products have 22
            limb = ((field - 24) >> 5) - FIRST_LIMB
            limbs[np.uint64(limb)] += ((low ^ sign) - sign) << ((field - 24) & 31)
        lowest = min(lowest, limb)
    return round_limbs(limbs, lowest, highest)


@inline
def chain(operands: Any, where: Any, c: Any, plan: Any, limbs: Any) -> Any:
    """Return one output of A·B + C: all blocks along k, c carried from block to block."""
    (i, j), depth = where, operands[0].shape[1]
    block, step = plan[BLOCK], plan[STEP]
    late = plan[LATE] == 1
    outer = c
    for start in range(0, depth, step):
        carried = np.float32(0.0) if late else outer
        for first in range(start, start + step, block):
            terms = (i, j, first, first + block)
            special = special_sum(operands, terms, carried)
            if special != 0:  # NaN or Inf
                carried = special
            elif plan[EXACT] == 1:
                carried = exact_block(operands, terms, carried, limbs)
            else:
                carried = fused_block(operands, terms, carried, plan)
        if late:
            added = np.float32(carried + outer)
            if plan[OUT_BITS] == 10:
                added = np.float32(round_lane(np.float64(added), 10, -14, 65504.0))
            outer = added
        else:
            outer = carried
    return outer


@kernel
def matmul_scalar(operands: Any, index: Any, c: Any, plan: Any, limbs: Any) -> None:
    """Overwrite each c (batch, M, N) with A (M, K) · B (K, N) + C.

    ``operands`` are the stacks of A and B, ``index`` says for each c which of them it uses;
    ``limbs`` are `exact_block`'s.
    """
    (a, b), (left, right) = operands, index
    for n in range(c.shape[0]):
        pair = (a[left[n]], b[right[n]])
        for i in range(c.shape[1]):
            for j in range(c.shape[2]):
                c[n, i, j] = chain(pair, (i, j), c[n, i, j], plan, limbs)
