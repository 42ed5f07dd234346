"""Tiles that runs choose by themselves are near the best of a whole space."""

from __future__ import annotations

import defaults
import pytest

from npusim.config.device import DeviceSpec
from npusim.config.node_file import load_machine
from npusim.config.packaged import list_packaged

ROWS = defaults.rows()
LONG = [case for case in ROWS if case.call in defaults.LONG]
#: Every second one of one case of each schedule on each device, and every tenth long call; all of them with
#: ``-m exhaustive``.
QUICK = [*[*{(case.schedule, case.hw): case for case in ROWS if case not in LONG}.values()][::2], *LONG[::10]]


def _assert_near_the_best(case: defaults.Case) -> None:
    best_us, latency_us = float(ROWS[case]["best_us"]), case.default().latency_us
    assert latency_us <= (1 + defaults.MOST) * best_us, f"the best: {ROWS[case]['best']}"
    # A grid of 12 tiles may have none as fast.
    assert case in LONG or latency_us >= best_us * 0.9995, (
        f"no best: python tests/golden/defaults.py '{' '.join(case)}'"
    )


@pytest.mark.parametrize("case", QUICK, ids=" ".join)
def test_a_default_is_within_5_percent_of_the_best(case: defaults.Case) -> None:
    _assert_near_the_best(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", set(ROWS) - set(QUICK), ids=" ".join)
def test_so_is_every_other(case: defaults.Case) -> None:
    _assert_near_the_best(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ROWS, ids=" ".join)
def test_the_best_is_proved(case: defaults.Case) -> None:
    assert float(str(defaults.proved(case)["best_us"])) == float(ROWS[case]["best_us"])


def test_49_long_calls_on_every_device_stand_beside_12_tiles_in_both_orders() -> None:
    machines = {name: load_machine(name) for name in list_packaged("hwconfigs")}
    timed = {name for name, machine in machines.items() if type(machine) is DeviceSpec and machine.is_timed}
    assert len(LONG) == 49 and {case.hw for case in LONG} == timed
    for case in LONG:
        assert len({tuple(tile.items()) for tile in case.grid}) == 12
        assert len({tile.get("launch", tile.get("deal")) for tile in case.grid}) > 1
