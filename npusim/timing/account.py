"""What the core group that ends last did: its operations by name, and who hands it what it waits for.

With the cycles that each queue was busy and stalled (`QueueUse`) this accounts for the kernel's time to the
cycle: a queue's operations, what shared links and pipes added to them, its waits by cause, the phases in which it has
nothing to do, and what follows its last operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.ir.walk import givers
from npusim.timing.result import Account, PhaseTime, Work
from npusim.timing.stream import TimedLoop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.ir.program import ProgramPhase
    from npusim.timing.result import QueueUse
    from npusim.timing.stream import Streams, TimedBody

#: Times and cycles of an operation, by the unit it ran on and its label.
Done = dict[tuple[str, str], list[int]]


def account_of(streams: Streams, uses: Sequence[Sequence[QueueUse]], ends: Sequence[int]) -> Account:
    """Return the account of the core group that ends last, the first of several.

    ``uses`` are those of each core group, ``ends`` the cycles at which the program's phases were over.
    """
    group = max(range(len(uses)), key=lambda g: max((u.end_cycles for u in uses[g] if u.operations), default=0))
    done: Done = {}
    phases = []
    for phase, before, end in zip(streams.program.phases, (0, *ends), ends, strict=False):
        busy = _add(streams, phase, group, done)
        idle = tuple(q.name for n, q in enumerate(streams.program.queues) if n not in busy)
        phases.append(PhaseTime(phase.name, end - before, idle))
    work = (Work(unit, label, times, cycles) for (unit, label), (times, cycles) in done.items())
    return Account(group, tuple(work), tuple(phases), givers(streams.endpoints))


def _add(streams: Streams, phase: ProgramPhase, group: int, done: Done) -> set[int]:
    """Add what a core group does in a phase; return the queues that do something."""
    times: dict[int, int] = {}
    bodies: dict[int, TimedBody] = {}
    for block in phase.blocks_of_group(group, streams.device.group_count.value):
        body = streams.timed(streams.templates.of(phase, block), None)
        bodies[id(body)] = body
        times[id(body)] = times.get(id(body), 0) + 1
    ran: dict[int, int] = {}
    for number, count in times.items():
        _count(bodies[number], count, ran)
    names = [queue.name for queue in streams.program.queues]
    prefix = _prefix(streams, phase)
    busy = set()
    for key, count in ran.items():
        op = streams.timed_op(key)
        busy.add(op.queue)
        pipes = ((streams.pipes[pipe], taken) for pipe, taken in op.pipes)
        alone = op.occupancy + (op.share.cycles if op.share else 0)
        for unit, taken in ((names[op.queue], alone), *pipes):
            row = done.setdefault((unit, prefix + op.label), [0, 0])
            row[0] += count
            row[1] += count * taken
    return busy


def _count(body: TimedBody, times: int, ran: dict[int, int]) -> None:
    """Add how often each operation of a body runs, which is run ``times`` times itself."""
    for part in body.parts:
        if isinstance(part, TimedLoop):
            _count(part.body, times * part.count, ran)
        else:
            for op in part:
                ran[op.key] = ran.get(op.key, 0) + times


def _prefix(streams: Streams, phase: ProgramPhase) -> str:
    """Return what a phase's rings are called by, and so its operations: the phase, unless it is the main one."""
    prefix = f"{phase.name} "
    return prefix if any(ring.name.startswith(prefix) for ring in streams.program.rings) else ""
