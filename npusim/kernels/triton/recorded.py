"""A recorded launch of a Triton kernel as a schedule: ``calls.npz::k`` (`npusim.kernels.triton.calls`)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.config.problem import KernelProblem
from npusim.config.tiling import BEST, SEARCHED, Field, part_of, with_fields
from npusim.errors import NpusimError, SpecError, one_line
from npusim.kernels.declare.define import schedule
from npusim.kernels.triton import launch_parts, short_kernel_name
from npusim.kernels.triton.calls import Argument, Call, CallConfiguration, call_of
from npusim.kernels.triton.compiler import Compiled, compiled_text
from npusim.kernels.triton.foreign_ttir import check_arguments
from npusim.kernels.triton.kernel_draft import plain_name
from npusim.kernels.triton.launch import (
    AXES,
    EXACT,
    PRECISIONS,
    STAGES,
    TritonPrecision,
    check_read,
    code_of,
    exact_launch,
    options_of,
    phase_read,
    read_as,
    takes_options,
)
from npusim.kernels.triton.shared_memory import check_shared
from npusim.kernels.triton.tensor_axes import tensor_of
from npusim.kernels.triton.ttir_text import Line, read, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.config.tiling import Tiling
    from npusim.kernels.declare.define import Phases
    from npusim.kernels.declare.registry import Schedule
    from npusim.kernels.triton.float64_walk import ExactLaunch

#: Triton's default of a launch (triton 3.6, CUDAOptions).
WARPS = 4
#: Note of a run whose kernel no compiler compiled.
NO_CODE = (
    "{}: registers are an estimate, because no compiler produced the code; multiplications and additions "
    "are fused as nvcc fuses them"
)


def load(name: str) -> tuple[Schedule, ...]:
    """Return the schedule that ``calls.npz::k`` names, one per core family; raise `SpecError` if that call does not
    exist.
    """
    path = Path(launch_parts(name)[0])
    return _load(name, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=64)  # of calls
def _load(name: str, _changed: int) -> tuple[Schedule, ...]:
    call = call_of(name)
    called = short_kernel_name(plain_name(call.name))
    fields, first = dict[str, tuple[object, object]](), call.configurations[0].options
    if len(call.configurations) > 1:
        fields["config"] = int | None, _numbers(call)
    schedules: tuple[Schedule, ...] = schedule(
        called,
        partial(phases_of, call),
        precisions=PRECISIONS,
        tiling=with_fields(called.title(), fields),
        kind="compiled",
        usual=options_of(first.get("num_warps", WARPS), first.get("num_stages", STAGES)),
        origin=f"{call.path}:{call.line}",
        problem=KernelProblem,
        summary=f"{call.language.title() or 'Triton'}'s {called}, as recorded at {call.where}",
    )
    shapes = {"tensors": {n: [*x.shape, x.fmt] for n, x in call.tensors.items()}}
    stated: dict[str, Any] = {"shapes": shapes, "exact": partial(_exact, call), "is_stated": True}
    return tuple(s.changed(declared=partial(_declared, call, s.declared), **stated) for s in schedules)


def _numbers(call: Call) -> Any:
    """Return the tiling field whose value is the number of a configuration."""
    listed = "; ".join(f"{i}: {_said(v)}" for i, v in enumerate(call.configurations))
    return Field(
        default=0,
        json_schema_extra={SEARCHED: list(range(len(call.configurations))), "none": BEST, **part_of("source")},
        description=f"number of the autotuner's configuration ({listed}); {BEST}: the fastest by `npusim tune`",
    )


def _configuration(call: Call, tiling: Any) -> CallConfiguration:
    """Return the configuration of a tiling; raise `SpecError` if there is none, or if Triton refuses it."""
    number = getattr(tiling, "config", 0)
    if number is None or not 0 <= number < len(call.configurations):
        raise SpecError(f"config: {number}; {call.name} has configurations 0 to {len(call.configurations) - 1}")
    if (configuration := call.configurations[number]).refused:
        raise SpecError(configuration.refused)
    return configuration


def _declared(call: Call, declared: Any, tiling: Any, *of: Any) -> Any:
    """Return a tiling with the warps and stages of its configuration, if it names none."""
    tiling = declared(tiling, *of)
    if not takes_options(tiling) or getattr(tiling, "config", 0) is None:
        return tiling
    options = _configuration(call, tiling).options
    own = {"warps": options.get("num_warps", WARPS), "stages": options.get("num_stages", STAGES)}
    return tiling.model_copy(update={n: x for n, x in own.items() if n not in tiling.model_fields_set})


def _said(configuration: CallConfiguration) -> str:
    return " ".join(f"{n}={x}" for n, x in configuration.values.items())


def phases_of(call: Call, problem: Any, tiling: Any, p: TritonPrecision, machine: Any) -> Phases:
    """Return the phase of a recorded call in the configuration of the tiling; raise `SpecError` if the call has no such
    configuration.
    """
    if sizes := getattr(problem, "sizes", {}):
        raise SpecError(
            f"problem: {', '.join(sizes)}: the sizes of a recorded call are fixed; record the program "
            "again with other sizes"
        )
    configuration = _configuration(call, tiling)
    options = dict(configuration.options)
    if takes_options(tiling):
        options |= {"num_warps": tiling.warps, "num_stages": tiling.stages}
    with refusing(Line(call.path, call.line), call.name):  # before a compiler reads the text
        _check(configuration.ttir, call)
    launch = call.name, Line(call.path, call.line), *_launched(call, configuration, p), problem, tiling, p, machine
    result = _compiled(
        call, configuration.ttir, code_of(machine.device), options, lambda text: check_read(text, *launch)
    )
    *before, last = phase_read(result, *launch)
    phase, *more = last if isinstance(last, tuple) else (last,)
    notes = [*configuration.notes, *([NO_CODE.format(call.language)] if call.language and result.fuses else [])]
    phase = replace(phase, notes=(*phase.notes, *notes))
    if len(call.configurations) > 1:
        number, count = call.configurations.index(configuration), len(call.configurations)
        note = f"configuration {number + 1} of {count} (config={number}: {_said(configuration)}); "
        phase = replace(phase, notes=(f"{note}-t config={BEST} uses the fastest by `npusim tune`", *phase.notes))
    return [*before, (phase, *more) if more else phase]


def _check(ttir: str, call: Call) -> None:
    """Raise `SpecError` if TTIR and arguments do not belong to one call, or if a launch reads memory to which it has
    stored.
    """
    function = read(ttir)
    check_arguments(function, call)
    check_shared(function, call)


def _compiled(
    call: Call, ttir: str, architecture: str, options: Mapping[str, int], check: Callable[[str], object]
) -> Compiled:
    """Return Triton's result for the TTIR of a call; only the text if another compiler compiles the code."""
    if not call.language:
        return compiled_text(ttir, architecture, options, check)
    return Compiled(ttir, fuses=bool(architecture), is_foreign=True)


