"""Tiles as the registers of a warp, arrays ``(..., 32 lanes, values)``: what layouts and chains are held against."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from npusim.errors import LayoutError
from npusim.formats.layout.fragment import WARP_LANES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from npusim.formats.layout.chain import Chain
    from npusim.formats.layout.fragment import Arrangement, Fragment

    #: Any dtype: lanes move values, they do not look at them.
    Array: TypeAlias = NDArray[Any]
    Index: TypeAlias = NDArray[np.intp]


def gather(fragment: Fragment, tiles: Array) -> Array:
    """Return the registers of one tile a group: ``(..., groups, rows, columns)`` in, ``(..., 32, values)`` out."""
    group, row, column = _elements(fragment)
    return tiles[..., group, row, column]


def scatter(fragment: Fragment, registers: Array) -> Array:
    """Return the tiles that registers hold; the inverse of `gather`."""
    _check_registers(fragment, registers)
    lane, value = _holders(fragment)
    return registers[..., lane, value]


def to_registers(fragment: Fragment, arrangement: Arrangement, tile: Array) -> Array:
    """Return the registers of one warp that hold a whole tile.

    ``(..., rows, columns)`` in, a multiple of what one warp instruction covers (`LayoutError` otherwise);
    ``(..., down, across, 32, values)`` out, the fragments down and across the tile.  What several groups need (B in
    4x1) is given to each.
    """
    height, width = arrangement.tile(fragment)
    down, across = arrangement.repeats(fragment, tile.shape[-2], tile.shape[-1])
    blocks = tile.reshape(*tile.shape[:-2], down, height, across, width).swapaxes(-3, -2)
    row, column = _warp_elements(fragment, arrangement)
    return blocks[..., row, column]


def from_registers(fragment: Fragment, arrangement: Arrangement, registers: Array) -> Array:
    """Return the tile that registers hold; the inverse of `to_registers`.

    Where groups hold copies, the copies of the last lanes are taken.
    """
    import numpy as np

    _check_registers(fragment, registers)
    height, width = arrangement.tile(fragment)
    *lead, down, across = registers.shape[:-2]
    row, column = _warp_elements(fragment, arrangement)
    blocks = np.empty((*lead, down, across, height, width), registers.dtype)
    blocks[..., row, column] = registers
    return blocks.swapaxes(-3, -2).reshape(*lead, down * height, across * width)


def gathered(link: Chain, registers: Array) -> Array:
    """Return an operand's registers from its chain's accumulators, each value taken from where it lies.

    ``(..., tiles, 32, accumulator values)`` in, ``(..., steps, 32, operand values)`` out.
    """
    import numpy as np

    lane, value = np.moveaxis(np.array(link.sources, np.intp), -1, 0)
    lead, values = registers.shape[:-3], link.tiles * link.accumulator.values
    flat = registers.swapaxes(-3, -2).reshape(*lead, WARP_LANES, values)
    return flat[..., lane, value].reshape(*lead, WARP_LANES, link.steps, link.operand.values).swapaxes(-3, -2)


def _check_registers(fragment: Fragment, registers: Array) -> None:
    if registers.shape[-2:] != (WARP_LANES, fragment.values):
        raise LayoutError(
            f"{fragment}: registers of shape {registers.shape}, wanted (..., {WARP_LANES}, {fragment.values})"
        )


@cache
def _elements(fragment: Fragment) -> tuple[Index, Index, Index]:
    """Return the group, row and column of each (lane, value)."""
    import numpy as np

    places = [
        [(fragment.group(lane), *fragment.coordinate(lane, v)) for v in range(fragment.values)]
        for lane in range(WARP_LANES)
    ]
    group, row, column = np.moveaxis(np.array(places, np.intp), -1, 0)
    return group, row, column


@cache
def _holders(fragment: Fragment) -> tuple[Index, Index]:
    """Return the lane and value of each (group, row, column)."""
    import numpy as np

    rows, columns = range(fragment.rows), range(fragment.columns)
    places = [[[fragment.holder(r, c, g) for c in columns] for r in rows] for g in range(fragment.groups)]
    lane, value = np.moveaxis(np.array(places, np.intp), -1, 0)
    return lane, value


@cache
def _warp_elements(fragment: Fragment, arrangement: Arrangement) -> tuple[Index, Index]:
    """Return the row and column in the warp's tile of each (lane, value)."""
    import numpy as np

    places = [[arrangement.element(fragment, lane, v) for v in range(fragment.values)] for lane in range(WARP_LANES)]
    row, column = np.moveaxis(np.array(places, np.intp), -1, 0)
    return row, column
