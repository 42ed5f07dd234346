"""Results of a simulation of time: cycles, busy units, waits with their causes, traffic of links."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, NamedTuple

from npusim.config.bands import Validated
from npusim.config.json_record import Microseconds, key
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class QueueUse:
    """Busy and waiting cycles of one queue of one core group, and its number of operations.

    ``stalls`` maps a cause (``"P ready"``, ``"S free"``, ``"no instruction"``) to cycles.  ``is_pipe``: it is not a
    queue, but a pipe of a GPU's core that the core's queues share.
    """

    queue: str
    group: int = 0
    busy_cycles: int = 0
    operations: int = 0
    stalls: dict[str, int] = field(default_factory=dict)
    end_cycles: int = 0
    is_pipe: bool = False

    def of_group(self, group: int) -> QueueUse:
        """Return the same use for another core group."""
        did = self.busy_cycles, self.operations, self.stalls, self.end_cycles, self.is_pipe
        return QueueUse(self.queue, group, *did)

    @property
    def pipe(self) -> str:
        """The name without its core: ``VECTOR``."""
        return self.queue.rpartition(".")[2]

    @property
    def main_stall(self) -> tuple[str, int] | None:
        """The cause for which it waits longest, and the cycles; None if it never waits."""
        return max(self.stalls.items(), key=lambda item: item[1], default=None)


def units_of(uses: tuple[QueueUse, ...]) -> tuple[QueueUse, ...]:
    """Return the executing units: the queues, or the pipes if queues share some (then a queue only issues)."""
    return tuple(use for use in uses if use.is_pipe) or uses


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on the timeline of one queue, or of the pipe that executes it, in cycles from the start.

    ``issued_by`` is the queue that issued it, ``done`` the time when that queue can continue; if no pipe is shared,
    both are the timeline's (``""``, ``-1``).
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
    """The number of executions of an operation on a unit, and the cycles that they take without other work on shared
    links or pipes.

    ``unit`` is the queue that issues it; a pipe that queues share has a separate row.
    """

    unit: str
    label: str
    times: int
    cycles: int


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Cycles of a phase, from the end of the previous one; ``idle`` are the queues without work in it."""

    name: str
    cycles: int
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """The time account of the core group that ends last; ``givers[queue][cause]``: the queues for which it waits."""

    group: int
    work: tuple[Work, ...]
    phases: tuple[PhaseTime, ...]
    givers: dict[str, dict[str, tuple[str, ...]]]


@dataclass(frozen=True)
class ConstantRecord:
    """A number of the device file, and the busy cycles of all queues that depend on it."""

    key: str
    basis: str
    cycles: float


@dataclass(frozen=True)
class Roofline:
    """A run's position under the roofline of its matrix units and its device memory.

    ``intensity`` is the number of operations per byte of inputs, and of outputs that do not stay in L2,
    ``moved_intensity`` the number of operations per byte that crossed the memory's link; rates are in operations a
    second.
    """

    intensity: float
    moved_intensity: float
    peak_flops_per_s: float
    memory_bytes_per_s: float
    attained_flops_per_s: float

    @property
    def attainable_flops_per_s(self) -> float:
        """The rate that memory and matrix units allow at the intensity of the compulsory traffic."""
        return min(self.peak_flops_per_s, self.intensity * self.memory_bytes_per_s)

    @property
    def ridge(self) -> float:
        """Intensity above which the matrix units, not memory, are the limit."""
        return self.peak_flops_per_s / self.memory_bytes_per_s

    @property
    def reached(self) -> float:
        """Attained over attainable, 0 to 1."""
        return self.attained_flops_per_s / self.attainable_flops_per_s


@dataclass(frozen=True, kw_only=True)
class OverlapRecord:
    """A node's kernels and collectives, each without the other, and their overlap.

    ``attention_s``, ``linear_s`` are the kernels' times in sequence without overlap, launch and issue included;
    ``allreduce_s`` is the time of the collectives, ``closed_form_s`` their time by the alpha-beta form. ``exposed_s``
    is the part of the time in which no kernel runs, ``overlap_efficiency`` the share of the shorter of compute and
    communication that overlaps with the other one.  ``modes`` are those of each collective, such as ``mesh by sdma
    (stream)``; ``parts_s`` is device 0's time by the name of its operations, as they ran: ``attention``, ``upload``,
    ``cpu``, ...
    """

    attention_s: Annotated[Microseconds, key("attention_us")]
    linear_s: Annotated[Microseconds, key("linear_us")]
    allreduce_s: Annotated[Microseconds, key("allreduce_us")]
    closed_form_s: Annotated[Microseconds, key("closed_form_us")]
    exposed_s: Annotated[Microseconds, key("exposed_us")]
    overlap_efficiency: float
    modes: tuple[str, ...]
    parts_s: Annotated[dict[str, Microseconds], key("parts_us")] = field(default_factory=dict)

    @property
    def parts_us(self) -> dict[str, float]:
        """``parts_s`` in microseconds."""
        return {name: seconds * 1e6 for name, seconds in self.parts_s.items()}


