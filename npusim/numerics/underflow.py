"""What becomes zero on the way from scores to the second product, and the mass that is lost with it.

An observer of executions.  It reads the names that step tables give their rows: ``P`` (the
exponential), ``P_fp8`` and ``P_out`` (its casts), ``alpha`` or ``e_old`` and ``e_tile`` (what
rescales earlier tiles and this one), ``l`` (the row sum) and ``O_normal`` (the division by it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import get_format
from npusim.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npusim.ir.op import Step
    from npusim.ir.tile import Tile
    from npusim.numerics.executor import Moment

Array = "NDArray[Any]"


class Underflow:
    """Counts probabilities that become zero, and sums the softmax mass they should have had.

    ``zeroed`` and ``visible`` count (query, key) pairs; ``lost_mass`` sums, over ``rows`` finished
    query rows, the part of the exact row sum that belongs to zeroed pairs; ``saturated`` counts
    values that a saturating cast cut to the largest finite one.
    """

    def __init__(self) -> None:
        self.zeroed = self.visible = self.rows = self.saturated = 0
        self.lost_mass = 0.0
        self._blocks: Sequence[Any] = ()
        self._lost: dict[str, NDArray[np.float64]] = {}
        self._start_tile()

    def _start_tile(self) -> None:
        self._mask: NDArray[np.bool_] | None = None
        self._exact: NDArray[np.float64] | None = None
        self._gone: NDArray[np.bool_] | None = None
        self._old: NDArray[Any] | None = None
        self._new: NDArray[Any] | None = None

    def __call__(self, moment: Moment) -> None:
        """Look at one executed step."""
        if moment.blocks is not self._blocks:
            self._blocks = moment.blocks
            self._lost = {}
        step = moment.step
        match step.name, step.opcode:
            case "S", Opcode.SELECT:
                self._mask = np.asarray(moment.sources[0] != 0)
            case "P", Opcode.EXP:
                self._exact = _exact_exponential(step, moment.sources[0])
                self._gone = np.asarray(moment.result == 0)
            case ("P_fp8" | "P_out"), Opcode.CAST:
                self._saw_cast(step, moment.sources[0], moment.result)
            case ("alpha" | "e_old"), Opcode.EXP:
                self._old = np.array(moment.result, np.float64)
            case "e_tile", Opcode.EXP:
                self._new = np.array(moment.result, np.float64)
            case "l", Opcode.ADD:
                self._finish_tile(moment)
            case "O_normal", Opcode.DIV:
                self._finish_rows(moment)
            case _:
                pass

    def _saw_cast(self, step: Step, source: NDArray[Any], result: NDArray[Any]) -> None:
        self._gone = np.asarray(result == 0)
        if step.attributes.overflow.endswith("saturate"):
            limit = get_format(step.dst.fmt).max_finite
            self.saturated += int((np.abs(source.astype(np.float64)) > limit).sum())

    def _finish_tile(self, moment: Moment) -> None:
        """Rescale what the rows have lost so far and add what this tile lost."""
        if self._exact is None or self._gone is None:
            return
        gone = self._gone if self._mask is None else self._gone & self._mask
        self.zeroed += int(gone.sum())
        self.visible += gone.size if self._mask is None else int(self._mask.sum())
        lost = np.where(gone, self._exact, 0.0).sum(axis=-1)
        if self._new is not None:
            lost = lost * self._new[..., 0]
        kept = self._rows_of(moment.resolved.tile_of(step_tile(moment)), len(moment.blocks))
        if self._old is not None:
            kept *= np.where(kept > 0, self._old[..., 0], 1.0)
        kept += lost
        self._start_tile()

    def _finish_rows(self, moment: Moment) -> None:
        total = moment.sources[1].astype(np.float64)[..., 0]
    # placeholder
