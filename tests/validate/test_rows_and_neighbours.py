"""Predictions beside measured neighbours, and as tables for others."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.problem import GemmProblem
from npusim.errors import SpecError
from npusim.report.latency_rows import latency_rows, refuse_other_table
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from npusim.studies.validate.nearest import nearest

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.simulation.run_result import RunData

CASE = "  - {name: %s, device: %s, schedule: gemm, workload: {m: %d, n: 512, k: 512}, measured: {latency_us: 20}}\n"


def product(hw: str, m: int, n: int, k: int) -> RunData:
    return run_request(Request("gemm", hw=hw, problem=GemmProblem(m=m, n=n, k=k), numerics=False))


def file_of(tmp_path: Path, *rows: tuple[str, str, int]) -> Path:
    file = tmp_path / "measured.yaml"
    file.write_text('schema: npusim.measurements/1\nsource: "x"\ncases:\n' + "".join(CASE % row for row in rows))
    return file


def test_the_nearest_measured_cases_are_named_with_what_differs_and_their_error(tmp_path: Path) -> None:
    file = file_of(tmp_path, ("far", "ascend_910b2", 8192), ("near", "ascend_910b2", 512), ("other", "h200", 256))
    run = product("ascend_910b2", 256, 512, 512)
    first, second = nearest(run, file)
    assert (first.name, first.measured_us, second.name) == ("near", 20, "far")
    assert "m 512" in first.differs
    assert first.relative_error == pytest.approx(first.predicted_us / 20 - 1)
    assert second.distance - first.distance == pytest.approx(4)
    with pytest.raises(SpecError, match="no latency of gemm on ascend_910b2"):
        nearest(run, file_of(tmp_path, ("other", "h200", 256)))


def test_a_table_replaces_no_file_of_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    refuse_other_table(file)
    for text in ("", "m,n,k,latency,band\n1,2,3,4,\n"):
        file.write_text(text)
        refuse_other_table(file)
    file.write_text("shape,band,us\n1,2,3\n")
    with pytest.raises(
        SpecError, match=r"mine.csv: is not a table of latencies, so that npusim does not replace it; .*--force"
    ):
        refuse_other_table(file)
    words = ["export", "rows", str(file), "--schedule", "gemm", "-g", "m=64", "-g", "n=64", "-g", "k=64"]
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, file.read_text()) == (2, "shape,band,us\n1,2,3\n")
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    written = file.read_text()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert file.read_text() == written


def test_rows_have_the_readers_columns_units_and_the_band() -> None:
    axes = {"m": [512, 64], "n": [512], "k": [512]}
    text, faults = latency_rows("gemm", axes, "aiconfigurator", hw="h200")
    rows = list(csv.DictReader(io.StringIO(text)))
    head = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency,band"
    assert (text.splitlines()[0], len(rows), faults) == (head, 2, ())
    run = product("h200", 512, 512, 512)
    assert float(rows[0]["latency"]) * 1e3 == pytest.approx(run.latency_us, rel=1e-3)
    assert 0 < float(rows[0]["band"]) < 1
    assert rows[1]["band"] == "", "none like it was measured"
    axes = {"heads": [2], "seq_q": [256], "head_dim": [64]}
    (row,) = csv.DictReader(io.StringIO(latency_rows("flash", axes, "msmodeling", hw="h200")[0]))
    assert row["Input Shapes"] == ";".join(["1,2,256,64"] * 3)
    with pytest.raises(SpecError, match="--grid: sizes m; needed: m, n and k"):
        latency_rows("gemm", {"m": [1]}, "aiconfigurator")
