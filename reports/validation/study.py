"""Every measured case: its predicted time, its error, and whether a constant was fitted to it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.cases import load_measurements
from npusim.studies.validate.kernels import check_kernels
from npusim.studies.validate.measured_times import validate_times
from npusim.studies.validate.vectors import check_vectors
from reports.ascend_timing.study import REPLACED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.config.cases import MeasurementCase
    from npusim.studies.validate.measured_times import GroupRank, Residual
    from npusim.studies.validate.vectors import VectorReport

HERE = Path(__file__).resolve().parent
SILICON = HERE.parent / "silicon"
#: Contents and folder of each file of measurements.
FILES: tuple[tuple[str, Path], ...] = (
    ("H200", HERE / "measured_h200.yaml"),
    ("H200", HERE / "measured_h200_schedules.yaml"),
    ("H100", HERE / "measured_h100.yaml"),
    ("two H200", HERE.parent / "nodes" / "measured_h200.yaml"),
    ("four H200", HERE.parent / "nodes" / "measured_h200_x4.yaml"),
    ("910B", HERE.parent / "ascend_timing" / "measured_910b2.yaml"),
    ("910B", HERE.parent / "ascend_timing" / "measured_more.yaml"),
    ("eight 910B", HERE.parent / "nodes" / "measured_ascend_910b2.yaml"),
    ("eight 910B, CANN's products", HERE.parent / "nodes" / "measured_ascend_allreduce.yaml"),
    ("papers", HERE.parent / "ascend_timing" / "measured_papers.yaml"),
    ("papers", HERE.parent / "nodes" / "measured_papers.yaml"),
    ("papers", HERE.parent / "nodes" / "measured_offload.yaml"),
    ("papers", HERE / "measured_v100.yaml"),
    ("V100", HERE / "measured_xformers.yaml"),
    ("whole models", HERE.parent / "nodes" / "measured_models.yaml"),
    ("papers, in words", HERE / "measured_text.yaml"),
    ("910B, CANN's tuning bank", HERE.parent / "ascend_timing" / "measured_bank.yaml"),
    ("910B, CANN's attention", HERE.parent / "production" / "measured_ascend_cann.yaml"),
    ("RTX PRO 6000", HERE.parent / "sm120" / "measured.yaml"),
    ("950", HERE.parent / "ascend_950" / "measured.yaml"),
    ("950", HERE.parent / "ascend_950" / "measured_cann.yaml"),
    ("H200, kernels in production", HERE.parent / "production" / "measured_h200_production.yaml"),
    ("H200, kernels in production", SILICON / "h200_production.yaml"),
    ("H200, kernels in production", HERE.parent / "production" / "measured_h200_served.yaml"),
    ("H200, kernels in production", SILICON / "h200_attention.yaml"),
    ("H200, other shapes", SILICON / "h200_heldout.yaml"),
    ("H200, other shapes", SILICON / "h200_ragged.yaml"),
    ("H200, other shapes", SILICON / "h200_products.yaml"),
)
#: Quantities that are a case's time; the first measured one is used.
TIMES = ("latency_us", "core_us", "tokens_per_s")
#: Kernels that a framework calls one by one: the rest of the time is the framework's.
MODELS = "whole models"
#: Kernels without a program here, measured at another clock.
NOT_ALIKE = "tileops_*"
#: A range whose upper end is at least this multiple of its lower end has many predictions by chance.
WIDE_RANGE = 1.2
#: Vectors and kernels recorded on hardware: parts that are stored here, and counts of recordings that are too large.
GOLDEN = HERE.parents[1] / "tests" / "golden"
KERNELS = "attention_h200_cut.npz"
VECTORS = ("mma_h200_cut.npz", KERNELS)
RECORDED = "recorded.csv"


#: A case cut into blocks; its other half is named alike, ``_sequential``.
TILED = re.compile(r"(\w+)_tiled\d+")


class Row(NamedTuple):
    """One quantity of one case."""

    kind: str
    file: str
    case: MeasurementCase
    residual: Residual
    method: str

    @property
    def error(self) -> float:
        """Signed relative error against the nearer end of the measured range; of a rate that of its time."""
        error = self.residual.relative_error
        return 1 / (1 + error) - 1 if self.residual.quantity == "tokens_per_s" else error

    @property
    def is_easy(self) -> bool:
        """Whether it is in a range so wide that this means little: the page shows it, and it is no hit."""
        low, high = self.residual.measured
        return high >= WIDE_RANGE * low and self.residual.relative_error == 0

    @property
    def is_counted(self) -> bool:
        """Whether it counts in figures: not if the host decides, if another row has its timing, or if all would hit."""
        apart = any(fnmatchcase(self.case.name, pattern) for pattern in (REPLACED, NOT_ALIKE))
        return not (self.residual.is_floor or apart or self.is_easy)

    @property
    def is_untouched(self) -> bool:
        """Whether no constant of its device was fitted on it or on its group."""
        return not self.residual.is_fitted


def wrong_signs(residuals: Iterable[Residual]) -> list[str]:
    """Return cases whose gain is predicted a loss, or the reverse: speed-ups, times tiled against sequential."""
    listed = list(residuals)
    gains = [(r.name, (r.measured.low, r.measured.high), r.predicted) for r in listed if r.quantity == "speedup"]
    times = {r.name: r for r in listed if r.quantity == "latency_us"}
    for name, tiled in times.items():
        if (match := TILED.fullmatch(name)) and (whole := times.get(f"{match[1]}_sequential")):
            measured = (whole.measured.low / tiled.measured.high, whole.measured.high / tiled.measured.low)
            gains.append((name, measured, whole.predicted / tiled.predicted))
    return [name for name, (low, high), predicted in gains if predicted < 1 < low or high < 1 < predicted]


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
def _reports(device: str | None) -> tuple[tuple[Row, ...], dict[str, GroupRank], tuple[str, ...]]:
    """Return the contents of all files of measurements (with cases of a device); without a default, because of
    ``cache``.
    """
    found: list[Row] = []
    ranks: dict[str, GroupRank] = {}
    faults: list[str] = []
    for kind, path in FILES:
        cases = {case.name: case for case in load_measurements(path).cases}
        if device is not None and all(case.device != device for case in cases.values()):
            continue
        report = validate_times(path, only=device)
        found += [Row(kind, path.stem, cases[r.name], r, report.methods.get(r.name, "")) for r in report.residuals]
        ranks |= report.groups
        faults += report.faults
    return tuple(found), ranks, tuple(faults)


def rows() -> tuple[Row, ...]:
    """Return every quantity that was measured and has a prediction."""
    return _reports(None)[0]


def groups() -> dict[str, GroupRank]:
    """Return how groups of tiles are ranked."""
    return _reports(None)[1]


def not_predicted() -> tuple[str, ...]:
    """Return why cases have no prediction."""
    return _reports(None)[2]


def counted(kind: str | None = None) -> list[Row]:
    """Return the rows of a kind, or all, that figures are made of."""
    return [r for r in rows() if r.is_counted and kind in (None, r.kind)]


def of_group(name: str) -> list[Row]:
    """Return the latencies of a group of tiles."""
    return [r for r in counted() if r.case.group == name and r.residual.quantity == "latency_us"]


def errors(found: Iterable[Row]) -> Errors:
    """Return the figures of rows."""
    return Errors.of(r.error for r in found)


def times(device: str | None = None) -> list[Row]:
    """Return the time of each case (of a device) that figures are made of: a call's, its cores', or a rate."""
    times: dict[tuple[str, str], Row] = {}
    for quantity in TIMES:
        for row in _reports(device)[0]:
            if row.is_counted and row.residual.quantity == quantity:
                times.setdefault((row.file, row.case.name), row)
    return list(times.values())


def classes() -> dict[tuple[str, str], list[Row]]:
    """Return the times by device and schedule."""
    keys = sorted({(r.case.device, r.case.schedule) for r in times()})
    return {key: [r for r in times() if (r.case.device, r.case.schedule) == key] for key in keys}


class Recorded(NamedTuple):
    """A recording outside the repository: its hash, and counts of instructions or kernels, outputs, equal outputs."""

    sha256: str
    counts: tuple[int, int, int]


def recorded() -> dict[str, Recorded]:
    """Return, by file, the recordings that tests compare with npusim if their files are next to the checkout."""
    lines = (GOLDEN / RECORDED).read_text(encoding="utf-8").splitlines()[2:]
    rows = (line.split(",") for line in lines)
    return {name: Recorded(digest, (int(a), int(b), int(c))) for name, digest, a, b, c in rows}


def counts(reports: Mapping[str, VectorReport]) -> tuple[int, int, int]:
    """Return instructions or kernels, outputs, and equal ones."""
    found = reports.values()
    return len(reports), sum(r.total for r in found), sum(r.matched for r in found)


@cache
def bits() -> dict[str, tuple[int, int, int]]:
    """Return the counts of every recording: those of the stored parts are computed here, the others come from tests."""
    cuts = {
        name: counts(check_kernels(GOLDEN / name) if name == KERNELS else check_vectors(GOLDEN / name))
        for name in VECTORS
    }
    return {**cuts, **{name: found.counts for name, found in recorded().items()}}
