"""Bits of a node program: its kernels executed rank by rank, its collectives in the order of their transfers.

Both come from the program that is timed: a kernel's children are the tile programs whose time is
taken, a collective's order and chunks are those of its plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.node.kernel import CollectiveOp, KernelOp, NodeKernel
from npusim.node.orders import Sums
from npusim.node.program import ROW_GRAIN
from npusim.node.topology import Topology
from npusim.numerics.evaluate import chosen, execute_rows, named_choices
from npusim.numerics.events import EVENTS_KEPT
from npusim.numerics.reference import attention, summarise_errors
from npusim.numerics.result import NumericEvent, NumericResult
from npusim.schedules import SCHEDULES, find_schedule
from npusim.simulation.arithmetic_uncertainty import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.node import NodeDevice
    from npusim.config.problem import LayerProblem
    from npusim.ir.program import TileProgram
    from npusim.node.collective import Transfer
    from npusim.node.kernel import Child
    from npusim.numerics.evaluate import Choice
    from npusim.numerics.executor import Execution, HeadSource, Progress

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the ranks of a layer read, by heads of the whole layer.

    ``heads(name, batch, head)`` gives Q, K and V, ``projection(head)`` the rows (value head size,
    hidden) of W_o that belong to a query head.  With fewer ``kv_heads`` than ranks some share one.
    """

    heads: HeadSource
    projection: Callable[[int], Array]
    kv_heads: int

    def of_rank(self, layer: LayerProblem, rank: int, row: int, piece: Problem) -> HeadSource:
        """Return the inputs of one rank for the piece of its attention that starts at ``row``."""
        first_batch, first = divmod(row, layer.seq_q)

        def source(name: str, batch: int, head: int) -> Array:
            if name == "q":
                own = self.heads(name, first_batch + batch, rank * layer.heads + head)
                return own[first : first + piece.seq_q]
            shared = self.kv_head(layer, rank, head)
            return self.heads(name, first_batch + batch, shared)[: piece.seq_kv]

        return source

    def kv_head(self, layer: LayerProblem, rank: int, head: int) -> int:
        """Return which of the layer's KV heads a rank's ``head``-th one is."""
        return rank * self.kv_heads // layer.ranks + head

    def share(self, layer: LayerProblem, rank: int) -> Array:
        """Return a rank's rows of W_o, (heads x value head size, hidden)."""
        first = rank * layer.heads
        return np.concatenate([self.projection(h) for h in range(first, first + layer.heads)])


@dataclass(frozen=True, slots=True)
class LayerBits:
    """Bits of a layer, the same sums in other orders, and the error that the additions alone make.

    ``numerics.output`` is (batch, 1, seq_q, hidden).  ``orders`` are what other collectives and
    tilings make of the same partial sums; ``sum_rmse`` is against the float64 sum of those.
    """

    numerics: NumericResult
    orders: tuple[Spread, ...]
    sum_rmse: float


def child_program(child: Child, device: DeviceSpec) -> TileProgram:
    """Return a child's tile program on its device, with the schedule's own tiling."""
    chosen = find_schedule(child.schedule, device.family)
    fields = build_tiling(chosen.tiling, {})
    return chosen.fitted(child.problem, fields, device, chosen.precision(child.precision))[1]


def without_program(program: TileProgram, device: DeviceSpec) -> list[str]:
    """Return the schedules of a node program that have no mapping on the cores of its device."""
    named = {c.schedule for op in operations(program) if isinstance(op, KernelOp) for c in op.kernel.children}
    return sorted(name for name in named if not has_schedule(name, device))


def has_schedule(name: str, device: DeviceSpec) -> bool:
    """Return whether a schedule has a mapping on a device's cores."""
    found = SCHEDULES.get((name, device.family))
    return found is not None and not found.unsupported(device)


def evaluate_layer(
    program: TileProgram,
    layer: LayerProblem,
    machine: NodeDevice,
    fmt: str,
    inputs: LayerInputs,
    *,
    rows: Choice = "sample",
    progress: Progress | None = None,
) -> LayerBits:
    """Return the bits of attention, projection and AllReduce of the chosen rows on all ranks.

    ``rows``: ``"all"``, query indices (their whole Q blocks), or ``"sample"`` (`sample_rows`).
    ``fmt`` is the format of the partial sums, in which they are added.

    Raises
    ------
    SpecError
        A row does not exist, or a device has no program for a kernel.
    """
    return _Layer(program, layer, machine, fmt, inputs, rows).run(progress)


