"""Diagnosis of an execution: ranges, resonance, underflow and saturation, as plain figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim.config.problem import SinkData
from npusim.ir.op import Opcode
from npusim.numerics.reference import multiplied, softmax_weights, summed
from npusim.numerics.resonance import Resonance, measure
from npusim.numerics.result import Magnitudes
from npusim.numerics.underflow import Underflow

if TYPE_CHECKING:
    from npusim.config.problem import Problem
    from npusim.numerics.executor import Moment

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the values of the computed rows went through; None where a figure has no meaning.

    Attributes
    ----------
    nan_row_percent
        Output rows with a NaN, as the PASA paper counts them.
    key_min, key_max, shifted_key_min, shifted_key_max
        Range of K, and of K' as stored.
    raw_score_min, raw_score_max
        Range of Q K^T in float64, unscaled, over the pairs that the mask leaves.
    score_min, score_max
        Range of what the matrix unit adds up (Q K^T, or PASA's S'), before it is stored; whole
        tiles, masked pairs included; infinite values left out.
    resonance_cosine, resonance_frequency, resonance_phase_degrees, resonance_share_percent
        See `npusim.numerics.resonance`; of the block whose wave moves the scores most.
    sink_mass_percent
        Mean softmax mass of the sinks: the first keys, as many as the recipe says, else one.
    underflow_percent
        Pairs whose probability is zero when the second product reads it; masked pairs not counted.
    zeroed_mass_percent
        Mean softmax mass of those pairs: what is really lost.
    product_mass_percent
        P-Cast's "effective information loss": fraction zeroed times mass, both without the sinks.
        It overstates the loss, since the pairs zeroed are the smallest (papers.md section 1.2).
    saturated_count
        Probabilities that the cast cut to the largest finite value.
    """

    nan_row_percent: float
    key_min: float
    key_max: float
    raw_score_min: float
    raw_score_max: float
    resonance_cosine: float
    resonance_frequency: float
    resonance_phase_degrees: float
    resonance_share_percent: float
    sink_mass_percent: float
    shifted_key_min: float | None = None
    shifted_key_max: float | None = None
    score_min: float | None = None
    score_max: float | None = None
    underflow_percent: float | None = None
    zeroed_mass_percent: float | None = None
    product_mass_percent: float | None = None
    saturated_count: float | None = None

    def figures(self) -> dict[str, float]:
        """Return the figures that have a meaning, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Range:
    """Smallest and largest finite value seen."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf

    def look(self, values: Array) -> None:
        """Take in an array; Inf and NaN are passed over."""
        wide = np.asarray(values, np.float64)
        finite = wide[np.isfinite(wide)]
        if finite.size:
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """The range, or twice None if nothing was seen."""
        return (self.low, self.high) if self.low <= self.high else (None, None)


