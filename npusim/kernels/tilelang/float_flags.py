"""Variables of ``bool`` that a loop sets, as float32 numbers 0 and 1, which the loop carries like tiles.

For example ``seen = False``, then ``if mask[k]: seen = True`` in a loop, then ``if seen: ...`` after the loop: each
value is the same as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    Conditional,
    Elementwise,
    Expression,
    Literal,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    expressions_in,
    parts_of,
    walked,
    with_bodies,
    with_inner,
)

_ZERO = Literal(0.0, "float32")


def with_float_flags(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements in which float32 variables replace the bool variables to which a loop assigns only constants.

    A variable that the loop reads in a condition is not replaced: it may decide what a later iteration does.
    """
    inside = [x for s in walked(body) if isinstance(s, SerialLoop) for x in walked(s.body)]
    set_there = {x.buffer for x in _assignments(inside)}
    asked_there = {e.buffer for of in expressions_in(inside) for e in parts_of(of) if isinstance(e, BufferElement)}
    flags = [b for b in dict.fromkeys(x.buffer for x in _assignments(body)) if b.fmt == "bool" and not b.block]
    firm = {x.buffer for x in _assignments(body) if x.condition is not None or not isinstance(x.value, Literal)}
    by = {
        b: replace(b, fmt="float32")
        for b in flags
        if not b.is_global and b in set_there and b not in asked_there | firm
    }
    return _with_floats(body, by) if by else tuple(body)


def _assignments(body: Iterable[Statement]) -> list[Elementwise]:
    """Return the assignments of statements, and of those in them."""
    return [x for s in walked(body) if isinstance(s, ParallelNest) for x in s.body if isinstance(x, Elementwise)]


def _with_floats(body: Sequence[Statement], by: dict[TileBuffer, TileBuffer]) -> tuple[Statement, ...]:
    def value(e: Expression) -> Expression:
        result = with_inner(e, value)
        if isinstance(result, BufferElement) and result.buffer in by:
            return Applied("ne", (replace(result, buffer=by[result.buffer]), _ZERO))
        return result

    def stored(x: Elementwise) -> Elementwise:
        if x.buffer not in by:
            return x
        assert isinstance(x.value, Literal)
        return replace(x, buffer=by[x.buffer], value=Literal(float(bool(x.value.value)), "float32"))

    def statement(s: Statement) -> Statement:
        if isinstance(s, SerialLoop | Conditional):
            return with_bodies(s, lambda inner: tuple(map(statement, inner)))
        if isinstance(s, ParallelNest):
            return replace(s, body=tuple(stored(x) if isinstance(x, Elementwise) else x for x in s.body))
        return s

    return changed(tuple(map(statement, body)), value)
