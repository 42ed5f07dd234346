"""The page on nodes: its figures, its timelines, and the rows it is held against."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.cases import Interval, load_measurements
from npusim.studies.validate.measured_times import Residual
from reports.nodes import models
from reports.nodes import page as nodes
from reports.nodes import study as nodes_study
from reports.parts.chart import Bar, Panel, gantt
from reports.parts.document import rounded
from reports.validation.study import wrong_signs
from tests.studies.copies import copied_cases

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def committed(repository: Path) -> dict[str, Any]:
    """Figures of the committed page."""
    data: dict[str, Any] = json.loads((repository / "reports/nodes/nodes.json").read_text())
    return data


def test_a_gain_predicted_where_a_loss_was_measured_is_named() -> None:
    def residual(name: str, measured: float, predicted: float, quantity: str = "latency_us") -> Residual:
        return Residual(name, None, quantity, Interval(measured, measured), predicted, 0.0, None)

    whole, slower, faster = residual("a_sequential", 10, 10), residual("a_tiled2", 11, 9), residual("a_tiled4", 9, 9.5)
    assert wrong_signs([whole, slower, faster, residual("b_tiled2", 11, 9)]) == ["a_tiled2"]
    assert wrong_signs([residual("c", 0.9, 1.1, "speedup"), residual("d", 1.1, 1.3, "speedup")]) == ["c"]


@pytest.mark.parametrize("name", ["papers.yaml", "ascend_910b2.yaml", "h200.yaml"])
def test_rows_beside_the_page_are_those_measured(name: str, repository: Path, shared_folder: Path) -> None:
    kept, every = copied_cases(repository / "reports/nodes" / f"measured_{name}", shared_folder / "measurements" / name)
    of_nodes = [n for n, c in every.items() if c.schedule.endswith("allreduce")]
    assert [case.name for case in kept] == of_nodes


def test_committed_forms_and_sums_are_what_comes_out(committed: dict[str, Any]) -> None:
    for part in (nodes._forms, nodes._sums):
        for key, figures in part()[1].items():
            assert rounded(figures) == committed[key]


def test_the_two_outcomes_have_their_signs(committed: dict[str, Any]) -> None:
    speedups = {name: found["speedup"] for name, found in committed["outcomes"].items()}
    assert len(speedups) == 9
    for name, speedup in speedups.items():
        assert (speedup > 1) == ("910B" in name), name
    errors = committed["errors"]
    assert errors["residuals_papers"]["worst"] < 0.1
    assert errors["residuals_npu"]["worst"] < 0.2
    assert errors["residuals_gpu"]["worst"] < 0.2


@pytest.mark.parametrize("blocks", [2, 8])
def test_causes_add_up_to_the_change(blocks: int) -> None:
    found = nodes_study.change("h200_x2", 32768, "sm", blocks)
    parts = found.untiled + found.cut + found.shared + found.exposed
    assert parts == pytest.approx(found.tiled)
    assert found.exposed < 0 < found.cut + found.shared
    assert found.speedup < 1


def test_protocol_changes_once_with_the_message() -> None:
    steps = nodes_study.step("h200_x2", "sm", [1 << i for i in range(10, 29)])
    assert [mode for _, mode in steps] == ["ll", "simple"]


def test_timelines_are_to_scale_and_escape_names() -> None:
    bars = {"COMPUTE": [Bar("attention", "A0", 0, 50)], "SDMA": [Bar("allreduce", "R0", 50, 100)]}
    panels = [Panel("left", {"run": bars}), Panel("right", {"run": bars})]
    svg = gantt("a < b", panels, ("attention", "allreduce"))
    assert "a &lt; b" in svg
    found = re.findall(r'aria-roledescription="bar" d="M([\d.]+),[\d.]+h([\d.]+)v', svg)
    edges = [(float(x), float(x) + float(width)) for x, width in found]
    assert len(edges) == 4
    assert edges[0][1] == edges[1][0]


def test_the_hosts_rows_are_those_of_the_shared_file(repository: Path, shared_folder: Path) -> None:
    kept = load_measurements(repository / "reports/nodes/measured_offload.yaml").cases
    assert kept == load_measurements(shared_folder / "measurements/papers_offload.yaml").cases


def test_gains_are_nearer_than_a_constant_and_ranked(committed: dict[str, Any]) -> None:
    gains = committed["gains"]
    assert gains["error"] < gains["error_of_a_constant"]
    assert gains["rank_correlation"] > 0.7
    assert models.rank_correlation([1, 2, 3], [2, 4, 9]) == 1
    assert models.rank_correlation([1, 2, 3], [9, 4, 2]) == -1
    assert models.rank_correlation([1, 1, 2], [1, 2, 2]) == pytest.approx(0.5)


def test_a_models_layers_never_take_longer_than_the_whole_that_was_measured(committed: dict[str, Any]) -> None:
    found = committed["whole_models"]
    cases = {c.name for c in load_measurements(models.HERE / "measured_models.yaml").cases}
    assert found.keys() == cases
    assert all(case["rest_us_a_layer"] > 0 for case in found.values())


def test_committed_layer_counts_are_what_comes_out(committed: dict[str, Any]) -> None:
    assert rounded(models.layer_counts()[1]["layer_counts"]) == committed["layer_counts"]


def test_other_orders_change_bits_of_the_real_layer_and_hardly_its_error(committed: dict[str, Any]) -> None:
    for found in committed["real_bits"].values():
        assert found["overflow"] == 0
        assert found["rmse"] < 5e-4
        assert all(0 < differing < 0.25 for differing, _ in found["orders"].values())
