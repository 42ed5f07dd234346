"""Where an output is not finite: which preset, and which other schedule, is finite on the same sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.algorithms.tiling_mask import seen
from npusim.config.problem import Problem
from npusim.errors import NpusimError
from npusim.numerics.evaluate import evaluate
from npusim.numerics.reference import attention, seen_attention
from npusim.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.tiling import Tiling
    from npusim.numerics.evaluate import Reference
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.result import NumericResult
    from npusim.schedules import Schedule


@dataclass(frozen=True, slots=True)
class FiniteChoice:
    """A schedule and preset whose output is finite, with its relative RMSE against float64."""

    schedule: str
    precision: str
    rmse: float


def reference_of(schedule: Schedule, tiling: Tiling) -> Reference:
    """Return what errors of a schedule's bits are against, ``reference(q, k, v, problem, row)``, in float64."""
    own, sees = schedule.reference, schedule.sees
    if own is not None:
        return lambda q, k, v, problem, row: own(q, k, v, problem, row, tiling)
    if sees is None:
        return attention

    def seen_keys(q: Any, k: Any, v: Any, problem: Problem, row: int) -> Any:
        visible = seen(sees(problem, tiling), problem.seq_q, problem.seq_kv)
        return seen_attention(q, k, v, problem, row, visible[row : row + len(q)])

    return seen_keys


def finite_choices(
    bits: NumericResult, schedule: Schedule, tiling: Tiling, problem: Problem, inputs: HeadSource, device: DeviceSpec
) -> tuple[FiniteChoice, ...]:
    """Return the first preset of ``schedule``, and the first other schedule, that compute the rows of
    ``bits`` without NaN or Inf; nothing where ``bits`` is finite itself.

    Presets are tried in the registry's order, other schedules with their default tiling; what does
    not fit the problem or the device is passed over.
    """
    if bits.error.is_finite:
        return ()
    found: list[FiniteChoice] = []
    others = () if schedule.reference else _others(schedule, problem, device)  # which compute something else
    for candidate in (schedule, *others):
        is_same = candidate is schedule
        if any((choice.schedule == schedule.name) == is_same for choice in found):
            continue
        chosen = tiling if is_same else candidate.tiling()
        for name in candidate.precisions:
            rmse = _error(bits, candidate, name, chosen, problem, inputs, device)
            if rmse is not None:
                found.append(FiniteChoice(candidate.name, name, rmse))
                break
    return tuple(found)


def _others(schedule: Schedule, problem: Problem, device: DeviceSpec) -> Iterator[Schedule]:
    """Yield the other schedules for a device's family that compute such a problem."""
    for other in SCHEDULES.values():
        fits = other.family == device.family and other.problem is Problem
        if other is not schedule and fits and (other.reads_scales or not problem.is_scaled):
            yield other


def _is_finite(values: NDArray[Any]) -> bool:
    return bool(np.isfinite(values.astype(np.float64)).all())


def _error(
    bits: NumericResult,
    schedule: Schedule,
    precision: str,
    tiling: Tiling,
    problem: Problem,
    inputs: HeadSource,
    device: DeviceSpec,
) -> float | None:
    """Return the relative RMSE of a preset on the rows of ``bits``; None if not finite, or not possible."""
    rows = sorted({row + n for (_, _, row), own in bits.rows.items() for n in range(len(own))})
    heads = sorted({head for _, head, _ in bits.rows})
    _, head, row = next(at for at, own in bits.rows.items() if not _is_finite(own))
    try:
        program = schedule.build(problem, tiling, device, schedule.precision(precision))
        # One block that was lost says no soonest.
        if not evaluate(program, problem, inputs, rows=[row], heads=[head]).error.is_finite:
            return None
        found = evaluate(program, problem, inputs, rows=rows, heads=heads, reference=reference_of(schedule, tiling))
    except NpusimError:
        return None
    return found.error.rmse if found.error.is_finite else None
