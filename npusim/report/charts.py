"""Charts as Vega-Lite specifications, made with Altair: for pages and, drawn once, for studies.

A specification holds its data and says what is to be seen, never a colour: those come from the theme
(`npusim.report.page.theme`), by the scale's kind or by a style's name (``wait``, ``cross``, ``quiet``, ``label``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def chart_of(name: str) -> Any:
    """Return a chart of the rows that `finished` is given by that name."""
    alt = altair()
    return alt.Chart(alt.NamedData(name=name))


def finished(chart: Any, height: int, **rows: Sequence[Row]) -> Spec:
    """Return a specification as wide as its place; rows come last, since Altair would check every one."""
    spec: Spec = chart.properties(width="container", height=height).to_dict(validate=False)
    return {**spec, "datasets": {name: list(found) for name, found in rows.items()}}


def names_of(rows: Iterable[Row], key: str) -> list[str]:
    """Return the values of one column, each once, in their order."""
    return list(dict.fromkeys(str(row[key]) for row in rows))


def rows_axis(names: Sequence[str], field: str = "track", title: str | None = None) -> Any:
    """Return a vertical axis with one row a name."""
    alt = altair()
    axis = alt.Axis(title=title, titleAnchor="middle", ticks=False, domain=False, labelLimit=260)
    return alt.Y(field, type="nominal", sort=list(names), scale=alt.Scale(domain=list(names)), axis=axis)


def tooltip(**fields: str) -> list[Any]:
    """Return what a tooltip says: ``column="title|us"``, ``|share``, ``|number``, or text."""
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
    names = names_of(rows, "track")
    x = alt.X("start_us", type="quantitative", title="time, us", scale=alt.Scale(domain=[start_us, end_us], nice=False))
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
    colour = alt.Color("colour", type="nominal", scale=alt.Scale(domain=list("01234"), range="ordinal"), legend=None)
    ran = base.transform_filter("datum.kind == 'operation'")
    layers = [
        base.transform_filter("datum.kind == 'wait'").mark_bar(height=3, style="wait"),
        ran.transform_filter("datum.colour == null").mark_bar(height={"band": 0.82}, style="quiet"),
        ran.transform_filter("datum.colour != null").mark_bar(height={"band": 0.82}, style="tile").encode(color=colour),
        at.transform_filter("datum.label != ''")
        .transform_calculate(mid="(datum.start_us + datum.end_us) / 2")
        .mark_text(style="inside", clip=True)
        .encode(x=alt.X("mid", type="quantitative"), text="label:N"),
        at.transform_filter("datum.events != ''")
        .mark_text(style="cross", text="×", fontSize=17)
        .encode(x=alt.X("end_us", type="quantitative")),
    ]
    return finished(alt.layer(*layers), ROW_HEIGHT * len(names), slices=rows)


def use_of_tracks(parts: Sequence[Row]) -> Spec:
    """Return how busy each track was in each part of a run: rows ``track``, ``start_us``, ``end_us``, ``busy``."""
    alt = altair()
    names = names_of(parts, "track")
    end = max(p["end_us"] for p in parts)
    chart = (
        chart_of("parts")
        .mark_bar(height={"band": 0.9})
        .encode(
            x=alt.X("start_us", type="quantitative", title="time, us", scale=alt.Scale(domain=[0, end], nice=False)),
            x2="end_us",
            y=rows_axis(names),
            color=alt.Color(
                "busy",
                type="quantitative",
                title="busy",
                scale=alt.Scale(domain=[0, 1], range="ramp"),
                legend=alt.Legend(format=".0%", orient="top"),
            ),
            tooltip=tooltip(track="track", start_us="from, us|us", end_us="to, us|us", busy="busy|share"),
        )
    )
    return finished(chart, ROW_HEIGHT * len(names), parts=parts)


def stacked_bars(rows: Sequence[Row], kinds: Sequence[str], *, x_title: str, unit: str = "us") -> Spec:
    """Return one bar a ``track``, cut by ``kind``: rows ``track``, ``kind``, ``cause``, ``value``, ``share``."""
    alt = altair()
    names, order = names_of(rows, "track"), {kind: at for at, kind in enumerate(kinds)}
    ordered = [{**row, "order": order[row["kind"]]} for row in rows]
    chart = (
        chart_of("parts")
        .mark_bar(height={"band": 0.78}, style="tile")
        .encode(
            x=alt.X("value", type="quantitative", title=x_title, stack="zero"),
            y=rows_axis(names),
            color=alt.Color(
                "kind",
                type="nominal",
                title=None,
                scale=alt.Scale(domain=list(kinds), range="category"),
                legend=alt.Legend(orient="top", columns=2, labelLimit=200),
            ),
            order=alt.Order("order", type="quantitative"),
            tooltip=tooltip(track="track", cause="what", value=f"{unit}|number", share="of the kernel|share"),
        )
    )
    return finished(chart, ROW_HEIGHT * len(names), parts=ordered)


def bars(rows: Sequence[Row], *, x_title: str, form: str = ".0%") -> Spec:
    """Return one bar a ``name`` with its ``value`` written beside it; ``text`` is what a tooltip adds."""
    alt = altair()
    names = names_of(rows, "name")
    base = chart_of("rows").encode(
        x=alt.X("value", type="quantitative", title=x_title, axis=alt.Axis(format=form, tickCount=6)),
        y=rows_axis(names, "name"),
        tooltip=[*tooltip(name="what"), alt.Tooltip("value", type="quantitative", format=form), *tooltip(text="note")],
    )
    text = base.mark_text(style="label", align="left", dx=5).encode(
        text=alt.Text("value", type="quantitative", format=form)
    )
    return finished(alt.layer(base.mark_bar(height={"band": 0.7}), text), ROW_HEIGHT * len(names), rows=rows)


def changes(rows: Sequence[Row], *, x_title: str = "change, us", form: str = "+,.2f") -> Spec:
    """Return a bar for each ``part`` and ``run`` from 0 to its ``value``, runs beside one another."""
    alt = altair()
    parts, runs = names_of(rows, "part"), names_of(rows, "run")
    base = chart_of("rows").encode(
        x=alt.X(
            "value",
            type="quantitative",
            title=x_title,
            scale=alt.Scale(padding=50),
            axis=alt.Axis(tickCount=6, format=form.replace("f", "~f")),
        ),
        y=rows_axis(parts, "part"),
        yOffset=alt.YOffset("run", type="nominal", sort=runs),
        tooltip=[*tooltip(run="run", part="part"), alt.Tooltip("value", type="quantitative", format=form)],
    )
    told = alt.Text("value", type="quantitative", format=form)
    legend = alt.Legend(orient="top", labelLimit=300) if len(runs) > 1 else None
    colour = alt.Color("run", type="nominal", title=None, sort=runs, scale=alt.Scale(range="category"), legend=legend)
    layers = [base.mark_bar(height={"band": 0.9}, style="tile").encode(color=colour)]
    for is_less, kept, align, dx in ((False, ">=", "left", 4), (True, "<", "right", -4)):
        if any((row["value"] < 0) is is_less for row in rows):
            beside = base.transform_filter(f"datum.value {kept} 0").mark_text(style="label", align=align, dx=dx)
            layers.append(beside.encode(text=told))
    return finished(alt.layer(*layers), max(ROW_HEIGHT, 17 * len(runs) + 8) * len(parts), rows=rows)


def front(points: Sequence[Row], title: str = "") -> Spec:
    """Return latency against error: rows ``name``, ``latency_us``, ``error``; those with ``is_front`` are joined."""
    alt = altair()
    errors = alt.Axis(format=".0e", tickCount=4)
    base = chart_of("points").encode(
        x=alt.X("latency_us", type="quantitative", title="latency, us", scale=alt.Scale(zero=False, padding=40)),
        y=alt.Y(
            "error", type="quantitative", title="relative RMSE", scale=alt.Scale(type="log", padding=20), axis=errors
        ),
        tooltip=tooltip(name="what", latency_us="us|number", error="relative RMSE|number"),
    )
    has_front = any(point.get("is_front") for point in points)
    layers = [
        *([base.transform_filter("datum.is_front").mark_line(interpolate="step-after")] if has_front else ()),
        base.mark_point(shape="diamond", size=120, filled=True, style="mark"),
        base.transform_filter("!datum.below").mark_text(style="label", dy=-13).encode(text="name:N"),
        base.transform_filter("datum.below").mark_text(style="label", dy=14).encode(text="name:N"),
    ]
    chart = alt.layer(*layers)
    return finished(chart.properties(title=title) if title else chart, CHART_HEIGHT, points=_apart(points))


def _apart(points: Sequence[Row]) -> list[Row]:
    """Return points with the names of some below them, where the one to the left is too near."""
    reach = max(p["latency_us"] for p in points) - min(p["latency_us"] for p in points)
    found: list[Row] = []
    for point in sorted(points, key=lambda p: p["latency_us"]):
        near = [
            p
            for p in found
            # An eighth of the width is a name, a factor of 1.3 its height.
            if point["latency_us"] - p["latency_us"] < reach / 8 and abs(math.log(point["error"] / p["error"])) < 0.26
        ]
        found.append({**point, "below": bool(near) and not near[-1]["below"]})
    return found
