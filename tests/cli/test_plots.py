"""Pictures beside the tables: each verb with --plot writes one, and its axes say where they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.report import charts
from npusim.report.charts import Figure
from npusim.report.text import Grid
from npusim.studies.stress.scores import HIGHEST, LOWEST

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
            ("flash on ascend_910b2: block_kv and block_q", "us (colours do not start at 0)"),
        ),
        ("stress pasa --seq 64 --budget 1 --over logit_std=1:2", ("the largest errors", "relative RMSE (logarithmic)")),
        (
            "export rows a.csv --hw h200 -g heads=2 -g seq_q=128,256 -g head_dim=64",
            ("flash on h200: latency by seq_q", "heads=2, head_dim=64", "latency, us (logarithmic)"),
        ),
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


def test_scores_are_drawn_before_and_after_the_shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, more in (("pasa", ""), ("flash", " --precision fa16")):
        command = f"stress {name} -w pasa_resonance --seq 128 --over resonance=1 --budget 1 --plot {name}.svg{more}"
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
        assert f"wrote {name}-scores.svg" in done.stderr
    pasa, flash = ((tmp_path / f"{name}-scores.svg").read_text(encoding="utf-8") for name in ("pasa", "flash"))
    assert all(
        words in text for text in (pasa, flash) for words in ("QK^T in float64", "size of a score (logarithmic)")
    )
    assert ">as pasa stores them in float16<" in pasa
    assert ">as flash stores them in float16, 100.0 % not finite<" in flash


def test_shares_of_scores_are_those_of_their_sizes() -> None:
    result = npusim.stress("pasa", ["logit_std=1"], workload="pasa_resonance", seq=64, heads=[0], budget_s=1)
    assert result.scores is not None
    q, k = (result.inputs[name][0, 0].astype(np.float64) for name in ("q", "k"))
    sizes = np.abs(q @ k.T)  # of 64 rows, all of the sample
    shares = [((sizes >= 2.0**e) & (sizes < 2.0 ** (e + 1))).mean() for e in range(LOWEST + 1, HIGHEST - 1)]
    assert result.scores.exact[1:-1] == pytest.approx(shares)
    assert sum(result.scores.exact) == pytest.approx(1)
    assert result.scores.lost == 0
    assert result.scores.fmt == "float16"
    # The shift takes nearly all of the mean away: stored scores are smaller by powers of two.
    largest = [
        max(at for at, share in enumerate(each) if share) for each in (result.scores.exact, result.scores.stored)
    ]
    assert largest[0] - largest[1] >= 3


def test_latencies_over_no_size_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "export rows a.csv -g heads=2 -g seq_q=128 -g head_dim=64 --plot a.svg"
    refused = CliRunner().invoke(app, command.split())
    assert refused.exit_code == 2
    assert "a size, which needs two values or more:" in refused.stderr
    assert not (tmp_path / "a.csv").exists()


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
