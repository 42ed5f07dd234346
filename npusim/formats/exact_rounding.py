"""Exact rounding of rationals, and elementary functions to any precision (the slow, reliable path).

``decimal`` gives exp, ln and square root correctly rounded to the working precision; arguments with a rational result
are computed exactly.  All other results are irrational, so that enough digits always decide the side of a rounding
boundary.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from npusim.errors import FormatError

if TYPE_CHECKING:
    from npusim.formats.float_format import FloatFormat

#: Digits of the working precision.  The worst float32 case of these functions is decided by
#: about 60 bits (18 digits); float16 and bfloat16 need fewer.
DIGITS = 60
_CONTEXT = Context(prec=DIGITS, Emin=-(10**9), Emax=10**9)
#: Context for rationals as decimals; it represents all binary floats exactly.
_OF_RATIONALS = Context(prec=400, Emin=-(10**9), Emax=10**9)
_LN_2 = _CONTEXT.ln(Decimal(2))
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def round_fraction(value: Fraction, fmt: FloatFormat) -> int:
    """Return the code (without the sign bit) of ``abs(value)`` rounded to nearest even; beyond ``fmt.max_code``:
    overflow.
    """
    magnitude = abs(value)
    if magnitude == 0:
        return 0
    above, below = magnitude.numerator, magnitude.denominator
    exponent = above.bit_length() - below.bit_length()
    exponent -= above << max(0, -exponent) < below << max(0, exponent)
    exponent = max(exponent, fmt.min_exponent)
    shift = exponent - fmt.mantissa_bits
    unit = below << max(0, shift)
    kept, rest = divmod(above << max(0, -shift), unit)
    kept += 2 * rest > unit or (2 * rest == unit and kept % 2 == 1)
    return ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + kept


def _decimal(value: Fraction) -> Decimal:
    return _OF_RATIONALS.divide(Decimal(value.numerator), Decimal(value.denominator))


def _square_root(value: Fraction) -> Fraction | None:
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    return None


def function_value(name: str, x: Fraction) -> Fraction:
    """Return ``name(x)``: exactly if it is rational, else with a relative error below 10**-58.

    ``name`` is one of exp, exp2, log, log2, log1p, rcp, rsqrt, sqrt, tanh, erf; ``x`` is inside the domain.

    Raises `FormatError` if the function is unknown.
    """
    context = _CONTEXT
    match name:
        case "exp":
            return Fraction(1) if x == 0 else Fraction(context.exp(_decimal(x)))
        case "exp2":
            if x.denominator == 1:
                return Fraction(2) ** x.numerator
            return Fraction(context.exp(context.multiply(_decimal(x), _LN_2)))
        case "log":
            return Fraction(0) if x == 1 else Fraction(context.ln(_decimal(x)))
        case "log2":
            whole = x.numerator.bit_length() - x.denominator.bit_length()
            if x == Fraction(2) ** whole:
                return Fraction(whole)
            return Fraction(context.divide(context.ln(_decimal(x)), _LN_2))
        case "log1p":
            return _log1p(x)
        case "rcp":
            return 1 / x
        case "rsqrt":
            root = _square_root(x)
            if root is not None:
                return 1 / root
            return Fraction(context.divide(Decimal(1), context.sqrt(_decimal(x))))
        case "sqrt":
            root = _square_root(x)
            return Fraction(context.sqrt(_decimal(x))) if root is None else root
        case "tanh":
            return _tanh(x)
        case "erf":
            return _erf(x)
    raise FormatError(f"no exact oracle for function {name!r}")


def _log1p(x: Fraction) -> Fraction:
    """Return log(1 + x) with a relative error below 10**-50; of small arguments by the first terms of its series."""
    if abs(x) < Fraction(1, 10**20):
        return x - x**2 / 2 + x**3 / 3  # the next term is relatively below 10**-60
    context = Context(prec=DIGITS + 60, Emin=-(10**9), Emax=10**9)
    value = 1 + x
    return Fraction(context.ln(context.divide(Decimal(value.numerator), Decimal(value.denominator))))


def _tanh(x: Fraction) -> Fraction:
    """Return tanh with a relative error below 10**-50; small arguments lose digits, so that they are computed with
    more.
    """
    if x == 0:
        return Fraction(0)
    if abs(x) > 200:
        # 1 - tanh(x) < 10**-170: no format distinguishes it from the number just below one.
        return Fraction(1 if x > 0 else -1) * (1 - Fraction(1, 10**150))
    context = Context(prec=DIGITS + 60, Emin=-(10**9), Emax=10**9)
    if abs(x) < Fraction(1, 10**20):
        return x - x**3 / 3  # the next term is relatively below 10**-80
    growth = context.exp(context.multiply(Decimal(2), _decimal(x)))
    return Fraction(context.divide(context.subtract(growth, Decimal(1)), context.add(growth, 1)))


def _erf(x: Fraction) -> Fraction:
    """Return erf with a relative error below 10**-50: 2 / sqrt(pi) e**-xx (x + 2 x**3 / 3 + 4 x**5 / 15 + ...), whose
    terms all have one sign.
    """
    if abs(x) > 20:  # 1 - erf(x) < 10**-170
        return Fraction(1 if x > 0 else -1) * (1 - Fraction(1, 10**150))
    context = Context(prec=DIGITS + 20, Emin=-(10**9), Emax=10**9)
    argument = _decimal(x)
    square = context.multiply(argument, argument)
    total = term = context.plus(argument)
    for n in range(1, 3000):
        term = context.divide(context.multiply(term, 2 * square), Decimal(2 * n + 1))
        total = context.add(total, term)
        if abs(term) <= abs(total) * Decimal(10) ** -DIGITS:
            break
    factor = context.divide(context.multiply(2, context.exp(-square)), context.sqrt(_PI))
    return Fraction(context.multiply(total, factor))
