"""Skipping repetitions: snapshots of the joint state at iterations of loops, and jumps by whole periods.

A snapshot contains everything that can affect the future, with times relative to the snapshot: the positions of engines
and scalar units, entries of queues, the flags that can still be awaited, and transfers in flight.  A time without a
possible effect (a flag that is already visible, a place that is already free) counts as the earliest time at which it
can be awaited. Remaining iterations are stored separately: if two snapshots differ only in these, and no loop ended in
between, the events between them repeat as long as the loops last.  All totals then grow by their increments, and all
times advance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npusim.formats.jit import inline, kernel
from npusim.program.timing.engine_arrays import (
    CROSSED,
    EVENTS,
    HALTED,
    MOMENT,
    NEVER,
    NOTHING,
    REQUESTS,
    WATCHED,
    EngineState,
    Ints,
    Program,
    Records,
    indices_of,
    memory_of,
)
from npusim.program.timing.engine_kernel import advance

#: Number of stored snapshots for each level of loops.  A joint period of more iterations is not detected.
KEPT = 16
#: Totals that are compared: the ends of every engine's operation and of its result, and its completed operations;
#: entries of every level of loops, and iterations left there; counts of flags; operations of shared pipes.
TOTALS = 7
FREE, LAST, DONE, ENTERED, LEFT, COUNTS, PIPES_DONE = range(TOTALS)
#: Multiplier of the hash of 64-bit words (Fowler-Noll-Vo, FNV-1 64-bit prime).
PRIME = 0x100000001B3


class Snapshots(NamedTuple):
    """The latest snapshots of each level of loops; slot ``level * kept + n``.

    ``total`` holds indices into the ``memory`` of the state: numbers that a snapshot stores without an effect on the
    future.  ``at`` has the first index of each of ``TOTALS``; the first two are times. The others, and the numbers
    after them, are counts that grow from period to period.
    """

    words: Ints  #: (slots, words)
    length: Ints
    digest: Ints
    moment: Ints
    totals: Ints  #: (slots, totals)
    taken: Ints  #: number of snapshots of each level, over the whole run
    scratch: Ints  #: (history,)
    engine_floor: Ints
    issue_floor: Ints
    memory: Ints
    total: Ints
    at: Ints


#: For runs in which no loop is watched.
UNUSED = Snapshots(*(np.zeros((0, 0) if n in {"words", "totals"} else 0, np.int64) for n in Snapshots._fields))


def build_snapshots(program: Program, state: EngineState) -> Snapshots:
    """Return space for the snapshots of one run."""
    levels, history = state.stack.shape[1] + 1, state.visible.shape[1]
    slots, engines = levels * KEPT, len(state.engine)
    # Largest number of words that ``note_state`` writes: 7 words and 2 per entry for an engine, 4 and 2 per level for a
    # scalar unit, 3 and every stored count for a pair, 3 and 2 per transfer for a link, 3 and 2 per queue for work.
    words = (
        engines * (7 + 2 * state.entry.shape[1])
        + len(state.dispatcher) * (4 + 2 * levels)
        + len(program.member) * (len(program.pair) * (3 + history) + len(program.pipe))
        + len(program.link) * (3 + 2 * engines)
        + len(state.core) * 3
        + 2 * engines
    )
    at = indices_of(state)
    totals = [at.engine[name] for name in ("free", "end", "done")]
    totals += [at.stack["entry"], at.stack["left"], at.counter["count"], at.pipe["done"]]
    booked = [at.engine[name] for name in ("busy", "idle", "waited")]
    booked += [at.counter["stalled"], at.link["bytes"], at.link["flow_cycles"], at.ran, at.pipe["busy"]]
    total = np.concatenate([indices.ravel() for indices in (*totals, *booked)])

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return Snapshots(
        words=np.empty((slots, words), np.int64),
        length=zeros(slots),
        digest=zeros(slots),
        moment=zeros(slots),
        totals=np.empty((slots, len(total)), np.int64),
        taken=zeros(levels),
        scratch=zeros(history),
        engine_floor=zeros(engines),
        issue_floor=zeros(len(state.dispatcher)),
        memory=memory_of(state),
        total=total,
        at=np.cumsum([0, *(indices.size for indices in totals[:-1])]),
    )


# ---------------------------------------------------------------- earliest times: before them nothing is noticed


@inline
def issue_floor(p: Program, m: EngineState, d: int) -> int:
    """Return the earliest time at which dispatcher ``d`` may issue again."""
    op, clock = m.dispatcher[d].pending, m.dispatcher[d].clock
    if op < 0:
        return clock
    e = d // p.entry.shape[1] * len(p.queue) + p.op[op].queue
    if m.engine[e].blocked != d:
        return clock
    return max(clock, busy_floor(m, e))


@inline
def busy_floor(m: EngineState, e: int) -> int:
    """Return the earliest time at which engine ``e``, which has work, may continue."""
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
    """Return whether engine ``e`` is idle at present."""
    return m.engine[e].op == NOTHING and m.engine[e].length == 0


@inline
def is_over(p: Program, m: EngineState, e: int) -> bool:
    """Return whether engine ``e`` has no more work in this phase."""
    return is_empty(m, e) and m.dispatcher[dispatcher_of(p, e)].pending == HALTED


@inline
def note_floors(p: Program, m: EngineState, s: Snapshots) -> None:
    """Compute the earliest times at which every engine and dispatcher may look at flags or issue; ``NEVER``: it has
    ended.
    """
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


# ---------------------------------------------------------------- snapshots


@inline
def note_engine(p: Program, m: EngineState, s: Snapshots, e: int, moment: int, out: Ints, start: int) -> int:
    """Write engine ``e`` and its queue; return the index of the next word."""
    n = start
    out[n], out[n + 1], out[n + 2] = m.engine[e].op, m.engine[e].length, m.engine[e].blocked
    n += 3  # words written
    floor, clock = s.engine_floor[e], s.issue_floor[dispatcher_of(p, e)]
    if floor == NEVER:
        return n
    if not is_empty(m, e):
        out[n], out[n + 1] = m.engine[e].wait_at, m.engine[e].in_flight
        n += 2
    out[n], out[n + 1] = floor - moment, max(m.engine[e].end - floor, 0)
    n += 2
    depth, slot = p.queue[e % len(p.queue)].depth, m.engine[e].head
    for position in range(depth):
        time = m.entry[e, slot].time
        if position < m.engine[e].length:
            out[n], out[n + 1] = m.entry[e, slot].op, max(time - floor, 0)
            n += 2
        elif time > clock:
            out[n], out[n + 1] = -position, time - clock
            n += 2
        slot = slot + 1 if slot + 1 < depth else 0
    return n


@inline
def note_pair(p: Program, m: EngineState, s: Snapshots, member: int, at: int, out: Ints, start: int) -> int:
    """Write the distance of two endpoints, and the flags of one endpoint for which the other may still wait."""
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
    """Write the position of dispatcher ``d``, but not its number of remaining iterations."""
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
    """Write the times for which the pipes of a member are occupied beyond the next possible request."""
    first, floor = member * len(p.queue), NEVER
    for e in range(first, first + len(p.queue)):
        floor = min(floor, s.engine_floor[e])
    for pipe in range(len(p.pipe)):
        out[start + pipe] = max(m.pipe[member, pipe].free - floor, 0)
    return start + len(p.pipe)


@inline
def note_link(p: Program, m: EngineState, link: int, moment: int, out: Ints, start: int) -> int:
    """Write the transfers in flight, and the idle cycles to be recovered."""
    flows: int = m.link[link].flows
    out[start] = flows
    idle, elapsed = m.link[link].idle, moment - m.link[link].updated
    if flows == 0:
        out[start + 1] = idle if idle < 0 else min(idle + elapsed, p.link[link].idle)
        return start + 2
    n = start + 1
    out[n], out[n + 1] = idle, elapsed
    return note_heap(m.transfer[link], flows, m.link[link].units, out, n + 2)


@inline
def note_core(m: EngineState, member: int, moment: int, out: Ints, start: int) -> int:
    """Write the current work on a core."""
    arithmetic, product = m.server[2 * member], m.server[2 * member + 1]
    out[start], out[start + 1], n = arithmetic.count, product.count, start + 2
    if arithmetic.count + product.count == 0:
        return n
    out[n] = m.core[member].updated - moment
    n = note_heap(m.work[2 * member], arithmetic.count, arithmetic.units, out, n + 1)
    return note_heap(m.work[2 * member + 1], product.count, product.units, out, n)


@inline
def note_heap(heap: Records, size: int, units: int, out: Ints, start: int) -> int:
    """Write, for each entry of a heap, its remaining time and its engine, in the order of their ends."""
    for i in range(size):
        rest, e = heap[i].key - units, heap[i].engine
        at = start + 2 * i
        while at > start and (out[at - 2] > rest or (out[at - 2] == rest and out[at - 1] > e)):
            out[at], out[at + 1] = out[at - 2], out[at - 1]
            at -= 2
        out[at], out[at + 1] = rest, e
    return start + 2 * size


@inline
def note_state(p: Program, m: EngineState, s: Snapshots, moment: int, out: Ints) -> int:
    """Write the joint state; return the number of words."""
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
    for member in range(len(m.core)):
        n = note_core(m, member, moment, out, n)
    for link in range(len(m.link)):
        n = note_link(p, m, link, moment, out, n)
    return n


# ---------------------------------------------------------------- totals


@inline
def note_totals(s: Snapshots, out: Ints) -> None:
    """Write the totals, which do not affect the future, and the remaining iterations."""
    for n in range(len(s.total)):
        out[n] = s.memory[s.total[n]]


@inline
def grow_totals(s: Snapshots, old: Ints, times: int) -> None:
    """Add ``times`` the growth of the totals since ``old``, except for times of engines."""
    for n in range(s.at[DONE], len(s.total)):
        s.memory[s.total[n]] += times * (s.memory[s.total[n]] - old[n])


# ---------------------------------------------------------------- periods


@inline
def periods_left(m: EngineState, s: Snapshots, old: Ints, elapsed: int) -> int:
    """Return the smallest number of further repetitions of the period since a snapshot of equal state."""
    times = NEVER
    for d in range(len(m.dispatcher)):
        levels = 0 if m.dispatcher[d].pending == HALTED else m.dispatcher[d].level
        for level in range(levels):
            at = d * m.stack.shape[1] + level
            fewer = old[s.at[LEFT] + at] - m.stack[d, level].left
            if fewer:
                if fewer < 0 or old[s.at[ENTERED] + at] != m.stack[d, level].entry:
                    return 0
                times = min(times, m.stack[d, level].left // fewer)
    if times == NEVER:
        return 0
    for e in range(len(m.engine)):
        engine = m.engine[e]
        if engine.done == old[s.at[DONE] + e]:
            continue
        if engine.end - old[s.at[LAST] + e] != elapsed:
            return 0
        if engine.op == NOTHING and engine.free - old[s.at[FREE] + e] != elapsed:
            return 0
    return times


@inline
def jump(p: Program, m: EngineState, s: Snapshots, old: Ints, shift: int, times: int) -> None:
    """Advance the state by ``times`` periods, ``shift`` cycles in total.

    Times without a possible effect stay unchanged, as do times of engines that have ended.
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
    at = s.at[PIPES_DONE]
    for member in range(m.pipe.shape[0]):
        for pipe in range(m.pipe.shape[1]):
            if m.pipe[member, pipe].done != old[at]:
                m.pipe[member, pipe].free += shift
            at += 1
    for link in range(len(m.link)):
        m.link[link].updated += shift
        if m.link[link].flows:
            m.link[link].due += shift
    for member in range(len(m.core)):
        m.core[member].updated += shift
    for at in range(1, len(m.due)):
        if m.due[at] < NEVER:
            m.due[at] += shift
    grow_totals(s, old, times)


