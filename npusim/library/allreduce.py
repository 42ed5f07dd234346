"""An AllReduce without compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from npusim.kernel import (
    CollectiveTiling,
    CopyProblem,
    Field,
    NodeDevice,
    PartialSums,
    TileProgram,
    TilingError,
    communication,
    node_schedule,
)
from npusim.machine import RowBlock, node_program


class AllReduceTiling(CollectiveTiling):
    """Fields of a collective without compute."""

    kind: Literal["allreduce", "reduce_scatter", "all_gather"] = Field(
        default="allreduce", description="which collective"
    )
    servers: int = Field(
        default=1,
        ge=1,
        description=("number of equal servers, which are joined device by device; npusim simulates one of them"),
    )


def _collective(
    problem: CopyProblem, tiling: AllReduceTiling, device: NodeDevice, _precision: PartialSums
) -> TileProgram:
    """Return a collective over all devices of a node, with ``problem.bytes`` on each."""
    node = device.node
    ranks = node.device_count.value
    way = communication(node, ranks, tiling, problem.bytes)
    comm = replace(way, kind=tiling.kind, servers=tiling.servers)
    if tiling.servers > 1 and (node.between is None or tiling.kind != "allreduce"):
        missing = (
            f"{node.name} has no links between servers (key between)"
            if node.between is None
            else f"between servers only an allreduce is supported, not kind={tiling.kind}"
        )
        raise TilingError(f"servers: {tiling.servers}, but {missing}")
    return node_program("allreduce", ranks, [RowBlock(0, 1, ())], comm, 0)


SCHEDULES = (
    node_schedule(
        "allreduce",
        "a collective by itself: start, protocol, bandwidth",
        _collective,
        tiling=AllReduceTiling,
        problem=CopyProblem,
    ),
)
