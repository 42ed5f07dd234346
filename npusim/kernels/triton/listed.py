"""Integers from a table, such as loaded token numbers: arithmetic, comparisons, and rows of a tensor by them.

Rows that a kernel accesses by a table are the rows of a separate tensor, in the order of the table, so that the index
in the table represents the address and all later operations on it are linear again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats.whole import WIDE, whole_limits
from npusim.kernels.triton.integers import DIVISIONS, NonlinearError, computed_of, known_throughout
from npusim.kernels.triton.tensor_axes import GatheredView, MaskView, View, gathered
from npusim.kernels.triton.values import (
    RELATIONS,
    Affine,
    Booleans,
    Condition,
    Integers,
    Listed,
    ListedMask,
    elements,
    known_elements,
    refuse_many,
    truth,
)

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op

    Sums = Callable[[Op, Affine, Affine], Affine]
    #: The integers of the programs that represent all programs, and for each program the index of its representative.
    Kinds = Callable[[Integers], tuple[Integers, Integers]]

#: Largest number of entries of a table of the integers of all programs and iterations.
MOST_LISTED = 1 << 22
#: Number of bits of integers that are read without their sign.
BYTE = 8
#: For each relation, the relation that is true of the same two numbers in the other order.
_TURNED: Mapping[str, str] = MappingProxyType({"slt": "sgt", "sgt": "slt", "sle": "sge", "sge": "sle"})
_SUMS = ("addi", "subi", "addptr")
_JOINED: Mapping[str, Callable[..., Booleans]] = MappingProxyType(
    {"andi": np.logical_and, "ori": np.logical_or, "xori": np.logical_xor}
)


def table_of(
    op: Op, values: Integers, known: Booleans | None, shape: tuple[int, ...], bits: int, kinds_of: Kinds | None = None
) -> Listed:
    """Return integers by their elements, (program, iteration, *axes), as a table; equal programs share its entries.

    ``known``: which elements have a value: all, or the first ones of an axis.  ``kinds_of`` returns the groups of
    programs that share entries, from the integers; by default these are the programs with equal integers.  Raises
    `ProgramError` for a block along two axes, or for too many entries.
    """
    wide = [i for i, n in enumerate(shape) if n > 1]
    values, known = np.broadcast_arrays(values, True if known is None else known)
    if len(wide) != 1:
        why = "the indices of a block are not linear along two axes; only a list along one axis is supported"
        raise NonlinearError(f"{op.line}: {why}")
    if values.size > MOST_LISTED:
        raise op.fail(f"the programs have {values.size:,} indices in all that are not linear; allowed: {MOST_LISTED:,}")
    programs, times, n = *values.shape[:2], shape[wide[0]]
    flat = np.where(known, values, 0).reshape(programs, times * n)
    if kinds_of is None:
        kinds, of_each = _rows_in_rows(flat, known.reshape(programs, times * n))
    else:
        first, of_each = kinds_of(flat)
        kinds = flat[first]
    base = of_each.reshape(-1, 1) * (times * n) + np.arange(times)[None] * n
    steps = tuple(int(i == wide[0]) for i in range(len(shape)))
    count = known.reshape(programs, times, n).sum(2)
    if np.any(known.reshape(programs, times, n) != (np.arange(n) < count[..., None])):
        raise op.fail("where a block's indices are not linear, a mask may keep only the first of them")
    left = tuple(count if step and np.any(count < n) else None for step in steps)
    rest = Affine(np.zeros((1, 1), np.int64), (0,) * len(shape), shape, bits=bits)
    return Listed(rest, kinds.reshape(-1), Affine(base, steps, shape, left=left))


def unlike_rows(rows: Integers) -> tuple[Integers, Integers]:
    """Return the different rows of integers in ascending order, and for each row its index among them.

    This gives the result of ``numpy.unique`` along axis 0, which is slow for long rows because it compares single
    elements.
    """
    unsigned = rows.astype(np.int64, copy=False).view(np.uint64) ^ np.uint64(1 << 63)
    keys = [row.tobytes() for row in unsigned.astype(">u8")]  # as bytes the keys have the order of the integers
    first = dict[bytes, int]()
    for i, key in enumerate(keys):
        first.setdefault(key, i)
    ordered = sorted(first)
    number = {key: i for i, key in enumerate(ordered)}
    return rows[[first[key] for key in ordered]], np.array([number[key] for key in keys], np.int64)


#: Largest number of rows with which one row is compared to find another row with the same integers.
_MOST_COMPARED = 16


def _rows_in_rows(rows: Integers, known: Booleans) -> tuple[Integers, Integers]:
    """Return rows of integers that represent all rows, and for each row the index of its representative.

    An integer that is not known agrees with any integer: the row of a program that visits more tiles of a sequence
    represents a program that visits only the first of them.
    """
    kinds, of_each = unlike_rows(rows)
    if known.all():
        return kinds, of_each
    seen = np.zeros(kinds.shape, bool)  # values that any of several equal rows has
    np.logical_or.at(seen, of_each, known)
    within, kept = np.arange(len(kinds)), dict[int, list[int]]()
    for i in np.argsort(-seen.sum(1), kind="stable").tolist():
        others = kept.setdefault(int(kinds[i, np.argmax(seen[i])]), [])
        for k in others[:_MOST_COMPARED]:
            if not np.any(seen[i] & (~seen[k] | (kinds[i] != kinds[k]))):
                within[i] = k
                break
        else:
            others.append(i)
    left, number = np.unique(within, return_inverse=True)
    return kinds[left], number.reshape(-1)[of_each]


def alike_programs(*values: Listed | Condition | Affine | Booleans | None) -> tuple[Integers, Integers] | None:
    """Return programs that represent all programs with the same integers, and for each program the one that represents
    it; None if all programs differ, or none.
    """
    parts, waiting = list[Any](), list[Any](values)
    while waiting:
        x = waiting.pop()
        if isinstance(x, Listed):
            waiting += (x.rest, x.at)
        elif isinstance(x, Condition):
            waiting += (d for _, d in x.every)
        elif isinstance(x, Affine):
            waiting += (x.base, *x.limits())
        elif x is not None:
            parts.append(np.asarray(x))
    count = max((len(x) for x in parts), default=1)
    many = [x.reshape(len(x), -1).astype(np.int64) for x in parts if len(x) > 1]
    if count == 1:
        return None
    _, of_each = unlike_rows(np.concatenate(many, axis=1))
    _, first = np.unique(of_each, return_index=True)
    return (first, of_each) if len(first) < count else None


def _of_alike(op: Op, how: Callable[..., Listed], *values: Listed | Affine) -> Listed:
    """Return a list that a function makes of integers, computed once for programs with equal integers."""
    if (alike := alike_programs(*values)) is None:
        return how(op, *values)
    first, of_each = alike
    result = how(op, *(x.of_programs(first) if isinstance(x, Listed) else x.at(first) for x in values))
    return result.of_programs(of_each)


def elements_of(op: Op, x: Listed | Affine) -> Integers:
    """Return every element, (program, iteration, *axes); an element that a mask hides is `Listed.beyond`, or any
    number.
    """
    if isinstance(x, Affine):
        return elements(op, x)
    refuse_many(op, prod(np.broadcast_shapes(x.rest.base.shape, x.at.base.shape)) * prod(x.shape))
    return np.asarray(elements(op, x.rest) + _entries(op, x.table, x.at, x.shape, x.beyond))


def _entries(op: Op, table: Any, at: Affine, shape: tuple[int, ...], beyond: int | bool | None) -> Any:
    """Return the table's entry of every element, and for one that a mask hides ``beyond`` (None: any)."""
    entries = table[np.clip(elements(op, at), 0, len(table) - 1)]
    known = None if beyond is None else known_elements(op, at.limits(), shape)
    return entries if known is None else np.where(known, entries, beyond)


