"""Small tile programs for tests: by hand, or drawn at random but legal.

Queues run on the vector unit of the 910B2 (or on the AIC's MTE2, whose results have a latency).  The
time of an operation is a fill of the queue's own scratch memory, so that every length can be had:
``copy`` costs head 11 + tail 13 + one cycle a repeat of 64 float32 (hwconfigs/ascend_910b2.yaml).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import networkx as nx
from hypothesis import settings, strategies

from npusim.formats import get_format
from npusim.machines.ascend.ascend_pricing import AscendPricing
from npusim.program.ir.buffers import AddressSpace, Allocator, Ring
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.tile import GlobalTile, Operand, RingTile, Tile
from npusim.program.ir.tile_program import Item, Loop, ProgramPhase, Queue, TileProgram, Touch
from npusim.program.ir.walk import ResolvedOp, Walker, list_endpoints, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from random import Random

    from npusim.program.ir.tile import GlobalTensor

#: Fixed cycles of one ``copy`` of the vector unit, and elements of one repeat of float32.
FILL_CYCLES = 11 + 13
REPEAT = 64
UB, GM, L1 = "aiv.UB", "gm", "aic.L1"

#: What random programs are drawn from.  Choices that hypothesis knows one by one cost more than the programs'
#: tests; it needs them to make a failing program smaller, which ``--hypothesis-profile=explore`` does.
RANDOMS = strategies.randoms(use_true_random=settings.get_current_profile_name() != "explore")


@dataclass
class Toy:
    """Builds one program: queues first, then rings, then blocks of items."""

    queues: list[Queue] = field(default_factory=list)
    allocator: Allocator = field(
        default_factory=lambda: Allocator({name: AddressSpace(name, 1 << 24, 32) for name in (UB, GM, L1)})
    )
    scratch: dict[str, Tile] = field(default_factory=dict)

    def queue(self, name: str, *, engine: str = "VECTOR", issuer: str = "") -> str:
        """Add a queue with its own scratch memory and, by default, a scalar unit of its own."""
        core = "aiv" if engine == "VECTOR" else "aic"
        self.queues.append(Queue(name, core, engine, issuer or f"scalar of {name}"))
        self.scratch[name] = self.allocator.tile(UB, f"scratch of {name}", 64, REPEAT, "float32")
        return name

    def ring(
        self,
        name: str,
        producers: Sequence[str],
        consumers: Sequence[str],
        depth: int = 2,
        *,
        flag: str = "binary",
        period: int = 1,
        space: str = UB,
        slot_bytes: int = 1024,
    ) -> Ring:
        """Add a ring of slots of 1 KiB: 4 rows of 64 float32."""
        return self.allocator.ring(
            space,
            name,
            slot_bytes,
            depth,
            producers=producers,
            consumers=consumers,
            flag=flag,
            period=period,  # type: ignore[arg-type]
        )

    def op(self, label: str, queue: str, *slots: RingTile, repeats: int = 0, steps: Iterable[Step] = ()) -> TileOp:
        """Return an operation that passes on ``slots`` and is busy for 24 + ``repeats`` cycles (or 0)."""
        busy = (self._busy(queue, repeats),) if repeats else ()
        return TileOp(label, queue, queue, (*busy, *steps), slots)

    def _busy(self, queue: str, repeats: int) -> Step:
        if next(q for q in self.queues if q.name == queue).engine == "MTE2":
            # 110 bytes a cycle from GM to L1, 20 cycles at least; there 300 cycles later.
            source = Tile(GM, 0, 16, 16 * repeats, 16 * repeats, "float16")
            return Step(Opcode.COPY, replace(source, space=L1), (source,))
        return Step(Opcode.FILL, self.scratch[queue].part(0, repeats), (0.0,))

    def program(
        self,
        items: Sequence[Item] | Callable[[Hashable], Iterable[Item]],
        *,
        blocks: Sequence[Hashable] = (0,),
        shape: Callable[[Hashable], Hashable] = lambda _block: 0,
        phases: Sequence[ProgramPhase] = (),
        tensors: Sequence[GlobalTensor] = (),
    ) -> TileProgram:
        """Return the program whose blocks are ``items``, or ``items(block)``."""
        body = items if callable(items) else lambda _block: items
        return TileProgram(
            name="toy",
            queues=tuple(self.queues),
            rings=tuple(self.allocator.rings),
            spaces=dict(self.allocator.spaces),
            used_bytes=dict(self.allocator.used_bytes),
            tensors={t.name: t for t in tensors},
            phases=tuple(phases) or (phase("toy", blocks, body, shape),),
            flops=0,
            pricing=AscendPricing,
        )


def phase(
    name: str, blocks: Sequence[Any], body: Callable[[Any], Iterable[Item]], shape: Callable[[Any], Hashable]
) -> ProgramPhase:
    """Return a phase; what its blocks touch in global tensors is what their operations do."""

    def touches(blocks: Sequence[Any]) -> Iterator[Touch]:
        for op in (op for block in blocks for op in flatten(body(block))):
            for step in op.steps:
                yield from (Touch(s) for s in step.srcs if isinstance(s, GlobalTile))
                if isinstance(step.dst, GlobalTile):
                    yield Touch(step.dst, 0)

    return ProgramPhase(name, blocks, body, shape, touches)


def flatten(items: Iterable[Item]) -> Iterator[TileOp]:
    """Yield operations with loops unrolled."""
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                yield from flatten(item.body(index))
        else:
            yield item


def _body_of(bodies: Sequence[list[Item]], block: tuple[int, int]) -> list[Item]:
    return bodies[block[0]]


def _first(block: tuple[int, int]) -> int:
    return block[0]


def fill(ring: Ring, *, first: bool = True, last: bool = True) -> RingTile:
    """Return the producer's side of a ring's slot, 4 x 64 float32."""
    return ring.fill(4, REPEAT, "float32", first=first, last=last)


def front(ring: Ring, *, first: bool = True, last: bool = True) -> RingTile:
    """Return a consumer's side of a ring's slot, 4 x 64 float32."""
    return ring.front(4, REPEAT, "float32", first=first, last=last)


# ---------------------------------------------------------------- an oracle of its own


def order_graph(operations: Sequence[ResolvedOp]) -> tuple[nx.DiGraph[int], dict[tuple[int, int], int]]:
    """Return the order that queues and waits keep, and ``{(endpoint, count): operation that sets it}``.

    Written from the rules alone (a queue is in order; a wait for count n of an endpoint comes after
    the n-th set of it), without ``tests.ir.graph`` or ``npusim.program.ir.races``.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    sets: dict[tuple[int, int], int] = {}
    done: dict[int, int] = {}
    latest: dict[int, int] = {}
    for node, resolved in enumerate(operations):
        graph.add_node(node)
        if resolved.queue in latest:
            graph.add_edge(latest[resolved.queue], node)
        latest[resolved.queue] = node
        for wait in resolved.waits:
            graph.add_edge(sets[wait.peer, wait.count], node)
        for endpoint in resolved.sets:
            done[endpoint] = done.get(endpoint, 0) + 1
            sets[endpoint, done[endpoint]] = node
    return graph, sets


