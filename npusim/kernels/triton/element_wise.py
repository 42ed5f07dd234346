"""Integers and masks of a block along two axes that are not linear: computed element by element.

Such integers, for example in ``rows // 16 == keys // 16``, decide which keys a row sees; they are not addresses.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from npusim.formats.whole import without_sign, wrapped
from npusim.kernels.triton.integers import DIVISIONS, SHIFTS, NonlinearError, computed_of
from npusim.kernels.triton.listed import elements_of, holds_of, known_of
from npusim.kernels.triton.values import (
    RELATIONS,
    Affine,
    Condition,
    Elements,
    Known,
    Listed,
    ListedMask,
    refuse_many,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.kernels.triton.ttir_text import Op
    from npusim.kernels.triton.values import Integers


def elements_in(op: Op, x: Known) -> Elements:
    """Return integers or a mask of indices as elements; raise `ProgramError` for other values and unknown elements."""
    if isinstance(x, Elements):
        return x
    if not isinstance(x, Affine | Listed | Condition | ListedMask):
        raise op.fail(
            f"{op.name} of computed values and of integers that are not linear along two axes is not supported"
        )
    if isinstance(x, Condition):
        return Elements(truth(op, x).astype(np.int64), 1, len(x.every))
    if isinstance(x, Affine) and x.of:
        raise op.fail("tl.where cannot choose addresses by a mask that is not linear along two axes")
    if (known := known_of(op, x)) is not None and not np.all(known):
        raise op.fail(
            "npusim cannot evaluate integers that are nonlinear along two axes of a block and partly hidden by a mask"
        )
    if isinstance(x, ListedMask):
        return Elements(holds_of(op, x).astype(np.int64), 1, 1)
    return Elements(elements_of(op, x), (x.rest if isinstance(x, Listed) else x).bits, int(isinstance(x, Listed)))


def computed_elements(op: Op, a: Known, b: Known) -> Elements:
    """Return an operation on integers, or on masks, by their elements; refuse a division by 0 and a shift that is too
    long.
    """
    one, other, name = elements_in(op, a), elements_in(op, b), op.name.partition(".")[2]
    if name == "addptr":
        raise op.fail(one.why or other.why)
    _refuse_many(op, one, other)
    is_wrong = other.values == 0 if name in DIVISIONS else (other.values < 0) | (other.values >= one.bits)
    if name in (*DIVISIONS, *SHIFTS) and np.any(is_wrong):
        raise op.fail(f"{op.name}: a division by 0, or a shift by all bits or more, whose result is undefined")
    return _made(one, other, computed_of(op, name, one.values, other.values, one.bits), one.bits)


def compared_elements(op: Op, relation: str, a: Known, b: Known) -> Elements:
    """Return a comparison (``slt``, ``ult``, ``eq``, ...) of integers by their elements, a mask."""
    one, other = elements_in(op, a), elements_in(op, b)
    _refuse_many(op, one, other)
    pair = [one.values, other.values]
    if relation.startswith("u"):
        x, y = (without_sign(v, one.bits) for v in pair)
        pair = [(x > y).astype(np.int64) - (x < y), np.zeros((1, 1), np.int64)]
    holds = RELATIONS[f"s{relation[1:]}" if relation.startswith("u") else relation](*pair)
    return _made(one, other, holds.astype(np.int64), 1)


def chosen_elements(op: Op, mask: Known, a: Known, b: Known) -> Elements:
    """Return integers by a mask, by their elements."""
    of, one, other = (elements_in(op, x) for x in (mask, a, b))
    _refuse_many(op, of, one, other)
    result = _made(one, other, np.where(of.values != 0, one.values, other.values), one.bits)
    return Elements(result.values, result.bits, result.work + of.work, result.why or of.why)


def resized_elements(op: Op, x: Elements, bits: int, *, is_signed: bool) -> Elements:
    """Return integers in a type with another number of bits."""
    values = -x.values if is_signed and x.bits == 1 < bits else x.values
    if bits > x.bits and not is_signed and np.any(values < 0):
        raise op.fail("some integers of a block are negative, and the kernel treats them as unsigned")
    return Elements(wrapped(values, bits), bits, x.work, x.why)


def or_elements(linear: Callable[[], Known], by_elements: Callable[[], Elements]) -> Known:
    """Return integers that are linear or follow a list; integers along two axes of a block by their elements.

    Raises the `ProgramError` of the first way, unless the second way fails for the same reason.
    """
    try:
        return linear()
    except NonlinearError as error:
        result = by_elements()
        if sum(n > 1 for n in result.shape) < 2:
            raise
        return Elements(result.values, result.bits, result.work, result.why or str(error).partition(": ")[2])


def _made(one: Elements, other: Elements, values: Integers, bits: int) -> Elements:
    return Elements(values, bits, one.work + other.work + 1, one.why or other.why)


def _refuse_many(op: Op, *values: Elements) -> None:
    """Raise `ProgramError` for more elements than npusim reads one by one."""
    refuse_many(op, prod(np.broadcast_shapes(*(x.values.shape for x in values))))
