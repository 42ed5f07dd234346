"""Every order in which a core group can reach the pieces of a phase, as a finite graph.

A node is a piece of the program (``ir.structure``) at one *state of the rings*: the distance of each endpoint from the
other endpoints, independent of their counts.  The edges of a node lead to its possible successors: the next piece, the
next iteration, another block of any shape.  Because loops and sequences of blocks return to earlier states, the graph
is finite and covers programs of every length.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim.errors import ProgramError, RaceError
from npusim.late_methods import dataclass
from npusim.program.ir.columns import distinct
from npusim.program.ir.families import values_of
from npusim.program.ir.opaque import OpaqueRange
from npusim.program.ir.structure import LoopPart, Operation, Piece, loops_of, pieces_of
from npusim.program.ir.walk import required_count
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from npusim.program.ir.opaque import Symbol
    from npusim.program.ir.structure import Part, RegionAccess, Shape
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.ir.walk import Endpoint

Ints = NDArray[np.int64]
#: The cursor of every endpoint, relative to the position of its ring.
State = tuple[int, ...]
#: The loops around a node: name, index and step of each; later iterations are named by adding steps.
LoopPath = tuple[tuple[str, int, int], ...]
Environment = dict["Symbol", object]
#: The boundary between a node and its successor: no boundary, the end of an iteration, or the end of a block.
NEXT, LAP, BLOCK = range(3)
#: Nodes whose successors are not followed yet, each with the boundary before it.
Tails = list[tuple[int, int]]


@dataclass(slots=True)
class Node:
    """A piece at one state of the rings.

    ``cursors``: the cursors at the first visit; ``advance``: the number of slots by which the piece moves them.
    ``successors`` has, for each node that may follow, the number of slots between the two nodes (the smallest number
    over all paths). ``regions`` are its contested regions, operation by operation.
    """

    piece: Piece
    state: State
    cursors: tuple[int, ...]
    advance: tuple[int, ...]
    path: LoopPath
    regions: tuple[tuple[RegionAccess, ...], ...]
    successors: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Position:
    """A point of the walk: the cursor of every endpoint, and the number of their state."""

    cursors: list[int]
    state: int


EMPTY = Piece(())
#: Used instead of the iteration from which a loop's states repeat, if the loop ends before they do.
NO_CYCLE = 1 << 62


class Outcome(NamedTuple):
    """The indices of the rings that a phase uses, and of the rings in which slots may stay occupied; the states at its
    end.
    """

    rings: tuple[int, ...]
    held: tuple[int, ...]
    ends: tuple[State, ...]


def counts_of(shape: Shape) -> tuple[list[int], Ints]:
    """Return the ids of a shape's loops with opaque counts, and the distinct counts of the blocks."""
    loops = {id(loop): loop.indices.count for loop in loops_of(shape.parts) if isinstance(loop.indices, OpaqueRange)}
    counts = np.empty((len(shape.numbers), len(loops)), np.int64)
    for at, count in enumerate(loops.values()):
        counts[:, at] = values_of(count, shape.coordinates)
    return list(loops), distinct(counts)[0] if loops else counts[:1]


