"""The weights by which an execution really multiplies V: softmax as a schedule's casts leave it.

An observer of executions, for schedules whose tiles of scores are handled in one piece (the GPU
mapping).  It goes by roles: the second product reads the last cast of the ``weight``; later tiles
rescale it (``decay``, and PASA's ``gain``), the end divides the ``output`` by the row sum and undoes a
scale.  What is left out are only the roundings of the product itself and of O, so that errors of P can
be told from those of the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim.program.ir.op import Opcode
from npusim.program.ir.tile import GlobalTile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npusim.program.numerics.executor import Moment

Doubles = NDArray[np.float64]
#: Called with a finished block and its weights, (rows, keys) float64, 0 where no key was visited.
Finished = "Callable[[Any, Doubles], None]"


class EffectiveWeights:
    """Rebuilds the weights of every block of ``keys`` keys and hands them to ``finished``.

    ``recast``, where given, stands for the schedule's cast of P: it takes a tile of unscaled P, (lanes,
    rows, keys) float32, and returns what would multiply V.
    """

    def __init__(
        self,
        keys: int,
        finished: Callable[[Any, Doubles], None],
        recast: Callable[[NDArray[np.float32]], Doubles] | None = None,
    ) -> None:
        self.keys, self.finished, self.recast = keys, finished, recast
        self._blocks: Sequence[Any] = ()
        self._tiles: list[tuple[int, Doubles, Doubles | None]] = []
        self._first_key = 0
        self._p: Doubles | None = None
        self._old: Doubles | None = None
        self._new: Doubles | None = None
        self._total: Doubles | None = None

    def __call__(self, moment: Moment) -> None:
        """Look at one executed step."""
        if moment.blocks is not self._blocks:
            self._blocks, self._tiles = moment.blocks, []
        step = moment.step
        if step.name == "k" and isinstance(step.srcs[0], GlobalTile):
            self._first_key = step.srcs[0].row
            return
        if isinstance(step.dst, GlobalTile) and step.dst.tensor.role == "output":
            self._finish_block()
            return
        match moment.role, step.opcode:
            case "weight", Opcode.EXP if self.recast is not None:
                self._p = self.recast(moment.result)
            case "weight", (Opcode.EXP | Opcode.CAST) if self.recast is None:
                self._p = moment.result.astype(np.float64)
            case "decay", Opcode.EXP:
                self._old = moment.result.astype(np.float64)
            case "gain", Opcode.EXP:
                self._new = moment.result.astype(np.float64)
            case "sum", Opcode.ADD:
                self._finish_tile()
            case "output", Opcode.DIV:
                self._total = moment.sources[1].astype(np.float64)
            case "output", Opcode.MUL if self._total is not None:  # after the division: a scale is undone
                self._total = self._total / moment.sources[1].astype(np.float64)
            case _:
                pass

    def _finish_tile(self) -> None:
        assert self._p is not None
        p = self._p if self._new is None else self._p * self._new
        self._tiles.append((self._first_key, p, self._old))
        self._p = self._old = self._new = None

    def _finish_block(self) -> None:
        assert self._total is not None
        lanes, rows = self._total.shape[:2]
        weights = np.zeros((lanes, rows, self.keys))
        later = 1.0 / self._total
        for first, p, old in reversed(self._tiles):
            np.multiply(p, later, out=weights[:, :, first : first + p.shape[-1]])
            later = later if old is None else later * old
        for block, own in zip(self._blocks, weights, strict=True):
            self.finished(block, own)
        self._tiles, self._total = [], None
