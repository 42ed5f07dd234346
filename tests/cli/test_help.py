"""Help texts: a screen for ``-h``, 80 columns, and one description of the options of a problem."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.testing

from npusim.cli.app import app
from npusim.cli.guide import guides


def _verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, verb in getattr(command, "commands", {}).items():
        yield from _verbs(verb, (*path, name))


VERBS = list(_verbs(typer.main.get_command(app)))


def _printed(*words: str) -> list[str]:
    outcome = typer.testing.CliRunner(env={"COLUMNS": "80"}).invoke(app, list(words))
    assert outcome.exit_code == 0, outcome.output
    return outcome.output.splitlines()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_short_help_fits_a_screen_and_each_line_a_terminal(verb: tuple[str, ...]) -> None:
    short, full = _printed(*verb, "-h"), _printed(*verb, "--help")
    assert len(short) <= 25
    assert max(map(len, [*short, *full])) <= 80
    assert any(line.startswith(("Examples:", "Commands:")) for line in short)
    if short != full:
        assert "--help" in short[-1]
        assert len(full) > 25


def test_a_short_help_stands_anywhere_among_the_words() -> None:
    assert _printed("run", "flash", "--seq", "512", "-h") == _printed("run", "-h")


def test_the_options_of_a_problem_are_described_once() -> None:
    sentence = "Queries and keys: 4096, or 8k."
    with_it = [verb for verb in VERBS if any(sentence in line for line in _printed(*verb, "--help"))]
    assert with_it == [("run",)]
    assert any(sentence in line for line in _printed("help", "problem"))
    names = "".join(_printed("explore", "--help"))
    assert "npusim help problem" in names
    assert all(name in names for name in ("--seq-kv", "--query-lengths", "--causal", "--problem"))


def test_a_long_command_of_a_guide_is_continued_as_a_shell_reads_it() -> None:
    lines = _printed("help", "diff")
    first = next(i for i, line in enumerate(lines) if line.startswith("$ npusim run flash"))
    assert lines[first].endswith(" \\")
    command = lines[first].removesuffix(" \\") + lines[first + 1].removeprefix("   ")
    assert command in guides()["diff"].splitlines()
