from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.errors import SpecError
from npusim.program.timing import METHODS
from npusim.report.comparison import ComparedFigure, Comparison, compare, comparison_document, comparison_table, reason
from npusim.report.output import save_run
from npusim.report.result_json import record_of
from npusim.report.text import markdown, plain
from npusim.run import run
from npusim.simulation.run_result import with_evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npusim.program.ir.tile_program import Cost
    from npusim.report.result_json import RunRecord
    from npusim.report.sheet import Part
    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")


def test_a_run_equals_itself_live_or_from_its_folder(tmp_path: Path, result: RunData, record: RunRecord) -> None:
    folder = save_run(result, tmp_path / "a", trace=False)
    for one, two in ((result, record), (folder, str(folder / "result.json")), (folder, result)):
        found = compare(one, two)
        assert found.differences == {}
        assert {figure.change() for figure in found.figures} <= {"", "="}
        assert found.moved == ()
        assert "the same" in str(found)
        assert "no activity of aiv0.VECTOR changed" in str(found)


def test_inputs_and_figures_that_differ_are_listed(record: RunRecord) -> None:
    assert record.timing is not None
    faster = replace(record.timing, latency_s=record.timing.latency_s / 2)
    new = replace(record, tiling={**record.tiling, "block_kv": 64}, timing=faster)
    found = compare(record, new)
    assert found.differences == {"tiling.block_kv": (record.tiling["block_kv"], 64)}
    assert found.problems == ()
    latency = next(f for f in found.figures if f.name == "latency us")
    assert latency.change() == "-50.0 %"
    assert latency.relative_change() == pytest.approx(-0.5)
    assert "-> 64" in str(found)


def test_other_problems_are_said_first_in_one_line(record: RunRecord) -> None:
    other = replace(record, problem={**record.problem, "causal": False, "seq_q": 17})
    found = compare(record, other)
    assert found.problems == ("problem.seq_q", "problem.causal")
    text = str(found).splitlines()
    assert text[1].startswith("  different problems  the times are of different work: problem.seq_q 512 -> 17; ")


def test_numerics_of_one_side_only_are_shown_without_a_change(record: RunRecord, overflowed: RunData) -> None:
    found = compare(record, overflowed)
    overflow = next(f for f in found.figures if f.name == "overflow")
    assert (overflow.values, overflow.change()) == ((None, 7), "")
    assert found.differences["sample"] == (None, "rows 128..131 of 1 of 5 heads")


def test_runs_without_a_time_compare_by_their_bits(overflowed: RunData) -> None:
    bits_only = replace(record_of(overflowed), timing=None)
    found = compare(bits_only, bits_only)
    assert [figure.name for figure in found.figures][:2] == ["relative RMSE", "max |error|"]
    assert found.latency is None
    assert comparison_document(found)["latency"] is None


@pytest.mark.parametrize(
    ("figure", "change"),
    [
        (ComparedFigure("a", "cycles", (100, 110)), "+10.0 %"),
        (ComparedFigure("a", "cycles", (100, 100)), "="),
        (ComparedFigure("a", "bytes", (10**6, 10**6 + 1)), "~0 %"),
        (ComparedFigure("a", "share", (0.43, 0.61)), "+18.0 pt"),
        (ComparedFigure("a", "count", (0, 1204)), "+1,204"),
        (ComparedFigure("a", "error", (4e-6, 3.1e-3)), "x775"),
        (ComparedFigure("a", "error", (4e-6, 4.2e-6)), "+5.0 %"),
        (ComparedFigure("a", "error", (0.0, 1e-3)), "new"),
        (ComparedFigure("a", "text", ("CUBE", "VECTOR")), "changed"),
        (ComparedFigure("a", "time", (1.0, None)), ""),
    ],
)
def test_changes_are_written_in_the_words_of_their_kind(figure: ComparedFigure, change: str) -> None:
    assert figure.change() == change


def test_document_is_stable(record: RunRecord) -> None:
    document: dict[str, Any] = comparison_document(compare(record, record))
    assert document["schema_version"] == 2
    assert document.keys() == {
        "schema_version",
        "kind",
        "runs",
        "problems",
        "differences",
        "latency",
        "moved",
        "figures",
    }
    assert document["figures"][0].keys() == {"name", "kind", "values", "changes", "relative_changes"}
    assert document["latency"]["parts"][0].keys() == {"kind", "name", "cycles", "givers", "text", "us"}


def test_second_core_that_repeats_the_first_is_left_out_of_the_table(record: RunRecord) -> None:
    found = compare(record, record)
    assert "veccore1" not in str(found)
    assert any(figure.name == "veccore1 VECTOR busy" for figure in found.figures)


