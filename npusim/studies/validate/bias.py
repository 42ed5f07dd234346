"""Bias of an output: those parts of its error that cancel over rows if rounding is correct, compared with those of
correct kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.program.numerics.evaluate import BlockRows

    Doubles = NDArray[np.float64]

#: Allowed bias, in standard errors: over all outputs, and over a single head of many.
ALL, EACH = 5.0, 7.0
#: Smallest numbers of rows for which there is a standard error: of all outputs, and of a head.
LEAST, LEAST_OF_HEAD = 16, 32


class Measure(NamedTuple):
    """One error of the output against float64, and the largest that is allowed."""

    name: str
    value: float
    allowed: float


class ErrorComponent(NamedTuple):
    """Component of an error along given weights, for each head, relative to the weights; and its standard error over
    rows.
    """

    value: Doubles
    error: Doubles


@dataclass(frozen=True)
class BiasCheck:
    """The biases of correct kernels' rows, with which an output's are compared.

    ``exact``: float64 results by batch, head and first row; ``tilt``: their derivatives by the logarithm of the scale
    of scores, None where they have no scale; ``finite``: the judged outputs; ``drawn``: correct kernels' rows.
    """

    exact: Mapping[BlockRows, Doubles]
    tilt: Mapping[BlockRows, Doubles] | None
    finite: Mapping[BlockRows, NDArray[np.bool_]]
    drawn: Sequence[Mapping[BlockRows, NDArray[Any]]]

    def measures(self, rows: Mapping[BlockRows, NDArray[Any]]) -> Iterator[Measure]:
        """Yield the biases of an output: the slope and the mean error of all heads and of each head, and the slopes of
        rows.

        Each bias is compared with the mean of the correct kernels' biases, within some of their standard errors.
        """
        if len(self._head) < LEAST:
            return
        errors, drawn = self._errors(rows), [self._errors(kernel) for kernel in self.drawn]
        for name, weights in self._weights.items():
            own, others = self._moment(errors, weights), [self._moment(e, weights) for e in drawn]
            middle = np.mean([m.value for m in others], axis=0)
            allowed = np.max([m.error for m in others], axis=0) * self._allowed
            for place, value, most in zip(self._places, np.abs(own.value - middle), allowed, strict=True):
                yield Measure(f"{name} of {place}", float(value), float(most))
        (own_mean, _), known = self._slopes(errors), np.array([self._slopes(e) for e in drawn]).max(axis=0)
        yield Measure("the size of the rows' slopes", own_mean**0.5, float((known[0] + ALL * known[1]) ** 0.5))

    @cached_property
    def _head(self) -> NDArray[np.int64]:
        """The number of each row's head, counting only heads that have rows."""
        heads = sorted({at[:2] for at in self.exact})
        return np.concatenate([np.full(len(rows), heads.index(at[:2])) for at, rows in self.exact.items()])

    @cached_property
    def _groups(self) -> list[NDArray[np.bool_]]:
        """Groups of rows that are compared together: all rows, and if there are several heads, each head with enough
        rows.
        """
        each = [self._head == number for number in range(int(self._head.max()) + 1)]
        several = [rows for rows in each if rows.sum() >= LEAST_OF_HEAD] if len(each) > 1 else []
        return [np.ones(len(self._head), np.bool_), *several]

    @cached_property
    def _places(self) -> list[str]:
        heads = sorted({at[:2] for at in self.exact})
        named = [heads[int(self._head[rows][0])] for rows in self._groups[1:]]
        return ["all outputs", *(f"batch {batch} head {head}" for batch, head in named)]

    @cached_property
    def _allowed(self) -> Doubles:
        return np.array([ALL] + [EACH] * (len(self._groups) - 1))

    @cached_property
    def _weights(self) -> dict[str, Doubles]:
        """Weights (rows, columns) of errors by the name of their sum; 0 for outputs that are not judged."""
        judged = np.concatenate([self.finite[at] for at in self.exact])
        weights = {"the slope": np.concatenate(list(self.exact.values())), "the mean error": np.ones(judged.shape)}
        if self.tilt is not None:
            weights["the error of the scale"] = np.concatenate([self.tilt[at] for at in self.exact])
        weights = {n: np.where(judged & np.isfinite(x), x, 0.0) for n, x in weights.items()}
        return {n: x for n, x in weights.items() if all(x[rows].any() for rows in self._groups)}

    def _errors(self, rows: Mapping[BlockRows, NDArray[Any]]) -> Doubles:
        errors = np.concatenate([rows[at].astype(np.float64) - x for at, x in self.exact.items()])
        return np.where(np.isfinite(errors), errors, 0.0)

    def _moment(self, errors: Doubles, weights: Doubles) -> ErrorComponent:
        along, square = (errors * weights).sum(axis=1), (weights * weights).sum(axis=1)
        sums = [(along[rows].sum(), np.sqrt((along[rows] ** 2).sum()), square[rows].sum()) for rows in self._groups]
        value, error, norm = np.array(sums).T
        return ErrorComponent(value / norm, error / norm)

    def _slopes(self, errors: Doubles) -> tuple[float, float]:
        """Return the mean square of each row's slope, and its standard error: they are large if the sums of rows are
        wrong by a factor.
        """
        weights = self._weights.get("the slope", np.zeros_like(errors))
        square = (weights * weights).sum(axis=1)
        slopes = np.divide((errors * weights).sum(axis=1), square, out=np.zeros_like(square), where=square > 0) ** 2
        return float(slopes.mean()), float(slopes.std() / np.sqrt(len(slopes)))
