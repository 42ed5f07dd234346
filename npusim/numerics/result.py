"""What the execution of values returns: tensors, errors against float64, and numeric events."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.numerics.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True)
class NumericEvent:
    """``overflow`` (finite in, Inf out) or ``nan`` (from numbers) in one operation of one block.

    ``path`` gives the iteration of each loop around it, ``row`` and ``col`` the first element within
    the operation's tile, ``count`` how many elements of it; ``position`` counts the block's operations
    before this one.
    """

    kind: str
    operation: str
    queue: str
    phase: str
    block: str
    path: dict[str, int]
    row: int
    col: int
    count: int = 1
    position: int = 0

    def __str__(self) -> str:
        where = " ".join(f"{name}={index}" for name, index in self.path.items())
        place = f"{self.block}{' ' + where if where else ''} row {self.row} col {self.col}"
        return f"{self.kind} in {self.operation} ({place})"


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Distance of computed outputs from float64 attention on the same inputs, over the rows computed.

    ``rmse`` is the relative Frobenius error; ``ulp_histogram`` counts outputs by distance from the
    correctly rounded reference: keys ``"0", "1", "2", "3-4", "5-8", ">8"``.  Where an output is NaN or
    Inf (``nan_count``, ``inf_count``) there is no error: ``rmse``, ``max_abs_error`` and ``max_ulp``
    are None and the histogram is empty.
    """

    rmse: float | None
    max_abs_error: float | None
    max_ulp: int | None
    ulp_histogram: dict[str, int]
    nan_count: int
    inf_count: int
    nan_row_fraction: float
    count: int

    @property
    def is_finite(self) -> bool:
        """Whether every output is a finite number."""
        return not self.nan_count and not self.inf_count


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """How many values have which magnitude, before they are stored in ``fmt``.

    ``counts`` maps n to how many lie from 2^n to below 2^(n + 1), sign left aside.
    """

    fmt: str
    counts: dict[int, int]
    zero_count: int
    nonfinite_count: int


@dataclass(frozen=True)
class NumericResult:
    """Bits of the chosen blocks, and what happened on the way.

    ``rows`` maps (batch, head, first row) of each computed block to its output (rows, dv).
    ``overflow_counts`` and ``nan_counts`` count elements per operation; ``events`` lists every
    operation of every computed block that had some, in program order (the first
    `npusim.numerics.events.EVENTS_KEPT` of them), ``first_events`` the first of each kind;
    ``arithmetic`` names the matrix units' arithmetic and its evidence, ``row_sums`` the orders of row
    sums.  ``row_errors`` has the relative error of each row of ``rows``, NaN or Inf where it is not finite;
    ``scores`` the magnitudes of what is stored as scores, where a diagnosis was asked for;
    ``against`` what errors are against, in words.
    """

    rows: dict[tuple[int, int, int], NDArray[Any]] = field(repr=False)
    shape: tuple[int, int, int, int]
    sample: str
    error: ErrorSummary
    overflow_counts: dict[str, int]
    nan_counts: dict[str, int]
    first_events: tuple[NumericEvent, ...]
    arithmetic: dict[str, str]
    row_sums: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    scores: Magnitudes | None = None
    row_errors: dict[tuple[int, int, int], NDArray[np.float64]] = field(default_factory=dict, repr=False)
    events: tuple[NumericEvent, ...] = field(default=(), repr=False)
    against: str = "float64"

    @cached_property
    def output(self) -> NDArray[Any]:
        """Output (batch, heads, seq_q, dv) in its own dtype; NaN where nothing was computed."""
        blocks = list(self.rows.values())
        full = np.full(self.shape, np.nan, blocks[0].dtype) if blocks else np.empty((0, 0, 0, 0))
        for (batch, head, row), block in self.rows.items():
            full[batch, head, row : row + len(block)] = block
        return full

    @cached_property
    def computed(self) -> NDArray[np.bool_]:
        """Which rows were computed, (batch, heads, seq_q)."""
        done = np.zeros(self.shape[:3], np.bool_)
        for (batch, head, row), block in self.rows.items():
            done[batch, head, row : row + len(block)] = True
        return done
