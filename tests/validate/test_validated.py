"""The errors that ship beside device files: written from every measured case, and shown beside latencies."""

from __future__ import annotations

import csv
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.config.bands import (
    A_DOUBLING,
    FILE,
    OWN,
    MeasuredCase,
    Validated,
    band,
    kind_of,
    numbers_of,
    tile_of,
    validated,
)
from npusim.config.cases import Interval, load_measurements
from npusim.config.load import load_device, load_workload
from npusim.config.packaged import packaged_folder
from npusim.config.tiling import build_tiling
from npusim.report.latency_rows import latency_rows
from npusim.report.record import record_of
from npusim.report.tables import run_table, run_tiles
from npusim.report.text import plain
from npusim.schedules import find_schedule
from npusim.validate.times import Residual
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
            "predicted only; nine in ten of the times measured there were within 30.0 % .gemm.$",
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
        (
            Validated(3, 0, 0.1, 0.2, nearest="flash (cann)"),
            "^not measured like this: no case of flash on t4 has such a kernel and each size within a factor of 4; "
            "errors of the nearest, 3 measured times of flash .cann.: up to 20.0 %, half of them up to 10.0 %$",
        ),
    ],
)
def test_errors_in_words(found: Validated, text: str) -> None:
    assert re.search(text, found.text("flash", "t4"))


def test_a_run_says_its_errors_in_every_form() -> None:
    runs = [npusim.run("flash", hw=hw, seq=512, numerics=False) for hw in ("h200", "a10")]
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
    assert (far.outside, far.like, far.widened) == ("m 1/4 of the smallest", 19, 1 + 2 * A_DOUBLING)
    assert far.most_error == far.band == pytest.approx(0.09 * far.widened)
    few = [case(0.01), *(case(n / 10, "flash") for n in range(1, 9)), case(3.0, "layer")]
    assert band(few, "gemm", {"m": 64}, is_estimated=False).others_used == 8
    assert band(few, "gemm", {"m": 64}, is_estimated=False).most_error == 0.8
    own = [*few, *(case(n / 100) for n in range(2, 7))]  # six: their largest, unless a constant was fitted on all
    assert (band(own, "gemm", {"m": 64}, is_estimated=False).most_error, own[0].error) == (0.06, 0.01)
    fitted = [c._replace(is_fitted=c.schedule == "gemm") for c in own]
    assert band(fitted, "gemm", {"m": 64}, is_estimated=False).most_error == 0.8
    told = [c._replace(estimated_error=2 * c.error) for c in cases]
    assert band(told, "gemm", {}, is_estimated=True).most_error == 0.18


def test_a_band_is_of_the_narrowest_class_of_kernels_with_cases_enough() -> None:
    wide, narrow = "more than 128 rows; one stage", "up to 128 rows; stages"
    cases = [
        *(case(n / 100, tile=narrow) for n in range(1, 11)),
        *(case(n / 10, tile=wide) for n in range(1, 9)),
        *(case(n / 1000, kind="cublas") for n in range(1, 10)),
    ]

    def of(*kernel: str) -> Validated:
        return band(cases, "gemm", {"m": 64}, *kernel, is_estimated=False)

    assert (of("", narrow).most_error, of("", narrow).ranked) == (0.1, 10)
    assert of("", narrow).why.endswith("; errors of 10 cases, up to 128 rows, stages)")
    assert (of("", wide).most_error, of("", wide).ranked, of("", wide).ranked_class) == (0.8, 18, OWN)
    assert (of("cublas").most_error, of("cublas").ranked_class) == (0.009, "cublas")
    cases.append(case(0.9, tile=wide, is_fitted=True))
    assert (of("", wide).most_error, of("", wide).ranked) == (0.9, 9)
    of_all = band(cases, "gemm", {}, is_estimated=False)
    assert (of_all.ranked, of_all.ranked_class, of_all.most_error) == (0, "", 0.7)


def test_the_class_of_a_tile() -> None:
    tilings = find_schedule("flash", "nvidia").tiling
    assert tile_of(build_tiling(tilings, {"block_q": 256, "stages": 1})) == "more than 128 rows; one stage"
    assert tile_of(build_tiling(tilings, {"block_q": 128, "stages": 2})) == "up to 128 rows; stages"
    assert tile_of(build_tiling(tilings, {"stages": "library"})) == tile_of(None) == ""
    assert tile_of(build_tiling(find_schedule("flash", "ascend").tiling, {})) == ""
    product = find_schedule("gemm", "ascend").tiling
    assert tile_of(build_tiling(product, {"block_n": 16})) == "tiles of up to 16 columns"
    assert tile_of(build_tiling(product, {})) == "tiles of more than 16 columns"


