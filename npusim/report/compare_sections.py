"""The figures of a comparison's page: why one run takes longer, and what it costs in bits."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report import charts
from npusim.report.compare_tables import comparison_table
from npusim.report.sections import Figure, FigureTile, PagePart
from npusim.report.text import Facts, Grid, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.charts import Row
    from npusim.report.compare import Comparison
    from npusim.report.sheet import Breakdown

#: Parts of the difference that a chart shows; the table beside it has them all.
SHOWN = 8
KINDS = MappingProxyType(
    {
        "work": "operations",
        "links": "others on shared links or pipes",
        "wait": "waits",
        "phase": "nothing to do in a phase",
        "end": "its last operation is over",
        "idle": "not busy",
        "launch": "launch",
    }
)


def comparison_part(c: Comparison) -> PagePart:
    """Return what a page says of runs side by side, before it shows each of them."""
    table = comparison_table(c)
    facts = [b for b in table if isinstance(b, Facts)]
    grids = [b for b in table if isinstance(b, Grid)]
    said = "Different problems: times are not of the same work." if c.problems else f"compared with {c.labels[0]}"
    return PagePart(" and ".join(c.labels), said, tuple(_tiles(c)), [*facts, grids[-1]], tuple(_figures(c)))


def _tiles(c: Comparison) -> Iterator[FigureTile]:
    for run, sheet in enumerate(c.sheets):
        if sheet.cycles is None:
            continue
        us = sheet.us(sheet.cycles) + sheet.launch_us
        bits = None if sheet.record is None else sheet.record.numerics
        error = "" if bits is None else f"relative RMSE {bits.rmse:.2e}" if bits.rmse is not None else "not finite"
        change = next((f.change(run) for f in c.figures if f.name == "latency us"), "") if run else ""
        yield FigureTile(sheet.label, f"{us:,.2f} us", ", ".join(filter(None, (change, error))), error == "not finite")


def _figures(c: Comparison) -> Iterator[Figure]:
    if c.latency is not None:
        yield _changes(c, c.latency)
        yield _whole(c, c.latency)
    yield from _against(c)
    yield from _busy(c)


def _changes(c: Comparison, latency: Breakdown) -> Figure:
    """Return the parts of each difference, with their sign."""
    runs = range(1, len(c.sheets))
    moved = [p for p in latency.ranked if any(latency.change_us(p, i) for i in runs)]
    rows: list[Row] = []
    for i in runs:
        rows += [
            {"part": str(p), "run": c.labels[i], "value": round(latency.change_us(p, i), 4)} for p in moved[:SHOWN]
        ]
        rest = sum(latency.change_us(p, i) for p in moved[SHOWN:])
        rows += [{"part": "all others", "run": c.labels[i], "value": round(rest, 4)}] if moved[SHOWN:] else []
    table = tuple(
        (
            str(p),
            *(f"{latency.us(p, i):,.2f}" for i in range(len(c.sheets))),
            *(f"{latency.change_us(p, i):+,.2f}" for i in runs),
        )
        for p in latency.ranked
    )
    head = ("part", *(f"{s} us" for s in c.labels), *(f"{c.labels[i]}, change us" for i in runs))
    units = ", ".join(dict.fromkeys(latency.units))
    text = f"How much longer each takes than {c.labels[0]}, by what {units} spends it on; the parts add up."
    spec = charts.changes(rows) if rows else None
    return Figure("changes", "Why the latencies differ", text, spec, head, table, is_wide=True)


def _whole(c: Comparison, latency: Breakdown) -> Figure:
    """Return each run's latency as one bar, cut by what the unit in question spends it on."""
    rows: list[Row] = []
    for i, sheet in enumerate(c.sheets):
        total = sum(latency.us(p, i) for p in latency.parts)
        rows += [
            {
                "track": sheet.label,
                "kind": KINDS[p.kind],
                "cause": str(p),
                "value": round(latency.us(p, i), 3),
                "share": latency.us(p, i) / total,
            }
            for p in sorted(latency.parts, key=lambda p: list(KINDS).index(p.kind))
            if latency.us(p, i)
        ]
    kinds = [k for k in KINDS.values() if any(r["kind"] == k for r in rows)]
    unit = ", ".join(dict.fromkeys(latency.units))
    table = tuple((r["track"], r["cause"], f"{r['value']:,.2f}", percent(r["share"])) for r in rows)
    return Figure(
        "whole",
        "What the latency is spent on",
        f"The account of {unit}, in the core group that ends last, and the launch.",
        charts.stacked_bars(rows, kinds, x_title="time, us"),
        ("run", "what", "us", "of the latency"),
        table,
    )


def _against(c: Comparison) -> Iterator[Figure]:
    """Yield latency against error, if at least two runs have both."""
    values = {f.name: f.values for f in c.figures}
    points = [
        {"name": c.labels[i], "latency_us": us, "error": error}
        for i, (us, error) in enumerate(
            zip(values.get("latency us", ()), values.get("relative RMSE", ()), strict=False)
        )
        if us is not None and error
    ]
    if len(points) >= 2:
        rows = tuple((str(p["name"]), f"{p['latency_us']:,.2f}", f"{p['error']:.2e}") for p in points)
        text = "Left is faster, down is nearer to float64. A run that is not finite has no place here."
        yield Figure(
            "front", "Latency against error", text, charts.front(points), ("run", "latency us", "relative RMSE"), rows
        )


def _busy(c: Comparison) -> Iterator[Figure]:
    """Yield how busy each pipe is in each run."""
    found = [f for f in c.figures if f.kind == "share"]
    seen: set[tuple[object, ...]] = set()
    rows: list[Row] = []
    table = []
    for f in found:
        pipe = f.name.removesuffix(" busy")
        if (pipe.rpartition(" ")[2], f.values) in seen:
            continue
        seen.add((pipe.rpartition(" ")[2], f.values))
        shares = [(label, v) for label, v in zip(c.labels, f.values, strict=True) if isinstance(v, float)]
        rows += [{"part": pipe, "run": label, "value": v} for label, v in shares]
        table.append((pipe, *("-" if not isinstance(v, float) else percent(v) for v in f.values)))
    if rows:
        spec = charts.changes(rows, x_title="share of the kernel", form=".0%")
        yield Figure(
            "busy",
            "How busy each pipe is",
            "In the core group that ends last.",
            spec,
            ("pipe", *c.labels),
            tuple(table),
        )
