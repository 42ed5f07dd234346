"""Executes a tile program for its values, in program order, over poisoned memories, and counts numeric events.

Blocks of one shape run in step, one lane each: the same operations on arrays with a leading lane
axis.  Bits do not depend on how blocks are put together, since lanes never meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import ProgramError
from npusim.formats import get_format
from npusim.ir.program import Item, Loop, ProgramPhase, TileProgram
from npusim.ir.tile import GlobalTile, Operand, RingTile
from npusim.ir.walk import ResolvedOp, Walker, walk
from npusim.numerics.result import NumericEvent
from npusim.numerics.semantics import apply

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from npusim.ir.op import Source, Step, TileOp
    from npusim.ir.tile import GlobalTensor, Tile


Array = NDArray[Any]
#: Lanes that run together: enough to spread the cost of a step, few enough for the caches.
LANES = 16
#: Events kept beside their counts: more would fill a trace with one message.
EVENTS_KEPT = 10_000


@dataclass
class EventLog:
    """Counts overflow to Inf and NaN from numbers by operation; keeps events: the first of each kind, one an operation.

    ``phase``, ``lanes`` and ``position`` say what is executed: the blocks' names, one a lane, and how
    many of their operations were done.
    """

    phase: str = ""
    lanes: Sequence[str] = ()
    position: int = 0
    overflow: Counter[str] = field(default_factory=Counter)
    nan: Counter[str] = field(default_factory=Counter)
    first: dict[str, NumericEvent] = field(default_factory=dict)
    events: list[NumericEvent] = field(default_factory=list)

    def look(self, resolved: ResolvedOp, step: Step, result: Array, sources: Sequence[Array]) -> None:
        """Record where ``result`` is Inf or NaN although the step's sources were not.

        An Inf that was put there (a mask, the start of a maximum) and what follows from it is no
        event: only elements whose sources are all finite count as overflow, and only NaN from
        sources without NaN as a new NaN.
        """
        if formats.is_all_finite(result):
            return
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(result)
            matmul = step.opcode.name == "MATMUL"
            clean, known = _finite_and_number(sources, result.shape, matmul)
            nan = np.isnan(result) & known
            overflow = ~finite & ~np.isnan(result) & clean
        label = f"{resolved.op.label}.{step.opcode.value}"
        for kind, where, counter in (("overflow", overflow, self.overflow), ("nan", nan, self.nan)):
            count = int(np.count_nonzero(where))
            if not count:
                continue
            counter[label] += count
            self._locate(kind, label, resolved, where)

    def _locate(self, kind: str, label: str, resolved: ResolvedOp, where: NDArray[np.bool_]) -> None:
        """Keep one event for each lane with an element in ``where``."""
        for lane in (int(n) for n in np.nonzero(where.any(axis=(1, 2)))[0]):
            if kind in self.first and len(self.events) >= EVENTS_KEPT:
                return
            row, col = (int(x[0]) for x in np.nonzero(where[lane]))
            event = NumericEvent(
                kind,
                label,
                resolved.op.queue,
                self.phase,
                self.lanes[lane],
                dict(resolved.path),
                row,
                col,
                int(np.count_nonzero(where[lane])),
                self.position,
            )
            self._keep(event)

    def _keep(self, event: NumericEvent) -> None:
        self.first.setdefault(event.kind, event)
        if len(self.events) < EVENTS_KEPT:
            self.events.append(event)

    def add(self, event: NumericEvent) -> None:
        """Count the elements of an event, and keep it."""
        (self.overflow if event.kind == "overflow" else self.nan)[event.operation] += event.count
        self._keep(event)

    def take(self, other: EventLog, where: str) -> None:
        """Take over what another log has; ``where`` leads the names of its blocks."""
        self.overflow.update(other.overflow)
        self.nan.update(other.nan)
        for event in other.events:
            self._keep(replace(event, block=f"{where}, {event.block}"))


def _finite_and_number(sources: Sequence[Array], shape: tuple[int, ...], is_matmul: bool) -> tuple[Any, Any]:
    """Return where all sources of an element are finite, and where none is NaN."""
    clean = known = np.ones(shape, bool)
    for source in sources:
        if source.dtype == np.int8:
            continue
        ok: Any = np.isfinite(source)
        number: Any = ~np.isnan(source)
        if is_matmul or source.shape[-1] != shape[-1] != 1 != source.shape[-1]:
            # Each element depends on whole rows and columns: judge the lane as one.
            ok = ok.all(axis=(-2, -1), keepdims=True)
            number = number.all(axis=(-2, -1), keepdims=True)
        elif shape[-1] == 1 != source.shape[-1]:
            ok, number = ok.all(axis=-1, keepdims=True), number.all(axis=-1, keepdims=True)
        clean, known = clean & ok, known & number
    return clean, known


@dataclass(slots=True)
class Moment:
    """One executed step, as observers see it: its place, what it read and what it wrote.

    ``index`` is the step's position in its operation; arrays are (lanes, rows, cols), lane i
    belonging to ``blocks[i]``; sources are views that later steps overwrite.  ``role`` is what the
    destination means to the algorithm (`npusim.algorithms.phase.Role`).
    """

    phase: str
    blocks: Sequence[Any]
    resolved: ResolvedOp
    index: int
    step: Step
    sources: Sequence[Array]
    result: Array
    role: str = ""


Observer = Callable[[Moment], None]
#: Receives how much of the work is done, from 0 to 1.
Progress = Callable[[float], None]


@dataclass
class Execution:
    """The state after execution: tensors in global memory and numeric events."""

    tensors: TensorStore
    events: EventLog = field(default_factory=EventLog)
    observers: Sequence[Observer] = ()


def execute(
    program: TileProgram,
    inputs: HeadSource,
    blocks: dict[str, Sequence[Any]] | None = None,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
) -> Execution:
    """Execute ``blocks`` of each phase (all where not named) and return tensors and events.

    ``inputs(name, batch, head)`` gives one head's matrix of an input tensor in its own dtype;
    ``observers`` are called after every step, ``progress`` with the share of blocks that are done.
    """
    state = Execution(TensorStore(program, inputs), observers=observers)
    chosen = [phase.blocks if blocks is None else blocks.get(phase.name, phase.blocks) for phase in program.phases]
    done, total = 0, sum(len(part) for part in chosen)
    for phase, part in zip(program.phases, chosen, strict=True):
        apart = [phase.succession.alone(block) for block in part] if phase.succession else part
        for lanes in _lanes(phase, apart):
            Lockstep(program, phase, lanes, state).run()
            done += len(lanes)
            if progress is not None:
                progress(done / total)
    return state


def _lanes(phase: ProgramPhase, blocks: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield groups of blocks of one shape, at most ``LANES`` together."""
    groups: dict[Hashable, list[Any]] = {}
    for block in blocks:
        groups.setdefault(phase.shape(block), []).append(block)
    for group in groups.values():
        for start in range(0, len(group), LANES):
            yield group[start : start + LANES]


