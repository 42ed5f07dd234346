"""Sizes of scores on the worst input: those of QK^T in float64, and those that a schedule stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import get_format
from npusim.formats.cast import widen
from npusim.program.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from npusim.program.numerics.executor import HeadSource, Moment

#: Sizes are counted by powers of two between these limits; smaller sizes and 0 count in the first power, larger ones in
#: the last.
LOWEST, HIGHEST = -8, 24


@dataclass(frozen=True, slots=True)
class ScoreSizes:
    """Shares of scores by size (absolute value): of QK^T (``exact``) and of the stored scores (``stored``).

    ``fmt``, ``largest``: the format in which products are stored, and its largest finite number.  Each entry of
    ``exact`` and ``stored`` is the share, 0 to 1, of sizes from ``2**(LOWEST + i)`` to twice that; the difference to 1
    is the share of values that are not finite.
    """

    fmt: str
    largest: float
    exact: tuple[float, ...]
    stored: tuple[float, ...]

    @property
    def lost(self) -> float:
        """Share of stored scores that are Inf or NaN."""
        return 1 - sum(self.stored)


@dataclass(slots=True)
class ScoreCounter:
    """Observer that counts scores by size where the program first stores them: as a product, or as its conversion."""

    fmt: str = ""
    counts: NDArray[np.int64] = field(default_factory=lambda: _sizes(np.zeros(0)))
    _last: NDArray[np.int64] = field(default_factory=lambda: _sizes(np.zeros(0)))

    def __call__(self, moment: Moment) -> None:
        """Observe one executed step."""
        step = moment.step
        if moment.role != "score" or step.opcode not in (Opcode.MATMUL, Opcode.CAST):
            return
        if step.attributes.accumulate:  # replaces the counts of the sum so far
            self.counts -= self._last
        self.fmt, self._last = step.dst.fmt, _sizes(widen(moment.result).astype(np.float64))
        self.counts += self._last


def score_sizes(counter: ScoreCounter, exact: Iterable[NDArray[np.float64]]) -> ScoreSizes | None:
    """Return the shares of the counted scores, and of exact scores; None if a schedule has no product of scores."""
    if not counter.counts.sum():
        return None
    sizes = sum((_sizes(scores) for scores in exact), start=_sizes(np.zeros(0)))
    largest = get_format(counter.fmt).max_finite
    return ScoreSizes(counter.fmt, float(largest), _shares(sizes), _shares(counter.counts))


def exact_scores(source: HeadSource, heads: Iterable[int], group: int, rows: slice) -> Iterable[NDArray[np.float64]]:
    """Yield QK^T of some rows of the first sequence, one head at a time, (rows, keys); ``group``: number of heads of Q
    per head of K.

    Values that are not finite give scores that are not finite.
    """
    for head in heads:
        q, k = (widen(source(name, 0, at)).astype(np.float64) for name, at in (("q", head), ("k", head // group)))
        with np.errstate(all="ignore"):
            yield q[rows] @ k.T


def _sizes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return counts by power of two, and last those that are not finite."""
    finite = np.abs(values[np.isfinite(values)])
    exponents = np.clip(np.frexp(finite)[1] - 1, LOWEST, HIGHEST - 1)
    exponents[finite == 0] = LOWEST
    counts = np.bincount(exponents - LOWEST, minlength=HIGHEST - LOWEST)
    return np.append(counts, values.size - finite.size).astype(np.int64)


def _shares(counts: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(float(x) for x in counts[:-1] / max(counts.sum(), 1))
