"""Integers of a kernel in the form of their types: with a number of bits, signed or unsigned, and wrapping.

TTIR's types state only the bits; each operation states whether its operands are signed.  Values are stored with their
sign, and values of one bit as 0 and 1.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats.whole import WHOLE_OPERATIONS, WIDE, whole_limits, whole_operation, wrapped
from npusim.kernels.triton.ttir_text import shape_of
from npusim.kernels.triton.values import Affine, Condition, Integers, affine, elements, known_elements, lesser

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.kernels.triton.ttir_text import Op

_TOP = np.int64(-(1 << (WIDE - 1)))


class NonlinearError(ProgramError):
    """Raised for integers of a block that are neither linear along the block's axes nor a list along one of them."""


class WrapsError(NonlinearError):
    """Raised for integers that wrap within a block: they are linear up to this point, and cannot be addresses."""


#: Operations that have no result for some second operands: for 0, or for the number of bits or more.
DIVISIONS, SHIFTS = ("divsi", "divui", "remsi", "remui"), ("shli", "shrsi", "shrui")


def restarts(op: Op) -> NonlinearError:
    """Return the refusal of indices that restart within a block (``%``), which are unknown from there on."""
    return _nonlinear(op, "indices that restart within a block (`%`) are used as values, or to load integers")


def known_throughout(op: Op, x: Affine) -> Affine:
    """Return integers of a block for use as values; raise `ProgramError` if indices restart within the block."""
    if not x.is_hidden and any(n is not None and np.any(n < size) for n, size in zip(x.limits(), x.shape, strict=True)):
        raise restarts(op)
    return x


def values_of(op: Op, x: Affine) -> Integers:
    """Return every element, (program, iteration, *axes), as a value: one that the mask of a load hides is 0.

    Raises `ProgramError` if indices restart within the block.
    """
    values = elements(op, known_throughout(op, x))
    known = known_elements(op, x.limits(), x.shape)
    return values if known is None else np.where(known, values, 0)


def bits_of(type_: str) -> int:
    """Return the number of bits of a type: an integer, a block's integers, or the target of pointers; `WIDE` for an
    index.
    """
    match = re.fullmatch(r"i(\d+)", shape_of(type_)[1])
    return int(match[1]) if match else WIDE


def integers(op: Op, a: Affine, b: Affine, *, begins: bool = True) -> tuple[Affine, NDArray[np.bool_] | None]:
    """Return an integer operation (``arith.addi``, ...) on two integers, and, for each program and iteration, whether
    it wraps.

    None if no result can exceed its type.  ``begins``: a block's remainders are known up to the point at which they
    restart. Raises `ProgramError` for an operation that is not linear in a block's axes.
    """
    name, bits = op.name.partition(".")[2], WIDE if a.of else a.bits
    left = tuple(lesser(x, y) for x, y in zip(a.limits(), b.limits(), strict=True))
    shape, said = tuple(map(min, a.shape, b.shape)), a.overflow or b.overflow
    if name == "shli":
        if any(b.steps) or (any(a.steps) and np.ptp(b.base)):
            raise _nonlinear(
                op,
                "a shift by the indices of a block, or of a block by numbers that differ between programs, is "
                "not supported",
            )
        name, b = "muli", replace(b, base=np.left_shift(np.int64(1), b.base))
    if name in ("addi", "subi", "addptr"):
        sign = -1 if name == "subi" else 1
        steps = tuple(x + sign * y for x, y in zip(a.steps, b.steps, strict=True))
        result = Affine(a.base + sign * b.base, steps, shape, a.of, left, bits, said)
        return _typed(op, result, a, b, lambda x, y: x + sign * y)
    if name == "muli" and not (any(a.steps) and any(b.steps)):
        block, factor = (a, b) if any(a.steps) else (b, a)
        if any(block.steps) and np.ptp(factor.base):
            raise _nonlinear(op, "a stride that differs between programs or iterations is not supported")
        steps = tuple(s * int(factor.base.flat[0]) for s in block.steps)
        result = Affine(a.base * b.base, steps, shape, "", left, bits, said)
        return _typed(op, result, a, b, operator.mul)
    if begins and name in ("remsi", "remui") and (begun := _begun(a, b, shape, left)) is not None:
        return begun, None
    return _by_elements(op, name, a, b, Affine(a.base, a.steps, shape, "", left, bits, said)), None


