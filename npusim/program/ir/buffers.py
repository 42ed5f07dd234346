"""Storage of tiles: an allocator per memory, and rings of slots that one engine passes to another.

A :class:`Ring` is a FIFO.  Producers acquire a slot, fill it and commit it; consumers acquire the front slot, read it
and release it.  Generation ``g`` is in slot ``g % depth``; it is ready after every producer's commit, and its slot is
free again after every consumer's release.  This is Ascend C's AllocTensor / EnQue / DeQue / FreeTensor handshake
without hidden state.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal

from npusim.errors import BufferOverflowError, ProgramError
from npusim.formats import stored_format
from npusim.late_methods import dataclass
from npusim.program.ir.tile import RingTile, Tile
from npusim.units import format_bytes, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FlagKind = Literal["binary", "counter", "scoreboard"]


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """One memory: its capacity and the alignment of allocations, in bytes; ``is_physical``: whether the limit is the
    device's.
    """

    name: str
    capacity_bytes: int
    alignment_bytes: int
    is_physical: bool = True


@dataclass(frozen=True)
class Ring:
    """``depth`` slots of ``slot_bytes`` in one memory, which producers pass to consumers in order.

    ``flag`` is the kind of signal: ``binary`` event flags between the pipes of one core (one id per slot and
    direction), ``counter`` flags between cores (one ready and one free counter), or the ``scoreboard`` of a
    multiprocessor, which has no flags: an instruction waits until its registers are loaded or stored, and warps wait
    for groups of copies to shared memory.  A consumer of a counter ring signals every ``period`` releases.  ``peeks``
    are consumers that also read each slot before they release it, with a separate cursor (:meth:`peek`).
    """

    name: str
    space: str
    offset_bytes: int
    slot_bytes: int
    depth: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    flag: FlagKind = "binary"
    period: int = 1
    peeks: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ProgramError(f"ring {self.name}: depth {self.depth}, but it needs at least 1 slot")
        if not 1 <= self.period <= self.depth:
            raise ProgramError(
                f"ring {self.name}: acknowledgement period {self.period} must be in 1..depth = {self.depth}, "
                "or its producer would wait forever"
            )

    def start(self, generation: int) -> int:
        """Return the address at which the slot of a generation begins in its memory."""
        return self.offset_bytes + generation % self.depth * self.slot_bytes

    def fill(
        self, rows: int, cols: int, fmt: str, *, first: bool = True, last: bool = True, stride: int | None = None
    ) -> RingTile:
        """Return the producer's view of its current slot; an operation with ``first`` waits for the slot, and one with
        ``last`` commits it.
        """
        return self._tile(True, rows, cols, fmt, stride, first, last)

    def front(
        self, rows: int, cols: int, fmt: str, *, first: bool = True, last: bool = True, stride: int | None = None
    ) -> RingTile:
        """Return a consumer's view of its front slot; an operation with ``first`` waits for the slot, and one with
        ``last`` releases it.
        """
        return self._tile(False, rows, cols, fmt, stride, first, last)

    def peek(
        self, rows: int, cols: int, fmt: str, *, first: bool = True, last: bool = True, stride: int | None = None
    ) -> RingTile:
        """Return a consumer's view of a slot that it releases later; an operation with ``first`` waits for the slot,
        and one with ``last`` advances the view.
        """
        return replace(self._tile(False, rows, cols, fmt, stride, first, last), is_peek=True)

    def _tile(
        self, is_producer: bool, rows: int, cols: int, fmt: str, stride: int | None, first: bool, last: bool
    ) -> RingTile:
        return RingTile(self, is_producer, rows, cols, stride or cols, fmt, 0, first, last)


@dataclass
class Allocator:
    """Allocates tiles and rings one after another; :meth:`check` checks the complete result.

    The check runs after all allocations, so that the error names every tile and ring, not only the last one. Phases of
    a program reuse the same memory (:meth:`start_phase`).
    """

    spaces: Mapping[str, AddressSpace]
    used_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Placed tiles and rings by memory, for its error: name, slots, bytes of a slot.
    tenants: dict[str, list[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(list))
    rings: list[Ring] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    prefix: str = ""

    def start_phase(self, prefix: str = "") -> None:
        """Check the previous phase and free its memory; its rings stay in the list, and names of new rings begin with
        ``prefix``.
        """
        self.check()
        self.prefix = prefix
        self.used_bytes = defaultdict(int)
        self.tenants = defaultdict(list)

    def tile(self, space: str, name: str, rows: int, cols: int, fmt: str) -> Tile:
        """Allocate a tile that a single engine uses (running state)."""
        size = stored_format(fmt).bytes_of(rows * cols)
        return Tile(space, self._place(space, name, size, 1), rows, cols, cols, fmt)

    def ring(
        self,
        space: str,
        name: str,
        slot_bytes: int,
        depth: int,
        *,
        producers: Sequence[str],
        consumers: Sequence[str],
        flag: FlagKind = "binary",
        period: int = 1,
        peeks: Sequence[str] = (),
    ) -> Ring:
        """Allocate a ring of ``depth`` slots."""
        slot = round_up(slot_bytes, self._space(space).alignment_bytes)
        name = self.prefix + name
        offset = self._place(space, name, slot, depth)
        ring = Ring(name, space, offset, slot, depth, tuple(producers), tuple(consumers), flag, period, tuple(peeks))
        self.rings.append(ring)
        return ring

    def check(self) -> None:
        """Raise :class:`BufferOverflowError`, which names every tile and ring of each memory that is too small."""
        faults: dict[str, list[str]] = {}
        for space, used in self.used_bytes.items():
            capacity = self._space(space).capacity_bytes
            if used > capacity:
                listed = " + ".join(
                    f"{name} {f'{depth}×' if depth > 1 else ''}{format_bytes(size)}"
                    for name, depth, size in self.tenants[space]
                )
                fault = (
                    f"{listed} = {format_bytes(used)} > {format_bytes(capacity)} ({used:,} bytes needed, "
                    f"{capacity:,} available)"
                )
                faults.setdefault(fault, []).append(space)
        if faults:
            raise BufferOverflowError("; ".join(f"{', '.join(s)}: {f}" for f, s in faults.items()))

    def _space(self, space: str) -> AddressSpace:
        if space not in self.spaces:
            raise ProgramError(f"there is no memory {space!r} on this device; its memories: {', '.join(self.spaces)}")
        return self.spaces[space]

    def _place(self, space: str, name: str, slot_bytes: int, depth: int) -> int:
        offset = round_up(self.used_bytes[space], self._space(space).alignment_bytes)
        end = self.used_bytes[space] = offset + slot_bytes * depth
        self.peak_bytes[space] = max(self.peak_bytes.get(space, 0), end)
        core = space.partition(".")[0]  # equal cores have equal contents, so that they share one error
        self.tenants[space].append((name.removeprefix(f"{core} "), depth, slot_bytes))
        return offset
