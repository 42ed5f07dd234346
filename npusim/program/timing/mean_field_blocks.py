"""One block of a core group with the mean traffic of the others: simulated once, and stored.

The time of a block depends on the state in which its group enters it, on the block and its neighbours, and on the
number of concurrent transfers of other groups on the links.  The engine runs one core group; on its links the others
are a constant weight.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.program.timing.engine import history_of
from npusim.program.timing.engine_arrays import (
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
from npusim.program.timing.engine_code import check_range
from npusim.program.timing.link import FRACTION_BITS
from npusim.program.timing.mean_field_arrays import ANY, BEFORE, NO_BLOCK, PART_BITS, WINDOW, build_results, head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npusim.program.timing.engine_arrays import Ints, Program
    from npusim.program.timing.engine_code import Code

#: Number of stored states; with more, blocks have too little in common for this method.
STATES = 2048
PLACES = np.arange(WINDOW)


class CutBlock(NamedTuple):
    """A block whose longest loop was shortened, by its number.

    ``work`` is the number of operations of the leading engine in it; if its loop was shortened, the rate is measured
    between its operations ``since`` and ``until``.
    """

    number: int
    work: int
    since: int = 0
    until: int = 0


class BlockTable:
    """Results of ``blocks``, whose loops may be shortened, by everything on which they depend.

    ``groups`` core groups share the links; the engine ``leader`` distinguishes blocks.
    """

    def __init__(self, code: Code, groups: int, leader: int, blocks: Iterable[CutBlock]) -> None:
        from npusim.formats.jit import Table
        from npusim.program.timing.periodic import build_snapshots, run_engine

        self.code, self.leader = code, leader
        self.blocks = {block.number: block for block in blocks}
        self.window = code.window(WINDOW)
        self.program = sole_member(code, groups)
        self.state = build_state(self.program, history_of(code.streams), code.levels)
        self.memory = memory_of(self.state)
        self.snapshots = build_snapshots(self.program, self.state)
        tables: Any = tuple(map(Table, (self.program, self.state, self.snapshots)))
        self._run_engine: Callable[[int], int] = partial(run_engine, *tables)
        rates = self.program.link["rate"].tolist()
        self.results = build_results(list(zip(rates, slack(self.program), strict=True)), len(self.booked()))
        calls = [(CALL, block.body, block.operand) for block in code.blocks]
        #: Calls of blocks by number; the call of no block is last.
        self._calls = np.array([*calls, (HALT, 0, 0)], self.program.code.dtype)
        #: Last results of every queue, for blocks that are the last.
        self.ends: dict[int, Ints] = {}
        self._states: dict[object, int] = {None: 0}
        self._entered = [self._first_state()]

    def _first_state(self) -> tuple[Ints, int, int]:
        """Return the state in which a group enters its first block: the memory, the links' clocks, and the leader's
        clock.
        """
        m = self.state
        dispatch = self.code.streams.device.timed_launch().block_dispatch_cycles.value
        m.size[LEADER], m.size[WINDOW_AT] = self.leader, self.window
        for d in range(len(m.dispatcher)):
            m.dispatcher[d] = (dispatch, -1, self.window + BEFORE, 0)
            m.todo[d] = len(m.engine) + d
            m.is_todo[len(m.engine) + d] = 1
        m.size[TODO] = len(m.dispatcher)
        return self.memory.copy(), 0, 0

    def _refusal(self) -> ProgramError:
        return ProgramError(f"{self.code.streams.program.name}: its blocks cannot be simulated one by one")

    def add(self, state: int, numbers: Ints, others: Ints) -> None:
        """Simulate a block that begins in ``state``, and store its time; ``others``: shares of other blocks' transfers.

        ``numbers``: the indices of the block and of its neighbours, `WINDOW` in total.  Raises `ProgramError` if scalar
        units are too far apart, or if blocks have too little in common.
        """
        r, m, block = self.results, self.state, self.blocks[int(numbers[BEFORE])]
        index, is_last = int(r.known[0]), bool(numbers[BEFORE + 1] == NO_BLOCK)
        if index == len(r.result):
            raise self._refusal()
        moment, now = self._enter(state, numbers, others)
        done, before = int(m.engine[self.leader]["done"]), self.booked()
        span_cycles = 0
        r.span_booked[index] = 0
        if block.until:
            now = self._run(now, done + block.since)
            span_cycles, r.span_booked[index] = -int(m.size[MOMENT]), -self.booked()
            now = self._run(now, done + block.until)
            span_cycles += int(m.size[MOMENT])
            r.span_booked[index] += self.booked()
        now = self._run(now, NEVER if is_last else done + block.work)
        m.link["load"] -= others
        r.booked[index], r.others[index] = self.booked() - before, others
        r.neighbour[index] = np.where(m.size[FETCHED] >> PLACES & 1, numbers, ANY)
        r.neighbour[index, BEFORE] = ANY
        cycles, following = int(m.size[MOMENT]) - moment, NO_BLOCK
        if is_last:
            self.ends[index] = m.engine["end"] - moment
            cycles = max(0, int(self.ends[index].max()))
        else:
            following = self._leave(now, has_more=bool(numbers[-1] != NO_BLOCK))
        head = head_of(state, block.number, is_last)
        r.result[index] = (state, block.number, is_last, following, cycles, span_cycles, r.head[head])
        r.head[head] = index
        r.known[0] += 1

    def _enter(self, state: int, numbers: Ints, others: Ints) -> tuple[int, int]:
        """Put the engine into the state in which a block is entered, with others' transfers on the links; return its
        time.
        """
        m = self.state
        self.memory[:], now, moment = self._entered[state]
        self.program.code[self.window : self.window + WINDOW] = self._calls[numbers]
        self.program.link["others"] = others
        m.link["load"] += others
        m.link["due"][m.link["flows"] > 0] = now
        m.size[FETCHED] = 0
        return moment, now

    def _run(self, now: int, target: int) -> int:
        """Run until the leading engine has completed ``target`` operations, or to the end if that is `NEVER`."""
        m = self.state
        m.size[TARGET], m.size[CROSSED] = target, 0
        now = self._run_engine(now)
        is_through = not (m.engine["op"] >= 0).any() and not m.engine["length"].any()
        if not (is_through if target == NEVER else m.size[CROSSED]):
            raise self._refusal()
        m.size[CROSSED] = 0
        return now

    def _leave(self, now: int, *, has_more: bool) -> int:
        """Return the number of the state in which the next block is entered; store the state if it is new."""
        m, pending = self.state, []
        for d, dispatcher in enumerate(m.dispatcher):
            level = dispatcher["level"]
            if dispatcher["pending"] == HALTED:
                if has_more:
                    raise self._refusal()  # the scalar unit would have had more instructions to issue
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
        """Return all records of the group so far."""
        e, link = self.state.engine, self.state.link
        columns = e["busy"], e["idle"], self.state.counter["stalled"], link["bytes"], link["flow_cycles"]
        return np.concatenate(columns)


def sole_member(code: Code, groups: int) -> Program:
    """Return the arrays for one core group that shares its links with others, in parts of a transfer."""
    program = code.program([1], [False])
    largest = int(program.flow["bytes"].max(initial=0))
    check_range(largest, groups * len(program.queue) << PART_BITS)
    program.link["rate"] = np.minimum(program.link["rate"], 1 << (RANGE_BITS - PART_BITS)) << PART_BITS
    program.link["unit"] <<= PART_BITS
    return program


def slack(program: Program) -> list[int]:
    """Return the number of other groups' transfers, in parts, up to which the group's own transfers run at its port's
    speed.
    """
    fits: list[list[int]] = [[] for _ in program.link]
    for op, following in pairwise(program.op):
        for flow in program.flow[op["flows"] : following["flows"]]:
            served = int(op["occupancy"]) * int(program.link[flow["link"]]["rate"])
            fits[flow["link"]].append(served // (int(flow["bytes"]) << FRACTION_BITS))
    return [max(0, min(of_link) - (1 << PART_BITS)) if of_link else 0 for of_link in fits]