def _uniform(x: Listed | Affine) -> int | None:
    """Return the one integer of all elements in all programs; None if they differ."""
    is_one = isinstance(x, Affine) and x.is_uniform and not x.of
    return int(x.base.flat[0]) if is_one and isinstance(x, Affine) else None


def _folded(x: Listed) -> Listed | None:
    """Return a list whose numbers are all in its table; None if the rest differs between elements or programs."""
    if (number := _uniform(x.rest)) is None:
        return None
    beyond = None if x.beyond is None else x.beyond + number
    return replace(x, rest=replace(x.rest, base=x.rest.base[:1, :1] * 0), table=x.table + number, beyond=beyond)


def operated(op: Op, a: Listed | Affine, b: Listed | Affine, sums: Sums) -> Listed:
    """Return an operation on two integers, of which at least one is a list; ``sums(op, a, b)`` adds two linear
    integers.

    Raises `ProgramError` if the result is along two axes, or exceeds its type.
    """
    name = op.name.partition(".")[2]
    one, other = (a, b) if isinstance(a, Listed) else (b, a)
    assert isinstance(one, Listed)
    number, whole = _uniform(other), _folded(one)
    is_sum = name in _SUMS and isinstance(other, Affine) and all(x is None for x in other.limits())
    if is_sum:
        rests = (one.rest, other) if one is a else (other, one.rest)
        sign = -1 if name == "subi" and one is b else 1
        beyond = None if one.beyond is None else sign * one.beyond
        result = replace(one, rest=sums(op, *rests), table=sign * one.table, beyond=beyond)
    elif number is not None and whole is not None and (one is a or name not in (*DIVISIONS, "shli", "shrsi", "shrui")):
        _refuse_zero(op, name, np.asarray([number]))
        ends = whole.table if whole.beyond is None else np.append(whole.table, whole.beyond)
        same: Integers = np.full(ends.shape, number, np.int64)
        pair = (ends, same) if one is a else (same, ends)
        ends = computed_of(op, name, pair[0], pair[1], one.rest.bits)
        beyond = None if whole.beyond is None else int(ends[-1])
        result = replace(whole, table=ends[: len(whole.table)], beyond=beyond)
    elif name == "muli" and number is not None:
        rest = replace(one.rest, base=one.rest.base * number, steps=tuple(s * number for s in one.rest.steps))
        beyond = None if one.beyond is None else one.beyond * number
        result = replace(one, rest=rest, table=one.table * number, beyond=beyond)
    elif name in _SUMS and isinstance(a, Listed) and isinstance(b, Listed) and _axis(a) == _axis(b) is not None:
        result = _summed(op, a, b, sums)
    else:
        return by_elements(op, a, b)
    return _in_bits(op, result)