@inline
def move_flags(p: Program, m: EngineState, s: Snapshots, c: int, old: Ints, shift: int, times: int) -> None:
    """Advance the times of a counter that can still be noticed, and store all of them under their new counts."""
    endpoints, mask = len(p.endpoint), m.visible.shape[1] - 1
    member, peer, floor = c // endpoints, c % endpoints, NEVER
    for at in range(len(p.pair)):
        if p.pair[at].peer == peer:
            owner = member * len(p.queue) + p.endpoint[p.pair[at].own].owner
            floor = min(floor, s.engine_floor[owner])
    count = old[s.at[COUNTS] + c]
    turn = times * (m.counter[c].count - count)
    for at in range(mask + 1):
        time = m.visible[c, at]
        s.scratch[(at + turn) & mask] = time + shift if time > floor else time
    for at in range(mask + 1):
        m.visible[c, at] = s.scratch[at]


@inline
def move_engine(p: Program, m: EngineState, s: Snapshots, e: int, old: Ints, shift: int) -> None:
    """Advance the times of an engine and of its queue."""
    depth, at, clock = p.queue[e % len(p.queue)].depth, m.engine[e].head, dispatcher_of(p, e)
    worked = m.engine[e].done != old[s.at[DONE] + e]
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
    for position in range(depth):
        if position < m.engine[e].length or m.entry[e, at].time > clock:
            m.entry[e, at].time += shift
        at = at + 1 if at + 1 < depth else 0


