"""Guides: every command in them is run, in the order in which a reader would, on the files they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.cli.guide import guides
from npusim.report import page
from tests.cli.transcripts import anew, blocks, shown
from tests.declared import declare_tiles

COMMAND = re.compile(r"^npusim (?P<words>.*?)(?:\s+# exit code (?P<code>\d))?$")
TOPICS = (
    "agents",
    "ci",
    "cluster",
    "compare",
    "device",
    "diff",
    "measurements",
    "probe",
    "schedule",
    "scope",
    "serve",
    "skill",
    "stability",
    "start",
    "stress",
    "tile",
    "tilelang",
    "trace",
    "triton",
    "tune",
    "words",
)


def test_there_is_a_guide_for_each_thing_that_users_do() -> None:
    assert tuple(guides()) == TOPICS
    told = CliRunner().invoke(app, ["help"]).stdout
    assert all(f"npusim help {topic} " in told for topic in TOPICS)
    scope = guides()["scope"].lower()
    assert "backward pass" in scope
    assert "energy" in scope


#: Guides that run a dozen of simulations: their verbs have tests of their own in every run.
LONG = ("ci", "compare", "diff", "start", "stress", "tile")


#: A guide of many kernels, each of which several commands run: by default every second one, all with ``-m exhaustive``.
MANY = ("schedule",)


@pytest.mark.parametrize(
    ("topic", "step"),
    [pytest.param(t, 1, id=t, marks=pytest.mark.exhaustive if t in LONG + MANY else []) for t in TOPICS]
    + [pytest.param(t, 2, id=f"{t}, every second one") for t in MANY],
)
def test_a_guides_examples_do_what_it_says(
    topic: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if topic in ("triton", "tune"):
        pytest.importorskip("triton", reason="npusim[triton] is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(page, "_vega", lambda: "")  # a megabyte that takes a while to put together
    if topic in MANY:  # runs whose figures the guide does not show have the declared tile
        declare_tiles(monkeypatch)
    told = CliRunner().invoke(app, ["help", topic])
    assert told.exit_code == 0
    assert told.stdout.startswith("# ")
    assert "<!--" not in told.stdout
    ran = listed = 0
    for block in blocks(guides()[topic]):
        if block["file"]:
            path = Path(block["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"])
        for line, lines in shown(block["text"]):
            command = COMMAND.match(line)
            assert command, f"{topic}: {line!r} is no command"
            if topic == "tilelang" and find_spec("tilelang") is None and re.search(r"record|calls\.npz", line):
                continue  # npusim[tilelang] is not installed
            is_left_out, listed = listed % step > 0, listed + 1
            if is_left_out:
                continue
            words = shlex.split(command["words"])
            done = CliRunner().invoke(app, [*words, *(["-j1"] if words[0] == "explore" else [])])
            assert done.exit_code == int(command["code"] or 0), f"{line}: {done.stderr}"
            assert done.stdout or done.stderr
            assert not lines or anew(lines, done.stdout) == lines
            ran += 1
    assert ran


def test_the_workflow_of_the_guide_runs_in_a_users_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps run as on a runner, in a clone of a repository with the guide's files; npusim is installed."""
    from ruamel.yaml import YAML

    user, clone = tmp_path / "user", tmp_path / "clone"
    for block in blocks(guides()["ci"]):
        if block["file"]:
            path = user / block["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"])
    (user / "baselines" / "mine.yaml").unlink()  # of a schedule that the guide has npusim write
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.chdir(user)
    for folder in ("baselines/", "decisions/"):
        assert CliRunner().invoke(app, ["check", folder, "--update", "--reason", "first"]).exit_code == 0
    assert "# cycles: the cores' time" in (user / "baselines" / "flash.yaml").read_text()
    assert "# winner: the fastest candidate" in (user / "decisions" / "tile.yaml").read_text()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "baselines"], ["clone", "-q", ".", str(clone)]):
        subprocess.run([*git, *words], check=True, cwd=user)
    workflow = YAML(typ="safe").load((clone / ".github" / "workflows" / "cycles.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    cached = next(step["with"]["path"] for step in steps if "cache" in step.get("uses", ""))
    assert workflow["env"]["NPUSIM_CACHE"] == f"${{{{ github.workspace }}}}/{cached}"
    installed, *runs = [step["run"] for step in steps if "run" in step]
    assert installed == 'python -m pip install "$NPUSIM"'
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "npusim").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m npusim "$@"\n')
    (bin_folder / "npusim").chmod(0o755)
    environment = {**os.environ, "CI": "true", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    for command in runs:
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (clone / "cycles.xml").is_file()