def _nonlinear(op: Op, why: str) -> NonlinearError:
    return NonlinearError(f"{op.line}: {why}")


def computed_of(op: Op, name: str, x: Integers, y: Integers, bits: int) -> Integers:
    """Return an operation (``divsi``, ...) on integers by their elements, in a type with this number of bits."""
    if name not in WHOLE_OPERATIONS:
        raise op.fail(
            f"{op.name} of integers is not supported; allowed: sums, products, quotients, shifts, minima and maxima"
        )
    return whole_operation(name, x, y, bits)


def _by_elements(op: Op, name: str, a: Affine, b: Affine, like: Affine) -> Affine:
    """Return the result of an operation without a linear form, over all elements; the result itself must be linear."""
    if name.endswith("ui"):
        like = replace(like, overflow="")  # unsigned integers wrap as intended

    def computed(x: Integers, y: Integers) -> Integers:
        return computed_of(op, name, x, y, like.bits)

    if name == "muli":
        raise _nonlinear(
            op, "a product of two blocks of indices is not supported; addresses must be linear along a block's axes"
        )
    if not any(a.steps) and not any(b.steps):
        return replace(like, base=computed(a.base, b.base))
    known = known_elements(op, like.left, like.shape)
    if not a.of and (result := affine(computed(elements(op, a), elements(op, b)), known)):
        # the indices are computed as if the block were within one group
        return replace(like, base=result.base, steps=result.steps)
    raise _nonlinear(
        op, f"{op.name} of a block's indices is not supported; addresses must be linear along a block's axes"
    )


def _begun(a: Affine, b: Affine, shape: tuple[int, ...], left: tuple[Integers | None, ...]) -> Affine | None:
    """Return a remainder of a block that restarts at the block's end, if it is known up to there; otherwise None."""
    is_block = sorted(a.steps)[-1:] == [1] == [sum(a.steps)] and not any(b.steps)
    if not is_block or np.any(a.base < 0) or np.any(b.base <= 0):
        return None
    begun = np.mod(a.base, b.base)
    sides = zip(left, a.steps, a.shape, strict=True)
    left = tuple(_ended(lesser(x, b.base - begun), n) if step else x for x, step, n in sides)
    return Affine(begun, a.steps, shape, "", left, a.bits)


def _ended(left: Integers | None, count: int) -> Integers | None:
    """Return the number of known elements; None if all ``count`` are known."""
    return None if left is None or np.all(left >= count) else left


def reach(x: Affine) -> tuple[int, int]:
    """Return the smallest and the largest of all elements, without a width."""
    ends = [s * (n - 1) for s, n in zip(x.steps, x.shape, strict=True)]
    return int(x.base.min()) + sum(min(0, e) for e in ends), int(x.base.max()) + sum(max(0, e) for e in ends)


def _reach(a: Affine, b: Affine, function: Callable[[Any, Any], Any]) -> tuple[int, int]:
    """Return bounds of a function that is monotone in each of its two operands, as integers of any width."""
    result = [function(x, y) for x in reach(a) for y in reach(b)]
    return min(result), max(result)


def _typed(
    op: Op, x: Affine, a: Affine, b: Affine, function: Callable[[Any, Any], Any]
) -> tuple[Affine, NDArray[np.bool_] | None]:
    """Return a function of two integers, computed in 64 bits, in the form of its type, and where it wraps."""
    (least, most), (low, high) = _reach(a, b, function), whole_limits(x.bits)
    if low <= least and most <= high:
        return x, None
    result = within(op, x)
    if x.bits < WIDE:
        return result, result.base != x.base
    return result, np.abs(function(a.base.astype(np.float64), b.base.astype(np.float64))) >= -float(low)


