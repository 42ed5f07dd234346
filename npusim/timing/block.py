"""The run-to-block engine: every core group and shared link, as ``des``, compiled.

Cycle-identical to ``npusim.timing.des``: the same cycles, busy and waiting times by cause, and
bytes of every link, at millions of operations a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import DeadlockError
from npusim.timing.block_code import Code
from npusim.timing.block_machine import BACKGROUND, Machine, Program, build_machine
from npusim.timing.result import QueueUse, TimingResult
from npusim.timing.stream import Streams
from npusim.timing.summary import NO_INSTRUCTION, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from npusim.ir.program import Phase, TileProgram
    from npusim.spec.device import DeviceSpec


def simulate(
    program: TileProgram,
    device: DeviceSpec,
    *,
    trace_groups: Collection[int] = (),
    streams: Streams | None = None,
) -> TimingResult:
    """Return the time of ``program`` on all core groups of ``device``."""
    from npusim.timing.block_kernel import run

    streams = streams or Streams(program, device)
    groups = range(device.group_count.value)
    return Run(streams, [[g] for g in groups]).result("block", run)


class Run:
    """One simulation: members (classes of equal core groups), their code, and the machine's state."""

    def __init__(self, streams: Streams, classes: Sequence[Sequence[int]]) -> None:
        self.streams, self.classes = streams, classes
        program, device = streams.program, streams.device
        groups = device.group_count.value
        code = Code(streams)
        self.starts: list[list[int]] = []
        for phase in program.phases:
            bodies = bodies_of_blocks(code, phase)
            self.starts.append(
                [
                    code.sequence(own) if (own := bodies[c[0] :: groups]) else -1
                    for c in classes
                ]
            )
        self.code = code
        self.program: Program = code.program([len(c) for c in classes])
        deepest = max((2 * r.depth + r.period + 1 for r in program.rings), default=1)
        self.machine: Machine = build_machine(
            self.program, 1 << (deepest - 1).bit_length(), code.levels
        )
        self.cycles = 0
        self.now = 0

    def result(self, method: str, run: Callable[[Program, Machine, int], None]) -> TimingResult:
        for phase, starts in zip(self.streams.program.phases, self.starts, strict=True):
            self._phase(phase, starts, run)
        counts = {
            op.key: int(n) for op, n in zip(self.code.operations, self.machine.ran, strict=True) if n
        }
        names = self.streams.device.links
        links = {name: int(n) for name, n in zip(names, self.machine.link_bytes, strict=True)}
        return summarise(self.streams, method, self.cycles, self._uses(), links, counts, ())

    def _phase(
        self, phase: Phase, starts: Sequence[int], run: Callable[[Program, Machine, int], None]
    ) -> None:
        m, queues, issuers = self.machine, len(self.program.depth), len(self.streams.issuers)
        dispatch = self.streams.device.timed_launch().block_dispatch_cycles.value
        begin = self.now
        m.size[:] = 0
        m.is_todo.fill(0)
        m.load[:] = self.program.link[:, BACKGROUND]
        for member, start in enumerate(starts):
            if start < 0:
                continue
            m.free[member * queues : (member + 1) * queues] = begin
            own = slice(member * issuers, (member + 1) * issuers)
            m.clock[own], m.pc[own], m.pending[own], m.level[own] = begin + dispatch, start, -1, 0
            for d in range(own.start, own.stop):
                m.todo[m.size[1]] = len(m.now_op) + d
                m.is_todo[len(m.now_op) + d] = 1
                m.size[1] += 1
        run(self.program, m, begin)
        if (m.now_op >= 0).any() or m.length.any():
            raise DeadlockError(f"phase {phase.name} stuck")
        self.cycles = int(m.end.max(initial=0))
        self.now = max(self.cycles, begin + dispatch if max(starts, default=-1) >= 0 else begin)

    def _uses(self) -> tuple[tuple[QueueUse, ...], ...]:
        m, streams = self.machine, self.streams
        queues, endpoints = streams.program.queues, streams.endpoints
        causes: list[list[tuple[int, str]]] = [[] for _ in queues]
        for e in endpoints:
            causes[streams.program.queue_index(e.queue)].append((e.index, str(e)))
        uses: dict[int, tuple[QueueUse, ...]] = {}
        for member, groups in enumerate(self.classes):
            found = []
            for q, queue in enumerate(queues):
                e = member * len(queues) + q
                stalls = {NO_INSTRUCTION: int(m.idle[e])} if m.idle[e] else {}
                for index, cause in causes[q]:
                    cycles = int(m.stalled[member * len(endpoints) + index])
                    if cycles:
                        stalls[cause] = stalls.get(cause, 0) + cycles
                found.append(QueueUse(queue.name, groups[0], int(m.busy[e]), int(m.done[e]), stalls, int(m.end[e])))
            for g in groups:
                uses[g] = tuple(found)
        return tuple(uses[g] for g in sorted(uses))


def bodies_of_blocks(code: Code, phase: Phase) -> list[int]:
    streams = code.streams
    return [code.body(streams.timed(streams.templates.of(phase, block), None)) for block in phase.blocks]
