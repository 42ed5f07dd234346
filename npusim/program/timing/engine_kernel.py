"""The compiled engine: each queue runs ahead until a flag, an instruction or a link stops it.

Only transfers on shared links must be processed in order of time.  Everything else is a maximum of known times: an
engine processes its queue immediately, up to the first operation whose flag has not been set, and a scalar unit issues
up to the first queue that is full.  An operation with transfers that begins later is an event; so is the end of the
next transfer on each link. Within a tick the order has no effect (``npusim.program.timing.link``); pipes with
first-come, first-served order are granted last.
"""

from __future__ import annotations

from npusim.formats.jit import inline
from npusim.program.timing.engine_arrays import (
    ASKING,
    CALL,
    CROSSED,
    END,
    EVENTS,
    FETCHED,
    HALTED,
    LEADER,
    LOOP,
    MOMENT,
    NEVER,
    NOTHING,
    OP,
    RANGE_BITS,
    REPEAT,
    REQUESTS,
    RET,
    SPANS,
    TARGET,
    TODO,
    WATCHED,
    WINDOW_AT,
    EngineState,
    Program,
    Records,
)
from npusim.program.timing.gpu_pipes import ONE_BITS
from npusim.program.timing.gpu_pipes import speeds as pipe_speeds
from npusim.program.timing.link import FRACTION_BITS

speeds = inline(pipe_speeds)

# ---------------------------------------------------------------- heaps of a key and an engine, smallest key first


