"""A run's time: in the terminal's table and in the figures of its page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.machines.tracks import LOOP_BOUNDS, track_of
from npusim.program.timing.summary import NO_INSTRUCTION
from npusim.program.timing.timing_result import BOUND_SHARE, LOST, QueueUse, Roofline, TimingRecord, method_text
from npusim.report import charts
from npusim.report.advice import EVEN_SHARE
from npusim.report.charts import Figure, Row
from npusim.report.text import Cell, Column, Columns, Fact, Grid, cells, percent, whole
from npusim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from npusim.report.result_json import RunRecord

#: Activities of a queue or pipe, in the order of the parts of a bar.
SPENT = BUSY, DATA, ROOM, LATE, OTHER, IDLE, DONE = (
    "busy",
    "waits for data",
    "waits for space",
    "no instruction",
    "pipe used by others",
    "idle",
    "finished",
)
#: Kinds of published times (`npusim.program.timing.timing_result.KINDS`), in words.
_MEASURED = MappingProxyType(
    {
        "core": "the cores, from the start of the first to the end of the last",
        "kernel": "the kernels as a profiler reports them (task duration), with their starts on the device",
        "back_to_back": "one of many calls that the host issues without waiting for their ends",
        "call": "a single call, from its issue until the host observes its end",
    }
)
#: Number of constants that a page lists, the largest share first, and of constants with weak evidence that the terminal
#: names.
LISTED, NAMED = 12, 2
#: Largest number of resident blocks of a core whose queues are all listed; the beginning of such a queue's name.
LISTED_BLOCKS, _OF_BLOCK = 2, re.compile(r"^B\d+(?=[A-Z])")
_WEAK_BASES = ("assumed", "fitted", "unknown")
_WINDOWS = MappingProxyType(
    {
        "Prologue": "The start: the pipeline fills.",
        "Steady state": "The middle of the run, which repeats.",
        "Epilogue": "How it drains.",
        "Beginning": "The run is too long to record every operation: the timeline shows its beginning.",
    }
)

PARTS = Columns(
    Column("pipe", "track"),
    Column("what", "cause"),
    Column("us", "value", ",.2f"),
    Column("of the cores' time", "share", percent),
)
SLICES = Columns(
    Column("pipe", "track"),
    Column("what", lambda s: s["name"] if s["kind"] == "operation" else f"waits: {s['name']}"),
    Column("from, us", "start_us", ".3f"),
    Column("to, us", "end_us", ".3f"),
    Column("loop", "at"),
    Column("block", "block"),
)
MEMORIES = Columns(
    Column("memory", "name"),
    Column("allocated", "used_bytes", format_bytes),
    Column("capacity", "capacity_bytes", format_bytes),
    Column("share", lambda m: m["used_bytes"] / m["capacity_bytes"], percent),
)
CONSTANTS = Columns(Column("constant", "key"), Column("basis", "basis"), Column("share", "share", percent))


# ---------------------------------------------------------------- the terminal's table


def limit_words(record: RunRecord, timing: TimingRecord) -> str:
    """Return a run's limit: ``VECTOR-bound``, ``hbm-bound``; for a node, the longest part of the run.

    If the launch is most of a call, it is the limit: ``launch-bound (67 % of the call), cores VECTOR-bound``.
    """
    limit = timing.limit(record.device.link_bytes_per_s)
    if not limit.name:
        return "nothing ran"
    if not limit.is_link and timing.overlap is not None and timing.overlap.parts_us:
        part, us = max(timing.overlap.parts_us.items(), key=lambda item: item[1])
        return f"{part} takes {us / timing.latency_us * 100:.0f} %"
    if timing.overlap is None and timing.launch_us > timing.core_us:
        cores = f", cores {limit.bound}-bound" if limit.is_limit else ""
        return f"launch-bound ({timing.launch_us / timing.latency_us * 100:.0f} % of the call){cores}"
    return f"{limit.bound}-bound"


def lost_words(record: RunRecord, timing: TimingRecord) -> Iterator[str]:
    """Yield the number of core groups that work, or how evenly they do; nothing for a node."""
    working, groups = len(timing.group_ends), record.device.group_count
    if timing.overlap is not None or not working:
        return
    mean = sum(timing.group_ends.values()) / working / max(timing.group_ends.values())
    if working < groups:
        yield f"{working} of {groups} core groups work"
    elif mean < EVEN_SHARE:
        yield f"load balance {mean * 100:.0f} %"


def sure_words(timing: TimingRecord) -> str:
    """Return the rounded latency, and the distance of such times from measured times."""
    number, unit = _duration(timing.latency_us).split()
    time, known = f"{float(number.replace(',', '')):,.3g} {unit}", timing.validated
    return time if known is None else known.after(time)


def time_facts(record: RunRecord, timing: TimingRecord, *, is_full: bool = False) -> Iterator[Fact]:
    """Yield latency, its evidence, its limit, and the run's position under its roofline.

    With ``is_full`` also the time of other kinds of measurement, the method, the least time, and the basis of the roof.
    """
    yield "latency", cells(_latency(timing))
    if record.device.scale:
        rates = (f"{name} at {factor:g} times its rate" for name, factor in record.device.scale.items())
        yield "what if", cells(", ".join(rates), style="warn")
    phases = timing.account.phases if timing.account else ()
    if len(phases) > 1:
        each = (f"{p.name} {_duration(timing.core_us * p.cycles / timing.cycles)}" for p in phases)
        yield "phases", cells(", ".join(each))
    if is_full and timing.overlap is None and len(timing.times_us) > 1:
        yield "times", cells(*(f"{kind} {_duration(us)}: {_MEASURED[kind]}" for kind, us in timing.times_us.items()))
    if timing.validated is not None:
        text = timing.validated.text(record.called, record.device.name)
        yield "measured", cells(text, style="" if timing.validated.cases else "warn")
    if is_full or timing.band:
        yield "method", cells(f"{method_text(timing.method, timing.band)} ({whole(timing.operations)} operations)")
    yield "limit", cells(_limit(record, timing))
    unit, least = max(timing.bound_cycles.items(), key=lambda item: item[1], default=("", 0))
    if unit and timing.cycles and (is_full or least > timing.cycles):
        time, share = _duration(timing.core_us * least / timing.cycles), percent(least / timing.cycles)
        text = (
            f"{time} on the cores ({share} of the prediction): the work of {unit} alone, distributed evenly and "
            "without waits"
        )
        yield "at least", cells(text, style="bad" if least > timing.cycles else "")
    if timing.overlap is not None and timing.overlap.parts_us:
        # The activities of a device, which may overlap, the longest first.
        ranked = sorted(timing.overlap.parts_us.items(), key=lambda item: -item[1])
        parts = [f"{name} {_duration(us)}, {percent(us / timing.latency_us)}" for name, us in ranked]
        yield "parts", cells(*parts)
    if timing.roofline is not None:
        reached, why = _roofline_lines(timing.roofline)
        yield "roofline", cells(reached, *([why] if is_full else []))
    if not is_full and timing.link_bytes:
        yield "bandwidth", cells(", ".join(_bandwidths(timing, record.device.link_bytes_per_s)))


def _bandwidths(timing: TimingRecord, bytes_per_s: Mapping[str, float]) -> Iterator[str]:
    lost = timing.idle_shares(bytes_per_s)
    for name, share in timing.link_shares(bytes_per_s).items():
        parts = f" ({percent(lost[name])} {LOST})" if lost.get(name, 0) > 0 else ""
        yield f"{percent(share)} of {name}'s{parts}"


def _duration(us: float) -> str:
    return format_duration(us * 1e-6)


def _latency(timing: TimingRecord) -> str:
    """Return a call's time and its parts."""
    clock = timing.clock(0.0)
    at = f" at {whole(round(clock / 1e6))} MHz" if clock and timing.overlap is None else ""
    cycles = f"{whole(timing.cycles)} cycles{at}"
    tflops = f"   ({timing.flops / timing.latency_us / 1e6:.1f} TFLOP/s)" if timing.flops else ""
    latency, core, launch = (_duration(us) for us in (timing.latency_us, timing.core_us, timing.launch_us))
    if timing.overlap is not None:
        return f"{latency} ({cycles}), launches included{tflops}"
    return f"{latency} a call = {core} on the cores ({cycles}) + {launch} to launch it and wait for it{tflops}"


