"""Approximate: each core group has its share of the links to itself, beside a mean of the others.

Where the groups all run different blocks (causal, dealt round robin) their joint state never
repeats.  Here a transfer shares a link with the group's own transfers, which are simulated, and
with as many others as the unfinished groups keep in flight on average in the blocks they are at.
A block then depends on nothing but the state in which its group enters it, and is simulated once;
long loops are cut short, and what an iteration takes is measured in the middle of them.

Model: the chance meetings of groups are averaged out; the difference that makes is measured on a part
of the program, which is simulated exactly too, and becomes the band of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.timing.block_code import Block, Code, check_range, code_of
from npusim.timing.block_counts import Counts
from npusim.timing.block_machine import (
    FRACTION_BITS,
    LEADER,
    RANGE_BITS,
    TODO,
    WINDOW_AT,
    build_machine,
    memory_of,
    record,
)
from npusim.timing.block_run import Booked, Run, history_of, uses_of
from npusim.timing.fold import Classes, equal_groups, fold_groups
from npusim.timing.gpu_pipes import refuse_shared_pipes
from npusim.timing.steady import Skipping, build_snapshots
from npusim.timing.stream import Streams
from npusim.timing.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.block_machine import EngineState, Ints, Program
    from npusim.timing.reserved_block import Groups, Known, ReservedBlocks
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
PLACES, PLACES_CROWDED, CROWDED = (0.5,), (0.25, 0.5, 0.75), 0.9
#: States and results kept; with more, blocks have too little in common for this method.
STATES, RESULTS = 2048, 4096
#: Room in the hash table for each result.
ROOM = 4
KIND_TYPE = record("body", "operand", "work", "since", "until")
RESULT_TYPE = record("state", "cycles", "part", "fetched")
PLACE_TYPE = record("time", "block", "state", "result")


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
    result = Reserved(code, classes, short).result()
    crowd = max((result.bound_cycles[link] for link in result.link_bytes), default=0)
    places = PLACES_CROWDED if crowd > CROWDED * result.cycles else PLACES
    error = 0.0
    for place in places:
        part = sample_of(code, classes, short, place, len(places))
        exact, found = Run(code, part).result("fold"), Reserved(code, part, short).result()
        error = max(error, abs(found.cycles / exact.cycles - 1))
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
    count = {block: code.operation_count(block) for block in set(classes.every_block())}
    return sum(count[block] for block in classes.every_block())


class Reserved:
    """One approximate simulation; phases with few classes of core groups, and those in
    ``short``, are simulated exactly.
    """

    def __init__(self, code: Code, classes: Classes, short: Collection[int] = ()) -> None:
        refuse_shared_pipes(code.streams, "reserved")
        self.code, self.streams = code, code.streams
        if self.streams.pipes:
            raise ProgramError(
                f"{self.streams.program.name}: method reserved has no queues that share pipes; use steady"
            )
        self.classes, self.short = classes.one_by_one(), short
        self.cycles = 0

    def result(self) -> TimingResult:
        """Run every phase and return what it took."""
        streams, groups = self.streams, len(self.classes.groups)
        queues, endpoints = len(streams.program.queues), len(streams.endpoints)

        def nothing(columns: int = queues) -> Ints:
            return np.zeros((groups, columns), np.int64)

        booked = Booked(nothing(), nothing(), nothing(), nothing(), stalled=nothing(endpoints))
        ends = []
        for number, phase in enumerate(self.classes.blocks):
            folded = fold_groups([(own,) for own in phase])
            if len(folded.groups) <= FEW_CLASSES or number in self.short:
                self._run_exactly(folded, booked)
            else:
                self._run_phase(phase, booked)
            self.cycles = max(self.cycles, int(booked.end.max(initial=0)))
            ends.append(self.cycles)
        counts = Counts(self.code)
        sequences = [list(chain(*own)) for own in zip(*self.classes.blocks, strict=True)]
        ran = np.array([counts.of_blocks(own) for own in sequences])
        booked.done[:] = [counts.by_queue(own) for own in ran]
        every = ran.sum(axis=0).tolist()
        links = dict.fromkeys(streams.device.links, 0)
        for op, count in zip(self.code.operations, every, strict=True):
            for link, size in op.flows:
                links[link] += count * size
        times = {o.key: n for o, n in zip(self.code.operations, every, strict=True) if n}
        uses = uses_of(streams, self.classes.groups, booked)
        return summarise(streams, "reserved", ends, uses, links, times, ())

    def _run_exactly(self, folded: Classes, booked: Booked) -> None:
        """Run one phase folded, skipping what repeats, and add what it books."""
        run = Run(self.code, folded)
        run.run_phase(0, Skipping(run))
        members, engine = len(folded.groups), run.machine.engine
        stalled = run.machine.counter["stalled"].reshape(members, -1)
        for member, groups in enumerate(folded.groups):
            own = engine.reshape(members, -1)[member]
            for group in groups:
                booked.busy[group] += own["busy"]
                booked.idle[group] += own["idle"]
                booked.stalled[group] += stalled[member]
                has_ended = own["end"] > 0
                booked.end[group, has_ended] = self.cycles + own["end"][has_ended]
        self.cycles += run.now

    def _run_phase(self, phase: Sequence[Sequence[int]], booked: Booked) -> None:
        """Run one phase group by group from where the one before it ended, and add what it books."""
        from npusim.timing.reserved_block import WINDOW
        from npusim.timing.reserved_kernel import run_groups
        from npusim.timing.steady_kernel import BUSY, ENGINE_TOTALS, IDLE

        blocks, leader = cut_blocks(self.code, phase)
        window = self.code.window(WINDOW)
        p = sole_member(self.code, len(phase))
        machine = build_machine(p, history_of(self.streams), self.code.levels)
        snapshots = build_snapshots(p, machine)
        columns = snapshots.totals.shape[1]
        known = build_known(p, machine, columns)
        self._begin(machine, known, leader, window)
        groups = build_groups(p, len(phase), columns)
        memory = memory_of(machine)
        if not run_groups(p, machine, memory, blocks, known, snapshots, groups, window):
            name = self.streams.program.name
            raise ProgramError(f"{name}: its blocks cannot be simulated one by one")
        queues = len(p.queue)
        engines = groups.total[:, : queues * ENGINE_TOTALS].reshape(-1, queues, ENGINE_TOTALS)
        booked.busy[:] += engines[:, :, BUSY]
        booked.idle[:] += engines[:, :, IDLE]
        has_ended = groups.end > 0
        booked.end[has_ended] = self.cycles + groups.end[has_ended]
        stalls = queues * ENGINE_TOTALS + 2 * machine.stack.size + 1
        booked.stalled[:] += groups.total[:, stalls : stalls + 2 * len(p.endpoint) : 2]

    def _begin(self, machine: EngineState, known: Known, leader: int, window: int) -> None:
        """Keep the state in which a group enters its first block, as number 0."""
        from npusim.timing.reserved_block import BEFORE

        dispatch = self.streams.device.timed_launch().block_dispatch_cycles.value
        engines = len(machine.engine)
        machine.size[LEADER], machine.size[WINDOW_AT] = leader, window
        for d in range(len(machine.dispatcher)):
            machine.dispatcher[d] = (dispatch, -1, window + BEFORE, 0)
            machine.todo[d] = engines + d
            machine.is_todo[engines + d] = 1
        machine.size[TODO] = len(machine.dispatcher)
        known.memory[0] = memory_of(machine)
        known.size[:] = (1, 0)
        known.digest[0] = known.moment[0] = 0


def sole_member(code: Code, groups: int) -> Program:
    """Return the arrays for one core group whose links others share in parts of a transfer."""
    from npusim.timing.reserved_block import PART_BITS

    program = code.program([1], [False])
    largest = int(program.flow["bytes"].max(initial=0))
    check_range(largest, groups * len(program.queue) << PART_BITS)
    program.link["rate"] = np.minimum(program.link["rate"], 1 << (RANGE_BITS - PART_BITS)) << PART_BITS
    program.link["unit"] <<= PART_BITS
    return program


def slack(program: Program) -> Ints:
    """Return how many transfers of others, in parts, leave every transfer of one's own as fast as its port."""
    from npusim.timing.reserved_block import PART_BITS

    found = []
    for link in range(len(program.link)):
        own, least = set(), None
        for op in range(len(program.op) - 1):
            for flow in program.flow[program.op[op]["flows"] : program.op[op + 1]["flows"]]:
                if flow["link"] == link:
                    own.add(int(program.op[op]["queue"]))
                    served = int(program.op[op]["occupancy"]) * int(program.link[link]["rate"])
                    fits = served // (int(flow["bytes"]) << FRACTION_BITS)
                    least = fits if least is None else min(least, fits)
        found.append(0 if least is None else max(0, least - (1 << PART_BITS)))
    return np.array(found, np.int64)


