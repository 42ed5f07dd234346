"""Collectives of a node, alone and concurrent with the kernels of the next rows, and the common part of node schedules.

``tiling_allreduce`` is FastAttention's: the B x S rows are cut into blocks; while the collective of one
block is on the links, the cores work on the next one.  The first block's compute and the last block's
collective stay exposed.  Tiled blocks run attention and projection in one launch, as the paper's fused
kernel; the baseline (``blocks: 1``) is three calls.  (FastAttention section 4.2, appendix B equations 15 to 18.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.flash import NamedFormats
from npusim.config.family import NODE_FAMILY, registered
from npusim.config.problem import CopyProblem, GemmProblem, LayerProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.node.program import Child, Communication, NodeKernel, RowBlock, cut_rows, node_program
from npusim.node.topology import Topology
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npusim.config.node import NodeDevice, NodeSpec
    from npusim.config.problem import Problem, Sizes
    from npusim.ir.program import TileProgram
    from npusim.node.collective import Algorithm


@dataclass(frozen=True, slots=True)
class PartialSums(NamedFormats):
    """Format of the partial products that a collective adds up."""

    name: str
    partial: str
    intermediates = ("partial",)


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
    problem: type[Sizes],
    precisions: Mapping[str, PartialSums] = PRECISIONS,
    hw: str = "ascend_910b2_x8",
    left: Callable[[NodeDevice], frozenset[str]] = lambda _device: frozenset(),
) -> Schedule:
    """Return a schedule of a whole node; the first of ``precisions`` is the default, searches leave fields ``left``."""
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
        left=left,
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
    """Row blocks whose collective overlaps with the next block's kernels."""

    # Few large blocks: a collective has a start-up, and a kernel's blocks no longer fill the cores.
    blocks: int = Field(default=2, ge=1, description="blocks of rows; 1: nothing overlaps")
    first_share: float | None = Field(
        default=None, gt=0, lt=1, description="rows in the first block, of all; default: as in the others"
    )


def communication(
    node: NodeSpec, ranks: int, tiling: CollectiveTiling, columns: int, element: int = 1
) -> Communication:
    """Return the collective that a tiling asks for, of rows of ``columns`` elements of ``element`` bytes.

    Raises `TilingError` for more ranks than devices; `SpecError` if the node has no such driver, or its devices are not
    all joined.
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


def element_bytes(precision: PartialSums) -> int:
    """Return the bytes of one partial sum."""
    return get_format(precision.partial).size_bytes


def _collective(
    problem: CopyProblem, tiling: AllReduceTiling, device: NodeDevice, _precision: PartialSums
) -> TileProgram:
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


class GemmAllReduceTiling(OverlapTiling):
    """Row blocks of a product and who drives the collective."""

    collective: str = Field(
        default="auto",
        description="who moves the bytes: a driver of the node's file; auto: mc2, CANN's fused kernel, where the file "
        "has it, else its first",
    )

    # pto-isa's kernel hands over tile by tile (ascend.md section 1.8); few blocks come near it.
    blocks: int = Field(default=4, ge=1, description="blocks of rows; 1: nothing overlaps")


def _gemm_allreduce(
    problem: GemmProblem, tiling: GemmAllReduceTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return ``C = sum over ranks of A B``; ``problem`` is each rank's product.

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


def linear(rows: int, problem: GemmProblem, precision: PartialSums) -> Child:
    """Return the product of ``rows`` rows of ``problem``, stored in the format of the partial sums."""
    product = GemmProblem(m=rows, n=problem.n, k=problem.k, dtype=problem.dtype)
    return Child("gemm", product, "" if precision.partial == product.dtype else f"output={precision.partial}")


#: How a node's kernels name a schedule of one device.
NAMED = "with its fields if any (standard:operators=eager)"


class TilingAllReduceTiling(OverlapTiling):
    """Row blocks, who drives the collective, and which attention runs on a device."""

    attention: str = Field(
        default="auto", description=f"attention of one device, {NAMED}; auto: two_level on ascend, flash on nvidia"
    )


def _tiling_allreduce(
    problem: LayerProblem, tiling: TilingAllReduceTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return attention, projection and AllReduce of one layer on ``problem.ranks`` devices.

    Raises `TilingError` for more blocks than rows, or more ranks than devices.
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


def prefill_attention(name: str, device: NodeDevice, problem: Problem) -> Child:
    """Return the attention that one device runs over rows of queries."""
    return Child.named(name, "two_level" if registered(device.each.family).processor == "npu" else "flash", problem)


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
        offset = problem.causal_offset + first
        keys = problem.seen.union(offset, offset + count - 1)[-1][1]
        yield problem.model_copy(update={"batch": 1, "seq_q": count, "seq_kv": keys, "causal_offset": offset})
        at += count


SCHEDULES = (
    node_schedule(
        "tiling_allreduce",
        "attention, projection and AllReduce by row blocks, FastAttention's overlap",
        _tiling_allreduce,
        tiling=TilingAllReduceTiling,
        problem=LayerProblem,
    ),
    node_schedule(
        "gemm_allreduce",
        "a product, its AllReduce during the next rows",
        _gemm_allreduce,
        tiling=GemmAllReduceTiling,
        problem=GemmProblem,
    ),
    node_schedule(
        "allreduce",
        "a collective by itself: start, protocol, bandwidth",
        _collective,
        tiling=AllReduceTiling,
        problem=CopyProblem,
    ),
)
