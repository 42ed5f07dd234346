"""The walker converts ring handshakes to counted waits, for one operation or for whole bodies.

Every producer and consumer of a ring is an *endpoint* with one counter: the number of generations that the endpoint has
passed on.  In program order the same number is its cursor.  For generation ``g``, endpoint ``e`` must see every
producer's counter at ``g + 1`` (if it is a consumer) or every consumer's counter at ``g - depth + 1`` (if it is a
producer). Schedules never compute a slot or a flag.

There are two views of the same rules:

* :func:`walk` resolves concrete operations one after the other (numerics, checks, graphs);
* :func:`compile_items` resolves a body once relative to its cursors, so that timing can replay it
  at any later point of the program (``Template``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.late_methods import dataclass
from npusim.program.ir.columns import distinct
from npusim.program.ir.families import families_of, shapes_of
from npusim.program.ir.tile_program import Item, Loop, ProgramPhase, TileProgram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from npusim.program.ir.families import Family
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile import RingTile, Tile

    Ints = npt.NDArray[np.int64]

Path = tuple[tuple[str, int], ...]
#: Number of blocks up to which compilation shape by shape is faster than a search for families.
FEW_BLOCKS = 24


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One side of a ring: the ``queue`` that commits (producer) or releases (consumer) its slots."""

    index: int
    ring: str
    queue: str
    is_producer: bool
    peers: tuple[int, ...]  #: endpoints of the other side, except those of the same queue
    lag: int  #: a consumer waits for generation + 1, a producer for generation + 1 - depth
    period: int  #: a producer sees releases only in multiples of this number
    is_cross_core: bool
    depth: int
    ring_number: int  #: the index among the program's rings: rings of different queues may have the same name
    is_peek: bool = False  #: reads slots without releasing them

    def __str__(self) -> str:
        return f"{self.ring} {'free' if self.is_producer else 'ready'}"


def list_endpoints(program: TileProgram) -> tuple[Endpoint, ...]:
    """Return every endpoint of the program's rings, producers before consumers ring by ring."""
    endpoints: list[Endpoint] = []
    for number, ring in enumerate(program.rings):
        first = len(endpoints)
        sides = [(q, True, False) for q in ring.producers] + [(q, False, False) for q in ring.consumers]
        sides += [(q, False, True) for q in ring.peeks]
        for offset, (queue, is_producer, is_peek) in enumerate(sides):
            peers = tuple(
                first + i for i, (q, p, peeks) in enumerate(sides) if p != is_producer and q != queue and not peeks
            )
            endpoints.append(
                Endpoint(
                    first + offset,
                    ring.name,
                    queue,
                    is_producer,
                    peers,
                    1 - ring.depth if is_producer else 1,
                    ring.period if is_producer else 1,
                    ring.flag == "counter",
                    ring.depth,
                    number,
                    is_peek,
                )
            )
    return tuple(endpoints)


