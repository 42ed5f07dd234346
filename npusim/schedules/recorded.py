"""A recorded launch of a Triton kernel as a schedule: ``calls.npz::k`` (`npusim.ttir.calls`)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.config.device import FAMILIES
from npusim.config.problem import KernelProblem
from npusim.config.tiling import SEARCHED, Tiling, part_of, with_fields
from npusim.errors import SpecError
from npusim.machines.ascend.plan import KernelFields
from npusim.machines.sm.core import GroupFields
from npusim.schedules.define import schedule
from npusim.schedules.triton import (
    AXES,
    EXACT,
    PRECISIONS,
    STAGES,
    TritonPrecision,
    architecture_of,
    exact_launch,
    phase_read,
)
from npusim.ttir.calls import Argument, Call, CallConfiguration, call_of
from npusim.ttir.compiler import compiled_text
from npusim.ttir.draft import plain_name
from npusim.ttir.layout import tensor_of
from npusim.ttir.text import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from npusim.schedules.define import Phases
    from npusim.schedules.registry import Schedule

#: Triton's default of a launch (triton 3.6, CUDAOptions).
WARPS = 4


def load(name: str) -> tuple[Schedule, ...]:
    """Return the schedule that ``calls.npz::k`` names, one a core family; raise `SpecError` where there is none."""
    path = Path(name.partition("::")[0])
    return _load(name, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=64)  # of calls
def _load(name: str, _changed: int) -> tuple[Schedule, ...]:
    call = call_of(name)
    called = plain_name(call.name)
    fields: dict[str, tuple[Any, str]] = {}
    if len(call.configurations) > 1:
        listed = "; ".join(f"{i}: {_said(v)}" for i, v in enumerate(call.configurations))
        fields["config"] = 0, f"configuration of the autotuner, by number ({listed})"
    first = call.configurations[0].options
    defaults = {"warps": first.get("num_warps", WARPS), "stages": first.get("num_stages", STAGES)}
    bases: dict[str, type[Tiling]] = {"nvidia": GroupFields, "cpu": GroupFields, "ascend": KernelFields}
    made = {
        family: with_fields(called.title(), base, fields, defaults if base is GroupFields else {})
        for family, base in bases.items()
    }
    for kind in made.values() if fields else ():
        searched: list[Any] = list(range(len(call.configurations)))
        kind.model_fields["config"].json_schema_extra = {SEARCHED: searched, **part_of("source")}
    schedules: tuple[Schedule, ...] = schedule(
        called,
        partial(phases_of, call),
        precisions=PRECISIONS,
        tiling=made,
        families=tuple(FAMILIES),
        origin=f"{call.path}:{call.line}",
        problem=KernelProblem,
        summary=f"Triton's {called}, as recorded at {call.where}",
    )
    shapes = {"tensors": {n: [*x.shape, x.fmt] for n, x in call.tensors.items()}}
    exact = partial(_exact, call)
    return tuple(
        replace(s, declared=partial(_declared, call, s.declared), shapes=shapes, exact=exact) for s in schedules
    )


def _configuration(call: Call, tiling: Any) -> CallConfiguration:
    """Return the configuration that a tiling has; raise `SpecError` where there is none, or Triton refuses it."""
    number = getattr(tiling, "config", 0)
    if not 0 <= number < len(call.configurations):
        raise SpecError(f"config: {number}; {call.name} has configurations 0 to {len(call.configurations) - 1}")
    if (configuration := call.configurations[number]).refused:
        raise SpecError(configuration.refused)
    return configuration


def _declared(call: Call, declared: Any, tiling: Any, *of: Any) -> Any:
    """Return a tiling with the warps and stages of its configuration, where it names none."""
    tiling = declared(tiling, *of)
    if not isinstance(tiling, GroupFields):
        return tiling
    options = _configuration(call, tiling).options
    own = {"warps": options.get("num_warps", WARPS), "stages": options.get("num_stages", STAGES)}
    return tiling.model_copy(update={n: x for n, x in own.items() if n not in tiling.model_fields_set})


def _said(configuration: CallConfiguration) -> str:
    return " ".join(f"{n}={x}" for n, x in {**configuration.constants, **configuration.options}.items())


def phases_of(call: Call, problem: Any, tiling: Any, p: TritonPrecision, machine: Any) -> Phases:
    """Return the phase of a recorded call in the configuration that the tiling has; raise `SpecError` without one."""
    if sizes := getattr(problem, "sizes", {}):
        raise SpecError(f"problem: {', '.join(sizes)}: a recorded call has its sizes; record the program at others")
    configuration = _configuration(call, tiling)
    options = dict(configuration.options)
    if isinstance(tiling, GroupFields):
        options |= {"num_warps": tiling.warps, "num_stages": tiling.stages or STAGES}
    made = compiled_text(configuration.ttir, architecture_of(machine.device), options)
    place, (arguments, grid) = (call.name, Line(call.path, call.line)), _launched(call, configuration, p)
    return phase_read(made, *place, arguments, grid, problem, tiling, p, machine)


def _launched(
    call: Call, configuration: CallConfiguration, p: TritonPrecision
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the arguments of a call by parameter, and its grid."""
    arguments = {
        n: tensor_of(n, x, is_exact=p.is_exact) if isinstance(x, Argument) else x for n, x in call.arguments.items()
    }
    grid = (*configuration.grid, *(1 for _ in AXES[len(configuration.grid) :]))
    if 0 in grid:
        raise SpecError(f"{call}: a grid without a program: nothing is launched")
    return arguments | dict(configuration.constants), grid


def _exact(call: Call, _problem: object, tiling: Tiling) -> Callable[..., np.ndarray[Any, Any]]:
    configuration = _configuration(call, tiling)
    line = Line(call.path, call.line)
    return exact_launch(configuration.ttir, call.name, line, *_launched(call, configuration, EXACT))
