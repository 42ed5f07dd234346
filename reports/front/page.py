"""The README's figures: time against error of attention at the tiles that runs choose, and what is simulated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.report.charts import CHART_HEIGHT, front
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from reports.front.drawing import drawing
from reports.parts.chart import svg
from reports.parts.document import number, save_page, table
from reports.parts.front import unbeaten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npusim.report.charts import Row

__all__ = ["picture", "write"]

#: Schedules and presets, which differ in the values that are float16.
CHOICES = (
    ("flash", "fa2_fp32"),
    ("flash", "fa16_32"),
    ("flash", "fa16"),
    ("two_level", "fa2_fp32"),
    ("two_level", "fa16_32"),
    ("pasa", "fp32_mean"),
    ("pasa", "fp16_mean"),
)
DEVICE, TOKENS = "ascend_910b2", 4096
WIDTH = 400
#: Width of a panel on a narrow screen, where panels are below one another.
NARROW = 270
NAMES = tuple(dict.fromkeys(schedule for schedule, _ in CHOICES))
#: Position of outputs that are not finite, above every error, and the text there instead of a number.
BEYOND, LOST = 10.0, "NaN"


class Load(NamedTuple):
    """One panel: a workload, its name in the data, its title, and the errors marked on its axis."""

    workload: str
    name: str
    title: str
    marked: tuple[float, ...]


LOADS = (
    Load("pangu_38b", "usual", "usual activations (PanGu-38B, causal)", (3e-4, 1e-3, 3e-3)),
    Load("pasa_resonance", "resonant", "resonant Q and K: float16 scores overflow", (1e-4, 1e-3, 1e-2, 1e-1, BEYOND)),
)


def write(folder: Path) -> list[Path]:
    """Write the page, its figures and the picture."""
    found = {load.name: [_point(load, *choice) for choice in CHOICES] for load in LOADS}
    rows = []
    for points in found.values():
        names = unbeaten({p["name"]: (p["latency_us"], p["error"]) for p in points if p["error"] is not None})
        for point in points:
            point["is_front"] = point["name"] in names
    for one, other in zip(*found.values(), strict=True):
        sides = [[p["latency_us"], number(p["error"]), "yes" if p["is_front"] else ""] for p in (one, other)]
        rows.append([one["name"], *sides[0], *sides[1]])
        rows[-1][1:1] = [one["tile"]]
    half = ["latency, us", "relative RMSE", "on the front"]
    usual = {p["name"]: p for p in found["usual"]}
    finite = [p["name"] for p in found["resonant"] if p["error"] is not None and "fa2_fp32" not in p["name"]]
    fields: dict[str, object] = {
        "points": table(["schedule, precision", "tile, usual", *half, *(f"{h}, resonant" for h in half)], rows),
        "flash": f"{usual['flash fa2_fp32']['latency_us']:.2f}",
        "pasa": f"{usual['pasa fp16_mean']['latency_us']:.2f}",
        "finite": " and ".join(f"`{name}`" for name in finite),
    }
    pictures = {
        "front.svg": picture(found),
        "front_narrow.svg": picture(found, NARROW),
        "simulated.svg": drawing(DEVICE),
        "simulated_narrow.svg": drawing(DEVICE, is_narrow=True),
    }
    return save_page(folder, "front", (fields, {"points": found}), pictures)


def _point(load: Load, schedule: str, precision: str) -> Row:
    """Return one run as a user has it: the fields of the tile that nobody names are chosen."""
    result = run_request(
        Request(schedule, hw=DEVICE, workload=load.workload, seq=TOKENS, precision=precision, trace_groups=())
    )
    assert result.numerics is not None
    fields = dict(result.tiling)
    kernel = f" {fields['kernel']}" if fields.get("kernel") else ""
    named = {"name": f"{schedule} {precision}", "schedule": schedule}
    named["tile"] = f"{fields['block_q']} x {fields['block_kv']}{kernel}"
    return {**named, "latency_us": result.latency_us, "error": result.numerics.error.rmse}


def picture(points: Mapping[str, Sequence[Row]], width: int = WIDTH) -> str:
    """Return the figure as SVG text: panels ``width`` pixels wide, below one another if they are narrow."""
    panels = [_panel(points[load.name], load, width) for load in LOADS]
    title = f"Attention of {TOKENS:,} tokens on an Ascend 910B2: ", "time against error, both predicted"
    rows = {name: data for panel in panels for name, data in panel.pop("datasets").items()}
    if width < WIDTH:
        return svg({"title": {"text": title, "anchor": "middle"}, "vconcat": panels, "datasets": rows})
    words = {"text": "".join(title), "anchor": "middle"}
    return svg({"title": words, "vconcat": [{"hconcat": panels}], "datasets": rows})


def _panel(points: Sequence[Row], load: Load, width: int) -> dict[str, Any]:
    """Return one panel of the given width, with names that fit; outputs that are not finite are above all errors."""
    drawn = [{**p, "error": p["error"] or BEYOND, "is_front": False} for p in points]  # no line joins them
    spec = front(drawn, load.title)
    data = spec.pop("datasets")
    data["names"] = [n for n in data["names"] if n["least"] <= width < n["beyond"]]
    text = json.dumps(spec)
    for name in data:
        text = text.replace(f'"name": "{name}"', f'"name": "{load.name}_{name}"')
    spec = json.loads(text)
    label = f"datum.value >= {BEYOND} ? '{LOST}' : format(datum.value, '~e')"
    colour = {"field": "schedule", "type": "nominal", "title": None, "scale": {"domain": NAMES, "range": "category"}}
    for layer in spec["layer"]:
        kind, encoding = layer["mark"]["type"], layer["encoding"]
        if kind == "text":
            del layer["transform"]
        if kind == "point":
            encoding["y"]["axis"] = {"values": load.marked, "labelExpr": label}
            encoding["x"]["axis"] = {"tickCount": 5, "labelOverlap": "greedy", "labelSeparation": 12}
            encoding["color"] = {**colour, "legend": {"orient": "top"}}
            layer["mark"].pop("style")
    sizes = {"width": width, "height": CHART_HEIGHT}
    return {**spec, **sizes, "datasets": {f"{load.name}_{n}": rows for n, rows in data.items()}}
