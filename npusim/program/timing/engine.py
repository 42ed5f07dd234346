"""One compiled engine: core groups in arrays, phase after phase, and their times.

It is cycle-identical to ``npusim.program.timing.des`` (cycles, busy and waiting times by cause, bytes of every link),
at millions of operations a second, and has two switches that change only its speed: one core group of each class
represents all of them (``fold``), and whole periods are added at once if the joint state of all classes repeats, at
iterations of any loop, over key tiles or over blocks (``steady``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from npusim.errors import DeadlockError
from npusim.program.ir.content import uncollected
from npusim.program.timing.engine_arrays import SPANS, TODO, WATCHED, build_state
from npusim.program.timing.engine_code import code_of, equal_groups
from npusim.program.timing.gpu_pipes import PIPE_BUSY, pipe_uses, span_of
from npusim.program.timing.stream import Streams
from npusim.program.timing.summary import NO_INSTRUCTION, summarise
from npusim.program.timing.timing_result import QueueUse, Span, TimingResult

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.program.timing.engine_arrays import Ints
    from npusim.program.timing.engine_code import Classes, Code

#: Number of waiting engines that a message about a deadlock lists, as in ``des``.
SHOWN = 8


def simulate(
    program: TileProgram,
    device: DeviceSpec,
    *,
    method: str,
    trace_groups: Collection[int] = (),
    streams: Streams | None = None,
) -> TimingResult:
    """Return the time of ``program`` on all core groups of ``device``.

    ``method``: ``block`` simulates all core groups, ``fold`` one of each class; ``steady`` does the same and adds whole
    periods at once, unless ``trace_groups`` requests spans.  Groups of one class share their
    :class:`~npusim.program.timing.timing_result.QueueUse`, in which the number of the group is that of the class's
    first group.

    Raises :class:`~npusim.errors.DeadlockError`, which names the waiting engines, and
    :class:`~npusim.errors.ProgramError` if transfers are too large for 64-bit clocks.
    """
    code = code_of(streams or Streams(program, device))
    classes = equal_groups(code)
    if method == "block":
        classes = classes.one_by_one()
    return Run(code, classes, trace_groups, periodic=method == "steady").result(method)


class Run:
    """One simulation of a program: the arrays of one core group of each class, and their progress.

    ``done_before`` are the operations that each queue had completed when the latest phase began.
    """

    def __init__(
        self, code: Code, classes: Classes, trace_groups: Collection[int] = (), *, periodic: bool = False
    ) -> None:
        from npusim.program.timing.periodic import UNUSED, build_snapshots

        self.code, self.classes, self.streams = code, classes, code.streams
        self.trace_groups = frozenset(trace_groups)
        self.starts = [[code.sequence(blocks) if blocks else -1 for blocks in phase] for phase in classes.blocks]
        is_traced = [not self.trace_groups.isdisjoint(groups) for groups in classes.groups]
        self.program = code.program([len(groups) for groups in classes.groups], is_traced)
        spans = sum(
            code.operation_count(blocks)
            for phase in classes.blocks
            for blocks, traced in zip(phase, is_traced, strict=True)
            if traced
        )
        self.state = build_state(self.program, history_of(self.streams), code.levels, spans)
        is_periodic = periodic and not self.trace_groups
        self.snapshots = build_snapshots(self.program, self.state) if is_periodic else UNUSED
        self.done_before = self.state.engine["done"].copy()
        self.cycles = self.now = 0

    def result(self, method: str, *, has_spans: bool = True) -> TimingResult:
        """Run every phase and return the times."""
        streams, m = self.streams, self.state
        ends = []
        for phase in range(len(self.starts)):
            self.run_phase(phase)
            ends.append(self.cycles)
        ran = m.ran.tolist()
        counts = {op: n for op, n in zip(self.code.operations, ran, strict=True) if n}
        links = dict(zip(streams.device.links, m.link["bytes"].tolist(), strict=True))
        e = m.engine
        booked = Booked(e["busy"], e["done"], e["end"], e["idle"], m.counter["stalled"])
        uses = self._with_pipes(uses_of(streams, self.classes.groups, booked))
        return summarise(streams, method, ends, uses, links, counts, self.spans() if has_spans else ())

    def run_phase(self, phase: int) -> None:
        """Let every member with blocks begin, and run until all have ended."""
        from npusim.program.timing.periodic import UNUSED, run_engine

        m, queues, issuers = self.state, len(self.program.queue), len(self.streams.issuers)
        of_phase, begin, engines = self.streams.program.phases[phase], self.now, len(m.engine)
        starts, catch_up = self.streams.starts(of_phase), self.streams.catch_up(of_phase)
        m.link["idle"] = -1
        self.program.link["idle"], self.program.link["catch_up"] = zip(*catch_up, strict=True)
        self.done_before = m.engine["done"].copy()
        for member, start in enumerate(self.starts[phase]):
            if start < 0:
                continue
            self.now = begin + min(starts)
            m.engine["free"][member * queues : (member + 1) * queues] = begin
            for d in range(member * issuers, (member + 1) * issuers):
                m.dispatcher[d] = (begin + starts[d % issuers], -1, start, 0)
                m.todo[m.size[TODO]] = engines + d
                m.is_todo[engines + d] = 1
                m.size[TODO] += 1
        if self.snapshots is not UNUSED:
            m.size[WATCHED] = busiest_dispatcher(self.code, self.classes.blocks[phase])
        run_engine(self.program, m, self.snapshots, begin)
        if (m.engine["op"] >= 0).any() or m.engine["length"].any():
            raise DeadlockError(self._describe(self.streams.program.phases[phase]))
        # A phase ends when its last result is available; a phase without work is dispatched nevertheless.
        self.cycles = self.now = max(self.now, int(m.engine["end"].max(initial=0)))

    def _with_pipes(self, uses: tuple[tuple[QueueUse, ...], ...]) -> tuple[tuple[QueueUse, ...], ...]:
        """Return the use of queues, followed by the use of the pipes that they share."""
        names = self.streams.pipes
        if not names:
            return uses
        with_pipes = list(uses)
        waited = self.state.engine["waited"].reshape(len(self.classes.groups), -1).tolist()
        pipes = (self.state.pipe[key].tolist() for key in ("busy", "done", "free"))
        for groups, waits, *used in zip(self.classes.groups, waited, *pipes, strict=True):
            for use, cycles in zip(uses[groups[0]], waits, strict=True):
                if cycles:
                    use.stalls[PIPE_BUSY] = cycles
            of_class = (*uses[groups[0]], *pipe_uses(names, groups[0], *used))
            for group in groups:
                with_pipes[group] = of_class
        return tuple(with_pipes)

    @uncollected()
    def spans(self, until: int | None = None) -> tuple[Span, ...]:
        """Return the operations of the traced groups; the operations of a class are repeated for each of its groups.

        ``until``: only operations that end by that cycle.
        """
        queues, operations = self.streams.program.queues, self.code.operations
        recorded, spans = self.state.span[: self.state.size[SPANS]], []
        for e, op, start, end in (recorded if until is None else recorded[recorded["end"] <= until]).tolist():
            member, queue = divmod(e, len(queues))
            for group in self.classes.groups[member]:
                if group in self.trace_groups:
                    use = QueueUse(queues[queue].name, group)
                    spans.append(span_of(operations[op], self.streams, use, start, end))
        return tuple(spans)

    def _describe(self, phase: ProgramPhase) -> str:
        """Return the waiting engines and their flags, in the words of ``des``."""
        m, p, queues = self.state, self.program, self.streams.program.queues
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
    """Return the number of counts of a flag to store: a power of two, so that a mask selects the entry.

    A waiter never needs counts older than the largest distance, in slots, between both sides of a ring.
    """
    rings = streams.program.rings
    return 1 << max((2 * r.depth + r.period for r in rings), default=0).bit_length()


class Booked(NamedTuple):
    """Records of a simulation for every queue, and for every endpoint's waits, member by member."""

    busy: Ints
    done: Ints
    end: Ints
    idle: Ints
    stalled: Ints


