"""Happens-before over a whole phase: operations on the same bytes must be ordered, whatever the engines' speed.

An access is a *fact*: a queue, its bytes, and the queues and flags that know that it has ended.  A queue knows what its
earlier operations know, and what each flag that it waits for knew when the flag was set. As in ``timing``, a flag is
set when all earlier operations of its queue have completed.  Facts are independent: each depends on the operations that
follow, not on other facts.  Therefore each fact is propagated through the automaton (``ir.automaton``) until no new
fact appears, which covers every sequence of blocks and every number of iterations. A race is an access to the same
bytes, in any node, by a queue that does not know the fact.

Bytes that several queues access are numbered (`PlaceTable`). A slot of a ring is counted from the position of its ring,
so that recurring slots are one case. A slot's flags are places too, written by the queue that sets them and read by the
queue that waits: a flag that is set again before a wait is lost. A side that waits for each slot before it releases the
slot loses no flag; flags are examined only for rings with a side that does not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from functools import reduce
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.errors import RaceError
from npusim.late_methods import dataclass
from npusim.program.ir.automaton import BLOCK, NEXT
from npusim.program.ir.content import record
from npusim.program.ir.regions import may_meet
from npusim.program.ir.structure import Bytes, RingAccess, pieces_of
from npusim.program.ir.walk import required_count
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from npusim.program.ir.automaton import Automaton, Node
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.structure import Operation, Piece, RegionAccess
    from npusim.program.ir.tile import GlobalTile

#: One use of a place in memory, and the agents that know that the use has ended: queues, then flags.
Fact = tuple[int, int]


class Witness(NamedTuple):
    """The origin of a fact: the operation at its node, and the number of slots since then."""

    node: int
    operation: Operation
    laps: int
    blocks: int

    def beyond(self, hop: int) -> Witness:
        """Return the witness after the step from one node to the next iteration of a loop, or to the next block."""
        return self._replace(laps=0 if hop == BLOCK else self.laps + 1, blocks=self.blocks + (hop == BLOCK))


class Resolved(NamedTuple):
    """The properties of an operation that matter for facts: its waits as (endpoint, position), and its accesses as
    (place, conflicts).
    """

    operation: Operation
    queue: int
    waits: tuple[tuple[int, int], ...]
    accesses: tuple[tuple[int, tuple[int, ...]], ...]
    sets: tuple[int, ...]


class Learning(dict[int, int]):
    """For eight agents: maps each subset that knows a fact before a piece to the agents that know it after the piece.

    ``each``: the result for each of the eight agents, as bits of one number.
    """

    def __init__(self, each: Sequence[int]) -> None:
        self.each = each

    def __missing__(self, some: int) -> int:
        known, left = 0, some
        while left:
            lowest = left & -left
            known |= self.each[lowest.bit_length() - 1]
            left ^= lowest
        self[some] = known
        return known


class Passage(NamedTuple):
    """The effect of a piece on facts: the conflicts with them, and the agents that know them afterwards.

    Knowledge spreads between agents in the same way for all facts: for the agents that know a fact before the piece,
    eight at a time, ``learn`` has the agents that know it after the piece.  ``sees``: for each operation, the agents
    before the piece whose knowledge it has.  ``meets``: for each place, the agents that the conflicting operations see;
    each of these operations must know of an access to the place before the piece.  ``replaced``: places that the piece
    itself accesses, with the last operation on each; ``own``: these places, with the operations and the agents that
    know of the access.  ``races``: two operations of the piece are not ordered.  ``renamed``: the number of each place
    after the piece.  ``known``: results of `after`.
    """

    operations: list[Resolved]
    sees: list[int]
    meets: dict[int, list[int]]
    replaced: dict[int, int]
    learn: list[Learning]
    own: list[tuple[int, int, int]]
    races: bool
    renamed: list[int]
    known: dict[int, int]

    def after(self, agents: int) -> int:
        """Return the agents that have, after the piece, the knowledge that ``agents`` have before it; `known` has the
        result from then on.
        """
        known = 0
        for learning, some in zip(self.learn, agents.to_bytes(len(self.learn), "little"), strict=True):
            if some:
                known |= learning[some]
        self.known[agents] = known
        return known


def check_races(automaton: Automaton) -> None:
    """Raise `RaceError` for two operations of a phase on common bytes that nothing orders.

    One of the two accesses writes, and there is a sequence of blocks and iterations in which they overlap.  The message
    names both with their iterations, the bytes, and the lines of the schedule that yield them.
    """
    _Facts(automaton).run()


class _Facts:
    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.places = automaton.alike if isinstance(automaton.alike, PlaceTable) else PlaceTable(automaton)
        self.program, self.endpoints = automaton.program, automaton.endpoints
        self.queues = len(self.program.queues)
        waiting = [[e for e in self.endpoints if peer.index in e.peers] for peer in self.endpoints]
        #: The first agent of each endpoint's flags; an endpoint has one flag for each slot of its ring, since only
        #: these flags can still be awaited.
        counts = (e.depth if waiting[e.index] else 0 for e in self.endpoints)
        self.flags = list(accumulate(counts, initial=self.queues))
        #: For each endpoint whose flags are awaited: its first flag, the end of its flags, its number, and the queues
        #: that wait.
        ends = zip(self.endpoints, waiting, pairwise(self.flags), strict=True)
        self._awaited = [(*flags, e.index, those) for e, those, flags in ends if those]
        self._sides = [[s.index for s in self.endpoints if s.ring_number == e.ring_number] for e in self.endpoints]
        self._visited: set[int] = set()
        #: For each node, its passage, and the agents that are relevant after it.
        self._nodes: dict[int, tuple[Passage, int]] = {}
        self._passages: dict[Hashable, Passage] = {}
        #: For each state of the rings after a node, by number, the agents that are relevant then.
        self._relevant: dict[int, int] = {}
        self._used: dict[int, list[int]] = {}
        #: For each place, the queues that may conflict with an access to it, as bits.
        self._dangers = [reduce(or_, (1 << q for q in queues), 0) for queues in self.places.dangers]

    # ---------------------------------------------------------------- nodes

    def _passed(self, number: int) -> tuple[Passage, int]:
        """Return the passage of a node, and the agents that are relevant after it.

        A piece depends only on the rings that it uses: nodes with one piece and equal states of these rings share one
        passage.
        """
        if number not in self._nodes:
            node = self.automaton.nodes[number]
            used = self._used.get(id(node.piece))
            if used is None:
                ends = {e for op in node.piece.operations for e, *_ in op.uses}
                ends |= {slot.endpoint for op in node.piece.operations for slot in op.slots}
                used = self._used[id(node.piece)] = sorted({side for e in ends for side in self._sides[e]})
            regions = tuple([tuple([(a.key, a.is_write) for a in of_op]) for of_op in node.regions])
            key = id(node.piece), tuple([node.state[e] for e in used]), regions
            if key not in self._passages:
                self._passages[key] = self._passage(node)
            after = self.automaton.state_after(number)
            if after not in self._relevant:  # the result depends only on the rings' state
                self._relevant[after] = self._agents(node)
            self._nodes[number] = self._passages[key], self._relevant[after]
        return self._nodes[number]

    def _resolve(self, node: Node) -> list[Resolved]:
        start, cursors = node.cursors, list(node.cursors)
        resolved = []
        for position, op in enumerate(node.piece.operations):
            waits: list[tuple[int, int]] = []
            for index, first, _ in op.uses:
                if not first:
                    continue
                need = required_count(self.endpoints[index], cursors[index])
                for peer in self.endpoints[index].peers:
                    at = need - 1 - start[peer] + self.endpoints[peer].depth
                    if at >= 0:  # a flag that is older than the slots of a ring adds no knowledge
                        waits.append((peer, at))
            regions = node.regions[position] if node.regions else ()
            accesses = tuple(self.places.accesses(op, cursors, start, regions))
            sets = tuple([e for e, _, last in op.uses if last])
            for endpoint in sets:
                cursors[endpoint] += 1
            resolved.append(Resolved(op, op.queue, tuple(waits), accesses, sets))
        return resolved

    def _agents(self, node: Node) -> int:
        """Return the queues, and the flags for which a queue may still wait after the node."""
        cursors = [c + a for c, a in zip(node.cursors, node.advance, strict=True)]
        agents = (1 << self.queues) - 1
        for first, end, peer, waiting in self._awaited:
            awaited = min([required_count(e, cursors[e.index]) for e in waiting])
            oldest = max(0, awaited - 1 - cursors[peer] + end - first)
            agents |= max(0, (1 << end) - (1 << first + oldest))
        return agents

    def _passage(self, node: Node) -> Passage:
        """Return the passage of a node; bits stand for the agents before the node, then for its operations."""
        operations, agents = self._resolve(node), self.flags[-1]
        known = [1 << queue for queue in range(self.queues)]
        flags = [[1 << agent for agent in range(first, end)] for first, end in pairwise(self.flags)]
        before = (1 << agents) - 1
        sees, meets, replaced, races = list[int](), defaultdict[int, list[int]](list), dict[int, int](), False
        for position, (_, queue, waits, accesses, sets) in enumerate(operations):
            seen = known[queue]
            for peer, at in waits:
                seen |= flags[peer][at]
            sees.append(seen)
            for _, conflicts in accesses:
                for other in conflicts:
                    if other not in replaced:
                        meets[other].append(seen & before)
                    elif not seen >> agents + replaced[other] & 1:
                        races = True
            for place, _ in accesses:
                replaced[place] = position
            known[queue] = seen = seen | 1 << agents + position
            for endpoint in sets:
                flags[endpoint].append(seen)
        for latest, (first, end) in zip(flags, pairwise(self.flags), strict=True):
            known += latest[len(latest) - (end - first) :]
        learn, renamed = _transposed(known, agents + len(operations)), self.places.renamed(node)
        # A fact is propagated for as long as some queue may conflict with it.
        own = [
            (renamed[n], learn[agents + at], at) for n, at in replaced.items() if self._dangers[n] & ~learn[agents + at]
        ]
        learnings = [Learning(learn[first : first + 8]) for first in range(0, agents, 8)]
        return Passage(operations, sees, dict(meets), replaced, learnings, own, races, renamed, {})

    # ---------------------------------------------------------------- facts

    def run(self) -> None:
        nodes = self.automaton.nodes
        seen: list[dict[int, list[int]]] = [defaultdict(list) for _ in nodes]
        new: list[dict[Fact, Witness]] = [{} for _ in nodes]
        # A heap of (sweep, node): within a sweep, nodes are in program order; a node to which a loop leads back comes
        # in the next sweep, when all facts for it have been collected.
        waiting = [(0, number) for number in range(len(nodes))]
        while waiting:
            turn = heappop(waiting)
            while waiting and waiting[0] == turn:
                heappop(waiting)
            sweep, number = turn
            facts, new[number] = new[number], {}
            left = self._step(number, facts)
            for successor, hop in nodes[number].successors.items():
                known, fresh = seen[successor], new[successor]
                for fact, witness in left.items():
                    place, agents = fact
                    if hop == BLOCK and place >= self.places.regions.base:
                        continue  # regions of two blocks never overlap (ir.regions)
                    # An access that fewer agents know of replaces those that more agents know of, because it has more
                    # possible conflicts.
                    for fewer in (listed := known[place]):
                        if not fewer & ~agents:
                            break
                    else:
                        listed.append(agents)
                        fresh[fact] = witness if hop == NEXT else witness.beyond(hop)
                if fresh:
                    heappush(waiting, (sweep + (successor <= number), successor))

    def _step(self, number: int, facts: Mapping[Fact, Witness]) -> dict[Fact, Witness]:
        """Propagate ``facts`` through a node; return the facts with which some queue may still conflict, and those of
        the node.
        """
        passage, relevant = self._passed(number)
        meets, replaced, renamed, dangers = passage.meets, passage.replaced, passage.renamed, self._dangers
        known = passage.known
        if passage.races:
            raise self._race(number, facts)
        left: dict[Fact, Witness] = {}
        for (place, agents), witness in facts.items():
            for seen in meets.get(place, ()):
                if not agents & seen:
                    raise self._race(number, facts)
            if place not in replaced:
                after = known.get(agents)
                if after is None:
                    after = passage.after(agents)
                if dangers[place] & ~after:
                    left[renamed[place], after & relevant] = witness
        # A node's accesses create the same facts at every visit, so that they are new only once.
        for place, agents, at in passage.own if number not in self._visited else ():
            left[place, agents & relevant] = Witness(number, passage.operations[at].operation, 0, 0)
        self._visited.add(number)
        return left

    # ---------------------------------------------------------------- errors

    def _race(self, number: int, facts: Mapping[Fact, Witness]) -> RaceError:
        """Return the error of a node's first access that conflicts with another access whose end its queue does not
        know.
        """
        (passage, _), agents = self._passed(number), self.flags[-1]
        order = list(dict.fromkeys(known for _, known in facts))
        earlier: dict[int, int] = {}
        for position, (seen, resolved) in enumerate(zip(passage.sees, passage.operations, strict=True)):
            for place, other in ((place, other) for place, conflicts in resolved.accesses for other in conflicts):
                if other not in earlier:
                    unseen = [fact for fact in facts if fact[0] == other and not fact[1] & seen]
                    if unseen:
                        return self._met(
                            number, position, place, facts[min(unseen, key=lambda f: order.index(f[1]))], other
                        )
                elif not seen >> agents + earlier[other] & 1:
                    mine = Witness(number, passage.operations[earlier[other]].operation, 0, 0)
                    return self._met(number, position, place, mine, other)
            earlier |= {place: position for place, _ in resolved.accesses}
        raise AssertionError(number)

    def _met(self, number: int, position: int, mine: int, earlier: Witness, other: int) -> RaceError:
        """Return the error that names both operations, their iterations and the bytes."""
        automaton, node = self.automaton, self.automaton.nodes[number]
        operation = self._passed(number)[0].operations[position].operation
        space, use = self.places.in_words(mine)
        _, other_use = self.places.in_words(other)
        first = automaton.named(automaton.nodes[earlier.node], earlier.operation)
        if earlier.blocks:
            first += " of the block before" if earlier.blocks == 1 else f" of {earlier.blocks} blocks before"
        there = f" (yielded at {earlier.operation.source})" if earlier.operation.source else ""
        return RaceError(
            f"{operation.prefix}{automaton.named(node, operation, earlier.laps)} {_verb(use)} {space} that {first} "
            f"{_verb(other_use)}, and no flag orders them{there}"
        )


def _transposed(rows: Sequence[int], width: int) -> list[int]:
    """Return for each of ``width`` bits the rows in which it is set, as bits of one number."""
    size = ceil_div(width, 8)
    listed = np.frombuffer(b"".join([row.to_bytes(size, "little") for row in rows]), np.uint8).reshape(len(rows), size)
    bits = np.unpackbits(listed, axis=1, count=width, bitorder="little")
    columns = np.packbits(bits.T, axis=1, bitorder="little")
    packed, size = columns.tobytes(), columns.shape[1]
    return [int.from_bytes(packed[n * size : (n + 1) * size], "little") for n in range(width)]


def _verb(use: Use) -> str:
    return "writes" if use.is_write else "reads"


# ---------------------------------------------------------------- places


@record
class Use:
    """One kind of access to a place: its bytes (of a slot, of a memory), and one queue."""

    where: Bytes | GlobalTile
    queue: int
    is_write: bool
    owner: int = -1  #: the ring that this place represents completely


@dataclass(slots=True)
class Places:
    """Numbers of places: from ``base`` on, one number for each of ``depth`` slots and each use."""

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


class _Touched(NamedTuple):
    """The accesses of an operation with which other accesses may conflict.

    ``slots``: the endpoint whose slot it is, the endpoint from which slots are counted, the ring's places, the use.
    ``others``: places in other memory with their conflicts.
    """

    operation: Operation
    slots: list[tuple[int, int, Places, int]]
    others: list[tuple[int, tuple[int, ...]]]


class PlaceTable:
    """The places of a phase: slots of rings, tiles that more than one queue accesses, contested regions.

    ``dangers`` contains, for each place, the queues that may conflict with an access there.  ``is_joined``: uses by a
    queue that conflict with the same other uses are one place, whatever the width of the tiles.
    """

    def __init__(self, automaton: Automaton, *, is_joined: bool = False) -> None:
        # This is not the automaton itself, because the automaton stores this object: objects that refer to each other
        # are not freed when their last user is.
        self.program, self.endpoints = automaton.program, automaton.endpoints
        self.bases, self.ranges = automaton.bases, automaton.ranges
        self.rings = [Places(ring.depth) for ring in self.program.rings]
        self.memories: dict[str, Places] = defaultdict(lambda: Places(1))
        self.regions = Places(1)
        self._overlaid: set[int] = set()
        #: Accesses by the identity of the operation; each entry refers to the operation, so that no other one gets its
        #: id.
        self._touched: dict[int, _Touched] = {}
        pieces = {id(p): p for shape in automaton.shapes for p in pieces_of(shape.parts)}.values()
        self._unasked = {r for piece in pieces for r in self._rings_unasked(piece)}
        self._number_places(pieces, automaton.nodes)
        base = 0
        for places in self._all():
            _find_conflicts(places, self._meet)
            if is_joined:
                _join_uses(places)
            places.base = base
            base += places.depth * len(places.listed)
        self.dangers = [
            tuple(sorted({places.listed[c].queue for c in conflicts}))
            for places in self._all()
            for _ in range(places.depth)
            for conflicts in places.conflicts
        ]

    def _all(self) -> tuple[Places, ...]:
        return (*self.rings, *self.memories.values(), self.regions)

    def _rings_unasked(self, piece: Piece) -> Iterator[int]:
        """Yield the rings with a side that passes on a slot for which it did not wait in this piece."""
        asked: set[int] = set()
        for op in piece.operations:
            for index, first, last in op.uses:
                endpoint = self.endpoints[index]
                if first:
                    asked.add(index)
                if last and endpoint.peers and index not in asked:
                    yield endpoint.ring_number
                if last:
                    asked.discard(index)

    def _slots(self, op: Operation) -> Iterator[RingAccess]:
        """Yield the slots that an operation accesses, then the flags that it awaits, then the flags that it sets."""
        yield from op.slots
        for is_set in (False, True):
            for index, *when in op.uses:
                endpoint = self.endpoints[index]
                if when[is_set] and endpoint.ring_number in self._unasked:
                    for setter in (index,) if is_set else endpoint.peers:
                        yield RingAccess(endpoint.ring_number, index, _flag(setter), is_set)

    def _number_places(self, pieces: Iterable[Piece], nodes: Iterable[Node]) -> None:
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
        for node in nodes:
            for op, accesses in zip(node.piece.operations, node.regions, strict=False):
                for access in accesses:
                    self.regions.add(*self._region_use(op, access))

    def _add_overlaid(
        self,
        used: Mapping[int, set[tuple[int, bool]]],
        queues: Mapping[str, set[int]],
        tiles: dict[tuple[str, Use], None],
    ) -> None:
        """Add a use of all its bytes to each ring that shares bytes with other rings or with tiles."""
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
        return (access.key, op.queue, access.is_write), use

    def _meet(self, a: Use, b: Use) -> bool:
        if isinstance(a.where, Bytes) and isinstance(b.where, Bytes):
            return a.where.overlaps(b.where)
        return may_meet(a.where, b.where, self.ranges)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- accesses of operations

    def accesses(
        self, op: Operation, cursors: Sequence[int], start: Sequence[int], regions: Iterable[RegionAccess]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the places that an operation accesses, each with its conflicts.

        ``cursors`` are the endpoints' cursors at the operation, ``start`` those at its node; ``regions`` are the
        contested regions that it accesses.
        """
        known = self._touched.get(id(op))
        if known is None:
            known = self._touched[id(op)] = self._touches(op)
        for endpoint, base, places, use in known.slots:
            first = places.base + (cursors[endpoint] - start[base]) % places.depth * len(places.listed)
            yield first + use, tuple([first + c for c in places.conflicts[use]])
        yield from known.others
        for access in regions:
            yield from _placed(self.regions, self._region_use(op, access)[0])

    def _touches(self, op: Operation) -> _Touched:
        touched = _Touched(op, [], [])
        for slot in self._slots(op):
            places = self.rings[slot.ring]
            use = places.uses[Use(slot.where, op.queue, slot.is_write)]
            if places.conflicts[use]:
                touched.slots.append((slot.endpoint, self.bases[slot.endpoint], places, use))
        for slot in op.slots:
            ring = self.program.rings[slot.ring]
            if slot.ring in self._overlaid and ring.space in self.memories:
                whole = Use(ring_bytes(ring), op.queue, slot.is_write, slot.ring)
                touched.others.extend(_placed(self.memories[ring.space], whole))
        for tile in op.tiles:
            if tile.space in self.memories:
                use_of_tile = Use(tile.where, op.queue, tile.is_write)
                touched.others.extend(_placed(self.memories[tile.space], use_of_tile))
        return touched

    def __call__(self, piece: Piece) -> Hashable:
        """Return the common key of pieces that access the same places and release the same slots, operation by
        operation.
        """
        at = [0] * len(self.endpoints)
        ops = piece.operations
        ends = [tuple(sorted({slot.endpoint for slot in op.slots})) for op in ops]
        return tuple(
            [(op.queue, op.uses, of, *self.accesses(op, at, at, ())) for op, of in zip(ops, ends, strict=True)]
        )

    def renamed(self, node: Node) -> list[int]:
        """Return each place relative to the positions of the rings after the node."""
        names = list(range(len(self.dangers)))
        bases = {e.ring_number: self.bases[e.index] for e in self.endpoints}
        for ring, places in enumerate(self.rings):
            shift = node.advance[bases[ring]] if ring in bases else 0
            count = len(places.listed)
            if shift % places.depth and count:
                for slot in range(places.depth):
                    there = places.base + (slot - shift) % places.depth * count
                    at = places.base + slot * count
                    names[at : at + count] = range(there, there + count)
        return names

    def in_words(self, place: int) -> tuple[str, Use]:
        """Return a place's bytes in words, and its use."""
        for ring, places in zip(self.program.rings, self.rings, strict=True):
            if 0 <= place - places.base < places.depth * len(places.listed):
                slot, use = divmod(place - places.base, len(places.listed))
                touch = places.listed[use]
                if touch.where.start < 0:  # type: ignore[union-attr]
                    setter = self.endpoints[-1 - touch.where.start]  # type: ignore[union-attr]
                    ready = "ready" if setter.is_producer else "free"
                    return (
                        f"the flag '{ring.name} {ready}' of a slot, which is set again before a wait for it,",
                        touch,
                    )
                start = ring.offset_bytes + slot * ring.slot_bytes
                return _bytes_text(touch.where, start, f"{ring.space} (ring {ring.name})"), touch  # type: ignore[arg-type]
        for space, places in self.memories.items():
            if 0 <= place - places.base < len(places.listed):
                touch = places.listed[place - places.base]
                return _bytes_text(touch.where, 0, space), touch  # type: ignore[arg-type]
        touch = self.regions.listed[place - self.regions.base]
        region: GlobalTile = touch.where  # type: ignore[assignment]
        return f"{region.rows} x {region.cols} elements of tensor {region.tensor.name}", touch


