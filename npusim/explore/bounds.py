"""Lower bounds of a program's time, from its own operations: without a simulation, and of one core group alone.

Both are proofs for a search: a program whose bound is no better than the best time known need not be
simulated.  Neither is a second model: costs, bodies and the order of a queue are those of the program.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.ir.content import Itself, interned, memo, methods_of
from npusim.ir.op import TileOp, meets_l2
from npusim.ir.walk import ends_of
from npusim.simulation.variants import blocks_key
from npusim.timing.engine import Run
from npusim.timing.engine_arrays import RANGE_BITS
from npusim.timing.engine_code import Classes, blocks_by_group

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import Body, Item, Pricing, ProgramPhase, TileProgram
    from npusim.timing.engine_arrays import Ints
    from npusim.timing.engine_code import Code

__all__ = ["Bound", "alone_bound", "work_bound"]

#: Core groups with most work that are looked at alone.
GROUPS = 1
#: Operations that are gone through one by one in less time than it takes to look for what repeats.
FEW_OPERATIONS = 500_000


class Bound(NamedTuple):
    """Cycles that no simulation goes below, and the core groups with most work, the busiest first."""

    cycles: int
    groups: tuple[int, ...] = ()


def work_bound(program: TileProgram, device: DeviceSpec, cutoff: float = float("inf")) -> Bound:
    """Return cycles that no simulation goes below: the work of the busiest engine, phase after phase.

    An engine does one operation at a time, each for its occupancy at least; a phase ends when its busiest
    core group does.  Bodies are looked at by how often they run, until the bound passes ``cutoff``: those
    that are left could only raise it.  0 where a machine does not say what its blocks are made of.
    """
    if any(p.memo_key is None for p in program.phases) or all(p.body_counts is None for p in program.phases):
        return Bound(0)
    works = _Works(program, device)
    # Depths of rings add no work: tilings that differ in nothing else have one bound.
    known = memo(program.phases[-1].memo_key, works.ends, "bounds")
    key = (works.by, cutoff, blocks_key(program))
    if key not in known:
        groups = device.group_count.value
        dispatch = device.timed_launch().block_dispatch_cycles.value
        busy = np.zeros(groups, np.int64)
        cycles = 0
        for phase in program.phases:
            if phase.blocks:
                longest = _of_phase(phase, works, groups, cutoff).max(axis=1)
                busy += longest
                cycles += dispatch + int(longest.max())
        known[key] = Bound(cycles, tuple(np.argsort(-busy, kind="stable")[:GROUPS].tolist()))
    bound: Bound = known[key]
    return bound


def _of_phase(phase: ProgramPhase, works: _Works, groups: int, cutoff: float) -> Ints:
    """Return the work of each engine by core group; 0 for a phase without loops over tiles."""
    cycles = np.zeros((groups, works.queues), np.int64)
    if phase.body_counts is None:
        return cycles
    examples, shape_counts = _dealt(Itself(phase.blocks), tuple(map(tuple, phase.dealt)), phase.shape, groups)
    bodies = list(phase.body_counts(examples))
    runs = shape_counts @ np.array([counts for _, counts in bodies], np.int64).reshape(len(bodies), len(examples)).T
    for number in np.argsort(-runs.sum(axis=0), kind="stable").tolist():
        cycles += runs[:, number, None] * works.of(bodies[number][0])
        if cycles.max() > cutoff:
            break
    return cycles


@lru_cache(maxsize=8)
def _dealt(blocks: Itself, dealt: tuple[tuple[int, ...], ...], shape: Any, groups: int) -> tuple[list[Any], Ints]:
    """Return a block of each shape, and how many of each shape each core group has."""
    numbers: dict[Hashable, int] = {}
    shapes = [numbers.setdefault(shape(block), len(numbers)) for block in blocks.thing]
    examples = dict(zip(reversed(shapes), reversed(blocks.thing), strict=True))
    shape_counts = np.zeros((groups, len(numbers)), np.int64)
    for group in range(groups):
        shapes_of_group = [shapes[n] for n in dealt[group]] if dealt else shapes[group::groups]
        shape_counts[group] = np.bincount(shapes_of_group, minlength=len(numbers))
    return [examples[n] for n in range(len(numbers))], shape_counts


class _Works:
    """Cycles that each queue is busy with one iteration, apart from those that depend on what L2 holds."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        assert program.pricing is not None
        self.program, self.device, self.queues = program, device, len(program.queues)
        self.by = interned((Itself(device), *methods_of(program.pricing), tuple(self._pricing.crowds.items())))
        self.ends = ends_of(program)

    @cached_property
    def _pricing(self) -> Pricing:
        assert self.program.pricing is not None
        return self.program.pricing(self.program, self.device)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {queue.name: number for number, queue in enumerate(self.program.queues)}

    def of(self, body: Body) -> Ints:
        """Return the work of a body, by queue."""
        known = memo(body.memo_key, self.ends, "work")
        key = (self.by, body.key)
        if key not in known:
            known[key] = np.zeros(self.queues, np.int64)
            self._add(body(0), 1, known[key])
        cycles: Ints = known[key]
        return cycles

    def _add(self, items: Iterable[Item], times: int, cycles: Ints) -> None:
        for item in items:
            if isinstance(item, TileOp):
                if not meets_l2(item):
                    cycles[self._numbers[item.queue]] += times * self._pricing.of_op(item).occupancy_cycles
            elif item.indices:
                self._add(item.body(item.indices[0]), times * len(item.indices), cycles)


def alone_bound(code: Code, groups: Sequence[int]) -> int:
    """Return cycles that no simulation goes below: these core groups, each alone on links without limit.

    In a core group every operation waits for earlier ones of its queue and for flags, nothing else; with
    shorter transfers nothing comes later.  0 where queues share pipes, which are first come, first served.
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
