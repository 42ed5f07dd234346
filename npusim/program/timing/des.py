"""The reference: a discrete-event simulation with SimPy, every core group and shared link included.

There is one process per queue's engine and one dispatcher per scalar unit, but none per operation or tile.  A scalar
unit issues in program order into bounded queues; an engine takes the head of its queue, waits for its flags, is busy
for its occupancy (stretched while links are shared), and sets its own flags when it and all earlier operations of the
queue have completed.  All times are integer cycles of the clock.

The processes are callbacks of SimPy events, not generators: they resume at half the cost, and an engine whose next
operation can start immediately does so without an event.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from npusim.errors import DeadlockError
from npusim.program.ir.walk import required_count
from npusim.program.timing.gpu_pipes import PIPE_BUSY, Pipes, ProcessorSharing, pipe_uses, span_of
from npusim.program.timing.link import Alarm, SharedLink, bytes_per_cycle
from npusim.program.timing.stream import Issued, Streams, TimedOp
from npusim.program.timing.summary import NO_INSTRUCTION, OpCounts, summarise
from npusim.program.timing.timing_result import QueueUse, Span, TimingResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from simpy.events import Event

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram


def simulate(
    program: TileProgram,
    device: DeviceSpec,
    *,
    trace_groups: Collection[int] = (),
    streams: Streams | None = None,
    progress: Callable[[float], None] | None = None,
) -> TimingResult:
    """Return the time of ``program`` on all core groups of ``device``.

    ``trace_groups`` are the core groups whose operations are stored as spans; ``progress`` receives the share of blocks
    that have been issued.  Raises :class:`~npusim.errors.DeadlockError`, which names every waiting engine, if no event
    is left.
    """
    simulation = _Simulation(streams or Streams(program, device), frozenset(trace_groups))
    simulation.progress = progress
    return simulation.result()


class Counter:
    """One endpoint's counter in one core group: the number of sets, and the times at which each became visible."""

    __slots__ = ("count", "latency", "size", "times", "waiters")

    def __init__(self, latency: int, size: int) -> None:
        self.count = 0
        self.latency = latency
        self.size = size
        self.times = [0] * size
        self.waiters: list[tuple[int, Engine | Dispatcher]] = []