class Lockstep:
    """Some blocks of one shape, executed operation by operation."""

    def __init__(self, program: TileProgram, phase: ProgramPhase, blocks: list[Any], state: Execution) -> None:
        self.program, self.phase, self.blocks = program, phase, blocks
        self.tensors, self.events, self.observers = state.tensors, state.events, state.observers
        self.store = BufferStore(program, len(blocks))
        self.events.phase = phase.name
        self.events.lanes = [str(b) for b in blocks]
        self._constants: dict[tuple[float, str], Array] = {}

    def run(self) -> None:
        """Execute everything, in program order."""
        walker = Walker(self.program)
        first, *others = (self.phase.body(b) for b in self.blocks)
        rest = [_flatten(items) for items in others]
        for position, resolved in enumerate(walk(walker, first)):
            self.events.position = position
            self.execute(resolved, [next(ops) for ops in rest])

    def execute(self, resolved: ResolvedOp, twins: Sequence[TileOp]) -> None:
        """Execute one operation of the first lane; ``twins`` are the same operation of the others."""
        for index, step in enumerate(resolved.op.steps):
            same = [twin.steps[index] for twin in twins]
            self._step(resolved, index, step, same)

    def _step(self, resolved: ResolvedOp, index: int, step: Step, same: list[Step]) -> None:
        fmt = step.dst.fmt
        sources = [self._read(resolved, source, [t.srcs[i] for t in same], fmt) for i, source in enumerate(step.srcs)]
        is_global = isinstance(step.dst, GlobalTile)
        before = sources[0] if is_global else self.store.view(self._tile(resolved, step.dst))
        result = apply(step.opcode, sources, before, fmt, step.attributes)
        if fmt != "int8":
            read = [*sources, before] if step.attributes.accumulate else sources
            self.events.look(resolved, step, np.broadcast_to(result, before.shape), read)
        for observer in self.observers:
            role = self.phase.roles.get(step.name, "")
            observer(Moment(self.phase.name, self.blocks, resolved, index, step, sources, result, role))
        if is_global:
            for lane, one in enumerate([step, *same]):
                assert isinstance(one.dst, GlobalTile)
                self.tensors.cut(one.dst)[...] = result[lane]
        else:
            before[...] = result

    def _read(self, resolved: ResolvedOp, source: Source, twins: list[Source], fmt: str) -> Array:
        if isinstance(source, float | int):
            return self._constant(float(source), fmt)
        if isinstance(source, GlobalTile):
            return self.tensors.read([source, *(t for t in twins if isinstance(t, GlobalTile))])
        return self.store.view(self._tile(resolved, source))

    def _constant(self, value: float, fmt: str) -> Array:
        key = (value, fmt)
        if key not in self._constants:
            self._constants[key] = formats.cast(np.full((1, 1, 1), value, np.float64), fmt)
        return self._constants[key]

    @staticmethod
    def _tile(resolved: ResolvedOp, operand: Operand) -> Any:
        return resolved.tile(operand) if isinstance(operand, RingTile) else operand


