"""How often each operation of a block runs, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import Ints


class Counts:
    """Operations of the blocks of a program, body by body."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._bodies: dict[int, Ints] = {}

    def of_blocks(self, numbers: Iterable[int]) -> Ints:
        """Return how often each operation runs in a sequence of blocks."""
        times: dict[int, Ints | int] = {}
        code = self.code
        for number in numbers:
            block = code.blocks[number]
            counts = np.array((1, *block.counts), np.int64)
            times[block.body] = times.get(block.body, 0) + counts
        found = np.zeros(len(code.operations), np.int64)
        for body, total in times.items():
            once, *repeated = np.asarray(total).tolist()
            found += once * self._of_body(body)
            for count, (inner, _) in zip(repeated, code.bodies[body].repeats, strict=True):
                found += count * self._of_body(inner)
        return found

    def _of_body(self, body: int) -> Ints:
        """Return how often each operation runs in a body whose repeats run never."""
        if body not in self._bodies:
            found = np.zeros(len(self.code.operations), np.int64)
            for part in self.code.bodies[body].parts:
                if not part or not isinstance(part[0], str):
                    np.add.at(found, list(part), 1)
                elif part[0] != "repeat":
                    found += part[1] * self._of_body(part[2])
            self._bodies[body] = found
        return self._bodies[body]