class Engine:
    """One queue with its engine: it starts operations in order, waits for their flags, and sets flags at their ends."""

    __slots__ = (
        "_base",
        "_begun",
        "_causes",
        "_counters",
        "_counts",
        "_finish",
        "_flows",
        "_index",
        "_is_served",
        "_links",
        "_number",
        "_pipes",
        "_port_end",
        "_ready",
        "_server",
        "_sim",
        "_stalled",
        "_start",
        "_started",
        "blocked",
        "depth",
        "entries",
        "op",
        "spans",
        "use",
    )

    def __init__(self, sim: _Simulation, group: int, number: int, depth: int) -> None:
        self._sim, self._number, self._is_served = sim, number, False
        self._counters, self._pipes, self._server = sim.counters[group], sim.pipes[group], sim.servers[group]
        self._causes, self._links, self._counts = sim.causes, sim.links, sim.counts
        self.entries: deque[Issued] = deque()
        self.depth = depth
        self.blocked: Dispatcher | None = None
        self.use = QueueUse(sim.program.queues[number].name, group)
        self.spans = sim.spans if group in sim.trace_groups else None
        self._start = Alarm(sim.env, self._begin)
        self._finish = Alarm(sim.env, self._finished)
        self.op: TimedOp | None = None
        self._base: Sequence[int] = ()
        self._index = self._flows = 0
        self._begun = self._ready = self._started = self._port_end = 0
        self._stalled = False

    @property
    def is_idle(self) -> bool:
        """Whether the queue executes no operation at present."""
        return self.op is None

    @property
    def stuck(self) -> str:
        """The flag that the engine waits for, if any."""
        if self.op is None or not self._stalled:
            return ""
        own = self.op.waits[self._index][0]
        return f"{self.op.label} waits for {self._causes[own]}"

    def reopen(self, now: int) -> None:
        """Begin a new phase: time before ``now`` does not count as a wait for instructions."""
        self._begun = now

    def take(self) -> None:
        """Take the next operation from the queue, if the queue is not empty."""
        entries = self.entries
        if not entries:
            self.op = None
            return
        self.op, self._base = entries.popleft()
        if self.blocked is not None:
            dispatcher, self.blocked = self.blocked, None
            dispatcher.go()
        now = int(self._sim.env._now)
        if now > self._begun:
            stalls = self.use.stalls
            stalls[NO_INSTRUCTION] = stalls.get(NO_INSTRUCTION, 0) + now - self._begun
        self._ready = now
        self._index = 0
        if self._flags():
            self._launch(now)

    def _flags(self) -> bool:
        """Process the waits; return False if a flag is not set yet."""
        assert self.op is not None
        waits, base, counters = self.op.waits, self._base, self._counters
        endpoints = self._sim.streams.endpoints
        for index in range(self._index, len(waits)):
            own, peer, delta = waits[index]
            need = required_count(endpoints[own], base[own] + delta)
            if need <= 0:
                continue
            counter = counters[peer]
            if counter.count < need:
                counter.waiters.append((need, self))
                self._index, self._stalled = index, True
                return False
            visible = counter.times[need % counter.size]
            if visible > self._ready:
                self._stall(own, visible)
        return True

    def _stall(self, own: int, until: int) -> None:
        stalls, cause = self.use.stalls, self._causes[own]
        stalls[cause] = stalls.get(cause, 0) + until - self._ready
        self._ready = until

    def wake(self, visible: int, now: int) -> None:
        """The awaited flag was just set; waits see it from ``visible`` on."""
        assert self.op is not None
        self._stalled = False
        if visible > self._ready:
            self._stall(self.op.waits[self._index][0], visible)
        self._index += 1
        if self._flags():
            self._launch(now)

    def _launch(self, now: int) -> None:
        """Schedule the operation, which starts when the last of its flags is visible.

        The end of the operation is known immediately, unless the operation uses shared links or pipes, which it joins
        when it starts.
        """
        op = self.op
        assert op is not None
        self._started, self._is_served = self._ready, False
        if op.share is None and not op.pipes and not op.flows:
            self._finish.set(self._ready + op.occupancy - now)
        elif self._ready > now:
            self._start.set(self._ready - now)
        else:
            self._begin()

    def _begin(self, _event: Event | None = None) -> None:
        op = self.op
        assert op is not None
        if op.share is not None:
            self._enter()
        elif op.pipes and not self._is_served:
            self._pipes.ask(self._number, self)
        else:
            self._join()

    def _enter(self) -> None:
        op = self.op
        assert op is not None and op.share is not None and self._server is not None
        self._pipes.book(op)
        self._server.join(op.share, self._left)

    def _left(self) -> None:
        """End the work of an operation whose remaining time needs no pipe."""
        assert self.op is not None
        self._pipes.end(self.op, int(self._sim.env._now))
        self._finish.set(self.op.occupancy)

    def served(self, begin: int, now: int) -> None:
        """The operation has the pipes from ``begin`` on."""
        op = self.op
        assert op is not None
        if begin > now:
            stalls = self.use.stalls
            stalls[PIPE_BUSY] = stalls.get(PIPE_BUSY, 0) + begin - now
        self._started, self._is_served = begin, True
        if not op.flows:
            self._finish.set(begin + op.occupancy - now)
        elif begin > now:
            self._start.set(begin - now)
        else:
            self._join()

    def _join(self) -> None:
        op = self.op
        assert op is not None
        self._flows = len(op.flows)
        self._port_end = self._started + op.occupancy
        for name, size in op.flows:
            self._links[name].join(size, self._flow_ended)

    def _flow_ended(self) -> None:
        self._flows -= 1
        if not self._flows:
            self._finish.set(max(0, self._port_end - int(self._sim.env._now)))

    def _finished(self, _event: Event) -> None:
        self._complete(int(self._sim.env._now))
        self.take()

    def _complete(self, now: int) -> None:
        op, use, counters = self.op, self.use, self._counters
        assert op is not None
        self._begun = now
        use.busy_cycles += now - self._started
        use.operations += 1
        counts = self._counts
        counts[op] = counts.get(op, 0) + 1
        if self.spans is not None:
            self.spans.append(span_of(op, self._sim.streams, use, self._started, now))
        done = now + op.latency
        use.end_cycles = max(use.end_cycles, done)
        for own in op.sets:
            counter = counters[own]
            count = counter.count = counter.count + 1
            visible = use.end_cycles + counter.latency
            counter.times[count % counter.size] = visible
            if counter.waiters:
                left = []
                for waiter in counter.waiters:
                    if waiter[0] <= count:
                        waiter[1].wake(visible, now)
                    else:
                        left.append(waiter)
                counter.waiters = left


