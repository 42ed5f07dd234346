"""The semantics of each opcode in one table, Opcode -> function on arrays of the formats' dtypes.

Arrays have shape ``(lanes, rows, cols)``; a column operand ``(lanes, rows, 1)`` is broadcast over the
columns.  Every result is rounded once, to the destination's format, by ``npusim.formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import FormatError, ProgramError, UnknownOpcodeError
from npusim.formats.float_format import format_of_dtype
from npusim.formats.whole import bits_of_floats, floats_of_bits, whole_step
from npusim.program.ir.op import DOWN, REVERSE, Attributes, Opcode

Array = NDArray[Any]
#: (sources, destination before the step, destination's format, attributes) -> result
Semantics = Callable[[Sequence[Array], Array, str, Attributes], Array]


def apply(opcode: Opcode, sources: Sequence[Array], before: Array, fmt: str, attributes: Attributes) -> Array:
    """Return the result of a step.  Raises :class:`UnknownOpcodeError` for an opcode that the table does not have."""
    row = SEMANTICS.get(opcode)
    if row is None:
        raise UnknownOpcodeError(f"{opcode.name} has no semantics")
    return row(sources, before, fmt, attributes)


def _copy(sources: Sequence[Array], before: Array, _fmt: str, _attributes: Attributes) -> Array:
    (source,) = sources
    # a vector of rows, broadcast along a row
    is_turned = source.shape[-2:] == before.shape[:-3:-1] and 1 in source.shape[-2:]
    return source.reshape(*source.shape[:-2], *before.shape[-2:]) if is_turned else source


def _cast(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    overflow: Any = attributes.overflow or None
    if formats.stored_format(fmt).scale_block:  # the end of a tile is filled up with zeros, as in a product
        padded = replace(formats.BLOCK_FORMATS[fmt], pads=True)
        return formats.quantize(sources[0], padded, rule=attributes.variant or None, axis=attributes.axis).stored()
    return formats.cast(sources[0], fmt, rounding=attributes.rounding or "nearest_even", overflow=overflow)


def _matmul(sources: Sequence[Array], before: Array, _fmt: str, attributes: Attributes) -> Array:
    return product(sources[0], sources[1], before, attributes)


def product(a: Array, b: Array, before: Array, attributes: Attributes, b_of: NDArray[np.int64] | None = None) -> Array:
    """Return the product of two operands of all lanes; ``b_of``: the number of each lane's ``b``, if lanes share
    operands.
    """
    if attributes.transpose_a:
        a = a.swapaxes(-1, -2)
    if attributes.transpose_b:
        b = b.swapaxes(-1, -2)
    arithmetic = formats.get_arithmetic(attributes.arithmetic)
    # The unit loads complete fractals: the elements beyond a ragged tail are zero (design section 1).
    tail = -a.shape[-1] % arithmetic.k
    if tail:
        a = np.concatenate([a, np.zeros((*a.shape[:-1], tail), a.dtype)], axis=-1)
        b = np.concatenate([b, np.zeros((*b.shape[:-2], tail, b.shape[-1]), b.dtype)], axis=-2)
    c, scales = before if attributes.accumulate else None, dict[str, Any]()
    if arithmetic.scale_block:
        scales = {
            "a_scale": formats.scales_of(a, arithmetic.scale_block, -1),
            "b_scale": formats.scales_of(b, arithmetic.scale_block, -2),
        }
        a, b = a["element"], b["element"]
    return formats.matmul(a, b, c, arithmetic=arithmetic, b_of=b_of, **scales)


def _binary(function: Callable[[Any, Any, str], Array]) -> Semantics:
    return lambda sources, _before, fmt, _attributes: function(sources[0], sources[1], fmt)


def _division(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    """Return a quotient rounded once, or, with ``div.hopper_full``, a GPU's ``div.full.f32``."""
    correct, full = formats.DIVISIONS
    if attributes.variant in ("", correct):
        return formats.div(sources[0], sources[1], fmt)
    if attributes.variant != full or fmt != "float32":
        raise FormatError(f"unknown division {attributes.variant!r} of {fmt}; allowed: {full} of float32")
    return formats.div_full(sources[0], sources[1])


