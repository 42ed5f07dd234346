"""Nested tuples of integers: the shapes, strides and coordinates of layouts.

Mode 0 runs fastest everywhere (column-major order), as in CuTe.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, TypeAlias

from npusim.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: An integer, or a tuple of such things.
IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"


def flatten(value: IntTuple) -> tuple[int, ...]:
    """Return the integers of ``value`` from left to right."""
    if isinstance(value, int):
        return (value,)
    return tuple(leaf for part in value for leaf in flatten(part))


def unflatten(leaves: Sequence[int], like: IntTuple) -> IntTuple:
    """Return ``leaves`` nested as ``like`` is; there must be one for each of its integers."""
    rest = iter(leaves)
    return _nested(rest, like)


def _nested(rest: Iterator[int], like: IntTuple) -> IntTuple:
    if isinstance(like, int):
        return next(rest)
    return tuple(_nested(rest, part) for part in like)


def size_of(shape: IntTuple) -> int:
    """Return how many coordinates ``shape`` has; 1 for the empty tuple."""
    return prod(flatten(shape))


def is_congruent(one: IntTuple, other: IntTuple) -> bool:
    """Return whether both are nested alike."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int)
    return len(one) == len(other) and all(map(is_congruent, one, other))


def is_int_tuple(value: object) -> bool:
    """Return whether ``value`` is an integer, or a nested tuple of integers."""
    if isinstance(value, tuple):
        return all(map(is_int_tuple, value))
    return isinstance(value, int) and not isinstance(value, bool)


def compact(shape: IntTuple) -> IntTuple:
    """Return the strides of a dense array whose mode 0 is contiguous."""
    leaves = flatten(shape)
    return unflatten([1, *accumulate(leaves[:-1], mul)] if leaves else [], shape)


def as_index(coordinate: IntTuple, shape: IntTuple) -> int:
    """Return the place of ``coordinate`` in the order of ``shape``.

    An integer stands for the coordinate at that place, also inside a tuple.

    Raises
    ------
    LayoutError
        The coordinate is nested deeper than the shape, or has another number of parts.
    """
    if isinstance(coordinate, int):
        return coordinate
    if isinstance(shape, int) or len(coordinate) != len(shape):
        raise LayoutError(f"coordinate {spelled(coordinate)} does not fit shape {spelled(shape)}")
    index, unit = 0, 1
    for part, extent in zip(coordinate, shape, strict=True):
        index += unit * as_index(part, extent)
        unit *= size_of(extent)
    return index


def coordinate_of(index: int, shape: IntTuple) -> IntTuple:
    """Return the coordinate at place ``index``, nested as ``shape``; the last mode may overrun."""
    leaves = flatten(shape)
    parts = []
    for extent in leaves[:-1]:
        parts.append(index % extent)
        index //= extent
    return unflatten([*parts, index] if leaves else [], shape)


def spelled(value: IntTuple) -> str:
    """Return ``value`` as CuTe prints it: ``((4,2),4)``."""
    return str(value).replace(" ", "").replace(",)", ")")
