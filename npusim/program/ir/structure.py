"""The structure of a phase: the operations that all of its blocks have in common, whatever the lengths of their loops.

Each shape of block is built once, with opaque coordinates (``ir.opaque``) in place of the differences between its
blocks, and each loop's body once, with an opaque index.  Since a body can use these coordinates only for the places of
its tiles in global memory, the result holds for all blocks and iterations.  Straight runs of operations may be
condensed to short loops (`condensed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields
from functools import cached_property
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from npusim.errors import ProgramError
from npusim.formats import stored_format
from npusim.late_methods import dataclass
from npusim.program.ir.content import record
from npusim.program.ir.families import families_of, shapes_of
from npusim.program.ir.opaque import (
    Coordinate,
    OpaqueError,
    OpaqueRange,
    Symbol,
    constant_of,
    hull_of,
    numbers_of,
    opaque,
    substituted,
    symbols_in,
    terms_of,
    twin,
)
from npusim.program.ir.tile import GlobalTensor, GlobalTile, RingTile, Tile
from npusim.program.ir.tile_program import Body, Loop
from npusim.program.ir.walk import Walker

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from npusim.program.ir.families import Family, Integers
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram

WRITABLE = ("output", "workspace")


@record
class Bytes:
    """``rows`` runs of ``width`` bytes, ``pitch`` apart, from ``start``."""

    start: int
    width: int
    pitch: int
    rows: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.rows - 1) * self.pitch + self.width

    def overlaps(self, other: Bytes) -> bool:
        """Return whether the two ranges may have a byte in common: exact if the pitches are equal and not smaller than
        the widths.
        """
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.pitch != other.pitch:
            return True  # different row pitches in one range: assume an overlap
        # Equal pitch: compare the byte columns, and the ranges of rows that contain them.
        rows, column = divmod(other.start - self.start, self.pitch)
        return any(
            left < self.width and left + other.width > 0 and row < self.rows and row + other.rows > 0
            for row, left in ((rows, column), (rows + 1, column - self.pitch))
        )


@record
class RingAccess:
    """The bytes of the slot that an operation's side of a ring has reached."""

    ring: int
    endpoint: int
    where: Bytes
    is_write: bool


@record
class TileAccess:
    """A range of bytes of a memory outside any ring."""

    space: str
    where: Bytes
    is_write: bool


@record
class RegionAccess:
    """A region of a tensor in global memory; its coordinates may be opaque."""

    region: GlobalTile
    is_write: bool

    def placed(self, values: Mapping[Symbol, object]) -> RegionAccess:
        """Return the region with its coordinates for these values of symbols."""
        r = self.region
        batch, head, row, col = (substituted(v, values) for v in r.corner)
        return RegionAccess(type(r)(r.tensor, batch, head, row, r.rows, col, r.cols), self.is_write)

    @property
    def key(self) -> Hashable:
        """A key that regions with the same bytes share, in any loop over the same indices."""
        r = self.region
        corner = [(constant_of(v), *((s.name, f) for s, f in terms_of(v).items())) for v in r.corner]
        return r.tensor.name, r.rows, r.cols, *corner


@record
class Operation:
    """The properties of an operation that matter for the order of events.

    ``uses`` are the endpoints that it uses: (endpoint, waits first, passes on last).  ``source`` is the line of the
    schedule that yields it, empty if it is unknown.
    """

    label: str
    queue: int
    uses: tuple[tuple[int, bool, bool], ...]
    slots: tuple[RingAccess, ...]
    tiles: tuple[TileAccess, ...]
    regions: tuple[RegionAccess, ...] = field(compare=False)
    source: str = field(compare=False)

    @property
    def prefix(self) -> str:
        """The beginning of a message about the operation: its line, if known."""
        return f"{self.source}: " if self.source else ""


@dataclass(frozen=True)
class Piece:
    """Operations without a loop between them."""

    operations: tuple[Operation, ...]

    @cached_property
    def _digest(self) -> int:
        return hash(self.operations)

    def __hash__(self) -> int:
        return self._digest


