"""Integers of types with a number of bits, signed or unsigned, which wrap; and the bits of floats as integers.

Integers are int64 arrays with their sign; integers of one bit are 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim.errors import FormatError
from npusim.formats.cast import cast, widen
from npusim.formats.float_format import get_format

Integers = np.ndarray[Any, np.dtype[np.int64]]
Unsigned = NDArray[np.uint64]
#: Number of bits of the widest integers.
WIDE = 64
#: Half of the number of bits of a 64-bit integer, and a mask of the lower half.
_HALF, _LOWER = np.uint64(32), np.uint64((1 << 32) - 1)


def _quotient(x: Integers, y: Integers) -> Integers:
    return (x - np.fmod(x, y)) // y  # rounds toward 0, as in C


#: Operations of signed integers (or for which the sign does not matter), by LLVM's names; and those of unsigned
#: integers.
_SIGNED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "divsi": _quotient,
        "remsi": np.fmod,
        "minsi": np.minimum,
        "maxsi": np.maximum,
        "shrsi": np.right_shift,
        "andi": np.bitwise_and,
        "ori": np.bitwise_or,
        "xori": np.bitwise_xor,
        "addi": np.add,
        "subi": np.subtract,
        "addptr": np.add,
        "muli": np.multiply,
        "shli": np.left_shift,
    }
)


def _high_bits(x: Unsigned, y: Unsigned, bits: int) -> Unsigned:
    """Return the upper half of the bits of products of unsigned integers."""
    if bits <= WIDE // 2:
        return (x * y) >> np.uint64(bits)
    (high, low), (other_high, other_low) = ((each >> _HALF, each & _LOWER) for each in (x, y))
    first, second = high * other_low, low * other_high
    carried = ((low * other_low) >> _HALF) + (first & _LOWER) + (second & _LOWER)
    return np.asarray(high * other_high + (first >> _HALF) + (second >> _HALF) + (carried >> _HALF), np.uint64)


_UNSIGNED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"divui": np.floor_divide, "remui": np.mod, "minui": np.minimum, "maxui": np.maximum, "shrui": np.right_shift}
)
#: All operations of two integers.
WHOLE_OPERATIONS: tuple[str, ...] = (*_SIGNED, *_UNSIGNED, "mulhiui")


def whole_limits(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest signed integer of a type; 0 and 1 for one bit."""
    return (0, 1) if bits == 1 else (-1 << (bits - 1), (1 << (bits - 1)) - 1)


def wrapped(values: Integers, bits: int) -> Integers:
    """Return the lowest bits of integers, as signed numbers."""
    low = whole_limits(bits)[0]
    return values if bits >= WIDE else ((values - low) & ((1 << bits) - 1)) + low


def without_sign(values: Integers, bits: int) -> Unsigned:
    """Return integers of a type as unsigned numbers."""
    return values.astype(np.int64).view(np.uint64) & np.uint64((1 << bits) - 1)


def whole_operation(name: str, x: Integers, y: Integers, bits: int) -> Integers:
    """Return an operation of integers, element by element, in a type of this number of bits, in which the result wraps.

    ``name``: LLVM's name (``addi``, ``divsi``, ``shrui``, ...), or ``mulhiui``, the upper half of the bits of a product
    of unsigned integers.  Quotients are cut toward 0; a division by 0 gives 0, and a shift by the number of bits or
    more gives the result of repeated shifts.

    Raises `FormatError` for another name.

    Examples
    --------
    >>> whole_operation("addi", np.array([127]), np.array([1]), 8).tolist()
    [-128]
    """
    with np.errstate(all="ignore"):
        if (function := _SIGNED.get(name)) is not None:
            return wrapped(function(x, y), bits)
        if name in _UNSIGNED:
            return wrapped(_UNSIGNED[name](*(without_sign(z, bits) for z in (x, y))).view(np.int64), bits)
        if name == "mulhiui":
            return wrapped(_high_bits(without_sign(x, bits), without_sign(y, bits), bits).view(np.int64), bits)
    raise FormatError(f"unknown operation of integers {name!r}; known: {', '.join(WHOLE_OPERATIONS)}")


def _as_integers(x: NDArray[Any]) -> Integers:
    """Return whole numbers of any format as int64; a NaN, which an unread lane may have, becomes 0."""
    return np.nan_to_num(widen(np.asarray(x)), nan=0.0, posinf=0.0, neginf=0.0).astype(np.int64)


def whole_step(text: str, x: NDArray[Any], y: NDArray[Any], fmt: str) -> NDArray[Any]:
    """Return the result of an operation on whole numbers, converted to ``fmt``; ``text``: the operation's name and
    bits, as ``addi.32``.
    """
    name, _, bits = text.partition(".")
    result = whole_operation(name, _as_integers(x), _as_integers(y), int(bits))
    return cast(result.astype(np.float64), fmt)


def bits_of_floats(x: NDArray[Any], of: str, fmt: str) -> NDArray[Any]:
    """Return the bits of floats, rounded to the format ``of``, as signed integers in the format ``fmt``."""
    kind = get_format(of)
    given = x if x.dtype == kind.dtype else cast(x, of)  # the bits of a NaN are unchanged
    bits = np.ascontiguousarray(given).view(f"i{kind.size_bytes}").reshape(x.shape)
    return cast(bits.astype(np.float64), fmt)


def floats_of_bits(x: NDArray[Any], of: str, fmt: str) -> NDArray[Any]:
    """Return the floats of the format ``of`` whose bits are integers, in a format that can represent them."""
    kind = get_format(of)
    bits = np.ascontiguousarray(_as_integers(x).astype(f"i{kind.size_bytes}")).reshape(x.shape)
    return bits.view(kind.dtype) if fmt == of else cast(bits.view(kind.dtype), fmt)