def _roofline_lines(at: Roofline) -> tuple[str, str]:
    """Return the roof of a run and its distance from it, and the run's intensities."""
    roof = "matrix units allow" if at.intensity >= at.ridge else "device memory allows"
    attained, allowed = at.attained_flops_per_s / 1e12, at.attainable_flops_per_s / 1e12
    return (
        f"{attained:.1f} of {allowed:.1f} TFLOP/s that the {roof}, {percent(at.reached)} (time of the cores alone)",
        f"{at.intensity:,.0f} operations per byte of inputs and outputs, each moved once; {at.moved_intensity:,.0f} "
        f"per byte moved; the device memory is the roof below {at.ridge:,.0f}",
    )


#: Bounds that apply to a smaller share of a pipe's busy time are not named.
_LEAST_BOUND = 0.1


def _bounds(timing: TimingRecord, pipe: str) -> str:
    """Return the bounds of a pipe's busy time, the largest first; empty for pipes without hardware loops."""
    cycles: dict[str, float] = {}
    for constant in timing.constants:
        _, is_of_pipe, key = constant.key.partition(f".engines.{pipe}.")
        if is_of_pipe:
            latency = key.removeprefix("ops.").removesuffix(".latency_cycles")
            words = LOOP_BOUNDS.get(key, f"latency of {latency.replace('_', ' ')}")
            cycles[words] = cycles.get(words, 0.0) + constant.cycles
    if not any(words in cycles for words in LOOP_BOUNDS.values()):
        return ""
    total = sum(cycles.values())
    ranked = sorted(cycles.items(), key=lambda item: -item[1])
    return ", ".join(f"{words} {percent(c / total)}" for words, c in ranked if c >= _LEAST_BOUND * total)