#: Share of the cores' time below which no pipe is the limit: the pipes wait for each other.
BOUND_SHARE = 0.6
#: Share of its bandwidth above which a link is the limit, if no pipe is busier.
LINK_SHARE = 0.8
#: How a link loses a share of its time.
LOST = "lost to reads of parts of lines or to few bytes in flight"


class Limit(NamedTuple):
    """The limit of a time: a link, else a pipe; the busiest pipe if neither limits it.

    ``share``: the used share of the link's rate, or of the cores' time.  ``name``: empty if nothing ran.
    """

    name: str
    share: float
    is_link: bool = False
    is_limit: bool = False

    @property
    def bound(self) -> str:
        """The limit by name; ``latency`` if pipes wait for one another."""
        return self.name if self.is_limit else "latency"

    def __str__(self) -> str:
        return self.name if self.is_limit else f"latency ({self.name})"


#: Kinds of published times: the slowest core's busy time; the profiler's task duration; the time of N calls without
#: waits between them, divided by N; one call with a wait.
KINDS = ("core", "kernel", "back_to_back", "call")


def method_text(method: str, band: float) -> str:
    """Return a method with its accuracy: ``steady, exact``, ``reserved, within 1.3 % of exact``."""
    return f"{method}, approximate: within {band * 100:.1f} % of exact" if band else f"{method}, exact"


