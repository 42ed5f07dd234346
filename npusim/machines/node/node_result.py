"""Results of a simulation of a node in addition to cycles: parts, exposed communication, closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from npusim.program.timing.timing_result import OverlapRecord, QueueUse, TimingResult

#: The part of a model's time that belongs to no kernel.
OVERHEAD = "framework overhead"


@dataclass(frozen=True, kw_only=True)
class NodeTiming(TimingResult, OverlapRecord):
    """Predicted time of a node program; ``queues[rank]``: the queues of one device.

    ``overlap_s`` is the time in which kernels and collectives overlap; ``running_s`` are the times of kernels and of
    collectives as they ran.  ``alone_s`` is the time of the kernels, in the same parts, on a device without other work
    and without the host's issue.
    """

    overlap_s: float
    running_s: tuple[float, float]
    alone_s: float

    @property
    def compute_s(self) -> float:
        """Time of all kernels without other work."""
        return self.attention_s + self.linear_s


def overlap_efficiency(overlap_s: float, running_s: tuple[float, float]) -> float:
    """Return the share of the shorter of compute and communication that overlaps with the other."""
    shorter = min(running_s)
    return overlap_s / shorter if shorter else 0.0


def folded(parts: Sequence[tuple[NodeTiming, int]], overhead_s: float = 0.0) -> NodeTiming:
    """Return the time of programs that run one after another, each repeated a number of times, and of a framework
    between them.

    Equal layers take equal times: each is simulated once.  Spans belong to the first layer.
    """
    first, clock = parts[0][0], parts[0][0].clock_hz

    def total(name: str) -> float:
        return sum(float(getattr(timing, name)) * count for timing, count in parts)

    def summed(name: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for timing, count in parts:
            for key, value in getattr(timing, name).items():
                totals[key] = totals.get(key, 0) + value * count
        return totals

    cycles = round(total("cycles") + overhead_s * clock)
    names = ("attention_s", "linear_s", "allreduce_s", "exposed_s", "overlap_s", "alone_s", "closed_form_s")
    totals: dict[str, Any] = {name: total(name) for name in names}
    running_s = sum(t.running_s[0] * n for t, n in parts), sum(t.running_s[1] * n for t, n in parts)
    overhead = {OVERHEAD: overhead_s} if overhead_s else {}
    seconds = total("latency_s") + overhead_s
    return replace(
        first,
        cycles=cycles,
        latency_s=seconds,
        times_s=dict.fromkeys(first.times_s, seconds),
        traced_cycles=first.cycles,
        queues=_queues(parts, cycles),
        term_cycles=summed("term_cycles"),
        operations=round(total("operations")),
        link_bytes={k: round(v) for k, v in summed("link_bytes").items()},
        bound_cycles={k: int(v) for k, v in summed("bound_cycles").items()},
        band=max(t.band for t, _ in parts),
        **totals,
        overlap_efficiency=overlap_efficiency(totals["overlap_s"], running_s),
        parts_s={**summed("parts_s"), **overhead},
        running_s=running_s,
    )


def _queues(parts: Sequence[tuple[NodeTiming, int]], cycles: int) -> tuple[tuple[QueueUse, ...], ...]:
    queues: list[dict[str, QueueUse]] = [{} for _ in parts[0][0].queues]
    for timing, count in parts:
        for group, uses in enumerate(timing.queues):
            for use in uses:
                total = queues[group].setdefault(use.queue, QueueUse(use.queue, group, end_cycles=cycles))
                total.busy_cycles += use.busy_cycles * count
                total.operations += use.operations * count
                for cause, waited in use.stalls.items():
                    total.stalls[cause] = total.stalls.get(cause, 0) + waited * count
    return tuple(tuple(uses.values()) for uses in queues)
