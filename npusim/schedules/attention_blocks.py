"""The blocks of an attention call: Q blocks of heads, and the runs of key tiles each of them visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim.units import chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class KvTile:
    """The ``index``-th tile visited: ``cols`` keys from ``col``, with or without a causal mask."""

    index: int
    col: int
    cols: int
    is_masked: bool

    @property
    def shape(self) -> tuple[int, bool]:
        """What tiles with the same operations share."""
        return self.cols, self.is_masked


@dataclass(frozen=True, slots=True)
class KvRun:
    """``count`` key tiles of one shape, visited from ``col`` on, ``step`` keys apart."""

    col: int
    cols: int
    count: int
    is_masked: bool
    step: int

    def tile(self, first: int, index: int) -> KvTile:
        """Return the tile visited as the ``index``-th of all, if the run's first is the ``first``-th."""
        return KvTile(index, self.col + (index - first) * self.step, self.cols, self.is_masked)

    @property
    def first_key(self) -> int:
        """Lowest key of its tiles."""
        return min(self.col, self.col + (self.count - 1) * self.step)

    @property
    def last_key(self) -> int:
        """One past the highest key of its tiles."""
        return max(self.col, self.col + (self.count - 1) * self.step) + self.cols

    def reversed(self) -> KvRun:
        """Return the same tiles from last to first."""
        return KvRun(
            self.col + (self.count - 1) * self.step,
            self.cols,
            self.count,
            self.is_masked,
            -self.step,
        )


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """``rows`` queries of one head from ``row``, and the key tiles they attend to."""

    batch: int
    head: int
    kv_head: int
    row: int
    rows: int
    causal_offset: int | None
    runs: tuple[KvRun, ...]

    def __str__(self) -> str:
        return f"batch {self.batch} head {self.head} rows {self.row}..{self.row + self.rows - 1}"

    @property
    def shape(self) -> Hashable:
        """Key that blocks with the same operations share."""
        return (self.rows, tuple((r.cols, r.count, r.is_masked) for r in self.runs))

    @property
    def first_key(self) -> int:
        """First key it visits."""
        return min(r.first_key for r in self.runs)

    @property
    def last_key(self) -> int:
        """One past the last key it visits."""
        return max(r.last_key for r in self.runs)


def attention_blocks(
    problem: Problem,
    block_q: int,
    block_kv: int,
    *,
    is_reverse: bool = False,
    is_trimmed: bool = True,
) -> tuple[AttentionBlock, ...]:
    """Return every Q block, head by head, rows ascending; keys ascending unless ``is_reverse``.

    Keys right of a causal block's last row are left out; a tile that the diagonal crosses is
    masked, all others need no mask.  Not ``is_trimmed``: tiles are visited whole or not at all.
    """
    offset = problem.causal_offset if problem.causal else None
    per_row = [
        (row, rows, kv_runs(row, rows, problem.seq_kv, block_kv, offset, is_trimmed=is_trimmed))
        for row, rows in chunks(problem.seq_q, block_q)
    ]
    if is_reverse:
        per_row = [
            (row, rows, tuple(r.reversed() for r in runs[::-1])) for row, rows, runs in per_row
        ]
    share = problem.heads // problem.kv_heads
    return tuple(
        AttentionBlock(batch, head, head // share, row, rows, offset, runs)
        for batch in range(problem.batch)
        for head in range(problem.heads)
        for row, rows, runs in per_row
    )


Deal = Literal["round_robin", "balanced"]


def dealt(
    blocks: tuple[AttentionBlock, ...], group_count: int, deal: Deal
) -> tuple[AttentionBlock, ...]:
    """Return the blocks in the order in which they are dealt to ``group_count`` core groups.

    ``round_robin`` keeps the vendor kernels' order (head by head, ascending rows).  ``balanced``
    deals the longest first, every other round backwards, so that a causal mask leaves all groups
    nearly the same work.
    """
    if deal == "round_robin":
        return blocks
    longest_first = sorted(blocks, key=lambda b: b.first_key - b.last_key)
    rounds = chunks(len(longest_first), group_count)
    found: list[AttentionBlock] = []
    for index, (start, count) in enumerate(rounds):
        one = longest_first[start : start + count]
        found += one[::-1] if index % 2 else one
    return tuple(found)


def kv_runs(
    row: int, rows: int, seq_kv: int, block_kv: int, offset: int | None, *, is_trimmed: bool = True
) -> tuple[KvRun, ...]:
    """Return the key tiles of queries ``row .. row + rows``, ascending, grouped by shape.

    With ``offset`` set, query x sees keys up to ``x + offset``: tiles whose last key the first
    query sees are whole, later ones masked, and none starts right of what the last query sees.
    """
    end = seq_kv if offset is None else min(seq_kv, row + rows + offset)
    if not is_trimmed:
        end = min(seq_kv, round_up(end, block_kv))
    clear = end if offset is None else min(end, row + offset + 1)
    whole = clear // block_kv
    runs = [KvRun(0, block_kv, whole, False, block_kv)] if whole else []
    for col, cols in chunks(end - whole * block_kv, block_kv):
        start = whole * block_kv + col
        is_masked = start + cols > clear
        if runs and (runs[-1].cols, runs[-1].is_masked) == (cols, is_masked):
            last = runs.pop()
            runs.append(KvRun(last.col, cols, last.count + 1, is_masked, block_kv))
        else:
            runs.append(KvRun(start, cols, 1, is_masked, block_kv))
    return tuple(runs)


def run_at(runs: tuple[KvRun, ...], index: int) -> tuple[KvRun, int]:
    """Return the run that holds the ``index``-th tile of ``runs``, and the index of its first tile."""
    first = 0
    for run in runs:
        if index < first + run.count:
            return run, first
        first += run.count
    raise IndexError(f"tile {index} lies past the end")


#: Rows and causal offset of a block; its batch, head, KV head and first row.
Static = tuple[int, int | None]
Corner = tuple[int, int, int, int]
#: The same with columns and mask of a tile of keys; with its index and first key.
StageShape = tuple[int, int | None, int, bool]
StageCorner = tuple[int, int, int, int, int, int]


def stage_of(block: AttentionBlock, tile: KvTile) -> tuple[StageShape, StageCorner]:
    """Return what the operations of a stage depend on, and where it is."""
    static = block.rows, block.causal_offset, tile.cols, tile.is_masked
    return static, (block.batch, block.head, block.kv_head, block.row, tile.index, tile.col)


def stage_at(static: StageShape, at: StageCorner) -> tuple[AttentionBlock, KvTile]:
    """Return the block, without its runs, and the tile that a stage works on."""
    rows, offset, cols, is_masked = static
    batch, head, kv_head, row, index, col = at
    block = AttentionBlock(batch, head, kv_head, row, rows, offset, ())
    return block, KvTile(index, col, cols, is_masked)
