"""FastAttention's tiling-mask: one small lower-triangular matrix from which every block's mask is cut.

Query x keeps key y when ``y <= x + offset``.  For a block with top-left corner (r0, c0) let ``D = r0 + offset - c0``.
The block's mask is the part of ``tril(2M x 2M)`` whose corner is ``(max(D, 0), max(-D, 0))``: exact whenever the block
is neither completely visible (D >= cols - 1) nor completely masked (D <= -rows), provided ``rows + cols - 1 <= 2M``
(FastAttention section 4.1; the mapping and its bound: reports/tiling_mask).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from npusim.config.seen import KeyRanges
from npusim.errors import TilingError
from npusim.late_methods import dataclass
from npusim.program.ir.opaque import varying
from npusim.program.ir.tile import GlobalTensor, GlobalTile

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.problem import Problem
    from npusim.config.seen import Seen
    from npusim.kernels.form.phase import Mask

#: M of FastAttention section 4.1: a 2M x 2M mask with M = 512.
DEFAULT_M = 512


@dataclass(frozen=True, slots=True)
class TilingMask:
    """The (2M) x (2M) mask matrix in global memory, 1 where a query sees a key; with a ``window``, a band of (4M) x
    (2M).

    ``after``: number of keys after its own position that a query sees; they are part of the window. A band is as wide
    as the window and at most 2M wide: if an edge of a wider window crosses a tile, the tile is completely within the
    other edge.
    """

    m: int = DEFAULT_M
    window: int | None = None
    after: int = 0

    @property
    def shows_key_0(self) -> bool:
        """Whether every query sees key 0."""
        return self.window is None

    @property
    def _band(self) -> int:
        return min(self.window or 2 * self.m, 2 * self.m)

    def tensor(self) -> GlobalTensor:
        """Return the mask as a tensor of one byte per element."""
        rows = 2 * self.m if self.window is None else 4 * self.m
        return GlobalTensor("mask", 1, 1, rows, 2 * self.m, "int8", "constant")

    def values(self) -> npt.NDArray[np.int8]:
        """Return the matrix, (1, 1, rows, 2M) int8: ones on the diagonal and below it, within the width of the band."""
        shape = self.tensor()
        return _lower(shape.rows, shape.cols, None if self.window is None else self._band)

    def check(self, rows: int, cols: int) -> None:
        """Raise :class:`TilingError` if masks of ``rows`` x ``cols`` cannot all be cut from it."""
        if rows + cols - 1 > 2 * self.m:
            raise TilingError(
                f"tiling-mask: a block of {rows}x{cols} needs rows + cols - 1 = {rows + cols - 1} <= 2M = "
                f"{2 * self.m} (M = {self.m}); use smaller blocks, "
                f"at most {max(1, 2 * self.m + 1 - rows)} keys with {rows} rows"
            )

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of the matrix that is the mask of the block at (row, col).

        A block left of the diagonal sees all keys, a block right of it none; their cuts are
        moved to the nearest cut with this content.
        """
        diagonal = row + (offset or 0) + self.after - col
        down = varying(lambda d: self._corner(rows, cols, d)[0], diagonal)
        right = varying(lambda d: self._corner(rows, cols, d)[1], diagonal)
        return self.tensor().tile(0, 0, down, rows, right, cols)

    def _corner(self, rows: int, cols: int, diagonal: int) -> tuple[int, int]:
        if self.window is None:
            diagonal = min(diagonal, cols - 1)
        elif diagonal >= cols - 1:  # only the window's far edge can cross it
            diagonal = min(max(diagonal - self.window + self._band, cols - 1), self._band + cols - 1)
        diagonal = max(diagonal, -rows)
        if max(-diagonal, 0) + cols > 2 * self.m:
            raise TilingError(f"tiling-mask: a fully masked block of {rows}x{cols} has no cut with M = {self.m}")
        return max(diagonal, 0), max(-diagonal, 0)