def _axis(x: Listed | ListedMask | Affine) -> int | None:
    """Return the one axis of a block along which a table advances; None if there is another number of them."""
    at = x if isinstance(x, Affine) else x.at
    wide = [i for i, (s, n) in enumerate(zip(at.steps, at.shape, strict=True)) if s and n > 1]
    return wide[0] if len(wide) == 1 else None


def _own_axis(x: Listed | ListedMask) -> Affine:
    """Return the places in a table along the only axis along which it advances."""
    return replace(x.at, shape=tuple(n if i == _axis(x) else 1 for i, n in enumerate(x.shape)))


def _summed(op: Op, a: Listed, b: Listed, sums: Sums) -> Listed:
    """Return a sum or difference of two lists along one axis as one list; their linear parts stay linear."""
    at = [_own_axis(x) for x in (a, b)]
    rests = [Affine(np.zeros((1, 1), np.int64), (0,) * len(x.shape), x.shape) for x in at]
    one, other = (replace(x, rest=rest, at=own) for x, rest, own in zip((a, b), rests, at, strict=True))
    result = _of_alike(op, _entries_summed, one, other)
    return replace(result, rest=sums(op, a.rest, b.rest), at=replace(result.at, shape=a.shape))


def _entries_summed(op: Op, one: Listed, other: Listed) -> Listed:
    values = elements_of(op, one) + (-1 if op.name == "arith.subi" else 1) * elements_of(op, other)
    return table_of(op, values, np.logical_and(_defined(op, one), _defined(op, other)), one.shape, WIDE)


