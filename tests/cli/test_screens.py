"""Screens of 80 columns: what verbs print fits a terminal, whichever verb it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli import console
from npusim.cli.app import VERBS, app
from npusim.cli.guide import entries, guides
from npusim.library import SCHEDULES
from npusim.report.text import Facts, folded
from tests.cli.odd_files import write_odd_files
from tests.cli.transcripts import COMMANDS, write_guides_files

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from npusim.report.text import Block

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
#: One problem of some milliseconds, for commands that follow one another.
SMALL = "--hw h200 --seq-q 16 --seq-kv 64 --no-causal --rows all --heads 0"
#: Commands that read what the ones before them wrote.
SEQUENCES = {
    "diff": (
        f"run flash {SMALL} --precision running=float16 --save-output -o kernel",
        f"diff kernel/output.safetensors flash {SMALL}",
        f"diff kernel/output.safetensors flash {SMALL} --judge",
    ),
    "report": ("run flash --seq 128 --no-numerics -o a", "report a"),
    "others": ("evaluate flash --hw h200 --seq 256", "new schedule mine", "import --template", "check scale.py::scale"),
    "export": ("export rows a.csv --hw h200 -g heads=32 -g seq_q=1k -g head_dim=128",),
    "probe": ("probe bits --cases f16.f32 -o probe",),
    "calibrate": ("calibrate measured.yaml",),
    "triton": (
        "record attention.py",
        "run calls.npz::0 --hw h200 -o a",
        "run calls.npz::0 --hw h200 -t warps=8 -o b",
        "compare a b",
        "tune calls.npz::0 --hw h200 -f warps=4,8 -j1",
    ),
}
#: Verbs that print the name of a written file or answer programs; tests/cli/test_help.py has their help at 80 columns.
WITHOUT_TABLES = frozenset({"warm", "serve"})
#: Lines that stay whole: commands that are to be copied.
WHOLE = re.compile(r".*npusim \S")


#: Labels of lines that need no entry in the glossary: plain words, keys of inputs, and names of files and schedules.
PLAIN = re.compile(
    r"|schedule|precision|program|faults|note|error|source|(tiling|formats|problem)\.\w+|tiling, \w+ alone|\S+/\S+"
)
#: Verbs whose labels are the keys of files.
OF_FILES = frozenset({"hw", "workload", "format", "layout"})


@pytest.fixture(autouse=True)
def labels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Messages are wrapped as on a terminal of 80 columns; labels of lines are collected."""
    monkeypatch.setattr(console, "_message_width", lambda: 80)
    collected, show = set[str](), console.show

    def collect(blocks: Iterable[Block]) -> None:
        shown = tuple(blocks)
        collected.update(label for block in shown if isinstance(block, Facts) for label, _ in block.rows)
        show(shown)

    monkeypatch.setattr(console, "show", collect)
    return collected


def _unexplained(command: str, labels: set[str]) -> set[str]:
    """Return the labels without an entry in the glossary; ``help`` shows the entry of each other one."""
    if command.split(maxsplit=1)[0] in OF_FILES or "--fields" in command:
        return set()
    names = {name for name, _ in SCHEDULES}
    labels = {re.sub(r"^class [A-Z?]+$", "class", label) for label in labels}  # a row for each class
    return {label for label in labels - {*entries(), *names} if not PLAIN.fullmatch(label)}


def _too_wide(command: str) -> list[str]:
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(app, command.split())
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    assert outcome.output
    return [line for line in outcome.output.splitlines() if len(line) > 80 and not WHOLE.match(line)]


@pytest.mark.parametrize("command", SCREENS)
def test_a_screen_fits_eighty_columns(
    command: str, labels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = set[str]()
    if command.startswith("help "):  # code may be wider
        code = set("\n".join(re.findall(r"(?ms)^```.*?^```|^    .*?$", guides()[command[5:]])).splitlines())
    # One quoted word of a command is not broken.
    parts = "\n".join(code)
    assert [x for x in _too_wide(command) if x not in code and x.strip().removesuffix(" \\") not in parts] == []
    assert _unexplained(command, labels) == set()


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.endswith("json")])
def test_the_commands_of_a_transcript_fit_eighty_columns(
    name: str, labels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_odd_files(tmp_path)
    files = ("--template", "schema", "import ")  # are printed as files
    commands = [command for command in COMMANDS[name] if not any(word in command for word in files)]
    assert [line for command in commands for line in _too_wide(command)] == []
    assert _unexplained(COMMANDS[name][0], labels) == set()


@pytest.mark.parametrize("name", SEQUENCES)
def test_commands_on_written_files_fit_eighty_columns(
    name: str, labels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    if name == "report":
        pytest.importorskip("altair")
    monkeypatch.chdir(tmp_path)
    write_odd_files(tmp_path)
    write_guides_files(tmp_path)
    commands = [command for command in SEQUENCES[name] if "--template" not in command]  # a file, printed
    assert [line for command in commands for line in _too_wide(command)] == []
    assert _unexplained(SEQUENCES[name][0], labels) == set()


def test_a_message_is_folded_on_a_terminal_and_one_line_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "run flash --seq 128 -t block_q=512 -t block_kv=512 -t vector_rows=16"

    def lines() -> list[str]:
        said = CliRunner().invoke(app, command.split()).stderr
        return said[said.index("npusim: error") :].splitlines()  # behind news of progress

    folded_lines = lines()
    assert len(folded_lines) > 1
    assert all(line.startswith("  ") for line in folded_lines[1:])
    monkeypatch.setattr(console, "_message_width", lambda: None)
    assert lines() == [" ".join(line.strip() for line in folded_lines)]


def test_a_folded_message_has_its_command_whole_on_a_line_of_its_own() -> None:
    command = "npusim check base.yaml --update --reason a_reason"
    text = f"npusim: 1 of 1 baselines not met; accept with: {command}"
    assert folded(text, 60) == f"npusim: 1 of 1 baselines not met; accept with:\n  {command}"
    assert folded("short", 60) == "short"
    assert folded(f"wrote a/{'b' * 70}", 60) == f"wrote\n  a/{'b' * 70}"


def test_the_list_of_schedules_fits_eighty_columns() -> None:
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["run"])
    assert outcome.exit_code == 2
    assert "pasa" in outcome.stderr
    assert max(map(len, outcome.stderr.splitlines())) <= 80


def test_every_verb_with_a_table_has_a_screen() -> None:
    commands = (*SCREENS, *(c for each in (*COMMANDS.values(), *SEQUENCES.values()) for c in each))
    shown = {command.split()[0] for command in commands}
    verbs = {verb for verbs in VERBS.values() for verb in verbs}
    assert verbs - shown == WITHOUT_TABLES


def test_a_number_of_a_device_is_on_the_line_of_its_key_at_eighty_columns() -> None:
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["hw", "show", "ascend_910b2"]).output.splitlines()
    (clock,) = [line for line in lines if "clock_hz" in line]
    assert clock.split() == ["clock_hz", "1.8", "GHz", "vendor"]
    long = next(i for i, line in enumerate(lines) if line.strip() == "slope_read_write_conflict_cycles_per_repeat")
    assert lines[long + 1].split() == ["1.77", "cycles/repeat", "derived"]
    assert max(map(len, lines)) <= 80
