"""The matrix units in plain integers: slow, exact, and written to be read beside numerics.md §1.

Shares no code with the kernels but the format data, so that agreement says something.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.matmul import checked_operands
from npusim.formats.mma_arithmetic import get_arithmetic
from tests.formats.reference import Number, decode, encode, fma_reference, round_fraction, signed_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.formats.cast import Array
    from npusim.formats.mma_arithmetic import MmaArithmetic

Pair = tuple[Number, Number]


def matmul_reference(a: Any, b: Any, c: Any = None, *, arithmetic: str | MmaArithmetic) -> Array:
    """Return what :func:`npusim.formats.matmul` must return, one output after the other.

    Same arguments, shapes, dtypes and errors; about 10,000 multiply-adds a second.
    """
    chosen = get_arithmetic(arithmetic)
    first, second, third, shape = checked_operands(a, b, c, chosen)
    lead = shape[:-2]
    left = np.broadcast_to(first, (*lead, *first.shape[-2:]))
    right = np.broadcast_to(second, (*lead, *second.shape[-2:]))
    start = np.zeros(shape, chosen.acc.dtype) if third is None else np.broadcast_to(third, shape)
    left_bits = np.ascontiguousarray(left).view(chosen.a.bits_dtype)
    right_bits = np.ascontiguousarray(right).view(chosen.b.bits_dtype)
    out = np.ascontiguousarray(start).copy().view(chosen.acc.bits_dtype)
    for index in np.ndindex(shape):
        batch, row, column = index[:-2], index[-2], index[-1]
        row_bits = [int(item) for item in left_bits[(*batch, row)]]
        column_bits = [int(item) for item in right_bits[(*batch, slice(None), column)]]
        out[index] = _one_output(row_bits, column_bits, int(out[index]), chosen)
    return out.view(chosen.acc.dtype)


def _one_output(row: Sequence[int], column: Sequence[int], c: int, unit: MmaArithmetic) -> int:
    """Chain the instructions along k."""
    if unit.method == "sequential":
        for x, y in zip(row, column, strict=True):
            c = fma_reference(x, y, c, unit.a, unit.acc, unit.b)
        return c
    for start in range(0, len(row), unit.k):
        pairs = [(decode(row[start + k], unit.a), decode(column[start + k], unit.b)) for k in range(unit.k)]
        c = _instruction(pairs, c, unit)
    return c


def _blocks(pairs: list[Pair], unit: MmaArithmetic) -> Iterator[list[Pair]]:
    """Yield the groups of products that are added in one rounding."""
    if unit.index_groups is not None:
        for group in unit.index_groups:
            yield [pairs[k] for k in group]
        return
    for start in range(0, unit.k, unit.block):
        yield pairs[start : start + unit.block]


def _instruction(pairs: list[Pair], c: int, unit: MmaArithmetic) -> int:
    """One instruction: its blocks, then c if the unit adds it last."""
    carried = 0 if unit.c_mode == "late" else c
    for block in _blocks(pairs, unit):
        carried = _block_sum(block, carried, unit)
    if unit.c_mode == "late":
        one = unit.acc.bias << unit.acc.mantissa_bits
        return fma_reference(carried, one, c, unit.acc)
    return carried


def _block_sum(block: list[Pair], c: int, unit: MmaArithmetic) -> int:
    """One fused dot-add: specials by IEEE rules, else an integer sum rounded once."""
    carried = decode(c, unit.acc)
    if not (carried.is_finite and all(x.is_finite and y.is_finite for x, y in block)):
        total = carried.as_float if not carried.is_finite else 0.0
        for x, y in block:
            if not (x.is_finite and y.is_finite):
                total += x.as_float * y.as_float
        if math.isnan(total):
            return unit.acc.canonical_nan_bits
        return signed_code(unit.acc.max_code + 1, total < 0, unit.acc)
    if unit.fraction_bits is None:
        exact = sum((x.value * y.value for x, y in block), carried.value)
        return encode(exact, exact < 0, unit.acc)
    return _truncated_sum(block, carried, unit, unit.fraction_bits)


def _truncated_sum(block: list[Pair], c: Number, unit: MmaArithmetic, fraction: int) -> int:
    """Align to the largest exponent, truncate, add integers, round once."""
    terms = [
        (
            x.is_negative != y.is_negative,
            x.significand * y.significand,
            x.fraction_bits + y.fraction_bits,
            x.exponent + y.exponent,
        )
        for x, y in block
    ]
    terms.append((c.is_negative, c.significand, c.fraction_bits, c.exponent))
    exponents = [term[3] for term in terms if term[1]]
    if not exponents:
        return 0
    floor = unit.min_alignment_exponent
    top = max(exponents if floor is None else [*exponents, floor])
    total = 0
    for negative, significand, fraction_bits, exponent in terms:
        shift = fraction - fraction_bits + exponent - top
        aligned = significand << shift if shift >= 0 else significand >> -shift
        total += -aligned if negative else aligned
    return _rounded(Fraction(total) * Fraction(2) ** (top - fraction), unit)


def _rounded(value: Fraction, unit: MmaArithmetic) -> int:
    """Round a block's sum once; toward zero still overflows to Inf; a zero result is +0."""
    acc = unit.acc
    code = round_fraction(value, acc, unit.rounding)
    code = min(code, acc.max_code + 1)
    if unit.kept_fraction_bits is not None:
        code &= -(1 << (acc.mantissa_bits - unit.kept_fraction_bits))
    return signed_code(code, value < 0 and code != 0, acc)
