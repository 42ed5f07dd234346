"""The sums of a node program's collectives, and the same partial sums in other orders.

Who adds what first follows from the collective and from where a row lies in its message: another
algorithm, or other blocks of rows, give other bits of the same sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.node.collective import ALGORITHMS, collective
from npusim.node.driver import plan_collective, shard_edges
from npusim.node.program import cut_rows
from npusim.node.reduction import execute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npusim.config.node import NodeSpec
    from npusim.node.collective import Algorithm
    from npusim.node.driver import NodePlan
    from npusim.node.kernel import CollectiveCall, CollectiveOp
    from npusim.node.reduction import Watch
    from npusim.node.topology import Topology

    Array = NDArray[Any]


@dataclass(slots=True)
class Order:
    """A collective over blocks of rows ``(row, rows)``, and how far its sums are from a run's own."""

    name: str
    blocks: tuple[tuple[int, int], ...]
    algorithm: Algorithm
    is_ordered: bool = False
    differing: int = 0
    count: int = 0
    squares: float = 0.0
    norm: float = 0.0

    def compare(self, own: Array, other: Array) -> None:
        """Count what differs in bits, and how far it is."""
        wide = own.astype(np.float64)
        with np.errstate(invalid="ignore"):
            self.squares += float(((other.astype(np.float64) - wide) ** 2).sum())
        same = own.view(np.uint8) == other.view(np.uint8)
        self.differing += int((~same.reshape(own.size, -1).all(axis=1)).sum())
        self.count += own.size
        self.norm += float((wide**2).sum())

    def distance(self) -> tuple[float, float]:
        """Return the relative Frobenius distance, and the share of sums whose bits differ."""
        return math.sqrt(self.squares / self.norm) if self.norm else 0.0, self.differing / max(1, self.count)


class Sums:
    """Adds up what the ranks hold of each row, as the collectives ``calls`` of a program do.

    ``orders`` are the other algorithms, the mesh in the order of ranks (HCCL's deterministic mode), and
    the rows in one block (or two, if the program has one).
    """

    def __init__(self, node: NodeSpec, topology: Topology, calls: Sequence[CollectiveOp], fmt: str) -> None:
        self.node, self.topology, self.fmt = node, topology, fmt
        self._plans: dict[tuple[CollectiveCall, bool], NodePlan] = {}
        self._squares = self._norm = 0.0
        own, blocks = calls[0].call.algorithm, tuple((op.row, op.rows) for op in calls)
        self.orders = [Order(f"algorithm={a}", blocks, a) for a in ALGORITHMS if a != own]
        self.orders.append(Order("algorithm=mesh added by rank", blocks, "mesh", is_ordered=True))
        total = sum(rows for _, rows in blocks)
        if len(blocks) > 1:
            self.orders.append(Order("blocks=1", ((0, total),), own))
        elif total > 1:
            self.orders.append(Order("blocks=2", tuple(cut_rows(total, 2, None)), own))

    def add(self, op: CollectiveOp, row: int, terms: Sequence[Array], watch: Watch) -> Array:
        """Return the sum of whole rows from ``row`` on, ``terms`` of one axis by rank, in the order of ``op``."""
        row_bytes = op.call.size_bytes // op.rows
        own = self._sum(op.call, (row - op.row) * row_bytes, terms, watch=watch)
        self._measure(own, terms)
        for order in self.orders:
            order.compare(own, self._in(order, op.call, row, row_bytes, terms))
        return own

    @property
    def rmse(self) -> float:
        """Relative Frobenius distance of all sums from the float64 sums of the same terms."""
        return math.sqrt(self._squares / self._norm) if self._norm else 0.0

    def _plan(self, call: CollectiveCall, *, is_ordered: bool) -> NodePlan:
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
        """Return the sum of a part of the message of ``call``."""
        plan, first = self._plan(call, is_ordered=is_ordered), first_byte // call.element_bytes
        edges = [[e - first for e in chunk] for chunk in shard_edges(plan, call.size_bytes)]
        return execute(plan.collective, terms, self.fmt, edges, watch)[0]

    def _in(self, order: Order, call: CollectiveCall, row: int, row_bytes: int, terms: Sequence[Array]) -> Array:
        """Return the sum of the rows from ``row`` on in another order, whose messages are cut elsewhere."""
        columns = row_bytes // call.element_bytes
        end, found = row + len(terms[0]) // columns, []
        for start, rows in order.blocks:
            a, b = max(start, row), min(start + rows, end)
            if a < b:
                part = [t[(a - row) * columns : (b - row) * columns] for t in terms]
                other = replace(call, algorithm=order.algorithm, size_bytes=rows * row_bytes)
                first_byte = (a - start) * row_bytes
                found.append(self._sum(other, first_byte, part, is_ordered=order.is_ordered))
        return np.concatenate(found)

    def _measure(self, own: Array, terms: Sequence[Array]) -> None:
        exact = np.zeros(own.shape, np.float64)
        with np.errstate(invalid="ignore"):
            for term in terms:
                exact += term.astype(np.float64)
            self._squares += float(((own.astype(np.float64) - exact) ** 2).sum())
        self._norm += float((exact**2).sum())
