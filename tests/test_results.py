"""Results as people meet them in Python: they fit a screen, save themselves, and say what they are."""

from __future__ import annotations

import inspect
import json
import pydoc
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.program.timing.timing_result import units_of
from npusim.report.result_json import load_result, record_of

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")

SCREEN = 60 * 200


@pytest.fixture(scope="module")
def result() -> RunData:
    return npusim.run("pasa", seq=256, presets=True)


def test_a_result_fits_a_line_and_prints_as_its_table(result: RunData) -> None:
    assert repr(result) == (
        f"<RunResult pasa-pangu_38b-256 on ascend_910b2, fp16_mean, {result.cycles:,} cycles, "
        f"{result.latency_us:,.2f} us, relative RMSE {result.numerics.error.rmse:.2e}>"  # type: ignore[union-attr]
    )
    text = str(result)
    assert text.startswith("pasa on ascend_910b2   precision fp16_mean\n")
    assert len(text) < SCREEN
    assert text.count("\n") < 60
    for part in (result.timing, result.numerics):
        assert len(repr(part)) < SCREEN / 4


def test_an_error_stands_by_itself_to_be_compared_and_kept(result: RunData) -> None:
    assert result.numerics is not None
    error = result.numerics.error
    assert error == replace(result.numerics).error
    assert json.loads(json.dumps(asdict(error)))["rmse"] == error.rmse


def test_help_describes_every_parameter() -> None:
    text = pydoc.render_doc(npusim.run)
    described = text.partition("Parameters")[2].partition("Returns")[0]
    for name in inspect.signature(npusim.run).parameters:
        assert name in described.replace(",", " ").split(), name
    for heading in ("Returns", "Raises", "Examples"):
        assert heading in text


def test_a_result_saves_itself(result: RunData, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "a")
    assert {p.name for p in folder.iterdir()} == {"result.json", "figures.json", "pipes.csv", "trace.json"}
    assert load_result(folder).to_document() == record_of(result).to_document()
    assert "output.safetensors" in {p.name for p in result.save(folder, save_output=True).iterdir()}


def test_presets_stand_beside_a_pasa_run_with_the_same_figures_as_alone(result: RunData) -> None:
    found = {p.precision: p for p in result.presets}
    assert list(found) == ["fp16_mean", "fp32_mean", "fixed_reference"]
    assert result.compared == "rows 192..255 of head 0"
    for name, preset in found.items():
        alone = npusim.run("pasa", seq=256, heads=[0], precision=name, trace_groups=())
        assert alone.numerics is not None
        rows, each = (x[0, 0, 128] for x in (alone.numerics.rows, alone.numerics.row_errors))
        weights = (rows[64:].astype(np.float64) ** 2).sum(axis=1)  # nearly those of the reference
        assert preset.relative_rmse == pytest.approx(np.sqrt(np.average(each[64:] ** 2, weights=weights)), rel=1e-3)
        assert preset.latency_us == alone.latency_us
    text = str(result)
    own, *others = result.presets
    for p in others:
        assert f"{p.precision} {p.latency_us:.2f} us, {p.relative_rmse / own.relative_rmse:.2f}" in text
    assert text.count("(of rows 192..255 of head 0)") == 2  # of other arithmetic too
    assert not npusim.run("flash", seq=64, presets=True, trace_groups=()).presets


def test_the_mean_chain_in_float16_is_seen_to_lose_on_resonant_inputs() -> None:
    result = npusim.run("pasa", workload="pasa_hybrid", seq=512, heads=[0], presets=True, trace_groups=())
    error = {p.precision: p.relative_rmse for p in result.presets}
    assert result.numerics is not None
    assert error["fp32_mean"] is not None
    assert result.numerics.error.rmse > 5 * error["fp32_mean"]


def test_the_command_line_shows_presets_unless_told_not_to() -> None:
    arguments = ["run", "pasa", "--seq", "128", "--no-save"]
    for more, shown in ((["--heads=0"], True), (["--heads=0", "--no-presets"], False), (["--no-numerics"], False)):
        done = CliRunner().invoke(app, [*arguments, *more])
        assert done.exit_code == 0
        assert ("presets " in done.stdout) == shown


def test_an_exploration_fits_a_line_and_becomes_columns() -> None:
    found = npusim.explore("flash", {"block_q": [128, 2048], "depth": [1]}, seq=256)
    best = found.best
    assert best is not None
    assert repr(found) == (
        "<Exploration of flash on ascend_910b2: 1 ok, 1 infeasible; best block_q=128 depth=1: "
        f"{best.cycles:,} cycles, {best.latency_us:,.2f} us>"
    )
    assert found.columns()["status"] == ["ok", "infeasible"]


def test_a_live_result_has_all_that_its_record_has() -> None:
    result = npusim.run("flash", seq=64, heads=[0])
    timing, bits = result.timing, result.numerics
    assert timing is not None
    assert bits is not None
    assert timing.flops == result.program.flops > 0
    assert {use.queue for use in timing.uses} == {use.queue for group in timing.queues for use in group}
    assert sum(c.cycles for c in timing.constants) == sum(use.busy_cycles for use in units_of(timing.uses))
    assert timing.roofline is not None
    assert timing.validated is not None
    assert bits.row_sums is not None
    assert set(bits.row_sums) == set(bits.row_sum_orders)


def test_a_comparison_fits_a_line() -> None:
    one = npusim.run("flash", seq=64, numerics=False, trace_groups=())
    two = npusim.run("flash", seq=64, numerics=False, trace_groups=(), tiling={"depth": 1})
    assert repr(npusim.compare(one, two)) == (
        f"<Comparison of flash-pangu_38b-64 #1 and flash-pangu_38b-64 #2: {one.latency_us:,.2f} -> "
        f"{two.latency_us:,.2f} us; tiling.depth differs>"
    )
    assert repr(npusim.compare(one, one)).endswith(" us; no input differs>")


def test_folders_differ_where_predictions_do_and_not_where_what_is_shown_does() -> None:
    further: tuple[dict[str, Any], ...] = ({}, {"timeline": (0.0, 2.0)}, {"window": 64})
    plain, same, windowed = (npusim.run("flash", seq=256, **more).folder for more in further)
    assert plain == same != windowed
