"""Executes a tile program for its values, in program order, on memories filled with NaN, and counts numeric events.

Blocks of one shape run in step, one lane each: the same operations on arrays with a leading lane
axis.  Bits do not depend on the grouping of blocks, since lanes never interact.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import lru_cache, partial, reduce
from itertools import accumulate, groupby, pairwise, zip_longest
from operator import add
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.errors import TensorError
from npusim.formats import stored_format
from npusim.formats.cast import widen
from npusim.late_methods import dataclass
from npusim.program.ir.op import COMPARED, Attributes, Opcode, Source, Step, TileOp
from npusim.program.ir.opaque import Lanes, at_lane, twin
from npusim.program.ir.tile import GlobalTensor, GlobalTile, RingTile, Tile
from npusim.program.ir.tile_program import Item, Loop, ProgramPhase, TileProgram
from npusim.program.ir.walk import ResolvedOp, Walker, walk
from npusim.program.numerics.bits_result import NumericEvent
from npusim.program.numerics.semantics import apply, product

Array = NDArray[Any]
#: Number of lanes that run together: enough to distribute the overhead of a step, few enough for the caches.  Blocks
#: with few rows run in more lanes, up to `LANE_ROWS` rows and `MOST_LANES` lanes.
LANES, MOST_LANES, LANE_ROWS = 16, 128, 1024
#: Number of events that are stored in addition to their counts; with more, a trace would contain little else.
EVENTS_KEPT = 10_000


@dataclass
class EventLog:
    """Counts overflows to Inf and NaN from numbers by operation; stores the first event of each kind, and one event per
    operation.

    If a mask of values selects between two values, the observer counts by name: elements, elements with the first
    value, operations on a block's tile, and operations with such an element.

    ``phase``, ``lanes`` and ``position`` describe the current execution: the blocks' names, one per lane, and the
    number of completed operations.
    """

    phase: str = ""
    lanes: Sequence[str] = ()
    position: int = 0
    overflow: Counter[str] = field(default_factory=Counter)
    nan: Counter[str] = field(default_factory=Counter)
    first: dict[str, NumericEvent] = field(default_factory=dict)
    events: list[NumericEvent] = field(default_factory=list)
    chosen: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def count_chosen(self, name: str, by: Array) -> None:
        """Count the elements of a choice, (blocks, rows, columns), that have the first of two values."""
        first = np.not_equal(widen(by), 0).reshape(len(by), -1)
        counts = first.size, np.count_nonzero(first), len(first), np.count_nonzero(first.any(axis=1))
        self.chosen[name] = self.chosen.get(name, np.zeros(4, np.int64)) + np.array(counts)

    def look(
        self, resolved: ResolvedOp, step: Step, result: Array, sources: Sequence[Array], shape: tuple[int, ...]
    ) -> None:
        """Record where ``result``, broadcast to ``shape``, is Inf or NaN although the step's sources were not.

        A written Inf (a mask, the start of a maximum) and its consequences are not events: an Inf counts as an overflow
        only if all of its sources are finite, and a NaN is new only if none of its sources is NaN.
        """
        if formats.is_all_finite(result):
            return
        result = np.broadcast_to(widen(result) if result.dtype.names else result, shape)
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
            cause = partial(_cause, step, sources if kind == "nan" else ())
            self._locate(kind, label, resolved, where, cause)

    def _locate(self, kind: str, label: str, resolved: ResolvedOp, where: NDArray[np.bool_], cause: Any) -> None:
        """Store one event for each lane with an element in ``where``, and its cause."""
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
                cause((lane, row, col)),
            )
            self._keep(event)

    def _keep(self, event: NumericEvent) -> None:
        self.first.setdefault(event.kind, event)
        if len(self.events) < EVENTS_KEPT:
            self.events.append(event)

    def add(self, event: NumericEvent) -> None:
        """Count the elements of an event, and store it."""
        (self.overflow if event.kind == "overflow" else self.nan)[event.operation] += event.count
        self._keep(event)

    def take(self, other: EventLog, where: str) -> None:
        """Add the counts and events of another log; ``where`` is a prefix of the names of its blocks."""
        self.overflow.update(other.overflow)
        self.nan.update(other.nan)
        for event in other.events:
            self._keep(replace(event, block=f"{where}, {event.block}"))


#: Form in which the cause of a NaN shows an operation of two numbers; other operations have no entry.
SIGNS = MappingProxyType({Opcode.ADD: " + ", Opcode.SUB: " - ", Opcode.MUL: " * ", Opcode.DIV: " / "})


def _cause(step: Step, sources: Sequence[Array], at: tuple[int, int, int]) -> str:
    """Return the operation on the two numbers of an element, (lane, row, column); axes of size one are broadcast."""
    numbers = [x[tuple(min(i, n - 1) for i, n in zip(at, x.shape, strict=True))] for x in sources]
    return SIGNS.get(step.opcode, "").join(f"{float(x):g}" for x in numbers if step.opcode in SIGNS)


def _finite_and_number(sources: Sequence[Array], shape: tuple[int, ...], is_matmul: bool) -> tuple[Any, Any]:
    """Return where all sources of an element are finite, and where no source is NaN."""
    clean = known = np.ones(shape, bool)
    for source in sources:
        if source.dtype == np.int8:
            continue
        values: Any = widen(source) if source.dtype.names else source
        ok: Any = np.isfinite(values)
        number: Any = ~np.isnan(values)
        if is_matmul or source.shape[-1] != shape[-1] != 1 != source.shape[-1]:
            # Each element depends on complete rows and columns, so that the lane is treated as one element.
            ok = ok.all(axis=(-2, -1), keepdims=True)
            number = number.all(axis=(-2, -1), keepdims=True)
        elif shape[-1] == 1 != source.shape[-1]:
            ok, number = ok.all(axis=-1, keepdims=True), number.all(axis=-1, keepdims=True)
        clean, known = clean & ok, known & number
    return clean, known


@dataclass(slots=True)
class Moment:
    """One executed step, as observers see it: its place, its sources and its result.

    ``index`` is the step's position in its operation; arrays are (lanes, rows, cols), lane i
    belonging to ``blocks[i]``; sources are views that later steps overwrite.  ``role`` is the role of the
    destination in the algorithm (`npusim.kernels.form.phase.Role`).
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
#: Receives the completed share of the work, from 0 to 1.
Progress = Callable[[float], None]


