"""Puts an attention algorithm's steps, an Ascend core group and a problem together into a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.ir.program import Phase, TileProgram
from npusim.ir.tile import GlobalTensor
from npusim.schedules.ascend_attention import AscendAttention, AscendAttentionTiling, AttentionTensors
from npusim.schedules.attention_blocks import AttentionBlock, attention_blocks
from npusim.schedules.tiling_mask import TilingMask

if TYPE_CHECKING:
    from npusim.schedules.on_ascend import AscendGroup
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.spec.problem import Problem


def attention_tensors(problem: Problem, output: str) -> AttentionTensors:
    """Return Q, K, V and O of ``problem`` in global memory, layout BNSD."""
    p, fmt = problem, problem.dtype
    return AttentionTensors(
        q=GlobalTensor("q", p.batch, p.heads, p.seq_q, p.head_dim, fmt, "input"),
        k=GlobalTensor("k", p.batch, p.kv_heads, p.seq_kv, p.head_dim, fmt, "input"),
        v=GlobalTensor("v", p.batch, p.kv_heads, p.seq_kv, p.value_head_dim, fmt, "input"),
        o=GlobalTensor("o", p.batch, p.heads, p.seq_q, p.value_head_dim, output, "output"),
    )


def attention_program(
    name: str, group: AscendGroup, problem: Problem, steps: AttentionSteps, tiling: AscendAttentionTiling
) -> TileProgram:
    """Return the program of one attention phase: every Q block of every head.

    Raises :class:`~npusim.errors.TilingError` if a block does not fit the device or the mask.
    """
    tensors = attention_tensors(problem, steps.formats["out"])
    mask = TilingMask() if problem.causal else None
    if mask:
        mask.check(min(tiling.block_q, problem.seq_q), min(tiling.block_kv, problem.seq_kv))
    attention = AscendAttention(group, tensors, steps, tiling, mask)
    listed = [tensors.q, tensors.k, tensors.v, tensors.o, *([mask.tensor()] if mask else [])]
    return TileProgram(
        name=name,
        queues=group.queues(),
        rings=tuple(group.allocator.rings),
        spaces=dict(group.allocator.spaces),
        tenants=dict(group.allocator.tenants),
        tensors={t.name: t for t in listed},
        phases=(
            Phase(
                "attention",
                attention_blocks(problem, tiling.block_q, tiling.block_kv),
                attention.block,
                _shape,
            ),
        ),
        flops=problem.flops(),
        constants={"mask": mask.values} if mask else {},
    )


def _shape(block: AttentionBlock) -> object:
    return block.shape
