"""A walk over stacked matrices touches each of them once, also in a phase without products."""

from __future__ import annotations

import pytest

from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_each_matrix_of_a_stack_is_touched_once(hw: str) -> None:
    sizes = {"heads": 1, "tokens": 256, "key": 64, "value": 64}
    plan = plan_of(Request("ssd", hw=hw, problem=sizes, tiling={"chunk": 64}, numerics=False))
    _, program = plan.schedule.fitted(plan.problem, plan.tiling, plan.device, plan.precision)
    for phase in program.phases:
        regions = [touch.region for touch in phase.footprint(phase.blocks)]
        for name in ("s", "h"):
            if touched := [region.corner for region in regions if region.tensor.name == name]:
                assert len(touched) == len(set(touched))
                assert {batch for batch, *_ in touched} == {0, 1, 2, 3}
