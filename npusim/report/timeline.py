"""The timeline of a run: slices by track, what they waited for, who fed whom, what memories and links held.

Cycles are the truth.  Each edge becomes nanoseconds once, so that the end of a slice and the start
of the next one at the same cycle are the same number, and nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from npusim.errors import SpecError
from npusim.machines.tracks import Track, track_of
from npusim.report.replay import Happened, Reading
from npusim.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npusim.numerics.result import NumericEvent
    from npusim.simulation.result import RunData
    from npusim.timing.result import QueueUse, TimingResult

_NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Slice:
    """An operation, or a wait for ``name``: its edges, where in the program it stands, its numeric events."""

    name: str
    start: int
    end: int
    kind: Literal["operation", "wait"] = "operation"
    block: str = ""
    path: tuple[tuple[str, int], ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """A tile's way from the operation that made it to one that uses it: two slices, with their tracks."""

    source: tuple[Track, Slice]
    target: tuple[Track, Slice]


@dataclass(frozen=True)
class Timeline:
    """Slices by track, each in the order of time; cores and pipes in the program's order.

    ``counters`` are levels (``L1 bytes`` of a core, ``hbm GB/s`` of a core group), each (cycle, level from then
    on), rising in time; ``end`` is the cycle up to which all is there, ``is_whole`` whether that is the whole run.
    """

    name: str
    clock_hz: int = 1
    end: int = 0
    is_whole: bool = True
    tracks: dict[Track, list[Slice]] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    counters: dict[Track, list[tuple[int, float]]] = field(default_factory=dict)

    def ns(self, cycle: int) -> int:
        """Return a cycle in whole nanoseconds."""
        return cycle * _NANOSECONDS // self.clock_hz

    def within(self, start: int, end: int) -> Timeline:
        """Return what lies in a window, slices that reach beyond it left whole."""
        tracks = {t: [s for s in slices if s.start < end and s.end > start] for t, slices in self.tracks.items()}
        kept = {id(s) for slices in tracks.values() for s in slices}
        flows = [f for f in self.flows if id(f.source[1]) in kept and id(f.target[1]) in kept]
        levels = {name: list(_levels(found, start, end)) for name, found in self.counters.items()}
        return replace(self, tracks=tracks, flows=flows, counters=levels)

    def windowed(self, window: tuple[float, float] | None) -> Timeline:
        """Return what lies from and to some us, all for None; raise `SpecError` where the timeline is over by then."""
        if window is None or not self.end:
            return self
        first, last = (round(us * 1e-6 * self.clock_hz) for us in window)
        if first >= self.end:
            over = format_duration(self.end / self.clock_hz)
            raise SpecError(f"window {window[0]:g}:{window[1]:g} us: the timeline ends at {over}")
        return self.within(first, last)


def _levels(found: Iterable[tuple[int, float]], start: int, end: int) -> Iterable[tuple[int, float]]:
    """Yield the level at the start of a window, and every change in it."""
    before: float | None = None
    for cycle, level in found:
        if cycle > start and before is not None:
            yield start, before
            before = None
        if start < cycle < end:
            yield cycle, level
        elif cycle <= start:
            before = level
    if before is not None:
        yield start, before


def timeline_of(result: RunData) -> Timeline:
    """Return the timeline of the core groups that were traced; empty for a run without a time."""
    timing = result.timing
    if timing is None:
        return Timeline(result.name)
    end, clock = timing.traced_cycles or timing.cycles, round(timing.clock_hz)
    timeline = Timeline(result.name, clock, end, timing.traced_cycles is None, _empty_tracks(result, timing))
    for group in sorted({s.group for s in timing.spans}):
        _add_group(timeline, Reading(result, group).read())
    for slices in timeline.tracks.values():
        slices.sort(key=lambda s: (s.start, s.end))
    for name in [t for t, slices in timeline.tracks.items() if not slices and _is_of_waits(timing, t)]:
        del timeline.tracks[name]
    return timeline


def _empty_tracks(result: RunData, timing: TimingResult) -> dict[Track, list[Slice]]:
    """Return the tracks of the traced groups: queues, and on a GPU their pipes, where operations are drawn."""
    pipes = [use.queue for use in timing.queues[0] if use.is_pipe]
    names = [*pipes, *(queue.name for queue in result.program.queues)]
    return {track_of(g, name): [] for g in sorted({s.group for s in timing.spans}) for name in names}


def _is_of_waits(timing: TimingResult, track: Track) -> bool:
    """Return whether a track shows a GPU's queue: its waits alone."""
    uses: tuple[QueueUse, ...] = timing.queues[0]
    return any(u.is_pipe for u in uses) and track.pipe not in {u.queue.rpartition(".")[2] for u in uses if u.is_pipe}


def _add_group(timeline: Timeline, found: Happened) -> None:
    """Add what happened on one core group."""
    made: list[tuple[Track, Slice]] = []
    for op in found.operations:
        span = op.span
        track = track_of(span.group, span.queue)
        piece = Slice(
            span.label, span.start, span.end, block=op.block, path=op.path, events=tuple(map(_told, op.events))
        )
        made.append((track, piece))
        timeline.tracks[track].append(piece)
        for producer in op.producers:
            timeline.flows.append(Flow(made[producer], made[-1]))
        queue = track_of(span.group, span.issued_by or span.queue)
        for cause, start, end in op.waits:
            if end > start:
                timeline.tracks[queue].append(Slice(cause, start, end, "wait", op.block, op.path))
    cores = {track_of(found.group, op.span.queue).core for op in found.operations}
    shared = cores.pop() if len(cores) == 1 else f"core group {found.group}"
    for space, changes in found.changes.items():
        place = track_of(found.group, space) if "." in space else Track(shared, space)
        timeline.counters[Track(place.core, f"{place.pipe} bytes")] = _summed(changes)
    for link, rates in found.rates.items():
        timeline.counters[Track(shared, f"{link} GB/s")] = [(at, round(v, 3)) for at, v in _summed(rates)]


def _summed(changes: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the level after each cycle with a change."""
    level, found = 0.0, dict[int, float]()
    for cycle, change in sorted(changes):
        level += change
        found[cycle] = level
    return list(found.items())


def _told(event: NumericEvent) -> str:
    return str(event) if event.count == 1 else f"{event}, {event.count} elements"
