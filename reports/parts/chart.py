"""Charts of pages as SVG text, from the specifications of `npusim.report.charts`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.report.charts import CHART_HEIGHT, altair, chart_of, finished, tooltip, tracks
from npusim.report.plot import svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.report.charts import Row

__all__ = ["Bar", "Panel", "chart", "gantt", "scatters", "svg"]

WIDTH, PANEL, TICKS = 620, 230, 8
#: A line of fewer points shows each.
DOTTED = 24


class Bar(NamedTuple):
    """One operation: its kind, its number, and its start and end in microseconds."""

    kind: str
    label: str
    start: float
    end: float


class Panel(NamedTuple):
    """Runs on one time axis: each a name with the bars of its tracks."""

    title: str
    runs: Mapping[str, Mapping[str, Sequence[Bar]]]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return a line chart as SVG text; points not finite, or not positive on a logarithm, are left out."""
    alt = altair()
    rows: list[Row] = [
        {"name": name, "x": x, "y": y}
        for name, points in lines.items()
        for x, y in points
        if math.isfinite(y) and (y > 0 or not log_y) and (x > 0 or not log_x)
    ]

    def scaled(is_log: bool) -> dict[str, Any]:
        # Labels stay under their ticks: one moved inwards at an end stands next to its neighbour.
        axis = alt.Axis(format="~r", tickCount=TICKS, labelFlush=False, labelOverlap="greedy", labelSeparation=8)
        return {"scale": alt.Scale(type="log") if is_log else alt.Scale(zero=True), "axis": axis}

    names = list(lines)
    drawn = (
        chart_of("points")
        .mark_line(point=max(map(len, lines.values())) < DOTTED, strokeWidth=2)
        .encode(
            x=alt.X("x", type="quantitative", title=x_label, **scaled(log_x)),
            y=alt.Y("y", type="quantitative", title=y_label, **scaled(log_y)),
            color=alt.Color(
                "name",
                type="nominal",
                title=None,
                sort=names,
                scale=alt.Scale(range="category"),
                legend=alt.Legend(orient="top", labelLimit=320) if len(lines) > 1 else None,
            ),
            strokeDash=alt.StrokeDash("name", type="nominal", sort=names, legend=None),
            tooltip=tooltip(name="line", x=f"{x_label}|number", y=f"{y_label}|number"),
        )
    )
    return svg(finished(drawn.properties(title=title), CHART_HEIGHT, points=rows), WIDTH)


def gantt(title: str, panels: Sequence[Panel], kinds: Sequence[str]) -> str:
    """Return the panels below one another as SVG text, each with its own time axis from 0, a colour a kind."""
    charts, rows = [], {}
    for number, panel in enumerate(panels):
        slices: list[Row] = [
            {
                "track": f"{run}: {track}",
                "name": bar.label,
                "kind": "operation",
                "start_us": bar.start,
                "end_us": bar.end,
                "tile": list(kinds).index(bar.kind),
            }
            for run, found in panel.runs.items()
            for track, bars in found.items()
            for bar in bars
        ]
        spec = tracks(slices, 0, max(s["end_us"] for s in slices), str(WIDTH))
        rows[f"panel{number}"] = spec.pop("datasets")["slices"]
        named = json.dumps(spec).replace('"name": "slices"', f'"name": "panel{number}"')
        charts.append({**json.loads(named), "title": panel.title, "width": WIDTH})
    return svg({"title": title, "vconcat": charts, "datasets": rows, "spacing": 24})


def scatters(title: str, panels: Mapping[str, Sequence[Row]], x_title: str, y_title: str, columns: int) -> str:
    """Return panels of points as SVG text, each with its own logarithmic axes and the line where both are equal.

    Rows have ``name``, ``x``, ``y`` and ``kind``, which colours them; dashed lines are 20 % above and below.
    """
    alt = altair()
    kinds = sorted({row["kind"] for rows in panels.values() for row in rows})
    charts, data = list[Any](), dict[str, Any]()
    for number, (name, rows) in enumerate(panels.items()):
        ends = [end for row in rows for end in (row["x"], row["y"])]
        low, high = min(ends) / 1.2, max(ends) * 1.2
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        axis = alt.Axis(format="~s", labelOverlap="greedy", labelSeparation=8, grid=False)
        diagonal = [{"x": at, "low": at / 1.2, "y": at, "high": at * 1.2} for at in (low * 1.2, high / 1.2)]
        data |= {f"points{number}": list(rows), f"diagonal{number}": diagonal}
        x = alt.X("x", type="quantitative", title=x_title, scale=scale, axis=axis)
        lines_ = [
            chart_of(f"diagonal{number}")
            .mark_line(style="quiet", strokeWidth=1, strokeDash=[1, 0] if y == "y" else [3, 3], clip=True)
            .encode(x=x, y=alt.Y(y, type="quantitative", title=y_title, scale=scale, axis=axis))
            for y in ("y", "low", "high")
        ]
        points = (
            chart_of(f"points{number}")
            .mark_point(size=28, filled=True, opacity=0.75)
            .encode(
                x=x,
                y=alt.Y("y", type="quantitative", title=y_title, scale=scale, axis=axis),
                color=alt.Color(
                    "kind",
                    type="nominal",
                    title=None,
                    sort=kinds,
                    scale=alt.Scale(domain=kinds, range="category"),
                    legend=alt.Legend(orient="top") if len(kinds) > 1 else None,
                ),
            )
        )
        spec = alt.layer(*lines_, points).properties(title=name, width=PANEL, height=PANEL).to_dict(validate=False)
        charts.append(spec)
    rows_ = [{"hconcat": charts[i : i + columns], "spacing": 24} for i in range(0, len(charts), columns)]
    return svg({"title": title, "vconcat": rows_, "datasets": data, "spacing": 24})
