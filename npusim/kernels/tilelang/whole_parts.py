"""Loops over parts of a tile as statements on the whole tile.

``for i in range(2): copy(W[:, 64 * i], c); ...`` is the copy of 128 columns.

A kernel whose buffers are smaller than a workspace or a result processes it part by part.  Each element is computed as
before, by the same operations; the division into parts affects only the time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

from npusim.kernels.tilelang.cores_joined import elements_of, with_buffers
from npusim.kernels.tilelang.statements import (
    BufferElement,
    BufferPart,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    Variable,
    linear,
    number_of,
    only_assignment,
    substituted,
    variables_of,
    with_bodies,
    with_inner,
    written_tiles,
)

Body = tuple[Statement, ...]
_ZERO, _TRUE = Literal(0), Literal(1, "bool")


class _OtherLoopError(Exception):
    """Raised for a loop that does something else."""


def with_whole_parts(body: Sequence[Statement], live: Set[TileBuffer] = frozenset()) -> Body:
    """Return statements on whole tiles in place of loops over parts; ``live``: tiles that are read after them."""
    result = list[Statement]()
    for i, s in enumerate(body):
        after = Exposed(body[i + 1 :]).reads | live
        inner = after | (Exposed(s.body).reads if isinstance(s, SerialLoop) else set())
        try:
            if not isinstance(s, SerialLoop):
                raise _OtherLoopError
            result += _Parts(s, after).whole()
        except _OtherLoopError:
            result.append(with_bodies(s, partial(with_whole_parts, live=inner)))
    return tuple(result)


class _Parts:
    """A loop over parts: for each tile of an iteration, the axis along which it is a part."""

    def __init__(self, loop: SerialLoop, live: Set[TileBuffer]) -> None:
        count = number_of(loop.high, {})
        if loop.low != _ZERO or not isinstance(count, int) or count < 1:
            raise _OtherLoopError
        self.loop, self.count, self.number = loop, count, Variable(loop.variable)
        self.private = set(written_tiles(loop.body)) - live - Exposed(loop.body).reads
        self.along, self.moved = dict[TileBuffer, int](), dict[int, str]()
        self.statements = [self.checked(s) for s in loop.body]

    def checked(self, s: Statement) -> Elementwise | MatrixProduct:
        """Return a statement that is an assignment of elements, or a product of whole tiles that clears its result."""
        if isinstance(s, MatrixProduct):
            if s.clears != _TRUE or not all(x.is_whole for x in (s.a, s.b, s.c)):
                raise _OtherLoopError
            return s
        x = only_assignment(s)
        if x is None or x.is_added:
            raise _OtherLoopError
        return x

    def whole(self) -> list[Statement]:
        """Return the statements on whole tiles."""
        elements = [x for x in self.statements if isinstance(x, Elementwise)]
        stored = {x.buffer for x in elements if x.buffer.is_global}
        if stored & {e.buffer for x in elements for e in elements_of(x)}:
            raise _OtherLoopError
        known = (-1, -1)
        while known != (known := (len(self.along), len(self.moved))):
            for i, x in enumerate(self.statements):
                self.follow_product(i, x) if isinstance(x, MatrixProduct) else self.follow(i, x)
        if len(self.moved) < len(self.statements):
            raise _OtherLoopError
        tiles = {
            b: replace(b, shape=tuple(n * self.count if d == axis else n for d, n in enumerate(b.shape)))
            for b, axis in self.along.items()
        }
        return [
            self.product(x, tiles) if isinstance(x, MatrixProduct) else self.nest(i, x, tiles)
            for i, x in enumerate(self.statements)
        ]

    def part(self, buffer: TileBuffer, axis: int) -> None:
        """Record a tile as a part along an axis."""
        if buffer not in self.private or self.along.setdefault(buffer, axis) != axis:
            raise _OtherLoopError

    def follow(self, at: int, x: Elementwise) -> None:
        """Record which parallel loop of an assignment runs over a part, and which tiles are parts."""
        lengths, every = dict(x.axes), [BufferElement(x.buffer, x.indices), *elements_of(x)]
        found = {self.counted(index, lengths) for e in every for index in e.indices if self.uses(index)}
        for e in every:
            if e.buffer in self.along:
                index = e.indices[self.along[e.buffer]]
                found.add(index.name if isinstance(index, Variable) and index.name in lengths else "")
        if not found:
            return
        if len(found) > 1 or "" in found:
            raise _OtherLoopError
        self.moved[at] = name = found.pop()
        for e in every:
            axes = [d for d, index in enumerate(e.indices) if name in variables_of([index])]
            if len(axes) > 1 or (axes and e.buffer.is_global and not self.uses(e.indices[axes[0]])):
                raise _OtherLoopError
            if axes and not e.buffer.is_global:
                if e.indices[axes[0]] != Variable(name):
                    raise _OtherLoopError
                self.part(e.buffer, axes[0])
        if name not in variables_of(x.indices):
            raise _OtherLoopError

    def uses(self, index: Expression) -> bool:
        return self.number.name in variables_of([index])

    def counted(self, index: Expression, lengths: dict[str, int]) -> str:
        """Return the parallel loop that an index adds to the multiple of the part's number."""
        terms = linear(index, {})
        size = terms.pop(self.number, 0)
        names = [n for n, length in lengths.items() if terms.get(Variable(n)) == 1 and length == size]
        if len(names) != 1 or self.number.name in variables_of(terms):
            raise _OtherLoopError
        return names[0]

    def follow_product(self, at: int, s: MatrixProduct) -> None:
        """Record the parts in a product, in which the second factor and the result may be parts along their columns."""
        columns = [max(s.b.buffer.dims[:1] if s.transposes[1] else s.b.buffer.dims), max(s.c.buffer.dims)]
        if s.b.buffer in self.along or s.c.buffer in self.along:
            for x, axis in zip((s.b, s.c), columns, strict=True):
                self.part(x.buffer, axis)
            self.moved[at] = ""
        if s.a.buffer in self.along or s.a.buffer in self.private:
            raise _OtherLoopError

    def product(self, s: MatrixProduct, tiles: dict[TileBuffer, TileBuffer]) -> MatrixProduct:
        b, c = (BufferPart(tiles[x.buffer], x.start, tiles[x.buffer].shape) for x in (s.b, s.c))
        return replace(s, b=b, c=c)

    def nest(self, at: int, x: Elementwise, tiles: dict[TileBuffer, TileBuffer]) -> ParallelNest:
        """Return an assignment of a part as an assignment of the whole."""
        axes = tuple((n, count * self.count if n == self.moved[at] else count) for n, count in x.axes)
        value = with_buffers(self.without_number(x.value, is_index=False), tiles)
        indices = tuple(self.without_number(i, is_index=True) for i in x.indices)
        result = replace(x, axes=axes, buffer=tiles.get(x.buffer, x.buffer), indices=indices, value=value)
        return ParallelNest(axes, (result,), x.line)

    def without_number(self, e: Expression, *, is_index: bool) -> Expression:
        """Return an expression without the number of the part, which only indices contain."""
        if is_index:
            return substituted(e, {self.number.name: _ZERO})
        if e == self.number:
            raise _OtherLoopError
        inside = isinstance(e, BufferElement)
        return with_inner(e, lambda x: self.without_number(x, is_index=inside))
