"""Steps of a GPU's warps executed lane by lane: registers in, registers out.

Tiles are dealt to the lanes of the warps as the fragments say (`npusim.layout`), the instructions
work on registers, and the result is collected again.  Bits are those of the same arithmetic on whole
tiles: layouts change who holds a value, never the value.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.layout import arrangement, chain, chained_product, from_registers, instruction, to_registers
from npusim.units import round_up

if TYPE_CHECKING:
    from npusim.formats import MmaArithmetic
    from npusim.ir.warps import WarpPlan
    from npusim.layout import Chain

Array = NDArray[Any]
#: Volta's only matrix instruction (PTX ISA).
MMA = "m8n8k4"


def product_on_lanes(
    a: Array, b: Array, c: Array, plan: WarpPlan, arithmetic: MmaArithmetic, *, is_transposed: bool
) -> Array:
    """Return ``a b + c`` by m8n8k4 on fragments; ``is_transposed``: B lies by columns in memory.

    Shapes are (lanes, rows, k), (lanes, k, columns), (lanes, rows, columns).  What does not fill
    whole fragments is padded with zeros and cut off again.
    """
    acc = "f16" if arithmetic.acc_format == "float16" else "f32"
    mma = instruction(MMA, acc=acc, a="row", b="col" if is_transposed else "row")
    where = arrangement(plan.arrangement, plan.row_order)
    operands = ((mma.a, a), (mma.b, b), (mma.c, c))
    left, right, start = (to_registers(f, where, filled(t, where.tile(f))) for f, t in operands)

    def multiply(x: Array, y: Array, z: Array) -> Array:
        return formats.matmul(x, y, z, arithmetic=arithmetic)

    result = chained_product(mma, left, right, start, multiply)
    return from_registers(mma.c, where, result)[..., : c.shape[-2], : c.shape[-1]]


def exchanged(p: Array, plan: WarpPlan) -> Array:
    """Return P after its way from accumulators to the A operand: values as they were, in new lanes."""
    link = _link(plan)
    where = link.arrangement
    rows, columns = where.tile(link.accumulator)
    whole = filled(p, (rows, columns * link.tiles))
    held = to_registers(link.accumulator, where, whole)
    across = held.shape[-3] // link.tiles
    chained = held.reshape(*held.shape[:-3], across, link.tiles, *held.shape[-2:])
    moved = link.gathered(chained)
    operand = moved.reshape(*moved.shape[:-4], across * link.steps, *moved.shape[-2:])
    return from_registers(link.operand, where, operand)[..., : p.shape[-2], : p.shape[-1]]


@cache
def _link(plan: WarpPlan) -> Chain:
    """Return which accumulator of which lane each value of the A operand comes from."""
    first, second = instruction(MMA, acc=plan.accumulator), instruction(MMA, b="row")
    where = arrangement(plan.arrangement, plan.row_order)
    return chain(first.c, second.a, arrangement=where)


def filled(tile: Array, unit: tuple[int, int]) -> Array:
    """Return a tile padded with zeros to a multiple of ``unit`` rows and columns."""
    rows, columns = (round_up(n, u) for n, u in zip(tile.shape[-2:], unit, strict=True))
    if (rows, columns) == tile.shape[-2:]:
        return tile
    whole = np.zeros((*tile.shape[:-2], rows, columns), tile.dtype)
    whole[..., : tile.shape[-2], : tile.shape[-1]] = tile
    return whole
