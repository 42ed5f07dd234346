"""The page on the 910B's timing: goals of issue 19 on packaged measurements, and its own arithmetic."""

from __future__ import annotations

import pytest

from npusim.config.measurements import load_measurements
from reports.ascend_timing import study
from reports.ascend_timing.samples import samples


@pytest.fixture(scope="module")
def rows() -> list[study.Row]:
    patterns = (p for kind, found in study.CLASSES.items() if kind != "papers" for p in found)
    return study.counted([row for pattern in patterns for row in study.rows(pattern)])


def test_published_times_are_met_as_issue_19_asks(rows: list[study.Row]) -> None:
    count, middle, _, near = study.summary(rows)
    assert count >= 49
    assert middle <= 0.11  # with the node's cases, which are not packaged here: 9.4 %
    assert near >= 0.75


def test_each_kind_is_met_but_for_the_one_that_is_not_explained(rows: list[study.Row]) -> None:
    kinds = {study.class_of(r.case.name) for r in rows}
    errors = {kind: study.summary([r for r in rows if study.class_of(r.case.name) == kind])[1] for kind in kinds}
    # mc2 alone stands for all-reduce here: 17.6 % at most; with the other node's cases 3.7 %.
    assert {kind for kind, error in errors.items() if error > 0.15} <= {"products, warm", "all-reduce"}


def test_two_thirds_of_the_cases_are_in_no_fit(rows: list[study.Row]) -> None:
    names = {r.case.name for r in rows}
    free = {r.case.name for r in study.untouched(rows)}
    assert len(free) >= 2 / 3 * len(names)
    used = {name for _, fitted in study.fitted().values() for name in fitted}
    assert used <= {case.name for case in study.cases()}
    assert not any(name.endswith("_16k") for name in used)


def test_packaged_cases_are_those_of_the_shared_files(shared_folder: object) -> None:
    folder = shared_folder / "measurements"  # type: ignore[operator]
    shared = {
        case.name: case
        for name in ("ascend_910b2", "ascend_more", "papers")
        for case in load_measurements(folder / f"{name}.yaml").cases
    }
    packaged = {case.name: case for case in study.cases()}
    assert packaged == {name: shared[name] for name in packaged}
    single = {n for n, c in shared.items() if c.device in ("ascend_910b1", "ascend_910b2")}
    assert single <= set(packaged)


def test_a_source_is_predicted_without_what_was_fitted_on_it() -> None:
    found = study.without("pto-isa, torch_jit (x86)")
    assert found.changes == {"launch.gap_s": "0"}
    assert found.filed[0] == found.alone[0] == 6
    assert found.filed[1] != found.alone[1]
    assert found.alone[1] <= 0.10


def test_samples_of_single_mechanisms_are_met() -> None:
    found = samples()
    errors = {(s.name.split()[0], s.name, s.quantity): abs(s.error) for s in found}
    assert {v for v, _, _ in errors} == {"V1", "V2", "V3", "V4", "V5", "V7"}
    assert max(errors.values()) <= 0.15
    # Columns of blocks 144 apart fall into one group of banks, 145 apart into eight: both met, sevenfold apart.
    slow, fast = (next(s for s in found if f"{n} blocks apart" in s.name) for n in (144, 145))
    assert slow.predicted / fast.predicted == pytest.approx(slow.measured / fast.measured, rel=0.05)
