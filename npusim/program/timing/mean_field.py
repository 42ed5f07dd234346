"""Approximate (mean field): each core group has its share of the links, together with the mean traffic of the others.

If the groups all run different blocks (causal, assigned round robin), their joint state never repeats.  Here a transfer
shares a link with the group's own transfers, which are simulated, and with the average number of transfers that the
unfinished groups have in flight in their current blocks.  A block then depends on nothing but the state in which its
group enters it, and is simulated once; long loops are cut short, and the time of an iteration is measured in the middle
of them.

Model: coincidences between groups are averaged; the resulting difference is measured on a part of the program, which is
also simulated exactly, and becomes the band of the result.

Users call the method ``reserved``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import DeadlockError, ProgramError
from npusim.identity import Itself
from npusim.program.timing.engine import Booked, Run, uses_of
from npusim.program.timing.engine_code import Classes, Code, InnerBody, code_of, equal_groups, fold_groups
from npusim.program.timing.mean_field_arrays import BEFORE, SPAN, WINDOW, build_groups
from npusim.program.timing.mean_field_blocks import BlockTable, CutBlock
from npusim.program.timing.stream import Streams
from npusim.program.timing.summary import summarise, times_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.engine_arrays import Ints
    from npusim.program.timing.timing_result import TimingResult

#: Iterations of a long loop before its rate is measured, during the measurement, and after it; the loop is shortened to
#: their sum.
HEAD, TAIL = 7, 3
LONG = HEAD + SPAN + TAIL
#: Number of classes of core groups whose joint state can be expected to repeat: evenly assigned blocks give two
#: classes.
FEW_CLASSES = 3
#: Number of operations of each part that is also simulated exactly: a part differs most at its beginning and end, so
#: that longer parts represent the whole less well, not better (14 calls of 10 to 57 million: 0.24 % at most, the whole
#: 0.23 %).
SAMPLE_OPERATIONS = 200_000
#: Smallest band of a result, to which the difference on that part is added, and the factor by which the difference of
#: the whole may exceed that of the part. For 138 random causal calls of 1 to 12 million operations the whole was 2.6 %
#: off at most, and never outside this band (tests/timing/test_band.py).
LEAST_BAND, BAND_FACTOR = 0.01, 1.0
#: Positions of the part in the work of each group; more positions if groups queue for a link that is busy for this
#: share of the time.
POSITIONS, POSITIONS_CROWDED, CROWDED = (0.5,), (0.25, 0.5, 0.75), 0.9


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the approximate time of ``program``; there are no spans, whatever ``trace_groups`` is.

    Operations and bytes are exact.  Raises :class:`~npusim.errors.ProgramError` if blocks cannot be simulated one by
    one: because a scalar unit is a block ahead of another, or because too many blocks differ.
    """
    code = code_of(streams or Streams(program, device))
    return approximate(code, equal_groups(code))


def approximate(code: Code, classes: Classes, widest: float = 1.0) -> TimingResult:
    """Return the approximate time with its band; raise :class:`ProgramError` if the band is above ``widest``."""
    sizes = [operations_of(code, Classes(classes.groups, (phase,))) for phase in classes.blocks]
    # Phases that are shorter than the sample, such as one that prepares inputs, are simulated exactly.
    short = tuple(number for number, size in enumerate(sizes) if size <= SAMPLE_OPERATIONS)
    field = _field(Itself(code), short)
    result = field.result(classes)
    crowd = max((result.bound_cycles[link] for link in result.link_bytes), default=0)
    positions = POSITIONS_CROWDED if crowd > CROWDED * result.cycles else POSITIONS
    band = LEAST_BAND + BAND_FACTOR * max(field.error_at(position, classes, sum(sizes)) for position in positions)
    if band > widest:
        raise ProgramError(f"{code.streams.program.name}: a band of {band:.1%}")
    # Groups that queue for a saturated unit load it more than their mean does, so the time is never below what the work
    # needs.
    least = max(result.bound_cycles.values(), default=0) - result.cycles
    if least > 0:
        cycles = result.cycles + least
        times, _ = times_of(code.streams.program, code.streams.device, cycles / result.clock_hz)
        result = replace(result, cycles=cycles, latency_s=times["call"], times_s=times)
    return replace(result, band=band)


@lru_cache(maxsize=2)
def _field(code: Itself, short: tuple[int, ...]) -> MeanField:
    return MeanField(code.thing, short)


def operations_of(code: Code, classes: Classes) -> int:
    """Return the number of operations that one core group of each class runs, over all phases."""
    return code.operation_count(classes.every_block())


class PhaseBooking(NamedTuple):
    """The smallest possible number of cycles of a phase, and the records of every group in it, from its beginning."""

    least: int
    busy: Ints  #: (groups, queues); the same for ``idle`` and ``end``, the last results
    idle: Ints
    stalled: Ints  #: (groups, endpoints)
    end: Ints


