"""The order of flags against every execution of drawn programs: no fault is missed, and no alarm is false."""

from __future__ import annotations

import pytest

from npusim.studies.flags.order import HappensBefore
from tests.tile_language.interleavings import drawn, outcomes

#: What an execution shows of a fault of the check: a wait without a set, or a cycle, is a deadlock.
SHOWN = {"race": "race", "lost set": "lost set", "left set": "left set"}


@pytest.mark.parametrize("seeds", [range(50 * i, 50 * i + 50) for i in range(4)], ids=str)
def test_drawn_programs_have_the_faults_that_executions_show(seeds: range) -> None:
    safe = 0
    for seed in seeds:
        cores = drawn(seed)
        found = {SHOWN.get(fault.kind, "deadlock") for fault in HappensBefore(cores).complete()}
        shown = outcomes(cores)
        assert bool(found) == bool(shown), (seed, found, shown)
        if "lost set" not in found | shown:  # after a lost set, sets and waits pair in another way
            assert found - {"race"} == shown - {"race"} or "deadlock" in shown, (seed, found, shown)
            assert "race" in found or "race" not in shown, (seed, found, shown)
            assert "race" in shown or "race" not in found or "deadlock" in shown, (seed, found, shown)
        safe += not found
    assert 15 <= safe <= 45
