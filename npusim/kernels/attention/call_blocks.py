"""An attention call in blocks: its tensors, the grid over them, and the runs of tiles that each block visits."""

from __future__ import annotations

import heapq
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npusim.config.seen import KeyRanges, joined
from npusim.kernels.form.phase import TileRun, WorkTile
from npusim.kernels.form.work_table import WorkTable
from npusim.late_methods import dataclass
from npusim.program.ir.tile import GlobalTensor
from npusim.units import ceil_div, chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.config.problem import Problem, Unseen
    from npusim.config.seen import Seen
    from npusim.kernels.form.work_table import Integers

#: The condition of tiles that a mask hides in part.
MASKED = frozenset({"mask"})
#: Axis of the grid along which blocks with the same span form one launched block, executed in turn.
SERIES = "series"


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Q, K, V and O; ``k`` may be a shifted K that an earlier phase writes to a workspace."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    o: GlobalTensor


def attention_tensors(problem: Problem, output: str, packed: int = 1) -> AttentionTensors:
    """Return Q, K, V and O of ``problem`` in its layout, the output in format ``output``.

    ``packed`` query heads form one head with concatenated rows.  This is their order in memory, unless several rows of
    a head are interleaved with rows of other heads (BSND).
    """
    p, fmt, mixed = problem, problem.dtype, problem.layout != "bnsd"
    heads, rows, apart = p.heads // packed, p.seq_q * packed, mixed and (packed == 1 or p.seq_q > 1)
    keys, queries = p.lengths, tuple(packed * n for n in p.queries) if p.lengths else ()
    k = GlobalTensor(
        "k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input", mixed, lengths=keys, stretch_rows=p.page
    )
    if p.cache is not None:  # an earlier kernel stores it, head by head
        k = replace(k, role="workspace", is_interleaved=False, stretch_rows=0)
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, heads, rows, p.head_dim, fmt, "input", apart, packed, queries),
        k=k,
        v=k if p.values_in_keys else replace(k, name="v", cols=p.value_head_dim),
        o=GlobalTensor("o", p.batch, heads, rows, p.value_head_dim, output, "output", apart, packed, queries),
    )


def of_sequences(problem: Problem, blocks: Callable[[Problem], tuple[WorkTile, ...]]) -> tuple[WorkTile, ...]:
    """Return the blocks of a call; if sequences differ in length, sequence by sequence."""
    if not problem.lengths:
        return blocks(problem)
    return tuple(
        replace(block, batch=number) for number in range(problem.batch) for block in blocks(problem.sequence(number))
    )


def grid(tensor: GlobalTensor, *axes: tuple[str, int]) -> tuple[WorkTile, ...]:
    """Return the blocks of a tensor's heads, row by row; each axis is given as ``(axis, size)``, rows first, then
    columns.
    """
    (row_axis, height), *rest = axes
    columns: list[tuple[tuple[str, int, int], ...]] = [
        ((axis, c, w),) for axis, width in rest for c, w in chunks(tensor.cols, width)
    ]
    return tuple(
        WorkTile(batch, head, ((row_axis, r, n), *cols))
        for batch in range(tensor.batch)
        for head in range(tensor.heads)
        for r, n in chunks(tensor.rows_of(batch), height)
        for cols in columns or [()]
    )


