"""The tensors of one attention call in global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from npusim.config.problem import Problem


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Q, K, V and O; ``k`` may be a shifted K that an earlier phase leaves in a workspace."""

    q: GlobalTensor
    k: GlobalTensor
    v: GlobalTensor
    o: GlobalTensor

    def bound(self) -> dict[str, GlobalTensor]:
        """Return the tensors by the names of attention's tables."""
        return {"q": self.q, "k": self.k, "v": self.v, "out": self.o}


def attention_tensors(problem: Problem, output: str, packed: int = 1) -> AttentionTensors:
    """Return Q, K, V and O of ``problem`` in its layout, the output in format ``output``.

    ``packed`` query heads are one, their rows below one another: as they lie in memory, unless several
    rows of a head are interleaved with other heads' (BSND).
    """
    p, fmt, mixed = problem, problem.dtype, problem.layout != "bnsd"
    heads, rows, apart = p.heads // packed, p.seq_q * packed, mixed and (packed == 1 or p.seq_q > 1)
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, heads, rows, p.head_dim, fmt, "input", apart, packed),
        k=GlobalTensor("k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input", mixed),
        v=GlobalTensor("v", p.batch, p.kv_heads, p.seq_kv, p.value_head_dim, fmt, "input", mixed),
        o=GlobalTensor("o", p.batch, heads, rows, p.value_head_dim, output, "output", apart, packed),
    )
