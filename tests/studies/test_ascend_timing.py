"""The page on the 910B's timing: goals of issue 5 on packaged measurements, and its own arithmetic."""

from __future__ import annotations

import pytest

from npusim.config.measurements import load_measurements
from npusim.validate.times import Predictor
from reports.ascend_timing import study

GOAL_ATTENTION, GOAL_CORE, GOAL_PIPES = (0.12, 0.30), 0.10, 0.15


@pytest.fixture(scope="module")
def attention() -> list[study.Row]:
    return study.rows("fa_910b2_*")


@pytest.fixture(scope="module")
def product() -> dict[str, study.Row]:
    return {row.quantity: row for row in study.rows("gemm_*")}


def test_attention_and_the_product_are_within_what_was_asked(
    attention: list[study.Row], product: dict[str, study.Row]
) -> None:
    median, worst = study.band_of([r for r in attention if r.case.name != "fa_910b2_1k"])
    assert (median <= GOAL_ATTENTION[0], worst <= GOAL_ATTENTION[1]) == (True, True)
    assert abs(product["core_us"].error) <= GOAL_CORE
    assert all(abs(product[q].error) <= GOAL_PIPES for q in ("mac_us", "mte1_us", "mte2_us"))


def test_packaged_cases_are_those_of_the_shared_files(shared_folder: object) -> None:
    folder = shared_folder / "measurements"  # type: ignore[operator]
    shared = {
        case.name: case
        for name in ("ascend_910b2", "papers")
        for case in load_measurements(folder / f"{name}.yaml").cases
    }
    packaged = {case.name: case for case in study.cases()}
    single = {n for n, c in shared.items() if c.device in ("ascend_910b1", "ascend_910b2")}
    assert packaged == {name: shared[name] for name in single}


def test_the_launch_that_one_case_needs_is_found(attention: list[study.Row]) -> None:
    # The launch is added to the cores' time, so the factor can be worked out.
    row = attention[0]
    launch = study.record(row.case).launch_us
    expected = (row.measured.low - (row.predicted - launch)) / launch
    found = study.needed(row, "kernel launch")
    assert found.factor == pytest.approx(expected, rel=2e-2)
    assert found.low < row.predicted < found.high


def test_a_group_that_cannot_do_it_says_so_with_both_ends(product: dict[str, study.Row]) -> None:
    row = product["mte1_us"]
    found = study.needed(row, "HBM bytes a second")
    assert found.factor is None
    assert found.low == pytest.approx(row.predicted) == found.high
    assert study.needed(row, "MTE1 bytes a cycle").factor == pytest.approx(0.88, abs=0.02)


def test_every_group_names_constants_of_the_device() -> None:
    device = Predictor().machine(study.DEVICE)
    for group in study.GROUPS:
        assert study.keys_of(device, group), group
        # A key that changes nothing is refused.
        assert study._Moved({group: 2.0}).machine(study.DEVICE) != device, group


def test_the_launch_is_fitted_by_least_squares_on_the_others(attention: list[study.Row]) -> None:
    found = study.left_out(attention)
    assert set(found) == {r.case.name for r in attention}
    name = attention[2].case.name
    others = [
        (r.measured.low, r.predicted - study.record(r.case).launch_us)
        for r in attention
        if r.case.name != name
    ]

    def loss(launch: float) -> float:
        return sum(((k + launch) / m - 1) ** 2 for m, k in others)

    best = found[name][0]
    assert loss(best) <= min(loss(best * 0.99), loss(best * 1.01))


def test_rounds_of_blocks_are_counted_by_the_core_groups(attention: list[study.Row]) -> None:
    found = study.rounds(attention, "fa_910b2_16k")
    assert found["fa_910b2_16k"] == (128, 6, pytest.approx(6.0))
    assert found["fa_910b2_8k"][:2] == (64, 3)


def test_of_cases_that_differ_in_length_one_is_searched(attention: list[study.Row]) -> None:
    slower = [r for r in attention if r.error > 0]
    assert study.twins(slower) == slower[:1]
