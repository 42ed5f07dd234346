"""Statements in which a buffer is replaced by the tiles that are its parts or slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    BoundValue,
    BufferElement,
    BufferPart,
    Elementwise,
    Expression,
    MatrixProduct,
    ParallelNest,
    Statement,
    TileBuffer,
    TileReduction,
    with_bodies,
    with_inner,
)


@dataclass(frozen=True, slots=True)
class TilesInPlace(ABC):
    """Tiles that replace parts of ``buffer`` along ``axis``; a subclass determines the tile of each part."""

    buffer: TileBuffer
    axis: int

    @abstractmethod
    def element(self, indices: tuple[Expression, ...], nest: ParallelNest | None) -> BufferElement:
        """Return an element of the buffer as an element of a tile; ``nest``: the parallel loops around the element."""

    @abstractmethod
    def tile_part(self, part: BufferPart) -> BufferPart:
        """Return a part of the buffer as a part of a tile."""

    @abstractmethod
    def nests(self, nest: ParallelNest) -> list[ParallelNest]:
        """Return parallel loops, divided so that each access of the buffer is an access of one tile."""

    def statements(self, body: Iterable[Statement]) -> tuple[Statement, ...]:
        """Return statements on the tiles."""
        return tuple(x for s in body for x in self.statement(s))

    def statement(self, s: Statement) -> list[Statement]:
        """Return a statement on the tiles; parallel loops over several tiles become several statements."""
        if isinstance(s, ParallelNest):
            return [self._nest(x) for x in self.nests(s)]
        if isinstance(s, MatrixProduct):
            s = replace(s, a=self._part(s.a), b=self._part(s.b), c=self._part(s.c))
        elif isinstance(s, TileReduction):
            s = replace(s, source=self._part(s.source), target=self._part(s.target))
        bodies = list[tuple[Statement, ...]]()

        def without_body(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
            bodies.append(self.statements(body))
            return ()

        (own,) = changed([with_bodies(s, without_body)], lambda e: self._value(e, None))
        each = iter(bodies)
        return [with_bodies(own, lambda _: next(each))]

    def _value(self, e: Expression, nest: ParallelNest | None) -> Expression:
        result = with_inner(e, lambda x: self._value(x, nest))
        if not isinstance(result, BufferElement) or result.buffer is not self.buffer:
            return result
        return self.element(result.indices, nest)

    def _part(self, part: BufferPart) -> BufferPart:
        return self.tile_part(part) if part.buffer is self.buffer else part

    def _nest(self, s: ParallelNest) -> ParallelNest:
        def on_tile(x: Elementwise | BoundValue) -> Elementwise | BoundValue:
            if isinstance(x, BoundValue) or x.buffer is not self.buffer:
                return x
            target = self.element(x.indices, s)
            return replace(x, buffer=target.buffer, indices=target.indices)

        (result,) = changed([s], lambda e: self._value(e, s))
        assert isinstance(result, ParallelNest)
        return replace(result, body=tuple(map(on_tile, result.body)))