@dataclass(frozen=True, slots=True)
class LoopPart:
    """A loop whose body was built once: ``parts`` for an opaque ``index``, at the coordinates ``at``."""

    name: str
    indices: Sequence[int] | OpaqueRange = field(hash=False)
    parts: tuple[Part, ...]
    index: Symbol = field(compare=False)
    at: tuple[tuple[Symbol, Any], ...] = field(compare=False)

    def values(self, outer: Mapping[Symbol, object], ranges: dict[Symbol, tuple[int, int]]) -> dict[Symbol, object]:
        """Return the values of its body's symbols if the enclosing symbols have the values ``outer``.

        ``ranges`` collects the first and last values of its index.
        """
        if isinstance(self.indices, OpaqueRange):
            (first, _), (_, end) = hull_of(self.indices.start), hull_of(self.indices.end)
            index = Symbol(self.index.name, ends=(self.indices.start, self.indices.end - 1))
            ranges[index] = (first, end - 1)
        else:
            first, last = min(self.indices), max(self.indices)
            index = Symbol(f"{self.index.name} ({first} to {last})")
            ranges[index] = (first, last)
        at = {symbol: substituted(value, outer) for symbol, value in self.at}
        return {**outer, self.index: Coordinate({index: 1}), **at}


Part = Piece | LoopPart


def pieces_of(parts: Iterable[Part]) -> Iterator[Piece]:
    """Yield every piece of ``parts`` once, without repeating loops."""
    for part in parts:
        if isinstance(part, Piece):
            yield part
        else:
            yield from pieces_of(part.parts)


def loops_of(parts: Iterable[Part]) -> Iterator[LoopPart]:
    """Yield every loop of ``parts`` once, inner loops included."""
    for part in parts:
        if isinstance(part, LoopPart):
            yield part
            yield from loops_of(part.parts)


@dataclass(slots=True)
class Shape:
    """The parts that blocks of one shape have in common.

    ``numbers`` are the blocks' indices in the phase; ``coordinates`` contains the values of each symbol, one per block.
    Blocks of a family also differ in the lengths of loops.  ``meets``: the blocks that run before and after these
    blocks (`Succession`).
    """

    parts: tuple[Part, ...]
    numbers: Integers
    coordinates: Mapping[Symbol, Integers]
    meets: tuple[Hashable, Hashable] = ((), ())


Condense = Callable[[Sequence["Operation"]], Iterable["Part"]]


def as_listed(run: Sequence[Operation]) -> Iterable[Part]:
    """Return operations as one piece, without a change."""
    return (Piece(tuple(run)),)


