from __future__ import annotations

import csv
import pickle
import re
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device, load_workload
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import OutputError, RaceError, SpecError, TilingError
from npusim.library import find_schedule
from npusim.machines.ascend.group import AscendGroup
from npusim.report.search_tables import front_of
from npusim.run import run
from npusim.simulation import simulate
from npusim.simulation.request import Request
from npusim.studies.explore import exploration, explore, points
from npusim.studies.explore.search import Options, Progress
from npusim.studies.explore.space import MOST_POINTS, SearchRequest
from npusim.studies.explore.store import PointOutcome, read_store

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.machines.ascend.group import VectorCore
    from npusim.program.ir.buffers import Ring
    from npusim.studies.explore import Exploration

# 100 is no multiple of 16; 2048 queries a block do not fit UB.
FIELDS = {"block_kv": [256, 512], "block_q": [128, 100, 2048]}


def test_every_point_has_its_time_or_its_reason() -> None:
    held = {"depth": 1, "kernel": "tilelang", "deal": "round_robin"}  # a run has nothing left to choose
    found = explore("flash", FIELDS, seq=256, tiling=held, exhaustive=True)
    assert [o.status for o in found.outcomes] == ["ok", "infeasible", "infeasible"] * 2
    assert "100 must be a multiple of 16" in found.outcomes[1].reason
    assert "UB" in found.outcomes[2].reason
    assert "\n" not in found.outcomes[2].reason
    alone = run("flash", seq=256, tiling={**held, **found.outcomes[0].point}, numerics=False)
    assert found.outcomes[0].cycles == alone.cycles
    assert found.outcomes[0].latency_us == alone.latency_us


@pytest.mark.usefixtures("declared_tile")
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


def test_a_tiling_of_a_schedule_is_taken_as_its_fields_are() -> None:
    tiling = find_schedule("flash", "ascend").tiling(depth=2, block_q=64)
    fields = {"block_kv": [128, 256]}
    found = [explore("flash", fields, seq=256, tiling=tiling, jobs=jobs) for jobs in (1, 2)]
    assert found[0].outcomes == found[1].outcomes
    for outcome in found[0].outcomes:
        own = tiling.model_copy(update=outcome.point)
        assert outcome.cycles == run("flash", seq=256, tiling=own, numerics=False).cycles


@pytest.mark.usefixtures("declared_tile")
def test_pruning_finds_what_simulating_all_of_it_finds() -> None:
    fields = {"block_kv": [64, 128], "block_q": [32, 64], "depth": [1, 2], "vector_rows": [4, 32, 64]}
    pruned, whole = (explore("flash", fields, seq=256, tensor_parallel=8, exhaustive=e) for e in (False, True))
    assert pruned.best is not None
    assert whole.best is not None
    assert (pruned.best.point, pruned.best.cycles) == (whole.best.point, whole.best.cycles)
    counts = pruned.counts()
    assert counts["pruned"] > counts["ok"]
    assert counts["merged"]  # slices of 64 rows are no larger than a core's share
    for o, exact in zip(pruned.outcomes, whole.outcomes, strict=True):
        if o.status == "pruned":
            assert exact.latency_us >= o.bound_us > pruned.best.latency_us * (1 - 1e-12)
        elif o.status == "merged":
            assert exact.cycles == whole.outcomes[o.same_as].cycles
        else:
            assert (o.cycles, o.status == "infeasible") == (exact.cycles, exact.status == "infeasible")


