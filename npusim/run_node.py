"""Runs a node schedule: kernels get their work from ``timing`` or from the node's table.

Beside ``run`` the only place where schedules, timing and nodes meet.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from npusim.config.kernels import CopyProblem, GemmProblem
from npusim.config.node import LayerProblem, NodeDevice, load_node_device
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, ProgramError, SpecError
from npusim.formats import get_format
from npusim.ir.check import check
from npusim.node.kernel import CollectiveOp, Kernel, KernelTimer, KernelWork, Waves
from npusim.node.machine import femtoseconds
from npusim.node.simulate import simulate, worst
from npusim.node_bits import child_program, operations
from npusim.node_layer import adapted, layer_bits, layer_problem, refuse_long
from npusim.request import refuse
from npusim.run_result import RunResult
from npusim.schedules import find_schedule
from npusim.timing import METHODS
from npusim.timing.sanity import check_sanity
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec
    from npusim.config.node import KernelTimes, NodeSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.node.kernel import Child
    from npusim.node.result import NodeTiming
    from npusim.node_layer import Given, NodeBits
    from npusim.request import Request
    from npusim.schedules.allreduce import PartialSums
    from npusim.timing.result import TimingResult

__all__ = ["kernel_timer", "run_on_node", "time_on_node"]


def run_on_node(
    request: Request, given: Given | None = None, bits: NodeBits | None = None
) -> RunResult:
    """Predict one node schedule; see :func:`npusim.run`.

    Without ``problem`` the workload's layer is shared by its ``tensor_parallel`` devices, or that of
    the tensors ``given``.  ``bits`` says which bits are computed, if any.  Raises a subclass of
    `NpusimError` that says what is wrong.
    """
    r, load = request, request.load()
    machine = load_node_device(cast("Any", r.place()), r.overrides)
    node = machine.node
    chosen = find_schedule(r.schedule, machine.family)
    if r.schedule != "tiling_allreduce":
        options = {
            "causal": r.causal, "tensors": given and given.tensors, "seed": given and given.seed,
        }  # fmt: skip
        refuse(options, f"{r.schedule} computes no attention and has no mask")
    sizes = r.sizes() if given is None or given.tensors is None else {**r.sizes(), "dtype": None}
    layer = r.problem or layer_problem(load, node, sizes, given)
    keys = layer.seq_kv if r.problem is None and isinstance(layer, LayerProblem) else 0
    layer = adapted(layer, given)
    preset = cast("PartialSums", chosen.precision(r.precision or _stored(layer)))
    what: Any = _problem_of(r.schedule, layer, node, preset.partial)
    fields = build_tiling(chosen.tiling, r.tiling or {})
    program = chosen.build(what, fields, machine, preset)
    check(program)
    if bits is not None and isinstance(what, LayerProblem):
        refuse_long(what, bits)
    timing = time_on_node(program, machine, r.method, r.trace_groups)
    found, why = layer_bits(program, what, machine, preset.partial, load, given, bits)
    return RunResult(
        name=f"{r.schedule}-{node.name}-{load.name}", schedule=r.schedule, precision=preset.name,
        formats=preset.formats(), device=machine, workload=load.name,
        inputs="none" if found is None or bits is None else bits.inputs(what, given),
        problem=what, tiling=fields, program=program, timing=timing,
        numerics=None if found is None else found.numerics, orders=() if found is None else found.orders,
        notes=(*_notes(node, timing, program), *why), asked=r.asked(),
        ignored=load.ignored(keys, r.ignore) if keys and r.schedule == "tiling_allreduce" else (),
    )  # fmt: skip


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


def _problem_of(schedule: str, given: object, node: NodeSpec, fmt: str) -> object:
    """Return the problem of a node schedule: what is given, or the part of a layer that it runs.

    ``fmt`` is the format of the partial sums, which a collective carries.

    Raises
    ------
    SpecError
        What is given is another kind of problem, or a layer for fewer devices than all.
    """
    devices = node.device_count.value
    if isinstance(given, LayerProblem) and schedule != "tiling_allreduce":
        if given.ranks != devices:
            raise SpecError(
                f"tensor_parallel: {given.ranks} ranks, but {schedule} runs on all {devices} devices of "
                f"{node.name}; for fewer: -C device_count={given.ranks}"
            )
        match schedule:
            case "allreduce":
                size = get_format(fmt).size_bytes
                return CopyProblem(bytes=given.rows * given.hidden * size)
            case "gemm_allreduce":
                return GemmProblem(m=given.rows, n=given.hidden, k=given.width, dtype=given.dtype)
    kinds = {"allreduce": (CopyProblem, "bytes"), "gemm_allreduce": (GemmProblem, "m, n and k")}
    kind, words = kinds.get(schedule, (LayerProblem, "a layer of a workload"))
    if not isinstance(given, kind):
        raise SpecError(f"problem: {schedule} needs {words}, not a {type(given).__name__}")
    return given


def _stored(problem: object) -> str:
    """Return the format of partial products: that of the inputs."""
    return str(getattr(problem, "dtype", "float16"))


def _notes(node: NodeSpec, timing: NodeTiming, program: TileProgram) -> tuple[str, ...]:
    """Return what a reader should know of the time: the collectives, and what they hide behind."""
    us = 1e6  # microseconds a second
    ways = ", ".join(dict.fromkeys(timing.modes))
    notes = [
        f"collectives: {len(timing.modes)}, {ways}; alpha-beta form {timing.closed_form_s * us:.1f} us, "
        f"simulated {timing.running_s[1] * us:.1f} us{_issue(timing, us)}"
    ]
    if timing.compute_s:
        notes.append(
            f"exposed communication {timing.exposed_s * us:.1f} us, overlap efficiency {timing.overlap_efficiency:.0%}"
        )
    calls = [op.call for op in operations(program) if isinstance(op, CollectiveOp)]
    if calls[0].servers > 1:
        notes.append(
            f"{calls[0].servers * len(program.phases[0].blocks)} devices: one server stands for "
            f"{calls[0].servers} equal ones in step, no traffic of others between them"
        )
    if node.kernels is not None:
        notes.append(f"kernel times are fitted ({node.name}: kernels), not simulated")
    return tuple(notes)


def _issue(timing: NodeTiming, us: float) -> str:
    """Return what the host needs to issue collectives, where its file says so."""
    issue = (timing.allreduce_s - timing.running_s[1]) * us
    return f" after {issue:.1f} us to issue them" if issue > 0.05 else ""


def kernel_timer(node: NodeSpec, device: DeviceSpec, method: str) -> KernelTimer:
    """Return what gives a kernel's work: the node's table if it has one, else the device's timing."""
    known: dict[Kernel, KernelWork] = {}
    times: dict[Child, TimingResult] = {}

    def timer(kernel: Kernel) -> KernelWork:
        if kernel not in known:
            if node.kernels is not None:
                known[kernel] = _from_table(kernel, node, node.kernels, device)
            else:
                for child in kernel.children:
                    if child not in times:
                        times[child] = _simulated(child, node, device, method)
                known[kernel] = _from_timing(kernel, [times[c] for c in kernel.children], device)
        return known[kernel]

    return timer


