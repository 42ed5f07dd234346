from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.report.inputs import problem_text, tiling_text
from npusim.report.output import save_run
from npusim.report.record import load_result, record_of
from npusim.report.tables import run_table
from npusim.report.text import plain
from npusim.run import run
from npusim.simulation.result import FiniteChoice, Spread

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.report.record import RunRecord
    from npusim.simulation.result import RunData


def test_table_shows_time_pipes_links_and_provenance(record: RunRecord) -> None:
    text = plain(run_table(record))
    timing = record.timing
    assert timing is not None
    assert "pangu_38b: B1 N5 S512 d128 causal float16" in text
    assert f"{timing.cycles:,}" in text
    assert f"file digest {record.device.digest}" in text
    for word in ("MTE2", "MTE1", "CUBE", "FIXP", "VECTOR", "MTE3", "hbm", "l2", "of busy cycles"):
        assert word in text
    assert "veccore0, veccore1" in text, "cores that did the same share their rows"
    assert "(last of 20 groups to end)" in text
    assert "numerics   not computed" in text


def test_numerics_lines_name_errors_events_sample_and_assumed_arithmetic(overflowed: RunData) -> None:
    text = plain(run_table(record_of(overflowed)))
    assert "not finite: 2 NaN in the output (25.0 % of rows), 1 Inf   overflow 7   NaN 2" in text
    assert "RMSE" not in text
    assert "no preset of this device's schedules is finite on the same sample" in text
    assert "first overflow in S.drain.cast" in text
    assert "row 3 col 5" in text
    assert "against float64 on rows 128..131 of 1 of 5 heads" in text
    assert "ascend.cube.k16.f16.f32 (assumed)" in text


def test_other_assumed_arithmetics_show_how_far_the_bits_depend_on_the_choice(overflowed: RunData) -> None:
    spread = (Spread("ascend.cube.k8.f16.f32", 1.5e-5, 0.125),)
    text = plain(run_table(replace(record_of(overflowed), spread=spread)))
    assert "with ascend.cube.k8.f16.f32 12.5 % of outputs differ, relative RMSE 1.50e-05" in text


def test_outputs_that_are_not_finite_are_at_no_distance_from_others(overflowed: RunData) -> None:
    spread = (Spread("ascend.cube.k8.f16.f32", None, None),)
    text = plain(run_table(replace(record_of(overflowed), spread=spread)))
    assert "with ascend.cube.k8.f16.f32: outputs are not finite" in text


def test_a_choice_that_is_finite_is_told_with_its_error(overflowed: RunData) -> None:
    finite = (FiniteChoice("flash", "fa2_fp32", 1.5e-4), FiniteChoice("pasa", "fp16_mean", 5e-3))
    text = plain(run_table(replace(record_of(overflowed), finite=finite)))
    assert (
        "finite on the same sample: flash with precision fa2_fp32 (relative RMSE 1.50e-04), "
        "pasa with precision fp16_mean (relative RMSE 5.00e-03)" in text
    )


def test_run_without_a_time_says_so(record: RunRecord) -> None:
    text = plain(run_table(replace(record, timing=None)))
    assert "latency  not modelled on this device" in text
    assert "advice" not in text


def test_closed_form_bound_stands_beside_the_cycles(record: RunRecord) -> None:
    timing = record.timing
    assert timing is not None
    bounded = replace(timing, bound_cycles={"CUBE": 10, "VECTOR": timing.cycles // 2})
    text = plain(run_table(replace(record, timing=bounded)))
    assert f"bound     {timing.cycles // 2:,} cycles at least (VECTOR), 50.0 % of the kernel" in text


def test_problem_text_shows_what_differs() -> None:
    problem: dict[str, object] = {
        "batch": 2,
        "heads": 8,
        "kv_heads": 1,
        "seq_q": 1,
        "seq_kv": 4096,
        "head_dim": 192,
        "value_head_dim": 128,
        "causal": False,
        "dtype": "bfloat16",
    }
    assert problem_text(problem) == "B2 N8/1 S1x4096 d192/128 full bfloat16"


def test_tiling_text_leaves_out_what_the_schedule_chooses() -> None:
    assert tiling_text({"block_q": 128, "vector_rows": None}) == "block_q=128"


def test_a_diagnosis_is_shown_and_kept(tmp_path: Path) -> None:
    asked = run(
        "pasa", workload="pasa_uniform", seq=512, tiling={"block_kv": 256}, heads=[0], diagnose=True, trace_groups=()
    )
    record = record_of(asked)
    assert record.numerics is not None
    figures = record.numerics.diagnosis
    assert figures is not None
    assert figures.shifted_key_max is not None
    assert figures.shifted_key_max < figures.key_min < figures.raw_score_min
    text = plain(run_table(record))
    for part in ("ranges: K [", "K' [", "Q K^T [", "resonance: Q against K 0 degrees", "P underflow: 87"):
        assert part in text
    again = load_result(save_run(asked, tmp_path / "run", trace="none"))
    assert again.to_document() == record.to_document()