def by_elements(op: Op, a: Listed | Affine, b: Listed | Affine) -> Listed:
    """Return an integer operation on two integers, element by element, as a table of all programs."""
    return _of_alike(op, _by_elements, a, b)


def _by_elements(op: Op, a: Listed | Affine, b: Listed | Affine) -> Listed:
    for x in (a, b) if op.name != "tt.addptr" else ():
        if isinstance(x, Affine):
            known_throughout(op, x)
    name, values = op.name.partition(".")[2], [elements_of(op, x) for x in (a, b)]
    _refuse_zero(op, name, values[1])
    of = next((n for n in map(_pointer, (a, b)) if n), "")
    bits = WIDE if of else (a.rest if isinstance(a, Listed) else a).bits
    defined = np.logical_and(_defined(op, a), _defined(op, b))
    result = table_of(op, computed_of(op, name, values[0], values[1], bits), defined, _shape(a, b), bits)
    return _in_bits(op, replace(result, rest=replace(result.rest, of=of)))


def chosen_by_table(op: Op, mask: ListedMask | Condition, a: Listed | Affine, b: Listed | Affine) -> Listed:
    """Return integers by a mask, element by element, as a table of all programs."""
    (one, other), bits = (elements_of(op, x) for x in (a, b)), (a.rest if isinstance(a, Listed) else a).bits
    if _pointer(a) != _pointer(b):
        raise op.fail("tl.where chooses between addresses of two tensors, which is not supported; load from both")
    holds = holds_of(op, mask)
    known = np.where(holds, _defined(op, a), _defined(op, b))
    if isinstance(mask, ListedMask):
        known = known & _defined(op, mask)
    result = table_of(op, np.where(holds, one, other), known, _shape(a, b), bits)
    return replace(result, rest=replace(result.rest, of=_pointer(a)))


def holds_of(op: Op, mask: ListedMask | Condition) -> Any:
    """Return, for every element, (program, iteration, *axes), whether a mask is true."""
    if isinstance(mask, Condition):
        return truth(op, mask)
    holds = _entries(op, mask.holds, mask.at, mask.shape, bool(mask.beyond))
    return holds if mask.within is None else holds & truth(op, mask.within)


def known_of(op: Op, x: Listed | ListedMask | Affine) -> Any:
    """Return which elements have a value; None for all elements."""
    return _known(op, x) if isinstance(x, Affine) or x.beyond is None else None


def _known(op: Op, *values: Listed | ListedMask | Affine) -> Any:
    """Return which elements all of the given integers have; None for all elements."""
    known = [known_elements(op, (x if isinstance(x, Affine) else x.at).limits(), x.shape) for x in values]
    both = [k for k in known if k is not None]
    return np.logical_and.reduce(np.broadcast_arrays(*both)) if both else None


def _defined(op: Op, x: Listed | ListedMask | Affine) -> Any:
    """Return which elements of integers, or of a mask, have a value; True for all elements."""
    known = known_of(op, x)
    return True if known is None else known


def _shape(*values: Listed | Affine) -> tuple[int, ...]:
    return tuple(map(max, *(x.shape for x in values)))


def _pointer(x: Listed | Affine) -> str:
    return x.rest.of if isinstance(x, Listed) else x.of


def _refuse_zero(op: Op, name: str, values: Integers) -> None:
    if name in DIVISIONS and np.any(values == 0):
        raise op.fail(f"{op.name}: a division by 0, whose result is undefined")