def test_where_no_case_is_alike_errors_are_errors() -> None:
    cases = [*(case(n / 100) for n in range(1, 10)), case(0.5, kind="cublas"), case(-0.7, kind="cublas")]
    sizes, kind = (
        band(cases, "gemm", {"m": 8}, is_estimated=False),
        band(cases, "gemm", {"m": 64}, "x", is_estimated=False),
    )
    assert (sizes.like, sizes.band, sizes.nearest, sizes.cases) == (0, None, "gemm", 9)
    assert (sizes.median_error, sizes.most_error, sizes.widened) == (0.05, 0.09, 1.0)
    assert (kind.band, kind.nearest, kind.cases, kind.most_error) == (None, "gemm", 11, 0.7)
    of_kind = band(cases, "gemm", {"m": 512}, "cublas", is_estimated=False)
    assert (of_kind.nearest, of_kind.cases, of_kind.median_error) == ("gemm (cublas)", 2, pytest.approx(0.6))
    assert band(cases, "gemm", {"m": 256}, "cublas", is_estimated=False).like == 2
    assert kind_of(None) == kind_of(build_tiling(find_schedule("flash", "nvidia").tiling, {"stages": 2})) == ""
    assert kind_of(build_tiling(find_schedule("flash", "nvidia").tiling, {"stages": "library"})) == "library"
    assert kind_of(build_tiling(find_schedule("flash", "ascend").tiling, {"kernel": "cann"})) == "cann"


def test_a_run_like_none_has_no_band_in_any_form() -> None:
    latents = load_workload("deepseek_v3").problem(
        seq_q=1, seq_kv=4096, batch=128, tensor_parallel=8, page=64, is_absorbed=True
    )
    known = validated(load_device("h100"), "split_kv", latents)
    assert (known.like, known.band, known.nearest, known.cases) == (0, None, "split_kv", 10)
    run = npusim.run("split_kv", hw="h100", seq=64, batch=1, numerics=False)
    record = record_of(run)
    assert record.timing is not None
    assert record.timing.validated is not None
    assert record.timing.validated.band is None
    assert re.search(
        r"us \(not measured like this; errors of the nearest, 10 measured times of split_kv: up to",
        plain(run_table(record)),
    )
    assert "±" not in plain(run_table(record))
    assert [tile.value for tile in run_tiles(record) if tile.name == "Validated"] == ["not like this"]
    text, _ = latency_rows("split_kv", {"heads": [8], "seq_q": [64], "head_dim": [64]}, "aiconfigurator", hw="h100")
    assert text.splitlines()[1].endswith(",")


def test_bands_rest_on_times_that_the_device_bounds() -> None:
    path = next(path for _, path in study.FILES if path.name == "measured_more.yaml")
    cases = [case for case in load_measurements(path).cases if case.host_floor_us is not None]
    assert {c.name for c in cases} >= {"cann_q3072_kv8192", "fa_x86_q128_kv2048", "cann_a3_8192"}
    interval = Interval(1.0, 1.0)
    residuals = [Residual(c.name, c.group, "latency_us", interval, 1.0, 0.0, None) for c in cases]
    rows = [study.Row("910B", "measured_more", c, r, "") for c, r in zip(cases, residuals, strict=True)]
    assert bands._lines(rows) == []
    assert validated(load_device("ascend_910b2"), "flash").cases == 9
    assert validated(load_device("ascend_910b2"), "flash").most_error < 0.3  # type: ignore[operator]


def test_bands_hold_for_cases_kept_out() -> None:
    kept = bands.judged()
    assert [key for key, cases in kept.items() if not bands.is_by_chance(cases)] == []
    widths = {key: bands.Width.of(cases) for key, cases in kept.items()}
    assert {key: w for key, w in widths.items() if w.widest > 2 * w.need} == {}, "wider than twice what they need"
    assert min(w.left_out for w in widths.values()) >= bands.SHARES[1][0]
    doubled = [c._replace(case=c.case._replace(error=2 * c.case.error)) for c in kept["h200", "flash", "cudnn", ""]]
    assert not bands.is_by_chance(doubled)
    every = [c for cases in bands.judged().values() for c in cases]
    assert all(low <= share <= high for share, (low, high) in zip(bands.shares(every), bands.SHARES, strict=True))
    holding = {factor: bands.holding(factor) for factor in bands.FACTORS}
    assert holding[A_DOUBLING] >= 0.7 * 2 * len(kept)
    assert holding[A_DOUBLING] >= max(holding.values()) - 1, "others widen better"
