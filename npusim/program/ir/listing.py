"""A program as lines for people: its rings, and the operations of the most frequent block of each phase.

A loop's body is called once, with an opaque index, so that a coordinate is printed as a sum (``512*kv + 128``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from npusim.late_methods import dataclass
from npusim.program.ir.families import shapes_of
from npusim.program.ir.opaque import Coordinate, OpaqueRange, Symbol, constant_of, terms_of
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.tile_program import Loop
from npusim.program.ir.walk import Walker

if TYPE_CHECKING:
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram


@dataclass(frozen=True, slots=True)
class ListedRing:
    """A ring: its slots, and the queues that pass them on; ``flag`` is the kind of signal."""

    name: str
    space: str
    depth: int
    slot_bytes: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    peeks: tuple[str, ...]
    flag: str


@dataclass(frozen=True, slots=True)
class ListedOp:
    """An operation: ``computes`` are its opcodes with the size of the first result; ``regions`` are the parts of global
    tensors that it accesses.

    ``waits`` and ``gives`` name states of rings: ``K ready`` means a filled slot, ``K free`` an empty one.
    """

    queue: str
    label: str
    computes: str
    regions: tuple[str, ...]
    waits: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListedLoop:
    """A loop over ``items``: its index ``name`` has ``count`` values from ``first`` on, ``step`` apart."""

    name: str
    first: str
    count: str
    step: int
    items: tuple[ListedItem, ...]

    @property
    def bounds(self) -> str:
        """The values of its index."""
        if self.count == "1":
            return f"{self.name} = {self.first}"
        by = f" by {self.step}" if self.step != 1 else ""
        return f"{self.name} from {self.first}{by}, {self.count} times"


ListedItem = ListedOp | ListedLoop


@dataclass(frozen=True, slots=True)
class ListedPhase:
    """A phase: how many blocks and shapes of blocks it has, and the items of block ``block``, which ``block_count``
    blocks share.
    """

    name: str
    blocks: int
    shapes: int
    block: int
    block_count: int
    items: tuple[ListedItem, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A program's rings and phases."""

    rings: tuple[ListedRing, ...]
    phases: tuple[ListedPhase, ...]


def listing_of(program: TileProgram) -> Listing:
    """Return the listing of a program; raises `ProgramError` if a body reads the value of its loop's index."""
    rings = tuple(
        ListedRing(r.name, r.space, r.depth, r.slot_bytes, r.producers, r.consumers, r.peeks, r.flag)
        for r in program.rings
    )
    walker = Walker(program)
    return Listing(rings, tuple(_phase(phase, walker) for phase in program.phases if phase.blocks))


def _phase(phase: ProgramPhase, walker: Walker) -> ListedPhase:
    shapes = shapes_of(phase)
    commonest = max(shapes, key=len)
    number = commonest[len(commonest) // 2]
    items = tuple(_items(phase.body(phase.blocks[number]), walker))
    return ListedPhase(phase.name, len(phase.blocks), len(shapes), number, len(commonest), items)


def _items(items: Iterable[Item], walker: Walker) -> Iterator[ListedItem]:
    """Yield operations and loops; the items of a part without a name, or of a loop without an index, are separate."""
    for item in items:
        if not isinstance(item, Loop):
            yield _op(item, walker)
        elif not item.name:
            for index in item.indices if not isinstance(item.indices, OpaqueRange) else [item.indices.start]:
                yield from _items(item.body(index), walker)
        elif item.indices:
            body = item.body(Coordinate({Symbol(item.name): 1}))
            yield ListedLoop(item.name, *_extent(item.indices), tuple(_items(body, walker)))


def _extent(indices: Sequence[int] | OpaqueRange) -> tuple[str, str, int]:
    """Return the first index, the number of indices, and the step of a range or of an opaque range."""
    if isinstance(indices, OpaqueRange):
        return number_text(indices.start), number_text(indices.count), 1
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return str(indices[0]), str(len(indices)), step


def _op(op: TileOp, walker: Walker) -> ListedOp:
    waits, gives = dict[str, None](), dict[str, None]()
    for index, (first, last) in walker.handshakes(op).items():
        endpoint = walker.endpoints[index]
        if endpoint.peers:  # a ring from a queue to itself needs no flags: the order of the queue suffices
            waits |= {str(endpoint): None} if first else {}
            side = "ready" if endpoint.is_producer else "free"
            gives |= {f"{endpoint.ring} {side}": None} if last and not endpoint.is_peek else {}
    opcodes = " ".join(dict.fromkeys(s.opcode.value for s in op.steps))
    size = f" {op.steps[0].dst.rows}x{op.steps[0].dst.cols}" if op.steps else ""
    tiles = [o for s in op.steps for o in (s.dst, *s.srcs) if isinstance(o, GlobalTile)]
    regions = tuple(dict.fromkeys(_region(tile) for tile in tiles))
    return ListedOp(op.queue, op.label, f"{opcodes}{size}", regions, tuple(waits), tuple(gives))


def _region(tile: GlobalTile) -> str:
    columns = "" if tile.cols == tile.tensor.cols else f", {number_text(tile.col)}:+{tile.cols}"
    return f"{tile.tensor.name}[{number_text(tile.row)}:+{tile.rows}{columns}]"


def number_text(value: object) -> str:
    """Return a number or a coordinate as a sum: ``512*kv - 1024``; a coordinate that is not a sum lists its symbols."""
    if not isinstance(value, Coordinate):
        return str(value)
    if not value.is_affine:
        return f"f({', '.join(sorted(s.name for s in terms_of(value)))})"
    parts = [(factor, symbol.name) for symbol, factor in terms_of(value).items() if factor]
    text = " + ".join(name if factor == 1 else f"{factor}*{name}" for factor, name in parts)
    constant = constant_of(value)
    if not text:
        return str(constant)
    return text + (f" {'-' if constant < 0 else '+'} {abs(constant)}" if constant else "")


def operations_of(items: Sequence[ListedItem]) -> Iterator[ListedOp]:
    """Yield the operations of items and of the loops in them, each loop once."""
    for item in items:
        if isinstance(item, ListedLoop):
            yield from operations_of(item.items)
        else:
            yield item
