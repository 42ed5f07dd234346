"""Charts of pages as SVG text, from the specifications of `npusim.report.charts`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from npusim.report.charts import lines as line_chart
from npusim.report.charts import tracks
from npusim.report.page import svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.report.charts import Row

__all__ = ["Bar", "Panel", "chart", "gantt"]

WIDTH = 560


class Bar(NamedTuple):
    """One operation: what kind it is, its number, and its edges in microseconds."""

    kind: str
    label: str
    start: float
    end: float


class Panel(NamedTuple):
    """Runs on one time axis: each a name with the bars of its tracks."""

    title: str
    runs: Mapping[str, Mapping[str, Sequence[Bar]]]


def chart(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]], *,
    log_x: bool = False, log_y: bool = False,
) -> str:  # fmt: skip
    """Return a line chart as SVG text; points that are not finite are left out of their line."""
    return svg(line_chart(x_label, y_label, lines, log_x=log_x, log_y=log_y, title=title), WIDTH)


def gantt(title: str, panels: Sequence[Panel], kinds: Sequence[str]) -> str:
    """Return the panels below one another as SVG text, each with its own time axis from 0, a colour a kind."""
    charts, rows = [], {}
    for number, panel in enumerate(panels):
        slices: list[Row] = [
            {
                "track": f"{run}: {track}", "name": bar.label, "kind": "operation", "start_us": bar.start,
                "end_us": bar.end, "tile": list(kinds).index(bar.kind),
            }
            for run, found in panel.runs.items()
            for track, bars in found.items()
            for bar in bars
        ]  # fmt: skip
        spec = tracks(slices, 0, max(s["end_us"] for s in slices))
        rows[f"panel{number}"] = spec.pop("datasets")["slices"]
        named = json.dumps(spec).replace('"name": "slices"', f'"name": "panel{number}"')
        charts.append({**json.loads(named), "title": panel.title, "width": WIDTH})
    return svg({"title": title, "vconcat": charts, "datasets": rows, "spacing": 24})
