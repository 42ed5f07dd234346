"""Layouts: functions from coordinates to indices written as ``shape:stride``, and their algebra.

The operations are those of CuTe (NVIDIA/cutlass, ``media/docs/cpp/cute/02_layout_algebra.md``);
each states the law it obeys, and the tests check the law at every coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, TypeAlias

from npusim.errors import LayoutError
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """A function from coordinates of ``shape`` to indices: the inner product with ``stride``.

    Parameters
    ----------
    shape
        An extent, or a (nested) tuple of extents; mode 0 runs fastest.
    stride
        Nested as ``shape``; default: a dense array whose mode 0 is contiguous.

    Raises
    ------
    LayoutError
        An extent below 1, a negative stride, strides nested otherwise than extents, or anything but
        integers.

    Examples
    --------
    >>> tile = Layout((4, 8), (8, 1))
    >>> tile(1, 2), tile((1, 2)), tile(9)
    (10, 10, 10)
    >>> str(tile)
    '(4,8):(8,1)'
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        for value in (shape, stride if stride is not None else ()):
            if not is_int_tuple(value):
                raise LayoutError(f"layout: {value!r} is no integer, nor a tuple of such")
        stride = compact(shape) if stride is None else stride
        text = f"{spelled(shape)}:{spelled(stride)}"
        if not is_congruent(shape, stride):
            raise LayoutError(f"layout {text}: shape and stride must be nested alike")
        if any(extent < 1 for extent in flatten(shape)) or any(d < 0 for d in flatten(stride)):
            raise LayoutError(f"layout {text}: extents must be at least 1, strides at least 0")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    def __call__(self, *coordinate: IntTuple) -> int:
        """Return the index at a coordinate, or at a place in the order of the shape.

        Beyond the shape the last mode goes on, as in CuTe.
        """
        at = coordinate[0] if len(coordinate) == 1 else coordinate
        position = coordinate_of(as_index(at, self.shape), self.shape)
        return sum(x * d for x, d in zip(flatten(position), flatten(self.stride), strict=True))

    def __getitem__(self, mode: int) -> Layout:
        """Return one mode as a layout of its own."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            if mode == 0:
                return self
            raise LayoutError(f"layout {self} has no mode {mode}")
        if not 0 <= mode < len(self.shape):
            raise LayoutError(f"layout {self} has no mode {mode}")
        return Layout(self.shape[mode], self.stride[mode])

    def __str__(self) -> str:
        return f"{spelled(self.shape)}:{spelled(self.stride)}"

    @property
    def rank(self) -> int:
        """How many modes it has; 1 where the shape is an integer."""
        return 1 if isinstance(self.shape, int) else len(self.shape)

    @property
    def modes(self) -> tuple[Layout, ...]:
        """The modes as layouts."""
        return tuple(self[mode] for mode in range(self.rank))

    @property
    def flat(self) -> tuple[tuple[int, int], ...]:
        """``(extent, stride)`` of each integer of the shape."""
        return tuple(zip(flatten(self.shape), flatten(self.stride), strict=True))

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return size_of(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest index."""
        return 1 + sum((extent - 1) * stride for extent, stride in self.flat)

    @property
    def is_bijective(self) -> bool:
        """Whether it takes every index from 0 to ``size - 1`` once."""
        return self.cosize == self.size == len({self(i) for i in range(self.size)})


def row_major(shape: Sequence[int]) -> Layout:
    """Return the layout of a dense array whose last mode is contiguous (ND)."""
    backwards = flatten(compact(tuple(reversed(shape))))
    return Layout(tuple(shape), tuple(reversed(backwards)))


def bundle(*modes: Layout) -> Layout:
    """Return the layout with these modes; each keeps its own strides."""
    return Layout(tuple(m.shape for m in modes), tuple(m.stride for m in modes))


def _of_flat(pairs: Sequence[tuple[int, int]]) -> Layout:
    if len(pairs) == 1:
        return Layout(*pairs[0])
    return Layout(tuple(s for s, _ in pairs), tuple(d for _, d in pairs)) if pairs else Layout(1, 0)


