"""Answers to questions about runs, as tables and as JSON.

The constants that affect the time (``npusim run --sensitivity``), the changes that affect the bits (``invariant``), the
choice that explains a kernel's output (``diff``), the errors of predictions against measurements (``validate``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report.charts import ROW_HEIGHT, Figure, PagePart, altair, chart_of, finished, tooltip
from npusim.report.text import (
    Block,
    Cell,
    Column,
    Columns,
    Fact,
    Facts,
    Heading,
    Style,
    cells,
    document,
    help_on,
    keyed,
    percent,
    whole,
)
from npusim.simulation.request import short_name
from npusim.studies.validate.given_output import BLANK
from npusim.studies.validate.measured_times import Residual, TimesReport, median_error
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.config.cases import Interval
    from npusim.simulation.sensitivity import Sensitivity
    from npusim.studies.invariance import Finding, Invariance
    from npusim.studies.invariance.examination import BitDifference
    from npusim.studies.validate.calibrate import Calibration
    from npusim.studies.validate.diff import Difference, Explanation
    from npusim.studies.validate.kernels import BitsReport

SCHEMA_VERSION = 1

#: Number of explanations of a difference that are shown; JSON has all.
SHOWN = 5


# ---------------------------------------------------------------- dependence of the time


def _change(share: float) -> str:
    return f"{share * 100:+.1f} %"


SENSITIVITY = Columns(
    Column("constant", "key", key="key"),
    Column("value", "value", "g", ">", key="value"),
    Column("basis", "basis", key="basis"),
    Column("-20 %", "lower", _change, ">", key="minus_20_percent"),
    Column("+20 %", "higher", _change, ">", key="plus_20_percent"),
    spare=("value", "basis"),
)
#: Smallest relative change of the latency that the terminal shows; JSON also has smaller changes.
SHOWN_CHANGE = 0.0005


def sensitivity_table(constants: Sequence[Sensitivity]) -> tuple[Block, ...]:
    """Return one line for each constant that changes the latency by `SHOWN_CHANGE` or more, and the number of other
    constants.
    """
    shown = [s for s in constants if max(abs(s.lower), abs(s.higher)) >= SHOWN_CHANGE]
    left_out = len(constants) - len(shown)
    text = f"{left_out} more {plural(left_out, 'constant')} in --json, each with a change below {SHOWN_CHANGE:.2%}"
    rest = Facts((("latency", cells(text.replace("%", " %"), style="dim")),))
    return (*([SENSITIVITY.grid(shown)] if shown else ()), *([rest] if left_out else ()))


def sensitivity_document(constants: Iterable[Sensitivity]) -> list[dict[str, object]]:
    """Return one entry for each constant, the strongest first."""
    return SENSITIVITY.records(constants)


# ---------------------------------------------------------------- changes of bits

VERDICTS: Mapping[str, tuple[str, Style]] = MappingProxyType(
    {
        "cannot": ("no: same structure", "good"),
        "same class": ("no, for finite inputs: same class", "good"),
        "not seen": ("not on these inputs", "warn"),
        "changes": ("yes", "bad"),
        "none": ("-", "dim"),
    }
)


def _tried_words(f: Finding) -> str:
    """Return the tried calls; calls that differ only in a number are one entry: ``page=16, 64, 256``."""
    alike: dict[str, list[str]] = {}
    for t in f.tried:
        if not t.reason:
            name, equals, value = t.what.partition("=")
            alike.setdefault(f"{name}{equals}", []).append(value)
    return "; ".join(f"{name}{', '.join(values)}" for name, values in alike.items())


def _finite(name: str) -> Callable[[BitDifference], float | None]:
    """Return a function that reads a value in the form of JSON, which has no NaN."""

    def value(difference: BitDifference) -> float | None:
        number: float = getattr(difference, name)
        return number if isfinite(number) else None

    return value


#: The first element that differs, and a varied call: a table shows the calls in one cell, and the differences in words
#: below the grid.
DIFFERENCE = Columns(
    *keyed("element"), Column(None, _finite("value"), key="value"), Column(None, _finite("other"), key="other")
)
TRIED = Columns(
    *keyed("what"),
    Column(None, "is_same_structure", key="same_structure"),
    Column(None, "is_same_class", key="same_class"),
    *keyed("latency_us"),
    Column(None, lambda t: t.reason or None, key="reason"),
    Column(None, lambda t: None if t.difference is None else DIFFERENCE.record(t.difference), key="difference"),
    Column(None, lambda t: t.parted or None, key="parted"),
)
#: Aspects that are fields of the kernel, not of the call.
OWN = ("splits", "rule", "merge", "tile")
ASPECTS = Columns(
    Column("vary", "aspect", style="label"),
    Column(
        "changes bits",
        lambda f: VERDICTS[f.verdict][0],
        style=lambda f: VERDICTS[f.verdict][1],
        key="verdict",
        json=lambda f: f.verdict,
    ),
    Column("tried", _tried_words),
    Column("ruled out by", "guarantee", key="guarantee", json=lambda f: f.guarantee or None),
    Column(
        "costs us",
        lambda f: "" if f.cost_us is None else f"{f.cost_us:+,.2f}",
        align=">",
        key="cost_us",
        json=lambda f: f.cost_us,
    ),
    Column("", "cost_at", key="cost_at", json=lambda f: f.cost_at or None),
    Column(None, lambda f: TRIED.records(f.tried), key="tried"),
)


def invariance_table(invariance: Invariance) -> tuple[Block, ...]:
    """Return the table that ``npusim invariant`` prints, followed by a description of each difference."""
    base, findings = invariance.base, invariance.findings
    time = "" if base.timing is None else f", {base.latency_us:,.2f} us"
    heads = "head 0" if invariance.heads == 1 else f"heads 0 to {invariance.heads - 1}"
    details = [(f.aspect, tuple(_details(f))) for f in findings if f.first or any(t.reason for t in f.tried)]
    none = [f.aspect for f in findings if f.verdict == "none"]
    compared = ("bits of", cells(f"{_ordinal(invariance)} sequence, {heads}, from row {invariance.row}"))
    unvaried = [("no choice", cells(", ".join(none), style="dim"))] if none else []
    return (
        Heading(f"{base.name} on {base.device.name}", f"precision {base.precision}{time}"),
        Facts((("verdict", tuple(_verdict(findings)) or cells("no aspect of this call varies")), compared, *unvaried)),
        ASPECTS.grid(f for f in findings if f.verdict != "none"),
        Facts((*details, ("more", cells(help_on(*dict.fromkeys(f.verdict for f in findings)), style="dim")))),
    )


def _verdict(findings: Sequence[Finding]) -> Iterator[Cell]:
    """Yield the aspects that change bits, with the fields that prevent it and their cost; then all others, one line
    each.

    Fields of the kernel itself (`OWN`) come last: naming such a field is the only way to fix these bits.
    """
    names: dict[str, list[str]] = {
        verdict: [f.aspect for f in findings if f.verdict == verdict] for verdict in VERDICTS
    }
    calls = [f for f in findings if f.verdict == "changes" and f.aspect not in OWN]
    for cure, cured in _by_cure(calls):
        words = f"-t {','.join(cure.split())} makes it invariant" if cure else "no tested field makes it invariant"
        about = (
            "name the fields that npusim chose for this call"
            if cured == [f for f in calls if f.aspect == "choice"]
            else ""
        )
        aspects = _or([*(f"{f.aspect}-" for f in cured[:-1]), f"{cured[-1].aspect}-invariant"])
        yield Cell(f"not {aspects}; {about or words}{_price(cured)}", "warn")
    if names["cannot"]:
        yield Cell(f"invariant, by structure: {', '.join(names['cannot'])}", "good")
    if names["same class"]:
        yield Cell(f"invariant for finite inputs, of one class of bits: {', '.join(names['same class'])}", "good")
    for cure, seen in _by_cure([f for f in findings if f.verdict == "not seen"]):
        words = f"; with -t {cure} the order of sums is fixed{_price(seen)}" if cure else ""
        yield Cell(f"the same bits on these inputs, not proved: {', '.join(f.aspect for f in seen)}{words}")
    if of_kernel := [name for name in names["changes"] if name in OWN]:
        yield Cell(f"{_or(of_kernel)} changes the bits", "dim")


def _by_cure(findings: Sequence[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    for cure in dict.fromkeys(f.guarantee for f in findings):
        yield cure, [f for f in findings if f.guarantee == cure]


def _price(findings: Sequence[Finding]) -> str:
    cost = max((f.cost_us for f in findings if f.cost_us is not None), default=None)
    return "" if cost is None else f", {cost:+,.2f} us"


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _ordinal(invariance: Invariance) -> str:
    keys = getattr(invariance.base.problem, "lengths", ())
    return f"the longest ({invariance.sequence}, {keys[invariance.sequence]} keys)" if keys else "the first"


def _details(f: Finding) -> Iterator[Cell]:
    if f.first:
        bits = f"{f.first.difference}, first at"
        if not f.first.difference:
            bits = "the same output bits, but intermediate values differ from"
        yield Cell(f"{f.first.what}: {bits} {f.first.parted or 'no step that both have'}")
    yield from cells(*(f"{t.what}: {t.reason}" for t in f.tried if t.reason), style="dim")


def invariance_document(invariance: Invariance, required: Collection[str] = ()) -> dict[str, object]:
    """Return the findings as JSON data."""
    base = invariance.base
    aspects = [f.aspect for f in invariance.findings]
    return document(
        "invariant",
        name=base.name,
        schedule=base.schedule,
        device=base.device.name,
        precision=base.precision,
        latency_us=None if base.timing is None else base.latency_us,
        row=invariance.row,
        heads=invariance.heads,
        aspects=dict(zip(aspects, ASPECTS.records(invariance.findings), strict=True)),
        required={name: invariance.holds(name) for name in required},
    )


# ---------------------------------------------------------------- a kernel's output against predicted bits


def difference_table(output: Path, difference: Difference) -> tuple[Block, ...]:
    """Return the table that ``npusim diff`` prints."""
    run = difference.run
    heading = Heading(f"{output} against {run.name} on {run.device.name}", run.precision)
    return (heading, Facts(tuple(_difference_facts(difference))))


def _difference_facts(d: Difference) -> Iterator[Fact]:
    style: Style = "good" if d.matched == d.total else "warn" if d.explained else "bad"
    if d.blank:
        yield "NaN", cells(f"{d.blank}; {BLANK}", style="bad")
    if d.reading:
        yield "inputs", cells(d.reading, style="warn")
    if d.tile:
        yield "tile", cells(d.tile)
    yield "equal", cells(f"{d.matched:,} of {d.total:,} outputs, {percent(d.matched / d.total)}", style=style)
    if d.first is not None:
        batch, head, row, column = d.first
        where = f"batch {batch} head {head} row {row} column {column}"
        yield "first", cells(f"{where}: {d.given:.9g} given, {d.predicted:.9g} predicted")
    if d.explained:
        lines = [cell for one in d.explained[:SHOWN] for cell in (Cell(str(one), "good"), *_step(one))]
        if more := len(d.explained[SHOWN:]):
            lines.append(Cell(f"and {more} more, equal on these inputs", "dim"))
        yield "explained by", tuple(lines)
    elif d.problem is not None:
        yield "another problem", cells(str(d.problem), style="bad")
    if d.blank or d.problem is not None or d.first is None:
        return
    if d.nearest is not None:
        near = d.nearest
        yield "nearest", (Cell(f"{near}: {near.matched:,} of {near.of:,} equal"), *_step(near))
    elif not d.explained:
        yield (
            "nearest",
            cells("no explanation: no change of a choice makes half of the differing outputs equal", style="bad"),
        )
    yield "tried", cells(f"{d.tried} changes to the choices of {short_name(d.run.schedule)}")


def _step(one: Explanation) -> tuple[Cell, ...]:
    return () if not one.parted else (Cell(f"first at {one.parted}", "dim"),)


def difference_document(output: Path, d: Difference) -> dict[str, object]:
    """Return the difference as JSON data."""
    return document(
        "diff",
        output=str(output),
        run=d.run.name,
        precision=d.run.precision,
        matched=d.matched,
        total=d.total,
        first=d.first,
        given=d.given if d.first else None,
        predicted=d.predicted if d.first else None,
        explained=[_explanation(one) for one in d.explained],
        nearest=None if d.nearest is None else _explanation(d.nearest),
        problem=None if d.problem is None else asdict(d.problem),
        blank=d.blank or None,
        reading=d.reading or None,
        tile=d.tile,
        tried=d.tried,
        passed=d.passed,
    )


def _explanation(one: Explanation) -> dict[str, object]:
    return {
        "changes": [asdict(c) for c in one.changes],
        "matched": one.matched,
        "of": one.of,
        "step": one.parted or None,
    }


# ---------------------------------------------------------------- predictions against measurements


def _measured(interval: Interval) -> float | list[float]:
    return interval.low if interval.low == interval.high else [interval.low, interval.high]


def _passed(is_passed: bool | None) -> Style:
    return "" if is_passed is None else "good" if is_passed else "bad"


def _range(measured: Interval) -> str:
    low, high = measured
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def _quantity(r: Residual) -> str:
    return f"latency_us ({r.timing})" if r.quantity == "latency_us" else r.quantity


def residuals(report: TimesReport) -> Columns:
    """Return the columns of the report's residuals, including the tile where npusim chose it."""
    tile = "chosen tile" if any(r.tile for r in report.residuals) else None
    return Columns(
        Column("case", "name", key="name"),
        Column(None, "group", key="group"),
        Column("quantity", _quantity, key="quantity", json=lambda r: r.quantity),
        Column("measured", "measured", _range, ">", key="measured", json=lambda r: _measured(r.measured)),
        Column("predicted", "predicted", ".4g", ">", key="predicted"),
        Column("error", "relative_error", _change, ">", lambda r: _passed(r.is_inside), key="relative_error"),
        Column(None, "timing", key="timing"),
        Column("method", lambda r: "the host decides" if r.is_floor else report.methods.get(r.name, "")),
        Column(None, "is_floor", key="host_decides"),
        Column(None, "is_fitted", key="fitted"),
        Column(tile, "tile", key="tile", json=lambda r: r.tile or None),
    )


