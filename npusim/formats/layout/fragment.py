"""Fragments: the lane and the register of a warp in which each element of an operand is."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal

from npusim.errors import LayoutError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.formats.layout.algebra import Layout


Operand = Literal["A", "B", "C"]
Order = Literal["row", "col"]

#: Number of lanes of a warp, and bits of one register of a lane (PTX ISA, "Machine Model" and "Types").
WARP_LANES = 32
REGISTER_BITS = 32


@dataclass(frozen=True)
class Fragment:
    """One operand of a matrix instruction, distributed over the lanes of a warp.

    A warp executes ``groups`` products in parallel: the four quad pairs of m8n8k4, one product of m16n8k16.  Each group
    has its own ``rows x columns`` tile.  Rows and columns are those of the matrix in PTX's notation: A is ``m x k``, B
    is ``k x n``, C and D are ``m x n``.

    """

    instruction: str  #: its shape: ``m8n8k4``
    operand: Operand  #: C and D share one map
    order: Order  #: order of A and B of m8n8k4; other instructions have a single order
    rows: int
    columns: int
    bits: int  #: bits of one value: 16 or 32
    layout: Layout  #: (thread of the group, value) -> ``row + rows * column``
    lanes: Layout  #: (thread of the group, group) -> lane

    def __post_init__(self) -> None:
        if not (self.layout.is_bijective and self.layout.size == self.rows * self.columns):
            raise LayoutError(f"{self}: {self.layout} does not hold each element once")
        if not (self.lanes.is_bijective and self.lanes.size == WARP_LANES):
            raise LayoutError(f"{self}: {self.lanes} does not name each lane once")

    def __str__(self) -> str:
        kind = f"f{self.bits}" if self.operand == "C" else self.order
        return f"{self.instruction} {self.operand} ({kind})"

    @property
    def threads(self) -> int:
        """Lanes of one group."""
        return self.layout.modes[0].size

    @property
    def values(self) -> int:
        """Values that a lane holds."""
        return self.layout.modes[1].size

    @property
    def groups(self) -> int:
        """Number of products that a warp executes at the same time."""
        return self.lanes.modes[1].size

    @property
    def registers(self) -> int:
        """32-bit registers of a lane."""
        return self.values * self.bits // REGISTER_BITS

    @property
    def vector_axis(self) -> int:
        """The axis along which a lane's value 1 follows value 0: 0 down a column, 1 along a row."""
        return 0 if self._element(0, 1)[1] == self._element(0, 0)[1] else 1

    def group(self, lane: int) -> int:
        """Return the group (quad pair) of a lane."""
        return self._seat(lane)[1]

    def thread(self, lane: int) -> int:
        """Return the place of a lane in its group."""
        return self._seat(lane)[0]

    def lane(self, thread: int, group: int = 0) -> int:
        """Return the lane that is a thread of a group."""
        return self.lanes(thread, group)

    def coordinate(self, lane: int, value: int) -> tuple[int, int]:
        """Return (row, column) of a lane's value in the tile of its group; raise `LayoutError` if there is no such
        value.
        """
        if not 0 <= value < self.values:
            raise LayoutError(f"{self}: a lane holds values 0 to {self.values - 1}, not {value}")
        return self._element(self.thread(lane), value)

    def holder(self, row: int, column: int, group: int = 0) -> tuple[int, int]:
        """Return (lane, value) that holds an element of a group's tile; raise `LayoutError` if no lane has it."""
        if not (0 <= row < self.rows and 0 <= column < self.columns and 0 <= group < self.groups):
            raise LayoutError(
                f"{self}: no element ({row}, {column}) of group {group}: it has {self.groups} "
                f"groups of {self.rows} x {self.columns}"
            )
        thread, value = self._holders[row, column]
        return self.lane(thread, group), value

    def butterflies(self) -> tuple[int, ...]:
        """Return the XOR masks of the shuffles that reduce a whole row of the tile.

        A lane first reduces its own elements; every mask is one butterfly step.  There are no masks for m8n8k4 with f16
        accumulators; with f32 accumulators they are (2,), and for m16n8k16 (1, 2) (volta.md §1.1).
        """
        lanes = {self.holder(0, column)[0] for column in range(self.columns)}
        masks = {lane ^ min(lanes) for lane in lanes}
        return tuple(m for m in sorted(masks) if m and m & (m - 1) == 0)

    def _element(self, thread: int, value: int) -> tuple[int, int]:
        index = self.layout(thread, value)
        return index % self.rows, index // self.rows

    def _seat(self, lane: int) -> tuple[int, int]:
        if not 0 <= lane < WARP_LANES:
            raise LayoutError(f"{self}: a warp has lanes 0 to {WARP_LANES - 1}, not {lane}")
        return self._seats[lane]

    @cached_property
    def _seats(self) -> tuple[tuple[int, int], ...]:
        seats = {self.lanes(t, g): (t, g) for t, g in product(range(self.threads), range(self.groups))}
        return tuple(seats[lane] for lane in range(WARP_LANES))

    @cached_property
    def _holders(self) -> dict[tuple[int, int], tuple[int, int]]:
        everywhere = product(range(self.threads), range(self.values))
        return {self._element(t, v): (t, v) for t, v in everywhere}


