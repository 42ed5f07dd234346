"""Differences of runs on a node: the work of kernels comes from ``timing`` or the node's table, and bits are those of
all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.layers import ModelProblem
from npusim.config.load import load_device
from npusim.config.problem import LayerProblem, SharedProblem
from npusim.config.tiling import Tiling
from npusim.errors import NpusimError, ProgramError
from npusim.kernels.declare.define import machine_of
from npusim.kernels.declare.layer_tasks import host_issue_s, layers_on_host, periods
from npusim.kernels.declare.registry import SMALLER
from npusim.library import SCHEDULES
from npusim.machines.node.collective import collective
from npusim.machines.node.kernel_work import SimulatedChild, launch_of_graph, simulated_work, stated_work
from npusim.machines.node.layers_in_memory import longest, memory_plan
from npusim.machines.node.node_machine import femtoseconds
from npusim.machines.node.node_program import ROW_GRAIN, CollectiveOp, HostOp, KernelOp, operations
from npusim.machines.node.node_result import folded
from npusim.machines.node.node_simulation import simulate
from npusim.machines.node.rank_bits import LayerEvaluation, LayerInputs, sample_rows
from npusim.machines.node.reduction import execute, normal_samples
from npusim.program.ir.check import check
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import projection_source
from npusim.program.timing import method_named
from npusim.program.timing.summary import check_sanity
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.evaluation import AttentionSubject, source_of
from npusim.simulation.naming import inputs_of
from npusim.simulation.plan import estimate, plan_of
from npusim.simulation.ranking import steady
from npusim.simulation.request import Request
from npusim.simulation.run_result import ComputedBits, Spread
from npusim.units import format_bytes, format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.node_file import NodeDevice, NodeSpec
    from npusim.config.problem import Problem
    from npusim.kernels.declare.layer_tasks import LayerTiling
    from npusim.kernels.declare.node_define import PartialSums
    from npusim.machines.node.collective import Algorithm
    from npusim.machines.node.node_program import Child, KernelTimer, KernelWork, NodeKernel
    from npusim.machines.node.node_result import NodeTiming
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.evaluate import Choice
    from npusim.program.timing.timing_result import TimingResult
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Groups

US = 1e6  # microseconds per second
#: Estimated seconds above which bits that were not requested are not computed.
SAMPLE_S = 25
NO_BITS = ComputedBits(inputs="none")


class NodeParts:
    """The parts of a run on a node; see `npusim.simulation.simulate.RunParts`."""

    no_bits = NO_BITS

    def estimate(self, plan: Plan) -> Mapping[str, float]:
        """Return the estimate for the bits of the named rows; if a sample would take long, no bits are computed."""
        r, problem = plan.request, plan.problem
        if r.numerics and isinstance(problem, SharedProblem) and r.rows != "sample":
            return {"bits": _seconds(problem, r.rows)}
        return {}

    def timing(
        self,
        plan: Plan,
        program: TileProgram,
        groups: Groups,
        _progress: Callable[[float], None] | None,
        _window: tuple[float, float] | None,
    ) -> NodeTiming:
        """Return the time of the program; for a model, of all layers."""
        if isinstance(plan.problem, ModelProblem):
            return _model(plan, plan.problem, groups)
        return time_on_node(program, plan.device, plan.request.method, groups, is_issued=True)

    def bits(self, plan: Plan, program: TileProgram, _others: object) -> ComputedBits:
        """Return the bits of all ranks, or a note on the reason why they are not computed."""
        return _bits(plan, program)

    def notes(self, plan: Plan, program: TileProgram, _bits: object, timing: TimingResult | None) -> Iterator[str]:
        """Yield notes on the collectives, on kernels whose times are stated, and on a model."""
        problem, machine, timing = plan.problem, cast("NodeDevice", plan.device), cast("NodeTiming", timing)
        yield from _notes(machine, timing, program, plan.request.method)
        if isinstance(problem, ModelProblem):
            yield from _model_notes(problem, cast("LayerTiling", plan.tiling), machine, timing)


# ---------------------------------------------------------------- time


def child_program(child: Child, device: DeviceSpec, whole: Problem | None = None) -> TileProgram:
    """Return a child's tile program on its device; fields that it does not name are chosen as in a run of the child.

    L2 has the state of a stream of kernels: it contains no dirty lines from a benchmark's fill.

    ``whole``: a problem that is computed instead of the child's, with the child's tile.
    """
    l2 = steady(None, device)
    content = "repeated" if l2 and child.is_near else l2
    fields: Any = {"tiling": dict(child.fields), "precision": child.precision or None, "l2": content}
    asked = Request(child.schedule, problem=child.problem, hw=device, numerics=False, **fields)
    plan, program = program_of(plan_of(asked))
    if whole is None:
        return program
    return plan.schedule.fitted(whole, plan.tiling, device, plan.precision)[1]


def has_schedule(name: str, device: DeviceSpec) -> bool:
    """Return whether a schedule has a mapping on a device's cores."""
    schedule = SCHEDULES.get((name, device.family))
    return schedule is not None and not schedule.unsupported(device)