def validation_document(report: TimesReport) -> dict[str, object]:
    """Return the report as JSON: cases and summary."""
    figures = ("median_abs_error", "worst_abs_error", "untouched_abs_error", "within_band", "left_out")
    summary = {
        **{name: getattr(report, name) for name in figures},
        "not_predicted": list(report.faults),
        "groups": {name: asdict(rank) for name, rank in report.groups.items()},
    }
    cases = residuals(report).records(report.residuals)
    return document("validate", version=SCHEMA_VERSION, cases=cases, summary=summary)


#: Recordings by name, with the number of equal outputs.
BITS = Columns(
    Column("name", 0),
    Column(
        "matched",
        lambda row: row[1].matched,
        whole,
        ">",
        lambda row: _passed(row[1].matched == row[1].total),
        key="matched",
    ),
    Column("total", lambda row: row[1].total, whole, ">", key="total"),
    Column("first that differs", lambda row: row[1].first_mismatch or ""),
)


def bits_document(report: BitsReport) -> dict[str, object]:
    """Return the comparison of recordings with predicted bits as JSON data."""
    rows = sorted(report.reports.items())
    counts = {name: record for (name, _), record in zip(rows, BITS.records(rows), strict=True)}
    return {"schema_version": SCHEMA_VERSION, report.kind: counts}


