"""Skipping what repeats: snapshots of the joint state at iterations of loops, and jumps by whole periods.

A snapshot holds all that can bear on the future, with times relative to the moment: what engines
and scalar units are at, entries of queues, the flags that can still be asked for, transfers in
flight.  A time that nothing can notice any more (a flag long visible, a place long free) counts as
the earliest moment at which it will be asked for.  Iterations left are kept apart: if two snapshots
differ in nothing else, and no loop came to its end in between, what happened between them happens
again as long as the loops last.  All totals then grow by what they grew by, and all times move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npusim.timing.block_jit import inline, kernel
from npusim.timing.block_kernel import HALTED, NOTHING, advance
from npusim.timing.block_machine import CROSSED, EVENTS, MASTER, NEVER, REQUESTS, EngineState, Ints, Program
from npusim.timing.steady_floors import dispatcher_of, is_empty, issue_floor, note_floors
from npusim.timing.steady_shared import note_link, note_room

#: Multiplier of the hash of 64-bit words (Fowler-Noll-Vo, FNV-1 64-bit prime).
PRIME = 0x100000001B3
#: Totals of an engine that ``note_totals`` writes: free, end, done, busy, idle, waited for pipes.
ENGINE_TOTALS = 6
FREE, LAST, DONE, BUSY, IDLE, WAITED = range(ENGINE_TOTALS)


class Snapshots(NamedTuple):
    """The latest snapshots of each level of loops; slot ``level * kept + n``."""

    words: Ints  #: (slots, words)
    length: Ints
    digest: Ints
    moment: Ints
    totals: Ints  #: (slots, totals), as ``note_totals`` writes them
    taken: Ints  #: of each level, ever
    scratch: Ints  #: (history,)
    engine_floor: Ints
    issue_floor: Ints


#: For runs in which no loop is watched.
UNUSED = Snapshots(*(np.zeros((0, 0) if n in {"words", "totals"} else 0, np.int64) for n in Snapshots._fields))


# ---------------------------------------------------------------- snapshots


@inline
def note_engine(p: Program, m: EngineState, s: Snapshots, e: int, moment: int, out: Ints, start: int) -> int:
    """Write down engine ``e`` and its queue; return where the next word goes."""
    n = start
    out[n], out[n + 1], out[n + 2] = m.engine[e].op, m.engine[e].length, m.engine[e].blocked
    n += 3  # words written
    floor, clock = s.engine_floor[e], s.issue_floor[dispatcher_of(p, e)]
    if floor == NEVER:
        return n
    if not is_empty(m, e):
        out[n], out[n + 1] = m.engine[e].wait_at, m.engine[e].flying
        n += 2
    out[n], out[n + 1] = floor - moment, max(m.engine[e].end - floor, 0)
    n += 2
    depth, slot = p.queue[e % len(p.queue)].depth, m.engine[e].head
    for place in range(depth):
        time = m.entry[e, slot].time
        if place < m.engine[e].length:
            out[n], out[n + 1] = m.entry[e, slot].op, max(time - floor, 0)
            n += 2
        elif time > clock:
            out[n], out[n + 1] = -place, time - clock
            n += 2
        slot = slot + 1 if slot + 1 < depth else 0
    return n


@inline
def note_pair(p: Program, m: EngineState, s: Snapshots, member: int, at: int, out: Ints, start: int) -> int:
    """Write down how far apart two endpoints are, and the flags one may yet ask of the other."""
    own, first, n = p.pair[at].own, member * len(p.endpoint), start
    peer = first + p.pair[at].peer
    need, period = m.counter[first + own].count + p.endpoint[own].lag, p.endpoint[own].period
    out[n] = min(need, 1)
    n += 1
    need = max(need, 1)
    if period != 1:
        out[n] = need % period
        n += 1
        need = -(-need // period) * period
    floor = s.engine_floor[member * len(p.queue) + p.endpoint[own].owner]
    out[n] = m.counter[peer].count - need
    n += 1
    for count in range(need, m.counter[peer].count + 1):
        out[n] = max(m.visible[peer, count & (m.visible.shape[1] - 1)] - floor, 0)
        n += 1
    return n


@inline
def note_dispatcher(m: EngineState, s: Snapshots, d: int, moment: int, out: Ints, start: int) -> int:
    """Write down where dispatcher ``d`` stands, without the iterations left."""
    n = start
    out[n] = m.dispatcher[d].pending
    n += 1
    if out[n - 1] == HALTED:
        return n
    levels = m.dispatcher[d].level
    out[n], out[n + 1], out[n + 2] = m.dispatcher[d].pc, levels, s.issue_floor[d] - moment
    n += 3  # words written
    for level in range(levels):
        out[n], out[n + 1] = m.stack[d, level].pc, m.stack[d, level].operand
        n += 2
    return n


@inline
def note_pipes(p: Program, m: EngineState, s: Snapshots, member: int, out: Ints, start: int) -> int:
    """Write down how long the pipes of a member are taken beyond the next moment to ask for them."""
    first, floor = member * len(p.queue), NEVER
    for e in range(first, first + len(p.queue)):
        floor = min(floor, s.engine_floor[e])
    for pipe in range(len(p.pipe)):
        out[start + pipe] = max(m.pipe[member, pipe].free - floor, 0)
    return start + len(p.pipe)


@inline
def note_state(p: Program, m: EngineState, s: Snapshots, moment: int, out: Ints) -> int:
    """Write down the joint state; return the number of words."""
    note_floors(p, m, s)
    n = 0
    for e in range(len(m.engine)):
        n = note_engine(p, m, s, e, moment, out, n)
    for d in range(len(m.dispatcher)):
        n = note_dispatcher(m, s, d, moment, out, n)
    for member in range(len(p.member)):
        n = note_pipes(p, m, s, member, out, n)
        for at in range(len(p.pair)):
            n = note_pair(p, m, s, member, at, out, n)
    for member in range(len(m.room)):
        n = note_room(m, member, moment, out, n)
    for link in range(len(m.link)):
        n = note_link(m, link, moment, out, n)
    return n


# ---------------------------------------------------------------- totals


@inline
def note_totals(m: EngineState, out: Ints) -> None:
    """Write down what grows without bearing on what follows, and the iterations left."""
    n = 0
    for e in range(len(m.engine)):
        engine = m.engine[e]
        out[n + FREE], out[n + LAST], out[n + DONE] = engine.free, engine.end, engine.done
        out[n + BUSY], out[n + IDLE], out[n + WAITED] = engine.busy, engine.idle, engine.waited
        n += ENGINE_TOTALS
    for d in range(m.stack.shape[0]):
        for level in range(m.stack.shape[1]):
            out[n], out[n + 1] = m.stack[d, level].entry, m.stack[d, level].left
            n += 2
    for c in range(len(m.counter)):
        out[n], out[n + 1] = m.counter[c].count, m.counter[c].stalled
        n += 2
    for link in range(len(m.link)):
        out[n], out[n + 1] = m.link[link].bytes, m.link[link].flow_cycles
        n += 2
    for op in range(len(m.ran)):
        out[n + op] = m.ran[op]
    n += len(m.ran)
    for member in range(m.pipe.shape[0]):
        for pipe in range(m.pipe.shape[1]):
            out[n], out[n + 1] = m.pipe[member, pipe].busy, m.pipe[member, pipe].done
            n += 2


@inline
def grow_totals(m: EngineState, old: Ints, times: int) -> None:
    """Let totals grow ``times`` over by what they grew by since ``old``, but for times of engines."""
    n = 0
    for e in range(len(m.engine)):
        m.engine[e].done += times * (m.engine[e].done - old[n + DONE])
        m.engine[e].busy += times * (m.engine[e].busy - old[n + BUSY])
        m.engine[e].idle += times * (m.engine[e].idle - old[n + IDLE])
        m.engine[e].waited += times * (m.engine[e].waited - old[n + WAITED])
        n += ENGINE_TOTALS
    for d in range(m.stack.shape[0]):
        for level in range(m.stack.shape[1]):
            m.stack[d, level].entry += times * (m.stack[d, level].entry - old[n])
            m.stack[d, level].left += times * (m.stack[d, level].left - old[n + 1])
            n += 2
    for c in range(len(m.counter)):
        m.counter[c].count += times * (m.counter[c].count - old[n])
        m.counter[c].stalled += times * (m.counter[c].stalled - old[n + 1])
        n += 2
    for link in range(len(m.link)):
        m.link[link].bytes += times * (m.link[link].bytes - old[n])
        m.link[link].flow_cycles += times * (m.link[link].flow_cycles - old[n + 1])
        n += 2
    for op in range(len(m.ran)):
        m.ran[op] += times * (m.ran[op] - old[n + op])
    n += len(m.ran)
    for member in range(m.pipe.shape[0]):
        for pipe in range(m.pipe.shape[1]):
            m.pipe[member, pipe].busy += times * (m.pipe[member, pipe].busy - old[n])
            m.pipe[member, pipe].done += times * (m.pipe[member, pipe].done - old[n + 1])
            n += 2


# ---------------------------------------------------------------- periods


@inline
def periods_left(m: EngineState, old: Ints, elapsed: int) -> int:
    """Return how often what happened since a snapshot of equal state will happen again at least."""
    at, times = len(m.engine) * ENGINE_TOTALS, NEVER
    for d in range(len(m.dispatcher)):
        levels = 0 if m.dispatcher[d].pending == HALTED else m.dispatcher[d].level
        for level in range(m.stack.shape[1]):
            fewer = old[at + 1] - m.stack[d, level].left
            if level < levels and fewer:
                if fewer < 0 or old[at] != m.stack[d, level].entry:
                    return 0
                times = min(times, m.stack[d, level].left // fewer)
            at += 2
    if times == NEVER:
        return 0
    for e in range(len(m.engine)):
        n, engine = e * ENGINE_TOTALS, m.engine[e]
        if engine.done == old[n + DONE]:
            continue
        if engine.end - old[n + LAST] != elapsed:
            return 0
        if engine.op == NOTHING and engine.free - old[n + FREE] != elapsed:
            return 0
    return times


@inline
def jump(p: Program, m: EngineState, s: Snapshots, old: Ints, shift: int, times: int) -> None:
    """Move the machine on by ``times`` periods, ``shift`` cycles in all.

    Times that nothing can notice any more stay as they are; so do those of whoever is through.
    """
    note_floors(p, m, s)
    for counter in range(len(m.counter)):
        move_flags(p, m, s, counter, old, shift, times)
    for e in range(len(m.engine)):
        move_engine(p, m, s, e, old, shift)
    for d in range(len(m.dispatcher)):
        if m.dispatcher[d].pending != HALTED:
            m.dispatcher[d].clock += shift
    for at in range(m.size[EVENTS]):
        m.event[at].key += shift
    for at in range(m.size[REQUESTS]):
        m.request[at].key += shift * len(m.engine)
    at = len(old) - 2 * m.pipe.size
    for member in range(m.pipe.shape[0]):
        for pipe in range(m.pipe.shape[1]):
            if m.pipe[member, pipe].done != old[at + 1]:
                m.pipe[member, pipe].free += shift
            at += 2
    for link in range(len(m.link)):
        if m.link[link].flows:
            m.link[link].updated += shift
            m.link[link].due += shift
    for member in range(len(m.room)):
        m.room[member].updated += shift
    for at in range(1, len(m.due)):
        if m.due[at] < NEVER:
            m.due[at] += shift
    grow_totals(m, old, times)


@inline
def move_flags(p: Program, m: EngineState, s: Snapshots, c: int, old: Ints, shift: int, times: int) -> None:
    """Move the times of a counter that are still to be noticed, and all to their new counts."""
    endpoints, mask = len(p.endpoint), m.visible.shape[1] - 1
    member, peer, floor = c // endpoints, c % endpoints, NEVER
    for at in range(len(p.pair)):
        if p.pair[at].peer == peer:
            owner = member * len(p.queue) + p.endpoint[p.pair[at].own].owner
            floor = min(floor, s.engine_floor[owner])
    count = old[len(m.engine) * ENGINE_TOTALS + 2 * m.stack.size + 2 * c]
    turn = times * (m.counter[c].count - count)
    for at in range(mask + 1):
        time = m.visible[c, at]
        s.scratch[(at + turn) & mask] = time + shift if time > floor else time
    for at in range(mask + 1):
        m.visible[c, at] = s.scratch[at]


@inline
def move_engine(p: Program, m: EngineState, s: Snapshots, e: int, old: Ints, shift: int) -> None:
    """Move the times of an engine and of its queue."""
    depth, at, clock = p.queue[e % len(p.queue)].depth, m.engine[e].head, dispatcher_of(p, e)
    worked = m.engine[e].done != old[e * ENGINE_TOTALS + DONE]
    clock = s.issue_floor[clock]
    next_entry = m.entry[e, at].time if m.engine[e].length else clock
    is_idle = m.engine[e].op == NOTHING and not worked and m.engine[e].free <= next_entry
    if not is_idle:
        m.engine[e].free += shift
    if worked:
        m.engine[e].end += shift
    if m.engine[e].op != NOTHING:
        m.engine[e].ready += shift
        m.engine[e].begun += shift
    for place in range(depth):
        if place < m.engine[e].length or m.entry[e, at].time > clock:
            m.entry[e, at].time += shift
        at = at + 1 if at + 1 < depth else 0


@inline
def look_back(p: Program, m: EngineState, s: Snapshots) -> int:
    """Take a snapshot; if it repeats an earlier one, jump. Return the cycles skipped."""
    level = m.size[CROSSED]
    m.size[CROSSED] = 0
    kept = len(s.length) // len(s.taken)
    slot = level * kept + s.taken[level] % kept
    s.taken[level] += 1
    moment, words = issue_floor(p, m, m.size[MASTER]), s.words[slot]
    length = note_state(p, m, s, moment, words)
    s.length[slot], s.moment[slot] = length, moment
    s.digest[slot] = digest = digest_of(words, length)
    note_totals(m, s.totals[slot])
    for other in range(len(s.length)):
        if other == slot or s.digest[other] != digest or s.length[other] != length:
            continue
        elapsed = moment - s.moment[other]
        if elapsed <= 0 or not is_same(words, s.words[other], length):
            continue
        times = periods_left(m, s.totals[other], elapsed)
        if times > 0:
            jump(p, m, s, s.totals[other], times * elapsed, times)
            return times * elapsed
    return 0


@inline
def digest_of(words: Ints, length: int) -> int:
    """Return a hash of a snapshot."""
    digest = length
    for at in range(length):
        digest = (digest ^ words[at]) * PRIME
    return digest


@inline
def is_same(a: Ints, b: Ints, length: int) -> bool:
    """Return whether two snapshots agree word for word."""
    for at in range(length):  # noqa: SIM110 - numba compiles no generators here
        if a[at] != b[at]:
            return False
    return True


@kernel
def run_steady(p: Program, m: EngineState, s: Snapshots, start: int) -> None:
    """Run until nobody can go on any more, skipping what repeats."""
    now = advance(p, m, start)
    while m.size[CROSSED]:
        now = advance(p, m, now + look_back(p, m, s))
