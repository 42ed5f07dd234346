"""The figures of a run's page: each a sentence, a chart, and its numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npusim.machines.tracks import track_of
from npusim.report import charts
from npusim.report.bottleneck import basis_shares, bottleneck, deciding_group, main_stall, queues_of
from npusim.report.text import percent, whole
from npusim.timing.summary import NO_INSTRUCTION
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npusim.report.charts import Row, Spec
    from npusim.report.record import RunRecord, TimingRecord

BUSY, DATA, ROOM, LATE, OTHER, IDLE, DONE = (
    "busy",
    "waits for data",
    "waits for room",
    "no instruction",
    "pipe taken by others",
    "idle",
    "nothing left to do",
)
#: Constants that a page lists, the largest share first.
CONSTANTS = 12


@dataclass(frozen=True)
class FigureTile:
    """One of the few numbers at the head of a page; ``is_bad`` where it should alarm."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart with a heading, what it shows (``text``), and its numbers; ``is_wide``: scrolled, not squeezed."""

    key: str
    title: str
    text: str
    spec: Spec | None = None
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    is_wide: bool = False


def run_tiles(record: RunRecord) -> tuple[FigureTile, ...]:
    """Return what a reader wants to know first."""
    found = []
    timing, bits = record.timing, record.numerics
    if timing is not None:
        band = f"within {percent(timing.band)} of exact" if timing.band else f"{timing.method}, exact"
        found.append(FigureTile("Latency", f"{timing.latency_us:,.2f} us", f"kernel {timing.core_us:,.2f} us; {band}"))
        if (held := timing.validated) is not None:
            value = "never" if held.most_error is None else f"within {percent(held.most_error)}"
            found.append(FigureTile("Validated", value, held.text(record.schedule, record.device.name)))
        if timing.flops and timing.latency_us:
            at = timing.roofline
            reached = "" if at is None else f"{percent(at.reached)} of what the roofline allows"
            found.append(FigureTile("Throughput", f"{timing.flops / timing.latency_us / 1e6:,.1f} TFLOP/s", reached))
        busiest = bottleneck(timing)
        if busiest is not None:
            found.append(FigureTile("Busiest pipe", busiest.pipe, f"busy {percent(busiest.busy_share)} of the kernel"))
    if bits is not None:
        is_finite = not (bits.nan_count or bits.inf_count)
        rmse = "not finite" if bits.rmse is None or not is_finite else f"{bits.rmse:.2e}"
        found.append(FigureTile("Relative RMSE", rmse, f"against {bits.against} on {bits.sample}", not is_finite))
        overflow, nan = sum(bits.overflow_counts.values()), sum(bits.nan_counts.values())
        found.append(
            FigureTile(
                "Overflow, NaN", f"{whole(overflow)}, {whole(nan)}", "elements, on the way", bool(overflow or nan)
            )
        )
    return tuple(found)


def run_figures(record: RunRecord, drawn: dict[str, Any] | None, prefix: str = "") -> Iterator[Figure]:
    """Yield the figures of a run; ``drawn`` is what stands in ``figures.json``, ``prefix`` goes before keys."""
    yield from (replace(figure, key=f"{prefix}{figure.key}") for figure in _figures(record, drawn or {}))


def _figures(record: RunRecord, drawn: dict[str, Any]) -> Iterator[Figure]:
    timing = record.timing
    if timing is not None and timing.cycles:
        yield _time(timing)
        yield from _windows(drawn)
        if drawn.get("use"):
            yield _use(drawn)
        if timing.roofline is not None:
            yield _roofline(record, timing)
    # Global memory is no buffer: a thousandth of it says nothing.
    buffers = [m for m in drawn.get("memories", ()) if m["name"] != "gm"]
    if buffers:
        yield _memories(buffers)
    if drawn.get("rows"):
        yield _errors(record, drawn)
    if drawn.get("scores"):
        yield _scores(drawn["scores"])
    if timing is not None and timing.constants:
        yield _constants(timing)


