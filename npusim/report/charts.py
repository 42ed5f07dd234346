"""Charts as Vega-Lite specifications, made with Altair: for pages and, drawn once, for studies.

A specification holds its data and says what is to be seen, never a colour: those come from the theme
(`npusim.report.page.theme`), by the scale's kind or by a style's name (``wait``, ``cross``, ``quiet``, ``label``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Spec", "bars", "grid_of_errors", "lines", "memory_bars", "roofline", "score_bars", "stacked_bars", "tracks",
    "use_of_tracks",
]  # fmt: skip

Spec = dict[str, Any]
Row = dict[str, Any]
#: Colours that tiles next to one another take in turn.
TILE_COLOURS = 5
#: Share of a chart's width that a letter of a label needs.
LETTER = 0.0085
ROW_HEIGHT, CHART_HEIGHT = 26, 280


def altair() -> Any:
    """Return the library; raise `NpusimError` where it is not installed."""
    try:
        import altair as alt
    except ImportError:
        raise NpusimError("pages and charts need altair and jinja2: python -m pip install 'npusim[report]'") from None
    return alt


def _chart(name: str) -> Any:
    """Return a chart of the rows that `_finished` is given by that name."""
    alt = altair()
    return alt.Chart(alt.NamedData(name=name))


def _finished(chart: Any, height: int, **rows: Sequence[Row]) -> Spec:
    """Return a specification as wide as its place; rows come last, since Altair would check every one."""
    spec: Spec = chart.properties(width="container", height=height).to_dict(validate=False)
    return {**spec, "datasets": {name: list(found) for name, found in rows.items()}}


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(str(row[key]) for row in rows))


def _rows_axis(names: Sequence[str], field: str = "track") -> Any:
    alt = altair()
    axis = alt.Axis(title=None, ticks=False, domain=False, labelLimit=150)
    return alt.Y(field, type="nominal", sort=list(names), scale=alt.Scale(domain=list(names)), axis=axis)


def _tooltip(**fields: str) -> list[Any]:
    alt = altair()
    kinds = {"us": ("quantitative", ",.3f"), "share": ("quantitative", ".1%"), "number": ("quantitative", ",.4~g")}
    found = []
    for name, said in fields.items():
        title, _, kind = said.partition("|")
        dtype, form = kinds.get(kind, ("nominal", None))
        more = {} if form is None else {"format": form}
        found.append(alt.Tooltip(name, type=dtype, title=title, **more))
    return found


# ---------------------------------------------------------------- time


def tracks(slices: Sequence[Row], start_us: float, end_us: float) -> Spec:
    """Return slices on their tracks: operations coloured by tile, waits as thin bars, numeric events as crosses.

    A slice is a row of ``figures.json``: ``track``, ``name``, ``kind``, ``start_us``, ``end_us``, ``tile``, ...
    """
    alt = altair()
    room = (end_us - start_us) * LETTER
    rows = []
    for s in slices:
        is_roomy = s["kind"] == "operation" and s["end_us"] - s["start_us"] > room * (len(s["name"]) + 1)
        tile = None if s.get("tile") is None else str(s["tile"] % TILE_COLOURS)
        what = s["name"] if s["kind"] == "operation" else f"waits: {s['name']}"
        rows.append(
            {
                **s,
                "colour": tile,
                "label": s["name"] if is_roomy else "",
                "what": what,
                "events": "; ".join(s.get("events", ())),
            }
        )
    names = _names(rows, "track")
    x = alt.X(
        "start_us", type="quantitative", title="time, us", scale=alt.Scale(domain=[start_us, end_us], nice=False)
    )
    tips = _tooltip(
        what="what",
        track="track",
        start_us="from, us|us",
        end_us="to, us|us",
        at="loop",
        block="block",
        events="events",
    )
    at = _chart("slices").encode(y=_rows_axis(names), tooltip=tips)
    base = at.encode(x=x, x2="end_us")
    colour = alt.Color("colour", type="nominal", scale=alt.Scale(domain=list("01234"), range="ordinal"), legend=None)
    ran = base.transform_filter("datum.kind == 'operation'")
    layers = [
        base.transform_filter("datum.kind == 'wait'").mark_bar(height=3, style="wait"),
        ran.transform_filter("datum.colour == null").mark_bar(height={"band": 0.82}, style="quiet"),
        ran.transform_filter("datum.colour != null").mark_bar(height={"band": 0.82}, style="tile").encode(color=colour),
        at.transform_filter("datum.label != ''").transform_calculate(mid="(datum.start_us + datum.end_us) / 2")
        .mark_text(style="inside", clip=True).encode(x=alt.X("mid", type="quantitative"), text="label:N"),
        at.transform_filter("datum.events != ''").mark_text(style="cross", text="×", fontSize=17)
        .encode(x=alt.X("end_us", type="quantitative")),
    ]  # fmt: skip
    return _finished(alt.layer(*layers), ROW_HEIGHT * len(names), slices=rows)


def use_of_tracks(parts: Sequence[Row]) -> Spec:
    """Return how busy each track was in each part of a run: rows ``track``, ``start_us``, ``end_us``, ``busy``."""
    alt = altair()
    names = _names(parts, "track")
    end = max(p["end_us"] for p in parts)
    chart = _chart("parts").mark_bar(height={"band": 0.9}).encode(
        x=alt.X("start_us", type="quantitative", title="time, us", scale=alt.Scale(domain=[0, end], nice=False)),
        x2="end_us",
        y=_rows_axis(names),
        color=alt.Color(
            "busy", type="quantitative", title="busy",
            scale=alt.Scale(domain=[0, 1], range="ramp"), legend=alt.Legend(format=".0%", orient="top"),
        ),
        tooltip=_tooltip(track="track", start_us="from, us|us", end_us="to, us|us", busy="busy|share"),
    )  # fmt: skip
    return _finished(chart, ROW_HEIGHT * len(names), parts=parts)


def stacked_bars(rows: Sequence[Row], kinds: Sequence[str], *, x_title: str, unit: str = "us") -> Spec:
    """Return one bar a ``track``, cut by ``kind``: rows ``track``, ``kind``, ``cause``, ``value``, ``share``."""
    alt = altair()
    names, order = _names(rows, "track"), {kind: at for at, kind in enumerate(kinds)}
    ordered = [{**row, "order": order[row["kind"]]} for row in rows]
    chart = _chart("parts").mark_bar(height={"band": 0.78}, style="tile").encode(
        x=alt.X("value", type="quantitative", title=x_title, stack="zero"),
        y=_rows_axis(names),
        color=alt.Color(
            "kind", type="nominal", title=None, scale=alt.Scale(domain=list(kinds), range="category"),
            legend=alt.Legend(orient="top", columns=3, labelLimit=200),
        ),
        order=alt.Order("order", type="quantitative"),
        tooltip=_tooltip(track="track", cause="what", value=f"{unit}|number", share="of the kernel|share"),
    )  # fmt: skip
    return _finished(chart, ROW_HEIGHT * len(names), parts=ordered)


def bars(rows: Sequence[Row], *, x_title: str, form: str = ".0%") -> Spec:
    """Return one bar a ``name`` with its ``value`` written beside it; ``text`` is what a tooltip adds."""
    alt = altair()
    names = _names(rows, "name")
    base = _chart("rows").encode(
        x=alt.X("value", type="quantitative", title=x_title, axis=alt.Axis(format=form, tickCount=6)),
        y=_rows_axis(names, "name"),
        tooltip=[
            *_tooltip(name="what"),
            alt.Tooltip("value", type="quantitative", format=form),
            *_tooltip(text="note"),
        ],
    )
    text = base.mark_text(style="label", align="left", dx=5).encode(
        text=alt.Text("value", type="quantitative", format=form)
    )
    return _finished(alt.layer(base.mark_bar(height={"band": 0.7}), text), ROW_HEIGHT * len(names), rows=rows)


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
    x = alt.X(
        "x", type="quantitative", scale=scale, title="operations a byte", axis=alt.Axis(format="~s", tickCount=6)
    )
    y = alt.Y("y", type="quantitative", scale=alt.Scale(type="log"), title="TFLOP/s", axis=alt.Axis(format="~g"))
    colour = alt.Color(
        "name", type="nominal", scale=alt.Scale(range="category"), legend=alt.Legend(orient="top", title="roof of")
    )
    dash = alt.StrokeDash("name", type="nominal", legend=None)
    points = _chart("marks").encode(
        x=x, y=y, color=colour, tooltip=_tooltip(what="what", x="operations a byte|number", y="TFLOP/s|number")
    )
    ups, downs = points.transform_filter("datum.up"), points.transform_filter("!datum.up")
    layers = [
        _chart("roofs").mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        ups.mark_point(shape="triangle-down", size=50, filled=True),
        ups.mark_text(style="label", dy=-11).encode(text="label:N", color=alt.Undefined),
        downs.mark_point(shape="diamond", size=130, filled=True, style="mark"),
        downs.mark_text(style="label", dy=17).encode(text="label:N", color=alt.Undefined),
    ]
    return _finished(alt.layer(*layers), CHART_HEIGHT, marks=marks, roofs=roofs)


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
    names = _names(rows, "name")
    x = alt.X(
        "used",
        type="quantitative",
        title="share of capacity",
        scale=alt.Scale(domain=[0, 1.08], nice=False),
        axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1]),
    )
    tips = _tooltip(
        name="memory",
        used="allocated|share",
        used_bytes="bytes allocated|number",
        capacity_bytes="bytes there|number",
        held="held at most|share",
    )
    base = _chart("memories").encode(y=_rows_axis(names, "name"), tooltip=tips)
    layers = [
        base.mark_bar(height={"band": 0.75}, style="quiet").encode(x=x),
        base.transform_filter("datum.held != null")
        .mark_bar(height={"band": 0.32})
        .encode(x=alt.X("held", type="quantitative")),
        base.mark_text(style="label", align="left", dx=4).encode(
            x=x, text=alt.Text("used", type="quantitative", format=".0%")
        ),
        _chart("limit").mark_rule(style="limit").encode(x="x:Q"),
    ]
    return _finished(alt.layer(*layers), ROW_HEIGHT * len(names), memories=rows, limit=[{"x": 1}])


# ---------------------------------------------------------------- bits


def grid_of_errors(rows: Sequence[Row]) -> Spec:
    """Return errors by head and rows; crosses mark overflow. Rows are those of ``figures.json``."""
    alt = altair()
    shown = [{**r, "end": r["last_row"] + 1} for r in rows]
    names = _names(shown, "head")
    first, last = min(r["first_row"] for r in shown), max(r["end"] for r in shown)
    at = _chart("rows").encode(
        y=_rows_axis(names, "head").title("head"),
        tooltip=_tooltip(
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
        "error", type="quantitative", title="relative error",
        scale=alt.Scale(type="log", range="ramp"), legend=alt.Legend(orient="top", format=".1e", tickCount=3),
    )  # fmt: skip
    middle = at.transform_calculate(mid="(datum.first_row + datum.end) / 2").encode(
        x=alt.X("mid", type="quantitative")
    )
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
    return _finished(alt.layer(*layers), max(3, len(names)) * (ROW_HEIGHT - 4 if len(names) < 12 else 12), rows=shown)


def score_bars(scores: Mapping[str, Any]) -> Spec:
    """Return how many scores have which magnitude, and the ends of their format's range."""
    alt = altair()
    limit = math.log2(scores["largest"])
    rows = [
        {
            "from": c["exponent"], "to": c["exponent"] + 1, "count": c["count"],
            "beyond": 2.0 ** c["exponent"] >= scores["largest"],
            "what": f"2^{c['exponent']} to 2^{c['exponent'] + 1}",
        }
        for c in scores["counts"]
    ]  # fmt: skip
    least, most = min(r["from"] for r in rows), max((limit, *(r["to"] for r in rows)))
    x = alt.X(
        "from", type="quantitative", title="magnitude of the scores, as a power of 2",
        scale=alt.Scale(domain=[min(max(least, most - 40) - 1, limit - 8), most + 2], nice=False),
        axis=alt.Axis(tickMinStep=1),
    )  # fmt: skip
    y = alt.Y(
        "count",
        type="quantitative",
        title="scores",
        axis=alt.Axis(format="~s", tickCount=4),
        scale=alt.Scale(domain=[0, max(r["count"] for r in rows)]),
    )
    base = _chart("rows").encode(x=x, x2="to", y=y, tooltip=_tooltip(what="magnitude", count="scores|number"))
    ends = [{"x": limit, "label": f"largest of {scores['format']}"}]
    end = _chart("ends").encode(x=alt.X("x", type="quantitative"))
    layers = [
        base.transform_filter("!datum.beyond").mark_bar(orient="vertical", binSpacing=1, clip=True),
        base.transform_filter("datum.beyond").mark_bar(orient="vertical", binSpacing=1, style="broken", clip=True),
        end.mark_rule(style="limit"),
        end.mark_text(style="label", align="right", dx=-5, baseline="top").encode(text="label:N", y=alt.value(2)),
    ]
    return _finished(alt.layer(*layers), 200, rows=rows, ends=ends)


