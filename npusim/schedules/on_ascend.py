"""The Ascend core group as schedules see it: one AIC, its AIVs, their queues and their memories.

:class:`AscendGroup` places rings and emits the moves and products that every schedule on this
family is made of.  On the 910B the AIC and the AIVs meet only in global memory: scores go
L0C -> FIXP -> slot in GM -> UB, and P the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator, Ring
from npusim.ir.op import PLAIN, Attributes, Opcode, Step, TileOp
from npusim.ir.program import Queue
from npusim.ir.tile import Operand, RingTile
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from npusim.spec.device import DeviceSpec

AIC = "aic"
AIV = "aiv"
MTE1, MTE2, CUBE, FIXP = "aic.MTE1", "aic.MTE2", "aic.CUBE", "aic.FIXP"
GM = "gm"
#: Edge of the tiles that L0A, L0B and half of L0C hold in ping-pong: 128 x 128 float16 is 32 KiB
#: of the 64 KiB L0A/L0B, 128 x 128 float32 is 64 KiB of the 128 KiB L0C (ascend.md section 1.2).
L0_EDGE = 128
PING_PONG = 2
#: Elements of a slice of scores in the vendor's kernels: 16 x 512 (CATLASS), 32 x 256 (PTO);
#: ascend.md section 2.1.
SLICE_ELEMENTS = 8192
#: What one block reduction turns into one value (ascend.md section 1.5: per 32 B block).
UB_BLOCK_BYTES = 32


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
    """``rows`` rows of a tile from ``row``; ``first`` and ``last`` of their vector core."""

    row: int
    rows: int
    first: bool
    last: bool


class AscendGroup:
    """Builds a program for one core group: allocates rings, emits moves and matrix products."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.vector_cores = tuple(
            VectorCore(i) for i in range(device.core(AIV).per_group_count.value)
        )
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
        aiv = [
            Queue(f"{v.name}.{e}", AIV, e, v.name)
            for v in self.vector_cores
            for e in ("MTE2", "VECTOR", "MTE3")
        ]
        return (*aic, *aiv)

    # ---------------------------------------------------------------- rings

    def cube_rings(
        self, prefix: str = "", rows: int = L0_EDGE, cols: int = L0_EDGE, depth: int = L0_EDGE, *,
        operand: str = "float16", accumulator: str = "float32",
    ) -> CubeRings:  # fmt: skip
        """Place rings through L0A, L0B and L0C for products of ``rows`` x ``cols`` over ``depth``.

        Each has as many slots as fit, two at most: the vendor's kernels use L0 in ping-pong.
        """
        half, single = get_format(operand).size_bytes, get_format(accumulator).size_bytes

        def ring(name: str, size: int, producer: str, consumer: str) -> Ring:
            capacity = self.allocator.spaces[f"{AIC}.{name}"].capacity_bytes
            slots = max(1, min(PING_PONG, capacity // size))
            return self.allocator.ring(
                f"{AIC}.{name}",
                f"{prefix}{name}",
                size,
                slots,
                producers=[producer],
                consumers=[consumer],
            )

        return CubeRings(
            ring("L0A", rows * depth * half, MTE1, CUBE),
            ring("L0B", depth * cols * half, MTE1, CUBE),
            ring("L0C", rows * cols * single, CUBE, FIXP),
        )

    def l1_ring(self, name: str, rows: int, cols: int, fmt: str, depth: int = PING_PONG) -> Ring:
        """Place a ring of operand tiles from GM on their way to L0."""
        size = rows * cols * get_format(fmt).size_bytes
        return self.allocator.ring("aic.L1", name, size, depth, producers=[MTE2], consumers=[MTE1])

    def ub_in(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring of tiles that a vector core loads from GM."""
        return self.allocator.ring(
            core.ub, name, size_bytes, depth, producers=[core.load], consumers=[core.vector]
        )

    def ub_out(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring of tiles that a vector core stores to GM."""
        return self.allocator.ring(
            core.ub, name, size_bytes, depth, producers=[core.vector], consumers=[core.store]
        )

    def ub_kept(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Place a ring that the vector unit hands to itself, some operations later."""
        return self.allocator.ring(
            core.ub, name, size_bytes, depth, producers=[core.vector], consumers=[core.vector]
        )

    def cross_ring(
        self, name: str, rows: int, cols: int, fmt: str, depth: int, *,
        producers: Sequence[str], consumers: Sequence[str], period: int = 1,
    ) -> Ring:  # fmt: skip
        """Place a ring of slots in global memory between AIC and AIVs, with counter flags."""
        size = rows * cols * get_format(fmt).size_bytes
        return self.allocator.ring(
            GM, name, size, depth,
            producers=producers, consumers=consumers, flag="counter", period=period,
        )  # fmt: skip

    # ---------------------------------------------------------------- rows

    def row_slices(self, rows: int, slice_rows: int) -> list[list[RowSlice]]:
        """Return, per vector core, the slices of its share of ``rows`` (possibly none)."""
        share = ceil_div(rows, len(self.vector_cores))
        shares = []
        for core in self.vector_cores:
            start, end = min(core.index * share, rows), min((core.index + 1) * share, rows)
            shares.append(
                [
                    RowSlice(r, min(slice_rows, end - r), r == start, r + slice_rows >= end)
                    for r in range(start, end, slice_rows)
                ]
            )
        return shares

    def largest_share(self, rows: int) -> int:
        """Return the most rows one vector core gets of a tile of ``rows``."""
        return ceil_div(rows, len(self.vector_cores))

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
    accumulator: Ring


def move(
    label: str, queue: str, dst: Operand, src: Operand, attributes: Attributes = PLAIN, name: str = ""
) -> TileOp:
    """Return a data move; a change of format on the way is a cast (the fixpipe's inline cast)."""
    opcode = Opcode.COPY if dst.fmt == src.fmt else Opcode.CAST
    return TileOp(label, queue, queue, (Step(opcode, dst, (src,), attributes, name),))


def compute(label: str, queue: str, steps: Sequence[Step]) -> TileOp:
    """Return one queue entry of the unit behind ``queue``."""
    return TileOp(label, queue, queue, tuple(steps))


def pass_on(label: str, queue: str, *tiles: RingTile) -> TileOp:
    """Return an operation that only takes or hands on slots: flags without work."""
    return TileOp(label, queue, queue, (), tiles)


Part = Callable[[int, int], RingTile]


def whole(tile: RingTile) -> Part:
    """Return an operand that is used in one piece."""
    return lambda _k, _size: tile


def product(
    label: str, rings: CubeRings, rows: int, cols: int, depth: int, *,
    left: Part, right: Part, attributes: Attributes, start: bool = True, end: bool = True,
    piece: int = L0_EDGE,
) -> Iterator[TileOp]:  # fmt: skip
    """Yield the moves and products of one accumulator tile: ``rows`` x ``cols`` over ``depth``.

    ``left(k, size)`` and ``right(k, size)`` return the operands in L1 for ``size`` of the depth
    from ``k``, with their handshake.  ``start`` opens the accumulator's slot and ``end`` hands it
    to the fixpipe; several calls between them accumulate in k order, ``piece`` at a time.  Operands are reloaded to L0
    for each product, as the vendor's kernels do (ascend.md section 2.2).
    """
    pieces = list(chunks(depth, piece))
    for index, (k, size) in enumerate(pieces):
        first, last = start and index == 0, end and index == len(pieces) - 1
        a, b = left(k, size), right(k, size)
        yield move(f"{label}.load_left", MTE1, rings.left.fill(a.rows, a.cols, a.fmt), a)
        yield move(f"{label}.load_right", MTE1, rings.right.fill(b.rows, b.cols, b.fmt), b)
        target = rings.accumulator.fill(
            rows, cols, attributes.accumulator_format, first=first, last=last
        )
        operands = (
            rings.left.front(a.rows, a.cols, a.fmt), rings.right.front(b.rows, b.cols, b.fmt),
        )  # fmt: skip
        how = attributes if first else replace(attributes, accumulate=True)
        yield compute(f"{label}.mmad", CUBE, (Step(Opcode.MATMUL, target, operands, how),))
