"""Exact skips: once the joint state of all classes repeats, whole periods are added at once.

Folded first; states are compared at iterations of every loop, of key tiles and of blocks alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npusim.timing.block_code import code_of
from npusim.timing.block_machine import MASTER
from npusim.timing.block_run import Run
from npusim.timing.fold import equal_groups
from npusim.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.block_code import Code
    from npusim.timing.block_machine import EngineState, Program
    from npusim.timing.fold import Classes
    from npusim.timing.result import TimingResult
    from npusim.timing.steady_kernel import Snapshots

#: Snapshots kept of each level of loops.  A joint period longer than that many iterations is not found.
KEPT = 16


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program``; where ``trace_groups`` asks for spans nothing is skipped."""
    code = code_of(streams or Streams(program, device))
    classes = equal_groups(code)
    if trace_groups:
        return Run(code, classes, trace_groups).result("steady")
    return skipping(code, classes)


def skipping(code: Code, classes: Classes) -> TimingResult:
    """Return the time of one core group of each class, repetitions skipped."""
    run = Run(code, classes)
    return run.result("steady", Skipping(run))


class Skipping:
    """Runs a phase with skips."""

    def __init__(self, run: Run) -> None:
        self.snapshots = build_snapshots(run.program, run.machine)

    def __call__(self, program: Program, machine: EngineState, start: int, master: int) -> None:
        """Run one phase from ``start``; ``master`` is the dispatcher whose loops are watched."""
        from npusim.timing.steady_kernel import run_steady

        machine.size[MASTER] = master
        run_steady(program, machine, self.snapshots, start)


def build_snapshots(program: Program, machine: EngineState) -> Snapshots:
    """Return room for the snapshots of one simulation."""
    from npusim.timing.steady_kernel import ENGINE_TOTALS, Snapshots

    levels, history = machine.stack.shape[1] + 1, machine.visible.shape[1]
    slots, engines = levels * KEPT, len(machine.engine)
    # The most that ``note_state`` writes: 7 words and 2 an entry for an engine, 4 and 2 a level for
    # a scalar unit, 3 and every count kept for a pair, 2 and 2 a transfer for a link, 3 and 2 a queue for work.
    words = (
        engines * (7 + 2 * machine.entry.shape[1])
        + len(machine.dispatcher) * (4 + 2 * levels)
        + len(program.member) * (len(program.pair) * (3 + history) + len(program.pipe))
        + len(program.link) * (2 + 2 * engines)
        + len(machine.room) * 3
        + 2 * engines
    )
    pairs = machine.stack.size + len(machine.counter) + len(program.link)
    totals = engines * ENGINE_TOTALS + 2 * (pairs + machine.pipe.size) + len(machine.ran)

    def zeros(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.zeros(shape, np.int64)

    return Snapshots(
        words=np.empty((slots, words), np.int64),
        length=zeros(slots),
        digest=zeros(slots),
        moment=zeros(slots),
        totals=np.empty((slots, totals), np.int64),
        taken=zeros(levels),
        scratch=zeros(history),
        engine_floor=zeros(engines),
        issue_floor=zeros(len(machine.dispatcher)),
    )