class MeanField:
    """Approximate simulations of a program or parts of it; phases with few classes of core groups, and phases in
    ``short``, are simulated exactly.  Times of blocks are stored for later phases.
    """

    def __init__(self, code: Code, short: Collection[int] = ()) -> None:
        if pipes := code.streams.pipes:
            raise ProgramError(
                f"{code.streams.program.name}: queues with shared pipes ({', '.join(pipes)}) are not supported by "
                "the method reserved; use des, block, fold, steady or auto"
            )
        self.code, self.streams, self.short = code, code.streams, short
        self._tables: dict[int, tuple[BlockTable, Ints, Ints]] = {}
        self._errors: dict[float, float] = {}
        self._widths = len(self.streams.program.queues), len(self.streams.endpoints)

    def error_at(self, position: float, classes: Classes, operations: int) -> float:
        """Return the relative difference from the exact time for a part of the program with this number of
        ``operations``.
        """
        if position not in self._errors:
            part = sample_of(self.code, classes, self.short, position, operations)
            try:
                exact = Run(self.code, part).result("fold")
            except DeadlockError:  # blocks that overlap wait for earlier blocks
                raise ProgramError(
                    f"{self.streams.program.name}: its blocks have no part that repeats by itself"
                ) from None
            self._errors[position] = abs(self.result(part).cycles / exact.cycles - 1)
        return self._errors[position]

    def result(self, classes: Classes) -> TimingResult:
        """Run every phase of these core groups' blocks, and return the times; the whole program must run before any
        part of it.
        """
        classes = classes.one_by_one()
        code, streams, groups = self.code, self.streams, len(classes.groups)
        (queues, endpoints), cycles, ends = self._widths, 0, []
        widths = (queues, queues, queues, queues, endpoints)
        busy, done, end, idle, stalled = (np.zeros((groups, width), np.int64) for width in widths)
        for number, phase in enumerate(classes.blocks):
            folded = fold_groups([(blocks,) for blocks in phase])
            is_exact = len(folded.groups) <= FEW_CLASSES or number in self.short
            taken = self._exactly(folded) if is_exact else self._beside_others(number, phase)
            busy += taken.busy
            idle += taken.idle
            stalled += taken.stalled
            has_ended = taken.end > 0
            end[has_ended] = cycles + taken.end[has_ended]
            cycles = max(cycles + taken.least, int(end.max(initial=0)))
            ends.append(cycles)
        operations = np.array([block.operations for block in code.blocks], np.int64)
        for group, blocks in enumerate(zip(*classes.blocks, strict=True)):
            done[group] = operations[list(chain(*blocks))].sum(0)
        runs = code.runs_of_operations(classes.every_block()).tolist()
        links = dict.fromkeys(streams.device.links, 0)
        for op, count in zip(code.operations, runs, strict=True):
            for link, size in op.flows:
                links[link] += count * size
        times = {op: n for op, n in zip(code.operations, runs, strict=True) if n}
        uses = uses_of(streams, classes.groups, Booked(busy, done, end, idle, stalled))
        return summarise(streams, "reserved", ends, uses, links, times, ())

    def _exactly(self, folded: Classes) -> PhaseBooking:
        """Run one phase folded, with repetitions skipped."""
        run = Run(self.code, folded, periodic=True)
        run.run_phase(0)
        member = np.empty(sum(map(len, folded.groups)), np.int64)
        for number, groups in enumerate(folded.groups):
            member[list(groups)] = number
        engine = run.state.engine.reshape(len(folded.groups), -1)[member]
        stalled = run.state.counter["stalled"].reshape(len(folded.groups), -1)[member]
        return PhaseBooking(run.now, engine["busy"], engine["idle"], stalled, engine["end"])

    def _beside_others(self, number: int, phase: Sequence[Sequence[int]]) -> PhaseBooking:
        """Run one phase group by group, each with the mean traffic of the others."""
        from npusim.formats.jit import Table
        from npusim.program.timing.mean_field_kernel import run_groups

        table, cut, extra = self._table(number, phase)
        blocks = [np.array(sequence, np.int64) for sequence in phase]
        states = build_groups([(cut[sequence], extra[sequence]) for sequence in blocks], table.results)
        arguments: Any = Table(states), Table(table.results)
        while (asks := run_groups(*arguments)) >= 0:
            group = states.group[asks]
            window = states.block["number"][group["at"] - BEFORE :][:WINDOW]
            table.add(int(group["state"]), window, states.others)
        ends = np.zeros((len(phase), self._widths[0]), np.int64)
        for mine, group in zip(ends, states.group, strict=True):
            if group["state"] < 0:
                last = int(group["result"])
                mine[:] = group["time"] - int(table.results.result[last]["cycles"]) + table.ends[last]
        queues, endpoints = self._widths
        busy, idle, stalled, _ = np.split(states.booked, [queues, 2 * queues, 2 * queues + endpoints], axis=1)
        return PhaseBooking(0, busy, idle, stalled, ends)

    def _table(self, number: int, phase: Sequence[Sequence[int]]) -> tuple[BlockTable, Ints, Ints]:
        """Return the times of a phase's blocks, the shortened form of each, and the number of its
        remaining iterations.
        """
        if number not in self._tables:
            blocks, leader = cut_blocks(self.code, phase)
            cut, extra = np.zeros((2, len(self.code.blocks)), np.int64)
            for block, (short, more) in blocks.items():
                cut[block], extra[block] = short.number, more
            table = BlockTable(self.code, len(phase), leader, {block for block, _ in blocks.values()})
            self._tables[number] = table, cut, extra
        return self._tables[number]


