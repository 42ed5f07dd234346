"""An attention call in blocks: its tensors, the grid over them, and the runs of tiles that each block visits."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.phase import TileRun, WorkTile
from npusim.ir.tile import GlobalTensor
from npusim.units import chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from npusim.config.problem import Problem

#: The condition of tiles that a mask cuts through.
MASKED = frozenset({"mask"})


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Q, K, V and O; ``k`` may be a shifted K that an earlier phase leaves in a workspace."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    o: GlobalTensor


def attention_tensors(problem: Problem, output: str, packed: int = 1) -> AttentionTensors:
    """Return Q, K, V and O of ``problem`` in its layout, the output in format ``output``.

    ``packed`` query heads are one, their rows below one another: as they lie in memory, unless several
    rows of a head are interleaved with other heads' (BSND).
    """
    p, fmt, mixed = problem, problem.dtype, problem.layout != "bnsd"
    heads, rows, apart = p.heads // packed, p.seq_q * packed, mixed and (packed == 1 or p.seq_q > 1)
    keys, queries = p.lengths, tuple(packed * n for n in p.queries) if p.lengths else ()
    k = GlobalTensor(
        "k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input", mixed, lengths=keys, stretch_rows=p.page
    )
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, heads, rows, p.head_dim, fmt, "input", apart, packed, queries),
        k=k,
        v=k if p.values_in_keys else replace(k, name="v", cols=p.value_head_dim),
        o=GlobalTensor("o", p.batch, heads, rows, p.value_head_dim, output, "output", apart, packed, queries),
    )


def of_sequences(problem: Problem, blocks: Callable[[Problem], tuple[WorkTile, ...]]) -> tuple[WorkTile, ...]:
    """Return the blocks of a call: of sequences that differ in length, those of each by itself, one after the other."""
    if not problem.lengths:
        return blocks(problem)
    return tuple(
        replace(block, batch=number) for number in range(problem.batch) for block in blocks(problem.sequence(number))
    )


def grid(tensor: GlobalTensor, *axes: tuple[str, int]) -> tuple[WorkTile, ...]:
    """Return the blocks of a tensor's heads, row by row: ``(axis, size)`` of rows, then of columns."""
    (row_axis, height), *rest = axes
    columns: list[tuple[tuple[str, int, int], ...]] = [
        ((axis, c, w),) for axis, width in rest for c, w in chunks(tensor.cols, width)
    ]
    return tuple(
        WorkTile(batch, head, ((row_axis, r, n), *cols))
        for batch in range(tensor.batch)
        for head in range(tensor.heads)
        for r, n in chunks(tensor.rows, height)
        for cols in columns or [()]
    )


def with_columns(
    blocks: tuple[WorkTile, ...], total: int, width: int, only: frozenset[str] = frozenset()
) -> tuple[WorkTile, ...]:
    """Return the blocks with a loop over ``total`` columns, ``width`` at a time, under conditions ``only``."""
    runs = tuple(replace(run, only=only) for run in kv_runs(0, 0, total, width, None))
    return tuple(replace(c, runs=runs) for c in blocks)


def attention_cells(
    problem: Problem, block_q: int, block_kv: int, *, is_reverse: bool = False, is_trimmed: bool = True
) -> tuple[WorkTile, ...]:
    """Return every Q block, head by head, rows ascending; keys ascending unless ``is_reverse``.

    Keys right of a causal block's last row are left out; a tile that the diagonal crosses is
    masked, all others need no mask.  Not ``is_trimmed``: tiles are visited whole or not at all.
    """
    if problem.lengths:
        how = {"is_reverse": is_reverse, "is_trimmed": is_trimmed}
        return of_sequences(problem, lambda one: attention_cells(one, block_q, block_kv, **how))
    offset = problem.causal_offset if problem.causal else None
    runs = [
        kv_runs(row, rows, problem.seq_kv, block_kv, offset, is_trimmed=is_trimmed)
        for row, rows in chunks(problem.seq_q, block_q)
    ]
    if is_reverse:
        runs = [tuple(r.reversed() for r in one[::-1]) for one in runs]
    return _of_every_head(problem, block_q, runs, offset)


def _of_every_head(
    problem: Problem, block_q: int, runs: Iterable[tuple[TileRun, ...]], offset: int | None = None
) -> tuple[WorkTile, ...]:
    """Return the Q blocks of all heads, whose blocks of rows visit the same ``runs``."""
    rows = list(zip(chunks(problem.seq_q, block_q), runs, strict=True))
    return tuple(
        WorkTile(batch, head, (("row", row, count),), visited, offset)
        for batch in range(problem.batch)
        for head in range(problem.heads)
        for (row, count), visited in rows
    )


