"""What typical commands print is what is kept of them."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import pytest

from tests.cli.odd_files import write_odd_files
from tests.cli.transcripts import COMMANDS, FOLDER, transcript

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_transcript_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_error_is_always_named_relative_and_no_place_of_a_machine_is_kept() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert text.count("RMSE") == text.count("relative RMSE"), path.name
        assert not re.search(r"/(home|root|tmp|work|usr)/", text), path.name
        assert "Traceback" not in text
