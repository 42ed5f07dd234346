"""The errors that ship beside device files: written from every measured case, and shown beside latencies."""

from __future__ import annotations

import csv
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.config.bands import A_DOUBLING, FILE, MeasuredCase, Validated, band, numbers_of, validated
from npusim.config.cases import load_measurements
from npusim.config.load import load_device
from npusim.config.packaged import packaged_folder
from npusim.report.record import record_of
from npusim.report.tables import run_table, run_tiles
from npusim.report.text import plain
from reports.validation import bands, study

if TYPE_CHECKING:
    from pathlib import Path

WRITE = "python reports/validation/bands.py writes it anew"


def listed() -> list[dict[str, str]]:
    text = (packaged_folder("hwconfigs") / FILE).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def test_errors_are_those_of_the_device_files_as_they_are() -> None:
    for row in listed():
        numbers = numbers_of(bands.machine_of(row["device"], row["schedule"]))
        assert numbers == row["numbers"], f"{row['device']} has other numbers now; {WRITE}"
    assert {row["device"] for row in listed()} >= {"h200", "ascend_910b2", "h200_x2"}


def test_every_measured_case_of_a_gpu_lies_beside_the_page(shared_folder: Path) -> None:
    for name, files, hw in (
        ("h200", ["h200"], "h200"),
        ("h200_schedules", ["h200_schedules"], "h200"),
        ("h100", ["h100"], "h100"),
        ("papers", ["v100"], "v100"),
    ):
        every = load_measurements(shared_folder / "measurements" / f"{name}.yaml").cases
        kept = [c for f in files for c in load_measurements(study.HERE / f"measured_{f}.yaml").cases]
        # Of the paper's kernel on a V100 the declared tile is meant, which the file beside the page says.
        assert [c.model_copy(update={"unnamed": None}) for c in kept] == [c for c in every if c.device == hw]


@pytest.mark.exhaustive
def test_the_table_is_what_comes_out() -> None:
    assert (packaged_folder("hwconfigs") / FILE).read_text(encoding="utf-8") == bands.table(), WRITE


def test_half_and_nine_in_ten() -> None:
    found = study.Errors.of([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, 0.8, 0.9, -1.0])
    assert found == (10, 0.55, 0.9, 1.0)
    assert study.Errors.of([]) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Validated(), "no measurement of flash on t4: predicted only"),
        (
            Validated(others={"gemm": 0.3}),
            "predicted only; nine in ten of the times measured there are expected within 30.0 % .gemm.$",
        ),
        (Validated(is_changed=True), "no measurement of flash on t4 with these numbers: predicted only"),
        (
            Validated(1, 1, 0.05, 0.05),
            "by 1 measured time of flash on t4, half .* all measured so far within 5.0 % .1 of 1",
        ),
        (Validated(9, 4, 0.05, 0.1), "by 9 measured times .* 5.0 %, nine in ten within 10.0 % .4 of 9 cases like it.$"),
        (
            Validated(4, 0, 0.05, 0.1, 8, "seq_kv 4 times the largest measured", is_estimated=True),
            "4 measured times of flash on t4 and 8 of other schedules, .* nine in ten within 10.0 % "
            ".0 of 4 cases like it; seq_kv 4 times the largest measured; registers estimated.$",
        ),
    ],
)
def test_errors_in_words(found: Validated, text: str) -> None:
    assert re.search(text, found.text("flash", "t4"))


def test_a_run_says_its_errors_in_every_form() -> None:
    runs = [npusim.run("flash", hw=hw, seq=256, numerics=False) for hw in ("h200", "a10")]
    measured, predicted = (record_of(run) for run in runs)
    for record, word in ((measured, "nine in ten within"), (predicted, "predicted only")):
        assert record.timing is not None
        assert record.timing.validated is not None
        text = record.timing.validated.text("flash", record.device.name)
        assert word in text
        assert f"measured   {text}" in plain(run_table(record), width=None)
        assert [tile.note for tile in run_tiles(record) if tile.name == "Validated"] == [text]
    assert asdict(measured)["timing"]["validated"]["cases"] == validated(load_device("h200"), "flash").cases > 100


def test_other_numbers_are_not_those_that_were_held_against_silicon() -> None:
    device = load_device("h200", {"clock_hz": "1e9"})
    assert validated(device, "flash") == Validated(is_changed=True)
    assert set(validated(load_device("ascend_910b2"), "pasa").others) >= {"flash", "gemm"}
    assert "layer" not in validated(load_device("ascend_910b2"), "pasa").others, "no whole models"


def case(error: float, schedule: str = "gemm", *, is_fitted: bool = False, m: int = 64, **more: object) -> MeasuredCase:
    return MeasuredCase("t4", "", schedule, f"{error}", is_fitted, error, None, {"m": m})._replace(**more)  # type: ignore[arg-type]


def test_a_band_is_a_rank_of_untouched_errors_and_wider_beyond_what_was_measured() -> None:
    cases = [case(sign * n / 100) for n in range(1, 10) for sign in (-1, 1)] + [case(0.5, is_fitted=True)]
    inside = band(cases, "gemm", {"m": 64}, is_estimated=False)
    assert (inside.cases, inside.like, inside.median_error, inside.most_error) == (19, 19, 0.05, 0.09)
    far = band(cases, "gemm", {"m": 16}, is_estimated=False)
    assert (far.outside, far.like, far.widened) == ("m 1/4 of the smallest", 0, 1 + 2 * A_DOUBLING)
    assert far.most_error == pytest.approx(0.09 * far.widened)
    few = [case(0.01), *(case(n / 10, "flash") for n in range(1, 9)), case(3.0, "layer")]
    assert band(few, "gemm", {"m": 64}, is_estimated=False).others_used == 8
    assert band(few, "gemm", {"m": 64}, is_estimated=False).most_error == 0.8
    told = [c._replace(estimated_error=2 * c.error) for c in cases]
    assert band(told, "gemm", {}, is_estimated=True).most_error == 0.18


def test_bands_hold_for_cases_kept_out() -> None:
    kept = bands.judged()
    assert [key for key, cases in kept.items() if not bands.is_by_chance(cases)] == []
    doubled = [c._replace(case=c.case._replace(error=2 * c.case.error)) for c in kept["h200", "flash"]]
    assert not bands.is_by_chance(doubled)
    every = [c for cases in bands.judged().values() for c in cases]
    assert all(low <= share <= high for share, (low, high) in zip(bands.shares(every), bands.SHARES, strict=True))
    holding = {factor: bands.holding(factor) for factor in bands.FACTORS}
    assert holding[A_DOUBLING] >= 0.7 * 2 * len(kept)
    assert holding[A_DOUBLING] >= max(holding.values()) - 1, "others widen better"
