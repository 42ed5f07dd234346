"""The run-to-block engine: each queue runs ahead until a flag, an instruction or a link holds it up.

Only transfers on shared links need to happen in order of time.  Everything else is a maximum of
times that are known: an engine goes through its queue at once, up to the first operation whose
flag has not been set, and a scalar unit issues up to the first queue without room.  An operation
with transfers that begins later is an event; so is the end of the next transfer on each link.
Within a tick the order is of no consequence (``npusim.timing.link``).
"""

from __future__ import annotations

from npusim.timing.block_jit import inline, kernel
from npusim.timing.block_machine import (
    BACKGROUND,
    CALL,
    CROSSED,
    END,
    EVENTS,
    FLAG_LATENCY,
    FLOWS,
    FRACTION_BITS,
    ISSUE,
    LAG,
    LATENCY,
    LOOP,
    MASTER,
    NEVER,
    OCCUPANCY,
    OP,
    PERIOD,
    QUEUE,
    RATE,
    RET,
    SETS,
    SPANS,
    TODO,
    UNIT,
    WAITS,
    Ints,
    Machine,
    Program,
)

#: An operation on an engine, and what a dispatcher fetches at its end.
NOTHING = -1
HALTED = -2


# ---------------------------------------------------------------- scalar units


@inline
def fetch(p: Program, m: Machine, d: int) -> int:
    """Return the next operation of dispatcher ``d``, or ``HALTED``."""
    pc, level = m.pc[d], m.level[d]
    while True:
        kind, argument = p.code[pc, 0], p.code[pc, 1]
        pc += 1
        if kind == OP:
            break
        if kind == LOOP:
            m.stack_pc[d, level] = pc
            m.stack_left[d, level] = argument - 1
            m.stack_entry[d, level] += 1
            level += 1
        elif kind == END:
            if d == m.size[MASTER]:
                m.size[CROSSED] = level if m.size[CROSSED] == 0 else min(m.size[CROSSED], level)
            if m.stack_left[d, level - 1] > 0:
                m.stack_left[d, level - 1] -= 1
                pc = m.stack_pc[d, level - 1]
            else:
                level -= 1
        elif kind == CALL:
            m.stack_pc[d, level] = pc
            m.stack_left[d, level] = 0
            m.stack_entry[d, level] += 1
            level += 1
            pc = p.entry[argument, d % p.entry.shape[1]]
        elif kind == RET:
            level -= 1
            pc = m.stack_pc[d, level]
        else:
            pc -= 1
            argument = HALTED
            break
    m.pc[d], m.level[d] = pc, level
    return argument


@inline
def issue(p: Program, m: Machine, d: int) -> None:
    """Issue until a queue is full or the code ends."""
    first = d // p.entry.shape[1] * len(p.depth)
    clock, op = m.clock[d], m.pending[d]
    while True:
        if op == NOTHING:
            op = fetch(p, m, d)
            if op == HALTED:
                break
            clock += p.op[op, ISSUE]
        queue = p.op[op, QUEUE]
        e = first + queue
        if m.length[e] == p.depth[queue]:
            m.blocked[e] = d
            break
        slot = m.head[e] + m.length[e]
        if slot >= p.depth[queue]:
            slot -= p.depth[queue]
        clock = max(clock, m.entry_time[e, slot])
        m.entry_time[e, slot] = clock
        m.entry_op[e, slot] = op
        m.length[e] += 1
        if m.now_op[e] == NOTHING:
            remember(m, e)
        op = NOTHING
    m.clock[d], m.pending[d] = clock, op


@inline
def remember(m: Machine, who: int) -> None:
    """Put an engine or dispatcher on the stack of those to look at."""
    if not m.is_todo[who]:
        m.is_todo[who] = 1
        m.todo[m.size[TODO]] = who
        m.size[TODO] += 1


# ---------------------------------------------------------------- engines


