"""The bits of a collective: its transfers executed on arrays, every addition rounded as it happens.

The order of additions follows from the collective and from a row's position in its message: with another algorithm, or
with other blocks of rows, the same sums have other bits (:class:`Sums`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import TensorError
from npusim.machines.node.collective import (
    ALGORITHMS,
    Algorithm,
    Collective,
    Transfer,
    collective,
    plan_collective,
    shard_sizes,
)
from npusim.machines.node.node_program import CollectiveOp, cut_rows
from npusim.program.numerics.reference import summed

if TYPE_CHECKING:
    from npusim.config.node_file import NodeSpec
    from npusim.machines.node.collective import CollectiveCall, PlannedCollective
    from npusim.machines.node.topology import Topology

Array = NDArray[Any]
#: Number of elements in a sample of partial sums: some in every shard of 64 ranks, enough for two digits of an error.
SAMPLE = 4096
#: Receives the transfer, the first element, both addends and their sum, before the sum is stored.
Watch = Callable[[Transfer, int, tuple[Array, Array], Array], None]


def execute(
    collective: Collective,
    inputs: Sequence[Array],
    fmt: str,
    edges: Sequence[Sequence[int]] | None = None,
    watch: Watch | None = None,
) -> list[Array]:
    """Return every rank's array after the collective, from the arrays before it: equal shapes, format ``fmt``.

    ``edges`` are, for each chunk of the message, the first element of each shard and the end
    (`PlannedCollective.shard_edges`); by default the message is one chunk.  If the arrays are a part of a message,
    edges are counted from the beginning of the part, and may be outside it; bits do not depend on the rest of a shard.
    ``watch`` is called for every addition.

    Additions round to ``fmt`` one by one in the collective's order: the rank's own value first, then the arriving
    values in the order of rounds (or all values by rank, if ``is_ordered``).  After a reduce-scatter only the shard of
    a rank is a sum; an all-gather copies each shard from its owner.  Rows of tiled calls are in different shards than
    those of an untiled call, so that bits are equal only if all shards are summed in the same order.

    Raises `TensorError` if the inputs are not one array of one shape for each rank.
    """
    shapes = {a.shape for a in inputs}
    if len(inputs) != collective.ranks or len(shapes) != 1:
        raise TensorError(
            f"{len(inputs)} arrays of shapes {sorted(shapes)}; needed: {collective.ranks} arrays of one shape"
        )
    partials = [np.array(a).reshape(-1) for a in inputs]
    size = partials[0].size
    if edges is None:
        edges = [np.cumsum([0, *shard_sizes(size, collective.shard_count)]).tolist()]
    for chunk in edges:
        cuts = [min(max(edge, 0), size) for edge in chunk]
        if cuts[0] < cuts[-1]:
            _chunk(collective, partials, cuts, fmt, watch)
    return [a.reshape(inputs[0].shape) for a in partials]


def _chunk(collective: Collective, partials: list[Array], cuts: Sequence[int], fmt: str, watch: Watch | None) -> None:
    for transfers in collective.rounds:
        sent = [[partials[t.source][cuts[s] : cuts[s + 1]].copy() for s in t.shards] for t in transfers]
        if collective.is_ordered and all(t.adds for t in transfers):
            _add_by_rank(partials, cuts, transfers, sent, fmt)
            continue
        for transfer, parts in zip(transfers, sent, strict=True):
            for shard, part in zip(transfer.shards, parts, strict=True):
                partial = partials[transfer.target][cuts[shard] : cuts[shard + 1]]
                result = formats.add(partial, part, fmt) if transfer.adds else part
                if watch is not None and transfer.adds:
                    watch(transfer, cuts[shard], (partial, part), result)
                partial[...] = result


def _add_by_rank(
    partials: list[Array], cuts: Sequence[int], transfers: Sequence[Transfer], sent: Sequence[Sequence[Array]], fmt: str
) -> None:
    """Add the values that arrive at each target in one round, and the target's value, in the order of ranks."""
    terms: dict[tuple[int, int], dict[int, Array]] = {}
    for transfer, parts in zip(transfers, sent, strict=True):
        for shard, part in zip(transfer.shards, parts, strict=True):
            terms.setdefault((transfer.target, shard), {})[transfer.source] = part
    for (target, shard), arrived in terms.items():
        partial = partials[target][cuts[shard] : cuts[shard + 1]]
        by_rank = [part for _, part in sorted({**arrived, target: partial.copy()}.items())]
        total = by_rank[0]
        for part in by_rank[1:]:
            total = formats.add(total, part, fmt)
        partial[...] = total


def normal_samples(ranks: int, fmt: str) -> list[Array]:
    """Return partial sums drawn from a normal distribution, one array per rank, equal in each call."""
    draw = np.random.default_rng(0)
    return [formats.cast(draw.standard_normal(SAMPLE), fmt) for _ in range(ranks)]


