"""Blocks of a large grid as columns of numbers, and the regions that blocks access, column by column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    import numpy.typing as npt

    from npusim.program.ir.tile import GlobalTensor

    Integers = npt.NDArray[np.int64]


class BlockColumns(ABC, Sequence[Any]):
    """Blocks as columns of numbers: a block itself is created when it is first used."""

    @abstractmethod
    def grouped(self, key_of: Callable[[Any], Hashable]) -> Mapping[Hashable, Integers] | None:
        """Return the indices of the blocks of each key, ascending, with keys in the order of their first blocks.

        None if blocks with equal columns may have different keys.
        """

    @property
    @abstractmethod
    def place_count(self) -> int:
        """The slots of a core that blocks use."""

    @property
    @abstractmethod
    def tile_counts(self) -> Integers:
        """Number of tiles that the loop of each block visits."""

    @abstractmethod
    def twin(self, numbers: Integers, name: str, made: Callable[[str, Sequence[int]], Any]) -> Any:
        """Return the common part of some blocks, as `npusim.program.ir.opaque.twin` does."""


class Touches(NamedTuple):
    """A region of a tensor for each of some blocks; each block reads it at most ``times`` times, or writes it
    (``times`` 0).

    ``steps``: the times, counted in steps of all core groups; ``order``: the position of each access within its step.
    ``name``: the index of the operand or result in the phase; ``tile``: the index of the region among those regions of
    the operand that a block accesses.  ``corner``: batch, head, row and column, each a number, or one number per
    region; ``read_bytes``: the sum of all reads.
    """

    steps: Integers
    order: Integers
    name: int
    tile: int
    tensor: GlobalTensor
    corner: tuple[int | Integers, int | Integers, int | Integers, int | Integers]
    rows: int
    cols: int
    payload_bytes: int
    times: int | Integers
    read_bytes: int | Integers


class ColumnScan(ABC):
    """A footprint that also lists the regions of blocks in columns."""

    @abstractmethod
    def of_columns(self, blocks: Sequence[Any], group_count: int) -> list[Touches] | None:
        """Return the regions that blocks access if ``group_count`` blocks run in step.

        None if the regions are listed separately.
        """


#: Upper limit of the numbers that `numbered` gives to rows.
MOST_NUMBERS = 1 << 62


def numbered(rows: Integers) -> Integers | None:
    """Return a number for each row, which is equal for equal rows and ascends in the order of rows; None if 64 bits are
    too few.
    """
    numbers, count = np.zeros(len(rows), np.int64), 1
    for column in rows.T:
        least, most = int(column.min(initial=0)), int(column.max(initial=0))
        count *= most - least + 1
        if count >= MOST_NUMBERS:
            return None
        numbers = numbers * (most - least + 1) + (column - least)
    return numbers


def distinct(rows: Integers) -> tuple[Integers, Integers]:
    """Return the different rows, and, for each row, the index of the equal one among them."""
    if not len(rows):
        return rows, np.zeros(0, np.int64)
    varying = rows[:, (rows != rows[0]).any(0)]
    if not varying.shape[1]:
        return rows[:1], np.zeros(len(rows), np.int64)
    if (codes := numbered(varying)) is not None:  # many times faster than a comparison of rows
        _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    else:
        _, first, which = np.unique(varying, axis=0, return_index=True, return_inverse=True)
    return rows[first], which.reshape(-1)
