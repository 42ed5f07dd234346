"""Pipes that the warps of a GPU's core share.

A queue of a GPU is a group of warps: it issues in order and executes one operation at a time.  The pipe that executes
an operation belongs to the core, and serves the operations of all queues in the order in which they become ready, and
in the order of the queues if they become ready together; an operation that needs several pipes (a product whose
operands come from shared memory) begins when all of them are free.

If the device file states the concurrent speeds of warp groups (``sharing``), their operations do not wait: all
arithmetic of a core runs at one speed, and so do all its products; each is slower than it would be alone, by the demand
of the current operations (`speeds`).  All numbers are integers, in units of 2^-20, and change only at the ticks at
which some work begins or ends, whatever the order within a tick.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from npusim.config.core_units import GroupMatrixEngine, TurnoverPipe, WarpIssue
from npusim.program.ir.tile_program import Share
from npusim.program.timing.link import Alarm, Wake
from npusim.program.timing.timing_result import QueueUse, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simpy import Environment

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.stream import Streams, TimedOp

#: Cause of a stall: another queue's operation is using the pipe.
PIPE_BUSY = "pipe busy"
#: One cycle of work, and the capacity of one pipe, as integers.
ONE_BITS = 20
ONE = 1 << ONE_BITS


class Rules(NamedTuple):
    """How arithmetic and products slow each other down, in 2^-20; see `IssueSpec`."""

    product_issue: int
    product_compare: int
    issue_product: int
    slowing: int


def sharing_of(program: TileProgram, device: DeviceSpec) -> Rules | None:
    """Return the rules of the core whose queues are warps; None for other cores."""
    for queue in program.queues:
        engine = device.engine(queue.core, queue.engine)
        if isinstance(engine, WarpIssue):
            s = engine.sharing.of(program.consumers)
            factors = s.product_issue_factor, s.product_compare_factor, s.issue_product_factor
            return Rules(*(round(f * ONE) for f in (*(f.value for f in factors), s.slowing)))
    return None


def turn_cycles(program: TileProgram, device: DeviceSpec) -> int:
    """Return the delay of each block that a core holds after the previous one.

    It is not 0 if the blocks' products take turns; blocks that read separate rows follow one another at the rate at
    which the core replaces blocks.
    """
    cores = {queue.core for queue in program.queues if queue.turn}
    engines = [engine for core in cores for engine in device.core(core).engines.values()]
    if program.has_own_rows:
        return next((round(e.block_cycles.value) for e in engines if isinstance(e, TurnoverPipe)), 0)
    return next((e.wgmma.turn_cycles.value for e in engines if isinstance(e, GroupMatrixEngine) and e.wgmma), 0)


def speeds(rules: Rules, issue: int, compare: int, special: int, tensor: int, memory: int) -> tuple[int, int]:
    """Return the speeds of arithmetic and of products, where 2^20 is the speed without the other, for these demands on
    each pipe.

    A product reads and writes its accumulators in the register file: it takes issue slots from arithmetic, and
    arithmetic takes time from it, unless the product needs no issue slots.
    """
    running = min(tensor, ONE)
    slots = issue + (rules.product_issue * running >> ONE_BITS)
    arithmetic = max(ONE, slots, compare + (rules.product_compare * running >> ONE_BITS), special, memory)
    arithmetic += (rules.slowing * running >> ONE_BITS) * arithmetic >> ONE_BITS
    product = max(ONE, tensor, memory)
    if issue and rules.issue_product:
        pressed = (rules.issue_product * issue >> ONE_BITS) + (rules.product_issue * running >> ONE_BITS)
        product = max(product, pressed)
    return (ONE << ONE_BITS) // arithmetic, (ONE << ONE_BITS) // product


class Customer(Protocol):
    """A queue that requests pipes: it has an operation, and is notified of its start."""

    op: TimedOp | None

    def served(self, begin: int, now: int) -> None:
        """The operation has the pipes from ``begin`` on."""


class Pipes:
    """The pipes that the queues of one core group share, first come, first served."""

    __slots__ = ("_alarm", "_env", "_is_set", "_waiting", "busy", "done", "free")

    def __init__(self, count: int, env: Environment) -> None:
        self.free, self.busy, self.done = [0] * count, [0] * count, [0] * count
        self._waiting: list[tuple[int, Customer]] = []
        self._env, self._alarm, self._is_set = env, Alarm(env, self._serve), False

    def ask(self, index: int, customer: Customer) -> None:
        """Serve queue ``index`` together with all others that are ready in this tick."""
        self._waiting.append((index, customer))
        if not self._is_set:
            self._is_set = True
            self._alarm.set(0, is_last=True)

    def book(self, op: TimedOp) -> None:
        """Count the busy time of an operation that waits for no pipe."""
        for pipe, cycles in op.pipes:
            self.busy[pipe] += cycles
            self.done[pipe] += 1

    def end(self, op: TimedOp, now: int) -> None:
        """Record the end of such an operation."""
        for pipe, _ in op.pipes:
            self.free[pipe] = max(self.free[pipe], now)

    def _serve(self, _event: object) -> None:
        now, self._is_set = int(self._env.now), False
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one[0]), []
        for _, customer in waiting:
            op = customer.op
            assert op is not None
            begin = max(now, *(self.free[pipe] for pipe, _ in op.pipes))
            for pipe, cycles in op.pipes:
                self.free[pipe] = begin + cycles
                self.busy[pipe] += cycles
                self.done[pipe] += 1
            customer.served(begin, now)


class ProcessorSharing:
    """The concurrent warp groups of one core: :meth:`join` begins work, a callback reports its end."""

    def __init__(self, env: Environment, rules: Rules) -> None:
        self.env, self.rules = env, rules
        self._work: tuple[list[tuple[int, int, Share, Callable[[], None]]], ...] = ([], [])
        self._load = [0] * (len(Share._fields) - 2)
        self._units, self._speed = [0, 0], [ONE, ONE]
        self._updated = self._sequence = 0
        self._wake = Wake(env, self._look)

    def join(self, share: Share, done: Callable[[], None]) -> None:
        """Begin some work now; call ``done`` when it is complete."""
        self._advance()
        self._sequence += 1
        kind = int(share.is_product)
        heapq.heappush(self._work[kind], (self._units[kind] + (share.cycles << ONE_BITS), self._sequence, share, done))
        self._change(share, 1)
        self._arm()

    def _change(self, share: Share, sign: int) -> None:
        self._load = [load + sign * part for load, part in zip(self._load, share[2:], strict=True)]
        self._speed = list(speeds(self.rules, *self._load))

    def _advance(self) -> None:
        now = int(self.env.now)
        for kind in range(2):
            self._units[kind] += (now - self._updated) * self._speed[kind]
        self._updated = now

    def _arm(self) -> None:
        waits = [
            max(0, -(-(work[0][0] - units) // speed))
            for work, units, speed in zip(self._work, self._units, self._speed, strict=True)
            if work
        ]
        if waits:
            self._wake.at(self._updated + min(waits))

    def _look(self, _due: int) -> None:
        self._advance()
        ended = []
        for kind in range(2):
            work = self._work[kind]
            while work and work[0][0] <= self._units[kind]:
                _, _, share, done = heapq.heappop(work)
                self._change(share, -1)
                ended.append(done)
            if not work:
                self._units[kind] = 0
        self._arm()
        for done in ended:
            done()


def shared_pipes(program: TileProgram, device: DeviceSpec) -> tuple[str, ...]:
    """Return the pipes of one core group that its queues share: ``sm.TENSOR``; none on an Ascend.

    The pipe that replaces ended blocks is included only for compiled rows: blocks of other programs include the cost of
    their start.
    """
    cores = dict.fromkeys(
        queue.core for queue in program.queues if isinstance(device.engine(queue.core, queue.engine), WarpIssue)
    )
    is_compiled = any(not queue.is_awaited for queue in program.queues)
    return tuple(
        f"{core}.{name}"
        for core in cores
        for name, engine in device.core(core).engines.items()
        if not isinstance(engine, WarpIssue) and (is_compiled or not isinstance(engine, TurnoverPipe))
    )


def span_of(op: TimedOp, streams: Streams, use: QueueUse, start: int, end: int) -> Span:
    """Return an operation's place on the timeline: the pipe that serves only it, else its queue."""
    if not op.pipes or op.share is not None:
        return Span(use.group, use.queue, op.label, start, end)
    pipe, cycles = op.pipes[0]
    return Span(use.group, streams.pipes[pipe], op.label, start, start + cycles, use.queue, end)


def pipe_uses(
    names: Sequence[str], group: int, busy: Sequence[int], done: Sequence[int], ends: Sequence[int]
) -> tuple[QueueUse, ...]:
    """Return the use of each shared pipe of one core group."""
    return tuple(QueueUse(name, group, busy[i], done[i], {}, ends[i], is_pipe=True) for i, name in enumerate(names))
