"""Traces for viewers: Perfetto protobuf, and Chrome JSON as B/E pairs.

Both are written from one list of marks: begins, ends and instants of each track in the order of time, with
the flows that leave and reach them, then the levels of counters.
Chrome's ``X`` events are not used: start plus duration rounds, and viewers then nest neighbours.
MindStudio Insight wants ``profilingType`` before the first bracket of a JSON file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.machines.tracks import Track
    from npusim.report.timeline import Slice, Timeline

TraceFormat = Literal["perfetto", "chrome"]
TRACE_FILES = MappingProxyType({"perfetto": "trace.pftrace", "chrome": "trace.json"})

_SEQUENCE = 1
#: Prefix of the name of a slice in which nothing ran; its cause follows.
_WAIT = "wait: "
_NANOSECONDS_PER_MICROSECOND = 1000


def trace_bytes(timeline: Timeline, form: TraceFormat) -> bytes:
    """Return a trace file's content."""
    return perfetto_trace(timeline) if form == "perfetto" else chrome_trace(timeline)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A begin, an end, or an instant; ``leaving`` and ``reaching`` are numbers of flows at a begin."""

    kind: Literal["B", "E", "i"]
    at_ns: int
    name: str
    piece: Slice
    leaving: tuple[int, ...] = ()
    reaching: tuple[int, ...] = ()


def _marks(timeline: Timeline) -> Iterator[tuple[Track, list[_Mark]]]:
    """Yield each track with its marks in the order of time."""
    leaving, reaching = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, flow in enumerate(timeline.flows, start=1):
        leaving[id(flow.source[1])].append(number)
        reaching[id(flow.target[1])].append(number)
    for track, slices in timeline.tracks.items():
        marks = []
        for piece in slices:
            start, end = timeline.ns(piece.start), timeline.ns(piece.end)
            name = piece.name if piece.kind == "operation" else f"{_WAIT}{piece.name}"
            flows = tuple(leaving[id(piece)]), tuple(reaching[id(piece)])
            marks.append(_Mark("B", start, name, piece, *flows))
            marks += [_Mark("i", end, text, piece) for text in piece.events]
            marks.append(_Mark("E", end, name, piece, *flows))
        yield track, marks


def _arguments(piece: Slice) -> dict[str, int | str]:
    block = {"block": piece.block} if piece.block else {}
    cycles = {"start_cycle": piece.start, "end_cycle": piece.end, "cycles": piece.end - piece.start}
    return {**cycles, **block, **dict(piece.path)}


def _processes(timeline: Timeline) -> dict[str, int]:
    """Return the number of each core: tracks and counters of one stand together."""
    cores = dict.fromkeys(t.core for t in (*timeline.tracks, *timeline.counters))
    return {core: pid for pid, core in enumerate(cores, start=1)}


def perfetto_trace(timeline: Timeline) -> bytes:
    """Return the timeline as a Perfetto trace (protobuf), times in whole nanoseconds."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise NpusimError(
            f"traces need the `perfetto` package, which does not load ({error}); "
            "python -m pip install perfetto, or --trace chrome, or --trace none"
        ) from None
    builder, event = TraceProtoBuilder(), proto.TrackEvent
    kinds = {"B": event.TYPE_SLICE_BEGIN, "E": event.TYPE_SLICE_END, "i": event.TYPE_INSTANT}

    def packet() -> Any:
        added = builder.add_packet()
        added.trusted_packet_sequence_id = _SEQUENCE
        return added

    packet().sequence_flags = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    processes, uuids = _processes(timeline), count(1)
    parents = {core: next(uuids) for core in processes}
    for core, pid in processes.items():
        descriptor = packet().track_descriptor
        descriptor.uuid, descriptor.process.pid, descriptor.process.process_name = parents[core], pid, core
    for tid, (track, marks) in enumerate(_marks(timeline), start=1):
        descriptor, uuid = packet().track_descriptor, next(uuids)
        descriptor.uuid, descriptor.parent_uuid = uuid, parents[track.core]
        descriptor.thread.pid, descriptor.thread.tid = processes[track.core], 1000 + tid
        descriptor.thread.thread_name = track.pipe
        for mark in marks:
            _event(packet(), mark, uuid, kinds[mark.kind])
    for track, levels in timeline.counters.items():
        descriptor, uuid = packet().track_descriptor, next(uuids)
        descriptor.uuid, descriptor.parent_uuid, descriptor.name = uuid, parents[track.core], track.pipe
        descriptor.counter.unit_name = track.pipe.rpartition(" ")[2]
        for cycle, level in levels:
            sample = packet()
            sample.timestamp, sample.track_event.track_uuid = timeline.ns(cycle), uuid
            sample.track_event.type, sample.track_event.double_counter_value = event.TYPE_COUNTER, level
    serialized: bytes = builder.serialize()
    return serialized


def _event(packet: Any, mark: _Mark, uuid: int, kind: int) -> None:
    packet.timestamp = mark.at_ns
    event = packet.track_event
    event.track_uuid, event.type = uuid, kind
    if mark.kind == "E":
        return
    event.name = mark.name
    if mark.kind == "B":
        event.flow_ids.extend(mark.leaving)
        event.terminating_flow_ids.extend(mark.reaching)
        for name, value in _arguments(mark.piece).items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value


def chrome_trace(timeline: Timeline) -> bytes:
    """Return the timeline as Chrome JSON; an end repeats its begin's name and arguments."""
    head = {"profilingType": "op", "displayTimeUnit": "ns"}
    # One event a line: a trace stays readable in a diff and in an editor.
    body = ",\n".join(json.dumps(event, ensure_ascii=False) for event in _chrome_events(timeline))
    text = f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'
    return text.encode()


def _chrome_events(timeline: Timeline) -> Iterator[dict[str, object]]:
    processes = _processes(timeline)
    for core, pid in processes.items():
        yield _metadata("process_name", {"pid": pid, "tid": 0}, {"name": core})
        yield _metadata("process_sort_index", {"pid": pid, "tid": 0}, {"sort_index": pid})
    for tid, (track, marks) in enumerate(_marks(timeline), start=1):
        where = {"pid": processes[track.core], "tid": tid}
        yield _metadata("thread_name", where, {"name": track.pipe})
        yield _metadata("thread_sort_index", where, {"sort_index": tid})
        for mark in marks:
            yield from _chrome_mark(mark, where)
    for track, levels in timeline.counters.items():
        where = {"pid": processes[track.core], "tid": 0}
        unit = track.pipe.rpartition(" ")[2]
        for cycle, level in levels:
            at = timeline.ns(cycle) / _NANOSECONDS_PER_MICROSECOND
            yield {"ph": "C", "ts": at, "name": track.pipe, **where, "args": {unit: level}}


def _metadata(name: str, where: dict[str, int], arguments: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, **where, "args": arguments}


def _chrome_mark(mark: _Mark, where: Mapping[str, int]) -> Iterator[dict[str, object]]:
    at = {"ts": mark.at_ns / _NANOSECONDS_PER_MICROSECOND, **where}
    flow = {"name": "tile", "cat": "tile", **at}
    if mark.kind == "i":
        yield {"ph": "i", "s": "t", "name": mark.name, **at}
        return
    edge = {"ph": mark.kind, "name": mark.name, **at, "args": _arguments(mark.piece)}
    if mark.kind == "E":  # a flow leaves at the end of its slice, which is open until then
        yield from ({"ph": "s", "id": number, **flow} for number in mark.leaving)
        yield edge
    else:
        yield edge
        yield from ({"ph": "f", "bp": "e", "id": number, **flow} for number in mark.reaching)
