from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.cases import BaselineFile, DecisionFile, ExpectedCycles, ExpectedDecision, accepted_text, load_case
from npusim.errors import OutputError, SpecError
from npusim.machines.ascend.ascend_pricing import EnginePricing
from npusim.run import run
from npusim.studies import baseline
from npusim.studies.baseline import CheckOutcome, check_baselines, cycles_of
from npusim.studies.explore import explore

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["pytester"]

CASE = """\
# why this case is here
schema: npusim.baseline/1
schedule: flash
hw: ascend_910b2   # the default device
workload: pangu_38b
seq: 256
tiling: {block_kv: 256}
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one baseline that expects nothing yet, outside CI."""
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "small.yaml").write_text(CASE)
    return tmp_path


def _accept(folder: Path) -> Path:
    check_baselines(folder, update=True)
    return folder / "small.yaml"


def test_new_case_fails_until_it_is_accepted(case: Path) -> None:
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.passed) == ("new", False)
    assert (case / "small.yaml").read_text() == CASE
    (outcome,) = check_baselines(case, update=True)
    assert (outcome.status, outcome.passed) == ("updated", True)
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.passed) == ("ok", True)


def test_accepted_file_keeps_its_comments_and_has_the_runs_cycles(case: Path) -> None:
    file = _accept(case)
    assert file.read_text().startswith(CASE)
    result = run("flash", seq=256, tiling={"block_kv": 256}, numerics=False)
    expected = _expected(file)
    assert expected.model_copy(update={"accepted": None}) == cycles_of(result)
    assert expected.cycles == result.cycles
    assert set(expected.busy_cycles) == {queue.name for queue in result.program.queues}


def _edited(file: Path, **changes: Any) -> None:
    """Write a file as if another npusim had accepted other numbers."""
    case = load_case(file)
    assert isinstance(case, BaselineFile)
    assert case.expect is not None
    expected = case.expect.model_copy(update=changes)
    file.write_text(accepted_text(file, case, expected, "0.0.1", "as it was"))


def _expected(file: Path) -> ExpectedCycles:
    found = load_case(file).expect
    assert isinstance(found, ExpectedCycles)
    return found


def test_change_names_pipe_operation_and_wait_that_moved(case: Path) -> None:
    file = _accept(case)
    accepted = _expected(file)
    vector = accepted.units["aiv0.VECTOR"]
    faster = vector.model_copy(
        update={
            "busy": vector.busy - 7,
            "operations": {**vector.operations, "rows of P": vector.operations["rows of P"] - 7},
            "waits": {**vector.waits, "S ready": vector.waits["S ready"] - 3},
        }
    )
    _edited(file, units={**accepted.units, "aiv0.VECTOR": faster}, cycles=accepted.cycles - 10)
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.passed) == ("changed", False)
    was = vector.operations["rows of P"]
    assert outcome.moved[0] == ("aiv0.VECTOR", "rows of P", was - 7, was)
    assert outcome.moved[1][:2] == ("aiv0.VECTOR", "waits: S ready")
    assert len(outcome.moved) == 2
    assert (outcome.rows[0].old, outcome.rows[0].new) == (accepted.cycles - 10, accepted.cycles)
    assert "longer" in outcome.reason
    assert "rows of P" in outcome.reason


def _slower(monkeypatch: pytest.MonkeyPatch, label: str, share: float) -> None:
    """Let one operation of every program on an Ascend take longer."""
    usual = EnginePricing.of_op

    def of_op(self: EnginePricing, op: Any) -> Any:
        cost = usual(self, op)
        return cost._replace(occupancy_cycles=int(cost.occupancy_cycles * share)) if op.label == label else cost

    monkeypatch.setattr(EnginePricing, "of_op", of_op)