#: Bytes of each memory as the bits of one integer.
Bytes = dict[str, int]


def touched_bytes(resolved: ResolvedOp) -> tuple[Bytes, Bytes]:
    """Return every single byte that an operation reads, and that it writes."""
    read: Bytes = {}
    written: Bytes = {}
    for step in resolved.op.steps:
        _mark(written, resolved, step.dst)
        for source in step.srcs:
            if not isinstance(source, float):
                _mark(read, resolved, source)
        if step.attributes.accumulate:
            _mark(read, resolved, step.dst)
    return read, written


def _mark(found: Bytes, resolved: ResolvedOp, operand: Operand) -> None:
    if isinstance(operand, GlobalTile):
        tensor, size = operand.tensor, get_format(operand.fmt).size_bytes
        matrix = operand.batch * tensor.heads + operand.head
        start = ((matrix * tensor.rows + operand.row) * tensor.cols + operand.col) * size
        space, pitch = f"tensor {tensor.name}", tensor.cols * size
    else:
        tile = resolved.tile(operand) if isinstance(operand, RingTile) else operand
        size = get_format(tile.fmt).size_bytes
        space, start, pitch = tile.space, tile.offset_bytes, tile.stride * size
    rows, width = operand.rows, operand.cols * size
    if pitch == width:
        rows, width = 1, rows * width
    one_row = (1 << width) - 1
    for row in range(rows):
        found[space] = found.get(space, 0) | one_row << (start + row * pitch)


