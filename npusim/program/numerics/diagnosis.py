"""Diagnosis of an execution: ranges, resonance, underflow and saturation, as plain figures.

The roles of the steps' destinations select the values to examine: a ``score``, an exponential that is a ``weight`` (P)
and its casts, exponentials that are ``decay`` or ``gain`` (they rescale the earlier tiles and the current one),
additions to the ``sum`` (the tile ends) and the ``output`` divided by it; keys are selected by their name, ``k``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.config.problem import Problem, SinkData
from npusim.formats import get_format
from npusim.formats.cast import widen
from npusim.late_methods import dataclass
from npusim.program.ir.op import COMPARED, Opcode, Step
from npusim.program.ir.opaque import at_lane
from npusim.program.ir.tile import GlobalTile, Operand, RingTile, Tile
from npusim.program.numerics.bits_result import Diagnosis
from npusim.program.numerics.reference import multiplied, softmax_weights, summed

if TYPE_CHECKING:
    from npusim.program.numerics.executor import Moment


Array = NDArray[Any]
Doubles = NDArray[np.float64]


class Range:
    """The smallest and the largest finite value so far."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf

    def look(self, values: Array) -> None:
        """Add the values of an array; Inf and NaN are ignored."""
        wide = np.asarray(values, np.float64)
        finite = wide[np.isfinite(wide)]
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """The range; both ends are None if no value was added."""
        return (self.low, self.high) if self.low <= self.high else (None, None)