class Dispatcher:
    """One scalar unit: issues its operations in program order into bounded queues.

    A scalar unit that waits for flags of other cores issues neither the waiting operation nor any later one.
    """

    __slots__ = (
        "_alarm",
        "_counters",
        "_ends",
        "_engines",
        "_env",
        "_pending",
        "_scalar_waits",
        "_stream",
        "_waits_for",
        "name",
    )

    def __init__(self, sim: _Simulation, group: int, issuer: str, stream: Iterator[Issued]) -> None:
        self.name = f"group {group} scalar unit of {issuer}"
        self._stream, self._engines, self._counters = stream, sim.engines[group], sim.counters[group]
        self._scalar_waits, self._ends = sim.streams.scalar_waits, sim.streams.endpoints
        self._pending: Issued | None = None
        self._waits_for = -1
        self._env, self._alarm = sim.env, Alarm(sim.env, lambda _: self.go())

    def start(self, delay: int) -> None:
        """Begin to issue ``delay`` cycles from now."""
        self._alarm.set(delay)

    def stuck(self, causes: Sequence[str]) -> str:
        """Return the flag that the scalar unit itself waits for, if any."""
        if self._pending is None or self._waits_for < 0:
            return ""
        return f"{self.name}: {self._pending[0].label} waits for {causes[self._waits_for]}"

    def wake(self, visible: int, now: int) -> None:
        """The awaited flag was just set; waits see it from ``visible`` on."""
        self._waits_for = -1
        self._alarm.set(max(0, visible - now))

    def _has_seen_flags(self) -> bool:
        """Return whether the flags that stop the scalar unit are visible; if not, it will be notified."""
        assert self._pending is not None
        op, base = self._pending
        now = int(self._env.now)
        for own, peer, delta in op.waits:
            need = required_count(self._ends[own], base[own] + delta)
            if own not in self._scalar_waits or need <= 0:
                continue
            counter = self._counters[peer]
            if counter.count < need:
                self._waits_for = own
                counter.waiters.append((need, self))
                return False
            visible = counter.times[need % counter.size]
            if visible > now:
                self._alarm.set(visible - now)
                return False
        return True

    def go(self) -> None:
        """Issue until a queue is full, an instruction takes time to issue, or the program ends."""
        engines = self._engines
        while True:
            if self._pending is None:
                self._pending = next(self._stream, None)
                if self._pending is None:
                    return
                if self._pending[0].issue_cycles:
                    self._alarm.set(self._pending[0].issue_cycles)
                    return
            if self._scalar_waits and not self._has_seen_flags():
                return
            engine = engines[self._pending[0].queue]
            if len(engine.entries) >= engine.depth:
                engine.blocked = self
                return
            engine.entries.append(self._pending)
            self._pending = None
            if engine.is_idle:
                engine.take()