def together(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tracks have, under short names; cores that did the same share one: ``veccore0-1 VECTOR``."""
    kept: dict[str, tuple[list[str], Any]] = {}
    for track, own in found.items():
        core, _, pipe = short(track).rpartition(" ")
        twin = next((n for n, (_, other) in kept.items() if other == own and n.rpartition(" ")[2] == pipe), None)
        kept.setdefault(twin or f"{core} {pipe}", ([], own))[0].append(core)
    return {
        f"{cores[0]}{f'-{cores[-1][-1]}' if len(cores) > 1 else ''} {name.rpartition(' ')[2]}": own
        for name, (cores, own) in kept.items()
    }


def short(track: str) -> str:
    """Return a track's name without the number of its core group: ``cubecore0 CUBE``."""
    core, _, pipe = track.rpartition(" ")
    return f"{core.partition('.')[2] or core} {pipe}"


# ---------------------------------------------------------------- time


def _kind(cause: str) -> str:
    if cause.endswith(" ready"):
        return DATA
    if cause.endswith(" free"):
        return ROOM
    return LATE if cause == NO_INSTRUCTION else OTHER


def time_parts(timing: TimingRecord) -> list[Row]:
    """Return the parts of the time of each queue or pipe of the core group that ends last."""
    us = timing.core_us / timing.cycles
    found: dict[str, list[Row]] = {}
    for queue in queues_of(timing, deciding_group(timing)):
        if not queue.operations:
            continue
        parts = [(BUSY, BUSY, queue.busy_cycles), *((_kind(c), c, n) for c, n in queue.stalls.items())]
        left = timing.cycles - sum(n for *_, n in parts)
        rest = IDLE if queue.is_pipe else DONE  # a shared pipe waits for nobody
        parts += [(rest, rest, left)] if left > 0 else []
        found[str(track_of(queue.group, queue.queue))] = [
            {"kind": kind, "cause": cause, "value": round(n * us, 3), "share": n / timing.cycles}
            for kind, cause, n in parts
            if n
        ]
    return [{**part, "track": track} for track, own in together(found).items() for part in own]


def _time(timing: TimingRecord) -> Figure:
    rows = time_parts(timing)
    used = {row["kind"] for row in rows}
    kinds = [k for k in (BUSY, DATA, ROOM, LATE, OTHER, IDLE, DONE) if k in used]
    table = tuple((r["track"], r["cause"], f"{r['value']:,.2f}", percent(r["share"])) for r in rows)
    return Figure(
        "time",
        "Where the time goes",
        _time_text(timing),
        charts.stacked_bars(rows, kinds, x_title="time, us"),
        ("pipe", "what", "us", "of the kernel"),
        table,
    )


def _time_text(timing: TimingRecord) -> str:
    found = bottleneck(timing)
    if found is None:
        return "Nothing ran."
    track = track_of(found.queue.group, found.queue.queue)
    text = f"{track.pipe} of {track.core} is busiest: {percent(found.busy_share)} of the kernel. "
    waiting = [(main_stall(q), q) for q in queues_of(timing, found.queue.group) if main_stall(q) and not q.is_pipe]
    if waiting:
        (cause, cycles), queue = max(waiting, key=lambda one: one[0][1] if one[0] else 0)  # type: ignore[misc]
        pipe = track_of(queue.group, queue.queue).pipe
        text += f"The longest wait: {pipe} for “{cause}”, {percent(cycles / timing.cycles)}."
    return text


def _windows(drawn: dict[str, Any]) -> Iterator[Figure]:
    notes = {
        "Prologue": "How the pipeline fills.",
        "Steady state": "Amid the run: what repeats.",
        "Epilogue": "How it drains.",
        "Beginning": "The run is too long to keep every operation: this is its beginning.",
    }
    for number, window in enumerate(drawn.get("windows", ())):
        found: dict[str, list[Row]] = {}
        for s in window["slices"]:
            found.setdefault(s["track"], []).append({k: v for k, v in s.items() if k != "track"})
        slices = [{**s, "track": track} for track, own in together(found).items() for s in own]
        rows = tuple(
            (
                s["track"],
                s["name"] if s["kind"] == "operation" else f"waits: {s['name']}",
                f"{s['start_us']:.3f}",
                f"{s['end_us']:.3f}",
                s["at"],
                s["block"],
            )
            for s in slices
        )
        how = "A colour is a tile of keys on its way through the pipes; thin grey bars are waits: point at one."
        yield Figure(
            f"window{number}",
            f"Timeline: {window['name'].lower()}",
            f"{notes.get(window['name'], '')} {window['start_us']:,.2f} to {window['end_us']:,.2f} us "
            f"of one core group. {how}",
            charts.tracks(slices, window["start_us"], window["end_us"]),
            ("pipe", "what", "from, us", "to, us", "loop", "block"),
            rows,
            is_wide=True,
        )


def _use(drawn: dict[str, Any]) -> Figure:
    found = together({u["track"]: u["busy"] for u in drawn["use"] if any(u["busy"])})
    step = drawn["end_us"] / max(map(len, found.values()))
    parts = [
        {"track": track, "start_us": n * step, "end_us": (n + 1) * step, "busy": share}
        for track, shares in found.items()
        for n, share in enumerate(shares)
    ]
    rows = tuple((track, percent(sum(v) / len(v)), percent(min(v)), percent(max(v))) for track, v in found.items())
    return Figure(
        "use",
        "Utilisation over the whole run",
        "How busy each pipe of the core group was, from first to last.",
        charts.use_of_tracks(parts),
        ("pipe", "mean", "least", "most"),
        rows,
    )


# ---------------------------------------------------------------- roofs and memories


def _roofline(record: RunRecord, timing: TimingRecord) -> Figure:
    at = timing.roofline
    assert at is not None
    rates = record.device.link_bytes_per_s
    levels: list[Row] = [
        {
            "name": name,
            "bytes_per_s": rates[name],
            "intensity": timing.flops / size,
            "attained": at.attained_flops_per_s,
        }
        for name, size in timing.link_bytes.items()
        if size
    ]
    rows = tuple(
        (
            lv["name"],
            format_bytes(timing.link_bytes[lv["name"]]),
            f"{lv['bytes_per_s'] / 1e9:,.0f} GB/s",
            f"{at.peak_flops_per_s / lv['bytes_per_s']:,.0f}",
            f"{lv['intensity']:,.0f}",
            percent(at.attained_flops_per_s / min(at.peak_flops_per_s, lv["intensity"] * lv["bytes_per_s"])),
        )
        for lv in levels
    )
    text = (
        f"{at.attained_flops_per_s / 1e12:,.1f} of {at.peak_flops_per_s / 1e12:,.1f} TFLOP/s, kernel alone. "
        "Triangles are the ridges: left of one, that memory is the limit. Diamonds are this run "
        "by the bytes that crossed each memory."
    )
    header = ("memory", "bytes moved", "bandwidth", "ridge, op/byte", "this run, op/byte", "of its roof")
    spec = charts.roofline(levels, at.peak_flops_per_s)
    return Figure("roofline", "Roofline", text, spec, header, rows)


def _memories(found: Sequence[Row]) -> Figure:
    rows = tuple(
        (
            m["name"],
            format_bytes(m["used_bytes"]),
            format_bytes(m["capacity_bytes"]),
            percent(m["used_bytes"] / m["capacity_bytes"]),
            "-" if m["held_bytes"] is None else format_bytes(m["held_bytes"]),
        )
        for m in found
    )
    fullest = max(found, key=lambda m: m["used_bytes"] / m["capacity_bytes"])
    text = (
        f"{fullest['name']} is the fullest: {percent(fullest['used_bytes'] / fullest['capacity_bytes'])}. The wide "
        "bar is what is allocated, the narrow one the most that tiles in flight took of it at one "
        "time; the line is the capacity."
    )
    header = ("memory", "allocated", "capacity", "share", "held at most")
    return Figure("memories", "Buffers against capacity", text, charts.memory_bars(found), header, rows)


# ---------------------------------------------------------------- bits


def _errors(record: RunRecord, drawn: dict[str, Any]) -> Figure:
    found = drawn["rows"]
    rows = tuple(
        (
            r["head"],
            f"{r['first_row']}..{r['last_row']}",
            "not finite" if r["error"] is None else f"{r['error']:.2e}",
            whole(r["nonfinite_rows"]),
            whole(r["overflows"]),
        )
        for r in found
    )
    broken, overflowed = sum(r["nonfinite_rows"] for r in found), sum(r["overflows"] for r in found)
    finite = [r for r in found if r["error"] is not None]
    text = f"{whole(broken)} rows are not finite (red), {whole(overflowed)} elements overflowed on the way (crosses). "
    if finite:
        worst = max(finite, key=lambda r: r["error"])
        rows_of = f"rows {worst['first_row']} to {worst['last_row']}"
        text += f"Worst where finite: head {worst['head']}, {rows_of}, {worst['error']:.2e}."
    sample = "" if record.numerics is None else f" Computed: {record.numerics.sample}."
    header = ("head", "rows", "relative error", "rows not finite", "overflows")
    return Figure("errors", "Error over rows and heads", text + sample, charts.grid_of_errors(found), header, rows)


def _scores(scores: dict[str, Any]) -> Figure:
    total = sum(c["count"] for c in scores["counts"]) + scores["zero_count"] + scores["nonfinite_count"]
    largest = scores["largest"]
    beyond = scores["nonfinite_count"] + sum(c["count"] for c in scores["counts"] if 2.0 ** c["exponent"] >= largest)
    text = (
        f"Magnitudes of {whole(total)} scores before they are stored as {scores['format']}, whose largest number is "
        f"{largest:,.6g}. {'None lies' if not beyond else f'{percent(beyond / total)} lie'} beyond it."
    )
    rows = tuple(
        (f"2^{c['exponent']} to 2^{c['exponent'] + 1}", whole(c["count"]), percent(c["count"] / total))
        for c in scores["counts"]
    )
    rows += (("zero", whole(scores["zero_count"]), percent(scores["zero_count"] / total)),)
    rows += (("Inf or NaN", whole(scores["nonfinite_count"]), percent(scores["nonfinite_count"] / total)),)
    return Figure(
        "scores",
        "Scores against the range of their format",
        text,
        charts.score_bars(scores),
        ("magnitude", "scores", "share"),
        rows,
    )


def _constants(timing: TimingRecord) -> Figure:
    shares = basis_shares(timing)
    total = sum(c.cycles for c in timing.constants)
    first = timing.constants[:CONSTANTS]
    rows = tuple((c.key, c.basis, percent(c.cycles / total)) for c in first)
    rest = total - sum(c.cycles for c in first)
    rows += (("all others", "", percent(rest / total)),) if rest > 0 else ()
    marks: Sequence[Row] = [
        {"name": basis, "value": share, "text": ", ".join(c.key for c in timing.constants if c.basis == basis)[:300]}
        for basis, share in shares.items()
    ]
    text = "How the numbers that busy time rests on are known: from the vendor, measured, derived, fitted, or assumed."
    return Figure(
        "constants",
        "What the time rests on",
        text,
        charts.bars(marks, x_title="share of busy cycles"),
        ("constant", "basis", "share"),
        rows,
    )
