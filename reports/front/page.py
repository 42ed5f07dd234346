"""The picture that the README opens with: what attention costs in time against what it costs in error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.report.charts import front
from npusim.report.page import svg
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from reports.parts.document import number, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.report.charts import Row

__all__ = ["write"]

#: Schedules and presets, with what each keeps in float16.
CHOICES = (
    ("flash", "fa2_fp32"),
    ("flash", "fa16_32"),
    ("flash", "fa16"),
    ("two_level", "fa2_fp32"),
    ("two_level", "fa16_32"),
    ("pasa", "fp32_mean"),
    ("pasa", "fp16_mean"),
)
TITLE = "Causal attention of PanGu-38B, 4,096 tokens, on an Ascend 910B2: time against error, predicted"
DEVICE, WORKLOAD, TOKENS = "ascend_910b2", "pangu_38b", 4096


def write(folder: Path) -> list[Path]:
    """Write the page, its figures and the picture."""
    points = [_point(schedule, precision) for schedule, precision in CHOICES]
    for point in points:
        point["is_front"] = not any(_beats(other, point) for other in points)
    rows = [[p["name"], p["latency_us"], p["error"], "yes" if p["is_front"] else ""] for p in points]
    head = ["schedule, precision", "latency, us", "relative RMSE", "on the front"]
    cann = _point("flash", "fa2_fp32", "cann")
    fields: dict[str, object] = {"points": table(head, rows), "cann": number(cann["latency_us"])}
    picture = svg(front(points, TITLE), width=760)
    return save_page(folder, "front", (fields, {"points": points}), {"front.svg": picture})


def _point(schedule: str, precision: str, kernel: str = "pto") -> Row:
    """Return one run, of one kernel where there is a choice: the default of some presets is another program."""
    tiling = declared_tiling(schedule, DEVICE, **({"kernel": kernel} if schedule != "pasa" else {}))
    result = run_request(
        Request(schedule, hw=DEVICE, workload=WORKLOAD, seq=TOKENS, tiling=tiling, precision=precision, trace_groups=())
    )
    assert result.numerics is not None
    return {"name": f"{schedule} {precision}", "latency_us": result.latency_us, "error": result.numerics.error.rmse}


def _beats(one: Row, two: Row) -> bool:
    """Return whether one point is at least as good as another in both, and better in one."""
    better = one["latency_us"] < two["latency_us"] or one["error"] < two["error"]
    return bool(better and one["latency_us"] <= two["latency_us"] and one["error"] <= two["error"])