class _Simulation:
    def __init__(self, streams: Streams, trace_groups: frozenset[int]) -> None:
        from simpy.core import Environment  # not at the top: most runs simulate without SimPy

        self.streams, self.trace_groups = streams, trace_groups
        self.program, self.device = streams.program, streams.device
        self.env = Environment()
        self.links = {
            name: SharedLink(self.env, name, bytes_per_cycle(self.device, name)) for name in self.device.links
        }
        self.causes = [str(e) for e in streams.endpoints]
        self.spans: list[Span] = []
        self.counts: OpCounts = {}
        self.groups = range(self.device.group_count.value)
        self.cursors = [[0] * len(streams.endpoints) for _ in self.groups]
        self.pipes = [Pipes(len(streams.pipes), self.env) for _ in self.groups]
        rules = streams.sharing
        self.servers = [None if rules is None else ProcessorSharing(self.env, rules) for _ in self.groups]
        self.counters = [self._flags() for _ in self.groups]
        depths = list(enumerate(streams.queue_depths()))
        self.engines = [[Engine(self, group, number, depth) for number, depth in depths] for group in self.groups]
        self.cycles = 0
        self.progress: Callable[[float], None] | None = None
        self.begun, blocks = 0, sum(len(phase.blocks) for phase in self.program.phases)
        self.to_begin = blocks * len(streams.issuers)

    def _begun(self, blocks: Sequence[object]) -> Iterator[object]:
        for block in blocks:
            if self.progress is not None:
                self.progress(self.begun / self.to_begin)
            self.begun += 1
            yield block

    def _flags(self) -> list[Counter]:
        # A waiter never needs counts that are older than the number of slots by which both sides can differ.
        return [Counter(self.streams.flag_latency(e.index), 2 * e.depth + e.period + 1) for e in self.streams.endpoints]

    def result(self) -> TimingResult:
        ends = []
        for phase in self.program.phases:
            self._run(phase)
            ends.append(self.cycles)
        names = self.streams.pipes
        uses = tuple(
            (*(e.use for e in engines), *pipe_uses(names, group, pipes.busy, pipes.done, pipes.free))
            for group, (engines, pipes) in enumerate(zip(self.engines, self.pipes, strict=True))
        )
        links = {name: link.total_bytes for name, link in self.links.items()}
        return summarise(self.streams, "des", ends, uses, links, self.counts, tuple(self.spans))

    def _run(self, phase: ProgramPhase) -> None:
        streams, env = self.streams, self.env
        starts = streams.starts(phase)
        for link, catch_up in zip(self.links.values(), streams.catch_up(phase), strict=True):
            link.begin_phase(*catch_up)
        dispatchers = []
        for group in self.groups:
            blocks = phase.blocks_of_group(group, len(self.groups))
            if not blocks:
                continue
            engines, cursors = self.engines[group], self.cursors[group]
            for engine in engines:
                engine.reopen(int(env.now))
            for issuer, start in zip(streams.issuers, starts, strict=True):
                stream = streams.stream(phase, self._begun(blocks), list(cursors), issuer)
                dispatchers.append(Dispatcher(self, group, issuer, stream))
                dispatchers[-1].start(start)
            self.cursors[group] = streams.advanced(phase, blocks, cursors)
        env.run()
        stuck = [e for engines in self.engines for e in engines if e.stuck or e.entries]
        held = [text for d in dispatchers if (text := d.stuck(self.causes))]
        if stuck or held:
            raise DeadlockError(_describe(self.program, phase, int(env.now), stuck, held))
        # A phase ends when its last result is available; a phase without work is dispatched nevertheless.
        ends = [e.use.end_cycles for engines in self.engines for e in engines]
        self.cycles = max(int(env.now), *ends)
        if int(env.now) < self.cycles:
            env.run(until=self.cycles)


def _describe(program: TileProgram, phase: ProgramPhase, now: int, stuck: list[Engine], held: list[str]) -> str:
    named = [f"group {e.use.group} {e.use.queue}: {e.stuck}" for e in stuck if e.stuck] + held
    shown = "; ".join(named[:8]) or f"{len(stuck)} queues have instructions left"
    return f"phase {phase.name} of {program.name} is stuck at cycle {now}: {shown}"