def within(op: Op, x: Affine) -> Affine:
    """Return integers that exceed their type in wrapped form; if a block wraps at one of its elements, only the
    elements before it are known.

    Raises `ProgramError` if other elements wrap.
    """
    low, high = whole_limits(x.bits)
    steps = tuple(int(wrapped(np.array(s & ((1 << WIDE) - 1), np.uint64).view(np.int64), x.bits)) for s in x.steps)
    result = replace(x, base=wrapped(x.base, x.bits), steps=steps)
    ends = [s * (n - 1) for s, n in zip(steps, x.shape, strict=True)]
    rises, falls = sum(max(0, e) for e in ends), sum(min(0, e) for e in ends)
    if rises - falls <= high - low and not np.any((result.base > high - rises) | (result.base < low - falls)):
        return result
    along = [i for i, e in enumerate(ends) if e]
    if len(along) != 1 or falls or x.bits >= WIDE:
        why = f"the indices of a block overflow {x.bits} bits and wrap within the block"
        raise WrapsError(f"{op.line}: {op.name}: {why}")
    fits = (high - result.base) // steps[along[0]] + 1
    left = [lesser(each, fits) if i == along[0] else each for i, each in enumerate(x.limits())]
    return replace(result, left=tuple(map(_ended, left, x.shape)))


def resized(op: Op, x: Affine, bits: int, *, is_signed: bool = True) -> Affine:
    """Return integers in a type with another number of bits: a narrower type has the last bits, and a wider type the
    same numbers.

    ``is_signed``: a wider type repeats the sign.  Raises `ProgramError` if a block with numbers of both signs becomes
    wider as unsigned numbers.
    """
    if bits <= x.bits:
        return within(op, replace(x, bits=bits))
    if is_signed:
        return replace(x, bits=bits) if x.bits > 1 else replace(x, base=-x.base, bits=bits)
    if (result := positive(x)) is None:
        raise op.fail("some indices of a block are negative, and the kernel treats them as unsigned")
    return replace(result, bits=bits)


def positive(x: Affine) -> Affine | None:
    """Return integers as unsigned numbers of 64 bits; None for a block with both signs, or beyond 64 bits."""
    ends = [s * (n - 1) for s, n in zip(x.steps, x.shape, strict=True)]
    low, high = x.base + sum(min(0, e) for e in ends), x.base + sum(max(0, e) for e in ends)
    if np.any((low < 0) & (high >= 0)) or (x.bits >= WIDE and np.any(low < 0)):
        return None
    return replace(x, base=np.where(low < 0, x.base + (1 << x.bits if x.bits < WIDE else 0), x.base), overflow="")


def compared(op: Op, relation: str, a: Affine, b: Affine) -> Condition:
    """Return a comparison (``slt``, ``ult``, ``eq``, ...) of two integers of one type.

    Raises `ProgramError` if a block with numbers of both signs is compared as unsigned numbers, and if indices restart
    within a block.
    """
    if any(x is not None for x in (*a.limits(), *b.limits())):
        raise op.fail(
            "a comparison of indices that repeat within a block is not supported; compare them before % or tl.where"
        )
    if not relation.startswith("u"):
        return Condition(((relation, _difference(op, a, b)),))
    signed, one_view, other_view = f"s{relation[1:]}", positive(a), positive(b)
    if one_view is not None and other_view is not None:
        return Condition(((signed, _difference(op, one_view, other_view)),))
    if not any(a.steps) and not any(b.steps):  # numbers of 64 bits
        one, other = (replace(x, base=x.base ^ _TOP) for x in (a, b))
        return Condition(((signed, _difference(op, one, other)),))
    if relation in ("ult", "ule") and reach(b)[0] >= 0:  # as unsigned numbers, all negative numbers are larger
        zero = replace(b, base=b.base[:1, :1] * 0, steps=(0,) * len(b.steps))
        return Condition((("sge", _difference(op, a, zero)), (signed, _difference(op, a, b))))
    raise op.fail("some indices of a block are negative, and the kernel compares them as unsigned")


def _difference(op: Op, a: Affine, b: Affine) -> Affine:
    """Return a difference that is compared with 0; if 64 bits cannot represent it, return only its sign."""
    steps = tuple(x - y for x, y in zip(a.steps, b.steps, strict=True))
    low, high = _reach(a, b, lambda x, y: x - y)
    shape = tuple(map(min, a.shape, b.shape))
    if whole_limits(WIDE)[0] <= low and high <= whole_limits(WIDE)[1]:
        return Affine(a.base - b.base, steps, shape)
    if any(a.steps) or any(b.steps):
        raise op.fail("a comparison of a block's indices that differ by more than 64 bits is not supported")
    return Affine((a.base > b.base).astype(np.int64) - (a.base < b.base), steps, shape)