def in_bands(blocks: Sequence[WorkTile], together: int, *, are_columns: bool = False) -> tuple[WorkTile, ...]:
    """Return tiles of a grid of rows and columns in bands of ``together`` rows of tiles; each band is ordered column by
    column.

    ``are_columns``: bands of columns of tiles, each ordered row by row.  Tiles of one column (row) and band share an
    operand of a product, so that the tiles of a wave read few rows and columns.
    """
    (_, _, height), (_, _, width) = blocks[0].spans[:2]
    band = (width if are_columns else height) * together

    def order(block: WorkTile) -> tuple[int, ...]:
        (_, row, _), (_, col, _) = block.spans[:2]
        place = (col // band, row, col) if are_columns else (row // band, col, row)
        return block.batch, block.head, *place

    return tuple(sorted(blocks, key=order))


def with_columns(
    blocks: tuple[WorkTile, ...], total: int, width: int, only: frozenset[str] = frozenset()
) -> tuple[WorkTile, ...]:
    """Return the blocks with a loop over ``total`` columns, ``width`` at a time, under conditions ``only``."""
    runs = tuple(replace(run, only=only) for run in kv_runs(KeyRanges(total), 0, 1, total, width))
    return tuple([WorkTile(c.batch, c.head, c.spans, runs, c.causal_offset, c.place) for c in blocks])


def attention_cells(
    problem: Problem,
    block_q: int,
    block_kv: int,
    *,
    seen: Seen | None = None,
    is_reverse: bool = False,
    is_trimmed: bool = True,
    mask_block: int = 0,
    is_placed: bool | None = None,
) -> tuple[WorkTile, ...]:
    """Return every Q block, head by head, rows ascending; keys ascend unless ``is_reverse``.

    Tiles in which no query of a block sees a key (``seen``; default: the problem's) are omitted, and so are the keys
    after the last key that a query sees. A tile is masked if some row does not see all of its keys. Without
    ``is_trimmed``, blocks visit whole tiles. ``mask_block``: the kernel decides for squares of this number of queries
    and keys, and visits squares with a mask first (FlexAttention). ``is_placed``: blocks state the position of their
    queries; by default they do if a mask or ALiBi depends on it.
    """
    seen = seen or problem.seen
    is_placed = depends_on_position(problem, seen) if is_placed is None else is_placed
    if problem.lengths:
        how: dict[str, Any] = {"is_reverse": is_reverse, "is_trimmed": is_trimmed, "mask_block": mask_block}
        return of_sequences(problem, lambda one: attention_cells(one, block_q, block_kv, **how, is_placed=is_placed))
    offset, runs = problem.causal_offset, list[tuple[TileRun, ...]]()
    for row, rows in chunks(problem.seq_q, block_q):
        visited: dict[str, Any] = {"is_trimmed": is_trimmed and not mask_block, "unseen": problem.unseen}
        if not mask_block:
            runs.append(kv_runs(seen, offset + row, rows, problem.seq_kv, block_kv, **visited))
            continue
        first, last = row // mask_block * mask_block, min(problem.seq_q, round_up(row + rows, mask_block))
        squares = kv_runs(seen, offset + first, last - first, problem.seq_kv, mask_block, **visited)
        runs.append(tuple(t for run in sorted(squares, key=lambda r: not r.only) for t in _cut(run, block_kv)))
    if is_reverse:
        runs = [tuple(r.reversed() for r in one[::-1]) for one in runs]
    visits = [((("row", *rows),), one) for rows, one in zip(chunks(problem.seq_q, block_q), runs, strict=True)]
    return tuple(
        WorkTile(batch, head, spans, visited, offset if is_placed else None)
        for batch in range(problem.batch)
        for head in range(problem.heads)
        for spans, visited in visits
    )


def below_one_another(blocks: tuple[WorkTile, ...], group: int, queries: int) -> tuple[WorkTile, ...]:
    """Return blocks of query heads as blocks of KV heads; each has the rows of ``group`` query heads in order."""
    if group == 1:
        return blocks
    rows = ((b, b.row + b.head % group * queries) for b in blocks)
    return tuple(replace(b, head=b.head // group, spans=(("row", row, b.rows),)) for b, row in rows)


def depends_on_position(problem: Problem, seen: Seen) -> bool:
    """Return whether the keys that a query sees, or a term added to its scores, depend on the query's position.

    The tiles do not show this, because a kernel may mask every tile, even one in which each query sees all keys.
    """
    return problem.alibi or not seen.shows_all


def _cut(run: TileRun, block_kv: int) -> Iterator[TileRun]:
    """Yield a run of tiles as runs of tiles of ``block_kv`` keys; the size of a whole tile is a multiple of
    ``block_kv``.
    """
    size = run.cols * run.count
    for col, cols in ((0, size // block_kv * block_kv), (size // block_kv * block_kv, size % block_kv)):
        if cols:
            tile = min(block_kv, cols)
            yield TileRun(run.col + col, tile, cols // tile, block_kv, run.only)


def _add(runs: list[TileRun], run: TileRun) -> None:
    """Append a run, or extend the last one if its tiles are equal."""
    last = runs[-1] if runs else None
    following = last and (last.cols, last.only, last.step, last.col + last.count * last.step)
    if last and following == (run.cols, run.only, run.step, run.col):
        runs[-1] = replace(last, count=last.count + run.count)
    else:
        runs.append(run)


def masked_throughout(block: WorkTile) -> WorkTile:
    """Return the block with every tile masked, whether or not the mask cuts through it."""
    return replace(block, runs=_masked(block.runs))


@lru_cache(maxsize=1024)  # blocks of one head
def _masked(runs: tuple[TileRun, ...]) -> tuple[TileRun, ...]:
    masked: list[TileRun] = []
    for run in runs:
        _add(masked, replace(run, only=MASKED))
    return tuple(masked)


#: How blocks are distributed to core groups: in the given order, one to each group in turn; the longest first, in turn,
#: with every other round in reverse order; or the longest first, each to the group that is free first, as from the work
#: list of a persistent kernel.
BlockOrder = Literal["round_robin", "balanced", "work_list"]


def dealt(
    blocks: Sequence[WorkTile], group_count: int, order: BlockOrder, heads: int | None = None
) -> Sequence[WorkTile]:
    """Return the blocks in the order in which they are assigned to ``group_count`` core groups.

    ``round_robin``: the order of the vendor's kernels (head by head, ascending rows). ``balanced``: the longest blocks
    first, and every other round in reverse order, so that all groups have nearly the same work under a causal mask.
    ``work_list``: the longest block first. ``heads`` as for :func:`longest_first`.
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


def longest_first(blocks: Sequence[WorkTile], heads: int | None = None) -> list[WorkTile]:
    """Return the blocks with the most keys first, for this number of ``heads`` of the batch at a time, so that their K
    and V stay in L2.

    FlashAttention-3 does so (``tile_scheduler.hpp``: heads in groups whose K and V fit 32 of 50 MiB).
    """
    of_sequence, each = 1 + max(c.head for c in blocks), heads or sys.maxsize
    return sorted(blocks, key=lambda c: ((c.batch * of_sequence + c.head) // each, c.first - c.last))


def as_free(
    blocks: Sequence[WorkTile], cores: int, residents: int = 1
) -> tuple[Sequence[WorkTile], tuple[tuple[int, ...], ...]]:
    """Return the blocks with their slots, and the indices of each core's blocks in order.

    Blocks start in the order given, each at the slot that is free first (the first slot of every core before any second
    one), as with a GPU's dispatcher or a work list; blocks of a series (`SERIES`) run at one slot in order. The
    estimated time of a block is one unit per tile, plus one for its start and end.
    """
    if isinstance(blocks, WorkTable) and SERIES not in blocks.axes:
        slots, owners = _first_free(blocks.tile_counts + 1, cores, residents)
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(cores + 1)).tolist()
        of_cores = tuple([tuple(order[a:b].tolist()) for a, b in pairwise(ends)])
        return blocks.at(slots), of_cores
    free = [(0, slot, core) for slot in range(residents) for core in range(cores)]
    placed: list[WorkTile] = []
    shares: list[list[int]] = [[] for _ in range(cores)]
    for _, series in groupby(enumerate(blocks), key=lambda b: b[1].span(SERIES) or b[0]):
        work, slot, core = free[0]
        for number, block in series:
            work += block.tile_count + 1
            shares[core].append(number)
            placed.append(block if slot == block.place else block.at(slot))
        heapq.heapreplace(free, (work, slot, core))
    return tuple(placed), tuple(tuple(share) for share in shares)


def _first_free(work: Integers, cores: int, residents: int) -> tuple[Integers, Integers]:
    """Return slot and core of blocks that start in turn at the slot that is free first."""
    if not np.ptp(work):  # each round of equal blocks visits the slots in the same order
        turns = np.arange(len(work)) % (residents * cores)
        return turns // cores, turns % cores
    free = [(0, slot, core) for slot in range(residents) for core in range(cores)]
    chosen = list[tuple[int, int]]()
    for cost in work.tolist():
        at, slot, core = free[0]
        chosen.append((slot, core))
        heapq.heapreplace(free, (at + cost, slot, core))
    slots, owners = np.array(chosen, np.int64).T
    return slots, owners


def kv_runs(
    seen: Seen,
    position: int,
    rows: int,
    seq_kv: int,
    block_kv: int,
    *,
    is_trimmed: bool = True,
    unseen: Unseen | None = None,
) -> tuple[TileRun, ...]:
    """Return the key tiles of queries at ``position .. position + rows``, ascending, grouped by shape.

    Tiles form a grid from key 0 on. A tile that all queries see is whole, a tile that some queries see is masked, and a
    tile that no query sees is not visited. With trimming, the last tile ends with the last visible key. ``unseen``: the
    result of queries that see no key; blocks that have only such queries visit the first tile, or all tiles if the
    result is the mean of V.
    """
    first, last = position, position + rows - 1
    shown = seen.union(first, last) or ((0, 1),)
    if unseen == "mean" and not all(seen.union(p, p) for p in range(first, last + 1)):
        shown = ((0, seq_kv),)
    end = shown[-1][1] if is_trimmed else min(seq_kv, round_up(shown[-1][1], block_kv))
    # Number of tiles; the last tile may be shorter.
    count = ceil_div(end, block_kv)
    clear = [(ceil_div(a, block_kv), count if b >= end else b // block_kv) for a, b in seen.common(first, last)]
    visited = joined((a // block_kv, min(count, ceil_div(b, block_kv))) for a, b in shown)
    edges = sorted({edge for span in (*visited, *clear, (count - 1, count)) for edge in span})
    runs: list[TileRun] = []
    for start, stop in pairwise(edges):
        if any(a <= start and stop <= b for a, b in visited):
            only = frozenset[str]() if any(a <= start and stop <= b for a, b in clear) else MASKED
            cols = min(block_kv, end - start * block_kv)
            _add(runs, TileRun(start * block_kv, cols, stop - start, block_kv, only))
    return tuple(runs)


def query_cells(
    problem: Problem, block_kv: int, block_q: int, *, part: str = "", sums: int = 1, is_series: bool = False
) -> tuple[WorkTile, ...]:
    """Return every block of ``block_kv`` keys, head by head, with the tiles of ``block_q`` queries that see one of its
    keys.

    A tile is masked if one of its queries does not see all keys of the block. A block visits all query heads that share
    its keys; with ``part``, it visits one head, whose number is the coordinate ``member``. ``part``: the axis that
    numbers the parts of a head; block n adds to sum n modulo ``sums``. ``is_series``: blocks that add to one sum run in
    order in one slot.
    """
    seen, offset, cells = problem.seen, problem.causal_offset, list[tuple[tuple[int, int], tuple[TileRun, ...]]]()
    each = [
        (row, n, seen.union(offset + row, offset + row + n - 1), seen.common(offset + row, offset + row + n - 1))
        for row, n in chunks(problem.seq_q, block_q)
    ]
    for key, keys in chunks(problem.seq_kv, block_kv):
        runs: list[TileRun] = []
        for row, rows, shown, common in each:
            if any(a < key + keys and key < b for a, b in shown):
                only = frozenset[str]() if any(a <= key and key + keys <= b for a, b in common) else MASKED
                _add(runs, TileRun(row, rows, 1, block_q, only))
        cells.append(((key, keys), tuple(runs)))
    group, count = problem.group_size, len(cells)
    members = [[n] for n in range(group)] if part else [[*range(group)]]
    walked = [[_of_members(runs, heads, problem.seq_q) for _, runs in cells] for heads in members]
    placed, turns = offset if depends_on_position(problem, seen) else None, ceil_div(count, sums)
    blocks = list[WorkTile]()
    for batch, head, member in product(range(problem.batch), range(problem.kv_heads), range(len(members))):
        series = ((batch * problem.kv_heads + head) * len(members) + member) * sums
        for n in (n for first in range(min(sums, count)) for n in range(first, count, sums)):
            axes = [(part, n % sums * turns + n // sums, 1)] if part else []
            axes += [("member", member, 1)] if part and group > 1 else []
            axes += [(SERIES, series + n % sums, 1)] if is_series else []
            blocks.append(WorkTile(batch, head, (("key", *cells[n][0]), *axes), walked[member][n], placed))
    return tuple(blocks)


def _of_members(runs: tuple[TileRun, ...], members: Sequence[int], rows: int) -> tuple[TileRun, ...]:
    """Return the tiles of several heads of ``rows`` rows, head after head, each with the same tiles."""
    listed = list[TileRun]()
    for member in members:
        for run in runs:
            _add(listed, replace(run, col=run.col + member * rows))
    return tuple(listed)