def cut_blocks(code: Code, groups: Sequence[Sequence[int]]) -> tuple[ReservedBlocks, int]:
    """Return what each group runs, each block's longest loop cut to ``LONG`` iterations, and who leads.

    The engine with most operations leads; blocks are told apart by what it is at.
    """
    from npusim.timing.reserved_block import ReservedBlocks

    cut = {number: _cut(code, number) for number in dict.fromkeys(chain(*groups))}
    kinds, counts = list(dict.fromkeys(c.block for c in cut.values())), Counts(code)
    # A block of just ``LONG`` iterations is the one that longer blocks are cut to.
    shortened = {c.block for c in cut.values() if c.extra}
    work = {number: counts.by_queue(counts.of_blocks((number,))) for number in kinds}
    leader = int(np.argmax(sum(work.values())))
    if not all(found[leader] for found in work.values()):
        raise ProgramError(f"{code.streams.program.name}: no queue has operations in every block")
    rows = []
    for number in kinds:
        block = code.blocks[number]
        since = until = 0
        if number in shortened:
            before, inner = _loop_of(code, counts, block, leader)
            since, until = before + HEAD * inner, before + (HEAD + SPAN) * inner
        rows.append((block.body, block.operand, int(work[number][leader]), since, until))
    place = {number: i for i, number in enumerate(kinds)}
    sequence = [cut[number] for number in chain(*groups)]
    blocks = ReservedBlocks(
        kind=np.array(rows, np.int64).view(KIND_TYPE).ravel(),
        span=np.array([SPAN], np.int64),
        first=np.array([0, *accumulate(len(own) for own in groups)], np.int64),
        sequence=np.array([place[c.block] for c in sequence], np.int64),
        extra=np.array([c.extra for c in sequence], np.int64),
    )
    return blocks, leader


