"""One block of a core group beside the mean traffic of the others: simulated once, and remembered.

What a block takes depends on the state in which its group enters it, on itself and its neighbours, and on how many
transfers of other groups share the links meanwhile.  The engine runs one core group, whose links carry those others
as a weight that stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.timing.engine import history_of
from npusim.timing.engine_arrays import (
    CALL,
    CROSSED,
    FETCHED,
    HALT,
    HALTED,
    LEADER,
    MOMENT,
    NEVER,
    RANGE_BITS,
    TARGET,
    TODO,
    WINDOW_AT,
    build_state,
    memory_of,
)
from npusim.timing.engine_code import check_range
from npusim.timing.link import FRACTION_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npusim.timing.engine_arrays import Ints, Program
    from npusim.timing.engine_code import Code

#: Parts of a transfer in which means are counted, as a shift.
PART_BITS = 8
#: Calls written for a simulation: the block before, the block itself and those that scalar units may
#: be at already: small blocks fit into the instruction queues several at a time.
BEFORE, AFTER = 1, 30
WINDOW = BEFORE + 1 + AFTER
#: States and results kept; with more, blocks have too little in common for this method.
STATES, RESULTS = 2048, 4095


class CutBlock(NamedTuple):
    """A block whose longest loop was cut short, by its number.

    ``work`` is how many operations the leading engine has in it; where its loop was cut, the pace is taken from
    when that has done ``since`` of them to when it has done ``until``.
    """

    number: int
    work: int
    since: int = 0
    until: int = 0


@dataclass(slots=True)
class BlockResult:
    """What a block takes: cycles, what is booked in them, and the same of the span in which its pace is taken.

    Booked are, one after the other: cycles that every queue was busy and idle, cycles that every endpoint waited,
    bytes on every link, and transfers in flight on every link, summed over cycles.  ``state`` is what the next block
    is entered in, -1 where there is none; then ``ends`` are the last results of every queue.  ``neighbours`` are the
    blocks around it, by distance, that scalar units fetched meanwhile.
    """

    state: int
    cycles: int
    booked: Ints
    span_cycles: int
    span_booked: Ints
    ends: Ints
    neighbours: tuple[tuple[int, int], ...]


class BlockTable:
    """Results of blocks, by all that they depend on.

    ``groups`` core groups share the links; the engine ``leader`` tells blocks apart.
    """

    def __init__(self, code: Code, groups: int, leader: int) -> None:
        from npusim.formats.jit import Table
        from npusim.timing.periodic import build_snapshots, run_engine

        self.code, self.leader = code, leader
        self.window = code.window(WINDOW)
        self.program = sole_member(code, groups)
        self.state = build_state(self.program, history_of(code.streams), code.levels)
        self.memory = memory_of(self.state)
        self.snapshots = build_snapshots(self.program, self.state)
        tables: Any = tuple(map(Table, (self.program, self.state, self.snapshots)))
        self._run_engine: Callable[[int], int] = partial(run_engine, *tables)
        self.slack = slack(self.program)
        self._states: dict[object, int] = {None: 0}
        self._entered = [self._first_state()]
        self._results: dict[object, list[BlockResult]] = {}
        self._count = 0

    def _first_state(self) -> tuple[Ints, int, int]:
        """Return what a group enters its first block in: the memory, the links' clock, the leader's."""
        m = self.state
        dispatch = self.code.streams.device.timed_launch().block_dispatch_cycles.value
        m.size[LEADER], m.size[WINDOW_AT] = self.leader, self.window
        for d in range(len(m.dispatcher)):
            m.dispatcher[d] = (dispatch, -1, self.window + BEFORE, 0)
            m.todo[d] = len(m.engine) + d
            m.is_todo[len(m.engine) + d] = 1
        m.size[TODO] = len(m.dispatcher)
        return self.memory.copy(), 0, 0

    def of(self, state: int, blocks: Sequence[CutBlock | None], at: int, others: tuple[int, ...]) -> BlockResult:
        """Return the result of ``blocks[at]``, entered in ``state`` beside so many parts of transfers of others.

        There is None before the first and after the last of ``blocks``.  Raises `ProgramError` where scalar units are
        too far apart, or blocks have too little in common.
        """
        block = blocks[at]
        assert block is not None
        alike = self._results.setdefault((state, block.number, blocks[at + 1] is None, others), [])
        for result in alike:
            if all(_number(blocks[at + distance]) == number for distance, number in result.neighbours):
                return result
        if self._count == RESULTS:
            raise self._refusal()
        self._count += 1
        alike.append(self._simulate(state, blocks[at - BEFORE : at + 1 + AFTER], others))
        return alike[-1]

    def _refusal(self) -> ProgramError:
        return ProgramError(f"{self.code.streams.program.name}: its blocks cannot be simulated one by one")

    def _simulate(self, state: int, window: Sequence[CutBlock | None], others: tuple[int, ...]) -> BlockResult:
        m, block, is_last = self.state, window[BEFORE], window[BEFORE + 1] is None
        assert block is not None
        moment, now = self._enter(state, window, others)
        done, before = int(m.engine[self.leader]["done"]), self.booked()
        span_cycles, span_booked = 0, np.zeros_like(before)
        if block.until:
            now = self._run(now, done + block.since)
            span_cycles, span_booked = -int(m.size[MOMENT]), -self.booked()
            now = self._run(now, done + block.until)
            span_cycles += int(m.size[MOMENT])
            span_booked += self.booked()
        now = self._run(now, NEVER if is_last else done + block.work)
        m.link["load"] -= others
        ends = m.engine["end"] - moment
        fetched = int(m.size[FETCHED])
        neighbours = tuple((i - BEFORE, _number(b)) for i, b in enumerate(window) if fetched >> i & 1 and i != BEFORE)
        booked = self.booked() - before
        cycles = max(0, int(ends.max())) if is_last else int(m.size[MOMENT]) - moment
        following = -1 if is_last else self._leave(now, window[-1])
        return BlockResult(following, cycles, booked, span_cycles, span_booked, ends, neighbours)

    def _enter(self, state: int, window: Sequence[CutBlock | None], others: tuple[int, ...]) -> tuple[int, int]:
        """Put the engine where a block is entered, with others' transfers on the links; return when that is."""
        m, calls = self.state, self.program.code[self.window : self.window + WINDOW]
        self.memory[:], now, moment = self._entered[state]
        for call, cut in zip(calls, window, strict=True):
            if cut is None:
                call["kind"] = HALT
            else:
                block = self.code.blocks[cut.number]
                call["kind"], call["argument"], call["operand"] = CALL, block.body, block.operand
        self.program.link["others"] = others
        m.link["load"] += others
        m.link["due"][m.link["flows"] > 0] = now
        m.size[FETCHED] = 0
        return moment, now

    def _run(self, now: int, target: int) -> int:
        """Run until the leading engine has done ``target`` operations, or to the end where that is `NEVER`."""
        m = self.state
        m.size[TARGET], m.size[CROSSED] = target, 0
        now = self._run_engine(now)
        is_through = not (m.engine["op"] >= 0).any() and not m.engine["length"].any()
        if not (is_through if target == NEVER else m.size[CROSSED]):
            raise self._refusal()
        m.size[CROSSED] = 0
        return now

    def _leave(self, now: int, last: CutBlock | None) -> int:
        """Return the number of the state in which the next block is entered, keeping it if it is new."""
        m, pending = self.state, []
        for d, dispatcher in enumerate(m.dispatcher):
            level = dispatcher["level"]
            if dispatcher["pending"] == HALTED:
                if last is not None:
                    raise self._refusal()  # it would have had more to issue
                continue
            # The calls move up by one.
            counter = m.stack[d, 0] if level else dispatcher
            counter["pc"] -= 1
            if counter["pc"] < self.window:
                raise self._refusal()
            pending.append(m.stack[d, :level]["left"].tobytes())
        key = self.snapshots.words[0, : self.snapshots.length[0]].tobytes(), *pending
        number = self._states.get(key)
        if number is None:
            number = self._states[key] = len(self._entered)
            if number == STATES:
                raise self._refusal()
            self._entered.append((self.memory.copy(), now, int(m.size[MOMENT])))
        return number

    def booked(self) -> Ints:
        """Return all that the group has booked so far."""
        e, link = self.state.engine, self.state.link
        columns = e["busy"], e["idle"], self.state.counter["stalled"], link["bytes"], link["flow_cycles"]
        return np.concatenate(columns)


def _number(block: CutBlock | None) -> int:
    return -1 if block is None else block.number


def sole_member(code: Code, groups: int) -> Program:
    """Return the arrays for one core group whose links others share in parts of a transfer."""
    program = code.program([1], [False])
    largest = int(program.flow["bytes"].max(initial=0))
    check_range(largest, groups * len(program.queue) << PART_BITS)
    program.link["rate"] = np.minimum(program.link["rate"], 1 << (RANGE_BITS - PART_BITS)) << PART_BITS
    program.link["unit"] <<= PART_BITS
    return program


def slack(program: Program) -> list[int]:
    """Return how many transfers of others, in parts, leave every transfer of one's own as fast as its port."""
    fits: list[list[int]] = [[] for _ in program.link]
    for op, following in pairwise(program.op):
        for flow in program.flow[op["flows"] : following["flows"]]:
            served = int(op["occupancy"]) * int(program.link[flow["link"]]["rate"])
            fits[flow["link"]].append(served // (int(flow["bytes"]) << FRACTION_BITS))
    return [max(0, min(of_link) - (1 << PART_BITS)) if of_link else 0 for of_link in fits]
