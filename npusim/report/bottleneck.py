"""What a run's counts say: which core group decides the time, which pipe, what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.machines.tracks import track_of
from npusim.report.record import units_of

if TYPE_CHECKING:
    from npusim.timing.result import QueueUse, TimingRecord


@dataclass(frozen=True)
class Bottleneck:
    """The busiest queue of the core group that ends last; shares are of the kernel's cycles."""

    queue: QueueUse
    busy_share: float

    @property
    def pipe(self) -> str:
        """Name of the pipe: ``VECTOR``."""
        return track_of(self.queue.group, self.queue.queue).pipe


def group_ends(timing: TimingRecord) -> dict[int, int]:
    """Return the cycle at which each core group that worked has ended."""
    ends: dict[int, int] = {}
    for queue in timing.uses:
        if queue.operations:
            ends[queue.group] = max(ends.get(queue.group, 0), queue.end_cycles)
    return ends


def deciding_group(timing: TimingRecord) -> int:
    """Return the core group that ends last (the first of several)."""
    ends = group_ends(timing)
    return max(ends, key=lambda group: (ends[group], -group), default=0)


def queues_of(timing: TimingRecord, group: int) -> tuple[QueueUse, ...]:
    """Return the queues of one core group, in the program's order."""
    return tuple(q for q in timing.uses if q.group == group)


def bottleneck(timing: TimingRecord) -> Bottleneck | None:
    """Return the busiest queue of the core group that ends last; None if nothing ran."""
    queues = units_of(queues_of(timing, deciding_group(timing)))
    if not queues or not timing.cycles:
        return None
    busiest = max(queues, key=lambda q: q.busy_cycles)
    return Bottleneck(busiest, busiest.busy_cycles / timing.cycles)


def main_stall(queue: QueueUse) -> tuple[str, int] | None:
    """Return the cause that a queue waits for longest, and its cycles; None if it never waits."""
    if not queue.stalls:
        return None
    return max(queue.stalls.items(), key=lambda item: item[1])


def basis_shares(timing: TimingRecord) -> dict[str, float]:
    """Return which share of all busy cycles rests on constants of each basis, the largest first."""
    total = sum(c.cycles for c in timing.constants)
    if not total:
        return {}
    cycles: dict[str, float] = {}
    for constant in timing.constants:
        cycles[constant.basis] = cycles.get(constant.basis, 0.0) + constant.cycles
    return {b: n / total for b, n in sorted(cycles.items(), key=lambda item: -item[1])}