@dataclass(frozen=True, kw_only=True)
class TimingRecord:
    """Predicted time of one program on one device, in the form of ``result.json``.

    ``cycles`` is the time of the cores, without launches; ``latency_s`` is the time of a call that the host waits for,
    launch included. ``times_s`` has the same time as each of `KINDS` would measure it, without the kinds that the
    device's file has no numbers for. ``bound_cycles`` is the least time that each unit and each link needs for its
    work, ``link_bytes`` the bytes that a link carried, ``idle_bytes`` those that it could have carried while memory
    answered more slowly (`LOST`), ``compulsory_bytes`` the least traffic beyond L2. ``band``: the exact cycles
    are within ``1 - band`` to ``1 + band`` times ``cycles``; 0 where ``method`` is exact, else derived from a
    difference measured on operations of the same program. ``uses``: those of all core groups' queues; ``overlap`` is
    set on nodes only, ``roofline`` where the device's matrix units are described. ``account`` belongs to the core group
    that ends last, ``validated`` states the errors of such predictions; None in files of earlier versions.
    """

    method: str
    cycles: int
    latency_s: Annotated[Microseconds, key("latency_us")]
    launch_s: Annotated[Microseconds, key("launch_us")]
    operations: int
    flops: int
    bound_cycles: dict[str, int]
    link_bytes: dict[str, int]
    uses: Annotated[tuple[QueueUse, ...], key("queues")] = field(repr=False)
    constants: tuple[ConstantRecord, ...] = field(repr=False)
    overlap: OverlapRecord | None = None
    compulsory_bytes: int = 0
    roofline: Roofline | None = None
    band: float = 0.0
    times_s: Annotated[dict[str, Microseconds], key("times_us")] = field(default_factory=dict)
    account: Account | None = field(default=None, repr=False)
    validated: Validated | None = None
    idle_bytes: dict[str, int] = field(default_factory=dict)

    def clock(self, nominal: float) -> float:
        """Return the clock in Hz of the cores' time; the ``nominal`` clock for files that do not state that time."""
        seconds = self.times_s.get("core", 0.0)
        # the form in which files store the seconds
        return float(f"{self.cycles / seconds:.7g}") if seconds else nominal

    @property
    def latency_us(self) -> float:
        """The call in microseconds, launch included."""
        return self.latency_s * 1e6

    @property
    def launch_us(self) -> float:
        """The launch alone, in microseconds."""
        return self.launch_s * 1e6

    @property
    def core_us(self) -> float:
        """Time of the cores in microseconds, without the launch."""
        return self.latency_us - self.launch_us

    @property
    def times_us(self) -> dict[str, float]:
        """``times_s`` in microseconds."""
        return {kind: seconds * 1e6 for kind, seconds in self.times_s.items()}

    @property
    def group_ends(self) -> dict[int, int]:
        """Cycle at which each core group that has work ends."""
        ends: dict[int, int] = {}
        for use in self.uses:
            if use.operations:
                ends[use.group] = max(ends.get(use.group, 0), use.end_cycles)
        return ends

    @property
    def last_group(self) -> int:
        """The core group that ends last (the first of several) and therefore decides the time."""
        ends = self.group_ends
        return max(ends, key=lambda group: (ends[group], -group), default=0)

    def uses_of(self, group: int) -> tuple[QueueUse, ...]:
        """Return the queues of one core group, in the program's order."""
        return tuple(use for use in self.uses if use.group == group)

    @property
    def busiest(self) -> QueueUse | None:
        """The busiest unit of the core group that ends last; None if nothing ran."""
        units = units_of(self.uses_of(self.last_group)) if self.cycles else ()
        return max(units, key=lambda use: use.busy_cycles, default=None)

    def busy_share(self, use: QueueUse) -> float:
        """Return the share of the cores' cycles in which a unit is busy."""
        return use.busy_cycles / (self.cycles or 1)

    def link_shares(self, bytes_per_s: Mapping[str, float]) -> dict[str, float]:
        """Return, for each link, the share of its ``bytes_per_s`` that it used during the cores' time."""
        return self._link_shares(self.link_bytes, bytes_per_s)

    def idle_shares(self, bytes_per_s: Mapping[str, float]) -> dict[str, float]:
        """Return, for each link that lost any, the share that it lost while memory answered more slowly."""
        return self._link_shares(self.idle_bytes, bytes_per_s)

    def used_shares(self, bytes_per_s: Mapping[str, float]) -> dict[str, float]:
        """Return the share of the cores' time in which each link was busy."""
        lost = self.idle_shares(bytes_per_s)
        return {name: share + lost.get(name, 0.0) for name, share in self.link_shares(bytes_per_s).items()}

    def _link_shares(self, of: Mapping[str, int], bytes_per_s: Mapping[str, float]) -> dict[str, float]:
        seconds = self.core_us * 1e-6
        return {name: size / seconds / bytes_per_s[name] for name, size in of.items()} if seconds else {}

    def limit(self, bytes_per_s: Mapping[str, float]) -> Limit:
        """Return the limit of the time; ``bytes_per_s``: the rate of each link."""
        if (busiest := self.busiest) is None:
            return Limit("", 0.0)
        busy, shares = self.busy_share(busiest), self.used_shares(bytes_per_s)
        link = max(shares, key=lambda name: shares[name], default="")
        if link and shares[link] >= max(LINK_SHARE, busy):
            return Limit(link, shares[link], is_link=True, is_limit=True)
        return Limit(busiest.pipe, busy, is_limit=busy >= BOUND_SHARE)

    @property
    def basis_shares(self) -> dict[str, float]:
        """Shares of all busy cycles that depend on constants of each basis, the largest first."""
        cycles: dict[str, float] = {}
        for constant in self.constants:
            cycles[constant.basis] = cycles.get(constant.basis, 0.0) + constant.cycles
        total = sum(c.cycles for c in self.constants)
        return {b: n / total for b, n in sorted(cycles.items(), key=lambda item: -item[1])} if total else {}


@dataclass(frozen=True, kw_only=True)
class TimingResult(TimingRecord):
    """The result of a simulation: the stored record, and data that only the current process has.

    ``queues[group][i]`` is the use of queue i of that core group; groups of one class share their uses. ``stream_s`` is
    the cost of launches on the device alone, ``term_cycles`` maps keys of the device's file to the busy cycles that
    depend on them.  ``spans`` cover the first ``traced_cycles``, or the complete run if this is None. ``flops``,
    ``uses``, ``constants``, ``overlap``, ``roofline`` and ``validated`` are set in a run
    (`npusim.simulation.run_result.with_evidence`), and empty in results of `npusim.program.timing` itself.
    """

    flops: int = 0
    uses: tuple[QueueUse, ...] = field(default=(), repr=False)
    constants: tuple[ConstantRecord, ...] = field(default=(), repr=False)
    clock_hz: float
    queues: tuple[tuple[QueueUse, ...], ...] = field(repr=False)
    term_cycles: dict[str, float] = field(repr=False)
    stream_s: float = 0.0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    traced_cycles: int | None = None

    def uses_of_groups(self) -> tuple[QueueUse, ...]:
        """Return the use of each queue of each core group; groups of one class share theirs."""
        return tuple([use.of_group(g) for g, group in enumerate(self.queues) for use in group])