@lru_cache(maxsize=8)
def _lower(rows: int, cols: int, band: int | None) -> npt.NDArray[np.int8]:
    lower = np.tril(np.ones((1, 1, rows, cols), np.int8))
    lower = lower if band is None else lower - np.tril(lower, -band)
    lower.flags.writeable = False
    return lower


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The causal mask of blocks of ``rows`` in which heads of ``each`` queries are stacked.

    Row r of a block is query r mod ``each`` and keeps key y when ``y <= r mod each + offset``: one matrix whose rows
    repeat, of which a tile of ``cols`` keys at c is cut from column ``cols + c - offset`` on.
    """

    each: int
    rows: int
    cols: int

    def tensor(self) -> GlobalTensor:
        """Return the mask as a tensor of one byte per element."""
        return GlobalTensor("mask", 1, 1, self.rows + self.each, 2 * self.cols + self.each, "int8", "constant")

    def values(self) -> npt.NDArray[np.int8]:
        """Return the matrix, int8, 1 for a visible key."""
        shape = self.tensor()
        query, key = np.arange(shape.rows)[:, None] % self.each, np.arange(shape.cols) - self.cols
        return (key <= query).astype(np.int8)[None, None]

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of the matrix that is the mask of rows of a block; blocks begin with a head's first row."""
        down = varying(lambda r: r % self.each, row)
        right = varying(lambda d: min(max(self.cols + d, 0), self.cols + self.each), col - (offset or 0))
        return self.tensor().tile(0, 0, down, rows, right, cols)


#: How a tile gets its mask: cut from a small constant matrix, if one suffices; by comparisons of the indices of its
#: rows and columns; or loaded from a matrix of all queries and keys.
MaskKind = Literal["cut", "computed", "loaded"]


@dataclass(frozen=True, slots=True)
class PartByPart:
    """A matrix that is never built completely: ``[batch, head]`` selects a head, and ``[rows, columns]`` a part
    of it.
    """

    shape: tuple[int, int]
    part: Callable[[int, int, slice, slice], npt.NDArray[Any]]
    head: tuple[int, int] = (0, 0)

    def __getitem__(self, index: tuple[Any, Any]) -> Any:
        """Return a head's matrix, or a part of it."""
        return self.part(*self.head, *index) if isinstance(index[0], slice) else replace(self, head=index)


