"""Results of an execution of values: tensors, errors against float64, and numeric events."""

from __future__ import annotations

from dataclasses import asdict, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from npusim.config.json_record import written_as
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NumericEvent:
    """``overflow`` (an Inf from finite inputs) or ``nan`` (a NaN from numbers) in one operation of one block.

    ``path`` contains the iteration of each loop around it, ``row`` and ``col`` the first element within the operation's
    tile, ``count`` the number of such elements in it; ``position`` counts the block's previous operations. ``cause``:
    for a NaN, the sum, difference, product or quotient of the first element as numbers, ``-inf - -inf``.
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
    cause: str = ""

    def __str__(self) -> str:
        where = " ".join(f"{name}={index}" for name, index in self.path.items())
        location = f"{self.block}{' ' + where if where else ''} row {self.row} col {self.col}"
        return f"{self.kind} in {self.operation} ({location}){self.cause and f': {self.cause}'}"


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Distance of computed outputs from float64 attention on the same inputs, over the rows computed.

    ``rmse`` is the relative Frobenius error; ``ulp_histogram`` counts outputs by distance from the correctly rounded
    reference: keys ``"0", "1", "2", "3-4", "5-8", ">8"``.  If an output is NaN or Inf (``nan_count``, ``inf_count``)
    there is no error: ``rmse``, ``max_abs_error`` and ``max_ulp`` are None and the histogram is empty.
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
class Diagnosis:
    """Properties of the values of the computed rows; None if a figure has no meaning.

    Ranges are those of K; of Q K^T in float64, unscaled, over visible pairs; of K' as stored; and of scores, which are
    the results of the matrix unit (Q K^T, or PASA's S') before they are stored, in whole tiles and without infinite
    values. Resonance (`npusim.program.numerics.diagnosis`) belongs to the block whose wave changes the scores most.
    """

    nan_row_percent: float  #: output rows with a NaN, as the PASA paper counts them
    key_min: float
    key_max: float
    raw_score_min: float
    raw_score_max: float
    resonance_cosine: float
    resonance_frequency: int
    resonance_phase_degrees: float
    resonance_share_percent: float
    sink_mass_percent: float  #: mean softmax mass of the first keys: as many as the recipe states, else one
    shifted_key_min: float | None = None
    shifted_key_max: float | None = None
    score_min: float | None = None
    score_max: float | None = None
    underflow_percent: float | None = None  #: visible pairs whose P is zero in the second product
    zeroed_mass_percent: float | None = None  #: mean softmax mass of those pairs: the actual loss
    #: P-Cast's "effective information loss": the fraction of zeroed pairs times their mass, both without the sinks.  It
    #: overstates the loss, since the zeroed pairs are the smallest (reports/pcast_numerics, table 1).
    product_mass_percent: float | None = None
    clipped_mass_percent: float | None = None  #: mean share of a row's sum that is lost because P saturates
    saturated_count: float | None = None  #: probabilities that the cast limited to the largest finite value

    def figures(self) -> dict[str, float]:
        """Return the figures that have a meaning, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChoiceCounts:
    """How often the first of two values was chosen: numbers of all elements and of elements with this choice; numbers
    of all tiles and of tiles with such an element.
    """

    count: int
    taken: int
    tiles: int
    tiles_with_one: int

    def __str__(self) -> str:
        share, of_tiles = (100 * a / b for a, b in ((self.taken, self.count), (self.tiles_with_one, self.tiles)))
        return f"in {share:.3g} % of {self.count:,} cases, at least once in {of_tiles:.3g} % of tiles"


@dataclass(frozen=True)
class NumericRecord(ErrorSummary):
    """Properties of the computed bits against a reference, in the form of ``result.json``.

    ``overflow_counts`` and ``nan_counts`` count elements per operation, ``first_events`` has the first of each kind.
    ``arithmetic`` names the matrix units' arithmetic and its evidence, ``row_sums`` the orders of row sums and their
    basis, ``against`` describes the reference of the errors, ``choices`` counts values that other values select,
    ``others`` contains the errors of results other than the output, by tensor, over the computed elements; None: there
    are no others.
    """

    sample: str
    overflow_counts: dict[str, int]
    nan_counts: dict[str, int]
    first_events: tuple[NumericEvent, ...]
    arithmetic: dict[str, str]
    diagnosis: Annotated[Diagnosis, written_as(Diagnosis.figures, dict[str, Any])] | None = None
    row_sums: dict[str, str] | None = None
    against: str = "float64"
    choices: dict[str, ChoiceCounts] | None = None
    others: dict[str, ErrorSummary | None] | None = None


@dataclass(frozen=True, kw_only=True)
class NumericResult(NumericRecord):
    """Bits of the chosen blocks, with the events of their execution.

    ``rows`` maps (batch, head, first row) of each computed block to its output (rows, dv).  ``events`` lists every
    operation of every computed block that had events, in program order (the first
    `npusim.program.numerics.executor.EVENTS_KEPT` of them).  ``row_errors`` has the relative error of each row of
    ``rows``, NaN or Inf where it is not finite; ``variants`` has one block of rows from each of the other programs
    (`npusim.program.numerics.evaluate.compared_rows`).  ``row_sums`` is set in a run's result: its device states the
    basis of ``row_sum_orders``.
    """

    rows: dict[tuple[int, int, int], NDArray[Any]] = field(repr=False)
    shape: tuple[int, int, int, int]
    row_sum_orders: tuple[str, ...] = ()
    row_errors: dict[tuple[int, int, int], NDArray[np.float64]] = field(default_factory=dict, repr=False)
    events: tuple[NumericEvent, ...] = field(default=(), repr=False)
    variants: dict[str, NDArray[Any]] = field(default_factory=dict, repr=False)

    @property
    def error(self) -> ErrorSummary:
        """Distance of the output from the reference, without other results."""
        return ErrorSummary(**{f.name: getattr(self, f.name) for f in fields(ErrorSummary)})

    @property
    def sampling_error(self) -> float:
        """Standard error of ``rmse``, from the differences between squares of rows' errors; 0 if all rows were
        computed.
        """
        squares = np.concatenate([np.square(errors) for errors in self.row_errors.values()] or [np.zeros(0)])
        if not self.rmse or len(squares) < 2 or len(squares) == np.prod(self.shape[:3]):
            return 0.0
        return float(self.rmse * squares.std() / squares.mean() / np.sqrt(4 * len(squares)))

    @cached_property
    def output(self) -> NDArray[Any]:
        """Output (batch, heads, seq_q, dv) in its own dtype, integers in float32; NaN where nothing was computed."""
        blocks = list(self.rows.values())
        dtype = blocks[0].dtype if blocks else np.dtype(np.float64)
        if dtype.kind in "iu" and not self.computed.all():
            dtype = np.dtype(np.float32)
        full = np.empty(self.shape, dtype) if dtype.kind in "iu" else np.full(self.shape, np.nan, dtype)
        full = full if blocks else np.empty((0, 0, 0, 0))
        for (batch, head, row), block in self.rows.items():
            full[batch, head, row : row + len(block)] = block
        return full

    @cached_property
    def computed(self) -> NDArray[np.bool_]:
        """Mask of the computed rows, (batch, heads, seq_q)."""
        done = np.zeros(self.shape[:3], np.bool_)
        for (batch, head, row), block in self.rows.items():
            done[batch, head, row : row + len(block)] = True
        return done
