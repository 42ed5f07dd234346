"""Page: is it right?  One table of all that npusim is held against, from the data of the studies and of the tests."""

from __future__ import annotations

import json
from collections import Counter
from csv import DictReader
from typing import TYPE_CHECKING, Any

from npusim.formats import ARITHMETICS
from reports.papers.page import STATUSES
from reports.papers.page import rows as paper_rows
from reports.parts.document import STUDIES, save_page, table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write"]

TESTS = STUDIES.parent / "tests"
#: A tile whose time is at most this multiple of the best one's counts as equally good.
NEAR = 1.05
#: Sources of measured times, and the page that explains the errors of their predictions.
PAGES = {
    "910B": "ascend_timing",
    "910B, CANN's tuning bank": "ascend_timing",
    "910B, CANN's attention": "production",
    "950": "ascend_950",
    "two H200": "nodes",
    "eight 910B": "nodes",
    "whole models": "nodes",
    "H200, kernels in production": "production",
    "V100": "volta",
}


def write(folder: Path) -> list[Path]:
    """Write ``right.md`` and its data to ``folder``; results of other pages are read from ``reports/``."""
    validation = _data("validation")
    rows = [*_bits(validation["bits"]), *_kept(), *_papers(), *_times(validation["summary"])]
    marked = Counter(unit.evidence for unit in ARITHMETICS.values())
    fields: dict[str, object] = {
        "table": table(("quantity", "compared with", "count", "result", "page or file"), rows),
        "confirmed": marked["hardware-vectors"],
        "assumed": marked["assumed"],
        "all_median": validation["summary"]["all but whole models"]["median"],
        "all_most": validation["summary"]["all but whole models"]["most"],
        "models_median": validation["summary"]["whole models"]["median"],
    }
    return save_page(folder, "right", (fields, {"rows": rows}))


def _data(study: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((STUDIES / study / f"{study}.json").read_text(encoding="utf-8"))
    return data


def _page(study: str) -> str:
    return f"[{study}](../{study}/{study}.md)"


def _bits(found: dict[str, list[int]]) -> list[list[object]]:
    """Outputs recorded on hardware: of matrix instructions, and of whole kernels."""
    return [
        [
            "bits of whole kernels" if name.startswith("attention") else "bits of matrix instructions",
            f"`{name}`, recorded on hardware: {count} kinds",
            f"{outputs:,}",
            f"{equal:,} equal",
            _page("validation"),
        ]
        for name, (count, outputs, equal) in found.items()
    ]


def _kept() -> list[list[object]]:
    """Bits and cycles of every schedule as they were accepted, tiles as they are proved."""
    pins = json.loads((TESTS / "golden" / "pins.json").read_text(encoding="utf-8"))
    with (TESTS / "golden" / "defaults.csv").open(encoding="utf-8", newline="") as lines:
        ratios = [float(row["ratio"]) for row in DictReader(lines)]
    off = [100 * (ratio - 1) for ratio in (NEAR, max(ratios))]
    near = f"{sum(r <= NEAR for r in ratios)} within {off[0]:.0f} % of the best, the worst at {off[1]:.1f} %"
    baselines = sorted((TESTS / "baselines").glob("*.yaml"))
    return [
        [
            "bits and cycles of programs",
            "accepted values, by hash",
            len(pins),
            "equal, or changed with a stated reason",
            "`tests/golden/pins.json`",
        ],
        ["tiles chosen by runs", "proved best tiles of their spaces", len(ratios), near, "`tests/golden/defaults.csv`"],
        [
            "cycles and decisions of devices",
            "files of baselines in CI",
            len(baselines),
            "inside their tolerances",
            "`tests/baselines`",
        ],
    ]


def _papers() -> list[list[object]]:
    """Tables, figures and claims of the papers."""
    counts = Counter(status for _, _, status in paper_rows())
    result = ", ".join(f"{counts[status]} {status}" for status in STATUSES).replace("drawing", "drawings")
    return [["papers' tables, figures, claims", "three papers", sum(counts.values()), result, _page("papers")]]


def _times(summary: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Measured times, source by source."""
    return [
        [
            f"times: {kind}",
            "measurements",
            errors["cases"],
            f"half within {errors['median']}, nine in ten within {errors['most']}",
            _page(PAGES.get(kind, "validation")),
        ]
        for kind, errors in summary.items()
    ]
