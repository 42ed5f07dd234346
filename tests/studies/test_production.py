"""The page on kernels that people run: its rows are those measured, its figures those computed."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from npusim.studies.validate.measured_times import validate_times
from reports.parts.document import rounded
from reports.production import page
from tests.studies.copies import copied_cases

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def committed(repository: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((repository / "reports/production/production.json").read_text())
    return data


@pytest.mark.parametrize("name", ["h200_production", "h200_served", "ascend_cann"])
def test_rows_beside_the_page_are_those_measured(name: str, shared_folder: Path) -> None:
    kept, every = copied_cases(page.HERE / f"measured_{name}.yaml", shared_folder / "measurements" / f"{name}.yaml")
    assert {case.name for case in kept} == every.keys()


def test_committed_figures_are_those_computed(committed: dict[str, Any]) -> None:
    (path,) = (path for _, path in page.FILES if path.name == "measured_ascend_cann.yaml")
    errors = [r.relative_error for r in validate_times(path).residuals if r.quantity.endswith("_us")]
    assert rounded(median(map(abs, errors))) == committed["summary"]["cann seen"]["median"]
    times = {k: page._time_us(64, 1024, causal=True, kernel=k) for k in ("fa2", "fa3", "cudnn")}
    assert {k: rounded(t) for k, t in times.items()}.items() <= committed["beside"]["d 64, 1024 keys, causal"].items()


def test_what_the_page_says_holds_in_its_figures(committed: dict[str, Any], repository: Path) -> None:
    tiles, text = committed["tiles"], (repository / "reports/production/production.md").read_text()
    better = [name for name, found in tiles.items() if found["gain"] > 0.02]
    assert f"For {len(better)} of {len(tiles)} calls another tile" in text
    assert all(found["best_us"] == min(found["tiles"].values()) for found in tiles.values())
    assert committed["gain"]["most"] > committed["gain"]["median"] > 1
