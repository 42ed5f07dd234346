"""The glossary: each verdict, advice and basis that a table prints has an entry, and tables name the command of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.cli.guide import entries
from npusim.config.quantity import BASES
from npusim.report.advice import RULES
from npusim.studies.baseline.cycles import Status as CheckStatus
from npusim.studies.evaluate.evaluation import Verdict as KernelVerdict
from npusim.studies.explore.store import Status as PointStatus
from npusim.studies.flags.order import FaultKind
from npusim.studies.invariance.examination import Verdict as BitsVerdict

if TYPE_CHECKING:
    from pathlib import Path

#: Verdicts of a search for the worst inputs (`Stress`), words of `Evaluation.bits` and `trust`, terms of a run's table.
OTHERS = ("holds", "loses", "not finite", "equal", "class", "different", "measure", "latency-bound", "launch-bound")
TERMS = ("group", "core", "pipe", "slots", "free", "ready", "share", "rows of P", "update", "finish", "no instruction")
WORDS = {
    *RULES,
    *BASES,
    *(word for kind in (CheckStatus, KernelVerdict, PointStatus, FaultKind, BitsVerdict) for word in get_args(kind)),
    *OTHERS,
    *TERMS,
}


@pytest.mark.parametrize("word", sorted(WORDS))
def test_every_verdict_and_advice_has_an_entry(word: str) -> None:
    assert word in entries()
    shown = CliRunner().invoke(app, ["help", word.replace(" ", "-")])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"{word}   (")
    assert len(shown.stdout.splitlines()) >= 3


def test_a_run_names_the_entry_of_its_advice_and_the_glossary() -> None:
    text = str(npusim.run("flash", seq=512, numerics=False))
    assert "[vector]" in text or "[waiting]" in text
    name = text.partition("[")[2].partition("]")[0]
    assert f"npusim help {name.replace(' ', '-')}: this advice" in text
    assert "npusim help words" in text


@pytest.mark.parametrize("command", ["invariant flash --seq 128", "stress pasa --seq 64 --budget 1"])
def test_a_verdict_names_its_entry(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, command.split())
    assert shown.exit_code == 0, shown.output
    named = re.search(r"more +npusim help ([\w-]+)", shown.stdout)
    assert named
    assert named[1].replace("-", " ") in entries()


def test_a_word_without_an_entry_is_refused_with_what_is_near() -> None:
    refused = CliRunner().invoke(app, ["help", "prund"])
    assert refused.exit_code == 2
    assert "no such guide or word" in refused.stderr
