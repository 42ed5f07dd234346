"""Numbers of a problem for each query head: slopes of ALiBi, a bias, learned additional scores (sinks)."""

from __future__ import annotations

import random
from dataclasses import field
from functools import lru_cache
from typing import Any

from npusim.late_methods import dataclass


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return each head's slope: 2^(-8 (h + 1) / n) if n is a power of two; else the slopes of the next lower power,
    then every second slope of the next higher power (Press et al. 2022, section 3; their code).
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    above = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return tuple((slopes + above)[:heads])


@lru_cache(maxsize=4096)  # stored by rows, because each block of keys needs the same rows
def bias_row(head: int, query: int, keys: int) -> Any:
    """Return the values added to the scores of a head's query, (keys,), drawn from a standard normal distribution in
    float32.
    """
    import numpy as np

    return np.random.default_rng([head, query]).standard_normal(keys, np.float32)


@dataclass(frozen=True, slots=True)
class GivenBias:
    """A given bias, (heads or 1, queries, keys); biases with the same digest are equal."""

    values: Any = field(compare=False, repr=False)
    digest: str

    def row(self, head: int, query: int, keys: int) -> Any:
        """Return the bias row of a query of any sequence: queries beyond the last row use the last row, and keys beyond
        the end of the row have bias 0.
        """
        row = self.values[head, min(query, self.values.shape[1] - 1)][:keys].astype("float64")
        row.resize(keys, refcheck=False)
        return row


def sink_logits(heads: int) -> tuple[float, ...]:
    """Return a drawn score for each head, from a standard normal distribution: a real model stores these scores in its
    weights.
    """
    draw = random.Random(heads)
    return tuple(draw.gauss(0.0, 1.0) for _ in range(heads))