def _in_bits(op: Op, x: Listed) -> Listed:
    """Return a list; raise `ProgramError` for one beyond its type."""
    (low, high), rest = whole_limits(x.rest.bits), x.rest
    ends = [s * (n - 1) for s, n in zip(rest.steps, rest.shape, strict=True)]
    entries = x.table if x.beyond is None else np.append(x.table, x.beyond)
    least = int(rest.base.min()) + sum(min(0, e) for e in ends) + int(entries.min(initial=0))
    most = int(rest.base.max()) + sum(max(0, e) for e in ends) + int(entries.max(initial=0))
    if least < low or most > high:
        raise op.fail(
            f"{op.name}: a value computed from loaded integers does not fit in {rest.bits} bits and wraps; convert "
            "the integers to a wider type first"
        )
    return x


def listed_in_bits(op: Op, x: Listed, bits: int, *, is_signed: bool) -> Listed:
    """Return a list in a type with another number of bits; a negative byte becomes unsigned if it is completely in the
    table.
    """
    if not is_signed and x.rest.bits == BYTE and (whole := _folded(x)) is not None:
        every = (1 << x.rest.bits) - 1
        x = replace(whole, table=whole.table & every, beyond=None if whole.beyond is None else whole.beyond & every)
    if not is_signed and min(int(x.rest.base.min()), int(x.table.min(initial=0)), x.beyond or 0) < 0:
        raise op.fail(f"{op.name}: some loaded integers are negative, and the kernel treats them as unsigned")
    return _in_bits(op, replace(x, rest=replace(x.rest, bits=bits)))


def lowest_bit(op: Op, x: Listed) -> ListedMask:
    """Return the last bit of a list as a mask; raise `ProgramError` if a part of the list is not in a table."""
    if (whole := _folded(x)) is None:
        raise op.fail(
            f"{op.name} takes the last bit of a sum of loaded integers and integers that differ between elements, "
            "which is not supported"
        )
    holds, beyond = (whole.table & 1).astype(bool), None if whole.beyond is None else bool(whole.beyond & 1)
    return ListedMask(holds, whole.at, beyond=beyond)


def compared_by_table(op: Op, relation: str, a: Listed | Affine, b: Listed | Affine) -> ListedMask:
    """Return a comparison of a list, entry by entry of its table; a new table if elements or programs differ.

    Raises `ProgramError` for integers of two axes, or for negative ones that are compared as unsigned.
    """
    name = f"s{relation[1:]}" if relation.startswith("u") else relation
    one, other = (a, b) if isinstance(a, Listed) else (b, a)
    assert isinstance(one, Listed)
    number, whole = _uniform(other), _folded(one)
    if number is not None and whole is not None:
        ends = whole.table if whole.beyond is None else np.append(whole.table, whole.beyond)
        pair, at = [ends, np.full_like(ends, number)], whole.at
        _refuse_signs(op, relation, *pair)
    else:
        every = elements_of(op, one), elements_of(op, other)
        refuse_many(op, prod(np.broadcast_shapes(*(x.shape for x in every))))
        *pair, known = np.broadcast_arrays(*every, np.logical_and(_defined(op, a), _defined(op, b)))
        _refuse_signs(op, relation, *(x[known] for x in pair))
        result = table_of(op, pair[0] - pair[1], known, _shape(a, b), WIDE)
        pair, at = [result.table, np.zeros_like(result.table)], result.at
    holds = np.asarray(RELATIONS[name](np.subtract(*(pair if one is a else pair[::-1])), 0))
    is_known = number is not None and whole is not None and whole.beyond is not None
    return ListedMask(holds[:-1], at, beyond=bool(holds[-1])) if is_known else ListedMask(holds, at)


