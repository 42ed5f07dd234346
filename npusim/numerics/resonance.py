"""Resonance of Q and K along the head dimension: how far their waves are in or out of phase.

The PASA paper calls it resonance when queries and keys share a wave along the head dimension, in
phase (scores large and positive) or 180 degrees out of phase (large and negative); section 3.3.2,
figure 6.  It defines no measure; this one is ours.  The mean score of all pairs that the mask leaves
is, by Parseval's theorem, a sum over frequencies; without a mask, of ``|Q(f)| |K(f)| cos(phase(f))``
of the mean query and the mean key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.numerics.reference import multiplied, summed

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Resonance:
    """What one block of queries has in common with the keys it sees.

    Attributes
    ----------
    cosine
        Mean over the pairs that the mask leaves of the cosine between query and key: 1 in phase, -1
        out of phase, about 0 for independent directions.
    frequency
        Periods along the head dimension of the wave that contributes most; 0 is a common offset.
    phase_degrees
        Its lag, from 0 (in phase) to 180 (out of phase).
    share
        Part that this one frequency has of the sizes of all these contributions.
    mean_score
        Contribution of this frequency to the mean of Q K^T over those pairs, unscaled.
    """

    cosine: float
    frequency: int
    phase_degrees: float
    share: float
    mean_score: float


def measure(q: NDArray[Any], k: NDArray[Any], seen: NDArray[np.int64] | None = None) -> Resonance:
    """Return the resonance of queries ``(rows, d)`` with keys ``(keys, d)``; all values finite.

    ``seen`` (rows) is how many of the keys, from the first, each query sees; by default all.

    Examples
    --------
    >>> wave = np.cos(2 * np.pi * 3 * np.arange(64) / 64)[None, :]
    >>> found = measure(wave, -wave)
    >>> found.frequency, round(found.phase_degrees), round(found.cosine, 6)
    (3, 180, -1.0)
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    d = queries.shape[1]
    reach = np.full(len(queries), len(keys)) if seen is None else np.asarray(seen)
    pairs = max(1, int(reach.sum()))
    turns = 2 * np.pi / d * (np.outer(np.arange(d), np.arange(d // 2 + 1)) % d)
    basis = np.vectorize(math.cos)(turns), np.vectorize(math.sin)(turns)  # numpy's own hang on the CPU
    (a, b), (x, y) = ([multiplied(rows, wave) for wave in basis] for rows in (queries, _sums(keys, reach)))
    real, lag = (summed(part.T) / pairs / d for part in (a * x + b * y, a * y - b * x))
    # Frequencies strictly between 0 and d/2 stand for two of the full transform's.
    for part in (real, lag):
        part[1 : (d + 1) // 2] *= 2
    power = np.sqrt(real * real + lag * lag)
    strongest = int(power.argmax())
    total = float(summed(power))
    return Resonance(
        cosine=float(summed(summed(_directions(queries) * _sums(_directions(keys), reach))) / pairs),
        frequency=strongest,
        phase_degrees=abs(math.degrees(math.atan2(lag[strongest], real[strongest]))),
        share=float(power[strongest]) / total if total else 0.0,
        mean_score=float(real[strongest]),
    )


def _sums(keys: NDArray[np.float64], reach: NDArray[Any]) -> NDArray[np.float64]:
    """Return, for each query, the sum of the keys it sees, (rows, d)."""
    sums = np.cumsum(np.vstack([np.zeros_like(keys[:1]), keys]), axis=0)
    found: NDArray[np.float64] = sums[reach]
    return found


def _directions(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows' unit vectors; a row of zeros has no direction and counts as 0."""
    length = np.sqrt(summed(rows * rows))[:, None]
    unit: NDArray[np.float64] = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