def test_a_search_that_ends_early_is_no_worse_than_a_plain_run_and_bounds_what_is_left(tmp_path: Path) -> None:
    fields = {"block_q": [32, 64, 128], "block_kv": [64, 512], "depth": [1, 2, 4], "vector_rows": ["auto", 4, 8]}
    call: dict[str, Any] = {"seq": 256, "tensor_parallel": 8, "numerics": False}
    plain, reports = run("flash", **call), list[Progress]()
    spec = SearchRequest(Request("flash", **call), ("flash",)).spec(fields)
    for budget in (1e-9, None):
        options = Options(store=tmp_path / "s.sqlite", resume=not budget, budget_s=budget, on_progress=reports.append)
        found = exploration.search(spec, options)
        assert len(found.undecided) + len(found.outcomes) == 54
        assert bool(found.undecided) == bool(budget)
    assert found.best is not None
    assert found.best.latency_us <= plain.latency_us
    assert {o.point["vector_rows"] for o in found.outcomes} == {None, 4, 8}
    assert all(r.remaining_us <= found.best.latency_us for r in reports if r.remaining_us is not None)
    assert all(r.remaining_us is None for r in reports if r.stage == "bounds")  # some have none yet
    assert reports[-1].decided == 54


@pytest.mark.exhaustive  # a product of the H200 by default: test_brute_force.py
def test_a_product_at_the_clock_of_products_is_not_pruned_where_it_wins() -> None:
    space = {"block_n": [64, 128, 256], "splits": [1, 2], "stages": [2, 3, 4]}
    asked: dict[str, Any] = {"hw": "h200", "problem": GemmProblem(m=5500, n=2657, k=191)}
    found, whole = explore("gemm", space, **asked), explore("gemm", space, exhaustive=True, **asked)
    assert found.counts()["pruned"] > 5
    assert found.best is not None
    assert whole.best is not None
    assert (found.best.point, found.best.cycles) == (whole.best.point, whole.best.cycles)
    for o, exact in zip(found.outcomes, whole.outcomes, strict=True):
        assert (o.bound_us or 0) <= exact.latency_us


def test_a_problem_is_given_as_sizes_by_name_as_in_a_run() -> None:
    sizes = {"m": 512, "n": 256, "k": 128}
    found = explore("gemm", {"block_k": [64, 128]}, problem=sizes)
    made = explore("gemm", {"block_k": [64, 128]}, problem=GemmProblem(**sizes))
    assert [o.cycles for o in found.outcomes] == [o.cycles for o in made.outcomes]
    assert found.request.problem == run("gemm", problem=sizes, numerics=False).problem
    heads = {"heads": 2, "seq_q": 64, "seq_kv": 64, "head_dim": 64}
    assert run("flash", problem=heads, numerics=False).problem == Problem(**heads)
    for wrong, why in (
        ({"m": 512}, "needs a matrix product"),
        ({**sizes, "m": "4k"}, "m: expected a whole"),
        (5, "got 5"),
    ):
        for call in (run, lambda name, problem: explore(name, {"block_k": [64]}, problem=problem)):
            with pytest.raises(SpecError, match=why):
                call("gemm", problem=wrong)


@pytest.mark.usefixtures("declared_tile")
def test_tensors_need_no_workload_beside_them() -> None:
    q, k, v = (np.ones((1, 1, 64, 64), np.float16) for _ in range(3))
    found = explore("flash", {"block_kv": [64, 128]}, tensors={"q": q, "k": k, "v": v}, pareto=True)
    assert found.best is not None


def test_a_declared_space_has_what_a_plain_run_takes() -> None:
    search = SearchRequest(Request("flash", workload="pangu_38b", seq=512), ("flash",))
    axes, plain = search.auto_axes(), search.plain_tiling("flash")
    assert all(plain[name] in values for name, values in axes.items())
    assert "full" in axes["vector_rows"]  # what is declared, by its word: nothing is left open to a choice
    spec = search.spec(axes)
    assert min(map(spec.distance, spec.points())) == 0


