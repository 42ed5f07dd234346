"""Predicted against measured times: residuals, the share inside the band, rank of tilings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import combinations
from statistics import fmean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config.cases import MeasurementCase, load_measurements
from npusim.config.node_file import load_machine
from npusim.config.packaged import list_packaged
from npusim.config.problem import launch_problem
from npusim.config.tiling import word_of
from npusim.errors import SpecError, TilingError
from npusim.frames import frame
from npusim.kernels.declare.define import machine_of
from npusim.library import takes_sizes
from npusim.machines.node.node_result import NodeTiming
from npusim.machines.tracks import MEASURED_PIPES
from npusim.program.ir.walk import Templates
from npusim.program.timing.timing_result import TimingResult, method_text
from npusim.simulation.plan import plan_of, target_of
from npusim.simulation.request import LAUNCH, Request
from npusim.simulation.simulate import run_plan, simulate_program
from npusim.studies.workers.executors import results
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from npusim.config.cases import Interval
    from npusim.config.device import DeviceSpec
    from npusim.simulation.plan import Plan
    from npusim.simulation.run_result import RunData

MICROSECONDS = 1e6
#: Number of case names in one line of a report.
SHOWN = 4
#: Factors between measured and predicted that look like another unit.
THOUSAND = (400.0, 2500.0)
#: Relative rounding difference of two sums of the same times.
TINY = 1e-9
#: The part of a node's time with which a measured quantity is compared.
NODE_PARTS = MappingProxyType({f"{part}_us": f"{part}_s" for part in ("compute", "attention", "linear", "allreduce")})
#: Measured quantities that are sums of a node's operations, with the parts of each sum.
RAN_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"upload_us": ("upload",), "gpu_us": ("attention",), "cpu_us": ("cpu",), "off_upload_us": ("offload", "return")}
)


@dataclass(frozen=True, slots=True)
class Residual:
    """One quantity of one case; the error is signed, against the nearer end of a range.

    ``timing``: the kind of its latency.  ``is_floor``: the host determines it, not the device; such a quantity is
    shown, and counts neither in the summary nor in a band.  ``is_fitted``: a number of the device's file was fitted on
    this case or its group.  ``tile``: the tile of a case that names no tile, and whether npusim chose it.
    """

    name: str
    group: str | None
    quantity: str
    measured: Interval
    predicted: float
    relative_error: float
    band: float | None
    timing: str = "call"
    is_floor: bool = False
    is_fitted: bool = False
    tile: str = ""

    @property
    def unit_hint(self) -> str:
        """The likely cause of a factor near a thousand; empty for any other."""
        value = sum(self.measured) / 2
        if not self.quantity.endswith("_us") or not self.predicted:
            return ""
        for factor, unit in ((value / self.predicted, "nanoseconds"), (self.predicted / value, "milliseconds")):
            if THOUSAND[0] < factor < THOUSAND[1]:
                return (
                    f"the measured value differs by a factor of {factor:,.0f}: is it in {unit}? {self.quantity} "
                    "must be in microseconds"
                )
        return ""

    @property
    def is_inside(self) -> bool | None:
        """Whether the error is within the band; None if no band is stated, or the host decides."""
        return None if self.band is None or self.is_floor else abs(self.relative_error) <= self.band


@dataclass(frozen=True, slots=True)
class GroupRank:
    """Cases that differ only in tiling: rank correlation, and the cost of the predicted best."""

    kendall_tau: float
    regret: float


@dataclass(frozen=True)
class TimesReport:
    """All residuals of a file, the number of excluded cases, and the reasons why others have no prediction."""

    source: str
    residuals: tuple[Residual, ...]
    left_out: int
    groups: dict[str, GroupRank]
    methods: dict[str, str]  #: case -> method by which its time was computed
    faults: tuple[str, ...] = ()  #: why selected cases have no prediction, each reason once
    not_predicted: int = 0  #: number of selected cases without a prediction

    def to_pandas(self) -> Any:
        """Return the residuals as a `pandas.DataFrame`: a row a quantity, with ``measured_low`` and ``measured_high``
        as two columns.

        Raises `NpusimError` where pandas is not installed.
        """
        ranges = ("measured_low", "measured_high")
        rows = ((asdict(r), dict(zip(ranges, r.measured, strict=True))) for r in self.residuals)
        return frame({**{k: v for k, v in row.items() if k != "measured"}, **ends} for row, ends in rows)

    @property
    def counted(self) -> tuple[Residual, ...]:
        """The quantities that the device determines, not the host."""
        return tuple(r for r in self.residuals if not r.is_floor)

    @property
    def fitted(self) -> tuple[Residual, ...]:
        """The counted quantities of cases on which numbers of their device's file were fitted."""
        return tuple(r for r in self.counted if r.is_fitted)

    @property
    def median_abs_error(self) -> float:
        """Median of the absolute relative errors that count."""
        return median_error(self.counted)

    @property
    def untouched_abs_error(self) -> float:
        """The median error of cases on which nothing was fitted."""
        return median_error([r for r in self.counted if not r.is_fitted])

    @property
    def worst_abs_error(self) -> float:
        """Largest absolute relative error that counts."""
        return max((abs(r.relative_error) for r in self.counted), default=0.0)

    @property
    def within_band(self) -> float | None:
        """The share of the quantities with a band that are inside it; None if no quantity has a band."""
        judged = [r.is_inside for r in self.residuals if r.is_inside is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def is_outside(self) -> bool:
        """Whether any predicted quantity is outside its band."""
        return any(r.is_inside is False for r in self.residuals)

    @property
    def is_passed(self) -> bool:
        """Whether everything has a prediction and no quantity is outside its band."""
        return not self.faults and not self.is_outside


def median_error(residuals: Sequence[Residual]) -> float:
    """Return the median of absolute relative errors; 0 if there are no residuals."""
    return median(abs(r.relative_error) for r in residuals) if residuals else 0.0


def validate_times(
    path: Path,
    *,
    only: str | None = None,
    band: float | None = None,
    method: str = "auto",
    jobs: int = 1,
    cluster: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TimesReport:
    """Return predictions for a measurement file, compared with the measured values.

    npusim searches the folder of the measurements for a device that no packaged file describes.  The work is done by
    ``jobs`` processes, or by the workers of a ``cluster`` (as in `npusim.explore`); ``progress`` gets the number of
    finished cases, and the number of all cases.

    Raises `SpecError` if the file is wrong, ``only`` selects nothing, or no selected case can be predicted: its
    schedule, device or tiling does not exist, its device has no timing model.  If only some cannot, the report has the
    others and each reason once; no case is skipped without a reason.
    """
    file = load_measurements(path)
    texts = {c.name: (c.name, c.schedule, c.device) for c in file.cases}
    chosen = [c for c in file.cases if only is None or any(fnmatchcase(text, only) for text in texts[c.name])]
    if not chosen:
        names = ", ".join(c.name for c in file.cases[:8])
        raise SpecError(f"--only {only!r} selects none of {len(file.cases)} cases: {names}, …")
    tasks = [(case, band if file.band_of(case) is None else file.band_of(case)) for case in chosen]
    predict = partial(_outcome, Predictor(method, folder=path.parent))
    outcomes = results(predict, tasks, lambda reason: ((), "", reason), jobs=jobs, cluster=cluster, advance=progress)
    residuals, methods = list[Residual](), dict[str, str]()
    faults: dict[str, list[str]] = defaultdict(list)
    for case, (of_case, method_name, fault) in zip(chosen, outcomes, strict=True):
        residuals += of_case
        if method_name:
            methods[case.name] = method_name
        if fault:
            faults[fault].append(case.name)
    lines = tuple(_fault(names, text) for text, names in faults.items())
    if not residuals:
        raise SpecError("\n".join(lines))
    left_out, missed = len(file.cases) - len(chosen), sum(map(len, faults.values()))
    return TimesReport(file.source, tuple(residuals), left_out, _ranks(residuals), methods, lines, missed)


def _fault(names: Sequence[str], text: str) -> str:
    """Return the reason why cases cannot be predicted, and a remedy."""
    hint = "; exclude it with --only" if len(names) == 1 else "; exclude them with --only"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{plural(len(names), 'case')} {', '.join(names[:SHOWN])}{more}: {text}{hint}"


#: The predictions of a case's quantities, the computation of its time, and the reason why it has no prediction.
_Outcome = tuple[tuple["Residual", ...], str, str]


def _outcome(predictor: Predictor, task: tuple[MeasurementCase, float | None]) -> _Outcome:
    case, band = task
    try:
        residuals = tuple(_residual(predictor, case, quantity, band) for quantity, _ in case.measured.items())
    except (SpecError, TilingError) as error:
        text = str(error).rstrip(".").removeprefix(f"case {case.name}: ")
        return (), "", text.removesuffix("; exclude it with --only")
    return residuals, predictor.methods.get(case.name, ""), ""


def _residual(predictor: Predictor, case: MeasurementCase, quantity: str, band: float | None) -> Residual:
    measured, predicted = getattr(case.measured, quantity), predictor.quantity(case, quantity)
    error, is_floor = measured.relative_error(predicted), predictor.is_floor(case, quantity)
    is_fitted = bool({case.name, case.group} & predictor.fitted(case.device))
    tile, kind = predictor.tile(case), case.kind
    return Residual(case.name, case.group, quantity, measured, predicted, error, band, kind, is_floor, is_fitted, tile)


class Predictor:
    """Runs cases; equal cases are run once.

    ``changes`` are overrides for `load_machine`; ``folder`` is searched for devices that no packaged file describes.
    `retimed` gives the same runs with other numbers.
    """

    def __init__(
        self, method: str = "auto", changes: Mapping[str, object] | None = None, folder: Path | None = None
    ) -> None:
        self.method = method
        self.changes = changes
        self.folder = folder
        self.methods: dict[str, str] = {}
        self._done: dict[str, RunData] = {}
        self._templates: dict[str, Templates] = {}
        self._machines: dict[str, DeviceSpec] = {}
        self._fitted: dict[str, frozenset[str]] = {}
        self._programs: Predictor | None = None

    def machine(self, name: str) -> DeviceSpec:
        """Return a device or a node by name, read once."""
        if name not in self._machines:
            is_packaged = name.replace("-", "_") in list_packaged("hwconfigs")
            file = name if is_packaged or name.endswith((".yaml", ".yml")) else f"{name}.yaml"
            path = self.beside(file)
            self._machines[name] = load_machine(name if path == file else path, self.changes)
        return self._machines[name]

    def _set_as(self, case: MeasurementCase) -> DeviceSpec:
        """Return a case's device with the clock and the limit that its board was set to."""
        machine = self.machine(case.device)
        clock = None if case.clock_mhz is None else case.clock_mhz * 1e6
        held = {"held_clock_hz": clock, "held_power_w": case.power_watts}
        set_to = {key: value for key, value in held.items() if value is not None}
        key = f"{case.device} {set_to}"
        if set_to and key not in self._machines:
            self._machines[key] = load_machine(machine, set_to)
        return self._machines[key] if set_to else machine

    def beside(self, file: str) -> str:
        """Return the path of a file in the folder of the measurements, if it exists there, else the name itself."""
        path, colon, name = file.partition(":")
        if self.folder is None or not path.endswith((".yaml", ".yml", ".py")) or not (self.folder / path).is_file():
            return file
        return f"{self.folder / path}{colon}{name}"

    def retimed(self, changes: Mapping[str, object]) -> Predictor:
        """Return these runs with changed numbers: programs are unchanged, and their times are simulated again on
        request.

        For numbers that price operations; a number that changes the program (a capacity, a count of cores) needs a
        separate `Predictor`.
        """
        other = Predictor(self.method, {**(self.changes or {}), **changes}, self.folder)
        other._programs = self
        return other

    def fitted(self, name: str) -> frozenset[str]:
        """Return the names of the cases and groups on which numbers of a device's file were fitted."""
        if name not in self._fitted:
            facts = self.machine(name).facts()
            self._fitted[name] = frozenset(case for _, fact in facts for case in fact.fitted_on or ())
        return self._fitted[name]

    def quantity(self, case: MeasurementCase, quantity: str) -> float:
        """Return one predicted quantity of a case."""
        result, timing = self.result(case), self.timing(case)
        if quantity == "speedup":
            baseline = case.baseline_case()
            assert baseline is not None
            return self.latency_us(baseline) / self.latency_us(case)
        if quantity == "latency_us":
            return self.latency_us(case)
        if quantity == "core_us":
            return timing.cycles / timing.clock_hz * MICROSECONDS
        if quantity == "phase1_us" and isinstance(timing, TimingResult) and timing.account is not None:
            first = timing.account.phases[0].cycles / timing.clock_hz
            launch = result.device.clocked(result.program.flops).timed_launch()
            return (first + launch.kernel_overhead_s.value) * MICROSECONDS
        if quantity == "tokens_per_s" and (rows := result.problem.query_rows()):
            return rows / result.latency_us * MICROSECONDS
        if quantity == "tflops" and (flops := result.problem.dense_flops()):
            return flops / self.latency_us(case) / MICROSECONDS
        if isinstance(timing, NodeTiming) and quantity in NODE_PARTS:
            return float(getattr(timing, NODE_PARTS[quantity])) * MICROSECONDS
        if isinstance(timing, NodeTiming) and quantity in RAN_PARTS:
            return sum(timing.parts_s.get(p, 0.0) for p in RAN_PARTS[quantity]) * MICROSECONDS
        queue = MEASURED_PIPES.get(quantity)
        for uses in zip(*timing.queues, strict=True):
            if uses[0].queue == queue:
                return float(max(u.busy_cycles for u in uses) / timing.clock_hz * MICROSECONDS)
        raise SpecError(f"case {case.name}: npusim does not predict {quantity} for schedule {case.schedule}")

    def latency_us(self, case: MeasurementCase) -> float:
        """Return a case's latency in the form in which it was measured: for its kind of timing, and at least the host's
        time.
        """
        timing = self.timing(case)
        times, floor = timing.times_s, case.host_floor_us
        if case.kind not in times:
            raise SpecError(
                f"case {case.name}: timing: {case.kind}: the file of {case.device} does not state launch.task_s, "
                f"gap_s and host_issue_s; it allows {', '.join(times)}"
            )
        if floor is not None and case.kind == "call":
            return floor + timing.latency_s * MICROSECONDS - timing.launch_s * MICROSECONDS
        if floor is not None:
            return max(floor, (timing.cycles / timing.clock_hz + timing.stream_s) * MICROSECONDS)
        return times[case.kind] * MICROSECONDS

    def is_floor(self, case: MeasurementCase, quantity: str) -> bool:
        """Whether the host, and not the device, limits a latency; its floor shows this."""
        if quantity != "latency_us" or case.kind not in ("back_to_back", "call"):
            return False
        timing = self.timing(case)
        device = timing.cycles / timing.clock_hz * MICROSECONDS
        if case.kind == "call":
            return case.host_floor_us is not None and case.host_floor_us > device
        return self.latency_us(case) > (device + timing.stream_s * MICROSECONDS) * (1 + TINY)

    def timing(self, case: MeasurementCase) -> TimingResult | NodeTiming:
        """Return the time of a case's run; raise `SpecError` if its device has no timing model."""
        timing = self.result(case).timing
        if timing is None:
            raise SpecError(f"case {case.name}: {case.device} has no timing model")
        self.methods[case.name] = method_text(timing.method, timing.band)
        return timing

    def text(self, case: MeasurementCase) -> str:
        """Return the text that distinguishes a case's run from others."""
        launch = [getattr(case, name) for name in LAUNCH]
        chosen = f"{_tiling(case)} {case.is_open}"
        board = f"{case.device} {case.clock_mhz} {case.power_watts}"
        return f"{board} {case.schedule} {launch} {case.precision} {chosen} {case.workload!r} {case.start}"

    def tile(self, case: MeasurementCase) -> str:
        """Return the fields of the tile that a case's attention uses, if the case does not state them."""
        plan, run = self.plan(case), self.result(case)
        if (case.tiling and not plan.is_open) or "attention" not in run.problem.features or plan.machine.node:
            return ""
        kind, declared = type(run.tiling), dict(plan.tiling)
        fields = {n: v for n, v in run.tiling if n.startswith("block") or v != declared[n]}
        words = ",".join(f"{n}={word_of(kind, n, v)}" for n, v in fields.items() if n not in (case.tiling or {}))
        return f"{'auto' if plan.is_open else 'declared'}: {words}" if words else ""

    def result(self, case: MeasurementCase) -> RunData:
        """Return the run of a case."""
        text = self.text(case)
        if text not in self._done and self._programs is not None:
            run, machine = self._programs.result(case), self._set_as(case)
            templates = self._programs.templates(text)
            timing = simulate_program(run.program, machine, self.method, templates=templates)
            self._done[text] = replace(run, device=machine, timing=timing)
        elif text not in self._done:
            self._done[text] = run_plan(self.plan(case))
        return self._done[text]

    def templates(self, text: str) -> Templates:
        """Return the data that all timings of a finished run share."""
        if text not in self._templates:
            self._templates[text] = Templates(self._done[text].program)
        return self._templates[text]

    def plan(self, case: MeasurementCase) -> Plan:
        """Return the plan of a case's run."""
        machine = self._set_as(case)
        request = Request(
            self.beside(case.schedule),
            **{name: getattr(case, name) for name in LAUNCH},
            hw=machine,
            tiling=_tiling(case),
            precision=case.precision,
            numerics=False,
            method=self.method,
            trace_groups=(),
            l2=case.start,
            **self._what(case),
        )
        if case.is_open:
            return plan_of(request)
        # The author of a measured kernel chose its tile: fields that a case does not state have their declared values,
        # not the fastest ones.
        if case.tiling:
            schedule, device, _ = target_of(request, has_bits=False)
            named = schedule.tiled(_tiling(case)), schedule.precision(request.precision)
            follows = machine_of(device).by_tile(*named)
            # A preset's kernel applies to the schedules that have it; other schedules have their own kernels.
            if not schedule.kernel_refusal(follows.get("kernel")):
                request = replace(request, tiling={**_tiling(case), **follows})
        return replace(plan_of(request), is_open=False)

    def _what(self, case: MeasurementCase) -> dict[str, Any]:
        """Return the problem of a request: a workload by name, a workload that the case itself describes, or sizes of
        another kernel.
        """
        w = case.workload
        if w.name is not None:
            return {"workload": self.beside(w.name), **w.of_name()}
        if w.kind == "attention":
            return {"workload": w.written(), "seq_q": w.seq_q}
        return {"problem": launch_problem(w.named_sizes(), is_plain=takes_sizes(case.schedule), dtype=w.dtype)}


def _tiling(case: MeasurementCase) -> dict[str, int | float | str]:
    """Return a case's tiling; a node's attention is one of its fields."""
    chosen = {"attention": case.attention} if case.attention else {}
    return {**(case.tiling or {}), **chosen}


def _ranks(residuals: Sequence[Residual]) -> dict[str, GroupRank]:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in residuals:
        if r.group is not None and r.quantity == "latency_us":
            groups[r.group].append((sum(r.measured) / 2, r.predicted))
    return {name: GroupRank(kendall_tau(pairs), regret(pairs)) for name, pairs in groups.items() if len(pairs) > 1}


def kendall_tau(pairs: list[tuple[float, float]]) -> float:
    """Return (concordant - discordant) / all pairs; ties count as neither."""
    products = [(a - b) * (x - y) for (a, x), (b, y) in combinations(pairs, 2)]
    return fmean((product > 0) - (product < 0) for product in products)


def regret(pairs: list[tuple[float, float]]) -> float:
    """Return the measured time of the predicted best relative to the measured best, minus 1."""
    chosen = min(pairs, key=lambda p: p[1])[0]
    return chosen / min(p[0] for p in pairs) - 1
