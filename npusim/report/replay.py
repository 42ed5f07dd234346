"""What a core group's operations did, in program order: their place in time and in the program.

The spans of a queue stand in the order in which the program has its operations, so that the two are
put together one by one.  From that follow each operation's producers, what it waited for, the bytes
that rings hold and what crosses links.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.ir.walk import Walker, walk
from npusim.timing.gpu_pipes import PIPE_BUSY
from npusim.timing.stream import Streams
from npusim.timing.summary import NO_INSTRUCTION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.ir.walk import Path, ResolvedOp
    from npusim.numerics.result import NumericEvent
    from npusim.simulation.result import RunData
    from npusim.timing.result import Span
    from npusim.timing.stream import TimedOp

#: Cause of a wait: other core groups have yet to end the phase before; then blocks are dealt out.
BARRIER = "phase barrier"
#: Cause, first and last cycle.
Wait = tuple[str, int, int]


@dataclass(slots=True)
class ReplayedOperation:
    """One operation; ``producers`` are numbers of operations that made what it reads, in one group's order."""

    span: Span
    block: str
    path: Path
    producers: list[int] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    events: list[NumericEvent] = field(default_factory=list)


@dataclass
class Happened:
    """The operations of one core group in program order; changes of bytes held by memory, of GB/s by link."""

    group: int
    operations: list[ReplayedOperation] = field(default_factory=list)
    changes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))


class Reading:
    """Goes through a core group's program with its spans."""

    def __init__(self, result: RunData, group: int) -> None:
        assert result.timing is not None
        self.result, self.program, self.group = result, result.program, group
        self.clock_hz = result.timing.clock_hz
        self.walker = Walker(self.program)
        self.sides = {(e.ring, e.queue, e.is_producer): e for e in self.walker.endpoints}
        self.found = Happened(group)
        spans: dict[str, list[Span]] = defaultdict(list)
        for span in result.timing.spans:
            if span.group == group:
                spans[span.issued_by or span.queue].append(span)
        self.spans = {q: sorted(own, key=lambda s: (-s.start, -s.end)) for q, own in spans.items()}  # last first
        self.sets: dict[int, list[int]] = defaultdict(list)  # by endpoint: the operations that moved it on
        self.visible: dict[int, list[int]] = defaultdict(list)  # and when that was seen
        self.free: dict[str, int] = {}  # by queue, in the phase at hand
        self.over: dict[str, int] = defaultdict(int)  # by queue: when all of its results are there
        self.opening: Wait = (NO_INSTRUCTION, 0, 0)  # from the end of the phase before to its first operation
        self.begun: set[tuple[int, int]] = set()  # ring and generation
        self.released: dict[tuple[int, int], list[int]] = defaultdict(list)

    def read(self) -> Happened:
        """Return all that happened."""
        events: dict[tuple[str, str, int], list[NumericEvent]] = defaultdict(list)
        for event in self.result.numerics.events if self.result.numerics else ():
            events[event.phase, event.block, event.position].append(event)
        left = sum(map(len, self.spans.values()))
        for (phase, block, position, resolved), timed in zip(self._walked(), self._timed(), strict=False):
            if not left:
                break
            own = self.spans.get(resolved.op.queue)
            if not own:
                continue  # beyond the end of what was traced
            left -= 1
            span = own.pop()
            assert span.label == resolved.op.label, f"{span} is no {resolved}"
            op = ReplayedOperation(span, block, resolved.path, events=events.get((phase, block, position), []))
            self.found.operations.append(op)
            self._look_at_waits(op, resolved, timed)
            self._look_at_rings(op, resolved)
            self._look_at_links(span, timed)
            self._hand_on(span, resolved, timed)
        return self.found

    def _walked(self) -> Iterator[tuple[str, str, int, ResolvedOp]]:
        """Yield phase, block and position of every operation of the group."""
        count = self.result.device.group_count.value
        for phase in self.program.phases:
            end = max(self.free.values(), default=0)
            first = min((own[-1].start for own in self.spans.values() if own), default=end)
            self.opening, self.free = (BARRIER if end else NO_INSTRUCTION, end, first), {}
            for block in phase.blocks_of_group(self.group, count):
                for position, resolved in enumerate(walk(self.walker, phase.body(block))):
                    yield phase.name, str(block), position, resolved

    def _timed(self) -> Iterator[TimedOp | None]:
        """Yield the same operations with their costs; None for each of a node, whose kernels have none."""
        if self.program.pricing is None:
            while True:
                yield None
        streams = self.streams = Streams(self.program, self.result.device)
        cursors, count = [0] * len(streams.endpoints), self.result.device.group_count.value
        for phase in self.program.phases:
            for op, _ in streams.stream(phase, phase.blocks_of_group(self.group, count), cursors):
                yield op

    def _look_at_waits(self, op: ReplayedOperation, resolved: ResolvedOp, timed: TimedOp | None) -> None:
        """Note who made what an operation reads, and cut the time before it by what held it up.

        Flags in the order in which the queue looks at them.  Where an instruction came late and a flag later
        still, all of it counts as the flag's.
        """
        if resolved.op.queue not in self.free:
            op.waits.append(self.opening)
        now = self.free.get(resolved.op.queue, self.opening[-1])
        for wait in resolved.waits:
            endpoint = self.walker.endpoints[wait.endpoint]
            if wait.count > len(self.sets[wait.peer]):
                continue
            if not endpoint.is_producer:
                op.producers.append(self.sets[wait.peer][wait.count - 1])
            seen = min(self.visible[wait.peer][wait.count - 1], op.span.start)
            if seen > now:
                op.waits.append((str(endpoint), now, seen))
                now = seen
        if op.span.start > now:
            is_shared = timed is not None and timed.pipes
            op.waits.append((PIPE_BUSY if is_shared else NO_INSTRUCTION, now, op.span.start))
        self.free[resolved.op.queue] = max(op.span.end, op.span.done)

    def _look_at_rings(self, op: ReplayedOperation, resolved: ResolvedOp) -> None:
        """A slot is held from its first producer's begin to its last consumer's end."""
        for (name, is_producer), generation in resolved.cursors.items():
            ring = self.sides[name, resolved.op.queue, is_producer].ring_number
            at = self.program.rings[ring]
            if is_producer and (ring, generation) not in self.begun:
                self.begun.add((ring, generation))
                self.found.changes[at.space].append((op.span.start, at.slot_bytes))
        for index in resolved.sets:
            endpoint = self.walker.endpoints[index]
            if endpoint.is_producer:
                continue
            at = self.program.rings[endpoint.ring_number]
            ends = self.released[endpoint.ring_number, len(self.sets[index])]
            ends.append(max(op.span.end, op.span.done))
            if len(ends) == len(at.consumers):
                self.found.changes[at.space].append((max(ends), -at.slot_bytes))

    def _look_at_links(self, span: Span, timed: TimedOp | None) -> None:
        end = max(span.end, span.done)
        for link, size in timed.flows if timed is not None and end > span.start else ():
            rate = size / (end - span.start) * self.clock_hz / 1e9
            self.found.rates[link] += [(span.start, rate), (end, -rate)]

    def _hand_on(self, span: Span, resolved: ResolvedOp, timed: TimedOp | None) -> None:
        number, queue = len(self.found.operations) - 1, resolved.op.queue
        over = max(span.end, span.done) + (0 if timed is None else timed.latency)
        self.over[queue] = max(over, self.over[queue])
        for index in resolved.sets:
            late = 0 if timed is None else self.streams.flag_latency(index)
            self.sets[index].append(number)
            self.visible[index].append(self.over[queue] + late)
