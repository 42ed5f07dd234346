"""Loops whose bodies have several iterations written out, with the last iteration after the loop, as plain loops.

A kernel that alternates between two buffers has two tiles in the body of a loop, and an odd tile after the loop.  The
same operations in the same order are a loop over all tiles, so that two loops over one tensor visit it in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    linear,
    number_of,
    substituted,
    variables_of,
    with_bodies,
    with_inner,
)

Body = tuple[Statement, ...]
_ZERO, _ONE = Literal(0), Literal(1)
#: Words of whole numbers whose sums are compared as sums.
_OF_SUMS = frozenset({"+", "-", "*"})
#: Words whose operands are whole numbers, or for which the order of additions has no other effect.
_OF_WHOLE = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "//", "%"})


class _UnlikeError(Exception):
    """Raised if statements are not iterations of one loop."""


def rolled(body: Sequence[Statement], live: Set[TileBuffer] = frozenset()) -> Body:
    """Return statements with loops in place of written-out iterations; ``live``: tiles that are read after them."""
    result, rest = list[Statement](), list(body)
    while rest:
        s = rest.pop(0)
        after = Exposed(rest).reads | live
        inner = after | (Exposed(s.body).reads if isinstance(s, SerialLoop) else set())
        s = with_bodies(s, partial(rolled, live=inner))
        if isinstance(s, SerialLoop):
            s = _with_fewer(s, after)
            while (longer := _with_next(s, rest, live)) is not None:
                s, rest = longer, rest[len(longer.body) :]
        result.append(s)
    return tuple(result)


def _with_fewer(loop: SerialLoop, live: Set[TileBuffer]) -> SerialLoop:
    """Return a loop with one tile in its body in place of several; unchanged if these differ."""
    high, size = number_of(loop.high, {}), len(loop.body)
    if loop.low != _ZERO or not isinstance(high, int):
        return loop
    for count in (n for n in range(size, 1, -1) if size % n == 0):
        parts = [loop.body[i : i + size // count] for i in range(0, size, size // count)]
        try:
            moved = [_moved(parts[0], loop.variable, count, i) for i in range(count)]
            if all(_are_alike(a, b, live) for a, b in zip(moved[1:], parts[1:], strict=True)):
                one = _moved(parts[0], loop.variable, count, None)
                return replace(loop, high=Literal(high * count), body=one)
        except _UnlikeError:
            continue
    return loop


def _with_next(loop: SerialLoop, rest: Sequence[Statement], live: Set[TileBuffer]) -> SerialLoop | None:
    """Return a loop with the iteration that is written after it; None if that is not an iteration of the loop."""
    high, size = number_of(loop.high, {}), len(loop.body)
    if loop.low != _ZERO or not isinstance(high, int) or high < 0 or len(rest) < size:
        return None
    by = {loop.variable: Literal(high)}
    try:
        one = changed(loop.body, lambda e: substituted(e, by))
        is_next = _are_alike(one, rest[:size], Exposed(rest[size:]).reads | live)
    except _UnlikeError:
        return None
    return replace(loop, high=Literal(high + 1)) if is_next else None


def _moved(body: Sequence[Statement], variable: str, count: int, place: int | None) -> Body:
    """Return the first of ``count`` tiles of an iteration as the tile at some place of the iteration, or as the tile of
    a loop over all.
    """
    is_used = False

    def element(e: Expression) -> Expression:
        nonlocal is_used
        if variable not in variables_of([e]):
            return e
        if not _is_sum(e):
            return with_inner(e, element)
        terms, own = linear(e, {}), Variable(variable)
        by = terms.pop(own, 0)
        if by % count or variable in variables_of(terms):
            raise _UnlikeError
        is_used, parts = True, [_times(t, n) for t, n in terms.items()]
        if place is None:
            parts.append(_times(own, by // count))
        else:
            parts += [_times(own, by), Literal(by // count * place)]
        return reduce(lambda a, b: Applied("+", (a, b)), parts)

    result = changed(body, element)
    if not is_used:
        raise _UnlikeError
    return result


def _times(term: Expression, by: float) -> Expression:
    return Literal(int(by)) if term == _ONE else Applied("*", (term, Literal(int(by)))) if by != 1 else term


def _is_sum(e: Expression) -> bool:
    """Return whether an expression is a sum of whole numbers and their products."""
    if isinstance(e, Applied):
        return e.word in _OF_SUMS and all(map(_is_sum, e.operands))
    return isinstance(e, Variable) or (isinstance(e, Literal) and e.fmt in ("int32", "int64"))


def _are_alike(one: Sequence[Statement], other: Sequence[Statement], live: Set[TileBuffer]) -> bool:
    """Return whether statements do the same; they may use different tiles if no later statement reads these."""
    a, b = _Form(), _Form()
    if [a.statement(s) for s in one] != [b.statement(s) for s in other]:
        return False
    early = Exposed(one).reads, Exposed(other).reads
    for x, y in zip(a.tiles, b.tiles, strict=True):
        is_of_both = x in b.tiles or y in a.tiles
        if x is not y and (is_of_both or x in early[0] | live or y in early[1] | live):
            return False
    return True


@dataclass(eq=False, slots=True)
class _Form:
    """Forms of statements, equal if they differ only in names of tiles, of bound values and of parallel loops."""

    tiles: list[TileBuffer] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def tile(self, b: TileBuffer) -> object:
        if b.is_global:
            return b
        if b not in self.tiles:
            self.tiles.append(b)
        return self.tiles.index(b), b.shape, b.fmt

    def name(self, name: str) -> None:
        self.names[name] = f"#{len(self.names)}"

    def expression(self, e: Expression) -> object:
        """Return the form of a value; its additions keep their order."""
        if isinstance(e, BufferElement):
            return self.tile(e.buffer), tuple(map(self.index, e.indices))
        if isinstance(e, Applied):
            return e.word, e.fmt, tuple(map(self.index if e.word in _OF_WHOLE else self.expression, e.operands))
        return e if isinstance(e, Literal) else self.names.get(e.name, e.name)

    def index(self, e: Expression) -> object:
        """Return the form of a whole number; the form of a sum does not depend on the order of its terms."""
        terms = linear(e, {}) if _is_sum(e) else {e: 1}
        if len(terms) == 1 and e in terms:
            return self.expression(e)
        return frozenset((self.expression(t), n) for t, n in terms.items())

    def part(self, x: BufferPart) -> object:
        return self.tile(x.buffer), tuple(map(self.index, x.start)), x.extent

    def statement(self, s: Statement | Elementwise) -> object:
        if isinstance(s, BoundValue):
            value = self.expression(s.value)
            self.name(s.name)
            return "bound", value
        if isinstance(s, ParallelNest):
            self.axes(s.axes)
            return "nest", tuple(n for _, n in s.axes), tuple(map(self.statement, s.body))
        if isinstance(s, Elementwise):
            self.axes(s.axes)
            rule = None if s.condition is None else self.expression(s.condition)
            value, at = self.expression(s.value), tuple(map(self.index, s.indices))
            return tuple(n for _, n in s.axes), value, rule, self.tile(s.buffer), at, s.is_added
        if isinstance(s, MatrixProduct):
            return "product", *map(self.part, (s.a, s.b, s.c)), s.transposes, self.expression(s.clears)
        if isinstance(s, TileReduction):
            return "reduction", *map(self.part, (s.source, s.target)), s.word, s.axis, s.clears, s.cumulates
        if isinstance(s, SerialLoop):
            bounds = self.index(s.low), self.index(s.high)
            self.name(s.variable)
            return "loop", bounds, self.statements(s.body)
        if isinstance(s, Conditional):
            return "if", self.expression(s.condition), self.statements(s.then), self.statements(s.otherwise)
        raise _UnlikeError

    def statements(self, body: Iterable[Statement]) -> tuple[object, ...]:
        return tuple(map(self.statement, body))

    def axes(self, axes: Iterable[tuple[str, int]]) -> None:
        for name, _ in axes:
            if name not in self.names:
                self.name(name)