@inline
def work(p: Program, m: Machine, e: int, now: int) -> None:
    """Take operations until one waits for a flag or a link, or none is left."""
    if m.wait_at[e] == NOTHING and m.now_op[e] != NOTHING:
        return
    while True:
        if m.now_op[e] == NOTHING:
            if m.length[e] == 0:
                return
            take(p, m, e)
        if not flags_seen(p, m, e):
            return
        op, begin = m.now_op[e], m.ready[e]
        m.wait_at[e] = NOTHING
        m.begun[e] = begin
        if p.op[op, FLOWS] != p.op[op + 1, FLOWS]:
            if begin <= now:
                join(p, m, e)
            else:
                push_event(m, begin, e)
            return
        complete(p, m, e, begin + p.op[op, OCCUPANCY])


@inline
def take(p: Program, m: Machine, e: int) -> None:
    """Take the oldest entry of the queue; its place is free from that moment."""
    head = m.head[e]
    op = m.entry_op[e, head]
    taken = max(m.entry_time[e, head], m.free[e])
    m.idle[e] += taken - m.free[e]
    m.entry_time[e, head] = taken
    m.head[e] = head + 1 if head + 1 < p.depth[p.op[op, QUEUE]] else 0
    m.length[e] -= 1
    if m.blocked[e] >= 0:
        remember(m, len(m.now_op) + m.blocked[e])
        m.blocked[e] = NOTHING
    m.now_op[e] = op
    m.wait_at[e] = p.op[op, WAITS]
    m.ready[e] = taken


