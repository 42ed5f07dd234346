"""Alternatives that change bits: other assumed arithmetic and, where an output is not finite, other precisions."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.problem import Problem
from npusim.errors import NpusimError, SpecError
from npusim.formats import ARITHMETICS, get_arithmetic
from npusim.formats.float_format import format_of_dtype
from npusim.numerics.evaluate import compared_block, execute_rows, named_choices
from npusim.numerics.reference import summarise_errors
from npusim.schedules import SCHEDULES
from npusim.simulation.result import FiniteChoice, Spread, row_sum_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.numerics.evaluate import BlockRows
    from npusim.numerics.result import NumericResult
    from npusim.simulation.plan import Plan


# ---------------------------------------------------------------- assumed arithmetic


def assumed_variants(program: TileProgram, plan: Plan) -> dict[str, TileProgram]:
    """Return by name the program with whatever is assumed of its arithmetic taken otherwise.

    Nothing is assumed: no programs.
    """
    variants = {}
    for name, changes in _alternatives(program, plan.device):
        try:
            variants[name] = plan.program(changes)
        except SpecError:  # the schedule leaves no choice of it
            continue
    return variants


def arithmetic_uncertainty(bits: NumericResult) -> tuple[Spread, ...]:
    """Return how much the rows of `compared_block` change under each of the variants of ``bits``.

    An output that is not finite is at no distance from another: none.
    """
    if not bits.variants:
        return ()
    before = bits.rows[compared_block(bits.rows)].astype(np.float64)
    if not np.isfinite(before).all():
        return ()
    return tuple(Spread(name, *_distance(before, rows.astype(np.float64))) for name, rows in bits.variants.items())


def compared_rows(bits: NumericResult) -> str:
    """Return in words which rows `compared_block` are."""
    batch, head, row = at = compared_block(bits.rows)
    of_batch = f" of batch {batch}" if bits.shape[0] > 1 else ""
    return f"rows {row}..{row + len(bits.rows[at]) - 1} of head {head}{of_batch}"


def block_of(program: TileProgram, plan: Plan, at: BlockRows) -> NDArray[Any]:
    """Return what another program of a plan computes for some rows, (rows, dv); they are a block of it too."""
    (batch, head, row), problem = at, cast("Problem", plan.problem)
    _, written = execute_rows(program, plan.source(problem), [row], {head}, problem.group_size, batches={batch})
    return written[at]


def block_rmse(block: NDArray[Any], plan: Plan, at: BlockRows) -> float | None:
    """Return the relative RMSE of some rows; None where they are not finite."""
    reference = plan.exact[*at, len(block)]
    if not np.isfinite(block.astype(np.float64)).all():
        return None
    fmt = format_of_dtype(block.dtype)
    return summarise_errors([block], [reference], fmt.name).rmse if fmt else None


def alternative_arithmetics(program: TileProgram) -> list[str]:
    """Return the arithmetics that `assumed_variants` computes with, beside the program's own."""
    return sorted({other for used in named_choices(program)[0] for other in _other_arithmetics(used)})


def _alternatives(program: TileProgram, device: DeviceSpec) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a name and the changed field of the precision for whatever could be otherwise."""
    for name in alternative_arithmetics(program):
        yield name, {"arithmetic": name}
    for used, basis in row_sum_evidence(named_choices(program)[1], device).items():
        others = (order for order in device.row_sums if order != used)
        for order in others if basis == "assumed" else ():
            yield f"row sums in {order}", {"sum_order": order}


def _other_arithmetics(name: str) -> Iterator[str]:
    """Yield the other assumed arithmetics of a unit with the operands, scales and accumulator of ``name``."""
    chosen, kind = get_arithmetic(name), attrgetter("evidence", "a_format", "b_format", "acc_format", "scale_format")
    for other, a in ARITHMETICS.items() if chosen.evidence == "assumed" else ():
        is_of_unit = other.startswith(f"{name.partition('.')[0]}.")
        if other != name and is_of_unit and kind(a) == kind(chosen):
            yield other


def _distance(before: NDArray[Any], after: NDArray[Any]) -> tuple[float | None, float | None]:
    """Return the relative distance, and the share of differing values; None if not all are finite."""
    if not np.isfinite(after).all():
        return None, None
    norm = float(np.sqrt((before**2).sum()))
    distance = float(np.sqrt(((after - before) ** 2).sum()))
    return distance / norm if norm else 0.0, float((after != before).mean())


# ---------------------------------------------------------------- finite choices


def finite_choices(bits: NumericResult, plan: Plan) -> tuple[FiniteChoice, ...]:
    """Return a plan's first preset, and the first other schedule, that compute the rows of ``bits`` without NaN or Inf.

    Nothing where ``bits`` is finite itself.  Presets are tried in the registry's order, other schedules with their
    default tiling; what does not fit the problem or the device is passed over.
    """
    if bits.error.is_finite:
        return ()
    others = (_finite_preset(bits, other) for other in _other_schedules(plan))
    choices = (_finite_preset(bits, plan), next(filter(None, others), None))
    return tuple(choice for choice in choices if choice is not None)


def _other_schedules(plan: Plan) -> Iterator[Plan]:
    """Yield plans of the other schedules for a device's family that compute such a problem."""
    problem: Any = plan.problem
    for other in () if plan.schedule.reference else SCHEDULES.values():  # a reference: others compute something else
        fits = other.family == plan.device.family and other.problem is Problem
        if other is not plan.schedule and fits and (other.reads_scales or not problem.is_scaled):
            yield replace(plan, schedule=other, tiling=other.tiling(), exact={})


def _finite_preset(bits: NumericResult, plan: Plan) -> FiniteChoice | None:
    """Return the first preset that gives the rows of ``bits`` without NaN or Inf; None where none does."""
    rows = sorted({row + n for (_, _, row), block in bits.rows.items() for n in range(len(block))})
    heads = sorted({head for _, head, _ in bits.rows})
    lost = (at for at, block in bits.rows.items() if not np.isfinite(block.astype(np.float64)).all())
    _, head, row = next(lost)
    for name in plan.schedule.precisions:
        try:
            program = plan.schedule.build(plan.problem, plan.tiling, plan.device, plan.schedule.precision(name))
            # One block that was lost refuses first.
            if not plan.bits(program, rows=[row], heads=[head]).error.is_finite:
                continue
            error = plan.bits(program, rows=rows, heads=heads).error
        except NpusimError:
            continue
        if error.rmse is not None:
            return FiniteChoice(plan.schedule.name, name, error.rmse)
    return None