@inline
def look_back(p: Program, m: EngineState, s: Snapshots) -> int:
    """Take a snapshot; if it repeats an earlier one, jump. Return the number of skipped cycles."""
    level = m.size[CROSSED]
    m.size[CROSSED] = 0
    kept = len(s.length) // len(s.taken)
    slot = level * kept + s.taken[level] % kept
    s.taken[level] += 1
    moment, words = issue_floor(p, m, m.size[WATCHED]), s.words[slot]
    length = note_state(p, m, s, moment, words)
    s.length[slot], s.moment[slot] = length, moment
    s.digest[slot] = digest = digest_of(words, length)
    note_totals(s, s.totals[slot])
    for other in range(len(s.length)):
        if other == slot or s.digest[other] != digest or s.length[other] != length:
            continue
        elapsed = moment - s.moment[other]
        if elapsed <= 0 or not is_same(words, s.words[other], length):
            continue
        times = periods_left(m, s, s.totals[other], elapsed)
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
    for at in range(length):  # noqa: SIM110 - kernels have no generators
        if a[at] != b[at]:
            return False
    return True


@kernel
def run_engine(p: Program, m: EngineState, s: Snapshots, start: int) -> int:
    """Run until no engine can proceed, with repetitions skipped; return the time of the last event.

    If an engine leads, its ``TARGET`` ends the run too: ``CROSSED`` is set, and slot 0 contains the state.
    """
    now = advance(p, m, start)
    while m.size[CROSSED] and m.size[WATCHED] >= 0:
        now = advance(p, m, now + look_back(p, m, s))
    if m.size[CROSSED]:
        s.length[0] = note_state(p, m, s, m.size[MOMENT], s.words[0])
    return now
