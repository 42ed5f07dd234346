"""What a simulation of time returns: cycles, who was busy, who waited for what, what crossed links."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class QueueUse:
    """Busy and waiting cycles of one queue of one core group, and how many operations it ran.

    ``stalls`` maps a cause (``"P ready"``, ``"S free"``, ``"no instruction"``) to cycles.  ``is_pipe``:
    not a queue, but a pipe of a GPU's core that its queues share.
    """

    name: str
    group: int = 0
    busy_cycles: int = 0
    operations: int = 0
    stalls: dict[str, int] = field(default_factory=dict)
    end_cycles: int = 0
    is_pipe: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the timeline of one queue, in cycles from the start of the kernel."""

    group: int
    queue: str
    label: str
    start: int
    end: int
    path: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Approximation:
    """How far an approximate method is from ``des``: measured on a part of the same program.

    ``error`` is the relative difference of the cycles, signed (positive: too slow), on ``sample``
    operations of the same core groups.
    """

    error: float
    sample: int


@dataclass(frozen=True)
class TimingResult:
    """Predicted time of one program on one device.

    ``cycles`` is what the cores take, without the kernel's launch; ``latency_s`` includes it.
    ``queues[group][i]`` is the use of queue i of that core group.  ``bound_cycles`` is the least
    time each unit and each link needs for its work, ``compulsory_bytes`` what has to come from or
    go beyond L2 at least.  ``approximation`` is None where the method is exact.
    """

    method: str
    cycles: int
    latency_s: float
    launch_s: float
    clock_hz: float
    queues: tuple[tuple[QueueUse, ...], ...] = field(repr=False)
    link_bytes: dict[str, int]
    term_cycles: dict[str, float] = field(repr=False)
    operations: int
    bound_cycles: dict[str, int] = field(default_factory=dict)
    compulsory_bytes: int = 0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    approximation: Approximation | None = None
