"""Alternatives that change bits: other possible arithmetics in place of assumed ones and, if an output is not finite,
other precisions.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TilingError
from npusim.formats import ARITHMETICS, get_arithmetic
from npusim.formats.float_format import format_of_dtype
from npusim.kernels.declare.registry import NAMED
from npusim.late_methods import dataclass
from npusim.library import SCHEDULES
from npusim.program.numerics.evaluate import compared_rows, named_choices, rows_alone
from npusim.program.numerics.reference import summarise_errors
from npusim.simulation.evaluation import bits_of, source_of, subject_of
from npusim.simulation.figures import figures
from npusim.simulation.run_result import FiniteChoice, Spread, arithmetic_evidence, row_sum_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from npusim.config.quantity import Choice
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.simulation.plan import Plan


# ---------------------------------------------------------------- assumed arithmetic


def assumed_variants(program: TileProgram, plan: Plan) -> dict[str, TileProgram]:
    """Return, by name, the program with each assumption on its arithmetic replaced by an alternative.

    Without assumptions there are no programs.
    """
    # Units whose arithmetic the schedule determines, and units whose products read other formats, are omitted.
    built = figures(_alternatives(program, plan), lambda named: plan.program(named[1]), (SpecError, TilingError))
    return {name: variant for (name, _), variant in built}


def arithmetic_uncertainty(bits: NumericResult) -> tuple[Spread, ...]:
    """Return how much `compared_rows` of ``bits`` change in each variant.

    An output that is not finite has no distance from another: None.
    """
    if not bits.variants:
        return ()
    before = Compared.of(bits).rows.astype(np.float64)
    if not np.isfinite(before).all():
        return ()
    return tuple(Spread(name, *_distance(before, rows.astype(np.float64))) for name, rows in bits.variants.items())


@dataclass(frozen=True)
class Compared:
    """The rows in which programs are compared with a run (`compared_rows`): the rows of ``block`` from ``at`` to its
    end, with the run's result, (rows, dv).
    """

    block: BlockRows
    at: BlockRows
    rows: NDArray[Any]
    batch_count: int

    @classmethod
    def of(cls, bits: NumericResult) -> Compared:
        """Return the compared rows of a run's bits."""
        at, count = compared_rows({at: len(rows) for at, rows in bits.rows.items()})
        block = max(key for key in bits.rows if key[:2] == at[:2])
        return cls(block, at, bits.rows[block][-count:], bits.shape[0])

    def __str__(self) -> str:
        batch, head, row = self.at
        of_batch = f" of batch {batch}" if self.batch_count > 1 else ""
        return f"rows {row}..{row + len(self.rows) - 1} of head {head}{of_batch}"

    def rmse(self, rows: NDArray[Any], plan: Plan) -> tuple[float | None, float]:
        """Return the relative RMSE of the last of these rows, and the standard error of its ratio to the run's.

        The RMSE is relative; it is None if values are not finite.
        """
        batch, head, row = self.block
        length = self.at[2] - row + len(rows)
        reference = plan.exact[batch, head, row, length][-len(rows) :]
        if not (np.isfinite(rows.astype(np.float64)).all() and (fmt := format_of_dtype(rows.dtype))):
            return None, 0.0
        mine, own = (((x.astype(np.float64) - reference) ** 2).sum(axis=1) for x in (rows, self.rows))
        return summarise_errors([rows], [reference], fmt.name).rmse, standard_error(mine, own)


def rows_under(program: TileProgram, plan: Plan, at: BlockRows, count: int) -> NDArray[Any]:
    """Return the compared rows of the result of another program of the plan."""
    (batch, head, row), subject = at, subject_of(plan, program)
    rows = rows_alone(program, source_of(plan, subject), [row], {head}, batches={batch}, most=count)[at]
    return rows[:, : subject.output.output_cols]


#: Fields of a precision that name a rounding, each with the value that is rounded.
ROUNDED = MappingProxyType({"rounding": "casts", "multiply_add": "multiply-adds"})


def assumed_roundings(plan: Plan) -> Iterator[tuple[str, Choice[Any]]]:
    """Yield the roundings that a plan's precision does not set and that the device's file assumes: field, choice."""
    for name, choice in plan.device.rounding_choices.items():
        if choice.basis == "assumed" and getattr(plan.precision, name, None) == "":
            yield name, choice


