"""Every measured case there is: predicted, and how far off; what of it a constant was fitted on."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.cases import load_measurements
from npusim.errors import SpecError
from npusim.validate.times import validate_times
from reports.ascend_timing.study import REPLACED
from reports.validation.kernels import check_kernels
from reports.validation.vectors import check_vectors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.config.cases import MeasurementCase
    from npusim.validate.times import GroupRank, Residual

HERE = Path(__file__).resolve().parent
#: What each file of measurements is, and where it lies.
FILES: tuple[tuple[str, Path], ...] = (
    ("H200", HERE / "measured_h200.yaml"),
    ("H200", HERE / "measured_h200_schedules.yaml"),
    ("H100", HERE / "measured_h100.yaml"),
    ("two H200", HERE.parent / "nodes" / "measured_h200.yaml"),
    ("910B", HERE.parent / "ascend_timing" / "measured_910b2.yaml"),
    ("910B", HERE.parent / "ascend_timing" / "measured_more.yaml"),
    ("eight 910B", HERE.parent / "nodes" / "measured_ascend_910b2.yaml"),
    ("papers", HERE.parent / "ascend_timing" / "measured_papers.yaml"),
    ("papers", HERE.parent / "nodes" / "measured_papers.yaml"),
    ("papers", HERE.parent / "nodes" / "measured_offload.yaml"),
    ("papers", HERE / "measured_v100.yaml"),
    ("whole models", HERE.parent / "nodes" / "measured_models.yaml"),
)
#: Vectors and kernels recorded on hardware, outside the repository.
GOLDEN = HERE.parents[2] / "shared" / "golden"
KERNELS = "attention_h200.npz"
VECTORS = ("mma_h200.npz", "mma_leeds.npz", KERNELS)


class Row(NamedTuple):
    """One quantity of one case."""

    kind: str
    case: MeasurementCase
    residual: Residual
    method: str

    @property
    def error(self) -> float:
        """Signed relative error against the nearer end of the measured range."""
        return self.residual.relative_error

    @property
    def is_counted(self) -> bool:
        """Whether figures are made of it: not where the host decides, nor where another row says its timing."""
        return not self.residual.is_floor and not fnmatchcase(self.case.name, REPLACED)

    @property
    def is_untouched(self) -> bool:
        """Whether no constant of its device was fitted on it or on its group."""
        return not self.residual.is_fitted


class Errors(NamedTuple):
    """Absolute errors of several quantities: half of them are within ``median``, nine in ten within ``most``."""

    cases: int
    median: float
    most: float
    worst: float

    @classmethod
    def of(cls, found: Iterable[float]) -> Errors:
        """Return the figures of signed errors; all 0 for none."""
        listed = sorted(map(abs, found))
        if not listed:
            return cls(0, 0.0, 0.0, 0.0)
        within = listed[-(-len(listed) * 9 // 10) - 1]
        return cls(len(listed), median(listed), within, listed[-1])


@cache
def _reports() -> tuple[tuple[Row, ...], dict[str, GroupRank], tuple[str, ...]]:
    found: list[Row] = []
    ranks: dict[str, GroupRank] = {}
    faults: list[str] = []
    for kind, path in FILES:
        cases = {case.name: case for case in load_measurements(path).cases}
        report = validate_times(path)
        found += [Row(kind, cases[r.name], r, report.methods.get(r.name, "")) for r in report.residuals]
        ranks |= report.groups
        faults += report.faults
    return tuple(found), ranks, tuple(faults)


def rows() -> tuple[Row, ...]:
    """Return every quantity that was measured and has a prediction."""
    return _reports()[0]


def groups() -> dict[str, GroupRank]:
    """Return how groups of tiles are ranked."""
    return _reports()[1]


def not_predicted() -> tuple[str, ...]:
    """Return why cases have no prediction."""
    return _reports()[2]


def counted(kind: str | None = None) -> list[Row]:
    """Return the rows of a kind, or all, that figures are made of."""
    return [r for r in rows() if r.is_counted and kind in (None, r.kind)]


def of_group(name: str) -> list[Row]:
    """Return the latencies of a group of tiles."""
    return [r for r in counted() if r.case.group == name and r.residual.quantity == "latency_us"]


def errors(found: Iterable[Row]) -> Errors:
    """Return the figures of rows."""
    return Errors.of(r.error for r in found)


def bands() -> dict[tuple[str, str], tuple[Errors, Errors]]:
    """Return by device and schedule the errors of times: of all cases, and of those that nothing was fitted on."""
    times = [r for r in counted() if r.residual.quantity == "latency_us" and r.kind != "whole models"]
    keys = sorted({(r.case.device, r.case.schedule) for r in times})
    return {
        key: (errors(own), errors(r for r in own if r.is_untouched))
        for key in keys
        for own in [[r for r in times if (r.case.device, r.case.schedule) == key]]
    }


@cache
def bits() -> dict[str, tuple[int, int]]:
    """Return equal outputs and all, by what was recorded; raise `SpecError` where the recordings are missing."""
    found: dict[str, tuple[int, int]] = {}
    for name in VECTORS:
        path = GOLDEN / name
        if not path.is_file():
            raise SpecError(f"{path}: missing; the page counts the outputs recorded there")
        reports = check_kernels(path) if name == KERNELS else check_vectors(path)
        found |= {f"{name}: {k}": (r.matched, r.total) for k, r in reports.items()}
    return found