class Builder:
    """Builds the structure of a program's phases; ``condense`` combines operations without a loop between them into
    parts.
    """

    def __init__(self, program: TileProgram, condense: Condense = as_listed) -> None:
        self.program, self.walker, self.condense = program, Walker(program), condense
        self._rings = {id(ring): number for number, ring in enumerate(program.rings)}
        self._sides = [(end.ring_number, end.is_producer) for end in self.walker.endpoints]
        self._bodies: dict[Hashable, tuple[tuple[Part, ...], list[Symbol], Symbol]] = {}
        self._sizes: dict[str, Callable[[int], int]] = {}
        #: Bytes and accesses by what they consist of: equal ones are one object, which needs no hash by its content.
        self._placed: dict[Hashable, Bytes] = {}
        self._slots: dict[Hashable, RingAccess] = {}
        self._tiles: dict[Hashable, TileAccess] = {}
        self._tensors = dict(program.tensors)
        self._block: object = None

    def shapes(self, phase: ProgramPhase, *, one_by_one: bool = False) -> list[Shape]:
        """Return the shapes of a phase, or families if operations are condensed (`npusim.program.ir.families`).

        ``one_by_one``: each block has its own shape, with its coordinates as numbers.

        Raises `ProgramError` for an operation without a queue or ring in the program, one that writes a read-only
        tensor or exceeds its slot, or a body that reads a coordinate on which it must not depend.
        """
        self._bodies = {}
        families = families_of(phase) if self.condense is condensed and not one_by_one else None
        if families is not None:
            return [self._of_family(phase, family) for family in families]
        shapes: list[Shape] = []
        for same in shapes_of(phase):
            shapes += (self._one_by_one if one_by_one else self._of_blocks)(phase, same)
        return shapes

    def _of_family(self, phase: ProgramPhase, family: Family) -> Shape:
        self._block = phase.blocks[family.numbers[0]]
        for symbol in family.coordinates:
            symbol.refusal = None
        parts = self._unseen(phase.body(family.block), family.coordinates)
        return Shape(parts, family.numbers, family.coordinates, self._meets(phase))

    def _of_blocks(self, phase: ProgramPhase, numbers: list[int]) -> list[Shape]:
        blocks = [phase.blocks[n] for n in numbers]
        self._block = blocks[0]
        coordinates: dict[Symbol, Sequence[int]] = {}
        try:
            common = twin(blocks, "block", symbols_in(coordinates))
            parts = self._unseen(phase.body(common), coordinates)
            return [Shape(parts, numbers, coordinates, self._meets(phase))]
        except TypeError:
            if not coordinates and len(blocks) == 1:
                raise
        except OpaqueError as error:
            if not error.symbols & coordinates.keys():
                raise ProgramError(f"{self.program.name}: {error}") from None
        return self._one_by_one(phase, numbers)

    def _one_by_one(self, phase: ProgramPhase, numbers: list[int]) -> list[Shape]:
        """Build blocks that differ in more than coordinates one by one, and compare them."""
        shapes = []
        for number in numbers:
            self._block = phase.blocks[number]
            parts = tuple(self._parts(phase.body(self._block)))
            shapes.append(Shape(parts, [number], {}, self._meets(phase)))
            if parts != shapes[0].parts:
                raise ProgramError(
                    f"{self.program.name}: phase {phase.name}: blocks {phase.blocks[numbers[0]]} and {self._block} "
                    f"have one shape, {phase.shape(self._block)}, but not the same operations"
                )
        return shapes

    def _meets(self, phase: ProgramPhase) -> tuple[Hashable, Hashable]:
        return phase.succession.meets(self._block) if phase.succession else ((), ())

    # ---------------------------------------------------------------- items

    def _parts(self, items: Iterable[Item]) -> Iterator[Part]:
        run: list[Operation] = []
        iterator = iter(items)
        for item in iterator:
            if not isinstance(item, Loop):
                run.append(self._operation(item, iterator))
                continue
            if run:
                yield from self.condense(run)
                run = []
            if item.indices:
                yield self._loop(item)
        if run:
            yield from self.condense(run)

    def _loop(self, loop: Loop) -> LoopPart:
        """Return a loop with its body; bodies with one key are built once, at coordinates of their own."""
        body = loop.body
        if not isinstance(loop.indices, range | OpaqueRange) and any(type(i) is not int for i in loop.indices):
            raise ProgramError(f"{self.program.name}: loop {loop.name}: its indices must be integers: {loop.indices}")
        if not isinstance(body, Body):
            index = Symbol(f"the index of loop {loop.name}")
            parts = self._body(loop, body, [index])
            return LoopPart(loop.name, loop.indices, parts, index, ())
        try:
            key = body.key
        except ProgramError as error:
            raise ProgramError(f"{self.program.name}: loop {loop.name}: {error}") from None
        if key not in self._bodies:
            symbols: list[Symbol] = []
            at = opaque(body.at, "at", symbols)
            index = Symbol(f"the index of loop {loop.name}")
            parts = self._body(loop, Body(body.function, body.static, at), [index, *symbols])
            self._bodies[key] = parts, symbols, index
        parts, symbols, index = self._bodies[key]
        values = tuple(zip(symbols, numbers_of(body.at), strict=True))
        return LoopPart(loop.name, loop.indices, parts, index, values)

    def _body(self, loop: Loop, body: Any, symbols: Sequence[Symbol]) -> tuple[Part, ...]:
        """Return a body's parts for an opaque index, the first of ``symbols``."""
        try:
            return self._unseen(body(Coordinate({symbols[0]: 1})), symbols)
        except OpaqueError as error:
            if symbols[0] in error.symbols or isinstance(body, Body):
                raise ProgramError(f"{self.program.name}: loop {loop.name}: {error}") from None
            raise

    def _unseen(self, items: Iterable[Item], symbols: Iterable[Symbol]) -> tuple[Part, ...]:
        """Return parts whose bodies did not read ``symbols``; a refusal counts even if the body caught it."""
        parts = tuple(self._parts(items))
        for symbol in symbols:
            if symbol.refusal:
                raise symbol.refusal
        return parts

    # ---------------------------------------------------------------- operations

    def _operation(self, op: TileOp, iterator: Iterator[Item]) -> Operation:
        try:
            uses = tuple([(e, first, last) for e, (first, last) in self.walker.handshakes(op).items()])
            queue = self.walker.queues[op.queue]
            sides = {self._sides[e]: e for e, _, _ in uses}
            slots: dict[int, RingAccess] = {}
            tiles: dict[int, TileAccess] = {}
            regions: list[RegionAccess] = []
            for view in op.handshake:
                self._ring_of(view)
            touched: dict[tuple[int, bool], Any] = {}  # steps share operands
            for step in op.steps:
                touched[id(step.dst), True] = step.dst
                for source in step.srcs:
                    touched[id(source), False] = source
                if step.attributes.accumulate:
                    touched[id(step.dst), False] = step.dst
            for (_, is_write), operand in touched.items():
                kind = type(operand)
                if kind is RingTile:
                    slot = self._slot(operand, sides, is_write)
                    slots[id(slot)] = slot
                elif kind is Tile:
                    where = self._bytes(operand.offset_bytes, operand)
                    key = operand.space, id(where), is_write
                    tile = self._tiles.get(key)
                    if tile is None:
                        tile = self._tiles[key] = TileAccess(operand.space, where, is_write)
                    tiles[id(tile)] = tile
                elif kind is GlobalTile:
                    regions += self._region(operand, is_write)
        except KeyError:
            known = ", ".join(self.walker.queues)
            raise self._fault(
                op, iterator, f"is not issued to a queue of the program; its queues are {known}"
            ) from None
        except ProgramError as error:
            if isinstance(error, OpaqueError):
                raise
            raise self._fault(op, iterator, str(error)) from None
        accesses = tuple(slots.values()), tuple(tiles.values()), tuple(regions)
        return Operation(op.label, queue, uses, *accesses, source_line(iterator))

    def _fault(self, op: TileOp, iterator: Iterator[Item], what: str) -> ProgramError:
        line = source_line(iterator)
        source = f"{line}: " if line else ""
        prefix = "" if what.startswith(f"{op.label}:") else f"{op.label} on {op.queue} "
        return ProgramError(f"{source}{self.program.name}: {prefix}{what} (block {self._block})")

    def _ring_of(self, tile: RingTile) -> int:
        number = self._rings.get(id(tile.ring))
        if number is None:
            raise ProgramError(f"works on ring {tile.ring.name}, which is not the program's ring of that name")
        return number

    def _slot(self, tile: RingTile, sides: Mapping[tuple[int, bool], int], is_write: bool) -> RingAccess:
        number = self._ring_of(tile)
        where = self._bytes(tile.offset_bytes, tile)
        if where.end > tile.ring.slot_bytes:
            raise ProgramError(
                f"accesses bytes {where.start}..{where.end} of a slot of ring {tile.ring.name}, which has "
                f"{tile.ring.slot_bytes} bytes"
            )
        endpoint = sides[number, tile.is_producer]
        key = endpoint, id(where), is_write
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = RingAccess(number, endpoint, where, is_write)
        return slot

    def _bytes(self, start: int, tile: Tile | RingTile) -> Bytes:
        key = start, tile.rows, tile.cols, tile.stride, tile.fmt
        if type(start) is type(tile.rows) is type(tile.cols) is type(tile.stride) is int:
            where = self._placed.get(key)
            if where is None:
                where = self._placed[key] = self._checked_bytes(start, tile)
            return where
        return self._checked_bytes(start, tile)

    def _checked_bytes(self, start: int, tile: Tile | RingTile) -> Bytes:
        size = self._sizes.get(tile.fmt)
        if size is None:
            size = self._sizes[tile.fmt] = stored_format(tile.fmt).row_bytes
        width, pitch, rows = size(tile.cols), size(tile.stride), tile.rows
        if type(start) is not int or type(width) is not int or type(pitch) is not int or type(rows) is not int:
            raise ProgramError(
                "accesses on-chip bytes whose place or size depends on an index; only coordinates of global "
                "memory may depend on one"
            )
        if start < 0 or rows < 1 or width < 1 or pitch < width:
            raise ProgramError(
                f"accesses {rows} x {tile.cols} elements from byte {start}, with rows {tile.stride} elements "
                "apart; rows and columns must be at least 1, and the distance of rows at least their length"
            )
        if pitch == width or rows == 1:
            return Bytes(start, width * rows, width * rows, 1)
        return Bytes(start, width, pitch, rows)

    def _region(self, region: GlobalTile, is_write: bool) -> Iterator[RegionAccess]:
        tensor = region.tensor
        if type(region.rows) is not int or type(region.cols) is not int:
            raise ProgramError(f"accesses a region of tensor {tensor.name} whose size depends on an index")
        if region.rows < 1 or region.cols < 1:
            raise ProgramError(f"accesses {region.rows} x {region.cols} elements of tensor {tensor.name}")
        known = self._tensors.setdefault(tensor.name, tensor)
        if known is not tensor and known != tensor:
            raise ProgramError(
                f"uses the name {tensor.name} for a tensor of {_differing(tensor, known)}; one name must mean one "
                "tensor, else the check would miss accesses to the same elements"
            )
        if tensor.role in WRITABLE:
            yield RegionAccess(region, is_write)
        elif is_write:
            raise ProgramError(
                f"writes tensor {tensor.name}, whose role is {tensor.role}; only tensors of role "
                f"{' or '.join(WRITABLE)} may be written"
            )