def _named(kind: str, functions: Mapping[str, Callable[..., Array]]) -> Semantics:
    """Return a function by its name and variant, ``exp.correct``; without a variant the function's ``correct``."""

    def run(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
        chosen = attributes.variant or f"{next(iter(functions))}.correct"
        function, _, variant = chosen.partition(".")
        if function not in functions or not variant:
            known = ", ".join(f"{f}.{v}" for f in functions for v in formats.VARIANTS[f])
            raise FormatError(f"unknown {kind} {chosen!r}; allowed: {known}")
        return functions[function](sources[0], fmt, variant=variant)

    return run


def _extreme(function: Callable[..., Array]) -> Semantics:
    """Return the larger or smaller of two operands; the rule ``variant`` decides about NaN."""
    return lambda sources, _before, fmt, attributes: function(*sources, fmt, nan=attributes.variant or "number")


def _reduced(function: Semantics) -> Semantics:
    """Return a reduction of rows to one column, or of columns (``axis`` `DOWN`) to one row."""

    def run(sources: Sequence[Array], before: Array, fmt: str, attributes: Attributes) -> Array:
        if attributes.axis != DOWN:
            return function(sources, before, fmt, attributes)[..., None]
        shape = np.broadcast_shapes(*(np.shape(x) for x in sources))
        turned = [np.ascontiguousarray(np.broadcast_to(x, shape).swapaxes(-1, -2)) for x in sources]
        return function(turned, before, fmt, attributes)[..., None, :]

    return run


def _row_max(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    if formats.get_format(fmt).is_integer:
        return np.asarray(sources[0].max(axis=-1))
    return _extreme(formats.reduce_max)(sources, _before, fmt, attributes)


def _row_sum(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    order: Any = attributes.order
    if not order:
        raise ProgramError("a row sum must name its order")
    if formats.get_format(fmt).is_integer:  # the sum wraps, and is the same in any order
        return np.asarray(np.add.reduce(sources[0], axis=-1, dtype=sources[0].dtype))
    return formats.reduce_sum(sources[0], fmt, order, times=sources[1] if len(sources) > 1 else None)


def _cumsum(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    is_turned = attributes.variant == REVERSE
    return formats.cumulative_sum(sources[0], fmt, attributes.order, every=attributes.every, reverse=is_turned)


def _fold(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    return formats.folded(sources, fmt, attributes.variant, attributes.order)


def _scan(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    return formats.scanned(sources, fmt, attributes.variant, attributes.order)


def _inverse(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    unit = attributes.arithmetic or formats.IEEE
    return formats.inverse(sources[0], fmt, attributes.order, arithmetic=unit)


def _fma(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    a, b, c = sources
    return formats.fma(-a if attributes.variant == "from" else a, b, -c if attributes.variant == "minus" else c, fmt)


def _compare(sources: Sequence[Array], _before: Array, _fmt: str, attributes: Attributes) -> Array:
    first, second = sources
    if first.dtype.kind == "i":
        return formats.compare(first.astype(np.float64), second.astype(np.float64), attributes.variant, "float64")
    fmt = format_of_dtype(first.dtype)
    assert fmt is not None
    return formats.compare(first, second, attributes.variant, fmt)


_LOGIC: Mapping[str, np.ufunc] = MappingProxyType({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor})


def _logic(sources: Sequence[Array], _before: Array, _fmt: str, attributes: Attributes) -> Array:
    first, second = (source != 0 for source in sources)
    return np.asarray(_LOGIC[attributes.variant](first, second), np.int8)


def _integer(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    return whole_step(attributes.variant, sources[0], sources[1], fmt)


def _bits(sources: Sequence[Array], _before: Array, fmt: str, attributes: Attributes) -> Array:
    way, _, of = attributes.variant.partition(".")
    return {"bits": bits_of_floats, "floats": floats_of_bits}[way](sources[0], of, fmt)


def _select(sources: Sequence[Array], _before: Array, _fmt: str, _attributes: Attributes) -> Array:
    mask, chosen, other = sources
    return np.where(mask != 0, chosen, other)


SEMANTICS: Mapping[Opcode, Semantics] = MappingProxyType(
    {
        Opcode.COPY: _copy,
        Opcode.CAST: _cast,
        Opcode.FILL: _copy,
        Opcode.MATMUL: _matmul,
        Opcode.ADD: _binary(formats.add),
        Opcode.SUB: _binary(formats.sub),
        Opcode.MUL: _binary(formats.mul),
        Opcode.DIV: _division,
        Opcode.FMA: _fma,
        Opcode.COMPARE: _compare,
        Opcode.LOGIC: _logic,
        Opcode.MAX: _extreme(formats.maximum),
        Opcode.MIN: _extreme(formats.minimum),
        Opcode.EXP: _named("exponential", {"exp": formats.exp, "exp2": formats.exp2}),
        Opcode.LOG: _named("logarithm", {"log": formats.log, "log2": formats.log2, "log1p": formats.log1p}),
        Opcode.RSQRT: _named("reciprocal square root", {"rsqrt": formats.rsqrt}),
        Opcode.SQRT: _named("square root", {"sqrt": formats.sqrt}),
        Opcode.TANH: _named("hyperbolic tangent", {"tanh": formats.tanh}),
        Opcode.ERF: _named("error function", {"erf": formats.erf}),
        Opcode.ROW_MAX: _reduced(_row_max),
        Opcode.ROW_SUM: _reduced(_row_sum),
        Opcode.CUMSUM: _cumsum,
        Opcode.FOLD: _reduced(_fold),
        Opcode.SCAN: _scan,
        Opcode.INVERSE: _inverse,
        Opcode.INTEGER: _integer,
        Opcode.BITS: _bits,
        Opcode.SELECT: _select,
    }
)
