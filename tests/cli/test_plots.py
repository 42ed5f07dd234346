"""Pictures beside the tables: each verb with --plot writes one, and its axes say where they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.report import charts
from npusim.report.charts import Figure
from npusim.report.text import Grid

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("altair", reason="npusim[report] is not installed")
pytest.importorskip("vl_convert", reason="npusim[report] is not installed")

from npusim.report.plot import picture

NONE = Grid((), "", ())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run flash --seq 128 --no-numerics --no-save", ("on ascend_910b2: where the time goes", "time, us")),
        ("compare flash pasa --seq 128 --no-numerics", ("flash and pasa: why the latencies differ", "change, us")),
        (
            "explore flash -f block_kv=64,128 -f block_q=32,64 --seq 128 -j1",
            ("flash on ascend_910b2: block_kv and block_q", "us"),
        ),
        ("stress pasa --seq 64 --budget 1 --over logit_std=1:2", ("the largest errors", "relative RMSE (logarithmic)")),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else "",
)
def test_a_verb_writes_a_picture(
    command: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*command.split(), "--plot", "picture.svg"])
    assert done.exit_code == 0, done.output
    assert "wrote picture.svg" in done.stderr
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert all(word in text for word in words)


def test_a_picture_is_refused_before_the_work_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, words in (("picture.gif", "pictures end in .svg or .png"), (str(tmp_path), "pictures end in")):
        refused = CliRunner().invoke(app, ["run", "flash", "--seq", "64", "--no-save", "--plot", file])
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_an_axis_that_does_not_start_at_0_says_so() -> None:
    points = [{"name": n, "latency_us": us, "error": 1e-3 * us} for n, us in (("a", 140.0), ("b", 141.0))]
    text = picture([Figure("front", "Front", "", charts.front(points), NONE)], ".svg").decode()
    assert "latency, us (axis starts at 139.9)" in text
    assert "relative RMSE (logarithmic)" in text
    bars = charts.bars([{"name": "a", "value": 140.0, "text": ""}, {"name": "b", "value": 141.0, "text": ""}])
    assert "axis starts" not in picture([Figure("bars", "Bars", "", bars, NONE)], ".svg").decode()


def test_a_png_has_its_signature() -> None:
    bars = charts.bars([{"name": "a", "value": 1.0, "text": ""}])
    assert picture([Figure("bars", "Bars", "", bars, NONE)], ".png")[:8] == b"\x89PNG\r\n\x1a\n"