class Scores(Range):
    """The scores' range and magnitudes, before they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.fmt, self._zeros, self._nonfinite = "", 0, 0
        self._counts: Counter[int] = Counter()

    def look_at(self, values: Array, fmt: str) -> None:
        """Take in scores on their way to format ``fmt``."""
        self.look(values)
        self.fmt = fmt
        size = np.abs(np.asarray(values, np.float64)).ravel()
        is_finite, is_zero = np.isfinite(size), size == 0
        exponents, counts = np.unique(np.frexp(size[is_finite & ~is_zero])[1], return_counts=True)
        # frexp's fraction lies in [1/2, 1)
        self._counts.update(dict(zip((exponents - 1).tolist(), counts.tolist(), strict=True)))
        self._zeros += int(is_zero.sum())
        self._nonfinite += int((~is_finite).sum())

    def magnitudes(self) -> Magnitudes | None:
        """Return what was seen; None for nothing."""
        counts = dict(sorted(self._counts.items()))
        return Magnitudes(self.fmt, counts, self._zeros, self._nonfinite) if self.fmt else None


class Probe:
    """Collects a diagnosis: an observer of the execution that also looks at the inputs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.underflow = Underflow(self.sinks)
        self.keys, self.shifted_keys, self.raw_scores = (Range() for _ in range(3))
        self.scores = Scores()
        self.resonance: Resonance | None = None
        self._sink_mass = 0.0
        self._rows = 0

    @property
    def sinks(self) -> int:
        """Number of sink keys."""
        data = self.problem.data
        return data.sinks if isinstance(data, SinkData) else 1

    def __call__(self, moment: Moment) -> None:
        """Look at one executed step."""
        match moment.role, moment.step.opcode:
            case "score", Opcode.MATMUL:  # scores stay in the accumulator
                self.scores.look_at(moment.result, moment.step.dst.fmt)
            case "score", (Opcode.COPY | Opcode.CAST):
                self.scores.look_at(moment.sources[0], moment.step.dst.fmt)
            case "result", _ if moment.step.name == "k_shifted":
                self.shifted_keys.look(moment.result)
            case _:
                self.underflow(moment)

    def look_at_inputs(self, q: Array, k: Array, row: int) -> None:
        """Look at the queries from ``row`` of one head, (rows, d), and its keys, (keys, d)."""
        queries = np.asarray(q, np.float64) * self.problem.q_scale
        keys = np.asarray(k, np.float64) * self.problem.k_scale
        raw = np.ascontiguousarray(multiplied(keys, queries.T).T)
        seen = np.full(len(q), len(k))
        if self.problem.causal:
            last = np.arange(row, row + len(q)) + self.problem.causal_offset
            seen = np.clip(last + 1, 0, len(k))
            raw[np.arange(len(k))[None, :] >= seen[:, None]] = -np.inf
        self.raw_scores.look(raw)
        self.keys.look(keys)
        found = measure(queries, keys, seen)
        if self.resonance is None or abs(found.mean_score) > abs(self.resonance.mean_score):
            self.resonance = found
        weights = softmax_weights(raw * self.problem.scale)
        self._sink_mass += float(summed(summed(weights[:, : self.sinks]) / summed(weights)))
        self._rows += len(q)

    def diagnosis(self, nan_row_fraction: float) -> Diagnosis:
        """Return what was found; ``nan_row_fraction`` is that of the outputs."""
        assert self.resonance is not None, "no inputs were looked at"
        sink_mass = self._sink_mass / self._rows
        zeroed, mass, product, saturated = self._underflow(1 - sink_mass)
        (key_min, key_max), (raw_min, raw_max) = self.keys.ends, self.raw_scores.ends
        assert key_min is not None
        assert key_max is not None
        assert raw_min is not None
        assert raw_max is not None
        shifted_min, shifted_max = self.shifted_keys.ends
        score_min, score_max = self.scores.ends
        wave = self.resonance
        return Diagnosis(
            nan_row_percent=100 * nan_row_fraction,
            key_min=key_min,
            key_max=key_max,
            raw_score_min=raw_min,
            raw_score_max=raw_max,
            resonance_cosine=wave.cosine,
            resonance_frequency=wave.frequency,
            resonance_phase_degrees=wave.phase_degrees,
            resonance_share_percent=100 * wave.share,
            sink_mass_percent=100 * sink_mass,
            shifted_key_min=shifted_min,
            shifted_key_max=shifted_max,
            score_min=score_min,
            score_max=score_max,
            underflow_percent=zeroed,
            zeroed_mass_percent=mass,
            product_mass_percent=product,
            saturated_count=saturated,
        )

    def _underflow(self, other_mass: float) -> tuple[float | None, float | None, float | None, float | None]:
        """Return pairs zeroed, mass zeroed, the product of the paper (percent), and saturations."""
        u = self.underflow
        if not u.visible or not u.rows:
            return None, None, None, None
        product = u.zeroed_others / max(1, u.visible_others) * other_mass
        return (100 * u.zeroed / u.visible, 100 * u.lost_mass / u.rows, 100 * product, float(u.saturated))
