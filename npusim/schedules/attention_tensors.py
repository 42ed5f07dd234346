"""The tensors of one attention call in global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.program import Touch
from npusim.ir.tile import GlobalTensor
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.schedules.attention_blocks import AttentionBlock
    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Q, K, V and O; ``k`` may be a shifted K that an earlier phase leaves in a workspace."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    o: GlobalTensor

    def touches(self, blocks: Sequence[AttentionBlock], band_rows: int = 0) -> Iterator[Touch]:
        """Yield what Q blocks in step read, keys and values as far as they visit them, and their output.

        Blocks of a head share its keys, and neighbours are one region of Q and of O.  V is read
        once for each band of ``band_rows`` queries, or once a block.
        """
        for batch, head, row, rows in neighbours(blocks):
            yield Touch(self.q.tile(batch, head, row, rows))
            yield Touch(self.o.tile(batch, head, row, rows), 0)
        read: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
        for block in blocks:
            first, last = block.first_key, block.last_key
            times = ceil_div(block.rows, band_rows) if band_rows else 1
            key = (block.batch, block.kv_head, first)
            rows, most, key_rows, value_rows = read.get(key, (0, 0, 0, 0))
            read[key] = (
                max(rows, last - first), max(most, times),
                key_rows + last - first, value_rows + times * (last - first),
            )  # fmt: skip
        for at, (rows, times, key_rows, value_rows) in read.items():
            keys, values = (t.tile(*at, rows) for t in (self.k, self.v))
            yield Touch(keys, 1, keys.payload_bytes // rows * key_rows)
            yield Touch(values, times, values.payload_bytes // rows * value_rows)


def neighbours(blocks: Sequence[AttentionBlock]) -> Iterator[tuple[int, int, int, int]]:
    """Yield batch, head, first row and rows of blocks, those that follow one another as one."""
    batch = head = row = rows = -1
    for block in blocks:
        if (block.batch, block.head, block.row) == (batch, head, row + rows):
            rows += block.rows
            continue
        if rows > 0:
            yield batch, head, row, rows
        batch, head, row, rows = block.batch, block.head, block.row, block.rows
    if rows > 0:
        yield batch, head, row, rows


def attention_tensors(problem: Problem, output: str) -> AttentionTensors:
    """Return Q, K, V and O of ``problem`` in its layout, the output in format ``output``."""
    p, fmt, mixed = problem, problem.dtype, problem.layout != "bnsd"
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, p.heads, p.seq_q, p.head_dim, fmt, "input", mixed),
        k=GlobalTensor("k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input", mixed),
        v=GlobalTensor("v", p.batch, p.kv_heads, p.seq_kv, p.value_head_dim, fmt, "input", mixed),
        o=GlobalTensor("o", p.batch, p.heads, p.seq_q, p.value_head_dim, output, "output", mixed),
    )
