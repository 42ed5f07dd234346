"""Approximate: each core group has its share of the links to itself, beside a mean of the others.

Where the groups all run different blocks (causal, dealt round robin) their joint state never
repeats.  Here a transfer shares a link with the group's own transfers, which are simulated, and
with as many others as the unfinished groups keep in flight on average in the blocks they are at.
A block then depends on nothing but the state in which its group enters it, and is simulated once;
long loops are cut short, and what an iteration takes is the difference of two lengths.

Model: the chance meetings of groups are averaged out; ``auto`` measures the difference to ``des``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.timing.block_code import Code, check_range
from npusim.timing.block_counts import Counts
from npusim.timing.block_machine import (
    FRACTION_BITS,
    LEADER,
    TODO,
    WINDOW_AT,
    build_machine,
    memory_of,
    record,
)
from npusim.timing.block_run import Booked, history_of, uses_of
from npusim.timing.fold import every_group
from npusim.timing.steady import build_snapshots
from npusim.timing.stream import Streams
from npusim.timing.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from npusim.ir.program import TileProgram
    from npusim.spec.device import DeviceSpec
    from npusim.timing.block_machine import Ints, Machine, Program
    from npusim.timing.fold import Classes
    from npusim.timing.reserved_kernel import Blocks, Groups, Known
    from npusim.timing.result import TimingResult

#: Iterations that a long loop is cut to, and those of its second simulation.
LONG, SHORT = 10, 6
#: States and results kept; with more, blocks have too little in common for this method.
STATES, RESULTS = 2048, 4096
#: Places of the hash table for each result.
PLACES = 4
KIND_TYPE = record("body", "operand", "short", "work", "short_work")
RESULT_TYPE = record("state", "cycles", "part", "fetched")
PLACE_TYPE = record("time", "block", "state", "result")


def simulate(
    program: TileProgram,
    device: DeviceSpec,
    *,
    trace_groups: Collection[int] = (),  # noqa: ARG001 - the signature of all methods
    streams: Streams | None = None,
) -> TimingResult:
    """Return the approximate time of ``program``; there are no spans, whatever ``trace_groups``.

    Operations and bytes are exact.  Raises :class:`~npusim.errors.ProgramError` if blocks cannot be
    simulated one by one: a scalar unit is a block ahead of another, or too many blocks differ.
    """
    code = Code(streams or Streams(program, device))
    return Reserved(code, every_group(code)).result()


class Reserved:
    """One approximate simulation; ``classes`` has a member for each core group."""

    def __init__(self, code: Code, classes: Classes) -> None:
        from npusim.timing.reserved_kernel import WINDOW

        self.code, self.classes, self.streams = code, classes, code.streams
        self.counts = Counts(code)
        self.cuts = [cut_blocks(code, phase, self.counts) for phase in classes.blocks]
        self.window = code.window(WINDOW)
        self.program = sole_member(code, len(classes.groups))
        self.slack = slack(self.program)
        self.cycles = self.simulated = 0

    def result(self) -> TimingResult:
        """Run every phase and return what it took."""
        streams, groups = self.streams, len(self.classes.groups)
        queues, endpoints = len(self.program.queue), len(self.program.endpoint)
        booked = Booked(
            *(np.zeros((groups, queues), np.int64) for _ in range(4)),  # busy, done, end, idle
            np.zeros((groups, endpoints), np.int64),
        )
        for blocks, leader in self.cuts:
            self.run_phase(blocks, leader, booked)
        sequences = [chain(*own) for own in zip(*self.classes.blocks, strict=True)]
        ran = np.array([self.counts.of_blocks(own) for own in sequences])
        queue_of = self.program.op["queue"][:-1]
        for queue in range(queues):
            booked.done[:, queue] = ran[:, queue_of == queue].sum(axis=1)
        every = ran.sum(axis=0).tolist()
        links = dict.fromkeys(streams.device.links, 0)
        for op, times in zip(self.code.operations, every, strict=True):
            for link, size in op.flows:
                links[link] += times * size
        counts = {o.key: n for o, n in zip(self.code.operations, every, strict=True) if n}
        uses = uses_of(streams, self.classes.groups, booked)
        return summarise(streams, "reserved", self.cycles, uses, links, counts, ())

    def run_phase(self, blocks: Blocks, leader: int, booked: Booked) -> None:
        """Run one phase from where the one before it ended, and add what it books."""
        from npusim.timing.reserved_kernel import run_groups
        from npusim.timing.steady_kernel import BUSY, ENGINE_TOTALS, IDLE

        p, code = self.program, self.code
        machine = build_machine(p, history_of(self.streams), code.levels)
        snapshots = build_snapshots(p, machine)
        columns = snapshots.totals.shape[1]
        known = build_known(p, machine, columns)
        self._begin(machine, known, leader)
        groups = build_groups(p, len(self.classes.groups), columns, self.slack)
        done = run_groups(
            p, machine, memory_of(machine), blocks, known, snapshots, groups, self.window
        )
        if not done:
            raise ProgramError(f"{self.streams.program.name}: its blocks cannot be simulated one by one")
        queues, start = len(p.queue), self.cycles
        engines = groups.total[:, : queues * ENGINE_TOTALS].reshape(-1, queues, ENGINE_TOTALS)
        booked.busy[:] += engines[:, :, BUSY]
        booked.idle[:] += engines[:, :, IDLE]
        has_ended = groups.end > 0
        booked.end[has_ended] = start + groups.end[has_ended]
        stalls = queues * ENGINE_TOTALS + 2 * machine.stack.size + 1
        booked.stalled[:] += groups.total[:, stalls : stalls + 2 * len(p.endpoint) : 2]
        self.cycles = max(start, int(booked.end.max(initial=0)))

    def _begin(self, machine: Machine, known: Known, leader: int) -> None:
        """Keep the state in which a group enters its first block, as number 0."""
        from npusim.timing.reserved_kernel import BEFORE

        dispatch = self.streams.device.timed_launch().block_dispatch_cycles.value
        engines = len(machine.engine)
        machine.size[LEADER], machine.size[WINDOW_AT] = leader, self.window
        for d in range(len(machine.dispatcher)):
            machine.dispatcher[d] = (dispatch, -1, self.window + BEFORE, 0)
            machine.todo[d] = engines + d
            machine.is_todo[engines + d] = 1
        machine.size[TODO] = len(machine.dispatcher)
        known.memory[0] = memory_of(machine)
        known.size[:] = (1, 0)
        known.digest[0] = known.moment[0] = 0


def sole_member(code: Code, groups: int) -> Program:
    """Return the arrays for one core group whose links others share in parts of a transfer."""
    from npusim.timing.reserved_kernel import PART_BITS

    program = code.program([1], [False])
    largest = int(program.flow["bytes"].max(initial=0))
    check_range(largest, groups * len(program.queue) << PART_BITS)
    program.link["rate"] <<= PART_BITS
    program.link["unit"] <<= PART_BITS
    return program


def slack(program: Program) -> Ints:
    """Return how many transfers of others, in parts, leave every transfer of one's own as fast as its port."""
    from npusim.timing.reserved_kernel import PART_BITS

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


