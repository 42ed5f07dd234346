"""Happens-before: operations on the same bytes must be ordered, whatever the engines' speed.

Each operation carries a vector clock: how far into every queue's operations it is certain to come
after.  It inherits the clock of its queue's previous operation and of every operation whose set it
waits for.  Two conflicting operations without an order are a race.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import RaceError
from npusim.formats import get_format
from npusim.ir.tile import GlobalTile, RingTile, Tile
from npusim.ir.walk import Walker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.ir.op import Step
    from npusim.ir.program import TileProgram
    from npusim.ir.walk import ResolvedOp

Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """``rows`` runs of ``width`` bytes, ``pitch`` apart, from ``start``."""

    start: int
    width: int
    pitch: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.pitch + self.width

    def overlaps(self, other: _Rectangle) -> bool:
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.pitch != other.pitch:
            return True  # different shapes in one range: assume the worst
        # Same pitch: compare the byte columns, and the row ranges they belong to.
        rows, column = divmod(other.start - self.start, self.pitch)
        for row, left in ((rows, column), (rows + 1, column - self.pitch)):
            if (
                left < self.width
                and left + other.width > 0
                and row < self.rows
                and row + other.rows > 0
            ):
                return True
        return False


class _Memory:
    """Who touched which bytes of one memory last, queue by queue.

    A queue runs in order, so its latest access to a rectangle stands for all its earlier ones.
    """

    def __init__(self) -> None:
        self._neighbours: dict[_Rectangle, list[_Rectangle]] = {}
        self._latest: dict[_Rectangle, dict[tuple[int, bool], tuple[int, ResolvedOp]]] = {}

    def touch(
        self,
        where: _Rectangle,
        resolved: ResolvedOp,
        position: int,
        is_write: bool,
        clock: list[int],
    ) -> tuple[ResolvedOp, bool] | None:
        """Record an access; return the operation it races with, and whether that one writes."""
        if where not in self._latest:
            overlapping = [r for r in self._latest if r.overlaps(where)]
            for other in overlapping:
                self._neighbours[other].append(where)
            self._neighbours[where] = [*overlapping, where]
            self._latest[where] = {}
        for other in self._neighbours[where]:
            for (queue, wrote), (at, earlier) in self._latest[other].items():
                if (is_write or wrote) and queue != resolved.queue and clock[queue] < at:
                    return earlier, wrote
        self._latest[where][resolved.queue, is_write] = (position, resolved)
        return None


def check_races(program: TileProgram, operations: Iterable[ResolvedOp]) -> None:
    """Raise :class:`RaceError` for the first two operations on the same bytes without an order.

    ``operations`` come in program order.  The message names both operations with their iterations
    and the tile they share.
    """
    queue_count = len(program.queues)
    endpoint_count = len(Walker(program).endpoints)
    clocks: list[list[int]] = [[0] * queue_count for _ in range(queue_count)]
    positions = [0] * queue_count
    signalled: list[list[Clock]] = [[(0,) * queue_count] for _ in range(endpoint_count)]
    memories: dict[str, _Memory] = defaultdict(_Memory)
    for resolved in operations:
        clock = clocks[resolved.queue]
        for wait in resolved.waits:
            reached = signalled[wait.peer]
            # A wait that nothing listed before satisfies orders nothing (check_order reports it).
            if wait.count < len(reached):
                clock[:] = map(max, clock, reached[wait.count])
        positions[resolved.queue] += 1
        position = positions[resolved.queue]
        for space, where, is_write in _accesses(resolved):
            race = memories[space].touch(where, resolved, position, is_write, clock)
            if race:
                earlier, wrote = race
                raise RaceError(
                    f"{resolved} {'writes' if is_write else 'reads'} bytes {where.start}..{where.end} of {space} "
                    f"that {earlier} {'writes' if wrote else 'reads'}, and no flag orders them"
                )
        clock[resolved.queue] = position
        for endpoint in resolved.sets:
            signalled[endpoint].append(tuple(clock))


def _accesses(resolved: ResolvedOp) -> Iterator[tuple[str, _Rectangle, bool]]:
    seen = set()
    for step in resolved.op.steps:
        for operand, is_write in _operands(step):
            if isinstance(operand, GlobalTile):
                size = get_format(operand.fmt).size_bytes
                pitch = operand.tensor.cols * size
                matrix = operand.batch * operand.tensor.heads + operand.head
                start = (matrix * operand.tensor.rows + operand.row) * pitch + operand.col * size
                if operand.tensor.role in ("input", "constant"):
                    continue
                space, rows, width = (
                    f"tensor {operand.tensor.name}",
                    operand.rows,
                    operand.cols * size,
                )
            else:
                tile = resolved.tile(operand) if isinstance(operand, RingTile) else operand
                size = get_format(tile.fmt).size_bytes
                space, start, rows = tile.space, tile.offset_bytes, tile.rows
                width, pitch = tile.cols * size, tile.stride * size
            access = (space, _Rectangle(start, width, pitch, rows), is_write)
            if access not in seen:
                seen.add(access)
                yield access


def _operands(step: Step) -> Iterator[tuple[Tile | RingTile | GlobalTile, bool]]:
    yield step.dst, True
    if step.attributes.accumulate:
        yield step.dst, False
    for source in step.srcs:
        if isinstance(source, (Tile, RingTile, GlobalTile)):
            yield source, False
