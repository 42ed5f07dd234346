"""Every order in which a core group can come to the pieces of a phase, as a finite graph.

A node is a piece of the program (``ir.structure``) at one *state of the rings*: how far each
endpoint is ahead of the others, whatever the count.  Its edges lead to what may follow: the next
piece, the next iteration, another block of any shape.  Loops and sequences of blocks return to
states they had, so the graph is finite and holds programs of every length.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.errors import ProgramError, RaceError
from npusim.ir.opaque import Coordinate, Symbol, substituted
from npusim.ir.structure import LoopPart, Operation, Piece
from npusim.ir.walk import required_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.ir.buffers import Ring
    from npusim.ir.program import TileProgram
    from npusim.ir.structure import Part, RegionAccess, Shape
    from npusim.ir.walk import Endpoint

#: Cursor of every endpoint, relative to where its ring stands.
State = tuple[int, ...]
#: A loop's name, index and step on the way to a node; the steps say what an iteration later is called.
Place = tuple[tuple[str, int, int], ...]
Environment = dict[Symbol, object]
#: What lies between a node and one that may follow: nothing, the end of an iteration, or of a block.
NEXT, LAP, BLOCK = range(3)


@dataclass(slots=True)
class Node:
    """A piece at one state of the rings.

    ``cursors`` are those of the first visit, ``advance`` how far the piece moves them.  ``successors``
    says of each node that may follow what lies between.  ``regions`` are its contested regions,
    operation by operation.
    """

    piece: Piece
    state: State
    cursors: tuple[int, ...]
    advance: tuple[int, ...]
    place: Place
    regions: tuple[tuple[RegionAccess, ...], ...]
    region_keys: tuple[object, ...]
    successors: dict[int, int] = field(default_factory=dict)


EMPTY = Piece(())


class Automaton:
    """The graph of one phase; building it proves that program order is legal in all of it.

    ``alike`` names, by a piece's id, the one that stands for it.

    Raises
    ------
    ProgramError
        An operation that waits for one listed after it, or a loop that moves a ring's ends apart.
    RaceError
        A slot filled again before it was read, or read before it was filled, where no flag could
        tell: between operations of one queue.
    """

    def __init__(
        self,
        program: TileProgram,
        endpoints: Sequence[Endpoint],
        shapes: Sequence[Shape],
        starts: Iterable[State],
        contested: frozenset[str],
        alike: Mapping[int, Piece] | None = None,
    ) -> None:
        self.program, self.endpoints, self.shapes = program, endpoints, shapes
        self.contested = contested
        self.nodes: list[Node] = []
        self.ranges: dict[Symbol, tuple[int, int]] = {}
        self._known: dict[object, int] = {}
        self._followed: dict[object, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        self._advances: dict[int, tuple[int, ...]] = {}
        self._pieces: dict[Piece, Piece] = {}
        self._interned: dict[int, Piece] = dict(alike or {})
        self._sides: dict[int, list[Endpoint]] = defaultdict(list)
        for endpoint in endpoints:
            self._sides[endpoint.ring_number].append(endpoint)
        #: The endpoint of each endpoint's ring from which its slots and states are counted.
        self.bases = [self._sides[e.ring_number][0].index for e in endpoints]
        self._periods = [max(x.period for x in self._sides[e.ring_number]) for e in endpoints]
        self._is_periodic = any(p > 1 for p in self._periods)
        self.ends: dict[State, None] = dict.fromkeys(starts)
        self._blocks()

    def _blocks(self) -> None:
        """Follow every shape of block from every state in which one can begin."""
        begun: dict[State, int] = {}
        finished: list[tuple[int, State]] = []
        waiting = list(self.ends)
        while waiting:
            state = waiting.pop()
            if state in begun:
                continue
            begun[state] = start = self._node(EMPTY, list(state), (), {})
            for shape in self.shapes:
                cursors = list(state)
                tails = self._follow(shape.parts, [(start, NEXT)], cursors, (), {})
                end = self._state(cursors)
                finished += [(tail, end) for tail, _ in tails]
                waiting.append(end)
        for tail, end in finished:
            self.nodes[tail].successors.setdefault(begun[end], BLOCK)
        self.ends = dict.fromkeys(begun)

    def rings(self) -> list[Ring]:
        """Return the rings that the phase works on."""
        used = {e for n in self.nodes for o in n.piece.operations for e, _, _ in o.uses}
        numbers = sorted({self.endpoints[e].ring_number for e in used})
        return [self.program.rings[n] for n in numbers]

    def is_drained(self, ring: Ring) -> bool:
        """Return whether every slot of a ring was read whenever a block ends."""
        sides = [e.index for e in self.endpoints if self.program.rings[e.ring_number] is ring]
        return all(len({state[e] for e in sides}) == 1 for state in self.ends)

    # ---------------------------------------------------------------- following items

    def _follow(
        self, parts: Iterable[Part], tails: list[tuple[int, int]], cursors: list[int], place: Place, given: Environment
    ) -> list[tuple[int, int]]:
        """Go through ``parts`` from ``tails``, moving ``cursors``; return the tails there are then."""
        for part in parts:
            if isinstance(part, LoopPart):
                tails = self._loop(part, tails, cursors, place, given)
                continue
            node = self._node(part, cursors, place, given)
            for tail, hop in tails:
                self.nodes[tail].successors.setdefault(node, hop)
            tails = [(node, NEXT)]
            for endpoint, moved in enumerate(self.nodes[node].advance):
                cursors[endpoint] += moved
        return tails

    def _loop(
        self, loop: LoopPart, tails: list[tuple[int, int]], cursors: list[int], place: Place, given: Environment
    ) -> list[tuple[int, int]]:
        """Follow a loop; one that was followed from here as often before, in another shape, leads to what it led to."""
        if self.contested:  # regions hang on where the loop is
            return self._around(loop, tails, cursors, place, given)
        key = id(loop.parts), loop.name, len(loop.indices), self._state(cursors), tuple(tails)
        known = self._followed.get(key)
        if known is None:
            before = list(cursors)
            tails = self._around(loop, tails, cursors, place, given)
            moves = [(e, c - b) for e, (b, c) in enumerate(zip(before, cursors, strict=True)) if c != b]
            self._followed[key] = tails, moves
            return tails
        for endpoint, moved in known[1]:
            cursors[endpoint] += moved
        return known[0]

    def _around(
        self, loop: LoopPart, tails: list[tuple[int, int]], cursors: list[int], place: Place, given: Environment
    ) -> list[tuple[int, int]]:
        """Follow a loop until the rings are in a state they had, once more around, then jump to its end."""
        count, number = len(loop.indices), 0
        step = loop.indices[1] - loop.indices[0] if count > 1 else 0
        inside = self._inside(loop, given)
        seen: dict[State, tuple[int, list[int]]] = {}
        end_of_cycle = -1
        if count == 1:
            here = (*place, (loop.name, loop.indices[0], step)) if loop.name else place
            return self._follow(loop.parts, tails, cursors, here, inside)
        while number < count:
            state = self._state(cursors)
            if number == end_of_cycle:
                before, then = seen[state]
                cycle = number - before
                for endpoint, at in enumerate(then):
                    cursors[endpoint] += (count - number) // cycle * (cursors[endpoint] - at)
                number, end_of_cycle = count - (count - number) % cycle, -1
                continue
            if state in seen and end_of_cycle < 0:
                end_of_cycle = number + number - seen[state][0]
            seen[state] = number, list(cursors)
            here = (*place, (loop.name, loop.indices[number], step)) if loop.name else place
            if number:
                tails = [(tail, LAP if loop.name else hop) for tail, hop in tails]
            tails = self._follow(loop.parts, tails, cursors, here, inside)
            number += 1
        return tails

    def _inside(self, loop: LoopPart, given: Environment) -> Environment:
        """Return what the symbols of a loop's body stand for; needed for contested regions only."""
        if not self.contested:
            return given
        return bind(loop, given, self.ranges)

    def _node(self, piece: Piece, cursors: list[int], place: Place, given: Environment) -> int:
        same = self._interned.get(id(piece))
        if same is None:
            same = self._interned[id(piece)] = self._pieces.setdefault(piece, piece)
        regions = tuple(self._regions(o, given) for o in piece.operations) if self.contested else ()
        state, region_keys = self._state(cursors), tuple(map(_region_key, regions))
        key = (id(same), state, region_keys)
        number = self._known.get(key)
        if number is None:
            advance = self._advance(same)
            node = Node(same, state, tuple(cursors), advance, place, regions, region_keys)
            number = self._known[key] = len(self.nodes)
            self.nodes.append(node)
            self._check_order(node)
        return number

    def _regions(self, operation: Operation, given: Environment) -> tuple[RegionAccess, ...]:
        return tuple(
            replace_region(access, given) for access in operation.regions if access.region.tensor.name in self.contested
        )

    def _advance(self, piece: Piece) -> tuple[int, ...]:
        found = self._advances.get(id(piece))
        if found is None:
            moved = [0] * len(self.endpoints)
            for operation in piece.operations:
                for endpoint, _, last in operation.uses:
                    moved[endpoint] += last
            found = self._advances[id(piece)] = tuple(moved)
        return found

    def _state(self, cursors: Sequence[int]) -> State:
        """Return cursors relative to their ring's first one, apart from where in its period that is."""
        if self._is_periodic:
            return tuple(
                c - cursors[b] + cursors[b] % p for c, b, p in zip(cursors, self.bases, self._periods, strict=True)
            )
        return tuple([c - cursors[b] for c, b in zip(cursors, self.bases, strict=True)])

    # ---------------------------------------------------------------- program order

    def _check_order(self, node: Node) -> None:
        cursors = list(node.cursors)
        for operation in node.piece.operations:
            for index, first, _ in operation.uses:
                endpoint = self.endpoints[index]
                if first:
                    need = required_count(endpoint, cursors[index])
                    for peer in endpoint.peers:
                        if cursors[peer] < need:
                            raise self._too_early(node, operation, self.endpoints[peer], need)
                for other in self._sides[endpoint.ring_number]:
                    is_peer = other.is_producer != endpoint.is_producer
                    if is_peer and cursors[other.index] < cursors[index] + endpoint.lag:
                        raise self._clobbered(node, operation, endpoint, other)
            for index, _, last in operation.uses:
                cursors[index] += last

    def _too_early(self, node: Node, operation: Operation, peer: Endpoint, need: int) -> ProgramError:
        verb = "commit" if peer.is_producer else "release"
        return ProgramError(
            f"{_prefix(operation)}{self.program.name}: {self.named(node, operation)} comes too early in program order; "
            f"list the {verb} of ring {peer.ring} number {need} on {peer.queue} before it"
        )

    def _clobbered(self, node: Node, operation: Operation, mine: Endpoint, other: Endpoint) -> RaceError:
        found = (o for s in self.shapes for o in operations_of(s.parts))
        by = next((o for o in found if any(e == other.index for e, _, _ in o.uses)), None)
        what = f"{by.label} on {other.queue}" if by else f"queue {other.queue}, by no operation,"
        slots = f"{other.depth} slot{'s' if other.depth > 1 else ''}"
        did = f"fills a slot of ring {mine.ring} again that {what} has still to read"
        if not mine.is_producer:
            did = f"reads a slot of ring {mine.ring} that {what} has still to fill"
        return RaceError(
            f"{_prefix(operation)}{self.program.name}: {self.named(node, operation)} {did}: the ring has {slots}, "
            "and no flag orders operations of one queue but their place in the program"
        )

    def named(self, node: Node, operation: Operation, laps: int = 0) -> str:
        """Return an operation as errors call it, ``laps`` iterations later than where its node was found."""
        names = [f"{name}={index}" for name, index, _ in node.place[:-1]]
        if node.place:
            name, index, step = node.place[-1]
            names.append(f"{name}={index + laps * step}")
        where = f" ({' '.join(names)})" if names else ""
        return f"{operation.label} on {self.program.queues[operation.queue].name}{where}"


