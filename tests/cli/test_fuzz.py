"""Drawn commands, wrong and right: each ends soon, in little memory, in its folder, and says in words what is wrong."""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING

import pytest

from tests.cli.boxed import MOST_BYTES, Boxed, Ended
from tests.cli.drawn import draw, verbs, write_template

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Commands by default: one test, since each process that runs tests prepares a box of its own.
COUNT = 30
#: What Python calls its errors.  Those that a user's own module can raise as it is imported are named on purpose.
_RAISED = "|".join(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ImportError | SyntaxError)
)
_OF_PYTHON = re.compile(rf"Traceback|Aborted!|Exception ignored|object at 0x|\b(?:{_RAISED})\b")


def faults(ended: Ended) -> list[str]:
    """Return what is wrong with how a command ended."""
    found = []
    if ended.code not in (0, 1, 2):
        found.append("killed after its time" if ended.code is None else f"exit code {ended.code}")
    if told := _OF_PYTHON.search(ended.stderr + ended.stdout[:100_000]):
        found.append(f"says {told[0]!r}")
    if "not enough memory" in ended.stderr or ended.peak_bytes > MOST_BYTES:
        found.append(f"wants more than {MOST_BYTES >> 30} GiB")
    found += [f"writes elsewhere: {place}" for place in ended.escaped]
    if ended.code in (1, 2) and not re.search(r"^(npusim: |Usage: |Error: )", ended.stderr, re.MULTILINE):
        found.append(f"does not say why it ends with {ended.code}")
    if not ended.stderr.replace("\n", "").isprintable():
        found.append("sends control characters to the terminal")
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def boxed(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxed]:
    with Boxed(template, tmp_path_factory.mktemp("box"), are_few=True) as process:
        yield process


@pytest.fixture(scope="module")
def warm_boxed(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxed]:
    with Boxed(template, tmp_path_factory.mktemp("box"), are_few=False) as process:
        yield process


def _hold(numbers: range, template: Path, boxed: Boxed) -> None:
    found = []
    for number in numbers:
        case = draw(number, template)
        ended = boxed.run(case)
        if wrong := faults(ended):
            found.append(f"{number}: {case}: {'; '.join(wrong)}\n    {ended.stderr[-300:]}")
    assert not found, "\n".join([f"{len(found)} of {len(numbers)} commands", *found])


def test_drawn_commands_end_soon_and_in_words(template: Path, boxed: Boxed) -> None:
    _hold(range(COUNT), template, boxed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(COUNT, 5000, 400))
def test_thousands_of_drawn_commands_end_soon_and_in_words(first: int, template: Path, warm_boxed: Boxed) -> None:
    _hold(range(first, first + 400), template, warm_boxed)


def test_every_verb_and_option_is_drawn(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cli.drawn.damage", lambda source, rng: b"")
    drawn = [draw(number, template).words for number in range(8000)]
    known = verbs()
    assert all(any(words[: len(path)] == path for words in drawn) for path in known)
    for path, command in known.items():
        spellings = {o for p in command.params if p.param_type_name == "option" for o in p.opts} - {"--force", "--auto"}
        used = {word.partition("=")[0] for words in drawn if words[: len(path)] == path for word in words}
        assert spellings <= used, path
