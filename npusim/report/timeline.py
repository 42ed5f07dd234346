"""The timeline of a run: slices by track, their waits and producers.

The timeline is rebuilt after the simulation: the spans of a queue are in the order of its operations in the program,
which is traversed at the same time. This gives each operation's producers and waits.

Cycles are exact.  Each edge is converted to nanoseconds once, so that a slice's end and the start of the next slice at
the same cycle are the same number, and slices never overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from npusim.errors import SpecError
from npusim.late_methods import dataclass
from npusim.machines.tracks import Track, track_of
from npusim.program.ir.walk import OpTemplate, Path, Templates, required_count, unrolled
from npusim.program.timing.gpu_pipes import PIPE_BUSY
from npusim.program.timing.stream import Streams
from npusim.program.timing.summary import NO_INSTRUCTION
from npusim.units import format_duration

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import NumericEvent
    from npusim.program.timing.timing_result import QueueUse, Span, TimingResult
    from npusim.simulation.run_result import RunData

#: Cause of a wait: other core groups have not ended the previous phase yet; blocks are distributed after that.
BARRIER = "phase barrier"
#: Cause, first and last cycle.
Wait = tuple[str, int, int]

_NANOSECONDS = 10**9


class Slice(NamedTuple):
    """An operation, or a wait for ``name``: its start and end, its place in the program, its numeric events."""

    name: str
    start: int
    end: int
    kind: Literal["operation", "wait"] = "operation"
    block: str = ""
    path: tuple[tuple[str, int], ...] = ()
    events: tuple[str, ...] = ()


class Flow(NamedTuple):
    """The path of a tile from the operation that computes it to one that uses it: the two slices and their tracks."""

    source: tuple[Track, Slice]
    target: tuple[Track, Slice]


@dataclass(frozen=True)
class Timeline:
    """Slices by track, each in the order of time; cores and pipes in the program's order.

    ``end`` is the cycle up to which all slices are recorded; ``is_whole`` states whether the run ends there.
    """

    name: str
    clock_hz: int = 1
    end: int = 0
    is_whole: bool = True
    tracks: dict[Track, list[Slice]] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)

    def ns(self, cycle: int) -> int:
        """Return a cycle in nanoseconds, an integer."""
        return cycle * _NANOSECONDS // self.clock_hz

    def within(self, start: int, end: int) -> Timeline:
        """Return the slices in a window; slices that reach beyond it are not cut."""
        tracks = {t: [s for s in slices if s.start < end and s.end > start] for t, slices in self.tracks.items()}
        inside = {id(s) for slices in tracks.values() for s in slices}
        flows = [f for f in self.flows if id(f.source[1]) in inside and id(f.target[1]) in inside]
        return replace(self, tracks=tracks, flows=flows)

    def windowed(self, window: tuple[float, float] | None) -> Timeline:
        """Return the slices between two times in us, or all slices for None; raise `SpecError` if the timeline ends
        earlier.
        """
        if window is None or not self.end:
            return self
        first, last = (round(us * 1e-6 * self.clock_hz) for us in window)
        if first >= self.end:
            over = format_duration(self.end / self.clock_hz)
            raise SpecError(f"--timeline {window[0]:g}:{window[1]:g} us: the timeline ends at {over}")
        return self.within(first, last)


def timeline_of(result: RunData) -> Timeline:
    """Return the timeline of the core groups that were traced; empty for a run without a time."""
    timing = result.timing
    if timing is None:
        return Timeline(result.name)
    end, clock = timing.traced_cycles or timing.cycles, round(timing.clock_hz)
    timeline = Timeline(result.name, clock, end, timing.traced_cycles is None, _empty_tracks(result, timing))
    for group in sorted({s.group for s in timing.spans}):
        _Replay(timeline, result, group).run()
    for slices in timeline.tracks.values():
        slices.sort(key=lambda s: (s.start, s.end))
    for name in [t for t, slices in timeline.tracks.items() if not slices and _is_of_waits(timing, t)]:
        del timeline.tracks[name]
    return timeline


def _empty_tracks(result: RunData, timing: TimingResult) -> dict[Track, list[Slice]]:
    """Return the tracks of the traced groups: queues; on a GPU also their pipes, on which operations are drawn."""
    pipes = [use.queue for use in timing.queues[0] if use.is_pipe]
    names = [*pipes, *(queue.name for queue in result.program.queues)]
    return {track_of(g, name): [] for g in sorted({s.group for s in timing.spans}) for name in names}


def _is_of_waits(timing: TimingResult, track: Track) -> bool:
    """Return whether a track shows a GPU's queue, which has only waits."""
    uses: tuple[QueueUse, ...] = timing.queues[0]
    return any(u.is_pipe for u in uses) and track.pipe not in {u.queue.rpartition(".")[2] for u in uses if u.is_pipe}


