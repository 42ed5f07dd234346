"""A matrix product on every rank and the AllReduce of the partial results, by row blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.problem import GemmProblem
from npusim.config.tiling import Field
from npusim.node.kernel import Child, NodeKernel
from npusim.node.program import RowBlock, cut_rows, node_program
from npusim.schedules.allreduce import OverlapTiling, PartialSums, communication, element_bytes, node_schedule

if TYPE_CHECKING:
    from npusim.config.node import NodeDevice
    from npusim.ir.program import TileProgram


class GemmAllReduceTiling(OverlapTiling):
    """Row blocks of a product and who drives the collective."""

    # pto-isa's kernel hands over tile by tile (ascend.md section 1.8); few blocks come near it.
    blocks: int = Field(default=4, ge=1, description="blocks of rows; 1: nothing overlaps")


def build(problem: GemmProblem, tiling: GemmAllReduceTiling, device: NodeDevice, precision: PartialSums) -> TileProgram:
    """Return ``C = sum over ranks of A B``; ``problem`` is what each rank multiplies.

    Raises
    ------
    TilingError
        More blocks than rows.
    """
    ranks = device.node.device_count.value
    comm = communication(device.node, ranks, tiling, problem.n, element_bytes(precision))
    blocks = [
        RowBlock(row, rows, (NodeKernel("linear", (linear(rows, problem, precision),)),))
        for row, rows in cut_rows(problem.m, tiling.blocks, tiling.first_share)
    ]
    return node_program("gemm_allreduce", ranks, blocks, comm, problem.flops())


def linear(rows: int, problem: GemmProblem, precision: PartialSums) -> Child:
    """Return the product of ``rows`` rows of ``problem``, stored in the format of the partial sums."""
    own = GemmProblem(m=rows, n=problem.n, k=problem.k, dtype=problem.dtype)
    return Child("gemm", own, "" if precision.partial == own.dtype else f"output={precision.partial}")


SCHEDULES = (
    node_schedule(
        "gemm_allreduce",
        "a product, its AllReduce beside the next rows",
        build,
        tiling=GemmAllReduceTiling,
        problem=GemmProblem,
    ),
)
