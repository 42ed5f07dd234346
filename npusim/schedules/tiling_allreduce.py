"""FastAttention's tiling-AllReduce: attention, output projection and AllReduce, block by block of rows.

The B x S rows are cut into blocks; while the collective of one block is on the links, the cores
work on the next one.  The first block's compute and the last block's collective stay exposed.
Tiled blocks run attention and projection in one launch, as the paper's fused kernel; the baseline
(``blocks: 1``) is three calls.  (FastAttention section 4.2, appendix B equations 15 to 18.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.problem import GemmProblem, LayerProblem, Problem
from npusim.config.tiling import Field
from npusim.node.kernel import Child, NodeKernel
from npusim.node.program import RowBlock, cut_rows, node_program
from npusim.schedules.allreduce import OverlapTiling, PartialSums, communication, element_bytes, node_schedule
from npusim.schedules.gemm_allreduce import linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.node import NodeDevice
    from npusim.ir.program import TileProgram


class TilingAllReduceTiling(OverlapTiling):
    """Row blocks, who drives the collective, and which attention runs on a device."""

    attention: str = Field(
        default="auto", description="attention of one device; auto: two_level on ascend, flash on nvidia"
    )


def build(
    problem: LayerProblem, tiling: TilingAllReduceTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return attention, projection and AllReduce of one layer on ``problem.ranks`` devices.

    Raises
    ------
    TilingError
        More blocks than rows, or more ranks than devices.
    """
    comm = communication(device.node, problem.ranks, tiling, problem.hidden, element_bytes(precision))
    name = tiling.attention
    if name == "auto":
        name = {"ascend": "two_level"}.get(device.each.family, "flash")
    product = GemmProblem(m=problem.rows, n=problem.hidden, k=problem.width, dtype=problem.dtype)
    attention, blocks = problem.attention, []
    for row, rows in cut_rows(problem.rows, tiling.blocks, tiling.first_share):
        pieces = tuple(Child(name, p) for p in row_pieces(attention, row, rows))
        kernels = (
            NodeKernel("attention", pieces),
            NodeKernel("linear", (linear(rows, product, precision),), is_fused=tiling.blocks > 1),
        )
        blocks.append(RowBlock(row, rows, kernels))
    return node_program("tiling_allreduce", problem.ranks, blocks, comm, problem.flops())


def row_pieces(problem: Problem, row: int, rows: int) -> Iterator[Problem]:
    """Yield the attention problems of rows ``row .. row + rows`` over batch x sequence.

    At most three: the end of a sequence, whole sequences, the beginning of one.  With a causal mask
    a piece needs only the keys up to its last row.
    """
    at, end, length = row, row + rows, problem.seq_q
    while at < end:
        first = at % length
        if first == 0 and end - at >= length:
            whole = (end - at) // length
            yield problem.model_copy(update={"batch": whole})
            at += whole * length
            continue
        count = min(end, at - first + length) - at
        keys, offset = problem.seq_kv, problem.causal_offset + first
        if problem.causal:
            keys = min(keys, offset + count)
        yield problem.model_copy(update={"batch": 1, "seq_q": count, "seq_kv": keys, "causal_offset": offset})
        at += count


SCHEDULES = (
    node_schedule(
        "tiling_allreduce",
        "attention, projection and AllReduce by row blocks, FastAttention's overlap",
        build,
        tiling=TilingAllReduceTiling,
        problem=LayerProblem,
    ),
)