def _launched(
    call: Call, configuration: CallConfiguration, p: TritonPrecision
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the arguments of a call by parameter, and its grid."""
    arguments = {
        n: tensor_of(n, x, is_exact=p.is_exact) if isinstance(x, Argument) else x for n, x in call.arguments.items()
    }
    grid = (*configuration.grid, *(1 for _ in AXES[len(configuration.grid) :]))
    if 0 in grid:
        raise SpecError(f"{call}: the grid has no program, so that nothing is launched")
    return arguments if call.language else arguments | dict(configuration.constants), grid


def _exact(call: Call, problem: KernelProblem, tiling: Tiling) -> ExactLaunch:
    configuration = _configuration(call, tiling)
    line = Line(call.path, call.line)
    return exact_launch(configuration.ttir, call.name, line, *_launched(call, configuration, EXACT), problem)


def unread(call: Call) -> str:
    """Return, in one line, why a recorded call cannot be read as a kernel of tiles; empty if it can.

    Its TTIR is read as for GPUs, for NPUs and in float64, in the first configuration; nothing is computed or timed.  A
    device may still refuse a call that can be read, because of a format or of the sizes of memories.
    """
    if refused := (configuration := call.configurations[0]).refused:
        return " ".join(refused.split())
    try:
        for p in (EXACT, *(listed[0] for listed in PRECISIONS.values())):
            _check(configuration.ttir, call)
            of = _launched(call, configuration, p)
            read_as(configuration.ttir, call.name, Line(call.path, call.line), *of, p)
    except NpusimError as error:
        return one_line(error)
    return ""
