"""``npusim new schedule NAME``: the file runs as it is, and says in the package's words what flash says."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.problem import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

pytestmark = pytest.mark.usefixtures("declared_tiles")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(*words: str) -> Result:
    return CliRunner().invoke(app, ["new", "schedule", *words])


@pytest.mark.parametrize(
    ("hw", "change"),
    [
        ("ascend_910b2", ""),
        ("ascend_910b2", ",exp_variant=exp2.exp2p"),
        ("h200", ",accumulate=fresh,exp_variant=exp.correct"),
        ("h200", ",accumulate=chained,exp_variant=exp2.exp2p"),
    ],
)
def test_the_file_is_flash_until_it_is_changed(hw: str, change: str) -> None:
    said = new("mine")
    assert said.exit_code == 0
    assert "wrote mine.py; run it: npusim run mine.py:mine" in said.stderr
    problem = Problem(heads=2, kv_heads=1, seq_q=150, seq_kv=200, head_dim=64, causal=True)
    tiling = {"block_q": 64, "block_kv": 64}
    mine = npusim.run("mine.py:mine", hw=hw, problem=problem, tiling=tiling, precision=f"fp32{change}", rows="all")
    # A barrier after every step, as a machine does it: what a published kernel does besides is flash's own.
    asked = {**tiling, "barriers": "every"} if hw == "ascend_910b2" else tiling
    usual = npusim.run("flash", hw=hw, problem=problem, tiling=asked, precision=f"fa2_fp32{change}", rows="all")
    assert mine.output.tobytes() == usual.output.tobytes()
    assert mine.numerics is not None
    assert mine.numerics.error.rmse < 1e-3
    if mine.timing is not None:
        assert mine.cycles == usual.cycles


def test_the_file_runs_from_the_command_line_with_the_public_surface_alone(elsewhere: Path) -> None:
    assert json.loads(new("mine", "--json").stdout)["file"] == "mine.py"
    tree = ast.parse((elsewhere / "mine.py").read_text())
    assert [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)] == ["math", "npusim.kernel"]
    assert not any(isinstance(n, ast.Import) for n in ast.walk(tree))
    done = CliRunner().invoke(app, ["run", "mine.py:mine", "--seq", "128", "--no-save", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["schedule"] == "mine.py:mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-schedule", "'my-schedule' cannot be the name of a schedule"),
        ("a/b", "'a/b' cannot be the name of a schedule"),
        ("class", "'class' cannot be the name of a schedule"),
        ("flash", "'flash' is a packaged schedule; choose"),
        ("own_attention", "'own_attention' has another meaning in the file"),
        ("full", "'full' has another meaning in the file"),
        ("there", "there.py: already exists"),
    ],
)
def test_what_cannot_be_written_is_refused(elsewhere: Path, name: str, message: str) -> None:
    (elsewhere / "there.py").write_text("kept")
    said = new(name)
    assert said.exit_code == 2
    assert said.stderr.startswith(f"npusim: error: {message}")
    assert [p.read_text() for p in elsewhere.iterdir()] == ["kept"]
