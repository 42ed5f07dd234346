"""The fast methods give what the reference gives, to the tick, wherever they are exact."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from ir.toy import GM, L1, RANDOMS, RandomProgram, Toy, fill, front

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.ir.tile_program import Loop
from npusim.program.timing import METHODS, auto, des, mean_field
from npusim.program.timing.engine import Run
from npusim.program.timing.engine_code import Code, equal_groups
from npusim.program.timing.stream import Streams
from tests.turns import in_turn
from timing.programs import ENDLESS_LINKS, booked, device_with, random_device

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import Item, TileProgram
    from npusim.program.timing.timing_result import TimingResult

FAST = ("block", "fold", "steady")


def uses(result: TimingResult) -> list[Any]:
    """Return every queue's use in order; groups of one class share theirs, so without its number."""
    return [row[1:] for row in booked(result)]


@settings(max_examples=60)
@given(RANDOMS)
def test_fast_methods_equal_des_on_random_programs(rng: Any) -> None:
    program, device = RandomProgram(rng).program(), random_device(rng)
    expected = des.simulate(program, device)
    for method in FAST:
        found = METHODS[method](program, device)
        assert uses(found) == uses(expected)
        assert (found.cycles, found.link_bytes) == (expected.cycles, expected.link_bytes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "seq", "heads"), [("flash", 1500, 3), ("two_level", 2048, 5), ("pasa", 1024, 4), ("standard", 600, 2)]
)
def test_fast_methods_equal_des_on_schedules_with_shared_links(
    causal: bool, name: str, seq: int, heads: int, device: DeviceSpec
) -> None:
    schedule = find_schedule(name, device.family)
    problem = Problem(heads=heads, seq_q=seq, head_dim=128, causal=causal)
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    expected = des.simulate(program, device)
    for method in FAST:
        found = METHODS[method](program, device)
        assert found.cycles == expected.cycles, method
        assert uses(found) == uses(expected), method
        assert found.link_bytes == expected.link_bytes, method
        assert found.term_cycles == pytest.approx(expected.term_cycles), method


@pytest.mark.parametrize("method", ["des", "auto", *FAST])
def test_a_flag_is_seen_when_all_before_it_in_its_queue_is_over(method: str) -> None:
    """A copy of 20 cycles whose data come 300 later, then an operation of no time that sets the flag."""
    toy = Toy()
    load, use = toy.queue("load", engine="MTE2"), toy.queue("use")
    ring = toy.ring("A", [load], [use], depth=1)
    tile = [
        toy.op("copy", load, fill(ring, last=False), repeats=1),
        toy.op("set", load, fill(ring, first=False)),
        toy.op("read", use, front(ring), repeats=1),
    ]
    bare = {"launch__block_dispatch_cycles": "0", "cores__aiv__engines__SCALAR__issue_cycles": "0"}
    device = device_with(group_count="1", **bare, **ENDLESS_LINKS)
    result = METHODS[method](toy.program([Loop("tile", range(50), lambda _i: tile)]), device)
    # Each way a flag is visible a cycle after it is set; the reader takes 25 cycles.
    assert result.cycles == 50 * (20 + 300 + 1 + 25 + 1) - 1


def test_a_block_begun_before_a_late_copy_arrives_is_not_one_begun_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of blocks that end alike but for when their last copy arrives, which the next one's flags wait for."""
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 2_000)
    toy, blocks = Toy(), 24 * 60
    load, use = toy.queue("load", engine="MTE2"), toy.queue("use")
    ring = toy.ring("A", [load], [use], depth=1)
    k = GlobalTensor("k", 1, 1, 16 * blocks, 16, "float16", "input")
    tile = [toy.op("set", load, fill(ring)), toy.op("read", use, front(ring), repeats=10)]
    place, soon = toy.allocator.tile(L1, "copied", 16, 16, "float16"), Tile(GM, 0, 16, 16, 16, "float16")

    def body(block: Any) -> list[Item]:
        kind, number = block
        source = k.tile(0, 0, number * 16, 16) if kind else soon
        return [*tile * 5, toy.op("copy", load, steps=[Step(Opcode.COPY, place, (source,))])]

    drawn = Random(2).choices((False, True), k=blocks)
    program = toy.program(
        body,
        blocks=list(zip(drawn, range(blocks), strict=True)),
        shape=lambda b: b[0],
        tensors=[k],  # type: ignore[index]
    )
    late = {"memory__l2__miss_extra_latency_cycles": "3000", "memory__l2__capacity_bytes": "1024"}
    depths = {f"cores__{e}__queue_depth_count": "2" for e in ("aiv__engines__VECTOR", "aic__engines__MTE2")}
    device = device_with(**late, **depths, **ENDLESS_LINKS)
    assert METHODS["reserved"](program, device).cycles == METHODS["fold"](program, device).cycles


def causal(device: DeviceSpec, name: str = "flash", heads: int = 5, **tiling: Any) -> TileProgram:
    schedule = find_schedule(name, device.family)
    problem = Problem(heads=heads, seq_q=16384, head_dim=128, causal=True)
    return schedule.program(problem, build_tiling(schedule.tiling, tiling), device, schedule.precision())


def test_auto_is_exact_where_that_is_quick(device: DeviceSpec) -> None:
    schedule = find_schedule("flash", device.family)
    problem = Problem(heads=1, seq_q=256, head_dim=64)
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    found = METHODS["auto"](program, device)
    assert (found.method, found.band) == ("steady", 0)
    assert METHODS["des"](program, device).method == "des"


@pytest.mark.parametrize(
    ("name", "hw"),
    in_turn(("flash", "two_level", "unified", "pasa", "fp8_attention"), ("ascend_910b2", "ascend_910b4")),
)
def test_auto_states_how_far_an_approximate_time_can_be_from_exact(
    name: str, hw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "FEW_OPERATIONS", 100_000)
    monkeypatch.setattr(mean_field, "SAMPLE_OPERATIONS", 100_000)
    device = load_device(hw)
    program = causal(device, name)
    exact, found = METHODS["steady"](program, device), METHODS["auto"](program, device)
    if found.method == "steady":
        assert found == exact
        assert (name, hw) != ("fp8_attention", "ascend_910b2"), "one at least is to be approximate"
        return
    assert 0 < found.band <= 0.02  # 2 %
    assert exact.cycles == pytest.approx(found.cycles, rel=found.band)
    assert (found.operations, found.link_bytes) == (exact.operations, exact.link_bytes)
    busy = [[use.busy_cycles for use in group] for group in found.queues]
    assert sum(map(sum, busy)) == pytest.approx(
        sum(use.busy_cycles for group in exact.queues for use in group), rel=0.05
    )


def test_auto_keeps_the_spans_it_is_asked_for(device: DeviceSpec) -> None:
    program = causal(device)
    found = METHODS["auto"](program, device, trace_groups=(3,))
    assert {span.group for span in found.spans} == {3}
    assert found.cycles == METHODS["steady"](program, device).cycles


def test_arrays_do_not_grow_with_the_length(device: DeviceSpec) -> None:
    """A dense call four times as long has the same blocks and runs in the same arrays."""
    schedule = find_schedule("flash", device.family)
    shapes = []
    for seq in (4096, 16384):
        problem = Problem(heads=3, seq_q=seq, head_dim=128)
        program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
        code = Code(Streams(program, device))
        classes = equal_groups(code)
        shapes.append((len(code.bodies), len(code.operations), Run(code, classes).state.size.base.size))
    assert shapes[0] == shapes[1]
