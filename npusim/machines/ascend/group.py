"""One Ascend core group: one AIC, its AIVs, their queues and their memories.

Where the device has a route from L0C to UB, what a product leaves for rows takes it, each AIV its share
of the rows; else (910B) it goes through a slot in GM.  The way back is UB to L1, or through GM again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, NoReturn

from npusim.config.engine import DmaEngine, FixpipeEngine, VectorEngine
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator, Ring
from npusim.ir.op import ALONE, PLAIN, Attributes, Opcode, Pace, Step, TileOp
from npusim.ir.program import Queue
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.algorithms.flow import Place
    from npusim.config.device import DeviceSpec
    from npusim.ir.tile import Operand, RingTile

AIC = "aic"
AIV = "aiv"
MTE1, MTE2, CUBE, FIXP = "aic.MTE1", "aic.MTE2", "aic.CUBE", "aic.FIXP"
GM, L1 = "gm", "aic.L1"
PING_PONG = 2
#: Elements of a slice of scores in the vendor's kernels: 16 x 512 (CATLASS), 32 x 256 (PTO);
#: ascend.md section 2.1.
SLICE_ELEMENTS = 8192


@dataclass(frozen=True, slots=True)
class VectorCore:
    """Queue and memory names of one AIV, and which rows of a tile it owns."""

    index: int

    @property
    def name(self) -> str:
        """Name of the core within its group."""
        return f"{AIV}{self.index}"

    @property
    def load(self) -> str:
        """Queue that brings tiles from GM to UB."""
        return f"{self.name}.MTE2"

    @property
    def vector(self) -> str:
        """Queue of the vector unit."""
        return f"{self.name}.VECTOR"

    @property
    def store(self) -> str:
        """Queue that takes tiles from UB to GM."""
        return f"{self.name}.MTE3"

    @property
    def ub(self) -> str:
        """Unified buffer."""
        return f"{self.name}.UB"


@dataclass(frozen=True, slots=True)
class RowSlice:
    """``rows`` rows of a tile from ``row``; ``first`` and ``last`` of their vector core's."""

    row: int
    rows: int
    first: bool
    last: bool