def producers_of(endpoints: Iterable[Endpoint]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the queues that set each flag (``S ready``), by the flag and the queue that waits for it."""
    listed, producers = list(endpoints), dict[str, dict[str, tuple[str, ...]]]()
    for e in listed:
        if e.peers:
            producers.setdefault(e.queue, {})[str(e)] = tuple(listed[p].queue for p in e.peers)
    return producers


@dataclass(frozen=True, slots=True)
class Wait:
    """``endpoint`` may continue once the counter of ``peer`` has reached ``count``."""

    endpoint: int
    peer: int
    count: int


@dataclass(slots=True)
class ResolvedOp:
    """An operation at one point of a program: its waits, its sets, and its position."""

    op: TileOp
    queue: int
    waits: tuple[Wait, ...]
    sets: tuple[int, ...]  #: endpoints whose counters it advances
    cursors: dict[tuple[str, bool], int]  #: (ring, is_producer) -> generation, for slot addresses
    path: Path  #: enclosing (loop, index) pairs, outermost first

    def tile(self, operand: RingTile) -> Tile:
        """Return the bytes of a ring operand of this operation."""
        return operand.slot(self.cursors[operand.ring.name, operand.is_producer])

    def __str__(self) -> str:
        where = " ".join(f"{name}={index}" for name, index in self.path)
        return f"{self.op.label} on {self.op.queue}" + (f" ({where})" if where else "")


class Walker:
    """Has one cursor per endpoint and resolves operations in program order."""

    def __init__(self, program: TileProgram) -> None:
        self.endpoints = list_endpoints(program)
        self._by_side = {_side(e): e.index for e in self.endpoints}
        if len(self._by_side) < len(self.endpoints):
            sides = Counter(map(_side, self.endpoints))
            ring, queue, *_ = next(side for side, count in sides.items() if count > 1)
            raise ProgramError(
                f"{program.name}: queue {queue} has two rings called {ring}, in one phase or in several; rename one"
            )
        self.queues = {q.name: i for i, q in enumerate(program.queues)}
        self.cursors = [0] * len(self.endpoints)

    def resolve(self, op: TileOp, path: Path) -> ResolvedOp:
        """Return ``op`` with counted waits at the current cursors, and advance them."""
        cursors, waits, sets = self.cursors, [], []
        generations: dict[tuple[str, bool], int] = {}
        for index, (first, last) in self.handshakes(op).items():
            endpoint = self.endpoints[index]
            generation = cursors[index]
            generations[endpoint.ring, endpoint.is_producer] = generation
            if first:
                need = required_count(endpoint, generation)
                waits += [Wait(index, peer, need) for peer in endpoint.peers if need > 0]
            if last:
                cursors[index] = generation + 1
                sets.append(index)
        return ResolvedOp(op, self.queues[op.queue], tuple(waits), tuple(sets), generations, path)

    def handshakes(self, op: TileOp) -> dict[int, tuple[bool, bool]]:
        """Return ``{endpoint: (waits, passes on)}`` for one operation.

        Raises `ProgramError` if its queue is not a producer or consumer of a ring that it uses.
        """
        handshakes: dict[int, tuple[bool, bool]] = {}
        for tile in op.ring_tiles():
            side = (tile.ring.name, op.queue, tile.is_producer, tile.is_peek)
            index = self._by_side.get(side)
            if index is None:
                role = "producer" if tile.is_producer else "consumer"
                raise ProgramError(f"{op.label}: queue {op.queue} is not a {role} of ring {tile.ring.name}")
            first, last = handshakes.get(index, (False, False))
            handshakes[index] = (first or tile.first, last or tile.last)
        return handshakes


def _side(endpoint: Endpoint) -> tuple[str, str, bool, bool]:
    return endpoint.ring, endpoint.queue, endpoint.is_producer, endpoint.is_peek


def required_count(endpoint: Endpoint, generation: int) -> int:
    """Return the count that peers must have reached for ``generation``; if it is 0 or less, there is no wait."""
    return -(-(generation + endpoint.lag) // endpoint.period) * endpoint.period


def walk(walker: Walker, items: Iterable[Item], path: Path = ()) -> Iterator[ResolvedOp]:
    """Yield every operation of ``items`` in program order, loops unrolled."""
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                inner = (*path, (item.name, index)) if item.name else path
                yield from walk(walker, item.body(index), inner)
        else:
            yield walker.resolve(item, path)


@dataclass(slots=True)
class OpTemplate:
    """An operation with waits relative to its endpoint's cursor at the start of the template.

    ``waits`` holds ``(endpoint, peer, delta)``: the peer's counter must reach ``cursor[endpoint] + delta`` plus the
    endpoint's lag (rounded up to its period).  ``timed`` is the operation with its cost by the last pricing.
    """

    op: TileOp
    queue: int
    waits: tuple[tuple[int, int, int], ...]
    sets: tuple[int, ...]
    timed: tuple[object, Any] | None = None


@dataclass(slots=True)
class LoopTemplate:
    """``count`` repetitions of ``body``, with these ``indices`` in a block of the shape for which it was compiled.

    ``start`` is the advance from the template's start to the loop.
    """

    name: str
    indices: Sequence[int]
    count: int
    start: tuple[int, ...]
    body: Template


@dataclass(slots=True, eq=False)
class Template:
    """A resolved body: sequences of operations and loops, and the advance of every cursor.

    ``moves`` lists the cursors that it moves, with the distances.
    """

    parts: tuple[tuple[OpTemplate, ...] | LoopTemplate, ...]
    advance: tuple[int, ...]
    moves: tuple[tuple[int, int], ...]

    def loop_counts(self) -> tuple[int, ...]:
        """Return the number of iterations of each loop of the body itself."""
        return tuple(p.count for p in self.parts if isinstance(p, LoopTemplate))

    def op_count(self) -> int:
        """Return the number of operations, loops unrolled."""
        return sum(p.count * p.body.op_count() if isinstance(p, LoopTemplate) else len(p) for p in self.parts)


def unrolled(
    template: Template, cursors: Sequence[int], path: Path = ()
) -> Iterator[tuple[OpTemplate, Sequence[int], Path]]:
    """Yield the operations of a template, the terms that are added to their waits, and the loops around them."""
    base = tuple(cursors)
    for part in template.parts:
        if isinstance(part, tuple):
            for op in part:
                yield op, base, path
            continue
        here = [b + s for b, s in zip(base, part.start, strict=True)]
        for index in part.indices:
            yield from unrolled(part.body, here, (*path, (part.name, index)) if part.name else path)
            here = [h + a for h, a in zip(here, part.body.advance, strict=True)]


Bodies = dict[Hashable, Template]


def compile_items(walker: Walker, items: Iterable[Item], bodies: Bodies | None = None) -> Template:
    """Resolve ``items`` relative to cursors of zero; loops are compiled from their first iteration.

    ``bodies`` stores the bodies of loops that have a key; new bodies are added to it.
    """
    origin = walker.cursors
    walker.cursors = [0] * len(origin)
    try:
        return _compile(walker, items, {} if bodies is None else bodies)
    finally:
        walker.cursors = origin


def _loop_body(walker: Walker, loop: Loop, bodies: Bodies) -> Template:
    body_key = loop.key
    key = None if body_key is None else (loop.name, body_key)
    body = bodies.get(key) if key else None
    if body is None:
        walker.cursors = [0] * len(walker.cursors)
        body = _compile(walker, loop.body(loop.indices[0]), bodies)
        if key:
            bodies[key] = body
    return body


def _compile(walker: Walker, items: Iterable[Item], bodies: Bodies) -> Template:
    parts: list[tuple[OpTemplate, ...] | LoopTemplate] = []
    run: list[OpTemplate] = []
    for item in items:
        if isinstance(item, Loop):
            if not item.indices:
                continue
            if run:
                parts.append(tuple(run))
                run = []
            start = tuple(walker.cursors)
            body = _loop_body(walker, item, bodies)
            count = len(item.indices)
            walker.cursors = list(start)
            for endpoint, moved in body.moves:
                walker.cursors[endpoint] += count * moved
            parts.append(LoopTemplate(item.name, item.indices, count, start, body))
        else:
            run.append(_op_template(walker, item))
    if run:
        parts.append(tuple(run))
    advance = tuple(walker.cursors)
    return Template(tuple(parts), advance, tuple([(e, moved) for e, moved in enumerate(advance) if moved]))


def _op_template(walker: Walker, op: TileOp) -> OpTemplate:
    cursors, waits, sets = walker.cursors, [], []
    for index, (first, last) in walker.handshakes(op).items():
        endpoint = walker.endpoints[index]
        if first:
            waits += [(index, peer, cursors[index]) for peer in endpoint.peers]
        if last:
            cursors[index] += 1
            sets.append(index)
    return OpTemplate(op, walker.queues[op.queue], tuple(waits), tuple(sets))


@dataclass(slots=True)
class Form:
    """The common part of blocks that differ only in the lengths of the body's loops.

    ``numbers`` are the blocks' indices in the phase; block n runs loop m, in the order of the template,
    ``counts[which[n], m]`` times.
    """

    numbers: Ints
    template: Template
    counts: Ints
    which: Ints


class Templates:
    """Compiles each block shape of a program once and stores the result."""

    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.walker = Walker(program)
        self._cache: dict[Hashable, Template] = {}
        self._bodies: dict[str, Bodies] = {p.name: {} for p in program.phases}
        self._forms: dict[str, list[Form]] = {}

    def of(self, phase: ProgramPhase, block: Hashable) -> Template:
        """Return the template of ``block``, shared by all blocks of its shape."""
        key = (phase.name, phase.shape(block))
        if key not in self._cache:
            self._cache[key] = compile_items(self.walker, phase.body(block), self._bodies[phase.name])
        return self._cache[key]

    def forms(self, phase: ProgramPhase) -> list[Form]:
        """Return the blocks of a phase by family, or by shape, with one template each."""
        if phase.name not in self._forms:
            self._forms[phase.name] = self.forms_of(phase, np.arange(len(phase.blocks)))
        return self._forms[phase.name]

    def forms_of(self, phase: ProgramPhase, numbers: Ints) -> list[Form]:
        """Return some blocks of a phase in the same way; the templates of other blocks are not compiled."""
        families = families_of(phase) if len(numbers) > FEW_BLOCKS else None
        if families is None:
            return [self._form_of_shape(phase, np.array(alike)) for alike in shapes_of(phase, numbers.tolist())]
        is_chosen = np.zeros(len(phase.blocks), np.bool_)
        is_chosen[numbers] = True
        return [form for f in families for form in self._forms_of(phase, f, is_chosen[f.numbers])]

    def _form_of_shape(self, phase: ProgramPhase, numbers: Ints) -> Form:
        template = self.of(phase, phase.blocks[numbers[0]])
        return Form(numbers, template, np.array([template.loop_counts()], np.int64), np.zeros(len(numbers), np.int64))

    def _forms_of(self, phase: ProgramPhase, family: Family, is_chosen: npt.NDArray[np.bool_]) -> Iterator[Form]:
        """Yield groups of a family's blocks by the set of loops that run more than once: other loops are not executed
        as loops.
        """
        of_family = family.numbers[is_chosen]
        counts, which = distinct(family.sizes[is_chosen])
        patterns, of_count = distinct((counts > 1).astype(np.int64))
        for pattern in range(len(patterns)):
            chosen = of_count == pattern
            numbers = np.flatnonzero(chosen[which])
            template = self.of(phase, phase.blocks[of_family[numbers[0]]])
            place = np.cumsum(chosen) - 1
            yield Form(of_family[numbers], template, counts[chosen], place[which[numbers]])