def bits_table(report: BitsReport) -> tuple[Block, ...]:
    """Return the table that compares recorded bits with predicted ones."""
    equal, total = (sum(getattr(r, n) for r in report.reports.values()) for n in ("matched", "total"))
    text = cells(f"{whole(equal)} of {whole(total)} outputs equal", style=_passed(report.is_passed))
    heading = Heading("bits, predicted against recorded", report.kind)
    left_out: list[Fact] = [("left out", cells(f"{report.left_out} by --only"))] if report.left_out else []
    return (heading, BITS.grid(sorted(report.reports.items())), Facts((("bits", text), *left_out)))


def validation_table(report: TimesReport) -> tuple[Block, ...]:
    """Return the report as a table."""
    heading = Heading("times, predicted against measured", report.source)
    return (heading, residuals(report).grid(report.residuals), Facts(tuple(_summary(report))))


def _summary(report: TimesReport) -> Iterator[Fact]:
    yield "error", cells(f"median {percent(report.median_abs_error)}, worst {percent(report.worst_abs_error)}")
    if report.within_band is not None:
        yield "in band", cells(f"{percent(report.within_band)} of the quantities with a band")
    if report.fitted:
        others, fitted = len(report.counted) - len(report.fitted), percent(median_error(report.fitted))
        text = f"{others} of {len(report.counted)}, median {percent(report.untouched_abs_error)}"
        yield "in no fit", cells(f"{text}; of fitted cases {fitted}")
    if floors := [r.name for r in report.residuals if r.is_floor]:
        text = f"{len(floors)} of {len(report.residuals)} not counted in these figures: {', '.join(floors)}"
        yield "host decides", cells(text)
    if report.left_out:
        yield "left out", cells(f"{report.left_out} cases by --only")
    if hints := [f"{r.name}: {r.unit_hint}" for r in report.residuals if r.unit_hint]:
        yield "units", cells(*hints, style="warn")
    if report.faults:
        yield "not predicted", cells(f"{report.not_predicted} cases", style="bad")
    for name, g in report.groups.items():
        yield name, cells(f"Kendall tau {g.kendall_tau:.2f}, regret {percent(g.regret)}")


