"""The walk of a chip and of a verb: the places that CONTRIBUTING names are all that one touches.

The walk of a mechanism is ``tests/schedules/test_mechanism.py``, which adds one by two edits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner

import npusim.cli
from npusim.cli import app as command_line
from npusim.config.load import load_device

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
_FILE = re.compile(r"(\S+)\n\+\+\+ b/(\S+)\n(.*)", re.DOTALL)
_HUNK = re.compile(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@\n((?:[ +-].*\n?|\n)*)", re.MULTILINE)


class Edit(NamedTuple):
    """The change of one file: its lines before and after, for each hunk; a new file has none before."""

    file: str
    is_new: bool
    hunks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def _edits(section: str) -> Iterator[Edit]:
    """Yield the changes that a section of the page shows."""
    body = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for shown in re.findall(r"```diff\n(.*?)```", body, re.DOTALL):
        for of_file in filter(None, re.split(r"^--- ", shown, flags=re.MULTILINE)):
            ((before, file, changed),) = _FILE.findall(of_file)
            hunks = []
            for old, new, lines in _HUNK.findall(changed):
                left = tuple(line[1:] for line in lines.splitlines() if line[:1] in (" ", "-"))
                right = tuple(line[1:] for line in lines.splitlines() if line[:1] in (" ", "+"))
                assert (len(left), len(right)) == (int(old), int(new)), f"{file}: the hunk has other lines than it says"
                hunks.append((left, right))
            yield Edit(file, before == "/dev/null", tuple(hunks))


def _new_text(edit: Edit) -> str:
    ((_, lines),) = edit.hunks
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("section", "new", "edited"),
    [
        ("Add a chip", ["hwconfigs/h200_slow.yaml"], ["tests/golden/pins.py"]),
        ("Add a kernel", ["npusim/library/relu.py"], []),
        ("Add a verb", ["npusim/cli/clock_command.py"], ["npusim/cli/app.py"]),
    ],
)
def test_the_places_of_a_change_are_few_and_there(section: str, new: list[str], edited: list[str]) -> None:
    edits = list(_edits(section))
    assert [edit.file for edit in edits if edit.is_new] == new
    assert [edit.file for edit in edits if not edit.is_new] == edited
    assert not any((ROOT / file).exists() for file in new)
    for edit in edits:
        text = "" if edit.is_new else (ROOT / edit.file).read_text(encoding="utf-8")
        for before, after in edit.hunks:
            assert "\n".join(before) in text
            assert len(after) > len(before)


def test_the_file_of_a_chip_is_all_that_a_run_needs(tmp_path: Path) -> None:
    edit = next(edit for edit in _edits("Add a chip") if edit.is_new)
    file = tmp_path / Path(edit.file).name
    file.write_text(_new_text(edit), encoding="utf-8")
    device = load_device(file)
    assert (device.name, device.clock_hz.value) == ("h200_slow", 1.5e9)
    assert device.group_count.value == load_device("h200").group_count.value


def test_the_file_and_the_line_of_a_verb_are_all_that_the_command_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, line = _edits("Add a verb")
    (tmp_path / Path(file.file).name).write_text(_new_text(file), encoding="utf-8")
    monkeypatch.setattr(npusim.cli, "__path__", [*npusim.cli.__path__, str(tmp_path)])
    (added,) = {*line.hunks[0][1]} - {*line.hunks[0][0]}
    name, purpose = re.findall(r'"([^"]*)"', added)
    groups = dict(command_line.VERBS)
    monkeypatch.setattr(command_line, "VERBS", groups | {"Your own hardware": {name: purpose}})
    # The tests' tree of commands, which is built once, has the verbs as they are.
    monkeypatch.setattr(typer.testing, "_get_command", typer.main.get_command)
    done = CliRunner().invoke(command_line.app, [name, "h200"], prog_name="npusim")
    mhz = load_device("h200").clock_hz.value / 1e6
    assert (done.exit_code, done.stdout) == (0, f"  clock  {mhz:,.0f} MHz\n")
    listed = CliRunner().invoke(command_line.app, ["--help"], prog_name="npusim")
    assert f"  {name:<9}" in listed.stdout
    assert purpose in listed.stdout
