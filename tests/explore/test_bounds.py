from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.load import list_devices, load_device
from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem, OperatorProblem, Problem, RowsProblem
from npusim.errors import NpusimError, TilingError
from npusim.library import SCHEDULES, find_schedule
from npusim.program.ir.families import families_of
from npusim.program.timing import METHODS, des
from npusim.program.timing.engine_code import Code
from npusim.program.timing.stream import Streams
from npusim.simulation.request import Request
from npusim.simulation.variants import Variants
from npusim.studies.explore import explore
from npusim.studies.explore.bounds import Bound, alone_bound, work_bound
from npusim.studies.explore.space import SearchRequest, declared

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.library import Schedule
    from npusim.program.ir.tile_program import TileProgram

DEVICE = load_device("ascend_910b2")
FIELDS = {
    "block_q": range(16, 145, 16),
    "block_kv": range(16, 257, 16),
    "depth": range(5),
    "vector_rows": (4, 8, 16, 32),
}


def random_program(rng: random.Random, name: str, longest: int) -> TileProgram:
    schedule = find_schedule(name, "ascend")
    heads, seq = rng.randrange(1, 6), rng.randrange(32, longest)
    problem = Problem(heads=heads, seq_q=seq, head_dim=rng.choice((64, 128)), causal=rng.random() < 0.6)
    while True:
        chosen = {n: rng.choice(list(values)) for n, values in FIELDS.items() if n in schedule.tiling.model_fields}
        try:
            return schedule.program(problem, schedule.tiling(**chosen), DEVICE, schedule.precision(), is_hinted=False)
        except TilingError:
            continue


