"""Charts as Vega-Lite specifications, written with Altair: for pages and, drawn once, for studies.

A specification has its data and encodings, but no colours: these belong to the theme (`npusim.report.page.theme`), by
the scale's kind or by a style's name (``wait``, ``cross``, ``quiet``, ``label``).
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.report.text import Block, Grid

Spec = dict[str, Any]
Row = dict[str, Any]
#: Number of colours that successive tiles use in turn.
TILE_COLOURS = 5
#: Pixels of a letter of a label, and largest number of letters in one line of a row's name.
LETTER, NAME_LETTERS = 6.4, 24
#: Widths in pixels above which the names of a front are placed again.
FRONT_WIDTHS = (0, 240, 340, 460, 620, 840, 1060)
#: Possible positions of a name relative to its point, in pixels, the best first.
_BESIDE = (
    *((0, dy, "center") for dy in (-15, 15)),
    *((dx, 0, align) for dx, align in ((10, "left"), (-10, "right"))),
    *((dx, dy, align) for dy in (-15, 15) for dx, align in ((-6, "left"), (6, "right"))),
)
ROW_HEIGHT, CHART_HEIGHT = 26, 280
#: Width of charts that are placed one below another.
PANEL_WIDTH = 560


@dataclass(frozen=True)
class FigureTile:
    """One of the few numbers at the head of a page; ``is_bad`` marks it as alarming."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart with a heading, its meaning (``text``), and its numbers; ``is_folded``: the numbers are shown
    on demand.
    """

    key: str
    title: str
    text: str
    spec: Spec | None
    table: Grid
    is_folded: bool = False


@dataclass(frozen=True)
class PagePart:
    """A part of a page: heading, verdict, tiles, the first figure, the terminal's table, the other figures.

    With ``is_folded`` the page shows the heading and the verdict, and the other contents on demand.
    """

    title: str
    subtitle: str = ""
    tiles: Sequence[FigureTile] = ()
    blocks: Sequence[Block] = ()
    figures: Sequence[Figure] = ()
    verdict: str = ""
    is_folded: bool = False


def altair() -> Any:
    """Return the library; raise `NpusimError` where it is not installed."""
    try:
        import altair as alt
    except ImportError:
        raise NpusimError("pages and charts need altair and jinja2: python -m pip install 'npusim[report]'") from None
    return alt


def chart_of(name: str) -> Any:
    """Return a chart of the rows that `finished` adds under that name."""
    alt = altair()
    return alt.Chart(alt.NamedData(name=name))


def finished(chart: Any, height: int, **rows: Sequence[Row]) -> Spec:
    """Return a specification as wide as its container; rows are added last, since Altair would check every row."""
    spec: Spec = chart.properties(width="container", height=height).to_dict(validate=False)
    return {**spec, "datasets": {name: list(data) for name, data in rows.items()}}


def names_of(rows: Iterable[Row], key: str) -> list[str]:
    """Return the different values of one column in the order in which they occur."""
    return list(dict.fromkeys(str(row[key]) for row in rows))


def rows_axis(names: Sequence[str], field: str = "track", title: str | None = None) -> Any:
    """Return a vertical axis with one row per name; long names have several lines."""
    alt = altair()
    part = f"(?=.{{{NAME_LETTERS + 1}}})(.{{1,{NAME_LETTERS}}}) "
    lines = f"split(replace(datum.label, regexp('{part}', 'g'), '$1\\n'), '\\n')"
    by_rows = {n: [name for name in names if rows_of_name([name]) == n] for n in range(2, rows_of_name(names) + 1)}
    higher = [
        {"test": f"indexof({json.dumps(long)}, datum.label) >= 0", "value": -7 * (n - 1)} for n, long in by_rows.items()
    ]
    many = {"labelExpr": lines, "labelOffset": {"condition": higher, "value": 0}} if higher else {}
    axis = alt.Axis(
        title=title, titleAnchor="middle", ticks=False, domain=False, labelOverlap=False, labelPadding=6, **many
    )
    return alt.Y(f"{field}:N", sort=list(names), scale={"domain": list(names)}, axis=axis)


def rows_of_name(names: Iterable[str]) -> int:
    """Return the number of lines that the longest of some names needs next to its row."""
    return max((len(textwrap.wrap(name, NAME_LETTERS)) for name in names), default=1)


def row_height(names: Iterable[str]) -> int:
    """Return the height of a row that has such names."""
    return max(ROW_HEIGHT, 14 * rows_of_name(names) + 4)


def tooltip(**fields: str) -> list[Any]:
    """Return the fields of a tooltip: ``column="title|us"``, ``|share``, ``|number``, or text."""
    alt = altair()
    formats = {"us": ",.3f", "share": ".1%", "number": ",.4~g"}
    parts = []
    for name, text in fields.items():
        title, _, kind = text.partition("|")
        shown = alt.Tooltip(f"{name}:{'Q' if kind else 'N'}", title=title)
        parts.append(shown.format(formats[kind]) if kind else shown)
    return parts


# ---------------------------------------------------------------- time


def tracks(slices: Sequence[Row], start_us: float, end_us: float, width: str = "width") -> Spec:
    """Return slices on their tracks: operations coloured by tile, waits as thin bars, numeric events as crosses.

    A slice is a row of ``figures.json``: ``track``, ``name``, ``kind``, ``start_us``, ``end_us``, ``tile``, ... A name
    is shown if there is space for it; ``width`` is the chart's width, or the number of pixels of one chart in a column
    of several.
    """
    alt = altair()
    room = f"(datum.end_us - datum.start_us) * {width} > {LETTER * (end_us - start_us)} * (length(datum.name) + 1)"
    rows = []
    for s in slices:
        is_operation, name = s["kind"] == "operation", s["name"]
        tile = None if s.get("tile") is None else str(s["tile"] % TILE_COLOURS)
        seen = {"colour": tile, "what": name if is_operation else f"waits: {name}"}
        rows.append({**s, **seen, "events": "; ".join(s.get("events", ()))})
    names = names_of(rows, "track")
    x = alt.X("start_us:Q", title="time, us", scale={"domain": [start_us, end_us], "nice": False})
    tips = tooltip(
        what="what",
        track="track",
        start_us="from, us|us",
        end_us="to, us|us",
        at="loop",
        block="block",
        events="events",
    )
    at = chart_of("slices").encode(y=rows_axis(names), tooltip=tips)
    base = at.encode(x=x, x2="end_us")
    colour = alt.Color("colour:N", scale={"domain": list("01234"), "range": "ordinal"}, legend=None)
    ran = base.transform_filter("datum.kind == 'operation'")
    layers = [
        base.transform_filter("datum.kind == 'wait'").mark_bar(height=3, style="wait"),
        ran.transform_filter("datum.colour == null").mark_bar(height={"band": 0.82}, style="plain"),
        ran.transform_filter("datum.colour != null").mark_bar(height={"band": 0.82}, style="tile").encode(color=colour),
        at.transform_filter(f"datum.kind == 'operation' && {room}")
        .transform_calculate(mid="(datum.start_us + datum.end_us) / 2")
        .mark_text(style="inside", clip=True)
        .encode(x="mid:Q", text="name:N"),
        at.transform_filter("datum.events != ''").mark_text(style="cross", text="×", fontSize=17).encode(x="end_us:Q"),
    ]
    return finished(alt.layer(*layers), ROW_HEIGHT * len(names), slices=rows)


def stacked_bars(rows: Sequence[Row], kinds: Sequence[str]) -> Spec:
    """Return the time of each ``track``, split by ``kind``: rows ``track``, ``kind``, ``cause``,
    ``value``, ``share``.
    """
    alt = altair()
    names, order = names_of(rows, "track"), {kind: at for at, kind in enumerate(kinds)}
    ordered = [{**row, "order": order[row["kind"]]} for row in rows]
    chart = (
        chart_of("parts")
        .mark_bar(height={"band": 0.78}, style="tile")
        .encode(
            x=alt.X("value:Q", title="time, us", stack="zero"),
            y=rows_axis(names),
            color=alt.Color(
                "kind:N", title=None, scale={"domain": list(kinds), "range": "category"}, legend={"orient": "top"}
            ),
            order="order:Q",
            tooltip=tooltip(track="track", cause="what", value="us|number", share="of the cores' time|share"),
        )
    )
    return finished(chart, ROW_HEIGHT * len(names), parts=ordered)


def bars(rows: Sequence[Row]) -> Spec:
    """Return one bar for each ``name`` with its latency, ``value``, as a label; ``text`` is the rest of its tooltip."""
    alt, form = altair(), ",.2f"
    names = names_of(rows, "name")
    # space for what is printed next to it
    scale = {"domain": [0, 1.25 * max(row["value"] for row in rows) or 1], "nice": False}
    base = chart_of("rows").encode(
        x=alt.X("value:Q", title="latency, us", axis={"format": ",.2~f", "tickCount": 6}, scale=scale),
        y=rows_axis(names, "name"),
        tooltip=[*tooltip(name="what"), alt.Tooltip("value:Q", format=form), *tooltip(text="note")],
    )
    text = base.mark_text(style="label", align="left", dx=5).encode(text=alt.Text("value:Q", format=form))
    return finished(alt.layer(base.mark_bar(height={"band": 0.7}), text), row_height(names) * len(names), rows=rows)


def errors(rows: Sequence[Row], limit: float) -> Spec:
    """Return one point for each ``name`` at its relative error, ``value``, on a logarithmic axis, and a line at
    ``limit``.
    """
    alt, form = altair(), ".1e"
    names = names_of(rows, "name")
    domain = _log_domain([limit, *(row["value"] for row in rows)])
    scale = {"domain": [domain[0], domain[1] * 2], "nice": False, "type": "log"}  # space for what is next to it
    x = alt.X("value:Q", title="relative RMSE", scale=scale, axis=alt.Axis(format="~e", tickCount=5))
    base = chart_of("rows").encode(
        x=x, y=rows_axis(names, "name"), tooltip=[*tooltip(name="input"), alt.Tooltip("value:Q", format=form)]
    )
    text = base.mark_text(style="label", align="left", dx=8).encode(text=alt.Text("value:Q", format=form))
    line = chart_of("limits").mark_rule(strokeDash=[4, 3]).encode(x=x)
    marks = base.mark_point(shape="diamond", size=110, filled=True, style="mark")
    layers = alt.layer(line, marks, text)
    return finished(layers, row_height(names) * len(names), rows=rows, limits=[{"value": limit}])


def sizes(rows: Sequence[Row], limit: float, limit_name: str) -> Spec:
    """Return histograms of sizes, one for each ``name``, below one another: rows ``low``, ``high``, ``share``.

    A dashed line marks ``limit``, the largest number of a format.
    """
    alt = altair()
    low, high = min(1.0, *(row["low"] for row in rows)), max(4 * limit, *(row["high"] for row in rows))
    scale = {"type": "log", "base": 2, "domain": [low, high], "nice": False}
    shares = {"domain": [0, 1.3 * max(row["share"] for row in rows) or 1], "nice": False}
    base = chart_of("rows").encode(
        x=alt.X("low:Q", title="size of a score", scale=scale, axis=alt.Axis(format="~g", tickCount=8)),
        y=alt.Y("share:Q", title="share of scores", scale=shares, axis=alt.Axis(format="%", tickCount=4)),
        tooltip=tooltip(name="scores", low="from|number", high="to|number", share="share|share"),
    )
    at = alt.X("low:Q", scale=scale)
    line = chart_of("limits").mark_rule(strokeDash=[4, 3]).encode(x=at)
    side = {"align": "left", "dx": 5, "baseline": "top", "y": 2}
    named = chart_of("limits").mark_text(style="label", **side).encode(x=at, text="name:N")
    panels = []
    for name in names_of(rows, "name"):
        bar = base.transform_filter(alt.datum.name == name).mark_bar(style="tile", binSpacing=1)
        panel = alt.layer(bar.encode(x2="high", y2=alt.datum(0)), line, named)
        panels.append(panel.properties(width=PANEL_WIDTH, height=CHART_HEIGHT // 3, title={"text": name}))
    data = {"rows": list(rows), "limits": [{"low": limit, "name": limit_name}]}
    return {**alt.vconcat(*panels, spacing=12).to_dict(validate=False), "datasets": data}


def curves(rows: Sequence[Row], x_title: str) -> Spec:
    """Return latencies over a size on logarithmic axes, with one line for each ``name``; rows are ``name``, ``size``,
    ``latency_us``.
    """
    alt = altair()
    names, sizes_ = names_of(rows, "name"), sorted({row["size"] for row in rows})
    ends = _log_domain([row["latency_us"] for row in rows])
    base = chart_of("rows").encode(
        x=alt.X(
            "size:Q",
            title=x_title,
            scale={"type": "log", "base": 2, "domain": _log_domain(sizes_), "nice": False},
            axis=alt.Axis(format=",", values=sizes_, labelOverlap=True),
        ),
        y=alt.Y(
            "latency_us:Q",
            title="latency, us",
            scale={"type": "log", "domain": ends, "nice": False},
            axis=alt.Axis(format=",~g", tickCount=6),
        ),
        color=alt.Color(
            "name:N",
            title=None,
            sort=names,
            scale={"range": "category"},
            legend=alt.Legend(orient="top") if len(names) > 1 else None,
        ),
        tooltip=tooltip(name="what", size=f"{x_title}|number", latency_us="us|number"),
    )
    text = base.mark_text(style="label", dy=-11).encode(text=alt.Text("latency_us:Q", format=",.4~g"))
    layers = [base.mark_line(), base.mark_point(filled=True, size=60), *([text] if len(names) == 1 else [])]
    return finished(alt.layer(*layers), CHART_HEIGHT, rows=rows)


def changes(rows: Sequence[Row]) -> Spec:
    """Return a bar for each ``part`` and ``run`` from 0 to its ``value``, with runs side by side."""
    alt, form = altair(), "+,.2f"
    parts, runs = names_of(rows, "part"), names_of(rows, "run")
    base = chart_of("rows").encode(
        x=alt.X("value:Q", title="change, us", scale={"padding": 58}, axis={"format": "+,.2~f", "tickCount": 6}),
        y=rows_axis(parts, "part"),
        yOffset=alt.YOffset("run:N", sort=runs),
        tooltip=[*tooltip(run="run", part="part"), alt.Tooltip("value:Q", format=form)],
    )
    written = alt.Text("value:Q", format=form)
    legend = alt.Legend(orient="top") if len(runs) > 1 else None
    colour = alt.Color("run:N", title=None, sort=runs, scale={"range": "category"}, legend=legend)
    layers = [base.mark_bar(height={"band": 0.9}, style="tile").encode(color=colour)]
    for is_less, sign, align, dx in ((False, ">=", "left", 4), (True, "<", "right", -4)):
        if any((row["value"] < 0) is is_less for row in rows):
            beside = base.transform_filter(f"datum.value {sign} 0").mark_text(style="label", align=align, dx=dx)
            layers.append(beside.encode(text=written))
    return finished(alt.layer(*layers), max(row_height(parts), 17 * len(runs) + 8) * len(parts), rows=rows)


def front(points: Sequence[Row], title: str = "") -> Spec:
    """Return latency over error: rows ``name``, ``latency_us``, ``error``; points with ``is_front`` are joined.

    Names are placed where they cover neither one another nor a point, at any width; names without space are in the
    tooltip.
    """
    alt = altair()
    xs, ys = _domain([p["latency_us"] for p in points]), _log_domain([p["error"] for p in points])
    base = chart_of("points").encode(
        x=alt.X("latency_us:Q", title="latency, us", scale={"domain": xs, "nice": False, "zero": False}),
        y=alt.Y(
            "error:Q",
            title="relative RMSE",
            scale={"domain": ys, "nice": False, "type": "log"},
            axis=alt.Axis(format="~e", tickCount=5),
        ),
        tooltip=tooltip(name="what", latency_us="us|number", error="relative RMSE|number"),
    )
    joined = base.transform_filter("datum.is_front").mark_line(interpolate="step-after")
    offsets = {key: {"expr": f"datum.{key}"} for key in ("dx", "dy", "align")}
    named = chart_of("names").transform_filter("width >= datum.least && width < datum.beyond")
    layers = [
        *([joined] if any(point.get("is_front") for point in points) else ()),
        base.mark_point(shape="diamond", size=120, filled=True, style="mark"),
        named.mark_text(style="label", baseline="middle", **offsets).encode(
            x="latency_us:Q", y="error:Q", text="name:N"
        ),
    ]
    chart = alt.layer(*layers)
    chart = chart.properties(title=title) if title else chart
    return finished(chart, CHART_HEIGHT, points=points, names=_names_of_front(points, xs, ys))


def _domain(values: Sequence[float]) -> list[float]:
    margin = 0.06 * (max(values) - min(values)) or 0.1 * abs(max(values))
    return [min(values) - margin, max(values) + margin]


def _log_domain(values: Sequence[float]) -> list[float]:
    """Return a domain that covers at least a factor of two."""
    margin = max((max(values) / min(values)) ** 0.12, math.sqrt(2 * min(values) / max(values)))
    return [min(values) / margin, max(values) * margin]


def _names_of_front(points: Sequence[Row], xs: Sequence[float], ys: Sequence[float]) -> list[Row]:
    """Return the names that fit beside the front's line, for each range of widths: first the names at its ends, then
    the others from the left.
    """
    placed: list[Row] = []
    named = sorted((p for p in points if p["name"]), key=lambda p: p["latency_us"])
    order = [*named[:1], *named[-1:], *named[1:-1]] if len(named) > 1 else named
    for least, beyond in zip(FRONT_WIDTHS, (*FRONT_WIDTHS[1:], 10_000), strict=True):
        width = max(least, 180)

        def spot(point: Row, width: int = width) -> tuple[float, float]:
            x, y = (point["latency_us"] - xs[0]) / (xs[1] - xs[0]), math.log(point["error"] / ys[0])
            return width * x, CHART_HEIGHT * (1 - y / math.log(ys[1] / ys[0]))

        boxes = [(x - 8, y - 8, x + 8, y + 8) for x, y in map(spot, points)]
        for (x, y), (end, below) in pairwise(spot(p) for p in named if p.get("is_front")):
            boxes += [(x, y - 1, end + 8, y + 1), (end - 1, y, end + 8, below)]
        for point in order:
            for dx, dy, align in _BESIDE:
                box = _box(spot(point), len(point["name"]) * LETTER, dx, dy, align)
                is_inside = box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= CHART_HEIGHT
                if is_inside and not any(_meet(box, other) for other in boxes):
                    boxes.append(box)
                    at = {key: point[key] for key in ("name", "latency_us", "error")}
                    placed.append({**at, "dx": dx, "dy": dy, "align": align, "least": least, "beyond": beyond})
                    break
    return placed


def _box(at: tuple[float, float], length: float, dx: int, dy: int, align: str) -> tuple[float, float, float, float]:
    left = at[0] + dx - {"left": 0.0, "center": length / 2, "right": length}[align]
    return left, at[1] + dy - 6, left + length, at[1] + dy + 6


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


# ---------------------------------------------------------------- roofs


def roofline(levels: Sequence[Row], peak: float) -> Spec:
    """Return roofs and the run's points under them, both axes logarithmic.

    A level is ``name``, ``bytes_per_s``, ``intensity`` (operations per byte that crossed it) and ``attained``
    (operations per second); ``peak`` is the rate of the matrix units.
    """
    alt = altair()
    ridges = [peak / level["bytes_per_s"] for level in levels]
    shown = [*ridges, *(level["intensity"] for level in levels)]
    low, high = min(shown) / 4, max(shown) * 4
    roofs = [
        {"name": level["name"], "x": x, "y": min(peak, x * level["bytes_per_s"]) / 1e12}
        for level, ridge in zip(levels, ridges, strict=True)
        for x in (low, ridge, high)
    ]
    marks = [
        {"name": level["name"], "x": x, "y": y / 1e12, "what": what, "label": label, "up": up}
        for level, ridge in zip(levels, ridges, strict=True)
        for x, y, what, label, up in (
            (ridge, peak, f"left of it {level['name']} is the limit", f"{ridge:,.0f}", True),
            (level["intensity"], level["attained"], f"this run, by bytes of {level['name']}", level["name"], False),
        )
    ]
    scale = alt.Scale(type="log", nice=False)
    x = alt.X("x:Q", scale=scale, title="operations a byte", axis={"format": "~s", "tickCount": 6})
    lowest = min(point["y"] for point in (*roofs, *marks))
    # names are placed above and below
    heights = {"type": "log", "domain": [lowest / 2.5, peak / 1e12 * 2], "nice": False}
    y = alt.Y("y:Q", scale=heights, title="TFLOP/s", axis={"format": "~g"})
    colour = alt.Color("name:N", scale={"range": "category"}, legend={"orient": "top", "title": "roof of"})
    dash = alt.StrokeDash("name:N", legend=None)
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


# ---------------------------------------------------------------- bits


def grid_of_errors(rows: Sequence[Row]) -> Spec:
    """Return errors by head and rows; crosses mark overflow. Rows: from ``figures.json``."""
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
    x = alt.X("first_row:Q", title="row of Q", scale={"domain": [first, last], "nice": False, "zero": False})
    base = at.encode(x=x, x2="end")
    colour = alt.Color(
        "error:Q",
        title="relative error",
        scale={"range": "ramp", "type": "log"},
        legend={"format": ".1e", "orient": "top", "tickCount": 3},
    )
    middle = at.transform_calculate(mid="(datum.first_row + datum.end) / 2").encode(x="mid:Q")
    wrong = base.transform_filter("datum.error > 0").mark_bar(height={"band": 0.92}).encode(color=colour)
    layers = [
        *([wrong] if any(r["error"] for r in shown) else ()),
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

    Rows: ``x``, ``y`` (text, in order), ``what`` (the status), and a ``value``, its lower ``bound``, or neither (a
    cross).
    """
    alt = altair()
    columns, lines = names_of(cells, "x"), names_of(cells, "y")
    x_axis = alt.Axis(labelAngle=0, ticks=False, domain=False)
    base = chart_of("cells").encode(
        x=alt.X("x:N", title=x_title, sort=columns, axis=x_axis),
        y=rows_axis(sorted(lines, key=lambda text: (len(text), text)), "y", y_title),
        tooltip=tooltip(x=x_title, y=y_title, value="us|number", what="status"),
    )
    known = [c["value"] for c in cells if c["value"] is not None]
    dark = (min(known) + max(known)) / 2 if known else 0.0
    colour = alt.Color("value:Q", title="us", scale={"range": "ramp"}, legend={"orient": "top"})
    written, small = alt.Text("value:Q", format=",.1f"), {"fontSize": alt.expr("clamp(bandwidth('x') / 4.5, 6, 11)")}
    there = base.transform_filter("datum.value != null")
    layers = [there.mark_rect().encode(color=colour)]
    for style, side in (("pale", "<="), ("deep", ">")):
        half = there.transform_filter(f"datum.value {side} {dark}")
        layers.append(half.mark_text(style=style, **small).encode(text=written))
    if any(c["value"] is None and c.get("bound") for c in cells):
        bounded = base.transform_filter("datum.value == null && datum.bound")
        least = bounded.transform_calculate(least="'≥ ' + format(datum.bound, ',.1f')")
        layers += [bounded.mark_rect(style="quiet"), least.mark_text(style="label", **small).encode(text="least:N")]
    if any(c["value"] is None and not c.get("bound") for c in cells):
        nothing = base.transform_filter("datum.value == null && !datum.bound")
        layers.append(nothing.mark_text(style="cross", text="×", fontSize=17))
    return finished(alt.layer(*layers), max(3, len(lines)) * 30, cells=cells)


