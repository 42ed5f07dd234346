"""Compiles code for usual runs ahead of time, by small runs, one for each kind of arithmetic."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.program.timing.engine_code import code_of, equal_groups
from npusim.program.timing.mean_field import MeanField
from npusim.program.timing.stream import Streams
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import evaluate_plan, run_request

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Schedule, device and formats of small runs; together these run every kernel that default runs of packaged devices
#: use.
USUAL = (
    ("pasa", "ascend_910b2", "float16"),
    ("flash", "ascend_910b2", "float16"),
    ("flash", "ascend_910b2", "bfloat16"),
    ("flash", "h200", "float16"),
    ("flash", "h200", "bfloat16"),
    ("fp8_attention", "h200", "float8_e4m3fn"),
    ("volta_flash", "v100", "float16"),
    ("tiling_allreduce", "ascend_910b2_x8", "float16"),
)


def run_bits(schedule: str, hw: str, precision: str | None, dtype: str) -> None:
    """Compute bits on a short call, with the schedule's other presets: this compiles all code of a run except the
    engine.
    """
    plan = plan_of(Request(schedule, hw=hw, seq=256, precision=precision, dtype=dtype or None))  # type: ignore[arg-type]
    for name in dict.fromkeys((plan.precision.name, *plan.schedule.beside)):
        preset = replace(plan, precision=plan.schedule.precision(name))
        evaluate_plan(preset, preset.program())


def warm() -> Iterator[tuple[str, int]]:
    """Run usual calls in small sizes, so that their machine code is stored; yield the name of each, and the total
    number.
    """
    count = len(USUAL) + 1
    for schedule, hw, dtype in USUAL:
        is_node = hw.endswith("_x8")
        run_request(Request(schedule, hw=hw, seq=256, dtype=dtype, presets=None if is_node else True))  # type: ignore[arg-type]
        yield f"{schedule} on {hw}, {dtype}", count
    _run_mean_field()
    yield "long causal calls", count


def _run_mean_field() -> None:
    """Run the method that `timing.auto` uses only for long causal calls, on a short call."""
    plan = plan_of(Request("flash", seq=1024, causal=True, numerics=False))
    _, program = plan.schedule.fitted(plan.problem, plan.tiling, plan.device, plan.precision)
    code = code_of(Streams(program, plan.device))
    MeanField(code).result(equal_groups(code))


def run_times() -> None:
    """Run the parts of the engine that a long call needs."""
    run_request(Request("flash", seq=256, numerics=False))
    _run_mean_field()


if __name__ == "__main__":
    if not sys.argv[1:]:
        run_times()
    else:
        run_bits(*sys.argv[1:])
