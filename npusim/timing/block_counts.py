"""How often each operation of a block runs, without running it."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import Ints


class Counts:
    """Operations of the blocks that a program has by now, body by body."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._body = np.array([block.body for block in code.blocks], np.int64)
        rows = zip_longest(*((1, *block.counts) for block in code.blocks), fillvalue=0)
        self._times = np.array(list(rows), np.int64).T
        self._queue = np.array([op.queue for op in code.operations], np.int64)
        self._bodies: dict[int, Ints] = {}

    def of_blocks(self, numbers: Sequence[int]) -> Ints:
        """Return how often each operation runs in a sequence of blocks."""
        code, chosen = self.code, np.array(numbers, np.int64)
        times = np.zeros((len(code.bodies), self._times.shape[1]), np.int64)
        np.add.at(times, self._body[chosen], self._times[chosen])
        found = np.zeros(len(code.operations), np.int64)
        for body in np.unique(self._body[chosen]).tolist():
            once, *repeated = times[body].tolist()
            found += once * self.of_body(body)
            for count, (inner, _) in zip(repeated, code.bodies[body].repeats, strict=False):
                found += count * self.of_body(inner)
        return found

    def of_body(self, body: int) -> Ints:
        """Return how often each operation runs in a body, without the loops whose counts blocks bring."""
        if body not in self._bodies:
            found = np.zeros(len(self.code.operations), np.int64)
            for part in self.code.bodies[body].parts:
                if not part or not isinstance(part[0], str):
                    np.add.at(found, list(part), 1)
                elif part[0] != "repeat":
                    found += part[1] * self.of_body(part[2])
            self._bodies[body] = found
        return self._bodies[body]

    def by_queue(self, ran: Ints) -> Ints:
        """Return how many of these operations each queue has."""
        found = np.zeros(len(self.code.streams.program.queues), np.int64)
        np.add.at(found, self._queue, ran)
        return found
