"""A better machine or less work never takes longer (by more than 2 %), and no time is below its bound."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.toy import RANDOMS, RandomProgram, Toy, fill, front

from npusim.config.problem import CopyProblem, GemmProblem, Problem
from npusim.library import find_schedule
from npusim.program.ir.tile_program import Loop
from npusim.program.timing import METHODS, des
from npusim.program.timing.summary import check_sanity
from timing.programs import device_with, random_device

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

#: Who waits for a link first may change with its rate: so much is allowed.
ALLOWED = 1.02

AIC, AIV = "cores__aic__engines__", "cores__aiv__engines__"
#: Numbers of which more is better, with their values in the 910B2's file.
RATES = {
    "links__hbm__bytes_per_s": 1.45e12,
    "links__l2__bytes_per_s": 7.0e12,
    f"{AIC}MTE2__routes__gm_l1__bytes_per_cycle": 110,
    f"{AIC}MTE1__routes__l1_l0a__bytes_per_cycle": 256,
    f"{AIC}MTE1__routes__l1_l0b__bytes_per_cycle": 128,
    f"{AIC}FIXP__routes__l0c_gm__bytes_per_cycle": 66,
    f"{AIV}MTE2__routes__gm_ub__bytes_per_cycle": 67,
    f"{AIV}MTE3__routes__ub_gm__bytes_per_cycle": 60,
    f"{AIC}MTE2__queue_depth_count": 8,
    f"{AIV}VECTOR__queue_depth_count": 8,
}
#: Numbers of which less is better.
DELAYS = {
    "flags__cross_core_latency_cycles": 500,
    "flags__cross_core_issue_cycles": 200,
    "launch__block_dispatch_cycles": 2000,
    f"{AIC}MTE2__routes__gm_l1__latency_cycles": 300,
    f"{AIV}VECTOR__ops__exp_float32__slope_cycles_per_repeat": 2.0,
    f"{AIV}VECTOR__ops__binary__head_cycles": 10,
    "memory__l2__miss_extra_latency_cycles": 150,
}
#: Schedules with sizes that take milliseconds: causal or not, several phases, shared links throughout.
PROGRAMS: dict[str, tuple[str, Any]] = {
    "flash": ("flash", Problem(heads=3, seq_q=640, head_dim=128, causal=False)),
    "causal": ("two_level", Problem(heads=5, seq_q=1024, head_dim=128, causal=True)),
    "ragged": ("flash", Problem(heads=30, seq_q=197, head_dim=80, causal=True)),
    "pasa": ("pasa", Problem(heads=2, seq_q=512, head_dim=128, causal=False)),
    "standard": ("standard", Problem(heads=2, seq_q=384, head_dim=64, causal=True)),
    "gemm": ("gemm", GemmProblem(m=1024, n=1024, k=512)),
    "copy": ("copy", CopyProblem(bytes=4 << 20)),
}


def built(name: str, problem: Any) -> TileProgram:
    device, schedule = device_with(), find_schedule(name, "ascend")
    return schedule.program(problem, schedule.tiling(), device, schedule.precision())


@cache
def program(case: str) -> TileProgram:
    return built(*PROGRAMS[case])


@cache
def timed(case: str, key: str = "", value: str = "") -> TimingResult:
    """Return the time of a case, one number of the device replaced."""
    return METHODS["steady"](program(case), device_with(**({key: value} if key else {})))


def scaled(value: float, factor: float) -> str:
    changed = value * factor
    return str(max(1, round(changed))) if isinstance(value, int) else repr(changed)


@settings(max_examples=50)
@given(case=st.sampled_from(sorted(PROGRAMS)), key=st.sampled_from(sorted(RATES)), data=st.data())
def test_more_bandwidth_or_deeper_queues_take_no_longer(case: str, key: str, data: Any) -> None:
    low, high = sorted(data.draw(st.sets(st.sampled_from([0.25, 0.5, 1, 1.5, 4]), min_size=2, max_size=2)))
    slow, fast = (timed(case, key, scaled(RATES[key], f)).latency_s for f in (low, high))
    assert fast <= slow * ALLOWED


@settings(max_examples=30)
@given(case=st.sampled_from(sorted(PROGRAMS)), key=st.sampled_from(sorted(DELAYS)), data=st.data())
def test_shorter_delays_take_no_longer(case: str, key: str, data: Any) -> None:
    low, high = sorted(data.draw(st.sets(st.sampled_from([0.25, 0.5, 1, 2, 4]), min_size=2, max_size=2)))
    fast, slow = (timed(case, key, scaled(DELAYS[key], f)).latency_s for f in (low, high))
    assert fast <= slow * ALLOWED


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_faster_clock_takes_no_longer(case: str) -> None:
    """Links keep their bytes a second, so that a cycle carries less of them."""
    times = [timed(case, "clock_hz", hz).latency_s for hz in ("1.0e9", "1.5e9", "1.8e9", "2.6e9")]
    assert all(b <= a * ALLOWED for a, b in pairwise(times))


@pytest.mark.parametrize("case", PROGRAMS)
def test_no_time_is_below_its_bound_and_no_byte_is_missing(case: str) -> None:
    result = timed(case)
    check_sanity(result)
    assert result.bound_cycles
    assert result.cycles >= max(result.bound_cycles.values())


@settings(max_examples=20)
@given(RANDOMS)
def test_no_random_program_is_faster_than_its_bound(rng: Any) -> None:
    drawn, device = RandomProgram(rng).program(), random_device(rng)
    check_sanity(METHODS["steady"](drawn, device))


# ---------------------------------------------------------------- rings and work


def pipeline(lengths: list[tuple[int, int]], depths: list[int], rounds: int) -> TileProgram:
    """Return stages in a row, each filling the next one's ring; two lengths a stage take turns."""
    toy = Toy()
    names = [toy.queue(f"stage{i}") for i in range(len(lengths))]
    rings = [
        toy.ring(f"r{i}", [a], [b], depth)
        for i, (a, b, depth) in enumerate(zip(names, names[1:], depths, strict=False))
    ]

    def body(_index: int) -> list[Any]:
        ops = []
        for turn in (0, 1):
            for i, name in enumerate(names):
                slots = [front(rings[i - 1])] if i else []
                slots += [fill(rings[i])] if i < len(rings) else []
                ops.append(toy.op(f"{name}.{turn}", name, *slots, repeats=lengths[i][turn]))
        return ops

    return toy.program([Loop("rounds", range(rounds), body)])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=5),
    rounds=st.integers(1, 40),
    data=st.data(),
)
def test_deeper_rings_take_no_longer(lengths: list[tuple[int, int]], rounds: int, data: Any) -> None:
    # Without shared links time is max-plus in its delays: no allowance is needed.
    depths = data.draw(st.lists(st.integers(1, 4), min_size=4, max_size=4))
    more = [d + data.draw(st.integers(0, 3)) for d in depths]
    shallow, deep = (METHODS["steady"](pipeline(lengths, d, rounds), device_with()) for d in (depths, more))
    assert deep.cycles <= shallow.cycles


def test_a_pipeline_of_uneven_stages_gains_from_its_second_slot() -> None:
    times = [des.simulate(pipeline([(40, 1), (1, 40)], [d], 10), device_with()).cycles for d in (1, 2)]
    assert times[1] < times[0]


@settings(max_examples=12)
@given(seq=st.integers(1, 900), less=st.integers(1, 300), rows=st.sampled_from([1, 64, 200]))
def test_fewer_keys_take_no_longer(seq: int, less: int, rows: int) -> None:
    # Without a mask: where the diagonal cuts one tile more, fewer keys are more work.
    def latency(keys: int) -> float:
        problem = Problem(heads=2, seq_q=rows, seq_kv=keys, head_dim=64, causal=False)
        return METHODS["steady"](built("flash", problem), device_with()).latency_s

    assert latency(seq) <= latency(seq + less) * ALLOWED


@settings(max_examples=25)
@given(size=st.integers(1, 1 << 22), less=st.integers(0, 1 << 21))
def test_fewer_bytes_take_no_longer(size: int, less: int) -> None:
    few, many = (
        METHODS["steady"](built("copy", CopyProblem(bytes=n)), device_with()).latency_s for n in (size, size + less)
    )
    assert few <= many * ALLOWED
