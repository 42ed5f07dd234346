"""Tiles in which a statement writes only the first elements.

For an assignment to the first elements of a tile, the writer computes as many elements as the sources have. The other
elements then do not have the program's values, so that a later read of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from npusim.kernels.tilelang.statements import (
    TRUE,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Expression,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    interval,
    parts_of,
    refused,
)
from npusim.kernels.triton.ttir_text import Line


def refuse_reads_of_the_rest(body: Iterable[Statement]) -> None:
    """Raise `ProgramError` if a tile is read beyond its first elements although only these were written."""
    _FirstElements().follow(body)


class _FirstElements:
    """Follows statements; ``known``: for each axis of a tile along which only the first elements have values, the
    number of these elements, and the line of the write.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[TileBuffer, int], tuple[int, Line]] = {}

    def follow(self, body: Iterable[Statement]) -> None:
        """Follow statements in their order."""
        for s in body:
            if isinstance(s, SerialLoop):
                self._read(s.line, {}, s.low, s.high)
                self._loop(s.body)
            elif isinstance(s, Conditional):
                self._read(s.line, {}, s.condition)
                before = dict(self.known)
                self.follow(s.then)
                then, self.known = self.known, before
                self.follow(s.otherwise)
                self._join(then)
            elif isinstance(s, BoundValue):
                self._read(s.line, {}, s.value)
            elif isinstance(s, ParallelNest):
                self._nest(s)
            elif isinstance(s, MatrixProduct):
                self._parts(s.line, s.a, s.b, *([] if s.clears == TRUE else [s.c]))
                self._whole(s.c)
            elif isinstance(s, TileReduction):
                self._parts(s.line, s.source, *([] if s.clears else [s.target]))
                self._whole(s.target)

    def _loop(self, body: Sequence[Statement]) -> None:
        while True:
            before = dict(self.known)
            self.follow(body)
            self._join(before)
            if self.known == before:
                return

    def _join(self, other: Mapping[tuple[TileBuffer, int], tuple[int, Line]]) -> None:
        """Use the smaller number of elements of two paths to a statement."""
        for at, (count, line) in other.items():
            if at not in self.known or count < self.known[at][0]:
                self.known[at] = count, line
            elif count == self.known[at][0]:
                self.known[at] = other[at]

    def _nest(self, s: ParallelNest) -> None:
        ranges: dict[str, tuple[float, float]] = {name: (0, n - 1) for name, n in s.axes}
        for x in s.body:
            if isinstance(x, BoundValue):
                self._read(x.line, ranges, x.value)
                ranges[x.name] = interval(x.value, ranges)
                continue
            own = ranges | {name: (0, n - 1) for name, n in x.axes}
            rules = () if x.condition is None else (x.condition,)
            self._read(x.line, own, x.value, *x.indices, *rules)
            if not x.buffer.is_global:
                self._write(x)

    def _write(self, x: Elementwise) -> None:
        lengths = dict(x.axes)
        at = {d: i.name for d in x.buffer.dims if isinstance(i := x.indices[d], Variable) and i.name in lengths}
        for d, name in at.items():
            if lengths[name] < x.buffer.shape[d]:
                before = self.known.get((x.buffer, d), (lengths[name], x.line))
                is_fewer = x.condition is None or lengths[name] < before[0]
                self.known[x.buffer, d] = (lengths[name], x.line) if is_fewer else before
            elif x.condition is None and len(at) == len(x.buffer.dims):
                self.known.pop((x.buffer, d), None)

    def _whole(self, part: BufferPart) -> None:
        if part.is_whole:
            for d in part.buffer.dims:
                self.known.pop((part.buffer, d), None)

    def _read(self, line: Line, ranges: Mapping[str, tuple[float, float]], *expressions: Expression) -> None:
        for e in expressions:
            for x in parts_of(e):
                if isinstance(x, BufferElement):
                    for d, index in enumerate(x.indices):
                        self._check(x.buffer, d, interval(index, ranges)[1] + 1, line)

    def _parts(self, line: Line, *parts: BufferPart) -> None:
        for x in parts:
            for d, (start, n) in enumerate(zip(x.start, x.extent, strict=True)):
                self._check(x.buffer, d, interval(start, {})[1] + n, line)

    def _check(self, buffer: TileBuffer, axis: int, count: float, line: Line) -> None:
        have, of = self.known.get((buffer, axis), (buffer.shape[axis], line))
        if count > have and (buffer, axis) in self.known:
            raise refused(
                of,
                f"the kernel writes only a part of the tile {buffer.name} ({have} of the {buffer.shape[axis]} elements "
                f"of axis {axis}), and line {line.number} reads more of it; write all of it",
            )
