from __future__ import annotations

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from npusim.cli.check_commands import _records
from npusim.cli.probe_command import ANSWERS, OPERATIONS
from npusim.config.bands import Validated
from npusim.errors import SpecError
from npusim.report.bits_table import ulp_words
from npusim.report.output import save_run
from npusim.report.result_json import load_result, record_of
from npusim.report.run_inputs import problem_text, tiling_text
from npusim.report.search_tables import exploration_document, exploration_part, exploration_table, rows_of
from npusim.report.tables import run_table, run_tiles, verdict
from npusim.report.text import plain
from npusim.report.times import pipes_grid
from npusim.report.worst_inputs import LEDGER
from npusim.run import run
from npusim.simulation.run_result import FiniteChoice, Spread
from npusim.studies.baseline.cycles import CheckOutcome, Row
from npusim.studies.explore.search import Progress
from npusim.studies.explore.store import FIGURES, PointOutcome
from npusim.studies.probe.decide import Answer
from npusim.studies.probe.vector import OperationResult
from npusim.studies.stress.ledger import Entry
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from npusim.report.result_json import RunRecord
    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")


@pytest.mark.parametrize(("ulp", "words"), [(8_400, "8,400"), (65_536, "65,536"), (2_082_367_176, "not comparable")])
def test_a_distance_in_ulp_that_means_nothing_is_not_printed(ulp: int, words: str) -> None:
    assert ulp_words(ulp) == words


def test_table_shows_time_pipes_links_and_provenance(record: RunRecord) -> None:
    text = plain(run_table(record, is_full=True))
    timing = record.timing
    assert timing is not None
    assert "pangu_38b: B1 N5 S512 d128 causal float16" in text
    assert f"{timing.cycles:,}" in text
    assert f"file digest {record.device.digest}" in text
    for word in ("MTE2", "MTE1", "CUBE", "FIXP", "VECTOR", "MTE3", "hbm", "l2", "of busy cycles"):
        assert word in text
    assert "veccore0, veccore1" in text, "cores that did the same share their rows"
    assert "core (slowest of 20)" in text
    assert "numerics   not computed" in text


def test_numerics_lines_name_errors_events_sample_and_assumed_arithmetic(overflowed: RunData) -> None:
    text = plain(run_table(record_of(overflowed)))
    assert "not finite: 2 NaN in the output (25.0 % of rows), 1 Inf   overflow 7   NaN 2" in text
    assert "RMSE" not in text
    assert "no schedule and preset on this device gives finite outputs on the same sample" in text
    assert "first overflow in S.drain.cast" in text
    assert "row 3 col 5" in text
    assert "against float64 on rows 128..131 of 1 of 5 heads" in text
    assert "ascend.cube.k16.f16.f32 (assumed)" in text


