"""Elementwise arithmetic in a named format: one IEEE rounding per operation, with the hardware's NaN rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import Array, cast, plan_cast, widen, with_canonical_nan
from npusim.formats.float_format import FloatFormat, get_format

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MaxNan = Literal["number", "propagate"]
MAX_NANS = get_args(MaxNan)
_NATIVE = ("float32", "float64")
_ORDERED: Mapping[str, np.ufunc] = MappingProxyType(
    {"eq": np.equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "ne": np.not_equal}
)
#: Relations of two numbers, named as in LLVM: ``o`` is false and ``u`` true if an operand is NaN.
RELATIONS = (*(f"{side}{r}" for side in "ou" for r in _ORDERED), "ord", "uno")


def check_operands(arrays: tuple[Any, ...], fmt: FloatFormat) -> tuple[Array, ...]:
    """Return the operands as arrays of the format's dtype; Python numbers are converted.

    Raises `FormatError` if an array has another dtype, or if the format is not a floating-point format.
    """
    if fmt.is_integer:
        raise FormatError(f"elementwise arithmetic needs a floating-point format, not {fmt.name}")
    checked = []
    for position, array in enumerate(arrays):
        if isinstance(array, (int, float)):
            checked.append(cast(float(array), fmt))
            continue
        values = np.asarray(array)
        if values.dtype != fmt.dtype:
            raise FormatError(f"operand {position} has dtype {values.dtype}; {fmt.name} needs {fmt.dtype}")
        checked.append(values)
    return tuple(checked)


def _lanes(values: Array, fmt: FloatFormat) -> Array:
    """Return exact values in a type whose own rounding cannot change the final one.

    float32 has more than 2p + 2 bits for every p <= 11 and covers the exponents of products of 5-bit formats; formats
    with float32's 8-bit exponent need float64, because otherwise a product or quotient near their subnormal range would
    be rounded twice.
    """
    wide = widen(values)
    return wide.astype(np.float64) if fmt.exponent_bits > 5 else wide


def _rounded_once(operation: Callable[..., Array], arrays: tuple[ArrayLike, ...], name: str | FloatFormat) -> Array:
    """Apply an IEEE ``operation`` and round its result once, to ``name``."""
    fmt = get_format(name)
    operands = check_operands(arrays, fmt)
    if fmt.name == "float16" and operation in _COMBINED:
        return _combined(_COMBINED[operation], operands, fmt)
    with np.errstate(all="ignore"):
        if fmt.name in _NATIVE:
            return with_canonical_nan(np.asarray(operation(*operands)), fmt)
        return cast(np.asarray(operation(*(_lanes(item, fmt) for item in operands))), fmt)


#: Operations of float16 for which one kernel does both conversions and the operation, and their numbers in that kernel.
_COMBINED: Mapping[Any, int] = MappingProxyType({np.add: 0, np.subtract: 1, np.multiply: 2, np.divide: 3})


def _combined(operation: int, operands: Sequence[Array], fmt: FloatFormat) -> Array:
    """Return float16 operands combined, each result rounded once."""
    from npusim.formats import cast_kernels

    first, second = (operand.shape for operand in operands)
    shape = first if first == second else np.broadcast_shapes(first, second)
    out = np.empty(shape, fmt.dtype)
    if not out.size:
        return out
    columns = shape[-1] if shape and shape[-1] > 1 else out.size
    x, y = (_rows(operand, shape, columns) for operand in operands)
    scratch = np.empty((2, columns), np.float32)
    patterns = out.reshape(-1, columns).view(np.int16)
    cast_kernels.combine_float16(x, y, patterns, scratch, _plan_of(fmt.name), operation)
    return out


@functools.cache
def _plan_of(name: str) -> tuple[int, ...]:
    """Return the rounding of a format's results in the form that kernels read; hashing a format takes longer than
    hashing its name.
    """
    return plan_cast(get_format(name), None, "canonical").numbers


def _rows(values: Array, shape: tuple[int, ...], columns: int) -> Array:
    """Return an operand's patterns as rows of ``columns``; a single number becomes one row and one column."""
    if values.size == 1:
        return values.reshape(1, 1).view(np.int16)
    if values.shape == shape:
        return np.ascontiguousarray(values).reshape(-1, columns).view(np.int16)
    width = 1 if values.ndim == len(shape) and values.shape[-1] == 1 != shape[-1] else columns
    whole = np.broadcast_to(values, (*shape[:-1], values.shape[-1] if width == 1 else shape[-1]))
    return np.ascontiguousarray(whole).reshape(-1, width).view(np.int16)


