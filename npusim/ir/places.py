"""Places in memory that several queues touch, numbered, and which uses of them must be ordered.

A slot of a ring is counted from where its ring stands, so that slots that come round are one case.
A slot's flags are places too, written by who sets them and read by who waits: one that is set again
before it was waited for is lost.  Sides that wait for every slot before they hand it on never do that,
so flags are looked at only in rings where one does not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.ir.automaton import coordinates_key
from npusim.ir.regions import may_meet
from npusim.ir.structure import Bytes, RingAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from npusim.ir.automaton import Automaton, Node
    from npusim.ir.buffers import Ring
    from npusim.ir.structure import Operation, Piece, RegionAccess
    from npusim.ir.tile import GlobalTile


@dataclass(frozen=True, slots=True)
class Use:
    """One way in which a place is touched: its bytes (of a slot, of a memory) by one queue."""

    where: Bytes | GlobalTile
    queue: int
    is_write: bool
    owner: int = -1  #: a ring whose whole extent this stands for


@dataclass(slots=True)
class Places:
    """Numbers for places: ``depth`` slots times the uses of each, from ``base`` on."""

    depth: int
    base: int = 0
    uses: dict[object, int] = field(default_factory=dict)
    listed: list[Use] = field(default_factory=list)
    conflicts: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, key: object, use: Use) -> None:
        """Number a use."""
        if key not in self.uses:
            self.uses[key] = len(self.listed)
            self.listed.append(use)


class PlaceTable:
    """The places of a phase: slots of rings, tiles that more than one queue touches, contested regions.

    ``dangers`` gives, for each place, the queues that may run into what was done there.
    """

    def __init__(self, automaton: Automaton) -> None:
        self.automaton, self.program = automaton, automaton.program
        self.rings = [Places(ring.depth) for ring in self.program.rings]
        self.memories: dict[str, Places] = defaultdict(lambda: Places(1))
        self.regions = Places(1)
        self._overlaid: set[int] = set()
        pieces = {id(n.piece): n.piece for n in automaton.nodes}.values()
        self._unasked = {r for piece in pieces for r in self._rings_unasked(piece)}
        self._number_places(pieces)
        base = 0
        for places in self._all():
            places.base = base
            base += places.depth * len(places.listed)
            _find_conflicts(places, self._meet)
        self.dangers = [
            tuple(sorted({places.listed[c].queue for c in conflicts}))
            for places in self._all()
            for _ in range(places.depth)
            for conflicts in places.conflicts
        ]

    def _all(self) -> tuple[Places, ...]:
        return (*self.rings, *self.memories.values(), self.regions)

    def _rings_unasked(self, piece: Piece) -> Iterator[int]:
        """Yield the rings of which a side hands on a slot that it did not wait for in this piece."""
        asked: set[int] = set()
        for op in piece.operations:
            for index, first, last in op.uses:
                endpoint = self.automaton.endpoints[index]
                if first:
                    asked.add(index)
                if last and endpoint.peers and index not in asked:
                    yield endpoint.ring_number
                if last:
                    asked.discard(index)

    def _slots(self, op: Operation) -> Iterator[RingAccess]:
        """Yield what an operation touches of slots, then the flags it waits for, then those that it sets."""
        yield from op.slots
        for is_set in (False, True):
            for index, *when in op.uses:
                endpoint = self.automaton.endpoints[index]
                if when[is_set] and endpoint.ring_number in self._unasked:
                    for setter in (index,) if is_set else endpoint.peers:
                        yield RingAccess(endpoint.ring_number, index, _flag(setter), is_set)

    def _number_places(self, pieces: Iterable[Piece]) -> None:
        """Find every use of every place."""
        used: dict[int, set[tuple[int, bool]]] = defaultdict(set)
        queues: dict[str, set[int]] = defaultdict(set)
        tiles: dict[tuple[str, Use], None] = {}
        for op in (op for piece in pieces for op in piece.operations):
            for slot in self._slots(op):
                use = Use(slot.where, op.queue, slot.is_write)
                self.rings[slot.ring].add(use, use)
            for slot in op.slots:
                used[slot.ring].add((op.queue, slot.is_write))
            for tile in op.tiles:
                queues[tile.space].add(op.queue)
                tiles[tile.space, Use(tile.where, op.queue, tile.is_write)] = None
        self._add_overlaid(used, queues, tiles)
        for space, use in tiles:
            if len(queues[space]) > 1:
                self.memories[space].add(use, use)
        for node in self.automaton.nodes:
            for op, accesses in zip(node.piece.operations, node.regions, strict=False):
                for access in accesses:
                    self.regions.add(*self._region_use(op, access))

    def _add_overlaid(
        self,
        used: Mapping[int, set[tuple[int, bool]]],
        queues: Mapping[str, set[int]],
        tiles: dict[tuple[str, Use], None],
    ) -> None:
        """Give rings that share bytes with other rings or with tiles a use of all their bytes."""
        extents = {r: (self.program.rings[r].space, ring_bytes(self.program.rings[r])) for r in used}
        for ring, (space, extent) in extents.items():
            others = [e for r, (s, e) in extents.items() if r != ring and s == space]
            others += [use.where for s, use in tiles if s == space]  # type: ignore[misc]
            if any(extent.overlaps(o) for o in others):
                self._overlaid.add(ring)
        for ring in self._overlaid:
            space, extent = extents[ring]
            for queue, is_write in sorted(used[ring]):
                queues[space].add(queue)
                tiles[space, Use(extent, queue, is_write, ring)] = None

    def _region_use(self, op: Operation, access: RegionAccess) -> tuple[object, Use]:
        use = Use(access.region, op.queue, access.is_write)
        return (coordinates_key(access), op.queue, access.is_write), use

    def _meet(self, a: Use, b: Use) -> bool:
        if isinstance(a.where, Bytes) and isinstance(b.where, Bytes):
            return a.where.overlaps(b.where)
        return may_meet(a.where, b.where, self.automaton.ranges)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- what operations touch

    def accesses(
        self, op: Operation, cursors: Sequence[int], start: Sequence[int], regions: Iterable[RegionAccess]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the places that an operation touches and what each conflicts with.

        ``cursors`` are the endpoints' at the operation, ``start`` at its node; ``regions`` the
        contested regions it touches.
        """
        for slot in self._slots(op):
            places = self.rings[slot.ring]
            use = places.uses[Use(slot.where, op.queue, slot.is_write)]
            if places.conflicts[use]:
                generation = cursors[slot.endpoint] - start[self.automaton.bases[slot.endpoint]]
                first = places.base + generation % places.depth * len(places.listed)
                yield first + use, tuple(first + c for c in places.conflicts[use])
        for slot in op.slots:
            ring = self.program.rings[slot.ring]
            if slot.ring in self._overlaid and ring.space in self.memories:
                whole = Use(ring_bytes(ring), op.queue, slot.is_write, slot.ring)
                yield from _placed(self.memories[ring.space], whole)
        for tile in op.tiles:
            if tile.space in self.memories:
                yield from _placed(self.memories[tile.space], Use(tile.where, op.queue, tile.is_write))
        for access in regions:
            yield from _placed(self.regions, self._region_use(op, access)[0])

    def renamed(self, node: Node) -> list[int]:
        """Return each place as counted from where the rings stand after the node."""
        found = list(range(len(self.dangers)))
        bases = {e.ring_number: self.automaton.bases[e.index] for e in self.automaton.endpoints}
        for ring, places in enumerate(self.rings):
            shift = node.advance[bases[ring]] if ring in bases else 0
            count = len(places.listed)
            if shift % places.depth and count:
                for slot in range(places.depth):
                    there = places.base + (slot - shift) % places.depth * count
                    at = places.base + slot * count
                    found[at : at + count] = range(there, there + count)
        return found

    def in_words(self, place: int) -> tuple[str, Use]:
        """Return a place's bytes in words, and its use."""
        for ring, places in zip(self.program.rings, self.rings, strict=True):
            if 0 <= place - places.base < places.depth * len(places.listed):
                slot, use = divmod(place - places.base, len(places.listed))
                found = places.listed[use]
                if found.where.start < 0:  # type: ignore[union-attr]
                    setter = self.automaton.endpoints[-1 - found.where.start]  # type: ignore[union-attr]
                    ready = "ready" if setter.is_producer else "free"
                    return (f"the flag '{ring.name} {ready}' of a slot, set again before it is waited for,", found)
                start = ring.offset_bytes + slot * ring.slot_bytes
                return _bytes_text(found.where, start, f"{ring.space} (ring {ring.name})"), found  # type: ignore[arg-type]
        for space, places in self.memories.items():
            if 0 <= place - places.base < len(places.listed):
                found = places.listed[place - places.base]
                return _bytes_text(found.where, 0, space), found  # type: ignore[arg-type]
        found = self.regions.listed[place - self.regions.base]
        region: GlobalTile = found.where  # type: ignore[assignment]
        return f"{region.rows} x {region.cols} elements of tensor {region.tensor.name}", found


