"""The warp groups of one core at work beside one another, as SimPy processes see them (`gpu_pipes.speeds`)."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from npusim.ir.program import Share
from npusim.timing.gpu_pipes import ONE, ONE_BITS, speeds
from npusim.timing.link import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpy import Environment

    from npusim.timing.gpu_pipes import Rules


class ProcessorSharing:
    """One core's room: :meth:`join` begins work, a callback ends it."""

    def __init__(self, env: Environment, rules: Rules) -> None:
        self.env, self.rules = env, rules
        self._work: tuple[list[tuple[int, int, Share, Callable[[], None]]], ...] = ([], [])
        self._load = [0] * (len(Share._fields) - 2)
        self._units, self._speed = [0, 0], [ONE, ONE]
        self._updated = self._sequence = 0
        self._wake = Wake(env, self._look)

    def join(self, share: Share, done: Callable[[], None]) -> None:
        """Begin some work now; call ``done`` when it is through."""
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