def compared_as_stairs(op: Op, relation: str, a: Listed | Affine, b: Listed | Affine) -> Condition | None:
    """Return the comparison of a list along one axis of a block with integers along the other axis, as a comparison of
    linear integers, if the list's entries rise by one every few elements (``rows // 4``); None for other lists.

    ``x // c >= d`` where ``x >= c d``, so that no element is computed.
    """
    one, other, relation = (a, b, relation) if isinstance(a, Listed) else (b, a, _TURNED.get(relation, relation))
    if not isinstance(one, Listed) or not isinstance(other, Affine) or relation not in _TURNED or other.of or one.at.of:
        return None
    axis = _axis(one)
    if axis is None or one.rest.of or other.steps[axis] or not any(other.steps):
        return None
    if any(x is not None for x in (*one.at.limits(), *one.rest.limits(), *other.limits())):
        return None
    if any(s for i, s in enumerate(one.rest.steps) if i != axis):
        return None
    own = _own_axis(one)
    part = replace(one, rest=replace(one.rest, shape=own.shape), at=own)
    values = elements_of(op, part)
    if (stairs := _stairs(values.reshape(*values.shape[:2], -1))) is None:
        return None
    count, base = stairs
    first = other.base + (relation in ("sgt", "sle"))  # the number that begins with the first x after the equal ones
    steps = tuple(int(i == axis) - count * s for i, s in enumerate(other.steps))
    difference = Affine(base - count * first, steps, _shape(a, b))
    return Condition((("sge" if relation in ("sge", "sgt") else "slt", difference),))


def _stairs(values: Integers) -> tuple[int, Integers] | None:
    """Return c, and x for each (program, iteration), of a list that is ``(x + i) // c``; None for another list."""
    n = values.shape[2]
    rises = np.diff(values, axis=2)
    if np.any((rises != 0) & (rises != 1)):
        return None
    where = [np.flatnonzero(row) for row in np.unique(rises.reshape(-1, n - 1), axis=0)]
    apart = {int(d) for at in where for d in np.diff(at)}
    if len(apart) > 1:
        return None
    count = apart.pop() if apart else n
    first = np.where(rises.any(2), count - 1 - np.argmax(rises, axis=2), 0)
    base = count * values[..., 0] + first
    result = (base[..., None] + np.arange(n)) // count
    return (count, base) if np.array_equal(result, values) else None


def as_condition(op: Op, mask: ListedMask, is_read: Booleans) -> Condition | None:
    """Return, as a comparison of the elements' places, a mask by a table that keeps, in each program, the first
    elements along one axis of a block; None for another mask.
    """
    axis = _axis(mask)
    if axis is None or mask.at.of or (mask.beyond is None and any(x is not None for x in mask.at.limits())):
        return None
    try:
        return first_compared(op, mask, is_read)
    except ProgramError:
        return None


def first_compared(op: Op, mask: ListedMask, is_read: Booleans) -> Condition:
    """Return a mask by a table that keeps the first elements along an axis as a comparison; refuse another one."""
    axis, count = first_ones(op, mask, is_read)
    steps = tuple(int(i == axis) for i in range(len(mask.shape)))
    result = Condition((("slt", Affine(-count, steps, mask.shape)),))
    return result & mask.within if mask.within else result


def _refuse_signs(op: Op, relation: str, *values: Integers) -> None:
    if relation.startswith("u") and any(np.any(x < 0) for x in values):
        raise op.fail("some loaded integers are negative, and the kernel compares them as unsigned")


def joined_masks(op: Op, name: str, a: ListedMask, b: ListedMask | Condition) -> ListedMask | None:
    """Return two masks joined by ``andi``, or, if one table describes both, by ``ori`` or ``xori``; None for other
    masks.
    """
    if isinstance(b, Condition):
        return replace(a, within=b & a.within if a.within else b) if name == "andi" else None
    is_plain = a.within is None and b.within is None
    is_one = (a.at.of, a.at.steps, a.at.shape) == (b.at.of, b.at.steps, b.at.shape) and len(a.holds) == len(b.holds)
    if (how := _JOINED.get(name)) is None or not (is_plain or name == "andi"):
        return None
    if not is_one or not np.array_equal(a.at.base, b.at.base):
        return _joined_by_elements(op, how, a, b)
    beyond = None if a.beyond is None or b.beyond is None else bool(how(a.beyond, b.beyond))
    within = [w for w in (a.within, b.within) if w is not None]
    both = within[0] & within[1] if len(within) > 1 else within[0] if within else None
    return replace(a, holds=how(a.holds, b.holds), within=both, beyond=beyond)