def _flag(setter: int) -> Bytes:
    """Return the place of the flag that an endpoint sets for a slot; it comes before the slot's bytes."""
    return Bytes(-1 - setter, 1, 1, 1)


def _bytes_text(where: Bytes, start: int, space: str) -> str:
    return f"bytes {start + where.start}..{start + where.end} of {space}"


def _placed(places: Places, key: object) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the place of a use that has only one, with its conflicts, if there are any."""
    use = places.uses[key]
    if places.conflicts[use]:
        yield places.base + use, tuple(places.base + c for c in places.conflicts[use])


def _find_conflicts(places: Places, meet: Callable[[Use, Use], bool]) -> None:
    """Determine which uses must be ordered: uses of different queues, on common bytes, one of them a write."""
    count = len(places.listed)
    conflicts: list[list[int]] = [[] for _ in range(count)]
    for i, a in enumerate(places.listed):
        for j in range(i):
            b = places.listed[j]
            if a.queue == b.queue or not (a.is_write or b.is_write):
                continue
            if (a.owner < 0 or a.owner != b.owner) and meet(a, b):
                conflicts[i].append(j)
                conflicts[j].append(i)
    places.conflicts = [tuple(f) for f in conflicts]


def _join_uses(places: Places) -> None:
    """Combine uses by one queue that conflict with the same other uses.

    A queue executes in order: an agent that knows that a later access has ended also knows that an earlier one has.
    """
    joined: dict[tuple[int, tuple[int, ...]], int] = {}
    uses = zip(places.listed, places.conflicts, strict=True)
    number = [joined.setdefault((use.queue, others), len(joined)) for use, others in uses]
    first = [number.index(n) for n in range(len(joined))]
    places.conflicts = [tuple(dict.fromkeys(number[c] for c in places.conflicts[n])) for n in first]
    places.listed = [places.listed[n] for n in first]
    places.uses = {key: number[n] for key, n in places.uses.items()}


def ring_bytes(ring: Ring) -> Bytes:
    """Return all bytes of a ring's slots."""
    size = ring.depth * ring.slot_bytes
    return Bytes(ring.offset_bytes, size, size, 1)
