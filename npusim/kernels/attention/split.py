"""Keys split among blocks (flash-decoding): partial outputs with their log-sum-exp, and their merge.

A split is attention over a part of the keys, with its own normalisation.  Merging proceeds level by level, ``fan``
neighbours at a time: all at once is *sequential*, two at a time a *tree*.  A merged output is a partial output again,
so that every level has the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.formats import get_format
from npusim.kernels.attention.kv_cache import reading_cache
from npusim.kernels.attention.online_softmax import FlashPrecision, Sink, attend, below, unchanged
from npusim.kernels.form.language import Value, exp, full, log, maximum, tiles
from npusim.kernels.form.lowering import kernel
from npusim.kernels.form.phase import Phase, Stacked, TileRun, WorkTile, tensor_of
from npusim.late_methods import dataclass
from npusim.program.ir.tile import GlobalTensor
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.kernels.form.lowering import Kernel
    from npusim.kernels.form.phase import Mask

Merge = Literal["sequential", "tree"]
#: Number of partial outputs that one step of a merge order joins; None: all of them.
FAN: Mapping[Merge, int | None] = MappingProxyType({"sequential": None, "tree": 2})
#: Smallest number of rows of a merge; fewer rows take the same time (npusim, 910B2).
FEWEST_ROWS = 8
#: Log-sum-exps and weights of splits have the format that kernels use, independent of the formats of the attention.
EXACT = "float32"


@dataclass(frozen=True, slots=True)
class SplitPrecision(FlashPrecision):
    """FlashAttention's formats, and ``partial``: the format of a split's output."""

    partial: str = EXACT
    intermediates = (*FlashPrecision.intermediates, "partial")


@kernel(results="out lse", q="row head", k="key head", v="key value", mask="row key")
def split(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: SplitPrecision,
    scale: float,
    log_variant: str,
    score: Callable[[Value], Value] = unchanged,
    unit: float = 1.0,
) -> tuple[Value, Value]:
    """FlashAttention-2 over a part of the keys, with its log-sum-exp, log l + m.

    A part may have no key that a row sees, or only scores of -Inf.  m then starts at the lowest number, relative to
    which a hidden score of -Inf has no weight, and l at the smallest: the output is 0, and its log-sum-exp is below all
    others. The first visible score replaces both.
    """
    lowest, least = -float(get_format(p.softmax).max_finite), float(get_format(p.running).min_subnormal)
    starts = (-math.inf, 0.0) if mask is None else (lowest, least)
    o, m, l = attend(q, k, v, mask, p, scale, score, factor=p.p_scale, starts=starts, unit=unit)
    return (o.to(p.running) / l).to(p.partial), log(l.to(EXACT), log_variant) + below(m, p.p_scale, p, unit).to(EXACT)


def merged(parts: Value, lses: Value, variant: str, sink: Value | None = None) -> tuple[Value, Value, Value]:
    """Return outputs weighted by exp(lse - largest lse so far), like tiles of softmax; the running values start with
    the ``sink``, if any.
    """
    total = full("row", 0.0 if sink is None else 1.0, EXACT)
    top, o = full("row", -math.inf, EXACT), full("row value", 0.0, EXACT)
    for part, lse in tiles(parts, lses, axis="split"):
        wide = part.to(EXACT)
        top = top if sink is None else maximum(top, sink)
        top_new = maximum(top, lse)
        decay, gain = exp(top - top_new, variant), exp(lse - top_new, variant)
        total = total * decay + gain
        o = o * decay + wide * gain
        top = top_new
    return o, total, top


@kernel(parts="row value", lses="row", sink="row")
def merge_last(
    parts: Value, lses: Value, fmt: str, exp_variant: str, sink: Value | None = None, where: Sink = "end"
) -> Value:
    """The last level of a merge; ``sink``: the additional score of a row."""
    o, total, top = merged(parts, lses, exp_variant, sink if where == "start" else None)
    total = total if sink is None or where == "start" else total + exp(sink - top, exp_variant)
    return (o / total).role("partial").to(fmt)


@kernel(results="out lse", parts="row value", lses="row")
def merge_level(parts: Value, lses: Value, fmt: str, exp_variant: str, log_variant: str) -> tuple[Value, Value]:
    """A level of a merge whose results are partial outputs again."""
    o, total, top = merged(parts, lses, exp_variant)
    return (o / total).role("partial").to(fmt), log(total, log_variant) + top


def tiles_of(block: WorkTile) -> int:
    """Return the number of tiles that a block's loop visits."""
    return block.tile_count