def test_a_result_without_an_account_is_split_by_busy_time_and_waits(record: RunRecord) -> None:
    assert record.timing is not None
    old = replace(record, timing=replace(record.timing, account=None))
    found = compare(old, record)
    assert found.latency is not None
    assert _sums(found) == [record.timing.cycles] * 2
    assert found.latency.parts[0].name == "all operations"


def test_folders_of_one_name_bring_their_parents_and_three_runs_fit(tmp_path: Path, result: RunData) -> None:
    places = [save_run(result, tmp_path / where / "flash", trace=False) for where in ("a", "b")]
    found = compare(*places, result, result)
    name = result.name
    assert found.labels == ("a/flash", "b/flash", f"{name} #1", f"{name} #2")
    assert "  B  b/flash\n" in str(found)
    assert "  why B  " in str(found)
    table = markdown(comparison_table(found))
    assert "| A us | B us | change |" in table
    assert "\\#1" in table
    with pytest.raises(SpecError, match="two runs or more, not 1"):
        compare(result)


# ---------------------------------------------------------------- parts of the latency


def _sums(found: Comparison) -> list[int]:
    assert found.latency is not None
    return [sum(p.cycles[i] for p in found.latency.parts) for i in range(len(found.sheets))]


def _changes(found: Comparison) -> dict[str, int]:
    assert found.latency is not None
    return {p.name: p.cycles[1] - p.cycles[0] for p in found.latency.moved(1) if p.cycles[0] != p.cycles[1]}


def _priced(result: RunData, change: Callable[[Any, Cost], Cost]) -> RunData:
    """Return the run with the cost of its operations changed."""
    make = result.program.pricing
    assert make is not None

    def pricing(program: Any, device: Any) -> Any:
        costs = make(program, device)
        usual = costs.of_op
        costs.of_op = lambda op: change(op, usual(op))
        return costs

    program = replace(result.program, pricing=pricing)
    return with_evidence(replace(result, program=program, timing=METHODS["steady"](program, result.device)))


def _alone(result: RunData) -> RunData:
    """Return the run with all but the vector units free of cost: nothing is left to wait for."""

    def free(op: Any, cost: Cost) -> Cost:
        is_vector = op.queue.endswith("VECTOR")
        return cost if is_vector else cost._replace(occupancy_cycles=0, latency_cycles=0, link_bytes=())

    return _priced(result, free)


@pytest.fixture(scope="module")
def runs() -> dict[str, RunData]:
    """The four runs that the three comparisons are made of, at their usual length."""
    tile = {"block_q": 128, "block_kv": 512, "depth": 2, "deal": "round_robin"}
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "flash": ("flash", {**tile, "kernel": "pto"}),
        "depth 3": ("flash", {**tile, "kernel": "pto", "depth": 3}),
        "block_kv 256": ("flash", {**tile, "kernel": "pto", "block_kv": 256}),
        "pasa": ("pasa", {**tile, "block_kv": 256}),
    }
    return {
        name: run(schedule, tiling=fields, numerics=False, trace_groups=())
        for name, (schedule, fields) in asked.items()
    }


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("flash", "depth 3", ("wait", "PV ready")),
        ("block_kv 256", "flash", ("work", "rows of P")),
        ("flash", "pasa", ("phase", "shift_keys")),
    ],
)
def test_the_parts_add_up_and_the_cause_is_the_one_that_was_changed(
    runs: dict[str, RunData], old: str, new: str, cause: tuple[str, str]
) -> None:
    found = compare(runs[old], runs[new])
    assert _sums(found) == [runs[old].cycles, runs[new].cycles]
    latency = found.latency
    assert latency is not None
    assert latency.units == ("aiv0.VECTOR",) * 2
    first = latency.causes(1)[0]
    assert (first.kind, first.name) == cause
    assert str(first) in reason(found.latency, 1)
    # To the last bit of a latency too, in exact numbers: each run's parts in its own clock and its launch.
    for i, name in enumerate((old, new)):
        timing = runs[name].timing
        assert timing is not None
        exact = sum(Fraction(p.cycles[i]) for p in latency.parts) / Fraction(timing.clock_hz)
        assert float(exact + Fraction(timing.launch_s)) == pytest.approx(timing.latency_s, rel=1e-15)
    # With nothing to wait for, the operations that the parts name make all of the difference, and nothing else does.
    free = compare(_alone(runs[old]), _alone(runs[new]))
    work = _work(found)
    assert _work(free) == work
    told = {name: by for name, by in _changes(free).items() if name not in work}
    assert abs(sum(told.values())) <= 1000 + _phases(free)  # flags take their time still