def with_starts(spec: Any) -> Any:
    """Return a specification whose axes and colours of numbers state where they start, if this is not 0."""
    if isinstance(spec, list):
        return [with_starts(part) for part in spec]
    if not isinstance(spec, Mapping):
        return spec
    changed = {key: value if key == "datasets" else with_starts(value) for key, value in spec.items()}
    for axis in ("x", "y"):
        channel = changed.get(axis)
        if isinstance(channel, dict) and channel.get("type") == "quantitative" and channel.get("title"):
            changed[axis] = {**channel, "title": f"{channel['title']}{_start(channel.get('scale') or {})}"}
    colour = changed.get("color")
    if isinstance(colour, dict) and colour.get("type") == "quantitative" and colour.get("title"):
        is_log = (colour.get("scale") or {}).get("type") == "log"
        starts = "logarithmic" if is_log else "colours do not start at 0"
        changed["color"] = {**colour, "title": f"{colour['title']} ({starts})"}
    return changed


def _start(scale: Mapping[str, Any]) -> str:
    """Return the words that follow an axis' title."""
    if scale.get("type") == "log":
        return " (logarithmic)"
    low = (scale.get("domain") or [0])[0]
    if isinstance(low, int | float) and low > 0:
        return f" (axis starts at {low:,.4g})"
    return " (axis does not start at 0)" if scale.get("zero") is False and "domain" not in scale else ""
