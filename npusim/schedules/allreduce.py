"""Collectives of a node by themselves, and the fields that every node schedule has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.config.node import NODE_FAMILY
from npusim.config.problem import CopyProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.node.program import Communication, RowBlock, node_program
from npusim.node.topology import Topology
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.config.model import SpecModel
    from npusim.config.node import NodeDevice, NodeSpec
    from npusim.ir.program import TileProgram
    from npusim.node.collective import Algorithm


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Format of the partial products that a collective adds up."""

    name: str
    partial: str

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}``."""
        return {"partial": self.partial}


PRECISIONS = MappingProxyType(
    {
        "float16": PartialSums("float16", "float16"),
        "bfloat16": PartialSums("bfloat16", "bfloat16"),
        "float32": PartialSums("float32", "float32"),
    }
)


def node_schedule(
    name: str,
    summary: str,
    build: Callable[[Any, Any, Any, Any], TileProgram],
    *,
    tiling: type[Tiling],
    problem: type[SpecModel],
    precisions: Mapping[str, PartialSums] = PRECISIONS,
    hw: str = "ascend_910b2_x8",
) -> Schedule:
    """Return a schedule of a whole node; the first of ``precisions`` is the default."""
    return Schedule(
        name=name,
        family=NODE_FAMILY,
        summary=summary,
        tiling=tiling,
        precisions=precisions,
        default_precision=next(iter(precisions)),
        build=build,
        problem=problem,
        hw=hw,
    )


class CollectiveTiling(Tiling):
    """Who drives the collective, and how."""

    collective: str = Field(
        default="auto", description="who moves the bytes: a driver of the node's file; auto: its first"
    )
    algorithm: Literal["auto", "mesh", "ring", "halving_doubling"] = Field(
        default="auto", description="order of the transfers; auto: mesh where every pair has a link, else ring"
    )


class AllReduceTiling(CollectiveTiling):
    """Fields of a collective by itself."""

    kind: Literal["allreduce", "reduce_scatter", "all_gather"] = Field(
        default="allreduce", description="which collective"
    )
    servers: int = Field(
        default=1, ge=1, description="equal servers, joined device by device; one of them is simulated"
    )


class OverlapTiling(CollectiveTiling):
    """Row blocks whose collective runs beside the next block's kernels."""

    # Few large blocks: a collective has a start-up, and a kernel's blocks no longer fill the cores.
    blocks: int = Field(default=2, ge=1, description="blocks of rows; 1: nothing overlaps")
    first_share: float | None = Field(
        default=None, gt=0, lt=1, description="rows in the first block, of all; default: as in the others"
    )


def communication(
    node: NodeSpec, ranks: int, tiling: CollectiveTiling, columns: int, element: int = 1
) -> Communication:
    """Return the collective that a tiling asks for, of rows of ``columns`` elements of ``element`` bytes.

    Raises
    ------
    TilingError
        More ranks than devices.
    SpecError
        The node has no such driver, or its devices are not all joined.
    """
    check_ranks(node, ranks)
    topology = Topology(node, ranks)
    driver = node.default_driver if tiling.collective == "auto" else tiling.collective
    node.driver(driver)
    algorithm: Algorithm = "mesh" if topology.is_full_mesh else "ring"
    if tiling.algorithm != "auto":
        algorithm = tiling.algorithm
    return Communication(driver, algorithm, columns * element, element_bytes=element)


def check_ranks(node: NodeSpec, ranks: int) -> None:
    """Raise `TilingError` where a node has fewer devices than ranks."""
    if ranks > node.device_count.value:
        raise TilingError(f"tensor_parallel: {ranks} ranks, but {node.name} has {node.device_count.value} devices")


def build(problem: CopyProblem, tiling: AllReduceTiling, device: NodeDevice, _precision: PartialSums) -> TileProgram:
    """Return a collective over all devices of a node, ``problem.bytes`` on each."""
    node = device.node
    ranks = node.device_count.value
    way = communication(node, ranks, tiling, problem.bytes)
    comm = replace(way, kind=tiling.kind, servers=tiling.servers)
    if tiling.servers > 1 and (node.between is None or tiling.kind != "allreduce"):
        missing = (
            f"{node.name} has no links between servers (key between)"
            if node.between is None
            else f"only an allreduce goes between servers, not kind={tiling.kind}"
        )
        raise TilingError(f"servers: {tiling.servers}, but {missing}")
    return node_program("allreduce", ranks, [RowBlock(0, 1, ())], comm, 0)


def element_bytes(precision: PartialSums) -> int:
    """Return the bytes of one partial sum."""
    return get_format(precision.partial).size_bytes


SCHEDULES = (
    node_schedule(
        "allreduce",
        "a collective by itself: start, protocol, bandwidth",
        build,
        tiling=AllReduceTiling,
        problem=CopyProblem,
    ),
)
