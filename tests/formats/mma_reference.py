"""The matrix units in plain integers: slow, exact, and written to be read beside numerics.md §1.

Shares no code with the kernels but the format data, so that agreement says something.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.float_format import get_format
from npusim.formats.matmul import checked_operands
from npusim.formats.mma_arithmetic import get_arithmetic
from tests.formats.reference import Number, decode, encode_power, fma_reference, fused, round_ratio, signed_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.formats.cast import Array
    from npusim.formats.mma_arithmetic import MmaArithmetic

Pair = tuple[Number, Number]


def matmul_reference(
    a: Any, b: Any, c: Any = None, *, arithmetic: str | MmaArithmetic, a_scale: Any = None, b_scale: Any = None
) -> Array:
    """Return what :func:`npusim.formats.matmul` must return, one output after the other.

    Scales are those of two matrices, as codes.  Same arguments, shapes, dtypes and errors; about 10,000 multiply-adds a
    second.
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
    rows = {at: [decode(int(x), chosen.a) for x in left_bits[at]] for at in np.ndindex(left_bits.shape[:-1])}
    columns_bits = right_bits.swapaxes(-1, -2)
    columns = {at: [decode(int(x), chosen.b) for x in columns_bits[at]] for at in np.ndindex(columns_bits.shape[:-1])}
    row_scales = [] if a_scale is None else [[decode_scale(int(s), chosen) for s in line] for line in a_scale]
    column_scales = [] if b_scale is None else [[decode_scale(int(s), chosen) for s in line] for line in b_scale.T]
    finite_rows, finite_columns = ({at: _are_finite(line) for at, line in x.items()} for x in (rows, columns))
    for index in np.ndindex(shape):
        batch, row, column = index[:-2], index[-2], index[-1]
        scales = [
            row_scales[row] if a_scale is not None else None,
            column_scales[column] if b_scale is not None else None,
        ]
        are_finite = finite_rows[*batch, row] and finite_columns[*batch, column]
        out[index] = _one_output(
            rows[*batch, row], columns[*batch, column], int(out[index]), chosen, scales, are_finite=are_finite
        )
    return out.view(chosen.acc.dtype)


def _are_finite(line: list[Number]) -> bool:
    return all(x.is_finite for x in line)


def decode_scale(code: int, unit: MmaArithmetic) -> Number:
    """Return an E8M0 code as 1 times a power of two, an E4M3 one without its sign; neither is normalised."""
    if unit.scale_format == "float8_e8m0fnu":
        return Number(False, code == 255, False, 1, code - 127, 0)
    number = decode(code & 0x7F, get_format(unit.scale_format))
    return number if number.significand or number.is_nan else Number(False, False, False, 0, -126, 0)


def _scaled(x: Number, scale: Number) -> Number:
    """Return x with its exponent moved by a power of two; a scale of NaN gives NaN."""
    if scale.is_nan:
        return Number(False, True, False, 0, 0, 0)
    return replace(x, exponent=x.exponent + scale.exponent)


def _one_output(
    row: list[Number],
    column: list[Number],
    c: int,
    unit: MmaArithmetic,
    scales: list[list[Number] | None],
    *,
    are_finite: bool,
) -> int:
    """Chain the instructions along k; whether all elements of both lines are finite is found once a line."""
    if unit.method == "sequential":
        for x, y in zip(row, column, strict=True):
            c = fused(x, y, decode(c, unit.acc), unit.acc)
        return c
    for start in range(0, len(row), unit.k):
        pairs = list(zip(row[start : start + unit.k], column[start : start + unit.k], strict=True))
        if unit.method == "grouped" or unit.scale_block:
            of = [tuple(_scale(s, start + k, unit) for s in scales) for k in range(unit.k)]
            if unit.method == "grouped":
                c = _grouped(pairs, of, c, unit)
                continue
            pairs = [(_scaled(x, p), _scaled(y, q)) for (x, y), (p, q) in zip(pairs, of, strict=True)]
        c = _instruction(pairs, c, unit, are_finite=are_finite and not unit.scale_block)
    return c


