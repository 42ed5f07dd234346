"""A bandwidth that transfers in flight share, each with an equal share (processor sharing).

Everything is an integer: the link's virtual clock counts bytes served to each transfer, in units of 2**-20 byte, and is
rounded down whenever the number of transfers changes (an error below 1e-6 byte an event).  It changes only at the ticks
at which some transfer starts or ends, whatever the order within a tick, so that cores in step can be folded into one
weighted transfer without changing a single tick.

Cores that queue for a link do not stay in step: the cores that were served last issue their next requests while the
others compute.  A link with ``catch_up`` in the device file recovers its idle time since a phase's first transfer, at a
multiple of its rate; over the phase it transfers no more than its rate allows.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpy import Environment
    from simpy.events import Event

    from npusim.config.device import DeviceSpec

#: Sub-units of a byte in the link's virtual clock.
FRACTION_BITS = 20
#: Idle cycles that a link recovers, and the multiple of its rate while it does, if cores stay in step.
NO_CATCH_UP = 0, 1


def bytes_per_cycle(device: DeviceSpec, link: str) -> float:
    """Return the bytes that a shared link transfers per cycle, for all cores together."""
    return device.link(link).rate / float(device.clock_hz.value)


def catch_up(device: DeviceSpec, link: str) -> tuple[int, int]:
    """Return the largest number of idle cycles that a link recovers, and the factor of its rate while it
    recovers them.
    """
    spec = device.link(link).catch_up
    return NO_CATCH_UP if spec is None else (spec.idle_cycles.value, spec.rate_factor.value)


class Alarm:
    """A SimPy event that one owner schedules repeatedly, at most once at a time."""

    __slots__ = ("_callback", "_event", "_priorities", "_schedule")

    def __init__(self, env: Environment, callback: Callable[[Event], None]) -> None:
        # SimPy is imported by its first user: most runs simulate in compiled code, without it
        from simpy.events import NORMAL, Event, EventPriority

        self._schedule, self._callback = env.schedule, [callback]
        self._priorities = NORMAL, EventPriority(NORMAL + 1)
        self._event = Event(env)
        self._event._ok = True
        self._event._value = None

    def set(self, delay: int, *, is_last: bool = False) -> None:
        """Call back ``delay`` cycles from now; if it ``is_last``, after all other events of that tick."""
        self._event.callbacks = self._callback
        self._schedule(self._event, self._priorities[is_last], delay)


class Wake:
    """Calls ``look`` at the next tick at which shared work may have ended.

    A timer that is already set for an earlier tick is unchanged: more work only delays ends, and the timer is set again
    when it fires.
    """

    __slots__ = ("_armed", "_env", "_look")

    def __init__(self, env: Environment, look: Callable[[int], None]) -> None:
        self._env, self._look = env, look
        self._armed: int | None = None

    def at(self, due: int) -> None:
        """Call ``look`` at tick ``due`` at the latest."""
        if self._armed is not None and self._armed <= due:
            return
        self._armed = due
        timer = self._env.timeout(due - int(self._env.now), due)
        assert timer.callbacks is not None
        timer.callbacks.append(self._fire)

    def _fire(self, timer: Event) -> None:
        due = int(timer.value or 0)
        if self._armed == due:
            self._armed = None
            self._look(due)


class SharedLink:
    """One shared link in a SimPy environment; :meth:`join` starts transfers, a callback reports their end."""

    def __init__(self, env: Environment, name: str, bytes_per_tick: float, fraction_bits: int = FRACTION_BITS) -> None:
        self.env, self.name = env, name
        self._most_idle, self._catch_up = NO_CATCH_UP
        self._idle = -1
        self.fraction_bits = fraction_bits
        self.rate = max(1, round(bytes_per_tick * (1 << fraction_bits)))
        self.total_bytes = 0
        self._flows: list[tuple[int, int, int, Callable[[], None]]] = []
        self._weight = 0
        self._virtual = 0
        self._updated = 0
        self._sequence = 0
        self._wake = Wake(env, self._look)

    def join(self, size_bytes: int, done: Callable[[], None], weight: int = 1) -> None:
        """Start ``weight`` equal transfers of ``size_bytes``; call ``done`` when they are complete."""
        self._advance()
        self._idle = max(self._idle, 0)
        self._sequence += 1
        self._weight += weight
        self.total_bytes += size_bytes * weight
        target = self._virtual + (size_bytes << self.fraction_bits)
        heapq.heappush(self._flows, (target, self._sequence, weight, done))
        self._arm()

    def change_rate(self, bytes_per_tick: float) -> None:
        """Serve at another rate from now on; bytes that were served do not change."""
        self._advance()
        self.rate = max(1, round(bytes_per_tick * (1 << self.fraction_bits)))
        if self._flows:
            self._arm()

    def begin_phase(self, most_idle: int, catch_up: int) -> None:
        """Let cores begin in step; from now on the link recovers up to ``most_idle`` cycles in which it is idle."""
        self._most_idle, self._catch_up, self._idle = most_idle, catch_up, -1

    def _reached(self, now: int) -> tuple[int, int]:
        """Return the virtual clock at ``now``, and the idle cycles still to be recovered."""
        elapsed = now - self._updated
        if self._weight and elapsed > 0:
            made_up = min(self._idle, (self._catch_up - 1) * elapsed)
            return self._virtual + (elapsed + made_up) * self.rate // self._weight, self._idle - made_up
        return self._virtual, self._idle if self._idle < 0 else min(self._idle + elapsed, self._most_idle)

    def _advance(self) -> None:
        now = int(self.env.now)
        self._virtual, self._idle = self._reached(now)
        self._updated = now

    def _arm(self) -> None:
        """Set the timer for the end of the link's next transfer."""
        # A transfer that ends at this tick may not have left yet: its remainder is then negative.
        rest = max(0, self._flows[0][0] - self._virtual)
        left = ceil_div(rest * self._weight, self.rate)
        self._wake.at(self._updated + max(left - max(self._idle, 0), ceil_div(left, self._catch_up)))

    def _look(self, due: int) -> None:
        flows = self._flows
        reached, idle = self._reached(due)
        ended = []
        if flows[0][0] <= reached:
            self._virtual, self._idle, self._updated = reached, idle, due
            while flows and flows[0][0] <= reached:
                _, _, weight, done = heapq.heappop(flows)
                self._weight -= weight
                ended.append(done)
        if flows:
            self._arm()
        else:
            self._virtual = 0
        # The link's state is consistent again: an owner whose transfer ends here may start the next one immediately.
        for done in ended:
            done()
