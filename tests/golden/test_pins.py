"""Cycles, traffic and bits of every schedule on every device are those that were accepted."""

from __future__ import annotations

import json
from typing import Any

import pins
import pytest

ACCEPTED: dict[str, dict[str, Any]] = json.loads(pins.PINS.read_text(encoding="utf-8"))
CASES = {case.name: case for case in pins.cases()}
HOW = "if it should: python tests/golden/pins.py, and say why in the commit"


@pytest.mark.parametrize("name", CASES)
def test_cycles_traffic_and_bits_are_as_accepted(name: str) -> None:
    assert CASES[name].figures() == ACCEPTED[name], f"{name} moved; {HOW}"


def test_times_of_nodes_are_as_accepted_and_nothing_else_is() -> None:
    found = dict(pins.node_figures())
    assert found == {name: figures for name, figures in ACCEPTED.items() if name not in CASES}, HOW
