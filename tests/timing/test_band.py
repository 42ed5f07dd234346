"""Approximate times: the exact one never lies outside the band, over random causal calls."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, ProgramError
from npusim.library import find_schedule
from npusim.program.timing import auto, mean_field
from npusim.program.timing.engine import Run
from npusim.program.timing.engine_code import Classes, Code, equal_groups
from npusim.program.timing.stream import Streams
from npusim.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

SCHEDULES = ("flash", "flash", "two_level", "unified", "pasa", "fp8_attention")
DEVICES = ("ascend_910b1", "ascend_910b2", "ascend_910b3", "ascend_910b4")


def random_calls(seed: int, shortest: int, longest: int) -> Iterator[tuple[TileProgram, DeviceSpec]]:
    """Yield causal calls of random schedules, devices, shapes and tilings that fit."""
    rng = random.Random(seed)
    while True:
        device = load_device(rng.choice(DEVICES))
        schedule = find_schedule(rng.choice(SCHEDULES), device.family)
        kv_heads = rng.choice([1, 2, 4, 8])
        problem = Problem(
            heads=kv_heads * rng.choice([1, 1, 2, 4, 7]),
            kv_heads=kv_heads,
            batch=rng.choice([1, 1, 2]),
            seq_q=int(shortest * (longest / shortest) ** rng.random()),
            head_dim=rng.choice([64, 128]),
            causal=True,
        )
        fields: dict[str, object] = {}
        if rng.random() < 0.5:
            fields["depth"] = rng.choice([1, 2, 3])
        if rng.random() < 0.4 and schedule.name in ("flash", "pasa"):
            fields["deal"] = "balanced"
        if rng.random() < 0.3:
            fields["block_q"] = rng.choice([64, 128])
        try:
            tiling = build_tiling(schedule.tiling, fields)
            program = schedule.program(problem, tiling, device, schedule.precision())
        except NpusimError:
            continue
        yield program, device


def held(seed: int, shortest: int, longest: int, operations: tuple[int, int], count: int) -> list[float]:
    """Hold ``count`` approximate times against exact ones; return how much of its band each uses."""
    used = []
    for program, device in random_calls(seed, shortest, longest):
        code = Code(Streams(program, device))
        classes = equal_groups(code)
        if not operations[0] < mean_field.operations_of(code, classes) < operations[1]:
            continue
        try:
            found = mean_field.approximate(code, classes)
        except ProgramError:
            continue  # groups in step: `auto` is exact there
        exact = Run(code, classes, periodic=True).result("steady")
        assert found.band
        assert (found.operations, found.link_bytes) == (exact.operations, exact.link_bytes)
        used.append(abs(exact.cycles / found.cycles - 1) / found.band)
        assert used[-1] <= 1, (program.name, device.name, found.cycles, exact.cycles, found.band)
        if len(used) == count:
            return used
    raise AssertionError


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_the_exact_time_lies_within_the_band(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls, where starts and ends count most, with a part as small beside them."""
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 60_000)
    assert max(held(7, 4096, 24576, (150_000, 500_000), count)) > 0


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(4))
def test_the_exact_time_lies_within_the_band_at_full_size(seed: int) -> None:
    assert len(held(seed, 8192, 98304, (2_000_000, 20_000_000), 25)) == 25


def test_a_block_as_long_as_others_are_cut_to_costs_them_nothing() -> None:
    """Longest blocks first, then one of just the length that those are cut to: it was 63 % too fast."""
    device = load_device("ascend_910b3")
    schedule = find_schedule("flash", device.family)
    problem = Problem(heads=7, kv_heads=1, seq_q=11000, head_dim=64, causal=True)
    tiling = build_tiling(schedule.tiling, {"deal": "balanced"})
    program = schedule.program(problem, tiling, device, schedule.precision())
    code = Code(Streams(program, device))
    classes = equal_groups(code)
    exact = Run(code, classes, periodic=True).result("steady").cycles
    assert mean_field.MeanField(code).result(classes).cycles == pytest.approx(exact, rel=0.01)


@pytest.mark.usefixtures("declared_tile")
def test_a_method_asked_for_by_name_says_that_it_is_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 60_000)
    found = run("two_level", seq=16384, numerics=False, method="reserved", trace_groups=())
    assert found.timing is not None
    assert found.timing.band >= mean_field.LEAST_BAND


@pytest.mark.parametrize(("few", "method"), [(auto.FEW_OPERATIONS, "steady"), (100_000, "reserved")])
@pytest.mark.usefixtures("declared_tile")
def test_cycles_do_not_depend_on_what_is_wanted_beside_them(
    few: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "FEW_OPERATIONS", few)
    monkeypatch.setattr(auto, "WIDE", 1.0)
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 60_000)
    options: dict[str, Any] = {"seq": 16384, "method": "auto"}
    plain = run("two_level", numerics=False, trace_groups=(), **options).timing
    saved = run("two_level", numerics=False, trace_groups=(0,), **options).timing
    assert plain is not None
    assert saved is not None
    assert (plain.cycles, plain.method, plain.band) == (saved.cycles, saved.method, saved.band)
    assert (saved.traced_cycles is None) == (plain.band == 0)
    assert plain.method == method


@pytest.mark.usefixtures("declared_tile")
def test_blocks_that_overlap_and_do_not_run_in_part_are_timed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "FEW_OPERATIONS", 100_000)
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 30_000)
    tile = {"block_kv": 512, "vector_rows": 16, "depth": 3, "deal": "balanced", "order": "rolling"}
    options: dict[str, Any] = {"seq": 8192, "tiling": tile, "numerics": False, "trace_groups": ()}
    with pytest.raises(ProgramError, match="no part that repeats by itself"):
        run("flash", method="reserved", **options)
    timing = run("flash", **options).timing
    assert timing is not None
    assert timing.method == "steady"


def test_a_mean_below_what_the_work_takes_is_raised_to_it_in_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 60_000)
    device, computed = load_device("ascend_910b2"), mean_field.MeanField.result
    schedule = find_schedule("two_level", device.family)
    problem = Problem(heads=5, seq_q=16384, head_dim=128, causal=True)
    code = Code(Streams(schedule.program(problem, schedule.tiling(), device, schedule.precision()), device))

    def halved(self: mean_field.MeanField, classes: Classes) -> TimingResult:
        result = computed(self, classes)
        return replace(result, cycles=max(result.bound_cycles.values()) // 2)

    monkeypatch.setattr(mean_field.MeanField, "result", halved)
    timing = mean_field.approximate(code, equal_groups(code))
    assert timing.cycles == max(timing.bound_cycles.values())
    assert timing.times_s["core"] == timing.cycles / timing.clock_hz
    assert timing.times_s["call"] == timing.latency_s