def seen_blocks(problem: Problem, block_q: int, block_kv: int, seen: NDArray[np.bool_]) -> tuple[WorkTile, ...]:
    """Return every Q block with the tiles of which it sees a key, masked where it does not see all.

    ``seen``: (queries, keys).  A block that sees no key at all visits one tile, which is masked wholly.
    """
    visited = []
    for row, rows in chunks(problem.seq_q, block_q):
        runs: list[TileRun] = []
        for col, cols in chunks(problem.seq_kv, block_kv):
            tile = seen[row : row + rows, col : col + cols]
            if tile.any() or not (runs or col + cols < problem.seq_kv):
                _add(runs, TileRun(col, cols, 1, block_kv, frozenset[str]() if tile.all() else MASKED))
        visited.append(tuple(runs))
    return _of_every_head(problem, block_q, visited)


def _add(runs: list[TileRun], run: TileRun) -> None:
    """Add a run, to the last one where it goes on with the same tiles."""
    last = runs[-1] if runs else None
    following = last and (last.cols, last.only, last.step, last.col + last.count * last.step)
    if last and following == (run.cols, run.only, run.step, run.col):
        runs[-1] = replace(last, count=last.count + run.count)
    else:
        runs.append(run)


def masked_throughout(block: WorkTile) -> WorkTile:
    """Return the block with every tile masked, whether or not the mask cuts through it."""
    runs: list[TileRun] = []
    for run in block.runs:
        _add(runs, replace(run, only=MASKED))
    return replace(block, runs=tuple(runs))


#: How blocks reach core groups: in turn, as listed; the longest first, every other round backwards; or each, the
#: longest first, at the core group that is free first, as from a persistent kernel's work list.
BlockOrder = Literal["round_robin", "balanced", "work_list"]


def dealt(
    blocks: tuple[WorkTile, ...], group_count: int, order: BlockOrder, heads: int | None = None
) -> tuple[WorkTile, ...]:
    """Return the blocks in the order in which they are dealt to ``group_count`` core groups.

    ``round_robin`` keeps the vendor kernels' order (head by head, ascending rows).  ``balanced``
    deals the longest first, every other round backwards, so that a causal mask leaves all groups
    nearly the same work.  ``work_list``: the longest first.  ``heads`` as for :func:`longest_first`.
    """
    if order == "round_robin":
        return blocks
    longest = longest_first(blocks, heads)
    if order == "work_list":
        return tuple(longest)
    ordered: list[WorkTile] = []
    for index, (start, count) in enumerate(chunks(len(blocks), group_count)):
        one_each = longest[start : start + count]
        ordered += one_each[::-1] if index % 2 else one_each
    return tuple(ordered)


def longest_first(blocks: tuple[WorkTile, ...], heads: int | None = None) -> list[WorkTile]:
    """Return the blocks with most keys first; ``heads`` of a sequence at a time, so that their K and V stay in L2.

    FlashAttention-3 does so (``tile_scheduler.hpp``: heads in groups whose K and V fit 32 of 50 MiB).
    """
    sections = groupby(blocks, key=lambda c: (c.batch, c.head // heads)) if heads else [((), blocks)]
    return [c for _, section in sections for c in sorted(section, key=lambda c: c.first - c.last)]


def as_free(
    blocks: Sequence[WorkTile], cores: int, residents: int = 1
) -> tuple[tuple[WorkTile, ...], tuple[tuple[int, ...], ...]]:
    """Return the blocks with their slots, and the numbers of each core's blocks in order.

    Blocks start in the order given, each at the slot that is free first (the first slot of every
    core before any second one), as a GPU's dispatcher or a work list does it.  How long a block takes is
    estimated: one unit a tile, and one for its start and end.
    """
    free = [(0, slot, core) for slot in range(residents) for core in range(cores)]
    placed: list[WorkTile] = []
    shares: list[list[int]] = [[] for _ in range(cores)]
    for number, block in enumerate(blocks):
        work, slot, core = free[0]
        tiles = sum(run.count for run in block.runs)
        heapq.heapreplace(free, (work + tiles + 1, slot, core))
        shares[core].append(number)
        placed.append(replace(block, place=slot))
    return tuple(placed), tuple(tuple(share) for share in shares)


def kv_runs(
    row: int, rows: int, seq_kv: int, block_kv: int, offset: int | None, *, is_trimmed: bool = True
) -> tuple[TileRun, ...]:
    """Return the key tiles of queries ``row .. row + rows``, ascending, grouped by shape.

    With ``offset`` set, query x sees keys up to ``x + offset``: tiles whose last key the first
    query sees are whole, later ones masked, and none starts right of what the last query sees.
    """
    end = seq_kv if offset is None else min(seq_kv, row + rows + offset)
    if not is_trimmed:
        end = min(seq_kv, round_up(end, block_kv))
    clear = end if offset is None else min(end, row + offset + 1)
    whole = clear // block_kv
    runs = [TileRun(0, block_kv, whole, block_kv)] if whole else []
    for col, cols in chunks(end - whole * block_kv, block_kv):
        start = whole * block_kv + col
        _add(runs, TileRun(start, cols, 1, block_kv, MASKED if start + cols > clear else frozenset()))
    return tuple(runs)
