"""Waits for flags of another core that hold up the scalar unit, not their pipe alone (``des`` only)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ir.toy import Toy, fill, front

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import DeadlockError
from npusim.library import find_schedule
from npusim.program.timing import METHODS, des
from timing.programs import device_with, timeline

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

TIMES = {
    "flags__cross_core_issue_cycles": "0",
    "flags__cross_core_latency_cycles": "500",
    "launch__block_dispatch_cycles": "0",
}


def simulate(program: TileProgram, blocks: str) -> TimingResult:
    device = device_with(flags__cross_core_wait_blocks=blocks, **TIMES)
    return des.simulate(program, device, trace_groups=(0,))


def test_what_stands_behind_the_wait_waits_too() -> None:
    """``p`` writes from 0 to 25 and its flag is seen at 525; ``other`` shares the reader's scalar unit."""
    toy = Toy()
    p = toy.queue("p")
    c, other = (toy.queue(n, issuer="one") for n in ("c", "other"))
    ring = toy.ring("S slots", [p], [c], depth=2, flag="counter")
    program = toy.program(
        [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=1), toy.op("x", other, repeats=1)]
    )
    assert (0, "other", 0, 25, "x") in timeline(simulate(program, "pipe"))
    held = timeline(simulate(program, "scalar"))
    assert (0, "c", 525, 550, "r") in held
    assert (0, "other", 525, 550, "x") in held


def test_flags_within_a_core_hold_up_their_pipe_only() -> None:
    toy = Toy()
    p = toy.queue("p")
    c, other = (toy.queue(n, issuer="one") for n in ("c", "other"))
    ring = toy.ring("S", [p], [c], depth=2)
    program = toy.program(
        [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=1), toy.op("x", other, repeats=1)]
    )
    assert timeline(simulate(program, "scalar")) == timeline(simulate(program, "pipe"))


def test_a_scalar_unit_that_waits_for_ever_is_named() -> None:
    """Each scalar unit stands before a wait for what the other would issue behind its own."""
    toy = Toy()
    a, b = (toy.queue(n, issuer="one") for n in "ab")
    c, d = (toy.queue(n, issuer="two") for n in "cd")
    there = toy.ring("there", [d], [a], depth=1, flag="counter")
    back = toy.ring("back", [b], [c], depth=1, flag="counter")
    program = toy.program(
        [
            toy.op("first", a, front(there)),
            toy.op("give", b, fill(back)),
            toy.op("second", c, front(back)),
            toy.op("take", d, fill(there)),
        ]
    )
    assert simulate(program, "pipe").cycles > 0
    with pytest.raises(DeadlockError, match="scalar unit of one: first waits for there ready"):
        simulate(program, "scalar")


@pytest.mark.parametrize("causal", [False, True])
def test_flash_hardly_feels_it_and_auto_takes_the_reference(causal: bool) -> None:
    """Its waits stand before the pipe whose bytes all that is issued behind them needs."""
    schedule = find_schedule("flash", "ascend")
    times = []
    for blocks in ("pipe", "scalar"):
        device = load_device("ascend_910b2", {"flags.cross_core_wait_blocks": blocks})
        problem = Problem(heads=5, seq_q=2048, head_dim=128, causal=causal)
        tiling = build_tiling(schedule.tiling, {"block_kv": 128, "depth": 3})
        program = schedule.program(problem, tiling, device, schedule.precision())
        result = METHODS["auto"](program, device)
        assert (result.method == "des") == (blocks == "scalar")
        times.append(result.cycles)
    assert times[1] == pytest.approx(times[0], rel=0.005)