@pytest.mark.parametrize("name", ["flash", "pasa", "two_level", "fp8_attention"])
def test_bounds_are_never_above_the_simulation(name: str) -> None:
    rng = random.Random(name)
    for _ in range(4):
        program = random_program(rng, name, 700)
        cycles = METHODS["fold"](program, DEVICE).cycles
        work, groups = work_bound(program, DEVICE)
        alone = alone_bound(Code(Streams(program, DEVICE)), groups)
        assert 0 < work <= cycles
        assert 0.5 * cycles < alone <= cycles
        # Bodies left out once the cutoff is passed only lower it.
        assert work_bound(program, DEVICE, work // 3).cycles <= work


def some_problem(rng: random.Random, schedule: Schedule, device: DeviceSpec, largest: int) -> object:
    """Draw a problem of up to ``largest`` rows; products have up to three times as many."""
    if schedule.problem is GemmProblem:
        m, n, k = (rng.randrange(1, most) for most in (3 * largest, 3 * largest, 3 * largest // 2))
        return GemmProblem(m=m, n=n, k=k, count=rng.choice((1, 1, 3)))
    if schedule.problem is CopyProblem:
        return CopyProblem(bytes=rng.randrange(1, 1 << 22))
    if schedule.problem is RowsProblem:
        return RowsProblem(what=rng.choice(("norm", "rotary", "gate")), rows=rng.randrange(1, 300), cols=1024)
    if schedule.problem is OperatorProblem:
        what = rng.choice(("widen", "mean", "rescale", "join", "plus"))
        return OperatorProblem(what=what, rows=rng.randrange(1, 300), cols=1024)
    if schedule.problem is KernelProblem:
        key, value = (rng.choice((32, 64, 128)) for _ in range(2))
        return KernelProblem(
            heads=rng.choice((1, 2, 5)), tokens=rng.randrange(16, 7 * largest // 4), key=key, value=value
        )
    seq = rng.randrange(16, largest)
    return Problem(
        heads=rng.choice((1, 2, 3, 6)),
        seq_q=rng.choice((1, seq, seq)),
        seq_kv=seq,
        head_dim=rng.choice((64, 128)),
        causal=rng.random() < 0.5,
        dtype=schedule.inputs(device) or "float16",
    )


def check_some_bounds(rng: random.Random, schedule: Schedule, device: DeviceSpec, largest: int = 200) -> bool:
    """Hold every kind of bound of one drawn program below its exact time; return whether what was drawn fits."""
    axes = {n: v for n, v in declared(schedule.tiling).items() if n not in schedule.left(device)}
    tiling = {n: rng.choice([v for v in values if v is not None]) for n, values in axes.items() if rng.random() < 0.25}
    # Few core groups have long blocks one after another, which is where units of work show.
    changes = {"group_count": str(rng.choice((1, 2, 3, 5, 9)))} if rng.random() < 0.4 else None
    try:
        problem: Any = some_problem(rng, schedule, device, largest)
        request = Request(schedule.name, hw=device.name, problem=problem, tiling=tiling, overrides=changes)
        built = Variants(request).built(())
    except NpusimError:
        return False
    program, on = built.program, built.plan.device
    streams = Streams(program, on)
    exact = METHODS["des" if streams.scalar_waits else "fold"](program, on).cycles
    bounds = [work_bound(program, on), work_bound(program, on, is_dealt=False)]
    alone = 0 if streams.scalar_waits else alone_bound(Code(streams), bounds[0].groups)
    for bound in (*(b.cycles for b in bounds), alone or 1):
        assert 0 < bound <= exact, (request, bound)
    return True


@cache
def everywhere() -> list[tuple[str, str]]:
    """Return each schedule on each device with times that takes it; not as tests are collected: devices are loaded."""
    return sorted(
        (name, hw)
        for hw, device in ((hw, load_device(hw)) for hw in list_devices())
        for (name, family), schedule in SCHEDULES.items()
        if device.is_timed and family == device.family and not schedule.unsupported(device)
    )


def test_no_bound_of_any_schedule_is_above_its_time() -> None:
    """Every fourth schedule and device, and each schedule once; all of them with ``-m exhaustive``."""
    rng, checked = random.Random(53), Counter[str]()
    some = sorted({*everywhere()[::4], *dict(everywhere()).items()})
    for name, hw in some:
        device = load_device(hw)
        checked[name] += any(check_some_bounds(rng, SCHEDULES[name, device.family], device) for _ in range(12))
    assert checked.keys() == {name for name, _ in everywhere()}
    assert checked.total() > 0.9 * len(some)  # FP8 has no product on some, and few draws fit others
    assert min(checked.values()) > 0


@pytest.mark.parametrize("hw", ["h100", "h200"])
def test_no_bound_of_a_product_is_above_its_time_at_the_clock_that_products_have(hw: str) -> None:
    device, rng = load_device(hw), random.Random(hw)
    schedule = SCHEDULES["gemm", device.family]
    assert sum(check_some_bounds(rng, schedule, device) for _ in range(20)) > 14


@pytest.mark.exhaustive
@pytest.mark.parametrize("hw", list_devices())
def test_no_bound_of_many_programs_is_above_its_time(hw: str) -> None:
    device, rng = load_device(hw), random.Random(f"many {hw}")
    assert device.is_timed == (hw in {other for _, other in everywhere()})
    for name in (name for name, other in everywhere() if other == hw):
        for _ in range(60):
            check_some_bounds(rng, SCHEDULES[name, device.family], device, largest=400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["flash", "pasa", "two_level", "fp8_attention"])
def test_bounds_are_never_above_des(name: str) -> None:
    rng = random.Random(f"{name} by des")
    for _ in range(40):
        program = random_program(rng, name, 500)
        found = work_bound(program, DEVICE)
        bound = max(found.cycles, alone_bound(Code(Streams(program, DEVICE)), found.groups))
        assert bound <= des.simulate(program, DEVICE).cycles


@pytest.mark.exhaustive
def test_pruned_is_exhaustive_by_des_on_100_spaces() -> None:
    rng, counts = random.Random(300), Counter[str]()
    for _ in range(100):  # three CPU minutes
        name = rng.choice(["flash", "flash", "pasa", "two_level", "fp8_attention"])
        known = find_schedule(name, "ascend").tiling.model_fields
        fields = {n: sorted(rng.sample(list(v), 2)) for n, v in FIELDS.items() if n in known}
        fields[rng.choice(list(fields))].pop()
        # 8 points and 4 or 5 of the 40 heads: a simulation event by event of all of them takes seconds.
        more = {"seq": rng.randrange(64, 320), "causal": rng.random() < 0.6, "tensor_parallel": rng.choice([8, 10])}
        found = explore(name, fields, **more, studies=True)
        exact = explore(name, fields, **more, studies=True, method="des", exhaustive=True)
        counts.update(found.counts())
        assert (found.best is None) == (exact.best is None)
        if found.best is not None and exact.best is not None:
            assert found.best.cycles == exact.best.cycles
            assert found.best.latency_us == exact.best.latency_us
        for o, other in zip(found.outcomes, exact.outcomes, strict=True):
            if o.status == "pruned":
                assert o.bound_us <= other.latency_us
    assert min(counts["pruned"], counts["ok"]) > 100


@pytest.mark.parametrize(
    ("name", "hw"), [("flash", "ascend_910b2"), ("flash", "ascend_950"), ("flash", "h200"), ("flash", "v100")]
)
def test_a_familys_bound_is_below_those_of_its_points(name: str, hw: str) -> None:
    request = Request(name, hw=hw, workload="qwen2_7b", seq=256, tensor_parallel=4)
    spec = SearchRequest(request, (name,)).spec(SearchRequest(request, (name,)).auto_axes())
    points, rng = spec.points(), random.Random(hw)
    families, done = spec.families(points, range(len(points))), 0
    assert sorted(i for f in families for i in f.indices) == list(range(len(points)))
    while done < 4:
        family = rng.choice(families)
        with suppress(TilingError):
            built = [
                spec.variants.build(spec.variants.named(points[i]), is_hinted=False)
                for i in rng.sample(family.indices, 2)
            ]
            lightest = spec.variants.build(spec.variants.named(family.lightest), is_hinted=False)
            known: dict[Any, Any] = {}
            on = lightest.plan.device
            least = work_bound(lightest.program, on, is_dealt=family.is_dealt, known=known).cycles
            for one in built:
                cycles, own = one.timing().cycles, work_bound(one.program, one.plan.device).cycles
                bodies = len(known)
                assert 0 < least <= work_bound(one.program, one.plan.device, known=known).cycles <= own <= cycles
                assert len(known) == bodies  # each body of a point is one of its family's program
                assert cycles < 12 * least
            done += 1


@pytest.mark.parametrize("hw", ["h200", "v100"])
def test_a_bound_of_families_of_blocks_is_that_of_their_shapes(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SearchRequest(Request("flash", hw=hw, workload="qwen2_7b", seq=768), ("flash",)).spec({"block_kv": (16, 32)})
    built = [spec.variants.build(spec.variants.named({**p, "block_q": 128})) for p in spec.points()]
    assert all(families_of(b.program.phases[0]) for b in built)

    def bounds() -> list[Bound]:
        return [work_bound(b.program, b.plan.device, is_dealt=not r) for b in built for r in (False, True)]

    by_family = bounds()
    monkeypatch.setitem(work_bound.__globals__, "families_of", lambda _: None)
    assert by_family == bounds()


def test_a_familys_bound_is_below_those_of_points_whose_sizes_shrink_further() -> None:
    """On chips with registers tiles ahead lie in UB: with 14 of them other rows of a slice fit."""
    problem = Problem(heads=2, kv_heads=2, seq_q=136, seq_kv=136, head_dim=128, causal=True)
    spec = SearchRequest(Request("flash", hw="ascend_950", problem=problem), ("flash",)).spec({"depth": (0, 4, 14)})
    points = spec.points()
    (family,) = spec.families(points, range(len(points)))
    assert family.heavier[0] == {"depth": 14}

    def sizes(one: Any) -> tuple[object, ...]:
        return tuple(value for name, value in one.plan.tiling if name != "depth")

    of_family = {sizes(one): one for one in spec.variants.candidates(family.lightest, family.heavier)}
    assert len(of_family) > len(list(spec.variants.candidates(family.lightest, ())))  # without those that shrink
    for point in points:
        assert {sizes(one) for one in spec.variants.candidates(point)} <= of_family.keys()
        run = spec.variants.built(tuple(point.items()))
        lighter = of_family[sizes(run)]
        assert work_bound(lighter.program, lighter.plan.device).cycles <= run.timing().cycles


def test_a_field_left_open_on_an_axis_is_no_value_of_it() -> None:
    request = Request("flash", hw="ascend_910b2", workload="qwen2_7b", seq=256, tensor_parallel=4)
    spec = SearchRequest(request, (request.schedule,)).spec({"block_q": ("auto",), "depth": ("auto", 8, 14)})
    points = spec.points()
    assert spec.is_open(has_bits=True)  # the rows of a block are chosen for each point
    assert [f.indices for f in spec.families(points, range(3))] == [(0,), (1, 2)]
    assert spec.variants.request_of(points[0]).tiling == {}
