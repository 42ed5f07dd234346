"""How the groups (quad pairs) of a warp share a tile, and how tiles fall to warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim.errors import LayoutError

if TYPE_CHECKING:
    from npusim.layout.fragment import Fragment

RowOrder = Literal["group", "lane"]

#: A group's lanes read 4 rows at a time (a threadgroup; volta.md §1).
_QUAD = 4


@dataclass(frozen=True, slots=True)
class Arrangement:
    """``m`` groups down and ``n`` across, counted down the columns as wmma does (volta.md §1).

    A is shared by the groups of one row, B by those of one column.

    Parameters
    ----------
    m, n
        Groups down and across; ``m * n`` is what the instruction has.
    row_order
        ``group``: a group's rows follow one another.  ``lane``: row = lane number, as llama.cpp
        has it (volta.md §1): quads of rows alternate between the groups, so that neighbouring
        lanes read neighbouring rows.  Values do not change, only which row is whose.
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
        """Return (rows, columns) of what one warp instruction covers of an operand.

        Raises
        ------
        LayoutError
            The instruction has another number of groups.
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
        """Return how often (down, across) each warp's tile fits its share of a block's tile.

        ``warps`` are the warps down and across the block.

        Raises
        ------
        LayoutError
            The tile does not divide; names the size that would.
        """
        height, width = self.tile(fragment)
        found = []
        sizes = (("rows", rows, height, warps[0]), ("columns", columns, width, warps[1]))
        for name, size, unit, count in sizes:
            if count < 1 or size < 1 or size % (unit * count):
                raise LayoutError(
                    f"{fragment} in {self}: {size} {name} are no multiple of {unit * count} ({count} warps of {unit})"
                )
            found.append(size // (unit * count))
        return found[0], found[1]

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

    Raises
    ------
    LayoutError
        Not two positive numbers with an x between them, or an unknown row order.

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
