"""Cycles that accesses to shared memory take in its banks, from the lanes' addresses."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.layout.fragment import WARP_LANES
from npusim.layout.memory import fragment_addresses, padded, return_cycles, swizzled, wavefronts
from npusim.units import chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.ir.op import WarpPlan
    from npusim.ir.tile import Tile
    from npusim.layout.fragment import Arrangement, Fragment
    from npusim.layout.memory import BankModel

    #: (row, column) -> element.
    Places = Callable[[int, int], int]


def places(tile: Tile, *, swizzle: bool) -> Places:
    """Return where the elements of a tile lie in shared memory, and those of the slot beyond it.

    A ragged tile is smaller than what a warp reads; the slot has room for whole fragments.
    """
    rows = round_up(tile.rows, WARP_LANES)
    if swizzle:
        return swizzled(rows, tile.stride, element_bytes=get_format(tile.fmt).size_bytes)
    return padded(rows, tile.cols, padding=tile.stride - tile.cols)


@cache
def load_cycles(
    fragment: Fragment, where: Arrangement, tile: Tile, plan: WarpPlan, banks: BankModel, *, is_transposed: bool
) -> int:
    """Return the cycles of one load of a warp's part of B: banks, or the way back if that is longer.

    ``is_transposed``: the tile holds B's columns as rows, as K does in Q Kᵀ.
    """
    at = places(tile, swizzle=plan.swizzle)
    addresses = fragment_addresses(
        fragment,
        where,
        (lambda row, column: at(column, row)) if is_transposed else at,
        access_bytes=plan.access_bytes,
        element_bytes=get_format(tile.fmt).size_bytes,
    )
    width = plan.access_bytes
    return max(wavefronts(addresses, width, banks), return_cycles(addresses, width, banks))


@cache
def store_cycles(tile: Tile, plan: WarpPlan, banks: BankModel) -> int:
    """Return the cycles of storing a tile: neighbouring lanes store neighbouring pieces of a row."""
    size = get_format(tile.fmt).size_bytes
    each, at = plan.access_bytes // size, places(tile, swizzle=plan.swizzle)
    pieces = [(row, col) for row in range(tile.rows) for col in range(0, tile.cols, each)]
    total = 0
    for start, count in chunks(len(pieces), WARP_LANES):
        addresses = [at(*piece) * size for piece in pieces[start : start + count]]
        total += wavefronts(addresses, plan.access_bytes, banks)
    return total