@inline
def push(heap: Records, size: int, key: int, engine: int) -> None:
    """Add to a heap of ``size`` whose smallest key is first."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if heap[above].key <= key:
            break
        heap[at].key, heap[at].engine = heap[above].key, heap[above].engine
        at = above
    heap[at].key, heap[at].engine = key, engine


@inline
def pop(heap: Records, size: int) -> None:
    """Remove the first entry of a heap, which has ``size`` entries after that."""
    key, engine, at = heap[size].key, heap[size].engine, 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1].key < heap[below].key:
            below += 1
        if heap[below].key >= key:
            break
        heap[at].key, heap[at].engine = heap[below].key, heap[below].engine
        at = below
    heap[at].key, heap[at].engine = key, engine


# ---------------------------------------------------------------- scalar units


@inline
def fetch(p: Program, m: EngineState, d: int) -> int:
    """Return the next operation of dispatcher ``d``, or ``HALTED``."""
    pc, level = m.dispatcher[d].pc, m.dispatcher[d].level
    while True:
        kind, argument = p.code[pc].kind, p.code[pc].argument
        pc += 1
        if kind == OP:
            break
        if level == 0 and m.size[LEADER] >= 0:
            m.size[FETCHED] |= 1 << (pc - 1 - m.size[WINDOW_AT])
        if kind in (LOOP, REPEAT):
            if kind == REPEAT:
                argument = p.operand[m.stack[d, level - 1].operand + argument]
            enter(m, d, level, pc, 0, argument - 1)
            level += 1
        elif kind == END:
            if d == m.size[WATCHED]:
                m.size[CROSSED] = level if m.size[CROSSED] == 0 else min(m.size[CROSSED], level)
            if m.stack[d, level - 1].left > 0:
                m.stack[d, level - 1].left -= 1
                pc = m.stack[d, level - 1].pc
            else:
                level -= 1
        elif kind == CALL:
            enter(m, d, level, pc, p.code[pc - 1].operand, 0)
            level += 1
            pc = p.entry[argument, d % p.entry.shape[1]]
        elif kind == RET:
            level -= 1
            pc = m.stack[d, level].pc
        else:
            pc -= 1
            argument = HALTED
            break
    m.dispatcher[d].pc, m.dispatcher[d].level = pc, level
    return argument


@inline
def enter(m: EngineState, d: int, level: int, pc: int, operand: int, left: int) -> None:
    """Push a loop or a call."""
    m.stack[d, level].pc = pc
    m.stack[d, level].operand = operand
    m.stack[d, level].left = left
    m.stack[d, level].entry += 1


@inline
def issue(p: Program, m: EngineState, d: int) -> None:
    """Issue until a queue is full or the code ends."""
    first = d // p.entry.shape[1] * len(p.queue)
    clock, op = m.dispatcher[d].clock, m.dispatcher[d].pending
    while True:
        if op == NOTHING:
            op = fetch(p, m, d)
            if op == HALTED:
                break
            clock += p.op[op].issue
        queue = p.op[op].queue
        e, depth = first + queue, p.queue[queue].depth
        if m.engine[e].length == depth:
            m.engine[e].blocked = d
            break
        slot = m.engine[e].head + m.engine[e].length
        if slot >= depth:
            slot -= depth
        clock = max(clock, m.entry[e, slot].time)
        m.entry[e, slot].time = clock
        m.entry[e, slot].op = op
        m.engine[e].length += 1
        if m.engine[e].op == NOTHING:
            enqueue(m, e)
        op = NOTHING
    m.dispatcher[d].clock, m.dispatcher[d].pending = clock, op


@inline
def enqueue(m: EngineState, who: int) -> None:
    """Put an engine or dispatcher on the stack of work to process."""
    if not m.is_todo[who]:
        m.is_todo[who] = 1
        m.todo[m.size[TODO]] = who
        m.size[TODO] += 1


# ---------------------------------------------------------------- engines


@inline
def work(p: Program, m: EngineState, e: int, now: int) -> None:
    """Take operations until one waits for a flag or a link, or none is left."""
    if m.engine[e].wait_at == NOTHING and m.engine[e].op != NOTHING:
        return
    while True:
        if m.engine[e].op == NOTHING:
            if m.engine[e].length == 0:
                return
            take(p, m, e)
        if not pass_waits(p, m, e):
            return
        op, begin = m.engine[e].op, m.engine[e].ready
        m.engine[e].wait_at = NOTHING
        m.engine[e].begun = begin
        if p.op[op].kind < 0 and p.op[op].takes != p.op[op + 1].takes:
            m.engine[e].in_flight = ASKING
            push(m.request, m.size[REQUESTS], begin * len(m.engine) + e, e)
            m.size[REQUESTS] += 1
            return
        if p.op[op].kind >= 0 or p.op[op].flows != p.op[op + 1].flows:
            if begin <= now:
                begin_shared(p, m, e, now)
            else:
                push(m.event, m.size[EVENTS], begin, e)
                m.size[EVENTS] += 1
            return
        complete(p, m, e, begin + p.op[op].occupancy)
        if m.size[CROSSED]:
            enqueue(m, e)
            return


@inline
def take(p: Program, m: EngineState, e: int) -> None:
    """Remove the oldest entry of the queue; its place is free from that time on."""
    head = m.engine[e].head
    op = m.entry[e, head].op
    taken = max(m.entry[e, head].time, m.engine[e].free)
    m.engine[e].idle += taken - m.engine[e].free
    m.entry[e, head].time = taken
    m.engine[e].head = head + 1 if head + 1 < p.queue[p.op[op].queue].depth else 0
    m.engine[e].length -= 1
    if m.engine[e].blocked >= 0:
        enqueue(m, len(m.engine) + m.engine[e].blocked)
        m.engine[e].blocked = NOTHING
    m.engine[e].op = op
    m.engine[e].wait_at = p.op[op].waits
    m.engine[e].ready = taken


@inline
def pass_waits(p: Program, m: EngineState, e: int) -> bool:
    """Process the waits; return False, and register as a waiter, if a flag is not set yet.

    An endpoint's own counter equals its current generation, since only its engine sets it.
    """
    op = m.engine[e].op
    first = e // len(p.queue) * len(p.endpoint)
    at, end, ready = m.engine[e].wait_at, p.op[op + 1].waits, m.engine[e].ready
    while at < end:
        own, peer = p.wait[at].own, first + p.wait[at].peer
        need = m.counter[first + own].count + p.endpoint[own].lag
        if need > 0:
            period = p.endpoint[own].period
            if period != 1:
                need = -(-need // period) * period
            if m.counter[peer].count < need:
                m.engine[e].next_waiter = m.counter[peer].waiter
                m.counter[peer].waiter = e
                m.engine[e].wait_at, m.engine[e].ready = at, ready
                return False
            seen = m.visible[peer, need & (m.visible.shape[1] - 1)]
            if seen > ready:
                m.counter[first + own].stalled += seen - ready
                ready = seen
        at += 1
    m.engine[e].ready = ready
    return True


@inline
def complete(p: Program, m: EngineState, e: int, end: int) -> None:
    """Record the operation and pass on its slots."""
    op, member = m.engine[e].op, e // len(p.queue)
    m.engine[e].op = NOTHING
    m.engine[e].busy += end - m.engine[e].begun
    m.engine[e].done += 1
    m.engine[e].free = end
    m.ran[op] += p.member[member].weight
    if p.member[member].is_traced:
        keep_span(m, e, op, end)
    if e == m.size[LEADER] and m.engine[e].done == m.size[TARGET]:
        m.size[CROSSED], m.size[MOMENT] = 1, end
    result = max(m.engine[e].end, end + p.op[op].latency)
    m.engine[e].end = result
    for at in range(p.op[op].sets, p.op[op + 1].sets):
        own = p.set[at]
        counter = member * len(p.endpoint) + own
        count = m.counter[counter].count + 1
        m.counter[counter].count = count
        m.visible[counter, count & (m.visible.shape[1] - 1)] = result + p.endpoint[own].latency
        waiter = m.counter[counter].waiter
        m.counter[counter].waiter = NOTHING
        while waiter != NOTHING:
            enqueue(m, waiter)
            following = m.engine[waiter].next_waiter
            m.engine[waiter].next_waiter = NOTHING
            waiter = following


@inline
def keep_span(m: EngineState, e: int, op: int, end: int) -> None:
    """Store an operation for the timeline."""
    at = m.size[SPANS]
    m.span[at].engine, m.span[at].op = e, op
    m.span[at].start, m.span[at].end = m.engine[e].begun, end
    m.size[SPANS] += 1


# ---------------------------------------------------------------- links


@inline
def join(p: Program, m: EngineState, e: int) -> None:
    """Start the transfers of the operation that engine ``e`` begins now."""
    op, begin = m.engine[e].op, m.engine[e].begun
    weight = p.member[e // len(p.queue)].weight
    m.engine[e].in_flight = p.op[op + 1].flows - p.op[op].flows
    for at in range(p.op[op].flows, p.op[op + 1].flows):
        link, size = p.flow[at].link, p.flow[at].bytes
        serve(p, m, link, begin)
        m.link[link].idle = max(m.link[link].idle, 0)
        m.link[link].load += weight * p.link[link].unit
        m.link[link].bytes += weight * size
        key = m.link[link].units + (size << FRACTION_BITS)
        push(m.transfer[link], m.link[link].flows, key, e)
        m.link[link].flows += 1
        m.link[link].due = begin  # examined again before the time advances


@inline
def serve(p: Program, m: EngineState, link: int, now: int) -> None:
    """Advance a link's clock to ``now``."""
    elapsed = now - m.link[link].updated
    if elapsed > 0:
        idle = m.link[link].idle
        if m.link[link].load:
            made_up = min(max(idle, 0), (p.link[link].catch_up - 1) * elapsed)
            m.link[link].units += (elapsed + made_up) * p.link[link].rate // m.link[link].load
            m.link[link].flow_cycles += elapsed * m.link[link].flows
            m.link[link].idle = idle - made_up
        elif idle >= 0:
            m.link[link].idle = min(idle + elapsed, p.link[link].idle)
        m.link[link].updated = now