def test_of_a_declared_space_that_is_too_large_fields_are_held_that_no_plain_run_chooses() -> None:
    search = SearchRequest(Request("split_kv", workload="pangu_38b", seq=512), ("split_kv",))
    whole = prod(map(len, search.auto_axes().values()))
    axes, (note,) = search.auto_space({})
    held = [name for name, values in axes.items() if len(values) == 1]
    assert prod(map(len, axes.values())) <= MOST_POINTS < whole
    assert held
    assert not {"block_q", "block_kv", "vector_rows", "depth", "deal"} & set(held)
    assert note.startswith(f"{whole:,} points")
    assert all(f"{name}=auto (--field {name}=auto,16," in note for name in held)
    given = {"split_keys": (32, 64), "together": (1,)}
    assert search.auto_space(given) == ({**search.auto_axes(), **given}, ())


@pytest.mark.usefixtures("declared_tile")
def test_axes_of_problems_devices_and_schedules(tmp_path: Path) -> None:
    held = {"vector_rows": 8, "block_q": 64, "depth": 2, "deal": "round_robin"}
    fields = {"seq": [128, 256], "group_count": [12, 24], "block_kv": [64, 128], **{n: [v] for n, v in held.items()}}
    found = explore(["flash", "two_level"], fields, tensor_parallel=8, out=tmp_path / "s.sqlite")
    assert len(found.outcomes) == 16
    assert found.setting.scene_names == ("schedule", "seq", "group_count")
    for seq, count in ((128, 12), (256, 24)):
        keys = {"group_count": str(count)}
        more: dict[str, Any] = {"seq": seq, "tensor_parallel": 8, "overrides": keys, "tiling": held}
        alone = explore("flash", {"block_kv": [64, 128]}, **more)
        wanted = {"schedule": "flash", "seq": seq, "group_count": count}
        same = [o for o in found.feasible if o.point.items() >= wanted.items()]
        assert alone.best is not None
        assert same[0].cycles == alone.best.cycles
    about, rows = read_store(tmp_path / "s.sqlite")
    assert about["schedules"] == ["flash", "two_level"]
    assert rows == found.outcomes


@pytest.mark.usefixtures("declared_tile")
def test_schedules_without_fields_are_compared_by_their_presets() -> None:
    found = explore(("flash", "two_level"), {}, seq=256, tensor_parallel=8, exhaustive=True)
    tried = {(o.point["schedule"], o.point["precision"]) for o in found.outcomes}
    device = load_device("ascend_910b2")
    assert tried == {(s, p) for s in ("flash", "two_level") for p in find_schedule(s, "ascend").presets(device)}


@pytest.mark.usefixtures("declared_tile")
def test_the_front_is_of_latency_and_error() -> None:
    fields = {"precision": ["fa2_fp32", "fa16"], "block_kv": [256], "depth": [1, 2]}
    call: dict[str, Any] = {"seq": 256, "tensor_parallel": 8, "tiling": {"block_q": 64}}
    found = explore("flash", fields, pareto=True, **call)
    errors = {o.point["precision"]: o.relative_rmse for o in found.front}
    assert errors["fa16"] > errors["fa2_fp32"] > 0
    assert len({o.relative_rmse for o in found.outcomes}) == 2
    assert all(o.is_finite for o in found.outcomes)
    most = errors["fa2_fp32"] * 1.01
    strict = explore("flash", fields, max_rmse=most, **call)
    assert strict.counts()["rejected"] >= 1
    assert all(o.point["precision"] == "fa16" for o in strict.outcomes if o.status == "rejected")


