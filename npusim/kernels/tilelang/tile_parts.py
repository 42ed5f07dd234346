"""Tiles that a kernel accesses in parts, always the same ones, as a tile for each part.

``T.copy(Q[..., :512], q[:, :512])``, ``T.copy(Q[..., 512:], q[:, 512:])`` and products with the one and the other are
statements on two tiles.  Parallel loops over several parts are loops over each of them, one after another: no iteration
needs what another one writes.  A tile with an access at a place that only a run knows stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    expressions_in,
    linear,
    parts_of,
    substituted,
    variables_of,
    walked,
    with_bodies,
    with_inner,
)

Body = tuple[Statement, ...]
#: Parts of one tile.
_MOST = 16


class _OtherPlaceError(Exception):
    """An access whose place is not a part of the tile."""


def with_parts_apart(body: Sequence[Statement]) -> Body:
    """Return statements with a tile for each part of the tiles that are accessed in equal parts alone."""
    made, tried = tuple(body), set[tuple[TileBuffer, int]]()
    while True:
        every = (b for s in walked(made) for b in _buffers_of(s))
        found = ((b, d) for b in dict.fromkeys(every) if not b.is_global for d in b.dims if (b, d) not in tried)
        if (one := next(found, None)) is None:
            return made
        tried.add(one)
        try:
            made = _PartTiles.of(made, *one).statements(made)
        except _OtherPlaceError:
            continue


def _buffers_of(s: Statement) -> Iterator[TileBuffer]:
    """Yield the buffers that a statement itself accesses."""
    for e in expressions_in([with_bodies(s, lambda _: ())]):
        yield from (x.buffer for x in parts_of(e) if isinstance(x, BufferElement))
    if isinstance(s, ParallelNest):
        yield from (x.buffer for x in s.body if isinstance(x, Elementwise))
    yield from (x.buffer for x in _parts(s))


def _parts(s: Statement) -> tuple[BufferPart, ...]:
    if isinstance(s, MatrixProduct):
        return s.a, s.b, s.c
    return (s.source, s.target) if isinstance(s, TileReduction) else ()


def _place(index: Expression, lengths: Mapping[str, int]) -> tuple[str, int, int]:
    """Return the parallel loop that an index is the variable of, empty for none, its first element and its length."""
    terms = linear(index, {})
    first = terms.pop(Literal(1), 0)
    if not terms:
        return "", int(first), 1
    ((of, factor),) = terms.items() if len(terms) == 1 else ((index, 0),)
    if factor != 1 or not isinstance(of, Variable) or of.name not in lengths:
        raise _OtherPlaceError
    return of.name, int(first), lengths[of.name]


def _lengths(s: ParallelNest) -> dict[str, int]:
    """Return the length of each parallel loop; raise `_OtherPlaceError` for a name of two lengths."""
    pairs = {pair for x in s.body if isinstance(x, Elementwise) for pair in x.axes} | set(s.axes)
    if len({name for name, _ in pairs}) < len(pairs):
        raise _OtherPlaceError
    return dict(pairs)


def _elements(s: ParallelNest, buffer: TileBuffer, axis: int) -> list[Expression]:
    """Return the indices along an axis of all accesses of a buffer in a nest."""
    found = [x.indices for x in s.body if isinstance(x, Elementwise) and x.buffer is buffer]
    every = [e for of in expressions_in([s]) for e in parts_of(of)]
    found += [e.indices for e in every if isinstance(e, BufferElement) and e.buffer is buffer]
    return [indices[axis] for indices in found]


@dataclass(frozen=True, slots=True)
class _PartTiles:
    """Tiles in place of the parts of a buffer along an axis; ``cuts``: where each part begins, and the end."""

    buffer: TileBuffer
    axis: int
    cuts: tuple[int, ...]
    tiles: tuple[TileBuffer, ...]

    @classmethod
    def of(cls, body: Body, buffer: TileBuffer, axis: int) -> _PartTiles:
        """Return the parts of a tile; raise `_OtherPlaceError` for a tile without several."""
        size, cuts = buffer.shape[axis], {0, buffer.shape[axis]}
        for s in walked(body):
            places = [_place(x.start[axis], {}) for x in _parts(s) if x.buffer is buffer]
            ends = [x.extent[axis] for x in _parts(s) if x.buffer is buffer]
            cuts |= {c for (_, first, _), n in zip(places, ends, strict=True) for c in (first, first + n)}
            if isinstance(s, ParallelNest):
                found = [_place(i, _lengths(s)) for i in _elements(s, buffer, axis)]
                cuts |= {c for _, first, n in found for c in (first, first + n)}
        edges = tuple(sorted(cuts))
        if not 2 < len(edges) <= _MOST + 1 or edges[0] < 0 or edges[-1] > size:
            raise _OtherPlaceError
        shapes = [tuple(b - a if i == axis else n for i, n in enumerate(buffer.shape)) for a, b in pairwise(edges)]
        names = [f"{buffer.name}_{a}" for a in edges[:-1]]
        tiles = (replace(buffer, name=n, shape=shape, strides=()) for n, shape in zip(names, shapes, strict=True))
        return cls(buffer, axis, edges, tuple(tiles))

    def tile(self, first: int, length: int) -> int:
        """Return the number of the tile that a part is; raise `_OtherPlaceError` for another part."""
        if first not in self.cuts or self.cuts.index(first) + 1 >= len(self.cuts):
            raise _OtherPlaceError
        at = self.cuts.index(first)
        if self.cuts[at + 1] != first + length:
            raise _OtherPlaceError
        return at

    def element(self, indices: tuple[Expression, ...], lengths: Mapping[str, int]) -> BufferElement:
        """Return an element of the buffer as one of a tile."""
        name, first, n = _place(indices[self.axis], lengths)
        tile = self.tiles[self.tile(first, n)]
        own = Variable(name) if name and n > 1 else Literal(0)
        return BufferElement(tile, tuple(own if i == self.axis else x for i, x in enumerate(indices)))

    def value(self, e: Expression, lengths: Mapping[str, int]) -> Expression:
        """Return an expression that reads the tiles."""
        made = with_inner(e, lambda x: self.value(x, lengths))
        if not isinstance(made, BufferElement) or made.buffer is not self.buffer:
            return made
        return self.element(made.indices, lengths)

    def part(self, x: BufferPart) -> BufferPart:
        """Return a part as its tile."""
        if x.buffer is not self.buffer:
            return x
        _, first, _ = _place(x.start[self.axis], {})
        start = tuple(Literal(0) if i == self.axis else e for i, e in enumerate(x.start))
        return BufferPart(self.tiles[self.tile(first, x.extent[self.axis])], start, x.extent)

    def statements(self, body: Iterable[Statement]) -> Body:
        """Return statements on the tiles."""
        return tuple(x for s in body for x in self.statement(s))

    def statement(self, s: Statement) -> Body:
        """Return a statement on the tiles: of parallel loops over several parts one for each."""
        if isinstance(s, ParallelNest):
            return tuple(map(self.nest, self.cut(s))) if _elements(s, self.buffer, self.axis) else (s,)
        if isinstance(s, MatrixProduct):
            s = replace(s, a=self.part(s.a), b=self.part(s.b), c=self.part(s.c))
        elif isinstance(s, TileReduction):
            s = replace(s, source=self.part(s.source), target=self.part(s.target))
        (own,) = changed([with_bodies(s, lambda _: ())], lambda e: self.value(e, {}))
        if isinstance(s, SerialLoop) and isinstance(own, SerialLoop):
            return (replace(own, body=self.statements(s.body)),)
        if isinstance(s, Conditional) and isinstance(own, Conditional):
            return (replace(own, then=self.statements(s.then), otherwise=self.statements(s.otherwise)),)
        return (own,)

    def nest(self, s: ParallelNest) -> ParallelNest:
        """Return parallel loops of which each access is of one tile."""
        lengths, body = _lengths(s), list[Elementwise | BoundValue]()
        for x in s.body:
            if isinstance(x, BoundValue):
                body.append(replace(x, value=self.value(x.value, lengths)))
                continue
            target = BufferElement(x.buffer, tuple(self.value(i, lengths) for i in x.indices))
            if x.buffer is self.buffer:
                target = self.element(target.indices, lengths)
            condition = None if x.condition is None else self.value(x.condition, lengths)
            value = self.value(x.value, lengths)
            body.append(replace(x, buffer=target.buffer, indices=target.indices, value=value, condition=condition))
        return replace(s, body=tuple(body))

    def cut(self, s: ParallelNest) -> list[ParallelNest]:
        """Return parallel loops over several parts as loops over each of them."""
        lengths = _lengths(s)
        places = [_place(i, lengths) for i in _elements(s, self.buffer, self.axis)]
        names = {name for name, _, _ in places if name}
        if not names:
            return [s]
        if len(names) > 1:
            raise _OtherPlaceError
        (name,) = names
        n = lengths[name]
        edges = sorted({0, n, *(c - first for own, first, _ in places if own for c in self.cuts if 0 < c - first < n)})
        if len(edges) == 2:
            return [s]
        if len(s.body) > 1 and any(isinstance(x, Elementwise) and name not in variables_of(x.indices) for x in s.body):
            raise _OtherPlaceError
        return [_of_range(s, name, a, b) for a, b in pairwise(edges)]


def _of_range(s: ParallelNest, name: str, first: int, end: int) -> ParallelNest:
    """Return parallel loops of which one runs over a part of its range."""
    by = {name: Applied("+", (Variable(name), Literal(first))) if first else Variable(name)}

    def axes(of: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((n, end - first) if n == name else (n, size) for n, size in of)

    (moved,) = changed([s], lambda e: substituted(e, by))
    assert isinstance(moved, ParallelNest)
    body = tuple(replace(x, axes=axes(x.axes)) if isinstance(x, Elementwise) else x for x in moved.body)
    return ParallelNest(axes(s.axes), body, s.line)
