"""Tiles that a kernel accesses only in certain parts, as a separate tile for each part.

``T.copy(Q[..., :512], q[:, :512])``, ``T.copy(Q[..., 512:], q[:, 512:])`` and products with each part are statements on
two tiles.  Parallel loops over several parts are loops over each part, one after another: no iteration needs what
another iteration writes.  A tile with an access at a place that is known only at run time is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    BufferPart,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
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
)
from npusim.kernels.tilelang.tiles_in_place import TilesInPlace

Body = tuple[Statement, ...]
#: Largest number of parts of a tile.
_MOST = 16


class _OtherPlaceError(Exception):
    """Raised for an access whose place is not a part of the tile."""


def with_parts_apart(body: Sequence[Statement]) -> Body:
    """Return statements with a separate tile for each part of those tiles that are accessed only in equal parts."""
    result, tried = tuple(body), set[tuple[TileBuffer, int]]()
    while True:
        every = (b for s in walked(result) for b in _buffers_of(s))
        untried = ((b, d) for b in dict.fromkeys(every) if not b.is_global for d in b.dims if (b, d) not in tried)
        if (one := next(untried, None)) is None:
            return result
        tried.add(one)
        try:
            result = _PartTiles.of(result, *one).statements(result)
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
    """Return the parallel loop whose variable an index contains (empty if there is none), the first element, and the
    length.
    """
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
class _PartTiles(TilesInPlace):
    """Tiles that replace the parts of a buffer along an axis; ``cuts``: the start of each part, and the end."""

    cuts: tuple[int, ...]
    tiles: tuple[TileBuffer, ...]

    @classmethod
    def of(cls, body: Body, buffer: TileBuffer, axis: int) -> _PartTiles:
        """Return the parts of a tile; raise `_OtherPlaceError` for a tile with only one."""
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
        """Return the number of the tile that replaces a part; raise `_OtherPlaceError` for a part that no tile
        replaces.
        """
        if first not in self.cuts or self.cuts.index(first) + 1 >= len(self.cuts):
            raise _OtherPlaceError
        at = self.cuts.index(first)
        if self.cuts[at + 1] != first + length:
            raise _OtherPlaceError
        return at

    def element(self, indices: tuple[Expression, ...], nest: ParallelNest | None) -> BufferElement:
        """Return an element of the buffer as an element of the tile of its part."""
        name, first, n = _place(indices[self.axis], {} if nest is None else _lengths(nest))
        tile = self.tiles[self.tile(first, n)]
        own = Variable(name) if name and n > 1 else Literal(0)
        return BufferElement(tile, tuple(own if i == self.axis else x for i, x in enumerate(indices)))

    def tile_part(self, part: BufferPart) -> BufferPart:
        """Return a part of the buffer as its tile."""
        _, first, _ = _place(part.start[self.axis], {})
        start = tuple(Literal(0) if i == self.axis else e for i, e in enumerate(part.start))
        return BufferPart(self.tiles[self.tile(first, part.extent[self.axis])], start, part.extent)

    def nests(self, nest: ParallelNest) -> list[ParallelNest]:
        """Return parallel loops over several parts as loops over each of them."""
        if not (indices := _elements(nest, self.buffer, self.axis)):
            return [nest]
        lengths = _lengths(nest)
        places = [_place(i, lengths) for i in indices]
        names = {name for name, _, _ in places if name}
        if not names:
            return [nest]
        if len(names) > 1:
            raise _OtherPlaceError
        (name,) = names
        n = lengths[name]
        edges = sorted({0, n, *(c - first for own, first, _ in places if own for c in self.cuts if 0 < c - first < n)})
        if len(edges) == 2:
            return [nest]
        if len(nest.body) > 1 and any(
            isinstance(x, Elementwise) and name not in variables_of(x.indices) for x in nest.body
        ):
            raise _OtherPlaceError
        return [_of_range(nest, name, a, b) for a, b in pairwise(edges)]


def _of_range(s: ParallelNest, name: str, first: int, end: int) -> ParallelNest:
    """Return parallel loops, one of which runs over a part of its range."""
    by = {name: Applied("+", (Variable(name), Literal(first))) if first else Variable(name)}

    def axes(of: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((n, end - first) if n == name else (n, size) for n, size in of)

    (moved,) = changed([s], lambda e: substituted(e, by))
    assert isinstance(moved, ParallelNest)
    body = tuple(replace(x, axes=axes(x.axes)) if isinstance(x, Elementwise) else x for x in moved.body)
    return ParallelNest(axes(s.axes), body, s.line)