@inline
def flags_seen(p: Program, m: Machine, e: int) -> bool:
    """Go through the waits; return False, as a waiter, if a flag has yet to be set.

    An endpoint's own counter stands at the generation it works on, since only its engine sets it.
    """
    op = m.now_op[e]
    first = e // len(p.depth) * len(p.endpoint)
    at, end, ready = m.wait_at[e], p.op[op + 1, WAITS], m.ready[e]
    while at < end:
        own, peer = p.wait[at, 0], first + p.wait[at, 1]
        need = m.count[first + own] + p.endpoint[own, LAG]
        if need > 0:
            period = p.endpoint[own, PERIOD]
            if period != 1:
                need = -(-need // period) * period
            if m.count[peer] < need:
                m.next_waiter[e] = m.waiter[peer]
                m.waiter[peer] = e
                m.wait_at[e], m.ready[e] = at, ready
                return False
            seen = m.visible[peer, need & (m.visible.shape[1] - 1)]
            if seen > ready:
                m.stalled[first + own] += seen - ready
                ready = seen
        at += 1
    m.ready[e] = ready
    return True


@inline
def complete(p: Program, m: Machine, e: int, end: int) -> None:
    """Book the operation and hand on its slots."""
    op = m.now_op[e]
    member = e // len(p.depth)
    m.now_op[e] = NOTHING
    m.busy[e] += end - m.begun[e]
    m.done[e] += 1
    m.free[e] = end
    m.ran[op] += p.weight[member]
    if p.is_traced[member]:
        at = m.size[SPANS]
        m.span[at, 0], m.span[at, 1] = e, op
        m.span[at, 2], m.span[at, 3] = m.begun[e], end  # its columns
        m.size[SPANS] += 1
    result = end + p.op[op, LATENCY]
    m.end[e] = max(m.end[e], result)
    for at in range(p.op[op, SETS], p.op[op + 1, SETS]):
        own = p.set[at]
        counter = member * len(p.endpoint) + own
        count = m.count[counter] + 1
        m.count[counter] = count
        m.visible[counter, count & (m.visible.shape[1] - 1)] = result + p.endpoint[own, FLAG_LATENCY]
        waiter = m.waiter[counter]
        m.waiter[counter] = NOTHING
        while waiter != NOTHING:
            remember(m, waiter)
            following = m.next_waiter[waiter]
            m.next_waiter[waiter] = NOTHING
            waiter = following


# ---------------------------------------------------------------- links


@inline
def join(p: Program, m: Machine, e: int) -> None:
    """Start the transfers of the operation that engine ``e`` begins now."""
    op, begin = m.now_op[e], m.begun[e]
    weight = p.weight[e // len(p.depth)]
    m.flying[e] = p.op[op + 1, FLOWS] - p.op[op, FLOWS]
    for at in range(p.op[op, FLOWS], p.op[op + 1, FLOWS]):
        link, size = p.flow[at, 0], p.flow[at, 1]
        serve(p, m, link, begin)
        m.load[link] += weight * p.link[link, UNIT]
        m.link_bytes[link] += weight * size
        push(m.flow_target[link], m.flow_engine[link], m.flow_count[link],
             m.clock_units[link] + (size << FRACTION_BITS), e)  # fmt: skip
        m.flow_count[link] += 1
        m.due[link] = begin  # looked at again before time goes on


@inline
def serve(p: Program, m: Machine, link: int, now: int) -> None:
    """Move a link's clock on to ``now``."""
    if now > m.updated[link]:
        if m.load[link]:
            elapsed = now - m.updated[link]
            m.clock_units[link] += elapsed * p.link[link, RATE] // m.load[link]
            m.flow_cycles[link] += elapsed * m.flow_count[link]
        m.updated[link] = now


@inline
def settle(p: Program, m: Machine, link: int, now: int) -> None:
    """End the transfers that are through at ``now`` and find when the next one will be."""
    targets, engines = m.flow_target[link], m.flow_engine[link]
    flows = m.flow_count[link]
    if flows == 0:
        m.due[link] = NEVER
        return
    serve(p, m, link, now)
    while flows and targets[0] <= m.clock_units[link]:
        e = engines[0]
        flows -= 1
        pop(targets, engines, flows)
        m.load[link] -= p.weight[e // len(p.depth)] * p.link[link, UNIT]
        m.flying[e] -= 1
        if m.flying[e] == 0:
            complete(p, m, e, max(now, m.begun[e] + p.op[m.now_op[e], OCCUPANCY]))
            remember(m, e)
    m.flow_count[link] = flows
    if flows == 0:
        m.load[link] = p.link[link, BACKGROUND]
        m.clock_units[link] = 0
        m.due[link] = NEVER
        return
    rest = (targets[0] - m.clock_units[link]) * m.load[link]
    m.due[link] = now - (-rest // p.link[link, RATE])


# ---------------------------------------------------------------- heaps


@inline
def push(keys: Ints, items: Ints, size: int, key: int, item: int) -> None:
    """Add to a heap of ``size`` that has its least key first."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if keys[above] <= key:
            break
        keys[at], items[at] = keys[above], items[above]
        at = above
    keys[at], items[at] = key, item


@inline
def pop(keys: Ints, items: Ints, size: int) -> None:
    """Take the first off a heap that has ``size`` left after that."""
    key, item, at = keys[size], items[size], 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and keys[below + 1] < keys[below]:
            below += 1
        if keys[below] >= key:
            break
        keys[at], items[at] = keys[below], items[below]
        at = below
    keys[at], items[at] = key, item


@inline
def push_event(m: Machine, time: int, e: int) -> None:
    """Let engine ``e`` begin its operation's transfers at ``time``."""
    push(m.event_time, m.event_engine, m.size[EVENTS], time, e)
    m.size[EVENTS] += 1


# ---------------------------------------------------------------- the run


@inline
def run_ahead(p: Program, m: Machine, now: int) -> None:
    """Let everybody go on who can, ``now`` being the time up to which links are in order."""
    engines = len(m.now_op)
    while m.size[TODO] and not m.size[CROSSED]:
        m.size[TODO] -= 1
        who = m.todo[m.size[TODO]]
        m.is_todo[who] = 0
        if who < engines:
            work(p, m, who, now)
        else:
            issue(p, m, who - engines)


@inline
def next_event(m: Machine) -> int:
    """Return the time of the next event, or ``NEVER``."""
    now = m.event_time[0] if m.size[EVENTS] else NEVER
    for link in range(len(m.due)):
        now = min(now, m.due[link])
    return now


@inline
def happen(p: Program, m: Machine, now: int) -> None:
    """Begin and end the transfers of this tick."""
    while m.size[EVENTS] and m.event_time[0] == now:
        e = m.event_engine[0]
        m.size[EVENTS] -= 1
        pop(m.event_time, m.event_engine, m.size[EVENTS])
        join(p, m, e)
    for link in range(len(m.due)):
        if m.due[link] == now:
            settle(p, m, link, now)


@kernel
def run(p: Program, m: Machine, start: int) -> None:
    """Run until nothing can go on any more."""
    m.size[MASTER] = NOTHING
    now = start
    run_ahead(p, m, now)
    while True:
        now = next_event(m)
        if now == NEVER:
            return
        happen(p, m, now)
        run_ahead(p, m, now)
