"""What the race check costs beside compiling the same programs' bodies, which every run does too."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import SCHEDULES
from npusim.program.ir.check import check
from npusim.program.ir.walk import Templates

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

pytestmark = pytest.mark.bench
REPEATS = 5


def programs(*, causal: bool) -> list[TileProgram]:
    """Return every attention schedule of the 910B2 at 4,096 tokens of five heads."""
    device = load_device("ascend_910b2")
    problem = Problem(heads=5, seq_q=4096, head_dim=128, causal=causal)
    return [
        s.program(problem, build_tiling(s.tiling, {}), device, s.precision(None))
        for (_, family), s in SCHEDULES.items()
        if family == device.family and s.problem is Problem
    ]


def compiled(program: TileProgram) -> None:
    templates = Templates(program)
    for phase in program.phases:
        for block in phase.blocks:
            templates.of(phase, block)


@pytest.mark.parametrize("causal", [False, True])
def test_a_check_stays_near_compiling(causal: bool) -> None:
    budget = load_device("ascend_910b2").flags
    seconds = {"compile": 0.0, "check": 0.0}
    found = programs(causal=causal)
    for program in found:
        fastest = dict.fromkeys(seconds, float("inf"))
        for _ in range(REPEATS):
            for what in seconds:
                start = time.process_time()
                compiled(program) if what == "compile" else check(program, budget)
                fastest[what] = min(fastest[what], time.process_time() - start)
        for what, least in fastest.items():
            seconds[what] += least
    mean = {what: f"{value / len(found) * 1e3:.1f} ms" for what, value in seconds.items()}
    sys.stdout.write(f"\n  causal {causal}, mean of {len(found)} schedules: {mean}")
    assert seconds["check"] < 8 * seconds["compile"]  # measured: 4.6 to 4.9
