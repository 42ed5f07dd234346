"""Approximate (mean field): each core group has its share of the links to itself, beside a mean of the others.

Where the groups all run different blocks (causal, dealt round robin) their joint state never
repeats.  Here a transfer shares a link with the group's own transfers, which are simulated, and
with as many others as the unfinished groups keep in flight on average in the blocks they are at.
A block then depends on nothing but the state in which its group enters it, and is simulated once;
long loops are cut short, and what an iteration takes is measured in the middle of them.

Model: the chance meetings of groups are averaged out; the difference that makes is measured on a part
of the program, which is simulated exactly too, and becomes the band of the result.

Users call the method ``reserved``.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.timing.engine import Booked, Run, uses_of
from npusim.timing.engine_code import Classes, Code, InnerBody, code_of, equal_groups, fold_groups
from npusim.timing.gpu_pipes import refuse_shared_pipes
from npusim.timing.link import FRACTION_BITS
from npusim.timing.mean_field_blocks import AFTER, BEFORE, PART_BITS, BlockResult, BlockTable, CutBlock
from npusim.timing.stream import Streams
from npusim.timing.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.engine_arrays import Ints
    from npusim.timing.result import TimingResult

#: Iterations of a long loop: before its pace is taken, while it is, and after; it is cut to their sum.
HEAD, SPAN, TAIL = 7, 4, 3
LONG = HEAD + SPAN + TAIL
#: Classes of core groups whose joint state can be expected to repeat: blocks dealt evenly make two.
FEW_CLASSES = 3
#: Operations of each part that is simulated exactly too: so many; or one in so many of all,
#: since core groups take long to fall into step, or out of it; but no more in all parts than take some 2 s.
SAMPLE_OPERATIONS, SAMPLE_PARTS, MOST_SAMPLED = 400_000, 40, 20_000_000
#: A result's band beside the difference on that part, and how much the whole may differ more than it
#: does: of 138 random causal calls of 1 to 12 million operations the whole was 2.6 % off at most, and
#: never further than this (tests/timing/test_band.py).
LEAST_BAND, BAND_FACTOR = 0.01, 1.0
#: Where the part lies in what each group runs; more of them where groups queue for a link that is busy
#: for such a share of the time.
POSITIONS, POSITIONS_CROWDED, CROWDED = (0.5,), (0.25, 0.5, 0.75), 0.9
#: Rounds over the links in which the groups' first blocks find each other's transfers.
ROUNDS = 2
#: Significant bits of a number of others: results are shared by groups that agree in them.
SIGNIFICANT = 5


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the approximate time of ``program``; there are no spans, whatever ``trace_groups``.

    Operations and bytes are exact.  Raises :class:`~npusim.errors.ProgramError` if blocks cannot be
    simulated one by one: a scalar unit is a block ahead of another, or too many blocks differ.
    """
    code = code_of(streams or Streams(program, device))
    return approximate(code, equal_groups(code))


def approximate(code: Code, classes: Classes, widest: float = 1.0) -> TimingResult:
    """Return the approximate time with its band; raise :class:`ProgramError` for one beyond ``widest``."""
    short = short_phases(code, classes)
    result = MeanField(code, classes, short).result()
    crowd = max((result.bound_cycles[link] for link in result.link_bytes), default=0)
    positions = POSITIONS_CROWDED if crowd > CROWDED * result.cycles else POSITIONS
    error = 0.0
    for position in positions:
        part = sample_of(code, classes, short, position, len(positions))
        exact, approximation = Run(code, part).result("fold"), MeanField(code, part, short).result()
        error = max(error, abs(approximation.cycles / exact.cycles - 1))
    band = LEAST_BAND + BAND_FACTOR * error
    if band > widest:
        raise ProgramError(f"{code.streams.program.name}: a band of {band:.1%}")
    # Groups that queue for a saturated unit are more than their mean: never below what the work takes.
    least = max(result.bound_cycles.values(), default=0) - result.cycles
    if least > 0:
        latency = result.latency_s + code.streams.device.seconds(least)
        result = replace(result, cycles=result.cycles + least, latency_s=latency)
    return replace(result, band=band)


