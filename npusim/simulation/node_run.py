"""Runs a node schedule: kernels get their work from ``timing`` or from the node's table.

Beside ``run`` the only place where schedules, timing and nodes meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from npusim.config.node import NodeDevice
from npusim.config.problem import CopyProblem, GemmProblem, LayerProblem, ModelProblem, SharedProblem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.ir.check import check
from npusim.node.kernel import CollectiveOp, KernelOp
from npusim.node.result import folded
from npusim.node.simulate import simulate
from npusim.numerics.evaluate import indices
from npusim.schedules import find_schedule
from npusim.schedules.layer import periods
from npusim.simulation.node_bits import operations
from npusim.simulation.node_layer import adapted, layer_bits, layer_problem, model_notes, refuse_long
from npusim.simulation.node_times import kernel_timer, simulated_child
from npusim.simulation.result import RunData
from npusim.timing import METHODS
from npusim.timing.sanity import check_sanity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.node import NodeSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.node.result import NodeTiming
    from npusim.schedules.allreduce import PartialSums
    from npusim.schedules.layer import LayerTiling
    from npusim.schedules.registry import Schedule
    from npusim.simulation.node_layer import Given, NodeBits
    from npusim.simulation.request import Request

US = 1e6  # microseconds a second


def run_on_node(request: Request, given: Given | None = None, bits: NodeBits | None = None) -> RunData:
    """Predict one node schedule; see :func:`npusim.run`.

    Without ``problem`` the workload's layer is shared by its ``tensor_parallel`` devices, or that of
    the tensors ``given``.  ``bits`` says which bits are computed, if any.  Raises a subclass of
    `NpusimError` that says what is wrong.
    """
    r, load = request, request.load()
    device = r.machine()
    machine = device if isinstance(device, NodeDevice) else NodeDevice.alone(device)
    chosen = find_schedule(r.schedule, machine.family)
    is_attention = issubclass(chosen.problem, SharedProblem)
    sizes = r.sizes() if given is None or given.tensors is None else {**r.sizes(), "dtype": None}
    kind = chosen.problem if is_attention else LayerProblem
    layer = r.problem or layer_problem(load, machine.node, sizes, given, cast("type[SharedProblem]", kind))
    keys = layer.seq_kv if r.problem is None and isinstance(layer, SharedProblem) else 0
    layer = adapted(layer, given)
    groups = indices("trace_groups", r.trace_groups, machine.node.device_count.value) if r.trace_groups else ()
    preset = cast("PartialSums", chosen.precision(r.precision or _stored(chosen, layer)))
    what: Any = _problem_of(chosen, layer, machine.node, preset.partial)
    fields = build_tiling(chosen.tiling, r.tiling or {})
    if bits is not None and isinstance(what, SharedProblem):
        refuse_long(what, bits)
    if isinstance(what, ModelProblem):
        program, timing = _model(what, cast("LayerTiling", fields), machine, preset, r.method, groups)
    else:
        program = chosen.build(what, fields, machine, preset)
        check(program)
        timing = time_on_node(program, machine, r.method, groups)
    found, why = layer_bits(program, what, machine, preset.partial, load, given, bits)
    return RunData(
        name=f"{r.schedule}-{machine.node.name}-{r.title(load)}",
        schedule=r.schedule,
        precision=preset.name,
        formats=preset.formats(),
        device=machine,
        workload=r.title(load),
        inputs="none" if found is None or bits is None else bits.inputs(what, given),
        problem=what,
        tiling=fields,
        program=program,
        timing=timing,
        numerics=None if found is None else found.numerics,
        orders=() if found is None else found.orders,
        notes=(*_notes(machine, timing, program, r.method), *model_notes(what, fields, machine, timing), *why),
        asked=r.asked(),
        ignored=load.ignored(keys, r.ignore) if keys and is_attention else (),
    )


def _model(
    what: ModelProblem,
    fields: LayerTiling,
    machine: NodeDevice,
    preset: PartialSums,
    method: str,
    groups: Sequence[int],
) -> tuple[TileProgram, NodeTiming]:
    """Return the layer of which a model has most, and the time of all its layers: each kind is simulated once."""
    listed = periods(what, fields, machine, preset)
    found = []
    for period in listed:
        check(period.program)
        time = time_on_node(period.program, machine, method, groups)
        found.append((time, period.count))
    timing = folded(found, fields.overhead_us / US * what.layers)
    check_sanity(timing)
    most = max(listed, key=lambda p: p.count).program
    return replace(most, flops=sum(p.program.flops * p.count for p in listed)), timing


def time_on_node(
    program: TileProgram, machine: NodeDevice, method: str, trace_groups: Sequence[int] = ()
) -> NodeTiming:
    """Return the time of a node program, its kernels by a named method, checked for sanity.

    Raises
    ------
    SpecError
        There is no such method, or the devices are not all joined.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r}: there are {', '.join(METHODS)}")
    node, device = machine.node, machine.each
    ranks = len(program.phases[0].blocks)
    timer = kernel_timer(node, device, method)
    timing = simulate(program, node, device, timer, ranks=ranks, trace_groups=trace_groups)
    check_sanity(timing)
    return timing