@pytest.mark.usefixtures("declared_tile")
def test_another_limit_is_held_against_what_a_store_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"precision": ["fa2_fp32", "fa16"], "block_kv": [256], "depth": [1, 2]}

    def search(**more: object) -> Exploration:
        call: dict[str, Any] = {"seq": 256, "tensor_parallel": 8, "tiling": {"block_q": 64}}
        return explore("flash", fields, out=tmp_path / "s.sqlite", **call, **more)

    whole = search(pareto=True)
    errors = {str(o.point["precision"]): o.relative_rmse or 0.0 for o in whole.outcomes}
    assert whole.best is not None
    assert whole.best.point["precision"] == "fa16"
    monkeypatch.setattr(simulate, "simulate_program", lambda *_: pytest.fail("simulated again"))
    strict = search(max_rmse=errors["fa2_fp32"], resume=True)
    assert strict.best is not None
    assert strict.best.point["precision"] == "fa2_fp32"
    assert search(max_rmse=0.0, resume=True).why_none() == "no point is left: 4 rejected by --max-rmse"
    again = search(pareto=True, resume=True)
    assert again.best == whole.best
    assert again.front == whole.front
    assert read_store(tmp_path / "s.sqlite")[1] == again.outcomes


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1e-9])
def test_a_limit_that_limits_nothing_is_refused(limit: float) -> None:
    with pytest.raises(SpecError, match=f"--max-rmse {limit}: must be a finite number, and at least 0"):
        explore("flash", FIELDS, seq=256, max_rmse=limit)


def test_of_equally_fast_points_the_front_has_the_one_nearest_to_float64() -> None:
    rows = [
        PointOutcome(n, {"n": n}, "ok", cycles=1, latency_us=t, relative_rmse=e)
        for n, (t, e) in enumerate([(2.0, 0.3), (2.0, 0.1), (2.0, 0.2), (3.0, 0.1), (4.0, 0.0)])
    ]
    assert [o.index for o in exploration.front(rows)] == [1, 4]
    shown = front_of([o.row() for o in rows], ["n"])[1]
    assert [p["name"] for p in shown if p["is_front"]] == ["n=1"]  # an error of 0 has no place on its axis


@pytest.mark.usefixtures("declared_tile")
def test_bits_are_computed_once_for_points_that_cannot_differ_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    bits_of = points._bits_of
    monkeypatch.setattr(points, "_bits_of", lambda job, task: computed.append(task.point) or bits_of(job, task))
    fields = {"depth": [1, 2], "vector_rows": [8, 16], "block_kv": [128, 256], "precision": ["fa2_fp32", "fa16"]}
    held = {"block_q": 64, "deal": "balanced"}
    found = explore("flash", fields, seq=256, tensor_parallel=8, tiling=held, pareto=True)
    assert len(found.outcomes) == 16
    assert len(computed) == 4  # tiles of keys, and formats


@pytest.mark.usefixtures("declared_tile")
def test_a_planted_race_stops_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AscendGroup.ub_kept
    monkeypatch.setattr(AscendGroup, "ub_kept", lambda *given: kept(*given[:-1], 1))
    with pytest.raises(RaceError, match=r"ring (alpha|l) "):
        explore("flash", {"block_kv": [64, 128], "depth": [2, 3]}, seq=512)


@pytest.mark.usefixtures("declared_tile")
@pytest.mark.parametrize(("depths", "check_all"), [((2, 3), False), ((3,), True)])
def test_a_race_in_points_that_cannot_win_stops_the_search(
    monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...], check_all: bool
) -> None:
    fields = {"block_q": [16, 64, 128], "block_kv": [64, 256], "depth": [2, 3]}
    if not check_all:
        sound = explore("flash", fields, seq=512, tensor_parallel=8)
        assert {o.status for o in sound.outcomes if o.point["block_q"] == 16} == {"pruned"}
        assert 0 < sound.checked < sound.counts()["pruned"]
    kept = AscendGroup.ub_kept

    def planted(group: AscendGroup, core: VectorCore, name: str, size: int, depth: int) -> Ring:
        is_planted = size == 8 * 4 and depth - 1 in depths  # a core's 8 of 16 rows, float32
        return kept(group, core, name, size, 1 if is_planted else depth)

    monkeypatch.setattr(AscendGroup, "ub_kept", planted)
    with pytest.raises(RaceError, match=r"ring (alpha|l) "):
        explore("flash", fields, seq=512, tensor_parallel=8, check_all=check_all)