def _differing(tensor: GlobalTensor, known: GlobalTensor) -> str:
    """Return the fields in which a tensor differs from another tensor with its name, in words."""
    names = [f.name for f in fields(tensor) if f.compare and getattr(tensor, f.name) != getattr(known, f.name)]
    here, there = (", ".join(f"{n} {getattr(t, n)}" for n in names) for t in (tensor, known))
    return f"{here}, elsewhere {there}"


def source_line(iterator: Iterator[Any]) -> str:
    """Return ``file:line`` of the yield at which the innermost generator has stopped."""
    while type(iterator) is GeneratorType and type(inner := iterator.gi_yieldfrom) is GeneratorType:
        iterator = inner
    if isinstance(iterator, GeneratorType) and iterator.gi_frame:
        return f"{iterator.gi_code.co_filename}:{iterator.gi_frame.f_lineno}"
    return ""


# ---------------------------------------------------------------- straight runs as short loops

#: Largest number of operations of a slice: loads with masks, the work, and stores; pieces of a product have the same
#: number of operations.
LONGEST = 12
#: Smallest number of repetitions for which a loop is smaller than the operations that it replaces; the automaton visits
#: a loop twice.
FEWEST = 3


def condensed(run: Sequence[Operation]) -> Iterator[Part]:
    """Yield operations as pieces and short loops of pieces: slices with equal operations.

    The accesses of an operation are widened to all accesses that its queue makes to the same slot, or memory, while the
    queue owns it: slices of a tile then become one repeated operation.  More bytes can only add races and never hide
    one. A phase that passes in this form is therefore proved; otherwise it is examined again in full (``ir.check``).
    """
    wide = list(_widened(run))
    numbers: dict[Hashable, int] = {}
    # Regions of global memory are compared separately: operations that access them do not repeat.
    ids = [-n if op.regions else numbers.setdefault(_alike(op), len(numbers)) for n, op in enumerate(wide, 1)]
    at = begun = 0
    while at < len(ids):
        period, times = _repeated(ids, at)
        if times < FEWEST:
            at += 1
            continue
        if begun < at:
            yield Piece(tuple(wide[begun:at]))
        body = Piece(tuple(wide[at : at + period]))
        yield LoopPart("", range(times), (body,), Symbol("the number of a slice"), ())
        at = begun = at + period * times
    if begun < len(ids):
        yield Piece(tuple(wide[begun:]))


