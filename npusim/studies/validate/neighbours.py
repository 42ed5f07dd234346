"""Problems similar to the requested one, which a kernel may compute by mistake; float64 results distinguish them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from npusim import formats
from npusim.formats.cast import widen
from npusim.program.numerics.reference import attention, attention_scores, multiplied, softmax_weights, summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.program.numerics.executor import HeadSource
    from npusim.program.numerics.paths import Place

    Rows = NDArray[Any]

#: Number of compared rows, which is lower if they have many keys, and the largest share of the distance that a
#: neighbour may have. Rounding does not depend on the difference between two problems, so it does not reduce a distance
#: to this share.
ROWS, SCORES, NEARER = 64, 1 << 19, 0.75
#: A neighbour counts if its error is at most this multiple of the schedule's error on the neighbour's problem.
ROUNDING = 4.0
#: Features other than scale and mask that a kernel may omit: visible keys, and functions of scores.
SEEN = ("window", "sinks", "prefix", "chunk", "documents")
SCORED = ("softcap", "alibi", "bias", "sink_logits")
#: A kernel's soft-cap is first searched for among powers of two times the largest score, then between two of these.
CAPS, REFINED = range(-6, 7), 24


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another problem, and the relative RMSE of a kernel's rows against it and against the requested one."""

    change: str
    error: float
    asked: float

    def __str__(self) -> str:
        return f"{self.change}: relative RMSE {self.error:.2g} against float64 (requested problem: {self.asked:.2g})"


class _Candidate(NamedTuple):
    """Another problem for a head: its name, the KV head, and the number of times that scores are capped."""

    change: str
    problem: Problem
    kv_head: int
    softcaps: int = 1


def nearest_problem(
    out: Rows, predicted: Rows, problem: Problem, source: HeadSource, place: Place, predict: Callable[[Problem], Rows]
) -> Neighbour | None:
    """Return the neighbour that a kernel computes, judged by its rows (rows, dv) from a row on; None if there is no
    such neighbour.

    ``predicted``: the same rows of the schedule; ``predict`` returns the schedule's rows of another problem, from
    ``place`` on.  The nearest neighbour is returned if rounding can cause its distance.
    """
    if not _wide(out).any() and _wide(predicted).any():
        return Neighbour("zeros", 0.0, 1.0)
    kernel = _Rows(_wide(out), problem.sequence(place.batch), source, place)
    asked = kernel.error(_Candidate("", kernel.problem, kernel.kv_head))
    candidates = [(kernel.error(one), one) for one in kernel.neighbours()]
    if capped := kernel.capped(min([NEARER * asked, *(error for error, _ in candidates)])):
        candidates.append(capped)
    error, nearest = min(candidates, key=lambda pair: pair[0])
    if not error < NEARER * asked < np.inf:
        return None
    changed = nearest.problem
    own_error = kernel.of(_wide(predict(changed))).error(_Candidate("", changed, kernel.kv_head))
    if not np.isfinite(own_error):  # the schedule does not compute this problem
        own_error = kernel.of(_wide(predicted)).error(_Candidate("", kernel.problem, kernel.kv_head))
    finfo: Any = ml_dtypes.finfo
    step = float(finfo(out.dtype).eps)
    return Neighbour(nearest.change, error, asked) if error <= ROUNDING * np.fmax(own_error, step) else None


def _wide(x: Rows) -> NDArray[np.float64]:
    return widen(x).astype(np.float64)


