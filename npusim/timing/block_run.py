"""One simulation on flat arrays: classes of equal core groups, phase after phase, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import DeadlockError
from npusim.timing.block_machine import BACKGROUND, MASTER, SPANS, TODO, build_machine
from npusim.timing.result import QueueUse, Span, TimingResult
from npusim.timing.summary import NO_INSTRUCTION, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from npusim.ir.program import Phase
    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import Machine, Program
    from npusim.timing.fold import Classes

    Kernel = Callable[[Program, Machine, int], None]

#: Waiting engines that a message about a deadlock lists, as in ``des``.
SHOWN = 8


class Run:
    """The machine of one simulation of a program."""

    def __init__(self, code: Code, classes: Classes, trace_groups: Collection[int] = ()) -> None:
        self.code, self.classes, self.streams = code, classes, code.streams
        self.trace_groups = frozenset(trace_groups)
        self.starts = [
            [code.sequence(own) if own else -1 for own in phase] for phase in classes.bodies
        ]
        self.masters = [code.busiest(phase) for phase in classes.bodies]
        is_traced = [not self.trace_groups.isdisjoint(groups) for groups in classes.groups]
        self.program = code.program([len(groups) for groups in classes.groups], is_traced)
        spans = sum(
            code.operation_count(own)
            for phase in classes.bodies
            for own, traced in zip(phase, is_traced, strict=True)
            if traced
        )
        rings = self.streams.program.rings
        # A waiter never looks further back than the slots both sides can be apart.
        reach = max((2 * r.depth + r.period + 1 for r in rings), default=1)
        # A power of two: counts find their place by a mask.
        history = 1 << (reach - 1).bit_length()
        self.machine = build_machine(self.program, history, code.levels, spans)
        self.cycles = self.now = 0

    def result(self, method: str, kernel: Kernel) -> TimingResult:
        """Run every phase with ``kernel`` and return what it took."""
        streams, m = self.streams, self.machine
        for phase, starts, master in zip(
            streams.program.phases, self.starts, self.masters, strict=True
        ):
            self._run(phase, starts, master, kernel)
        ran = m.ran.tolist()
        counts = {op.key: n for op, n in zip(self.code.operations, ran, strict=True) if n}
        links = dict(zip(streams.device.links, m.link_bytes.tolist(), strict=True))
        return summarise(streams, method, self.cycles, self._uses(), links, counts, self._spans())

    def _run(self, phase: Phase, starts: list[int], master: int, kernel: Kernel) -> None:
        """Let every member with blocks begin, and run until all are through."""
        m, queues, issuers = self.machine, len(self.program.depth), len(self.streams.issuers)
        dispatch = self.streams.device.timed_launch().block_dispatch_cycles.value
        begin, engines = self.now, len(m.now_op)
        m.load[:] = self.program.link[:, BACKGROUND]
        m.size[MASTER] = master
        for member, start in enumerate(starts):
            if start < 0:
                continue
            self.now = begin + dispatch
            m.free[member * queues : (member + 1) * queues] = begin
            own = slice(member * issuers, (member + 1) * issuers)
            m.clock[own], m.pc[own], m.pending[own], m.level[own] = self.now, start, -1, 0
            for d in range(own.start, own.stop):
                m.todo[m.size[TODO]] = engines + d
                m.is_todo[engines + d] = 1
                m.size[TODO] += 1
        kernel(self.program, m, begin)
        if (m.now_op >= 0).any() or m.length.any():
            raise DeadlockError(self._describe(phase))
        self.cycles = int(m.end.max(initial=0))
        self.now = max(self.cycles, self.now)

    def _uses(self) -> tuple[tuple[QueueUse, ...], ...]:
        """Return the use of every queue; groups of one class share theirs."""
        m, streams = self.machine, self.streams
        names = [q.name for q in streams.program.queues]
        causes: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
        for e in streams.endpoints:
            causes[e.queue].append((e.index, str(e)))
        busy, done, end, idle = (a.tolist() for a in (m.busy, m.done, m.end, m.idle))
        stalled = m.stalled.tolist()
        found: dict[int, tuple[QueueUse, ...]] = {}
        for member, groups in enumerate(self.classes.groups):
            first, counters = member * len(names), member * len(streams.endpoints)
            uses = []
            for e, name in enumerate(names, first):
                stalls = {NO_INSTRUCTION: idle[e]} if idle[e] else {}
                for index, cause in causes[name]:
                    cycles = stalled[counters + index]
                    if cycles:
                        stalls[cause] = stalls.get(cause, 0) + cycles
                uses.append(QueueUse(name, groups[0], busy[e], done[e], stalls, end[e]))
            found |= dict.fromkeys(groups, tuple(uses))
        return tuple(found[group] for group in sorted(found))

    def _spans(self) -> tuple[Span, ...]:
        """Return the operations of the traced groups, each class's once for each of its groups."""
        queues, operations = self.streams.program.queues, self.code.operations
        kept = []
        for e, op, start, end in self.machine.span[: self.machine.size[SPANS]].tolist():
            member, queue = divmod(e, len(queues))
            for group in self.classes.groups[member]:
                if group in self.trace_groups:
                    kept.append(Span(group, queues[queue].name, operations[op].label, start, end))
        return tuple(kept)

    def _describe(self, phase: Phase) -> str:
        """Return who waits for what, as ``des`` says it."""
        m, p, queues = self.machine, self.program, self.streams.program.queues
        named = []
        for e in (m.now_op >= 0).nonzero()[0].tolist():
            own = p.wait[m.wait_at[e], 0]
            group = self.classes.groups[e // len(queues)][0]
            label = self.code.operations[m.now_op[e]].label
            named.append(
                f"group {group} {queues[e % len(queues)].name}: {label} waits for {self.streams.endpoints[own]}"
            )
        left = int((m.length > 0).sum())
        shown = "; ".join(named[:SHOWN]) or f"{left} queues have instructions left"
        now = int(max(m.free.max(), m.clock.max()))
        return f"phase {phase.name} of {self.streams.program.name} is stuck at cycle {now}: {shown}"
