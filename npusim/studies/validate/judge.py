"""Whether a kernel's output is right for its formats: within the error that correct kernels of that precision have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.errors import SpecError
from npusim.formats import get_arithmetic
from npusim.program.numerics.evaluate import named_choices
from npusim.simulation import evaluation
from npusim.simulation.figures import figures
from npusim.studies.validate.bias import BiasCheck, Measure
from npusim.studies.validate.diff import Change, HeldOutput, alternatives, comparison
from npusim.studies.validate.given_output import BLANK

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.simulation.request import Request

Rows = Mapping["BlockRows", "NDArray[Any]"]
#: Choices that a correct kernel of the same precision may make differently: order and grouping of sums, where a factor
#: rounds, the unit's arithmetic, order of keys, tiles and splits.  Formats are stated by the kernel, and are not among
#: these choices.
LEGAL = frozenset(
    (
        *("sum_order", "accumulate", "exponent", "multiply_add", "rounding", "arithmetic", "exp_variant"),
        *("sink", "is_reverse", "block_kv", "splits", "merge"),
    )
)
#: Exponentials that are as exact as float32.
EXPONENTIALS = frozenset(("exp.correct", "exp2.correct", "exp2.exp2p", "exp2.hopper_ex2"))
#: Number of drawn kernels, the share of its choices in which each differs, and the largest number of attempts to draw
#: one.
DRAWN, SHARE, ATTEMPTS = 24, 0.5, 4
#: An error is refused above this multiple of the quantile of the drawn kernels' errors.
FACTOR, QUANTILE = 2.0, 0.99
#: An error is also refused above this share of the error of zeros, if correct kernels have large errors too.
MOST = 0.5
#: Share by which the scale is changed for its derivative.
TILT = 2.0**-8
#: Kinds of errors that `_errors` returns.
MEASURES = "the error of all outputs", "the largest error of a row", "the largest error of an output"


@dataclass(frozen=True)
class Judgement:
    """Whether an output is right: ``matched`` of ``total`` outputs have the predicted bits.

    ``measures``: the errors of the output, in absolute numbers, with the limits that ``drawn`` legal kernels allow;
    ``lost``: number of values that are NaN or Inf where the values of such kernels are finite; ``unjudged``: number of
    values that are not finite in such a kernel; ``blank``: rows that are all NaN, in words; ``reading``: how tensors
    were read, if another layout is likelier.
    """

    matched: int
    total: int
    drawn: int = 0
    measures: tuple[Measure, ...] = ()
    lost: int = 0
    unjudged: int = 0
    blank: str = ""
    reading: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the output is accepted."""
        within = bool(self.measures) and all(m.value <= m.allowed for m in self.measures)
        return self.matched == self.total or (within and not self.lost)

    def __str__(self) -> str:
        """Return the decision on one line."""
        if self.matched == self.total:
            return f"right: all {self.total:,} outputs have the predicted bits"
        if self.blank:
            return f"wrong: {self.blank} are NaN in the output ({self.lost:,} of {self.total:,} outputs); {BLANK}"
        if self.lost:
            return (
                f"wrong: {self.lost:,} of {self.total:,} outputs are NaN or Inf where those of correct kernels "
                "are finite"
            )
        worst = max(self.measures, key=lambda m: m.value / m.allowed if m.allowed else float(m.value > 0) * np.inf)
        of = (
            f"{worst.name} is {worst.value:.3g}; allowed by {self.drawn} correct kernels of this precision: "
            f"{worst.allowed:.3g}"
        )
        left = (
            f"; {self.unjudged:,} of {self.total:,} outputs are not judged: correct kernels too give NaN or Inf there"
        )
        return f"{'right' if self.is_right else 'wrong'}: {of}{left if self.unjudged else ''}"


def judge(
    outputs: Sequence[str | Path | NDArray[Any]], request: Request, on_tried: Callable[[int, int], None] | None = None
) -> list[Judgement]:
    """Decide whether kernels' outputs are right for the formats and the inputs of a request.

    An output is right if its bits are equal, or if its errors against float64 are at most twice the 99th percentile of
    the errors of correct kernels of the same formats (the schedule with other orders of sums, roundings, tiles and
    splits, drawn with the request's seed) and at most half of the error of zeros.  Errors are the norm over all
    outputs, the largest norm of a row, and the largest error of an element.  The output's biases (`BiasCheck`) must
    also be those of such kernels.  Outputs where one of these kernels has NaN or Inf are not judged.  The form of
    outputs, the compared rows, and the errors raised are as for `npusim.studies.validate.diff.diff`; `SpecError` is
    also raised if no output remains.
    """
    judge_of = Judge(comparison(outputs[0], request), on_tried)
    return [judge_of.decide(held) for held in (judge_of.first, *map(judge_of.first.of, outputs[1:]))]