@dataclass(frozen=True, slots=True)
class ByIndices:
    """A matrix of all ``rows`` and columns computed from their indices; each tile is a separate part.

    A block whose first query is at position ``offset`` of its sequence reads rows ``offset * rows`` to ``(offset + 1) *
    rows``, so that sequences of different lengths share one tensor.  Rows repeat after ``each`` queries (one number for
    each sequence, or one for all), because heads are stacked.
    """

    name: str
    fmt: str
    heads: int
    last_offset: int
    rows: int
    cols: int
    each: tuple[int, ...]

    def tensor(self) -> GlobalTensor:
        """Return the tensor that represents the matrix."""
        rows = (self.last_offset + 1) * self.rows
        return GlobalTensor(self.name, len(self.each), self.heads, rows, self.cols, self.fmt, "constant")

    def values(self) -> Any:
        """Return the function that returns a head's matrix part by part."""
        return PartByPart(((self.last_offset + 1) * self.rows, self.cols), self.part)

    def part(self, batch: int, head: int, rows: slice, cols: slice) -> npt.NDArray[Any]:
        """Return a part of a head's matrix."""
        raise NotImplementedError

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of a block at (row, col)."""
        where = (col, cols) if self.cols > 1 else (0, 1)
        return self.tensor().tile(0, 0, row + (offset or 0) * self.rows, rows, *where)


@dataclass(frozen=True, slots=True)
class SeenMask(ByIndices):
    """The mask of any set of keys, for each sequence or for all sequences, 1 if a query sees a key.

    Without ``is_loaded`` there is no such matrix in memory: comparisons of indices compute it.
    """

    seen: tuple[Seen, ...]
    is_loaded: bool = True
    shows_key_0 = False  #: whether every query sees key 0: not examined

    def part(self, batch: int, head: int, rows: slice, cols: slice) -> npt.NDArray[np.int8]:
        """Return a part of the matrix, int8."""
        parts, at, each, seen = list[npt.NDArray[np.int8]](), rows.start, self.each[batch], self.seen[batch]
        while at < rows.stop:  # head by head
            offset, row = divmod(at, self.rows)
            count = min(rows.stop - at, each - row % each)
            parts.append(seen.matrix(offset + row % each, count, cols.start, cols.stop - cols.start).astype(np.int8))
            at += count
        return np.concatenate(parts)

    @property
    def index_work(self) -> tuple[int, int]:
        """Number of comparisons of indices that decide whether a query sees a key, and number of the operands that they
        read.
        """
        return self.seen[0].index_work


@dataclass(frozen=True, slots=True)
class Repeated:
    """A mask whose ``each`` rows are repeated for stacked heads, so that a tile belongs to one head."""

    mask: Mask
    each: int
    shows_key_0 = False  #: whether every query sees key 0: not examined

    def tensor(self) -> GlobalTensor:
        """Return the repeated mask's tensor."""
        return self.mask.tensor()

    def values(self) -> Any:
        """Return the repeated mask's values."""
        return self.mask.values()

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the part of a tile at (row, col)."""
        return self.mask.cut(varying(lambda r: r % self.each, row), rows, col, cols, offset)

    @property
    def is_loaded(self) -> bool:
        """Whether the mask is cut from a matrix in memory."""
        return bool(getattr(self.mask, "is_loaded", True))

    @property
    def index_work(self) -> tuple[int, int]:
        """Number of comparisons of indices that decide whether a query sees a key, and number of the operands that they
        read.
        """
        work: tuple[int, int] = getattr(self.mask, "index_work", (0, 0))
        return work


@dataclass(frozen=True, slots=True)
class Turned(Repeated):
    """The transpose of another mask: rows of a tile are keys, columns are queries, for the same heads."""

    def tensor(self) -> GlobalTensor:
        """Return the transposed tensor of the other mask, under another name."""
        whole = self.mask.tensor()
        return replace(whole, name=f"{whole.name}^T", rows=whole.cols, cols=whole.rows)

    def values(self) -> Any:
        """Return the transposed values of the other mask."""
        values = self.mask.values()
        if isinstance(values, PartByPart):
            return PartByPart(values.shape[::-1], lambda b, h, rows, cols: values.part(b, h, cols, rows).T)
        return np.ascontiguousarray(values.swapaxes(-1, -2))

    def cut(self, row: int, rows: int, col: int, cols: int, offset: int | None) -> GlobalTile:
        """Return the mask of keys from ``row`` on and queries from ``col`` on."""
        of = Repeated.cut(self, col, cols, row, rows, offset)
        return self.tensor().tile(0, 0, of.col, rows, of.row, cols)


def mask_of(
    problem: Problem, sizes: tuple[int, int], kind: MaskKind | None = None, *, seen: Seen | None = None, packed: int = 1
) -> Mask | None:
    """Return the mask of a problem, for blocks of ``sizes`` = (rows, keys); None if every query sees every key.

    ``kind``: by default, cut if a constant matrix suffices (causal masks and windows), else loaded.  The rows of
    ``packed`` heads are concatenated.  Raises `TilingError` if no constant matrix suffices, or if none exists for such
    blocks.
    """
    seen = problem.seen if seen is None else seen
    if isinstance(seen, KeyRanges):
        if seen.shows_all:
            return None
        is_band = seen.after is not None and not (seen.sinks or seen.prefix or seen.documents or seen.chunk)
        if packed > 1 and len(set(problem.queries)) == 1 and seen.is_plain and kind in (None, "cut"):
            return PackedMask(problem.seq_q, *sizes)
        if packed == 1 and is_band and kind in (None, "cut"):
            assert seen.after is not None
            mask = TilingMask(window=seen.window and seen.window + seen.after, after=seen.after)
            mask.check(min(sizes[0], problem.seq_q), min(sizes[1], problem.seq_kv))
            return mask
    if kind == "cut":
        raise TilingError(
            "mask=cut: one constant matrix can express only causal masks and windows, which are the same for all "
            "queries; sinks, prefixes, documents, chunks and your own functions need mask=loaded or computed"
        )
    seens: tuple[Seen, ...] = (seen,)
    each: tuple[int, ...] = (problem.seq_q,)
    if problem.lengths and (problem.documents or (packed > 1 and len(set(problem.queries)) > 1)):
        seens, each = tuple(problem.sequence(n).seen for n in range(problem.batch)), problem.queries
    call = problem.last_offset, problem.seq_q * packed, problem.seq_kv, each
    return SeenMask("mask", "int8", 1, *call, seens, kind != "computed")
