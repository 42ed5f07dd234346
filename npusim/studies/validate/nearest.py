"""Measured cases nearest to a run, and the errors of their predictions: shown next to a prediction, never mixed into
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npusim.config.bands import SIZES
from npusim.config.cases import load_measurements
from npusim.errors import SpecError
from npusim.simulation.chosen_tile import choose_tile
from npusim.studies.validate.measured_times import Predictor

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.config.cases import MeasurementCase
    from npusim.simulation.run_result import RunData

#: Distance between two different values of a tiling field, or of a mask: as large as that of a doubled size.
OTHER = 1.0
SHOWN = 3


@dataclass(frozen=True, slots=True)
class MeasuredNeighbour:
    """A measured case: its differences from the run, in words, its times in us, and the prediction's relative error."""

    name: str
    distance: float
    differs: str
    measured_us: float
    predicted_us: float
    relative_error: float


def nearest(run: RunData, path: Path, method: str = "auto") -> tuple[MeasuredNeighbour, ...]:
    """Return the measured cases of a file that are nearest to a run, of its device and schedule.

    Raises `SpecError` if the file has no case whose latency the device determines.
    """
    who = Predictor(method, folder=path.parent)
    cases = [c for c in load_measurements(path).cases if c.schedule == run.schedule and c.measured.latency_us]
    cases = [c for c in cases if who.machine(c.device).name == run.device.name]
    if not cases:
        raise SpecError(f"--like {path}: it has no latency of {run.schedule} on {run.device.name}")
    neighbours = []
    for (distance, words), name, case in sorted((_differences(run, who, c), c.name, c) for c in cases)[:SHOWN]:
        interval, predicted = case.measured.latency_us, who.latency_us(case)
        assert interval is not None
        error = interval.relative_error(predicted)
        neighbours.append(MeasuredNeighbour(name, distance, words, sum(interval) / 2, predicted, error))
    return tuple(neighbours)


def _differences(run: RunData, who: Predictor, case: MeasurementCase) -> tuple[float, str]:
    """Return the distance between a case's sizes and a run's, in doublings, and the differences in words."""
    plan = who.plan(case)
    tiling = plan.tiling.model_copy(update=choose_tile(plan).fields)
    words, distance = [], 0.0
    for name in SIZES:
        a, b = getattr(plan.problem, name, None), getattr(run.problem, name, None)
        if isinstance(a, int) and isinstance(b, int) and a != b:
            distance += abs(math.log2(b / a))
            words.append(f"{name} {a:,}")
    fields = dict(run.tiling)
    others: list[tuple[str, Any, Any]] = [
        (name, value, fields.get(name)) for name, value in sorted(dict(tiling).items())
    ]
    others += [("causal", getattr(plan.problem, "causal", None), getattr(run.problem, "causal", None))]
    for name, value, here in others:
        if value != here:
            distance += OTHER
            words.append(f"{name} {value}")
    return distance, ", ".join(words) or "the same"
