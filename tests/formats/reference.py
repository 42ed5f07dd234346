"""Scalar twins of casts and elementwise arithmetic: exact rationals, written to be read.

The array functions in ``cast`` and ``elementwise`` must give the same bits; one test body runs
both.  Values travel as bit patterns (Python integers, unused storage bits included).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from npusim.errors import FormatError
from npusim.formats.float_format import get_format

if TYPE_CHECKING:
    from npusim.formats.float_format import FloatFormat


@dataclass(frozen=True)
class Number:
    """A decoded pattern: a sign and a magnitude, or Inf, or NaN.

    ``significand * 2**(exponent - fraction_bits)`` is the magnitude; ``exponent`` is not
    normalised for subnormals (it is the format's smallest).
    """

    is_negative: bool
    is_nan: bool
    is_infinite: bool
    significand: int
    exponent: int
    fraction_bits: int

    @cached_property
    def is_finite(self) -> bool:
        """Neither Inf nor NaN."""
        return not (self.is_nan or self.is_infinite)

    @cached_property
    def signed(self) -> int:
        """The significand with its sign; of -0 none."""
        return -self.significand if self.is_negative else self.significand

    @cached_property
    def lowest(self) -> int:
        """The exponent of the significand's last bit."""
        return self.exponent - self.fraction_bits

    @cached_property
    def value(self) -> Fraction:
        """The exact value of a finite number; -0 is 0."""
        return times_power(self.signed, self.lowest)

    @property
    def as_float(self) -> float:
        """The value if special, else its sign times 1 or 0: enough for IEEE rules of specials."""
        size = float(self.significand > 0)
        size = math.nan if self.is_nan else math.inf if self.is_infinite else size
        return -size if self.is_negative else size


def times_power(number: int, power: int) -> Fraction:
    """Return ``number * 2**power``."""
    return Fraction(number << power) if power >= 0 else Fraction(number, 1 << -power)


def round_fraction(value: Fraction, fmt: FloatFormat, rounding: str = "nearest_even") -> int:
    """Return the code (sign bit apart) of ``abs(value)`` rounded to ``fmt``, unbounded above.

    A code beyond ``fmt.max_code`` means overflow.  The sign of ``value`` matters only for ``floor`` and ``ceil``.
    """
    return round_ratio(value.numerator, value.denominator, fmt, rounding)


def round_ratio(number: int, below: int, fmt: FloatFormat, rounding: str = "nearest_even") -> int:
    """Return the same for ``number / below``, which may have common factors: a `Fraction` looks for them each time."""
    if number == 0:
        return 0
    above = abs(number)
    exponent = above.bit_length() - below.bit_length()
    if above << max(0, -exponent) < below << max(0, exponent):
        exponent -= 1
    exponent = max(exponent, fmt.min_exponent)
    shift = exponent - fmt.mantissa_bits
    unit = below << max(0, shift)
    kept, lost = divmod(above << max(0, -shift), unit)
    if rounding in ("nearest_even", "none", "rint"):
        up = 2 * lost > unit or (2 * lost == unit and kept % 2 == 1)
    elif rounding == "nearest_away":
        up = 2 * lost >= unit
    elif rounding == "toward_zero":
        up = False
    elif rounding == "floor":
        up = lost > 0 and number < 0
    elif rounding == "ceil":
        up = lost > 0 and number > 0
    elif rounding == "odd":
        up = lost > 0 and kept % 2 == 0
    else:
        raise AssertionError(rounding)
    return ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + kept + up


def decode(pattern: int, fmt: FloatFormat) -> Number:
    """Return what a stored pattern of ``fmt`` means; low bits tf32 does not use are dropped."""
    return _decoded(pattern, fmt.name)  # a format's hash takes longer than its name's


@lru_cache(maxsize=1 << 16)
def _decoded(pattern: int, name: str) -> Number:
    fmt = get_format(name)
    code = pattern >> fmt.storage_shift
    is_negative = bool(code >> (fmt.bits - 1))
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    above = magnitude - fmt.max_code
    is_infinite = fmt.has_infinity and above == 1
    # Only the dropped bits of a tf32 operand may tell NaN from Inf.
    if is_infinite and pattern & ((1 << fmt.storage_shift) - 1):
        is_infinite = False
    fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
    field = magnitude >> fmt.mantissa_bits
    return Number(
        is_negative=is_negative,
        is_nan=above > 0 and not is_infinite,
        is_infinite=is_infinite,
        significand=fraction | (int(field > 0) << fmt.mantissa_bits),
        exponent=max(field, 1) - fmt.bias,
        fraction_bits=fmt.mantissa_bits,
    )


def signed_code(code: int, is_negative: bool, fmt: FloatFormat) -> int:
    """Return the stored pattern of a magnitude code and a sign."""
    return (code | (int(is_negative) << (fmt.bits - 1))) << fmt.storage_shift


def encode(value: Fraction, is_negative: bool, fmt: FloatFormat) -> int:
    """Return ``abs(value)`` rounded to nearest even with the given sign, natural overflow."""
    return _stored(round_fraction(value, fmt), is_negative, fmt)


def encode_power(number: int, power: int, fmt: FloatFormat) -> int:
    """Return ``number * 2**power`` rounded to nearest even, natural overflow; 0 is +0."""
    return _stored(round_ratio(number << max(0, power), 1 << max(0, -power), fmt), number < 0, fmt)


def _stored(code: int, is_negative: bool, fmt: FloatFormat) -> int:
    """Return the pattern of a rounded magnitude; beyond the largest it is an Inf, or the canonical NaN."""
    if code <= fmt.max_code:
        return signed_code(code, is_negative, fmt)
    if fmt.has_infinity:
        return signed_code(fmt.max_code + 1, is_negative, fmt)
    return fmt.canonical_nan_bits


def cast_reference(
    number: Number, fmt: FloatFormat, *, rounding: str = "nearest_even", overflow: str = "inf", nan: str = "canonical"
) -> int:
    """Return the stored pattern of ``number`` cast to floating-point ``fmt``.

    The rules are those of :func:`npusim.formats.cast`; ``overflow`` has no default of the
    format here.

    Raises
    ------
    FormatError
        If the policy is unknown.
    """
    keep = nan != "canonical"
    quiet = fmt.canonical_nan_bits >> fmt.storage_shift
    if keep and fmt.nan == "ieee":
        quiet = (fmt.max_code + 1) | (1 << (fmt.mantissa_bits - 1))
    if number.is_nan:
        if overflow == "ascend_saturate":
            return 0
        return signed_code(quiet, number.is_negative and keep, fmt)
    code = fmt.max_code + 1
    inward = False
    if number.is_finite:
        value = number.value
        code = round_fraction(value, fmt, rounding)
        inward = rounding in ("toward_zero", "odd")
        inward |= rounding == ("ceil" if number.is_negative else "floor")
    if code <= fmt.max_code:
        return signed_code(code, number.is_negative, fmt)
    if inward or overflow in ("saturate", "ascend_saturate"):
        return signed_code(fmt.max_code, number.is_negative, fmt)
    if overflow == "inf":
        return signed_code(fmt.max_code + 1, number.is_negative, fmt)
    if overflow == "nan":
        return signed_code(quiet, number.is_negative and keep, fmt)
    raise FormatError(f"unknown overflow policy {overflow!r}")


def fma_reference(
    x: int, y: int, z: int, fmt: FloatFormat, acc: FloatFormat | None = None, other: FloatFormat | None = None
) -> int:
    """Return the pattern of ``x * y + z`` rounded once; ``z`` and the result are in ``acc``, y in ``other``."""
    out = fmt if acc is None else acc
    return fused(decode(x, fmt), decode(y, other or fmt), decode(z, out), out)


def fused(first: Number, second: Number, third: Number, out: FloatFormat) -> int:
    """Return ``first * second + third`` rounded once to ``out``."""
    if not (first.is_finite and second.is_finite and third.is_finite):
        return _special(first.as_float * second.as_float + third.as_float, out)
    negative = first.is_negative != second.is_negative
    product, at = first.signed * second.signed, first.lowest + second.lowest
    low = min(at, third.lowest)
    total = (product << (at - low)) + (third.signed << (third.lowest - low))
    if total == 0:  # IEEE: +0 unless both addends are -0 (or cancel, which gives +0)
        both = product == 0 and negative and third.is_negative
        return signed_code(0, both and third.signed == 0, out)
    return encode_power(total, low, out)


def _special(value: float, fmt: FloatFormat) -> int:
    """Return the pattern of an Inf, or the canonical NaN."""
    if math.isnan(value) or not fmt.has_infinity:
        return fmt.canonical_nan_bits
    return signed_code(fmt.max_code + 1, value < 0, fmt)


def operation_reference(name: str, x: int, y: int, fmt: FloatFormat) -> int:
    """Return the pattern of one operation: add, sub, mul, div, sqrt (``y`` unused), max or min.

    Raises
    ------
    FormatError
        If the operation is unknown.
    """
    first, second = decode(x, fmt), decode(y, fmt)
    one = Number(False, False, False, 1, 0, 0)
    match name:
        case "add":
            return fused(first, one, second, fmt)
        case "sub":
            flipped = y ^ (1 << (fmt.bits - 1 + fmt.storage_shift))
            return fused(first, one, decode(flipped, fmt), fmt)
        case "mul":
            # -0 as addend changes no product, not even a zero.
            return fused(first, second, Number(True, False, False, 0, 0, 0), fmt)
        case "div":
            return _quotient(first, second, fmt)
        case "sqrt":
            return _square_root(first, fmt)
        case "max" | "min":
            return _chosen(x, y, fmt, largest=name == "max")
    raise FormatError(f"no reference for operation {name!r}")


def _quotient(first: Number, second: Number, fmt: FloatFormat) -> int:
    """Return first / second; 0/0 and Inf/Inf are NaN."""
    negative = first.is_negative != second.is_negative
    if first.is_nan or second.is_nan or (first.is_infinite and second.is_infinite):
        return fmt.canonical_nan_bits
    if second.is_infinite:
        return signed_code(0, negative, fmt)
    if first.is_infinite:
        return _special(-math.inf if negative else math.inf, fmt)
    if second.significand == 0:
        special = math.nan if first.significand == 0 else math.inf
        return _special(-special if negative else special, fmt)
    return encode(first.value / second.value, negative, fmt)


def _square_root(number: Number, fmt: FloatFormat) -> int:
    """Return the square root: enough bits of the integer root, and an odd bit for the rest."""
    if number.is_finite and number.significand == 0:
        return signed_code(0, number.is_negative, fmt)
    if number.is_nan or number.is_negative:
        return fmt.canonical_nan_bits
    if number.is_infinite:
        return _special(math.inf, fmt)
    places = 2 * fmt.mantissa_bits + fmt.bias + 64
    scaled = number.value * Fraction(4) ** places
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(root * root) != scaled
    return encode(Fraction(2 * root + int(inexact)) / Fraction(2) ** (places + 1), False, fmt)


def _chosen(x: int, y: int, fmt: FloatFormat, *, largest: bool) -> int:
    """Return the larger or smaller pattern: numbers win over NaN, +0 is above -0."""
    first, second = decode(x, fmt), decode(y, fmt)
    if first.is_nan and second.is_nan:
        return fmt.canonical_nan_bits
    if first.is_nan or second.is_nan:
        return y if first.is_nan else x

    def rank(number: Number) -> tuple[float, Fraction, bool]:
        infinite = number.as_float if number.is_infinite else 0.0
        value = Fraction(0) if number.is_infinite else number.value
        return infinite, value, not number.is_negative

    return x if (rank(first) >= rank(second)) == largest else y