def _simulated(child: Child, node: NodeSpec, device: DeviceSpec, method: str) -> TimingResult:
    """Return the time of one child on its device, with the schedule's own tiling and precision."""
    try:
        return METHODS[method](child_program(child, device), device, trace_groups=())
    except NpusimError as error:
        text = f"{node.name}: {child.schedule} on one {device.name}: {error}"
        if isinstance(error, ProgramError):
            text += "; a node's file may state its kernels' times instead (key kernels)"
        raise type(error)(text) from error


def _from_timing(kernel: Kernel, results: Sequence[TimingResult], device: DeviceSpec) -> KernelWork:
    """Return the work of children simulated on their device, and what they use of it."""
    cycles = sum(r.cycles for r in results)
    launch = 0.0 if kernel.is_fused else max(r.launch_s for r in results)
    busy: dict[str, float] = defaultdict(float)
    for result in results:
        for kind, used in _busiest(result).items():
            busy[kind] += used
        moved = result.link_bytes.get("hbm", 0) / device.link("hbm").bytes_per_s.value
        busy["hbm"] += moved * device.clock_hz.value
    demand = tuple((name, min(1.0, used / cycles)) for name, used in busy.items())
    terms: dict[str, float] = defaultdict(float)
    for result in results:
        for key, part in result.term_cycles.items():
            terms[key] += part
    total = sum(terms.values()) or 1.0
    bound = sum(max(r.bound_cycles.values(), default=0) for r in results)
    return KernelWork(
        femtoseconds(device.seconds(cycles)), femtoseconds(launch), 0, demand,
        terms=tuple((key, part / total) for key, part in terms.items()),
        methods=tuple(sorted({r.method for r in results})),
        bound_fs=femtoseconds(device.seconds(bound)),
        approximation=worst(r.approximation for r in results),
    )  # fmt: skip


def _busiest(result: TimingResult) -> dict[str, float]:
    """Return the busy cycles of each kind of core: its busiest pipe, on average over groups."""
    totals: dict[str, float] = defaultdict(float)
    for uses in result.queues:
        for use in uses:
            totals[use.queue] += use.busy_cycles / len(result.queues)
    found: dict[str, float] = defaultdict(float)
    for name, used in totals.items():
        kind = name.partition(".")[0].rstrip("0123456789")
        found[kind] = max(found[kind], used)
    return found


def _from_table(
    kernel: Kernel, node: NodeSpec, table: KernelTimes, device: DeviceSpec
) -> KernelWork:
    """Return the work of a kernel from the node's table: equal blocks on the device's cores."""
    if node.host is None:
        raise SpecError(f"{node.name}: host: missing; kernels by the node's table need it")
    cores = device.core_count(table.core)
    if kernel.role == "attention":
        problems = [cast("Problem", c.problem) for c in kernel.children]
        rows = table.attention.block_rows_count.value
        count = sum(p.batch * p.heads * ceil_div(p.seq_q, rows) for p in problems)
        seconds = sum(p.flops() for p in problems) / count / table.attention.flops_per_s.value
        resident, issue = table.attention.resident_count.value, node.host.attention_issue_s.value
    else:
        matmul = cast("GemmProblem", kernel.children[0].problem)
        m, n = table.linear.block_m_count.value, table.linear.block_n_count.value
        count = ceil_div(matmul.m, m) * ceil_div(matmul.n, n)
        seconds = 2 * m * n * matmul.k / table.linear.flops_per_s.value
        resident, issue = 1, node.host.linear_issue_s.value
    waves = Waves(count, femtoseconds(seconds), resident, cores)
    alone = ceil_div(count, cores) * waves.block_fs
    bound = count * waves.block_fs // cores  # every core busy to the end
    constant = (f"node.kernels.{kernel.role}.flops_per_s", 1.0)
    return KernelWork(
        alone,
        0,
        femtoseconds(issue),
        (),
        waves,
        terms=(constant,),
        methods=("fitted kernels",),
        bound_fs=bound,
    )
