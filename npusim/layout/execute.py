"""Instructions executed on registers: what each lane holds goes in, what each lane gets comes out.

Registers are arrays ``(..., 32 lanes, values)``.  Arithmetic is the caller's: any function
``(a, b, c) -> a·b + c`` on stacks of matrices, such as ``formats.matmul`` with an arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from npusim.errors import LayoutError
from npusim.layout.fragment import WARP_LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from npusim.layout.fragment import Arrangement, Fragment
    from npusim.layout.instruction import MmaInstruction

    #: Any dtype: lanes move values, they do not look at them.
    Array: TypeAlias = NDArray[Any]
    Index: TypeAlias = NDArray[np.intp]
    Multiply: TypeAlias = Callable[[Array, Array, Array], Array]


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


def chained_product(instruction: MmaInstruction, a: Array, b: Array, c: Array, multiply: Multiply) -> Array:
    """Execute a warp's product of whole tiles on registers, k in rising order, by a ``multiply`` that chains.

    ``a``, ``b``, ``c``: registers of `to_registers`, ``(..., m, k, 32, values)``, ``(..., k, n, 32, values)`` and
    ``(..., m, n, 32, values)``; m, n, k count fragments.  Each group's fragments are put side by side: one call
    multiplies ``(..., groups, m rows, all k)`` by ``(..., groups, all k, n columns)``, adding up k instruction by
    instruction in rising order, as ``formats.matmul`` does.
    """
    import numpy as np

    operands = ((instruction.a, a), (instruction.b, b), (instruction.c, c))
    whole = multiply(*(_side_by_side(*operand) for operand in operands))
    down, across = c.shape[-4:-2]
    rows, columns = instruction.c.rows, instruction.c.columns
    tiles = whole.reshape(*whole.shape[:-2], down, rows, across, columns)
    return gather(instruction.c, np.moveaxis(tiles, (-5, -4, -3, -2, -1), (-3, -5, -2, -4, -1)))


def _side_by_side(fragment: Fragment, registers: Array) -> Array:
    """Return each group's whole matrix, ``(..., groups, rows, columns)``, from its fragments."""
    import numpy as np

    tiles = scatter(fragment, registers)  # (..., down, across, groups, rows, columns)
    moved = np.moveaxis(tiles, (-5, -4, -3, -2, -1), (-4, -2, -5, -3, -1))
    *lead, down, rows, across, columns = moved.shape
    return moved.reshape(*lead, down * rows, across * columns)


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
