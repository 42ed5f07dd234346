"""The one place where numerics and timing meet: a request in, a `RunData` out."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.node import NodeDevice, is_node
from npusim.config.problem import ModelProblem, Problem
from npusim.config.tiling import Tiling, build_tiling
from npusim.errors import SpecError
from npusim.ir.check import check
from npusim.numerics.evaluate import evaluate, indices
from npusim.numerics.inputs import array_source, recipe_source
from npusim.schedules import find_schedule, is_of_models
from npusim.schedules.plugins import with_origin
from npusim.simulation.arithmetic_uncertainty import row_sum_evidence, spread_over_alternates
from npusim.simulation.estimate import estimate, refuse_beyond
from npusim.simulation.finite_alternatives import finite_choices, reference_of
from npusim.simulation.inputs import chosen_tensors, load_projection
from npusim.simulation.node_layer import Given, NodeBits, given_problem
from npusim.simulation.node_run import run_on_node, time_on_node
from npusim.simulation.request import refuse
from npusim.simulation.result import PresetOutcome, RunData
from npusim.timing import METHODS
from npusim.timing.precompile import compiled_meanwhile
from npusim.timing.prefix import first_spans
from npusim.timing.sanity import check_sanity
from npusim.timing.stream import Streams
from npusim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.workload import Workload
    from npusim.ir.program import TileProgram
    from npusim.numerics.evaluate import Reference, References
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.result import NumericResult
    from npusim.schedules import Schedule
    from npusim.schedules.precision import Precision
    from npusim.simulation.request import Layout, Request
    from npusim.timing.result import TimingResult


def run_request(request: Request, *, is_bare: bool = False) -> RunData:
    """Predict bits and cycles of what is asked for; `npusim.run` describes it.

    ``is_bare``: without bits and timeline, for those who compute bits in a way of their own.
    """
    request.refuse_unread(what_is_there(request, has_bits=is_bare or request.numerics))
    r, load = request, request.load()
    if is_bare:
        r = replace(r, numerics=False, diagnose=False, presets=False, trace_groups=())
    given, scales = chosen_tensors(r)
    as_asked = partial(_as_asked, seed=r.seed, layout=r.layout, scales=scales)
    if is_node(r.place()) or is_of_models(r.schedule):
        some = None if isinstance(r.heads, str) and r.heads in ("sample", "all") else r.heads
        refuse({"heads": some}, "a node's ranks run all heads; leave it out")
        matrix = load_projection(r.tensors, r.prefix, given)
        bits = NodeBits(r.rows, r.limit_s, r.progress, partial(_inputs, r.tensors)) if r.numerics else None
        return run_on_node(r, Given(given, matrix, r.seed, as_asked), bits)
    r = _with_inputs(r)
    plan = _planned(r, load, as_asked(r.problem or _problem(r, load, given)), given)
    chosen, what, device, preset = plan.schedule, plan.problem, plan.device, plan.precision
    refuse_beyond(r.limit_s, estimate(what, plan.tiling, r.method, (r.rows, r.heads) if r.numerics else None))
    tiling, program = chosen.fitted(what, plan.tiling, device, preset)
    return RunData(
        name=_name(chosen.name, r.title(load), what),
        schedule=r.schedule,
        precision=preset.name,
        formats=preset.formats(),
        device=device,
        workload=r.title(load),
        inputs=_inputs(r.tensors, what),
        problem=what,
        ignored=plan.ignored,
        asked=r.asked(),
        tiling=tiling,
        **_computed(replace(plan, tiling=tiling), program),
    )


def what_is_there(request: Request, *, has_bits: bool) -> frozenset[str]:
    """Return which of `npusim.simulation.request.NEEDS` a run has."""
    r = request
    is_one = not (is_node(r.place()) or is_of_models(r.schedule))
    device = r.machine()
    kind = find_schedule(r.schedule, device.family if is_one else "node").problem
    found = {
        "workload": r.problem is None,
        "model": r.problem is None or isinstance(r.problem, Problem),
        "attention": issubclass(kind, Problem),
        "device": is_one,
        "time": not is_one or device.is_timed,
        "tensors": r.tensors is not None,
        "bits": has_bits and kind is not ModelProblem,
        "drawn": r.tensors is None or not is_one,  # a node draws W_o
    }
    return frozenset(need for need, is_there in found.items() if is_there)


def plan_of(request: Request) -> Plan:
    """Return what is asked for, resolved, of one device and without the tensors themselves: what a search builds."""
    r, load = _with_inputs(request), request.load()
    given, scales = chosen_tensors(r)
    return _planned(r, load, _as_asked(r.problem or _problem(r, load, given), r.seed, r.layout, scales), None)


def _with_inputs(request: Request) -> Request:
    """Return the request with the format of inputs that its schedule is for, where nothing says one."""
    if request.dtype is not None or request.problem is not None or request.tensors is not None:
        return request
    device = request.machine()
    return replace(request, dtype=find_schedule(request.schedule, device.family).inputs(device))


def _planned(r: Request, load: Workload, what: AnyProblem, given: Mapping[str, NDArray[Any]] | None) -> Plan:
    device = r.machine()
    chosen = find_schedule(r.schedule, device.family)
    ignored = load.ignored(what.seq_kv, r.ignore) if r.problem is None and isinstance(what, Problem) else ()
    preset = chosen.precision(",".join(filter(None, (r.precision, _as_change(r.arithmetic)))))
    tiling = build_tiling(chosen.tiling, r.chosen_tiling(chosen.tiling))
    return Plan(r, chosen, what, tiling, device, preset, given, ignored)


def _computed(plan: Plan, program: TileProgram) -> dict[str, Any]:
    """Return the parts of a result that are computed: the program as it is run, time and bits."""
    device, r = plan.device, plan.request
    program = warmed(program, device) if r.warm else program
    groups = indices("trace_groups", r.trace_groups, device.group_count.value) if r.trace_groups else ()
    with with_origin(plan.schedule.origin):
        check(program, device.flags)

    def timed() -> TimingResult | None:
        with_origin = (r.method, groups, r.progress, r.window)
        return simulate_program(program, device, *with_origin) if device.is_timed else None

    if not (r.numerics and device.is_timed and r.method != "des"):
        timing, bits, more = timed(), *(_evaluate(plan, program) if r.numerics else (None, {}))
    else:
        with compiled_meanwhile() as wait:
            timing = None if wait else timed()
            bits, more = _evaluate(plan, program)
            if wait:
                wait()
                timing = timed()
    return {
        "program": program,
        "timing": timing,
        "numerics": bits,
        **more,
        "presets": _beside(plan) if r.numerics and r.presets else (),
        "notes": _notes(program, device, bits, timing),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for, resolved: enough to build the program, with another precision too."""

    request: Request
    schedule: Schedule
    problem: AnyProblem
    tiling: Tiling
    device: DeviceSpec
    precision: Precision
    given: Mapping[str, NDArray[Any]] | None
    ignored: tuple[str, ...] = ()
    #: What presets side by side are held against: computed once.
    exact: References = field(default_factory=dict, repr=False, compare=False)

    def source(self, problem: Problem) -> HeadSource:
        """Return the inputs: those given, or those of the recipe."""
        return recipe_source(problem) if self.given is None else array_source(self.given, problem.data)

    def program(self, changes: Mapping[str, str] | None = None) -> TileProgram:
        """Return the program, with fields of the precision changed; raise `SpecError` where it has no such field."""
        precision: Any = self.precision
        if changes and not changes.keys() <= {f.name for f in fields(precision)}:
            raise SpecError(f"precision {precision.name}: has no field {', '.join(changes)}")
        precision = replace(precision, **(changes or {}))
        return self.schedule.program(self.problem, self.tiling, self.device, precision)


