"""Page: times of chips of compute capability 12 against published ones, and one table of time and error by format."""

from __future__ import annotations

import csv
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import npusim
from npusim.studies.validate.measured_times import kendall_tau
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.validation.study import Errors

__all__ = ["write"]

#: Predictions as `reports/silicon/sm120.py` wrote them.
RECORDED = Path(__file__).resolve().parent / "predictions.csv"
#: The call whose formats are compared, and their presets: bfloat16's width, FP8, formats in blocks of scales.
DEVICES = ("rtx_pro_6000", "rtx_5090")
CALL: dict[str, Any] = {"workload": "qwen2_7b", "seq": 2048}
PRESETS = ("fa2_fp32", "sage_fp8", "mxfp8", "nvfp4")


class Case(NamedTuple):
    """A published time, its prediction in microseconds, whether a constant was fitted on it, and its prediction with
    the constants that all other shapes decide (`reports/silicon/board_clock.py`; None: they decide none, or one that
    acts on all cases of the group in proportion).
    """

    group: str
    us: float
    predicted_us: float
    is_fitted: bool
    left_out_us: float | None = None

    @property
    def log_error(self) -> float:
        """The logarithm of predicted over measured."""
        return log((self.left_out_us or self.predicted_us) / self.us)


def write(folder: Path) -> list[Path]:
    """Write ``sm120.md`` and its data to ``folder``."""
    return save_page(folder, "sm120", gather("sm120", [_errors(cases()), _formats()]))


def cases() -> list[Case]:
    """Return the recorded cases, sorted by group."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [
        Case(
            row["group"],
            float(row["us"]),
            float(row["predicted_us"]),
            row["is_fitted"] == "yes",
            float(row["left_out_us"]) if row.get("left_out_us") else None,
        )
        for row in rows
    ]
    return sorted(found, key=lambda case: case.group)


def left_out(group: list[Case]) -> list[float]:
    """Return the relative errors of a group; where its clock was fitted, each as the other cases would have fitted it.

    A limit in watts alone acts on all cases of a group in proportion; where more was fitted, a case has its own
    prediction of the other shapes.
    """
    logs = [case.log_error for case in group]
    if not all(case.is_fitted and case.left_out_us is None for case in group) or len(group) < 2:
        return [exp(x) - 1 for x in logs]
    total, others = sum(logs), len(logs) - 1
    return [exp(x - (total - x) / others) - 1 for x in logs]


def _errors(found: list[Case]) -> Section:
    rows, data = [], []
    for name, members in groupby(found, lambda case: case.group):
        group = list(members)
        signed = left_out(group)
        errors = Errors.of(signed)
        pairs = [(case.us, case.predicted_us) for case in group]
        order = kendall_tau(pairs) if len(pairs) > 1 else None
        figures = {
            "group": name,
            "cases": len(group),
            "fitted": sum(case.is_fitted for case in group),
            "median": errors.median,
            "most": errors.most,
            "bias": fmean(signed),
            "tau": order,
        }
        data.append(figures)
        shares = [percent(float(str(figures[key]))) for key in ("median", "most", "bias")]
        counts = [str(figures[key]) for key in ("cases", "fitted")]
        rows.append([name, *counts, *shares, "no pairs" if order is None else f"{order:.2f}"])
    header = ["group", "cases", "fitted on", "median error", "nine in ten", "mean error", "tau"]
    fields: dict[str, object] = {"errors": table(header, rows), "counted": str(len(found))}
    return fields, {"groups": data}


def _formats() -> Section:
    rows, data = [], []
    for hw in DEVICES:
        for preset in PRESETS:
            result = npusim.run("flash", hw=hw, precision=preset, trace_groups=(), **CALL)
            error = None if result.numerics is None else result.numerics.error.rmse
            rows.append([hw, preset, f"{result.latency_us:.1f}", number(error)])
            data.append({"device": hw, "precision": preset, "us": result.latency_us, "error": error})
    return {"tokens": f"{CALL['seq']:,}", "formats": table(["device", "precision", "us", "relative RMSE"], rows)}, {
        "formats": data
    }