def _flag(setter: int) -> Bytes:
    """Return where a slot's flag stands that an endpoint sets: before the slot's bytes."""
    return Bytes(-1 - setter, 1, 1, 1)


def _bytes_text(where: Bytes, start: int, space: str) -> str:
    return f"bytes {start + where.start}..{start + where.end} of {space}"


def _placed(places: Places, key: object) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the place of a use that has only one, with what it conflicts with, if anything does."""
    use = places.uses[key]
    if places.conflicts[use]:
        yield places.base + use, tuple(places.base + c for c in places.conflicts[use])


def _find_conflicts(places: Places, meet: Callable[[Use, Use], bool]) -> None:
    """Fill in which uses must be ordered: of different queues, on common bytes, one of them a write."""
    count = len(places.listed)
    found: list[list[int]] = [[] for _ in range(count)]
    for i, a in enumerate(places.listed):
        for j in range(i):
            b = places.listed[j]
            if a.queue == b.queue or not (a.is_write or b.is_write):
                continue
            if (a.owner < 0 or a.owner != b.owner) and meet(a, b):
                found[i].append(j)
                found[j].append(i)
    places.conflicts = [tuple(f) for f in found]


def ring_bytes(ring: Ring) -> Bytes:
    """Return all bytes of a ring's slots."""
    size = ring.depth * ring.slot_bytes
    return Bytes(ring.offset_bytes, size, size, 1)