@dataclass(slots=True)
class Order:
    """A collective over blocks of rows ``(row, rows)``, and the distance of its sums from the sums of a run."""

    name: str
    blocks: tuple[tuple[int, int], ...]
    algorithm: Algorithm
    is_ordered: bool = False
    differing: int = 0
    count: int = 0
    squares: float = 0.0
    norm: float = 0.0

    def compare(self, total: Array, other: Array) -> None:
        """Count the values whose bits differ, and the largest distance."""
        wide = total.astype(np.float64)
        with np.errstate(invalid="ignore"):
            self.squares += _squared(other.astype(np.float64) - wide)
        same = total.view(np.uint8) == other.view(np.uint8)
        self.differing += int(np.count_nonzero(~same.reshape(total.size, -1).all(axis=1)))
        self.count += total.size
        self.norm += _squared(wide)

    def distance(self) -> tuple[float, float]:
        """Return the relative Frobenius distance, and the share of sums whose bits differ."""
        return math.sqrt(self.squares / self.norm) if self.norm else 0.0, self.differing / max(1, self.count)


class Sums:
    """Adds the ranks' values of each row in the order of the collectives ``calls`` of a program.

    ``orders`` are the other algorithms, the mesh in the order of ranks (HCCL's deterministic mode), and
    the rows in one block (or two, if the program has one).
    """

    def __init__(self, node: NodeSpec, topology: Topology, calls: Sequence[CollectiveOp], fmt: str) -> None:
        self.node, self.topology, self.fmt = node, topology, fmt
        self._plans: dict[tuple[CollectiveCall, bool], PlannedCollective] = {}
        self._squares = self._norm = 0.0
        algorithm, blocks = calls[0].call.algorithm, tuple((op.row, op.rows) for op in calls)
        self.orders = [Order(f"algorithm={a}", blocks, a) for a in ALGORITHMS if a != algorithm]
        self.orders.append(Order("algorithm=mesh added by rank", blocks, "mesh", is_ordered=True))
        total = sum(rows for _, rows in blocks)
        if len(blocks) > 1:
            self.orders.append(Order("blocks=1", ((0, total),), algorithm))
        elif total > 1:
            self.orders.append(Order("blocks=2", tuple(cut_rows(total, 2, None)), algorithm))

    def add(self, op: CollectiveOp, row: int, terms: Sequence[Array], watch: Watch) -> Array:
        """Return the sum of complete rows from ``row`` on, in the order of ``op``; ``terms`` has the values of each
        rank along one axis.
        """
        row_bytes = op.call.size_bytes // op.rows
        total = self._sum(op.call, (row - op.row) * row_bytes, terms, watch=watch)
        self._measure(total, terms)
        for order in self.orders:
            order.compare(total, self._in(order, op.call, row, row_bytes, terms))
        return total

    @property
    def rmse(self) -> float:
        """Relative Frobenius distance of all sums from the float64 sums of the same terms."""
        return math.sqrt(self._squares / self._norm) if self._norm else 0.0

    def _plan(self, call: CollectiveCall, *, is_ordered: bool) -> PlannedCollective:
        key = (call, is_ordered)
        if key not in self._plans:
            plan = plan_collective(self.node, self.topology, call)
            if is_ordered:
                by_rank = collective(call.kind, call.algorithm, self.topology.ranks, is_ordered=True)
                plan = replace(plan, collective=by_rank)
            self._plans[key] = plan
        return self._plans[key]

    def _sum(
        self,
        call: CollectiveCall,
        first_byte: int,
        terms: Sequence[Array],
        *,
        is_ordered: bool = False,
        watch: Watch | None = None,
    ) -> Array:
        plan, first = self._plan(call, is_ordered=is_ordered), first_byte // call.element_bytes
        edges = [[e - first for e in chunk] for chunk in plan.shard_edges()]
        return execute(plan.collective, terms, self.fmt, edges, watch)[0]

    def _in(self, order: Order, call: CollectiveCall, row: int, row_bytes: int, terms: Sequence[Array]) -> Array:
        """Return the sum of the rows from ``row`` on in another order, in which the boundaries of messages differ."""
        columns = row_bytes // call.element_bytes
        end, sums = row + len(terms[0]) // columns, []
        for start, rows in order.blocks:
            a, b = max(start, row), min(start + rows, end)
            if a < b:
                part = [t[(a - row) * columns : (b - row) * columns] for t in terms]
                other = replace(call, algorithm=order.algorithm, size_bytes=rows * row_bytes)
                first_byte = (a - start) * row_bytes
                sums.append(self._sum(other, first_byte, part, is_ordered=order.is_ordered))
        return np.concatenate(sums)

    def _measure(self, total: Array, terms: Sequence[Array]) -> None:
        exact = np.zeros(total.shape, np.float64)
        with np.errstate(invalid="ignore"):
            for term in terms:
                exact += term.astype(np.float64)
            self._squares += _squared(total.astype(np.float64) - exact)
        self._norm += _squared(exact)


def _squared(x: NDArray[np.float64]) -> float:
    """Return the sum of squares, from left to right whatever the CPU is."""
    return float(summed((x * x).reshape(-1)))
