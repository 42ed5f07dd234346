"""A warp's product one instruction after the other, and shuffles one by one: what chained products are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from layout.execute import gather, scatter
from npusim.errors import LayoutError
from npusim.formats.layout.fragment import WARP_LANES

if TYPE_CHECKING:
    from npusim.formats.layout.chain import Chain
    from npusim.formats.layout.instruction import MmaInstruction

Array = Any
Multiply = Any


def mma(instruction: MmaInstruction, a: Array, b: Array, c: Array, multiply: Multiply | None = None) -> Array:
    """Execute one warp instruction on registers ``(..., 32, values)``; return those of D.

    ``multiply``: ``(a, b, c) -> a·b + c`` on ``(..., groups, rows, columns)``; default ``a @ b + c`` as numpy does
    it, exact on integers.
    """
    fragments = (instruction.a, instruction.b, instruction.c)
    x, y, z = (scatter(f, r) for f, r in zip(fragments, (a, b, c), strict=True))
    return gather(instruction.c, x @ y + z if multiply is None else multiply(x, y, z))


def shuffled(link: Chain, registers: Array) -> Array:
    """Return the same as `gathered`, by what each lane keeps and the shuffles, one by one."""
    lead, values = registers.shape[:-3], link.tiles * link.accumulator.values
    flat = registers.swapaxes(-3, -2).reshape(*lead, WARP_LANES, values)
    found = np.zeros((*flat.shape[:-1], len(link.sources[0])), flat.dtype)
    for lane, row in enumerate(link.sources):
        for slot, (source, value) in enumerate(row):
            if source == lane:
                found[..., lane, slot] = flat[..., lane, value]
    for shuffle in link.shuffles:
        for lane in range(WARP_LANES):
            published = flat[..., lane ^ shuffle.mask, shuffle.sources[lane]]
            found[..., lane, shuffle.slots[lane]] = published
    return found.reshape(*lead, WARP_LANES, link.steps, link.operand.values).swapaxes(-3, -2)


def warp_product(instruction: MmaInstruction, a: Array, b: Array, c: Array, multiply: Multiply | None = None) -> Array:
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