@dataclass(slots=True)
class _Log:
    """Numeric events of all ranks, named by rank and operation of the node."""

    overflow: Counter[str] = field(default_factory=Counter)
    nan: Counter[str] = field(default_factory=Counter)
    events: list[NumericEvent] = field(default_factory=list)

    def add_kernel(self, rank: int, op: KernelOp, done: Execution) -> None:
        """Take over what happened in one child of a kernel."""
        self.overflow.update(done.events.overflow)
        self.nan.update(done.events.nan)
        for event in done.events.events[: EVENTS_KEPT - len(self.events)]:
            self.events.append(replace(event, block=f"rank {rank} {op.label}, {event.block}"))

    def add_sum(self, op: CollectiveOp, where: str, first: int, columns: int, bad: Mapping[str, Array]) -> None:
        """Take over where one addition of a collective left no number."""
        label = f"{op.label}.add"
        for kind, mask in bad.items():
            count = int(mask.sum())
            if not count:
                continue
            (self.overflow if kind == "overflow" else self.nan)[label] += count
            row, col = divmod(first + int(np.argmax(mask)), columns)
            if len(self.events) < EVENTS_KEPT:
                self.events.append(NumericEvent(kind, label, op.queue, "rows", where, {}, row, col, count))

    def first(self) -> tuple[NumericEvent, ...]:
        """Return the first event of each kind."""
        kinds = dict.fromkeys(e.kind for e in self.events)
        return tuple(next(e for e in self.events if e.kind == kind) for kind in kinds)


class _Layer:
    """All ranks of a layer, operation by operation of the program they share."""

    def __init__(
        self,
        program: TileProgram,
        layer: LayerProblem,
        machine: NodeDevice,
        fmt: str,
        inputs: LayerInputs,
        rows: Choice,
    ) -> None:
        self.layer, self.machine, self.fmt, self.inputs = layer, machine, fmt, inputs
        self.operations = list(operations(program))
        self.wanted = _wanted(rows, layer.seq_q)
        self.programs: dict[Child, TileProgram] = {}
        self.log = _Log()
        self.attended: list[Array] = []
        self.partial: list[Array] = []
        self.done: Array = np.zeros(0, np.bool_)
        self.found: dict[int, Array] = {}
        self.references: dict[int, Array] = {}
        calls = [op for op in self.operations if isinstance(op, CollectiveOp)]
        self.sums = Sums(machine.node, Topology(machine.node, layer.ranks), calls, fmt)

    def run(self, progress: Progress | None) -> LayerBits:
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
            self.programs[child] = child_program(child, self.machine.each)
        return self.programs[child]

    def _attention(self, op: KernelOp) -> None:
        """Compute each rank's heads of a row block; the rows that were not asked for stay 0."""
        layer = self.layer
        self.done = np.zeros(op.rows, np.bool_)
        self.attended = []
        for rank in range(layer.ranks):
            own: Array | None = None
            for start, child in _pieces(op.kernel):
                piece, program = cast("Problem", child.problem), self._program(child)
                own = np.zeros((op.rows, layer.width), _dtype(program, "o")) if own is None else own
                rows = self._rows_of(op.row + start, piece)
                if not rows:
                    continue
                source = self.inputs.of_rank(layer, rank, op.row + start, piece)
                done, written = execute_rows(program, source, rows, range(piece.heads), piece.group_size)
                self.log.add_kernel(rank, op, done)
                for (batch, head, row), block in written.items():
                    at = start + batch * piece.seq_q + row
                    columns = slice(head * layer.value_head_dim, (head + 1) * layer.value_head_dim)
                    own[at : at + len(block), columns] = block
                    self.done[at : at + len(block)] = True
            assert own is not None
            self.attended.append(own)

    def _rows_of(self, row: int, piece: Problem) -> Choice:
        """Return the chosen rows of the piece of attention that starts at ``row``, counted from there."""
        if self.wanted is None:
            return "all"
        first = row % self.layer.seq_q
        return [r - first for r in self.wanted if first <= r < first + piece.seq_q]

    def _linear(self, op: KernelOp) -> None:
        """Compute each rank's partial sums of a row block from its share of W_o."""
        (child,) = op.kernel.children
        program, rows = self._program(child), np.nonzero(self.done)[0].tolist()
        self.partial = []
        for rank in range(self.layer.ranks):
            own = np.zeros((op.rows, self.layer.hidden), _dtype(program, "c"))
            if rows:
                given = {"a": self.attended[rank], "b": self.inputs.share(self.layer, rank)}
                source = _matrices(given)
                done, written = execute_rows(program, source, rows, (0,), output="c")
                self.log.add_kernel(rank, op, done)
                for (_, _, row), block in written.items():
                    own[row : row + len(block)] = block
            self.partial.append(own)

    # ---------------------------------------------------------------- collectives

    def _reduce(self, op: CollectiveOp) -> None:
        """Add up the partial sums of the rows that were computed, and in every other order too."""
        at = 0
        for is_done, run in groupby(self.done.tolist()):
            start, at = at, at + len(list(run))
            if not is_done:
                continue
            row, terms = op.row + start, [p[start:at].reshape(-1) for p in self.partial]
            own = self.sums.add(op, row, terms, partial(self._look, op, row))
            self.found[row] = own.reshape(-1, self.layer.hidden)
            self.references[row] = self._reference(row, at - start)

    def _look(
        self, op: CollectiveOp, row: int, transfer: Transfer, first: int, addends: tuple[Array, Array], result: Array
    ) -> None:
        """Record overflow and NaN that an addition makes of numbers."""
        if np.isfinite(result).all():
            return
        finite, known = (np.logical_and(*(test(x) for x in addends)) for test in (np.isfinite, lambda x: ~np.isnan(x)))
        bad = {"overflow": np.isinf(result) & finite, "nan": np.isnan(result) & known}
        where = f"rank {transfer.target} adds what rank {transfer.source} sent"
        self.log.add_sum(op, where, first + row * self.layer.hidden, self.layer.hidden, bad)

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
                    seen = layer.visible_keys(first + rows - 1)
                    k, v = (self.inputs.heads(n, batch, kv)[:seen] for n in ("k", "v"))
                    columns = slice(head * layer.value_head_dim, (head + 1) * layer.value_head_dim)
                    heads[start : start + rows, columns] = attention(q, k, v, layer, first)
            total += heads @ self.inputs.share(self.layer, rank).astype(np.float64)
        return total

    def _result(self) -> LayerBits:
        layer, outputs = self.layer, list(self.found.values())
        error = summarise_errors(outputs, list(self.references.values()), self.fmt)
        choices = [named_choices(p) for p in self.programs.values()]
        written = {}
        for row, block in self.found.items():
            for start, batch, first, rows in _stretches(row, len(block), layer.seq_q, longest=layer.seq_q):
                written[batch, 0, first] = block[start : start + rows]
        numerics = NumericResult(
            rows=written,
            shape=(layer.batch, 1, layer.seq_q, layer.hidden),
            sample=self._sample(),
            error=error,
            overflow_counts=dict(self.log.overflow),
            nan_counts=dict(self.log.nan),
            first_events=self.log.first(),
            arithmetic={n: e for arithmetic, _ in choices for n, e in arithmetic.items()},
            row_sums=tuple(sorted({o for _, orders in choices for o in orders})),
            events=tuple(self.log.events),
        )
        orders = tuple(Spread(o.name, *o.distance()) for o in self.sums.orders) if error.is_finite else ()
        return LayerBits(numerics, orders, self.sums.rmse)

    def _sample(self) -> str:
        total, layer = self.layer.rows, self.layer
        count = sum(len(b) for b in self.found.values())
        where = f"{layer.hidden} columns of the layer on {layer.ranks} ranks"
        if count == total:
            return f"all {total} rows, {where}"
        spans = [f"{row}..{row + len(b) - 1}" for row, b in sorted(self.found.items())]
        return f"rows {', '.join(spans[:3])}{', …' if len(spans) > 3 else ''} of {total}, {where}"