class Automaton:
    """The graph of one phase; building it proves that program order is legal everywhere in the phase.

    Raises `ProgramError` if an operation waits for one that is listed after it, or if a loop changes the distance
    between the ends of a ring; `RaceError` if operations of one queue, without a flag between them, fill a slot again
    before it is read, or read it before it is filled.
    """

    def __init__(
        self,
        program: TileProgram,
        endpoints: Sequence[Endpoint],
        shapes: Sequence[Shape],
        starts: Iterable[State],
        contested: frozenset[str],
        alike: Callable[[Automaton], Callable[[Piece], Hashable]] = lambda _automaton: lambda piece: piece,
    ) -> None:
        self.program, self.endpoints, self.shapes = program, endpoints, shapes
        self.contested = contested
        self.nodes: list[Node] = []
        self.ranges: dict[Symbol, tuple[int, int]] = {}
        self._known: dict[object, int] = {}
        #: States by number, and numbers of states: a walk compares numbers, because a state has an entry per endpoint.
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        #: For each node: the endpoints that the node moves, with their distances, and the number of the next state.
        self._moves: list[tuple[tuple[tuple[int, int], ...], int]] = []
        #: For each loop with an opaque count, by its id: its count in the current block, the iteration from which its
        #: states repeat, and the length of the cycle.
        self._counts: dict[int, int] = {}
        self._turns: dict[int, tuple[int, int]] = {}
        self._advances: dict[int, tuple[int, ...]] = {}
        self._pieces: dict[Hashable, Piece] = {}
        self._interned: dict[int, Piece] = {}
        self._sides: dict[int, list[Endpoint]] = defaultdict(list)
        for endpoint in endpoints:
            self._sides[endpoint.ring_number].append(endpoint)
        #: For each endpoint, the endpoint of its ring from which slots and states are counted.
        self.bases = [self._sides[e.ring_number][0].index for e in endpoints]
        self._periods = [max(x.period for x in self._sides[e.ring_number]) for e in endpoints]
        self._is_periodic = any(p > 1 for p in self._periods)
        self.ends: dict[State, None] = dict.fromkeys(starts)
        #: Data that equal pieces share.
        self.alike = alike(self)
        self._blocks()

    def _blocks(self) -> None:
        """Follow every shape of block from every state in which one can begin."""
        begun: dict[tuple[State, Hashable], int] = {}
        finished: list[tuple[int, tuple[State, Hashable]]] = []
        waiting: list[tuple[State, Hashable]] = [(state, ()) for state in self.ends]
        counted = [(shape, *counts_of(shape)) for shape in self.shapes]
        while waiting:
            state, under_way = waiting.pop()
            if (state, under_way) in begun:
                continue
            begins = _Position(list(state), self._numbered(state))
            begun[state, under_way] = start = self._node(EMPTY, begins, (), {})
            for shape, loops, rows in counted:
                left = rows if shape.meets[0] == under_way else rows[:0]
                while len(left):
                    # Of all counts that reach the same states, only the largest is simulated, because it visits all of
                    # these states.
                    self._counts = dict(zip(loops, left[-1].tolist(), strict=True))
                    self._turns = {}
                    at = _Position(list(state), begins.state)
                    tails = self._follow(shape.parts, [(start, NEXT)], at, (), {})
                    end = self._states[at.state], shape.meets[1]
                    finished += [(tail, end) for tail, _ in tails]
                    waiting.append(end)
                    left = self._others(loops, left)
        for tail, end in finished:
            self.nodes[tail].successors.setdefault(begun[end], BLOCK)
        self.ends = dict.fromkeys(state for state, under_way in begun if under_way == ())

    def _others(self, loops: Sequence[int], rows: Ints) -> Ints:
        """Return the rows of counts whose states differ from those of the last row; that row has been followed."""
        alike = np.ones(len(rows), np.bool_)
        for at, loop in enumerate(loops):
            counts = rows[:, at]
            since, cycle = self._turns.get(loop, (NO_CYCLE, 1))
            turned = np.where(counts < since, counts, since + (counts - since) % cycle)
            alike &= turned == turned[-1]
        return rows[~alike]

    def outcome(self) -> Outcome:
        """Return the state with which the later phases are checked."""
        used = {e for n in self.nodes for o in n.piece.operations for e, _, _ in o.uses}
        rings = sorted({self.endpoints[e].ring_number for e in used})
        held = tuple(n for n in rings if any(len({state[e.index] for e in self._sides[n]}) > 1 for state in self.ends))
        return Outcome(tuple(rings), held, tuple(self.ends))

    # ---------------------------------------------------------------- following items

    def _follow(self, parts: Iterable[Part], tails: Tails, at: _Position, path: LoopPath, outer: Environment) -> Tails:
        """Follow ``parts`` from ``tails`` and advance ``at``; return the tails at the end."""
        for part in parts:
            if isinstance(part, LoopPart):
                tails = self._loop(part, tails, at, path, outer)
                continue
            node = self._node(part, at, path, outer)
            for tail, hop in tails:
                successors = self.nodes[tail].successors
                successors[node] = min(hop, successors.get(node, hop))
            tails = [(node, NEXT)]
            moves, at.state = self._moves[node]
            for endpoint, moved in moves:
                at.cursors[endpoint] += moved
        return tails

    def _turn(self, loop: LoopPart, since: int, cycle: int) -> None:
        """Record the iteration from which a loop's states repeat, and the ``cycle``; `NO_CYCLE` if the loop ends before
        that.
        """
        before = self._turns.get(id(loop))
        if before:  # the loop is inside another loop
            since, cycle = max(since, before[0]), lcm(cycle, before[1])
        self._turns[id(loop)] = since, cycle

    def _loop(self, loop: LoopPart, tails: Tails, at: _Position, path: LoopPath, outer: Environment) -> Tails:
        """Follow a loop until a state of the rings repeats, then one more cycle, and jump to the loop's end."""
        count = self._counts[id(loop)] if isinstance(loop.indices, OpaqueRange) else len(loop.indices)
        number, turn = 0, (NO_CYCLE, 1)
        step = 0
        if count > 1:
            step = 1 if isinstance(loop.indices, OpaqueRange) else loop.indices[1] - loop.indices[0]
        inside = loop.values(outer, self.ranges) if self.contested else outer
        seen: dict[int, tuple[int, list[int]]] = {}
        end_of_cycle = -1
        if count == 1:
            here = (*path, (loop.name, loop.indices[0], step)) if loop.name else path
            return self._follow(loop.parts, tails, at, here, inside)
        while number < count:
            state, cursors = at.state, at.cursors
            if number == end_of_cycle:
                before, then = seen[state]
                cycle = number - before
                turn = number, cycle
                times = (count - number) // cycle  # the state after them is the one before them
                at.cursors = [now + times * (now - was) for now, was in zip(cursors, then, strict=True)]
                number, end_of_cycle = count - (count - number) % cycle, -1
                continue
            if state in seen and end_of_cycle < 0:
                end_of_cycle = number + number - seen[state][0]
            seen[state] = number, list(cursors)
            here = (*path, (loop.name, loop.indices[number], step)) if loop.name else path
            if number:
                tails = [(tail, LAP if loop.name else hop) for tail, hop in tails]
            tails = self._follow(loop.parts, tails, at, here, inside)
            number += 1
        self._turn(loop, *turn)
        return tails

    def _node(self, piece: Piece, at: _Position, path: LoopPath, values: Environment) -> int:
        same = self._interned.get(id(piece))
        if same is None:
            same = self._interned[id(piece)] = self._pieces.setdefault(self.alike(piece), piece)
        regions: tuple[tuple[RegionAccess, ...], ...] = ()
        if self.contested:
            regions = tuple(
                tuple(a.placed(values) for a in o.regions if a.region.tensor.name in self.contested)
                for o in piece.operations
            )
        key = (id(same), at.state, tuple([tuple([(a.key, a.is_write) for a in r]) for r in regions]))
        number = self._known.get(key)
        if number is None:
            advance = self._advance(same)
            node = Node(same, self._states[at.state], tuple(at.cursors), advance, path, regions)
            number = self._known[key] = len(self.nodes)
            self.nodes.append(node)
            moves = tuple([(endpoint, moved) for endpoint, moved in enumerate(advance) if moved])
            then = self._numbered(self._state([c + moved for c, moved in zip(at.cursors, advance, strict=True)]))
            self._moves.append((moves, then))
            self._check_order(node)
        return number

    def state_after(self, node: int) -> int:
        """Return the number of the rings' state after a node."""
        return self._moves[node][1]

    def _numbered(self, state: State) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def _advance(self, piece: Piece) -> tuple[int, ...]:
        advance = self._advances.get(id(piece))
        if advance is None:
            moved = [0] * len(self.endpoints)
            for operation in piece.operations:
                for endpoint, _, last in operation.uses:
                    moved[endpoint] += last
            advance = self._advances[id(piece)] = tuple(moved)
        return advance

    def _state(self, cursors: Sequence[int]) -> State:
        """Return the cursors relative to their ring's first cursor, and the position of that cursor in its period."""
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
            f"{operation.prefix}{self.program.name}: {self.named(node, operation)} comes too early in program "
            f"order; put the {verb} number {need} of ring {peer.ring} on {peer.queue} before it"
        )

    def _clobbered(self, node: Node, operation: Operation, mine: Endpoint, other: Endpoint) -> RaceError:
        operations = (o for s in self.shapes for p in pieces_of(s.parts) for o in p.operations)
        by = next((o for o in operations if any(e == other.index for e, _, _ in o.uses)), None)
        what = f"{by.label} on {other.queue}" if by else f"queue {other.queue}, by no operation,"
        slots = f"{other.depth} {plural(other.depth, 'slot')}"
        did = f"fills a slot of ring {mine.ring} again before {what} has read it"
        if not mine.is_producer:
            did = f"reads a slot of ring {mine.ring} before {what} has filled it"
        return RaceError(
            f"{operation.prefix}{self.program.name}: {self.named(node, operation)} {did}: the ring has {slots}, "
            "and the operations of one queue are ordered only by their place in the program"
        )

    def named(self, node: Node, operation: Operation, laps: int = 0) -> str:
        """Return the name of an operation for errors, ``laps`` iterations after the iteration of its node."""
        names = [f"{name}={index}" for name, index, _ in node.path[:-1]]
        if node.path:
            name, index, step = node.path[-1]
            names.append(f"{name}={index + laps * step}")
        where = f" ({' '.join(names)})" if names else ""
        return f"{operation.label} on {self.program.queues[operation.queue].name}{where}"