def sample_of(code: Code, classes: Classes, short: Collection[int], position: float, operations: int) -> Classes:
    """Return the part at ``position`` on which this method is compared with an exact one, without ``short`` phases.

    The whole has this number of ``operations``.  Raises :class:`ProgramError` if all of its groups run in step: the
    sample would then contain no information.
    """
    limit = SAMPLE_OPERATIONS
    while limit < operations:
        part = part_at(position, code, classes, limit, short)
        if len(part.groups) > FEW_CLASSES:
            return part
        limit *= 2
    raise ProgramError(f"{code.streams.program.name}: core groups run in step; use method steady")


def part_at(position: float, code: Code, classes: Classes, limit: int, short: Collection[int]) -> Classes:
    """Return complete blocks from ``position`` of every core group's sequence, about ``limit`` operations in total."""
    phases: list[list[tuple[int, ...]]] = []
    for number, phase in enumerate(classes.one_by_one().blocks):
        turns = 0 if number in short else max(map(len, phase))
        first = last = int(position * turns)
        budget = limit // (len(classes.blocks) - len(short))
        while budget > 0 and last - first < turns:
            if last < turns:
                at, last = last, last + 1
            else:
                at = first = first - 1
            budget -= code.operation_count(blocks[at] for blocks in phase if at < len(blocks))
        phases.append([blocks[first:last] for blocks in phase])
    return fold_groups(list(zip(*phases, strict=True)))


def cut_blocks(code: Code, groups: Iterable[Sequence[int]]) -> tuple[dict[int, tuple[CutBlock, int]], int]:
    """Return each block with its longest loop shortened to ``LONG`` iterations, the number of further iterations, and
    the leader.

    The engine with the most operations leads; its position distinguishes blocks.
    """
    cut = {number: _cut(code, number) for number in dict.fromkeys(chain(*groups))}
    work = {number: code.blocks[number].operations for number, _ in cut.values()}
    leader = int(np.argmax(np.sum(list(work.values()), axis=0)))
    if not all(operations[leader] for operations in work.values()):
        raise ProgramError(f"{code.streams.program.name}: no queue has operations in every block")
    # Longer blocks are shortened to a block of exactly ``LONG`` iterations.
    shortened = {number for number, extra in cut.values() if extra}
    blocks = {}
    for number, operations in work.items():
        since = until = 0
        if number in shortened:
            before, inner = _loop_of(code, number, leader)
            since, until = before + HEAD * inner, before + (HEAD + SPAN) * inner
        blocks[number] = CutBlock(number, operations[leader], since, until)
    return {number: (blocks[short], extra) for number, (short, extra) in cut.items()}, leader


def _cut(code: Code, number: int) -> tuple[int, int]:
    """Return a block's number with at most ``LONG`` iterations of its longest loop, and the number of further
    iterations.
    """
    block = code.blocks[number]
    longest = max(block.counts, default=0)
    if longest <= LONG:
        return number, 0
    at = block.counts.index(longest)
    counts = (*block.counts[:at], LONG, *block.counts[at + 1 :])
    return code.block_of(block.body, counts), longest - LONG


def _loop_of(code: Code, number: int, queue: int) -> tuple[int, int]:
    """Return the number of operations of a queue before the longest loop of a block, and in its body."""
    block = code.blocks[number]
    counts, longest = iter(block.counts), max(block.counts)
    before = 0
    for part in code.bodies[block.body].parts:
        if not isinstance(part, InnerBody):
            before += sum(code.operations[op].queue == queue for op in part)
            continue
        inner, count = code.bodies[part.body].operations[queue], part.times
        if count is None:
            count = next(counts)
            if count == longest:
                return before, inner
        before += count * inner
    raise AssertionError("a block has as many loops as counts")
