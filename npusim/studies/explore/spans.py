"""The least time between the start of a queue's first operation in a body and the end of its last one.

The operations of a body follow one another in each queue.  Some of them wait for operations of the same body on other
queues: a slot must be filled before it is read, and read before it is filled again.  The longest chain of such waits
from a queue's first operation to its last one is a bound in every run of the body.  It does not depend on earlier
operations, because everything that does not follow the first operation is assumed to have ended long before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import TileOp
    from npusim.program.timing.engine_arrays import Ints

#: One side of a ring: the ring's name, and whether it is the side of the producer.
Side = tuple[str, bool]
#: A time long before a body begins.
LONG_BEFORE = -(1 << 62)


class QueueEntry(NamedTuple):
    """An operation: the cycles of its queue, the additional cycles until its results are ready, and its sides of rings.

    Flags of a side: whether it waits for a slot, and whether it passes a slot on.
    """

    queue: int
    occupancy: int
    latency: int
    sides: tuple[tuple[Side, bool, bool], ...]


class _Slots(NamedTuple):
    """A ring in a body: its depth, and the least and most slots that are full when the body begins."""

    depth: int
    least: int
    most: int


def waited_for(rings: Iterable[Ring]) -> dict[str, int]:
    """Return the depth of each ring between two queues of one core, by name."""
    between = (r for r in rings if r.flag == "binary" and not r.peeks and len(r.producers) == len(r.consumers) == 1)
    return {ring.name: ring.depth for ring in between if ring.producers != ring.consumers}


def sides_of(op: TileOp, depths: Mapping[str, int]) -> tuple[tuple[Side, bool, bool], ...]:
    """Return an operation's sides of the rings in ``depths``."""
    sides: dict[Side, tuple[bool, bool]] = {}
    for tile in op.ring_tiles():
        if tile.ring.name in depths:
            side = tile.ring.name, tile.is_producer
            first, last = sides.get(side, (False, False))
            sides[side] = first or tile.first, last or tile.last
    return tuple([(side, *when) for side, when in sides.items()])


def spans(entries: Sequence[QueueEntry], depths: Mapping[str, int], queues: int) -> Ints:
    """Return the least cycles from each queue's first operation to the end of its last one; 0 without operations.

    ``entries`` are in program order, ``depths`` as `waited_for` returns them, ``queues`` the number of queues.
    """
    rings = _rings(entries, depths)
    # Times are arrays: one entry per queue, relative to the start of its first operation.
    ends = np.full((queues, queues), LONG_BEFORE, np.int64)
    handed_on: dict[Side, list[Ints]] = {}
    begun = [False] * queues
    for queue, occupancy, latency, sides in entries:
        start = ends[queue].copy()
        for (ring, is_producer), is_first, _ in sides:
            if is_first and (slots := rings.get(ring)):
                mine, others = handed_on.get((ring, is_producer), ()), handed_on.get((ring, not is_producer), ())
                at = len(mine) + slots.least - slots.depth if is_producer else len(mine) - slots.most
                if 0 <= at < len(others):
                    np.maximum(start, others[at], out=start)
        if not begun[queue]:
            begun[queue] = True
            start[queue] = max(0, start[queue])
        ends[queue] = start + occupancy
        for side, _, is_last in sides:
            if is_last:
                handed_on.setdefault(side, []).append(ends[queue] + latency)
    return np.maximum(ends.diagonal(), 0)


def _rings(entries: Iterable[QueueEntry], depths: Mapping[str, int]) -> dict[str, _Slots]:
    """Return the rings of which both sides wait for each slot and pass it on, and the numbers of slots that may be full
    at the beginning.

    Program order is legal: an operation is listed after the operations that it waits for.  This limits the number of
    full slots.
    """
    holds: dict[Side, bool] = {}
    refused: set[str] = set()
    full: dict[str, int] = {}
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for *_, sides in entries:
        for side, is_first, is_last in sides:
            ring, is_producer = side
            if is_first == holds.get(side, False):
                refused.add(ring)
            holds[side] = not is_last
            now = full.get(ring, 0)
            if is_producer:
                most[ring] = min(most.get(ring, depths[ring]), depths[ring] - 1 - now)
                full[ring] = now + is_last
            else:
                least[ring] = max(least.get(ring, 0), 1 - now)
                full[ring] = now - is_last
    refused.update(ring for (ring, _), is_held in holds.items() if is_held)
    both = (ring for ring in most.keys() & least.keys() if ring not in refused)
    return {ring: _Slots(depths[ring], least[ring], most[ring]) for ring in both}
