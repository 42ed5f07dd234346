"""More charts: where a run lies under its roofs, what memories hold, errors row by row, magnitudes of scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from npusim.report.charts import CHART_HEIGHT, ROW_HEIGHT, altair, chart_of, finished, names_of, rows_axis, tooltip

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.report.charts import Row, Spec


# ---------------------------------------------------------------- roofs and memories


def roofline(levels: Sequence[Row], peak: float) -> Spec:
    """Return roofs and the run's place under them, both axes logarithmic.

    A level is ``name``, ``bytes_per_s``, ``intensity`` (operations a byte that crossed it) and ``attained``
    (operations a second); ``peak`` is that of the matrix units.
    """
    alt = altair()
    ridges = [peak / level["bytes_per_s"] for level in levels]
    found = [level["intensity"] for level in levels]
    low, high = min((*ridges, *found)) / 4, max((*ridges, *found)) * 4
    roofs = [
        {"name": level["name"], "x": x, "y": min(peak, x * level["bytes_per_s"]) / 1e12}
        for level, ridge in zip(levels, ridges, strict=True)
        for x in (low, ridge, high)
    ]
    marks = [
        {"name": level["name"], "x": x, "y": y / 1e12, "what": what, "label": label, "up": up}
        for level, ridge in zip(levels, ridges, strict=True)
        for x, y, what, label, up in (
            (ridge, peak, f"ridge of {level['name']}", f"{ridge:,.0f}", True),
            (level["intensity"], level["attained"], f"this run, by bytes of {level['name']}", level["name"], False),
        )
    ]
    scale = alt.Scale(type="log", nice=False)
    x = alt.X("x", type="quantitative", scale=scale, title="operations a byte", axis=alt.Axis(format="~s", tickCount=6))
    y = alt.Y("y", type="quantitative", scale=alt.Scale(type="log"), title="TFLOP/s", axis=alt.Axis(format="~g"))
    colour = alt.Color(
        "name", type="nominal", scale=alt.Scale(range="category"), legend=alt.Legend(orient="top", title="roof of")
    )
    dash = alt.StrokeDash("name", type="nominal", legend=None)
    points = chart_of("marks").encode(
        x=x, y=y, color=colour, tooltip=tooltip(what="what", x="operations a byte|number", y="TFLOP/s|number")
    )
    ups, downs = points.transform_filter("datum.up"), points.transform_filter("!datum.up")
    layers = [
        chart_of("roofs").mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        ups.mark_point(shape="triangle-down", size=50, filled=True),
        ups.mark_text(style="label", dy=-11).encode(text="label:N", color=alt.Undefined),
        downs.mark_point(shape="diamond", size=130, filled=True, style="mark"),
        downs.mark_text(style="label", dy=17).encode(text="label:N", color=alt.Undefined),
    ]
    return finished(alt.layer(*layers), CHART_HEIGHT, marks=marks, roofs=roofs)


def memory_bars(memories: Sequence[Row]) -> Spec:
    """Return shares of memories: rows ``name``, ``used_bytes`` (allocated), ``capacity_bytes``, ``held_bytes``."""
    alt = altair()
    rows = [
        {
            **m,
            "used": m["used_bytes"] / m["capacity_bytes"],
            "held": None if m["held_bytes"] is None else m["held_bytes"] / m["capacity_bytes"],
        }
        for m in memories
    ]
    names = names_of(rows, "name")
    x = alt.X(
        "used",
        type="quantitative",
        title="share of capacity",
        scale=alt.Scale(domain=[0, 1.08], nice=False),
        axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
    )
    tips = tooltip(
        name="memory",
        used="allocated|share",
        used_bytes="bytes allocated|number",
        capacity_bytes="bytes there|number",
        held="held at most|share",
    )
    base = chart_of("memories").encode(y=rows_axis(names, "name"), tooltip=tips)
    layers = [
        base.mark_bar(height={"band": 0.75}, style="quiet").encode(x=x),
        base.transform_filter("datum.held != null")
        .mark_bar(height={"band": 0.32})
        .encode(x=alt.X("held", type="quantitative")),
        base.mark_text(style="label", align="left", dx=4).encode(
            x=x, text=alt.Text("used", type="quantitative", format=".0%")
        ),
        chart_of("limit").mark_rule(style="limit").encode(x="x:Q"),
    ]
    return finished(alt.layer(*layers), ROW_HEIGHT * len(names), memories=rows, limit=[{"x": 1}])


# ---------------------------------------------------------------- bits


def grid_of_errors(rows: Sequence[Row]) -> Spec:
    """Return errors by head and rows; crosses mark overflow. Rows are those of ``figures.json``."""
    alt = altair()
    shown = [{**r, "end": r["last_row"] + 1} for r in rows]
    names = names_of(shown, "head")
    first, last = min(r["first_row"] for r in shown), max(r["end"] for r in shown)
    at = chart_of("rows").encode(
        y=rows_axis(names, "head", "head"),
        tooltip=tooltip(
            head="head",
            first_row="from row|number",
            last_row="to row|number",
            error="relative error|number",
            nonfinite_rows="rows not finite|number",
            overflows="elements overflowed|number",
        ),
    )
    x = alt.X(
        "first_row",
        type="quantitative",
        title="row of Q",
        scale=alt.Scale(domain=[first, last], nice=False, zero=False),
    )
    base = at.encode(x=x, x2="end")
    colour = alt.Color(
        "error",
        type="quantitative",
        title="relative error",
        scale=alt.Scale(type="log", range="ramp"),
        legend=alt.Legend(orient="top", format=".1e", tickCount=3),
    )
    middle = at.transform_calculate(mid="(datum.first_row + datum.end) / 2").encode(x=alt.X("mid", type="quantitative"))
    has_errors = any(r["error"] for r in shown)
    layers = [
        *(
            [base.transform_filter("datum.error > 0").mark_bar(height={"band": 0.92}).encode(color=colour)]
            if has_errors
            else ()
        ),
        base.transform_filter("datum.error === 0").mark_bar(height={"band": 0.92}, style="quiet"),
        base.transform_filter("datum.nonfinite_rows > 0").mark_bar(height={"band": 0.92}, style="broken"),
        *(
            middle.transform_filter("datum.overflows > 0").mark_text(style=style, text="×", fontSize=17)
            for style in ("halo", "cross")
        ),
    ]
    return finished(alt.layer(*layers), max(3, len(names)) * (ROW_HEIGHT - 4 if len(names) < 12 else 12), rows=shown)


def heatmap(cells: Sequence[Row], x_title: str, y_title: str) -> Spec:
    """Return values over two axes.

    Rows: ``x``, ``y`` (text, in order), ``what``, and a ``value``, or the ``bound`` below it, or neither: a cross.
    """
    alt = altair()
    columns, lines = names_of(cells, "x"), names_of(cells, "y")
    x_axis = alt.Axis(labelAngle=0, ticks=False, domain=False)
    base = chart_of("cells").encode(
        x=alt.X("x", type="nominal", title=x_title, sort=columns, axis=x_axis),
        y=rows_axis(sorted(lines, key=lambda text: (len(text), text)), "y", y_title),
        tooltip=tooltip(x=x_title, y=y_title, value="us|number", what="status"),
    )
    known = [c["value"] for c in cells if c["value"] is not None]
    dark = (min(known) + max(known)) / 2 if known else 0.0
    colour = alt.Color(
        "value", type="quantitative", title="us", scale=alt.Scale(range="ramp"), legend=alt.Legend(orient="top")
    )
    told = alt.Text("value", type="quantitative", format=",.1f")
    there = base.transform_filter("datum.value != null")
    layers = [there.mark_rect().encode(color=colour)]
    if any(value <= dark for value in known):
        layers.append(there.transform_filter(f"datum.value <= {dark}").mark_text(style="pale").encode(text=told))
    if any(value > dark for value in known):
        layers.append(there.transform_filter(f"datum.value > {dark}").mark_text(style="deep").encode(text=told))
    if any(c["value"] is None and c.get("bound") for c in cells):
        bounded = base.transform_filter("datum.value == null && datum.bound")
        layers.append(bounded.mark_rect(style="quiet"))
        least = alt.Text("least", type="nominal")
        told = bounded.transform_calculate(least="'≥ ' + format(datum.bound, ',.1f')")
        layers.append(told.mark_text(style="label").encode(text=least))
    if any(c["value"] is None and not c.get("bound") for c in cells):
        nothing = base.transform_filter("datum.value == null && !datum.bound")
        layers.append(nothing.mark_text(style="cross", text="×", fontSize=17))
    return finished(alt.layer(*layers), max(3, len(lines)) * 30, cells=cells)


def score_bars(scores: Mapping[str, Any]) -> Spec:
    """Return how many scores have which magnitude, and the ends of their format's range."""
    alt = altair()
    limit = math.log2(scores["largest"])
    rows = [
        {
            "from": c["exponent"],
            "to": c["exponent"] + 1,
            "count": c["count"],
            "beyond": 2.0 ** c["exponent"] >= scores["largest"],
            "what": f"2^{c['exponent']} to 2^{c['exponent'] + 1}",
        }
        for c in scores["counts"]
    ]
    least, most = min(r["from"] for r in rows), max((limit, *(r["to"] for r in rows)))
    x = alt.X(
        "from",
        type="quantitative",
        title="magnitude of the scores, as a power of 2",
        scale=alt.Scale(domain=[min(max(least, most - 40) - 1, limit - 8), most + 2], nice=False),
        axis=alt.Axis(tickMinStep=1),
    )
    y = alt.Y(
        "count",
        type="quantitative",
        title="scores",
        axis=alt.Axis(format="~s", tickCount=4),
        scale=alt.Scale(domain=[0, max(r["count"] for r in rows)]),
    )
    base = chart_of("rows").encode(x=x, x2="to", y=y, tooltip=tooltip(what="magnitude", count="scores|number"))
    ends = [{"x": limit, "label": f"largest of {scores['format']}"}]
    end = chart_of("ends").encode(x=alt.X("x", type="quantitative"))
    layers = [
        base.transform_filter("!datum.beyond").mark_bar(orient="vertical", binSpacing=1, clip=True),
        base.transform_filter("datum.beyond").mark_bar(orient="vertical", binSpacing=1, style="broken", clip=True),
        end.mark_rule(style="limit"),
        end.mark_text(style="label", align="right", dx=-5, baseline="top").encode(text="label:N", y=alt.value(2)),
    ]
    return finished(alt.layer(*layers), 200, rows=rows, ends=ends)
