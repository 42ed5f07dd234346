"""Loops in which each vector core copies the rows of its half of a tile one at a time, as one copy of all rows.

A sparse kernel copies rows at loaded indices: ``for b in range(n): copy(K[i[b + vid * n], :], row); copy(row, W[b +
vid * n, :])``.  Both vector cores together copy rows 0 to 2 n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import partial, reduce

from npusim.kernels.tilelang.statements import (
    Applied,
    BoundValue,
    BufferElement,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    Variable,
    linear,
    number_of,
    only_assignment,
    parts_of,
    substituted,
    variables_of,
    with_bodies,
    with_inner,
)

Body = tuple[Statement, ...]
_ZERO = Literal(0)


class _OtherLoopError(Exception):
    """Raised for a loop that does something else."""


def with_gathered_rows(body: Sequence[Statement], vector: str, live: Set[TileBuffer] = frozenset()) -> Body:
    """Return statements with copies of all rows in place of loops over them; ``live``: tiles that are read
    after them.
    """
    result = list[Statement]()
    for i, s in enumerate(body):
        after = Exposed(body[i + 1 :]).reads | live
        inner = after | (Exposed(s.body).reads if isinstance(s, SerialLoop) else set())
        try:
            if not isinstance(s, SerialLoop):
                raise _OtherLoopError
            result += _Rows(s, vector, after).copies()
        except _OtherLoopError:
            result.append(with_bodies(s, partial(with_gathered_rows, vector=vector, live=inner)))
    return tuple(result)


class _Rows:
    """A loop over rows: the tiles that have one row per iteration, and the source that each of them copies."""

    def __init__(self, loop: SerialLoop, vector: str, live: Set[TileBuffer]) -> None:
        count = number_of(loop.high, {})
        if loop.low != _ZERO or not isinstance(count, int) or count < 1:
            raise _OtherLoopError
        self.loop, self.vector, self.count = loop, vector, count
        self.shared = live | Exposed(loop.body).reads
        self.rows, self.names = dict[TileBuffer, Elementwise](), dict[str, Expression]()

    def copies(self) -> list[Statement]:
        """Return a copy of all rows for each tensor or tile whose rows the loop writes."""
        targets = list[Elementwise]()
        for s in self.loop.body:
            if isinstance(s, BoundValue):
                self.names[s.name] = self.whole(s.value)
                continue
            x = only_assignment(s)
            if x is None or x.is_added:
                raise _OtherLoopError
            x = replace(x, value=self.whole(x.value), indices=tuple(map(self.whole, x.indices)))
            if self.loop.variable in variables_of(x.indices):
                targets.append(self.checked(x, targets))
            else:
                self.rows[x.buffer] = self.row(x)
        read = {e.buffer for x in targets for e in parts_of(x.value) if isinstance(e, BufferElement)}
        if not targets or read & {x.buffer for x in targets}:
            raise _OtherLoopError
        return [ParallelNest(x.axes, (x,), x.line) for x in targets]

    def checked(self, x: Elementwise, before: Iterable[Elementwise]) -> Elementwise:
        """Return an assignment of the elements of a row as an assignment of all rows."""
        own = Variable(self.loop.variable)
        moved = [linear(i, {}) for i in x.indices if self.loop.variable in variables_of([i])]
        is_row = len(moved) == 1 and moved[0].pop(own, 0) == 1 and self.loop.variable not in variables_of(moved[0])
        if not is_row or any(x.buffer is y.buffer for y in before):
            raise _OtherLoopError
        is_halved = self.vector in variables_of(e for s in self.loop.body for e in _expressions(s))
        return replace(x, axes=((self.loop.variable, self.count * (1 + is_halved)), *x.axes))

    def row(self, x: Elementwise) -> Elementwise:
        """Return an assignment that writes a complete tile that only its own iteration reads."""
        moving = [(i, n) for i, n in zip(x.indices, x.buffer.shape, strict=True) if n != 1]
        is_whole = [(Variable(name), n) for name, n in x.axes if n != 1] == moving
        if x.buffer.is_global or x.buffer in self.shared or not is_whole:
            raise _OtherLoopError
        return x

    def whole(self, e: Expression) -> Expression:
        """Return an expression with the number of a row among all rows, and with the sources from which rows are
        copied.
        """
        if isinstance(e, Variable):
            e = self.names.get(e.name, e)
            return self.without_number(e) if e == Variable(self.vector) else e
        if isinstance(e, BufferElement) and e.buffer in self.rows:
            x = self.rows[e.buffer]
            pairs = zip(x.indices, map(self.whole, e.indices), strict=True)
            value = substituted(x.value, {i.name: j for i, j in pairs if isinstance(i, Variable)})
            return Applied("cast", (value,), e.buffer.fmt)
        if self.vector in variables_of([e]) and isinstance(e, Applied) and e.word in ("+", "-"):
            return self.without_number(e)
        return with_inner(e, self.whole)

    def without_number(self, e: Expression) -> Expression:
        """Return an index of a row and a vector core as the index of the row among the rows of both cores."""
        terms = linear(e, {})
        by, of_core = terms.get(Variable(self.loop.variable), 0), terms.pop(Variable(self.vector), 0)
        rest = variables_of(t for t in terms if t != Variable(self.loop.variable))
        if not by or of_core != by * self.count or {self.vector, self.loop.variable} & rest:
            raise _OtherLoopError
        parts = [
            t if n == 1 else Literal(n) if t == Literal(1) else Applied("*", (t, Literal(n))) for t, n in terms.items()
        ]
        return reduce(lambda a, b: Applied("+", (a, b)), parts)


def _expressions(s: Statement) -> list[Expression]:
    """Return the expressions of an assignment or of a bound value."""
    if isinstance(s, BoundValue):
        return [s.value]
    x = only_assignment(s)
    return [x.value, *x.indices] if x is not None else []
