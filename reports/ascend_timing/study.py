"""What the page on the 910B's timing computes: residuals, what they rest on, what would remove them."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.engine import VectorEngine
from npusim.config.load import load_device
from npusim.config.measurements import MeasurementCase, load_measurements
from npusim.config.overrides import apply_overrides
from npusim.ir.op import Opcode, Step
from npusim.ir.tile import Tile
from npusim.machines.ascend.vector_cost import vector_cycles
from npusim.report.record import record_of
from npusim.simulate import simulate_program
from npusim.units import ceil_div
from npusim.validate.times import Predictor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.measurements import Interval
    from npusim.report.record import TimingRecord
    from npusim.run_result import RunResult

__all__ = [
    "FACTOR", "GROUPS", "LARGE", "LONGEST", "Needed", "Row", "band_of", "cases", "elsewhere", "keys_of", "left_out",
    "needed", "predicted", "rate_of_burst", "record", "reductions", "result_of", "rounds", "rows", "twins",
]  # fmt: skip

#: Files beside this module that hold what was measured.
FILES = ("measured_910b2.yaml", "measured_papers.yaml")
DEVICE = "ascend_910b2"
#: Residuals beyond this are looked into, as issue 5 asks.
LARGE = 0.10
#: How far a group of constants is moved either way, and steps of the search in between.
FACTOR, STEPS = 4.0, 4
#: Longer sequences than this are searched at it: per token the time is the same.
LONGEST = 32768
#: Relative error at which a search ends.
NEAR = 2e-3

#: Constants of the device file that are moved together, as patterns of their keys.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cycles a vector repeat": ("*.VECTOR.ops.*.slope*",),
        "head and tail of a vector instruction": (
            "*.VECTOR.ops.*.head_cycles",
            "*.VECTOR.ops.*.tail_cycles",
        ),
        "flag between cores, latency": ("flags.cross_core_latency_cycles",),
        "flag between cores, issue": ("flags.cross_core_issue_cycles",),
        "FIXP bytes a cycle": ("*.l0c_gm.bytes_per_cycle",),
        "MTE2 of an AIV, bytes a cycle": ("*.gm_ub.bytes_per_cycle",),
        "MTE2 of an AIC, bytes a cycle": ("*.gm_l1.bytes_per_cycle",),
        "MTE1 bytes a cycle": ("*.l1_l0?.bytes_per_cycle",),
        "CUBE cycles a fractal": ("*.cycles_per_fractal",),
        "L2 bytes a second": ("links.l2.*bytes_per_s",),
        "HBM bytes a second": ("links.hbm.bytes_per_s",),
        "block dispatch": ("launch.block_dispatch_cycles",),
        "kernel launch": ("launch.kernel_overhead_s",),
    }
)


class Row(NamedTuple):
    """One quantity of one case."""

    case: MeasurementCase
    quantity: str
    measured: Interval
    predicted: float

    @property
    def name(self) -> str:
        """Case and, where it has several quantities, the quantity."""
        single = len(list(self.case.measured.items())) == 1
        return self.case.name if single else f"{self.case.name} {self.quantity}"

    @property
    def error(self) -> float:
        """Signed relative error against the nearer end of the measured range."""
        return self.measured.relative_error(self.predicted)

    @property
    def asks_for_an_explanation(self) -> bool:
        """Outside the range of a paper, or more than 10 % off."""
        is_range = self.measured.low < self.measured.high
        return bool(self.error) if is_range else abs(self.error) > LARGE


@cache
def cases() -> tuple[MeasurementCase, ...]:
    """Return the cases of both files."""
    found: list[MeasurementCase] = []
    for name in FILES:
        found += load_measurements(Path(__file__).with_name(name)).cases
    return tuple(found)


@cache
def _as_filed() -> Predictor:
    return Predictor()


def rows(pattern: str = "*") -> list[Row]:
    """Return every quantity of the cases of that name, predicted by the device file as it is."""
    return [
        Row(case, quantity, measured, _as_filed().quantity(case, quantity))
        for case in cases()
        if fnmatchcase(case.name, pattern)
        for quantity, measured in case.measured.items()
    ]


def record(case: MeasurementCase) -> TimingRecord:
    """Return what is kept of a case's own run."""
    timing = record_of(_as_filed().result(case)).timing
    assert timing is not None
    return timing


