"""Work of a node's kernels: from times of their children on one device, or from the table of the node's file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from npusim.errors import SpecError
from npusim.kernels.attention.split_rules import num_splits_heuristic
from npusim.machines.node.node_machine import femtoseconds
from npusim.machines.node.node_program import KernelWork, NodeKernel, Waves
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.node_file import AttentionTimes, HostSpec, LinearTimes, NodeSpec, RoofTimes
    from npusim.config.problem import GemmProblem, Problem
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult


def stated_work(kernel: NodeKernel, node: NodeSpec, device: DeviceSpec, *, has_schedules: bool) -> KernelWork | None:
    """Return a kernel's work as the node's file states it; None if it is simulated.

    ``has_schedules``: whether the schedules of all its children have a mapping on the device's cores.
    """
    table = node.kernels
    if table is None:
        return None
    if kernel.role == "attention" and table.attention is not None:
        if all(cast("Problem", c.problem).seq_q == 1 for c in kernel.children) and table.others is not None:
            return _from_roof(kernel, table.others, device)  # a single query has no block of rows
        return _attention_from_table(kernel, table.attention, *_cores_and_host(node, device))
    if kernel.role == "linear" and table.linear is not None:
        return _linear_from_table(kernel, table.linear, *_cores_and_host(node, device))
    if kernel.role == "decode" and table.decode is not None:
        problem = cast("Problem", kernel.children[0].problem)
        size = problem.kv_bytes()
        start, rate = table.decode.start_s.value, float(table.decode.bytes_per_s.value)
        seconds = float(start) + size / rate
        terms = (("start_s", start / seconds), ("bytes_per_s", 1.0 - start / seconds))
        return _roof(kernel, seconds, size / device.link("hbm").rate, terms, "decode")
    if table.others is not None and not has_schedules:
        return _from_roof(kernel, table.others, device)
    return None


def _from_roof(kernel: NodeKernel, table: RoofTimes, device: DeviceSpec) -> KernelWork:
    """Return the work of kernels without a schedule: the time of the slower of memory and matrix units."""
    problems = [c.problem for c in kernel.children]
    memory = sum(p.bytes_moved() for p in problems) / device.link("hbm").rate
    reached = memory / float(table.memory_factor.value)
    products = sum(p.flops() for p in problems) / table.flops_per_s.value
    key = "memory_factor" if reached >= products else "flops_per_s"
    launch = 0.0 if kernel.is_fused or device.launch is None else float(device.launch.kernel_overhead_s.value)
    work = _roof(kernel, max(reached, products), memory, ((key, 1.0),), "others")
    return replace(work, launch_fs=femtoseconds(launch))


def _roof(
    kernel: NodeKernel, seconds: float, memory_s: float, terms: tuple[tuple[str, float], ...], part: str
) -> KernelWork:
    """Return work that takes ``seconds``, and that uses the device's memory for ``memory_s`` of this time."""
    return KernelWork(
        femtoseconds(seconds),
        0,
        0,
        (("hbm", min(1.0, memory_s / seconds)),),
        terms=tuple((f"node.kernels.{part}.{key}", share) for key, share in terms),
        methods=("stated kernels",),
        bound_fs=femtoseconds(min(seconds, memory_s)),
    )


class SimulatedChild(NamedTuple):
    """A child's program and its time on its device."""

    program: TileProgram
    result: TimingResult


def simulated_work(
    kernel: NodeKernel, children: Sequence[SimulatedChild], node: NodeSpec, device: DeviceSpec, *, is_issued: bool
) -> KernelWork:
    """Return the work of children that are simulated on their device, and the resources that they use.

    The blocks of an attention occupy cores, like the blocks of the node's table: a collective that cores drive waits
    for these blocks, and uses the cores of later blocks. ``is_issued``: the host that the node's file describes issues
    the kernel, whose time is then that of a launch.
    """
    results = [child.result for child in children]
    table, waves, issue_s = node.kernels, tuple[Waves, ...](), 0.0
    if kernel.role == "attention" and table is not None and table.attention is not None:
        core_count, host = _cores_and_host(node, device)
        waves = tuple(w for child in children for w in _simulated_waves(child, core_count))
        issue_s = float(host.attention_issue_s.value) if is_issued else 0.0
    cycles, seconds = sum(r.cycles for r in results), sum(r.cycles / r.clock_hz for r in results)
    first = max(results, key=lambda r: r.stream_s)
    launch, gap = (0.0, 0.0) if kernel.is_fused or issue_s else (first.stream_s, _between(first))
    busy: dict[str, float] = defaultdict(float)
    for result in results:
        for kind, used in _busiest(result).items():
            busy[kind] += used
        hbm_seconds = result.link_bytes.get("hbm", 0) / device.link("hbm").rate
        busy["hbm"] += hbm_seconds * result.clock_hz
    demand = tuple((name, min(1.0, used / cycles)) for name, used in busy.items())
    terms: dict[str, float] = defaultdict(float)
    for result in results:
        for key, part in result.term_cycles.items():
            terms[key] += part
    total = sum(terms.values()) or 1.0
    bound = sum(max(r.bound_cycles.values(), default=0) / r.clock_hz for r in results)
    return KernelWork(
        femtoseconds(seconds),
        femtoseconds(launch),
        femtoseconds(issue_s),
        demand,
        waves,
        terms=tuple((key, part / total) for key, part in terms.items()),
        methods=tuple(sorted({r.method for r in results})),
        bound_fs=femtoseconds(bound),
        band=max(r.band for r in results),
        gap_fs=femtoseconds(gap),
        launches=_launches(gap, device),
    )


