"""Traces for people's viewers: Perfetto protobuf, and Chrome JSON as B/E pairs.

Chrome's ``X`` events are not used: start plus duration rounds, and viewers then nest neighbours.
MindStudio Insight wants ``profilingType`` before the first bracket of a JSON file.
"""

from __future__ import annotations

import json
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.timeline import Slice, Timeline

__all__ = ["TRACE_FILES", "TraceFormat", "chrome_trace", "perfetto_trace", "trace_bytes"]

TraceFormat = Literal["perfetto", "chrome"]
TRACE_FILES = MappingProxyType({"perfetto": "trace.pftrace", "chrome": "trace.json"})

_SEQUENCE = 1
_NANOSECONDS_PER_MICROSECOND = 1000


def trace_bytes(timeline: Timeline, form: TraceFormat) -> bytes:
    """Return a trace file's content."""
    return perfetto_trace(timeline) if form == "perfetto" else chrome_trace(timeline)


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
    builder = TraceProtoBuilder()
    event_type = proto.TrackEvent
    uuids = count(1)
    process_uuids: dict[str, int] = {}

    def packet() -> Any:
        made = builder.add_packet()
        made.trusted_packet_sequence_id = _SEQUENCE
        return made

    first = packet()
    first.sequence_flags = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for tid, (track, slices) in enumerate(timeline.tracks.items(), start=1):
        if track.core not in process_uuids:
            process_uuids[track.core] = next(uuids)
            _describe_process(packet(), process_uuids[track.core], len(process_uuids), track.core)
        thread = next(uuids)
        pid = list(process_uuids).index(track.core) + 1
        described = packet().track_descriptor
        described.uuid, described.parent_uuid = thread, process_uuids[track.core]
        described.thread.pid, described.thread.tid = pid, 1000 + tid
        described.thread.thread_name = track.pipe
        for piece in slices:
            _event(packet(), piece.start_ns, thread, event_type.TYPE_SLICE_BEGIN, piece)
            for text in piece.events:
                _instant(packet(), piece.end_ns, thread, event_type.TYPE_INSTANT, text)
            _event(packet(), piece.end_ns, thread, event_type.TYPE_SLICE_END, None)
    serialized: bytes = builder.serialize()
    return serialized


def _describe_process(packet: Any, uuid: int, pid: int, name: str) -> None:
    described = packet.track_descriptor
    described.uuid = uuid
    described.process.pid = pid
    described.process.process_name = name


def _event(packet: Any, at_ns: int, track: int, kind: int, piece: Slice | None) -> None:
    packet.timestamp = at_ns
    event = packet.track_event
    event.track_uuid, event.type = track, kind
    if piece is not None:
        event.name = piece.name
        for name, value in _arguments(piece):
            note = event.debug_annotations.add()
            note.name, note.int_value = name, value


def _instant(packet: Any, at_ns: int, track: int, kind: int, text: str) -> None:
    packet.timestamp = at_ns
    event = packet.track_event
    event.track_uuid, event.type, event.name = track, kind, text


def _arguments(piece: Slice) -> list[tuple[str, int]]:
    return [
        ("start_cycle", piece.start_cycle),
        ("end_cycle", piece.end_cycle),
        ("cycles", piece.end_cycle - piece.start_cycle),
        *piece.path,
    ]


def chrome_trace(timeline: Timeline) -> bytes:
    """Return the timeline as Chrome JSON; an end repeats its begin's name and arguments."""
    events = list(_chrome_events(timeline))
    head = {"profilingType": "op", "displayTimeUnit": "ns"}
    # One event a line: a trace stays readable in a diff and in an editor.
    body = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    text = f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'
    return text.encode()


def _chrome_events(timeline: Timeline) -> Iterator[dict[str, object]]:
    cores = dict.fromkeys(track.core for track in timeline.tracks)
    processes = {core: pid for pid, core in enumerate(cores, start=1)}
    for core, pid in processes.items():
        yield _metadata("process_name", {"pid": pid, "tid": 0}, {"name": core})
        yield _metadata("process_sort_index", {"pid": pid, "tid": 0}, {"sort_index": pid})
    for tid, (track, slices) in enumerate(timeline.tracks.items(), start=1):
        where = {"pid": processes[track.core], "tid": tid}
        yield _metadata("thread_name", where, {"name": track.pipe})
        yield _metadata("thread_sort_index", where, {"sort_index": tid})
        for piece in slices:
            yield from _chrome_slice(piece, where)


def _metadata(name: str, where: dict[str, int], arguments: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": name, **where, "args": arguments}


def _chrome_slice(piece: Slice, where: dict[str, int]) -> Iterator[dict[str, object]]:
    start, end = (ns / _NANOSECONDS_PER_MICROSECOND for ns in (piece.start_ns, piece.end_ns))
    told = {"name": piece.name, **where, "args": dict(_arguments(piece))}
    yield {"ph": "B", "ts": start, **told}
    for text in piece.events:
        yield {"ph": "i", "ts": end, "s": "t", "name": text, **where}
    yield {"ph": "E", "ts": end, **told}
