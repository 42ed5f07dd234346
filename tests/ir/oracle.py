"""Happens-before over every operation of a program, unrolled: what ``ir.check`` must never be wiser than.

Written from the rules alone: queues are in order, a wait comes after the set it asks for, phases end
in a barrier, core groups know nothing of one another within a phase.  Also: values in any legal order.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.formats import get_format
from npusim.program.ir.buffers import Ring
from npusim.program.ir.tile import GlobalTile, RingTile, Tile
from npusim.program.ir.tile_program import Body, Loop, ProgramPhase, TileProgram
from npusim.program.ir.walk import ResolvedOp, Walker, walk

if TYPE_CHECKING:
    from random import Random

    from npusim.program.ir.op import Step, TileOp
    from npusim.program.ir.tile_program import Item


class Runs(NamedTuple):
    """``rows`` runs of ``width`` bytes, ``pitch`` apart, from ``start``."""

    start: int
    width: int
    pitch: int
    rows: int

    def meets(self, other: Runs) -> bool:
        """Return whether a byte is common to both, by looking at all of them: each is a bit."""
        ends = [r.start + (r.rows - 1) * r.pitch + r.width for r in (self, other)]
        if self.start >= ends[1] or other.start >= ends[0]:
            return False
        base = min(self.start, other.start)
        return bool(_bits(self) << self.start - base & _bits(other) << other.start - base)


@lru_cache(maxsize=1 << 12)
def _bits(runs: Runs) -> int:
    one_row = (1 << runs.width) - 1
    return reduce(or_, (one_row << row * runs.pitch for row in range(runs.rows)))


Access = tuple[str, Runs, bool]
#: One side of a ring: the ring, the queue, whether it fills slots, and whether it reads them before it releases them.
Side = tuple[Ring, str, bool, bool]
#: How many operations of each queue are known to have completed.
Clock = dict[str, int]


def group_operations(program: TileProgram, groups: int) -> list[list[list[ResolvedOp]]]:
    """Return the operations of each phase, group by group, in program order."""
    walkers = [Walker(program) for _ in range(groups)]
    return [
        [
            [op for block in phase.blocks_of_group(group, groups) for op in walk(walkers[group], phase.body(block))]
            for group in range(groups)
        ]
        for phase in program.phases
    ]


# ---------------------------------------------------------------- races, unrolled


def told_by_flag(clock: Clock, queue: str, position: int) -> Clock:
    """Return what the flag of a queue's operation number ``position`` tells: the rule of completion.

    It shows once all operations up to that one in its queue have completed, and with them what the
    queue knew when that one began.
    """
    return clock | {queue: position}


def find_race(program: TileProgram, groups: int = 3, ignored: tuple[str, str, bool, str] | None = None) -> str | None:
    """Return two operations on common bytes, one of them writing, that nothing orders; None if there are none.

    ``ignored``: ring, queue, whether it fills, and the queue of the other side that it does not wait for.
    Nothing of the checker's or the walker's is used.  A flag is a byte that its setter writes and who
    waits for it reads: one set again before it is waited for is lost.
    """
    cores = [_Core(ignored) for _ in range(groups)]
    for phase in program.phases:
        found = _Meetings()
        for group, core in enumerate(cores):
            core.barrier()
            for number in phase.dealt[group] if phase.dealt else range(group, len(phase.blocks), groups):
                for label, op in unrolled(phase.body(phase.blocks[number])):
                    race = core.run(label, op, partial(found.add, number))
                    if race:
                        return race
        race = found.race()
        if race:
            return race
    return None


def unrolled(items: Iterable[Item], place: str = "") -> Iterator[tuple[str, TileOp]]:
    """Yield every operation with its name and iterations."""
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                yield from unrolled(item.body(index), f"{place} {item.name}={index}")
        else:
            yield f"{item.label} on {item.queue}{place}", item


class _Core:
    """One core group: what is known where, and who touched what last since the last barrier."""

    def __init__(self, ignored: tuple[str, str, bool, str] | None) -> None:
        self.ignored = ignored
        self.told: dict[Side, list[Clock]] = defaultdict(list)  # by each hand-over of a side
        self.barrier()

    def barrier(self) -> None:
        """Forget what lies before: all of it has completed."""
        self.positions: Clock = defaultdict(int)
        self.known: dict[str, Clock] = defaultdict(dict)
        self.memory = _Memory()
        self.told.update({side: [{}] * len(clocks) for side, clocks in self.told.items()})

    def run(self, label: str, op: TileOp, shared: Callable[[str, Runs, bool, str], None]) -> str | None:
        """Take in an operation; return the race it is in.  ``shared`` gets what it touches of tensors."""
        sides: dict[Side, tuple[bool, bool]] = {}
        operands = [o for step in op.steps for o in _operands(step)]
        for tile in (*op.handshake, *(o for o, _ in operands)):
            if isinstance(tile, RingTile):
                side = (tile.ring, op.queue, tile.is_producer, tile.is_peek)
                first, last = sides.get(side, (False, False))
                sides[side] = (first or tile.first, last or tile.last)
        at = {side: len(self.told[side]) for side in sides}
        touched: list[Access] = []
        for side, (first, _) in sides.items():
            for peer, need in _waits(side, at[side]) if first else ():
                if (side[0].name, side[1], side[2], peer[1]) == self.ignored:
                    continue
                if need > len(self.told[peer]):
                    return f"{label} waits for number {need} of ring {side[0].name}, which is listed later"
                for queue, position in self.told[peer][need - 1].items():
                    self.known[op.queue][queue] = max(position, self.known[op.queue].get(queue, 0))
                touched.append((f"flags {id(peer[0])} {peer[1:]}", _flag(peer[0], need - 1), False))
        touched += [(*located(o, op.queue, at), is_write) for o, is_write in operands]
        touched += [
            (f"flags {id(side[0])} {side[1:]}", _flag(side[0], at[side]), True)
            for side, (_, last) in sides.items()
            if last
        ]
        self.positions[op.queue] += 1
        position, clock = self.positions[op.queue], self.known[op.queue]
        for space, where, is_write in touched:
            if space.startswith("tensor "):
                shared(space, where, is_write, label)
            other = self.memory.touch(space, where, is_write, op.queue, position, clock, label)
            if other:
                return f"{label} and {other} meet in {space}"
        for side, (_, last) in sides.items():
            if last:
                self.told[side].append(told_by_flag(clock, op.queue, position))
        return None


def _waits(side: Side, generation: int) -> Iterator[tuple[Side, int]]:
    """Yield the sides that a slot is waited for from, and the hand-over by number, from 1 on."""
    ring, queue, fills, _ = side
    need = generation + 1 - (ring.depth if fills else 0)
    if fills:
        need = -(-need // ring.period) * ring.period
    for peer in ring.consumers if fills else ring.producers:
        if peer != queue and need > 0:
            yield (ring, peer, not fills, False), need


def _flag(ring: Ring, generation: int) -> Runs:
    return Runs(generation % ring.depth, 1, 1, 1)


class _Memory:
    """Who read and wrote which bytes last, queue by queue."""

    def __init__(self) -> None:
        self.latest: dict[str, dict[Runs, dict[tuple[str, bool], tuple[int, str]]]] = defaultdict(dict)
        self.near: dict[tuple[str, Runs], list[Runs]] = {}

    def touch(
        self, space: str, where: Runs, is_write: bool, queue: str, position: int, clock: Clock, label: str
    ) -> str | None:
        """Note an access; return the earlier one of another queue that it must not meet."""
        latest = self.latest[space]
        if where not in latest:
            mine = self.near[space, where] = [r for r in latest if r.meets(where)]
            for other in mine:
                self.near[space, other].append(where)
            mine.append(where)
            latest[where] = {}
        for other in self.near[space, where]:
            for (by, wrote), (at, earlier) in latest[other].items():
                if (is_write or wrote) and by != queue and clock.get(by, 0) < at:
                    return earlier
        latest[where][queue, is_write] = (position, label)
        return None


class _Meetings:
    """What blocks of a phase touch of tensors: any two may run at once."""

    def __init__(self) -> None:
        self.touched: dict[str, dict[tuple[Runs, bool], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, block: int, space: str, where: Runs, is_write: bool, label: str) -> None:
        self.touched[space][where, is_write][block] = label

    def race(self) -> str | None:
        """Return two operations of different blocks that meet."""
        for space, touched in self.touched.items():
            for (where, _), writers in ((t, by) for t, by in touched.items() if t[1]):
                for (other, _), blocks in touched.items():
                    pair = next(((a, b) for a in writers for b in blocks if a != b), None)
                    if pair and where.meets(other):
                        return f"{writers[pair[0]]} and {blocks[pair[1]]} of another block meet in {space}"
        return None


def _operands(step: Step) -> Iterator[tuple[Tile | RingTile | GlobalTile, bool]]:
    yield step.dst, True
    if step.attributes.accumulate:
        yield step.dst, False
    for source in step.srcs:
        if isinstance(source, (Tile, RingTile, GlobalTile)):
            yield source, False


def located(operand: Tile | RingTile | GlobalTile, queue: str, generations: Mapping[Side, int]) -> tuple[str, Runs]:
    """Return the memory and the bytes behind an operand of an operation on ``queue``."""
    size = get_format(operand.fmt).size_bytes
    if isinstance(operand, GlobalTile):
        tensor, pitch = operand.tensor, operand.tensor.cols * size
        start = ((operand.batch * tensor.heads + operand.head) * tensor.rows + operand.row) * pitch
        return f"tensor {tensor.name}", Runs(start + operand.col * size, operand.cols * size, pitch, operand.rows)
    space, start, pitch = "", operand.offset_bytes, operand.stride * size
    if isinstance(operand, RingTile):
        ring = operand.ring
        space, slot = ring.space, generations[ring, queue, operand.is_producer, operand.is_peek] % ring.depth
        start += ring.offset_bytes + slot * ring.slot_bytes
    else:
        space = operand.space
    return space, Runs(start, operand.cols * size, pitch, operand.rows)


def bytes_of(resolved: ResolvedOp, operand: Tile | RingTile | GlobalTile) -> tuple[str, Runs]:
    """Return the memory and the bytes behind an operand of a resolved operation."""
    if isinstance(operand, RingTile):
        return located(resolved.tile(operand), "", {})
    return located(operand, "", {})


# ---------------------------------------------------------------- mutants


@dataclass
class Changed:
    """Applies ``change`` to every operation of a program, loops and shared bodies included.

    ``order`` may list the items of a body otherwise, before.
    """

    change: Callable[[TileOp], TileOp]
    order: Callable[[Iterable[Item]], Iterable[Item]] = iter
    _functions: dict[Any, Any] = field(default_factory=dict)

    def program(self, program: TileProgram) -> TileProgram:
        """Return the changed program."""
        return dataclasses.replace(program, phases=tuple(self._phase(p) for p in program.phases))

    def _phase(self, phase: ProgramPhase) -> ProgramPhase:
        return dataclasses.replace(phase, body=lambda block: self._items(phase.body(block)))

    def _items(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in self.order(items):
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
            self._functions[function] = lambda static, at, index: self._items(function(static, at, index))
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

    steps = tuple(dataclasses.replace(s, dst=changed(s.dst), srcs=tuple(map(changed, s.srcs))) for s in op.steps)
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
                    found[Flag(resolved.op.label, resolved.op.queue, tile.ring.name, tile.is_producer)] = None
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
    phases: Sequence[Sequence[Sequence[ResolvedOp]]],
    order: Order,
    cells: dict[tuple[int, int], list[Cells]] | None = None,
) -> dict[tuple[int, int, int], int]:
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
