"""A run's place under the roofline, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from npusim.program.timing.timing_result import Roofline
from npusim.report.result_json import load_result, record_of
from npusim.report.tables import run_table
from npusim.report.text import plain, to_json
from npusim.run import run
from npusim.simulation.run_result import roofline_of

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.config.device import DeviceSpec
    from npusim.simulation.run_result import RunData


def test_the_peak_of_a_910b2_is_the_published_one(device: DeviceSpec) -> None:
    # 24 AIC x 16^3 multiply-adds x 2 x 1.8 GHz = 353.9 TFLOP/s (PASA, appendix M: 354);
    # float32 a quarter.
    assert device.peak_flops_per_s("float16") == pytest.approx(24 * 8192 * 1.8e9)
    assert device.peak_flops_per_s("float32") == pytest.approx(24 * 8192 * 1.8e9 / 4)


def test_attention_lies_under_the_matrix_roof_by_the_bytes_of_its_tensors(result: RunData) -> None:
    # 5 causal heads of 512 x 128: Q, K and V in float16, each once; O stays in L2.
    found, problem = roofline_of(result), result.problem
    assert found is not None
    tensors = 3 * 5 * 512 * 128 * 2
    pairs = 512 * 513 // 2
    assert problem.flops() == 5 * pairs * 4 * 128
    assert found.intensity == pytest.approx(problem.flops() / tensors)
    assert found.moved_intensity <= found.intensity
    assert found.ridge == pytest.approx(353.9e12 / 1.45e12, rel=1e-3)
    assert 0 < found.reached < 1


def test_below_the_ridge_memory_is_the_roof() -> None:
    few = Roofline(10.0, 5.0, 300.0, 20.0, 100.0)
    assert (few.ridge, few.attainable_flops_per_s, few.reached) == (15.0, 200.0, 0.5)
    many = replace(few, intensity=100.0)
    assert many.attainable_flops_per_s == 300.0


def test_the_table_and_the_result_file_have_it(result: RunData, tmp_path: Path) -> None:
    record = record_of(result)
    text = plain(run_table(record, is_full=True))
    for words in (
        "roofline",
        "per byte of inputs and outputs, each moved once",
        "over the least",
        "the roof below 244",
    ):
        assert words in text
    file = tmp_path / "result.json"
    file.write_text(to_json(record.to_document()))
    assert load_result(file).to_document() == record.to_document()


def test_an_approximate_time_says_so_with_its_band(result: RunData) -> None:
    record = record_of(result)
    assert record.timing is not None
    near = replace(record, timing=replace(record.timing, band=0.0131))
    assert "approximate: within 1.3 % of exact" in plain(run_table(near))
    assert "approximate" not in plain(run_table(record))


def test_a_copy_has_no_place_under_it() -> None:
    from npusim.config.problem import CopyProblem

    assert roofline_of(run("copy", problem=CopyProblem(bytes=1 << 20))) is None
