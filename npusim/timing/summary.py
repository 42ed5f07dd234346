"""Turns the raw counts of a simulation into a :class:`TimingResult`; shared by all methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.result import QueueUse, Span, TimingResult

if TYPE_CHECKING:
    from npusim.timing.stream import Streams

#: How often each timed operation ran, by its key.
OpCounts = dict[int, int]
#: Cause of a stall: the queue was empty.
NO_INSTRUCTION = "no instruction"


def summarise(
    streams: Streams, method: str, cycles: int, uses: tuple[tuple[QueueUse, ...], ...],
    link_bytes: dict[str, int], counts: OpCounts, spans: tuple[Span, ...],
) -> TimingResult:  # fmt: skip
    """Return the result of one simulation."""
    device = streams.device
    terms: dict[str, float] = {}
    for index, count in counts.items():
        for key, part in streams.timed_op(index).terms:
            terms[key] = terms.get(key, 0.0) + part * count
    launch = float(device.timed_launch().kernel_overhead_s.value) * len(streams.program.phases)
    return TimingResult(
        method=method,
        cycles=cycles,
        latency_s=launch + device.seconds(cycles),
        launch_s=launch,
        clock_hz=float(device.clock_hz.value),
        queues=uses,
        link_bytes=link_bytes,
        term_cycles=terms,
        operations=sum(u.operations for group in uses for u in group),
        spans=spans,
    )