@dataclass
class Execution:
    """The state after execution: tensors in global memory and numeric events; for each variant only its tensors.

    ``is_counted``: whether events are counted.
    """

    tensors: TensorStore
    events: EventLog = field(default_factory=EventLog)
    observers: Sequence[Observer] = ()
    variants: Sequence[TensorStore] = ()
    #: Memories of the lanes of the last execution, by name; the next lanes overwrite them.
    memories: dict[str, Array] = field(default_factory=dict)
    is_counted: bool = True


class Alternative(NamedTuple):
    """A program that differs from another only in attributes of steps (`changed_attributes`), and its blocks by phase.

    Its lanes run with those of the other program; their events are not counted, and observers do not receive them.
    """

    program: TileProgram
    blocks: Mapping[str, Sequence[Any]]
    changes: Mapping[Attributes, Attributes]


class Lane(NamedTuple):
    """One block that runs in step with others: the places of its tensors, and its own attributes.

    Lanes of one program are contiguous.
    """

    block: object
    tensors: TensorStore
    changes: Mapping[Attributes, Attributes] = MappingProxyType({})


def execute(
    program: TileProgram,
    inputs: HeadSource,
    blocks: Mapping[str, Sequence[Any]] | None = None,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    variants: Sequence[Alternative] = (),
    is_counted: bool = True,
    memories: dict[str, Array] | None = None,
) -> Execution:
    """Execute ``blocks`` of each phase (all blocks of phases that are not named) and return tensors and events.

    ``inputs(name, batch, head)`` gives one head's matrix of an input tensor in its own dtype; ``observers`` are called
    after every step, ``progress`` with the share of blocks that are done; without ``is_counted`` events are not
    counted.  ``memories``: memories of earlier executions, which this one overwrites.
    """
    stores = [TensorStore(variant.program, inputs) for variant in variants]
    tensors = TensorStore(program, inputs)
    state = Execution(tensors, observers=observers, variants=stores, is_counted=is_counted)
    state.memories = state.memories if memories is None else memories
    chosen = [phase.blocks if blocks is None else blocks.get(phase.name, phase.blocks) for phase in program.phases]
    done, total = 0, sum(len(part) for part in chosen)
    for phase, part in zip(program.phases, chosen, strict=True):
        lanes = [Lane(block, state.tensors) for block in _apart(phase, part)]
        for variant, store in zip(variants, stores, strict=True):
            lanes += [Lane(block, store, variant.changes) for block in _apart(phase, variant.blocks[phase.name])]
        for group in _groups(phase, lanes):
            Lockstep(program, phase, group, state).run()
            done += sum(lane.tensors is state.tensors for lane in group)
            if progress is not None:
                progress(done / total)
    state.tensors.leave_out(program)
    return state


