"""Traces for viewers: Perfetto protobuf, and Chrome JSON as B/E pairs.

Both are written from one list of marks: begins, ends and instants of each track in the order of time, with the flows
that leave and reach them, then the levels of counters. Chrome's ``X`` events are not used: start plus duration rounds,
and viewers then nest neighbours. MindStudio Insight wants ``profilingType`` before the first bracket of a JSON file.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.machines.tracks import Track
    from npusim.report.timeline import Slice, Timeline

TraceFormat = Literal["perfetto", "chrome"]
TRACE_FILES = MappingProxyType({"perfetto": "trace.pftrace", "chrome": "trace.json"})

#: Numbers of the fields of Perfetto's messages (protos/perfetto/trace) that are written here, and of kinds of events.
_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _EVENT, _STATE, _DESCRIPTOR = 8, 10, 11, 13, 60  # of TracePacket
_UUID, _TRACK_NAME, _PROCESS, _THREAD, _PARENT, _COUNTER = 1, 2, 3, 4, 5, 8  # of TrackDescriptor
_PID, _TID, _THREAD_NAME, _PROCESS_NAME, _UNIT = 1, 2, 5, 6, 6  # of the descriptors in it
_ANNOTATION, _TYPE, _TRACK, _EVENT_NAME, _LEVEL, _FLOW, _LAST_FLOW = 4, 9, 11, 23, 44, 47, 48  # of TrackEvent
_INTEGER, _TEXT, _NAME = 4, 6, 10  # of DebugAnnotation
_TYPES = MappingProxyType({"B": 1, "E": 2, "i": 3})
_TYPE_COUNTER = 4
_BYTES = tuple(bytes([n]) for n in range(256))
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
    sequence = _field(_SEQUENCE, 1)
    packets = [sequence + _field(_STATE, 1)]  # names and such begin anew: SEQ_INCREMENTAL_STATE_CLEARED

    def describe(track: bytes) -> None:
        packets.append(sequence + _field(_DESCRIPTOR, track))

    def add(at_ns: int, event: bytes) -> None:
        packets.append(_field(_TIMESTAMP, at_ns) + sequence + _field(_EVENT, event))

    processes, uuids = _processes(timeline), count(1)
    parents = {core: next(uuids) for core in processes}
    for core, pid in processes.items():
        process = _field(_PID, pid) + _field(_PROCESS_NAME, core)
        describe(_field(_UUID, parents[core]) + _field(_PROCESS, process))
    for tid, (track, marks) in enumerate(_marks(timeline), start=1):
        uuid = next(uuids)
        thread = _field(_PID, processes[track.core]) + _field(_TID, 1000 + tid) + _field(_THREAD_NAME, track.pipe)
        describe(_field(_UUID, uuid) + _field(_THREAD, thread) + _field(_PARENT, parents[track.core]))
        for mark in marks:
            add(mark.at_ns, _event(mark, _field(_TRACK, uuid)))
    for track, levels in timeline.counters.items():
        uuid, unit = next(uuids), _field(_UNIT, track.pipe.rpartition(" ")[2])
        name, parent = _field(_TRACK_NAME, track.pipe), _field(_PARENT, parents[track.core])
        describe(_field(_UUID, uuid) + name + parent + _field(_COUNTER, unit))
        head = _field(_TYPE, _TYPE_COUNTER) + _field(_TRACK, uuid)
        for cycle, level in levels:
            add(timeline.ns(cycle), head + _field(_LEVEL, float(level)))
    return b"".join(_field(_PACKET, packet) for packet in packets)


def _event(mark: _Mark, track: bytes) -> bytes:
    """Return a mark as a ``TrackEvent``."""
    event = _field(_TYPE, _TYPES[mark.kind]) + track
    if mark.kind == "E":
        return event
    event += _field(_EVENT_NAME, mark.name)
    if mark.kind == "i":
        return event
    notes = [_annotation(name, value) for name, value in _arguments(mark.piece).items()]
    leaving = [_fixed(_FLOW, number) for number in mark.leaving]
    return b"".join((*notes, event, *leaving, *(_fixed(_LAST_FLOW, number) for number in mark.reaching)))


@lru_cache(maxsize=1 << 12, typed=True)
def _annotation(name: str, value: int | str) -> bytes:
    content = _field(_INTEGER if isinstance(value, int) else _TEXT, value)
    return _field(_ANNOTATION, content + _field(_NAME, name))


# ---------------------------------------------------------------- protobuf's wire format, as far as traces need it


def _field(number: int, value: float | str | bytes) -> bytes:
    """Return a field: a whole number, not negative, as a varint; a float in 64 bits; text and messages by length.

    https://protobuf.dev/programming-guides/encoding
    """
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    if isinstance(value, float):
        return _key(number, 1) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(content)) + content


def _fixed(number: int, value: int) -> bytes:
    """Return a field of a whole number in 64 bits, as those of flows are."""
    return _key(number, 1) + struct.pack("<Q", value)


@cache
def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Return a whole number seven bits a byte, the lowest first; a byte's eighth bit says that more follow."""
    if value <= 0x7F:
        return _BYTES[value]
    if value <= 0x3FFF:
        return _BYTES[value & 0x7F | 0x80] + _BYTES[value >> 7]
    return _BYTES[value & 0x7F | 0x80] + _varint(value >> 7)


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