class _Rows:
    """Rows (rows, dv) of a kernel or of the schedule from a row on, and the inputs of the problem."""

    def __init__(self, rows: NDArray[np.float64], problem: Problem, source: HeadSource, place: Place) -> None:
        self.problem, self.source, self.place = problem, source, place
        self.rows = rows[: max(1, min(ROWS, SCORES // problem.seq_kv))]
        self.kv_head = place.head // problem.group_size
        self.q = _wide(source("q", place.batch, place.head)[place.row : place.row + len(self.rows)])

    def of(self, rows: NDArray[np.float64]) -> _Rows:
        """Return other rows on the same inputs."""
        return _Rows(rows, self.problem, self.source, self.place)

    def error(self, one: _Candidate) -> float:
        """Return the relative RMSE against a problem in float64; Inf if there is no such problem."""
        k, v = self._keys(one.kv_head)
        with np.errstate(invalid="ignore"):
            if one.softcaps > 1:
                scores = attention_scores(self.q, k, one.problem, self.place.row, self.place.head)
                return self._distance(_weighted(_capped(scores, one.problem.softcap or np.inf), v))
            return self._distance(attention(self.q, k, v, one.problem, self.place.row, self.place.head))

    def capped(self, error: float) -> tuple[float, _Candidate] | None:
        """Return a soft-cap with an error below the given one, and its error; None if there is none.

        The distance from the output with a cap grows on both sides of the kernel's cap: the best of `CAPS` is refined
        by sections, and the result is the shortest number that is as near.
        """
        plain = self.problem.model_copy(update={"softcap": None})
        k, v = self._keys(self.kv_head)
        with np.errstate(invalid="ignore"):
            scores = attention_scores(self.q, k, plain, self.place.row, self.place.head)

        def left(cap: float) -> float:
            return self._distance(_weighted(_capped(scores, cap), v))

        largest = float(np.abs(scores, where=np.isfinite(scores), out=np.zeros_like(scores)).max(initial=0.0))
        if not largest or self.problem.alibi or self.problem.bias or self.problem.sink_logits:
            return None  # features that apply after a soft-cap, or together with it
        caps = [largest * 2.0**n for n in CAPS]
        best = min(range(1, len(caps) - 1), key=lambda n: left(caps[n]))
        if left(caps[best]) >= error:
            return None
        low, high = caps[best - 1], caps[best + 1]
        for _ in range(REFINED):
            third = (high / low) ** (1 / 3)
            low, high = (low, high / third) if left(low * third) < left(high / third) else (low * third, high)
        least = left(cap := (low * high) ** 0.5)
        texts = (f"{cap:.{digits}g}" for digits in (1, 2, 3))
        cap = next((x for x in map(float, texts) if left(x) <= (1 + NEARER) * least), cap)
        return left(cap), _Candidate(f"softcap={cap:g}", plain.model_copy(update={"softcap": cap}), self.kv_head)

    def _keys(self, kv_head: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        k, v = (_wide(self.source(n, self.place.batch, kv_head)) for n in "kv")
        return k, v

    def _distance(self, exact: NDArray[np.float64]) -> float:
        seen = np.isfinite(exact).all(axis=1)  # a query that sees no key has no values
        norm = float(np.linalg.norm(exact[seen]))
        return float(np.linalg.norm(self.rows[seen] - exact[seen])) / norm if norm else np.inf

    def neighbours(self) -> Iterator[_Candidate]:
        """Yield kernels with another mask, a step omitted or applied twice, other heads of K and V, or no scores."""
        p, kv_head = self.problem, self.kv_head
        usual = {name: type(p).model_fields[name].default for name in (*SEEN, *SCORED)}
        left_out = {name: value for name, value in usual.items() if getattr(p, name) != value}
        for name, value in (*_masks(p), *left_out.items()):
            yield _Candidate(f"{name}={value}", p.model_copy(update={name: value}), kv_head)
        for words, scale in (("scale left out", 1.0), ("scale twice", p.scale**2)):
            yield _Candidate(words, p.model_copy(update={"scale": scale}), kv_head)
        if p.softcap is not None:
            yield _Candidate("softcap twice", p, kv_head, 2)
        if 1 < p.kv_heads < p.heads:
            words = "heads of K and V interleaved (head % kv_heads)"
            yield _Candidate(words, p, self.place.head % p.kv_heads)
        uniform = {"scale": 0.0} | {name: usual[name] for name in SCORED}
        yield _Candidate("uniform weights (the mean of V)", p.model_copy(update=uniform), kv_head)
        everything = {name: usual[name] for name in SEEN} | {"causal": False}
        if p.causal or not p.seen.is_plain:
            words = "uniform weights of all keys (the mean of V)"
            yield _Candidate(words, p.model_copy(update=uniform | everything), kv_head)


def _capped(scores: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    """Return ``cap tanh(s / cap)`` of scores; scores of -Inf are unchanged."""
    return np.where(scores == -np.inf, scores, formats.tanh(scores / cap, "float64") * cap)


def _weighted(scores: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = softmax_weights(scores)
    return multiplied(weights, v) / summed(weights)[:, None]


def _masks(p: Problem) -> Iterator[tuple[str, object]]:
    """Yield fields of the mask with other values: causal or not, windows and offsets one key off."""
    yield "causal", not p.causal
    if isinstance(p.window, tuple):
        before, after = p.window  # a side with -1 has no end
        yield from (("window", (n, after)) for n in (before - 1, before + 1) if before >= 0 <= n)
        yield from (("window", (before, n)) for n in (after - 1, after + 1) if after >= 0 <= n)
    elif p.window:
        yield from (("window", n) for n in (p.window - 1, p.window + 1) if n)
    # This comes after windows: if a window has only one side, another offset is another window.
    offset = p.causal_offset
    offsets = dict.fromkeys((0, p.seq_kv - p.seq_q, offset - 1, offset + 1))
    yield from (("causal_offset", n) for n in offsets if n != offset)
