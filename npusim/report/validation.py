"""Validation reports as tables and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Facts, Grid, Heading, Style, cells, percent, whole
from npusim.validate.bits import BitsReport
from npusim.validate.times import median_error

if TYPE_CHECKING:
    from npusim.config.cases import Interval
    from npusim.formats.vectors import VectorReport
    from npusim.validate.times import Residual, TimesReport

SCHEMA_VERSION = 1


def validation_document(report: TimesReport | BitsReport) -> dict[str, object]:
    """Return the report as JSON: cases and summary, or vectors and kernels."""
    if isinstance(report, BitsReport):
        document: dict[str, object] = {"schema_version": SCHEMA_VERSION}
        document |= {"vectors": _counts(report.vectors)} if report.vectors else {}
        document |= {"kernels": _counts(report.kernels)} if report.kernels else {}
        return document
    return {
        "schema_version": SCHEMA_VERSION,
        "cases": [
            {
                "name": r.name,
                "group": r.group,
                "quantity": r.quantity,
                "measured": _measured(r.measured),
                "predicted": r.predicted,
                "relative_error": r.relative_error,
                "timing": r.timing,
                "host_decides": r.is_floor,
                "fitted": r.is_fitted,
            }
            for r in report.residuals
        ],
        "summary": {
            "median_abs_error": report.median_abs_error,
            "worst_abs_error": report.worst_abs_error,
            "untouched_abs_error": report.untouched_abs_error,
            "within_band": report.within_band,
            "left_out": report.left_out,
            "not_predicted": list(report.faults),
            "groups": {name: {"kendall_tau": g.kendall_tau, "regret": g.regret} for name, g in report.groups.items()},
        },
    }


def _counts(found: dict[str, VectorReport]) -> dict[str, dict[str, object]]:
    return {
        name: {"matched": r.matched, "total": r.total}
        | ({"first_mismatch": r.first_mismatch} if r.first_mismatch else {})
        for name, r in sorted(found.items())
    }


def _measured(interval: Interval) -> float | list[float]:
    return interval.low if interval.low == interval.high else [interval.low, interval.high]


def validation_table(report: TimesReport | BitsReport) -> tuple[Block, ...]:
    """Return the report as people read it."""
    return _bits_table(report) if isinstance(report, BitsReport) else _times_table(report)


def _bits_table(report: BitsReport) -> tuple[Block, ...]:
    rows = []
    for name, r in sorted({**report.vectors, **report.kernels}.items()):
        style: Style = "good" if r.matched == r.total else "bad"
        rows.append((Cell(name), Cell(whole(r.matched), style), Cell(whole(r.total)), Cell(r.first_mismatch or "")))
    verdict = Cell(
        f"{whole(report.matched)} of {whole(report.total)} outputs equal", "good" if report.is_passed else "bad"
    )
    facts: list[tuple[str, tuple[Cell, ...]]] = [("bits", (verdict,))]
    if report.left_out:
        facts.append(("left out", cells(f"{report.left_out} by --only")))
    return (
        Heading("bits, predicted against recorded"),
        Grid(("name", "matched", "total", "first that differs"), "<>><", tuple(rows)),
        Facts(tuple(facts)),
    )


def _times_table(report: TimesReport) -> tuple[Block, ...]:
    summary = [("error", cells(f"median {percent(report.median_abs_error)}, worst {percent(report.worst_abs_error)}"))]
    if report.within_band is not None:
        summary.append(("in band", cells(f"{percent(report.within_band)} of the quantities with a band")))
    if report.fitted:
        others, own = len(report.counted) - len(report.fitted), percent(median_error(report.fitted))
        text = f"{others} of {len(report.counted)}, median {percent(report.untouched_abs_error)}; of fitted ones {own}"
        summary.append(("in no fit", cells(text)))
    floors = [r.name for r in report.residuals if r.is_floor]
    if floors:
        text = f"{len(floors)} of {len(report.residuals)} in no figure here: {', '.join(floors)}"
        summary.append(("host decides", cells(text)))
    if report.left_out:
        summary.append(("left out", cells(f"{report.left_out} cases by --only")))
    hints = [f"{r.name}: {r.unit_hint}" for r in report.residuals if r.unit_hint]
    if hints:
        summary.append(("units", tuple(Cell(hint, "warn") for hint in hints)))
    if report.faults:
        summary.append(("not predicted", (Cell(f"{len(report.faults)} cases", "bad"),)))
    for name, g in report.groups.items():
        summary.append((name, cells(f"Kendall tau {g.kendall_tau:.2f}, regret {percent(g.regret)}")))
    return (
        Heading("times, predicted against measured", report.source),
        Grid(
            ("case", "quantity", "measured", "predicted", "error", "method"),
            "<<>>><",
            tuple(_time_row(r, report) for r in report.residuals),
        ),
        Facts(tuple(summary)),
    )


def _time_row(residual: Residual, report: TimesReport) -> tuple[Cell, ...]:
    low, high = residual.measured
    measured = f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"
    style: Style = "" if residual.is_inside is None else ("good" if residual.is_inside else "bad")
    kind = f"{residual.quantity} ({residual.timing})" if residual.quantity == "latency_us" else residual.quantity
    return (
        Cell(residual.name),
        Cell(kind),
        Cell(measured),
        Cell(f"{residual.predicted:.4g}"),
        Cell(f"{residual.relative_error * 100:+.1f} %", style),
        Cell("the host decides" if residual.is_floor else report.methods.get(residual.name, "")),
    )