def cut_blocks(
    code: Code, groups: Sequence[Sequence[int]], counts: Counts
) -> tuple[Blocks, int]:
    """Return what each group runs, each block's longest loop cut to ``LONG`` iterations, and who leads.

    The engine with most operations leads; blocks are told apart by what it is at.
    """
    from npusim.timing.reserved_kernel import Blocks

    cut = {number: _cut(code, number) for number in dict.fromkeys(chain(*groups))}
    kinds = {c.long: c for c in cut.values()}
    work = {n: _by_queue(code, counts, n) for c in kinds.values() for n in (c.long, c.short)}
    leader = int(np.argmax(sum(work.values())))
    rows = []
    for c in kinds.values():
        body, operand = code.blocks[c.long].body, code.blocks[c.long].operand
        short = code.blocks[c.short].operand if c.short != c.long else -1
        rows.append((body, operand, short, int(work[c.long][leader]), int(work[c.short][leader])))
    if not all(work[number][leader] for number in work):
        raise ProgramError(f"{code.streams.program.name}: no queue has operations in every block")
    place = {number: i for i, number in enumerate(kinds)}
    sequence = [cut[number] for number in chain(*groups)]
    blocks = Blocks(
        kind=np.array(rows, np.int64).view(KIND_TYPE).ravel(),
        loop=np.array([c.loop for c in kinds.values()], np.int64),
        cut=np.array([LONG - SHORT], np.int64),
        first=np.array([0, *accumulate(len(own) for own in groups)], np.int64),
        sequence=np.array([place[c.long] for c in sequence], np.int64),
        extra=np.array([c.extra for c in sequence], np.int64),
    )
    return blocks, leader


@dataclass(frozen=True, slots=True)
class Cut:
    """A block's number with ``LONG`` and with ``SHORT`` iterations, how many it has more, and which loop's."""

    long: int
    short: int
    extra: int
    loop: tuple[int, ...]  #: first instruction by issuer


def _cut(code: Code, number: int) -> Cut:
    """Return a block cut short, if it is long."""
    block = code.blocks[number]
    longest = max(block.counts, default=0)
    if longest <= LONG:
        return Cut(number, number, 0, (-1,) * len(code.streams.issuers))
    at = block.counts.index(longest)
    lengths = [(*block.counts[:at], n, *block.counts[at + 1 :]) for n in (LONG, SHORT)]
    long, short = (code.block_of(block.body, counts) for counts in lengths)
    return Cut(long, short, longest - LONG, code.bodies[block.body].repeats[at][1])


def _by_queue(code: Code, counts: Counts, number: int) -> Ints:
    """Return how many operations of a block each queue has."""
    found = np.zeros(len(code.streams.program.queues), np.int64)
    np.add.at(found, [op.queue for op in code.operations], counts.of_blocks([number]))
    return found


def build_known(program: Program, machine: Machine, columns: int) -> Known:
    """Return empty tables of states and results; what is not used costs no memory."""
    from npusim.timing.reserved_kernel import OTHERS, Known

    def empty(*shape: int) -> Any:
        return np.empty(shape, np.int64)

    return Known(
        memory=empty(STATES, len(memory_of(machine))), moment=np.zeros(STATES, np.int64),
        digest=empty(STATES), key=empty(RESULTS, OTHERS + len(program.link)),
        place=np.full(RESULTS * PLACES, -1, np.int64), result=np.empty(RESULTS, RESULT_TYPE),
        total=empty(RESULTS, columns), part=empty(RESULTS, columns),
        end=empty(RESULTS, len(program.queue)), size=np.zeros(2, np.int64),
    )  # fmt: skip


def build_groups(program: Program, groups: int, columns: int, slack: Ints) -> Groups:
    """Return core groups that have yet to begin."""
    from npusim.timing.reserved_kernel import Groups

    def zeros(width: int) -> Any:
        return np.zeros((groups, width), np.int64)

    return Groups(
        place=np.zeros(groups, PLACE_TYPE), flying=zeros(len(program.link)),
        met=zeros(len(program.link)), total=zeros(columns),
        end=zeros(len(program.queue)), slack=slack,
    )  # fmt: skip
