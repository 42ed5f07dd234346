"""The tensors of one attention call in global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.program import Touch
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.schedules.attention_blocks import AttentionBlock
    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Q, K, V and O; ``k`` may be a shifted K that an earlier phase leaves in a workspace."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    o: GlobalTensor

    def touches(self, block: AttentionBlock) -> Iterator[Touch]:
        """Yield what a Q block reads, its keys and values as far as it visits them, and its output."""
        queries = (block.batch, block.head, block.row, block.rows)
        keys = (block.batch, block.kv_head, block.first_key, block.last_key - block.first_key)
        yield Touch(self.q.tile(*queries))
        yield Touch(self.k.tile(*keys))
        yield Touch(self.v.tile(*keys))
        yield Touch(self.o.tile(*queries), 0)


def attention_tensors(problem: Problem, output: str) -> AttentionTensors:
    """Return Q, K, V and O of ``problem``, layout BNSD, the output in format ``output``."""
    p, fmt = problem, problem.dtype
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, p.heads, p.seq_q, p.head_dim, fmt, "input"),
        k=GlobalTensor("k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input"),
        v=GlobalTensor("v", p.batch, p.kv_heads, p.seq_kv, p.value_head_dim, fmt, "input"),
        o=GlobalTensor("o", p.batch, p.heads, p.seq_q, p.value_head_dim, output, "output"),
    )
