"""A product and the AllReduce of its result."""

from __future__ import annotations

from npusim.kernel import (
    Field,
    GemmProblem,
    NodeDevice,
    OverlapTiling,
    PartialSums,
    TileProgram,
    communication,
    element_bytes,
    linear,
    node_schedule,
)
from npusim.machine import NodeKernel, RowBlock, cut_rows, node_program


class GemmAllReduceTiling(OverlapTiling):
    """Row blocks of a product and the driver of its collective."""

    collective: str = Field(
        default="auto",
        description=(
            "driver in the node's file that moves the bytes; auto: mc2, CANN's fused kernel, if the file has it, "
            "else the first driver"
        ),
    )

    # pto-isa's kernel transfers its result tile by tile (ascend.md section 1.8); a small number of blocks is nearly
    # equivalent.
    blocks: int = Field(default=4, ge=1, description="number of blocks of rows; 1: collectives do not overlap")


def _gemm_allreduce(
    problem: GemmProblem, tiling: GemmAllReduceTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return ``C = sum over ranks of A B``; ``problem`` is the product of one rank.

    Raises `TilingError` for more blocks than rows.
    """
    ranks = device.node.device_count.value
    if tiling.collective == "auto" and "mc2" in device.node.drivers:
        tiling = tiling.model_copy(update={"collective": "mc2"})
    comm = communication(device.node, ranks, tiling, problem.n, element_bytes(precision))
    blocks = [
        RowBlock(row, rows, (NodeKernel("linear", (linear(rows, problem, precision),)),))
        for row, rows in cut_rows(problem.m, tiling.blocks, tiling.first_share)
    ]
    return node_program("gemm_allreduce", ranks, blocks, comm, problem.flops())


SCHEDULES = (
    node_schedule(
        "gemm_allreduce",
        "a product, its AllReduce during the next rows",
        _gemm_allreduce,
        tiling=GemmAllReduceTiling,
        problem=GemmProblem,
    ),
)