@dataclass
class Judge:
    """Decides about outputs of one request; the outputs of correct kernels and the float64 result are computed once."""

    first: HeldOutput
    on_tried: Callable[[int, int], None] | None = None

    @cached_property
    def predicted(self) -> Rows:
        """The predicted rows."""
        bits = evaluation.bits_of(
            self.first.plan, self.first.base.program, rows=self.first.request.rows, heads=self.first.request.heads
        )
        return bits.rows

    @cached_property
    def exact(self) -> Mapping[BlockRows, NDArray[np.float64]]:
        """The compared rows in float64."""
        return {at: self.first.plan.exact[*at, len(rows)] for at, rows in self.predicted.items()}

    @cached_property
    def kernels(self) -> list[Rows]:
        """The rows of correct kernels; the predicted rows are first."""
        sizes = {at: len(rows) for at, rows in self.predicted.items()}
        return [self.predicted, *_legal(self.first, sizes, self.on_tried)]

    @cached_property
    def tilt(self) -> Rows | None:
        """The derivatives of the exact rows by the scale of scores."""
        return _tilt(self.first, self.exact)

    def decide(self, held: HeldOutput) -> Judgement:
        """Return whether an output of the request is right."""
        predicted, exact = self.predicted, self.exact
        matched, total = held.equal(held.given.cut(predicted))
        if matched == total:
            return Judgement(matched, total, reading=held.plan.reading)
        cut = held.given.cut
        tilt = None if self.tilt is None else cut(self.tilt)
        kernels = [cut(kernel) for kernel in self.kernels]
        whose = f"correct kernels of {held.base.schedule} with precision {held.base.precision}"
        judgement = within_errors(held.given.beside(kernels[0]), kernels, cut(exact), tilt, whose)
        return replace(judgement, matched=matched, blank=held.given.blank(kernels[0]), reading=held.plan.reading)


def _tilt(held: HeldOutput, exact: Mapping[BlockRows, NDArray[np.float64]]) -> Rows | None:
    """Return the derivatives of float64 rows by the logarithm of the scale of scores; None without a scale."""
    problem = cast("Problem", held.plan.problem)
    if "attention" not in held.plan.features:
        return None
    tilted = [problem.model_copy(update={"scale": problem.scale * (1 + x)}) for x in (TILT, -TILT)]
    both = [{at: evaluation.exact_rows(held.plan, p, *at, len(rows)) for at, rows in exact.items()} for p in tilted]
    return {at: (both[0][at] - both[1][at]) / (2 * TILT) for at in exact}


def within_errors(
    given: Rows, kernels: Sequence[Rows], exact: Mapping[BlockRows, NDArray[np.float64]], tilt: Rows | None, whose: str
) -> Judgement:
    """Return whether rows are right by the rows of ``kernels``, all correct, and by float64; see `judge`.

    ``tilt``: the derivatives of ``exact`` by the logarithm of the scale of scores, None without one; ``whose``: the
    kernels in words.  Raises `SpecError` if these kernels have no finite value.
    """
    finite = {at: np.all([_is_finite(kernel[at]) for kernel in kernels], axis=0) for at in exact}
    total, judged = (sum(int(f(cells)) for cells in finite.values()) for f in (np.size, np.sum))
    if not judged:
        raise SpecError(f"--judge: there is no reference for the output: {whose} give NaN or Inf on these inputs")
    drawn = np.array([_errors(kernel, exact, finite) for kernel in kernels])
    of_zeros = _errors({at: np.zeros_like(rows) for at, rows in exact.items()}, exact, finite)
    quantile = np.quantile(drawn, QUANTILE, axis=0, method="higher")
    allowed = np.minimum(FACTOR * quantile, MOST * np.array(of_zeros)).tolist()
    bias = BiasCheck(exact, tilt, finite, kernels).measures(given)
    return Judgement(
        0,
        total,
        len(kernels),
        (*(Measure(*m) for m in zip(MEASURES, _errors(given, exact, finite), allowed, strict=True)), *bias),
        sum(int((finite[at] & ~_is_finite(given[at])).sum()) for at in exact),
        total - judged,
    )


def _is_finite(values: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isfinite(values.astype(np.float64))


def _errors(rows: Rows, exact: Rows, finite: Rows) -> tuple[float, float, float]:
    """Return the norm of all errors, the largest norm of a row and the largest error, where all are finite."""
    errors = [np.where(finite[at], rows[at].astype(np.float64) - exact[at], 0.0) for at in exact]
    errors = [np.nan_to_num(e, nan=0.0, posinf=0.0, neginf=0.0) for e in errors]
    by_row = np.concatenate([np.sqrt((e * e).sum(axis=1)) for e in errors])
    return float(np.sqrt((by_row**2).sum())), float(by_row.max()), max(float(np.abs(e).max()) for e in errors)


def _legal(
    held: HeldOutput, sizes: Mapping[BlockRows, int], on_tried: Callable[[int, int], None] | None
) -> Iterator[Rows]:
    """Yield the results of other correct kernels of the same formats, on blocks of rows of several sizes.

    The choices of such kernels are drawn together, from the combinations that can be built.
    """
    by_field: dict[str, list[Change]] = {}
    for change in alternatives(held.base):
        if change.field in LEGAL and _is_as_exact(change, held):
            by_field.setdefault(change.field, []).append(change)
    rng = np.random.default_rng([held.request.seed or 0, len(by_field)])
    built: set[tuple[Change, ...]] = {()}

    def drawn() -> Iterator[tuple[Change, ...]]:
        for _ in range(ATTEMPTS * DRAWN):
            chosen = tuple(c[rng.integers(len(c))] for c in by_field.values() if rng.random() < SHARE)
            if len(built) <= DRAWN and chosen not in built:
                yield chosen

    def rows(changes: tuple[Change, ...]) -> Rows:
        kernel = held.rows(held.built(changes).program)
        built.add(changes)
        return kernel

    for _, kernel in figures(drawn(), rows):
        if on_tried:
            on_tried(len(built) - 1, DRAWN)
        if {at: len(block) for at, block in kernel.items()} == sizes:
            yield kernel


def _is_as_exact(change: Change, held: HeldOutput) -> bool:
    """Return whether a change is within the claimed precision: no narrower sums, exact exponentials."""
    if change.field == "arithmetic":
        formats = {get_arithmetic(name).acc_format for name in named_choices(held.base.program)[0]}
        return not held.is_foreign(change) and get_arithmetic(str(change.value)).acc_format in formats
    return change.field != "exp_variant" or change.value in EXPONENTIALS
