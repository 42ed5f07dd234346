"""Tiles that runs choose by themselves are near the best of a whole space."""

from __future__ import annotations

import defaults
import pytest

ROWS = defaults.rows()
#: One of each schedule on each device; all of them with ``-m exhaustive``.
QUICK = list({(case.schedule, case.hw): case for case in ROWS}.values())
#: Further off: a long call is judged by a shorter one, all of whose blocks still wait for the same misses.
FURTHER = {("flash", "h200", "svd_img2vid"): 0.075}


def _assert_near_the_best(case: defaults.Case) -> None:
    best_us, latency_us = float(ROWS[case]["best_us"]), case.default().latency_us
    most = FURTHER.get(tuple(case), defaults.MOST)
    assert latency_us <= (1 + most) * best_us, f"the best: {ROWS[case]['best']}"
    assert latency_us >= best_us * 0.9995, f"no best: python tests/golden/defaults.py '{' '.join(case)}'"


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
