"""Values of a schedule for a page: the program as a run builds it, executed without its time."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.evaluate import Choice, References
    from npusim.program.numerics.executor import HeadSource, Observer

__all__ = ["ASCEND", "GPU", "observe", "program_of", "values"]

#: Devices whose mappings the pages use.
ASCEND = "ascend_910b2"
GPU = "h200"


@cache
def _device(name: str) -> DeviceSpec:
    """Return a packaged device; pages ask for the same ones hundreds of times."""
    return load_device(name)


def program_of(
    schedule: str, problem: Problem, precision: str, *, hw: str = ASCEND, tiling: Mapping[str, object] | None = None
) -> TileProgram:
    """Return the tile program of a schedule on a packaged device."""
    device = _device(hw)
    chosen = find_schedule(schedule, device.family)
    fields = build_tiling(chosen.tiling, tiling or {})
    return chosen.program(problem, fields, device, chosen.precision(precision))


def values(
    schedule: str,
    problem: Problem,
    precision: str,
    *,
    hw: str = ASCEND,
    tiling: Mapping[str, object] | None = None,
    source: HeadSource | None = None,
    rows: Choice = "all",
    heads: Choice = "all",
    diagnose: bool = False,
) -> NumericResult:
    """Return bits, errors and events; inputs come from the problem's recipe unless given."""
    program = program_of(schedule, problem, precision, hw=hw, tiling=tiling)
    inputs = _drawn(problem) if source is None else source
    exact = _references(problem, inputs)
    return evaluate(program, problem, inputs, rows=rows, heads=heads, diagnose=diagnose, exact=exact)


@lru_cache(maxsize=2)
def _drawn(problem: Problem) -> HeadSource:
    """Return the inputs of a problem's recipe: precisions are compared on one."""
    return recipe_source(problem)


@lru_cache(maxsize=2)
def _references(_problem: Problem, _source: HeadSource) -> References:
    """Return the known values of the reference on some inputs; callers add to them."""
    return {}


def observe(
    schedule: str,
    problem: Problem,
    precision: str,
    observer: Observer,
    *,
    hw: str = GPU,
    tiling: Mapping[str, object] | None = None,
    source: HeadSource | None = None,
) -> Any:
    """Execute every block with an observer; return the output tensor (batch, heads, rows, dv)."""
    program = program_of(schedule, problem, precision, hw=hw, tiling=tiling)
    inputs = source if source is not None else recipe_source(problem)
    done = execute(program, inputs, observers=(observer,))
    heads = [
        [done.tensors.head(program.tensors["o"], b, h) for h in range(problem.heads)] for b in range(problem.batch)
    ]
    return np.array(heads)
