"""Primitive tile operations and the entries of instruction queues that carry them.

A :class:`Step` is one primitive operation on tiles. A :class:`TileOp` is a sequence of steps on one engine; it waits
only before the first step and sets flags only after the last, so that its cost is the exact sum of its steps.  There
are no compound operations: softmax is a dozen steps.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum, unique
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from npusim.errors import ProgramError
from npusim.formats import get_arithmetic
from npusim.late_methods import dataclass
from npusim.program.ir.content import record
from npusim.program.ir.tile import GlobalTile, Operand, RingTile, Tile

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


@unique
class Opcode(Enum):
    """Operation of one step. Each member has one entry in ``numerics.semantics`` and a cost for each core family.

    Sources have the order of an instruction, ``Instruction(Opcode.DIV, "dst", "a", "b")``. A tile is (rows, columns).
    One of two operands a and b may be a row vector (rows, 1), whose values apply to complete rows, or a constant.

    COPY a: a, bit for bit (a transfer or a copy between registers)
    CAST a: a rounded once to the format of dst; a block format has scales by the rule ``variant`` along ``axis``
    FILL a: a in every element: a constant, or the value of each row of a row vector
    MATMUL a, b: a b (+ dst with ``accumulate``) in the arithmetic of a matrix unit
    ADD a, b: a + b
    SUB a, b: a - b
    MUL a, b: a * b
    DIV a, b: a / b
    FMA a, b, c: a b + c rounded once; a b - c with ``variant`` ``minus``, c - a b with ``from``
    COMPARE a, b: a mask (int8), 1 where the relation ``variant`` holds (`npusim.formats.RELATIONS`), else 0
    LOGIC a, b: a mask, ``and``, ``or`` or ``xor`` (``variant``) of the masks a and b
    MAX a, b: the larger of a and b; for a number and NaN the number, or NaN with ``variant`` ``propagate``
    MIN a, b: the smaller of a and b; NaN as for MAX
    EXP a: e^a, or the exponential that ``variant`` names (``exp2.*``: 2^a)
    LOG a: ln a, or the logarithm that ``variant`` names
    RSQRT a: 1 / sqrt(a), in the approximation that ``variant`` names
    SQRT a: the square root of a, in the approximation that ``variant`` names
    TANH a: the hyperbolic tangent of a, in the approximation that ``variant`` names
    ERF a: the error function of a, in the approximation that ``variant`` names
    ROW_MAX a: (rows, 1), the maximum of each row; NaN as for MAX
    ROW_SUM a: (rows, 1), the sum of each row in the named order; with a second operand b the sum of each row of a b,
        to which a lane adds each product without rounding it first (fma)
    CUMSUM a: the cumulative sums of each row in the named order; the sums restart after ``every`` columns; with variant
        ``reverse`` from the last element to the first
    FOLD a, ...: (rows, 1), one result of a reduction of each row by the function of two elements ``variant``
        (`npusim.formats.combine_text`) in the named order; with several operands an element consists of one number of
        each
    ROW_MAX, ROW_SUM and FOLD with ``axis`` `DOWN`: (1, columns), the same of each column from the first row to the last
    SCAN a, ...: the same of each element of a row and all before it
    INVERSE a: for each square of a (the squares are stacked), the inverse of I + L in the named order; L is the
        strictly lower triangle of the square
    INTEGER a, b: an operation of integers (``addi.32`` in ``variant``: LLVM's name and the bits in which it wraps),
        signed or unsigned according to the name
    BITS a: the bits of floats as integers (``bits.float32``), or the floats of these bits (``floats.float32``)
    SELECT mask, a, b: a where the mask (int8) is not zero, else b, bit for bit; a and b may be constants.
        ``variant`` ``compared``: the mask is a result of COMPARE; else it is a mask of positions
    """

    COPY = "copy"
    CAST = "cast"
    FILL = "fill"
    MATMUL = "matmul"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    FMA = "fma"
    COMPARE = "compare"
    LOGIC = "logic"
    MAX = "max"
    MIN = "min"
    EXP = "exp"
    LOG = "log"
    RSQRT = "rsqrt"
    SQRT = "sqrt"
    TANH = "tanh"
    ERF = "erf"
    ROW_MAX = "row_max"
    ROW_SUM = "row_sum"
    CUMSUM = "cumsum"
    FOLD = "fold"
    SCAN = "scan"
    INVERSE = "inverse"
    INTEGER = "integer"
    BITS = "bits"
    SELECT = "select"

    #: Members are compared by identity, not by name, because they are parts of many keys.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.name


#: Operations that reduce rows, or with `DOWN` columns, to one element each.
REDUCTIONS = frozenset({Opcode.ROW_MAX, Opcode.ROW_SUM, Opcode.FOLD})


#: Number of sources of an operation; a row sum may also have the factor of its elements.
SOURCES: Mapping[Opcode, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys((Opcode.COPY, Opcode.CAST, Opcode.FILL, Opcode.ROW_MAX), (1,)),
        **dict.fromkeys((Opcode.CUMSUM, Opcode.INVERSE, Opcode.BITS), (1,)),
        **dict.fromkeys((Opcode.EXP, Opcode.LOG, Opcode.RSQRT, Opcode.SQRT, Opcode.TANH, Opcode.ERF), (1,)),
        **dict.fromkeys((Opcode.MATMUL, Opcode.ADD, Opcode.SUB, Opcode.MUL, Opcode.DIV), (2,)),
        **dict.fromkeys((Opcode.COMPARE, Opcode.LOGIC, Opcode.MAX, Opcode.MIN, Opcode.INTEGER), (2,)),
        Opcode.ROW_SUM: (1, 2),
        **dict.fromkeys((Opcode.FOLD, Opcode.SCAN), (1, 2, 3, 4)),
        **dict.fromkeys((Opcode.SELECT, Opcode.FMA), (3,)),
    }
)


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of a step; an empty string selects the default behaviour of the format."""

    accumulate: bool = False
    transpose_a: bool = False  #: whether a product's operands are stored with exchanged axes
    transpose_b: bool = False
    arithmetic: str = ""  #: registry name of the matrix arithmetic; it also applies to the products of an inverse
    #: Named function (of EXP, LOG, RSQRT, SQRT, TANH, ERF); signs of an FMA; scale rule; relation of a COMPARE,
    #: function of a LOGIC, INTEGER, BITS, FOLD and SCAN, NaN rule of MAX, MIN and ROW_MAX, kind of mask of a SELECT,
    #: direction of a CUMSUM.
    variant: str = ""
    # axis along which the blocks of a CAST are formed, and along which a reduction runs: -1 columns, `DOWN` rows
    axis: int = -1
    order: str = ""  #: order of a row sum, of cumulative sums, of an inverse, a FOLD and a SCAN
    every: int = 0  #: number of columns after which cumulative sums restart; 0: they do not restart within a row
    overflow: str = ""
    rounding: str = ""  #: rounding of a CAST, as in `formats.cast`
    # share of the cases that take time on a GPU; share of the powers of two that a polynomial computes
    share: float = 1.0
    comparisons: int = 0  #: indices that determine the mask of a SELECT
    lookups: int = 0  #: number of reads, per row and per column, of one number
    #: Waits of a load for memory, one after the other, in which all blocks are in step, and its waits for what L2 has;
    #: they change no value, and no text has them.
    memory_waits: int = field(default=0, repr=False)
    near_waits: int = field(default=0, repr=False)
    #: Accesses of a load, each of which begins when the previous one has arrived; as above.
    accesses: int = field(default=1, repr=False)
    #: Kind of loads for which each iteration of a loop waits, those of as many iterations ahead as its slots hold:
    #: ``copies`` to shared memory, or ``loads`` to registers; empty: other loads; as above.
    awaited: str = field(default="", repr=False)
    warp: WarpPlan | None = None  #: layout of the tiles in the lanes of a GPU's warps

    @property
    def accumulator_format(self) -> str:
        """Format in which a product with this arithmetic accumulates."""
        return get_arithmetic(self.arithmetic).acc_format


PLAIN = Attributes()
#: `Attributes.axis` of operations that go down the rows of a tile.
DOWN = -2
#: Format of masks.
MASK = "int8"
#: Whether a SELECT's mask comes from comparisons of values.
COMPARED = "compared"
#: Whether cumulative sums go from the last element of a row to the first.
REVERSE = "reverse"
Source = Operand | float


def goes_down(opcode: Opcode, attributes: Attributes) -> bool:
    """Return whether an operation reduces each column of a tile, and so needs all of its rows."""
    return opcode in REDUCTIONS and attributes.axis == DOWN


@record
class Step:
    """One primitive operation: ``dst = opcode(srcs)``.

    A number among the sources is a constant in the format of dst, or, for COMPARE, in the format of the other source.
    ``name`` is the name of the destination in the algorithm: for steps in its tables the name there (``P``, ``m_new``),
    for other steps ``k`` (a tile of keys as loaded), ``S_in`` (scores as stored) or ``k_shifted`` (keys as stored).
    Mappings set the name; observers identify steps by it.
    """

    opcode: Opcode
    dst: Operand
    srcs: tuple[Source, ...]
    attributes: Attributes = PLAIN
    name: str = field(default="", compare=False)

    @property
    def depth(self) -> int:
        """Number of products that a MATMUL sums for each element."""
        a = self.srcs[0]
        if isinstance(a, float):
            raise ProgramError("a matrix product needs tiles, not constants")
        return a.rows if self.attributes.transpose_a else a.cols

    @property
    def constant_format(self) -> str:
        """Format of the constants among the sources."""
        return self.operands()[1].fmt if self.opcode is Opcode.COMPARE else self.dst.fmt

    def operands(self) -> tuple[Operand, ...]:
        """Return destination and sources, without constants."""
        return (self.dst, *(s for s in self.srcs if isinstance(s, (Tile, RingTile, GlobalTile))))


class OperationWork(Protocol):
    """Work of an operation in addition to its steps, in the terms of its core family: only the family's pricing reads
    it.

    Immutable and hashable.
    """

    @property
    def decided(self) -> Hashable:
        """The decisions of the operation's kernel."""


@dataclass(slots=True)
class TileOp:
    """One entry of an instruction queue. An entry does not change after construction.

    queue, engine
        Queue that issues the entry in order; engine that executes it.
    label
        Name in traces and errors.
    handshake
        Slots of rings for which the entry waits, or that it releases, without accessing their bytes (a core that has no
        rows of a ragged tile must wait and release like the other cores).
    work
        Work in addition to the steps. None: no such work.
    """

    label: str
    queue: str
    engine: str
    steps: tuple[Step, ...]
    handshake: tuple[RingTile, ...] = field(default=())
    work: OperationWork | None = None

    def ring_tiles(self) -> list[RingTile]:
        """Return every ring slot that this operation accesses, waits for or releases."""
        tiles = list(self.handshake)
        for step in self.steps:
            if type(step.dst) is RingTile:
                tiles.append(step.dst)
            tiles.extend(s for s in step.srcs if type(s) is RingTile)
        return tiles


def meets_l2(op: TileOp) -> bool:
    """Return whether an operation accesses global tensors: its cost depends on the content of L2."""
    return any(type(step.dst) is GlobalTile or GlobalTile in map(type, step.srcs) for step in op.steps)


# ---------------------------------------------------------------- data of a GPU's steps

Accumulator = Literal["f16", "f32"]


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """Warps stacked along the rows of a step's tiles, and the fragments in which each warp stores its part.

    warps
        The warps that execute the step together, each on its own rows.
    arrangement
        The arrangement of the quad pairs in a warp, rows by lane, as `npusim.formats.layout.fragment` reads it.
    accumulator
        Format of the accumulators in whose fragment C the tile is, in registers.
    access_bytes
        Bytes of one lane's access to shared memory.
    swizzle
        Whether the positions of 16-byte chunks of tiles in shared memory are XORed with row mod 8.
    exchange
        The step converts accumulators to the A operand of the next product, across lanes.
    """

    warps: int
    arrangement: str
    accumulator: Accumulator
    access_bytes: int = 16
    swizzle: bool = False
    exchange: bool = False
