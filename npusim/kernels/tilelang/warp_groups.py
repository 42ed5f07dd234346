"""Statements of warp groups (``T.ws``) that barriers of the program order, in the order of the text.

The text is one order in which the groups may run.  All other orders give the same values if no wait can end at a phase
other than that in the text, and if the barriers order any two accesses of an element, one of which is a write.  Both
conditions are checked on all statements, with all iterations of loops, by clocks: a clock states which statements a
group, or an asynchronous copy, is known to follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from npusim.kernels.tilelang.statements import (
    TRUE,
    Applied,
    BarrierStep,
    BufferElement,
    Conditional,
    CoreScope,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    expressions_in,
    linear,
    number_of,
    parts_of,
    refused,
    substituted,
    variables_of,
    walked,
    with_bodies,
)
from npusim.kernels.triton.ttir_text import Line

Body = tuple[Statement, ...]
#: Largest number of statements of all groups, with all iterations of loops, that are followed.
MOST_STEPS = 200_000
_ALL = "all threads"
_ZERO = Literal(0)


def in_text_order(
    body: Sequence[Statement], counts: Mapping[str, Sequence[int]], threads: int, registers: Set[TileBuffer]
) -> Body:
    """Return statements without warp groups and barriers.

    ``counts``: the arrivals of each barrier's phases, by name; ``threads``: the threads of a block; ``registers``:
    tiles that each group has as a separate copy.  Raises `ProgramError` with a line for accesses or waits that the
    barriers do not order.
    """
    _Order(counts, threads, registers).follow(body, {})
    return _plain(body)


def _plain(body: Iterable[Statement]) -> Body:
    """Return statements without the groups and barriers around them."""
    result = list[Statement]()
    for s in body:
        if isinstance(s, CoreScope):
            result += _plain(s.body)
        elif isinstance(s, BarrierStep):
            result += [] if s.copy is None else [s.copy]
        else:
            result.append(with_bodies(s, _plain))
    return tuple(result)


@dataclass(slots=True)
class _Part:
    """An access: the group, the time, and the part of a buffer, given by its first element and its length along each
    axis.
    """

    agent: str
    time: int
    start: tuple[Expression, ...]
    extent: tuple[int, ...]
    is_write: bool
    line: Line

    def meets(self, other: _Part) -> bool:
        """Return whether two parts of a buffer may have a common element."""
        for a, n, b, m in zip(self.start, self.extent, other.start, other.extent, strict=True):
            distance = linear(Applied("-", (b, a)), {})
            if set(distance) <= {Literal(1)} and not -m < distance.get(Literal(1), 0) < n:
                return False
        return True


Clock = dict[str, int]


@dataclass(slots=True)
class _Barrier:
    """A barrier: for each phase so far, the clock of the statements before its end; and the waits for the last
    phase.
    """

    count: int
    arrived: int = 0
    pending: Clock = field(default_factory=dict)
    phases: list[Clock] = field(default_factory=list)
    waits: list[tuple[str, int, Line]] = field(default_factory=list)


def _joined(one: Clock, other: Clock) -> None:
    for agent, time in other.items():
        one[agent] = max(time, one.get(agent, 0))


class _Order:
    """Follows the statements of all groups in the order of the text."""

    def __init__(self, counts: Mapping[str, Sequence[int]], threads: int, registers: Set[TileBuffer]) -> None:
        self.counts, self.threads, self.registers = counts, threads, registers
        self.barriers = dict[tuple[str, int], _Barrier]()
        self.clocks = defaultdict[str, Clock](dict)
        self.accesses = defaultdict[TileBuffer, list[_Part]](list)
        self.owners, self.steps, self.group = dict[TileBuffer, str](), 0, _ALL
        self.groups = set[str]()

    def follow(self, body: Iterable[Statement], known: Mapping[str, int]) -> None:
        """Follow statements; ``known``: the present values of the variables of enclosing loops."""
        for s in body:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise refused(s.line, f"warp groups with more than {MOST_STEPS:,} statements are not checked")
            if isinstance(s, SerialLoop):
                low, high = (number_of(x, known) for x in (s.low, s.high))
                if low is None or high is None:
                    why = "a loop of warp groups whose length differs between programs is not supported"
                    raise refused(s.line, why)
                for n in range(int(low), int(high)):
                    self.follow(s.body, {**known, s.variable: n})
            elif isinstance(s, CoreScope):
                self.in_group(s, known)
            elif isinstance(s, Conditional):
                self.branch(s, known)
            elif isinstance(s, BarrierStep):
                self.at_barrier(s, known)
            else:
                self.accessed(s, known)

    def in_group(self, s: CoreScope, known: Mapping[str, int]) -> None:
        if self.group != _ALL:
            raise refused(s.line, "a warp group within another one is not supported")
        first, _, end = s.core.partition(":")
        others = (g.partition(":") for g in self.groups - {s.core})
        if any(int(first) < int(b) and int(a) < int(end) for a, _, b in others):
            raise refused(s.line, f"the threads {s.core} are also in another warp group, which is not supported")
        if s.core not in self.groups:  # the statement comes after all earlier statements of all threads
            self.groups.add(s.core)
            _joined(self.clocks[s.core], self.clocks[_ALL])
        self.group = s.core
        self.follow(s.body, known)
        self.group = _ALL

    def branch(self, s: Conditional, known: Mapping[str, int]) -> None:
        holds = number_of(s.condition, known)
        if holds is not None:
            self.follow(s.then if holds else s.otherwise, known)
            return
        if any(isinstance(x, BarrierStep | CoreScope) for x in walked((*s.then, *s.otherwise))):
            raise refused(s.line, "a barrier or warp group in an if that is decided in a run is not supported")
        self.read(s.condition, s.line, known)
        self.follow((*s.then, *s.otherwise), known)

    # ------------------------------------------------------------ clocks
    def begin(self) -> tuple[Clock, int]:
        """Begin a statement: return the clock of its group, and its time; a statement of all threads comes after all
        groups.
        """
        if self.group == _ALL:
            for g in self.groups:
                _joined(self.clocks[_ALL], self.clocks[g])
        clock = self.clocks[self.group]
        clock[self.group] = clock.get(self.group, 0) + 1
        return clock, clock[self.group]

    def end(self) -> None:
        """End a statement: all groups come after a statement of all threads, because the compiler adds a barrier."""
        for g in self.groups if self.group == _ALL else ():
            _joined(self.clocks[g], self.clocks[_ALL])

    def barrier(self, s: BarrierStep, known: Mapping[str, int]) -> _Barrier:
        at = number_of(s.index, known)
        counts = self.counts[s.barrier]
        if at is None or not 0 <= int(at) < len(counts):
            raise refused(
                s.line, f"the number of the barrier {s.barrier} is not known, or is not one of 0 to {len(counts) - 1}"
            )
        return self.barriers.setdefault((s.barrier, int(at)), _Barrier(counts[int(at)]))

    def at_barrier(self, s: BarrierStep, known: Mapping[str, int]) -> None:
        barrier = self.barrier(s, known)
        if s.copy is not None:
            self.copied(s.copy, barrier, known)
        elif s.parity is not None:
            self.wait(s, barrier, known)
        else:
            self.arrive(s, barrier)

    def wait(self, s: BarrierStep, barrier: _Barrier, known: Mapping[str, int]) -> None:
        assert s.parity is not None
        parity, done = number_of(s.parity, known), len(barrier.phases)
        clock, time = self.begin()
        if parity is None or int(parity) not in (0, 1):
            raise refused(s.line, f"the parity of a wait for {s.barrier} is not known, or is neither 0 nor 1")
        if (done - 1) % 2 != int(parity):
            raise refused(
                s.line,
                f"a wait for the parity {int(parity)} of {s.barrier} does not end here: in the order of the "
                f"text, {done} phases of the barrier have ended before it",
            )
        if done > 1 and not self.is_after(clock, barrier.phases[done - 2]):
            raise refused(
                s.line, f"a wait for {s.barrier} may end two phases early: it does not follow the previous phase"
            )
        if done:
            _joined(clock, barrier.phases[done - 1])
        barrier.waits.append((self.group, time, s.line))
        self.end()

    def arrive(self, s: BarrierStep, barrier: _Barrier) -> None:
        clock, _ = self.begin()
        if barrier.phases and not self.is_after(clock, barrier.phases[-1]):
            why = "may count for the previous phase, because it does not follow the end of that phase"
            raise refused(s.line, f"an arrival at {s.barrier} {why}")
        first, _, end = self.group.partition(":")
        barrier.arrived += int(end) - int(first) if end else self.threads
        _joined(barrier.pending, clock)
        if barrier.arrived > barrier.count:
            raise refused(s.line, f"{barrier.arrived} threads arrive at {s.barrier}, whose phases have {barrier.count}")
        if barrier.arrived == barrier.count:
            for group, time, line in barrier.waits:
                if barrier.pending.get(group, 0) < time:
                    raise refused(
                        line, f"a wait for {s.barrier} may miss its phase: the next phase may end before the wait"
                    )
            barrier.phases.append(barrier.pending)
            barrier.arrived, barrier.pending, barrier.waits = 0, {}, []
        self.end()

    def copied(self, s: ParallelNest, barrier: _Barrier, known: Mapping[str, int]) -> None:
        """Follow a copy that ends with the current phase of its barrier, and for which nothing else waits."""
        clock, _ = self.begin()
        if barrier.phases and not self.is_after(clock, barrier.phases[-1]):
            raise refused(
                s.line,
                "a copy may count for the previous phase of its barrier, because it does not follow the end of that "
                "phase",
            )
        agent = f"copy {self.steps}"
        self.access_all(s, agent, {**clock, agent: 1}, 1, known)
        _joined(barrier.pending, {**clock, agent: 1})
        self.end()

    @staticmethod
    def is_after(clock: Clock, other: Clock) -> bool:
        return all(clock.get(agent, 0) >= time for agent, time in other.items())

    # ------------------------------------------------------------ accesses
    def accessed(self, s: Statement, known: Mapping[str, int]) -> None:
        clock, time = self.begin()
        self.access_all(s, self.group, clock, time, known)
        self.end()

    def read(self, e: Expression, line: Line, known: Mapping[str, int]) -> None:
        clock, time = self.begin()
        for buffer, start, extent in _elements([e], {}):
            part = _Part(self.group, time, _placed(start, known), extent, is_write=False, line=line)
            self.access(buffer, clock, part)
        self.end()

    def access_all(self, s: Statement, agent: str, clock: Clock, time: int, known: Mapping[str, int]) -> None:
        for is_write, (buffer, start, extent) in _parts(s):
            self.access(buffer, clock, _Part(agent, time, _placed(start, known), extent, is_write, s.line))

    def access(self, buffer: TileBuffer, clock: Clock, part: _Part) -> None:
        """Check an access against earlier accesses."""
        if buffer in self.registers and self.owners.setdefault(buffer, self.group) != self.group:
            raise refused(
                part.line,
                f"{buffer.name} is in registers, which warp groups do not share, but {self.owners[buffer]} and "
                f"{self.group} access it",
            )
        remaining = list[_Part]()
        for other in self.accesses[buffer]:
            is_ordered = clock.get(other.agent, 0) >= other.time
            if not is_ordered and (part.is_write or other.is_write) and part.meets(other):
                raise refused(
                    part.line,
                    f"no barrier orders this access of {buffer.name} and the access in line {other.line.number}: "
                    "at least one of them is a write, and they belong to different warp groups or one is an "
                    "asynchronous copy",
                )
            is_same = other.start == part.start and other.extent == part.extent
            is_over = is_ordered and is_same and (part.is_write or (not other.is_write and other.agent == part.agent))
            remaining += [] if is_over else [other]
        self.accesses[buffer] = [*remaining, part]


def _placed(start: Sequence[Expression], known: Mapping[str, int]) -> tuple[Expression, ...]:
    """Return the first element of a part with the numbers of loops."""
    by = {name: Literal(n) for name, n in known.items()}
    result = (substituted(x, by) for x in start)
    return tuple(x if (n := number_of(x, {})) is None else Literal(int(n)) for x in result)


Region = tuple[TileBuffer, tuple[Expression, ...], tuple[int, ...]]


def _region(buffer: TileBuffer, indices: Sequence[Expression], axes: Mapping[str, int]) -> Region:
    """Return the part of a buffer that parallel loops access by some indices; the complete axis if the part
    is unknown.
    """
    start, extent = list[Expression](), list[int]()
    for index, n in zip(indices, buffer.shape, strict=True):
        moving = variables_of([index]) & axes.keys()
        terms = linear(index, {})
        (name,) = moving if len(moving) == 1 else ("",)
        is_plain = not any(isinstance(e, BufferElement) for e in parts_of(index))
        rest = {e for t in terms if t != Variable(name) for e in variables_of([t])}
        if is_plain and not moving:
            start.append(index)
            extent.append(1)
        elif is_plain and name and terms.get(Variable(name)) == 1 and name not in rest:
            start.append(substituted(index, {name: _ZERO}))
            extent.append(axes[name])
        else:
            start.append(_ZERO)
            extent.append(n)
    return buffer, tuple(start), tuple(extent)


def _elements(expressions: Iterable[Expression], axes: Mapping[str, int]) -> Iterator[Region]:
    for e in (x for each in expressions for x in parts_of(each)):
        if isinstance(e, BufferElement):
            yield _region(e.buffer, e.indices, axes)


def _parts(s: Statement) -> Iterator[tuple[bool, Region]]:
    """Yield the parts of buffers that a statement reads, and those that it writes."""
    if isinstance(s, ParallelNest):
        axes = {name: n for x in s.body if isinstance(x, Elementwise) for name, n in (*s.axes, *x.axes)}
        yield from ((False, r) for r in _elements(expressions_in([s]), axes))
        yield from ((True, _region(x.buffer, x.indices, axes)) for x in s.body if isinstance(x, Elementwise))
    elif isinstance(s, MatrixProduct):
        reads = (s.a, s.b) if s.clears == TRUE else (s.a, s.b, s.c)
        yield from ((False, (x.buffer, x.start, x.extent)) for x in reads)
        yield True, (s.c.buffer, s.c.start, s.c.extent)
    elif isinstance(s, TileReduction):
        used = (s.source,) if s.clears else (s.source, s.target)
        yield from ((False, (x.buffer, x.start, x.extent)) for x in used)
        yield True, (s.target.buffer, s.target.start, s.target.extent)
    else:
        yield from ((False, r) for r in _elements(expressions_in([s]), {}))