def band_of(found: list[Row]) -> tuple[float, float]:
    """Return median and largest absolute error."""
    errors = [abs(r.error) for r in found]
    return median(errors), max(errors)


# ---------------------------------------------------------------- what would have to be true


class Needed(NamedTuple):
    """What moving one group of constants does to a case.

    ``factor`` brings the prediction to the nearer end of what was measured, None if none within a
    factor of 4 does; ``low`` and ``high`` are the predictions at a quarter and at four times.
    """

    group: str
    factor: float | None
    low: float
    high: float


def keys_of(device: DeviceSpec, group: str) -> list[str]:
    """Return the keys of a group's constants in a device file, without those that no model reads."""
    keys = [key for key, _ in device.quantities() if not key.startswith("facts.")]
    return [k for k in keys if any(fnmatchcase(k, pattern) for pattern in GROUPS[group])]


class _Moved(Predictor):
    """Predicts with groups of constants multiplied: programs as they are, simulated on other devices."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self._factors = factors

    def machine(self, name: str) -> DeviceSpec:
        """Return a device with the groups moved; whole numbers are rounded."""
        device = _as_filed().machine(name)
        values = {key: fact.value for key, fact in device.quantities()}
        changed: dict[str, str] = {}
        for group, factor in self._factors.items():
            for key in keys_of(device, group):
                value = values[key] * factor
                changed[key] = str(round(value)) if key.endswith("_cycles") else repr(value)
        return apply_overrides(device, changed)

    def result(self, case: MeasurementCase) -> RunResult:
        """Return the run of a case on the moved device."""
        base, device = _as_filed().result(case), self.machine(case.device)
        timing = simulate_program(base.program, device, self.method)
        return replace(base, device=device, timing=timing)


def needed(row: Row, group: str) -> Needed:
    """Return by which factor a group of constants would have to differ for the case to come out."""
    target = row.measured.low if row.predicted < row.measured.low else row.measured.high
    case = _shortened(row.case)

    def at(factor: float) -> float:
        return _Moved({group: factor}).quantity(case, row.quantity)

    ends = {1 / FACTOR: at(1 / FACTOR), FACTOR: at(FACTOR)}
    low, high = ends[1 / FACTOR], ends[FACTOR]
    for end, value in ends.items():
        if (value - target) * (row.predicted - target) <= 0:
            return Needed(
                group, _between(at, target, (1.0, row.predicted), (end, value)), low, high
            )
    return Needed(group, None, low, high)


def _shortened(case: MeasurementCase) -> MeasurementCase:
    """Return a case with a sequence that is searched in reasonable time."""
    w = case.workload
    if w.seq_q is None or w.seq_q <= LONGEST:
        return case
    return case.model_copy(
        update={"workload": w.model_copy(update={"seq_q": LONGEST, "seq_kv": LONGEST})}
    )


def elsewhere(found: list[Row], change: Needed) -> tuple[float, float]:
    """Return median and largest error of rows once a group of constants is what one case asks for."""
    assert change.factor is not None
    moved = _Moved({change.group: change.factor})
    return band_of([r._replace(predicted=moved.quantity(r.case, r.quantity)) for r in found])


def _between(
    at: Callable[[float], float],
    target: float,
    first: tuple[float, float],
    second: tuple[float, float],
) -> float:
    """Return the factor at which ``at`` crosses ``target``: false position in logarithms, kept bracketed."""
    (a, fa), (b, fb) = first, second
    for _ in range(STEPS):
        share = (target - fa) / (fb - fa) if fb != fa else 0.5
        middle = exp(log(a) + min(0.9, max(0.1, share)) * (log(b) - log(a)))
        found = at(middle)
        if abs(found / target - 1) < NEAR:
            return middle
        if (found - target) * (fa - target) <= 0:
            b, fb = middle, found
        else:
            a, fa = middle, found
    return exp((log(a) + log(b)) / 2)


def result_of(case: MeasurementCase, **changes: object) -> RunResult:
    """Return the run of a case with some of its keys replaced (a tiling adds to its own)."""
    if isinstance(tiling := changes.get("tiling"), dict):
        changes["tiling"] = {**(case.tiling or {}), **tiling}
    return _as_filed().result(case.model_copy(update=changes))


def predicted(row: Row, **changes: object) -> float:
    """Return what is predicted of a quantity once keys of its case (not of its baseline) are replaced."""
    return _as_filed().quantity(row.case.model_copy(update=changes), row.quantity)


def twins(found: list[Row]) -> list[Row]:
    """Return rows with one for each schedule and number of heads: the shortest sequence."""
    chosen: dict[tuple[object, ...], Row] = {}
    for row in found:
        w = row.case.workload
        key = (row.case.schedule, w.heads, w.kv_heads, row.quantity, row.error > 0)
        chosen.setdefault(key, row)
    return list(chosen.values())


# ---------------------------------------------------------------- constants taken from kernels


def left_out(found: list[Row]) -> dict[str, tuple[float, float]]:
    """Return for each attention case the launch that the others ask for, in us, and its error then.

    The launch of the device file is an intercept of such timings.  Here it is fitted anew on all cases
    but one, by least squares of the relative errors, and the one left out is predicted with it.
    """
    kernels = {
        r.case.name: (sum(r.measured) / 2, r.predicted - record(r.case).launch_us) for r in found
    }
    results = {}
    for name, (measured, kernel) in kernels.items():
        others = [kernels[n] for n in kernels if n != name]
        # d/dx of sum ((k + x) / m - 1)^2 = 0
        launch = sum((m - k) / m**2 for m, k in others) / sum(1 / m**2 for m, k in others)
        results[name] = (launch, (kernel + launch) / measured - 1)
    return results


class Reduction(NamedTuple):
    """A row maximum over a tile: cycles of the block reductions used, and of the vendor's fit."""

    fmt: str
    columns: int
    used_cycles: int
    fitted_cycles: float