def coalesce(layout: Layout) -> Layout:
    """Return the same function of the integers with the fewest modes, none nested.

    Law: ``coalesce(L)(i) == L(i)`` for i below ``L.size``.

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
    return _of_flat(merged)


def composition(outer: Layout, inner: Layout) -> Layout:
    """Return the layout that applies ``inner``, then ``outer``.

    Law: ``R(i) == outer(inner(i))`` for i below ``inner.size``, where ``inner`` stays below
    ``outer.size``; R has the modes of ``inner``.

    Raises
    ------
    LayoutError
        The extents do not divide, so no ``shape:stride`` with the modes of ``inner`` is that
        function.

    Examples
    --------
    >>> str(composition(Layout((4, 8), (8, 1)), Layout(8, 4)))
    '8:1'
    """
    source = coalesce(outer).flat
    pieces = [_pieces(source, extent, stride) for extent, stride in inner.flat]
    reached = [0] * len(source)
    for digit, extent, step in (piece for mode in pieces for piece in mode or ()):
        reached[digit] += (extent - 1) * step
    # A sum of indices that carries from one mode of `outer` into the next is no sum of strides.
    carries = any(top >= extent for top, (extent, _) in zip(reached[:-1], source, strict=False))
    if carries or any(mode is None for mode in pieces):
        raise LayoutError(f"{outer} after {inner} is no layout: the extents do not divide")
    modes = [
        _of_flat([(taken, step * source[digit][1]) for digit, taken, step in mode]) if mode else Layout(extent, 0)
        for mode, (extent, _) in zip(pieces, inner.flat, strict=True)
    ]
    return _nested(unflatten(range(len(modes)), inner.shape), modes)


def _nested(numbers: IntTuple, layouts: Sequence[Layout]) -> Layout:
    """Return the layouts ``found``, nested as the numbers of their places are."""
    if isinstance(numbers, int):
        return layouts[numbers]
    return bundle(*(_nested(part, layouts) for part in numbers))


def _pieces(source: Sequence[tuple[int, int]], extent: int, stride: int) -> list[tuple[int, int, int]] | None:
    """Return ``extent`` places ``stride`` apart as (mode of ``source``, extent, step in it).

    None where they do not cut the modes evenly; no pieces where all are one place.
    """
    if extent == 1 or stride == 0:
        return []
    pieces: list[tuple[int, int, int]] = []
    last = len(source) - 1
    for digit, (room, _) in enumerate(source):
        if digit == last or (extent - 1) * stride < room:
            break  # every place that is left lies in this mode
        if stride % room and room % stride:
            return None
        taken = min(max(1, room // stride), extent)
        if extent % taken:
            return None
        if taken > 1:
            pieces.append((digit, taken, stride))
        extent, stride = extent // taken, ceil_div(stride, room)
    return [*pieces, (digit, extent, stride)] if extent > 1 else pieces


def complement(layout: Layout, cosize: int | None = None) -> Layout:
    """Return the layout of the indices that ``layout`` leaves out below ``cosize``.

    Law: ``bundle(L, C)`` takes no index twice, its cosize is at least ``cosize``, and the strides
    of C rise.  ``cosize`` defaults to that of ``layout``.

    Raises
    ------
    LayoutError
        The strides of ``layout`` do not divide one another, so the rest is no layout.

    Examples
    --------
    >>> str(complement(Layout(4, 2), 24))
    '(2,3):(1,8)'
    """
    bound = layout.cosize if cosize is None else cosize
    gaps: list[tuple[int, int]] = []
    covered = 1
    for stride, extent in sorted((d, s) for s, d in layout.flat if s > 1 and d > 0):
        if stride % covered:
            raise LayoutError(f"{layout} has no complement: stride {stride} follows {covered}")
        gaps.append((stride // covered, covered))
        covered = stride * extent
    return coalesce(_of_flat([*gaps, (ceil_div(bound, covered), covered)]))


def right_inverse(layout: Layout) -> Layout:
    """Return where in ``layout`` each index from 0 on lies, as far as they follow one another.

    Law: ``layout(R(i)) == i`` for i below ``R.size``.

    Examples
    --------
    >>> str(right_inverse(Layout((4, 8), (8, 1))))
    '(8,4):(4,1)'
    """
    dense = coalesce(layout)
    places = flatten(compact(dense.shape))
    modes: list[tuple[int, int]] = []
    covered = 1
    for (extent, stride), place in sorted(
        zip(dense.flat, places, strict=True), key=lambda mode: (mode[0][1], mode[0][0])
    ):
        if extent == 1:
            continue
        if stride != covered:
            break
        modes.append((extent, place))
        covered *= extent
    return coalesce(_of_flat(modes))


def fitted(function: Callable[[int], int], shape: IntTuple) -> Layout:
    """Return the layout of ``shape`` that equals ``function`` at every place.

    Each mode of the top level is coalesced.

    Raises
    ------
    LayoutError
        No strides give the function; names the first place where they fail.

    Examples
    --------
    >>> str(fitted(lambda i: i % 4 * 8 + i // 4, ((2, 2), 8)))
    '(4,8):(8,1)'
    """
    steps = flatten(compact(shape))
    strides = [function(u) if s > 1 else 0 for s, u in zip(flatten(shape), steps, strict=True)]
    layout = Layout(shape, unflatten(strides, shape))
    for index in range(layout.size):
        if layout(index) != function(index):
            raise LayoutError(
                f"no layout of shape {spelled(shape)}: at {index} {layout} gives {layout(index)}, "
                f"wanted {function(index)}"
            )
    return layout if isinstance(shape, int) else bundle(*map(coalesce, layout.modes))


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

    def nested(part: IntTuple) -> IntTuple:
        return next(rest) if isinstance(part, int) else tuple(map(nested, part))

    return nested(like)


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


#: What divides or multiplies a layout: a layout, an extent, or one of these for each mode.
Tiler: TypeAlias = "Layout | int | tuple[Tiler, ...]"


def logical_divide(layout: Layout, tiler: Tiler) -> Layout:
    """Return ``layout`` as (within a tile, which tile); a tuple divides mode by mode.

    Law: mode 0 is ``composition(layout, tiler)``; both modes together take the same indices.
    Modes beyond the tuple stay as they are.

    Raises
    ------
    LayoutError
        The tiler does not divide the layout, or a tuple has more parts than the layout modes.

    Examples
    --------
    >>> str(logical_divide(Layout(24, 2), 4))
    '(4,6):(2,8)'
    """
    if isinstance(tiler, tuple):
        return bundle(*_by_mode(layout, tiler, logical_divide))
    tile = tiler if isinstance(tiler, Layout) else Layout(tiler, 1)
    if layout.size % tile.size:
        raise LayoutError(f"{layout} cannot be divided by {tile}: {layout.size} % {tile.size} != 0")
    return composition(layout, bundle(tile, complement(tile, layout.size)))


def logical_product(layout: Layout, tiler: Tiler) -> Layout:
    """Return copies of ``layout`` side by side where ``tiler`` says; a tuple goes mode by mode.

    Law: mode 0 is ``layout``, mode 1 counts the copies, and no index is taken twice if neither
    ``layout`` nor ``tiler`` takes one twice.

    Raises
    ------
    LayoutError
        ``layout`` has no complement, or a tuple has more parts than the layout modes.

    Examples
    --------
    >>> str(logical_product(Layout(4, 1), 3))
    '(4,3):(1,4)'
    """
    if isinstance(tiler, tuple):
        return bundle(*_by_mode(layout, tiler, logical_product))
    copies = tiler if isinstance(tiler, Layout) else Layout(tiler, 1)
    return bundle(layout, composition(complement(layout, layout.size * copies.cosize), copies))


def _by_mode(layout: Layout, tiler: tuple[Tiler, ...], apply: Callable[[Layout, Tiler], Layout]) -> list[Layout]:
    if len(tiler) > layout.rank:
        raise LayoutError(f"{layout} has {layout.rank} modes, its tiler {len(tiler)} parts")
    parts = [apply(mode, part) for mode, part in zip(layout.modes, tiler, strict=False)]
    return [*parts, *layout.modes[len(tiler) :]]


@dataclass(frozen=True, slots=True)
class Swizzle:
    """XOR ``bits`` bits at ``base + shift`` into those at ``base`` (CuTe's ``Swizzle<B,M,S>``).

    A negative ``shift`` XORs the lower bits into the upper ones.  Its own inverse.

    Raises
    ------
    LayoutError
        Negative ``bits`` or ``base``, or fields that overlap (``|shift| < bits``).

    Examples
    --------
    >>> Swizzle(3, 3, 3)(64 + 8)
    64
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or abs(self.shift) < self.bits:
            raise LayoutError(f"{self}: needs bits >= 0, base >= 0 and |shift| >= bits")

    def __call__(self, index: int) -> int:
        """Return the swizzled index."""
        field = (1 << self.bits) - 1 << self.base
        if self.shift >= 0:
            return index ^ (index >> self.shift & field)
        return index ^ ((index & field) << -self.shift)


@dataclass(frozen=True, slots=True)
class SwizzledLayout:
    """A layout whose indices are swizzled: ``swizzle(layout(coordinate))``."""

    swizzle: Swizzle
    layout: Layout

    def __call__(self, *coordinate: IntTuple) -> int:
        """Return the swizzled index at a coordinate."""
        return self.swizzle(self.layout(*coordinate))

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return self.layout.size