def _problem_of(schedule: Schedule, given: object, node: NodeSpec, fmt: str) -> object:
    """Return the problem of a node schedule: what is given, or the part of a layer that it runs.

    ``fmt`` is the format of the partial sums, which a collective carries.

    Raises
    ------
    SpecError
        What is given is another kind of problem, or a layer for fewer devices than all.
    """
    devices, kind = node.device_count.value, schedule.problem
    if isinstance(given, LayerProblem) and not issubclass(kind, SharedProblem):
        if given.ranks != devices:
            raise SpecError(
                f"tensor_parallel: {given.ranks} ranks, but {schedule.name} runs on all {devices} devices of "
                f"{node.name}; for fewer: -C device_count={given.ranks}"
            )
        if kind is CopyProblem:
            return CopyProblem(bytes=given.rows * given.hidden * get_format(fmt).size_bytes)
        return GemmProblem(m=given.rows, n=given.hidden, k=given.width, dtype=given.dtype)
    if not isinstance(given, kind):
        words = {CopyProblem: "bytes", GemmProblem: "m, n and k"}.get(cast("Any", kind), "a layer of a workload")
        raise SpecError(f"problem: {schedule.name} needs {words}, not a {type(given).__name__}")
    return given


def _stored(schedule: Schedule, problem: object) -> str | None:
    """Return the preset for partial products in the format of the inputs; None: the only one there is."""
    fmt = str(getattr(problem, "dtype", "float16"))
    return fmt if len(schedule.precisions) > 1 else None


def _notes(machine: NodeDevice, timing: NodeTiming, program: TileProgram, method: str) -> tuple[str, ...]:
    """Return what a reader should know of the time: the collectives, and what they hide behind."""
    node, notes = machine.node, list[str]()
    calls = [op.call for op in operations(program) if isinstance(op, CollectiveOp)]
    if calls:
        ways = ", ".join(dict.fromkeys(timing.modes))
        notes.append(
            f"collectives: {len(timing.modes)}, {ways}; alpha-beta form {timing.closed_form_s * US:.1f} us, "
            f"simulated {timing.running_s[1] * US:.1f} us{_issue(timing, US)}"
        )
    if calls and timing.compute_s:
        notes.append(
            f"exposed communication {timing.exposed_s * US:.1f} us, overlap efficiency {timing.overlap_efficiency:.0%}"
        )
    if calls and calls[0].servers > 1:
        notes.append(
            f"{calls[0].servers * len(program.phases[0].blocks)} devices: one server stands for "
            f"{calls[0].servers} equal ones in step, no traffic of others between them"
        )
    if "fitted kernels" in timing.method:
        notes.append(f"kernel times are fitted ({node.name}: kernels), not simulated")
    return (*notes, *_beside(machine, program, method))


def _beside(machine: NodeDevice, program: TileProgram, method: str) -> tuple[str, ...]:
    """Return what our own schedule takes where the node's file states another kernel's time."""
    stated = [op.kernel for op in operations(program) if isinstance(op, KernelOp) and op.kernel.role == "decode"]
    table = machine.node.kernels
    if not stated or table is None or table.decode is None or not machine.each.is_timed:
        return ()
    (child,) = stated[0].children
    problem = cast("Problem", child.problem)
    own = simulated_child(child, machine.node, machine.each, method)
    rate, hbm = problem.kv_bytes() / own.latency_s, machine.each.link("hbm").bytes_per_s.value
    kernel = table.decode.start_s.value + problem.kv_bytes() / table.decode.bytes_per_s.value
    return (
        f"attention of the device: {kernel * US:,.1f} us by the kernel that {machine.node.name} states (fitted); our "
        f"{child.schedule} {own.latency_s * US:,.1f} us, {rate / hbm:.0%} of the memory's bandwidth",
    )


def _issue(timing: NodeTiming, us: float) -> str:
    """Return what the host needs to issue collectives, where its file says so."""
    issue = (timing.allreduce_s - timing.running_s[1]) * us
    return f" after {issue:.1f} us to issue them" if issue > 0.05 else ""