def _joined_by_elements(op: Op, how: Callable[..., Booleans], a: ListedMask, b: ListedMask) -> ListedMask | None:
    """Return masks by two tables along one axis of a block as one mask by a table of all programs; None for two
    axes.
    """
    if a.at.of or b.at.of or _axis(a) is None or _axis(a) != _axis(b):
        return None
    thin = [replace(x, at=_own_axis(x), within=None) for x in (a, b)]
    holds = how(*(holds_of(op, x) for x in thin))
    known = np.logical_and(*(_defined(op, x) for x in thin))
    result = table_of(op, holds.astype(np.int64), known, thin[0].shape, 1)
    within = [w for w in (a.within, b.within) if w is not None]
    both = within[0] & within[1] if len(within) > 1 else within[0] if within else None
    return ListedMask(result.table.astype(bool), replace(result.at, shape=a.shape), both)


def first_ones(op: Op, mask: ListedMask, is_read: Booleans) -> tuple[int, Integers]:
    """Return the axis of a mask by a table, and the number of first elements that the mask does not hide; refuse a mask
    that hides others.
    """
    wide = [i for i, (s, n) in enumerate(zip(mask.at.steps, mask.at.shape, strict=True)) if s and n > 1]
    if len(wide) != 1:
        raise op.fail("a mask of loaded integers must run along one axis of the block")
    at = replace(mask.at, shape=tuple(n if i == wide[0] else 1 for i, n in enumerate(mask.at.shape)))
    holds = _entries(op, mask.holds, at, at.shape, bool(mask.beyond))
    holds = holds.reshape(*holds.shape[:2], -1)
    count = holds.sum(2)
    first = np.arange(holds.shape[2]) < count[..., None]
    if np.any((holds != first) & is_read[..., None]):
        raise op.fail("a mask of loaded integers must keep the first elements of a block, and no others")
    return wide[0], count


def _shifted(op: Op, x: Listed, shift: Integers) -> Listed:
    """Return a list with a part of its rest, (program, iteration), in the table; if programs differ, the table is built
    from the elements.
    """
    rest = replace(x.rest, base=x.rest.base - shift)
    if not np.ptp(shift):
        beyond = None if x.beyond is None else x.beyond + int(shift.flat[0])
        return replace(x, rest=rest, table=x.table + shift.flat[0], beyond=beyond)
    shape = tuple(n if step else 1 for n, step in zip(x.shape, x.at.steps, strict=True))
    part = replace(x, rest=Affine(shift, (0,) * len(shape), shape), at=replace(x.at, shape=shape))
    result = table_of(op, elements_of(op, part), _known(op, part), shape, WIDE)
    return Listed(rest, result.table, replace(result.at, shape=x.shape))


def by_one_list(op: Op, x: Listed, kinds_of: Kinds) -> Listed:
    """Return pointers whose table advances along an axis of a block along which they are also linear, as pointers by
    one table of all programs: one element, or row, for each row of the block.
    """
    axis = _axis(x)
    if axis is None or not x.rest.steps[axis]:
        return x
    own = _own_axis(x)
    steps = tuple(s if i == axis else 0 for i, s in enumerate(x.rest.steps))
    part = replace(x, rest=Affine(x.rest.base, steps, own.shape), at=own)
    result = table_of(op, elements_of(op, part), _known(op, part), own.shape, WIDE, kinds_of)
    others = tuple(0 if i == axis else s for i, s in enumerate(x.rest.steps))
    rest = replace(x.rest, base=np.zeros((1, 1), np.int64), steps=others)
    return Listed(rest, result.table, replace(result.at, shape=x.shape))