def _work(found: Comparison) -> dict[str, int]:
    assert found.latency is not None
    return {p.name: p.cycles[1] - p.cycles[0] for p in found.latency.moved(1) if p.kind == "work"}


def _phases(found: Comparison) -> int:
    assert found.latency is not None
    return sum(abs(p.cycles[1] - p.cycles[0]) for p in found.latency.parts if p.kind == "phase")


def test_more_depth_is_less_waiting_and_a_ring_of_hand_overs_is_named(runs: dict[str, RunData]) -> None:
    found = compare(runs["flash"], runs["depth 3"])
    assert _work(found) == {}
    steps = found.chains[1]
    assert steps[-1].unit == "aic.FIXP"
    assert {"aiv0.MTE2", "aic.FIXP", "aic.CUBE"} <= {step.unit for step in steps}
    assert all(step.part.cycles[1] < step.part.cycles[0] for step in steps)


def test_a_larger_tile_is_updated_half_as_often_against_longer_waits(runs: dict[str, RunData]) -> None:
    found = compare(runs["block_kv 256"], runs["flash"])
    assert found.latency is not None
    moved = {(m.unit, m.part.name): m for m in found.moved}
    update = moved["aiv0.VECTOR", "update"]
    assert update.times == (72, 36)
    assert 2 * update.part.cycles[1] == update.part.cycles[0]
    # Half as many tiles are handed over and updated.
    said = reason(found.latency, 1)
    assert "aiv0.VECTOR: rows of P -" in said
    assert ", update -" in said.partition("; partly offset by waits: ")[0]


def test_pasas_extra_phase_and_launch_are_parts(runs: dict[str, RunData]) -> None:
    found = compare(runs["flash"], runs["pasa"])
    assert found.latency is not None
    parts: dict[str, Part] = {p.name: p for p in found.latency.parts}
    phases = runs["pasa"].timing.account.phases  # type: ignore[union-attr]
    assert parts["shift_keys"].cycles == (0, phases[0].cycles)
    launch = parts["launch"]
    for i, name in enumerate(("flash", "pasa")):
        timing = runs[name].timing
        assert timing is not None
        assert found.latency.us(launch, i) == pytest.approx(timing.launch_s * 1e6)
    assert found.latency.us(launch, 1) > found.latency.us(launch, 0)