def _limit(record: RunRecord, timing: TimingRecord) -> str:
    busiest = timing.busiest
    if busiest is None:
        return "nothing ran"
    track, share = track_of(busiest.group, busiest.queue), timing.busy_share(busiest)
    whose = "the time" if timing.overlap is not None else "the cores' time"
    busy, bounds = f"{track.pipe} of {track.core}, busy {percent(share)} of {whose}", _bounds(timing, track.pipe)
    busy += f" (bound by {bounds})" if bounds else ""
    if (limit := timing.limit(record.device.link_bytes_per_s)).is_link:
        return f"{limit.name}, at {percent(limit.share)} of its bandwidth; the busiest pipe is {busy}"
    return busy if limit.is_limit else f"pipes wait for one another; the busiest is {busy}"


def pipes_grid(timing: TimingRecord) -> Grid:
    """Return the queues of the core group that ends last, with the longest wait of each."""
    total, busiest = max(1, timing.cycles), timing.busiest
    limit = busiest if busiest is not None and timing.busy_share(busiest) >= BOUND_SHARE else None

    def waits(row: tuple[str, str, QueueUse]) -> tuple[str, str]:
        stall = row[2].main_stall
        return ("-", "") if stall is None else (stall[0], percent(stall[1] / total))

    table = Columns(
        Column(_pipes_title(timing), 0),
        Column("pipe", 1),
        Column(
            "busy", lambda row: timing.busy_share(row[2]), percent, ">", lambda row: "warn" if row[2] == limit else ""
        ),
        Column("operations", lambda row: row[2].operations, whole, ">"),
        Column("waits most for", lambda row: waits(row)[0]),
        Column("share", lambda row: waits(row)[1], align=">"),
    )
    return table.grid(_cores(timing.uses_of(timing.last_group)))


def _pipes_title(timing: TimingRecord) -> str:
    ends = timing.group_ends
    if timing.overlap is not None:
        return "device" if len(ends) < 2 else f"device (slowest of {len(ends)})"
    return "core" if len(ends) < 2 else f"core (slowest of {len(ends)})"


def _cores(queues: tuple[QueueUse, ...]) -> list[tuple[str, str, QueueUse]]:
    """Return the busy queues, the first one after its core's name; cores with the same activity are combined."""
    cores: dict[str, list[QueueUse]] = {}
    for queue in queues:
        if queue.busy_cycles:
            cores.setdefault(track_of(queue.group, queue.queue).core, []).append(queue)

    def use(core: str) -> object:
        return [(q.pipe, q.busy_cycles, q.operations, q.end_cycles, q.stalls) for q in cores[core]]

    rows = []
    for _, alike in groupby(cores, key=use):
        first, *others = alike
        name = ", ".join([first, *(core.rpartition(".")[2] for core in others)])
        rows += [(name if not number else "", *listed) for number, listed in enumerate(_listed(cores[first]))]
    return rows


