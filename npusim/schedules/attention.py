"""What every attention schedule decides alike: cells, mask, and the slices of the vector cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from npusim.algorithms.cells import attention_cells
from npusim.algorithms.flash import flash
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.tiling_mask import TilingMask
from npusim.errors import TilingError
from npusim.machines.ascend import SLICE_ELEMENTS, AscendTiling, slice_elements

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.algorithms.phase import Cell, Phase
    from npusim.config.problem import Problem
    from npusim.machines.ascend import AscendMachine


#: Phases, and what is to be said of them.
Made = tuple[tuple["Phase", ...], tuple[str, ...]]
#: ``make(problem, sizes, precision, places)`` returns an attention with blocks of ``sizes`` = (rows, keys)
#: on so many places where they run at a time.
Make = Callable[["Problem", tuple[int, int], "FlashPrecision", int], Made]


def alone(problem: Problem, sizes: tuple[int, int], p: FlashPrecision, _places: int) -> Made:
    """Return FlashAttention-2 as it is."""
    return (flash_phase(problem, sizes, p),), ()


def flash_phase(
    problem: Problem, sizes: tuple[int, int], p: FlashPrecision, *, is_packed: bool = False
) -> Phase:
    """Return FlashAttention-2, a head a block, or all query heads of a KV head below one another."""
    if is_packed:
        tensors = attention_tensors(problem, p.output, problem.group_size)
        return flash(problem, sizes, packed_cells(problem, sizes), p, tensors, None)
    tensors, cells = attention_tensors(problem, p.output), attention_cells(problem, *sizes)
    return flash(problem, sizes, cells, p, tensors, causal_mask(problem, sizes))


def causal_mask(problem: Problem, sizes: tuple[int, int]) -> TilingMask | None:
    """Return the tiling-mask of a causal problem, checked against blocks of ``sizes`` = (rows, keys)."""
    if not problem.causal:
        return None
    mask = TilingMask()
    mask.check(min(sizes[0], problem.seq_q), min(sizes[1], problem.seq_kv))
    return mask


def packed_cells(problem: Problem, sizes: tuple[int, int]) -> tuple[Cell, ...]:
    """Return blocks of the rows of all query heads that share a KV head, the heads below one another.

    Raises `TilingError` where these rows are not one matrix in memory, or not masked alike.
    """
    p = problem
    if p.seq_q > 1 and (p.causal or p.layout != "bnsd"):
        between = f"in layout {p.layout} other heads lie between them"
        why = "a causal mask hides other keys from each" if p.causal else between
        raise TilingError(
            f"pack: {p.seq_q} queries a head cannot be packed: {why}; packed are one query a head (--seq-q 1), or "
            "rows without a mask in layout bnsd; leave pack=off"
        )
    keys = p.visible_keys(0) if p.causal else p.seq_kv
    rows = p.model_copy(update={"heads": p.kv_heads, "seq_q": p.seq_q * p.group_size, "seq_kv": keys, "causal": False})
    return attention_cells(rows, *sizes)


def ascend_tiling(
    machine: AscendMachine, sizes: tuple[int, int], vector_rows: int | None, ahead: int,
    elements: int = SLICE_ELEMENTS, spilled: tuple[str, ...] = (),
) -> AscendTiling:  # fmt: skip
    """Return the tiling of attention's loop: slices of ``vector_rows``, or of ``elements`` by default."""
    share = machine.group.largest_share(sizes[0])
    slices = slice_elements(vector_rows, share, sizes[1], elements)
    return AscendTiling(elements=slices, ahead=ahead, spilled=spilled)
