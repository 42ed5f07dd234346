"""What a program takes at least, from its own operations: without a simulation, and of one core group alone.

Both are proofs for a search: a program whose bound is no better than what is known need not be
simulated.  Neither is a second model: costs, bodies and the order of a queue are those of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npusim.ir.content import Itself, interned, known_at, methods_of
from npusim.ir.tile import GlobalTile
from npusim.ir.walk import LoopTemplate, Templates, compile_items, ends_of
from npusim.timing.block_machine import RANGE_BITS
from npusim.timing.block_run import Run, run_whole
from npusim.timing.fold import Classes, equal_groups
from npusim.timing.steady import Skipping

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npusim.config.device import DeviceSpec
    from npusim.ir.cost import Pricing
    from npusim.ir.program import Loop, Phase, TileProgram
    from npusim.ir.walk import OpTemplate, Template
    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import Ints

__all__ = ["alone_bound", "content_of", "work_bound"]

#: Core groups with most work that are looked at alone.
GROUPS = 2
#: Operations that are gone through one by one in less time than it takes to look for what repeats.
FEW_OPERATIONS = 500_000


def content_of(program: TileProgram) -> Hashable:
    """Return what programs share that are one but for their tilings' words; None where that is not known."""
    if any(phase.home is None for phase in program.phases):
        return None
    rings = tuple((r.name, r.space, r.offset_bytes, r.slot_bytes, r.depth, r.period) for r in program.rings)
    tensors = tuple((t.name, t.batch, t.rows) for t in program.tensors.values())
    return rings, tensors, _blocks_of(program)


def _blocks_of(program: TileProgram) -> tuple[Hashable, ...]:
    return tuple((p.home, tuple(p.blocks), tuple(map(tuple, p.dealt))) for p in program.phases)


def work_bound(program: TileProgram, device: DeviceSpec, cutoff: float = float("inf")) -> int:
    """Return cycles that no simulation goes below: the work of the busiest engine, phase after phase.

    An engine does one operation at a time, each for its occupancy at least; a phase ends when its busiest
    core group does.  Bodies are looked at by how often they run, until the bound passes ``cutoff``: those
    that are left could only raise it.  0 where a machine does not say what its blocks are made of.
    """
    if any(p.home is None for p in program.phases) or all(p.makeup is None for p in program.phases):
        return 0
    works = _Works(program, device)
    # Depths of rings add no work: tilings that differ in nothing else have one bound.
    known = known_at(program.phases[-1].home, works.ends, "bounds")
    key = (works.by, cutoff, _blocks_of(program))
    if key not in known:
        dispatch = device.timed_launch().block_dispatch_cycles.value
        phases = (_of_phase(phase, works, device.group_count.value, cutoff) for phase in program.phases)
        known[key] = sum(dispatch + found for phase, found in zip(program.phases, phases, strict=True) if phase.blocks)
    return int(known[key])


def _of_phase(phase: Phase, works: _Works, groups: int, cutoff: float) -> int:
    """Return the work of the busiest engine of a phase's busiest core group; 0 for one without loops over tiles."""
    if phase.makeup is None:
        return 0
    shapes: dict[Hashable, int] = {}
    loops: dict[Hashable, tuple[int, Loop]] = {}
    made: list[list[tuple[int, int]]] = []
    held: list[dict[int, int]] = []
    for group in range(groups):
        counts: dict[int, int] = {}
        for block in phase.blocks_of_group(group, groups):
            shape = phase.shape(block)
            if shape not in shapes:
                shapes[shape] = len(made)
                own = [(loops.setdefault(loop.key, (len(loops), loop)), loop) for loop in phase.makeup(block)]
                made.append([(known[0], len(loop.indices)) for known, loop in own])
            counts[shapes[shape]] = counts.get(shapes[shape], 0) + 1
        held.append(counts)
    runs, per_shape = np.zeros((groups, len(made)), np.int64), np.zeros((len(made), len(loops)), np.int64)
    for group, counts in enumerate(held):
        runs[group, list(counts)] = list(counts.values())
    for at, listed in enumerate(made):
        for number, count in listed:
            per_shape[at, number] += count
    often, found = runs @ per_shape, np.zeros((groups, works.queues), np.int64)
    listed_loops = [loop for _, loop in loops.values()]
    for number in np.argsort(-often.sum(axis=0), kind="stable").tolist():
        found += often[:, number, None] * works.of(listed_loops[number])
        if found.max() > cutoff:
            break
    return int(found.max(initial=0))


class _Works:
    """Cycles that each queue is busy with one iteration, as far as they do not hang on what L2 holds."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        assert program.pricing is not None
        self.program, self.device, self.queues = program, device, len(program.queues)
        self.by = interned((Itself(device), *methods_of(program.pricing)))
        self.ends = ends_of(program)
        self._templates: Templates | None = None
        self._pricing: Pricing | None = None

    def of(self, loop: Loop) -> Ints:
        """Return the work of one iteration, by queue."""
        known = known_at(loop.body.home, self.ends, "work")  # type: ignore[attr-defined]  # makeups have homes
        key = (self.by, loop.key)
        if key not in known:
            self._templates = self._templates or Templates(self.program)
            (whole,) = compile_items(self._templates.walker, (loop,)).parts
            known[key] = np.zeros(self.queues, np.int64)
            assert isinstance(whole, LoopTemplate)
            self._add(whole.body, 1, known[key])
        found: Ints = known[key]
        return found

    def _add(self, template: Template, times: int, found: Ints) -> None:
        for part in template.parts:
            if isinstance(part, LoopTemplate):
                self._add(part.body, times * part.count, found)
                continue
            for op in part:
                if not meets_l2(op):
                    found[op.queue] += times * self._occupancy(op)

    def _occupancy(self, op: OpTemplate) -> int:
        if op.costs is None or op.costs[0] is not self.by:
            if self._pricing is None:
                assert self.program.pricing is not None
                self._pricing = self.program.pricing(self.program, self.device)
            op.costs = self.by, self._pricing.of_op(op.op)
        return op.costs[1].occupancy_cycles


def meets_l2(op: OpTemplate) -> bool:
    """Return whether an operation's cost hangs on what L2 holds of a tensor."""
    return any(isinstance(o, GlobalTile) for step in op.op.steps for o in (step.dst, *step.srcs))


def alone_bound(code: Code) -> int:
    """Return cycles that no simulation goes below: core groups with most work, each alone on links without limit.

    In a core group every operation waits for earlier ones of its queue and for flags, nothing else; with
    shorter transfers nothing comes later.  0 where queues share pipes, which are first come, first served.
    """
    if code.streams.pipes:
        return 0
    whole = equal_groups(code)
    work = {block: code.operation_count(block) for block in set(whole.every_block())}
    totals = [sum(work[b] for phase in whole.blocks for b in phase[m]) for m in range(len(whole.groups))]
    chosen = sorted(range(len(totals)), key=lambda m: -totals[m])[:GROUPS]
    alone = Classes(
        tuple(whole.groups[m][:1] for m in chosen), tuple(tuple(phase[m] for m in chosen) for phase in whole.blocks)
    )
    run = Run(code, alone)
    is_long = sum(totals[m] for m in chosen) > FEW_OPERATIONS
    run.program = run.program._replace(link=run.program.link.copy())
    run.program.link["rate"] = 1 << RANGE_BITS
    through = Skipping(run) if is_long else run_whole
    for phase in range(len(alone.blocks)):
        run.run_phase(phase, through)
    return int(run.cycles)