def warmed(program: TileProgram, device: DeviceSpec) -> TileProgram:
    """Return the program with its inputs in L2 at its start; raise `SpecError` where they do not fit it."""
    size = sum(t.size_bytes for t in program.tensors.values() if t.role == "input")
    room = device.memory.l2.capacity_bytes.value
    if size > room:
        raise SpecError(
            f"warm: inputs of {format_bytes(size)} do not stay in the L2 of {device.name}, {format_bytes(room)}"
        )
    return replace(program, is_warm=True)


def _as_change(arithmetic: str | None) -> str | None:
    return arithmetic and f"arithmetic={arithmetic}"


def _evaluate(plan: Plan, program: TileProgram) -> tuple[NumericResult | None, dict[str, Any]]:
    """Return the bits of an attention program, and fields of the result that say more of them."""
    problem, r = plan.problem, plan.request
    if not isinstance(problem, Problem):
        return None, {}
    source = plan.source(problem)
    bits = evaluate(
        program,
        problem,
        source,
        rows=r.rows,
        heads=r.heads,
        diagnose=r.diagnose,
        progress=r.progress,
        reference=_reference(plan.schedule, plan.tiling),
        exact=plan.exact,
    )
    spread = spread_over_alternates(bits, problem, source, plan.device, plan.program)
    finite = finite_choices(bits, plan.schedule, plan.tiling, problem, source, plan.device)
    return replace(bits, against=plan.schedule.against), {"spread": spread, "finite": finite}


def _reference(schedule: Schedule, tiling: Tiling) -> Reference:
    """Return what errors are against; what goes wrong in a file's own is with_origin with its place."""
    own = reference_of(schedule, tiling)
    if schedule.reference is None:
        return own

    def right(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], problem: Problem, row: int) -> NDArray[Any]:
        with with_origin(schedule.origin):
            found = np.asarray(own(q, k, v, problem, row), np.float64)
            if found.shape != (len(q), v.shape[1]):
                raise SpecError(f"reference: returned shape {found.shape}, wanted (rows, dv) = {(len(q), v.shape[1])}")
            return found

    return right


