"""Earliest moments at which scalar units may issue and engines go on: before them nothing is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.block_jit import inline
from npusim.timing.block_kernel import HALTED, NOTHING
from npusim.timing.block_machine import NEVER

if TYPE_CHECKING:
    from npusim.timing.block_machine import EngineState, Program
    from npusim.timing.steady_kernel import Snapshots


@inline
def issue_floor(p: Program, m: EngineState, d: int) -> int:
    """Return the earliest moment at which dispatcher ``d`` may issue again."""
    op, clock = m.dispatcher[d].pending, m.dispatcher[d].clock
    if op < 0:
        return clock
    e = d // p.entry.shape[1] * len(p.queue) + p.op[op].queue
    if m.engine[e].blocked != d:
        return clock
    return max(clock, busy_floor(m, e))


@inline
def busy_floor(m: EngineState, e: int) -> int:
    """Return the earliest moment at which engine ``e``, which has work, may go on."""
    if m.engine[e].op == NOTHING:
        return max(m.engine[e].free, m.entry[e, m.engine[e].head].time)
    return m.engine[e].ready if m.engine[e].wait_at != NOTHING else m.engine[e].begun


@inline
def dispatcher_of(p: Program, e: int) -> int:
    """Return the dispatcher that fills the queue of engine ``e``."""
    queues = len(p.queue)
    return e // queues * p.entry.shape[1] + p.queue[e % queues].issuer


@inline
def is_empty(m: EngineState, e: int) -> bool:
    """Return whether engine ``e`` has nothing to do at present."""
    return m.engine[e].op == NOTHING and m.engine[e].length == 0


@inline
def is_over(p: Program, m: EngineState, e: int) -> bool:
    """Return whether engine ``e`` has nothing more to do in this phase."""
    return is_empty(m, e) and m.dispatcher[dispatcher_of(p, e)].pending == HALTED


@inline
def note_floors(p: Program, m: EngineState, s: Snapshots) -> None:
    """Find the earliest moments at which everybody may look at flags or issue; ``NEVER``: it is through."""
    for d in range(len(m.dispatcher)):
        is_halted = m.dispatcher[d].pending == HALTED
        s.issue_floor[d] = NEVER if is_halted else issue_floor(p, m, d)
    for e in range(len(m.engine)):
        if not is_empty(m, e):
            s.engine_floor[e] = busy_floor(m, e)
        elif is_over(p, m, e):
            s.engine_floor[e] = NEVER
        else:
            s.engine_floor[e] = max(m.engine[e].free, s.issue_floor[dispatcher_of(p, e)])
