"""What `npusim validate` reads, says and exits with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim import run
from npusim.cli.app import app
from npusim.config.cases import load_measurements
from npusim.errors import SpecError
from npusim.studies.validate import TimesReport, validate

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "schema: npusim.measurements/1\nsource: a test\nband: 0.5\ncases:\n"
GEMM = (
    "  - {{name: {name}, hw: ascend_910b2, schedule: {schedule}, workload: {{m: 128, n: 128, k: 128{dtype}}}, "
    "measured: {{latency_us: {us}}}}}\n"
)


def _gemm(name: str, us: float = 23, schedule: str = "gemm", dtype: str = "") -> str:
    return GEMM.format(name=name, us=us, schedule=schedule, dtype=f", dtype: {dtype}" if dtype else "")


def _write(tmp_path: Path, *cases: str) -> Path:
    file = tmp_path / "m.yaml"
    file.write_text(HEAD + "".join(cases))
    return file


def _npusim(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["validate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def _times(file: Path) -> TimesReport:
    report = validate(file)
    assert isinstance(report, TimesReport)
    return report


def test_the_template_is_a_file_that_validates(tmp_path: Path) -> None:
    code, stdout, _ = _npusim("--template")
    assert code == 0
    assert stdout.count("#") > 15
    file = tmp_path / "t.yaml"
    file.write_text(stdout)
    code, shown, stderr = _npusim(file)
    assert (code, stderr) == (0, "")
    assert [name for name in ("flash_1k", "product", "copy", "flash_sizes") if name in shown]
    code, _, stderr = _npusim()
    assert code == 2
    assert "npusim validate --template > measured.yaml" in stderr


def test_words_of_run_and_todays_keys_mean_the_same(tmp_path: Path) -> None:
    rest = "schedule: flash, tiling: auto, measured: {latency_us: 20}"
    sizes = "{heads: 5, seq_q: 256, seq_kv: 256, head_dim: 128, causal: true}"
    file = _write(
        tmp_path,
        f"  - {{name: old, device: ascend_910b2, workload: {sizes}, {rest}}}\n",
        f"  - {{name: new, hw: ascend_910b2, workload: pangu_38b, seq: 256, {rest}}}\n",
        f"  - {{name: both, hw: ascend_910b2, workload: {{name: pangu_38b, seq_q: 256, seq_kv: 256}}, {rest}}}\n",
        f"  - {{name: part, hw: ascend_910b2, workload: pangu_38b, seq: 256, batch: 2, {rest}}}\n",
    )
    old, new, both, part = (r.predicted for r in _times(file).residuals)
    assert old == new == both
    assert part == run("flash", seq=256, batch=2, numerics=False, trace_groups=()).latency_us


def test_a_baseline_is_named_so_too(tmp_path: Path) -> None:
    case = (
        "  - {name: a, hw: ascend_910b2, schedule: flash, tiling: auto, workload: pangu_38b, seq: 256,"
        " baseline: {hw: ascend_910b1, workload: pangu_38b, seq: 512}, measured: {speedup: 2}}\n"
    )
    fast, slow = (
        run("flash", hw=hw, seq=seq, numerics=False, trace_groups=()).latency_us
        for hw, seq in (("ascend_910b2", 256), ("ascend_910b1", 512))
    )
    assert _times(_write(tmp_path, case)).residuals[0].predicted == pytest.approx(slow / fast)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("device: h200, hw: h200, workload: pangu_38b", "means the same as `device`, which is set too;"),
        (
            "hw: ascend_910b2, workload: {name: pangu_38b, heads: 3}",
            "heads: a workload of kind named cannot have this size",
        ),
        (
            "hw: ascend_910b2, workload: {m: 1, n: 1, k: 1, seq: 3}",
            "seq: a workload of kind gemm cannot have this size",
        ),
        ("hw: ascend_910b2, workload: {heads: 3}", "missing; sizes of attention are heads, seq_q"),
        ("hw: ascend_910b2, seq: 3", "seq: unknown key"),
    ],
)
def test_keys_that_contradict_are_named_with_their_line(keys: str, message: str, tmp_path: Path) -> None:
    file = _write(tmp_path, f"  - {{name: a, {keys}, schedule: flash, measured: {{latency_us: 1}}}}\n")
    with pytest.raises(SpecError, match=r"m.yaml:5  cases\.0") as error:
        load_measurements(file)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cases", "code", "said"),
    [
        ((_gemm("good"),), 0, ()),
        (
            (_gemm("good"), _gemm("odd", dtype="float17"), _gemm("none", schedule="nope")),
            2,
            ("case odd: dtype: 'float17' is not one of", "case none: unknown schedule 'nope'"),
        ),
        (
            (_gemm("slow", 1000), _gemm("odd", dtype="float17"), _gemm("none", schedule="nope")),
            1,
            ("differ by more than allowed; besides, 2 cases have no prediction", "case odd: ", "case none: "),
        ),
        ((_gemm("odd", dtype="float17"), _gemm("none", schedule="nope")), 2, ("case odd: ", "case none: ")),
    ],
)
def test_what_cannot_be_predicted_hides_nothing_and_is_named_case_by_case(
    cases: tuple[str, ...], code: int, said: tuple[str, ...], tmp_path: Path
) -> None:
    found, _, stderr = _npusim(_write(tmp_path, *cases))
    assert found == code
    assert [text for text in said if text not in stderr] == []
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("us", "hint"), [(0.0106, "is it in milliseconds? latency_us"), (10600, "is it in nanoseconds?"), (100, "")]
)
def test_a_factor_near_a_thousand_asks_for_the_unit(us: float, hint: str, tmp_path: Path) -> None:
    file = _write(tmp_path, _gemm("a", us))
    (residual,) = _times(file).residuals
    assert hint in residual.unit_hint
    assert bool(residual.unit_hint) == bool(hint)
    assert ("units " in _npusim(file)[1]) == bool(hint)