def uses_of(streams: Streams, members: Sequence[Sequence[int]], booked: Booked) -> tuple[tuple[QueueUse, ...], ...]:
    """Return the use of every queue, group by group; the groups of one member share one object."""
    names = [q.name for q in streams.program.queues]
    causes: dict[str, list[tuple[int, str]]] = {name: [] for name in names}
    for endpoint in streams.endpoints:
        causes[endpoint.queue].append((endpoint.index, str(endpoint)))
    busy, done, end, idle, stalled = (a.ravel().tolist() for a in booked)
    by_group: dict[int, tuple[QueueUse, ...]] = {}
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
        by_group |= dict.fromkeys(groups, tuple(uses))
    return tuple(by_group[group] for group in sorted(by_group))


def busiest_dispatcher(code: Code, members: Sequence[Sequence[int]]) -> int:
    """Return the dispatcher with the most operations of the member with the most operations."""
    sizes = [code.operation_count(blocks) for blocks in members]
    busiest = sizes.index(max(sizes))
    issuers = code.streams.issuers
    issued = [0] * len(issuers)
    for block, count_of_block in Counter(members[busiest]).items():
        for queue, count in zip(code.streams.program.queues, code.blocks[block].operations, strict=True):
            issued[issuers.index(queue.issuer)] += count_of_block * count
    return busiest * len(issuers) + issued.index(max(issued))