class Probe:
    """Collects a diagnosis: an observer of the execution that also examines the inputs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.underflow = Underflow(self.sinks)
        self.keys, self.shifted_keys, self.raw_scores, self.scores = (Range() for _ in range(4))
        self.resonance: Resonance | None = None
        self._sink_mass = 0.0
        self._rows = 0

    @property
    def sinks(self) -> int:
        """Number of sink keys."""
        data = self.problem.data
        return data.sinks if isinstance(data, SinkData) else 1

    def __call__(self, moment: Moment) -> None:
        """Examine one executed step."""
        match moment.role, moment.step.opcode:
            case "score", Opcode.MATMUL:  # scores are still in the accumulator
                self.scores.look(moment.result)
            case "score", (Opcode.COPY | Opcode.CAST):
                self.scores.look(moment.sources[0])
            case "result", _ if moment.step.name == "k_shifted":
                self.shifted_keys.look(moment.result)
            case _:
                self.underflow(moment)

    def look_at_inputs(self, q: Array, k: Array, row: int, problem: Problem) -> None:
        """Observe the queries of one head from ``row`` on, (rows, d), and its keys, (keys, d); ``problem``: the problem
        of this head.
        """
        queries = np.asarray(q, np.float64) * problem.q_scale
        keys = np.asarray(k, np.float64) * problem.k_scale
        raw = np.ascontiguousarray(multiplied(keys, queries.T).T)
        seen = problem.seen.matrix(problem.causal_offset + row, len(q), 0, len(k))
        raw = np.where(seen, raw, -np.inf)
        self.raw_scores.look(raw)
        self.keys.look(keys)
        resonance = measure(queries, keys, seen)
        if self.resonance is None or abs(resonance.mean_score) > abs(self.resonance.mean_score):
            self.resonance = resonance
        weights = softmax_weights(raw * problem.scale)
        self._sink_mass += float(summed(summed(weights[:, : self.sinks]) / summed(weights)))
        self._rows += len(q)

    def diagnosis(self, nan_row_fraction: float) -> Diagnosis:
        """Return the figures; ``nan_row_fraction`` counts rows of the outputs."""
        assert self.resonance is not None, "no inputs were looked at"
        sink_mass = self._sink_mass / self._rows
        shifted_min, shifted_max = self.shifted_keys.ends
        score_min, score_max = self.scores.ends
        wave = self.resonance
        return Diagnosis(
            nan_row_percent=100 * nan_row_fraction,
            key_min=self.keys.low,
            key_max=self.keys.high,
            raw_score_min=self.raw_scores.low,
            raw_score_max=self.raw_scores.high,
            resonance_cosine=wave.cosine,
            resonance_frequency=wave.frequency,
            resonance_phase_degrees=wave.phase_degrees,
            resonance_share_percent=100 * wave.share,
            sink_mass_percent=100 * sink_mass,
            shifted_key_min=shifted_min,
            shifted_key_max=shifted_max,
            score_min=score_min,
            score_max=score_max,
            **self.underflow.figures(1 - sink_mass),
        )


class Underflow:
    """Counts probabilities that become zero, and sums the softmax mass that they represent.

    ``zeroed`` and ``visible`` count (query, key) pairs; ``zeroed_others`` and ``visible_others`` count those pairs
    whose key is after the first ``sinks``.  Over ``rows`` finished query rows, ``lost_mass`` is the sum of the parts of
    row sums that zeroed pairs represent, and ``clipped_mass`` the sum of the parts that saturation cut; ``saturated``
    counts values that a saturating cast cut to the largest finite one.  A row whose sum is not finite, or is 0 without
    a loss, has no mass and is not in ``rows``.
    """

    def __init__(self, sinks: int = 0) -> None:
        self.sinks = sinks
        self.zeroed = self.visible = self.rows = self.saturated = 0
        self.zeroed_others = self.visible_others = 0
        self.lost_mass = self.clipped_mass = 0.0
        self._first_key, self._is_loading = 0, False
        self._blocks: Sequence[Any] = ()
        #: By memory: sums of zeroed pairs, and of the parts that saturation cut from other pairs, (2, lanes, rows).
        self._lost: dict[str, Doubles] = {}
        #: A tile whose sum is computed: P may be cast before or after the sum, so that a tile is counted when the next
        #: one begins.
        self._summed: tuple[Operand, Any, Any, Any, Any, int] | None = None
        self._gone: NDArray[np.bool_] | None = None
        self._clipped: Doubles | float = 0.0
        self._start_tile()

    def _start_tile(self) -> None:
        self._mask: NDArray[np.bool_] | None = None
        self._exact: Doubles | None = None
        self._old_factor: Doubles | None = None
        self._tile_factor: Doubles | None = None

    def __call__(self, moment: Moment) -> None:
        """Examine one executed step."""
        if moment.blocks is not self._blocks:
            self._settle()
            self._blocks, self._lost = moment.blocks, {}
        step = moment.step
        match moment.role, step.opcode:
            case "operand", _ if step.name == "k" and isinstance(step.srcs[0], GlobalTile):
                row = at_lane(step.srcs[0].row, 0)  # a tile of keys may consist of several pieces
                self._first_key = min(self._first_key, row) if self._is_loading else row
                self._is_loading = True
            case _, Opcode.SELECT if isinstance(step.srcs[2], float) and step.attributes.variant != COMPARED:
                self._mask = np.asarray(moment.sources[0] != 0)
            case "weight", Opcode.EXP:
                self._settle()
                self._clipped = 0.0
                self._exact = _exact_exponential(step, moment.sources[0])
                self._gone = widen(moment.result) == 0
                self._is_loading = False
            case "weight", Opcode.CAST:
                self._gone = widen(moment.result) == 0
                cut = _clipped_share(step, moment.sources[0])
                self.saturated += int(np.count_nonzero(cut))
                self._clipped = cut
            case "decay", Opcode.EXP:
                self._old_factor = moment.result.astype(np.float64)[..., 0]
            case "gain", Opcode.EXP:
                self._tile_factor = moment.result.astype(np.float64)[..., 0]
            case "sum", Opcode.ADD if self._exact is not None:
                others = max(0, self.sinks - self._first_key)
                factors = self._tile_factor, self._old_factor
                self._summed = step.dst, self._exact, self._mask, *factors, others
                self._start_tile()
            case "output", Opcode.DIV:
                self._settle()
                self._finish_rows(step.srcs[1], moment.sources[1].astype(np.float64)[..., 0])
            case _:
                pass

    def figures(self, other_mass: float) -> dict[str, float]:
        """Return the figures for a `Diagnosis`; ``other_mass`` is the mass of keys that are not sinks."""
        if not self.visible or not self.rows:
            return {}
        return {
            "underflow_percent": 100 * self.zeroed / self.visible,
            "zeroed_mass_percent": 100 * self.lost_mass / self.rows,
            "product_mass_percent": 100 * (self.zeroed_others / max(1, self.visible_others) * other_mass),
            "clipped_mass_percent": 100 * self.clipped_mass / self.rows,
            "saturated_count": float(self.saturated),
        }

    def _settle(self) -> None:
        """Rescale the losses of the rows so far, and add those of the current tile."""
        if self._summed is None or self._gone is None:
            return
        row_sum, exact, mask, tile_factor, old_factor, others = self._summed
        self._summed = None
        mask = np.broadcast_to(True if mask is None else mask, self._gone.shape)
        gone = self._gone & mask
        self.zeroed += int(gone.sum())
        self.visible += int(mask.sum())
        self.zeroed_others += int(gone[..., others:].sum())
        self.visible_others += int(mask[..., others:].sum())
        lost = np.stack([summed(np.where(mask, exact * part, 0.0)) for part in (gone, self._clipped)])
        if tile_factor is not None:
            lost = lost * tile_factor
        total_lost = self._lost_rows(row_sum)
        if old_factor is not None:
            total_lost *= np.where(total_lost > 0, old_factor, 0.0)
        total_lost += lost

    def _finish_rows(self, row_sum: object, total: Doubles) -> None:
        if not isinstance(row_sum, Tile | RingTile):
            return
        lost = self._lost_rows(row_sum)
        has_mass = np.isfinite(total) & ((total != 0) | (lost[0] != 0))
        zeroed, clipped = np.divide(lost, total, out=np.zeros_like(lost), where=has_mass)
        self.lost_mass += float(summed(zeroed.ravel()))
        self.clipped_mass += float(summed(clipped.ravel()))
        self.rows += int(has_mass.sum())

    def _lost_rows(self, row_sum: Operand) -> Doubles:
        """Return the lost sums of some rows, (2, lanes, rows), stored by the place of the row sum ``l``."""
        assert isinstance(row_sum, Tile | RingTile)  # the sum is in a ring if a core continues with its next block
        space = row_sum.space if isinstance(row_sum, Tile) else row_sum.ring.space
        first = row_sum.offset_bytes // get_format(row_sum.fmt).size_bytes
        end, lanes = first + row_sum.rows, len(self._blocks)
        known = self._lost.get(space, np.zeros((2, lanes, 0)))
        if known.shape[2] < end:
            known = np.concatenate([known, np.zeros((2, lanes, end - known.shape[2]))], axis=2)
            self._lost[space] = known
        return known[..., first:end]


def _exact_exponential(step: Step, exponent: Array) -> Doubles:
    """Return the exponential without underflow, in the base of its variant."""
    power = formats.exp2 if step.attributes.variant.startswith("exp2.") else formats.exp
    result: Doubles = power(exponent.astype(np.float64), "float64")
    return result


def _clipped_share(step: Step, source: Array) -> Doubles | float:
    """Return the share that a saturating cast cuts of each value."""
    if not step.attributes.overflow.endswith("saturate"):
        return 0.0
    size = np.abs(source.astype(np.float64))
    return 1 - get_format(step.dst.fmt).max_finite / np.fmax(size, get_format(step.dst.fmt).max_finite)


@dataclass(frozen=True, slots=True)
class Resonance:
    """Common waves of one block of queries and the keys that it sees: their amplitudes and phases.

    The PASA paper calls it resonance when queries and keys share a wave along the head dimension, in phase (scores
    large and positive) or 180 degrees out of phase (large and negative); section 3.3.2, figure 6.  It defines no
    measure; this one is ours.  The mean score of all visible pairs is, by Parseval's theorem, a sum over
    frequencies; without a mask, of ``|Q(f)| |K(f)| cos(phase(f))`` of the mean query and the mean key.
    """

    cosine: float  #: mean over those pairs: 1 in phase, -1 out of phase, about 0 for independent directions
    frequency: int  #: periods along the head dimension of the wave that contributes most; 0 is a common offset
    phase_degrees: float  #: lag of K's wave behind Q's, from 0 (in phase) to 180 (out of phase)
    share: float  #: share of this frequency in the sum of the absolute values of all these contributions
    mean_score: float  #: contribution of this frequency to the mean of Q K^T over those pairs, unscaled


def measure(q: Array, k: Array, seen: NDArray[np.bool_] | None = None) -> Resonance:
    """Return the resonance of queries ``(rows, d)`` with keys ``(keys, d)``; all values must be finite.

    ``seen`` (rows, keys): whether a query sees a key; by default all.

    Examples
    --------
    >>> wave = np.cos(2 * np.pi * 3 * np.arange(64) / 64)[None, :]
    >>> opposite = measure(wave, -wave)
    >>> opposite.frequency, round(opposite.phase_degrees), round(opposite.cosine, 6)
    (3, 180, -1.0)
    """
    queries, keys = np.asarray(q, np.float64), np.asarray(k, np.float64)
    d = queries.shape[1]
    reach = np.full((len(queries), len(keys)), True) if seen is None else np.asarray(seen)
    pairs = max(1, int(reach.sum()))
    turns = 2 * np.pi / d * (np.outer(np.arange(d), np.arange(d // 2 + 1)) % d)
    # results of numpy's functions depend on the CPU
    basis = np.vectorize(math.cos)(turns), np.vectorize(math.sin)(turns)
    (a, b), (x, y) = ([multiplied(rows, wave) for wave in basis] for rows in (queries, _sums(keys, reach)))
    real, lag = (summed(part.T) / pairs / d for part in (a * x + b * y, a * y - b * x))
    # Frequencies strictly between 0 and d/2 represent two frequencies of the full transform.
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


def _sums(keys: Doubles, reach: NDArray[np.bool_]) -> Doubles:
    """Return, for each query, the sum of the keys that it sees, (rows, d): over ranges, from cumulative sums."""
    sums = np.cumsum(np.vstack([np.zeros_like(keys[:1]), keys]), axis=0)
    ends = np.diff(np.pad(reach, ((0, 0), (1, 1))).astype(np.int8))  # 1 where a range begins, -1 after its last key
    of_queries = np.zeros((len(reach), keys.shape[1]))
    for sign in (-1, 1):
        rows, at = np.nonzero(ends == -sign)
        np.add.at(of_queries, rows, sign * sums[at])
    return of_queries


def _directions(rows: Doubles) -> Doubles:
    """Return the rows' unit vectors; a row of zeros has no direction and counts as 0."""
    length = np.sqrt(summed(rows * rows))[:, None]
    unit: Doubles = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return unit
