"""The keys that a query sees: ranges of keys as a function of the query's position in its sequence.

The query at position p has the position of key p; query row i of a call is at position i + ``causal_offset``, the last
one on the last key.  Everything else follows from ranges: the tiles that are visited, the tiles that need a mask, and
the number of pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from npusim.errors import SpecError, TilingError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

#: First key of each range and the key after its last; ranges are ascending, disjoint and not adjacent.
Ranges = tuple[tuple[int, int], ...]
#: ``sees(q, k)``: whether queries at positions q of a sequence see the keys at k; int64 arrays that broadcast.
Sees = Callable[[Any, Any], Any]
#: Largest number of elements of a user's mask that are examined.
MOST_SEEN = 1 << 28


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in ascending order, without empty ranges; ranges that touch or overlap become one."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Visible keys by the fields of a problem: at most two ranges per query, whose ends never decrease from query to
    query.

    The range of a query at p is its document, or its chunk of the document; else all ``keys``. Within this range, the
    query sees the ``window`` that ends with p (None: all keys up to p), ``after`` keys after p (None: all), and the
    first ``sinks`` and ``prefix`` keys; ``after`` also limits sinks.
    """

    keys: int
    after: int | None = None
    window: int | None = None
    sinks: int = 0
    prefix: int = 0
    documents: tuple[int, ...] = ()
    chunk: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a query sees all keys, or all keys up to its own."""
        return self.window is None and not self.after and not self.prefix and not self.documents and self.chunk is None

    @property
    def shows_all(self) -> bool:
        """Whether every query sees all keys."""
        return self.is_plain and self.after is None

    @property
    def index_work(self) -> tuple[int, int]:
        """Numbers of the operations on positions that decide whether a key is visible, and of the operands that they
        read.

        Each limit needs one comparison; a window also needs a difference, and an operation that joins its mask with the
        mask of the other end.  In Triton's code for sm_90 (eight tiles) a window has 2.3 to 3.6 instructions more than
        a causal mask, a chunk 0.8 to 1 more, and sinks none.
        """
        bounds = self.prefix, self.documents, self.chunk
        steps = (self.after is not None) + 3 * (self.window is not None) + sum(bool(bound) for bound in bounds)
        return steps, int(bool(self.documents))

    def ends_at(self, p: int) -> tuple[int, int, int, int]:
        """Return the first key that a query may see, the end of that range (sinks, prefix), and the window's range."""
        base, end = 0, self.keys
        if self.documents:
            ends = _ends(self.documents)
            number = min(bisect_right(ends, p), len(ends) - 1)
            base, end = ends[number] - self.documents[number], ends[number]
            end = min(end, self.keys)
        if self.chunk is not None:
            start = base + (min(p, end - 1) - base) // self.chunk * self.chunk
            base, end = max(base, start), min(end, start + self.chunk)  # a chunk before the first key is empty
        high = end if self.after is None else min(p + 1 + self.after, end)
        low = base if self.window is None else max(base, p + 1 - self.window)
        return base, max(min(base + self.sinks, high), min(base + self.prefix, end)), low, high

    def union(self, first: int, last: int) -> Ranges:
        """Return the keys that any query at positions ``first`` to ``last`` sees."""
        base, shown, low, _ = self.ends_at(first)
        _, shown_last, _, high = self.ends_at(last)
        return joined(((base, shown), (low, max(high, shown_last))))

    def common(self, first: int, last: int) -> Ranges:
        """Return the keys that all queries at these positions see."""
        base, shown, _, high = self.ends_at(first)
        base_last, _, low, _ = self.ends_at(last)
        return joined(((base, shown), (low, high))) if base == base_last else ()

    def matrix(self, first: int, rows: int, col: int, cols: int) -> npt.NDArray[Any]:
        """Return which keys each position sees, (rows, cols) bool."""
        return _matrix(self, first, rows, col, cols)


@lru_cache(maxsize=256)  # stored by tiles, because blocks of other heads need the same tiles
def _matrix(seen: KeyRanges, first: int, rows: int, col: int, cols: int) -> npt.NDArray[Any]:
    import numpy as np

    base, shown, low, high = (x[:, None] for x in np.array([seen.ends_at(first + r) for r in range(rows)]).T)
    k = np.arange(col, col + cols)[None]
    seen_keys: npt.NDArray[Any] = ((k >= base) & (k < shown)) | ((k >= low) & (k < high))
    return seen_keys


@lru_cache(maxsize=64)  # one entry per document mask
def _ends(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(lengths))


@dataclass(frozen=True, slots=True)
class KeyFunction:
    """A user's function of the positions of query and key; ``keys`` of a sequence."""

    sees: Sees
    keys: int
    is_plain = shows_all = False
    index_work = (4, 0)  #: assumed to be the work of a window; the function's own operations are not counted

    def union(self, first: int, last: int) -> Ranges:
        """Return the keys that any query at positions ``first`` to ``last`` sees."""
        return _ranges(self._block(first, last).any(axis=0))

    def common(self, first: int, last: int) -> Ranges:
        """Return the keys that all queries at these positions see."""
        return _ranges(self._block(first, last).all(axis=0))

    def matrix(self, first: int, rows: int, col: int, cols: int) -> npt.NDArray[Any]:
        """Return the keys that each position sees, (rows, cols) bool.

        Raises `SpecError` for a function that contradicts itself.
        """
        import numpy as np

        q, k = np.arange(first, first + rows)[:, None], np.arange(col, col + cols)[None]
        answer = np.asarray(self.sees(q, k))
        if answer.dtype != bool or np.broadcast_shapes(answer.shape, (rows, cols)) != (rows, cols):
            raise SpecError(
                f"sees: the function has arguments q ({rows}, 1) and k (1, {cols}) and must return for each pair "
                f"whether q sees k, bool ({rows}, {cols}); it returned {answer.dtype} {answer.shape}"
            )
        return np.broadcast_to(answer, (rows, cols))

    def _block(self, first: int, last: int) -> Any:
        rows = last + 1 - first
        if rows * self.keys > MOST_SEEN:
            raise TilingError(f"a mask function has {rows} x {self.keys} pairs at a time; allowed: {MOST_SEEN:,}")
        return self.matrix(first, rows, 0, self.keys)


#: The keys that the queries of a sequence see; immutable and hashable.
Seen = KeyRanges | KeyFunction


def _ranges(row: npt.NDArray[Any]) -> Ranges:
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False]))))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@lru_cache(maxsize=64)  # one entry per problem
def pairs_seen(seen: Seen, first: int, rows: int) -> int:
    """Return the number of visible pairs of a query and a key for ``rows`` positions from ``first`` on."""
    if isinstance(seen, KeyFunction):
        step = max(1, MOST_SEEN // 16 // seen.keys)
        parts = ((p, min(step, first + rows - p)) for p in range(first, first + rows, step))
        return sum(int(seen.matrix(p, n, 0, seen.keys).sum()) for p, n in parts)
    return sum(b - a for p in range(first, first + rows) for a, b in seen.union(p, p))
