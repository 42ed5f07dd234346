"""``trace.json``: a timeline as Chrome's trace events, which Perfetto, Chrome and MindStudio Insight open.

Each track has its begins, ends and instants in the order of time, and the flows that start or end at them.  ``X``
events are not used: start plus duration is rounded, and viewers then nest neighbours.  MindStudio Insight requires
``profilingType`` before the first bracket.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.report.timeline import Slice, Timeline

TRACE_FILE = "trace.json"
#: Prefix of the name of a slice in which nothing ran; its cause follows.
_WAIT = "wait: "
_NANOSECONDS_PER_MICROSECOND = 1000


def trace_json(timeline: Timeline) -> str:
    """Return the timeline as JSON text; an end event repeats the name and the arguments of its begin event."""
    trace = {"profilingType": "op", "displayTimeUnit": "ns", "traceEvents": list(_events(timeline))}
    return f"{json.dumps(trace, ensure_ascii=False)}\n"


def _events(timeline: Timeline) -> Iterator[dict[str, object]]:
    # A core is a process of the trace, so that its tracks are shown together.
    cores = dict.fromkeys(t.core for t in timeline.tracks)
    processes = {core: pid for pid, core in enumerate(cores, start=1)}
    for core, pid in processes.items():
        yield _metadata("process_name", {"pid": pid, "tid": 0}, {"name": core})
        yield _metadata("process_sort_index", {"pid": pid, "tid": 0}, {"sort_index": pid})
    leaving, reaching = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, flow in enumerate(timeline.flows, start=1):
        leaving[id(flow.source[1])].append(number)
        reaching[id(flow.target[1])].append(number)
    for tid, (track, slices) in enumerate(timeline.tracks.items(), start=1):
        where = {"pid": processes[track.core], "tid": tid}
        yield _metadata("thread_name", where, {"name": track.pipe})
        yield _metadata("thread_sort_index", where, {"sort_index": tid})
        for piece in slices:
            yield from _slice_events(timeline, piece, where, leaving[id(piece)], reaching[id(piece)])


def _metadata(name: str, where: dict[str, int], arguments: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, **where, "args": arguments}


def _slice_events(
    timeline: Timeline, piece: Slice, where: Mapping[str, int], leaving: Sequence[int], reaching: Sequence[int]
) -> Iterator[dict[str, object]]:
    """Yield begin, instants and end of a slice, and the ends of flows; ``leaving`` and ``reaching`` are the numbers of
    flows.
    """
    ends = (timeline.ns(cycle) / _NANOSECONDS_PER_MICROSECOND for cycle in (piece.start, piece.end))
    first, last = ({"ts": us, **where} for us in ends)
    block = {"block": piece.block} if piece.block else {}
    cycles = {"start_cycle": piece.start, "end_cycle": piece.end, "cycles": piece.end - piece.start}
    name = piece.name if piece.kind == "operation" else f"{_WAIT}{piece.name}"
    about, flow = {"name": name, "args": {**cycles, **block, **dict(piece.path)}}, {"name": "tile", "cat": "tile"}
    yield {"ph": "B", **first, **about}
    yield from ({"ph": "f", "bp": "e", "id": number, **flow, **first} for number in reaching)
    yield from ({"ph": "i", "s": "t", "name": text, **last} for text in piece.events)
    # A flow starts at the end of its slice, which is still open then.
    yield from ({"ph": "s", "id": number, **flow, **last} for number in leaving)
    yield {"ph": "E", **last, **about}