def kernel_timer(
    node: NodeSpec,
    device: DeviceSpec,
    method: str,
    issue_s: float = 0.0,
    *,
    is_issued: bool = False,
    is_graph: bool = False,
) -> KernelTimer:
    """Return the function for a kernel's work: the node's table if it has one; otherwise, or if requested, the device's
    timing.

    Kernels are issued one after another. A launch costs the device's time if its file states this time separately; a
    host takes ``issue_s`` for each kernel, or, with ``is_issued``, the time that the node's file states for a simulated
    attention; else the launch time is a framework's overhead.  In a graph (``is_graph``) no kernel waits for a host: if
    a kernel's table states the host's time, the device's launch time replaces it.
    """
    timed = cache(partial(simulated_child, node=node, device=device, method=method))

    @cache
    def timer(kernel: NodeKernel) -> KernelWork:
        has_schedules = all(has_schedule(child.schedule, device) for child in kernel.children)
        is_named = any(child.is_named for child in kernel.children)
        work = None if is_named else stated_work(kernel, node, device, has_schedules=has_schedules)
        if work is None:
            children = [timed(child) for child in kernel.children]
            work = simulated_work(kernel, children, node, device, is_issued=is_issued)
        if is_graph and work.issue_fs:
            stream, gap = (femtoseconds(s) for s in launch_of_graph(device))
            return replace(work, issue_fs=0, launch_fs=stream, gap_fs=gap)
        if not issue_s or kernel.is_fused:
            return work
        return replace(work, issue_fs=max(work.issue_fs, femtoseconds(issue_s * work.launches)))

    return timer


def simulated_child(child: Child, node: NodeSpec, device: DeviceSpec, method: str) -> SimulatedChild:
    """Return the time of one child on its device, with the schedule's own tiling and precision."""
    try:
        program = child_program(child, device)
        return SimulatedChild(program, method_named(method)(program, device, trace_groups=()))
    except NpusimError as error:
        text = f"{node.name}: {child.schedule} on one {device.name}: {error}"
        if not child.is_named and (isinstance(error, ProgramError) or not has_schedule(child.schedule, device)):
            text += "; the node's file may state the times of its kernels instead (key kernels)"
        raise type(error)(text) from error


def time_on_node(
    program: TileProgram,
    node_device: DeviceSpec,
    method: str,
    trace_groups: Groups = (),
    issue_s: float = 0.0,
    *,
    is_issued: bool = False,
    is_graph: bool = False,
) -> NodeTiming:
    """Return the time of a node program whose kernels are timed by the named method; the result is checked.

    ``trace_groups`` may be ``"last"``: the device that ends last.  ``issue_s``, ``is_issued``, ``is_graph``: see
    `kernel_timer`.

    Raises `SpecError` if there is no such method, or if links do not join all devices.
    """
    method_named(method)
    machine = machine_of(node_device)
    node, device = machine.node, machine.single
    timer = kernel_timer(node, device, method, issue_s, is_issued=is_issued, is_graph=is_graph)
    ranks = len(program.phases[0].blocks)
    traced = range(ranks) if isinstance(trace_groups, str) else trace_groups
    timing = simulate(program, node, device, timer, ranks=ranks, trace_groups=traced, is_graph=is_graph)
    check_sanity(timing)
    if not isinstance(trace_groups, str) or timing.account is None:
        return timing
    return replace(timing, spans=tuple(s for s in timing.spans if s.group == timing.account.group))


