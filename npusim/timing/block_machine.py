"""The flat integer arrays that the run-to-block engine works on: a program, and the state of a run.

Everything is int64.  A *member* is one simulated core group (``block``: each group; ``fold``: one
of each class of equal groups); engine ``m * queues + q`` is queue q of member m, counter
``m * endpoints + e`` is endpoint e, dispatcher ``m * issuers + i`` is scalar unit i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = npt.NDArray[np.int64]

#: Kinds of instructions of a dispatcher's code; ``(kind, argument)`` pairs.
OP, LOOP, END, CALL, RET, HALT = range(6)
#: Columns of ``Program.op``: queue, occupancy, latency, issue cycles, then the first wait, set, flow.
QUEUE, OCCUPANCY, LATENCY, ISSUE, WAITS, SETS, FLOWS, OP_COLUMNS = range(8)
#: Columns of ``Program.endpoint``.
LAG, PERIOD, FLAG_LATENCY, OWNER = range(4)
#: Columns of ``Program.link``: units a cycle, and the weight of one flow and of flows from outside.
RATE, UNIT, BACKGROUND = range(3)
#: Places of ``Machine.size``: lengths of lists, and the scalar unit whose loops are counted.
EVENTS, TODO, SPANS, CROSSED, MASTER, SIZES = range(6)
#: Later than any event.
NEVER = 1 << 62
#: Sub-units of a byte in a link's clock, as in ``npusim.timing.link``.
FRACTION_BITS = 20


class Program(NamedTuple):
    """What is to be run; never changes during a run."""

    op: Ints  #: (operations + 1, OP_COLUMNS); an operation's waits end where the next one's begin
    wait: Ints  #: (waits, 2): own endpoint, peer
    set: Ints  #: endpoints
    flow: Ints  #: (flows, 2): link, bytes
    code: Ints  #: (instructions, 2)
    entry: Ints  #: (bodies, issuers): first instruction
    endpoint: Ints  #: (endpoints, 4)
    pair: Ints  #: (pairs, 2): every endpoint with each of its peers
    depth: Ints  #: of each queue
    issuer: Ints  #: of each queue
    link: Ints  #: (links, 3)
    weight: Ints  #: core groups that each member stands for
    is_traced: Ints  #: of each member


class Machine(NamedTuple):
    """The state of a run; views of one block of memory (:func:`build_machine`)."""

    # engines
    now_op: Ints  #: operation taken, or -1
    wait_at: Ints  #: its next wait, or -1 when it has begun
    ready: Ints  #: when its waits so far are over
    begun: Ints  #: when it began
    flying: Ints  #: transfers not yet through
    head: Ints  #: oldest entry of the instruction queue
    length: Ints
    blocked: Ints  #: dispatcher that waits for room, or -1
    next_waiter: Ints  #: engine that waits for the same counter, or -1
    entry_op: Ints  #: (engines, depth)
    entry_time: Ints  #: (engines, depth): when an entry was issued, or its place became free
    # counters
    visible: Ints  #: (counters, history): when each count is seen, by count modulo the history
    waiter: Ints  #: first engine that waits for it, or -1
    # dispatchers
    clock: Ints
    pending: Ints  #: operation fetched, -1 for none, -2 at the end
    pc: Ints
    level: Ints
    stack_pc: Ints  #: (dispatchers, levels): where a loop's body begins, or a call returns to
    # links
    clock_units: Ints  #: served to each transfer
    updated: Ints
    load: Ints  #: weight of the transfers in flight
    due: Ints
    flow_count: Ints
    flow_target: Ints  #: (links, engines): heap of clock values at which transfers end
    flow_engine: Ints
    # events
    event_time: Ints  #: heap of operations that begin later
    event_engine: Ints
    todo: Ints  #: stack of engines and dispatchers to look at
    is_todo: Ints
    size: Ints
    span: Ints  #: (spans, 4): engine, operation, start, end
    # what a period of a loop changes without changing what follows it
    free: Ints  #: of each engine: end of the operation before
    end: Ints  #: of each engine: its last result
    stack_entry: Ints  #: (dispatchers, levels): how often a loop or call was entered there
    stack_left: Ints  #: (dispatchers, levels): iterations left after this one
    count: Ints  #: of each counter
    busy: Ints
    done: Ints  #: operations of each engine
    idle: Ints  #: cycles without an instruction
    stalled: Ints  #: cycles of each counter's owner waiting as that endpoint
    ran: Ints  #: how often each operation ran, in core groups
    link_bytes: Ints
    flow_cycles: Ints  #: of each link: transfers in flight, summed over cycles


def build_machine(program: Program, history: int, levels: int, spans: int = 0) -> Machine:
    """Return an idle machine: ``history`` counts are kept of each counter, loops nest ``levels`` deep."""
    members, queues = len(program.weight), len(program.depth)
    engines, counters = members * queues, members * len(program.endpoint)
    issuers, links = program.entry.shape[1], len(program.link)
    dispatchers, deepest = members * issuers, int(program.depth.max(initial=1))
    shapes: dict[str, Sequence[int]] = {
        **dict.fromkeys(Machine._fields, (engines,)),
        **dict.fromkeys(("entry_op", "entry_time"), (engines, deepest)),
        **dict.fromkeys(("count", "waiter", "stalled"), (counters,)),
        "visible": (counters, history),
        **dict.fromkeys(("clock", "pending", "pc", "level"), (dispatchers,)),
        **dict.fromkeys(("stack_pc", "stack_left", "stack_entry"), (dispatchers, levels)),
        **dict.fromkeys(("clock_units", "updated", "load", "due", "flow_count"), (links,)),
        **dict.fromkeys(("link_bytes", "flow_cycles"), (links,)),
        **dict.fromkeys(("flow_target", "flow_engine"), (links, engines)),
        **dict.fromkeys(("todo", "is_todo"), (engines + dispatchers,)),
        "size": (SIZES,),
        "span": (spans, 4),  # engine, operation, start, end
        "ran": (len(program.op) - 1,),
    }
    memory = np.zeros(sum(int(np.prod(shapes[n])) for n in Machine._fields), np.int64)
    parts, at = {}, 0
    for name in Machine._fields:
        size = int(np.prod(shapes[name]))
        parts[name] = memory[at : at + size].reshape(shapes[name])
        at += size
    machine = Machine(**parts)
    for array in (machine.now_op, machine.blocked, machine.next_waiter, machine.waiter):
        array.fill(-1)
    machine.pending.fill(-2)
    machine.due.fill(NEVER)
    machine.size[MASTER] = -1
    return machine


def totals(machine: Machine) -> Ints:
    """Return all of ``free`` to ``flow_cycles`` as one array."""
    memory = machine.free.base
    names = Machine._fields
    tail = sum(getattr(machine, n).size for n in names[names.index("free") :])
    whole: Ints = memory[-tail:]
    return whole
