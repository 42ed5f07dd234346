"""One Ascend core group: one AIC, its AIVs, their queues and their memories.

If the device has a route from L0C to UB, a product's results for rows use the route, and each AIV gets its share of the
rows; otherwise (910B) they pass through a slot in GM.  The way back is from UB to L1, or through GM again.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from npusim.config.core_units import DmaEngine, FixpipeEngine, RegisterVectorEngine, VectorUnit
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.formats.reductions import CHAINS
from npusim.late_methods import dataclass
from npusim.machines.base import memories
from npusim.machines.decisions import AscendDecisions, VectorCode
from npusim.program.ir.buffers import AddressSpace, Allocator, Ring
from npusim.program.ir.content import record
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.tile_program import Queue
from npusim.units import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.flow import Place
    from npusim.machines.decisions import Route
    from npusim.program.ir.tile import Operand, RingTile

AIC = "aic"
AIV = "aiv"
MTE1, MTE2, CUBE, FIXP = "aic.MTE1", "aic.MTE2", "aic.CUBE", "aic.FIXP"
GM, L1 = "gm", "aic.L1"
PING_PONG = 2
#: Number of elements in a slice of scores in the vendor's kernels: 16 x 512 (CATLASS), 32 x 256 (PTO); ascend.md
#: section 2.1.
SLICE_ELEMENTS = 8192


@dataclass(frozen=True, slots=True)
class VectorCore:
    """One AIV by name: its UB, and its queues, which load tiles from GM to UB, process them and store them."""

    index: int
    name: str
    load: str
    vector: str
    store: str
    ub: str


@record
class RowSlice:
    """``rows`` rows of a tile, from ``row`` on; they begin at row ``at`` of the ``share`` rows of their vector core.

    Whether the rows are the first and the last of that share.
    """

    row: int
    rows: int
    at: int
    share: int
    first: bool = True
    last: bool = True


class VectorWork(NamedTuple):
    """Work of a vector unit's operation in addition to its steps.

    ``decided``: the decisions of its kernel.  ``code``: its form on a unit with registers.  ``hands_on``: the phase in
    which this operation is the first to pass a tile to other cores; empty: no phase.
    """

    decided: AscendDecisions = AscendDecisions()
    code: VectorCode | None = None
    hands_on: str = ""


class AscendGroup:
    """One core group as programs see it: its queues, its memories and the rings in them."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        names = (f"{AIV}{i}" for i in range(device.core(AIV).per_group_count.value))
        self.vector_cores = tuple(
            VectorCore(i, n, f"{n}.MTE2", f"{n}.VECTOR", f"{n}.MTE3", f"{n}.UB") for i, n in enumerate(names)
        )
        spaces = memories(device, AIC)
        for core in self.vector_cores:
            spaces |= memories(device, AIV, core.name)
        gm = device.memory.gm
        share = gm.capacity_bytes.value // device.group_count.value
        spaces[GM] = AddressSpace(GM, share, gm.alignment_bytes.value)
        self.allocator = Allocator(spaces)

    def queues(self) -> tuple[Queue, ...]:
        """Return the queues of the group: on this family each has a separate engine."""
        aic = [Queue(f"{AIC}.{e}", AIC, e, AIC) for e in ("MTE2", "MTE1", "CUBE", "FIXP")]
        aiv = [Queue(f"{v.name}.{e}", AIV, e, v.name) for v in self.vector_cores for e in ("MTE2", "VECTOR", "MTE3")]
        return (*aic, *aiv)

    # ---------------------------------------------------------------- rings

    def ring(self, space: str, name: str, size_bytes: int, depth: int, producer: str, consumer: str) -> Ring:
        """Allocate a ring from one queue to another."""
        return self.allocator.ring(space, name, size_bytes, depth, producers=[producer], consumers=[consumer])

    def ub_kept(self, core: VectorCore, name: str, size_bytes: int, depth: int) -> Ring:
        """Allocate a ring from the vector unit to itself; the unit reads a slot some operations after it has written
        it.
        """
        return self.ring(core.ub, name, size_bytes, depth, core.vector, core.vector)

    def is_direct(self, what: str, place: Place, route: Route | None = None) -> bool:
        """Return whether a name is transferred between AIC and AIVs by a direct route instead of through global memory.

        Raises `TilingError` if the device has no route, or lacks the ``route`` that is named.
        """
        ends = (AIC, "L0C", AIV, "UB") if place == "down" else (AIV, "UB", AIC, "L1")
        sender, source, reader, destination = ends
        has = self.device.has_route
        if route != "gm" and has(sender, source, destination):
            return True
        if route == "chip":
            self.refuse_route(f"route=chip: {what} goes from {sender} to {reader}", source, destination)
        if not (has(sender, source, "GM") and has(reader, "GM", destination)):
            self.refuse_route(f"{what} goes from {sender} to {reader}", source, destination)
        return False

    @property
    def edge(self) -> int:
        """Edge of the largest square float16 tile that fits L0A twice (ping-pong).

        The size of pieces of products in the vendor's kernels (ascend.md section 1.2): 128 if L0A has 64 KiB.
        """
        room = self.capacity_bytes("L0A") // PING_PONG
        return isqrt(room // get_format("float16").size_bytes) // self.fractal * self.fractal

    @property
    def fractal(self) -> int:
        """Edge of the CUBE's step in float16; the edges of tiles are multiples of it."""
        return self.device.matrix_engine(AIC).fractals["float16"].m_elements.value

    def capacity_bytes(self, buffer: str) -> int:
        """Return the size of a buffer of the AIC."""
        return self.allocator.spaces[f"{AIC}.{buffer}"].capacity_bytes

    @property
    def block_bytes(self) -> int:
        """Number of bytes that a vector core's reduction combines into one value in a pass."""
        return self.vector_engine.block_bytes.value

    @property
    def vector_engine(self) -> VectorUnit:
        """The vector unit of a vector core."""
        engine = self.device.engine(AIV, "VECTOR")
        assert isinstance(engine, VectorUnit)
        return engine

    def share(self, core: VectorCore, rows: int, grain: int = 1) -> tuple[int, int]:
        """Return the first row and the number of rows of a vector core's share of ``rows``, possibly none; groups of
        ``grain`` rows are not divided.
        """
        each = self.largest_share(rows, grain)
        start, end = min(core.index * each, rows), min((core.index + 1) * each, rows)
        return start, end - start

    def largest_share(self, rows: int, grain: int = 1) -> int:
        """Return the largest number of rows that one vector core gets from a tile of ``rows``."""
        return min(rows, round_up(ceil_div(rows, len(self.vector_cores)), grain))

    def refuse_route(self, what: str, source: str, destination: str) -> NoReturn:
        """Raise `TilingError`: ``what`` needs a route that the device file does not have."""
        there = sorted(
            f"{r.source} to {r.destination}"
            for core in (AIC, AIV)
            for engine in self.device.core(core).engines.values()
            if isinstance(engine, DmaEngine | FixpipeEngine)
            for r in engine.routes.values()
        )
        raise TilingError(
            f"{what}, but {self.device.name} has no route from {source} to {destination}; its routes: "
            + ", ".join(there)
        )

    def row_sum(self, code: VectorCode | None) -> str:
        """Return the order of the vector unit's row sums: the order of the unit, or of the code for its registers."""
        assert self.device.row_sum is not None  # a device with AIVs has vector units
        if code is None:
            return str(self.device.row_sum.value)
        if code.layout == "nd":
            return "vector_lanes"
        return str(self.device.row_sum.value) if code.chains == CHAINS else "sequential"

    def arithmetic(self, operand: str, _result: str) -> str:
        """Return the registry name of the CUBE's arithmetic for operands of a format; the result may have any
        format.
        """
        return self.device.matrix_engine(AIC).arithmetic_of(operand)


def has_registers(device: DeviceSpec) -> bool:
    """Return whether the vector units of a device work on registers."""
    return isinstance(device.engine(AIV, "VECTOR"), RegisterVectorEngine)


def move(label: str, queue: str, dst: Operand, src: Operand, name: str = "") -> TileOp:
    """Return a data move; a change of format on the way is a cast (the fixpipe's inline cast)."""
    opcode = Opcode.COPY if dst.fmt == src.fmt else Opcode.CAST
    return TileOp(label, queue, queue, (Step(opcode, dst, (src,), name=name),))


def compute(label: str, queue: str, steps: Sequence[Step], work: VectorWork | None = None) -> TileOp:
    """Return one queue entry of the unit that executes ``queue``."""
    return TileOp(label, queue, queue, tuple(steps), work=work)


def pass_on(label: str, queue: str, *tiles: RingTile) -> TileOp:
    """Return an operation that only acquires or releases slots, and does no work."""
    return TileOp(label, queue, queue, (), tiles)
