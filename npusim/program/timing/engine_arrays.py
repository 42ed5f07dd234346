"""The flat integer records on which the compiled engine works: a program, and the state of a run.

Every field is an int64.  A *member* is one simulated core group (each group, or one of each class of equal
groups); engine ``m * queues + q`` is queue q of member m, counter
``m * endpoints + e`` is endpoint e, dispatcher ``m * issuers + i`` is scalar unit i.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ints = npt.NDArray[np.int64]
#: Arrays of records: kernels read and write their fields as attributes.
Records = Any

#: Kinds of instructions of a dispatcher's code.  The argument of ``LOOP`` is its number of iterations; the number of
#: iterations of ``REPEAT`` is the operand of the enclosing call, with the argument as offset.
OP, LOOP, REPEAT, END, CALL, RET, HALT = range(7)
#: Entries of ``EngineState.size``: lengths of lists; the level of loops that the watched scalar unit ``WATCHED`` has
#: crossed, or 1 if engine ``LEADER`` has completed ``TARGET`` operations, at the time ``MOMENT``.  ``FETCHED`` marks
#: the calls fetched since then, bit by bit, counted from instruction ``WINDOW_AT``.
(EVENTS, TODO, SPANS, CROSSED, WATCHED, LEADER, TARGET, MOMENT, FETCHED, WINDOW_AT, REQUESTS, SIZES) = range(12)
#: No operation on an engine; also what a dispatcher fetches at its end.
NOTHING, HALTED = -1, -2
#: Later than any event.
NEVER = 1 << 62
#: In place of transfers in flight: the operation waits for shared pipes.
ASKING = -1
#: Number of bits of an int64 that a product of bytes in flight and their number may use; two bits are left for sums.
RANGE_BITS = 60


def record(fields: str) -> np.dtype[Any]:
    """Return a type of records of integers; their names are separated by spaces."""
    return np.dtype([(name, np.int64) for name in fields.split()])


class Program(NamedTuple):
    """The program of a run; it never changes during the run (`build_program`)."""

    op: Records  #: one entry more than operations: an operation's waits end where the next operation's waits begin
    wait: Records
    set: Ints  #: endpoints
    flow: Records
    take: Records  #: shared pipes that an operation keeps busy
    pipe: Ints  #: one entry for each shared pipe of a core group
    code: Records
    operand: Ints  #: iteration counts that blocks pass to their loops
    entry: Ints  #: (bodies, issuers): first instruction
    endpoint: Records
    pair: Records  #: every pair of an endpoint and a peer
    queue: Records
    link: Records
    member: Records
    rule: Records  #: how warp groups slow each other down (`npusim.program.timing.gpu_pipes.Rules`), if they do


#: Types of the records of a program's arrays.
PROGRAM_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        # ``kind``: 0 arithmetic, 1 product, -1 no work concurrent with other warp groups
        # (`npusim.program.ir.tile_program.Share`); the other fields are its cycles without other groups, and its
        # demands.
        "op": record(
            "queue occupancy latency issue waits sets flows takes kind work slots compare special tensor memory"
        ),
        "wait": record("own peer"),
        "flow": record("link bytes"),
        "take": record("pipe cycles"),
        "code": record("kind argument operand"),
        "endpoint": record("lag period latency owner"),
        "pair": record("own peer"),
        "queue": record("depth issuer"),
        # Units of the link's clock per cycle; the weight of one transfer; the weight of transfers from outside; for a
        # phase: the largest number of idle cycles that the link recovers, and the multiple of its rate while it does.
        "link": record("rate unit others idle catch_up"),
        # Number of core groups that the member represents, and whether its spans are stored.
        "member": record("weight is_traced"),
        "rule": record("product_issue product_compare issue_product slowing"),
    }
)


def build_program(entry: Ints, **rows: Sequence[Any]) -> Program:
    """Return the arrays of these rows, empty arrays if there are none; ``entry`` is unchanged."""
    arrays = {}
    for name in Program._fields:
        array = np.array(rows.get(name, ()), np.int64)
        kind = PROGRAM_TYPES.get(name)
        arrays[name] = array if kind is None else array.reshape(-1, len(kind)).view(kind).ravel()
    return Program(**{**arrays, "entry": entry})


class EngineState(NamedTuple):
    """The state of a run; views of one block of memory (:func:`build_state`)."""

    engine: Records
    entry: Records  #: (engines, depth): the instruction queue, a ring
    counter: Records
    visible: Ints  #: (counters, history): when each count becomes visible, by count modulo the history
    dispatcher: Records
    stack: Records  #: (dispatchers, levels): loops and calls
    link: Records
    transfer: Records  #: (links, engines): heap by the clock value at which a transfer ends
    event: Records  #: heap by the time at which an operation with transfers begins
    request: Records  #: heap by the time at which an operation is ready for its pipes, then engine
    pipe: Records  #: (members, pipes)
    core: Records  #: (members,) if warp groups share the pipes of a core (processor sharing), else empty
    server: Records  #: (2 * members,): clocks of arithmetic and of products for each of these cores
    work: Records  #: (2 * members, queues): heaps by the clock value of the server at which work ends
    due: Ints  #: tree of minima over the members: the time at which the next work of each ends
    todo: Ints  #: stack of engines and dispatchers to process
    is_todo: Ints
    ran: Ints  #: number of executions of each operation, in core groups
    size: Ints
    span: Records


HEAP_TYPE = record("key engine")
#: Types of the records of a state's arrays.
STATE_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        # ``op``: the operation, or -1.  ``wait_at``: its next wait, or -1 after the operation has begun.  ``ready``:
        # the end of its waits so far.  ``in_flight``: its unfinished transfers, or ``ASKING`` for pipes.  ``head`` and
        # ``length``: first entry and length of the queue.  ``blocked``: the dispatcher that waits for a free entry, or
        # -1. ``next_waiter``: the engine that waits for the same counter, or -1.  ``free``: the end of the previous
        # operation.  ``end``: the time of the last result, for which flags wait.  ``idle``: cycles without an
        # instruction.  ``waited``: cycles in which another operation had its pipes.
        "engine": record(
            "op wait_at ready begun in_flight head length blocked next_waiter free end busy done idle waited"
        ),
        # ``time``: when the operation was issued, or when its entry became free.
        "entry": record("op time"),
        # ``waiter``: the first engine that waits for the counter, or -1.  ``stalled``: cycles in which its owner waited
        # for other operations.
        "counter": record("waiter count stalled"),
        # ``pending``: the fetched operation, ``NOTHING``, or ``HALTED``.
        "dispatcher": record("clock pending pc level"),
        # ``pc``: the start of a loop's body, or the return address of a call.  ``left``: iterations after this one.
        # ``entry``: the number of loops or calls entered at this level.
        "stack": record("pc operand left entry"),
        # ``units``: units served to each transfer.  ``load``: weight in flight.  ``due``: the end of the next transfer.
        # ``flow_cycles``: transfers in flight, summed over cycles.  ``idle``: cycles to be recovered, -1 before a
        # phase's first transfer.
        "link": record("units updated load due flows bytes flow_cycles idle"),
        "transfer": HEAP_TYPE,
        "event": HEAP_TYPE,
        "request": HEAP_TYPE,
        # ``free``: the end of the last operation on a pipe.
        "pipe": record("free busy done"),
        # The demands of all current operations.
        "core": record("slots compare special tensor memory updated"),
        # ``units``: the clock, in units served to each operation.  ``count``: current operations.
        "server": record("units speed count"),
        "work": HEAP_TYPE,
        "span": record("engine op start end"),
    }
)


def build_state(program: Program, history: int, levels: int, spans: int = 0) -> EngineState:
    """Return the state before a run: ``history`` counts are stored for each counter, and loops nest ``levels`` deep."""
    members, issuers = len(program.member), program.entry.shape[1]
    engines, counters = members * len(program.queue), members * len(program.endpoint)
    dispatchers, links = members * issuers, len(program.link)
    deepest = int(program.queue["depth"].max(initial=1))
    cores = members if len(program.rule) else 0
    leaves = 1 << max(0, cores - 1).bit_length()
    shapes: dict[str, Sequence[int]] = {
        "engine": (engines,),
        "entry": (engines, deepest),
        "counter": (counters,),
        "visible": (counters, history),
        "dispatcher": (dispatchers,),
        "stack": (dispatchers, levels),
        "link": (links,),
        "transfer": (links, engines),
        "event": (engines,),
        "request": (engines,),
        "pipe": (members, len(program.pipe)),
        "core": (cores,),
        "server": (2 * cores,),
        "work": (2 * cores, len(program.queue)),
        "due": (2 * leaves,),
        "todo": (engines + dispatchers,),
        "is_todo": (engines + dispatchers,),
        "ran": (len(program.op) - 1,),
        "size": (SIZES,),
        "span": (spans,),
    }
    types = {name: STATE_TYPES.get(name, np.dtype(np.int64)) for name in shapes}
    words = [math.prod(shape) * types[name].itemsize // types["size"].itemsize for name, shape in shapes.items()]
    memory = np.zeros(sum(words), np.int64)
    parts = np.split(memory, np.cumsum(words)[:-1])
    arrays = zip(parts, shapes.items(), strict=True)
    state = EngineState(**{name: part.view(types[name]).reshape(shape) for part, (name, shape) in arrays})
    for field in ("op", "blocked", "next_waiter"):
        state.engine[field] = -1
    state.counter["waiter"] = -1
    state.dispatcher["pending"] = HALTED
    state.link["due"] = NEVER
    state.due[:] = NEVER
    state.size[WATCHED] = state.size[LEADER] = -1
    return state


def memory_of(state: EngineState) -> Ints:
    """Return the block of memory that contains all arrays of a state as views."""
    assert state.size.base is not None
    return state.size.base


def indices_of(state: EngineState) -> EngineState:
    """Return arrays in the layout of a state, in which every number is its own index in the state's memory."""
    indices = np.arange(memory_of(state).size)
    ends = np.cumsum([array.nbytes for array in state]) // indices.itemsize
    parts = np.split(indices, ends[:-1])
    return EngineState(*(part.view(a.dtype).reshape(a.shape) for part, a in zip(parts, state, strict=True)))
