"""The fast methods give what the reference gives, to the tick, wherever they are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.toy import RandomProgram

from npusim.schedules import find_schedule
from npusim.spec.problem import Problem
from npusim.timing import METHODS, block, des, fold, steady
from timing.programs import booked, random_device

if TYPE_CHECKING:
    from npusim.spec.device import DeviceSpec
    from npusim.timing.result import TimingResult

FAST = {"block": block.simulate, "fold": fold.simulate, "steady": steady.simulate}


def uses(result: TimingResult) -> list[Any]:
    """Return every queue's use in order; groups of one class share theirs, so without its number."""
    return [row[1:] for row in booked(result)]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_fast_methods_equal_des_on_random_programs(rng: Any) -> None:
    program, device = RandomProgram(rng).program(), random_device(rng)
    expected = des.simulate(program, device)
    for simulate in FAST.values():
        found = simulate(program, device)
        assert uses(found) == uses(expected)
        assert (found.cycles, found.link_bytes) == (expected.cycles, expected.link_bytes)


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "seq", "heads"), [("flash", 1500, 3), ("two_level", 2048, 5), ("pasa", 1024, 4), ("standard", 600, 2)]
)
def test_fast_methods_equal_des_on_schedules_with_shared_links(
    method: str, causal: bool, name: str, seq: int, heads: int, device: DeviceSpec
) -> None:
    schedule = find_schedule(name, device.family)
    problem = Problem(heads=heads, seq_q=seq, head_dim=128, causal=causal)
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    expected, found = des.simulate(program, device), FAST[method](program, device)
    assert found.cycles == expected.cycles
    assert uses(found) == uses(expected)
    assert found.link_bytes == expected.link_bytes
    assert found.term_cycles == pytest.approx(expected.term_cycles)


def test_a_result_says_by_which_method_it_was_found(device: DeviceSpec) -> None:
    schedule = find_schedule("flash", device.family)
    problem = Problem(heads=1, seq_q=256, head_dim=64)
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    assert METHODS["auto"](program, device).method == "steady"
    assert METHODS["des"](program, device).method == "des"
