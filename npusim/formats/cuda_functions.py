"""Functions and divisions of float32 as CUDA's instructions and its library, libdevice, compute them.

The special function unit of an H200 was measured on every input (`reports/silicon/special_functions.py`): its results
differ by at most 2 ulp from the correctly rounded ones, and the differences repeat from binade to binade.  ptxas
assembles ``div.full`` and ``ex2`` from these instructions; libdevice computes logarithms, the hyperbolic tangent, erf
and expf with them and with fused multiply-adds.  NaN, zeros and subnormals are handled as on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import elementwise
from npusim.formats.cast import with_canonical_nan
from npusim.formats.float_format import get_format

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from npusim.formats.cast import Array

#: Significant bits of float32 after the first, the numbers of a binade, and the largest exponent of a number below Inf.
BITS, BINADE, TOP = 23, 1 << 23, 128
TINY, LOWEST_EXPONENT, BIAS = np.finfo(np.float32).tiny, -126, 127
INFINITY = 0x7F800000


def _bits(pattern: int) -> np.float32:
    """Return the float32 of a pattern."""
    number: np.float32 = np.uint32(pattern).view(np.float32)
    return number


#: log2(e), 2**23 and 2**-23; numbers of libdevice as their patterns in the PTX that Triton 3.6 compiles.
LOG2_E, TO_NORMAL, OF_EXPONENT = _bits(0x3FB8AA3B), _bits(0x4B000000), _bits(0x34000000)
#: Constants of logarithms: the offset that is subtracted from a number's pattern to get its exponent, and the
#: coefficients of the polynomial.
NATURAL, NATURAL_POLYNOMIAL = (
    0x3F2AAAAB,
    tuple(
        map(
            _bits,
            (
                *(0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9),
                *(0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78, 0xBF000000),
            ),
        )
    ),
)
BINARY, BINARY_POLYNOMIAL = (
    0x3F3504F3,
    tuple(
        map(
            _bits,
            (
                *(0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4),
                *(0xBE763C8B, 0x3E93BF99, 0xBEB8AA49, 0x3EF6384A, 0xBF38AA3B),
            ),
        )
    ),
)
LN2 = _bits(0x3F317218)
#: log1pf: the bit pattern from which the exponent of 1 + x is counted, and the bit pattern of 4; the coefficients of
#: the polynomial in the remaining factor.
LOG1P_FROM, LOG1P_FOUR = np.uint32(0x3F400000), np.uint32(0x40800000)
LOG1P_POLYNOMIAL = tuple(
    map(
        _bits,
        (
            *(0xBD39BF78, 0x3DD80012, 0xBE0778E0, 0x3E146475, 0xBE2A68DD),
            *(0x3E4CAF9E, 0xBE800042, 0x3EAAAAE6, 0xBF000000),
        ),
    )
)
#: tanhf is a polynomial below ``TANH_SMALL``, 1 from ``TANH_ONE`` on, and 1 - 2 / (2**(x ``TANH_SCALE``) + 1) between
#: them.
TANH_SMALL, TANH_ONE, TANH_SCALE = _bits(0x3F19999A), _bits(0x41102CB4), _bits(0x4038AA3B)
TANH_POLYNOMIAL = tuple(map(_bits, (0x3C80F082, 0xBD563CAE, 0x3E085941, 0xBEAAA9ED, 0x00000000)))
#: expf: x log2(e) / 252 + 1/2, clamped to [0, 1], times 252, rounded down, is the power of two; log2(e) has two parts.
EXP_SHARE, EXP_STEPS, EXP_SHIFT, EXP_BACK = map(_bits, (0x3BBB989D, 0x437C0000, 0x4B400001, 0xCB40007F))
LOG2_E_LOW = _bits(0x32A57060)
#: erff: the smallest argument whose result is 1 - 2**p; the coefficients of p, and of the polynomial in x**2 for
#: smaller arguments, both from the highest power.
ERF_LARGE = _bits(0x3F8060FE)
ERF: Array = np.array(
    [
        (0x3789CA3C, 0xB9F560B9, 0x3BAC840B, 0xBD0C8162, 0x3E1CF906, 0x3F6A937E, 0x3F20D842),
        (0x38B1E96A, 0xBA574D20, 0x3BAAD5EA, 0xBCDC1BE7, 0x3DE718AF, 0xBEC093AC, 0x3E0375D3),
    ],
    np.uint32,
).view(np.float32)


@functools.cache
def difference(key: str) -> Array:
    """Return a packaged table of the differences between measured and correctly rounded patterns (read-only)."""
    from importlib.resources import files

    path = files("npusim.formats").joinpath("hopper_unary.npz")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        table: Array = archive[key]
    table.setflags(write=False)
    return table


def flushed(x: Array) -> Array:
    """Return float32 with signed zeros for subnormals, as ``.ftz`` reads and writes them."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def _fma(x: Array, y: ArrayLike, z: ArrayLike) -> Array:
    a, b, c = (flushed(np.broadcast_to(np.asarray(v, np.float32), x.shape)) for v in (x, y, z))
    return flushed(elementwise.fma(a, b, c, "float32"))


