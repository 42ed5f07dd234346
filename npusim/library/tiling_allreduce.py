"""Collectives of a node, without other work or while kernels compute the next rows; and the common part of node
schedules.

``tiling_allreduce`` is FastAttention's method: the B x S rows are cut into blocks; while the links transfer the
collective of one block, the cores compute the next one.  The first block's compute and the last block's collective are
not hidden. Tiled blocks run attention and projection in one launch, like the paper's fused kernel; the baseline
(``blocks: 1``) consists of three calls.  (FastAttention section 4.2, appendix B equations 15 to 18.)
"""

from __future__ import annotations

from npusim.kernel import (
    NAMED,
    Field,
    GemmProblem,
    LayerProblem,
    NodeDevice,
    OverlapTiling,
    PartialSums,
    TileProgram,
    communication,
    element_bytes,
    linear,
    node_schedule,
    prefill_attention,
    row_pieces,
)
from npusim.machine import NodeKernel, RowBlock, cut_rows, node_program


class TilingAllReduceTiling(OverlapTiling):
    """Options: row blocks, the driver of the collective, and the attention that runs on a device."""

    attention: str = Field(
        default="auto",
        description=f"attention of one device, {NAMED}; auto: two_level on ascend, flash on nvidia (on Hopper the "
        "kernel of cuDNN; if the node's file states the time of the attention, that time applies)",
    )


def _tiling_allreduce(
    problem: LayerProblem, tiling: TilingAllReduceTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return attention, projection and AllReduce of one layer on ``problem.ranks`` devices.

    Raises `TilingError` for more blocks than rows, or for more ranks than devices.
    """
    comm = communication(device.node, problem.ranks, tiling, problem.hidden, element_bytes(precision))
    product = GemmProblem(m=problem.rows, n=problem.hidden, k=problem.width, dtype=problem.dtype)
    attention, blocks = problem.attention, []
    for row, rows in cut_rows(problem.rows, tiling.blocks, tiling.first_share):
        pieces = tuple(prefill_attention(tiling.attention, device, p) for p in row_pieces(attention, row, rows))
        kernels = (
            NodeKernel("attention", pieces),
            NodeKernel("linear", (linear(rows, product, precision),), is_fused=tiling.blocks > 1),
        )
        blocks.append(RowBlock(row, rows, kernels))
    return node_program("tiling_allreduce", problem.ranks, blocks, comm, problem.flops())


SCHEDULES = (
    node_schedule(
        "tiling_allreduce",
        "attention, projection and AllReduce by row blocks, FastAttention's overlap",
        _tiling_allreduce,
        tiling=TilingAllReduceTiling,
        problem=LayerProblem,
    ),
)