def _flatten(items: Iterable[Item]) -> Iterator[TileOp]:
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                yield from _flatten(item.body(index))
        else:
            yield item


#: Gives one head's matrix (rows, cols) of an input tensor by (name, batch, head).
HeadSource = Callable[[str, int, int], Array]
#: A NaN in float16, float32, bfloat16 and E4M3: what is read before it is written shows.
POISON = 0xFF


class BufferStore:
    """One core group's memories for ``lanes`` blocks that run in step, as bytes."""

    def __init__(self, program: TileProgram, lanes: int) -> None:
        self.lanes = lanes
        self._bytes = {space: np.full((lanes, used), POISON, np.uint8) for space, used in program.used_bytes.items()}

    def view(self, tile: Tile) -> Array:
        """Return the elements of a tile, (lanes, rows, cols), as a view of memory."""
        memory = self._bytes[tile.space]
        fmt = get_format(tile.fmt)
        size = fmt.size_bytes
        return np.ndarray(
            (self.lanes, tile.rows, tile.cols),
            fmt.dtype,
            memory,
            tile.offset_bytes,
            (memory.strides[0], tile.stride * size, size),
        )


class TensorStore:
    """Global tensors, one matrix a head; inputs are asked for when first read."""

    def __init__(self, program: TileProgram, inputs: HeadSource) -> None:
        self._inputs, self._constants = inputs, program.constants
        self._heads: dict[tuple[str, int, int], Array] = {}

    def head(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        """Return one head's matrix; outputs and workspaces start as NaN."""
        key = (tensor.name, batch, head)
        matrix = self._heads.get(key)
        if matrix is None:
            matrix = self._heads[key] = self._make(tensor, batch, head)
        return matrix

    def _make(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        if tensor.name in self._constants:
            values: Array = self._constants[tensor.name]()[batch, head]
        elif tensor.role == "input":
            heads = range(head * tensor.packed, (head + 1) * tensor.packed)
            matrices = [self._inputs(tensor.name, batch, h) for h in heads]
            values = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        else:
            fmt = get_format(tensor.fmt)
            raw = np.full(tensor.rows * tensor.cols * fmt.size_bytes, POISON, np.uint8)
            return raw.view(fmt.dtype).reshape(tensor.rows, tensor.cols)
        if values.shape != (shape := (tensor.rows_of(batch), tensor.cols)):
            raise ProgramError(f"tensor {tensor.name}: {values.shape} given, {shape} needed")
        return values

    def read(self, tiles: list[GlobalTile]) -> Array:
        """Return the cuts of all lanes, (lanes, rows, cols)."""
        return np.stack([self.cut(t) for t in tiles])

    def cut(self, tile: GlobalTile) -> Array:
        """Return one cut as a view of its head's matrix."""
        matrix = self.head(tile.tensor, tile.batch, tile.head)
        return matrix[tile.row : tile.row + tile.rows, tile.col : tile.col + tile.cols]

    def written(self, tensor: GlobalTensor) -> dict[tuple[int, int], Array]:
        """Return the matrices of a tensor that exist so far, by (batch, head)."""
        return {(b, h): m for (name, b, h), m in self._heads.items() if name == tensor.name}
