"""What tests of schedules start from: the bits of a run, and not those of alternatives to assumed arithmetic."""

from __future__ import annotations

import pytest

#: Files of tests that hold the alternatives.
OF_ALTERNATIVES = frozenset({"test_row_sums.py"})


@pytest.fixture(scope="module", autouse=True)
def bits_that_are_held(request: pytest.FixtureRequest) -> None:
    """Leave out what no test of the file holds."""
    if request.path.name not in OF_ALTERNATIVES:
        request.getfixturevalue("own_bits_alone")
