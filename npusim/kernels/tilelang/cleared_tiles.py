"""Products that clear their result in the first iteration of loops, as products that add to a tile of zeros.

``init=T.And(k == 0, kk == 0)`` of a product in two loops is a tile of zeros before both; ``init=(k == 0)`` of a product
in an if has no effect if the tile is zeros before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from npusim.kernels.tilelang.statements import (
    FLOATS,
    Applied,
    Conditional,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    Variable,
    linear,
    only_assignment,
    walked,
    with_bodies,
    written_buffers,
)

_ADDS = Literal(0, "bool")


def with_zeros_before(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements in which tiles of zeros before loops replace products that clear in the first iteration of
    several loops.
    """
    result, zeros = list[Statement](), set[TileBuffer]()
    for statement in body:
        s = with_bodies(statement, with_zeros_before)
        if isinstance(s, SerialLoop):
            cleared = {p.c.buffer: p for p in _products_first_in(s, ()) if _is_alone(s, p)}
            s = _adding(s, set(cleared.values()))
            result += [_zeros(b, p) for b, p in cleared.items() if b not in zeros]
            within = [p for p in _in_branches(s.body) if p.clears == _first(s) and p.c.buffer in zeros]
            s = _adding(s, {p for p in within if _is_alone(s, p)})
        zeros -= set(written_buffers([s]))
        if (tile := _zeroed(s)) is not None:
            zeros.add(tile)
        result.append(s)
    return tuple(result)


def _first(loop: SerialLoop) -> Expression:
    """Return the condition of a loop's first iteration."""
    return Applied("eq", (Variable(loop.variable), loop.low))


def _terms(x: Expression) -> set[Expression]:
    """Return the conditions that all hold if a condition holds."""
    if isinstance(x, Applied) and x.word == "and":
        return {t for operand in x.operands for t in _terms(operand)}
    return {x}


def _runs(loop: SerialLoop) -> bool:
    """Return whether, according to constant bounds, a loop has an iteration."""
    count = linear(Applied("-", (loop.high, loop.low)), {})
    return set(count) == {Literal(1)} and count[Literal(1)] > 0


def _products_first_in(loop: SerialLoop, outer: tuple[SerialLoop, ...]) -> Iterable[MatrixProduct]:
    """Yield products in loops within a loop that clear in the first iteration of all of these loops."""
    around = (*outer, loop)
    if not _runs(loop):
        return
    for s in loop.body:
        if isinstance(s, SerialLoop):
            yield from _products_first_in(s, around)
        elif isinstance(s, MatrixProduct) and outer and _terms(s.clears) == {_first(x) for x in around}:
            yield s


def _in_branches(body: Iterable[Statement]) -> Iterable[MatrixProduct]:
    """Yield the products in the ifs of a loop's body."""
    for s in body:
        if isinstance(s, Conditional):
            branches = (*s.then, *s.otherwise)
            yield from (p for p in branches if isinstance(p, MatrixProduct))
            yield from _in_branches(branches)


def _is_alone(loop: SerialLoop, product: MatrixProduct) -> bool:
    """Return whether no other statement of a loop writes a product's whole result."""
    leaves = (s for s in walked([loop]) if not isinstance(s, SerialLoop | Conditional))
    return product.c.is_whole and sum(product.c.buffer in written_buffers([s]) for s in leaves) == 1


def _adding(s: SerialLoop, products: set[MatrixProduct]) -> SerialLoop:
    """Return a loop in which some products add to their result."""

    def adding(body: Iterable[Statement]) -> tuple[Statement, ...]:
        return tuple(
            replace(x, clears=_ADDS) if isinstance(x, MatrixProduct) and x in products else with_bodies(x, adding)
            for x in body
        )

    return replace(s, body=adding(s.body))


def _zeros(tile: TileBuffer, product: MatrixProduct) -> ParallelNest:
    """Return the statement that fills a tile with 0."""
    axes = tuple((f"zero{i}", n) for i, n in enumerate(tile.shape))
    value = Literal(0.0 if tile.fmt in FLOATS else 0, tile.fmt)
    result = Elementwise(axes, tile, tuple(Variable(name) for name, _ in axes), value, None, product.line)
    return ParallelNest(axes, (result,), product.line)


def _zeroed(s: Statement) -> TileBuffer | None:
    """Return the tile that a statement fills completely with 0; None for another statement."""
    x = only_assignment(s)
    if x is None or x.condition is not None or x.buffer.is_global or not isinstance(x.value, Literal) or x.value.value:
        return None
    sizes = dict(x.axes)
    names = [i.name if isinstance(i, Variable) else "" for i in x.indices]
    is_whole = len(set(names)) == len(names) and all(
        sizes.get(name, 1 if index == Literal(0) else 0) == n
        for name, index, n in zip(names, x.indices, x.buffer.shape, strict=True)
    )
    return x.buffer if is_whole else None
