"""One simulation on flat arrays: classes of equal core groups, phase after phase, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npusim.errors import DeadlockError
from npusim.ir.content import uncollected
from npusim.timing.block_machine import SPANS, TODO, build_machine
from npusim.timing.gpu_pipes import PIPE_BUSY, pipe_uses, span_of
from npusim.timing.result import QueueUse, Span, TimingResult
from npusim.timing.summary import NO_INSTRUCTION, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from npusim.ir.program import ProgramPhase
    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import EngineState, Ints, Program
    from npusim.timing.fold import Classes
    from npusim.timing.stream import Streams

    #: Runs a phase from a cycle on; the last argument is the dispatcher whose loops tell the most.
    RunPhase = Callable[[Program, EngineState, int, int], None]

#: Waiting engines that a message about a deadlock lists, as in ``des``.
SHOWN = 8


def run_whole(program: Program, machine: EngineState, start: int, _master: int) -> None:
    """Run a phase operation by operation."""
    from npusim.timing.steady_kernel import UNUSED, run_steady

    run_steady(program, machine, UNUSED, start)


class Run:
    """The machine of one simulation of a program."""

    def __init__(self, code: Code, classes: Classes, trace_groups: Collection[int] = ()) -> None:
        self.code, self.classes, self.streams = code, classes, code.streams
        self.trace_groups = frozenset(trace_groups)
        self.starts = [[code.sequence(own) if own else -1 for own in phase] for phase in classes.blocks]
        self.masters = [busiest_dispatcher(code, phase) for phase in classes.blocks]
        is_traced = [not self.trace_groups.isdisjoint(groups) for groups in classes.groups]
        self.program = code.program([len(groups) for groups in classes.groups], is_traced)
        spans = sum(
            code.operation_count(block)
            for phase in classes.blocks
            for own, traced in zip(phase, is_traced, strict=True)
            if traced
            for block in own
        )
        self.machine = build_machine(self.program, history_of(self.streams), code.levels, spans)
        self.cycles = self.now = 0

    def result(self, method: str, run: RunPhase = run_whole) -> TimingResult:
        """Run every phase with ``run`` and return what it took."""
        streams, m = self.streams, self.machine
        ends = []
        for phase in range(len(self.starts)):
            self.run_phase(phase, run)
            ends.append(self.cycles)
        ran = m.ran.tolist()
        counts = {op.key: n for op, n in zip(self.code.operations, ran, strict=True) if n}
        links = dict(zip(streams.device.links, m.link["bytes"].tolist(), strict=True))
        e = m.engine
        booked = Booked(e["busy"], e["done"], e["end"], e["idle"], m.counter["stalled"])
        uses = self._with_pipes(uses_of(streams, self.classes.groups, booked))
        return summarise(streams, method, ends, uses, links, counts, self._spans())

    def run_phase(self, phase: int, run: RunPhase) -> None:
        """Let every member with blocks begin, and run until all are through."""
        starts, master = self.starts[phase], self.masters[phase]
        m, queues, issuers = self.machine, len(self.program.queue), len(self.streams.issuers)
        dispatch = self.streams.device.timed_launch().block_dispatch_cycles.value
        begin, engines = self.now, len(m.engine)
        for member, start in enumerate(starts):
            if start < 0:
                continue
            self.now = begin + dispatch
            m.engine["free"][member * queues : (member + 1) * queues] = begin
            for d in range(member * issuers, (member + 1) * issuers):
                m.dispatcher[d] = (self.now, -1, start, 0)
                m.todo[m.size[TODO]] = engines + d
                m.is_todo[engines + d] = 1
                m.size[TODO] += 1
        run(self.program, m, begin, master)
        if (m.engine["op"] >= 0).any() or m.engine["length"].any():
            raise DeadlockError(self._describe(self.streams.program.phases[phase]))
        # A phase is over when its last result is there; one without work still is dispatched.
        self.cycles = self.now = max(self.now, int(m.engine["end"].max(initial=0)))

    def _with_pipes(self, uses: tuple[tuple[QueueUse, ...], ...]) -> tuple[tuple[QueueUse, ...], ...]:
        """Return the use of queues and, after them, of the pipes that they share."""
        names = self.streams.pipes
        if not names:
            return uses
        found = list(uses)
        waited = self.machine.engine["waited"].reshape(len(self.classes.groups), -1).tolist()
        pipes = (self.machine.pipe[key].tolist() for key in ("busy", "done", "free"))
        for groups, waits, *used in zip(self.classes.groups, waited, *pipes, strict=True):
            for use, cycles in zip(uses[groups[0]], waits, strict=True):
                if cycles:
                    use.stalls[PIPE_BUSY] = cycles
            own = (*uses[groups[0]], *pipe_uses(names, groups[0], *used))
            for group in groups:
                found[group] = own
        return tuple(found)

    @uncollected()
    def _spans(self) -> tuple[Span, ...]:
        """Return the operations of the traced groups, each class's once for each of its groups."""
        queues, operations = self.streams.program.queues, self.code.operations
        kept = []
        for e, op, start, end in self.machine.span[: self.machine.size[SPANS]].tolist():
            member, queue = divmod(e, len(queues))
            for group in self.classes.groups[member]:
                if group in self.trace_groups:
                    use = QueueUse(queues[queue].name, group)
                    kept.append(span_of(operations[op], self.streams, use, start, end))
        return tuple(kept)

    def _describe(self, phase: ProgramPhase) -> str:
        """Return who waits for what, as ``des`` says it."""
        m, p, queues = self.machine, self.program, self.streams.program.queues
        named = []
        for e in (m.engine["op"] >= 0).nonzero()[0].tolist():
            own = p.wait[m.engine[e]["wait_at"]]["own"]
            group = self.classes.groups[e // len(queues)][0]
            label = self.code.operations[m.engine[e]["op"]].label
            named.append(
                f"group {group} {queues[e % len(queues)].name}: {label} waits for {self.streams.endpoints[own]}"
            )
        left = int((m.engine["length"] > 0).sum())
        shown = "; ".join(named[:SHOWN]) or f"{left} queues have instructions left"
        now = int(max(m.engine["free"].max(), m.dispatcher["clock"].max()))
        return f"phase {phase.name} of {self.streams.program.name} is stuck at cycle {now}: {shown}"


def history_of(streams: Streams) -> int:
    """Return how many counts of a flag have to be kept: a power of two, so that a mask finds them.

    A waiter never looks further back than the slots both sides of a ring can be apart.
    """
    rings = streams.program.rings
    return 1 << max((2 * r.depth + r.period for r in rings), default=0).bit_length()


class Booked(NamedTuple):
    """What a simulation books for every queue, and for every endpoint's waits, member by member."""

    busy: Ints
    done: Ints
    end: Ints
    idle: Ints
    stalled: Ints


def uses_of(streams: Streams, members: Sequence[Sequence[int]], booked: Booked) -> tuple[tuple[QueueUse, ...], ...]:
    """Return the use of every queue, group by group; the groups of a member share theirs."""
    names = [q.name for q in streams.program.queues]
    causes: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
    for e in streams.endpoints:
        causes[e.queue].append((e.index, str(e)))
    busy, done, end, idle, stalled = (a.ravel().tolist() for a in booked)
    found: dict[int, tuple[QueueUse, ...]] = {}
    for member, groups in enumerate(members):
        counters = member * len(streams.endpoints)
        uses = []
        for e, name in enumerate(names, member * len(names)):
            stalls = {NO_INSTRUCTION: idle[e]} if idle[e] else {}
            for index, cause in causes[name]:
                cycles = stalled[counters + index]
                if cycles:
                    stalls[cause] = stalls.get(cause, 0) + cycles
            uses.append(QueueUse(name, groups[0], busy[e], done[e], stalls, end[e]))
        found |= dict.fromkeys(groups, tuple(uses))
    return tuple(found[group] for group in sorted(found))


def busiest_dispatcher(code: Code, members: Sequence[Sequence[int]]) -> int:
    """Return the dispatcher that issues most, of the member that runs most."""
    issuers = len(code.streams.issuers)
    known = {b: code.operations_by_issuer(b) for own in members for b in set(own)}
    totals = [[sum(known[b][i] for b in own) for i in range(issuers)] for own in members]
    longest = max(range(len(totals)), key=lambda member: sum(totals[member]))
    return longest * issuers + max(range(issuers), key=lambda i: totals[longest][i])
