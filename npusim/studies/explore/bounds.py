"""Lower bounds of a program's time: from counts of its operations, and from simulations of single core groups.

Both prove facts for a search: a program whose bound is no better than the best time known need not be simulated.
Neither is a second model: both read costs, bodies and the order of a queue from the program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.identity import Itself
from npusim.program.ir.columns import distinct
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.families import families_of
from npusim.program.ir.op import TileOp, meets_l2
from npusim.program.ir.tile_program import Item, Loop, Pricing, ProgramPhase, TileProgram
from npusim.program.timing.engine import Run
from npusim.program.timing.engine_arrays import RANGE_BITS, Ints
from npusim.program.timing.engine_code import Classes, Code, blocks_by_group
from npusim.program.timing.gpu_pipes import ONE, shared_pipes, sharing_of
from npusim.program.timing.stream import clocked
from npusim.studies.explore.spans import QueueEntry, sides_of, spans, waited_for
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec


#: Number of core groups with their own bounds: those with the most work.
GROUPS = 1
#: Largest number of operations whose simulation takes less time than a search for repetitions.
FEW_OPERATIONS = 500_000
#: Largest number of operations of a body whose waits are computed; in longer bodies, computing them takes more time
#: than it saves.
MOST_ENTRIES = 512


class Bound(NamedTuple):
    """A lower bound of the cycles of every simulation, and the core groups with the most work, the busiest first."""

    cycles: int
    groups: tuple[int, ...] = ()


def work_bound(
    program: TileProgram,
    device: DeviceSpec,
    cutoff: float = float("inf"),
    *,
    is_dealt: bool = True,
    waits: bool = True,
    known: dict[Hashable, Ints] | None = None,
) -> Bound:
    """Return a lower bound of the cycles of every simulation: the work of the busiest engine, phase after phase.

    An engine executes one operation at a time, each for at least its occupancy; a phase ends with its busiest core
    group.  Bodies are examined in the order of their number of executions until the bound passes ``cutoff``: further
    bodies could only raise the bound.  The bound is valid for any placement of tiles, and without ``is_dealt`` for any
    assignment of blocks. With ``waits`` an engine counts as busy while it waits for others within a body
    (`npusim.studies.explore.spans`): this bound depends on the depth of rings.  ``known`` is the work of bodies by key,
    from programs that do no more than this one, and the work with waits from programs with the same rings; missing
    bodies are added.
    """
    device = clocked(program, device)
    works = _Works(program, device, {} if known is None else known, is_dealt=is_dealt, waits=waits)
    groups = device.group_count.value
    dispatch = device.timed_launch().block_dispatch_cycles.value
    busy = np.zeros(groups, np.int64)
    cycles = 0
    for phase in program.phases:
        if phase.blocks:
            work, longest = _of_phase(phase, works, groups, cutoff - cycles - dispatch)
            busy += work
            cycles += dispatch + longest
            if cycles > cutoff:
                break
    return Bound(cycles, tuple(np.argsort(-busy, kind="stable")[:GROUPS].tolist()))


def _of_phase(phase: ProgramPhase, works: _Works, groups: int, cutoff: float) -> tuple[Ints, int]:
    """Return the work of the busiest engine by core group, and a lower bound of the phase's cycles."""
    bodies, of_classes, class_counts = _bodies_of(phase, groups)
    runs = class_counts @ of_classes.T
    if not works.is_dealt:  # the work of each group if it were distributed evenly, and the block with the most work
        present = of_classes[:, class_counts.any(axis=0)].T
        runs = np.concatenate([present, runs.sum(axis=0, keepdims=True)])
    cycles = np.zeros((len(runs), works.columns), np.int64)
    longest = 0
    for number in np.argsort(-runs.sum(axis=0), kind="stable").tolist():
        cycles += runs[:, number, None] * works.of(bodies[number])
        longest = _longest(cycles // works.scale, groups, is_dealt=works.is_dealt)
        if longest > cutoff:
            break
    return ((cycles // works.scale).max(axis=1) if works.is_dealt else np.zeros(groups, np.int64)), longest


def _longest(cycles: Ints, groups: int, *, is_dealt: bool) -> int:
    """Return the largest number of cycles of an engine; the last row is the sum of all work, distributed over the core
    groups.
    """
    if is_dealt:
        return int(cycles.max(initial=0))
    return max(int(cycles[:-1].max(initial=0)), ceil_div(int(cycles[-1].max(initial=0)), groups))


class _Part(NamedTuple):
    """A body of a phase; programs that differ only in when and where they run operations share one for each key."""

    key: Hashable
    items: Callable[[], Iterable[Item]]
    #: Whether the operations run one after another, in their order.
    is_together: bool = True


def _items_of(phase: ProgramPhase, block: Any, loop: int) -> Iterable[Item]:
    """Return the operations of a block outside loops (``loop`` -1), or of one iteration of a loop: equal in its
    family.
    """
    items = [i for i in phase.body(block) if not isinstance(i, Loop) or i.indices]
    loops = [i for i in items if isinstance(i, Loop)]
    if loop < 0:
        return [i for i in items if not isinstance(i, Loop)]
    return [replace(loops[loop], indices=loops[loop].indices[:1])]


def _bodies_of(phase: ProgramPhase, groups: int) -> tuple[Sequence[_Part], Ints, Ints]:
    """Return bodies, the runs of each body in a block of each class, and the number of blocks of each class in each
    core group.
    """
    families = families_of(phase) if phase.body_counts is None else None
    if families is None:
        blocks = phase.blocks if phase.body_counts is None else phase.alone
        examples, class_counts = _dealt(Itself(blocks), tuple(map(tuple, phase.dealt)), phase.shape, groups)
        if phase.body_counts is None:  # a block counts as a body
            whole = [_Part(None, partial(phase.body, block)) for block in examples]
            return whole, np.eye(len(examples), dtype=np.int64), class_counts
        keys, bodies, counts = zip(*phase.body_counts(examples), strict=True)
        named = [_Part((phase.name, key), partial(body, 0)) for key, body in zip(keys, bodies, strict=True)]
        return named, np.array(counts, np.int64), class_counts
    parts: list[_Part] = []
    which = np.empty(len(phase.blocks), np.int64)
    columns: list[tuple[int, list[int]]] = []
    for family in families:
        sizes, of_block = distinct(family.sizes)
        which[family.numbers] = len(columns) + of_block
        columns += [(len(parts), [1, *row]) for row in sizes.tolist()]
        block = phase.blocks[family.numbers[0]]
        parts += [
            _Part(None, partial(_items_of, phase, block, loop), loop >= 0) for loop in range(-1, family.sizes.shape[1])
        ]
    of_classes = np.zeros((len(parts), len(columns)), np.int64)
    for number, (start, runs) in enumerate(columns):
        of_classes[start : start + len(runs), number] = runs
    dealt = [which[phase.numbers_of_group(group, groups)] for group in range(groups)]
    return parts, of_classes, np.array([np.bincount(one, minlength=len(columns)) for one in dealt])


@kept_by_blocks(lambda _counts, blocks, *_: len(blocks.thing))
def _dealt(blocks: Itself, dealt: tuple[tuple[int, ...], ...], shape: Any, groups: int) -> tuple[list[Any], Ints]:
    """Return a block of each shape, and the number of blocks of each shape in each core group."""
    numbers: dict[Hashable, int] = {}
    shapes = [numbers.setdefault(shape(block), len(numbers)) for block in blocks.thing]
    examples = dict(zip(reversed(shapes), reversed(blocks.thing), strict=True))
    shape_counts = np.zeros((groups, len(numbers)), np.int64)
    for group in range(groups):
        shapes_of_group = [shapes[n] for n in dealt[group]] if dealt else shapes[group::groups]
        shape_counts[group] = np.bincount(shapes_of_group, minlength=len(numbers))
    return [examples[n] for n in range(len(numbers))], shape_counts


#: Units that warp groups share, fields of `Share`: the first three belong to arithmetic, the next to products, the last
#: to both.
_SHARED = ("issue", "compare", "special", "tensor", "memory")


class _Works:
    """Busy cycles of queues, pipes and shared units of warp groups for a body.

    Without ``waits`` accesses to global tensors are omitted: their cost depends on the content of L2.
    """

    def __init__(
        self, program: TileProgram, device: DeviceSpec, known: dict[Hashable, Ints], *, is_dealt: bool, waits: bool
    ) -> None:
        assert program.pricing is not None
        self.program, self.device, self.is_dealt, self._known = program, device, is_dealt, known
        names = [queue.name for queue in program.queues]
        is_sharing = sharing_of(program, device) is not None
        shared = _SHARED if is_sharing else shared_pipes(program, device)
        self._numbers = {name: number for number, name in enumerate((*names, *shared))}
        self.columns, self._queues = len(self._numbers), len(names)
        #: For each column, the number of its units per cycle.
        self.scale = np.array([1] * len(names) + [ONE if is_sharing else 1] * len(shared), np.int64)
        self._depths = waited_for(program.rings) if waits else None
        self._bodies: dict[Hashable, tuple[dict[int, int], list[QueueEntry]]] = {}

    @cached_property
    def _pricing(self) -> Pricing:
        assert self.program.pricing is not None
        pricing = self.program.pricing(self.program, self.device)
        pricing.is_placed = False
        return pricing

    def of(self, part: _Part) -> Ints:
        """Return the units of each column that a body keeps busy."""
        depths = self._depths if part.is_together else None
        key = (part.key, None if depths is None else tuple(depths.items()))
        if key in self._known:
            return self._known[key]
        work, entries = self._of_items(part.items())
        units = np.zeros(self.columns, np.int64)
        units[list(work)] = list(work.values())
        if depths is not None and len(entries) <= MOST_ENTRIES:
            np.maximum(units[: self._queues], spans(entries, depths, self._queues), out=units[: self._queues])
        if part.key is not None:
            self._known[key] = units
        return units

    def _of_items(self, items: Iterable[Item]) -> tuple[dict[int, int], list[QueueEntry]]:
        """Return the units of operations and loops by column, and the operations in order as long as there are not too
        many.

        Bodies that blocks share are examined once.
        """
        units: dict[int, int] = {}
        entries: list[QueueEntry] = []
        for item in items:
            if not isinstance(item, Loop):
                for column, more in self._units(item, entries):
                    units[column] = units.get(column, 0) + more
            elif item.indices:
                key, count = item.key, len(item.indices)
                known = None if key is None else self._bodies.get(key)
                if known is None:
                    known = self._of_items(item.body(item.indices[0]))
                    if key is not None:
                        self._bodies[key] = known
                for column, more in known[0].items():
                    units[column] = units.get(column, 0) + count * more
                entries += known[1] * min(count, MOST_ENTRIES)
        return units, entries[: MOST_ENTRIES + 1]

    def _units(self, op: TileOp, entries: list[QueueEntry]) -> Iterator[tuple[int, int]]:
        """Yield the columns (queues, pipes, shared units) that an operation occupies, each with its units; add the
        operation
        to ``entries``.
        """
        if self._depths is None and meets_l2(op):
            return
        cost, numbers = self._pricing.of_op(op), self._numbers
        share, queue = cost.share, numbers[op.queue]
        occupancy = cost.occupancy_cycles + (share.cycles if share else 0)
        if self._depths is not None:
            entries.append(QueueEntry(queue, occupancy, cost.latency_cycles, sides_of(op, self._depths)))
        yield queue, occupancy
        if share is not None:
            for name in _SHARED[3:] if share.is_product else (*_SHARED[:3], _SHARED[4]):
                yield numbers[name], share.cycles * getattr(share, name)
        elif "issue" not in numbers:
            for name, cycles in cost.pipe_cycles:
                yield numbers[name], cycles


def alone_bound(code: Code, groups: Sequence[int]) -> int:
    """Return a lower bound of the cycles from simulations of these core groups, each alone, on links without a limit.

    In a core group every operation waits only for earlier operations of its queue and for flags; with shorter transfers
    no operation ends later.  The bound is 0 if queues share pipes, which serve operations in order of arrival.
    """
    if code.streams.pipes:
        return 0
    blocks = [blocks_by_group(code, phase, groups) for phase in code.streams.program.phases]
    alone = Classes(tuple((group,) for group in groups), tuple(tuple(phase) for phase in blocks))
    run = Run(code, alone, periodic=code.operation_count(alone.every_block()) > FEW_OPERATIONS)
    run.program = run.program._replace(link=run.program.link.copy())
    run.program.link["rate"] = 1 << RANGE_BITS
    for phase in range(len(blocks)):
        run.run_phase(phase)
    return int(run.cycles)
