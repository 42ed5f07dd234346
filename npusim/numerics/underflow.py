"""What becomes zero on the way from scores to the second product, and the mass that is lost with it.

An observer of executions.  It goes by the roles of what steps write: an exponential that is a ``weight``
(P) and its casts, exponentials that are ``decay`` or ``gain`` (what rescales earlier tiles and this one),
what adds to the ``sum`` (the tile ends) and the ``output`` divided by it; and by the name of keys, ``k``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.formats import get_format
from npusim.ir.op import Opcode
from npusim.ir.tile import GlobalTile, Operand, Tile
from npusim.numerics.reference import summed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.ir.op import Step
    from npusim.numerics.executor import Moment

Doubles = NDArray[np.float64]


class Underflow:
    """Counts probabilities that become zero, and sums the softmax mass they should have had.

    ``zeroed`` and ``visible`` count (query, key) pairs that the mask leaves, ``zeroed_others`` and
    ``visible_others`` those whose key is none of the first ``sinks``; ``lost_mass`` sums, over ``rows``
    finished query rows, the part of the row sum that zeroed pairs should have had; ``saturated``
    counts values that a saturating cast cut to the largest finite one.  A row whose sum is not finite
    has no mass and is left out of ``rows``.
    """

    def __init__(self, sinks: int = 0) -> None:
        self.sinks = sinks
        self.zeroed = self.visible = self.rows = self.saturated = 0
        self.zeroed_others = self.visible_others = 0
        self.lost_mass = 0.0
        self._first_key, self._is_loading = 0, False
        self._blocks: Sequence[Any] = ()
        self._lost: dict[str, Doubles] = {}
        self._start_tile()

    def _start_tile(self) -> None:
        self._mask: NDArray[np.bool_] | None = None
        self._exact: Doubles | None = None
        self._gone: NDArray[np.bool_] | None = None
        self._old_factor: Doubles | None = None
        self._tile_factor: Doubles | None = None

    def __call__(self, moment: Moment) -> None:
        """Look at one executed step."""
        if moment.blocks is not self._blocks:
            self._blocks, self._lost = moment.blocks, {}
        step = moment.step
        match moment.role, step.opcode:
            case "operand", _ if step.name == "k" and isinstance(step.srcs[0], GlobalTile):
                self._load_keys(step.srcs[0].row)
            case _, Opcode.SELECT if isinstance(step.srcs[2], float):
                self._mask = np.asarray(moment.sources[0] != 0)
            case "weight", Opcode.EXP:
                self._exact = _exact_exponential(step, moment.sources[0])
                self._gone = np.asarray(moment.result == 0)
                self._is_loading = False
            case "weight", Opcode.CAST:
                self._gone = np.asarray(moment.result == 0)
                self.saturated += _count_saturated(step, moment.sources[0])
            case "decay", Opcode.EXP:
                self._old_factor = moment.result.astype(np.float64)[..., 0]
            case "gain", Opcode.EXP:
                self._tile_factor = moment.result.astype(np.float64)[..., 0]
            case "sum", Opcode.ADD:
                self._finish_tile(step.dst)
            case "output", Opcode.DIV:
                self._finish_rows(step.srcs[1], moment.sources[1].astype(np.float64)[..., 0])
            case _:
                pass

    def _load_keys(self, row: int) -> None:
        """Take in that keys from ``row`` are loaded: a tile of them may come in pieces."""
        self._first_key = min(self._first_key, row) if self._is_loading else row
        self._is_loading = True

    def _finish_tile(self, row_sum: Operand) -> None:
        """Rescale what the rows have lost so far, and add what this tile lost."""
        if self._exact is None or self._gone is None:
            return
        mask = np.broadcast_to(True if self._mask is None else self._mask, self._gone.shape)
        gone = self._gone & mask
        self.zeroed += int(gone.sum())
        self.visible += int(mask.sum())
        others = max(0, self.sinks - self._first_key)
        self.zeroed_others += int(gone[..., others:].sum())
        self.visible_others += int(mask[..., others:].sum())
        lost = summed(np.where(gone, self._exact, 0.0))
        if self._tile_factor is not None:
            lost = lost * self._tile_factor
        kept = self._lost_rows(row_sum)
        if self._old_factor is not None:
            kept *= np.where(kept > 0, self._old_factor, 0.0)
        kept += lost
        self._start_tile()

    def _finish_rows(self, row_sum: object, total: Doubles) -> None:
        """Add the lost share of finished rows."""
        if not isinstance(row_sum, Tile):
            return
        share = np.divide(self._lost_rows(row_sum), total, out=np.zeros_like(total), where=np.isfinite(total))
        self.lost_mass += float(summed(share.ravel()))
        self.rows += int(np.isfinite(total).sum())

    def _lost_rows(self, row_sum: Operand) -> Doubles:
        """Return the lost sums of some rows, (lanes, rows), kept where the row sum ``l`` lies."""
        assert isinstance(row_sum, Tile)  # state lives as long as a block, never in a ring
        first = row_sum.offset_bytes // get_format(row_sum.fmt).size_bytes
        end, lanes = first + row_sum.rows, len(self._blocks)
        known = self._lost.get(row_sum.space, np.zeros((lanes, 0)))
        if known.shape[1] < end:
            known = np.concatenate([known, np.zeros((lanes, end - known.shape[1]))], axis=1)
            self._lost[row_sum.space] = known
        return known[:, first:end]


def _exact_exponential(step: Step, exponent: NDArray[Any]) -> Doubles:
    """Return what the exponential would be without underflow; in the base of its variant."""
    power = formats.exp2 if step.attributes.variant.startswith("exp2.") else formats.exp
    result: Doubles = power(exponent.astype(np.float64), "float64")
    return result


def _count_saturated(step: Step, source: NDArray[Any]) -> int:
    if not step.attributes.overflow.endswith("saturate"):
        return 0
    limit = get_format(step.dst.fmt).max_finite
    return int((np.abs(source.astype(np.float64)) > limit).sum())
