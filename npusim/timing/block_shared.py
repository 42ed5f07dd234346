"""What the run-to-block engine shares at a speed that hangs on who is there: links, and a core's room for warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.block_heap import pop, push
from npusim.timing.block_jit import inline
from npusim.timing.block_machine import FRACTION_BITS, NEVER
from npusim.timing.gpu_pipes import ONE, ONE_BITS

if TYPE_CHECKING:
    from npusim.timing.block_machine import EngineState, Program

# ---------------------------------------------------------------- links


@inline
def join(p: Program, m: EngineState, e: int) -> None:
    """Start the transfers of the operation that engine ``e`` begins now."""
    op, begin = m.engine[e].op, m.engine[e].begun
    weight = p.member[e // len(p.queue)].weight
    m.engine[e].flying = p.op[op + 1].flows - p.op[op].flows
    for at in range(p.op[op].flows, p.op[op + 1].flows):
        link, size = p.flow[at].link, p.flow[at].bytes
        serve(p, m, link, begin)
        m.link[link].load += weight * p.link[link].unit
        m.link[link].bytes += weight * size
        key = m.link[link].units + (size << FRACTION_BITS)
        push(m.transfer[link], m.link[link].flows, key, e)
        m.link[link].flows += 1
        m.link[link].due = begin  # looked at again before time goes on


@inline
def serve(p: Program, m: EngineState, link: int, now: int) -> None:
    """Move a link's clock on to ``now``."""
    elapsed = now - m.link[link].updated
    if elapsed > 0:
        if m.link[link].load:
            m.link[link].units += elapsed * p.link[link].rate // m.link[link].load
            m.link[link].flow_cycles += elapsed * m.link[link].flows
        m.link[link].updated = now


# ---------------------------------------------------------------- warp groups at work beside one another


@inline
def enter_room(p: Program, m: EngineState, e: int, now: int) -> None:
    """Let the operation of engine ``e`` begin its work beside the other warp groups of its core."""
    op, member = m.engine[e].op, e // len(p.queue)
    for at in range(p.op[op].takes, p.op[op + 1].takes):
        m.pipe[member, p.take[at].pipe].busy += p.take[at].cycles
        m.pipe[member, p.take[at].pipe].done += 1
    serve_room(m, member, now)
    key, room = p.op[op].work << ONE_BITS, m.room[member]
    if p.op[op].kind:
        push(m.work[2 * member + 1], room.count1, room.units1 + key, e)
        room.count1 += 1
    else:
        push(m.work[2 * member], room.count0, room.units0 + key, e)
        room.count0 += 1
    change_load(p, m, member, op, 1)
    m.engine[e].flying = 1
    note_due(m, member, now)


@inline
def begin_beside(p: Program, m: EngineState, e: int, now: int) -> None:
    """Let engine ``e`` begin what it does beside others: work on its core, or transfers."""
    if p.op[m.engine[e].op].kind >= 0:
        enter_room(p, m, e, now)
    else:
        join(p, m, e)


@inline
def serve_room(m: EngineState, member: int, now: int) -> None:
    """Move a core's clocks on to ``now``."""
    room = m.room[member]
    elapsed = now - room.updated
    if elapsed > 0:
        room.units0 += elapsed * room.speed0
        room.units1 += elapsed * room.speed1
        room.updated = now


@inline
def change_load(p: Program, m: EngineState, member: int, op: int, sign: int) -> None:
    """Add or take away what an operation asks for, and find the speeds anew (`gpu_pipes.speeds`)."""
    room, rule = m.room[member], p.rule[0]
    room.slots += sign * p.op[op].slots
    room.compare += sign * p.op[op].compare
    room.special += sign * p.op[op].special
    room.tensor += sign * p.op[op].tensor
    room.memory += sign * p.op[op].memory
    taken = rule.product_issue * min(room.tensor, ONE) >> ONE_BITS
    compare = room.compare + (rule.product_compare * min(room.tensor, ONE) >> ONE_BITS)
    product = max(ONE, room.tensor, room.memory)
    if room.slots:
        product = max(product, (rule.issue_product * room.slots >> ONE_BITS) + taken)
    room.speed0 = (ONE << ONE_BITS) // max(ONE, room.slots + taken, compare, room.special, room.memory)
    room.speed1 = (ONE << ONE_BITS) // product


@inline
def next_through(p: Program, m: EngineState, member: int) -> int:
    """Take out an engine whose work is through, or return -1."""
    room, e = m.room[member], -1
    if room.count0 and m.work[2 * member, 0].key <= room.units0:
        e = m.work[2 * member, 0].engine
        room.count0 -= 1
        pop(m.work[2 * member], room.count0)
    elif room.count1 and m.work[2 * member + 1, 0].key <= room.units1:
        e = m.work[2 * member + 1, 0].engine
        room.count1 -= 1
        pop(m.work[2 * member + 1], room.count1)
    if e >= 0:
        m.engine[e].flying = 0
        change_load(p, m, member, m.engine[e].op, -1)
    return e


@inline
def note_pipes_free(p: Program, m: EngineState, e: int, now: int) -> None:
    """Note that the pipes of engine ``e`` are its own no more."""
    op, member = m.engine[e].op, e // len(p.queue)
    for at in range(p.op[op].takes, p.op[op + 1].takes):
        pipe = p.take[at].pipe
        m.pipe[member, pipe].free = max(m.pipe[member, pipe].free, now)


@inline
def note_due(m: EngineState, member: int, now: int) -> None:
    """Write down when the next work of a core ends; clocks of what is empty begin anew."""
    room, due = m.room[member], NEVER
    if room.count0:
        due = now - (room.units0 - m.work[2 * member, 0].key) // room.speed0
    else:
        room.units0 = 0
    if room.count1:
        due = min(due, now - (room.units1 - m.work[2 * member + 1, 0].key) // room.speed1)
    else:
        room.units1 = 0
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
