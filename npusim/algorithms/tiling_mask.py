"""FastAttention's tiling-mask: one small lower-triangular matrix from which every block's mask is cut.

Query x keeps key y when ``y <= x + offset``.  For a block with top-left corner (r0, c0) let
``D = r0 + offset - c0``.  The block's mask is the cut of ``tril(2M x 2M)`` whose corner is
``(max(D, 0), max(-D, 0))``: exact whenever the block is neither wholly kept (D >= cols - 1) nor
wholly masked (D <= -rows), provided ``rows + cols - 1 <= 2M`` (FastAttention section 4.1; the
mapping and its bound: papers.md section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from npusim.errors import TilingError
from npusim.ir.opaque import varying
from npusim.ir.tile import GlobalTensor, GlobalTile

if TYPE_CHECKING:
    from npusim.config.problem import Problem

#: M of FastAttention section 4.1: a 2M x 2M mask with M = 512.
DEFAULT_M = 512


@dataclass(frozen=True, slots=True)
class TilingMask:
    """The (2M) x (2M) mask matrix in global memory, 1 where a key is kept."""

    m: int = DEFAULT_M

    def tensor(self) -> GlobalTensor:
        """Return the mask as a tensor of one byte an element."""
        return GlobalTensor("mask", 1, 1, 2 * self.m, 2 * self.m, "int8", "constant")

    def values(self) -> npt.NDArray[np.int8]:
        """Return the matrix, (1, 1, 2M, 2M) int8, ones on and below the diagonal."""
        return np.tril(np.ones((1, 1, 2 * self.m, 2 * self.m), np.int8))

    def check(self, rows: int, cols: int) -> None:
        """Raise :class:`TilingError` if masks of ``rows`` x ``cols`` cannot all be cut from it."""
        if rows + cols - 1 > 2 * self.m:
            raise TilingError(
                f"tiling-mask: a block of {rows}x{cols} needs rows + cols - 1 = {rows + cols - 1} <= 2M = "
                f"{2 * self.m} (M = {self.m}); use smaller blocks or a larger M"
            )

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of the matrix that is the mask of the block at (row, col).

        A block left of the diagonal keeps everything, one right of it nothing; their cuts are
        moved to the nearest one that says so.
        """
        diagonal = row + (offset or 0) - col
        down = varying(lambda d: self._corner(rows, cols, d)[0], diagonal)
        right = varying(lambda d: self._corner(rows, cols, d)[1], diagonal)
        return self.tensor().tile(0, 0, down, rows, right, cols)

    def _corner(self, rows: int, cols: int, diagonal: int) -> tuple[int, int]:
        diagonal = max(min(diagonal, cols - 1), -rows)
        if max(-diagonal, 0) + cols > 2 * self.m:
            raise TilingError(f"tiling-mask: a wholly masked block of {rows}x{cols} has no cut with M = {self.m}")
        return max(diagonal, 0), max(-diagonal, 0)


def causal_mask(problem: Problem, sizes: tuple[int, int]) -> TilingMask | None:
    """Return the tiling-mask of a causal problem, checked against blocks of ``sizes`` = (rows, keys)."""
    if not problem.causal:
        return None
    mask = TilingMask()
    mask.check(min(sizes[0], problem.seq_q), min(sizes[1], problem.seq_kv))
    return mask


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The causal mask of blocks of ``rows`` in which heads of ``each`` queries lie below one another.

    Row r of a block is query r mod ``each`` and keeps key y when ``y <= r mod each + offset``: one matrix whose rows
    repeat, of which a tile of ``cols`` keys at c is cut from column ``cols + c - offset`` on.
    """

    each: int
    rows: int
    cols: int

    def tensor(self) -> GlobalTensor:
        """Return the mask as a tensor of one byte an element."""
        return GlobalTensor("mask", 1, 1, self.rows + self.each, 2 * self.cols + self.each, "int8", "constant")

    def values(self) -> npt.NDArray[np.int8]:
        """Return the matrix, int8, 1 where a key is kept."""
        shape = self.tensor()
        query, key = np.arange(shape.rows)[:, None] % self.each, np.arange(shape.cols) - self.cols
        return (key <= query).astype(np.int8)[None, None]

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of the matrix that is the mask of rows of a block; blocks begin with a head's first row."""
        down = varying(lambda r: r % self.each, row)
        right = varying(lambda d: min(max(self.cols + d, 0), self.cols + self.each), col - (offset or 0))
        return self.tensor().tile(0, 0, down, rows, right, cols)


#: ``sees(q, k)``: whether queries at positions q of a sequence see the keys at k; arrays that broadcast.
Sees = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
#: Elements of a mask matrix, at most: one byte each.
MOST_SEEN = 1 << 28


@lru_cache(maxsize=2)
def seen(sees: Sees, rows: int, cols: int) -> npt.NDArray[np.bool_]:
    """Return which of ``cols`` keys each of the last ``rows`` positions sees; `TilingError` for too many of them."""
    if rows * cols > MOST_SEEN:
        raise TilingError(f"a mask function of {rows} x {cols} has {rows * cols:,} elements; {MOST_SEEN:,} at most")
    queries, keys = np.arange(cols - rows, cols)[:, None], np.arange(cols)[None]
    return np.broadcast_to(np.asarray(sees(queries, keys), bool), (rows, cols))


@dataclass(frozen=True, slots=True)
class SeenMask:
    """A whole matrix in global memory, of which each cut tile loads its own part: any function of query and key."""

    sees: Sees
    rows: int
    cols: int

    def tensor(self) -> GlobalTensor:
        """Return the mask as a tensor of one byte an element."""
        return GlobalTensor("mask", 1, 1, self.rows, self.cols, "int8", "constant")

    def values(self) -> npt.NDArray[np.int8]:
        """Return the matrix, int8, 1 where a key is seen."""
        return seen(self.sees, self.rows, self.cols).astype(np.int8)[None, None]

    def cut(self, row: int, rows: int, col: int, cols: int, _offset: int | None) -> GlobalTile:
        """Return the part of a block at (row, col)."""
        return self.tensor().tile(0, 0, row, rows, col, cols)
