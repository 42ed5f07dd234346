"""Executes the instructions of a core group in step and compares the states after iterations.

A state is the knowledge that each pipe has of the others: for every pipe, the last instruction that has certainly
ended.  Since pipes execute in order, this is one number for each pipe.  An access is a fault unless its instruction
knows that the earlier accesses to the same bytes have ended; flags are checked in the same way.  Equal states have
equal futures if the instructions that follow are the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from npusim.kernels.tilelang.tiles import Box
from npusim.studies.flags.order import MOST_CROSS_SETS

if TYPE_CHECKING:
    from npusim.kernels.tilelang.expert import Flag, Issued
    from npusim.kernels.tilelang.lengths import Move, Slope
    from npusim.studies.flags.order import Cores

Clock = dict[str, int]
Turn = tuple[int, int]
State = tuple[object, ...]

#: Number of last iterations for which each access to a moving part of a tensor is stored; for earlier iterations, only
#: the last access is stored.
NEAR = 4


@dataclass(frozen=True, slots=True)
class _Moving:
    """A part of a tensor whose ranges move with an iteration, as it would be in iteration 0."""

    buffer: str
    ranges: tuple[tuple[Slope, Slope], ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    """Accesses of a pipe to a place: in one iteration ``at`` of part ``part`` of the program, or in all earlier
    iterations.
    """

    place: Box | _Moving
    at: int | None
    part: int
    pipe: str
    is_write: bool


@dataclass(slots=True)
class _Flag:
    """A flag: the sets that no wait has met, the waits that no later set has followed, and how often it was set."""

    depth: int
    sets: deque[Clock] = field(default_factory=deque)
    waits: deque[tuple[str, int]] = field(default_factory=deque)
    count: int = 0


@dataclass(slots=True)
class _Core:
    """A core: its instructions, the number of those that it has issued, the queues of its pipes, and the instructions
    that precede all later ones.

    ``stop``: the number of the instruction that must end before the next one is issued.
    """

    name: str
    issued: tuple[Issued, ...]
    at: int = 0
    queues: dict[str, deque[tuple[int, Issued, Clock]]] = field(default_factory=lambda: defaultdict(deque))
    gate: Clock = field(default_factory=dict)
    stop: int | None = None

    def places(self) -> list[int]:
        """Return the number of each instruction within its turn."""
        result, first = list[int](), 0
        for i, x in enumerate(self.issued):
            first = i if i and self.issued[i - 1].turn != x.turn else first
            result.append(i - first)
        return result


class SteppedCores:
    """One execution: ``states`` after each iteration, and the first ``fault`` in words, empty if there is none."""

    def __init__(self, cores: Cores) -> None:
        self.cores = [_Core(name, tuple(issued)) for name, issued in cores.items()]
        self.fault, self.states = "", dict[Turn, State]()
        #: The first iteration that some core has not completely executed; -1: it belongs to an earlier part of the
        #: program.
        self.begun = dict[Turn, int]()
        # by pipe: the knowledge of its last instruction, and the instruction itself
        self._clocks: dict[str, Clock] = {}
        self._numbers = defaultdict[str, int](int)
        self._flags: dict[tuple[object, ...], _Flag] = {}
        self._products: dict[tuple[str, Flag], Clock] = {}
        self._uses: dict[tuple[str, str], dict[_Use, int]] = defaultdict(dict)
        self._places = {core.name: core.places() for core in self.cores}
        self._turn: Turn = (0, 0)
        for turn in sorted({x.turn for core in self.cores for x in core.issued}):
            self._turn = turn
            self._forget()
            while sum(self._advance(core) for core in self.cores):
                if self.fault:
                    return
            if turn[0] % 2:
                self.states[turn] = self._state()
                self.begun[turn] = self._begun()
        for core in self.cores:
            for x in [*(x for queue in core.queues.values() for _, x, _ in queue), *core.issued[core.at :]]:
                self.fault = f"{x} never starts: no set ends a wait before it"
                return
        if any(flag.sets for flag in self._flags.values()):
            self.fault = "a flag is left set"

    # ------------------------------------------------------------ one core

    def _advance(self, core: _Core) -> bool:
        """Issue and execute the instructions of the present turn as far as flags allow; return whether one did."""
        is_any = False
        while not self.fault:
            issued = core.at
            while core.at < len(core.issued) and core.stop is None and core.issued[core.at].turn <= self._turn:
                x = core.issued[core.at]
                core.queues[x.pipe].append((core.at, x, core.gate))
                if x.pipe == "ALL" or x.stops_scalar_unit:
                    core.stop = core.at
                core.at += 1
            if not sum(self._execute(core, pipe) for pipe in list(core.queues)) and core.at == issued:
                break
            is_any = True
        return is_any

    def _execute(self, core: _Core, pipe: str) -> bool:
        """Execute the first instruction of a pipe's queue, if it does not have to wait."""
        queue = core.queues[pipe]
        if not queue or self.fault:
            return False
        number, x, gate = queue[0]
        if pipe == "ALL" and any(q for name, q in core.queues.items() if name != "ALL"):
            return False
        name, product = f"{core.name} {pipe}", (core.name, x.flag) if x.flag[:1] == ("product",) else None
        before = [gate, self._clocks.get(name, {})]
        if pipe == "ALL":
            before += [clock for other, clock in self._clocks.items() if other.startswith(f"{core.name} ")]
        if product and pipe == "M":
            if product not in self._products:
                return False
            before.append(self._products[product])
        waited = self._flags_of(core, x) if "wait" in x.kind else []
        if any(not flag.sets for flag in waited):
            return False
        before += [flag.sets.popleft() for flag in waited]
        queue.popleft()
        own = _joined(before)
        self._access(x, own, name)
        self._numbers[name] += 1
        own[name] = self._numbers[name]
        self._clocks[name] = own
        for flag in waited:
            flag.waits.append((name, own[name]))
        if "set" in x.kind:
            self._set(core, x, own)
        if product and pipe == "M":
            del self._products[product]
        elif product:
            self._products[product] = own
        if pipe == "ALL":
            for other in [n for n in self._clocks if n.startswith(f"{core.name} ")]:
                self._clocks[other] = own
        if core.stop == number:
            core.gate, core.stop = own, None
        return True

    # ------------------------------------------------------------ flags

    def _flags_of(self, core: _Core, x: Issued) -> list[_Flag]:
        """Return the flags that an instruction sets or waits for: its core's, or those of each core of another kind."""
        if "cross" not in x.kind:
            return [self._flags.setdefault((core.name, core.name, x.flag), _Flag(1))]
        others = [c.name for c in self.cores if c.name[0] != core.name[0]]
        pairs = [(core.name, c) if "set" in x.kind else (c, core.name) for c in others]
        return [self._flags.setdefault((*pair, x.flag), _Flag(MOST_CROSS_SETS)) for pair in pairs]

    def _set(self, core: _Core, x: Issued, own: Clock) -> None:
        for flag in self._flags_of(core, x):
            flag.count += 1
            if flag.count > flag.depth:
                pipe, number = flag.waits.popleft() if flag.waits else ("", 1)
                if own.get(pipe, 0) < number:
                    self.fault = f"{x}: the flag may be set again before the wait for it has ended"
            flag.sets.append(own)

    # ------------------------------------------------------------ memory

    def _access(self, x: Issued, known: Clock, pipe: str) -> None:
        """Record the accesses of an instruction; it is a fault if an earlier access to common bytes is not known to
        have ended.
        """
        result = list[tuple[Box, _Use]]()
        for is_write, boxes in ((False, x.reads), (True, x.writes)):
            for box in boxes:
                is_moving = bool(box.moves)
                use = _Use(
                    _placed(box, x.turn[1]),
                    x.turn[1] if is_moving else None,
                    x.turn[0] if is_moving else 0,
                    pipe,
                    is_write,
                )
                result.append((box, use))
                for other, number in self._uses[box.space, box.core].items():
                    is_open = (is_write or other.is_write) and known.get(other.pipe, 0) < number
                    if is_open and self._may_meet(use, other):
                        self.fault = f"{x}: nothing orders its access to {box} after an access of {other.pipe}"
                        return
        for box, use in result:
            self._uses[box.space, box.core][use] = self._numbers[pipe] + 1

    def _may_meet(self, one: _Use, other: _Use) -> bool:
        """Return whether two uses may have a byte in common; the answer is the same in all iterations of a loop."""
        a, b = one.place, other.place
        if isinstance(a, Box) and isinstance(b, Box):
            return _overlap(a, b)
        if a.buffer != b.buffer:
            return False  # parts that move are parts of tensors, which share no byte
        for (low, high), (start, end), move, its in zip(a.ranges, b.ranges, _moves(a), _moves(b), strict=True):
            if move is None or move != its or (move and one.part != other.part):
                continue  # the two accesses may have bytes in common
            if move and other.at is None and one.part != self._turn[0]:
                continue
            # the other access occurs in all iterations that are more than `NEAR` before this turn
            if move and other.at is None:
                last = self._turn[1] - NEAR - 1 - (one.at or 0)
                if end + move * last <= low if move > 0 else start + move * last >= high:
                    return False
                continue
            apart = move * ((one.at or 0) - (other.at or 0))
            if low + apart >= end or start >= high + apart:
                return False
        return True

    def _forget(self) -> None:
        """Join the uses of moving parts in iterations that are more than `NEAR` before the present one."""
        for uses in self._uses.values():
            for use, number in list(uses.items()):
                if use.at is not None and (use.part != self._turn[0] or use.at < self._turn[1] - NEAR):
                    del uses[use]
                    joined = _Use(use.place, None, use.part, use.pipe, use.is_write)
                    uses[joined] = max(uses.get(joined, 0), number)

    # ------------------------------------------------------------ states

    def _begun(self) -> int:
        left = [x for core in self.cores for queue in core.queues.values() for _, x, _ in queue]
        left += [core.issued[core.at] for core in self.cores if core.at < len(core.issued)]
        part, iteration = self._turn
        return min((x.turn[1] if x.turn[0] == part else -1 for x in left if x.turn[0] <= part), default=iteration + 1)

    def _state(self) -> State:
        """Return everything that determines later states; instructions are numbered by their order, and iterations from
        the present one.
        """
        marks = defaultdict[str, set[int]](set)
        for uses in self._uses.values():
            for use, number in uses.items():
                marks[use.pipe].add(number)
        for flag in self._flags.values():
            for pipe, number in flag.waits:
                marks[pipe].add(number)
        order = {pipe: sorted(numbers) for pipe, numbers in marks.items()}

        def known(clock: Mapping[str, int]) -> frozenset[tuple[str, int]]:
            ranks = ((pipe, bisect_right(order[pipe], n)) for pipe, n in clock.items() if pipe in order)
            return frozenset((pipe, n) for pipe, n in ranks if n)

        def place(core: _Core, number: int) -> tuple[int, int, int] | None:
            if number == len(core.issued):
                return None
            part, iteration = core.issued[number].turn
            return (
                part,
                iteration - self._turn[1] if part == self._turn[0] else iteration,
                self._places[core.name][number],
            )

        places = {
            (use.place, None if use.at is None else use.at - self._turn[1], use.part, use.pipe, use.is_write, rank)
            for group in self._uses.values()
            for use, number in group.items()
            for rank in (bisect_right(order[use.pipe], number),)
        }
        cores = tuple(
            (
                place(core, core.at),
                None if core.stop is None else place(core, core.stop),
                known(core.gate),
                tuple(
                    (pipe, place(core, n), known(gate)) for pipe, q in sorted(core.queues.items()) for n, _, gate in q
                ),
            )
            for core in self.cores
        )
        flags = {
            (
                key,
                tuple(map(known, flag.sets)),
                tuple((pipe, bisect_right(order[pipe], n)) for pipe, n in flag.waits),
                min(flag.count, flag.depth),
            )
            for key, flag in self._flags.items()
        }
        clocks = {(pipe, known(clock)) for pipe, clock in self._clocks.items()}
        return frozenset(places), cores, frozenset(flags), frozenset(clocks), tuple(map(known, self._products.values()))


def _joined(clocks: Iterable[Mapping[str, int]]) -> Clock:
    result = Clock()
    for clock in clocks:
        for pipe, number in clock.items():
            if result.get(pipe, 0) < number:
                result[pipe] = number
    return result


def _placed(box: Box, iteration: int) -> Box | _Moving:
    """Return the place of a box; the place of a box that moves is that in iteration 0, and an axis without a place has
    none.
    """
    if not box.moves:
        return box
    ranges = tuple(
        (0, 0) if move is None else (low - move * iteration, high - move * iteration)
        for (low, high), move in zip(box.ranges, box.moves, strict=True)
    )
    return _Moving(box.buffer, ranges, box.moves)


def _moves(place: Box | _Moving) -> tuple[Move, ...]:
    return place.moves if isinstance(place, _Moving) else (0,) * len(place.ranges)


@cache
def _overlap(a: Box, b: Box) -> bool:
    return a.overlaps(b)