def operations_of(code: Code, classes: Classes) -> int:
    """Return how many operations one core group of each class runs, all phases together."""
    return code.operation_count(classes.every_block())


class PhaseBooking(NamedTuple):
    """Cycles that a phase takes at least, and what every group books in it, from its beginning."""

    least: int
    busy: Ints  #: (groups, queues), as are ``idle`` and ``end``, the last results
    idle: Ints
    stalled: Ints  #: (groups, endpoints)
    end: Ints


class MeanField:
    """One approximate simulation; phases with few classes of core groups, and those in
    ``short``, are simulated exactly.
    """

    def __init__(self, code: Code, classes: Classes, short: Collection[int] = ()) -> None:
        refuse_shared_pipes(code.streams, "reserved")
        self.code, self.streams = code, code.streams
        self.classes, self.short = classes.one_by_one(), short
        self._widths = len(self.streams.program.queues), len(self.streams.endpoints)

    def result(self) -> TimingResult:
        """Run every phase and return what it took."""
        code, streams, groups = self.code, self.streams, len(self.classes.groups)
        (queues, endpoints), cycles, ends = self._widths, 0, []
        widths = (queues, queues, queues, queues, endpoints)
        busy, done, end, idle, stalled = (np.zeros((groups, width), np.int64) for width in widths)
        for number, phase in enumerate(self.classes.blocks):
            folded = fold_groups([(blocks,) for blocks in phase])
            is_exact = len(folded.groups) <= FEW_CLASSES or number in self.short
            taken = self._exactly(folded) if is_exact else self._beside_others(phase)
            busy += taken.busy
            idle += taken.idle
            stalled += taken.stalled
            has_ended = taken.end > 0
            end[has_ended] = cycles + taken.end[has_ended]
            cycles = max(cycles + taken.least, int(end.max(initial=0)))
            ends.append(cycles)
        sequences = [list(chain(*blocks)) for blocks in zip(*self.classes.blocks, strict=True)]
        work = {block: np.array(code.blocks[block].operations) for block in set(chain(*sequences))}
        for group, blocks in enumerate(sequences):
            done[group] = sum(work[block] for block in blocks)
        runs = code.runs_of_operations(chain(*sequences)).tolist()
        links = dict.fromkeys(streams.device.links, 0)
        for op, count in zip(code.operations, runs, strict=True):
            for link, size in op.flows:
                links[link] += count * size
        times = {o.key: n for o, n in zip(code.operations, runs, strict=True) if n}
        uses = uses_of(streams, self.classes.groups, Booked(busy, done, end, idle, stalled))
        return summarise(streams, "reserved", ends, uses, links, times, ())

    def _exactly(self, folded: Classes) -> PhaseBooking:
        """Run one phase folded, skipping what repeats."""
        run = Run(self.code, folded, periodic=True)
        run.run_phase(0)
        member = np.empty(sum(map(len, folded.groups)), np.int64)
        for number, groups in enumerate(folded.groups):
            member[list(groups)] = number
        engine = run.state.engine.reshape(len(folded.groups), -1)[member]
        stalled = run.state.counter["stalled"].reshape(len(folded.groups), -1)[member]
        return PhaseBooking(run.now, engine["busy"], engine["idle"], stalled, engine["end"])

    def _beside_others(self, phase: Sequence[Sequence[int]]) -> PhaseBooking:
        """Run one phase group by group, each beside the mean traffic of the others."""
        cut, leader = cut_blocks(self.code, phase)
        traffic = MeanTraffic(BlockTable(self.code, len(phase), leader), [[cut[b] for b in blocks] for blocks in phase])
        traffic.run()
        queues, endpoints = self._widths
        booked = np.array([group.booked for group in traffic.groups])
        busy, idle, stalled, _ = np.split(booked, [queues, 2 * queues, 2 * queues + endpoints], axis=1)
        return PhaseBooking(0, busy, idle, stalled, np.array([group.ends for group in traffic.groups]))