#: Measured cases nearest to a run.
NEIGHBOURS = Columns(
    Column("nearest measured", "name", key="name"),
    *keyed("distance"),
    Column("differs in", "differs", key="differs"),
    Column("measured us", "measured_us", ".4g", ">", key="measured_us"),
    Column("predicted us", "predicted_us", ".4g", ">", key="predicted_us"),
    Column("error", "relative_error", _change, ">", key="relative_error"),
)


# ---------------------------------------------------------------- constants fitted to measurements

CONSTANTS = Columns(
    Column("constant", "key", key="key"),
    Column("before", "before", ".5g", ">", key="before"),
    Column("fitted", "after", ".5g", ">", key="after"),
    Column("90 % interval", lambda c: f"{c.low:.4g} .. {c.high:.4g}"),
    *keyed("low", "high"),
    Column("same factor as", "with_it", ", ".join, key="with_it"),
)
#: Errors by class of cases, before and after the calibration.
CLASSES = Columns(
    Column("cases of", "name", key="name"),
    Column("times", "cases", align=">", key="cases"),
    Column("before", "before", percent, ">", key="before"),
    Column("fitted", "fitted", percent, ">", key="fitted"),
    Column("left out", "kept_out", percent, ">", lambda c: "bad" if c.kept_out > c.before else "good", key="kept_out"),
)