def _scale(scales: list[Number] | None, at: int, unit: MmaArithmetic) -> Number:
    """Return the scale of element ``at`` of a line; 1 where there is none."""
    return scales[at // unit.scale_block] if scales is not None else Number(False, False, False, 1, 0, 0)


def _blocks(pairs: list[Pair], unit: MmaArithmetic) -> Iterator[list[Pair]]:
    """Yield the groups of products that are added in one rounding."""
    if unit.index_groups is not None:
        for group in unit.index_groups:
            yield [pairs[k] for k in group]
        return
    for start in range(0, unit.k, unit.block):
        yield pairs[start : start + unit.block]


def _instruction(pairs: list[Pair], c: int, unit: MmaArithmetic, *, are_finite: bool) -> int:
    """One instruction: its blocks, then c if the unit adds it last."""
    carried = 0 if unit.c_mode == "late" else c
    for block in _blocks(pairs, unit):
        carried = _block_sum(block, carried, unit, are_finite=are_finite)
    if unit.c_mode == "late":
        one = unit.acc.bias << unit.acc.mantissa_bits
        return fma_reference(carried, one, c, unit.acc)
    return carried


def _grouped(pairs: list[Pair], scales: list[tuple[Number, ...]], c: int, unit: MmaArithmetic) -> int:
    """Groups of exact sums times their scales' significands, aligned by the scales' exponents; then as any sum."""
    carried = decode(c, unit.acc)
    if any(s.is_nan for pair in scales for s in pair) or not carried.is_finite:
        is_nan = carried.is_nan or any(s.is_nan for pair in scales for s in pair)
        return unit.acc.canonical_nan_bits if is_nan else c
    terms = []
    for start in range(0, unit.k, unit.group):
        total = sum((x.value * y.value for x, y in pairs[start : start + unit.group]), Fraction(0))
        p, q = scales[start]
        exact = total * p.significand * q.significand / Fraction(2) ** (p.fraction_bits + q.fraction_bits)
        terms.append((exact, p.exponent + q.exponent))
    if carried.significand:
        c_exponent = carried.exponent
        terms.append((carried.value / Fraction(2) ** c_exponent, c_exponent))
    top, fraction = max(exponent for _, exponent in terms), unit.fraction_bits or 0
    aligned = sum(math.trunc(value * Fraction(2) ** (fraction + exponent - top)) for value, exponent in terms)
    return _rounded(aligned, top - fraction, unit)


def _block_sum(block: list[Pair], c: int, unit: MmaArithmetic, *, are_finite: bool) -> int:
    """One fused dot-add: specials by IEEE rules, else an integer sum rounded once."""
    carried = decode(c, unit.acc)
    if not (carried.is_finite and (are_finite or all(x.is_finite and y.is_finite for x, y in block))):
        total = carried.as_float if not carried.is_finite else 0.0
        for x, y in block:
            if not (x.is_finite and y.is_finite):
                total += x.as_float * y.as_float
        if math.isnan(total):
            return unit.acc.canonical_nan_bits
        return signed_code(unit.acc.max_code + 1, total < 0, unit.acc)
    if unit.fraction_bits is None:
        return encode_power(*_exact_sum(block, carried), unit.acc)
    return _truncated_sum(block, carried, unit, unit.fraction_bits)


def _exact_sum(block: list[Pair], c: Number) -> tuple[int, int]:
    """Return products and ``c`` added up in units of the smallest power of two among them, and that power."""
    terms = [(x.signed * y.signed, x.lowest + y.lowest) for x, y in block]
    terms.append((c.signed, c.lowest))
    low = min(power for _, power in terms)
    return sum(number << (power - low) for number, power in terms), low


def _truncated_sum(block: list[Pair], c: Number, unit: MmaArithmetic, fraction: int) -> int:
    """Align to the largest exponent, truncate, add integers, round once."""
    terms = [(x.signed * y.signed, x.fraction_bits + y.fraction_bits, x.exponent + y.exponent) for x, y in block]
    terms.append((c.signed, c.fraction_bits, c.exponent))
    exponents = [exponent for number, _, exponent in terms if number]
    if not exponents:
        return 0
    floor = unit.min_alignment_exponent
    top = max(exponents if floor is None else [*exponents, floor])
    total = 0
    for number, fraction_bits, exponent in terms:
        shift = fraction - fraction_bits + exponent - top
        aligned = abs(number) << shift if shift >= 0 else abs(number) >> -shift
        total += -aligned if number < 0 else aligned
    return _rounded(total, top - fraction, unit)


def _rounded(number: int, power: int, unit: MmaArithmetic) -> int:
    """Round a block's sum, ``number * 2**power``, once; toward zero still overflows to Inf; a zero result is +0."""
    acc = unit.acc
    code = round_ratio(number << max(0, power), 1 << max(0, -power), acc, unit.rounding)
    code = min(code, acc.max_code + 1)
    if unit.kept_fraction_bits is not None:
        code &= -(1 << (acc.mantissa_bits - unit.kept_fraction_bits))
    return signed_code(code, number < 0 and code != 0, acc)