@pytest.mark.parametrize("label", ["rows of P", "update"])
def test_a_vector_operation_ten_per_cent_slower_is_named(
    case: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    _accept(case)
    _slower(monkeypatch, label, 1.1)
    (outcome,) = check_baselines(case)
    assert outcome.status == "changed"
    worked = {name for _, name, *_ in outcome.moved if not name.startswith(("waits", "busy"))}
    assert worked == {label}
    assert f"aiv0.VECTOR: {label}" in outcome.reason


def test_tolerance_is_of_cycles_and_busy_pipes(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _accept(case)
    _slower(monkeypatch, "finish", 1.1)
    assert [o.status for o in check_baselines(case)] == ["changed"]
    assert [o.status for o in check_baselines(case, tolerance=0.05)] == ["ok"]
    assert [o.status for o in check_baselines(case, tolerance=0.001)] == ["changed"]
    with pytest.raises(SpecError, match="tolerance 1: write a share from 0"):
        check_baselines(case, tolerance=1)


def test_what_was_accepted_is_replaced_for_a_reason_only(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _accept(case)
    accepted = _expected(file)
    assert accepted.accepted is not None
    assert (accepted.accepted.reason, accepted.accepted.npusim) == ("first accepted", npusim.__version__)
    _slower(monkeypatch, "rows of P", 1.1)
    before = file.read_text()
    assert check_baselines(case, update=True)[0].status == "changed"
    assert file.read_text() == before
    assert check_baselines(case, update=True, reason="a slower exp")[0].status == "updated"
    again = _expected(file).accepted
    assert again is not None
    assert again.reason == "a slower exp"
    assert check_baselines(case)[0].status == "ok"


def test_a_baseline_edited_by_hand_is_an_error_until_it_is_accepted(case: Path) -> None:
    file = _accept(case)
    text = file.read_text()
    for edited in (text.replace("seq: 256", "seq: 512"), text.replace("rows of P: ", "rows of P: 1")):
        assert edited != text
        file.write_text(edited)
        with pytest.raises(SpecError, match=r"small\.yaml:\d+  expect\.accepted\.digest: .* were edited by hand"):
            check_baselines(case)
        assert check_baselines(case, update=True)[0].status == "updated"
        assert check_baselines(case)[0].status == "ok"
        file.write_text(text)
    file.write_text(text.replace("# why this case is here", "# an unrelated edit"))
    assert check_baselines(case)[0].status == "ok"


def test_a_file_of_an_older_npusim_is_held_by_its_pipes(case: Path) -> None:
    expected = cycles_of(run("flash", seq=256, tiling={"block_kv": 256}, numerics=False))
    busy = "".join(f"    {pipe}: {n}\n" for pipe, n in expected.busy_cycles.items())
    old = f"expect:\n  device_digest: x\n  cycles: {expected.cycles}\n  busy_cycles:\n{busy}"
    (case / "small.yaml").write_text(CASE + old)
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.device_changed) == ("ok", True)
    cube = expected.busy_cycles["aic.CUBE"]
    (case / "small.yaml").write_text(CASE + old.replace(f"CUBE: {cube}", "CUBE: 7"))
    (outcome,) = check_baselines(case)
    assert outcome.moved == (("aic.CUBE", "busy", 7, cube),)


def test_another_device_file_alone_is_no_change(case: Path) -> None:
    _edited(_accept(case), device_digest="old")
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.device_changed) == ("ok", True)


def test_case_that_does_not_run_any_more_fails_with_its_reason(case: Path) -> None:
    (case / "small.yaml").write_text(CASE.replace("block_kv: 256", "block_kv: 100"))
    (outcome,) = check_baselines(case, update=True)
    assert (outcome.status, outcome.passed) == ("failed", False)
    assert "multiple of 16" in outcome.reason


def test_update_is_refused_in_ci(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SpecError, match="--update is refused"):
        check_baselines(case, update=True)
    assert (case / "small.yaml").read_text() == CASE
    monkeypatch.setenv("CI", "false")
    assert check_baselines(case, update=True)[0].passed


def test_every_file_is_read_before_any_case_runs(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case / "zz.yaml").write_text("schema: npusim.baseline/1\nschedle: flash\n")

    def never(*_: object, **__: object) -> CheckOutcome:
        raise AssertionError("ran")

    monkeypatch.setattr(baseline, "cycles_today", never)
    with pytest.raises(SpecError, match=r"zz\.yaml:2  schedle: unknown key"):
        check_baselines(case)


def test_path_is_relative_to_the_baseline(case: Path) -> None:
    (case / "mine.yml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n")
    (case / "small.yaml").write_text(CASE.replace("ascend_910b2 ", "mine.yml "))
    (outcome,) = check_baselines(case / "small.yaml")
    assert outcome.status == "new"


def test_no_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="contains no baseline"):
        check_baselines(tmp_path)
    with pytest.raises(SpecError, match="no such baseline or folder"):
        check_baselines(tmp_path / "none")


