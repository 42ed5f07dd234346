"""Every output of real tensor cores, as bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from npusim.formats import ARITHMETICS
from npusim.studies.validate.vectors import check_vectors
from reports.validation import study
from reports.validation.study import recorded


@pytest.mark.parametrize("name", ["mma_h200.npz", "mma_leeds.npz"])
def test_every_output_of_silicon_is_equal(name: str, golden: Any) -> None:
    reports = check_vectors(golden(name))
    first = {key: item.first_mismatch for key, item in reports.items() if item.first_mismatch}
    assert first == {}
    assert recorded()[name].counts == study.counts(reports)


def test_one_case_of_each_kind_ships_with_the_tests_and_is_equal() -> None:
    reports = check_vectors(study.GOLDEN / "mma_h200_cut.npz")
    assert all(item.first_mismatch is None for item in reports.values())
    assert study.counts(reports)[0] == recorded()["mma_h200.npz"].counts[0]


def test_corner_cases_of_an_h200_are_equal() -> None:
    """Cases on which public models disagree, measured by us with ``mma.sync`` (row 0, column 0).

    Chosen from 492,000: zero operands times huge ones, sums near the smallest alignment exponent
    (-133 for float32, -21 for float16 results), negative sums that round to zero, subnormal
    float16 c, ties of float16 results decided by bits at the alignment limit.  The last four of a
    unit have their smallest term at the last bit below that exponent, or half of it.
    """
    reports = check_vectors(Path(__file__).parent / "corner_h200.npz")
    assert {name: item.first_mismatch for name, item in reports.items()} == dict.fromkeys(reports)
    assert sum(item.total for item in reports.values()) == 5334


def test_units_marked_as_confirmed_are_those_the_files_confirm(golden: Any) -> None:
    from npusim.studies.validate.vectors import load_vectors

    names = {key.partition("@")[0] for file in ("mma_h200.npz", "mma_leeds.npz") for key in load_vectors(golden(file))}
    marked = {name for name, unit in ARITHMETICS.items() if unit.evidence == "hardware-vectors"}
    assert marked == names


def test_every_ascend_unit_is_marked_assumed() -> None:
    count = Counter(unit.evidence for name, unit in ARITHMETICS.items() if name.startswith("ascend."))
    assert count == {"assumed": 28}
