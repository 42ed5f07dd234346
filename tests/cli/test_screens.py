"""Screens of 80 columns: what verbs print fits a terminal, whichever verb it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import VERBS, app
from npusim.cli.guide import guides
from tests.cli.odd_files import write_odd_files
from tests.cli.transcripts import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

#: Commands of a few seconds, besides those of the transcripts.
SCREENS = (
    "run flash --seq 128 --full --no-save",
    "run flash --fields",
    "stress pasa --seq 64 --budget 1",
    "compare flash pasa --seq 128 --no-numerics",
    "invariant flash --seq 128",
    "explore flash --auto --seq 128 --budget 2 -j1",
    "tune flash --hw h200 --seq 256 -f block_kv=64,128 -f warps=4,8 -j1",
    "program flash --seq 256",
    "hw show ascend_910b2",
    "hw show h200 --sources",
    "hw show rtx_5090",
    *(f"help {topic}" for topic in guides()),
)
#: Verbs that print a file, a page or the name of a written file; tests/cli/test_help.py has their help at 80 columns.
WITHOUT_TABLES = frozenset(
    "warm report diff evaluate serve new record probe import calibrate export".split()  # noqa: SIM905
)
#: Lines that stay whole: commands that are to be copied.
WHOLE = re.compile(r".*npusim \S")


def _too_wide(command: str) -> list[str]:
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(app, command.split())
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    assert outcome.output
    return [line for line in outcome.stdout.splitlines() if len(line) > 80 and not WHOLE.match(line)]


@pytest.mark.parametrize("command", SCREENS)
def test_a_screen_fits_eighty_columns(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = set[str]()
    if command.startswith("help "):  # code may be wider
        code = set("\n".join(re.findall(r"(?ms)^```.*?^```|^    .*?$", guides()[command[5:]])).splitlines())
    assert [line for line in _too_wide(command) if line not in code] == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.endswith("json")])
def test_the_commands_of_a_transcript_fit_eighty_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_odd_files(tmp_path)
    files = ("--template", "schema", "import ")  # are printed as files
    commands = [command for command in COMMANDS[name] if not any(word in command for word in files)]
    assert [line for command in commands for line in _too_wide(command)] == []


def test_the_list_of_schedules_fits_eighty_columns() -> None:
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["run"])
    assert outcome.exit_code == 2
    assert "pasa" in outcome.stderr
    assert max(map(len, outcome.stderr.splitlines())) <= 80


def test_every_verb_with_a_table_has_a_screen() -> None:
    shown = {command.split()[0] for command in (*SCREENS, *(c for each in COMMANDS.values() for c in each))}
    verbs = {verb for verbs in VERBS.values() for verb in verbs}
    assert verbs - shown == WITHOUT_TABLES