def _listed(queues: Sequence[QueueUse]) -> Iterator[tuple[str, QueueUse]]:
    """Yield the queues of a core by name; if more than `LISTED_BLOCKS` resident blocks have queues of one kind, only
    the busiest.
    """
    kinds: dict[str, list[QueueUse]] = {}
    for queue in queues:
        kinds.setdefault(_OF_BLOCK.sub("B", queue.pipe), []).append(queue)
    for queue in queues:
        same = kinds[_OF_BLOCK.sub("B", queue.pipe)]
        if len(same) <= LISTED_BLOCKS:
            yield queue.pipe, queue
        elif queue is same[0]:
            busiest = max(same, key=lambda q: q.busy_cycles)
            yield f"{busiest.pipe}, busiest of {len(same)}", busiest


def links_grid(record: RunRecord, timing: TimingRecord) -> Grid:
    """Return the traffic of each link and its rate; the minimum is one transfer of the inputs, and of the outputs that
    leave L2.
    """
    seconds, shares = timing.core_us * 1e-6, timing.link_shares(record.device.link_bytes_per_s)

    def rate(row: tuple[str, int]) -> float:
        return row[1] / seconds if seconds else 0.0

    def least(row: tuple[str, int]) -> str:
        return f"{row[1] / timing.compulsory_bytes:,.2f}x" if timing.compulsory_bytes else ""

    table = Columns(
        Column("link", 0),
        Column("bytes", 1, format_bytes, ">"),
        Column("over the least", least, align=">"),
        Column("achieved", rate, _gb_per_s, ">"),
        Column("of its bandwidth", lambda row: shares.get(row[0], 0.0), percent, ">"),
    )
    return table.grid(timing.link_bytes.items())