def inverted(mask: ListedMask) -> ListedMask:
    """Return the negation of a mask by a table only."""
    return replace(mask, holds=~mask.holds, beyond=None if mask.beyond is None else not mask.beyond)


def where_held(op: Op, x: Listed, mask: ListedMask, kinds_of: Kinds) -> Listed | None:
    """Return pointers by a table along one axis; the elements that a mask by a table hides point to the first element.

    None if the mask is along another axis.
    """
    x = by_one_list(op, x, kinds_of)
    axis = _axis(x)
    if axis is None or _axis(mask) != axis:
        return None
    own = _own_axis(x)
    part = replace(x, rest=Affine(np.zeros((1, 1), np.int64), (0,) * len(own.shape), own.shape), at=own)
    holds = holds_of(op, replace(mask, at=_own_axis(mask), within=None))
    values, holds = np.broadcast_arrays(elements_of(op, part), holds)
    result = table_of(op, np.where(holds, values, 0), _known(op, part), own.shape, WIDE, kinds_of)
    return replace(x, table=result.table, at=replace(result.at, shape=x.shape))


def as_list(x: Affine | Listed) -> Listed:
    """Return pointers of a block of one axis as a list of the block's elements."""
    if isinstance(x, Listed):
        return x
    rest = replace(x, steps=(0,), left=())
    return Listed(rest, x.steps[0] * np.arange(x.shape[0]), Affine(np.zeros((1, 1), np.int64), (1,), x.shape))


def without_hidden(op: Op, x: Listed, mask: ListedMask, source: View) -> Listed:
    """Return pointers by a list in which the elements that a mask hides point to no element."""
    shift = _shift_along(source, _axes_along(source, x.table), x)
    part = replace(x, rest=Affine(shift, (0,), x.shape))
    values, holds = np.broadcast_arrays(elements_of(op, part), holds_of(op, mask))
    result = table_of(op, np.where(holds, values, -1), None, x.shape, WIDE)
    return replace(result, rest=replace(x.rest, base=x.rest.base - shift))


def _axes_along(source: View, table: Integers) -> tuple[int, ...]:
    """Return the axes of a tensor along which a table's entries move."""
    along = tuple(i for i in range(len(source.sizes)) if np.any(source.index((i,), table)))
    return along or tuple(sorted(range(len(source.sizes)), key=lambda i: -source.by[i])[:1])


def _shift_along(source: View, along: tuple[int, ...], x: Listed) -> Integers:
    """Return what the rest of pointers by a table adds along some axes, (program, iteration)."""
    return np.asarray(sum(source.index((i,), x.rest.base) * source.by[i] for i in along))


def rows_of(op: Op, x: Listed, source: View, name: str) -> tuple[Affine, GatheredView]:
    """Return pointers by a table as linear pointers into a tensor of the table's rows, and that tensor."""
    inside = (x.table >= 0) & (x.table < source.extent)
    known = np.where(inside, x.table, 0)
    along = _axes_along(source, known)
    rest = sum(source.index((i,), known) * source.by[i] for i in along)
    if np.any(rest != known):
        raise op.fail(f"{source.name}: loaded integers address an element outside of its axes")
    if source.is_workspace:
        raise op.fail(
            f"{source.name}: rows that a list selects, or that a mask chooses, of values that npusim stores "
            "between two kernels are not supported"
        )
    if isinstance(source, MaskView):
        raise op.fail(f"{source.name}: rows of integers that a list selects, or that a mask chooses, are not supported")
    if np.any(shift := _shift_along(source, along, x)):
        return rows_of(op, _shifted(op, x, shift), source, name)
    view = gathered(name, source, along, tuple(np.where(inside, x.table, -1).tolist()))
    steps = tuple(s * view.by_row + t for s, t in zip(x.at.steps, x.rest.steps, strict=True))
    base = x.at.base * view.by_row + x.rest.base
    return Affine(base, steps, x.rest.shape, name, x.at.left), view