def _simulated_waves(child: SimulatedChild, core_count: int) -> Iterator[Waves]:
    """Yield the blocks of each launch of a child, of its simulated time."""
    times = () if child.result.account is None else child.result.account.phases
    for phase, time in zip(child.program.phases, times, strict=bool(times)):
        whole_fs = femtoseconds(time.cycles / child.result.clock_hz)
        yield Waves.of_time(whole_fs, len(phase.blocks), phase.place_count, core_count)


def _between(result: TimingResult) -> float:
    """Return the part of the launches of a stream during which no kernel runs; 0 if the file does not state it."""
    times = result.times_s
    return max(0.0, times["core"] + result.stream_s - times["kernel"]) if "kernel" in times else 0.0


def launch_of_graph(device: DeviceSpec) -> tuple[float, float]:
    """Return the time of a kernel of a graph in addition to its work, and the part of it in which no kernel runs, in
    seconds.

    Both are 0 if a device's file does not state them separately.
    """
    launch = device.launch
    if launch is None or launch.task_s is None or launch.gap_s is None:
        return 0.0, 0.0
    return float(launch.task_s.value) + float(launch.gap_s.value), float(launch.gap_s.value)


def _launches(gap_s: float, device: DeviceSpec) -> int:
    """Return the number of kernels after which there is such a gap."""
    each = device.launch.gap_s if device.launch is not None else None
    return round(gap_s / float(each.value)) if each is not None and each.value and gap_s else 1


def _busiest(result: TimingResult) -> dict[str, float]:
    """Return the busy cycles of each kind of core: its busiest pipe, on average over groups."""
    totals: dict[str, float] = defaultdict(float)
    for uses in result.queues:
        for use in uses:
            totals[use.queue] += use.busy_cycles / len(result.queues)
    busiest: dict[str, float] = defaultdict(float)
    for name, used in totals.items():
        kind = name.partition(".")[0].rstrip("0123456789")
        busiest[kind] = max(busiest[kind], used)
    return busiest


def _attention_from_table(kernel: NodeKernel, table: AttentionTimes, core_count: int, host: HostSpec) -> KernelWork:
    """Return the work of attention as equal blocks on the device's cores."""
    problems = [cast("Problem", c.problem) for c in kernel.children]
    resident, split = table.resident_count.value, table.split

    def blocks(rows: int) -> int:
        return sum(p.batch * p.heads * ceil_div(p.seq_q, rows) for p in problems)

    count, rate, merge_s = blocks(table.block_rows_count.value), float(table.flops_per_s.value), 0.0
    if split is not None:
        tiles = ceil_div(max(p.seq_kv for p in problems), split.block_keys_count.value)
        cut = blocks(split.block_rows_count.value)
        parts = num_splits_heuristic(cut, resident * core_count, tiles, skips_equal=True)
        if parts > 1:
            # The longest part, in complete tiles, determines the time.
            count, merge_s = parts * cut, float(split.merge_s.value)
            rate = float(split.flops_per_s.value) * tiles / (parts * ceil_div(tiles, parts))
    seconds = sum(p.flops() for p in problems) / count / rate
    alone = 1.0 if table.alone_factor is None else float(table.alone_factor.value)
    waves = Waves(count, femtoseconds(seconds), resident, core_count, alone, femtoseconds(merge_s))
    return _in_waves(kernel, waves, host.attention_issue_s.value)


def _linear_from_table(kernel: NodeKernel, table: LinearTimes, core_count: int, host: HostSpec) -> KernelWork:
    """Return the work of a product as equal tiles on the device's cores."""
    product = cast("GemmProblem", kernel.children[0].problem)
    m, n = table.block_m_count.value, table.block_n_count.value
    count = product.count * ceil_div(product.m, m) * ceil_div(product.n, n)
    seconds = 2 * m * n * product.k / table.flops_per_s.value
    return _in_waves(kernel, Waves(count, femtoseconds(seconds), 1, core_count), host.linear_issue_s.value)


def _in_waves(kernel: NodeKernel, waves: Waves, issue_s: float) -> KernelWork:
    return KernelWork(
        waves.whole_fs,
        0,
        femtoseconds(issue_s),
        (),
        (waves,),
        terms=((f"node.kernels.{kernel.role}.flops_per_s", 1.0),),
        methods=("fitted kernels",),
        # every core is assumed to be busy until the end
        bound_fs=waves.block_count * waves.block_fs // waves.core_count,
    )


def _cores_and_host(node: NodeSpec, device: DeviceSpec) -> tuple[int, HostSpec]:
    """Return the number of cores on which the table's blocks run, and what issues their kernels."""
    core_count = device.core_count((node.kernels and node.kernels.core) or "")
    if node.host is None:
        raise SpecError(f"{node.name}: host: missing; kernels in the node's table need it")
    return core_count, node.host