def _gb_per_s(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GB/s"


def constants_facts(timing: TimingRecord) -> Iterator[Fact]:
    """Yield the shares of busy time by evidence, and the weakest constants by name."""
    shares = timing.basis_shares
    if shares:
        text = ", ".join(f"{basis} {percent(share)}" for basis, share in shares.items())
        total = sum(c.cycles for c in timing.constants)
        weak = [c for c in timing.constants if c.basis in _WEAK_BASES][:NAMED]
        named = [f"{c.basis}: {c.key}, {percent(c.cycles / total)}" for c in weak]
        yield "constants", (Cell(f"{text} of busy cycles"), *cells(*named, style="dim"))


# ---------------------------------------------------------------- the page's figures


def time_figures(record: RunRecord, timing: TimingRecord, drawn: dict[str, Any]) -> Iterator[Figure]:
    """Yield the charts of the time: over the run, in windows of the run, and below the roofs."""
    rows = time_parts(timing)
    used = {row["kind"] for row in rows}
    spec = charts.stacked_bars(rows, [kind for kind in SPENT if kind in used])
    yield Figure("time", "Where the time goes", _time_text(timing), spec, PARTS.grid(rows))
    for number, window in enumerate(drawn.get("windows", ())):
        yield _window(f"window{number}", window)
    if timing.roofline is not None:
        yield _roofline(record, timing, timing.roofline)


def together(tracks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of tracks under short names; cores with equal content share a name: ``veccore0-1 VECTOR``."""
    groups: dict[str, tuple[list[str], Any]] = {}
    for track, content in tracks.items():
        core, _, pipe = short(track).rpartition(" ")
        twin = next((n for n, (_, other) in groups.items() if other == content and n.rpartition(" ")[2] == pipe), None)
        groups.setdefault(twin or f"{core} {pipe}", ([], content))[0].append(core)
    return {
        f"{cores[0]}{f'-{cores[-1][-1]}' if len(cores) > 1 else ''} {name.rpartition(' ')[2]}": content
        for name, (cores, content) in groups.items()
    }


def short(track: str) -> str:
    """Return a track's name without the number of its core group: ``cubecore0 CUBE``."""
    core, _, pipe = track.rpartition(" ")
    return f"{core.partition('.')[2] or core} {pipe}"


def _kind(cause: str) -> str:
    if cause.endswith(" ready"):
        return DATA
    if cause.endswith(" free"):
        return ROOM
    return LATE if cause == NO_INSTRUCTION else OTHER


def time_parts(timing: TimingRecord) -> list[Row]:
    """Return the parts of the time of each queue or pipe of the core group that ends last."""
    us = timing.core_us / timing.cycles
    tracks: dict[str, list[Row]] = {}
    for queue in timing.uses_of(timing.last_group):
        if not queue.operations:
            continue
        parts = [(BUSY, BUSY, queue.busy_cycles), *((_kind(c), c, n) for c, n in queue.stalls.items())]
        left = timing.cycles - sum(n for *_, n in parts)
        rest = IDLE if queue.is_pipe else DONE  # a shared pipe does not wait for a queue
        parts += [(rest, rest, left)] if left > 0 else []
        tracks[str(track_of(queue.group, queue.queue))] = [
            {"kind": kind, "cause": cause, "value": round(n * us, 3), "share": n / timing.cycles}
            for kind, cause, n in parts
            if n
        ]
    return _on_tracks(tracks)


def _on_tracks(tracks: Mapping[str, list[Row]]) -> list[Row]:
    return [{**row, "track": track} for track, rows in together(tracks).items() for row in rows]


def _time_text(timing: TimingRecord) -> str:
    busiest = timing.busiest
    if busiest is None:
        return "Nothing ran."
    track = track_of(busiest.group, busiest.queue)
    text = f"{track.pipe} of {track.core} is busiest: {percent(timing.busy_share(busiest))} of the cores' time. "
    queues = [q for q in timing.uses_of(busiest.group) if q.stalls and not q.is_pipe]
    if queues:
        queue = max(queues, key=lambda q: max(q.stalls.values()))
        cause, cycles = queue.main_stall or ("", 0)
        text += f"The longest wait: {queue.pipe} for “{cause}”, {percent(cycles / timing.cycles)}."
    return text


def _window(key: str, window: dict[str, Any]) -> Figure:
    tracks: dict[str, list[Row]] = {}
    for s in window["slices"]:
        tracks.setdefault(s["track"], []).append({k: v for k, v in s.items() if k != "track"})
    slices, name = _on_tracks(tracks), window["name"]
    text = (
        f"{_WINDOWS.get(name, '')} {window['start_us']:,.2f} to {window['end_us']:,.2f} us of one core group. Each "
        "tile of keys has one colour in all pipes. Thin grey bars are waits: point at one to see its cause."
    )
    spec = charts.tracks(slices, window["start_us"], window["end_us"])
    return Figure(key, f"Timeline: {name.lower()}", text, spec, SLICES.grid(slices))


def _roofline(record: RunRecord, timing: TimingRecord, at: Roofline) -> Figure:
    rates, peak, attained = record.device.link_bytes_per_s, at.peak_flops_per_s, at.attained_flops_per_s
    levels: list[Row] = [
        {"name": name, "bytes_per_s": rates[name], "intensity": timing.flops / size, "attained": attained}
        for name, size in timing.link_bytes.items()
        if size
    ]
    table = Columns(
        Column("memory", "name"),
        Column("bytes moved", lambda lv: timing.link_bytes[lv["name"]], format_bytes),
        Column("bandwidth", "bytes_per_s", _gb_per_s),
        Column("the limit below, op/byte", lambda lv: peak / lv["bytes_per_s"], ",.0f"),
        Column("this run, op/byte", "intensity", ",.0f"),
        Column("of its roof", lambda lv: attained / min(peak, lv["intensity"] * lv["bytes_per_s"]), percent),
    )
    text = (
        f"{attained / 1e12:,.1f} of {peak / 1e12:,.1f} TFLOP/s, cores alone. A triangle marks where a memory's "
        "roof ends: left of it, that memory is the limit. Diamonds mark this run, with the bytes that passed "
        "through each memory."
    )
    return Figure("roofline", "Roofline", text, charts.roofline(levels, peak), table.grid(levels))


def memories_figure(memories: Sequence[Row]) -> Figure:
    """Return the allocated part and the capacity of buffers."""
    share, name = max(((m["used_bytes"] / m["capacity_bytes"], m["name"]) for m in memories), key=lambda pair: pair[0])
    text = f"{name} is the fullest: {percent(share)}."
    return Figure("memories", "Buffers against capacity", text, None, MEMORIES.grid(memories))


def constants_figure(timing: TimingRecord) -> Figure:
    """Return the constants that determine the busy time, and the share of each basis."""
    total = sum(c.cycles for c in timing.constants)
    rows: list[Row] = [{"key": c.key, "basis": c.basis, "share": c.cycles / total} for c in timing.constants[:LISTED]]
    rest = total - sum(c.cycles for c in timing.constants[:LISTED])
    rows += [{"key": "all others", "basis": "", "share": rest / total}] if rest > 0 else []
    shares = ", ".join(f"{basis} {percent(share)}" for basis, share in timing.basis_shares.items())
    text = f"Evidence for the constants of the busy time: {shares}."
    return Figure("constants", "Basis of the time", text, None, CONSTANTS.grid(rows))
