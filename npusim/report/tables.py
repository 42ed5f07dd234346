"""A run: the table of the terminal, and the tiles and figures of its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from npusim.report import bits_table, times
from npusim.report.advice import Trial, advise, decoding
from npusim.report.charts import Figure, FigureTile
from npusim.report.program_table import program_figures
from npusim.report.run_inputs import asked_text, tiling_text
from npusim.report.text import Block, Cell, Fact, Facts, Heading, cells, help_on, percent, whole
from npusim.units import format_duration

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import NumericRecord
    from npusim.program.timing.timing_result import TimingRecord
    from npusim.report.result_json import RunRecord


VERDICT = "verdict"
#: A relative error above which an output has little in common with its reference: an output of zeros has an error of 1.
UNLIKE = 0.7
#: Contents that the short table omits.
_MORE = "--full (details() in Python) adds the time by kind of measurement, links, other arithmetics and evidence"
#: The guide to all words.
_WORDS = f"{help_on('words')} explains the words of this table"


def run_table(record: RunRecord, trial: Trial | None = None, *, is_full: bool = False) -> tuple[Block, ...]:
    """Return the table that ``npusim run`` prints; with ``is_full`` the table of ``--full``.

    ``trial`` simulates the changes that its advice suggests.
    """
    timing = record.timing
    first = [(VERDICT, (verdict(record),)), *_inputs(record, is_full=is_full)]
    blocks: list[Block] = [Heading(f"{record.schedule} on {record.device.name}", f"precision {record.precision}")]
    after = [*bits_table.bits_facts(record, is_full=is_full)]
    if timing is None:
        blocks.append(Facts((*first, ("latency", cells("not modelled on this device")))))
    else:
        blocks += [Facts((*first, *times.time_facts(record, timing, is_full=is_full))), times.pipes_grid(timing)]
        if is_full:
            blocks += [times.links_grid(record, timing)] if timing.link_bytes else []
            after += times.constants_facts(timing)
    after += bits_table.presets_facts(record)
    decode = decoding(record)
    if decode is not None:
        after.append(("decode", cells(decode, style="warn")))
    after += _notes(record)
    advice = advise(record, trial)
    if advice is not None:
        tries = (Cell(f"try: {advice.command}", "good", whole=True),) if advice.command else ()
        after.append(("advice", (Cell(advice.text, "good"), *tries)))
    if not is_full:
        explained = [] if advice is None else [f"{help_on(advice.name)}: this advice"]
        after.append(("more", cells("; ".join([_MORE, *explained, _WORDS]), style="dim")))
    return (*blocks, Facts(tuple(after)))


def verdict(record: RunRecord) -> Cell:
    """Return a run in one line: its limit, its distance from the roof, its error, and its time with the uncertainty."""
    timing, numerics = record.timing, record.numerics
    is_finite, rmse = numerics is None or numerics.is_finite, None if numerics is None else numerics.rmse
    is_unlike = rmse is not None and UNLIKE <= rmse < inf
    parts = []
    if timing is not None:
        parts += [times.limit_words(record, timing), *times.lost_words(record, timing)]
        if timing.roofline is not None:
            parts.append(f"{timing.roofline.reached * 100:.0f} % of the roofline")
    if not is_finite:
        parts.append("output not finite")
    elif numerics is not None and rmse is not None and rmse < inf:  # an error relative to 0 is infinite
        error = f"error {rmse:.1e}"
        parts.append(
            f"THE OUTPUT DOES NOT MATCH {numerics.against}: relative {error}; an output of zeros would have 1"
            if is_unlike
            else error
        )
    if timing is not None:
        parts.append(times.sure_words(timing))
    return Cell(", ".join(parts) or "no time and no bits", "bad" if is_unlike or not is_finite else "title")


def _inputs(record: RunRecord, *, is_full: bool) -> Iterator[Fact]:
    device = record.device
    yield "problem", cells(asked_text(record))
    if record.ignored:
        yield "ignored", cells(", ".join(record.ignored), style="warn")
    if is_full:
        parts = "devices" if record.timing is not None and record.timing.overlap is not None else "core groups"
        clock = f"{device.clock_hz / 1e9:.2f} GHz"
        yield "device", cells(f"{device.group_count} {parts} at {clock}, file digest {device.digest}")
    yield "tiling", cells(tiling_text(record.tiling))


def _notes(record: RunRecord) -> Iterator[Fact]:
    """Yield the run's notes, without notes that the line on arithmetic covers."""
    stated = () if record.numerics is None else (*record.numerics.arithmetic, "order of row sums")
    notes = [note for note in record.notes if not any(name in note for name in stated)]
    if notes:
        yield "notes", cells(*notes, style="warn")


# ---------------------------------------------------------------- the page


def run_tiles(record: RunRecord) -> tuple[FigureTile, ...]:
    """Return the figures that readers need first."""
    time = () if record.timing is None else _time_tiles(record, record.timing)
    return (*time, *(() if record.numerics is None else _bits_tiles(record.numerics)))


def _time_tiles(record: RunRecord, timing: TimingRecord) -> Iterator[FigureTile]:
    band = f"within {percent(timing.band)} of exact" if timing.band else f"{timing.method}, exact"
    yield FigureTile(
        "Latency", format_duration(timing.latency_s), f"cores {format_duration(timing.core_us * 1e-6)}; {band}"
    )
    if (validated := timing.validated) is not None:
        value = validated.missing if validated.band is None else f"within {percent(validated.band)}"
        note = validated.text(record.called, record.device.name).removeprefix(f"{value}: ")
        yield FigureTile("Validated", value, note)
    if timing.flops and timing.latency_us:
        at = timing.roofline
        reached = "" if at is None else f"{percent(at.reached)} of the roofline"
        yield FigureTile("Throughput", f"{timing.flops / timing.latency_us / 1e6:,.1f} TFLOP/s", reached)
    busiest = timing.busiest
    if busiest is not None:
        yield FigureTile("Busiest pipe", busiest.pipe, f"busy {percent(timing.busy_share(busiest))} of the cores' time")


def _bits_tiles(numerics: NumericRecord) -> Iterator[FigureTile]:
    rmse = "not finite" if numerics.rmse is None else bits_table.scientific(numerics.rmse)
    is_bad = numerics.rmse is None or numerics.rmse >= UNLIKE
    yield FigureTile("Relative RMSE", rmse, f"against {numerics.against} on {numerics.sample}", is_bad)
    overflow, nan = sum(numerics.overflow_counts.values()), sum(numerics.nan_counts.values())
    value = f"{whole(overflow)}, {whole(nan)}"
    yield FigureTile("Overflow, NaN", value, "intermediate values", bool(overflow or nan))


def run_figures(record: RunRecord, drawn: dict[str, Any] | None, prefix: str = "") -> Iterator[Figure]:
    """Yield the figures of a run; ``drawn`` is the content of ``figures.json``, ``prefix`` precedes keys."""
    yield from (replace(figure, key=f"{prefix}{figure.key}") for figure in _figures(record, drawn or {}))


def _figures(record: RunRecord, drawn: dict[str, Any]) -> Iterator[Figure]:
    timing = record.timing
    if timing is not None and timing.cycles:
        yield from times.time_figures(record, timing, drawn)
    # Global memory is not a buffer; the share of it that is in use means nothing.
    buffers = [m for m in drawn.get("memories", ()) if m["name"] != "gm"]
    if buffers:
        yield times.memories_figure(buffers)
    if drawn.get("rows"):
        yield bits_table.errors_figure(record, drawn)
    if timing is not None and timing.constants:
        yield times.constants_figure(timing)
    yield from program_figures(drawn.get("program", ()))