@pytest.mark.usefixtures("declared_tile")
def test_csv_grows_point_by_point_and_survives_an_interruption(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "sweep.csv"
    seen: list[int] = []

    def on_outcome(outcome: PointOutcome, total: int) -> None:
        assert total == 6
        seen.append(outcome.index)
        assert outcome in read_store(file.with_suffix(".sqlite"))[1]
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore("flash", FIELDS, seq=256, out=file, on_outcome=on_outcome)
    assert len(list(csv.DictReader(file.open()))) == 3
    again: list[int] = []
    whole = explore("flash", FIELDS, seq=256, out=file, resume=True, on_outcome=lambda o, _: again.append(o.index))
    assert sorted(again) == list(range(6))
    assert whole.outcomes == read_store(file.with_suffix(".sqlite"))[1]
    rows = list(csv.DictReader(file.open()))
    assert [row["status"] for row in rows] == ["ok", "infeasible", "infeasible"] * 2
    assert {"block_kv", "block_q", "status", "cycles", "latency_us", "bound_us", "head_room"} <= rows[0].keys()


def test_what_is_wrong_for_every_point_is_an_error_before_the_first(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    with pytest.raises(TilingError, match="unknown tiling field"):
        explore("flash", {"blok": [1]}, out=file)
    with pytest.raises(SpecError, match="does not divide 40 query heads"):
        explore("flash", FIELDS, tensor_parallel=7, out=file)
    with pytest.raises(SpecError, match="unknown schedule"):
        explore("flsh", FIELDS, out=file)
    assert not file.exists()


def test_device_without_times_has_nothing_to_rank() -> None:
    values_only = load_device("h200").model_copy(update={"flags": None, "launch": None})
    with pytest.raises(SpecError, match="h200 has no timing model yet"):
        explore("flash", {"block_kv": [64]}, hw=values_only)


def test_unwritable_csv_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        explore("flash", FIELDS, seq=256, out=tmp_path / "file" / "sweep.csv")


def test_request_pickles_with_an_equal_device() -> None:
    request = Request("flash", hw=load_device("ascend_910b2"), workload=load_workload("pangu_38b"), seq=256)
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(("hw", "schedule"), [("h200", "flash"), ("a100", "flash"), ("v100", "volta_flash")])
def test_room_of_a_gpu_counts_the_registers_of_resident_blocks(hw: str, schedule: str) -> None:
    done = run(schedule, hw=hw, seq=512, numerics=False)
    words = re.search(
        r"(\d+) resident blocks? of (\d+) warps? \(limit: .*\), (\d+) registers", "\n".join(done.program.notes)
    )
    assert words
    fit, warps, registers = map(int, words.groups())
    used, there = done.program.occupancy_bytes()["sm.RF"]
    of_block = warps * 32 * registers * 4
    assert there == 64 * 1024 * 4  # CUDA C++ Programming Guide, compute capabilities
    assert of_block <= used <= min(there, fit * of_block * 1.2)
    used, there = done.program.occupancy_bytes()["sm.SMEM"]
    assert 0 < used <= there < 1 << 18


@pytest.mark.parametrize(("kernel", "tiles"), [("fa3", 5), ("cudnn", 6)])
def test_room_of_specialised_warps_counts_the_tiles_of_shared_memory(kernel: str, tiles: int) -> None:
    done = run("flash", hw="h100", seq=512, tiling={"kernel": kernel}, numerics=False)
    of_tile = 128 * 128 * 2  # of Q, and of two of K and of V
    assert done.program.occupancy_bytes() == {"sm.SMEM": (tiles * of_tile, 228 * 1024)}


@pytest.mark.parametrize("asked", [{"pareto": True}, {"finite": True}, {"max_rmse": 0.1}])
def test_what_computes_no_bits_is_not_searched_for_them(asked: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="gemm computes no bits: its points differ only in time; remove"):
        explore("gemm", {"block_m": [64, 128]}, problem=GemmProblem(m=64, n=64, k=64), **asked)
