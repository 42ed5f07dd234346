"""What every attention schedule decides alike: cells, mask, and the slices of the vector cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from npusim.algorithms.tiling_mask import TilingMask
from npusim.machines.ascend import SLICE_ELEMENTS, AscendTiling, slice_elements

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.algorithms.phase import Phase
    from npusim.machines.ascend import AscendMachine
    from npusim.spec.problem import Problem


#: ``make(phase, precision, places)`` returns what becomes of FlashAttention's phase on so many places
#: where cells run at a time, and what is to be said of it.
Make = Callable[["Phase", "FlashPrecision", int], tuple[tuple["Phase", ...], tuple[str, ...]]]


def alone(phase: Phase, _precision: FlashPrecision, _places: int) -> tuple[tuple[Phase, ...], tuple[str, ...]]:
    """Return the phase as it is."""
    return (phase,), ()


def causal_mask(problem: Problem, sizes: tuple[int, int]) -> TilingMask | None:
    """Return the tiling-mask of a causal problem, checked against blocks of ``sizes`` = (rows, keys)."""
    if not problem.causal:
        return None
    mask = TilingMask()
    mask.check(min(sizes[0], problem.seq_q), min(sizes[1], problem.seq_kv))
    return mask


def ascend_tiling(
    machine: AscendMachine, sizes: tuple[int, int], vector_rows: int | None, ahead: int,
    elements: int = SLICE_ELEMENTS, spilled: tuple[str, ...] = (),
) -> AscendTiling:  # fmt: skip
    """Return the tiling of attention's loop: slices of ``vector_rows``, or of ``elements`` by default."""
    share = machine.group.largest_share(sizes[0])
    slices = slice_elements(vector_rows, share, sizes[1], elements)
    return AscendTiling(elements=slices, ahead=ahead, spilled=spilled)