def add(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat) -> Array:
    """Return ``x + y`` rounded once to ``fmt``.

    ``x`` and ``y`` broadcast and have the format's dtype (or are Python numbers, converted first).  Overflow gives the
    format's natural result (Inf; NaN in float8_e4m3fn), (+0) + (-0) is +0, a NaN result is canonical.  The same holds
    for :func:`sub`, :func:`mul` and :func:`div`.

    Raises `FormatError` for an unknown format or an operand of another dtype.

    Examples
    --------
    >>> add(np.float16(2048), np.float16(1), "float16").item()
    2048.0
    """
    return _rounded_once(np.add, (x, y), fmt)


def sub(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat) -> Array:
    """Return ``x - y`` rounded once to ``fmt``; see :func:`add`."""
    return _rounded_once(np.subtract, (x, y), fmt)


def mul(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat) -> Array:
    """Return ``x * y`` rounded once to ``fmt``; see :func:`add`."""
    return _rounded_once(np.multiply, (x, y), fmt)


def div(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat) -> Array:
    """Return ``x / y`` rounded once to ``fmt``; x/0 is Inf and 0/0 NaN; see :func:`add`."""
    return _rounded_once(np.divide, (x, y), fmt)


def fma(x: ArrayLike, y: ArrayLike, z: ArrayLike, fmt: str | FloatFormat) -> Array:
    """Return ``x * y + z`` rounded once (fused) to ``fmt``; see :func:`add`.

    The float64 sum is rounded to odd (its last bit shows whether the sum is inexact), so that the rounding to the
    target knows the side of a tie of the exact sum.
    """
    target = get_format(fmt)
    operands = check_operands((x, y, z), target)
    if target.name == "float64":
        from npusim.formats import elementwise_kernels

        shaped = np.broadcast_arrays(*operands)
        first, second, third = (np.ascontiguousarray(item).reshape(-1) for item in shaped)
        out = np.empty(first.size)
        elementwise_kernels.fma_float64(first, second, third, out)
        return with_canonical_nan(out, target).reshape(shaped[0].shape)
    with np.errstate(all="ignore"):
        first, second, third = (widen(item).astype(np.float64) for item in operands)
        return cast(_add_to_odd(first * second, third), target)


def _add_to_odd(x: Array, y: Array) -> Array:
    """Return the float64 sum rounded to odd; both operands exact, no overflow possible."""
    total = np.asarray(x + y)
    virtual = total - x
    error = np.asarray((x - (total - virtual)) + (y - virtual))
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    # One step in the direction of the error, which is away from zero if the error has the sum's sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.asarray(np.where(inexact, bits + step, bits)).view(np.float64)


