"""A core family from outside: one unified core, whose matrix unit reads and writes UB, where rows work too.

Four queues in order (LOAD, MATRIX, VECTOR, STORE) and one memory.  Nothing is sliced or run ahead: a tile's
stages follow one another, and slots in pairs let loads and stores run beside them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npusim.kernel import Attributes, Blocks, Opcode, Phase, Stage, TilingError, Visit, WorkTile
from npusim.machine import (
    WHOLE,
    Allocator,
    CoreFamily,
    DeviceSpec,
    EnginePricing,
    Frame,
    Item,
    Machine,
    Operand,
    ProgramPhase,
    Queue,
    Ring,
    RingTile,
    Source,
    Step,
    Tile,
    TileOp,
    TileProgram,
    bind,
    get_format,
    memories,
    program_phase,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CORE, UB = "core", "core.UB"
QUEUES = LOAD, MATRIX, VECTOR, STORE = tuple(f"{CORE}.{e}" for e in ("LOAD", "MATRIX", "VECTOR", "STORE"))


class UnifiedMachine(Machine):
    """The family on one device."""

    def build(
        self, name: str, phases: Iterable[tuple[Phase, Any]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program; the phases say all, tiling fields nothing beyond them."""
        listed = [phase for phase, _ in phases]
        allocator = Allocator(memories(self.device, CORE))
        built = []
        for phase in listed:
            allocator.start_phase()
            built.append(UnifiedPhase(phase, self.device, allocator).build())
        allocator.check()
        queues = [Queue(q, CORE, q.rpartition(".")[2], CORE) for q in QUEUES]
        return self.program(name, listed, built, queues, allocator, EnginePricing, flops=flops, notes=notes)