class AscendGroup:
    """One core group as programs see it: its queues, its memories and the rings in them."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.vector_cores = tuple(VectorCore(i) for i in range(device.core(AIV).per_group_count.value))
        self.allocator = Allocator(self._spaces())

    def _spaces(self) -> dict[str, AddressSpace]:
        members = [(AIC, AIC), *((v.name, AIV) for v in self.vector_cores)]
        spaces = {
            f"{member}.{name}": AddressSpace(
                f"{member}.{name}", buffer.capacity_bytes.value, buffer.alignment_bytes.value
            )
            for member, core in members
            for name, buffer in self.device.core(core).buffers.items()
        }
        gm = self.device.memory.gm
        share = gm.capacity_bytes.value // self.device.group_count.value
        spaces[GM] = AddressSpace(GM, share, gm.alignment_bytes.value)
        return spaces

    def queues(self) -> tuple[Queue, ...]:
        """Return the queues of the group: on this family each has an engine of its own."""
        aic = [Queue(f"{AIC}.{e}", AIC, e, AIC) for e in ("MTE2", "MTE1", "CUBE", "FIXP")]
        aiv = [Queue(f"{v.name}.{e}", AIV, e, v.name) for v in self.vector_cores for e in ("MTE2", "VECTOR", "MTE3")]
        return (*aic, *aiv)

    # ---------------------------------------------------------------- rings

    def cube_rings(
        self, prefix: str, rows: int, cols: int, depth: int, *, operand: str, accumulator: str, halves: int = 1
    ) -> CubeRings:
        """Place rings through L0A, L0B and L0C for products of ``rows`` x ``cols`` over ``depth``.

        Each has as many slots as fit, two at most: the vendor's kernels use L0 in ping-pong.
        """
        half, single = get_format(operand).size_bytes, get_format(accumulator).size_bytes

        def ring(name: str, size: int, producer: str, consumer: str, part: str = "") -> Ring:
            capacity = self.allocator.spaces[f"{AIC}.{name}"].capacity_bytes
            slots = max(1, min(PING_PONG, capacity // size // (halves if part else 1)))
            return self.allocator.ring(
                f"{AIC}.{name}", f"{prefix}{name}{part}", size, slots, producers=[producer], consumers=[consumer]
            )

        return CubeRings(
            ring("L0A", rows * depth * half, MTE1, CUBE),
            ring("L0B", depth * cols * half, MTE1, CUBE),
            tuple(
                ring("L0C", rows * ceil_div(cols, halves) * single, CUBE, FIXP, f" part {i}" if halves > 1 else "")
                for i in range(halves)
            ),
        )

    def l1_ring(self, name: str, rows: int, cols: int, fmt: str, depth: int = PING_PONG) -> Ring:
        """Place a ring of operand tiles from GM on their way to L0."""
        size = rows * cols * get_format(fmt).size_bytes
        return self.allocator.ring(L1, name, size, depth, producers=[MTE2], consumers=[MTE1])

    def ub_in(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring of tiles that a vector core loads from GM."""
        return self.allocator.ring(core.ub, name, size_bytes, depth, producers=[core.load], consumers=[core.vector])

    def ub_out(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring of tiles that a vector core stores to GM."""
        return self.allocator.ring(core.ub, name, size_bytes, depth, producers=[core.vector], consumers=[core.store])

    def ub_kept(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring that the vector unit hands to itself, some operations later."""
        return self.allocator.ring(core.ub, name, size_bytes, depth, producers=[core.vector], consumers=[core.vector])

    def cross_ring(
        self,
        name: str,
        rows: int,
        cols: int,
        fmt: str,
        depth: int,
        *,
        producers: Sequence[str],
        consumers: Sequence[str],
        period: int = 1,
        space: str = GM,
    ) -> Ring:
        """Place a ring of slots between AIC and AIVs, in global memory or where one reads it, with counter flags."""
        size = rows * cols * get_format(fmt).size_bytes
        return self.allocator.ring(
            space,
            name,
            size,
            depth,
            producers=producers,
            consumers=consumers,
            flag="counter",
            period=min(period, depth),
        )

    def is_direct(self, what: str, place: Place) -> bool:
        """Return whether a name goes between AIC and AIVs by a route of its own, and not through global memory.

        Raises `TilingError` where the device has neither.
        """
        ends = (AIC, "L0C", AIV, "UB") if place == "down" else (AIV, "UB", AIC, "L1")
        sender, source, reader, destination = ends
        has = self.device.has_route
        if has(sender, source, destination):
            return True
        if not (has(sender, source, "GM") and has(reader, "GM", destination)):
            self.refuse_route(f"{what} goes from {sender} to {reader}", source, destination)
        return False

    @property
    def edge(self) -> int:
        """Edge of a square float16 tile of which L0A holds as many as a ping-pong takes.

        As the vendor's kernels cut products (ascend.md section 1.2): 128 where L0A has 64 KiB.
        """
        room = self.capacity_bytes("L0A") // PING_PONG
        return isqrt(room // get_format("float16").size_bytes) // self.fractal * self.fractal

    @property
    def fractal(self) -> int:
        """Edge of the CUBE's step in float16, which tiles are multiples of."""
        return self.device.matrix_engine(AIC).fractals["float16"].m_elements.value

    def capacity_bytes(self, buffer: str) -> int:
        """Return the size of a buffer of the AIC."""
        return self.allocator.spaces[f"{AIC}.{buffer}"].capacity_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that a vector core's reduction turns into one value before its next pass."""
        engine = self.device.engine(AIV, "VECTOR")
        assert isinstance(engine, VectorEngine)
        return engine.block_bytes.value

    def share(self, core: VectorCore, rows: int) -> tuple[int, int]:
        """Return first row and rows of a vector core's share of ``rows``, possibly none."""
        each = ceil_div(rows, len(self.vector_cores))
        start, end = min(core.index * each, rows), min((core.index + 1) * each, rows)
        return start, end - start

    def largest_share(self, rows: int) -> int:
        """Return the most rows one vector core gets of a tile of ``rows``."""
        return ceil_div(rows, len(self.vector_cores))

    def refuse_route(self, what: str, source: str, destination: str) -> NoReturn:
        """Raise `TilingError`: ``what`` needs a route that the device file has not."""
        there = sorted(
            f"{r.source} to {r.destination}"
            for core in (AIC, AIV)
            for engine in self.device.core(core).engines.values()
            if isinstance(engine, DmaEngine | FixpipeEngine)
            for r in engine.routes.values()
        )
        raise TilingError(
            f"{what}, and no route of {self.device.name} leads from {source} to {destination}; there are "
            + ", ".join(there)
        )

    @property
    def row_sum(self) -> str:
        """Order in which the vector unit adds up a row."""
        assert self.device.row_sum is not None  # a device with AIVs has vector units
        return self.device.row_sum.value

    def arithmetic(self, fmt: str) -> str:
        """Return the registry name of the CUBE's arithmetic for operands of ``fmt``."""
        return self.device.matrix_engine(AIC).arithmetic_of(fmt)


@dataclass(frozen=True)
class CubeRings:
    """The rings every matrix product passes through."""

    left: Ring
    right: Ring
    accumulators: tuple[Ring, ...]


def move(label: str, queue: str, dst: Operand, src: Operand, attributes: Attributes = PLAIN, name: str = "") -> TileOp:
    """Return a data move; a change of format on the way is a cast (the fixpipe's inline cast)."""
    opcode = Opcode.COPY if dst.fmt == src.fmt else Opcode.CAST
    return TileOp(label, queue, queue, (Step(opcode, dst, (src,), attributes, name),))


def compute(label: str, queue: str, steps: Sequence[Step], pace: Pace = ALONE) -> TileOp:
    """Return one queue entry of the unit behind ``queue``."""
    return TileOp(label, queue, queue, tuple(steps), pace=pace)


def pass_on(label: str, queue: str, *tiles: RingTile) -> TileOp:
    """Return an operation that only takes or hands on slots: flags without work."""
    return TileOp(label, queue, queue, (), tiles)
