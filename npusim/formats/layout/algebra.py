"""Layouts: functions from coordinates to indices in CuTe's notation, ``shape:stride``.

Source: NVIDIA/cutlass, ``media/docs/cpp/cute/02_layout_algebra.md``.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, TypeAlias

from npusim.errors import LayoutError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: An integer, or a tuple of such values.
IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"


@dataclass(frozen=True, slots=True)
class Layout:
    """A function from coordinates of ``shape`` to indices: the inner product with ``stride``.

    ``shape`` is an extent, or a nested tuple of extents, the first of which varies fastest; ``stride`` has the same
    nesting (otherwise `LayoutError`).

    Examples
    --------
    >>> tile = Layout((4, 8), (8, 1))
    >>> tile(1, 2), tile(9), str(tile)
    (10, 10, '(4,8):(8,1)')
    """

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not _is_congruent(self.shape, self.stride):
            raise LayoutError(f"layout {self}: shape and stride must have the same nesting")

    def __call__(self, *coordinate: int) -> int:
        """Return the index at a coordinate for each mode, or at a position in the order of the shape; the last extent
        continues beyond its end.

        Raises `LayoutError` for a number of coordinates that differs from the number of modes.
        """
        if len(coordinate) != 1:
            if len(coordinate) != len(self.modes):
                raise LayoutError(f"{len(coordinate)} coordinates do not match layout {self}")
            return sum(mode(place) for mode, place in zip(self.modes, coordinate, strict=True))
        place, index = coordinate[0], 0
        *inner, (_, last) = self.flat
        for extent, stride in inner:
            place, at = divmod(place, extent)
            index += at * stride
        return index + place * last

    def __str__(self) -> str:
        return f"{self.shape}:{self.stride}".replace(" ", "").replace(",)", ")")

    @property
    def modes(self) -> tuple[Layout, ...]:
        """The parts of the top level as layouts."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(map(Layout, self.shape, self.stride))

    @property
    def flat(self) -> tuple[tuple[int, int], ...]:
        """``(extent, stride)`` of each integer of the shape."""
        return tuple(zip(_flatten(self.shape), _flatten(self.stride), strict=True))

    @property
    def size(self) -> int:
        """Number of its coordinates."""
        return prod(_flatten(self.shape))

    @property
    def is_bijective(self) -> bool:
        """Whether the layout has every index from 0 to ``size - 1`` exactly once."""
        return {self(i) for i in range(self.size)} == set(range(self.size))


def coalesce(layout: Layout) -> Layout:
    """Return the same function of the integers with the fewest modes and without nested modes.

    Examples
    --------
    >>> str(coalesce(Layout((2, (1, 6)), (1, (6, 2)))))
    '12:1'
    """
    merged: list[tuple[int, int]] = []
    for extent, stride in layout.flat:
        if extent == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, stride))
    if len(merged) < 2:
        return Layout(*(merged[0] if merged else (1, 0)))
    return Layout(tuple(s for s, _ in merged), tuple(d for _, d in merged))


def fitted(function: Callable[[int], int], shape: tuple[IntTuple, ...]) -> Layout:
    """Return the layout that equals ``function`` at every place of ``shape``, each mode coalesced.

    Raises `LayoutError` if no strides give the function; the message names the first place where they fail.

    Examples
    --------
    >>> str(fitted(lambda i: i % 4 * 8 + i // 4, ((2, 2), 8)))
    '(4,8):(8,1)'
    """
    extents = _flatten(shape)
    steps = accumulate((1, *extents[:-1]), mul)
    strides = [function(step) if extent > 1 else 0 for extent, step in zip(extents, steps, strict=True)]
    layout = Layout(shape, _nested(strides, shape))
    for index in range(layout.size):
        if layout(index) != function(index):
            raise LayoutError(f"no layout fits: at {index} {layout} gives {layout(index)}, needed: {function(index)}")
    modes = [coalesce(mode) for mode in layout.modes]
    return Layout(tuple(m.shape for m in modes), tuple(m.stride for m in modes))


def _flatten(value: IntTuple) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(leaf for part in value for leaf in _flatten(part))


def _nested(leaves: Sequence[int], like: IntTuple) -> IntTuple:
    rest = iter(leaves)

    def nested(part: IntTuple) -> IntTuple:
        return next(rest) if isinstance(part, int) else tuple(map(nested, part))

    return nested(like)


def _is_congruent(one: IntTuple, other: IntTuple) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int)
    return len(one) == len(other) and all(map(_is_congruent, one, other))