def _polynomial(x: Array, coefficients: Iterable[Any]) -> Array:
    first, *others = coefficients
    start: Array = np.broadcast_to(first, x.shape)
    return functools.reduce(lambda total, c: _fma(total, x, c), others, start)


def ex2(x: Array) -> Array:
    """Return ``ex2.approx.ftz.f32``: the argument is cut to 23 bits after the point; if it is negative and has a
    fraction, the result of the cut is one step lower.

    Flat float32; subnormal results are 0.
    """
    from npusim.formats import elementwise_kernels

    wide = np.abs(x.astype(np.float64))
    whole = np.where(wide < TOP, np.floor(wide * BINADE), TOP * BINADE).astype(np.int64)
    steps = np.where(np.signbit(x), -whole - (whole & BINADE - 1 != 0), whole)
    part, power = steps & BINADE - 1, steps >> BITS
    near = np.empty(x.size, np.float32)
    elementwise_kernels.exp_float32((part / BINADE).astype(np.float32), near, np.empty(x.size, np.bool_), True)
    fraction = near.view(np.int32) + difference("ex2_float32")[part]
    pattern = np.where(power < LOWEST_EXPONENT, 0, np.where(power < TOP, fraction + (power << BITS), INFINITY))
    return np.where(np.isnan(x), np.float32(np.nan), pattern.astype(np.int32).view(np.float32))


def ex2_subnormal(x: Array) -> Array:
    """Return ``ex2.approx.f32``: if the result would be subnormal, the square of the result for half the argument."""
    is_low = x < LOWEST_EXPONENT
    power = ex2(np.where(is_low, x * np.float32(0.5), x))
    return np.where(is_low, power * power, power)


def rcp(x: Array) -> Array:
    """Return ``rcp.approx.ftz.f32`` of flat float32."""
    x = flushed(x)
    correct = np.float32(1) / x
    near = correct.view(np.int32) + difference("rcp_float32")[x.view(np.int32) & BINADE - 1]
    inside = (x != 0) & np.isfinite(x)
    return flushed(np.where(inside, near.view(np.float32), correct))


def _of_binades(name: str, x: Array, correct: Array) -> Array:
    """Return a root of flat float32, with 0 for subnormals; its table has the two binades from 1 on."""
    place = x.view(np.int32) - (BIAS << BITS) & 2 * BINADE - 1
    near = (correct.view(np.int32) + difference(f"{name}_float32")[place]).view(np.float32)
    return np.where((x > 0) & np.isfinite(x), near, correct)


def rsqrt(x: Array) -> Array:
    """Return ``rsqrt.approx.ftz.f32`` of flat float32."""
    x = flushed(x)
    return _of_binades("rsqrt", x, (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32))


def sqrt(x: Array) -> Array:
    """Return ``sqrt.approx.ftz.f32`` of flat float32."""
    x = flushed(x)
    return _of_binades("sqrt", x, np.sqrt(x))


def div_full(x: ArrayLike, y: ArrayLike) -> Array:
    """Return ``div.full.f32``: x times ``rcp`` of y; both are scaled if 1/y would not be normal.

    ``x`` and ``y`` broadcast and are float32 (or Python numbers, converted first).  At most 2 ulp from the correctly
    rounded quotient; NaN is canonical.

    Raises `FormatError` for an operand of another dtype.

    Examples
    --------
    >>> div_full(np.float32([1, 2]), 3.0).tolist()
    [0.3333333432674408, 0.6666666865348816]
    """
    fmt = get_format("float32")
    first, second = np.broadcast_arrays(*elementwise.check_operands((x, y), fmt))
    with np.errstate(all="ignore"):
        quotient = _divided(first.reshape(-1), second.reshape(-1))
    return with_canonical_nan(quotient, fmt).reshape(first.shape)


def _divided(x: Array, y: Array) -> Array:
    magnitude = np.abs(y)
    small = np.where(magnitude < TINY, np.float32(2.0**24), np.float32(1))
    scale = np.where(magnitude > np.float32(2.0**126), np.float32(0.25), small)
    quotient: Array = rcp(y * scale) * (x * scale)
    return quotient


