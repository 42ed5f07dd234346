"""Happens-before over every operation of a program, unrolled: what ``ir.check`` must never be wiser than.

Written from the rules alone: queues are in order, a wait comes after the set it asks for, phases end
in a barrier, core groups know nothing of one another within a phase.  Also: values in any legal order.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npusim.formats import get_format
from npusim.ir.program import Body, Loop, Phase, TileProgram
from npusim.ir.structure import Bytes
from npusim.ir.tile import GlobalTile, RingTile, Tile
from npusim.ir.walk import ResolvedOp, Walker, walk

if TYPE_CHECKING:
    from random import Random

    from npusim.ir.op import Step, TileOp
    from npusim.ir.program import Item

Access = tuple[str, Bytes, bool]


def group_operations(program: TileProgram, groups: int) -> list[list[list[ResolvedOp]]]:
    """Return the operations of each phase, group by group, in program order."""
    walkers = [Walker(program) for _ in range(groups)]
    return [
        [
            [
                op
                for block in phase.blocks_of_group(group, groups)
                for op in walk(walkers[group], phase.body(block))
            ]
            for group in range(groups)
        ]
        for phase in program.phases
    ]


def find_race(program: TileProgram, groups: int = 3) -> str | None:
    """Return two operations on common bytes, one of them writing, that nothing orders; None if there are none."""
    endpoints = len(Walker(program).endpoints)
    signalled: list[list[list[tuple[int, ...]]]] = [
        [[(0,) * len(program.queues)] for _ in range(endpoints)] for _ in range(groups)
    ]
    for phase in group_operations(program, groups):
        shared: dict[str, list[tuple[Bytes, bool, int, ResolvedOp]]] = defaultdict(list)
        for group, operations in enumerate(phase):
            found = _race_within(program, operations, signalled[group])
            if found:
                return found
            for resolved in operations:
                for space, where, is_write in accesses(resolved):
                    if space.startswith("tensor "):
                        shared[space].append((where, is_write, group, resolved))
        found = _race_between(shared)
        if found:
            return found
        # A barrier: what was set before it orders all that follows.
        for group in range(groups):
            for sets in signalled[group]:
                sets[:] = [(0,) * len(program.queues)] * len(sets)
    return None


def _race_within(
    program: TileProgram, operations: Iterable[ResolvedOp], signalled: list[list[tuple[int, ...]]]
) -> str | None:
    count = len(program.queues)
    clocks = [[0] * count for _ in range(count)]
    positions = [0] * count
    latest: dict[str, dict[Bytes, dict[tuple[int, bool], tuple[int, ResolvedOp]]]] = defaultdict(
        dict
    )
    for resolved in operations:
        clock = clocks[resolved.queue]
        for wait in resolved.waits:
            clock[:] = map(max, clock, signalled[wait.peer][wait.count])
        positions[resolved.queue] += 1
        for space, where, is_write in accesses(resolved):
            for other, by in latest[space].items():
                if not where.overlaps(other):
                    continue
                for (queue, wrote), (at, earlier) in by.items():
                    if (is_write or wrote) and queue != resolved.queue and clock[queue] < at:
                        return f"{resolved} and {earlier} meet in {space}"
            latest[space].setdefault(where, {})[resolved.queue, is_write] = (
                positions[resolved.queue], resolved,
            )  # fmt: skip
        clock[resolved.queue] = positions[resolved.queue]
        for endpoint in resolved.sets:
            signalled[endpoint].append(tuple(clock))
    return None


def _race_between(shared: dict[str, list[tuple[Bytes, bool, int, ResolvedOp]]]) -> str | None:
    for space, touched in shared.items():
        writes = [t for t in touched if t[1]]
        for where, _, group, writer in writes:
            for other, _, its_group, resolved in touched:
                if its_group != group and where.overlaps(other):
                    return f"{writer} and {resolved} of another core group meet in {space}"
    return None


def accesses(resolved: ResolvedOp) -> Iterator[Access]:
    """Yield every memory and its bytes that an operation touches, and whether it writes them."""
    for step in resolved.op.steps:
        for operand, is_write in _operands(step):
            yield (*bytes_of(resolved, operand), is_write)


def _operands(step: Step) -> Iterator[tuple[Tile | RingTile | GlobalTile, bool]]:
    yield step.dst, True
    if step.attributes.accumulate:
        yield step.dst, False
    for source in step.srcs:
        if isinstance(source, (Tile, RingTile, GlobalTile)):
            yield source, False


def bytes_of(resolved: ResolvedOp, operand: Tile | RingTile | GlobalTile) -> tuple[str, Bytes]:
    """Return the memory and the bytes behind an operand."""
    size = get_format(operand.fmt).size_bytes
    if isinstance(operand, GlobalTile):
        pitch = operand.tensor.cols * size
        matrix = operand.batch * operand.tensor.heads + operand.head
        start = (matrix * operand.tensor.rows + operand.row) * pitch + operand.col * size
        return f"tensor {operand.tensor.name}", Bytes(
            start, operand.cols * size, pitch, operand.rows
        )
    tile = resolved.tile(operand) if isinstance(operand, RingTile) else operand
    return tile.space, Bytes(tile.offset_bytes, tile.cols * size, tile.stride * size, tile.rows)


# ---------------------------------------------------------------- mutants


@dataclass
class Changed:
    """Applies ``change`` to every operation of a program, loops and shared bodies included."""

    change: Callable[[TileOp], TileOp]
    _functions: dict[Any, Any] = field(default_factory=dict)

    def program(self, program: TileProgram) -> TileProgram:
        """Return the changed program."""
        return dataclasses.replace(program, phases=tuple(self._phase(p) for p in program.phases))

    def _phase(self, phase: Phase) -> Phase:
        return dataclasses.replace(phase, body=lambda block: self._items(phase.body(block)))

    def _items(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if not isinstance(item, Loop):
                yield self.change(item)
            elif isinstance(item.body, Body):
                body = Body(self._function(item.body.function), item.body.static, item.body.at)
                yield Loop(item.name, item.indices, body)
            else:
                yield Loop(item.name, item.indices, self._body(item.body))

    def _body(self, body: Callable[[Any], Iterable[Item]]) -> Callable[[Any], Iterable[Item]]:
        return lambda index: self._items(body(index))

    def _function(self, function: Any) -> Any:
        if function not in self._functions:
            self._functions[function] = lambda static, at, index: self._items(
                function(static, at, index)
            )
        return self._functions[function]


@dataclass(frozen=True)
class Flag:
    """The waits of operations of one label on one side of a ring."""

    label: str
    queue: str
    ring: str
    is_producer: bool

    def __str__(self) -> str:
        return f"{self.label} on {self.queue} waiting for {self.ring} {'free' if self.is_producer else 'ready'}"

    def dropped(self, op: TileOp) -> TileOp:
        """Return the operation without these waits."""
        if (op.label, op.queue) != (self.label, self.queue):
            return op
        return with_tiles(op, self._without)

    def _without(self, tile: RingTile) -> RingTile:
        if (tile.ring.name, tile.is_producer) != (self.ring, self.is_producer):
            return tile
        return tile.held(first=False, last=tile.last)


def with_tiles(op: TileOp, change: Callable[[RingTile], RingTile]) -> TileOp:
    """Return an operation with every ring tile changed."""

    def changed(operand: Any) -> Any:
        return change(operand) if isinstance(operand, RingTile) else operand

    steps = tuple(
        dataclasses.replace(s, dst=changed(s.dst), srcs=tuple(map(changed, s.srcs)))
        for s in op.steps
    )
    return dataclasses.replace(op, steps=steps, handshake=tuple(map(changed, op.handshake)))


def flags_of(program: TileProgram) -> list[Flag]:
    """Return every kind of wait of a program that another queue satisfies."""
    ends = {(e.ring, e.queue, e.is_producer): e for e in Walker(program).endpoints}
    found: dict[Flag, None] = {}
    for phase in group_operations(program, 1):
        for resolved in phase[0]:
            for tile in resolved.op.ring_tiles():
                end = ends[tile.ring.name, resolved.op.queue, tile.is_producer]
                if tile.first and end.peers:
                    found[
                        Flag(resolved.op.label, resolved.op.queue, tile.ring.name, tile.is_producer)
                    ] = None
    return list(found)


# ---------------------------------------------------------------- values in any legal order


#: Bytes of one row of the toys' tiles.
UNIT = 256
Cells = tuple[list[tuple[str, int]], list[tuple[str, int]]]


class Values:
    """Executes operations for tokens instead of numbers: memory holds what was computed, from what, by whom.

    So any change of a value that an order could cause is seen, whatever the operations are.  Memory
    is told apart in units of one row of the toys' tiles.
    """

    def __init__(self, cells: dict[tuple[int, int], list[Cells]]) -> None:
        self.cells = cells  # what operations read and write, shared between orders
        self.memory: dict[tuple[str, int], int] = {}
        self.computed: dict[tuple[int, int], int] = {}

    def run(self, group: int, number: int, resolved: ResolvedOp) -> None:
        """Execute one operation of a core group; ``number`` is its place in program order."""
        key = (group, id(resolved))
        if key not in self.cells:
            self.cells[key] = [_cells_of(group, resolved, s) for s in resolved.op.steps]
        seen, memory = 0, self.memory
        for at, (read, written) in enumerate(self.cells[key]):
            seen = hash((group, number, at, tuple([memory.get(c, 0) for c in read]), seen))
            for cell in written:
                memory[cell] = seen
        self.computed[group, number] = seen


def _cells_of(group: int, resolved: ResolvedOp, step: Step) -> Cells:
    """Return the units of memory that a step reads, and those it writes."""
    found: Cells = ([], [])
    for operand, is_write in _operands(step):
        space, where = bytes_of(resolved, operand)
        name = space if space.startswith("tensor ") else f"{space} of {group}"
        for row in range(where.rows):
            start = where.start + row * where.pitch
            units = range(start // UNIT, -(-(start + where.width) // UNIT))
            found[is_write].extend((name, cell) for cell in units)
    return found


Ordered = tuple[int, int, ResolvedOp]
#: From a phase's operations, group by group, to an order of them all: (group, place, operation).
Order = Callable[[Sequence[Sequence[ResolvedOp]]], Iterable[Ordered]]


def values_in(
    phases: Sequence[Sequence[Sequence[ResolvedOp]]], order: Order,
    cells: dict[tuple[int, int], list[Cells]] | None = None,
) -> dict[tuple[int, int, int], int]:  # fmt: skip
    """Return what every operation computes, by phase, group and place in program order."""
    state, found = Values({} if cells is None else cells), {}
    for number, phase in enumerate(phases):
        for group, place, resolved in order(phase):
            state.run(group, place, resolved)
        found |= {(number, *key): value for key, value in state.computed.items()}
        state.computed = {}
    # What is left in memory counts too: of two writes only their order shows.
    found[-1, -1, -1] = hash(frozenset(state.memory.items()))
    return found


def program_order(phase: Sequence[Sequence[ResolvedOp]]) -> Iterator[Ordered]:
    """Yield group after group, as the program lists its operations."""
    for group, operations in enumerate(phase):
        for place, resolved in enumerate(operations):
            yield group, place, resolved


class RandomOrder:
    """An order that queues and flags allow, drawn at random; one object for all phases of a program."""

    def __init__(self, program: TileProgram, groups: int, rng: Random) -> None:
        self.rng = rng
        self.counts = [[0] * len(Walker(program).endpoints) for _ in range(groups)]

    def __call__(self, phase: Sequence[Sequence[ResolvedOp]]) -> Iterator[Ordered]:
        waiting: dict[tuple[int, int], list[tuple[int, ResolvedOp]]] = defaultdict(list)
        for group, operations in enumerate(phase):
            for place, resolved in reversed(list(enumerate(operations))):
                waiting[group, resolved.queue].append((place, resolved))
        longest = self.rng.choice([1, 20])  # one queue runs as far as it can, or all take turns
        while waiting:
            able = [key for key in waiting if self._may_go(key[0], waiting[key][-1][1])]
            assert able, "no queue can go on"
            key = self.rng.choice(able)
            for _ in range(self.rng.randint(1, longest)):
                if not waiting[key] or not self._may_go(key[0], waiting[key][-1][1]):
                    break
                place, resolved = waiting[key].pop()
                yield key[0], place, resolved
                for endpoint in resolved.sets:
                    self.counts[key[0]][endpoint] += 1
            if not waiting[key]:
                del waiting[key]

    def _may_go(self, group: int, resolved: ResolvedOp) -> bool:
        return all(self.counts[group][w.peer] >= w.count for w in resolved.waits)
