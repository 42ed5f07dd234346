"""Guides: every command in them is run, in the order in which a reader would, on the files they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.cli.guide import guides
from npusim.report import page
from tests.cli.transcripts import anew, blocks, shown

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
    "stress",
    "tile",
    "trace",
    "triton",
    "tune",
)


def test_there_is_a_guide_for_each_thing_that_users_do() -> None:
    assert tuple(guides()) == TOPICS
    told = CliRunner().invoke(app, ["help"]).stdout
    assert all(f"npusim help {topic} " in told for topic in TOPICS)
    scope = guides()["scope"].lower()
    assert "backward pass" in scope
    assert "energy" in scope


#: Guides that run a dozen of simulations: their verbs have tests of their own in every run.
LONG = ("ci", "compare", "diff", "stress", "tile")


@pytest.mark.parametrize(
    "topic", [pytest.param(t, marks=[pytest.mark.exhaustive] if t in LONG else []) for t in TOPICS]
)
def test_a_guides_examples_do_what_it_says(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if topic in ("triton", "tune"):
        pytest.importorskip("triton", reason="npusim[triton] is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(page, "_vega", lambda: "")  # a megabyte that takes a while to put together
    told = CliRunner().invoke(app, ["help", topic])
    assert told.exit_code == 0
    assert told.stdout.startswith("# ")
    assert "<!--" not in told.stdout
    ran = 0
    for block in blocks(guides()[topic]):
        if block["file"]:
            path = Path(block["file"])
            path.parent.mkdir(exist_ok=True)
            path.write_text(block["text"])
        for line, lines in shown(block["text"]):
            command = COMMAND.match(line)
            assert command, f"{topic}: {line!r} is no command"
            words = shlex.split(command["words"])
            done = CliRunner().invoke(app, [*words, *(["-j1"] if words[0] == "explore" else [])])
            assert done.exit_code == int(command["code"] or 0), f"{line}: {done.stderr}"
            assert done.stdout or done.stderr
            assert not lines or anew(lines, done.stdout) == lines
            ran += 1
    assert ran