def test_the_verdict_says_limit_roof_error_and_how_sure_the_time_is(record: RunRecord, overflowed: RunData) -> None:
    timing = record.timing
    assert timing is not None
    assert timing.busiest is not None
    assert timing.busy_share(timing.busiest) < 0.6
    known = Validated(9, 3, 0.05, 0.136)
    sure = replace(record, timing=replace(timing, latency_s=238.4e-6, launch_s=80e-6, validated=known))
    assert verdict(sure).text == "latency-bound, 20 of 24 core groups work, 10 % of the roofline, 238 us ± 14 %"
    assert verdict(record).text.startswith("launch-bound (59 % of the call), 20 of 24 core groups work, ")
    other = replace(timing, latency_s=1.2e-3, validated=Validated())
    assert verdict(replace(record, timing=other)).text.endswith(", 1.2 ms, not measured")
    busy = replace(timing.busiest, busy_cycles=timing.cycles)
    ended = tuple(replace(u, group=g) for g, u in enumerate([busy] * record.device.group_count))
    early = [replace(u, end_cycles=timing.cycles // 2) for u in ended[1:]]
    uneven = replace(record, timing=replace(timing, uses=(replace(ended[0], end_cycles=timing.cycles), *early)))
    assert verdict(uneven).text.startswith(
        f"launch-bound (59 % of the call), cores {busy.pipe}-bound, load balance 52 %, "
    )
    full = replace(timing, link_bytes={"hbm": round(timing.core_us * 1.45e6 * 0.9)})
    assert verdict(replace(record, timing=full)).text.startswith("launch-bound (59 % of the call), cores hbm-bound, ")
    assert "  limit      hbm, at 90.0 % of its bandwidth; " in plain(run_table(replace(record, timing=full)))
    both = replace(record, timing=replace(full, uses=ended))  # a pipe is busier than the link
    assert verdict(both).text.startswith(f"launch-bound (59 % of the call), cores {busy.pipe}-bound, ")
    assert f"  limit      {busy.pipe} of " in plain(run_table(both))
    assert "output not finite" in verdict(record_of(overflowed)).text
    assert verdict(replace(record, timing=None)).text == "no time and no bits"
    bits = record_of(overflowed).numerics
    assert bits is not None
    for rmse, words in ((1.04, "THE OUTPUT DOES NOT MATCH float64: relative error 1.0e+00"), (0.1, "error 1.0e-01")):
        off = replace(record, timing=None, numerics=replace(bits, rmse=rmse, nan_count=0, inf_count=0))
        assert verdict(off).text.startswith(words)


def test_the_short_table_has_half_the_lines_and_names_the_rest(record: RunRecord) -> None:
    short, full = (plain(run_table(record, is_full=is_full)) for is_full in (False, True))
    assert "more " in short
    assert "--full" in short
    assert "--full" not in full
    for words in ("\n  times ", "constants ", "over the least", "at least ", "file digest"):
        assert words in full
        assert words not in short


def test_other_assumed_arithmetics_show_how_far_the_bits_depend_on_the_choice(overflowed: RunData) -> None:
    spread = (Spread("ascend.cube.k8.f16.f32", 1.5e-5, 0.125, 0.031),)
    record = replace(record_of(overflowed), spread=spread)
    assert "another moves the outputs by up to 1.5e-05 \N{PLUS-MINUS SIGN} 3 %" in plain(run_table(record))
    text = plain(run_table(record, is_full=True))
    assert "with ascend.cube.k8.f16.f32 12.5 % of outputs differ, relative RMSE 1.50e-05" in text


def test_outputs_that_are_not_finite_are_at_no_distance_from_others(overflowed: RunData) -> None:
    spread = (Spread("ascend.cube.k8.f16.f32", None, None),)
    record = replace(record_of(overflowed), spread=spread)
    assert "with another, outputs are not finite" in plain(run_table(record))
    assert "with ascend.cube.k8.f16.f32: outputs are not finite" in plain(run_table(record, is_full=True))


def test_a_choice_that_is_finite_is_told_with_its_error(overflowed: RunData) -> None:
    finite = (FiniteChoice("flash", "fa2_fp32", 1.5e-4), FiniteChoice("pasa", "fp16_mean", 5e-3))
    text = plain(run_table(replace(record_of(overflowed), finite=finite)))
    assert (
        "finite outputs on the same sample: flash with precision fa2_fp32 (relative RMSE 1.50e-04), "
        "pasa with precision fp16_mean (relative RMSE 5.00e-03)" in text
    )


#: Runs by limit: launch, a pipe, a link, none; on NPUs and GPUs, few blocks and many.
SPREAD: list[tuple[str, dict[str, Any]]] = [
    ("flash", {"hw": "ascend_910b2", "seq": 512}),
    ("flash", {"hw": "h100", "seq": 1024}),
    ("copy", {"hw": "ascend_910b2", "problem": {"bytes": 1 << 20}}),
    ("copy", {"hw": "h200", "problem": {"bytes": 1 << 26}}),
    ("gemm", {"hw": "h200", "problem": {"m": 1, "n": 4096, "k": 4096}}),
    ("gemm", {"hw": "h200", "problem": {"m": 4096, "n": 4096, "k": 4096}}),
    ("gemm", {"hw": "ascend_910b4", "problem": {"m": 256, "n": 4096, "k": 4096}}),
    ("ssd", {"hw": "t4", "problem": {"tokens": 512}, "tiling": declared_tiling("ssd", "t4")}),
    (
        "retention",
        {"hw": "ascend_910b2", "problem": {"tokens": 512}, "tiling": declared_tiling("retention", "ascend_910b2")},
    ),
]


@pytest.mark.parametrize(("schedule", "of"), SPREAD)
def test_verdict_limit_and_advice_name_one_limit(schedule: str, of: dict[str, Any]) -> None:
    record = record_of(run(schedule, numerics=False, **of))
    timing, rows = record.timing, dict[str, str]()
    assert timing is not None
    for line in plain(run_table(record)).splitlines():
        if line.startswith("  ") and len(words := line.split(maxsplit=1)) > 1:
            rows.setdefault(words[0], words[1])
    first, *_ = rows["verdict"].split(", ")
    cores = re.search(r"(?:^|cores )(\w+)-bound", rows["verdict"].removeprefix("launch-bound"))
    assert first.startswith("launch-bound") == (timing.launch_us > timing.core_us)
    waits = rows["limit"].startswith("pipes wait for one another")
    assert waits == (cores is None or cores[1] == "latency")
    if not waits:
        assert cores is not None and rows["limit"].startswith((f"{cores[1]} of ", f"{cores[1]}, at "))
    assert ("no pipe is the limit" in rows.get("advice", "")) <= waits
    assert str(timing.limit(record.device.link_bytes_per_s)).startswith("latency") == waits  # as `tune` prints it


def test_declared_sizes_are_the_problem_and_the_same_run_where_they_are_named() -> None:
    tiling = declared_tiling("retention", "ascend_910b2")  # no other is tried
    usual = run("retention", numerics=False, tiling=tiling)
    named = run("retention", numerics=False, tiling=tiling, problem={"tokens": 2048})
    other = run("retention", numerics=False, tiling=tiling, problem={"tokens": 1024, "dtype": "bfloat16"})
    assert "problem    batch=1 heads=16 tokens=2048 key=128 value=128 float16" in str(usual)
    assert "problem    batch=1 heads=16 tokens=1024 key=128 value=128 bfloat16" in str(other)
    assert (usual.digest, usual.name) == (named.digest, named.name) == (usual.digest, "retention")
    assert other.name == "retention-tokens1024"
    with pytest.raises(SpecError, match="retention has no size tokns=4"):
        run("retention", numerics=False, problem={"tokns": 4})


def test_queues_of_many_resident_blocks_are_one_row_a_kind(record: RunRecord) -> None:
    timing = record.timing
    assert timing is not None
    queues = [replace(u, queue=f"sm.B{n}LDG", busy_cycles=10 + n) for n, u in enumerate([timing.uses[0]] * 12)]
    pipe = replace(timing.uses[0], queue="sm.LDG", is_pipe=True)
    rows = [row[1].text for row in pipes_grid(replace(timing, uses=(*queues, pipe))).rows]
    assert rows == ["B11LDG, busiest of 12", "LDG"]
    assert [row[1].text for row in pipes_grid(replace(timing, uses=(*queues[:2], pipe))).rows] == [
        "B0LDG",
        "B1LDG",
        "LDG",
    ]


def test_run_without_a_time_says_so(record: RunRecord) -> None:
    text = plain(run_table(replace(record, timing=None)))
    assert "latency  not modelled on this device" in text
    assert "advice" not in text


def test_closed_form_bound_stands_beside_the_cycles(record: RunRecord) -> None:
    timing = record.timing
    assert timing is not None
    bounded = replace(timing, bound_cycles={"CUBE": 10, "VECTOR": timing.cycles // 2})
    text = plain(run_table(replace(record, timing=bounded), is_full=True))
    assert f"{timing.core_us / 2:.2f} us on the cores (50.0 % of the prediction): the work of VECTOR alone" in text
    over = replace(timing, bound_cycles={"VECTOR": timing.cycles + 1})
    assert "the work of VECTOR alone" in plain(run_table(replace(record, timing=over))), "shown where it contradicts"


def test_the_tile_of_a_page_says_once_that_nothing_was_measured(record: RunRecord) -> None:
    assert record.timing is not None
    other = replace(record, timing=replace(record.timing, validated=Validated()))
    tile = next(tile for tile in run_tiles(other) if tile.name == "Validated")
    assert (tile.value, tile.note.partition(" ")[0]) == ("not measured", "no")


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
    again = load_result(save_run(asked, tmp_path / "run", trace=False))
    assert again.to_document() == record.to_document()


def test_records_of_checks_probes_and_ledgers_have_every_field() -> None:
    """A table that is declared once leaves no field of its rows out of JSON."""
    row = Row("aic", 1, 2, 1.0, "longer")
    outcome = CheckOutcome("cycles", "case", Path("case.yaml"), "changed", (row,), moved=(("aic", "CUBE", 1, 2),))
    (record,) = _records([outcome])
    assert {**record, "path": record["file"]}.keys() >= {f.name for f in fields(outcome)}
    assert (record["rows"], record["passed"]) == ([asdict(row)], False)
    assert record["moved"] == [{"unit": "aic", "name": "CUBE", "old": 1, "new": 2}]
    for columns, one in (
        (ANSWERS, Answer("question", "answer", 1, 2, ("another",))),
        (OPERATIONS, OperationResult("key", "question", ("answer",), 1, 2, "best", "note")),
        (LEDGER, Entry("step", "float16", 4, 1, 2, 3)),
    ):
        assert columns.records([one]) == [asdict(one)]
        assert len(columns.grid([one]).rows) == 1


def test_records_of_a_search_have_every_figure_of_a_point() -> None:
    """The document of a search, its table and its page read one declaration."""
    figures = {"cycles": 5, "latency_us": 2.0, "band": 0.1, "head_room": 0.5, "tightest": "UB", "busy_share": 0.9}
    points = [
        PointOutcome(0, {"block_kv": 64}, "ok", method="mean field", busiest="CUBE", **cast("Any", figures)),
        PointOutcome(1, {"block_kv": 96, "depth": None}, "infeasible", reason="UB: full", relative_rmse=0.25),
    ]
    told = exploration_document("flash", points, None, Progress("", 2, 2))
    assert told["points"] == [{"tiling": o.point} | {n: getattr(o, n) for n in FIGURES} for o in points]
    assert told["best"] == cast("list[object]", told["points"])[0]
    text = plain(exploration_table("flash", points, None, Progress("", 2, 2), top=5, is_pareto=False))
    row = next(line for line in text.splitlines() if "best" in line)
    assert row.split() == ["64", "2.00", "5", "best", "CUBE", "90.0", "%", "UB", "50.0", "%"]
    assert "method  mean field ±10.0 %" in text
    page = exploration_part("flash", [o.row() for o in points])
    grids = {figure.key: figure.table for figure in page.figures}
    assert [cell.text for cell in grids["ranking"].rows[0]] == ["64", "2.00", "5", "CUBE", "90.0 %"]
    assert [cell.text for cell in grids["left"].rows[0]] == ["block_kv=96", "infeasible", "UB: full"]


def test_a_table_of_a_search_by_another_version_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("block_kv,depth,status,latency_us\n64,,ok,2.5\n,2,infeasible,\n")
    rows = rows_of(tmp_path / "old.csv")
    assert ("depth" in rows[0], "block_kv" in rows[1], rows[0]["cycles"]) == (False, False, None)
    grid = next(f.table for f in exploration_part("old", rows).figures if f.key == "ranking")
    assert [cell.text for cell in grid.rows[0]] == ["64", "", "2.50", "-", "-", "-"]
