from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npusim.config.cases import Interval, MeasurementCase, load_measurements

if TYPE_CHECKING:
    from collections.abc import Callable

SHARED = Path(__file__).resolve().parents[3] / "shared" / "measurements"
HEAD = "schema: npusim.measurements/1\nsource: a test\ncases:\n"
CASE = (
    "  - name: {name}\n    device: ascend_910b2\n    schedule: flash\n"
    "    workload: {{heads: 5, seq_q: 64, seq_kv: 64, head_dim: 64}}\n"
    "    measured: {{latency_us: [10, 12.5]}}\n"
)


@pytest.mark.parametrize(("name", "count"), [("ascend_910b2", 9), ("papers", 38), ("h200", 191)])
def test_shared_files_load_and_every_attention_case_is_a_problem(name: str, count: int) -> None:
    path = SHARED / f"{name}.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not here: shared measurements lie beside the checkout")
    cases = load_measurements(path).cases
    assert len(cases) == count
    for case in cases:
        if case.workload.kind == "attention":
            assert case.workload.problem().heads >= 1


def _papers_case(name: str) -> MeasurementCase:
    path = SHARED / "papers.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not here: shared measurements lie beside the checkout")
    return next(case for case in load_measurements(path).cases if case.name == name)


def test_tensor_parallel_divides_the_heads() -> None:
    case = _papers_case("tiling_allreduce_llama70b_8k")
    problem = case.workload.problem()
    assert (problem.heads, problem.kv_heads, case.workload.hidden) == (8, 1, 8192)


def test_a_baseline_replaces_keys_of_its_case() -> None:
    case = _papers_case("fa16_vs_fa32")
    baseline = case.baseline_case()
    assert baseline is not None
    assert (baseline.schedule, baseline.precision) == ("flash", "fa2_fp32")
    assert (baseline.workload, baseline.baseline) == (case.workload, None)


def test_a_baseline_with_another_schedule_takes_that_schedules_defaults() -> None:
    case = _papers_case("unified_vs_standard_16k")
    assert case.tiling == {"block": 128}
    baseline = case.baseline_case()
    assert baseline is not None
    assert (baseline.schedule, baseline.tiling) == ("standard", None)


@pytest.mark.parametrize(("predicted", "error"), [(9.0, -0.1), (10.0, 0.0), (11.0, 0.0), (12.5, 0.0), (15.0, 0.2)])
def test_errors_are_against_the_nearer_end_of_a_range(predicted: float, error: float) -> None:
    assert Interval(10.0, 12.5).relative_error(predicted) == pytest.approx(error)


def test_ranges_numbers_and_bands_are_read(write: Callable[..., Path]) -> None:
    text = HEAD.replace("cases", "band: 0.2\ncases") + CASE.format(name="a")
    text += CASE.format(name="b").replace("[10, 12.5]", "7") + "    band: 0.1\n"
    file = load_measurements(write(text))
    first, second = file.cases
    assert dict(first.measured.items()) == {"latency_us": Interval(10.0, 12.5)}
    assert dict(second.measured.items()) == {"latency_us": Interval(7.0, 7.0)}
    assert (file.band_of(first), file.band_of(second)) == (0.2, 0.1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flash", "flash\n    prec: x", "7  cases.0.prec: unknown key. Did you mean `precision`?"),
        ("latency_us", "latncy_us", "8  cases.0.measured.latncy_us: unknown key. Did you mean"),
        ("{latency_us: [10, 12.5]}", "{}", "8  cases.0.measured: nothing was measured"),
        (
            "[10, 12.5]",
            "[12.5, 10]",
            "8  cases.0.measured.latency_us: the low end is above the high end (got [12.5, 10])",
        ),
        ("[10, 12.5]", "-1", "8  cases.0.measured.latency_us: expected a positive number or [low, high] (got -1)"),
        (
            "seq_kv: 64, ",
            "",
            "7  cases.0.workload.seq_kv: missing; sizes of attention are heads, seq_q, seq_kv, head_dim",
        ),
        ("latency_us: [10, 12.5]", "speedup: 1.2", "4  cases.0.baseline: missing; a speedup is relative to a baseline"),
        ("flash", "flash\n    band: 0", "7  cases.0.band: 0 must be greater than 0"),
    ],
)
def test_bad_cases_are_refused_with_their_place(
    old: str, new: str, message: str, write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    text = HEAD + CASE.format(name="a")
    assert old in text
    path = write(text.replace(old, new))
    assert fault(load_measurements, path).startswith(f"{path}:{message}")


def test_case_names_are_unique(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write(HEAD + CASE.format(name="a") + CASE.format(name="a"))
    expected = f"{path}:9  cases.1.name: 'a' is also the name of case 1"
    assert fault(load_measurements, path) == expected
