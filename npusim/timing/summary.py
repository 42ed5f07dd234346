"""Turns the raw counts of a simulation into a :class:`TimingResult`; shared by all methods."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from npusim.timing.account import account_of
from npusim.timing.link import bytes_per_cycle
from npusim.timing.result import QueueUse, Span, TimingResult
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec, LaunchSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.stream import Streams

#: How often each timed operation ran, by its key.
OpCounts = dict[int, int]
#: Cause of a stall: the queue was empty.
NO_INSTRUCTION = "no instruction"


def summarise(
    streams: Streams, method: str, ends: Sequence[int], uses: tuple[tuple[QueueUse, ...], ...],
    link_bytes: dict[str, int], counts: OpCounts, spans: tuple[Span, ...],
) -> TimingResult:  # fmt: skip
    """Return the result of one simulation; ``ends`` are the cycles at which its phases were over."""
    device, cycles = streams.device, ends[-1]
    terms: dict[str, float] = {}
    work: dict[str, int] = {}
    names = [queue.name for queue in streams.program.queues]
    for index, count in counts.items():
        op = streams.timed_op(index)
        takes = [(streams.pipes[pipe], taken) for pipe, taken in op.pipes]
        for unit, taken in takes or [(names[op.queue], op.occupancy)]:
            work[unit] = work.get(unit, 0) + taken * count
        for key, part in op.terms:
            terms[key] = terms.get(key, 0.0) + part * count
    share = device.sustained(streams.program.flops, device.seconds(cycles)) if cycles else 1.0
    seconds = device.seconds(cycles) / share
    times, stream = times_of(streams.program, device, seconds)
    return TimingResult(
        method=method,
        cycles=cycles,
        latency_s=times["call"],
        launch_s=round(times["call"] - seconds, 15),  # whole femtoseconds
        times_s=times,
        stream_s=stream,
        clock_hz=float(device.clock_hz.value) * share,
        queues=uses,
        link_bytes=link_bytes,
        term_cycles=terms,
        operations=sum(u.operations for group in uses for u in group if not u.is_pipe),
        bound_cycles=_bounds(streams, work, link_bytes),
        compulsory_bytes=streams.costs.residency.compulsory_bytes,
        spans=spans,
        account=account_of(streams, uses, ends),
    )


def times_of(program: TileProgram, device: DeviceSpec, seconds: float) -> tuple[dict[str, float], float]:
    """Return what :func:`launched` says of a program whose cores take ``seconds``."""
    groups = device.group_count.value
    busy = (min(len(phase.blocks), groups) for phase in program.phases)
    return launched(seconds, [(n - 1) / max(1, groups - 1) for n in busy], device.timed_launch())


def launched(core_s: float, shares: Sequence[float], spec: LaunchSpec) -> tuple[dict[str, float], float]:
    """Return the time of each of `KINDS` that is known, and what the launches take of a stream of kernels.

    ``shares``: for each kernel, how many of the core groups work beside the first, 0 to 1.

    The host issues kernels one behind the other and waits once, so that a call of several is held up by
    the slower of host and device.  Where a file states one cost of a launch only, each kernel pays it.
    """
    overhead, kernels = float(spec.kernel_overhead_s.value), len(shares)
    if spec.task_s is None or spec.gap_s is None or spec.host_issue_s is None:
        return {"core": core_s, "call": core_s + overhead * kernels}, overhead * kernels
    one = float(spec.task_s.value)
    every = one if spec.task_all_s is None else float(spec.task_all_s.value)
    gap, issue = float(spec.gap_s.value), float(spec.host_issue_s.value)
    tasks = [one + (every - one) * share for share in shares]
    stream = sum(tasks) + gap * kernels
    behind = stream - tasks[0] - gap if tasks else 0.0  # the call's own launch is that of its first kernel
    return {
        "core": core_s,
        "kernel": core_s + sum(tasks),
        "back_to_back": max(issue * kernels, core_s + stream),
        "call": overhead + max(issue * (kernels - 1), core_s + behind),
    }, stream


def _bounds(streams: Streams, work: dict[str, int], link_bytes: dict[str, int]) -> dict[str, int]:
    """Return the least time each unit and link needs: its work spread evenly, without a wait."""
    groups = streams.device.group_count.value
    units = streams.pipes or [queue.name for queue in streams.program.queues]
    bounds = {unit: ceil_div(work.get(unit, 0), groups) for unit in units}
    for name, size in link_bytes.items():
        rate = bytes_per_cycle(streams.device, name)
        bounds[name] = ceil(size / rate) if size else 0
    return bounds
