"""What typical commands print is what is kept of them."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import pytest

from tests.cli.odd_files import write_odd_files
from tests.cli.transcripts import (
    COMMANDS,
    FOLDER,
    README,
    anew,
    blocks,
    needs_triton,
    renewed,
    shown,
    transcript,
    write_guides_files,
)

if TYPE_CHECKING:
    from pathlib import Path

#: Blocks of the README that show what commands print.
SHOWN = [
    block["text"]
    for block in blocks(README.read_text(encoding="utf-8"))
    if any(lines for _, lines in shown(block["text"]))
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_transcript_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CI", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    write_odd_files(tmp_path)
    kept = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    said = transcript(name, tmp_path).splitlines()
    changes = "\n".join(difflib.unified_diff(kept, said, "kept", "printed", lineterm="", n=1))
    assert kept == said, f"if that is meant: python -m tests.cli.transcripts\n{changes}"


def test_twenty_commands_are_kept_and_nothing_else() -> None:
    assert len(COMMANDS) >= 20
    assert {path.stem for path in FOLDER.iterdir()} == set(COMMANDS)


@pytest.mark.parametrize("text", SHOWN, ids=[text.partition("\n")[0] for text in SHOWN])
def test_the_readme_shows_what_is_printed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if needs_triton(text):
        pytest.importorskip("triton", reason="npusim[triton] is not installed")
    for variable in ("CI", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    write_guides_files(tmp_path)
    said = renewed(text).splitlines()
    changes = "\n".join(difflib.unified_diff(text.splitlines(), said, "kept", "printed", lineterm="", n=1))
    assert text.splitlines() == said, f"if that is meant: python -m tests.cli.transcripts\n{changes}"


def test_the_readme_shows_five_commands() -> None:
    assert len(SHOWN) == 5


@pytest.mark.parametrize(
    ("lines", "is_shown"),
    [
        (["run", "  a  1", "  ...", "  c  3"], True),
        (["run", "  ...", "  b  2", "  ..."], True),
        (["run", "  a  1", "  ..."], True),
        (["run", "  a  2", "  ...", "  c  3"], False),
        (["run", "  b  2", "  ..."], False),
        (["run", "  a  1"], False),
        (["run", "  ...", "  c  3", "  d  4"], False),
    ],
)
def test_a_page_leaves_lines_out_only_where_it_says_so(lines: list[str], *, is_shown: bool) -> None:
    assert (anew(lines, "run\n  a  1\n  b  2\n  c  3\n") == lines) == is_shown


def test_an_error_is_always_named_relative_and_no_place_of_a_machine_is_kept() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert text.count("RMSE") == text.count("relative RMSE"), path.name
        assert not re.search(r"/(home|root|tmp|work|usr)/", text), path.name
        assert "Traceback" not in text
