"""Layouts cut into tiles, and tiles repeated: logical and zipped division and product.

As in CuTe (NVIDIA/cutlass, ``media/docs/cpp/cute/02_layout_algebra.md``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from npusim.errors import LayoutError
from npusim.layout.algebra import Layout, bundle, complement, composition

if TYPE_CHECKING:
    from collections.abc import Callable

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
