"""What every attention schedule decides alike: cells, mask, and the slices of the vector cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.algorithms.cells import attention_cells, kv_runs
from npusim.algorithms.flash import attention_phase, exponent_factor, flash
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.tiling_mask import PackedMask, TilingMask
from npusim.errors import TilingError
from npusim.machines.ascend import SLICE_ELEMENTS, AscendTiling, Barriers, slice_elements

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.algorithms.phase import Cell, Mask, Phase
    from npusim.config.problem import Problem
    from npusim.machines.ascend import AscendMachine


#: Phases, and what is to be said of them.
Made = tuple[tuple["Phase", ...], tuple[str, ...]]
#: ``make(problem, sizes, precision, places)`` returns an attention with blocks of ``sizes`` = (rows, keys)
#: on so many places where they run at a time.
#: None: FlashAttention-2 as it is.
Make = Callable[["Problem", tuple[int, int], "FlashPrecision", int], Made]


@lru_cache(maxsize=4)  # of phases
def flash_phase(
    problem: Problem, sizes: tuple[int, int], p: FlashPrecision, *, is_packed: bool = False
) -> Phase:
    """Return FlashAttention-2, a head a block, or all query heads of a KV head below one another."""
    if is_packed:
        tensors = attention_tensors(problem, p.output, problem.group_size)
        cells = packed_cells(problem, sizes)
        mask: Mask | None = PackedMask(problem.seq_q, sizes[0], sizes[1]) if problem.causal and problem.seq_q > 1 else None
    else:
        mask = causal_mask(problem, sizes)  # what does not fit it is said before cells are made
        cells, tensors = attention_cells(problem, *sizes), attention_tensors(problem, p.output)
    scale = problem.scale * exponent_factor(p.exp_variant)
    return attention_phase(flash, problem, sizes, cells, tensors, mask, p, scale=scale)


def causal_mask(problem: Problem, sizes: tuple[int, int]) -> TilingMask | None:
    """Return the tiling-mask of a causal problem, checked against blocks of ``sizes`` = (rows, keys)."""
    if not problem.causal:
        return None
    mask = TilingMask()
    mask.check(min(sizes[0], problem.seq_q), min(sizes[1], problem.seq_kv))
    return mask


def packed_cells(problem: Problem, sizes: tuple[int, int]) -> tuple[Cell, ...]:
    """Return blocks of the rows of all query heads that share a KV head, the heads below one another.

    With a mask a block has whole heads, as many as fit.  Raises `TilingError` where these rows are not one matrix
    in memory, or where a mask leaves room for one head alone.
    """
    p, (height, keys) = problem, sizes
    if p.seq_q > 1 and p.layout != "bnsd":
        raise TilingError(
            f"pack: {p.seq_q} queries a head cannot be packed: in layout {p.layout} other heads lie between them; "
            "packed are one query a head (--seq-q 1), or rows in layout bnsd; leave pack=off"
        )
    is_masked = p.causal and p.seq_q > 1
    if is_masked and height < 2 * p.seq_q:
        raise TilingError(
            f"pack: a causal block has whole heads, and {height} rows hold but one of {p.seq_q} queries: packing would "
            f"change nothing; a block_q of {2 * p.seq_q} or more holds two, or leave pack=off"
        )
    seen = p.visible_keys(0) if p.causal and not is_masked else p.seq_kv
    rows = p.model_copy(update={"heads": p.kv_heads, "seq_q": p.seq_q * p.group_size, "seq_kv": seen, "causal": False})
    if not is_masked:
        return attention_cells(rows, *sizes)
    runs = kv_runs(0, p.seq_q, p.seq_kv, keys, p.causal_offset)
    whole = attention_cells(rows, height // p.seq_q * p.seq_q, keys)
    return tuple(replace(cell, runs=runs, causal_offset=p.causal_offset) for cell in whole)


def may_pack(problem: Problem, height: int) -> bool:
    """Return whether rows of several query heads of a KV head fit in a block of ``height`` rows."""
    single = problem.seq_q == 1
    return problem.group_size > 1 and (single or (problem.layout == "bnsd" and 2 * problem.seq_q <= height))


def ascend_tiling(
    machine: AscendMachine, sizes: tuple[int, int], vector_rows: int | None, ahead: int,
    elements: int = SLICE_ELEMENTS, spilled: tuple[str, ...] = (),
) -> AscendTiling:  # fmt: skip
    """Return the tiling of attention's loop: slices of ``vector_rows``, or of ``elements`` by default."""
    share = machine.group.largest_share(sizes[0])
    slices = slice_elements(vector_rows, share, sizes[1], elements)
    return AscendTiling(elements=slices, ahead=ahead, spilled=spilled)


class Kernel(NamedTuple):
    """What a published kernel does that formats and tiles do not say."""

    barriers: Barriers
    together: int = 1
    has_extra: bool = False

    def of(self, fields: AscendTiling, barriers: Barriers | None, together: int | None) -> AscendTiling:
        """Return a tiling run as the kernel does, but for what is chosen; its extra cost is of its own barriers."""
        return replace(
            fields, barriers=barriers or self.barriers, together=together or self.together,
            extra=self.has_extra and barriers in (None, self.barriers),
        )  # fmt: skip


CANN = Kernel("every")
#: By preset; slices cut by hand are CANN's, whose softmax takes them.  ``fa2_fp32``: PTO's kernel, with what it
#: takes a tile beyond others (``flags.tile_extra_cycles``).  ``fa16_32``: TileLang's, which hands over every
#: second tile (60 to 72 % of CANN's speed, bench_mark.md).
KERNELS = MappingProxyType({"fa2_fp32": Kernel("needed", has_extra=True), "fa16_32": Kernel("every", together=2)})


def kernel_of(schedule: str, preset: str, vector_rows: int | None) -> Kernel:
    """Return the kernel that a preset of a schedule stands for, slices cut by hand or not."""
    is_flash = schedule in ("flash", "split_kv") and not vector_rows
    return KERNELS.get(preset.partition(",")[0], CANN) if is_flash else CANN