def _prefix(operation: Operation) -> str:
    return f"{operation.source}: " if operation.source else ""


def operations_of(parts: Iterable[Part]) -> Iterable[Operation]:
    """Yield every operation of ``parts`` once, loops not repeated."""
    for part in parts:
        if isinstance(part, Piece):
            yield from part.operations
        else:
            yield from operations_of(part.parts)


def bind(loop: LoopPart, given: Mapping[Symbol, object], ranges: dict[Symbol, tuple[int, int]]) -> Environment:
    """Return what the symbols of a loop's body stand for at this place; ``ranges`` gets its index's ends."""
    inside: Environment = dict(given)
    first, last = min(loop.indices), max(loop.indices)
    index = Symbol(f"{loop.index.name} ({first} to {last})")
    ranges[index] = (first, last)
    inside[loop.index] = Coordinate({index: 1})
    for symbol, value in loop.at:
        inside[symbol] = substituted(value, given)
    return inside


def replace_region(access: RegionAccess, given: Mapping[Symbol, object]) -> RegionAccess:
    """Return a region with its coordinates as they are at this place of the program."""
    r = access.region
    at = [substituted(v, given) for v in (r.batch, r.head, r.row, r.col)]
    batch, head, row, col = at
    return type(access)(type(r)(r.tensor, batch, head, row, r.rows, col, r.cols), access.is_write)


def _region_key(accesses: Iterable[RegionAccess]) -> object:
    return tuple((coordinates_key(a), a.is_write) for a in accesses)


def coordinates_key(access: RegionAccess) -> object:
    """Return what two regions of the same bytes share, whichever loop over the same indices is meant."""
    r = access.region
    return (
        r.tensor.name,
        r.rows,
        r.cols,
        *(
            (v.constant, tuple((s.name, f) for s, f in v.terms.items())) if isinstance(v, Coordinate) else v
            for v in (r.batch, r.head, r.row, r.col)
        ),
    )
