"""What each opcode computes: one table, Opcode -> function on arrays of the formats' own dtypes.

Arrays have shape ``(lanes, rows, cols)``; a column operand ``(lanes, rows, 1)`` spreads over the
columns.  Every result is rounded once, to the destination's format, by ``npusim.formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import FormatError, ProgramError, UnknownOpcodeError
from npusim.ir.op import Attributes, Opcode
from npusim.layout.chain import chain
from npusim.layout.execute import chained_product, from_registers, to_registers
from npusim.layout.fragment import arrangement
from npusim.layout.instruction import instruction
from npusim.units import round_up

if TYPE_CHECKING:
    from npusim.formats import MmaArithmetic
    from npusim.ir.op import WarpPlan
    from npusim.layout.chain import Chain


Array = NDArray[Any]
#: (sources, destination before the step, destination's format, attributes) -> result
Semantics = Callable[[Sequence[Array], Array, str, Attributes], Array]


def apply(opcode: Opcode, sources: Sequence[Array], before: Array, fmt: str, attributes: Attributes) -> Array:
    """Return what a step writes.  Raises :class:`UnknownOpcodeError` for an opcode without a row."""
    row = SEMANTICS.get(opcode)
    if row is None:
        raise UnknownOpcodeError(f"{opcode.name} has no semantics")
    return row(sources, before, fmt, attributes)


def _copy(sources: Sequence[Array], _before: Array, _fmt: str, attributes: Attributes) -> Array:
    plan = attributes.warp
    return exchanged(sources[0], plan) if plan and plan.exchange else sources[0]


def _cast(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    overflow: Any = attributes.overflow or None
    return formats.cast(sources[0], fmt, overflow=overflow)


def _matmul(sources: Sequence[Array], before: Array, _fmt: str, attributes: Attributes) -> Array:
    a, b = sources
    if attributes.transpose_b:
        b = b.swapaxes(-1, -2)
    arithmetic = formats.get_arithmetic(attributes.arithmetic)
    # The unit loads whole fractals: what a ragged tail leaves empty is zero (design section 1).
    tail = -a.shape[-1] % arithmetic.k
    if tail:
        a = np.concatenate([a, np.zeros((*a.shape[:-1], tail), a.dtype)], axis=-1)
        b = np.concatenate([b, np.zeros((*b.shape[:-2], tail, b.shape[-1]), b.dtype)], axis=-2)
    if attributes.warp:
        start = before if attributes.accumulate else np.zeros_like(before)
        return product_on_lanes(a, b, start, attributes.warp, arithmetic, is_transposed=attributes.transpose_b)
    return formats.matmul(a, b, before if attributes.accumulate else None, arithmetic=arithmetic)


def _binary(function: Callable[[Any, Any, str], Array]) -> Semantics:
    def run(sources: Sequence[Array], _before: Array, fmt: str, _attributes: Attributes) -> Array:
        return function(sources[0], sources[1], fmt)

    return run


def _named(kind: str, functions: Mapping[str, Callable[..., Array]]) -> Semantics:
    """Return a function by its name and variant, ``exp.correct``; the first one's ``correct`` by default."""

    def run(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
        chosen = attributes.variant or f"{next(iter(functions))}.correct"
        function, _, variant = chosen.partition(".")
        if function not in functions or not variant:
            known = ", ".join(f"{f}.{v}" for f in functions for v in formats.VARIANTS[f])
            raise FormatError(f"unknown {kind} {chosen!r}; there are {known}")
        return functions[function](sources[0], fmt, variant=variant)

    return run


def _row_max(sources: Sequence[Array], _before: Array, fmt: str, _attributes: Attributes) -> Array:
    return formats.reduce_max(sources[0], fmt)[..., None]


def _row_sum(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    order: Any = attributes.order
    if not order:
        raise ProgramError("a row sum must name its order")
    return formats.reduce_sum(sources[0], fmt, order)[..., None]


def _fma(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    a, b, c = sources
    return formats.fma(-a if attributes.variant == "from" else a, b, -c if attributes.variant == "minus" else c, fmt)


def _select(sources: Sequence[Array], _before: Array, _fmt: str, _attributes: Attributes) -> Array:
    mask, kept, other = sources
    return np.where(mask != 0, kept, other)


SEMANTICS: Mapping[Opcode, Semantics] = MappingProxyType(
    {
        Opcode.COPY: _copy,
        Opcode.CAST: _cast,
        Opcode.FILL: _copy,
        Opcode.MATMUL: _matmul,
        Opcode.ADD: _binary(formats.add),
        Opcode.SUB: _binary(formats.sub),
        Opcode.MUL: _binary(formats.mul),
        Opcode.DIV: _binary(formats.div),
        Opcode.FMA: _fma,
        Opcode.MAX: _binary(formats.maximum),
        Opcode.EXP: _named("exponential", {"exp": formats.exp, "exp2": formats.exp2}),
        Opcode.LOG: _named("logarithm", {"log": formats.log, "log2": formats.log2}),
        Opcode.TANH: _named("hyperbolic tangent", {"tanh": formats.tanh}),
        Opcode.ROW_MAX: _row_max,
        Opcode.ROW_SUM: _row_sum,
        Opcode.SELECT: _select,
    }
)


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