def operations(program: TileProgram) -> Iterator[Any]:
    """Yield the operations that all ranks of a node program share, in program order."""
    for phase in program.phases:
        yield from phase.body(phase.blocks[0])


def sample_rows(count: int) -> list[int]:
    """Return the rows of a sequence whose blocks a sample has: the last 128, and one at five eighths.

    The last see all keys, but lie in the last shard of a message, which ring and mesh add alike: the
    others lie in the midst of a message, whether of the whole sequence or of half of it.
    """
    return sorted({5 * count // 8, *range(max(0, count - ROW_GRAIN), count)})


def _wanted(rows: Choice, count: int) -> list[int] | None:
    """Return the query rows to compute, or None for all."""
    which = chosen("rows", rows, count)
    return None if which == "all" else sample_rows(count) if which == "sample" else which


def _pieces(kernel: NodeKernel) -> Iterator[tuple[int, Child]]:
    """Yield the children of an attention kernel, each with its first row."""
    start = 0
    for child in kernel.children:
        if not isinstance(child.problem, Problem):
            raise SpecError(f"{child.schedule}: no attention")
        yield start, child
        start += child.problem.batch * child.problem.seq_q


def _stretches(row: int, count: int, length: int, longest: int = 512) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, batch, first, rows) of rows over batch and sequence that lie in one sequence.

    At most ``longest`` rows each, so that float64 scores of long sequences fit in memory.
    """
    at = row
    while at < row + count:
        batch, first = divmod(at, length)
        rows = min(longest, length - first, row + count - at)
        yield at - row, batch, first, rows
        at += rows


def _dtype(program: TileProgram, name: str) -> Any:
    return get_format(program.tensors[name].fmt).dtype


def _matrices(given: Mapping[str, Array]) -> HeadSource:
    return lambda name, _batch, _head: given[name]
