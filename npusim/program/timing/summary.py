"""Computes a :class:`TimingResult` from the raw counts of a simulation; all methods share it.

The account of the core group that ends last divides its time exactly: together with the cycles in which each queue was
busy and stalled (`QueueUse`), it has a queue's operations, delays by shared links and pipes, its waits by cause, the
phases in which it has no operation, and the time after its last operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from npusim.config.device import FOLLOWED
from npusim.errors import ContradictionError
from npusim.program.ir.walk import producers_of
from npusim.program.timing.link import bytes_per_cycle
from npusim.program.timing.stream import TimedOp
from npusim.program.timing.timing_result import Account, PhaseTime, QueueUse, Span, TimingResult, Work
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.program.ir.walk import Template
    from npusim.program.timing.stream import Streams

#: Number of executions of each timed operation.
OpCounts = dict[TimedOp, int]
#: Times and cycles of an operation, by the unit it ran on and its label.
Done = dict[tuple[str, str], list[int]]
#: Cause of a stall: the queue was empty.
NO_INSTRUCTION = "no instruction"


def summarise(
    streams: Streams,
    method: str,
    ends: Sequence[int],
    uses: tuple[tuple[QueueUse, ...], ...],
    link_bytes: dict[str, int],
    counts: OpCounts,
    spans: tuple[Span, ...],
) -> TimingResult:
    """Return the result of one simulation.

    ``ends``: the cycles at which its phases were over; ``link_bytes``: the bytes by which links were busy, idle ones
    included (`Cost.idle_bytes`).
    """
    if streams.program.l2 in FOLLOWED:
        ends, uses = _followed(streams, ends, uses, link_bytes)
    device, cycles = streams.device, ends[-1]
    terms: dict[str, float] = {}
    work: dict[str, int] = {}
    idle: dict[str, int] = {}
    names = [queue.name for queue in streams.program.queues]
    for op, count in counts.items():
        takes = [(streams.pipes[pipe], spent) for pipe, spent in op.pipes]
        for unit, spent in takes or [(names[op.queue], op.occupancy)]:
            work[unit] = work.get(unit, 0) + spent * count
        for key, part in op.terms:
            terms[key] = terms.get(key, 0.0) + part * count
        for link, size in op.idle_bytes:
            idle[link] = idle.get(link, 0) + size * count
    bounds = _bounds(streams, work, link_bytes)
    share = device.sustained(streams.program.flops, device.seconds(cycles), bounds) if cycles else 1.0
    seconds = device.seconds(cycles) / share
    times, stream = times_of(streams.program, device, seconds)
    return TimingResult(
        method=method,
        cycles=cycles,
        latency_s=times["call"],
        launch_s=round(times["call"] - seconds, 15),  # rounded to femtoseconds
        times_s=times,
        stream_s=stream,
        clock_hz=float(device.clock_hz.value) * share,
        queues=uses,
        link_bytes={link: size - idle.get(link, 0) for link, size in link_bytes.items()},
        idle_bytes=idle,
        term_cycles=terms,
        operations=sum(u.operations for group in uses for u in group if not u.is_pipe),
        bound_cycles=bounds,
        compulsory_bytes=streams.costs.residency.compulsory_bytes,
        spans=spans,
        account=_account(streams, uses, ends),
    )


def _followed(
    streams: Streams, ends: Sequence[int], uses: tuple[tuple[QueueUse, ...], ...], link_bytes: dict[str, int]
) -> tuple[Sequence[int], tuple[tuple[QueueUse, ...], ...]]:
    """Return ends and uses if another launch follows, which does not wait for the last stores of some queues.

    These stores end while the next launch runs; no launch needs less time than its bytes need on links.
    """
    queues = streams.program.queues
    late = {q.name for q in queues if not q.is_awaited}
    awaited = max((u.end_cycles for group in uses for u in group if u.queue not in late), default=0)
    least = max(_of_links(streams, link_bytes).values(), default=0)
    end = min(ends[-1], max(awaited, least, *ends[:-1]))
    if end == ends[-1]:
        return ends, uses

    def cut(use: QueueUse) -> QueueUse:
        beyond = max(0, use.end_cycles - end)
        return replace(use, busy_cycles=max(0, use.busy_cycles - beyond), end_cycles=use.end_cycles - beyond)

    return (*ends[:-1], end), tuple([tuple(map(cut, group)) for group in uses])


def _of_links(streams: Streams, link_bytes: dict[str, int]) -> dict[str, int]:
    """Return the cycles that the bytes of each link need at its rate."""
    return {n: ceil(size / bytes_per_cycle(streams.device, n)) if size else 0 for n, size in link_bytes.items()}


def times_of(program: TileProgram, device: DeviceSpec, seconds: float) -> tuple[dict[str, float], float]:
    """Return the result of `DeviceSpec.launched` for a program whose cores need ``seconds``."""
    launches: list[int] = []
    for phase in program.phases:
        if phase.is_joined:
            launches[-1] = max(launches[-1], len(phase.blocks))
        else:
            launches.append(len(phase.blocks))
    is_masked, is_attention = "mask" in program.tensors, program.is_attention
    return device.launched(seconds, launches, is_masked=is_masked, is_attention=is_attention, clears=program.clears)


def _bounds(streams: Streams, work: dict[str, int], link_bytes: dict[str, int]) -> dict[str, int]:
    """Return the smallest time of each unit and link: that of its work, distributed evenly and without a wait."""
    groups = streams.device.group_count.value
    units = streams.pipes or [queue.name for queue in streams.program.queues]
    bounds = {unit: ceil_div(work.get(unit, 0), groups) for unit in units}
    return bounds | _of_links(streams, link_bytes)


def _account(streams: Streams, uses: Sequence[Sequence[QueueUse]], ends: Sequence[int]) -> Account:
    """Return the account of the core group that ends last, the first of several.

    ``uses``: the uses of each core group; ``ends``: the cycles at which the program's phases ended.
    """
    group = max(range(len(uses)), key=lambda g: max((u.end_cycles for u in uses[g] if u.operations), default=0))
    done: Done = {}
    phases = []
    for phase, before, end in zip(streams.program.phases, (0, *ends), ends, strict=False):
        busy = _add_phase(streams, phase, group, done)
        idle = tuple(q.name for n, q in enumerate(streams.program.queues) if n not in busy)
        phases.append(PhaseTime(phase.name, end - before, idle))
    work = (Work(unit, label, times, cycles) for (unit, label), (times, cycles) in done.items())
    return Account(group, tuple(work), tuple(phases), producers_of(streams.endpoints))


def _add_phase(streams: Streams, phase: ProgramPhase, group: int, done: Done) -> set[int]:
    """Add the operations of a core group in a phase; return the queues that have some."""
    mine = np.zeros(len(phase.blocks), np.bool_)
    mine[phase.numbers_of_group(group, streams.device.group_count.value)] = True
    ran: Counter[TimedOp] = Counter()
    for form in streams.templates.forms(phase):
        which = form.which[mine[form.numbers]]
        if len(which):
            _count(streams, form.template, len(which), ran, form.counts[which].sum(0).tolist())
    names = [queue.name for queue in streams.program.queues]
    # The prefix of the names of its rings and operations: the phase's name, unless it is the main phase.
    prefix = f"{phase.name} "
    prefix *= any(ring.name.startswith(prefix) for ring in streams.program.rings)
    busy = set()
    for op, count in ran.items():
        busy.add(op.queue)
        pipes = ((streams.pipes[pipe], spent) for pipe, spent in op.pipes)
        alone = op.occupancy + (op.share.cycles if op.share else 0)
        for unit, spent in ((names[op.queue], alone), *pipes):
            row = done.setdefault((unit, prefix + op.label), [0, 0])
            row[0] += count
            row[1] += count * spent
    return busy


def _count(streams: Streams, body: Template, times: int, ran: Counter[TimedOp], loops: Sequence[int] = ()) -> None:
    """Add the number of executions of each operation of a body that runs ``times`` times.

    ``loops``: the total number of iterations of each of its loops; by default, the number that the body states, each
    time.
    """
    counts = iter(loops)
    for part in body.parts:
        if isinstance(part, tuple):
            for op in part:
                ran[streams.timed(op)] += times
        else:
            _count(streams, part.body, next(counts, times * part.count), ran)


def check_sanity(result: TimingResult) -> None:
    """Check a result against rules that any prediction of time must obey; a violation is a bug and fails the run.

    Raises :class:`ContradictionError` for a unit that is busy for longer than the time, a time below its bound, or
    fewer bytes beyond L2 than those of the inputs and of the outputs that do not stay in L2.
    """
    for uses in result.queues:
        for use in uses:
            if use.busy_cycles > result.cycles:
                raise ContradictionError(
                    f"group {use.group} {use.queue}: busy {use.busy_cycles} of {result.cycles} cycles, over 100 %"
                )
    for unit, bound in result.bound_cycles.items():
        if result.cycles < bound:
            raise ContradictionError(f"{result.cycles} cycles are fewer than the bound of {unit}, {bound}")
    moved = result.link_bytes.get("hbm", result.compulsory_bytes)
    if moved < result.compulsory_bytes:
        raise ContradictionError(
            f"{moved} bytes crossed to memory beyond L2, but the inputs, and the outputs that do not stay in L2, have "
            f"{result.compulsory_bytes}"
        )