def share_bytes(a: Bytes, b: Bytes) -> bool:
    """Whether two operations' bytes meet."""
    return any(a[space] & b[space] for space in a.keys() & b.keys())


def conflict(a: ResolvedOp, b: ResolvedOp) -> bool:
    """Whether two operations touch a common byte and one of them writes it."""
    (read_a, written_a), (read_b, written_b) = touched_bytes(a), touched_bytes(b)
    return share_bytes(written_a, read_b) or share_bytes(written_a, written_b) or share_bytes(read_a, written_b)


def unordered_conflicts(operations: Sequence[ResolvedOp]) -> set[tuple[int, int]]:
    """Return all pairs of operations on a common byte, one of them writing, that no path orders."""
    reach = nx.transitive_closure_dag(order_graph(operations)[0])
    return {
        (a, b)
        for b in range(len(operations))
        for a in range(b)
        if not reach.has_edge(a, b) and conflict(operations[a], operations[b])
    }


def endpoint_index(program: TileProgram, ring: str, queue: str, *, is_producer: bool) -> int:
    """Return the index of one side of a ring."""
    return next(
        e.index for e in list_endpoints(program) if (e.ring, e.queue, e.is_producer) == (ring, queue, is_producer)
    )


# ---------------------------------------------------------------- random programs


@dataclass
class _Side:
    """One endpoint while a program is drawn: what it has handed on, what it holds, what is left to do."""

    ring: Ring
    queue: str
    is_producer: bool
    handed_on: int = 0
    holds: bool = False
    left: int = 0

    def may_start(self, sides: Sequence[_Side]) -> bool:
        """Whether its next slot is there in program order, whatever the acknowledgement period."""
        peers = [s.handed_on for s in sides if s.ring is self.ring and s.is_producer != self.is_producer]
        if self.is_producer:
            return self.handed_on - min(peers) <= self.ring.depth - self.ring.period
        return min(peers) > self.handed_on


