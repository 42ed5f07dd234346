"""What the page on the 910B's timing computes: residuals, what is fitted, and comparisons like with like."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.load import load_device
from npusim.config.measurements import MeasurementCase, load_measurements
from npusim.config.node import load_machine
from npusim.config.problem import Problem
from npusim.run import run
from npusim.validate.times import Predictor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.measurements import Interval

__all__ = [
    "CLASSES", "SOURCES", "Row", "Without", "before", "cases", "class_of", "counted", "deit", "fitted", "pasa",
    "repository", "rows", "speedups", "summary", "tiles_of_16k", "untouched", "wide", "without",
]  # fmt: skip

FILES = ("measured_910b2.yaml", "measured_more.yaml", "measured_papers.yaml")
DEVICE = "ascend_910b2"
#: Cases whose timing another file says, and counts instead.
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
    }
)
#: What constants fitted on a repository's cases are without them: another source's value, or none.
OTHERWISE: Mapping[str, dict[str, str]] = MappingProxyType(
    {
        "pto-isa, torch_jit (x86)": {"launch.gap_s": "0"},
        "pto-isa, flash_atten": {"flags.tile_extra_cycles": "0"},
        "CANN's tuning bank": {"launch.block_dispatch_cycles": "0"},
        "asc-devkit": {"cores.aic.engines.MTE2.routes.gm_l1.burst_overhead_cycles": "0.66"},
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


@cache
def cases() -> tuple[MeasurementCase, ...]:
    """Return the cases of all files."""
    found: list[MeasurementCase] = []
    for name in FILES:
        found += load_measurements(Path(__file__).with_name(name)).cases
    return tuple(found)


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
        r for r in found
        if not r.is_floor and class_of(r.case.name) != "papers" and not fnmatchcase(r.case.name, REPLACED)
    ]  # fmt: skip


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
    """Return how a repository's cases are met as filed, and by constants chosen without them."""
    changes, patterns = OTHERWISE[source], SOURCES[source]
    changed = _Changed(changes)
    filed = [r for p in patterns for r in counted(rows(p))]
    alone = [r for p in patterns for r in counted(rows(p, changed))]
    return Without(changes, summary(filed), summary(alone))


def tiles_of_16k() -> dict[int, float]:
    """Return the time of 16k tokens by the keys of a tile, which its source does not state."""
    case = next(c for c in cases() if c.name == "fa_b2b_910b2_16k")
    found = {}
    for keys in (256, 512):
        other = case.model_copy(update={"tiling": {"block_q": 128, "block_kv": keys}})
        found[keys] = _as_filed().latency_us(other)
    return found


# ---------------------------------------------------------------- like with like

#: The vendor's kernels in CANN: FP32 128 x 512 in slices of 8 rows, FP16 128 x 1024 in slices of 16
#: (ops-transformer attention/prompt_flash_attention, CVDIFF).
CANN_FP32: dict[str, Any] = {"block_q": 128, "block_kv": 512, "vector_rows": 8}
CANN_FP16: dict[str, Any] = {"block_q": 128, "block_kv": 1024, "vector_rows": 16}


def _us(schedule: str, problem: Problem, precision: str | None = None, **tiling: Any) -> float:
    return run(
        schedule, hw=DEVICE, problem=problem, precision=precision, tiling=tiling, numerics=False, trace_groups=()
    ).latency_us


def attention(seq: int, heads: int, *, causal: bool, batch: int = 1, head_dim: int = 128) -> Problem:
    """Return one device's attention."""
    return Problem(batch=batch, heads=heads, seq_q=seq, seq_kv=seq, head_dim=head_dim, causal=causal)


def pasa(seq: int = 32768) -> dict[str, tuple[float, float]]:
    """Return speed-up over CANN's FP32 kernel and TFLOP/s of PASA by precision, and of the kernel itself."""
    problem = attention(seq, 16, causal=False)
    base = _us("flash", problem, "fa2_fp32", **CANN_FP32)
    flops = problem.dense_flops() / 1e6
    found = {"CANN FP32": (1.0, flops / base)}
    for name in ("fp16_mean", "fp32_mean", "fixed_reference", "fp16_mean,sum_order=tree_halves"):
        own = _us("pasa", problem, name)
        found[name] = base / own, flops / own
    return found


def wide() -> float:
    """Return CANN's FP16 kernel over its FP32 kernel, with the tiles of each."""
    problem = attention(32768, 16, causal=False)
    return _us("flash", problem, "fa2_fp32", **CANN_FP32) / _us("flash", problem, "fa16", **CANN_FP16)


def speedups() -> dict[int, tuple[float, float, float, float]]:
    """Return unified and two-level over fused passes and over eager operators, by length (PanGu-38B, 5 heads)."""
    found = {}
    for seq in (1024, 2048, 4096, 8192, 16384):
        problem = attention(seq, 5, causal=True)
        unified, two = _us("unified", problem, block=128), _us("two_level", problem)
        fused, eager = _us("standard", problem), _us("standard", problem, operators="eager")
        found[seq] = fused / unified, fused / two, eager / unified, eager / two
    return found


def deit() -> dict[int, tuple[float, float]]:
    """Return two-level over fused passes and over eager operators for DeiT-B, by batch."""
    found = {}
    for batch in (32, 256, 1024):
        problem = attention(197, 12, causal=False, batch=batch, head_dim=64)
        two = _us("two_level", problem)
        fused = _us("standard", problem)
        found[batch] = fused / two, _us("standard", problem, operators="eager") / two
    return found
