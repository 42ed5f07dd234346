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

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.stream import Streams

#: How often each timed operation ran, by its key.
OpCounts = dict[int, int]
#: Cause of a stall: the queue was empty.
NO_INSTRUCTION = "no instruction"


def summarise(
    streams: Streams,
    method: str,
    ends: Sequence[int],
    uses: tuple[tuple[QueueUse, ...], ...],
    link_bytes: dict[str, int],
    counts: OpCounts,
    spans: tuple[Span, ...],
) -> TimingResult:
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
    """Return what `DeviceSpec.launched` says of a program whose cores take ``seconds``."""
    return device.launched(seconds, [len(phase.blocks) for phase in program.phases])


def _bounds(streams: Streams, work: dict[str, int], link_bytes: dict[str, int]) -> dict[str, int]:
    """Return the least time each unit and link needs: its work spread evenly, without a wait."""
    groups = streams.device.group_count.value
    units = streams.pipes or [queue.name for queue in streams.program.queues]
    bounds = {unit: ceil_div(work.get(unit, 0), groups) for unit in units}
    for name, size in link_bytes.items():
        rate = bytes_per_cycle(streams.device, name)
        bounds[name] = ceil(size / rate) if size else 0
    return bounds