class UnifiedPhase:
    """One phase: its names in UB, and its operations in order."""

    def __init__(self, phase: Phase, device: DeviceSpec, allocator: Allocator) -> None:
        self.phase, self.frame, self.allocator = phase, Frame(phase), allocator
        frame, unit = self.frame, device.matrix_engine(CORE)
        assert device.row_sum is not None
        self.tables = frame.tables(device.row_sum.value)
        self.how: dict[Stage, Attributes] = {}
        for s in frame.stages:
            if s.is_product:
                (row,) = s.rows
                self.how[s] = frame.product_attributes(s, lambda operand, _result: unit.arithmetic_of(operand))
                if frame.places[row.dst] == "state":
                    whose = f"{frame.label(row.dst)} belongs to the vector unit"
                    raise TilingError(f"accumulate=chained: {whose}; use accumulate=fresh")
        self.rings: dict[str, Ring] = {}
        self.tiles: dict[str, Tile] = {}
        self.sums: dict[Stage, Ring] = {}
        self._place()
        self.bodies = {loop: partial(self._stages, loop.stages) for loop in phase.loops}

    def build(self) -> ProgramPhase:
        """Return the phase, its cells dealt to cores round robin."""
        return program_phase(self.frame, self._items)

    # ---------------------------------------------------------------- memory

    def _place(self) -> None:
        """Place rings of what one queue hands to another, and tiles of what stays with the vector unit."""
        frame = self.frame
        for root in dict.fromkeys(frame.storage.values()):
            sharing = [n for n, r in frame.storage.items() if r == root]
            size = max(self._bytes(n) for n in sharing)
            users = {_queue(s) for s in frame.stages for n in sharing if n in (*s.read, *s.written)}
            makers = [s for s in frame.stages if s.is_product and s.rows[0].dst == root]
            for s in makers:
                fmt = self.how[s].accumulator_format
                if fmt != frame.fmt(root):  # the vector unit converts it
                    self.sums[s] = self._ring(f"{s.name} sums", self._bytes(root, fmt), 2, MATRIX, [VECTOR])
            maker = MATRIX if makers and not self.sums.keys() & set(makers) else VECTOR
            match frame.places[root]:
                case "global" | "mask" as what:
                    depth = 2 if root in self.frame.visited or what == "mask" else 1
                    self.rings[root] = self._ring(root, size, depth, LOAD, sorted(users))
                case "out":
                    self.rings[root] = self._ring(root, size, 2, maker, [STORE])
                case "up":
                    self.rings[root] = self._ring(root, size, 2, VECTOR, [MATRIX])
                case "down" if maker == MATRIX:
                    self.rings[root] = self._ring(root, size, 2, MATRIX, [VECTOR])
                case _:
                    rows = self.phase.sizes[frame.axes(root)[0]]
                    self.tiles[root] = self.allocator.tile(UB, root, rows, frame.width(root), frame.fmt(root))

    def _bytes(self, n: str, fmt: str = "") -> int:
        """Return the bytes of a name's largest tile, in a format other than its own if one is given."""
        count = self.phase.sizes[self.frame.axes(n)[0]] * self.frame.width(n)
        return count * get_format(fmt or self.frame.fmt(n)).size_bytes

    def _ring(self, n: str, size: int, depth: int, producer: str, consumers: Sequence[str]) -> Ring:
        name = self.frame.prefix + self.frame.label(n) if n in self.phase.names else self.frame.prefix + n
        return self.allocator.ring(UB, name, size, depth, producers=[producer], consumers=consumers)

    # ---------------------------------------------------------------- order

    def _items(self, cell: WorkTile) -> Iterator[Item]:
        frame, phase = self.frame, self.phase
        for n in self.frame.held:
            yield self._load(n, cell, WHOLE)
            yield from self._pass_on(n, cell, "take", first=True)
        fills = [
            Step(Opcode.FILL, self.tiles[frame.storage[n]].part(0, cell.rows), (w.start,))
            for n, w in phase.names.items()
            if w.start is not None
        ]
        if fills:
            yield TileOp("start", VECTOR, VECTOR, tuple(fills))
        for loop in phase.loops:
            yield from frame.loop(loop, self.bodies[loop], cell)
        yield from self._stages(phase.finish, cell, WHOLE)
        for n in self.frame.held:
            yield from self._pass_on(n, cell, "release", last=True)

    def _stages(self, stages: tuple[Stage, ...], cell: WorkTile, tile: Visit) -> Iterator[TileOp]:
        read = {n for s in stages for n in s.read}
        for n in (*self.frame.visited, *sorted(tile.only)):
            if n in read:
                yield self._load(n, cell, tile)
        for s in stages:
            uses = stages, cell, tile
            yield from self._product(s, *uses) if s.is_product else self._rows(s, *uses)
            for n in s.written:
                if self.frame.places[n] == "out":
                    target = self.frame.cut(n, cell, tile)
                    done = self.rings[n].front(*self._shape(n, cell, tile))
                    yield _op(f"{self.frame.label(n)}.store", STORE, Opcode.COPY, target, (done,), name=n)

    def _product(self, s: Stage, stages: tuple[Stage, ...], cell: WorkTile, tile: Visit) -> Iterator[TileOp]:
        """Yield a product, right where rows read it; a conversion is the vector unit's."""
        (row,), how = s.rows, self.how[s]
        operands = tuple(self._view(n, s, stages, cell, tile) for n in row.srcs)
        if s not in self.sums:
            yield _op(s.name, MATRIX, Opcode.MATMUL, self._view(row.dst, s, stages, cell, tile), operands, how, row.dst)
            return
        rows, cols, _ = self._shape(row.dst, cell, tile)
        shape = rows, cols, how.accumulator_format
        yield _op(s.name, MATRIX, Opcode.MATMUL, self.sums[s].fill(*shape), operands, how)
        kept = self._view(row.dst, s, stages, cell, tile)
        yield _op(f"{s.name}.convert", VECTOR, Opcode.CAST, kept, (self.sums[s].front(*shape),), name=row.dst)

    def _rows(self, s: Stage, stages: tuple[Stage, ...], cell: WorkTile, tile: Visit) -> Iterator[TileOp]:
        bound: dict[str, Source] = {**self.phase.constants, **(self.phase.per_tile(tile) if tile.cols else {})}
        for n in (*s.written, *s.read):
            if n in self.phase.names and (n not in self.phase.masks or n in tile.only):
                bound[n] = self._view(n, s, stages, cell, tile)
        op = TileOp(s.name, VECTOR, VECTOR, bind(self.tables[s], bound))
        touched = {t.ring for t in op.ring_tiles()}
        op.handshake = tuple(t for t in bound.values() if isinstance(t, RingTile) and t.ring not in touched)
        yield op

    # ---------------------------------------------------------------- tiles

    def _shape(self, n: str, cell: WorkTile, tile: Visit) -> tuple[int, int, str]:
        frame = self.frame
        fmt = "int8" if n in self.phase.masks else frame.fmt(n)
        return frame.size(cell, frame.axes(n)[0], tile), frame.cols(n, cell, tile), fmt

    def _view(self, n: str, s: Stage, stages: tuple[Stage, ...], cell: WorkTile, tile: Visit) -> Operand:
        """Return a name's tile as a stage sees it: its queue waits at the first use, hands on after the last."""
        storage = self.frame.storage
        root, shape = storage.get(n, n), self._shape(n, cell, tile)
        if root in self.tiles:
            return self.tiles[root].part(0, shape[0], 0, shape[1])
        ring, queue = self.rings[root], VECTOR if s in self.sums and n in s.written else _queue(s)
        if root in self.frame.held:
            return ring.front(*shape, first=False, last=False)
        uses = [
            x for x in stages if _queue(x) == queue and any(storage.get(m, m) == root for m in (*x.written, *x.read))
        ]
        view = ring.fill if queue in ring.producers else ring.front
        return view(*shape, first=s in (uses or [s])[:1], last=s in (uses or [s])[-1:])

    def _load(self, n: str, cell: WorkTile, tile: Visit) -> TileOp:
        rows = 0, self.frame.size(cell, self.frame.row_axis, tile)
        mask = n in self.phase.masks
        source = self.frame.mask_cut(n, cell, tile, rows) if mask else self.frame.cut(n, cell, tile)
        slot = self.rings[n].fill(source.rows, source.cols, source.fmt)
        return _op(f"{self.frame.label(n)}.load", LOAD, Opcode.COPY, slot, (source,), name=n)

    def _pass_on(
        self, n: str, cell: WorkTile, what: str, *, first: bool = False, last: bool = False
    ) -> Iterator[TileOp]:
        """Yield what takes or releases an operand that stays for the whole cell."""
        slot = self.rings[n].front(*self._shape(n, cell, WHOLE), first=first, last=last)
        for queue in self.rings[n].consumers:
            yield TileOp(f"{self.frame.label(n)}.{what}", queue, queue, (), (slot,))


def _queue(s: Stage) -> str:
    return MATRIX if s.is_product else VECTOR


def _op(
    label: str,
    queue: str,
    opcode: Opcode,
    dst: Operand,
    srcs: tuple[Source, ...],
    how: Attributes | None = None,
    name: str = "",
) -> TileOp:
    return TileOp(label, queue, queue, (Step(opcode, dst, srcs, how or Attributes(), name),))


#: The manifest of the family: it runs attention and kernels whose blocks are their own, with the kernels' fields alone.
UNIFIED = CoreFamily(
    name="unified",
    machine=UnifiedMachine,
    fields={"attention": Blocks, "stages": ""},
    cores=(CORE,),
    unread={"flags.cross_core_*": "families of two kinds of cores, which meet through flags"},
)
