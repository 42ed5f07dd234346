"""Computations of the page on the 910B's timing: residuals, fitted constants, and comparisons of equal calls."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.cases import MeasurementCase, load_measurements
from npusim.config.load import load_device
from npusim.config.node_file import load_machine
from npusim.studies.validate.measured_times import Predictor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.cases import Interval
    from npusim.config.device import DeviceSpec

__all__ = [
    "CLASSES",
    "DEVICE",
    "SOURCES",
    "Row",
    "Without",
    "bank",
    "before",
    "cases",
    "class_of",
    "core_us",
    "counted",
    "fitted",
    "repository",
    "rows",
    "summary",
    "tiles_of_16k",
    "untouched",
    "without",
]

FILES = ("measured_910b2.yaml", "measured_more.yaml", "measured_papers.yaml")
BANK = "measured_bank.yaml"
DEVICE = "ascend_910b2"
#: Cases whose timing another file states; only that file is counted.
REPLACED = "fa_910b2_*"
#: Kinds of cases by patterns of their names, the first match counts.
CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention on one and eight cores": ("fa_x86_*",),
        "attention on all cores": ("fa_b2b_*", "cann_*", "tilelang_*"),
        "products, warm": ("bank_*",),
        "products, cold": ("guide_*", "catlass_*", "ptodsl_*", "torchmm_*", "gemm_910b1_*"),
        "all-reduce": ("mc2_*", "gemm_ar_*"),
        "a call's floor": ("pangu71b_*",),
        "papers": ("*",),
    }
)
#: Repositories that cases come from, by their names.
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pto-isa, torch_jit (x86)": ("fa_x86_*",),
        "pto-isa, flash_atten": ("fa_b2b_*",),
        "CANN's tuning bank": ("bank_*",),
        "asc-devkit": ("gemm_910b1_*", "guide_*", "mc2_*"),
        "all others": ("torchmm_*", "catlass_*", "ptodsl_*", "cann_*", "tilelang_*"),
    }
)
#: What constants chosen by a repository's timings are without them: another source's value (guide, pto-isa, mskpp),
#: or none.
OTHERWISE: Mapping[str, dict[str, str]] = MappingProxyType(
    {
        "pto-isa, torch_jit (x86)": {"launch.gap_s": "0"},
        "pto-isa, flash_atten": {"flags.tile_extra_cycles": "0"},
        "CANN's tuning bank": {
            "launch.block_dispatch_cycles": "500",
            "cores.aic.engines.MTE2.routes.gm_l1.request_cycles": "0",
        },
        "asc-devkit": {
            "cores.aic.engines.MTE2.routes.gm_l1.burst_overhead_cycles": "0",
            "cores.aic.engines.MTE2.routes.gm_l1.row_cycles": "0",
            "links.hbm.bytes_per_s": "1.6e12",
            "cores.aic.engines.CUBE.startup_cycles": "6",
            "cores.aic.engines.FIXP.routes.l0c_gm.bytes_per_cycle": "123",
            "launch.task_s": "0",
            "launch.task_all_s": "0",
        },
        "all others": {},
    }
)


class Row(NamedTuple):
    """One quantity of one case; ``is_floor``: the host decides it."""

    case: MeasurementCase
    quantity: str
    measured: Interval
    predicted: float
    is_floor: bool

    @property
    def error(self) -> float:
        """Signed relative error against the nearer end of the measured range."""
        return self.measured.relative_error(self.predicted)

    @property
    def is_wrong_sign(self) -> bool:
        """Whether a gain is predicted where a loss was measured, or a loss where a gain was."""
        gain, loss = self.measured.low > 1, self.measured.high < 1
        return self.quantity == "speedup" and (self.predicted < 1 if gain else loss and self.predicted > 1)


@cache
def cases(*files: str) -> tuple[MeasurementCase, ...]:
    """Return the cases of some files: of those whose rows count, if none is named."""
    paths = [Path(__file__).with_name(name) for name in files or FILES]
    return tuple(case for path in paths for case in load_measurements(path).cases)


def bank() -> list[Row]:
    """Return the residuals of the records that two constants were fitted on."""
    predict = _as_filed().quantity
    found = [(case, case.measured.core_us) for case in cases(BANK)]
    return [Row(case, "core_us", us, predict(case, "core_us"), is_floor=False) for case, us in found if us is not None]


class _Changed(Predictor):
    """Predicts on devices with some numbers changed."""

    def __init__(self, changes: Mapping[str, str]) -> None:
        super().__init__()
        self.changes = changes

    def machine(self, name: str) -> DeviceSpec:
        """Return a device or node with the changes."""
        if name not in self._machines:
            self._machines[name] = load_machine(name, None if "_x" in name else self.changes)
        return self._machines[name]


@cache
def _as_filed() -> Predictor:
    return Predictor()


def rows(pattern: str = "*", predictor: Predictor | None = None) -> list[Row]:
    """Return the residuals of the cases that match."""
    who = predictor or _as_filed()
    return [
        Row(case, quantity, measured, who.quantity(case, quantity), who.is_floor(case, quantity))
        for case in cases()
        if fnmatchcase(case.name, pattern)
        for quantity, measured in case.measured.items()
    ]


def class_of(name: str) -> str:
    """Return the kind of a case."""
    return next(kind for kind, found in CLASSES.items() if any(fnmatchcase(name, p) for p in found))


def counted(found: list[Row]) -> list[Row]:
    """Return the rows that figures are made of: no paper's, none that the host or another file's row decides."""
    return [
        r
        for r in found
        if not r.is_floor and class_of(r.case.name) != "papers" and not fnmatchcase(r.case.name, REPLACED)
    ]


def summary(found: list[Row]) -> tuple[int, float, float, float]:
    """Return count, median and worst absolute error, and the share within 20 %."""
    errors = [abs(r.error) for r in found]
    if not errors:
        return 0, 0.0, 0.0, 1.0
    return len(errors), median(errors), max(errors), sum(e <= 0.2 for e in errors) / len(errors)


def before() -> dict[str, float]:
    """Return the errors of the release before, by case and quantity."""
    data = json.loads(Path(__file__).with_name("before.json").read_text(encoding="utf-8"))
    errors: dict[str, float] = data["errors"]
    return errors


def fitted() -> dict[str, tuple[float, tuple[str, ...]]]:
    """Return the fitted numbers of the device file, each with its cases."""
    return {
        key: (float(q.value), q.fitted_on)
        for key, q in load_device(DEVICE).quantities()
        if q.basis == "fitted" and q.fitted_on
    }


def untouched(found: list[Row]) -> list[Row]:
    """Return the rows of cases that nothing was fitted on."""
    used = {name for _, names in fitted().values() for name in names}
    return [r for r in found if r.case.name not in used]


def repository(source: str) -> tuple[str, ...]:
    """Return the patterns of the cases that come from a repository."""
    return SOURCES[source]


class Without(NamedTuple):
    """A repository's cases predicted by constants that were chosen without them."""

    changes: dict[str, str]
    filed: tuple[int, float, float, float]
    alone: tuple[int, float, float, float]


def without(source: str) -> Without:
    """Return the errors of a repository's cases with the filed constants, and with constants chosen without them."""
    changes, patterns = OTHERWISE[source], SOURCES[source]
    changed = _Changed(changes)
    filed = [r for p in patterns for r in counted(rows(p))]
    alone = [r for p in patterns for r in counted(rows(p, changed))]
    return Without(changes, summary(filed), summary(alone))


def core_us(case: MeasurementCase) -> float:
    """Return the part of a case's call on the cores, in microseconds."""
    timing = _as_filed().timing(case)
    return timing.cycles / timing.clock_hz * 1e6


def tiles_of_16k() -> dict[int, float]:
    """Return the time of 16k tokens by the keys of a tile, which its source does not state."""
    case = next(c for c in cases() if c.name == "fa_b2b_910b2_16k")
    found = {}
    for keys in (256, 512):
        other = case.model_copy(update={"tiling": {"block_q": 128, "block_kv": keys, "kernel": "pto"}})
        found[keys] = _as_filed().latency_us(other)
    return found
