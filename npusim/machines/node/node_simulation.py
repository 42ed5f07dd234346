"""Time of a node program: every device's queues, kernels and collectives, in integer femtoseconds."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from simpy.core import Environment

from npusim.errors import DeadlockError, ProgramError, SpecError
from npusim.machines.node.collective import CollectiveCall, PlannedCollective, plan_collective
from npusim.machines.node.node_machine import FEMTOSECONDS, Device, Fabric, Host, RunningCollective, femtoseconds
from npusim.machines.node.node_program import CollectiveOp, CopyOp, HostOp, KernelOp, KernelTimer, KernelWork
from npusim.machines.node.node_result import NodeTiming, overlap_efficiency
from npusim.machines.node.topology import Topology
from npusim.program.ir.walk import ResolvedOp, Walker, list_endpoints, producers_of, walk
from npusim.program.timing.timing_result import KINDS, Account, PhaseTime, QueueUse, Span, Work

if TYPE_CHECKING:
    from simpy.events import Event

    from npusim.config.device import DeviceSpec
    from npusim.config.node_file import NodeSpec
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import TileProgram

    Steps = Generator[Event, object, None]

#: Roles of kernels that are attention.
ATTENTION = ("attention", "decode")
#: The part of a time that does not belong to a kernel.
BETWEEN = "between kernels"


def simulate(
    program: TileProgram,
    node: NodeSpec,
    device: DeviceSpec,
    timer: KernelTimer,
    *,
    ranks: int | None = None,
    trace_groups: Collection[int] = (),
    is_graph: bool = False,
) -> NodeTiming:
    """Return the time of a node program on ``ranks`` devices of ``node`` (all by default).

    ``is_graph``: its tasks are nodes of a graph, so that no host issues a collective.

    Raises `SpecError` if the devices are not all joined, a link has no bandwidth, or a collective needs more cores than
    there are; `DeadlockError` if a queue waits for a result that no task ever provides.
    """
    return _Simulation(program, node, device, timer, ranks, frozenset(trace_groups), is_graph=is_graph).result()


@dataclass(slots=True)
class _Entry:
    """One operation in a queue: the time at which the host has issued it, and the number of the collective in which it
    takes part.
    """

    resolved: ResolvedOp
    issued_fs: int
    ordinal: int


class _Counters:
    def __init__(self, env: Environment, count: int) -> None:
        self.env = env
        self.counts = [0] * count
        self._waiters: list[list[tuple[int, Event]]] = [[] for _ in range(count)]

    def reached(self, peer: int, count: int) -> Event | None:
        """Return an event for the moment a counter reaches ``count``; None if the queue has ended."""
        if self.counts[peer] >= count:
            return None
        event = self.env.event()
        self._waiters[peer].append((count, event))
        return event

    def add(self, endpoint: int) -> None:
        """Commit or release one generation."""
        self.counts[endpoint] += 1
        for count, event in list(self._waiters[endpoint]):
            if count <= self.counts[endpoint]:
                self._waiters[endpoint].remove((count, event))
                event.succeed()


class _Simulation:
    def __init__(
        self,
        program: TileProgram,
        node: NodeSpec,
        device: DeviceSpec,
        timer: KernelTimer,
        ranks: int | None,
        trace_groups: frozenset[int],
        *,
        is_graph: bool,
    ) -> None:
        self.program, self.node, self.spec, self.trace_groups = program, node, device, trace_groups
        self.is_graph = is_graph
        self.timer = timer
        self.env = Environment()
        self.topology = Topology(node, ranks)
        self.fabric = Fabric(self.env, self.topology)
        count = self.topology.ranks
        self.devices = [Device(self.env, i, device) for i in range(count)]
        self.host = Host(self.env, node, count)
        self.running: dict[int, RunningCollective] = {}
        self.plans: dict[CollectiveCall, PlannedCollective] = {}
        self.uses = [[QueueUse(q.name, g) for q in program.queues] for g in range(count)]
        self.spans: list[Span] = []
        self.terms: dict[str, float] = {}
        #: Intervals in which device 0 runs kernels, and collectives; and its time by kind of operation.
        self.ran: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.parts_fs: dict[str, int] = {}
        #: Times and cycles of each device's operations, by queue and kind of operation.
        self.work: list[dict[tuple[str, str], list[int]]] = [{} for _ in range(count)]
        self.calls: list[CollectiveCall] = []
        self.kernels: list[tuple[str, KernelWork]] = []
        self.issue_fs = 0
        self.end_fs = 0
        self.stuck: dict[tuple[int, str], str] = {}
        walker = Walker(program)
        self.causes = [str(e) for e in walker.endpoints]
        self.counters = [_Counters(self.env, len(walker.endpoints)) for _ in range(count)]
        for rank in range(count):
            self._deal(rank)

    def _deal(self, rank: int) -> None:
        """Distribute one device's operations to its queues, in program order, as the host issues them."""
        queues: list[list[_Entry]] = [[] for _ in self.program.queues]
        issued = ordinal = 0
        walker = Walker(self.program)
        for phase in self.program.phases:
            for block in phase.blocks_of_group(rank, self.topology.ranks):
                for resolved in walk(walker, phase.body(block)):
                    op = resolved.op
                    if isinstance(op, KernelOp):
                        work = self.timer(op.kernel)
                        issued += work.issue_fs
                        if rank == 0:
                            self.kernels.append((op.kernel.role, work))
                    elif isinstance(op, CollectiveOp):
                        issued += self._issue_fs(op.call)
                        if rank == 0:
                            self.calls.append(op.call)
                    elif not isinstance(op, CopyOp | HostOp):
                        raise ProgramError(f"{op.label}: a node runs kernels, collectives and copies only")
                    queues[resolved.queue].append(_Entry(resolved, issued, ordinal))
                    ordinal += 1
        for index, entries in enumerate(queues):
            self.env.process(self._queue(rank, index, entries))

    def _issue_fs(self, call: CollectiveCall) -> int:
        host = self.node.host
        if host is None or self.is_graph:
            return 0
        events = host.overlap_issue_s.value if call.is_overlapped else 0.0
        return femtoseconds(host.collective_issue_s.value + events)

    def _queue(self, rank: int, index: int, entries: list[_Entry]) -> Steps:
        use, counters, env = self.uses[rank][index], self.counters[rank], self.env
        for entry in entries:
            op = entry.resolved.op
            began = int(env.now)
            if env.now < entry.issued_fs:
                yield env.timeout(entry.issued_fs - int(env.now))
                self._stall(use, "host", began)
            for wait in entry.resolved.waits:
                event = counters.reached(wait.peer, wait.count)
                if event is not None:
                    began = int(env.now)
                    self.stuck[rank, use.queue] = f"{op.label} waits for {self.causes[wait.endpoint]}"
                    yield event
                    del self.stuck[rank, use.queue]
                    self._stall(use, self.causes[wait.endpoint], began)
            start = int(env.now)
            if isinstance(op, KernelOp):
                yield from self.devices[rank].run_kernel(self.timer(op.kernel))
            elif isinstance(op, CollectiveOp):
                yield from self._collective(rank, entry.ordinal, op.call)
            elif isinstance(op, CopyOp):
                yield from self.host.copy(rank, op.call)
            elif isinstance(op, HostOp):
                yield from self.host.attention(rank, op.call)
            self._book(use, op, start)
            for endpoint in entry.resolved.sets:
                counters.add(endpoint)

    def _collective(self, rank: int, ordinal: int, call: CollectiveCall) -> Steps:
        plan = self._plan(call)
        yield from self.devices[rank].claim(plan)
        if ordinal not in self.running:
            self.running[ordinal] = RunningCollective(self.fabric, self.devices, plan, self.node.between)
        yield from self.running[ordinal].join(rank)
        self.devices[rank].release(plan)

    def _plan(self, call: CollectiveCall) -> PlannedCollective:
        if call not in self.plans:
            plan = plan_collective(self.node, self.topology, call)
            core, engines = plan.driver.core, plan.driver.engine_count.value
            if core is not None and engines > self.spec.core_count(core):
                raise SpecError(
                    f"{self.node.name}: drivers.{call.driver}.engine_count: {engines}, but {self.spec.name} "
                    f"has {self.spec.core_count(core)} {core}"
                )
            self.plans[call] = plan
        return self.plans[call]

    def _stall(self, use: QueueUse, cause: str, began: int) -> None:
        waited = self._cycles(int(self.env.now)) - self._cycles(began)
        use.stalls[cause] = use.stalls.get(cause, 0) + waited

    def _book(self, use: QueueUse, op: TileOp, start: int) -> None:
        now = int(self.env.now)
        first, last = self._cycles(start), self._cycles(now)
        use.busy_cycles += last - first
        use.operations += 1
        use.end_cycles = last
        self.end_fs = max(self.end_fs, now)
        part = op.label.rpartition(" ")[0]
        done = self.work[use.group].setdefault((use.queue, part or op.label), [0, 0])
        done[0] += 1
        done[1] += last - first
        if use.group == 0:
            gap = self.timer(op.kernel).gap_fs if isinstance(op, KernelOp) else 0
            for name, spent in ((part, now - start - gap), *([(BETWEEN, gap)] if gap else [])):
                self.parts_fs[name] = self.parts_fs.get(name, 0) + spent
            if isinstance(op, KernelOp | CollectiveOp):
                self.ran[isinstance(op, CollectiveOp)].append((start, now))
        for key, share in self._terms(op):
            self.terms[key] = self.terms.get(key, 0.0) + share * (last - first)
        if use.group in self.trace_groups:
            self.spans.append(Span(use.group, use.queue, op.label, first, last))

    def _terms(self, op: TileOp) -> tuple[tuple[str, float], ...]:
        if isinstance(op, KernelOp):
            return self.timer(op.kernel).terms
        if isinstance(op, CopyOp | HostOp):
            return self.host.terms(op.call)
        return self._plan(op.call).terms() if isinstance(op, CollectiveOp) else ()

    def _cycles(self, fs: int) -> int:
        """Return cycles of the device clock, rounded down: a point in time is the same cycle for all users."""
        return fs * round(self.spec.clock_hz.value) // FEMTOSECONDS

    def _account(self, cycles: int) -> Account:
        last = max(range(len(self.uses)), key=lambda rank: max(use.end_cycles for use in self.uses[rank]))
        work = (Work(queue, label, times, spent) for (queue, label), (times, spent) in self.work[last].items())
        idle = tuple(use.queue for use in self.uses[last] if not use.operations)
        phase = PhaseTime(self.program.phases[0].name, cycles, idle)
        return Account(last, tuple(work), (phase,), producers_of(list_endpoints(self.program)))

    def result(self) -> NodeTiming:
        self.env.run()
        if self.stuck:
            named = "; ".join(f"device {r} {q}: {w}" for (r, q), w in list(self.stuck.items())[:8])
            raise DeadlockError(f"{self.program.name} is stuck at {self.env.now} fs: {named}")
        clock = float(self.spec.clock_hz.value)
        compute = self.uses[0][0]
        attention = sum(w.whole_fs for role, w in self.kernels if role in ATTENTION)
        others = sum(w.whole_fs for role, w in self.kernels if role not in ATTENTION)
        issue = sum(self._issue_fs(c) for c in self.calls)
        seconds = self.end_fs / FEMTOSECONDS
        plans = [self._plan(call) for call in self.calls]
        begun_s = max((float(p.driver.call_s.value) for p in plans if p.driver.call_s), default=0.0)
        is_alone = not self.kernels
        overlap_s = _common(*self.ran) / FEMTOSECONDS
        running_s = _length(self.ran[0]), _length(self.ran[1])
        return NodeTiming(
            method=_method(work for _, work in self.kernels),
            band=max((work.band for _, work in self.kernels), default=0.0),
            cycles=ceil(seconds * clock),
            latency_s=seconds + begun_s,
            launch_s=begun_s,
            times_s={kind: seconds + (0.0 if kind == "core" else begun_s) for kind in KINDS},
            clock_hz=clock,
            queues=tuple(tuple(uses) for uses in self.uses),
            link_bytes=self._busiest_links(),
            bound_cycles=self._bounds(clock),
            term_cycles=self.terms,
            operations=sum(u.operations for uses in self.uses for u in uses),
            spans=tuple(self.spans),
            account=self._account(ceil(seconds * clock)),
            attention_s=attention / FEMTOSECONDS,
            linear_s=others / FEMTOSECONDS,
            allreduce_s=_length(self.ran[1]) + issue / FEMTOSECONDS,
            parts_s={part: fs / FEMTOSECONDS for part, fs in self.parts_fs.items()},
            overlap_s=overlap_s,
            running_s=running_s,
            overlap_efficiency=overlap_efficiency(overlap_s, running_s),
            exposed_s=seconds - (0 if is_alone else compute.busy_cycles / clock),
            alone_s=sum(w.launch_fs + w.alone_fs for _, w in self.kernels) / FEMTOSECONDS,
            closed_form_s=sum(plan.seconds for plan in plans),
            modes=tuple(f"{p.call.algorithm} by {p.call.driver} ({p.mode_name})" for p in plans),
        )

    def _busiest_links(self) -> dict[str, int]:
        bytes_by_kind: dict[str, int] = {}
        for name, link in self.fabric.links.items():
            kind = name.partition(" ")[0]
            bytes_by_kind[kind] = max(bytes_by_kind.get(kind, 0), link.total_bytes)
        return {**bytes_by_kind, **self.host.link_bytes()}

    def _bounds(self, clock: float) -> dict[str, int]:
        """Return lower bounds of the time: the sum of the kernels, and for each kind of link the time of its bytes."""
        bounds = {
            name: int(size / self.node.links[name].bytes_per_s.value * clock)
            for name, size in self._busiest_links().items()
            if name in self.node.links and self.node.links[name].model != "edges"
        }
        if self.kernels:
            bounds["kernels"] = self._cycles(sum(work.bound_fs for _, work in self.kernels))
        return bounds


def _method(kernels: Iterable[KernelWork]) -> str:
    """Return the method of the times: ``node-des over steady and reserved``."""
    below = sorted({name for work in kernels for name in work.methods})
    return " over ".join(["node-des", *([" and ".join(below)] if below else [])])


def _length(intervals: list[tuple[int, int]]) -> float:
    return sum(end - start for start, end in intervals) / FEMTOSECONDS


def _common(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    """Return the time in which intervals of both lists overlap; the intervals of each list do not overlap."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in some for c, d in others)