def short_phases(code: Code, classes: Classes) -> tuple[int, ...]:
    """Return the phases that take less than the sample does, such as one that prepares inputs."""
    sizes = (operations_of(code, Classes(classes.groups, (phase,))) for phase in classes.blocks)
    return tuple(number for number, size in enumerate(sizes) if size <= SAMPLE_OPERATIONS)


def sample_of(code: Code, classes: Classes, short: Collection[int], position: float, positions: int) -> Classes:
    """Return one of ``positions`` parts on which this method is held against an exact one, without
    ``short`` phases.

    Raises :class:`ProgramError` where groups go in step in all of it: that would say nothing.
    """
    operations = operations_of(code, classes)
    limit = max(SAMPLE_OPERATIONS, min(operations // SAMPLE_PARTS, MOST_SAMPLED // positions))
    while limit < operations:
        part = part_at(position, code, classes, limit, short)
        if len(part.groups) > FEW_CLASSES:
            return part
        limit *= 2
    raise ProgramError(f"{code.streams.program.name}: core groups go in step; use method steady")


def part_at(position: float, code: Code, classes: Classes, limit: int, short: Collection[int]) -> Classes:
    """Return whole blocks from ``position`` of what every core group runs, some ``limit`` operations in all."""
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
    """Return each block with its longest loop cut to ``LONG`` iterations, and how many it has more; and who leads.

    The engine with most operations leads; blocks are told apart by what it is at.
    """
    cut = {number: _cut(code, number) for number in dict.fromkeys(chain(*groups))}
    work = {number: code.blocks[number].operations for number, _ in cut.values()}
    leader = int(np.argmax(np.sum(list(work.values()), axis=0)))
    if not all(operations[leader] for operations in work.values()):
        raise ProgramError(f"{code.streams.program.name}: no queue has operations in every block")
    # A block of just ``LONG`` iterations is the one that longer blocks are cut to.
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
    """Return a block's number with at most ``LONG`` iterations of its longest loop, and how many it has more."""
    block = code.blocks[number]
    longest = max(block.counts, default=0)
    if longest <= LONG:
        return number, 0
    at = block.counts.index(longest)
    counts = (*block.counts[:at], LONG, *block.counts[at + 1 :])
    return code.block_of(block.body, counts), longest - LONG


def _loop_of(code: Code, number: int, queue: int) -> tuple[int, int]:
    """Return how many operations a queue has before the longest loop of a block, and in its body."""
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


class GroupState:
    """One core group of a phase: where it is, and what it has booked (as `BlockResult`).

    ``in_flight`` are the transfers that it keeps in flight on average on each link, in parts; ``unnoticed`` those
    of others that make none of its own later.  ``blocks`` has None before the first and after the last.
    """

    __slots__ = ("blocks", "booked", "ends", "extras", "in_flight", "index", "state", "time", "unnoticed")

    def __init__(self, table: BlockTable, blocks: Sequence[tuple[CutBlock, int]]) -> None:
        self.blocks = [*[None] * BEFORE, *(block for block, _ in blocks), *[None] * AFTER]
        self.extras = [extra for _, extra in blocks]
        self.index = self.state = self.time = 0
        self.in_flight, self.unnoticed = ([0] * len(table.program.link) for _ in range(2))
        self.booked, self.ends = np.zeros_like(table.booked()), np.zeros(len(table.program.queue), np.int64)


class MeanTraffic:
    """The core groups of one phase, from block to block in order of time.

    Each block of a group meets what the blocks that the others are at keep in flight on average.
    """

    def __init__(self, table: BlockTable, blocks: Iterable[Sequence[tuple[CutBlock, int]]]) -> None:
        self.table, self.rates = table, table.program.link["rate"].tolist()
        self.groups = [GroupState(table, sequence) for sequence in blocks]
        self.busy = [group for group in self.groups if group.extras]
        self.total = [0] * len(self.rates)

    def run(self) -> None:
        """Run every group's blocks; raise `ProgramError` if one cannot be simulated on its own."""
        self._find_first()
        waiting = [(0, number) for number, _ in enumerate(self.busy)]
        while waiting:
            _, number = waiting[0]
            group = self.busy[number]
            if group.state >= 0:
                self._pass(group)
                heapq.heapreplace(waiting, (group.time, number))
            else:
                heapq.heappop(waiting)
                self._set_in_flight(group, [0] * len(self.rates))

    def _set_in_flight(self, group: GroupState, parts: list[int]) -> None:
        for link, (before, now) in enumerate(zip(group.in_flight, parts, strict=True)):
            self.total[link] += now - before
        group.in_flight = parts

    def _result(self, group: GroupState) -> tuple[BlockResult, list[bool]]:
        """Return the result of a group's next block, and on which links it notices the transfers of others."""
        others, is_noticed = [], []
        for link, total in enumerate(self.total):
            parts = total - group.in_flight[link]
            is_noticed.append(parts > self.table.slack[link])
            group.unnoticed[link] = 0 if is_noticed[link] else parts
            others.append(rounded(parts) if is_noticed[link] else 0)
        return self.table.of(group.state, group.blocks, BEFORE + group.index, tuple(others)), is_noticed

    def _mean(self, group: GroupState, booked: Ints, cycles: int, is_noticed: Sequence[bool]) -> list[int]:
        """Return how many transfers a group keeps in flight on average while it books that, in parts.

        Others that make no operation later still make its transfers longer: each takes as long as all
        of them would one after the other.
        """
        links = len(self.rates)
        numbers, mean = booked[-2 * links :].tolist(), []
        for link, rate in enumerate(self.rates):
            if is_noticed[link]:
                mean.append((numbers[links + link] << PART_BITS) // max(1, cycles))
            else:
                alone = (numbers[link] << FRACTION_BITS) // rate
                shared = (group.unnoticed[link] + (1 << PART_BITS)) << PART_BITS
                mean.append(alone * shared // max(1, cycles))
        return mean

    def _pass(self, group: GroupState) -> None:
        """Let a group run its next block."""
        result, is_noticed = self._result(group)
        cycles, booked = with_extra(result, group.extras[group.index])
        group.booked += booked
        self._set_in_flight(group, self._mean(group, booked, cycles, is_noticed))
        if result.state < 0:
            group.ends = group.time + cycles - result.cycles + result.ends
        group.time += cycles
        group.state = result.state
        group.index += 1

    def _find_first(self) -> None:
        """Find how many transfers the groups' first blocks keep in flight together."""
        self._expect()
        most = len(self.groups) * len(self.table.program.queue) << PART_BITS
        for _ in range(ROUNDS):
            for link, slack in enumerate(self.table.slack):
                if self.total[link] <= slack:
                    continue
                least, rest = 0, most
                # More transfers of others make every transfer longer, and so more are in flight.
                while rounded(least) != rounded(rest):
                    guess = (least + rest) // 2
                    if rounded(guess) in (rounded(least), rounded(rest)):
                        break
                    for group in self.busy:
                        parts = [*group.in_flight]
                        parts[link] = guess // len(self.busy)
                        self._set_in_flight(group, parts)
                    self._expect()
                    if self.total[link] > guess:
                        least = guess
                    else:
                        rest = guess

    def _expect(self) -> None:
        """Find what each group's first block keeps in flight, beside what the others do by now."""
        results = [self._result(group) for group in self.busy]
        for group, (result, is_noticed) in zip(self.busy, results, strict=True):
            cycles, booked = with_extra(result, group.extras[0])
            self._set_in_flight(group, self._mean(group, booked, cycles, is_noticed))


def with_extra(result: BlockResult, extra: int) -> tuple[int, Ints]:
    """Return the cycles of a block with ``extra`` more iterations, and what is booked in it."""
    booked = result.booked + extra * result.span_booked // SPAN if extra else result.booked
    return result.cycles + extra * result.span_cycles // SPAN, booked


def rounded(parts: int) -> int:
    """Return a mean number of transfers, rounded to ``SIGNIFICANT`` bits."""
    unit = 1
    while parts >= unit << SIGNIFICANT:
        unit *= 2
    return (parts + unit // 2) // unit * unit