def reductions(rows_count: int) -> list[Reduction]:
    """Return the vendor's fits of whole-row reductions beside what a reduction costs here."""
    device = load_device(DEVICE)
    engine = device.engine("aiv", "VECTOR")
    assert isinstance(engine, VectorEngine)
    # Known, but read by no model: <format>.<number>.<quantity>.
    prefix = "facts.cores.aiv.engines.VECTOR.row_reduce."
    fits: dict[str, dict[str, float]] = {}
    for key, fact in device.quantities():
        if key.startswith(prefix):
            fit, _, quantity = key.removeprefix(prefix).rpartition(".")
            fits.setdefault(fit, {})[quantity] = fact.value
    found = []
    for name, published in fits.items():
        fmt, columns = name.partition(".")[0], int(published["columns_count"])
        tile = Tile("aiv.UB", 0, rows_count, columns, columns, fmt)
        step = Step(Opcode.ROW_MAX, replace(tile, cols=1, stride=1), (tile,))
        cycles, _ = vector_cycles(step, engine, None, "aiv.VECTOR")
        elements = rows_count * columns
        fitted = published["slope_cycles_per_element"] * elements + published["bias_cycles"]
        found.append(Reduction(fmt, columns, cycles, fitted))
    return found


def rounds(found: list[Row], reference: str) -> dict[str, tuple[int, int, float]]:
    """Return a case's blocks, the rounds that all core groups need for them, and the rounds measured.

    Measured is the time without launch in units of what one block of ``reference`` takes as measured, by
    the keys of each.
    """
    groups = load_device(DEVICE).group_count.value
    blocks = {r.case.name: len(result_of(r.case).program.phases[-1].blocks) for r in found}
    spent = {r.case.name: r.measured.low - record(r.case).launch_us for r in found}
    keys = {r.case.name: r.case.workload.seq_kv or 0 for r in found}
    per_key = spent[reference] / ceil_div(blocks[reference], groups) / keys[reference]
    return {
        name: (count, ceil_div(count, groups), spent[name] / per_key / keys[name])
        for name, count in blocks.items()
    }


def rate_of_burst(row: Row) -> tuple[float, float]:
    """Return cycles a burst in the device file, and what the product's own MTE2 time would ask for."""
    key = "cores.aic.engines.MTE2.routes.gm_l1.burst_overhead_cycles"
    value = dict(load_device(row.case.device).quantities())[key].value
    terms = {c.key: c.cycles for c in record(row.case).constants}
    device = load_device(row.case.device)
    wanted = sum(row.measured) / 2 - row.predicted  # us a core
    cycles = wanted * 1e-6 * device.clock_hz.value * device.group_count.value
    return value, value * (1 + cycles / terms[key])
