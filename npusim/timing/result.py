"""What a simulation of time returns: cycles, who was busy, who waited for what, what crossed links."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class QueueUse:
    """Busy and waiting cycles of one queue of one core group, and how many operations it ran.

    ``stalls`` maps a cause (``"P ready"``, ``"S free"``, ``"no instruction"``) to cycles.  ``is_pipe``:
    not a queue, but a pipe of a GPU's core that its queues share.
    """

    queue: str
    group: int = 0
    busy_cycles: int = 0
    operations: int = 0
    stalls: dict[str, int] = field(default_factory=dict)
    end_cycles: int = 0
    is_pipe: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the timeline of one queue, or of the pipe it takes, in cycles from the start.

    ``issued_by`` is the queue it came from, ``done`` when that queue can go on; both are the timeline's own
    (``""``, ``-1``) where no pipe is shared.
    """

    group: int
    queue: str
    label: str
    start: int
    end: int
    issued_by: str = ""
    done: int = -1


@dataclass(frozen=True, slots=True)
class Work:
    """How often an operation ran on a unit, and the cycles that takes without others on shared links or pipes.

    ``unit`` is the queue that issues it; a pipe that queues share has a row of its own.
    """

    unit: str
    label: str
    times: int
    cycles: int


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Cycles of a phase, from the end of the one before; ``idle`` are the queues that do nothing in it."""

    name: str
    cycles: int
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """What the core group that ends last does; ``givers[queue][cause]`` are the queues that it waits for."""

    group: int
    work: tuple[Work, ...]
    phases: tuple[PhaseTime, ...]
    givers: dict[str, dict[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Approximation:
    """How far an approximate method can be from ``des``, relative to what it says.

    The exact time lies within ``1 - band`` to ``1 + band`` times the stated one: ``band`` is derived
    from the difference measured on ``sample`` operations of the same program.
    """

    band: float
    sample: int


#: What a published time can be: the slowest core's busy time; the profiler's task duration; N calls that are
#: not waited for, over N; one call that is.
KINDS = ("core", "kernel", "back_to_back", "call")


def method_text(method: str, band: float) -> str:
    """Return a method with what it is worth: ``steady, exact``, ``reserved, within 1.3 % of exact``."""
    return f"{method}, approximate: within {band * 100:.1f} % of exact" if band else f"{method}, exact"


@dataclass(frozen=True)
class TimingResult:
    """Predicted time of one program on one device.

    ``cycles`` is what the cores take, without the kernel's launch; ``latency_s`` is that of a call that is
    waited for, launch included.  ``times_s`` says the same time as each of `KINDS` would measure it, those
    of which the device's file knows nothing left out, and ``stream_s`` what launches cost on the device alone.
    ``queues[group][i]`` is the use of queue i of that core group.  ``bound_cycles`` is the least
    time each unit and each link needs for its work, ``compulsory_bytes`` what has to come from or
    go beyond L2 at least.  ``approximation`` is None where the method is exact.
    ``spans`` are those of the first ``traced_cycles``, of the whole where that is None.
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
    times_s: dict[str, float] = field(default_factory=dict)
    stream_s: float = 0.0
    traced_cycles: int | None = None
    account: Account | None = field(default=None, repr=False)

    @property
    def band(self) -> float:
        """How far the exact cycles can be from ``cycles``, relative to them; 0 where they are exact."""
        return 0.0 if self.approximation is None else self.approximation.band
