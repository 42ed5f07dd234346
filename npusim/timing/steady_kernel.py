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

from npusim.timing.block_jit import inline, kernel
from npusim.timing.block_kernel import HALTED, NOTHING, happen, next_event, run_ahead
from npusim.timing.block_machine import (
    CROSSED,
    EVENTS,
    LAG,
    MASTER,
    NEVER,
    OWNER,
    PERIOD,
    QUEUE,
    Ints,
    Machine,
    Program,
)

#: Multiplier of the hash of 64-bit words (Fowler-Noll-Vo, FNV-1 64-bit prime).
PRIME = 0x100000001B3


class Snapshots(NamedTuple):
    """The latest snapshots of each level of loops; slot ``level * kept + n``."""

    words: Ints  #: (slots, words)
    length: Ints
    digest: Ints
    moment: Ints
    totals: Ints  #: (slots, totals)
    taken: Ints  #: of each level, ever
    scratch: Ints  #: (history,)
    is_stale: Ints  #: of each engine: idle since before anything can notice
    counts: Ints  #: (2,): jumps, cycles skipped


# ---------------------------------------------------------------- earliest moments


@inline
def issue_floor(p: Program, m: Machine, d: int) -> int:
    """Return the earliest moment at which dispatcher ``d`` may issue again."""
    op = m.pending[d]
    if op < 0:
        return m.clock[d]
    e = d // p.entry.shape[1] * len(p.depth) + p.op[op, QUEUE]
    if m.blocked[e] != d:
        return m.clock[d]
    return max(m.clock[d], busy_floor(m, e))


@inline
def busy_floor(m: Machine, e: int) -> int:
    """Return the earliest moment at which engine ``e``, which has work, may go on."""
    if m.now_op[e] == NOTHING:
        return max(m.free[e], m.entry_time[e, m.head[e]])
    return m.ready[e] if m.wait_at[e] != NOTHING else m.begun[e]


@inline
def dispatcher_of(p: Program, e: int) -> int:
    """Return the dispatcher that fills the queue of engine ``e``."""
    queues = len(p.depth)
    return e // queues * p.entry.shape[1] + p.issuer[e % queues]


@inline
def engine_floor(p: Program, m: Machine, e: int) -> int:
    """Return the earliest moment at which engine ``e`` may look at a flag again."""
    if m.now_op[e] == NOTHING and m.length[e] == 0:
        return max(m.free[e], issue_floor(p, m, dispatcher_of(p, e)))
    return busy_floor(m, e)


# ---------------------------------------------------------------- snapshots


@inline
def note_engine(p: Program, m: Machine, e: int, moment: int, out: Ints, n: int) -> int:
    """Write down engine ``e`` and its queue; return the number of words so far."""
    d = dispatcher_of(p, e)
    out[n], out[n + 1], out[n + 2] = m.now_op[e], m.length[e], m.blocked[e]
    n += 3  # words written
    is_empty = m.now_op[e] == NOTHING and m.length[e] == 0
    if is_empty and m.pending[d] == HALTED:
        return n
    clock = issue_floor(p, m, d)
    if is_empty:
        floor = max(m.free[e], clock)
    else:
        floor = busy_floor(m, e)
        out[n], out[n + 1] = m.wait_at[e], m.flying[e]
        n += 2
    out[n] = floor - moment
    n += 1
    depth, slot = p.depth[e % len(p.depth)], m.head[e]
    for place in range(depth):
        time = m.entry_time[e, slot]
        if place < m.length[e]:
            out[n], out[n + 1] = m.entry_op[e, slot], max(time - floor, 0)
            n += 2
        elif time > clock:
            out[n], out[n + 1] = -place, time - clock
            n += 2
        slot = slot + 1 if slot + 1 < depth else 0
    return n


