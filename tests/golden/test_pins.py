"""Cycles, traffic and bits of every schedule on every device are those that were accepted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pins
import pytest

if TYPE_CHECKING:
    from pathlib import Path

ACCEPTED: dict[str, dict[str, Any]] = json.loads(pins.PINS.read_text(encoding="utf-8"))
CASES = {case.name: case for case in pins.cases()}
HOW = "if it should: python tests/golden/pins.py --issue NUMBER --reason TEXT"


@pytest.mark.parametrize("name", CASES)
def test_cycles_traffic_and_bits_are_as_accepted(name: str) -> None:
    assert CASES[name].figures() == ACCEPTED[name], f"{name} moved; {HOW}"


def test_times_of_nodes_are_as_accepted_and_nothing_else_is() -> None:
    found = dict(pins.node_figures())
    assert found == {name: figures for name, figures in ACCEPTED.items() if name not in CASES}, HOW


def test_each_change_of_pins_has_an_issue_and_a_reason() -> None:
    moves = pins.moves()
    assert moves[-1]["digest"] == pins.digest(), f"pins.json was changed without a line in pins_moved.csv; {HOW}"
    for line in moves:
        assert int(line["issue"]) > 0, line
        assert int(line["moved"]) > 0, line
        assert line["cases"], line
        assert len(line["reason"].split()) >= 4, line


def test_pins_move_with_a_reason_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS", tmp_path / "pins.json")
    monkeypatch.setattr(pins, "MOVED", tmp_path / "pins_moved.csv")
    pins.PINS.write_text('{"flash h200 long": {"cycles": 1}, "flash h200 causal": {"cycles": 2}}')
    pins.MOVED.write_text("issue,moved,cases,digest,reason\n")
    found = {"flash h200 long": {"cycles": 3}, "gemm v100 long": {"cycles": 2}}
    for issue, reason in ((None, "keys in another order"), (54, " ")):
        with pytest.raises(SystemExit, match=r"3 pins moved \(flash h200 long, \.\.\.\): --issue NUMBER"):
            pins.accept(found, issue, reason)
    assert pins.accept(found, 54, "keys in another order") == "3 pins moved"
    assert json.loads(pins.PINS.read_text()) == found
    line = {"issue": "54", "moved": "3", "cases": "flash h200; gemm v100", "reason": "keys in another order"}
    assert pins.moves() == [{**line, "digest": pins.digest()}]
    assert pins.accept(found, None, "") == "no pin moved"
    assert len(pins.moves()) == 1