RowOrder = Literal["group", "lane"]

#: The lanes of a group read 4 rows at a time (a threadgroup; volta.md §1).
_QUAD = 4


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The arrangement of a warp's groups: ``m`` down and ``n`` across, counted down the columns as in wmma (volta.md
    §1).

    A is shared by the groups of one row, B by the groups of one column; ``m * n`` is the instruction's number of
    groups. ``row_order`` ``group``: a group's rows follow one another.  ``lane``: row = lane number, as in llama.cpp
    (volta.md §1): quads of rows alternate between the groups, so that neighbouring lanes read neighbouring rows. Values
    do not change, only the assignment of rows.
    """

    m: int
    n: int
    row_order: RowOrder = "group"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}" + (" by lane" if self.row_order == "lane" else "")

    def seat(self, group: int) -> tuple[int, int]:
        """Return (down, across) of a group."""
        return group % self.m, group // self.m

    def tile(self, fragment: Fragment) -> tuple[int, int]:
        """Return the (rows, columns) of an operand that one warp instruction covers.

        Raises `LayoutError` if the instruction has another number of groups.
        """
        self._check(fragment)
        down = 1 if fragment.operand == "B" else self.m
        across = 1 if fragment.operand == "A" else self.n
        return fragment.rows * down, fragment.columns * across

    def element(self, fragment: Fragment, lane: int, value: int) -> tuple[int, int]:
        """Return (row, column) in the warp's tile of a value that a lane holds."""
        row, column = fragment.coordinate(lane, value)
        down, across = self.seat(fragment.group(lane))
        if fragment.operand != "B":
            row = self._row(row, down, fragment.rows)
        if fragment.operand != "A":
            column += fragment.columns * across
        return row, column

    def repeats(
        self, fragment: Fragment, rows: int, columns: int, *, warps: tuple[int, int] = (1, 1)
    ) -> tuple[int, int]:
        """Return, along rows and columns, the number of a warp's tiles that fill its share of a block's tile.

        ``warps`` are the numbers of warps along the rows and columns of the block.  Raises `LayoutError` for a tile
        that does not divide it; the message names a size that does.
        """
        height, width = self.tile(fragment)
        counts = []
        sizes = (("rows", rows, height, warps[0]), ("columns", columns, width, warps[1]))
        for name, size, unit, count in sizes:
            if count < 1 or size < 1 or size % (unit * count):
                raise LayoutError(
                    f"{fragment} in {self}: {size} {name} are not a multiple of {unit * count} ({count} warps of "
                    f"{unit})"
                )
            counts.append(size // (unit * count))
        return counts[0], counts[1]

    def _row(self, row: int, down: int, rows: int) -> int:
        if self.row_order == "group":
            return row + rows * down
        return row % _QUAD + _QUAD * down + _QUAD * self.m * (row // _QUAD)

    def _check(self, fragment: Fragment) -> None:
        if self.m * self.n != fragment.groups:
            raise LayoutError(
                f"arrangement {self}: {fragment.instruction} has {fragment.groups} groups of lanes, "
                f"not {self.m * self.n}"
            )
        if self.row_order == "lane" and fragment.groups == 1:
            raise LayoutError(f"arrangement {self}: {fragment.instruction} has one group only")


def arrangement(text: str, row_order: str = "group") -> Arrangement:
    """Return the arrangement written ``4x1``: four groups down, one across.

    Raises `LayoutError` for a text other than two positive numbers with an x between them, and for an unknown row
    order.

    Examples
    --------
    >>> arrangement("2x2").seat(2)
    (0, 1)
    """
    down, _, across = text.partition("x")
    if not (down.isdecimal() and across.isdecimal() and int(down) and int(across)):
        raise LayoutError(f"arrangement {text!r}: write groups down x across, such as 4x1")
    if row_order not in ("group", "lane"):
        raise LayoutError(f"row order {row_order!r}: choose group or lane")
    return Arrangement(int(down), int(across), "lane" if row_order == "lane" else "group")
