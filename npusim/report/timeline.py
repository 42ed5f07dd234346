"""The timeline of a run as tracks of slices with integer nanoseconds, ready for any trace format.

Cycles are the truth.  Each edge becomes nanoseconds once, so that the end of a slice and the start
of the next one at the same cycle are the same number, and nothing overlaps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.ir.walk import Walker, walk
from npusim.machines.tracks import Track, track_of

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.numerics.result import NumericEvent
    from npusim.run_result import RunResult
    from npusim.timing.result import Span, TimingResult

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
        track_of(group, queue): []
        for group in sorted({s.group for s in spans})
        for queue in _pipes(result.timing) or [q.name for q in result.program.queues]
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
                tuple(map(_told, events.get(index, ()))),
            )
        )
    for slices in tracks.values():
        slices.sort(key=lambda s: (s.start_cycle, s.end_cycle))
    return Timeline(result.name, tracks)


def _told(event: NumericEvent) -> str:
    return str(event) if event.count == 1 else f"{event}, {event.count} elements"


def _pipes(timing: TimingResult) -> list[str]:
    """Return the pipes that a GPU's queues share: there its operations are drawn."""
    return [use.queue for use in timing.queues[0] if use.is_pipe]


def _events_by_span(result: RunResult, spans: tuple[Span, ...]) -> dict[int, list[NumericEvent]]:
    """Return the numeric events of traced groups by the span they belong to."""
    found: dict[int, list[NumericEvent]] = {}
    if result.numerics is None or not result.numerics.events:
        return found
    count = result.device.group_count.value
    for group in sorted({s.group for s in spans}):
        blocks = {str(b) for p in result.program.phases for b in p.blocks_of_group(group, count)}
        events = [e for e in result.numerics.events if e.block in blocks]
        if not events:
            continue
        ordinals = _ordinals(result.program, group, count, {(e.phase, e.block) for e in events})
        like: dict[Kind, list[int]] = {}
        for index, span in enumerate(spans):
            if span.group == group:
                like.setdefault((span.queue, span.label), []).append(index)
        for indices in like.values():
            indices.sort(key=lambda i: spans[i].start)
        for event in events:
            ordinal = ordinals[event.phase, event.block, event.position]
            same = like.get((event.queue, _label(event)), [])
            if ordinal < len(same):
                found.setdefault(same[ordinal], []).append(event)
    return found


#: Queue and label of operations.
Kind = tuple[str, str]


def _ordinals(
    program: TileProgram, group: int, group_count: int, wanted: set[tuple[str, str]]
) -> dict[tuple[str, str, int], int]:
    """Return how many operations of its kind a group runs before each operation of wanted blocks.

    Keys are phase, block and position in the block; ``wanted`` are phases and blocks.
    """
    found: dict[tuple[str, str, int], int] = {}
    passed: Counter[Kind] = Counter()
    for phase in program.phases:
        for block in phase.blocks_of_group(group, group_count):
            name = str(block)
            for position, resolved in enumerate(walk(Walker(program), phase.body(block))):
                kind = resolved.op.queue, resolved.op.label
                if (phase.name, name) in wanted:
                    found[phase.name, name, position] = passed[kind]
                passed[kind] += 1
    return found


def _label(event: NumericEvent) -> str:
    """Return the operation's label: an event names operation and step, ``S.mmad.matmul``."""
    return event.operation.rpartition(".")[0]
