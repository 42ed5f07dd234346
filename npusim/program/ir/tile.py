"""Typed regions of memory: on-chip tiles, slots of rings, and parts of tensors in global memory.

A tile is two-dimensional.  ``space`` names one physical memory as one core group sees it
(``aic.L1``, ``aiv0.UB``, ``gm`` for the group's slots in global memory); tensors in global
memory are addressed by :class:`GlobalTile` instead, since all groups share them.
"""

from __future__ import annotations

from dataclasses import field, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, Protocol

from npusim.formats import stored_format
from npusim.late_methods import dataclass
from npusim.program.ir.content import record
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from npusim.program.ir.buffers import Ring

Role = Literal["input", "output", "workspace", "constant"]


@record
class Tile:
    """``rows`` x ``cols`` elements of format ``fmt`` in ``space``; consecutive rows are ``stride`` elements apart."""

    space: str
    offset_bytes: int
    rows: int
    cols: int
    stride: int
    fmt: str

    def part(self, row: int, rows: int, col: int = 0, cols: int | None = None) -> Tile:
        """Return the sub-tile of ``rows`` x ``cols`` (to the right edge by default) at (row, col)."""
        width = self.cols - col if cols is None else cols
        fmt = stored_format(self.fmt)
        offset = self.offset_bytes + row * fmt.row_bytes(self.stride) + fmt.row_bytes(col)
        return Tile(self.space, offset, rows, width, self.stride, self.fmt)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements and of their scales, without the gaps between rows."""
        return stored_format(self.fmt).bytes_of(self.rows * self.cols)


class Arranged(Protocol):
    """The arrangement of a tensor's values in memory."""

    @property
    def parameter(self) -> str:
        """The kernel's parameter for these values."""

    @property
    def argument(self) -> tuple[int, ...]:
        """The shape of the argument for the kernel's parameter."""

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values as (batch, heads, rows, cols)."""

    def drawn(self, values: NDArray[Any], head: tuple[int, int]) -> NDArray[Any]:
        """Return drawn values of a (batch, head), (rows, cols); rows that share a place in memory have equal values."""

    def of_no_element(self, head: tuple[int, int]) -> NDArray[Any] | None:
        """Return a mask of a (batch, head), (rows, cols): the places that no element of the argument has; None if there
        are none.
        """

    def piece(self, rows: int, cols: int) -> int:
        """Return the number of elements of a part of a matrix that are contiguous in memory."""


def in_a_row(count: int, rows: int, pitch: int) -> int:
    """Return the number of elements that are contiguous in memory, for ``rows`` rows of ``count`` elements whose starts
    are ``pitch`` elements apart.
    """
    return count * rows if rows == 1 or pitch == count else count


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor in global memory, ``(batch, heads, rows, cols)``, which all core groups share.

    is_interleaved
        Whether memory stores the heads of a token next to one another (BSND). If not, it stores the rows of a head next
        to one another (BNSD).
    packed
        Number of heads of the call that form one head of the tensor; their rows are concatenated.
    lengths
        Rows of each batch, if they differ; ``rows`` is then the largest number.
    stretch_rows
        Number of rows of a head that are contiguous, if not all are. A transfer moves one stretch at a time.
    shared_rows
        Number of rows that share one row in memory, such as a scale for a block of tokens.
    column
        Width of the columns within which memory stores row after row (NZ); 0: rows are contiguous.
    is_transposed
        Whether the matrices are the transposes of the call's matrices.
    view
        Arrangement of the tensor in a recorded call, if it differs.
    of
        Tensor that owns the memory of this tensor. If its ``added`` is not 0, this tensor contains the sums of its
        batches.
    added
        Number of batches that share one place in memory; this is first set to 0, and then writers add to it. 0: batches
        do not share places. The values are added in the order of the writes.
    parameter
        Name of the kernel's parameter, if a launch passes the tensor as a parameter.
    """

    name: str
    batch: int
    heads: int
    rows: int
    cols: int
    fmt: str
    role: Role
    is_interleaved: bool = False
    packed: int = 1
    lengths: tuple[int, ...] = ()
    stretch_rows: int = 0
    shared_rows: int = 1
    column: int = 0
    is_transposed: bool = False
    view: Arranged | None = None
    of: GlobalTensor | None = None
    added: int = 0
    parameter: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """Name of the tensor that owns the memory."""
        return self.name if self.of is None else self.of.name

    def under(self, name: str) -> GlobalTensor:
        """Return the same tensor under another name, for one of several phases: the shares of bytes in L2 are stored by
        name, as averages over the phases that use the name.
        """
        return replace(self, name=name, of=self.of or self)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        rows = sum(ceil_div(self.rows_of(b), self.shared_rows) for b in range(self.batch)) // max(1, self.added)
        return stored_format(self.fmt).bytes_of(self.heads * rows * self.cols)

    @property
    def stored_shape(self) -> tuple[int, int, int, int]:
        """Batches, heads of the call, rows and columns in memory; rows that share one row in memory count once."""
        return self.batch, self.heads * self.packed, ceil_div(self.rows // self.packed, self.shared_rows), self.cols

    def rows_of(self, batch: int) -> int:
        """Return the rows of one batch."""
        return self.lengths[batch] if self.lengths else self.rows

    def heads_of(self, batch: int, head: int, row: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (head of the call, first row in it, row count, row of the tensor) for each head in some rows."""
        each, end = self.rows_of(batch) // self.packed, row + rows
        while row < end:
            count = min(each - row % each, end - row)
            yield head * self.packed + row // each, row % each, count, row
            row += count

    def tile(self, batch: int, head: int, row: int, rows: int, col: int = 0, cols: int | None = None) -> GlobalTile:
        """Return a part of one head's matrix; ``cols`` defaults to the rest of the row."""
        return GlobalTile(self, batch, head, row, rows, col, self.cols - col if cols is None else cols)


@record
class GlobalTile:
    """``rows`` x ``cols`` elements of one head of a :class:`GlobalTensor`, from (``row``, ``col``)."""

    tensor: GlobalTensor
    batch: int
    head: int
    row: int
    rows: int
    col: int
    cols: int

    @property
    def fmt(self) -> str:
        """Format of the tensor."""
        return self.tensor.fmt

    @property
    def corner(self) -> tuple[int, int, int, int]:
        """Batch, head, row and column of the first element."""
        return self.batch, self.head, self.row, self.col

    @property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Start and size along batch, head, row and column."""
        return (self.batch, 1), (self.head, 1), (self.row, self.rows), (self.col, self.cols)

    @property
    def stretches(self) -> float:
        """Number of stretches of rows that the tile overlaps, averaged over the first rows of tiles of its size."""
        each = self.tensor.stretch_rows
        return (self.rows + each - gcd(self.rows, each)) / each if each else 1.0

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements of this tile."""
        return stored_format(self.tensor.fmt).bytes_of(ceil_div(self.rows, self.tensor.shared_rows) * self.cols)

    def is_part_of_lines(self, line_bytes: int) -> bool:
        """Return whether the tile has less than a line of each row, while other tiles of the same width have the rest
        of the line.

        False for fractals, rows that share one place, interleaved rows, and ragged edges.
        """
        whole, fmt, piece = self.tensor, stored_format(self.tensor.fmt), self._piece
        if whole.column or whole.shared_rows > 1:
            return False
        row = whole.rows if self.goes_down else whole.cols
        return piece > 1 and fmt.bytes_of(piece) < min(line_bytes, self.payload_bytes) and row % piece == 0

    def sector_bytes(self, sector: int) -> int:
        """Return the bytes of the sectors that contain the tile's elements, if fewer bytes than a sector are
        contiguous.

        0 for longer pieces, and for fractals and rows that share one place.  Lanes that read next to one another read
        a sector once; other tiles have the rest of it.
        """
        whole, fmt, piece = self.tensor, stored_format(self.tensor.fmt), self._piece
        if whole.column or whole.shared_rows > 1 or not 0 < fmt.bytes_of(piece) < sector:
            return 0
        return self.rows * self.cols // piece * sector

    @property
    def goes_down(self) -> bool:
        """Whether elements that follow one another in memory belong to one column."""
        return self._piece != self.cols

    @property
    def _piece(self) -> int:
        """Number of elements of the tile that follow one another in memory."""
        whole = self.tensor
        if whole.view is not None:
            return whole.view.piece(self.rows, self.cols)
        if whole.is_transposed:
            return in_a_row(self.rows, self.cols, whole.rows)
        apart = whole.heads * whole.packed if whole.is_interleaved else 1
        return in_a_row(self.cols, self.rows, whole.cols * apart)


@record
class RingTile:
    """A region of the slot that a producer or consumer of a ring has at this point of the program.

    ``first``: the operation waits for the slot (until it is free, for a producer; until it is ready, for a consumer).
    ``last``: the operation releases the slot when it ends. The walker tracks the generation of the ring that the slot
    contains. ``is_peek``: the operation reads the slot before the consumer that releases it, with a separate cursor.
    """

    ring: Ring
    is_producer: bool
    rows: int
    cols: int
    stride: int
    fmt: str
    offset_bytes: int = 0
    first: bool = True
    last: bool = True
    is_peek: bool = False

    def part(self, row: int, rows: int, col: int = 0, cols: int | None = None) -> RingTile:
        """Return a sub-region of the same slot with the same handshake."""
        width = self.cols - col if cols is None else cols
        fmt = stored_format(self.fmt)
        offset = self.offset_bytes + row * fmt.row_bytes(self.stride) + fmt.row_bytes(col)
        ends = self.first, self.last, self.is_peek
        return RingTile(self.ring, self.is_producer, rows, width, self.stride, self.fmt, offset, *ends)

    def held(self, *, first: bool, last: bool) -> RingTile:
        """Return the same region with another handshake."""
        size = self.rows, self.cols, self.stride, self.fmt
        return RingTile(self.ring, self.is_producer, *size, self.offset_bytes, first, last, self.is_peek)

    def slot(self, generation: int) -> Tile:
        """Return the bytes of this region in the slot of ``generation``."""
        offset = self.ring.start(generation) + self.offset_bytes
        return Tile(self.ring.space, offset, self.rows, self.cols, self.stride, self.fmt)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the elements themselves."""
        return stored_format(self.fmt).bytes_of(self.rows * self.cols)


Operand = Tile | RingTile | GlobalTile


def memory_of(operand: Operand) -> str:
    """Return the device file's name of the memory of an operand: ``L1``, ``SMEM``, ``GM``."""
    if isinstance(operand, GlobalTile):
        return "GM"
    space = operand.space if isinstance(operand, Tile) else operand.ring.space
    return "GM" if space == "gm" else space.rpartition(".")[2]