def _model(plan: Plan, problem: ModelProblem, groups: Groups) -> NodeTiming:
    """Return the time of all layers of a model: each kind is simulated once."""
    tiling, machine = cast("LayerTiling", plan.tiling), cast("NodeDevice", plan.device)
    times, groups = [], (0,) if isinstance(groups, str) else groups  # all devices are equal
    issue_s, is_graph = host_issue_s(tiling, machine), tiling.launches == "graph"
    for period in periods(problem, tiling, machine, cast("PartialSums", plan.precision)):
        check(period.program)
        time = time_on_node(period.program, machine, plan.request.method, groups, issue_s, is_graph=is_graph)
        times.append((time, period.count))
    timing = folded(times, tiling.overhead_us / US * problem.layers)
    check_sanity(timing)
    return timing


# ---------------------------------------------------------------- bits


def _seconds(problem: SharedProblem, rows: Choice) -> float:
    """Return an estimate of the seconds that the bits of all ranks take."""
    chosen = sample_rows(problem.seq_q) if rows == "sample" else rows
    return estimate(problem.whole, Tiling(), "auto", (chosen, "all"))["bits"]


def _bits(plan: Plan, program: TileProgram) -> ComputedBits:
    """Return the bits of a node program, if there are any, and notes on them."""
    problem, machine = plan.problem, cast("NodeDevice", plan.device)
    calls = [op.call for op in operations(program) if isinstance(op, CollectiveOp)]
    if isinstance(problem, ModelProblem):
        return NO_BITS
    if type(problem) is SharedProblem:
        return ComputedBits(_attention_bits(plan, problem, program))
    if not calls or calls[0].kind != "allreduce":
        return NO_BITS
    ranks, fmt, algorithm = (
        len(program.phases[0].blocks),
        cast("PartialSums", plan.precision).partial,
        calls[0].algorithm,
    )
    names = {c.schedule for op in operations(program) if isinstance(op, KernelOp) for c in op.kernel.children}
    missing = sorted(name for name in names if not has_schedule(name, machine.each))
    if missing or not isinstance(problem, LayerProblem):
        why = f"bits not computed: {', '.join(missing)} has no mapping for {machine.each.family} cores"
        return replace(NO_BITS, notes=(*([why] if missing else []), _sums_note(algorithm, ranks, fmt)))
    if plan.request.rows == "sample" and (seconds := _seconds(problem, "sample")) > SAMPLE_S:
        last = max(0, problem.seq_q - ROW_GRAIN)
        why = (
            f"bits not computed: a sample of all {problem.heads * ranks} heads would take about "
            f"{format_duration(seconds)}; --rows {last}-{problem.seq_q - 1} computes the last rows"
        )
        return replace(NO_BITS, notes=(why,))
    inputs, of_child = _layer_inputs(plan, problem), partial(child_program, device=machine.each)
    layer = LayerEvaluation(program, problem, machine.node, fmt, inputs, of_child, plan.request.rows)
    bits = layer.run(plan.request.progress)
    note = (
        f"{fmt} sums of {ranks} ranks by {algorithm}: relative RMSE {bits.sum_rmse:.2e} against the float64 sums of "
        "the same partial sums"
    )
    return ComputedBits(
        bits.numerics,
        orders=tuple(Spread(order.name, *order.distance()) for order in bits.orders),
        inputs=inputs_of(plan) + ("" if plan.projection is not None else ", W_o normal"),
        notes=(note,),
    )


def _attention_bits(plan: Plan, problem: SharedProblem, program: TileProgram) -> NumericResult:
    """Return the bits of the attention of all heads, from the device's kernel or the host's."""
    op = next(op for op in operations(program) if isinstance(op, KernelOp | HostOp))
    child = op.call.child if isinstance(op, HostOp) else op.kernel.children[0]
    machine, whole = cast("NodeDevice", plan.device), problem.whole
    device = machine.each
    if isinstance(op, HostOp) and machine.node.cpu is not None:
        device = load_device(machine.node.cpu.device)
    kv_heads = plan.workload.kv_heads if plan.tensors is None else plan.tensors["k"].shape[1]
    if whole.heads % kv_heads == 0 and kv_heads < whole.kv_heads:
        whole = whole.model_copy(update={"kv_heads": kv_heads})  # more devices than KV heads
    attention = child_program(child, device, whole)
    r = plan.request
    return evaluate(attention, whole, source_of(plan, AttentionSubject(problem)), rows=r.rows, progress=r.progress)