def even(tiles: int, parts: int) -> tuple[int, ...]:
    """Return the number of tiles of each part: as even as possible, longer parts first, no part empty."""
    parts = min(parts, tiles)
    return tuple(tiles // parts + (number < tiles % parts) for number in range(parts))


def sized(tiles: int, each: int) -> tuple[int, ...]:
    """Return the tiles of each part: ``each``, or fewer for the last one."""
    return tuple(count for _, count in chunks(tiles, each))


def cut_runs(runs: tuple[TileRun, ...], parts: Iterable[int]) -> tuple[tuple[TileRun, ...], ...]:
    """Return the tiles of runs in consecutive parts with this number of tiles each."""
    cut: list[tuple[TileRun, ...]] = []
    left = list(runs)
    for count_of_part in parts:
        wanted, part = count_of_part, list[TileRun]()
        while wanted:
            run = left.pop(0)
            count = min(run.count, wanted)
            part.append(TileRun(run.col, run.cols, count, run.step, run.only))
            if count < run.count:
                left.insert(0, TileRun(run.col + count * run.step, run.cols, run.count - count, run.step, run.only))
            wanted -= count
        cut.append(tuple(part))
    return tuple(cut)


#: The tiles of each part into which a block's tiles are divided.
Cut = Callable[[WorkTile], tuple[int, ...]]


def split_blocks(blocks: Sequence[WorkTile], cut: Cut) -> tuple[WorkTile, ...]:
    """Return the blocks in parts along their runs."""
    return tuple(
        replace(block, runs=runs, spans=(*block.spans, ("split", i, 1)))
        for block in blocks
        for i, runs in enumerate(cut_runs(block.runs, cut(block)))
    )


def split_kv(
    whole: Phase,
    splits: int | Cut,
    merge: Merge,
    p: FlashPrecision,
    places: int,
    scored: Callable[[Kernel], tuple[Kernel, Mapping[str, Any]]] | None = None,
    sink: Mask | None = None,
    merge_rows: int = 0,
) -> tuple[Phase, ...]:
    """Return FlashAttention's phase with the tiles of each block in parts, and the merge's phases.

    ``splits``: a function that divides a block, or the number of parts (at most the number of the block's tiles), which
    are as even as possible. If no block has two parts, the phase itself is returned.  A merge's rows are distributed
    over ``places``, or a block has ``merge_rows``.  ``scored(kernel)``: the kernel with the changes to scores, and its
    arguments; default: scores are scaled as in ``whole``.  ``sink``: a learned score of no key, which the last merge
    includes.
    """
    cut = (lambda block: even(tiles_of(block), splits)) if isinstance(splits, int) else splits
    count = max(len(cut(block)) for block in whole.cells)
    if count == 1:
        return (whole,)
    p = p if isinstance(p, SplitPrecision) else SplitPrecision(**asdict(p))
    target = whole.tensors["out"]
    assert isinstance(target, GlobalTensor)
    stacks = _stacks(target, count, p.partial, 0)
    tensors: dict[str, Any] = {n: t for n, t in whole.tensors.items() if n[0] in "qkv"}
    scaled: dict[str, Any] = {"scale": whole.constants["scale"]} if scored is None else {}
    kernel, arguments = (split, scaled) if scored is None else scored(split)
    kernel = reading_cache(kernel, tensors)
    cut_masks = {n: mask for n, mask in whole.masks.items() if n not in (*arguments, "sink")}
    first = kernel.phase(
        "attention",
        split_blocks(whole.cells, cut),
        {**whole.sizes, "split": 1},
        list(stacks.values()),
        **tensors,
        mask=cut_masks or None,
        p=p,
        log_variant=_variants(p)[1],
        **arguments,
    )
    return (first, *_merge_phases(_shared(whole, places, merge_rows), cut, stacks, FAN[merge] or count, p, sink))


def _shared(whole: Phase, places: int, merge_rows: int) -> Phase:
    """Return the phase with the rows of its blocks in parts, so that all places have some if there are enough."""
    height = merge_rows or max(FEWEST_ROWS, ceil_div(sum(block.rows for block in whole.cells), places))
    blocks = tuple(
        replace(block, spans=((axis, start + at, count), *rest))
        for block in whole.cells
        for (axis, start, rows), *rest in (block.spans,)
        for at, count in chunks(rows, height)
    )
    return replace(whole, cells=blocks, sizes={**whole.sizes, "row": min(height, whole.sizes["row"])})


def _merge_phases(
    whole: Phase, cut: Cut, stacks: dict[str, Stacked], fan: int, p: FlashPrecision, sink: Mask | None
) -> tuple[Phase, ...]:
    target, phases = whole.tensors["out"], list[Phase]()
    counts, (exp_variant, log_variant) = [len(cut(block)) for block in whole.cells], _variants(p)
    assert isinstance(target, GlobalTensor)
    while max(counts) > 1:
        left = [ceil_div(n, fan) for n in counts]
        is_last = max(left) == 1
        partial_fmt = tensor_of(stacks["out"]).fmt
        results: Mapping[str, GlobalTensor | Stacked] = (
            {"out": target} if is_last else _stacks(target, max(left), partial_fmt, len(phases) + 1)
        )
        blocks = tuple(
            replace(block, spans=(*block.spans, ("split", g, 1)), runs=(TileRun(g * fan, 1, min(fan, n - g * fan), 1),))
            for block, n, groups in zip(whole.cells, counts, left, strict=True)
            for g in range(groups)
        )
        is_named, last = phases or not is_last, dict[str, Any](sink=sink, where=p.sink) if is_last else {}
        phase = (merge_last if is_last else merge_level).phase(
            f"merge {len(phases) + 1}" if is_named else "merge",
            blocks,
            {"row": whole.sizes["row"], "value": whole.sizes["value"], "split": 1},
            list(results.values()),
            parts=stacks["out"],
            lses=stacks["lse"],
            fmt=target.fmt if is_last else partial_fmt,
            exp_variant=exp_variant,
            log_variant=log_variant,
            **last,
        )
        phases.append(phase)
        counts, stacks = left, {n: s for n, s in results.items() if isinstance(s, Stacked)}
    return tuple(phases)


def _stacks(target: GlobalTensor, count: int, fmt: str, level: int) -> dict[str, Stacked]:
    """Return workspaces for ``count`` partial outputs and their log-sum-exps."""

    def stack(what: str, cols: int, fmt: str) -> Stacked:
        batch = target.batch * count
        tensor = GlobalTensor(f"{what}{level or ''}", batch, target.heads, target.rows, cols, fmt, "workspace")
        return Stacked("split", count, tensor)

    return {"out": stack("o_part", target.cols, fmt), "lse": stack("lse", 1, EXACT)}


def _variants(p: FlashPrecision) -> tuple[str, str]:
    """Return the exponential and the logarithm of a merge, to the base of the attention's exponential.

    The variant also applies to float32 if the kernel's exponentials are float32.
    """
    base, _, variant = p.exp_variant.partition(".")
    return f"{base}.{variant if p.exponential == EXACT else 'correct'}", f"log{'2' if base == 'exp2' else ''}.correct"


#: Largest number of packed rows with which a block takes no longer than with one row; smallest number of tiles per
#: place with which more rows save time (npusim's times of llama2_70b with 8 heads and one KV head, and qwen2_7b with 28
#: and 4, with 2 to 64 causal queries on 8k keys, 910B2).
PACKED_ROWS, PACKED_TILES = 32, 2


def packs(rows: int, tiles: int, places: int) -> bool:
    """Return whether packing ``rows`` queries of the heads that share keys as rows of one block saves time.

    The blocks visit ``tiles`` tiles in all, on ``places`` places; more rows than `PACKED_ROWS` would otherwise leave
    too few blocks.
    """
    return rows <= PACKED_ROWS or tiles >= PACKED_TILES * places