# ---------------------------------------------------------------- studies


def lines(
    x_title: str, y_title: str, named: Mapping[str, Sequence[tuple[float, float]]], *, log_x: bool = False,
    log_y: bool = False, title: str = "",
) -> Spec:  # fmt: skip
    """Return lines with their names; points that are not finite, or not positive on a logarithm, are left out."""
    alt = altair()
    rows = [
        {"name": name, "x": x, "y": y}
        for name, points in named.items()
        for x, y in points
        if math.isfinite(y) and (y > 0 or not log_y) and (x > 0 or not log_x)
    ]

    def scale(is_log: bool) -> Any:
        return alt.Scale(type="log") if is_log else alt.Scale(zero=True)

    form = alt.Axis(format="~g")
    names = list(named)
    chart = _chart("points").mark_line(point=True, strokeWidth=2).encode(
        x=alt.X("x", type="quantitative", title=x_title, scale=scale(log_x), axis=form),
        y=alt.Y("y", type="quantitative", title=y_title, scale=scale(log_y), axis=form),
        color=alt.Color(
            "name", type="nominal", title=None, sort=names, scale=alt.Scale(range="category"),
            legend=alt.Legend(labelLimit=320),
        ),
        strokeDash=alt.StrokeDash("name", type="nominal", sort=names, legend=None),
        tooltip=_tooltip(name="line", x=f"{x_title}|number", y=f"{y_title}|number"),
    )  # fmt: skip
    return _finished(chart.properties(title=title) if title else chart, CHART_HEIGHT, points=rows)
