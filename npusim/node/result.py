"""What a simulation of a node returns beside cycles: parts, exposed communication, closed form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from npusim.timing.result import QueueUse, TimingResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


#: The line of a model's time that no kernel has.
OVERHEAD = "framework overhead"


@dataclass(frozen=True)
class NodeTiming(TimingResult):
    """Predicted time of a node program; ``queues[rank]`` are those of one device.

    ``attention_s``, ``linear_s`` are the kernels' times alone, one after the other, launch and
    issue included; ``allreduce_s`` is what the collectives took, ``closed_form_s`` what the
    alpha-beta form gives for them.  ``exposed_s`` is the part of the whole in which no kernel runs,
    ``overlap_s`` that in which kernels and collectives run side by side; ``running_s`` are the times
    of kernels and of collectives as they ran.  ``alone_s`` is what the kernels, cut as they are,
    take on a device that does nothing else, without the host's issue.  ``parts_s`` is device 0's time
    by what its operations are called, as they ran: ``attention``, ``upload``, ``cpu``, ...
    """

    attention_s: float = 0.0
    linear_s: float = 0.0
    allreduce_s: float = 0.0
    exposed_s: float = 0.0
    overlap_s: float = 0.0
    running_s: tuple[float, float] = (0.0, 0.0)
    alone_s: float = 0.0
    closed_form_s: float = 0.0
    modes: tuple[str, ...] = field(default=())  #: each collective's, as ``mesh by sdma (stream)``
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Time of all kernels alone."""
        return self.attention_s + self.linear_s

    @property
    def overlap_efficiency(self) -> float:
        """Share of the shorter of compute and communication that runs beside the other one."""
        shorter = min(self.running_s)
        return self.overlap_s / shorter if shorter else 0.0


def folded(parts: Sequence[tuple[NodeTiming, int]], overhead_s: float = 0.0) -> NodeTiming:
    """Return the time of programs one after the other, each so many times, and of a framework between them.

    Equal layers take equal times: each is simulated once.  Spans are those of the first.
    """
    first, clock = parts[0][0], parts[0][0].clock_hz

    def total(name: str) -> float:
        return sum(float(getattr(timing, name)) * count for timing, count in parts)

    def summed(name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for timing, count in parts:
            for key, value in getattr(timing, name).items():
                found[key] = found.get(key, 0) + value * count
        return found

    cycles = round(total("cycles") + overhead_s * clock)
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
        approximation=max((t.approximation for t, _ in parts if t.approximation), key=lambda a: a.band, default=None),
        attention_s=total("attention_s"),
        linear_s=total("linear_s"),
        allreduce_s=total("allreduce_s"),
        exposed_s=total("exposed_s"),
        overlap_s=total("overlap_s"),
        alone_s=total("alone_s"),
        closed_form_s=total("closed_form_s"),
        parts_s={**summed("parts_s"), **overhead},
        running_s=(sum(t.running_s[0] * n for t, n in parts), sum(t.running_s[1] * n for t, n in parts)),
    )


def _queues(parts: Sequence[tuple[NodeTiming, int]], cycles: int) -> tuple[tuple[QueueUse, ...], ...]:
    """Return the use of every device's queues in all programs."""
    found: list[dict[str, QueueUse]] = [{} for _ in parts[0][0].queues]
    for timing, count in parts:
        for group, uses in enumerate(timing.queues):
            for use in uses:
                own = found[group].setdefault(use.queue, QueueUse(use.queue, group, end_cycles=cycles))
                own.busy_cycles += use.busy_cycles * count
                own.operations += use.operations * count
                for cause, waited in use.stalls.items():
                    own.stalls[cause] = own.stalls.get(cause, 0) + waited * count
    return tuple(tuple(uses.values()) for uses in found)
