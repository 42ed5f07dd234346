"""Promising points first, and what a search says of its best."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.run import run
from npusim.studies.explore import explore
from npusim.studies.explore.exploration import front
from npusim.studies.explore.search import LARGE, STEPS, Progress, Search, _OutOfTimeError
from npusim.studies.explore.store import PointOutcome

if TYPE_CHECKING:
    from pathlib import Path

CALL: dict[str, Any] = {"workload": "llama3_8b", "seq": 2048, "hw": "ascend_910b3"}
#: More than `LARGE` points.
FIELDS: dict[str, Any] = {
    "block_q": (32, 64, 128, 256),
    "block_kv": (64, 128, 256, 512, 1024),
    "vector_rows": (8, 16, 32, 64),
    "depth": (1, 2, 3, 4),
    "together": (1, 2, 4, 8, 16, 32, 64),
}


def _out_of_time(*_: object) -> NoReturn:
    raise _OutOfTimeError


def test_a_large_space_has_a_better_tile_than_a_run_before_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of some 2,000 points are simulated, and one is faster than what a run takes."""
    monkeypatch.setattr(Search, "_survey", _out_of_time)
    done = explore("flash", FIELDS, **CALL)
    assert done.best is not None and done.best.latency_us is not None
    assert len(done.setting.points()) > LARGE
    assert len(done.feasible) <= STEPS
    assert len(done.undecided) > LARGE // 2
    assert done.best.latency_us < 0.95 * (run("flash", numerics=False, **CALL).latency_us or 0)


def test_processes_take_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_survey", _out_of_time)
    monkeypatch.setattr("npusim.studies.explore.search.STEPS", STEPS // 3)  # the way is that of more
    call: dict[str, Any] = {"workload": "smollm2", "seq": 256, "hw": "ascend_910b3"}
    assert explore("flash", FIELDS, **call).outcomes == explore("flash", FIELDS, jobs=2, **call).outcomes


@pytest.mark.usefixtures("declared_tile")
def test_a_search_says_how_long_its_stage_takes() -> None:
    from npusim.simulation.request import Request
    from npusim.studies.explore.exploration import search
    from npusim.studies.explore.search import Options
    from npusim.studies.explore.space import SearchRequest

    told: list[Progress] = []
    fields = {"block_q": (32, 64), "block_kv": (64, 128), "vector_rows": (8, 16)}
    asked = SearchRequest(Request("flash", workload="smollm2", seq=256, numerics=False), ("flash",))
    search(asked.spec(fields), Options(on_progress=told.append))
    of_bounds = [now.remaining_s for now in told if now.stage == "bounds"]
    assert of_bounds[0] is None and all(s is not None and s >= 0 for s in of_bounds[1:])


def _outcome(index: int, us: float, error: float, sampling_error: float = 0.0, **point: object) -> PointOutcome:
    return PointOutcome(index, point, "ok", cycles=1, latency_us=us, relative_rmse=error, sampling_error=sampling_error)


def test_errors_within_their_sampling_error_are_equal() -> None:
    near, apart = _outcome(1, 2.0, 0.98e-3, 0.05e-3), _outcome(2, 3.0, 0.90e-3, 0.05e-3)
    fastest = _outcome(0, 1.0, 1.00e-3, 0.05e-3)
    assert front([near, apart, fastest]) == [fastest, apart]
    exact = [_outcome(o.index, o.latency_us or 0, o.relative_rmse or 0) for o in (fastest, near, apart)]
    assert front(exact) == exact


def test_a_front_has_a_row_for_each_precision() -> None:
    best, *others = (_outcome(n, 1.0 + n, 1e-3 * (1 + n), precision=name) for n, name in enumerate("aabb"))
    assert front([best, *others]) == [best, others[1]]


@pytest.mark.usefixtures("declared_tile")
def test_a_search_for_a_front_simulates_each_precision_that_is_named() -> None:
    """In full precision nothing is faster or nearer: its points alone would be left."""
    call: dict[str, Any] = {"workload": "smollm2", "seq": 256, "tensor_parallel": 3, "dtype": "float16"}
    fields = {"precision": ("fa2_fp32", "fa16_32", "fa16"), "block_kv": (128, 256)}
    held = {"block_q": 64, "depth": 2, "vector_rows": 16, "deal": "balanced"}
    done = explore("flash", fields, hw="ascend_910b2", tiling=held, pareto=True, **call)
    assert {o.point["precision"] for o in done.front} == {"fa2_fp32", "fa16_32", "fa16"}


@pytest.mark.usefixtures("declared_tile")
def test_all_rows_have_no_sampling_error() -> None:
    call: dict[str, Any] = {"workload": "smollm2", "seq": 256, "hw": "ascend_910b2"}
    bits = [run("flash", rows=rows, heads=heads, **call).numerics for rows, heads in (("all", "all"), ("sample", "0"))]
    assert bits[0] is not None and bits[0].sampling_error == 0
    assert bits[1] is not None and 0 < bits[1].sampling_error < 0.1 * (bits[1].rmse or 0)


@pytest.mark.usefixtures("declared_tile")
def test_the_best_as_json_says_what_it_is_the_best_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "explore flash --hw h200 -w qwen2_7b --seq 512 -f block_kv=64,128 -j1 --best best.json"
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["device"], best["workload"], best["precision"]) == ("h200", "qwen2_7b", "fa2_fp32")
    assert (best["problem"]["seq_q"], best["problem"]["seq_kv"], best["schedule"]) == (512, 512, "flash")
    assert best["block_kv"] in (64, 128) and best["latency_us"] > 0
