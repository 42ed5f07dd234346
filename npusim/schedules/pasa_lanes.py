"""PASA in the lanes of warps, on multiprocessors whose file describes them (Volta)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.flash import FlashPrecision
from npusim.machines.sm import SmTiling
from npusim.machines.sm.fields import SmFields
from npusim.machines.sm.fit import fitted, lanes_of, quad_pairs
from npusim.schedules.flash_gpu import EXPONENTIAL

if TYPE_CHECKING:
    from npusim.algorithms.pasa import PasaPrecision
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.schedules.pasa import PasaTiling

#: Row vectors that live together at most: m, m_new, m_tile, l, l_tile, F_new, the shifts old and new, e_old.
VECTORS = 9


def in_lanes(
    problem: Problem, tiling: PasaTiling, device: DeviceSpec, p: PasaPrecision
) -> tuple[SmTiling, SmTiling, tuple[str, ...]]:
    """Return how tiles lie in the lanes of warps, before the attention and in it, and what fits.

    What comes before runs a block at a time on a multiprocessor.
    """
    like = FlashPrecision(
        p.name, scores=p.scores, softmax=p.vector, exponential=p.vector, operand=p.operand, running=p.vector,
        product=p.product, output=p.output,
    )  # fmt: skip
    fields = SmFields(block_kv=tiling.block_kv)
    upright = quad_pairs(tiling.block_kv, fields.warps, "block_kv")
    pairs = quad_pairs(tiling.block_q, fields.warps, "block_q")
    fields, found = fitted(
        problem, fields.model_copy(update={"block_q": tiling.block_q, "arrangement": pairs}), device, like, VECTORS
    )
    lanes = lanes_of(fields, like, problem)
    before = replace(lanes.lanes["value"], arrangement=upright)
    return (
        SmTiling(lanes=dict.fromkeys(("head", "value"), before), padding=lanes.padding),
        replace(lanes, residents=found.blocks),
        (f"{found}; tiles of {tiling.block_q} x {tiling.block_kv}", EXPONENTIAL),
    )


#: Tiles as a whole, on a device that is described for its values.
NO_LANES = (SmTiling(), SmTiling(), ())
