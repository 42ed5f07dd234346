"""Problems next to the requested one, one of which a kernel may compute instead: distinguished in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.formats.cast import widen
from npusim.numerics.reference import attention, attention_scores, multiplied, softmax_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.paths import Place

#: Rows that are compared, and the share of the distance that a neighbour's is at most: rounding, which has nothing to
#: do with the difference of two problems, makes none as much nearer.
ROWS, NEARER = 64, 0.75
#: What a call may have beside scale and mask, and a kernel leave out.
LEFT_OUT = ("window", "sinks", "prefix", "chunk", "documents", "softcap", "alibi", "bias", "sink_logits")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another problem, and the relative RMSE of a kernel's rows against it and against the requested one."""

    change: str
    error: float
    asked: float

    def __str__(self) -> str:
        return f"{self.change}: relative RMSE {self.error:.2g} against float64, {self.asked:.2g} as asked"


def nearest_problem(out: NDArray[Any], problem: Problem, source: HeadSource, place: Place) -> Neighbour | None:
    """Return the neighbour that is nearest to a kernel's rows (rows, dv) from a place on; None where none is nearer."""
    p, head, given = problem.sequence(place.batch), place.head, _wide(out)[:ROWS]
    q = _wide(source("q", place.batch, head)[place.row : place.row + len(given)])

    def error(changed: Problem, kv_head: int, softcaps: int = 1) -> float:
        k, v = (_wide(source(n, place.batch, kv_head)) for n in "kv")
        with np.errstate(invalid="ignore"):
            exact = attention(q, k, v, changed, place.row, head)
            if softcaps > 1 and (cap := changed.softcap):
                scores = attention_scores(q, k, changed, place.row, head)
                again = formats.tanh(scores / cap, "float64") * cap
                weights = softmax_weights(np.where(scores == -np.inf, scores, again))
                exact = multiplied(weights, v) / weights.sum(axis=1, keepdims=True)
        seen = np.isfinite(exact).all(axis=1)  # a query that sees no key has no values
        norm = float(np.linalg.norm(exact[seen]))
        return float(np.linalg.norm(given[seen] - exact[seen])) / norm if norm else np.inf

    asked = error(p, head // p.group_size)
    found = [Neighbour(words, error(*changed), asked) for words, changed in _neighbours(p, head)]
    nearest = min(found, key=lambda n: n.error, default=None)
    return nearest if nearest and nearest.error < NEARER * asked < np.inf else None


def _wide(x: NDArray[Any]) -> NDArray[np.float64]:
    return widen(x).astype(np.float64)


def _neighbours(p: Problem, head: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield a neighbour's name, the problem, the KV head of ``head``, and the number of applications of a soft-cap."""
    kv_head, offset = head // p.group_size, p.causal_offset
    changes: list[tuple[str, Any]] = [("causal", not p.causal)]
    if isinstance(p.window, tuple):
        before, after = p.window  # a side of -1 has no end
        sides = [(n, after) for n in (before - 1, before + 1) if before >= 0 <= n]
        sides += [(before, n) for n in (after - 1, after + 1) if after >= 0 <= n]
        changes += [("window", one) for one in sides]
    elif p.window:
        changes += [("window", n) for n in (p.window - 1, p.window + 1) if n]
    # Behind windows: with one side alone, another offset is another window.
    offsets = dict.fromkeys((0, p.seq_kv - p.seq_q, offset - 1, offset + 1))
    changes += [("causal_offset", n) for n in offsets if n != offset]
    defaults = {name: type(p).model_fields[name].default for name in LEFT_OUT}
    changes += [(name, default) for name, default in defaults.items() if getattr(p, name) != default]
    for name, value in changes:
        yield f"{name}={value}", (p.model_copy(update={name: value}), kv_head)
    for words, scale in (("scale left out", 1.0), ("scale twice", p.scale**2)):
        yield words, (p.model_copy(update={"scale": scale}), kv_head)
    if p.softcap is not None:
        yield "softcap twice", (p, kv_head, 2)
    if 1 < p.kv_heads < p.heads:
        yield "heads of K and V interleaved (head % kv_heads)", (p, head % p.kv_heads)
