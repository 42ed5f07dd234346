"""Scalar units of the SimPy reference: who fills the instruction queues, and what holds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.stream import Issued, needed_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.timing.des import Counter, Engine
    from npusim.timing.link import Alarm


class Dispatcher:
    """One scalar unit: issues its operations in program order into bounded queues.

    ``name`` is what errors call it.  Where waits for flags of other cores (``own_waits``, by endpoint)
    hold it up, it stands still before the operation that waits.  ``now`` tells the time, ``alarm``
    makes an alarm that calls back.
    """

    __slots__ = ("_alarm", "_counters", "_engines", "_now", "_own_waits", "_pending", "_stream", "_waits_for", "name")

    def __init__(
        self,
        name: str,
        stream: Iterator[Issued],
        engines: list[Engine],
        counters: list[Counter],
        own_waits: frozenset[int],
        now: Callable[[], int],
        alarm: Callable[[Callable[[object], None]], Alarm],
    ) -> None:
        self.name, self._stream, self._engines = name, stream, engines
        self._counters, self._own_waits = counters, own_waits
        self._pending: Issued | None = None
        self._waits_for = -1
        self._now, self._alarm = now, alarm(self._issued)

    def start(self, delay: int) -> None:
        """Begin to issue ``delay`` cycles from now."""
        self._alarm.set(delay)

    def stuck(self, causes: Sequence[str]) -> str:
        """Return what the scalar unit itself waits for, if it waits for a flag."""
        if self._pending is None or self._waits_for < 0:
            return ""
        return f"{self.name}: {self._pending[0].label} waits for {causes[self._waits_for]}"

    def wake(self, visible: int, now: int) -> None:
        """The flag waited for was set just now; waits see it from ``visible`` on."""
        self._waits_for = -1
        self._alarm.set(max(0, visible - now))

    def _has_seen_flags(self) -> bool:
        """Return whether the flags that hold up the scalar unit are seen; if not, it will be woken."""
        assert self._pending is not None
        op, base = self._pending
        now = self._now()
        for own, peer, delta, period in op.waits:
            need = needed_count(base, own, delta, period)
            if own not in self._own_waits or need <= 0:
                continue
            counter = self._counters[peer]
            if counter.count < need:
                self._waits_for = own
                counter.waiters.append((need, self))
                return False
            visible = counter.times[need % counter.size]
            if visible > now:
                self._alarm.set(visible - now)
                return False
        return True

    def _issued(self, _event: object) -> None:
        self.go()

    def go(self) -> None:
        """Issue until a queue is full, an instruction takes time to issue, or the program ends."""
        engines = self._engines
        while True:
            if self._pending is None:
                self._pending = next(self._stream, None)
                if self._pending is None:
                    return
                if self._pending[0].issue_cycles:
                    self._alarm.set(self._pending[0].issue_cycles)
                    return
            if self._own_waits and not self._has_seen_flags():
                return
            engine = engines[self._pending[0].queue]
            if len(engine.entries) >= engine.depth:
                engine.blocked = self
                return
            engine.entries.append(self._pending)
            self._pending = None
            if engine.is_idle:
                engine.take()