def compare(x: Array | float, y: Array | float, relation: str, fmt: str | FloatFormat) -> Array:
    """Return where a relation is true, as int8: 1 where it is true, else 0; exact.

    ``x`` and ``y`` broadcast and have the format's dtype (or are Python numbers, converted first).  ``relation``: one
    of `RELATIONS`: ``oeq ogt oge olt ole one`` are true only for numbers, ``ueq ugt uge ult ule une`` also if an
    operand is NaN, ``ord`` if no operand is NaN, ``uno`` if an operand is NaN.  -0 equals +0.

    Raises `FormatError` for an unknown format or relation or an operand of another dtype.

    Examples
    --------
    >>> compare(np.float32([1, 3, np.nan]), 2.0, "ogt", "float32").tolist()
    [0, 1, 0]
    """
    if relation not in RELATIONS:
        raise FormatError(f"unknown relation {relation!r}; known: {', '.join(RELATIONS)}")
    first, second = (widen(item) for item in check_operands((x, y), get_format(fmt)))
    unordered = np.isnan(first) | np.isnan(second)
    if relation in ("ord", "uno"):
        return np.asarray(unordered == (relation == "uno"), np.int8)
    with np.errstate(invalid="ignore"):
        holds = _ORDERED[relation[1:]](first, second)
    return np.asarray(np.where(unordered, relation.startswith("u"), holds), np.int8)


def _select(x: ArrayLike, y: ArrayLike, name: str | FloatFormat, *, nan: str, largest: bool) -> Array:
    """Return the larger or smaller operand; +0 counts as larger than -0."""
    from npusim.formats import elementwise_kernels

    fmt = get_format(name)
    if nan not in MAX_NANS:
        raise FormatError(f"unknown NaN rule {nan!r} of max and min; known: {', '.join(MAX_NANS)}")
    if fmt.is_integer:
        return _select_integer(x, y, fmt, largest=largest)
    shaped = np.broadcast_arrays(*check_operands((x, y), fmt))
    signed = np.dtype(f"i{fmt.size_bytes}")
    first, second = (np.ascontiguousarray(item).reshape(-1).view(signed) for item in shaped)
    out = np.empty(first.size, signed)
    rules = (largest, nan == "propagate")
    elementwise_kernels.select_patterns(first, second, out, pattern_limits(fmt), rules)
    return out.view(fmt.dtype).reshape(shaped[0].shape)


def _select_integer(x: ArrayLike, y: ArrayLike, fmt: FloatFormat, *, largest: bool) -> Array:
    """Return the larger or smaller of two integers of a format, in the format; Python numbers are converted."""
    for position, each in enumerate((x, y)):
        if not isinstance(each, (int, float)) and np.asarray(each).dtype != fmt.dtype:
            raise FormatError(f"operand {position} has dtype {np.asarray(each).dtype}; {fmt.name} needs {fmt.dtype}")
        if isinstance(each, (int, float)) and np.asarray(each).astype(fmt.dtype) != each:
            raise FormatError(f"operand {position} is {each}, which is no {fmt.name}")
    first, second = (np.asarray(each).astype(fmt.dtype) for each in (x, y))
    return np.asarray(np.maximum(first, second) if largest else np.minimum(first, second))


def pattern_limits(fmt: FloatFormat) -> tuple[int, int, int]:
    """Return all magnitude bits, the largest pattern that is no NaN, and the canonical NaN."""
    last = fmt.max_code + (1 if fmt.has_infinity else 0)
    every = (1 << (8 * fmt.size_bytes - 1)) - 1
    return every, last << fmt.storage_shift, fmt.canonical_nan_bits


def maximum(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat, *, nan: MaxNan = "number") -> Array:
    """Return the larger of ``x`` and ``y``; max(-0, +0) is +0.

    ``nan="number"``: a number has precedence over a NaN, and two NaNs give the canonical NaN (IEEE 754-2019
    maximumNumber; NVIDIA ``max``, checked on H200); ``"propagate"``: any NaN gives the canonical NaN (maximum;
    ``max.NaN``).  Integers have no NaN.

    Raises `FormatError` for an unknown format or rule or an operand of another dtype.
    """
    return _select(x, y, fmt, nan=nan, largest=True)


def minimum(x: ArrayLike, y: ArrayLike, fmt: str | FloatFormat, *, nan: MaxNan = "number") -> Array:
    """Return the smaller of ``x`` and ``y``; min(-0, +0) is -0; NaN as in :func:`maximum`."""
    return _select(x, y, fmt, nan=nan, largest=False)
