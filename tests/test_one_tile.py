"""One rule chooses a tile that nobody named, for every verb: on a call whose choice is not the declared tile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.cases import MeasurementCase
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from npusim.studies.invariance import examine as varied
from npusim.studies.stress.worst_search import StressedRun
from npusim.studies.validate.diff import diff
from npusim.studies.validate.judge import judge
from npusim.studies.validate.measured_times import Predictor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALL: dict[str, Any] = {"hw": "h200", "workload": "llama3_8b", "seq": 256, "causal": False}
WORDS = ("flash", "--hw", "h200", "-w", "llama3_8b", "--seq", "256", "--no-causal")


def request(**more: Any) -> Request:
    return Request("flash", **CALL, rows=[0], heads=[0], trace_groups=(), **more)


def _measured() -> Any:
    sizes = {"name": "llama3_8b", "seq": 256, "causal": False}
    case: dict[str, Any] = {"name": "one", "device": "h200", "schedule": "flash", "workload": sizes}
    return Predictor("auto").result(MeasurementCase(**case, measured={"latency_us": 10.0}, unnamed="auto")).tiling


VERBS: dict[str, Callable[[], Any]] = {
    "diff": lambda: diff(run_request(request()).output, request()).run.tiling,
    "invariant": lambda: varied(Request("flash", **CALL), ["batch"]).base.tiling,
    "stress": lambda: StressedRun(request()).base[0].tiling,
    "validate": _measured,
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_tile_of_a_run(verb: str) -> None:
    tiling = run_request(request()).tiling
    assert dict(tiling) != dict(plan_of(request()).tiling)  # chosen, not declared
    assert dict(VERBS[verb]()) == dict(tiling)


def test_a_comparison_has_the_tile_of_a_run() -> None:
    tiling = run_request(request()).tiling
    fields = ",".join(f"{n}={value}" for n, value in tiling if n.startswith("block") or n == "warps")
    words = ["compare", "flash", f"flash -t {fields}", *WORDS[1:], "--no-numerics", "--json"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert not [n for n in json.loads(shown.stdout)["differences"] if n.startswith("tiling.block")]


def test_the_output_of_a_run_has_the_bits_of_a_diff_and_is_judged_right(tmp_path: Path) -> None:
    """The file has fewer rows than the declared tile, and states which."""
    call = [*WORDS, "--precision", "running=float16"]
    runner, file = CliRunner(), tmp_path / "k" / "output.safetensors"
    run = ["run", *call, "--rows", "0", "--heads", "0", "--save-output", "--no-trace", "-o", str(file.parent)]
    assert runner.invoke(app, run).exit_code == 0
    for rows in (["--rows", "0", "--heads", "0"], []):  # those of the file where none are named
        for how in (["--judge"], []):
            result = runner.invoke(app, ["diff", str(file), *call, *rows, *how])
            assert result.exit_code == 0, result.output
            assert "8,192" in result.stdout
    (judgement,) = judge([file], request(precision="running=float16"))
    assert (judgement.matched, judgement.total) == (64 * 128, 64 * 128)


def test_rows_that_a_file_does_not_have_are_named(tmp_path: Path) -> None:
    out = run_request(request()).output
    computed = ~np.isnan(out.astype(np.float32)).all(axis=3)
    np.savez(tmp_path / "out.npz", o=out, computed=computed)
    assert diff(tmp_path / "out.npz", request()).passed
    with pytest.raises(
        npusim.NpusimError,
        match=r"has rows 0\.\.63 of batch 0 head 0, but none of the rows to compare \(rows 64\.\.127 of ",
    ):
        diff(tmp_path / "out.npz", Request("flash", **CALL, rows=[100]))
    np.savez(tmp_path / "out.npz", o=out, computed=computed[:, :, :9])
    with pytest.raises(npusim.NpusimError, match=r"computed is bool of shape \(1, 32, 9\); .* each of \(1, 32, 256\)"):
        diff(tmp_path / "out.npz", request())


def test_rows_of_nan_are_named_before_anything_else(tmp_path: Path) -> None:
    call: dict[str, Any] = {**CALL, "rows": [0, 64], "heads": [0, 1]}
    out = np.array(npusim.run("flash", **call).output)
    out[0, 1, 96:112] = np.nan
    np.savez(tmp_path / "out.npz", o=out)
    found = diff(tmp_path / "out.npz", Request("flash", **call))
    assert (found.blank, found.tried, found.passed) == ("rows 96..111 of batch 0 head 1", 0, False)
    (judgement,) = judge([tmp_path / "out.npz"], Request("flash", **call))
    assert str(judgement).startswith("wrong: rows 96..111 of batch 0 head 1 are NaN in the output (2,048 of ")
    words = ["diff", str(tmp_path / "out.npz"), *WORDS, "--rows", "0,64", "--heads", "0,1"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 1
    first = next(line for line in shown.stdout.splitlines()[1:] if line.strip())
    assert first.split()[:3] == ["NaN", "rows", "96..111"]
