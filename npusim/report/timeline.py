"""The timeline of a run as tracks of slices with integer nanoseconds, ready for any trace format.

Cycles are the truth.  Each edge becomes nanoseconds once, so that the end of a slice and the start
of the next one at the same cycle are the same number, and nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.ir.walk import Walker, walk
from npusim.report.tracks import Track, track_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.ir.program import TileProgram
    from npusim.numerics.result import NumericEvent
    from npusim.run_result import RunResult
    from npusim.timing.result import Span

__all__ = ["Slice", "Timeline", "timeline_of"]

_NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Slice:
    """One operation: its label, its edges, and what happened numerically when it was done."""

    name: str
    start_ns: int
    end_ns: int
    start_cycle: int
    end_cycle: int
    path: tuple[tuple[str, int], ...] = ()
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Slices by track, each in the order of time; cores and pipes in the program's order."""

    name: str
    tracks: dict[Track, list[Slice]] = field(default_factory=dict)


def timeline_of(result: RunResult) -> Timeline:
    """Return the timeline of the core groups that were traced; empty for a run without a time."""
    if result.timing is None:
        return Timeline(result.name)
    clock, spans = round(result.timing.clock_hz), result.timing.spans
    events = _events_by_span(result, spans)
    tracks: dict[Track, list[Slice]] = {
        track_of(group, queue.name): []
        for group in sorted({s.group for s in spans})
        for queue in result.program.queues
    }
    for index, span in enumerate(spans):
        tracks[track_of(span.group, span.queue)].append(
            Slice(
                span.label,
                span.start * _NANOSECONDS // clock,
                span.end * _NANOSECONDS // clock,
                span.start,
                span.end,
                span.path,
                tuple(str(event) for event in events.get(index, ())),
            )
        )
    for slices in tracks.values():
        slices.sort(key=lambda s: (s.start_cycle, s.end_cycle))
    return Timeline(result.name, tracks)


def _events_by_span(result: RunResult, spans: tuple[Span, ...]) -> dict[int, list[NumericEvent]]:
    """Return the first numeric events of traced groups by the span they belong to."""
    found: dict[int, list[NumericEvent]] = {}
    if result.numerics is None:
        return found
    for event in result.numerics.first_events:
        for group in sorted({s.group for s in spans}):
            count = result.device.group_count.value
            ordinal = _ordinal(result.program, event, group, count)
            if ordinal is not None:
                index = _nth(spans, group, event, ordinal)
                if index is not None:
                    found.setdefault(index, []).append(event)
    return found


def _ordinal(program: TileProgram, event: NumericEvent, group: int, group_count: int) -> int | None:
    """Return how many like operations the group runs before the event's; None if not its own."""
    blocks = {str(b) for p in program.phases for b in p.blocks_of_group(group, group_count)}
    if event.block not in blocks:
        return None
    passed = 0
    for phase, block, label, queue, path in _operations(program, group, group_count):
        if (label, queue) != (_label(event), event.queue):
            continue
        if (phase, block, path) == (event.phase, event.block, event.path):
            return passed
        passed += 1
    return None


def _operations(
    program: TileProgram, group: int, group_count: int
) -> Iterator[tuple[str, str, str, str, tuple[tuple[str, int], ...]]]:
    for phase in program.phases:
        for block in phase.blocks_of_group(group, group_count):
            for resolved in walk(Walker(program), phase.body(block)):
                op = resolved.op
                yield phase.name, str(block), op.label, op.queue, resolved.path


def _nth(spans: tuple[Span, ...], group: int, event: NumericEvent, ordinal: int) -> int | None:
    like = [
        i
        for i, s in enumerate(spans)
        if (s.group, s.queue, s.label) == (group, event.queue, _label(event))
    ]
    like.sort(key=lambda i: spans[i].start)
    return like[ordinal] if ordinal < len(like) else None


def _label(event: NumericEvent) -> str:
    """Return the operation's label: an event names operation and step, ``S.mmad.matmul``."""
    return event.operation.rpartition(".")[0]