def calibration_document(done: Calibration) -> dict[str, object]:
    """Return a calibration as JSON data."""
    return document(
        "calibration",
        device=done.device,
        constants=CONSTANTS.records(done.constants),
        classes=CLASSES.records(done.classes),
        total=CLASSES.record(done.total),
        cases=done.cases,
        source=done.source,
        is_whole=done.is_whole,
        helps=done.helps,
    )


def calibration_part(done: Calibration) -> PagePart:
    """Return a page's part on a calibration: errors before and after by class, as bars, and the tables."""
    ways = ("before", "fitted", "left out")
    rows = [
        {"class": c.name, "errors": way, "share": share}
        for c in (*done.classes, done.total)
        for way, share in zip(ways, (c.before, c.fitted, c.kept_out), strict=True)
    ]
    alt = altair()
    chart = chart_of("errors").mark_bar()
    chart = chart.encode(
        y=alt.Y("class:N", sort=None, title=None),
        yOffset=alt.YOffset("errors:N", sort=list(ways)),
        x=alt.X("share:Q", title="mean absolute error", axis=alt.Axis(format="%")),
        color=alt.Color("errors:N", sort=list(ways), title=None),
        tooltip=tooltip(**{"class": "cases of", "errors": "errors", "share": "mean|share"}),
    )
    spec = finished(chart, 3 * ROW_HEIGHT * (len(done.classes) + 1), errors=rows)
    text = "Left out: constants were fitted on the other groups."
    figure = Figure("errors", "Errors before and after", text, spec, CLASSES.grid((*done.classes, done.total)))
    return PagePart(f"Constants of {done.device}", f"measured: {done.source}", (), calibration_table(done), (figure,))


def calibration_table(done: Calibration) -> tuple[Block, ...]:
    """Return a calibration as a table: constants, and mean absolute errors before and after by schedule."""
    facts: list[Fact] = []
    if not done.is_whole:
        facts.append(("interrupted", cells("the search for further constants was not completed", style="warn")))
    if grown := [c.name for c in done.classes if c.kept_out > c.before]:
        facts.append(("larger errors", cells(f"{', '.join(grown)}, if left out of the fit", style="warn")))
    blocks = (
        Heading(
            f"constants of {done.device}",
            f"fitted on {len(done.cases)} {plural(len(done.cases), 'case')} of {done.source}",
        ),
        CONSTANTS.grid(done.constants),
        Heading("mean absolute errors", "left out: constants fitted on the other groups"),
        CLASSES.grid((*done.classes, done.total)),
        Facts(tuple(facts)),
    )
    return tuple(block for block in blocks if isinstance(block, Heading) or block.rows)