class _Replay:
    """Walks a core group's program in step with its spans, and adds slices and flows to a timeline."""

    def __init__(self, timeline: Timeline, result: RunData, group: int) -> None:
        assert result.timing is not None
        self.timeline, self.result, self.program, self.group = timeline, result, result.program, group
        #: None for a node, whose kernels have no separate costs.
        self.streams = Streams(self.program, result.device) if self.program.pricing else None
        self.templates = self.streams.templates if self.streams else Templates(self.program)
        self.endpoints, self.queues = self.templates.walker.endpoints, [q.name for q in self.program.queues]
        spans: dict[str, list[Span]] = defaultdict(list)
        for span in result.timing.spans:
            if span.group == group:
                spans[span.issued_by or span.queue].append(span)
        #: By queue, the last slice first; slices of zero length at one time are in the order in which they were issued.
        self.spans = {queue: sorted(run, key=lambda s: (s.start, s.end))[::-1] for queue, run in spans.items()}
        self.operations: list[tuple[Track, Slice]] = []  # in program order
        self.sets: dict[int, list[int]] = defaultdict(list)  # by endpoint: the operations that set the endpoint's flag
        self.visible: dict[int, list[int]] = defaultdict(list)  # and the cycles from which each set flag is visible
        self.free: dict[str, int] = {}  # by queue: the time from which the queue is free, in the current phase
        self.over: dict[str, int] = defaultdict(int)  # by queue: the time at which all of its results are available
        # the wait from the end of the previous phase to the first operation
        self.opening: Wait = (NO_INSTRUCTION, 0, 0)

    def run(self) -> None:
        """Add slices and flows of the group."""
        events: dict[tuple[str, str, int], list[NumericEvent]] = defaultdict(list)
        for event in self.result.numerics.events if self.result.numerics else ():
            events[event.phase, event.block, event.position].append(event)
        left = sum(map(len, self.spans.values()))
        for (phase, block, position), op, cursors, path in self._walked():
            if not left:
                break
            remaining = self.spans.get(self.queues[op.queue])
            if not remaining:
                continue  # after the end of the trace
            left -= 1
            span = remaining.pop()
            assert span.label == op.op.label, f"{span} is no {op.op.label}"
            noted = events.get((phase, block, position), ()) if events else ()
            notes = tuple([str(e) if e.count == 1 else f"{e}, {e.count} elements" for e in noted])
            piece = Slice(span.label, span.start, span.end, block=block, path=path, events=notes)
            track = track_of(self.group, span.queue)
            self.operations.append((track, piece))
            self.timeline.tracks[track].append(piece)
            timed = self.streams.timed(op) if self.streams else None
            self._add_waits(piece, span, op, cursors, is_shared=bool(timed and timed.pipes))
            self._set_flags(span, op, timed.latency if timed else 0)

    def _walked(self) -> Iterator[tuple[tuple[str, str, int], OpTemplate, Sequence[int], Path]]:
        """Yield phase, block and position of every operation of the group; then the operation, cursors, and the loops
        around it.
        """
        cursors, count = [0] * len(self.endpoints), self.result.device.group_count.value
        for phase in self.program.phases:
            end = max(self.free.values(), default=0)
            first = min((spans[-1].start for spans in self.spans.values() if spans), default=end)
            self.opening, self.free = (BARRIER if end else NO_INSTRUCTION, end, first), {}
            for block in phase.blocks_of_group(self.group, count):
                template, name = self.templates.of(phase, block), str(block)
                for position, operation in enumerate(unrolled(template, cursors)):
                    yield (phase.name, name, position), *operation
                for endpoint, moved in template.moves:
                    cursors[endpoint] += moved

    def _add_waits(self, piece: Slice, span: Span, op: OpTemplate, cursors: Sequence[int], *, is_shared: bool) -> None:
        """Add flows from the producers of an operation's operands, and split the time before it by cause.

        Flags are processed in the order of the queue's waits.  If both the instruction and a flag were late, and the
        flag was later, all of the time is attributed to the flag.  ``is_shared``: it uses pipes that other queues use
        too.
        """
        queue = self.queues[op.queue]
        waits = [] if queue in self.free else [self.opening]
        now = self.free.get(queue, self.opening[-1])
        for index, peer, delta in op.waits:
            endpoint = self.endpoints[index]
            count = required_count(endpoint, cursors[index] + delta)
            if not 0 < count <= len(self.sets[peer]):
                continue
            if not endpoint.is_producer:
                self.timeline.flows.append(Flow(self.operations[self.sets[peer][count - 1]], self.operations[-1]))
            seen = min(self.visible[peer][count - 1], span.start)
            if seen > now:
                waits.append((str(endpoint), now, seen))
                now = seen
        if span.start > now:
            waits.append((PIPE_BUSY if is_shared else NO_INSTRUCTION, now, span.start))
        self.free[queue] = max(span.end, span.done)
        track = self.timeline.tracks[track_of(self.group, queue)]
        track += [
            Slice(cause, start, end, "wait", piece.block, piece.path) for cause, start, end in waits if end > start
        ]

    def _set_flags(self, span: Span, op: OpTemplate, latency: int) -> None:
        number, queue = len(self.operations) - 1, self.queues[op.queue]
        self.over[queue] = max(max(span.end, span.done) + latency, self.over[queue])
        for index in op.sets:
            self.sets[index].append(number)
            late = self.streams.flag_latency(index) if self.streams else 0
            self.visible[index].append(self.over[queue] + late)
