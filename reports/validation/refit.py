"""Fit on one group of tiles, predict others: constants that saw tile groups, fitted again on one of them alone."""

from __future__ import annotations

import math
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.load import load_device
from npusim.studies.validate.measured_times import Predictor, kendall_tau, regret
from reports.validation.study import Errors, counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.cases import MeasurementCase

DEVICE = "h200"
#: The group that constants are fitted on, and those that are predicted then.
FITTED = "tiles_b1h16s2048d128"
PREDICTED = (
    "tiles_b4h32s4096d64",
    "gqa_b2h28kv4s4096d128",
    "pasa_b1h16s2048d128",
    "fp8_b1h16s2048d128_chained",
    "fp8_b1h16s2048d128_fresh",
)
#: Values of constants before any tile group was seen; the device file states their sources.
BEFORE: Mapping[str, float] = MappingProxyType(
    {"product_issue_factor": 1.33, "step_instructions_count": 52, "load_cycles.wgmma": 49, "SPILL.bytes_per_cycle": 34}
)
#: Factors tried on one constant after the other, coarse and then fine.
STEPS = ((0.75, 1.3), (0.88, 1.14))


class Fit(NamedTuple):
    """Constants by key, and the mean absolute logarithm of predicted over measured times of the group to which they
    were fitted.
    """

    values: dict[str, float]
    loss: float
    tried: int


class Outcome(NamedTuple):
    """How a group is met."""

    errors: Errors
    tau: float
    regret: float


@cache
def cases(group: str) -> tuple[MeasurementCase, ...]:
    """Return the cases of a group."""
    return tuple(r.case for r in counted() if r.case.group == group and r.residual.quantity == "latency_us")


def constants() -> dict[str, float]:
    """Return the constants that were fitted with an eye on a tile group, as filed."""
    seen = {FITTED, *PREDICTED}
    return {key: q.value for key, q in load_device(DEVICE).quantities() if q.fitted_on and seen & set(q.fitted_on)}


def before() -> dict[str, float]:
    """Return their earlier values."""
    return {
        key: next((v for end, v in BEFORE.items() if key.endswith(end)), filed) for key, filed in constants().items()
    }


@cache
def _filed() -> Predictor:
    """Return the runs by the device file as it is: the constants price operations, and no program depends on them."""
    return Predictor()


def _pairs(group: str, changes: Mapping[str, float]) -> list[tuple[float, float]]:
    who = _filed().retimed({key: str(value) for key, value in changes.items()})
    found = []
    for case in cases(group):
        assert case.measured.latency_us is not None
        found.append((case.measured.latency_us.low, who.latency_us(case)))
    return found


def _loss(group: str, changes: Mapping[str, float]) -> float:
    pairs = _pairs(group, changes)
    return sum(abs(math.log(predicted / measured)) for measured, predicted in pairs) / len(pairs)


@cache
def fit(group: str = FITTED) -> Fit:
    """Return the constants that fit a group best, one after another, starting from their values before any group was
    seen.
    """
    values, filed = before(), constants()
    best, tried = _loss(group, values), 1
    for factors in STEPS:
        for key in values:
            start = values[key]
            for factor in factors:
                value = start * factor
                value = round(value) if isinstance(filed[key], int) else float(f"{value:.3g}")
                loss = _loss(group, {**values, key: value})
                tried += 1
                if loss < best:
                    best, values = loss, {**values, key: value}
    return Fit(values, best, tried)


@cache
def outcomes(which: str) -> dict[str, Outcome]:
    """Return the errors of groups with the constants ``filed``, ``before`` or ``refitted``."""
    changes = fit().values if which == "refitted" else before() if which == "before" else constants()
    found = {}
    for group in (FITTED, *PREDICTED):
        pairs = _pairs(group, changes)
        errors = Errors.of(predicted / measured - 1 for measured, predicted in pairs)
        found[group] = Outcome(errors, kendall_tau(pairs), regret(pairs))
    return found