@pytest.mark.parametrize("label", ["rows of P", "update"])
def test_one_vector_operation_ten_per_cent_slower_is_named(runs: dict[str, RunData], label: str) -> None:
    def slower(op: Any, cost: Cost) -> Cost:
        return cost._replace(occupancy_cycles=cost.occupancy_cycles * 11 // 10) if op.label == label else cost

    new = _priced(runs["flash"], slower)
    found = compare(runs["flash"], new)
    assert _sums(found) == [runs["flash"].cycles, new.cycles]
    assert found.latency is not None
    assert found.latency.causes(1)[0].name == label
    assert set(_work(found)) == {label}
    assert {m.part.name for m in found.moved if m.part.kind == "work"} == {label}


@pytest.mark.parametrize("method", ["des", "block", "fold", "steady"])
@pytest.mark.parametrize("schedule", ["flash", "pasa", "split_kv"])
def test_every_units_account_adds_up_by_every_method(schedule: str, method: str) -> None:
    found = compare(*[run(schedule, seq=256, numerics=False, method=method)] * 2)
    sheet = found.sheets[0]
    for unit in sheet.units.values():
        rows = sheet.rows(unit.name)
        assert sum(rows.values()) == sheet.cycles
        assert min(rows.values()) >= 0, (unit.name, rows)


def test_runs_of_different_cores_are_split_by_a_unit_of_their_own() -> None:
    old = run("flash", seq=256, numerics=False)
    new = run("flash", seq=256, numerics=False, hw="v100")
    found = compare(old, new)
    assert _sums(found) == [old.cycles, new.cycles]
    assert found.latency is not None
    assert found.latency.units == ("aiv0.VECTOR", "sm.B0W0")
    assert not found.latency.is_one_clock
    assert "aiv0.VECTOR -> sm.B0W0" in reason(found.latency, 1)
    text = plain(comparison_table(found), 80)
    assert not any(line.split()[-1] == "-" or " -> -" in line or " - -> " in line for line in text.splitlines() if line)
    assert "tiling, A alone  " in text
    assert "busy, B alone    sm0 B0LDG" not in text
    assert re.search(r"busy, B alone  (sm0 \w+ [\d.]+ %,?\s+)+", text)
    assert "moved: unit" not in text, "no unit is on both"


def test_a_node_is_split_by_its_kernels_and_collectives() -> None:
    sizes = {"hw": "ascend_910b2_x8", "seq": 256, "numerics": False}
    old, new = (run("tiling_allreduce", tiling={"blocks": n}, **sizes) for n in (1, 2))
    found = compare(old, new)
    assert _sums(found) == [old.cycles, new.cycles]
    assert found.latency is not None
    assert found.latency.causes(1)[0].kind in ("work", "wait")
    names = {m.part.name for m in found.moved}
    assert {"attention", "allreduce"} <= names
    for sheet in found.sheets:
        for unit in sheet.units:
            assert sum(sheet.rows(unit).values()) == sheet.cycles
            assert min(sheet.rows(unit).values()) >= 0


# ---------------------------------------------------------------- a profiler's file


def test_our_own_pipes_csv_reads_back_as_the_run_it_is_of(tmp_path: Path, result: RunData) -> None:
    folder = save_run(result, tmp_path / "a", trace=False)
    found = compare(folder, folder / "pipes.csv")
    assert _sums(found) == [result.cycles] * 2
    assert found.latency is not None
    assert found.latency.moved(1) == ()  # cores' time on both sides: the file has no launch
    busy = [f for f in found.figures if f.name.endswith(" busy")]
    assert len(busy) == 10
    for figure in busy:
        assert figure.values[0] == pytest.approx(figure.values[1], abs=1e-5)


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "v100"])
def test_beside_its_own_file_a_run_takes_as_long(tmp_path: Path, hw: str) -> None:
    run = npusim.run("volta_flash" if hw == "v100" else "flash", hw=hw, seq=256, numerics=False)
    folder = save_run(run, tmp_path / "a", trace=False)
    found = compare(folder, folder / "pipes.csv")
    text = str(found)
    assert "core us" in text
    assert "latency us" not in text
    assert "cores only, without launches" in text
    assert found.figures[0].name == "core us"
    assert found.figures[0].relative_change() == pytest.approx(0.0, abs=1e-12)
    assert f"{run.timing.core_us:,.2f}" in text
    document = comparison_document(found)["latency"]
    assert document["time"] == "core"  # type: ignore[index,call-overload]


def test_a_measured_file_is_held_against_a_prediction(tmp_path: Path, result: RunData) -> None:
    file = tmp_path / "PipeUtilization.csv"
    file.write_text(
        "block_id,sub_block_id,aic_time(us),aic_total_cycles,aic_cube_time(us),aic_cube_ratio,"
        "aiv_time(us),aiv_total_cycles,aiv_vec_ratio,aiv_icache_miss_rate\n"
        "0,cube0,10,18000,4,0.4,NA,NA,NA,NA\n0,vector0,NA,NA,NA,NA,20,36000,0.75,0.1\n1,cube0,9,16200,4,0.4,NA,NA,NA,NA\n"
    )
    found = compare(result, file)
    assert found.labels[1] == tmp_path.name
    assert _sums(found) == [result.cycles, 36000]
    assert found.latency is not None
    assert found.latency.units == ("aiv0.VECTOR",) * 2
    assert [p.cycles[1] for p in found.latency.parts] == [27000, 9000, 0]
    assert found.differences == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column block_id, aic_total_cycles or aiv_total_cycles"),
        ("block_id,aic_total_cycles\n0,NA\n", "no row has cycles of a core"),
        ("block_id,aic_total_cycles\n0,12\n", r"no column aic_time\(us\)"),
        ("block_id,aic_time(us),aic_total_cycles\n0,1,much\n", "line 2: aic_total_cycles: 'much' is not a number"),
        ("", "no column block_id"),
    ],
)
def test_a_profilers_file_that_lacks_something_is_refused(
    tmp_path: Path, record: RunRecord, text: str, message: str
) -> None:
    file = tmp_path / "PipeUtilization.csv"
    file.write_text(text)
    with pytest.raises(SpecError, match=message):
        compare(record, file)


def test_a_half_written_folder_is_refused(tmp_path: Path, record: RunRecord) -> None:
    (tmp_path / "pipes.csv").write_text("block_id\n")
    with pytest.raises(SpecError, match=r"result\.json: cannot be read"):
        compare(record, tmp_path)
    (tmp_path / "result.json").write_text('{"kind": "npusim.run", "schema_vers')
    with pytest.raises(SpecError, match="not a JSON file"):
        compare(record, tmp_path)