@inline
def settle(p: Program, m: EngineState, link: int, now: int) -> None:
    """End the transfers that are complete at ``now`` and compute when the next one will be."""
    heap, flows = m.transfer[link], m.link[link].flows
    if flows:
        serve(p, m, link, now)
    units = m.link[link].units
    while flows and heap[0].key <= units:
        e = heap[0].engine
        flows -= 1
        pop(heap, flows)
        m.link[link].load -= p.member[e // len(p.queue)].weight * p.link[link].unit
        m.engine[e].in_flight -= 1
        if m.engine[e].in_flight == 0:
            complete(p, m, e, max(now, m.engine[e].begun + p.op[m.engine[e].op].occupancy))
            enqueue(m, e)
    m.link[link].flows = flows
    if flows == 0:
        m.link[link].load = p.link[link].others
        m.link[link].units = 0
        m.link[link].due = NEVER
        return
    if units >> RANGE_BITS:  # a link that is never idle would exceed the range of its clock
        for at in range(flows):
            heap[at].key -= units
        m.link[link].units = units = 0
    rest = (heap[0].key - units) * m.link[link].load
    left = -(-rest // p.link[link].rate)
    m.link[link].due = now + max(left - m.link[link].idle, -(-left // p.link[link].catch_up))


# ---------------------------------------------------------------- pipes of a core: shared by all (processor sharing)


@inline
def share_core(p: Program, m: EngineState, e: int, now: int) -> None:
    """Start the operation of engine ``e`` in parallel with the other warp groups of its core."""
    op, member = m.engine[e].op, e // len(p.queue)
    for at in range(p.op[op].takes, p.op[op + 1].takes):
        m.pipe[member, p.take[at].pipe].busy += p.take[at].cycles
        m.pipe[member, p.take[at].pipe].done += 1
    serve_core(m, member, now)
    number = 2 * member + p.op[op].kind
    server = m.server[number]
    push(m.work[number], server.count, server.units + (p.op[op].work << ONE_BITS), e)
    server.count += 1
    change_load(p, m, member, op, 1)
    m.engine[e].in_flight = 1
    note_due(m, member, now)


@inline
def serve_core(m: EngineState, member: int, now: int) -> None:
    """Advance a core's clocks to ``now``."""
    elapsed = now - m.core[member].updated
    if elapsed > 0:
        for number in range(2 * member, 2 * member + 2):
            m.server[number].units += elapsed * m.server[number].speed
        m.core[member].updated = now


@inline
def change_load(p: Program, m: EngineState, member: int, op: int, sign: int) -> None:
    """Add or remove the demand of an operation, and compute the new speeds."""
    core = m.core[member]
    core.slots += sign * p.op[op].slots
    core.compare += sign * p.op[op].compare
    core.special += sign * p.op[op].special
    core.tensor += sign * p.op[op].tensor
    core.memory += sign * p.op[op].memory
    arithmetic, product = speeds(p.rule[0], core.slots, core.compare, core.special, core.tensor, core.memory)
    m.server[2 * member].speed, m.server[2 * member + 1].speed = arithmetic, product


@inline
def pop_finished(p: Program, m: EngineState, member: int) -> int:
    """Remove an engine whose work is complete, or return -1."""
    for number in range(2 * member, 2 * member + 2):
        server = m.server[number]
        if server.count and m.work[number, 0].key <= server.units:
            e: int = m.work[number, 0].engine
            server.count -= 1
            pop(m.work[number], server.count)
            m.engine[e].in_flight = 0
            change_load(p, m, member, m.engine[e].op, -1)
            return e
    return -1


@inline
def free_pipes(p: Program, m: EngineState, e: int, now: int) -> None:
    """Record that engine ``e`` has released its pipes."""
    op, member = m.engine[e].op, e // len(p.queue)
    for at in range(p.op[op].takes, p.op[op + 1].takes):
        pipe = p.take[at].pipe
        m.pipe[member, pipe].free = max(m.pipe[member, pipe].free, now)


@inline
def note_due(m: EngineState, member: int, now: int) -> None:
    """Store the next time at which work of a core ends; clocks of empty kinds of work restart."""
    due = NEVER
    for number in range(2 * member, 2 * member + 2):
        server = m.server[number]
        if server.count:
            due = min(due, now - (server.units - m.work[number, 0].key) // server.speed)
        else:
            server.units = 0
    at = len(m.due) // 2 + member
    m.due[at] = max(due, now) if due < NEVER else NEVER
    while at > 1:
        at >>= 1
        m.due[at] = min(m.due[2 * at], m.due[2 * at + 1])


@inline
def first_due(m: EngineState) -> int:
    """Return the core whose next work ends first."""
    at = 1
    while 2 * at < len(m.due):
        at = 2 * at if m.due[2 * at] == m.due[at] else 2 * at + 1
    return at - len(m.due) // 2


@inline
def settle_core(p: Program, m: EngineState, member: int, now: int) -> None:
    """End the work of a core's warp groups that is complete at ``now``."""
    serve_core(m, member, now)
    e = pop_finished(p, m, member)
    while e != NOTHING:
        free_pipes(p, m, e, now)
        complete(p, m, e, now + p.op[m.engine[e].op].occupancy)
        enqueue(m, e)
        e = pop_finished(p, m, member)
    note_due(m, member, now)


# ---------------------------------------------------------------- pipes of a core: first come, first served


@inline
def grant(p: Program, m: EngineState, now: int) -> None:
    """Grant pipes to the operations that are ready in this tick, in the order of their queues."""
    while m.size[REQUESTS] and m.request[0].key // len(m.engine) == now:
        e = m.request[0].engine
        m.size[REQUESTS] -= 1
        pop(m.request, m.size[REQUESTS])
        op, member, begin = m.engine[e].op, e // len(p.queue), now
        for at in range(p.op[op].takes, p.op[op + 1].takes):
            begin = max(begin, m.pipe[member, p.take[at].pipe].free)
        for at in range(p.op[op].takes, p.op[op + 1].takes):
            pipe, cycles = p.take[at].pipe, p.take[at].cycles
            m.pipe[member, pipe].free = begin + cycles
            m.pipe[member, pipe].busy += cycles
            m.pipe[member, pipe].done += 1
        m.engine[e].waited += begin - now
        m.engine[e].begun, m.engine[e].in_flight = begin, 0
        if p.op[op].flows == p.op[op + 1].flows:
            complete(p, m, e, begin + p.op[op].occupancy)
            enqueue(m, e)
        elif begin == now:
            join(p, m, e)
        else:
            push(m.event, m.size[EVENTS], begin, e)
            m.size[EVENTS] += 1


# ---------------------------------------------------------------- the run


@inline
def begin_shared(p: Program, m: EngineState, e: int, now: int) -> None:
    """Start the shared work of engine ``e``: work on its core, or transfers."""
    if p.op[m.engine[e].op].kind >= 0:
        share_core(p, m, e, now)
    else:
        join(p, m, e)


@inline
def run_ahead(p: Program, m: EngineState, now: int) -> None:
    """Let every engine and dispatcher that can continue do so; ``now`` is the time up to which links are processed."""
    engines = len(m.engine)
    while m.size[TODO] and not m.size[CROSSED]:
        m.size[TODO] -= 1
        who = m.todo[m.size[TODO]]
        m.is_todo[who] = 0
        if who < engines:
            work(p, m, who, now)
        else:
            issue(p, m, who - engines)


@inline
def next_event(m: EngineState) -> int:
    """Return the time of the next event, or ``NEVER``."""
    now = min(m.event[0].key if m.size[EVENTS] else NEVER, m.due[1])
    for link in range(len(m.link)):
        now = min(now, m.link[link].due)
    return min(now, m.request[0].key // len(m.engine)) if m.size[REQUESTS] else now


@inline
def handle_tick(p: Program, m: EngineState, now: int) -> None:
    """Begin and end the transfers of this tick; when there are none left, grant shared pipes."""
    is_quiet = True
    while m.size[EVENTS] and m.event[0].key == now:
        is_quiet = False
        e = m.event[0].engine
        m.size[EVENTS] -= 1
        pop(m.event, m.size[EVENTS])
        begin_shared(p, m, e, now)
    for link in range(len(m.link)):
        if m.link[link].due == now:
            is_quiet = False
            settle(p, m, link, now)
    while m.due[1] == now:
        is_quiet = False
        settle_core(p, m, first_due(m), now)
    if is_quiet:
        grant(p, m, now)


@inline
def advance(p: Program, m: EngineState, start: int) -> int:
    """Run until nothing can continue or a boundary is crossed; return the time of the last event."""
    now = start
    while True:
        run_ahead(p, m, now)
        following = next_event(m)
        if following == NEVER or m.size[CROSSED]:
            return now
        now = following
        handle_tick(p, m, now)