def _layer_inputs(plan: Plan, layer: LayerProblem) -> LayerInputs:
    """Return the heads and the projection of a layer; they are given, or drawn by the layer's recipe."""
    heads, kv_heads = layer.heads * layer.ranks, layer.kv_heads * layer.ranks
    if plan.tensors is not None:
        kv_heads = plan.tensors["k"].shape[1]
    elif heads == plan.workload.heads:
        kv_heads = plan.workload.kv_heads
    source, matrix, size = source_of(plan, AttentionSubject(layer)), plan.projection, layer.value_head_dim
    if matrix is None:
        return LayerInputs(source, projection_source(layer, heads, layer.hidden), kv_heads)
    return LayerInputs(source, lambda head: matrix[head * size : (head + 1) * size], kv_heads)


def _sums_note(algorithm: Algorithm, ranks: int, fmt: str) -> str:
    """Return the difference between the sum in the collective's real order and float64, on normal samples."""
    inputs = normal_samples(ranks, fmt)
    other = "mesh" if algorithm == "ring" else algorithm
    sums = {
        name: execute(collective("allreduce", name, ranks), inputs, fmt)[0].astype(np.float64)
        for name in ("ring", other)
    }
    exact = np.sum([part.astype(np.float64) for part in inputs], axis=0)
    rmse = float(np.linalg.norm(sums[algorithm] - exact) / np.linalg.norm(exact))
    differing = sums["ring"] != sums[other]
    return (
        f"{fmt} sums of {ranks} normal samples by {algorithm}: relative RMSE {rmse:.2e} against float64; "
        f"{float(np.mean(differing)):.0%} differ in bits between ring and {other}"
    )


# ---------------------------------------------------------------- notes


def _notes(machine: NodeDevice, timing: NodeTiming, program: TileProgram, method: str) -> tuple[str, ...]:
    """Return notes on the time: the collectives, and the compute time that hides them."""
    node, notes = machine.node, list[str]()
    calls = [op.call for op in operations(program) if isinstance(op, CollectiveOp)]
    if calls:
        modes = ", ".join(dict.fromkeys(timing.modes))
        begun = f", plus {timing.launch_s * US:.1f} us for the call of the driver (call_s)" if timing.launch_s else ""
        notes.append(
            f"collectives: {len(timing.modes)}, {modes}; alpha-beta form {format_duration(timing.closed_form_s)}, "
            f"simulated {format_duration(timing.running_s[1])}{_issue(timing)}{begun}"
        )
    if calls and timing.compute_s:
        notes.append(
            f"exposed communication {timing.exposed_s * US:.1f} us, overlap efficiency {timing.overlap_efficiency:.0%}"
        )
    if calls and calls[0].servers > 1:
        notes.append(
            f"{calls[0].servers * len(program.phases[0].blocks)} devices: one server is simulated for "
            f"{calls[0].servers} equal servers that run in step, without other traffic between them"
        )
    if "fitted kernels" in timing.method:
        notes.append(f"kernel times are fitted ({node.name}: kernels), not simulated")
    return (*notes, *_cut_rows(machine.each, program), *_beside(machine, program, method))


def _cut_rows(device: DeviceSpec, program: TileProgram) -> tuple[str, ...]:
    """Return a note on the kernels of rows whose fields are smaller than their defaults because their rows do
    not fit.
    """
    kernels = (op.kernel for op in operations(program) if isinstance(op, KernelOp) and op.kernel.role == "rows")
    children = {(k.label, c): None for k in kernels for c in k.children if has_schedule(c.schedule, device)}
    notes = (f"{label}: {n}" for label, c in children for n in child_program(c, device).notes if SMALLER in n)
    return tuple(dict.fromkeys(notes))


