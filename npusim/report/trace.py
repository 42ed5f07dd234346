"""``trace.json``: a timeline as Chrome's trace events, which Perfetto, Chrome and MindStudio Insight open.

Each track has its begins, ends and instants in the order of time, and the flows that start or end at them.  ``X``
events are not used: start plus duration is rounded, and viewers then nest neighbours.  MindStudio Insight requires
``profilingType`` before the first bracket.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.program.ir.walk import Path
    from npusim.report.timeline import Slice, Timeline

TRACE_FILE = "trace.json"
#: Prefix of the name of a slice in which nothing ran; its cause follows.
_WAIT = "wait: "
_NANOSECONDS_PER_MICROSECOND = 1000


def trace_json(timeline: Timeline) -> str:
    """Return the timeline as JSON text; an end event repeats the name and the arguments of its begin event.

    Events are written as text: as objects, they take twice the time.
    """
    return f'{{"profilingType": "op", "displayTimeUnit": "ns", "traceEvents": [{", ".join(_events(timeline))}]}}\n'


def _events(timeline: Timeline) -> Iterator[str]:
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
        at = f'"pid": {processes[track.core]}, "tid": {tid}'
        for piece in slices:
            yield from _slice_events(timeline, piece, at, leaving.get(id(piece), ()), reaching.get(id(piece), ()))


def _metadata(name: str, where: Mapping[str, int], arguments: Mapping[str, object]) -> str:
    return json.dumps({"ph": "M", "name": name, **where, "args": arguments}, ensure_ascii=False)


def _slice_events(
    timeline: Timeline, piece: Slice, where: str, leaving: Sequence[int], reaching: Sequence[int]
) -> Iterator[str]:
    """Yield begin, instants and end of a slice, and the ends of flows; ``leaving`` and ``reaching`` are the numbers of
    flows, ``where`` the members that state the track.
    """
    start, end = piece.start, piece.end
    first = f'"ts": {timeline.ns(start) / _NANOSECONDS_PER_MICROSECOND!r}, {where}'
    last = f'"ts": {timeline.ns(end) / _NANOSECONDS_PER_MICROSECOND!r}, {where}'
    name = piece.name if piece.kind == "operation" else f"{_WAIT}{piece.name}"
    arguments = _arguments(piece.block, piece.path) % {"start": start, "end": end, "cycles": end - start}
    about, flow = f'"name": {_quoted(name)}, "args": {{{arguments}}}', '"name": "tile", "cat": "tile"'
    yield f'{{"ph": "B", {first}, {about}}}'
    for number in reaching:
        yield f'{{"ph": "f", "bp": "e", "id": {number}, {flow}, {first}}}'
    for text in piece.events:
        yield f'{{"ph": "i", "s": "t", "name": {_quoted(text)}, {last}}}'
    # A flow starts at the end of its slice, which is still open then.
    for number in leaving:
        yield f'{{"ph": "s", "id": {number}, {flow}, {last}}}'
    yield f'{{"ph": "E", {last}, {about}}}'


@lru_cache(maxsize=1024)
def _arguments(block: str, path: Path) -> str:
    """Return the arguments of slices in a block and these loops, as a format of their first cycle, end and duration.

    A loop with the name of another argument replaces it.
    """
    values = {"start_cycle": "%(start)d", "end_cycle": "%(end)d", "cycles": "%(cycles)d"}
    values |= {"block": _literal(_quoted(block))} if block else {}
    values |= {loop: json.dumps(index) for loop, index in path}
    return ", ".join(f"{_literal(_quoted(name))}: {value}" for name, value in values.items())


def _literal(text: str) -> str:
    """Return a text that stands for itself in a format."""
    return text.replace("%", "%%")
