from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from npusim import baseline
from npusim.baseline import CaseOutcome, check_baselines, cycles_of
from npusim.config.baseline_file import ExpectedCycles, load_baseline, write_expected
from npusim.errors import OutputError, SpecError
from npusim.run import run

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
    expected = load_baseline(file).expect
    assert expected == cycles_of(result)
    assert expected is not None
    assert expected.cycles == result.cycles
    assert set(expected.busy_cycles) == {queue.name for queue in result.program.queues}


def test_change_names_the_pipe_that_moved(case: Path) -> None:
    file = _accept(case)
    accepted = load_baseline(file).expect
    assert accepted is not None
    busy = {**accepted.busy_cycles, "aic.CUBE": accepted.busy_cycles["aic.CUBE"] - 7}
    write_expected(file, accepted.model_copy(update={"busy_cycles": busy, "cycles": 1}))
    (outcome,) = check_baselines(case)
    assert (outcome.status, outcome.passed) == ("changed", False)
    assert outcome.moved == {"aic.CUBE": (busy["aic.CUBE"], busy["aic.CUBE"] + 7)}
    assert (outcome.old_cycles, outcome.new_cycles) == (1, accepted.cycles)


def test_another_device_file_alone_is_no_change(case: Path) -> None:
    file = _accept(case)
    accepted = load_baseline(file).expect
    assert accepted is not None
    write_expected(file, accepted.model_copy(update={"device_digest": "old"}))
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


def test_every_file_is_read_before_any_case_runs(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case / "zz.yaml").write_text("schema: npusim.baseline/1\nschedle: flash\n")

    def never(*_: object, **__: object) -> CaseOutcome:
        raise AssertionError("ran")

    monkeypatch.setattr(baseline, "_check", never)
    with pytest.raises(SpecError, match=r"zz\.yaml:2  schedle: unknown key"):
        check_baselines(case)


def test_path_is_relative_to_the_baseline(case: Path) -> None:
    (case / "mine.yml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n")
    (case / "small.yaml").write_text(CASE.replace("ascend_910b2 ", "mine.yml "))
    (outcome,) = check_baselines(case / "small.yaml")
    assert outcome.status == "new"


def test_no_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no baseline"):
        check_baselines(tmp_path)
    with pytest.raises(SpecError, match="no such baseline, nor a folder"):
        check_baselines(tmp_path / "none")


def test_file_that_cannot_be_written_stays(tmp_path: Path) -> None:
    expected = ExpectedCycles(device_digest="a", cycles=1, busy_cycles={})
    with pytest.raises(OutputError, match="cannot be written"):
        write_expected(tmp_path / "none.yaml", expected)


# ---------------------------------------------------------------- the pytest fixture

TEST = """
import npusim

def test_flash(cycles_regression):
    result = npusim.run("flash", seq=256, numerics=False)
    cycles_regression.check(result, rtol={rtol})
"""


def _run(pytester: pytest.Pytester, *args: str, rtol: float = 0) -> pytest.RunResult:
    pytester.makepyfile(test_it=TEST.format(rtol=rtol))
    # Where npusim is installed, pytest finds the plugin itself.
    installed = any(p.value == "npusim.pytest_plugin" for p in entry_points(group="pytest11"))
    load = () if installed else ("-p", "npusim.pytest_plugin")
    return pytester.runpytest_subprocess(*load, "-p", "no:cacheprovider", *args)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pytest of its own find npusim in the checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(baseline.__file__).parents[1]))


@pytest.mark.usefixtures("importable")
def test_fixture_stores_then_compares_and_tolerates_only_on_request(
    pytester: pytest.Pytester,
) -> None:
    _run(pytester).assert_outcomes(failed=1)  # pytest-regressions writes the file and fails
    _run(pytester).assert_outcomes(passed=1)
    file = pytester.path / "test_it" / "test_flash.yml"
    text = file.read_text()
    cycles = int(text.rpartition("\ncycles: ")[2].split()[0])
    file.write_text(text.replace(f"\ncycles: {cycles}", f"\ncycles: {cycles + cycles // 50}"))
    outcome = _run(pytester)
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines([f"*-cycles: {cycles + cycles // 50}*"])
    _run(pytester, rtol=0.05).assert_outcomes(passed=1)


@pytest.mark.usefixtures("importable")
def test_fixture_without_pytest_regressions_says_what_to_install(
    pytester: pytest.Pytester,
) -> None:
    outcome = _run(pytester, "-p", "no:regressions", "-p", "no:pytest_regressions")
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*cycles_regression needs pytest-regressions*"])