def _repeated(ids: Sequence[int], at: int) -> tuple[int, int]:
    """Return the period that repeats most often from ``at`` on, and its number of repetitions."""
    best = (1, 1)
    for period in range(1, min(LONGEST, (len(ids) - at) // FEWEST) + 1):
        end = at + period
        while end < len(ids) and ids[end] == ids[end - period]:
            end += 1
        times = (end - at) // period
        if times >= FEWEST and period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best


def _alike(op: Operation) -> Hashable:
    """Return the common key of equal operations, whose accesses are the same objects (`_widened`)."""
    return op.label, op.queue, op.uses, tuple(map(id, op.slots)), tuple(map(id, op.tiles))


def _widened(run: Sequence[Operation]) -> Iterator[Operation]:
    """Yield operations with accesses widened as in `condensed`; equal accesses are one object."""
    held: dict[object, list[Bytes]] = defaultdict(list)
    touched: dict[object, list[Bytes]] = defaultdict(list)
    turns: dict[int, int] = defaultdict(int)
    accessed = []
    for op in run:
        slots = [(s, (s.endpoint, turns[s.endpoint], s.is_write)) for s in op.slots]
        tiles = [(t, (t.space, op.queue, t.is_write)) for t in op.tiles]
        for access, turn in slots:
            held[turn].append(access.where)
        for tile, memory in tiles:
            touched[memory].append(tile.where)
        accessed.append((op, slots, tiles))
        for endpoint, _, last in op.uses:
            turns[endpoint] += last
    hulls = {key: _hull(accesses) for key, accesses in held.items()}
    spans = {key: _joined(accesses) for key, accesses in touched.items()}
    one: dict[RingAccess | TileAccess, Any] = {}
    of_slots: dict[object, RingAccess] = {}
    of_tiles: dict[object, TileAccess] = {}
    for op, slots, tiles in accessed:
        wide: dict[int, RingAccess] = {}
        for s, key in slots:
            slot = of_slots.get(key)
            if slot is None:
                slot = RingAccess(s.ring, s.endpoint, hulls[key], s.is_write)
                slot = of_slots[key] = one.setdefault(slot, slot)
            wide[id(slot)] = slot
        joined: dict[int, TileAccess] = {}
        for t, memory in tiles:
            at = memory, id(t.where)
            whole = of_tiles.get(at)
            if whole is None:
                whole = TileAccess(t.space, spans[memory][t.where], t.is_write)
                whole = of_tiles[at] = one.setdefault(whole, whole)
            joined[id(whole)] = whole
        accesses = tuple(wide.values()), tuple(joined.values())
        yield Operation(op.label, op.queue, op.uses, *accesses, op.regions, op.source)


def _hull(runs: Sequence[Bytes]) -> Bytes:
    first = runs[0]
    if all(f == first for f in runs):
        return first
    start, end = min(f.start for f in runs), max(f.end for f in runs)
    return Bytes(start, end - start, end - start, 1)


def _joined(runs: Iterable[Bytes]) -> dict[Bytes, Bytes]:
    """Return, for each run of bytes, the runs that touch or overlap it, directly or through others."""
    joined: dict[Bytes, Bytes] = {}
    group: list[Bytes] = []
    end = 0
    for where in sorted(set(runs), key=lambda b: (b.start, b.end)):
        if group and where.start > end:
            joined |= dict.fromkeys(group, _hull(group))
            group = []
        group.append(where)
        end = max(end, where.end)
    return joined | dict.fromkeys(group, _hull(group))
