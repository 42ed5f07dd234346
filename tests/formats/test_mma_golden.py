"""Every output of real tensor cores, as bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from npusim.formats import ARITHMETICS
from npusim.formats.vectors import check_vectors


@pytest.mark.parametrize(
    ("name", "total"), [("mma_h200.npz", 458_752), ("mma_leeds.npz", 120_000)]
)
def test_every_output_of_silicon_is_equal(name: str, total: int, golden: Any) -> None:
    reports = check_vectors(golden(name))
    first = {key: item.first_mismatch for key, item in reports.items() if item.first_mismatch}
    assert first == {}
    assert sum(item.matched for item in reports.values()) == total


def test_units_marked_as_confirmed_are_those_the_files_confirm(golden: Any) -> None:
    from npusim.formats.vectors import load_vectors

    names = {
        key.partition("@")[0]
        for file in ("mma_h200.npz", "mma_leeds.npz")
        for key in load_vectors(golden(file))
    }
    marked = {name for name, unit in ARITHMETICS.items() if unit.evidence == "hardware-vectors"}
    assert marked == names


def test_every_ascend_unit_is_marked_assumed() -> None:
    count = Counter(
        unit.evidence for name, unit in ARITHMETICS.items() if name.startswith("ascend.")
    )
    assert count == {"assumed": 6}
