"""Split-KV attention (flash-decoding): the keys of a query among several blocks, then a merge.

`flash` with its phase cut along the keys; one split is flash itself.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from npusim.algorithms.cells import attention_cells, attention_tensors, kv_runs
from npusim.algorithms.flash import attention_phase, exponent_factor, flash
from npusim.algorithms.split import FAN, PACKED, Merge, SplitPrecision, split_kv, tiles_of
from npusim.algorithms.tiling_mask import PackedMask
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.sm.fields import SmFields
from npusim.schedules.define import FlashTiling, causal_mask, schedule
from npusim.schedules.flash import PRECISIONS
from npusim.schedules.splits import best_splits
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.phase import Mask, Phase, WorkTile
    from npusim.config.problem import Problem
    from npusim.schedules.define import Phases


class _Splits(Tiling):
    """How keys are split, and how what splits leave is merged."""

    splits: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="blocks that share a query's keys; auto: so that a call takes least time"
    )
    merge: Merge = Field(default="sequential", description="order of the merge: one after the other, or in pairs")
    pack: Literal["auto", "on", "off"] = Field(
        default="auto", description="query heads of a KV head as rows of one block; auto: where it pays"
    )


class SplitTiling(_Splits, FlashTiling):
    """Tiling fields of split-KV attention on Ascend."""


class GpuSplitTiling(_Splits, SmFields):
    """The same on streaming multiprocessors."""


@lru_cache(maxsize=4)  # of phases
def _whole(problem: Problem, sizes: tuple[int, int], p: SplitPrecision, *, is_packed: bool) -> Phase:
    """Return FlashAttention-2, a head a block, or all query heads of a KV head below one another."""
    if is_packed:
        cells = packed_cells(problem, sizes)
        mask: Mask | None = PackedMask(problem.seq_q, *sizes) if problem.causal and problem.seq_q > 1 else None
    else:
        mask = causal_mask(problem, sizes)  # what does not fit it is said before cells are made
        cells = attention_cells(problem, *sizes)
    tensors = attention_tensors(problem, p.output, problem.group_size if is_packed else 1)
    scale = problem.scale * exponent_factor(p.exp_variant)
    return attention_phase(flash, problem, sizes, cells, tensors, mask, p, scale=scale)


def packed_cells(problem: Problem, sizes: tuple[int, int]) -> tuple[WorkTile, ...]:
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


def phases(problem: Problem, tiling: Any, p: SplitPrecision, machine: Any) -> Phases:
    """Return FlashAttention-2 cut along the keys, and the merge of what splits leave."""
    sizes, group, said = (tiling.block_q, tiling.block_kv), problem.group_size, tuple[str, ...]()
    is_packed = group > 1 and tiling.pack == "on"
    if tiling.pack == "auto" and may_pack(problem, sizes[0]):
        cells, seen = problem.batch * problem.kv_heads, ceil_div(problem.seq_kv, sizes[1])
        is_packed = problem.seq_q == 1 or PACKED.packs(group * problem.seq_q, cells, seen, machine.places)
    whole = _whole(problem, sizes, p, is_packed=is_packed)
    tiles, splits = max(map(tiles_of, whole.cells)), tiling.splits
    if tiling.pack == "auto" and is_packed:
        said = (f"pack=auto: the {group} query heads of a KV head are rows of one block",)
    if splits == "auto":
        splits = best_splits(machine.device, whole, FAN[tiling.merge])
        said = (*said, f"splits=auto: {splits}, on {machine.places} places; blocks of queries: {len(whole.cells)}")
    if splits > tiles:
        raise TilingError(
            f"splits: {splits} of {tiles} tiles of {sizes[1]} keys: a split is one tile at least; take splits={tiles} "
            "at most, or a smaller block_kv"
        )
    first, *rest = split_kv(whole, splits, tiling.merge, p, machine.places)
    return [replace(first, notes=said) if said else first, *rest]


SCHEDULES = schedule(
    "split_kv",
    phases,
    tiling=MappingProxyType({"ascend": SplitTiling, "nvidia": GpuSplitTiling}),
    precisions={f: tuple(SplitPrecision(**asdict(p)) for p in listed) for f, listed in PRECISIONS.items()},
    families=["ascend", "nvidia"],
    summary="flash-decoding: keys split among blocks, partial outputs merged",
)
