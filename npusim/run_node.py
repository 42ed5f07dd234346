"""Runs a node schedule: kernels get their work from ``timing`` or from the node's table.

Beside ``run`` the only place where schedules, timing and nodes meet.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from npusim.errors import SpecError
from npusim.ir.check import check
from npusim.node.kernel import Kernel, KernelTimer, KernelWork, Waves
from npusim.node.machine import femtoseconds
from npusim.node.simulate import simulate
from npusim.run_result import RunResult
from npusim.schedules import find_schedule
from npusim.spec.load import load_device
from npusim.spec.node import LayerProblem, load_node
from npusim.spec.overrides import apply_overrides
from npusim.spec.problem import Problem
from npusim.spec.tiling import Tiling, build_tiling
from npusim.timing import METHODS
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npusim.node.kernel import Child
    from npusim.spec.device import DeviceSpec
    from npusim.spec.kernels import AnyProblem, GemmProblem
    from npusim.spec.node import KernelTimes, NodeSpec
    from npusim.spec.workload import Workload
    from npusim.timing.result import TimingResult

__all__ = ["layer_problem", "run_on_node"]


def run_on_node(
    schedule: str,
    *,
    hw: str | Path | NodeSpec,
    load: Workload,
    problem: AnyProblem | LayerProblem | None = None,
    sizes: Mapping[str, Any] | None = None,
    tiling: Mapping[str, object] | Tiling | None = None,
    precision: str | None = None,
    method: str = "auto",
    trace_groups: Sequence[int] = (0,),
    overrides: Mapping[str, str] | None = None,
) -> RunResult:
    """Predict the time of one node schedule; arguments are those of :func:`npusim.run`.

    Without ``problem`` the workload's layer is shared by its ``tensor_parallel`` devices.  Raises a
    subclass of `NpusimError` that says what is wrong.
    """
    node = load_node(hw) if not hasattr(hw, "drivers") else cast("NodeSpec", hw)
    if overrides:
        node = cast("NodeSpec", apply_overrides(cast("DeviceSpec", node), overrides))
    device = load_device(node.device)
    chosen = find_schedule(schedule, node.family)
    what: Any = problem or layer_problem(load, node, sizes or {})
    fields = tiling if isinstance(tiling, Tiling) else build_tiling(chosen.tiling, tiling or {})
    preset = chosen.precision(precision or _stored(what))
    program = chosen.build(what, fields, cast("DeviceSpec", node), preset)
    check(program, None, thorough=False)
    if method not in METHODS:
        raise SpecError(f"method {method!r}: there are {', '.join(METHODS)}")
    ranks = what.ranks if isinstance(what, LayerProblem) else node.device_count.value
    timer = kernel_timer(node, device, method)
    timing = simulate(program, node, device, timer, ranks=ranks, trace_groups=trace_groups)
    return RunResult(
        name=f"{schedule}-{node.name}-{load.name}", schedule=schedule, precision=preset.name,
        formats=preset.formats(), device=device, workload=load.name, inputs="none", problem=what, tiling=fields,
        program=program, timing=timing, numerics=None, notes=_notes(node, timing.modes),
    )  # fmt: skip


def layer_problem(load: Workload, node: NodeSpec, sizes: Mapping[str, Any]) -> LayerProblem:
    """Return a workload's layer on a node; all devices share it unless the workload says otherwise.

    Raises
    ------
    SpecError
        The heads cannot be divided by the ranks (lists the divisors), or the width is not stated.
    """
    ranks = sizes.get("tensor_parallel") or node.device_count.value
    if load.hidden is None:
        raise SpecError(f"workload {load.name}: hidden: missing; the output projection needs it")
    problem = load.problem(**{**sizes, "tensor_parallel": ranks})
    return LayerProblem(attention=problem, hidden=load.hidden, ranks=ranks)


def _stored(problem: object) -> str:
    """Return the format of partial products: that of the inputs."""
    inner = problem.attention if isinstance(problem, LayerProblem) else problem
    return getattr(inner, "dtype", "float16")


def _notes(node: NodeSpec, modes: Sequence[str]) -> tuple[str, ...]:
    notes = [f"{len(modes)} collectives: {', '.join(dict.fromkeys(modes))}"]
    if node.kernels is not None:
        notes.append(f"kernel times are fitted ({node.name}: kernels), not simulated")
    return tuple(notes)


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
                        times[child] = _simulated(child, device, method)
                known[kernel] = _from_timing(kernel, [times[c] for c in kernel.children], device)
        return known[kernel]

    return timer


def _simulated(child: Child, device: DeviceSpec, method: str) -> TimingResult:
    chosen = find_schedule(child.schedule, device.family)
    fields = build_tiling(chosen.tiling, {})
    program = chosen.program(child.problem, fields, device, chosen.precision())
    return METHODS[method](program, device, trace_groups=())


def _from_timing(
    kernel: Kernel, results: Sequence[TimingResult], device: DeviceSpec
) -> KernelWork:
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
    return KernelWork(femtoseconds(device.seconds(cycles)), femtoseconds(launch), 0, demand)


def _busiest(result: TimingResult) -> dict[str, float]:
    """Return the busy cycles of each kind of core: its busiest pipe, on average over groups."""
    totals: dict[str, float] = defaultdict(float)
    for uses in result.queues:
        for use in uses:
            totals[use.name] += use.busy_cycles / len(result.queues)
    found: dict[str, float] = defaultdict(float)
    for name, used in totals.items():
        kind = name.partition(".")[0].rstrip("0123456789")
        found[kind] = max(found[kind], used)
    return found


def _from_table(
    kernel: Kernel, node: NodeSpec, table: KernelTimes, device: DeviceSpec
) -> KernelWork:
    """Return the work of a kernel from the node's table: equal blocks on the device's cores."""
    assert node.host is not None
    cores = device.core_count(table.core)
    if kernel.role == "attention":
        problems = [cast("Problem", c.problem) for c in kernel.children]
        rows = table.attention.block_rows_count.value
        count = sum(p.batch * p.heads * ceil_div(p.seq_q, rows) for p in problems)
        seconds = sum(p.flops() for p in problems) / count / table.attention.flops_per_s.value
        resident, issue = table.attention.resident_count.value, node.host.attention_issue_s.value
    else:
        product = cast("GemmProblem", kernel.children[0].problem)
        m, n = table.linear.block_m_count.value, table.linear.block_n_count.value
        count = ceil_div(product.m, m) * ceil_div(product.n, n)
        seconds = 2 * m * n * product.k / table.linear.flops_per_s.value
        resident, issue = 1, node.host.linear_issue_s.value
    waves = Waves(count, femtoseconds(seconds), resident, cores)
    alone = ceil_div(count, cores) * waves.block_fs
    return KernelWork(alone, 0, femtoseconds(issue), (), waves)
