"""Schedules of a node: their declaration, their fields, and the collectives between their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from npusim.config.family import NODE_FAMILY, registered
from npusim.config.node_file import NodeDevice, NodeSpec
from npusim.config.problem import GemmProblem, Problem, Sizes
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.kernels.attention.online_softmax import NamedFormats
from npusim.kernels.declare.registry import Schedule
from npusim.late_methods import dataclass
from npusim.machines.node.collective import Algorithm
from npusim.machines.node.node_program import Child, Communication
from npusim.machines.node.topology import Topology
from npusim.program.ir.tile_program import TileProgram


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
    """Return a schedule of a whole node; the first of ``precisions`` is the default; ``left``: fields that searches
    leave unchanged.
    """
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
    """Driver and mode of the collective."""

    collective: str = Field(
        default="auto", description=("driver in the node's file that moves the bytes; auto: the first driver")
    )
    algorithm: Literal["auto", "mesh", "ring", "halving_doubling"] = Field(
        default="auto",
        description=("order of the transfers; auto: mesh if every pair of devices has a link, else ring"),
    )


class OverlapTiling(CollectiveTiling):
    """Row blocks whose collective overlaps with the next block's kernels."""

    # The default is a few large blocks, because a collective has a start-up time, and kernels of small blocks do not
    # fill the cores.
    blocks: int = Field(default=2, ge=1, description="number of blocks of rows; 1: collectives do not overlap")
    first_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=("share of all rows that the first block has; default: the share of each other block"),
    )


def communication(
    node: NodeSpec, ranks: int, tiling: CollectiveTiling, columns: int, element: int = 1
) -> Communication:
    """Return the collective that a tiling selects, for rows of ``columns`` elements of ``element`` bytes.

    Raises `TilingError` for more ranks than devices, and `SpecError` if the node lacks this driver or if links do not
    join all of its devices.
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
    """Raise `TilingError` if a node has fewer devices than ranks."""
    if ranks > node.device_count.value:
        raise TilingError(f"tensor_parallel: {ranks} ranks, but {node.name} has {node.device_count.value} devices")


def element_bytes(precision: PartialSums) -> int:
    """Return the bytes of one partial sum."""
    return get_format(precision.partial).size_bytes


def linear(rows: int, problem: GemmProblem, precision: PartialSums) -> Child:
    """Return the product of ``rows`` rows of ``problem``, stored in the format of the partial sums."""
    product = GemmProblem(m=rows, n=problem.n, k=problem.k, dtype=problem.dtype)
    return Child("gemm", product, "" if precision.partial == product.dtype else f"output={precision.partial}")


#: Names of one-device schedules in a node's kernels.
NAMED = "optionally with fields (standard:operators=eager)"


def prefill_attention(name: str, device: NodeDevice, problem: Problem) -> Child:
    """Return the attention that one device runs over rows of queries."""
    return Child.named(name, registered(device.each.family).attention_of(problem, device.each), problem)


def row_pieces(problem: Problem, row: int, rows: int) -> Iterator[Problem]:
    """Yield the attention problems of rows ``row .. row + rows`` over batch x sequence.

    There are at most three: the end of a sequence, complete sequences, and the beginning of a sequence. With a causal
    mask a piece needs only the keys up to its last row.
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