class RandomProgram:
    """Draws a legal program: every operation's waits are met by operations listed before it.

    A block is a prologue in which producers run ahead, loops and straight runs in which all sides
    of a ring advance alike, and an epilogue in which consumers catch up.  With ``touching`` the
    operations fill and read parts of the slots, else they only pass them on.
    """

    def __init__(self, rng: Random, *, touching: bool = False) -> None:
        self.rng, self.touching, self.toy = rng, touching, Toy()
        self.labels = 0
        names = [f"q{i}" for i in range(rng.randint(1, 5))]
        issuers = rng.randint(1, len(names))
        engines = ["VECTOR"] if touching else ["VECTOR", "MTE2"]
        for name in names:
            self.toy.queue(name, engine=rng.choice(engines), issuer=f"scalar{rng.randrange(issuers)}")
        self.sides: list[_Side] = []
        for index in range(rng.randint(1, 4)):
            depth = rng.randint(1, 4)
            ring = self.toy.ring(
                f"r{index}",
                self._some(names),
                self._some(names),
                depth,
                flag=rng.choice(["binary", "counter"]),
                period=rng.randint(1, depth),
            )
            self.sides += [_Side(ring, q, True) for q in ring.producers]
            self.sides += [_Side(ring, q, False) for q in ring.consumers]

    def _some(self, names: Sequence[str]) -> list[str]:
        return self.rng.sample(names, self.rng.randint(1, min(3, len(names))))

    def program(self) -> TileProgram:
        """Return one or two phases of up to seven blocks of up to three shapes."""
        phases = []
        for number in range(self.rng.randint(1, 2)):
            bodies = [self._block() for _ in range(self.rng.randint(1, 3))]
            blocks = [(self.rng.randrange(len(bodies)), i) for i in range(self.rng.randint(1, 7))]
            phases.append(phase(f"p{number}", blocks, partial(_body_of, bodies), _first))
        return self.toy.program((), phases=phases)

    def _block(self) -> list[Item]:
        rings = list(dict.fromkeys(s.ring for s in self.sides))
        ahead = {r.name: self.rng.randint(0, r.depth - r.period + 1) for r in rings}
        items: list[Item] = list(self._run({r: (n, 0) for r, n in ahead.items()}))
        for _ in range(self.rng.randint(0, 3)):
            items += self._segment(rings, 2)
        items += self._run({r: (0, n) for r, n in ahead.items()})
        if not any(True for _ in flatten(items)):
            items.append(self._op(self.rng.choice(self.toy.queues).name, ()))
        return items

    def _segment(self, rings: Sequence[Ring], levels: int) -> list[Item]:
        if not levels or self.rng.random() < 0.4:
            return list(self._run({r.name: (n, n) for r in rings for n in [self.rng.randint(0, 3)]}))
        body = [item for _ in range(self.rng.randint(1, 2)) for item in self._segment(rings, levels - 1)]
        indices = range(self.rng.randint(0, 4))
        return [Loop(f"loop{self.labels}", indices, lambda _i: body)]

    def _run(self, slots: dict[str, tuple[int, int]]) -> Iterable[TileOp]:
        """Draw operations until every producer has filled and every consumer read its slots."""
        for side in self.sides:
            side.left = slots[side.ring.name][0 if side.is_producer else 1]
        if self.rng.random() < 0.3:
            yield self._op(self.rng.choice(self.toy.queues).name, ())
        while True:
            able = [s for s in self.sides if s.holds or (s.left and s.may_start(self.sides))]
            if not able:
                assert not any(s.left for s in self.sides)
                return
            queue = self.rng.choice(able).queue
            mine = [s for s in able if s.queue == queue]
            chosen = self.rng.sample(mine, self.rng.randint(1, len(mine)))
            yield self._op(queue, [self._take(side) for side in chosen])

    def _take(self, side: _Side) -> RingTile:
        first, last = not side.holds, self.rng.random() < 0.7
        side.holds = not last
        if last:
            side.handed_on += 1
            side.left -= 1
        tile = (fill if side.is_producer else front)(side.ring, first=first, last=last)
        if not self.touching:
            return tile
        if side.is_producer and len(side.ring.producers) > 1:  # each fills a row of its own
            return tile.part(side.ring.producers.index(side.queue), 1)
        row = self.rng.randrange(4)
        return tile.part(row, self.rng.randint(1, 4 - row))

    def _op(self, queue: str, slots: Sequence[RingTile]) -> TileOp:
        self.labels += 1
        repeats = 0 if self.touching else self.rng.choice([0, 1, 1, 3, 10, 40])
        steps = []
        if self.touching:
            for slot in slots:
                own = self.toy.scratch[queue].part(0, slot.rows)
                dst, source = (slot, own) if slot.is_producer else (own, slot)
                steps.append(Step(Opcode.COPY, dst, (source,)))
            slots = ()
        return self.toy.op(f"op{self.labels}", queue, *slots, repeats=repeats, steps=steps)


def resolve(program: TileProgram) -> list[ResolvedOp]:
    """Return the operations of a program's first phase, flags counted."""
    phase = program.phases[0]
    walker = Walker(program)
    return [op for block in phase.blocks for op in walk(walker, phase.body(block))]


def crossed() -> TileProgram:
    """Return two queues that each wait for the other's slot first."""
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    there, back = toy.ring("there", [a], [b]), toy.ring("back", [b], [a])
    first = toy.op("first", a, front(back), fill(there))
    return toy.program([first, toy.op("second", b, front(there), fill(back))])
