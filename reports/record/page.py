"""Page: kernels in the forms of Triton's tutorials, recorded without a GPU, with their times on an H200 and a 910B2."""

from __future__ import annotations

import csv
from pathlib import Path

from npusim.units import format_bytes
from reports.parts.document import Section, gather, save_page, table

__all__ = ["rows", "write"]

#: Predictions as `record.py` wrote them.
RECORDED = Path(__file__).resolve().parent / "times.csv"


def rows() -> list[dict[str, str]]:
    """Return the rows of the file, a launch each."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(folder: Path) -> list[Path]:
    """Write ``record.md`` and its data to ``folder``."""
    made = rows()
    return save_page(folder, "record", gather("record", [_times(made), _cost(made)]))


def _times(made: list[dict[str, str]]) -> Section:
    header = ["tutorial", "size", "programs", *(text for d in ("H200", "910B2") for text in (f"us, {d}", f"rate, {d}"))]
    header.append("relative RMSE")
    listed = [
        [
            r["tutorial"],
            r["sizes"],
            f"{int(r['programs']):,}",
            *(text for d in ("h200", "ascend_910b2") for text in (f"{float(r[f'{d}_us']):,.1f}", _rate(r, d))),
            f"{float(r['h200_rmse']):.1e}",
        ]
        for r in made
    ]
    return {"count": str(len(made)), "times": table(header, listed)}, {"launches": made}


def _rate(row: dict[str, str], device: str) -> str:
    """Return the products of a launch per second; without products its bytes per second, each tensor counted once."""
    us, flops = float(row[f"{device}_us"]), int(row["flops"])
    return f"{flops / us / 1e6:,.0f} TFLOP/s" if flops else f"{int(row['bytes']) / us / 1e3:,.0f} GB/s"


def _cost(made: list[dict[str, str]]) -> Section:
    first, again = ([float(r[n]) for r in made] for n in ("launch_s", "again_s"))
    files, predicted = [int(r["file_bytes"]) for r in made], [float(r["predict_s"]) for r in made]
    fields = {
        "first": f"{max(first):.2f}",
        "again": f"{max(again):.2f}",
        "largest": format_bytes(max(files)),
        "slowest": f"{max(predicted):.0f}",
        "quickest": f"{min(predicted):.1f}",
    }
    return dict(fields), {"cost": fields}
