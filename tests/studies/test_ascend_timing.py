"""The page on the 910B's timing: its goals on packaged measurements, and its own arithmetic."""

from __future__ import annotations

from statistics import median

import pytest

from npusim.config.cases import Interval, MeasurementCase, load_measurements
from reports.ascend_timing import causes, compare, study
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


def test_each_kind_is_met(rows: list[study.Row]) -> None:
    kinds = {study.class_of(r.case.name) for r in rows}
    errors = {kind: study.summary([r for r in rows if study.class_of(r.case.name) == kind])[1] for kind in kinds}
    # mc2 alone stands for all-reduce here: 17.6 % at most; with the other node's cases 3.7 %.
    # Two rows of FastAttention's Table 9 stand for calls behind a host's floor: 18.8 % at most with the declared tile.
    assert {kind for kind, error in errors.items() if error > 0.15} <= {"all-reduce", "a call's floor"}
    assert errors["a call's floor"] < 0.18


def test_two_thirds_of_the_cases_are_in_no_fit(rows: list[study.Row]) -> None:
    names = {r.case.name for r in rows}
    free = {r.case.name for r in study.untouched(rows)}
    assert len(free) >= 2 / 3 * len(names)
    used = {name for _, fitted in study.fitted().values() for name in fitted}
    assert used <= {case.name for case in study.cases() + study.cases(study.BANK)}
    assert not any(name.endswith("_16k") for name in used)


def test_the_tuning_bank_is_met_with_its_tiles_and_layouts() -> None:
    errors = [row.error for row in study.bank()]
    assert len(errors) == 60
    assert median(map(abs, errors)) <= 0.12
    assert -0.07 <= median(errors) <= 0
    # What the bank does not say of a side of 16 is the worst of it.
    assert {r.case.name for r in study.bank() if abs(r.error) > 0.5 and r.case.workload.n > 16} == {
        "bank_64x112x640",
        "bank_4096x112x208",
    }
    kept = [row.error for row in study.rows("bank_*")]
    assert len(kept) == 10
    assert median(map(abs, kept)) <= 0.09
    assert max(map(abs, kept)) <= 0.2


def without_words(case: MeasurementCase) -> object:
    """Return a case without what its file says in words: whose kernel it is, which record of the bank."""
    found = case.model_dump()
    for run in (found, found.get("baseline") or {}):
        (run.get("tiling") or {}).pop("kernel", None)
    if case.name.startswith("bank_"):
        found["tiling"] = found["workload"]["operands"] = None
    return found


def test_packaged_cases_are_those_of_the_shared_files(shared_folder: object) -> None:
    folder = shared_folder / "measurements"  # type: ignore[operator]
    shared = {
        case.name: case
        for name in ("ascend_910b2", "ascend_more", "papers")
        for case in load_measurements(folder / f"{name}.yaml").cases
    }
    packaged = {case.name: case for case in study.cases()}
    for seq in (1024, 2048, 4096):  # of Table 9 at the end of reference/papers.md
        assert packaged.pop(f"pangu71b_floor_{seq}").workload.seq_q == seq
    del shared["fa16_vs_fa32"]  # a range that nothing could miss
    assert {n: without_words(c) for n, c in packaged.items()} == {n: without_words(shared[n]) for n in packaged}
    single = {n for n, c in shared.items() if c.device in ("ascend_910b1", "ascend_910b2")}
    assert single <= set(packaged)


def test_a_source_is_predicted_without_what_was_fitted_on_it() -> None:
    found = study.without("pto-isa, torch_jit (x86)")
    assert found.changes == {"launch.gap_s": "0"}
    assert found.filed[0] == found.alone[0] == 6
    assert found.filed[1] != found.alone[1]
    assert found.alone[1] <= 0.10


def test_a_gain_predicted_for_a_loss_is_no_small_error() -> None:
    case = next(c for c in study.cases() if c.name == "pasa_mha_32k")
    below, above = Interval(0.95, 0.99), Interval(1.01, 1.05)
    signs = [
        study.Row(case, quantity, measured, predicted, is_floor=False).is_wrong_sign
        for quantity, measured, predicted in (
            ("speedup", below, 1.01),
            ("speedup", above, 0.99),
            ("speedup", below, 0.9),
            ("speedup", above, 1.2),
            ("speedup", Interval(0.9, 1.1), 1.2),
            ("latency_us", above, 0.99),
        )
    ]
    assert signs == [True, True, False, False, False, False]


def test_bounds_of_a_fused_kernel_lie_below_it_and_its_operators_add_up() -> None:
    found, parts = compare.deit(32), compare.deit_operators(32)
    assert [p.name for p in parts] == ["scores", "scale", "softmax", "values"]
    assert found.memory < found.narrow < found.overlapped < found.kernel
    assert found.unfused[0] == found.unfused[1] < found.unfused[2]
    assert sum(p.us for p in parts) < found.unfused[1]  # and launches


def test_samples_of_single_mechanisms_are_met() -> None:
    found = samples()
    errors = {(s.name.split()[0], s.name, s.quantity): abs(s.error) for s in found}
    assert {v for v, _, _ in errors} == {"V1", "V2", "V3", "V4", "V5", "V7"}
    assert max(errors.values()) <= 0.15
    # Columns of blocks 144 apart fall into one group of banks, 145 apart into eight: both met, sevenfold apart.
    slow, fast = (next(s for s in found if f"{n} blocks apart" in s.name) for n in (144, 145))
    assert slow.predicted / fast.predicted == pytest.approx(slow.measured / fast.measured, rel=0.05)


def test_a_loop_of_calls_is_the_larger_of_host_and_device_but_for_one_library() -> None:
    found = causes.hosts()
    added = {who for who, (_, larger, one_by_one) in found.items() if one_by_one < larger}
    assert {who for who in found if who.startswith("PTO's kernels")} & added == set()
    assert "CANN's attention through torch" in added
    assert sum(count for count, _, _ in found.values()) == 23