def _beside(plan: Plan) -> tuple[PresetOutcome, ...]:
    """Return what the schedule's other presets give on the same rows, with the same matrix arithmetic."""
    found, r = [], plan.request
    for name in plan.schedule.beside:
        if name == plan.precision.name or not isinstance(plan.problem, Problem):
            continue
        arithmetic = getattr(plan.precision, "arithmetic", "")
        other = replace(plan, precision=plan.schedule.precision(",".join(filter(None, (name, _as_change(arithmetic))))))
        program = other.program()
        bits = evaluate(
            program,
            plan.problem,
            plan.source(plan.problem),
            rows=r.rows,
            heads=r.heads,
            reference=_reference(plan.schedule, plan.tiling),
            exact=plan.exact,
        )
        timing = simulate_program(program, plan.device, r.method) if plan.device.is_timed else None
        found.append(PresetOutcome(name, bits.error.rmse, None if timing is None else timing.latency_s * 1e6))
    return tuple(found)


def _as_asked(problem: AnyProblem, seed: int | None, layout: Layout, scales: Mapping[str, float]) -> AnyProblem:
    return _stored(_seeded(problem, seed), layout, scales)


def _stored(problem: AnyProblem, layout: Layout, scales: Mapping[str, float]) -> AnyProblem:
    """Return the problem with its inputs' arrangement in memory and their scales."""
    if not isinstance(problem, Problem) or (layout == "bnsd" and not scales):
        return problem
    return problem.model_copy(update={"layout": "bnsd" if layout == "bnsd" else "bsnd", **scales})


def _seeded(problem: AnyProblem, seed: int | None) -> AnyProblem:
    """Return the problem with another seed for its inputs."""
    if seed is None or not isinstance(problem, Problem):
        return problem
    if "seed" not in type(problem.data).model_fields:
        raise SpecError(f"seed: inputs of kind {problem.data.kind} are not drawn; leave it out")
    if seed < 0:
        raise SpecError(f"seed: {seed} must be at least 0")
    data = problem.data.model_copy(update={"seed": seed})
    return problem.model_copy(update={"data": data})


def _inputs(tensors: object, problem: AnyProblem) -> str:
    """Return what the inputs are, for the record."""
    if isinstance(tensors, str | Path):
        return str(tensors)
    if tensors is not None:
        return "arrays given"
    if isinstance(problem, Problem):
        seed = getattr(problem.data, "seed", None)
        return problem.data.kind if seed is None else f"{problem.data.kind}, seed {seed}"
    return "none"


def _name(schedule: str, title: str, problem: AnyProblem) -> str:
    """Return the name of a run: of its folder, and in comparisons."""
    if isinstance(problem, Problem):
        return f"{schedule}-{title}-{problem.seq_kv}"
    return f"{schedule}-{problem.flops() or 'bytes'}"


def _problem(request: Request, load: Workload, given: Mapping[str, NDArray[Any]] | None) -> Problem:
    if given is None:
        return load.problem(**request.sizes())
    # Tensors are rounded already.
    return given_problem(load, given, {**request.sizes(), "dtype": None})


def simulate_program(
    program: TileProgram,
    device: DeviceSpec,
    method: str,
    trace_groups: Sequence[int] = (),
    progress: Callable[[float], None] | None = None,
    window: tuple[float, float] | None = None,
) -> TimingResult:
    """Return the time of a program by a named method, checked for sanity.

    A run too long for operations one by one has those of its beginning, up to the end of ``window`` (us).

    Raises `SpecError` for an unknown method, `ProgramError` for a result that cannot be.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r}: there are {', '.join(METHODS)}")
    if isinstance(device, NodeDevice):
        return time_on_node(program, device, method, trace_groups)
    with_origin = {"progress": progress} if method == "des" else {}
    streams = Streams(program, device)
    result = METHODS[method](program, device, trace_groups=trace_groups, streams=streams, **with_origin)
    check_sanity(result)
    if not trace_groups or result.spans or not result.operations:
        return result
    until = None if window is None else round(window[1] * 1e-6 * result.clock_hz)
    spans, traced = first_spans(streams, trace_groups, until)
    return replace(result, spans=spans, traced_cycles=traced)


def _notes(
    program: TileProgram, device: DeviceSpec, bits: NumericResult | None, timing: TimingResult | None
) -> tuple[str, ...]:
    notes = list(program.notes)
    if timing and timing.traced_cycles is not None:
        traced = format_duration(timing.traced_cycles / timing.clock_hz)
        notes.append(f"timeline: the first {traced}; --window 0:END goes on to END us")
    if bits is not None:
        notes += [
            f"matrix arithmetic {name} is assumed: no public bit-level source"
            for name, evidence in bits.arithmetic.items()
            if evidence == "assumed"
        ]
        notes += [
            f"order of row sums {order} is assumed: {device.row_sum.source}"
            for order, evidence in row_sum_evidence(bits, device).items()
            if device.row_sum is not None and evidence == "assumed"
        ]
    return tuple(notes)
