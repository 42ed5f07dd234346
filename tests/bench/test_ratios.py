"""The comparison of recorded commands with an earlier commit: what it counts, and its table."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import tests.bench.__main__ as bench
from tests.bench.__main__ import COLUMNS, ENTRIES, ROOT, TABLE, Version, main, read_table

#: A process that starts another one and ends at once; the other one then works for a third of a second.
OUTLIVED = """
import subprocess, sys
work = "import time\\nwhile time.process_time() < 1 / 3: pass"
subprocess.Popen([sys.executable, "-S", "-c", work])
"""
#: Measures it, in a process without other children.
MEASURED = """
import os, pathlib, sys
from tests.bench.__main__ import cpu_s
output = os.open(os.devnull, os.O_WRONLY)
print(*cpu_s([sys.executable, "-S", "-c", sys.argv[1]], output, pathlib.Path(sys.argv[2]), os.environ))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="descendants that nobody waits for are counted on Linux")
def test_time_of_descendants_that_outlive_a_command_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, OUTLIVED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    spent, code = done.stdout.split()
    assert float(spent) > 1 / 3
    assert code == "0"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--against", "HEAD", "explores"])
    assert ended.value.code == 2
    assert "unknown command 'explores'; there are pasa, time alone" in capsys.readouterr().err


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of its own, and commands that take 2 s before and 3 s after."""
    versions = Version("11111111", tmp_path, tmp_path), Version("22222222", tmp_path, tmp_path)
    monkeypatch.setattr(bench, "TABLE", tmp_path / "ratios.csv")
    monkeypatch.setattr(bench, "both", lambda _: nullcontext(versions))
    monkeypatch.setattr(bench, "compared", lambda *_: (2.0, 3.0))
    monkeypatch.setattr(bench, "is_changed", lambda: False)
    return tmp_path / "ratios.csv"


def test_rows_are_written_with_their_goals_and_commits_and_others_remain(measured: Path) -> None:
    assert main(["--against", "HEAD", "explore 384", "help", "--write"]) == 1  # slower
    assert main(["--against", "HEAD", "pasa"]) == 1
    assert list(read_table()) == ["help", "explore 384"], "in the order of the entries; without --write nothing"
    assert main(["--against", "HEAD", "pasa", "--write"]) == 1
    head, first, second, third = measured.read_text().splitlines()
    assert head == "name,goal,ratio,before_s,after_s,before,after,command"
    assert first == "pasa,0.65,1.50,2.00,3.00,11111111,22222222,npusim run pasa"
    assert second == "help,1,1.50,2.00,3.00,11111111,22222222,npusim --help"
    assert third.startswith("explore 384,0.4,1.50,")


def test_rows_of_uncommitted_changes_are_not_written(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "is_changed", lambda: True)
    with pytest.raises(SystemExit) as ended:
        main(["--against", "HEAD", "help", "--write"])
    assert ended.value.code == 2
    assert "have uncommitted changes; a row names a commit" in capsys.readouterr().err
    assert not measured.exists()


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.skipif(not TABLE.exists(), reason="python -m tests.bench --against d3b48652 --write has not run")
def test_the_table_has_each_command_with_its_goal_and_commits_of_the_history() -> None:
    rows = read_table()
    assert list(rows) == list(ENTRIES), "python -m tests.bench --against d3b48652 --write"
    for name, row in rows.items():
        assert tuple(row) == COLUMNS
        assert (row["goal"], row["command"]) == (ENTRIES[name].goal, ENTRIES[name].command), name
        before, after = float(row["before_s"]), float(row["after_s"])
        least, most = (after - 0.005) / (before + 0.005), (after + 0.005) / (before - 0.005)
        assert least - 0.005 <= float(row["ratio"]) <= most + 0.005, name
    if _git("rev-parse", "--is-shallow-repository").stdout.strip() == "false":
        for commit in {row[which] for row in rows.values() for which in ("before", "after")}:
            assert _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit
