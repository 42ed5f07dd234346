"""A warp's product one instruction after the other: what chained products are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npusim.errors import LayoutError
from npusim.layout import mma

if TYPE_CHECKING:
    from npusim.layout import Instruction

Array = Any
Multiply = Any


def warp_product(
    instruction: Instruction, a: Array, b: Array, c: Array, multiply: Multiply | None = None
) -> Array:
    """Execute a warp's product of whole tiles on registers, k in rising order.

    Parameters
    ----------
    a, b, c
        Registers of `to_registers`: ``(..., m, k, 32, values)``, ``(..., k, n, 32, values)``,
        ``(..., m, n, 32, values)``; m, n, k count fragments.
    multiply
        As in `mma`; one call for each k computes all ``m x n`` fragments.

    Raises
    ------
    LayoutError
        A and B have different numbers of fragments along k.
    """
    steps = a.shape[-3]
    if b.shape[-4] != steps:
        raise LayoutError(f"{instruction}: A has {steps} fragments along k, B {b.shape[-4]}")
    for k in range(steps):
        left, right = a[..., :, k, None, :, :], b[..., None, k, :, :, :]
        c = mma(instruction, left, right, c, multiply)
    return c