def test_file_that_cannot_be_written_stays(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, _content: bytes) -> None:
        raise OutputError(f"{file}: cannot be written")

    monkeypatch.setattr("npusim.studies.baseline.cycles.write_whole", refuse)
    with pytest.raises(OutputError, match=r"small\.yaml: cannot be written"):
        check_baselines(case, update=True)
    assert (case / "small.yaml").read_text() == CASE


# ---------------------------------------------------------------- decisions

SPACE = """\
schema: npusim.decision/1
hw: ascend_910b2
workload: pangu_38b
seq: 512
candidates:
- {schedule: flash, fields: {block_kv: [128, 256]}}
- {schedule: pasa, fields: {block_kv: [256]}}
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a decision between two tiles, and two schedules, as it was accepted."""
    file = tmp_path_factory.mktemp("decision") / "space.yaml"
    file.write_text(SPACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        assert check_baselines(file, update=True)[0].status == "updated"
    return file.read_text()


@pytest.fixture
def decision(space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of that decision."""
    monkeypatch.delenv("CI", raising=False)
    file = tmp_path / "space.yaml"
    file.write_text(space)
    return file


def test_a_decision_keeps_winner_margin_finiteness_and_every_points_cycles(decision: Path) -> None:
    expected = load_case(decision).expect
    assert isinstance(expected, ExpectedDecision)
    found = [explore(s, {"block_kv": v}, seq=512) for s, v in (("flash", [128, 256]), ("pasa", [256]))]
    flash, pasa = (e.best for e in found)
    assert flash is not None and pasa is not None and flash.latency_us and pasa.latency_us
    assert expected.winner == "flash"
    assert expected.margin == pytest.approx(pasa.latency_us / flash.latency_us - 1, abs=1e-6)
    first, second = expected.choices
    assert (first.point, first.finite) == (flash.point, True)
    assert first.cycles == tuple(o.cycles for o in found[0].outcomes)
    times = sorted(o.latency_us for o in found[0].outcomes if o.latency_us)
    assert first.margin == pytest.approx(times[1] / times[0] - 1, abs=1e-6)
    assert (second.margin, second.candidate) == (None, "pasa")
    (outcome,) = check_baselines(decision)
    assert (outcome.status, outcome.rows[0].old) == ("ok", outcome.rows[0].new)


def test_a_planted_change_of_the_best_tile_fails_with_both_and_the_reason(
    decision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_case(decision).expect
    assert isinstance(expected, ExpectedDecision)
    assert expected.choices[0].point == {"block_kv": 256}
    _slower(monkeypatch, "K.load", 20.0)  # a tile of 256 keys waits for two of them
    (outcome,) = check_baselines(decision)
    assert outcome.status == "changed"
    tile = outcome.rows[1]
    assert (tile.name, tile.old, tile.new) == ("flash", "block_kv=256", "block_kv=128")
    then = expected.choices[0].cycles
    assert f"block_kv=128: {then[0]:,} -> " in tile.why
    assert f"block_kv=256: {then[1]:,} -> " in tile.why
    assert "today" in tile.why and "shorter" in tile.why
    assert check_baselines(decision, tolerance=0.9)[0].passed
    assert check_baselines(decision, update=True)[0].status == "changed"
    assert check_baselines(decision, update=True, reason="loads measured anew")[0].status == "updated"
    assert check_baselines(decision)[0].passed


def test_a_planted_change_of_the_schedule_fails(decision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginePricing, "of_op", EnginePricing.of_op)
    text = decision.read_text()
    _slower(monkeypatch, "S.drain", 120.0)  # of scores in float32: pasa's are half as large
    (outcome,) = check_baselines(decision)
    row = outcome.rows[-1]
    assert (row.name, row.old, row.new) == ("schedule", "flash", "pasa")
    assert row.why.startswith("flash ")
    assert decision.read_text() == text


def test_cycles_that_move_without_another_winner_are_no_change(decision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _slower(monkeypatch, "finish", 1.1)
    assert check_baselines(decision)[0].status == "ok"


def test_a_winner_that_is_not_finite_any_more_fails(decision: Path) -> None:
    case = load_case(decision)
    assert isinstance(case, DecisionFile) and case.expect is not None
    flash, pasa = case.expect.choices
    choices = (flash.model_copy(update={"finite": False}), pasa)
    decision.write_text(
        accepted_text(decision, case, case.expect.model_copy(update={"choices": choices}), "0", "as it was")
    )
    (outcome,) = check_baselines(decision)
    assert [(r.name, r.old, r.new) for r in outcome.rows[1:]] == [("flash", "not finite", "finite")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{block_kv: [128, 256]}", "{}", r"space\.yaml:6  candidates\.0\.fields: "),
        ("{block_kv: [128, 256]}", "{tile: [1]}", "tile: unknown tiling field"),
        ("seq: 512", "problem: {m: 1, n: 2}", "problem: m, n: write m, n and k"),
        ("candidates:", "candidate:", "candidate: unknown key"),
        ("decision/1", "decision/2", "schema: 'npusim.decision/2' is another kind"),
        ("{block_kv: [128, 256]}", "{block_q: [2048]}", ""),
    ],
)
def test_a_decision_that_cannot_be_made_says_why(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(SPACE.replace(old, new))
    try:
        (outcome,) = check_baselines(file)
    except SpecError as error:
        assert re.search(message, str(error))
    else:
        assert outcome.status == ("failed" if message else "new")
        assert re.search(message, outcome.reason)


# ---------------------------------------------------------------- the pytest fixture

TEST = """
import npusim

def test_flash(cycles_regression):
    result = npusim.run("flash", seq=256, numerics=False)
    cycles_regression.check(result, rtol={rtol})
"""


def _run(pytester: pytest.Pytester, *args: str, rtol: float = 0, text: str = TEST) -> pytest.RunResult:
    pytester.makepyfile(test_it=text.replace("{rtol}", str(rtol)))
    # Where npusim is installed, pytest finds the plugin itself.
    installed = any(p.value == "npusim.pytest_plugin" for p in entry_points(group="pytest11"))
    load = () if installed else ("-p", "npusim.pytest_plugin")
    return pytester.runpytest_inprocess(*load, "-p", "no:cacheprovider", *args)


def test_fixture_stores_then_compares_and_tolerates_only_on_request(pytester: pytest.Pytester) -> None:
    _run(pytester).assert_outcomes(failed=1)  # pytest-regressions writes the file and fails
    _run(pytester).assert_outcomes(passed=1)
    file = pytester.path / "test_it" / "test_flash.yml"
    text = file.read_text()
    assert "rows of P: " in text
    cycles = int(text.rpartition("\ncycles: ")[2].split()[0])
    file.write_text(text.replace(f"\ncycles: {cycles}", f"\ncycles: {cycles + cycles // 50}"))
    outcome = _run(pytester)
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines([f"*-cycles: {cycles + cycles // 50}*", "*npusim: *us shorter*"])
    _run(pytester, rtol=0.05).assert_outcomes(passed=1)


def test_fixture_without_pytest_regressions_says_what_to_install(pytester: pytest.Pytester) -> None:
    outcome = _run(pytester, "-p", "no:regressions", "-p", "no:pytest_regressions")
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*cycles_regression needs pytest-regressions*"])
