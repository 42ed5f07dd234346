"""Bits of a node program: its kernels executed rank by rank, its collectives in the order of their transfers.

Both follow from the timed program: the children of a kernel are the timed tile programs, and the order and chunks of a
collective are those of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.machines.node.node_program import ROW_GRAIN, Child, CollectiveOp, KernelOp, NodeKernel, operations
from npusim.machines.node.reduction import Order, Sums
from npusim.machines.node.topology import Topology
from npusim.program.numerics.bits_result import NumericEvent, NumericResult
from npusim.program.numerics.evaluate import Choice, chosen, execute_rows, numeric_result
from npusim.program.numerics.executor import EventLog, HeadSource, Progress
from npusim.program.numerics.reference import attention, summarise_errors

if TYPE_CHECKING:
    from npusim.config.node_file import NodeSpec
    from npusim.config.problem import LayerProblem, Problem
    from npusim.machines.node.collective import Transfer
    from npusim.program.ir.tile_program import TileProgram

Array = NDArray[Any]
#: Builds the tile program of a kernel's child on the node's device.
ChildProgram = Callable[[Child], "TileProgram"]
#: Largest size of shares of W_o that are stored; larger shares are computed again for each row block.
KEPT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of the ranks of a layer, by heads of the layer.

    ``heads(name, batch, head)`` gives Q, K and V, ``projection(head)`` the rows (value head size,
    hidden) of W_o that belong to a query head.  With fewer ``kv_heads`` than ranks, several ranks share a KV head.
    """

    heads: HeadSource
    projection: Callable[[int], Array]
    kv_heads: int

    def of_rank(self, layer: LayerProblem, rank: int, row: int, piece: Problem) -> HeadSource:
        """Return the inputs of one rank for the piece of its attention that starts at ``row``."""
        first_batch, first = divmod(row, layer.seq_q)

        def source(name: str, batch: int, head: int) -> Array:
            if name == "q":
                queries = self.heads(name, first_batch + batch, rank * layer.heads + head)
                return queries[first : first + piece.seq_q]
            shared = self.kv_head(layer, rank, head)
            return self.heads(name, first_batch + batch, shared)[: piece.seq_kv]

        return source

    def kv_head(self, layer: LayerProblem, rank: int, head: int) -> int:
        """Return the number of the KV head in the layer for the ``head``-th KV head of a rank."""
        return rank * self.kv_heads // layer.ranks + head

    def share(self, layer: LayerProblem, rank: int) -> Array:
        """Return a rank's rows of W_o, (heads x value head size, hidden)."""
        first = rank * layer.heads
        return np.concatenate([self.projection(h) for h in range(first, first + layer.heads)])


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Bits of a layer, the same sums in other orders, and the error of only the additions.

    ``numerics.output`` is (batch, 1, seq_q, hidden).  ``orders`` are the results of other collectives and tilings for
    the same partial sums; ``sum_rmse`` is against the float64 sum of the partial sums.
    """

    numerics: NumericResult
    orders: tuple[Order, ...]
    sum_rmse: float


class LayerEvaluation:
    """All ranks of a layer on a node, operation by operation of the program they share.

    ``rows`` are the rows to compute: ``"all"``, query indices (with their Q blocks), or ``"sample"``
    (`sample_rows`).  ``fmt`` is the format of the partial sums, in which they are added.  Raises `SpecError` for
    a row that does not exist.
    """

    def __init__(
        self,
        program: TileProgram,
        layer: LayerProblem,
        node: NodeSpec,
        fmt: str,
        inputs: LayerInputs,
        program_of: ChildProgram,
        rows: Choice = "sample",
    ) -> None:
        self.layer, self.fmt, self.inputs = layer, fmt, inputs
        self.operations = list(operations(program))
        which = chosen("rows", rows, layer.seq_q)
        self.chosen_rows = None if which == "all" else sample_rows(layer.seq_q) if which == "sample" else which
        self.programs: dict[Child, TileProgram] = {}
        self.program_of = program_of
        self.log = EventLog()
        #: For the current row block: the rows that are computed, and the attention and partial sums of each rank.
        self.computed: Array = np.zeros(0, np.bool_)
        self.attended: list[Array] = []
        self.partial: list[Array] = []
        self.shares: dict[int, Array] = {}
        self.outputs: dict[int, Array] = {}
        self.references: dict[int, Array] = {}
        calls = [op for op in self.operations if isinstance(op, CollectiveOp)]
        self.sums = Sums(node, Topology(node, layer.ranks), calls, fmt)

    def run(self, progress: Progress | None = None) -> LayerBits:
        """Return the bits of attention, projection and AllReduce of the chosen rows on all ranks."""
        for number, op in enumerate(self.operations):
            if isinstance(op, KernelOp) and op.kernel.role == "attention":
                self._attention(op)
            elif isinstance(op, KernelOp):
                self._linear(op)
            elif isinstance(op, CollectiveOp):
                self._reduce(op)
            if progress is not None:
                progress((number + 1) / len(self.operations))
        return self._result()

    # ---------------------------------------------------------------- kernels

    def _program(self, child: Child) -> TileProgram:
        if child not in self.programs:
            self.programs[child] = self.program_of(child)
        return self.programs[child]

    def _attention(self, op: KernelOp) -> None:
        """Compute each rank's heads of a row block; rows that were not requested stay 0."""
        layer = self.layer
        pieces = list(_pieces(op.kernel))
        dtype = _dtype(self._program(pieces[0][1]), "o")
        self.computed = np.zeros(op.rows, np.bool_)
        self.attended = [np.zeros((op.rows, layer.width), dtype) for _ in range(layer.ranks)]
        for rank, heads in enumerate(self.attended):
            for start, child in pieces:
                piece, program = cast("Problem", child.problem), self._program(child)
                rows = self._rows_of(op.row + start, piece)
                if not rows:
                    continue
                source = self.inputs.of_rank(layer, rank, op.row + start, piece)
                done, written = execute_rows(program, source, rows, range(piece.heads))
                self.log.take(done.events, f"rank {rank} {op.label}")
                for (batch, head, row), block in written.items():
                    at = start + batch * piece.seq_q + row
                    heads[at : at + len(block), self._columns(head)] = block
                    self.computed[at : at + len(block)] = True

    def _columns(self, head: int) -> slice:
        return slice(head * self.layer.value_head_dim, (head + 1) * self.layer.value_head_dim)

    def _rows_of(self, row: int, piece: Problem) -> Choice:
        """Return the chosen rows of the piece of attention that starts at ``row``, counted from there."""
        if self.chosen_rows is None:
            return "all"
        first = row % self.layer.seq_q
        return [r - first for r in self.chosen_rows if first <= r < first + piece.seq_q]

    def _linear(self, op: KernelOp) -> None:
        """Compute each rank's partial sums of a row block from its share of W_o."""
        (child,) = op.kernel.children
        program, rows = self._program(child), np.nonzero(self.computed)[0].tolist()
        dtype = _dtype(program, "c")
        self.partial = [np.zeros((op.rows, self.layer.hidden), dtype) for _ in range(self.layer.ranks)]
        if not rows:
            return
        for rank, products in enumerate(self.partial):
            done, written = execute_rows(program, partial(self._matrix, rank), rows, (0,), output="c")
            self.log.take(done.events, f"rank {rank} {op.label}")
            for (_, _, row), block in written.items():
                products[row : row + len(block)] = block

    def _matrix(self, rank: int, name: str, _batch: int, _head: int) -> Array:
        """Return the operands of a rank's product: its attention ``a``, its share of W_o ``b``."""
        return self.attended[rank] if name == "a" else self._share(rank)

    def _share(self, rank: int) -> Array:
        """Return a rank's share of W_o: stored for every row block if all shares fit, since drawing one is slow."""
        if rank in self.shares:
            return self.shares[rank]
        share = self.inputs.share(self.layer, rank)
        if share.nbytes * self.layer.ranks <= KEPT_BYTES:
            self.shares[rank] = share
        return share

    # ---------------------------------------------------------------- collectives

    def _reduce(self, op: CollectiveOp) -> None:
        """Add up the partial sums of the computed rows, also in every other order."""
        at = 0
        for is_computed, run in groupby(self.computed.tolist()):
            start, at = at, at + len(list(run))
            if not is_computed:
                continue
            row, terms = op.row + start, [p[start:at].reshape(-1) for p in self.partial]
            total = self.sums.add(op, row, terms, partial(self._look, op, row))
            self.outputs[row] = total.reshape(-1, self.layer.hidden)
            self.references[row] = self._reference(row, at - start)

    def _look(
        self, op: CollectiveOp, row: int, transfer: Transfer, first: int, addends: tuple[Array, Array], result: Array
    ) -> None:
        """Record overflow and NaN that an addition of numbers produces."""
        if np.isfinite(result).all():
            return
        finite, known = (np.logical_and(*(test(x) for x in addends)) for test in (np.isfinite, lambda x: ~np.isnan(x)))
        label, where = f"{op.label}.add", f"rank {transfer.target} adds what rank {transfer.source} sent"
        for kind, mask in (("overflow", np.isinf(result) & finite), ("nan", np.isnan(result) & known)):
            if count := int(mask.sum()):
                element = first + row * self.layer.hidden + int(np.argmax(mask))
                at = divmod(element, self.layer.hidden)
                self.log.add(NumericEvent(kind, label, op.queue, "rows", where, {}, *at, count))

    # ---------------------------------------------------------------- result

    def _reference(self, row: int, count: int) -> Array:
        """Return the float64 layer for ``count`` rows from ``row`` over batch and sequence."""
        layer, total = self.layer, np.zeros((count, self.layer.hidden))
        for rank in range(layer.ranks):
            heads = np.zeros((count, layer.width))
            for start, batch, first, rows in _stretches(row, count, layer.seq_q):
                for head in range(layer.heads):
                    kv = self.inputs.kv_head(layer, rank, head // layer.group_size)
                    q = self.inputs.heads("q", batch, rank * layer.heads + head)[first : first + rows]
                    seen = layer.seen.union(first, first + rows - 1)[-1][1]
                    k, v = (self.inputs.heads(n, batch, kv)[:seen] for n in ("k", "v"))
                    heads[start : start + rows, self._columns(head)] = attention(q, k, v, layer, first)
            total += heads @ self._share(rank).astype(np.float64)
        return total

    def _result(self) -> LayerBits:
        layer = self.layer
        error = summarise_errors(list(self.outputs.values()), list(self.references.values()), self.fmt)
        written = {
            (batch, 0, first): block[start : start + rows]
            for row, block in self.outputs.items()
            for start, batch, first, rows in _stretches(row, len(block), layer.seq_q, longest=layer.seq_q)
        }
        numerics = numeric_result(
            error,
            self.log,
            self.programs.values(),
            rows=written,
            shape=(layer.batch, 1, layer.seq_q, layer.hidden),
            sample=self._sample(),
        )
        return LayerBits(numerics, tuple(self.sums.orders) if error.is_finite else (), self.sums.rmse)

    def _sample(self) -> str:
        total, layer = self.layer.rows, self.layer
        count = sum(len(b) for b in self.outputs.values())
        where = f"{layer.hidden} columns of the layer on {layer.ranks} ranks"
        if count == total:
            return f"all {total} rows, {where}"
        spans = [f"{row}..{row + len(b) - 1}" for row, b in sorted(self.outputs.items())]
        return f"rows {', '.join(spans[:3])}{', …' if len(spans) > 3 else ''} of {total}, {where}"


def sample_rows(count: int) -> list[int]:
    """Return the rows of a sequence whose blocks a sample contains: the last 128 rows, and one row at five eighths of
    the sequence.

    The last rows see all keys, but belong to the last shard of a message, which ring and mesh add in the same order;
    the other row is inside a message, whether it consists of the sequence or of half of it.
    """
    return sorted({5 * count // 8, *range(max(0, count - ROW_GRAIN), count)})


def _pieces(kernel: NodeKernel) -> Iterator[tuple[int, Child]]:
    start = 0
    for child in kernel.children:
        if not (rows := child.problem.query_rows()):
            raise SpecError(f"{child.schedule}: no attention")
        yield start, child
        start += rows


def _stretches(row: int, count: int, length: int, longest: int = 512) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, batch, first, rows) of rows over batch and sequence within one sequence.

    Each part has at most ``longest`` rows, so that float64 scores of long sequences fit in memory.
    """
    at = row
    while at < row + count:
        batch, first = divmod(at, length)
        rows = min(longest, length - first, row + count - at)
        yield at - row, batch, first, rows
        at += rows


def _dtype(program: TileProgram, name: str) -> Any:
    return get_format(program.tensors[name].fmt).dtype
