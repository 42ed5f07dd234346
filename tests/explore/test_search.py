from __future__ import annotations

import csv
import pickle
from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_device, load_workload
from npusim.errors import OutputError, SpecError, TilingError
from npusim.explore import explore
from npusim.request import Request
from npusim.run import run

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.explore.store import Outcome

# 100 is no multiple of 16; 2048 queries a block do not fit UB.
FIELDS = {"block_kv": [256, 512], "block_q": [128, 100, 2048]}


def test_every_point_has_its_time_or_its_reason() -> None:
    found = explore("flash", FIELDS, seq=256, tiling={"depth": 1})
    assert [o.status for o in found.outcomes] == ["ok", "infeasible", "infeasible"] * 2
    assert "100 must be a multiple of 16" in found.outcomes[1].reason
    assert "UB" in found.outcomes[2].reason
    assert "\n" not in found.outcomes[2].reason
    alone = run("flash", seq=256, tiling={"depth": 1, **found.outcomes[0].point}, numerics=False)
    assert found.outcomes[0].cycles == alone.cycles
    assert found.outcomes[0].latency_us == alone.latency_us


def test_best_is_the_fastest_and_misfits_are_kept_apart() -> None:
    found = explore("flash", FIELDS, seq=256)
    assert found.best is not None
    assert found.best.cycles == min(o.cycles for o in found.feasible if o.cycles)
    assert len(found.infeasible) == 4
    assert found.columns()["block_q"] == [128, 100, 2048] * 2


def test_processes_give_what_one_process_gives() -> None:
    fields = {"block_kv": [256, 512]}
    one, two = (explore("flash", fields, seq=256, jobs=jobs) for jobs in (1, 2))
    assert one.outcomes == two.outcomes


def test_csv_grows_point_by_point_and_survives_an_interruption(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "sweep.csv"
    seen: list[int] = []

    def on_outcome(outcome: Outcome, total: int) -> None:
        assert total == 6
        seen.append(len(list(csv.DictReader(file.open()))))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore("flash", FIELDS, seq=256, csv_path=file, on_outcome=on_outcome)
    assert seen == [1, 2, 3]
    rows = list(csv.DictReader(file.open()))
    assert [row["status"] for row in rows] == ["ok", "infeasible", "infeasible"]
    assert rows[0].keys() == {
        "block_kv", "block_q", "status", "cycles", "latency_us", "method", "band", "busiest", "busy_share",
        "ignored", "reason",
    }  # fmt: skip


def test_what_is_wrong_for_every_point_is_an_error_before_the_first(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    with pytest.raises(TilingError, match="unknown tiling field"):
        explore("flash", {"blok": [1]}, csv_path=file)
    with pytest.raises(SpecError, match="does not divide 40 query heads"):
        explore("flash", FIELDS, tensor_parallel=7, csv_path=file)
    with pytest.raises(SpecError, match="unknown schedule"):
        explore("flsh", FIELDS, csv_path=file)
    assert not file.exists()


def test_device_without_times_has_nothing_to_rank() -> None:
    values_only = load_device("h200").model_copy(update={"flags": None, "launch": None})
    with pytest.raises(SpecError, match="h200 has no timing model yet"):
        explore("flash", {"block_kv": [64]}, hw=values_only)


def test_unwritable_csv_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        explore("flash", FIELDS, seq=256, csv_path=tmp_path / "file" / "sweep.csv")


def test_request_pickles_with_an_equal_device() -> None:
    request = Request("flash", hw=load_device("ascend_910b2"), workload=load_workload("pangu_38b"), seq=256)
    assert pickle.loads(pickle.dumps(request)) == request