def _alternatives(program: TileProgram, plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield, for each choice that could be different, its name and the changed field of the precision."""
    device, (arithmetics, orders) = plan.device, named_choices(program)
    for name, choice in assumed_roundings(plan):
        for other in NAMED[name]:
            if other != choice.value:
                yield f"{ROUNDED[name]} rounded {other}", {name: other}
    assumed = [name for name, evidence in arithmetic_evidence(arithmetics, device).items() if evidence == "assumed"]
    for name in sorted({other for used in assumed for other in _other_arithmetics(used)}):
        yield name, {"arithmetic": name}
    for used, basis in row_sum_evidence(orders, device).items():
        others = (order for order in device.row_sums if order != used)
        for order in others if basis == "assumed" else ():
            yield f"row sums in {order}", {"sum_order": order}


def _other_arithmetics(name: str) -> Iterator[str]:
    """Yield the other possible arithmetics of a unit that have the operands, scales and accumulator of ``name``."""
    chosen, kind = get_arithmetic(name), attrgetter("evidence", "a_format", "b_format", "acc_format", "scale_format")
    for other, a in ARITHMETICS.items():
        is_of_unit = other.startswith(f"{name.partition('.')[0]}.")
        if other != name and is_of_unit and kind(a) == kind(chosen):
            yield other


def _distance(before: NDArray[Any], after: NDArray[Any]) -> tuple[float | None, float | None, float]:
    """Return the relative distance of values, the share of values that differ, and the relative standard error of the
    distance.

    Distance and share are None if some outputs are not finite.
    """
    if not np.isfinite(after).all():
        return None, None, 0.0
    change, norm = (((after - before) ** 2).sum(axis=1), (before**2).sum(axis=1))
    distance = float(np.sqrt(change.sum() / norm.sum())) if norm.any() else 0.0
    return distance, float((after != before).mean()), standard_error(change, norm)


def standard_error(squares: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the relative standard error of sqrt(sum(squares) / sum(others)), for pairs of sums by row; 0 if unknown.

    The estimate is of first order: half of the difference between the rows' shares of the two sums.
    """
    if len(squares) < 2 or not (squares.any() and others.any() and np.isfinite(others).all()):
        return 0.0
    difference = squares / squares.mean() - others / others.mean()
    return float(difference.std(ddof=1) / np.sqrt(len(squares)) / 2)


# ---------------------------------------------------------------- finite choices


def finite_choices(bits: NumericResult, plan: Plan) -> tuple[FiniteChoice, ...]:
    """Return a plan's first preset, and the first other schedule, that compute the rows of ``bits`` without NaN or Inf.

    Empty where ``bits`` is finite.  Presets are tried in the registry's order, other schedules with their
    default tiling; a choice that does not fit the problem or the device is skipped.
    """
    if bits.error.is_finite:
        return ()
    others = (_finite_preset(bits, other) for other in other_schedules(plan))
    # The tile chosen for the run's precision may not fit with another precision.
    asked = build_tiling(plan.schedule.tiling, plan.request.chosen_tiling(plan.schedule.tiling))
    of_schedule = _finite_preset(bits, plan) or _finite_preset(bits, replace(plan, tiling=asked))
    choices = (of_schedule, next(filter(None, others), None))
    return tuple(choice for choice in choices if choice is not None)


def other_schedules(plan: Plan) -> Iterator[Plan]:
    """Yield plans of the other schedules of a device's family that compute such a problem in the way of a
    real kernel.
    """
    schedule = plan.schedule
    if schedule.reference or plan.problem.attention is None:  # these schedules compute another function
        return
    for other in SCHEDULES.values():
        fits = other.family == plan.device.family and other.problem is Problem is schedule.problem
        is_study = other.study is not None and other.study(plan.problem, plan.device)
        if (
            other is not schedule
            and fits
            and not is_study
            and (other.reads_scales or "scales" not in plan.problem.needs)
        ):
            yield replace(plan, schedule=other, tiling=other.tiling(), exact={})


def _finite_preset(bits: NumericResult, plan: Plan) -> FiniteChoice | None:
    """Return the first preset with which the rows of ``bits`` have no NaN or Inf; None if there is no such preset."""
    rows = sorted({row + n for (_, _, row), block in bits.rows.items() for n in range(len(block))})
    heads = sorted({head for _, head, _ in bits.rows})
    lost = (at for at, block in bits.rows.items() if not np.isfinite(block.astype(np.float64)).all())
    _, head, row = next(lost, (0, None, None))
    if row is None:  # the output has numbers where NaN is required; no preset can change this
        return None

    def rmse(name: str) -> float | None:
        program = plan.schedule.build(plan.problem, plan.tiling, plan.device, plan.schedule.precision(name))
        # The block whose output is not finite is computed first, since it excludes most presets.
        if not bits_of(plan, program, rows=[row], heads=[head]).error.is_finite:
            return None
        return bits_of(plan, program, rows=rows, heads=heads).error.rmse

    errors = figures(plan.schedule.precisions, rmse)
    return next((FiniteChoice(plan.schedule.name, name, error) for name, error in errors if error is not None), None)