def _logarithm(x: Array, from_where: int, of_parts: Callable[[Array, Array], Array]) -> Array:
    is_subnormal = x < TINY
    x = np.where(is_subnormal, x * TO_NORMAL, x)
    pattern = x.view(np.uint32)
    exponent = pattern - np.uint32(from_where) & np.uint32(0xFF800000)
    less = np.where(is_subnormal, np.float32(-BITS), np.float32(0))
    power = _fma(exponent.view(np.int32).astype(np.float32), OF_EXPONENT, less)
    result = of_parts(power, (pattern - exponent).view(np.float32) - np.float32(1))
    result = np.where(pattern < INFINITY, result, _fma(x, np.float32(np.inf), np.float32(np.inf)))
    return np.where(x == 0, np.float32(-np.inf), result)


def log(x: Array) -> Array:
    """Return libdevice's ``__nv_logf`` of flat float32."""

    def of_parts(power: Array, rest: Array) -> Array:
        return _fma(power, LN2, _fma(rest * _polynomial(rest, NATURAL_POLYNOMIAL), rest, rest))

    return _logarithm(x, NATURAL, of_parts)


def log2(x: Array) -> Array:
    """Return libdevice's ``__nv_log2f`` of flat float32."""

    def of_parts(power: Array, rest: Array) -> Array:
        return power + _fma(rest, LOG2_E, rest * (rest * _polynomial(rest, BINARY_POLYNOMIAL)))

    return _logarithm(x, BINARY, of_parts)


def log1p(x: Array) -> Array:
    """Return libdevice's ``__nv_log1pf`` of flat float32."""
    scale = _to_zero(flushed(x)).view(np.uint32) - LOG1P_FROM & np.uint32(0xFF800000)
    rest = _fma((LOG1P_FOUR - scale).view(np.float32), np.float32(0.25), np.float32(-1))
    rest = rest + (x.view(np.uint32) - scale).view(np.float32)
    power = scale.view(np.int32).astype(np.float32) * OF_EXPONENT
    result = _fma(power, LN2, _fma(rest * _polynomial(rest, LOG1P_POLYNOMIAL), rest, rest))
    beyond = np.where(x == 0, x, _fma(x, np.float32(np.inf), np.float32(np.inf)))
    is_inside = np.isfinite(x) & (x >= -1) & ((x != 0) | ~np.signbit(x))
    return np.where(is_inside, result, beyond)


def _to_zero(x: Array) -> Array:
    """Return x + 1, rounded toward 0."""
    whole = x.astype(np.float64) + 1.0  # of float64 the next number below in size, where the sum was rounded up
    result = whole.astype(np.float32)
    above = np.abs(result.astype(np.float64)) > np.abs(whole)
    return flushed(np.where(above, np.nextafter(result, np.float32(0)), result))


def tanh(x: Array) -> Array:
    """Return libdevice's ``__nv_tanhf`` of flat float32."""
    magnitude = flushed(np.abs(x))
    below = rcp(ex2(magnitude * TANH_SCALE) + np.float32(1))
    large = np.where(magnitude >= TANH_ONE, np.float32(1), _fma(below, np.float32(-2), np.float32(1)))
    small = _fma(_polynomial(x * x, TANH_POLYNOMIAL), x, x)
    result = np.where(magnitude < TANH_SMALL, small, np.copysign(large, x))
    return np.where(np.isnan(x), np.float32(np.nan), result)


def exp(x: Array) -> Array:
    """Return libdevice's ``__nv_expf`` of flat float32."""
    share = _fma(x, EXP_SHARE, np.float32(0.5))
    held = np.where(np.isnan(share), np.float32(0), np.clip(share, np.float32(0), np.float32(1))).astype(np.float64)
    below = np.floor(held * np.float64(EXP_STEPS) + np.float64(EXP_SHIFT)).astype(np.float32)  # an fma.rm of integers
    rest = _fma(x, LOG2_E_LOW, _fma(x, LOG2_E, -(below + EXP_BACK)))
    return ex2(rest) * (below.view(np.uint32) << np.uint32(BITS)).view(np.float32)


def erf(x: Array) -> Array:
    """Return libdevice's ``__nv_erff`` of flat float32."""
    magnitude = flushed(np.abs(x))
    is_large = magnitude >= ERF_LARGE
    argument, times = np.where(is_large, magnitude, x * x), np.where(is_large, -magnitude, x)
    power = _polynomial(argument, (np.where(is_large, large, small) for large, small in ERF.T))
    power = _fma(power, times, times)
    return np.where(is_large, np.copysign(np.float32(1) - ex2(power), x), power)


#: Functions of flat float32, by name and variant.
FUNCTIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "exp.libdevice": exp,
        "exp2.hopper_ex2": ex2,
        "exp2.hopper_ex2_subnormal": ex2_subnormal,
        "log.libdevice": log,
        "log2.libdevice": log2,
        "log1p.libdevice": log1p,
        "rcp.hopper_approx": rcp,
        "rsqrt.hopper_approx": rsqrt,
        "sqrt.hopper_approx": sqrt,
        "tanh.libdevice": tanh,
        "erf.libdevice": erf,
    }
)
