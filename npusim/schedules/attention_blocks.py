"""The blocks of an attention call: Q blocks of heads, and the runs of key tiles each of them visits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.units import chunks

if TYPE_CHECKING:
    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class KvTile:
    """``cols`` keys from ``col``; masked tiles need the causal mask, the others do not."""

    col: int
    cols: int
    is_masked: bool


@dataclass(frozen=True, slots=True)
class KvRun:
    """``count`` consecutive key tiles of one shape, the first at ``col``."""

    col: int
    cols: int
    count: int
    is_masked: bool


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

    @property
    def shape(self) -> Hashable:
        """Key that blocks with the same operations share."""
        return (self.rows, tuple((r.cols, r.count, r.is_masked) for r in self.runs))


def attention_blocks(problem: Problem, block_q: int, block_kv: int) -> tuple[AttentionBlock, ...]:
    """Return every Q block, head by head, rows ascending.

    Keys right of a causal block's last row are left out altogether; a tile that the diagonal
    crosses is masked, all others need no mask.
    """
    offset = problem.causal_offset if problem.causal else None
    per_row = [
        (row, rows, kv_runs(row, rows, problem.seq_kv, block_kv, offset))
        for row, rows in chunks(problem.seq_q, block_q)
    ]
    share = problem.heads // problem.kv_heads
    return tuple(
        AttentionBlock(batch, head, head // share, row, rows, offset, runs)
        for batch in range(problem.batch)
        for head in range(problem.heads)
        for row, rows, runs in per_row
    )


def kv_runs(row: int, rows: int, seq_kv: int, block_kv: int, offset: int | None) -> tuple[KvRun, ...]:
    """Return the key tiles of queries ``row .. row + rows``, grouped by shape.

    With ``offset`` set, query x sees keys up to ``x + offset``: tiles whose last key the first
    query sees are whole, later ones masked, and none starts right of what the last query sees.
    """
    end = seq_kv if offset is None else min(seq_kv, row + rows + offset)
    clear = end if offset is None else min(end, row + offset + 1)
    whole = clear // block_kv
    runs = [KvRun(0, block_kv, whole, False)] if whole else []
    for col, cols in chunks(end - whole * block_kv, block_kv):
        start = whole * block_kv + col
        is_masked = start + cols > clear
        if runs and (runs[-1].cols, runs[-1].is_masked) == (cols, is_masked):
            last = runs.pop()
            runs.append(KvRun(last.col, cols, last.count + 1, is_masked))
        else:
            runs.append(KvRun(start, cols, 1, is_masked))
    return tuple(runs)