def short_phases(code: Code, classes: Classes) -> tuple[int, ...]:
    """Return the phases that take less than the sample does, such as one that prepares inputs."""
    sizes = (operations_of(code, Classes(classes.groups, (phase,))) for phase in classes.blocks)
    return tuple(number for number, size in enumerate(sizes) if size <= SAMPLE_OPERATIONS)


def sample_of(code: Code, classes: Classes, short: Collection[int], place: float, places: int) -> Classes:
    """Return one of ``places`` parts on which this method is held against an exact one, without
    ``short`` phases.

    Raises :class:`ProgramError` where groups go in step in all of it: that would say nothing.
    """
    operations = operations_of(code, classes)
    limit = max(SAMPLE_OPERATIONS, min(operations // SAMPLE_PARTS, MOST_SAMPLED // places))
    while limit < operations:
        part = part_at(place, code, classes, limit, short)
        if len(part.groups) > FEW_CLASSES:
            return part
        limit *= 2
    raise ProgramError(f"{code.streams.program.name}: core groups go in step; use method steady")


def part_at(place: float, code: Code, classes: Classes, limit: int, short: Collection[int]) -> Classes:
    """Return whole blocks from ``place`` of what every core group runs, some ``limit`` operations in all."""
    phases: list[list[tuple[int, ...]]] = []
    for number, phase in enumerate(classes.one_by_one().blocks):
        turns = 0 if number in short else max(map(len, phase))
        first = last = int(place * turns)
        left = limit // (len(classes.blocks) - len(short))
        while left > 0 and last - first < turns:
            if last < turns:
                at, last = last, last + 1
            else:
                at = first = first - 1
            left -= sum(code.operation_count(own[at]) for own in phase if at < len(own))
        phases.append([own[first:last] for own in phase])
    return fold_groups(list(zip(*phases, strict=True)))


@dataclass(frozen=True, slots=True)
class Cut:
    """A block's number with at most ``LONG`` iterations of its longest loop, and how many it has more."""

    block: int
    extra: int


def _cut(code: Code, number: int) -> Cut:
    """Return a block cut to ``LONG`` iterations, if it is longer."""
    block = code.blocks[number]
    longest = max(block.counts, default=0)
    if longest <= LONG:
        return Cut(number, 0)
    at = block.counts.index(longest)
    counts = (*block.counts[:at], LONG, *block.counts[at + 1 :])
    return Cut(code.block_of(block.body, counts), longest - LONG)


def _loop_of(code: Code, counts: Counts, block: Block, queue: int) -> tuple[int, int]:
    """Return how many operations a queue has before the longest loop of a block, and in its body."""
    body, longest = code.bodies[block.body], block.counts.index(max(block.counts))
    before = repeat = 0
    for part in body.parts:
        if part and part[0] == "repeat":
            inner = int(counts.by_queue(counts.of_body(part[2]))[queue])
            if repeat == longest:
                return before, inner
            before += block.counts[repeat] * inner
            repeat += 1
        elif part and isinstance(part[0], str):
            before += part[1] * int(counts.by_queue(counts.of_body(part[2]))[queue])
        else:
            before += sum(code.operations[op].queue == queue for op in part)
    raise AssertionError("a block has as many loops as counts")


def build_known(program: Program, machine: EngineState, columns: int) -> Known:
    """Return empty tables of states and results; what is not used costs no memory."""
    from npusim.timing.reserved_block import OTHERS, Known

    def empty(*shape: int) -> Any:
        return np.empty(shape, np.int64)

    return Known(
        memory=empty(STATES, len(memory_of(machine))),
        moment=np.zeros(STATES, np.int64),
        digest=empty(STATES),
        key=empty(RESULTS, OTHERS + len(program.link)),
        place=np.full(RESULTS * ROOM, -1, np.int64),
        result=np.empty(RESULTS, RESULT_TYPE),
        total=empty(RESULTS, columns),
        part=empty(RESULTS, columns),
        end=empty(RESULTS, len(program.queue)),
        size=np.zeros(2, np.int64),
    )


def build_groups(program: Program, groups: int, columns: int) -> Groups:
    """Return core groups that have yet to begin."""
    from npusim.timing.reserved_block import Groups

    def zeros(width: int) -> Any:
        return np.zeros((groups, width), np.int64)

    return Groups(
        place=np.zeros(groups, PLACE_TYPE),
        flying=zeros(len(program.link)),
        met=zeros(len(program.link)),
        total=zeros(columns),
        end=zeros(len(program.queue)),
        slack=slack(program),
    )