def _beside(machine: NodeDevice, program: TileProgram, method: str) -> tuple[str, ...]:
    """Return a note on the time of npusim's own schedule, if the node's file states the time of another kernel."""
    stated = [op.kernel for op in operations(program) if isinstance(op, KernelOp) and op.kernel.role == "decode"]
    table = machine.node.kernels
    if not stated or table is None or table.decode is None or not machine.each.is_timed:
        return ()
    (child,) = stated[0].children
    problem = cast("Problem", child.problem)
    simulated = simulated_child(child, machine.node, machine.each, method).result
    rate, hbm = problem.kv_bytes() / simulated.latency_s, machine.each.link("hbm").rate
    kernel = table.decode.start_s.value + problem.kv_bytes() / table.decode.bytes_per_s.value
    return (
        f"attention on each device: {kernel * US:,.1f} us with the kernel in {machine.node.name}'s file (fitted); "
        f"simulated {child.schedule}: {simulated.latency_s * US:,.1f} us, {rate / hbm:.0%} of the memory's "
        "bandwidth",
    )


def _issue(timing: NodeTiming) -> str:
    """Return words for the time in which the host issues collectives; empty if the node's file states none."""
    issue = (timing.allreduce_s - timing.running_s[1]) * US
    return f" after {issue:.1f} us to issue them" if issue > 0.05 else ""


def _model_notes(what: ModelProblem, tiling: LayerTiling, machine: NodeDevice, timing: NodeTiming) -> tuple[str, ...]:
    """Return the notes of a model's run: its latency or rate, its memory, the place of K and V."""
    memory, seconds = memory_plan(what, machine, output=tiling.output), timing.latency_s
    rate = f"{format_duration(seconds)} of prefill"
    if what.seq_q == 1:
        rate = f"{what.batch / seconds:,.2f} tokens a second"
    overhead = "no framework overhead (-t overhead_us=...)"
    if tiling.overhead_us:
        overhead = f"{tiling.overhead_us:g} us a layer of framework overhead"
    host = ""
    if tiling.offload != "none":
        host = (
            f"; K and V of {layers_on_host(what, tiling, machine)} layers on the host; the memory of the devices "
            f"holds {memory.gpu_layers} of {what.layers} layers (L_GPU)"
        )
    offloaded = "; ".join(
        f"{longest(what, machine, is_offloaded=is_offloaded):,} {text}"
        for is_offloaded, text in ((False, "on the devices"), (True, "with K and V on the host"))
        if not is_offloaded or memory.host_bytes is not None
    )
    kinds = f" ({what.local_layers} of them local, assumed to be distributed evenly)" if what.local_layers else ""
    return (
        f"{what.layers} layers{kinds}: {rate}, {overhead}; {_weights(what)}",
        *_experts_note(what),
        f"memory of each device: {memory.listed()}; capacity {format_bytes(memory.capacity_bytes)}{host}",
        f"longest prompt in tokens: {offloaded}",
    )


def _weights(what: ModelProblem) -> str:
    """Return the number of a model's parameters: the stated number, the number that follows from the shapes, and the
    number that one token uses.
    """
    weights = what.weights()
    total, active = weights.total - what.copied, weights.active - what.copied
    parts = [f"{(what.parameters or total) / 1e9:.1f} billion parameters"]
    parts += [f"{total / 1e9:.1f} by its shapes"] if what.parameters else []
    parts += [f"{active / 1e9:.1f} used for each token, vocabulary included"] if what.experts else []
    if what.stored is not None:
        parts += [
            f"{what.stored.of} are stored in {what.stored.bits:g} bits; products use them as {what.dtype} (the "
            "conversion is not modelled)"
        ]
    parts += [] if what.vocab else ["without the vocabulary, whose size is not stated"]
    return ", ".join(parts)


def _experts_note(what: ModelProblem) -> tuple[str, ...]:
    """Return the note on the assumed number of experts that a call reads, if there are experts."""
    experts = what.experts
    if experts is None:
        return ()
    touched, rows = experts.touched(what.rows), what.rows
    tokens = f"{rows:,} {plural(rows, 'token')}"
    return (
        f"experts: {experts.per_token} of {experts.count} for each token in {what.layers - what.dense_layers} "
        f"layers; {tokens} of a call {'uses' if rows == 1 else 'use'} {touched} (the expected number if tokens "
        "choose independently, which is assumed), each on all devices",
    )