@inline
def note_pair(p: Program, m: Machine, member: int, at: int, out: Ints, n: int) -> int:
    """Write down how far apart two endpoints are, and the flags one may yet ask of the other."""
    own, peer = p.pair[at, 0], p.pair[at, 1]
    first = member * len(p.endpoint)
    need, period = m.count[first + own] + p.endpoint[own, LAG], p.endpoint[own, PERIOD]
    out[n] = min(need, 1)
    n += 1
    need = max(need, 1)
    if period != 1:
        out[n] = need % period
        n += 1
        need = -(-need // period) * period
    floor = engine_floor(p, m, member * len(p.depth) + p.endpoint[own, OWNER])
    out[n] = m.count[first + peer] - need
    n += 1
    for count in range(need, m.count[first + peer] + 1):
        out[n] = max(m.visible[first + peer, count & (m.visible.shape[1] - 1)] - floor, 0)
        n += 1
    return n


@inline
def note_dispatcher(p: Program, m: Machine, d: int, moment: int, out: Ints, n: int) -> int:
    """Write down where dispatcher ``d`` stands, without the iterations left."""
    out[n] = m.pending[d]
    n += 1
    if m.pending[d] == HALTED:
        return n
    out[n], out[n + 1], out[n + 2] = m.pc[d], m.level[d], issue_floor(p, m, d) - moment
    n += 3  # words written
    for level in range(m.level[d]):
        out[n] = m.stack_pc[d, level]
        n += 1
    return n


@inline
def note_link(m: Machine, link: int, moment: int, out: Ints, n: int) -> int:
    """Write down the transfers in flight, in the order in which they will end."""
    flows = m.flow_count[link]
    out[n] = flows
    n += 1
    if flows == 0:
        return n
    out[n] = m.updated[link] - moment
    n += 1
    for i in range(flows):
        rest, e = m.flow_target[link, i] - m.clock_units[link], m.flow_engine[link, i]
        at = n + 2 * i
        while at > n and (out[at - 2] > rest or (out[at - 2] == rest and out[at - 1] > e)):
            out[at], out[at + 1] = out[at - 2], out[at - 1]
            at -= 2
        out[at], out[at + 1] = rest, e
    return n + 2 * flows


@inline
def note_all(p: Program, m: Machine, moment: int, out: Ints) -> int:
    """Write down the joint state; return the number of words."""
    n = 0
    for e in range(len(m.now_op)):
        n = note_engine(p, m, e, moment, out, n)
    for d in range(len(m.clock)):
        n = note_dispatcher(p, m, d, moment, out, n)
    for member in range(len(p.weight)):
        for at in range(len(p.pair)):
            n = note_pair(p, m, member, at, out, n)
    for link in range(len(m.due)):
        n = note_link(m, link, moment, out, n)
    return n


# ---------------------------------------------------------------- periods


@inline
def periods_left(p: Program, m: Machine, s: Snapshots, slot: int, elapsed: int) -> int:
    """Return how often what happened since a snapshot of equal state will happen again at least."""
    engines, levels = len(m.now_op), m.stack_pc.shape[1]
    entry, left, done = 2 * engines, 2 * engines + m.stack_entry.size, done_at(m)
    old, times = s.totals[slot], NEVER
    for d in range(len(m.clock)):
        if m.pending[d] == HALTED:
            continue
        for level in range(m.level[d]):
            at = d * levels + level
            fewer = old[left + at] - m.stack_left[d, level]
            if fewer and old[entry + at] != m.stack_entry[d, level]:
                return 0
            if fewer < 0:
                return 0
            if fewer > 0:
                times = min(times, m.stack_left[d, level] // fewer)
    if times == NEVER:
        return 0
    for e in range(engines):
        if m.done[e] == old[done + e]:
            continue
        if m.end[e] - old[engines + e] != elapsed:
            return 0
        if m.now_op[e] == NOTHING and m.free[e] - old[e] != elapsed:
            return 0
    return times


@inline
def done_at(m: Machine) -> int:
    """Return where ``done`` begins in the totals."""
    return 2 * len(m.now_op) + 2 * m.stack_entry.size + len(m.count) + len(m.busy)


@inline
def jump(p: Program, m: Machine, s: Snapshots, slot: int, now: Ints, shift: int, times: int) -> None:
    """Move the machine on by ``times`` periods, ``shift`` cycles in all; ``now`` are its totals."""
    engines, old = len(m.now_op), s.totals[slot]
    mask = m.visible.shape[1] - 1
    first_count = 2 * engines + 2 * m.stack_entry.size
    for counter in range(len(m.count)):
        turn = times * (m.count[counter] - old[first_count + counter])
        for at in range(mask + 1):
            s.scratch[(at + turn) & mask] = m.visible[counter, at] + shift
        for at in range(mask + 1):
            m.visible[counter, at] = s.scratch[at]
    done = done_at(m)
    for e in range(engines):
        s.is_stale[e] = m.done[e] == old[done + e]
        if s.is_stale[e] and m.now_op[e] == NOTHING:
            s.is_stale[e] = m.free[e] <= idle_until(p, m, e)
    for e in range(engines):
        if m.done[e] != old[done + e]:
            m.end[e] += shift
        if not s.is_stale[e]:
            m.free[e] += shift
        m.ready[e] += shift
        m.begun[e] += shift
        for place in range(m.entry_time.shape[1]):
            m.entry_time[e, place] += shift
    for at in range(m.size[EVENTS]):
        m.event_time[at] += shift
    for d in range(len(m.clock)):
        m.clock[d] += shift
    for link in range(len(m.due)):
        m.updated[link] += shift
        if m.due[link] != NEVER:
            m.due[link] += shift
    for at in range(2 * engines, len(now)):
        now[at] += times * (now[at] - old[at])


@inline
def idle_until(p: Program, m: Machine, e: int) -> int:
    """Return the earliest moment at which an idle engine may take an operation."""
    if m.length[e]:
        return m.entry_time[e, m.head[e]]
    return issue_floor(p, m, dispatcher_of(p, e))


@inline
def look_back(p: Program, m: Machine, s: Snapshots, now: Ints) -> int:
    """Take a snapshot; if it repeats an earlier one, jump. Return the cycles skipped."""
    level = m.size[CROSSED]
    m.size[CROSSED] = 0
    kept = len(s.length) // len(s.taken)
    slot = level * kept + s.taken[level] % kept
    s.taken[level] += 1
    moment = issue_floor(p, m, m.size[MASTER])
    words = s.words[slot]
    length = note_all(p, m, moment, words)
    digest = length
    for at in range(length):
        digest = (digest ^ words[at]) * PRIME
    s.length[slot], s.digest[slot], s.moment[slot] = length, digest, moment
    for at in range(len(now)):
        s.totals[slot, at] = now[at]
    for other in range(len(s.length)):
        if other == slot or s.digest[other] != digest or s.length[other] != length:
            continue
        elapsed = moment - s.moment[other]
        if elapsed <= 0 or not same(words, s.words[other], length):
            continue
        times = periods_left(p, m, s, other, elapsed)
        if times > 0:
            jump(p, m, s, other, now, times * elapsed, times)
            s.counts[0] += 1
            s.counts[1] += times * elapsed
            return times * elapsed
    return 0


@inline
def same(a: Ints, b: Ints, length: int) -> bool:
    """Return whether two snapshots agree word for word."""
    for at in range(length):  # noqa: SIM110 - numba compiles no generators here
        if a[at] != b[at]:
            return False
    return True


@kernel
def run_steady(p: Program, m: Machine, s: Snapshots, now_totals: Ints, start: int) -> None:
    """Run until nothing can go on any more, skipping what repeats."""
    now = start
    while True:
        run_ahead(p, m, now)
        if m.size[CROSSED]:
            now += look_back(p, m, s, now_totals)
            continue
        now = next_event(m)
        if now == NEVER:
            return
        happen(p, m, now)