def _apart(phase: ProgramPhase, blocks: Sequence[Any]) -> Sequence[Any]:
    return [phase.succession.alone(block) for block in blocks] if phase.succession else blocks


def _groups(phase: ProgramPhase, lanes: Iterable[Lane]) -> Iterator[list[Lane]]:
    """Yield lanes of one shape, in groups of an efficient size."""
    groups: dict[Hashable, list[Lane]] = {}
    for lane in lanes:
        groups.setdefault(phase.shape(lane.block), []).append(lane)
    for group in groups.values():
        most = _most_lanes(group[0].block)
        for start in range(0, len(group), most):
            yield group[start : start + most]


def _most_lanes(block: object) -> int:
    """Return how many lanes like this block run together; a block without rows counts as a large one."""
    rows: int = getattr(block, "rows", LANE_ROWS)
    return min(MOST_LANES, max(LANES, LANE_ROWS // max(1, rows)))


def changed_attributes(
    program: TileProgram, others: Mapping[str, TileProgram], blocks: Mapping[str, Sequence[Any]]
) -> dict[str, dict[Attributes, Attributes]]:
    """Return, by name, which attributes of steps differ in other programs' ``blocks`` by phase.

    A program is absent if it differs in more than attributes, or if attributes that are equal in the program differ in
    it.
    """
    changes_of: dict[str, dict[Attributes, Attributes]] = {
        name: {}
        for name, other in others.items()
        if program.used_bytes == other.used_bytes and len(program.phases) == len(other.phases)
    }
    for number, phase in enumerate(program.phases):
        for block in {phase.shape(b): b for b in _apart(phase, blocks[phase.name])}.values() if changes_of else ():
            mine = [(step, isinstance(step, Step) and _does(step)) for step in steps_of(phase.body(block))]
            for name in [*changes_of]:
                if not _differ_in_attributes(mine, steps_of(others[name].phases[number].body(block)), changes_of[name]):
                    del changes_of[name]
    return {
        name: {before: after for before, after in changes.items() if before != after}
        for name, changes in changes_of.items()
    }


def _differ_in_attributes(
    mine: Iterable[tuple[Step | int, Any]], its: Iterable[Step | int], changes: dict[Attributes, Attributes]
) -> bool:
    """Return whether steps differ at most in attributes, and each attributes in one way; add them to ``changes``.

    ``mine``: the steps of the first program, each with its opcode and operands.
    """
    for (own, does), other in zip_longest(mine, its, fillvalue=(None, None)):
        if not isinstance(own, Step) or not isinstance(other, Step):
            if own != other:
                return False
        elif does != _does(other) or changes.setdefault(own.attributes, other.attributes) != other.attributes:
            return False
    return True


def steps_of(items: Iterable[Item]) -> Iterator[Step | int]:
    """Yield each step; for loops, yield the number of iterations, then the steps of the last one."""
    for item in items:
        if isinstance(item, Loop):
            yield len(item.indices)
            yield from steps_of(item.body(item.indices[-1]))
        else:
            yield from item.steps


def _does(step: Step) -> Any:
    return step.opcode, *map(_form, (step.dst, *step.srcs))


def _form(operand: Source) -> Any:
    """Return an operand by its content: each program has tensor and ring objects of its own."""
    if isinstance(operand, GlobalTile):
        return operand.tensor.name, operand.fmt, operand.rows, operand.cols
    if isinstance(operand, RingTile):
        ring = operand.ring
        return ring.name, operand.is_producer, operand.is_peek, ring.depth, ring.slot_bytes, operand.slot(0)
    return operand


class Lockstep:
    """Some blocks of one shape, executed operation by operation; blocks of variants are last."""

    def __init__(self, program: TileProgram, phase: ProgramPhase, lanes: Sequence[Lane], state: Execution) -> None:
        self.program, self.phase, self.lanes = program, phase, lanes
        self.events, self.observers, self.is_counted = state.events, state.observers, state.is_counted
        #: Blocks of the program itself.
        self.blocks = [lane.block for lane in lanes if lane.tensors is state.tensors]
        self.store = BufferStore(program, len(lanes), state.memories)
        self.events.phase = phase.name
        self.events.lanes = [str(b) for b in self.blocks] if self.is_counted else ()
        self._constants: dict[tuple[float, str], Array] = {}
        self._is_one_program = not any(lane.changes for lane in lanes)
        self._runs: dict[Attributes, list[tuple[int, int, Attributes]]] = {}
        #: Events and observers see the tile of each lane.
        self._may_share = self._is_one_program and not self.is_counted and not self.observers
        #: Loads of tiles that the lanes do not share, by operation and step.
        self._unshared: set[tuple[str, int]] = set()
        #: The index of each block; variants may run equal blocks.
        self._distinct = {block: n for n, block in enumerate(dict.fromkeys(lane.block for lane in lanes))}
        #: For each lane its tensors and the index of its block, because it takes long to hash a block.
        self._numbered = [(lane.tensors, self._distinct[lane.block]) for lane in lanes]

    def run(self) -> None:
        """Execute everything, in program order."""
        for position, (resolved, twins) in enumerate(self._operations()):
            self.events.position = position
            self.execute(resolved, twins)

    def execute(self, resolved: ResolvedOp, twins: Sequence[TileOp] = ()) -> None:
        """Execute one operation for all blocks: ``resolved`` with `Lanes` as coordinates, or ``resolved`` for the first
        block and its ``twins`` for the others.
        """
        for index, step in enumerate(resolved.op.steps):
            self._step(resolved, index, [step, *[op.steps[index] for op in twins]])

    def _operations(self) -> Iterator[tuple[ResolvedOp, Sequence[TileOp]]]:
        """Yield operations in the order of `execute`: with `Lanes` if bodies do not compare the positions of blocks.

        If a body compares coordinates although its operations are equal, each block has separate operations.
        """
        blocks, done = list(self._distinct), 0
        try:
            common = twin(blocks, "block", lambda _name, values: Lanes(values))
            for resolved in walk(Walker(self.program), self.phase.body(common)):
                yield resolved, ()
                done += 1
        except TypeError:
            first, *others = map(self.phase.body, blocks)
            rest = [_flatten(items) for items in others]
            for position, resolved in enumerate(walk(Walker(self.program), first)):
                twins = [next(ops) for ops in rest]
                if position >= done:
                    yield resolved, twins

    def _step(self, resolved: ResolvedOp, index: int, steps: Sequence[Step]) -> None:
        step = steps[0]
        if self._may_share and len(steps) == 1 and self._is_shared(resolved, index, step):
            return
        fmt = step.dst.fmt
        known = step.constant_format
        sources = [self._read(resolved, [s.srcs[i] for s in steps], known) for i in range(len(step.srcs))]
        is_global = isinstance(step.dst, GlobalTile)
        before = sources[0] if is_global else self._view(resolved, step.dst)
        result = self._apply(step, sources, before)
        if (self.is_counted or self.observers) and (count := len(self.blocks)):
            is_all = count == len(self.lanes)
            read, outcome = (sources, result) if is_all else ([x[:count] for x in sources], result[:count])
            if self.is_counted and fmt != "int8" and step.opcode is not Opcode.COPY:  # a copy creates no Inf or NaN
                had = [*read, before[:count]] if step.attributes.accumulate else read
                self.events.look(resolved, step, outcome, had, before[:count].shape)
            if self.is_counted and step.opcode is Opcode.SELECT and step.attributes.variant == COMPARED:
                self.events.count_chosen(step.name, read[0])
            for observer in self.observers:
                role = self.phase.roles.get(step.name, "")
                observer(Moment(self.phase.name, self.blocks, resolved, index, step, read, outcome, role))
        if is_global:
            for cut, values in zip(self._cuts([s.dst for s in steps]), result, strict=True):
                cut[...] = values.reshape(cut.shape)  # a column, written to the single row of a tensor
        else:
            before[...] = result

    def _is_shared(self, resolved: ResolvedOp, index: int, step: Step) -> bool:
        """Execute a step whose tile several lanes share, and return whether it is such a step.

        Such a step is a load, of which no copies are made in memory until another step requests them; or a product with
        such a tile as its right operand, which is prepared once for all of these lanes.
        """
        if isinstance(step.dst, GlobalTile):
            return False
        if step.opcode is Opcode.MATMUL and isinstance(step.srcs[1], Tile | RingTile):
            shared = self.store.shared(self._key(resolved, step.srcs[1]))
            if shared is None:
                return False
            left, before = self._read(resolved, step.srcs[:1], ""), self._view(resolved, step.dst)
            before[...] = product(left, shared.tiles, before, step.attributes, shared.of)
            return True
        if step.opcode is not Opcode.COPY or not isinstance(source := step.srcs[0], GlobalTile):
            return False
        form = source.fmt, source.rows, source.cols
        if (resolved.op.label, index) in self._unshared:
            return False
        if form != (step.dst.fmt, step.dst.rows, step.dst.cols) or stored_format(source.fmt).scale_block:
            return False
        corners = self._corners(source)
        numbers, firsts = dict[Hashable, int](), list[Array]()
        of = []
        for tensors, number in self._numbered:
            place = id(tensors), *corners[number]
            of.append(numbers.setdefault(place, len(numbers)))
            if 2 * len(numbers) > len(self.lanes):
                self._unshared.add((resolved.op.label, index))
                return False
            if len(firsts) < len(numbers):
                firsts.append(tensors.cut(source, number))
                if firsts[-1].shape != form[1:]:
                    return False
        self.store.share(self._key(resolved, step.dst), SharedTile(np.stack(firsts), np.array(of)))
        return True

    def _apply(self, step: Step, sources: Sequence[Array], before: Array) -> Array:
        """Return the results of lanes: consecutive lanes with equal attributes are computed together."""
        if self._is_one_program:
            return apply(step.opcode, sources, before, step.dst.fmt, step.attributes)
        if step.attributes not in self._runs:
            each = [lane.changes.get(step.attributes, step.attributes) for lane in self.lanes]
            ends = accumulate(len(list(run)) for _, run in groupby(each))
            self._runs[step.attributes] = [(start, end, each[start]) for start, end in pairwise((0, *ends))]
        results = []
        for start, end, attributes in self._runs[step.attributes]:
            some = [x if len(x) == 1 else x[start:end] for x in sources]
            results.append(apply(step.opcode, some, before[start:end], step.dst.fmt, attributes))
        return results[0] if len(results) == 1 else np.concatenate(results)

    def _read(self, resolved: ResolvedOp, sources: Sequence[Source], fmt: str) -> Array:
        """Return the operands of the lanes' steps in one place."""
        source: Any = sources[0]
        if isinstance(source, Lanes):
            each = [source.values[number] for _, number in self._numbered]
            return formats.cast(np.array(each, np.float64)[:, None, None], fmt)
        if isinstance(source, float | int):
            return self._constant(float(source), fmt)
        if isinstance(source, GlobalTile):
            cuts = list(self._cuts(sources))
            read = np.empty((len(cuts), *cuts[0].shape), cuts[0].dtype)
            for lane, cut in enumerate(cuts):  # faster than np.stack for small arrays
                read[lane] = cut
            return read
        return self._view(resolved, source)

    def _cuts(self, tiles: Sequence[Any]) -> Iterator[Array]:
        """Yield the part of a tensor that each lane reads or writes; ``tiles`` has one tile for all lanes, or one per
        block.
        """
        if len(tiles) > 1:
            for tensors, number in self._numbered:
                yield tensors.cut(tiles[number], number)
            return
        (tile,) = tiles
        tensor, rows, cols = tile.tensor, tile.rows, tile.cols
        places = self._corners(tile)
        for tensors, number in self._numbered:
            batch, head, row, col = places[number]
            yield tensors.started(tensor, (batch, head), row, row + rows)[row : row + rows, col : col + cols]

    def _corners(self, tile: GlobalTile) -> list[tuple[int, int, int, int]]:
        """Return batch, head, row and column of a tile in each block."""
        count, corner = len(self._distinct), cast("tuple[Any, ...]", tile.corner)
        return list(zip(*[at.values if type(at) is Lanes else [at] * count for at in corner], strict=True))

    def _constant(self, value: float, fmt: str) -> Array:
        key = (value, fmt)
        if key not in self._constants:
            self._constants[key] = formats.cast(np.full((1, 1, 1), value, np.float64), fmt)
        return self._constants[key]

    def _view(self, resolved: ResolvedOp, operand: Any) -> Array:
        return self.store.view(self._key(resolved, operand))

    @staticmethod
    def _key(resolved: ResolvedOp, operand: Tile | RingTile) -> ViewKey:
        form = operand.rows, operand.cols, operand.stride, operand.fmt
        if not isinstance(operand, RingTile):
            return operand.space, operand.offset_bytes, *form
        start = operand.ring.start(resolved.cursors[operand.ring.name, operand.is_producer])
        return operand.ring.space, start + operand.offset_bytes, *form


def _flatten(items: Iterable[Item]) -> Iterator[TileOp]:
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                yield from _flatten(item.body(index))
        else:
            yield item


#: Returns one head's matrix (rows, cols) of an input tensor by (name, batch, head).
HeadSource = Callable[[str, int, int], Array]
#: A NaN in float16, float32, bfloat16 and E4M3, so that a read before the first write is visible.
POISON = 0xFF


#: Number of rows up to which all rows of a result are set to NaN at the start.
EAGER_ROWS = 64
#: A tile in memory: space, first byte, rows, columns, columns from row to row, format.
ViewKey = tuple[str, int, int, int, int, str]


class SharedTile(NamedTuple):
    """A tile that lanes loaded from few places: the tiles of these places, and the number of each lane's tile."""

    tiles: Array
    of: NDArray[np.int64]


@lru_cache(maxsize=1024)
def _span(key: ViewKey) -> tuple[int, int]:
    """Return the first byte of a tile, and the one after its last."""
    _, offset, rows, cols, stride, name = key
    fmt = stored_format(name)
    return offset, offset + fmt.row_bytes(stride) * (rows - 1) + fmt.row_bytes(cols)


def _pages(size: int) -> NDArray[np.uint8]:
    """Return an array of this number of bytes, whose pages cost time and memory only when they are used.

    Lanes of few rows use a few pages of each memory; with pages of 2 MiB, which numpy requests, all of the memory would
    be used.
    """
    pages = mmap.mmap(-1, max(1, size))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # this operating system has no such pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


class BufferStore:
    """One core group's memories for ``lanes`` blocks that run in step, as bytes.

    ``kept``: memories of finished lanes, as bytes by name, for reuse: a used memory is faster than a new one.
    """

    def __init__(self, program: TileProgram, lanes: int, kept: dict[str, Array]) -> None:
        self.lanes, self._used, self._kept = lanes, program.used_bytes, kept
        self._bytes: dict[str, Array] = {}
        #: By memory, which bytes of a lane have a view: they were poisoned before their first use.
        self._viewed: dict[str, Array] = {}
        #: Tiles that lanes share: no memory has them yet.
        self._shared: dict[ViewKey, SharedTile] = {}
        #: Values in block formats, by memory: an element and its scale, at twice the address if a byte holds two
        #: elements.
        self._pairs: dict[str, Array] = {}
        self._views: dict[ViewKey, Array] = {}

    def view(self, key: ViewKey) -> Array:
        """Return the elements of a tile, (lanes, rows, cols), as a view of memory."""
        if self._shared:
            loaded = self._shared.pop(key, None)
            self._spread(key)
            if loaded is not None:
                self.view(key)[...] = loaded.tiles[loaded.of]
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view(*key)
        return view

    def _view(self, space: str, offset: int, rows: int, cols: int, stride: int, name: str) -> Array:
        memory = self._bytes[space] if space in self._bytes else self._fresh(space)
        fmt = stored_format(name)
        pitch, size = fmt.row_bytes(stride), fmt.size_bytes
        if fmt.scale_block:
            if space not in self._pairs:
                self._pairs[space] = np.full((self.lanes, 4 * memory.shape[1]), POISON, np.uint8)
            memory, size = self._pairs[space], fmt.dtype.itemsize
            offset, pitch = offset * size * fmt.per_byte, pitch * size * fmt.per_byte
        else:
            self._poison(space, offset, (rows, cols * size), pitch)
        return np.ndarray((self.lanes, rows, cols), fmt.dtype, memory, offset, (memory.strides[0], pitch, size))

    def _poison(self, space: str, offset: int, shape: tuple[int, int], pitch: int) -> None:
        """Poison the bytes of a view that no earlier view has: many programs use only a small part of a memory."""
        memory = self._bytes[space]
        known = np.ndarray(shape, np.bool_, self._viewed[space], offset, (pitch, 1))
        fresh = np.ndarray((self.lanes, *shape), np.uint8, memory, offset, (memory.strides[0], pitch, 1))
        if not known.any():
            fresh[...] = POISON
        elif not known.all():
            fresh[:, ~known] = POISON
        known[...] = True

    def _fresh(self, space: str) -> Array:
        memory, size = self._kept.get(space), self.lanes * self._used[space]
        if memory is None or len(memory) < size:
            memory = self._kept[space] = _pages(size)
        memory = self._bytes[space] = memory[:size].reshape(self.lanes, self._used[space])
        self._viewed[space] = np.zeros(memory.shape[1], np.bool_)
        return memory

    def share(self, key: ViewKey, loaded: SharedTile) -> None:
        """Store a tile that lanes share, instead of a copy in the memory of each lane."""
        self._spread(key)
        self._shared[key] = loaded

    def shared(self, key: ViewKey) -> SharedTile | None:
        """Return the tile that lanes share; None for a tile in memory."""
        return self._shared.get(key)

    def _spread(self, key: ViewKey) -> None:
        """Write the other shared tiles that have bytes of a view to the memories of the lanes."""
        first, last = _span(key)
        for other in [x for x in self._shared if x != key and x[0] == key[0]]:
            start, end = _span(other)
            if start < last and first < end:
                loaded = self._shared.pop(other)
                self.view(other)[...] = loaded.tiles[loaded.of]


class TensorStore:
    """Global tensors, one matrix per head; inputs are requested at their first read."""

    def __init__(self, program: TileProgram, inputs: HeadSource) -> None:
        self._inputs, self._constants = inputs, program.constants
        self._heads: dict[tuple[str, int, int], Array] = {}
        #: By the identity of a large matrix, its bytes that start as NaN, and the rows that have not been requested
        #: yet.
        self._fresh: dict[int, tuple[NDArray[np.uint8], NDArray[np.bool_]]] = {}

    def head(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        """Return one head's matrix; outputs and workspaces start as NaN."""
        return self.started(tensor, (batch, head), 0, tensor.rows)

    def started(self, tensor: GlobalTensor, of: tuple[int, int], first: int, last: int) -> Array:
        """Return the matrix of (batch, head) in which these rows are defined: a large matrix starts as NaN one part at
        a time.
        """
        matrix = self._matrix(tensor, *of)
        if id(matrix) in self._fresh:
            raw, fresh = self._fresh[id(matrix)]
            raw[first:last][fresh[first:last]] = POISON
            fresh[first:last] = False
        return matrix

    def _matrix(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        key = (tensor.name, batch, head)
        matrix = self._heads.get(key)
        if matrix is None:
            result = self._viewed(tensor, tensor.of, batch, head) if tensor.of else self._make(tensor, batch, head)
            matrix = self._heads[key] = result
        return matrix

    def _viewed(self, tensor: GlobalTensor, of: GlobalTensor, batch: int, head: int) -> Array:
        """Return a head's matrix of another tensor, or the sum that writers have added so far to its batches, unless
        the tensor's batches share the same places.
        """
        if tensor.added == of.added:
            return self._matrix(of, batch, head)
        first, *rest = (self.head(of, batch * of.added + part, head) for part in range(of.added))
        return reduce(add, rest, first)

    def _make(self, tensor: GlobalTensor, batch: int, head: int) -> Array:
        if tensor.name in self._constants:
            values: Array = self._constants[tensor.name]()[batch, head]
        elif tensor.role in ("input", "constant"):
            heads = range(head * tensor.packed, (head + 1) * tensor.packed)
            matrices = [self._inputs(tensor.name, batch, h) for h in heads]
            values = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
            values = np.ascontiguousarray(values.T) if tensor.is_transposed else values
        else:
            fmt = stored_format(tensor.fmt)
            is_lazy, size = tensor.rows > EAGER_ROWS and not tensor.added, tensor.cols * fmt.dtype.itemsize
            start = 0 if tensor.added else POISON
            raw = np.empty((tensor.rows, size), np.uint8) if is_lazy else np.full((tensor.rows, size), start, np.uint8)
            values = raw.reshape(-1).view(fmt.dtype).reshape(tensor.rows, tensor.cols)
            if is_lazy:
                self._fresh[id(values)] = raw, np.ones(tensor.rows, np.bool_)
            return values
        if values.shape != (shape := (tensor.rows_of(batch), tensor.cols)):
            raise TensorError(f"tensor {tensor.name}: its values have shape {values.shape}; needed: {shape}")
        return values

    def cut(self, tile: GlobalTile, number: int = 0) -> Array:
        """Return one part as a view of its head's matrix; ``number``: the block's number, if coordinates are
        `Lanes`.
        """
        batch, head, row, col = (at_lane(at, number) for at in tile.corner)
        matrix = self.started(tile.tensor, (batch, head), row, row + tile.rows)
        return matrix[row : row + tile.rows, col : col + tile.cols]

    def leave_out(self, program: TileProgram) -> None:
        """Undo stores to places that no element of a result's argument has: a store's mask hides these lanes."""
        for name, batch, head in list(self._heads):
            tensor = program.tensors[name]
            here = None
            if tensor.role == "output" and tensor.view is not None:
                here = tensor.view.of_no_element((batch, head))
            if here is not None:
                matrix = self.head(tensor, batch, head)
                matrix.view(np.uint8).reshape(*matrix.shape, -1)[here] = POISON

    def written(self, tensor: GlobalTensor) -> dict[tuple[int, int], Array]:
        """Return the matrices of a tensor that exist so far, by (batch, head)."""
        return {(b, h): self.head(tensor, b, h) for name, b, h in self._heads if name == tensor.name}
