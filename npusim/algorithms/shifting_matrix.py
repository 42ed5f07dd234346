"""PASA's shifting matrix M: what it takes from a block of keys, and the correction that gives it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import cast, get_format

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ShiftingMatrix:
    """M = (I - (beta / n) J) / alpha with entries rounded to ``fmt``, and the correction it needs.

    ``alpha`` is 1 where the scale 1/sqrt(d) is applied elsewhere.
    """

    keys: int
    beta: float
    alpha: float
    fmt: str = "float16"

    @property
    def diagonal(self) -> float:
        """Entry on the diagonal, rounded once."""
        return float(cast(np.float64((1 - self.beta / self.keys) / self.alpha), self.fmt))

    @property
    def off_diagonal(self) -> float:
        """Entry beside the diagonal, rounded once."""
        return -float(cast(np.float64(self.beta / self.keys / self.alpha), self.fmt))

    @property
    def mean_kept(self) -> float:
        """What is left of a block's mean, times 1 / alpha: a - bn of the rounded entries.

        a is the diagonal plus b, b the off-diagonal's size: what M really does to a row
        (papers.md section 2.2).  Zero or less where rounding takes beta to 1 or beyond.
        """
        b = -self.off_diagonal
        return self.diagonal + b - b * self.keys

    def values(self) -> NDArray[Any]:
        """Return M, (1, 1, keys, keys) in the format's dtype."""
        shape = (1, 1, self.keys, self.keys)
        matrix = np.full(shape, self.off_diagonal, get_format(self.fmt).dtype)
        index = np.arange(self.keys)
        matrix[..., index, index] = self.diagonal
        return matrix

    def correction(self, *, is_ideal: bool) -> float:
        """Return Inva: bn / (a - bn) of the rounded entries, or beta / (1 - beta)."""
        if is_ideal:
            return self.beta / (1 - self.beta)
        return -self.off_diagonal * self.keys / self.mean_kept


def optimal_beta(beta: float, keys: int, fmt: str = "float16", *, rounds: int = 16) -> float:
    """Return the beta next to ``beta`` whose ideal correction equals that of the rounded matrix.

    Fixed point of beta = 1 - (a - b n) with the entries of M at alpha = 1 rounded to ``fmt``, in
    float64 (PASA, equations 20 to 22, simplified in papers.md section 2.1); one step unless the
    entries round anew (16 at most).  1 or more where they take the whole mean.
    """
    for _ in range(rounds):
        found = 1 - ShiftingMatrix(keys, beta, 1.0, fmt).mean_kept
        if found == beta:
            break
        beta = found
    return beta
