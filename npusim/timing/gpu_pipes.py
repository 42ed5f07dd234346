"""Pipes that the warps of a GPU's core share.

A queue of a GPU is a group of warps: it issues in order and does one operation at a time.  The pipe
that executes an operation belongs to the core, and serves the operations of all queues in the order
in which they are ready, ties by the number of the queue; an operation that keeps several pipes busy
(a product whose operands come from shared memory) begins when all of them are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from npusim.config.gpu_engine import WarpIssue
from npusim.errors import ProgramError
from npusim.timing.link import AFTER_ALL, Alarm
from npusim.timing.result import QueueUse, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.stream import Streams, TimedOp

#: Cause of a stall: another queue's operation is on the pipe.
PIPE_BUSY = "pipe busy"


class Customer(Protocol):
    """A queue that asks for pipes: it has an operation, and is told when that begins."""

    op: TimedOp | None

    def served(self, begin: int, now: int) -> None:
        """The pipes are this operation's from ``begin`` on."""


class Pipes:
    """The pipes that the queues of one core group share, first come first served.

    ``now`` tells the time, ``alarm`` makes an alarm that calls back.
    """

    __slots__ = ("_alarm", "_is_set", "_now", "_waiting", "busy", "done", "free")

    def __init__(
        self, count: int, now: Callable[[], int], alarm: Callable[[Callable[[object], None]], Alarm]
    ) -> None:
        self.free, self.busy, self.done = [0] * count, [0] * count, [0] * count
        self._waiting: list[tuple[int, Customer]] = []
        self._now, self._alarm, self._is_set = now, alarm(self._serve), False

    def ask(self, index: int, customer: Customer) -> None:
        """Let the queue ``index`` be served with all others that are ready in this tick."""
        self._waiting.append((index, customer))
        if not self._is_set:
            self._is_set = True
            self._alarm.set(0, AFTER_ALL)

    def _serve(self, _event: object) -> None:
        now, self._is_set = self._now(), False
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


def shared_pipes(program: TileProgram, device: DeviceSpec) -> tuple[str, ...]:
    """Return the pipes of one core group that its queues share: ``sm.TENSOR``; none on an Ascend."""
    cores = dict.fromkeys(
        queue.core
        for queue in program.queues
        if isinstance(device.engine(queue.core, queue.engine), WarpIssue)
    )
    return tuple(
        f"{core}.{name}"
        for core in cores
        for name, engine in device.core(core).engines.items()
        if not isinstance(engine, WarpIssue)
    )


def refuse_shared_pipes(streams: Streams, method: str) -> None:
    """Raise `ProgramError` for a program whose queues share pipes, where a method knows none."""
    if streams.pipes:
        raise ProgramError(
            f"{streams.program.name}: queues with shared pipes ({', '.join(streams.pipes)}) are not known to "
            f"the method {method}; use des, block, fold, steady or auto"
        )


def span_of(op: TimedOp, streams: Streams, use: QueueUse, start: int, end: int) -> Span:
    """Return an operation's place on the timeline: of the first pipe it takes, else of its queue."""
    if not op.pipes:
        return Span(use.group, use.queue, op.label, start, end)
    pipe, cycles = op.pipes[0]
    return Span(use.group, streams.pipes[pipe], op.label, start, start + cycles, use.queue, end)


def pipe_uses(
    names: Sequence[str], group: int, busy: Sequence[int], done: Sequence[int], ends: Sequence[int]
) -> tuple[QueueUse, ...]:
    """Return the use of each shared pipe of one core group."""
    return tuple(
        QueueUse(name, group, busy[i], done[i], {}, ends[i], is_pipe=True)
        for i, name in enumerate(names)
    )
