"""A matrix product on every rank and the AllReduce of the partial results, by row blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.node.kernel import Child, Kernel
from npusim.node.program import RowBlock, cut_rows, node_program
from npusim.schedules.allreduce import (
    PRECISIONS,
    OverlapTiling,
    PartialSums,
    communication,
    element_bytes,
)
from npusim.schedules.registry import Schedule
from npusim.spec.kernels import GemmProblem
from npusim.spec.node import NODE_FAMILY

if TYPE_CHECKING:
    from npusim.ir.program import TileProgram
    from npusim.spec.node import NodeSpec


def build(
    problem: GemmProblem, tiling: OverlapTiling, node: NodeSpec, precision: PartialSums
) -> TileProgram:
    """Return ``C = sum over ranks of A B``; ``problem`` is what each rank multiplies.

    Raises
    ------
    TilingError
        More blocks than rows.
    """
    ranks = node.device_count.value
    comm = communication(node, ranks, tiling, problem.n * element_bytes(precision))
    blocks = [
        RowBlock(row, rows, (Kernel("linear", (linear(rows, problem),)),))
        for row, rows in cut_rows(problem.m, tiling.blocks, tiling.first_share)
    ]
    return node_program("gemm_allreduce", ranks, blocks, comm, problem.flops())


def linear(rows: int, problem: GemmProblem) -> Child:
    """Return the product of ``rows`` rows of ``problem``."""
    return Child("gemm", GemmProblem(m=rows, n=problem.n, k=problem.k, dtype=problem.dtype))


SCHEDULES = (
    Schedule(
        name="gemm_allreduce", family=NODE_FAMILY, summary="a product, its AllReduce beside the next rows",
        tiling=OverlapTiling, precisions=PRECISIONS, default_precision="float16", causal=False, build=build,
    ),
)  # fmt: skip
