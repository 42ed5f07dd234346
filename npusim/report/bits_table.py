"""A run's bits: in the terminal's table and in the figures of its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npusim.report import charts
from npusim.report.charts import Figure
from npusim.report.text import Cell, Column, Columns, Fact, cells, percent, whole
from npusim.units import format_duration

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import ErrorSummary, NumericEvent, NumericRecord
    from npusim.report.result_json import RunRecord
    from npusim.simulation.run_result import Spread

#: The effect of an arithmetic of TF32 factors on float32.
_TRUNCATED = "; float32 without its low 13 bits"
#: Largest distance in ULP that is printed: the number of values of a 16-bit format.  A larger distance of a float32
#: output occurs only next to values so near 0 that the count has no meaning.
COMPARABLE_ULP = 1 << 16
#: Ranges of a diagnosis by their subject; their keys end in ``_min`` and ``_max``.
_RANGES = (("K", "key"), ("K'", "shifted_key"), ("Q K^T", "raw_score"), ("in the accumulator", "score"))

ERRORS = Columns(
    Column("head", "head"),
    Column("rows", lambda r: f"{r['first_row']}..{r['last_row']}"),
    Column("relative error", lambda r: "not finite" if r["error"] is None else scientific(r["error"])),
    Column("rows not finite", "nonfinite_rows", whole),
    Column("overflows", "overflows", whole),
)


def scientific(value: float | None) -> str:
    """Return an error as text: ``1.23e-04``; ``-`` for a missing value, and for a change relative to 0."""
    return "-" if value is None or math.isinf(value) else f"{value:.2e}"


# ---------------------------------------------------------------- the terminal's table


def bits_facts(record: RunRecord, *, is_full: bool = False) -> Iterator[Fact]:
    """Yield errors, events, a diagnosis and the evidence for the arithmetic; with ``is_full`` all other arithmetics."""
    bits = record.numerics
    if bits is None:
        yield "numerics", cells("not computed")
        return
    results = bits.others or {}
    overflow, nan = sum(bits.overflow_counts.values()), sum(bits.nan_counts.values())
    is_bad = overflow or nan or not bits.is_finite
    events = f"overflow {whole(overflow)}   NaN {whole(nan)}"
    yield (
        "numerics",
        (
            Cell(f"{_error(bits)}   {events}", "bad" if is_bad else ""),
            *(Cell(f"{n}: {_of_other(x)}", "bad" if x and not x.is_finite else "") for n, x in results.items()),
            *cells(*(f"first {event}{_why(event, bits)}" for event in bits.first_events), style="bad"),
            *_finite(record, bits),
            Cell(f"against {bits.against} on {bits.sample}"),
            *cells(
                *(
                    f"{n} selects its first choice {of}; the time includes all choices, or the shares of the precision"
                    for n, of in (bits.choices or {}).items()
                )
            ),
        ),
    )
    if record.orders:
        yield "same sums", cells(*map(_spread, record.orders))
    if bits.diagnosis is not None:
        yield "diagnosis", cells(*_diagnosis_lines(bits.diagnosis.figures()))
    used = bits.arithmetic | {f"row sums in {order}": basis for order, basis in (bits.row_sums or {}).items()}
    if used:
        units = ", ".join(f"{name} ({evidence}{_TRUNCATED * ('.tf32.' in name)})" for name, evidence in used.items())
        stated = Cell(units, "warn" if "assumed" in used.values() else "")
        if is_full:
            others = [*map(_spread, record.spread), *([_compared(record).strip()] if record.spread else [])]
            yield "arithmetic", (stated, *cells(*filter(None, others)))
        else:
            reach = _reach(record.spread)
            yield "arithmetic", (replace(stated, text=f"{units}{reach}{reach and _compared(record)}"),)


def _why(event: NumericEvent, bits: NumericRecord) -> str:
    """Return why a row has a NaN, if its scores or their maximum are all -Inf."""
    if event.cause != "-inf - -inf":
        return ""
    why = "no score of the row is finite up to this tile"
    if bits.overflow_counts:
        return f"; {why}"
    return f"; {why}, because the mask hides all of them; a kernel in the paper's form may use finite_starts=True"


def presets_facts(record: RunRecord) -> Iterator[Fact]:
    """Yield the results of the schedule's other presets: the time, and the error on the same rows relative to the run's
    error.
    """
    rows, of_run = [], next((p.relative_rmse for p in record.presets if p.precision == record.precision), None)
    for p in record.presets:
        if of_run and p.precision == record.precision:
            continue
        error = "not finite" if p.relative_rmse is None else f"relative RMSE {p.relative_rmse:.1e}"
        if of_run and p.relative_rmse is not None:
            ratio = p.relative_rmse / of_run
            error = f"{ratio:.2f}{_plus_minus(ratio, p.standard_error)} of {record.precision}'s error"
        time = "" if p.latency_us is None else f" {format_duration(p.latency_us * 1e-6)},"
        rows.append(f"{p.precision}{time} {error}")
    if rows:
        yield "presets", cells(f"{'; '.join(rows)}{_compared(record)}")


def _plus_minus(value: float, relative: float) -> str:
    """Return the standard error of a figure with two decimals, from the relative standard error; empty if it is below
    half a unit.
    """
    return f" \N{PLUS-MINUS SIGN} {value * relative:.2f}" if value * relative >= 0.005 else ""


def _compared(record: RunRecord) -> str:
    return f" (of {record.compared})" if record.compared else ""


def _diagnosis_lines(figures: Mapping[str, float]) -> Iterator[str]:
    """Yield one line each on ranges, resonance, underflow, and saturation."""
    ranges = [
        f"{name} [{figures[f'{key}_min']:,.4g}, {figures[f'{key}_max']:,.4g}]"
        for name, key in _RANGES
        if f"{key}_min" in figures
    ]
    yield f"ranges: {', '.join(ranges)}"
    yield (
        f"resonance: Q against K {figures['resonance_phase_degrees']:.0f} degrees at frequency "
        f"{figures['resonance_frequency']:.0f}, {figures['resonance_share_percent']:.0f} % of the mean "
        f"score; mean cosine {figures['resonance_cosine']:.3f}"
    )
    yield (
        f"NaN rows {figures['nan_row_percent']:.3g} %; sinks have {figures['sink_mass_percent']:.3g} % of the weights"
    )
    if "underflow_percent" in figures:
        yield (
            f"P underflow: {figures['underflow_percent']:.3g} % of pairs, mass lost "
            f"{figures['zeroed_mass_percent']:.3g} % (P-Cast's product formula: "
            f"{figures['product_mass_percent']:.3g} %); cut to the largest value: "
            f"{figures['saturated_count']:,.0f}"
        )


def ulp_words(ulp: int) -> str:
    """Return a distance in ULP; ``not comparable`` beyond `COMPARABLE_ULP`."""
    return whole(ulp) if ulp <= COMPARABLE_ULP else "not comparable"


def _of_other(error: ErrorSummary | None) -> str:
    """Return the errors of a result other than the output."""
    return (
        "no error: the run computes no part of this output (use --rows all), or other kernels add to it"
        if error is None
        else _error(error)
    )


def _error(bits: ErrorSummary) -> str:
    """Return the errors, or the numbers of NaN and Inf if the output has any."""
    if not bits.is_finite:
        return (
            f"not finite: {whole(bits.nan_count)} NaN in the output "
            f"({percent(bits.nan_row_fraction)} of rows), {whole(bits.inf_count)} Inf"
        )
    ulp = "-" if bits.max_ulp is None else ulp_words(bits.max_ulp)
    exact = "" if bits.rmse is None or bits.rmse < math.inf else " (the exact result is 0)"
    return (
        f"relative RMSE {scientific(bits.rmse)}{exact}   max |error| {scientific(bits.max_abs_error)}   max ULP {ulp}"
    )


def _finite(record: RunRecord, bits: NumericRecord) -> tuple[Cell, ...]:
    """Return the choices that are finite on the same sample if the output is not."""
    is_node = record.timing is not None and record.timing.overlap is not None
    if is_node or bits.is_finite:
        return ()  # the presets of a node are formats of sums, so no other preset was tried
    choices = [f"{f.schedule} with precision {f.precision} (relative RMSE {f.rmse:.2e})" for f in record.finite]
    if choices:
        return cells(f"finite outputs on the same sample: {', '.join(choices)}", style="good")
    return cells("no schedule and preset on this device gives finite outputs on the same sample", style="bad")


def _spread(spread: Spread) -> str:
    if spread.differing is None:
        return f"with {spread.arithmetic}: outputs are not finite"
    if not spread.differing:
        return f"with {spread.arithmetic} the same bits"
    share, rmse = percent(spread.differing), scientific(spread.rmse)
    return f"with {spread.arithmetic} {share} of outputs differ, relative RMSE {rmse}"


def _reach(spreads: Sequence[Spread]) -> str:
    """Return the effect of the other arithmetics on the outputs in a few words."""
    if any(s.differing is None for s in spreads):
        return "; with another, outputs are not finite"
    most = max((s for s in spreads if s.differing), key=lambda s: s.rmse or 0.0, default=None)
    if most is None or not most.rmse:
        return ""
    error = f" \N{PLUS-MINUS SIGN} {most.standard_error * 100:.0f} %" if most.standard_error >= 0.005 else ""
    return f"; another moves the outputs by up to {most.rmse:.1e}{error}"


# ---------------------------------------------------------------- the page's figures


def errors_figure(record: RunRecord, drawn: dict[str, Any]) -> Figure:
    """Return the errors of the computed rows, and the places of overflow."""
    rows = drawn["rows"]
    broken, overflowed = sum(r["nonfinite_rows"] for r in rows), sum(r["overflows"] for r in rows)
    finite = [r for r in rows if r["error"] is not None]
    text = f"{whole(broken)} rows are not finite (red), {whole(overflowed)} intermediate values overflowed (crosses). "
    if finite:
        worst = max(finite, key=lambda r: r["error"])
        rows_of = f"rows {worst['first_row']} to {worst['last_row']}"
        text += f"Worst where finite: head {worst['head']}, {rows_of}, {worst['error']:.2e}."
    sample = "" if record.numerics is None else f" Computed: {record.numerics.sample}."
    return Figure("errors", "Error over rows and heads", text + sample, charts.grid_of_errors(rows), ERRORS.grid(rows))
