"""Bits and cycles of one run, together."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from npusim.config.bands import launch_kind, validated
from npusim.config.device_tables import ESTIMATED
from npusim.errors import SpecError
from npusim.kernels.triton import is_launch
from npusim.late_methods import dataclass
from npusim.program.timing.timing_result import ConstantRecord, OverlapRecord, Roofline, units_of
from npusim.simulation.naming import digest_of, folder_of, inputs_of, sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.config.bands import Validated
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.timing.timing_result import TimingResult
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Asked


#: Key of cycles that no constant of a queue explains: other transfers on the same link slow down a transfer.
SHARED_LINKS = "links"

# Bases, the weakest first: if two constants determine a cost, its basis is the weaker of the two.
_WEAKEST_FIRST = ("assumed", "fitted", "derived", "measured", "vendor")


@dataclass(frozen=True)
class PresetOutcome:
    """The result of a preset of the schedule, either the run's own or another; its error covers the rows
    `RunData.compared`.

    ``relative_rmse`` is None if the output is not finite, ``latency_us`` on a device without a time. ``standard_error``
    is the relative standard error of the ratio of this error to the run's, estimated from the differences between rows.
    """

    precision: str
    relative_rmse: float | None
    latency_us: float | None
    standard_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Outputs under another arithmetic, compared with the run's outputs, over the rows `RunData.compared` of one head.

    ``arithmetic`` is the registry name of the other arithmetic, or ``row sums in <order>``.  ``rmse`` is the relative
    Frobenius distance, ``differing`` the share of outputs whose bits differ; both are None if some outputs of the other
    arithmetic are not finite. ``standard_error``: the relative standard error of ``rmse``, estimated from the
    differences between rows.
    """

    arithmetic: str
    rmse: float | None
    differing: float | None
    standard_error: float = 0.0


@dataclass(frozen=True, slots=True)
class FiniteChoice:
    """A schedule and preset whose output is finite, with its relative RMSE against float64."""

    schedule: str
    precision: str
    rmse: float


@dataclass(frozen=True, slots=True)
class ComputedBits:
    """Bits of a run with their notes, in the fields of `RunData`; ``inputs`` None: the plan's."""

    numerics: NumericResult | None = None
    spread: tuple[Spread, ...] = ()
    orders: tuple[Spread, ...] = ()
    finite: tuple[FiniteChoice, ...] = ()
    inputs: str | None = None
    notes: tuple[str, ...] = ()
    compared: str = ""


@dataclass(frozen=True, repr=False)
class RunData:
    """Bits and cycles of one schedule on one device for one problem.

    ``timing`` is set on every device whose file has the numbers for it, ``numerics`` unless it was switched off.
    ``inputs`` names the origin of Q, K and V, ``spread`` describes the dependence of the bits on assumed arithmetic,
    ``orders`` the results of other collectives and row blocks of a node for the same partial sums, ``finite`` the
    alternatives that are finite on the same sample if the output is not finite, ``presets`` the results of other
    presets; ``notes`` are notes for the reader, ``ignored`` the features of the workload's attention that were left out
    on request.  ``asked`` are the options that state this run on a command line (None: no command line can state it).
    ``digest`` is a hash of everything that affects the prediction, ``folder`` the name of a folder that no other run
    has.
    """

    name: str
    schedule: str
    precision: str
    formats: dict[str, str]
    device: DeviceSpec
    workload: str
    inputs: str
    problem: AnyProblem
    tiling: Tiling
    program: TileProgram
    timing: TimingResult | None
    numerics: NumericResult | None
    spread: tuple[Spread, ...] = ()
    orders: tuple[Spread, ...] = ()
    finite: tuple[FiniteChoice, ...] = ()
    notes: tuple[str, ...] = field(default=())
    ignored: tuple[str, ...] = ()
    presets: tuple[PresetOutcome, ...] = ()
    compared: str = ""
    asked: Asked | None = None
    digest: str = ""
    folder: str = ""

    @property
    def cycles(self) -> int:
        """Time of the cores in cycles of the device clock, without the launch."""
        return self._timed().cycles

    @property
    def latency_us(self) -> float:
        """The call in microseconds, launch included."""
        return self._timed().latency_s * 1e6

    def _timed(self) -> TimingResult:
        if self.timing is None:
            raise SpecError(f"{self.device.name} has no timing model yet: this run has values only")
        return self.timing

    @property
    def output(self) -> Any:
        """Output tensor (batch, heads, seq_q, value_head_dim), or None without numerics."""
        return None if self.numerics is None else self.numerics.output

    def __repr__(self) -> str:
        """Return the run and its result, on one line."""
        time = "" if self.timing is None else f", {self.cycles:,} cycles, {self.latency_us:,.2f} us"
        rmse = None if self.numerics is None else self.numerics.error.rmse
        is_lost = self.numerics is not None and rmse is None
        error = ", output not finite" if is_lost else "" if rmse is None else f", relative RMSE {rmse:.2e}"
        return f"<{type(self).__name__} {self.name} on {self.device.name}, {self.precision}{time}{error}>"

    @property
    def tflops(self) -> float:
        """Useful operations, without those of masked pairs, per second of the call, in 1e12."""
        return self.program.flops / self._timed().latency_s / 1e12


def result_of(
    plan: Plan,
    program: TileProgram,
    timing: TimingResult | None,
    bits: ComputedBits,
    notes: tuple[str, ...],
    presets: tuple[PresetOutcome, ...] = (),
) -> RunData:
    """Return the result of the plan."""
    request, problem = plan.request, plan.problem
    title = request.title(plan.workload)
    if plan.machine.node is not None:
        name = f"{request.schedule}-{plan.device.name}-{title}"
    else:
        name = problem.run_name(plan.schedule.name, title, sizes_of(plan))
    result = RunData(
        name=name,
        schedule=request.schedule,
        precision=plan.precision.name,
        formats=plan.precision.formats(),
        device=plan.device,
        workload=title,
        inputs=inputs_of(plan) if bits.inputs is None else bits.inputs,
        problem=problem,
        tiling=plan.tiling,
        program=program,
        timing=timing,
        numerics=bits.numerics,
        spread=bits.spread,
        orders=bits.orders,
        finite=bits.finite,
        notes=(*notes, *_cache_note(plan), *problem.notes(), *bits.notes),
        ignored=plan.ignored,
        presets=presets,
        compared=bits.compared,
        asked=request.asked(),
        digest=digest_of(plan),
        folder=folder_of(plan),
    )
    return with_evidence(result)


def _cache_note(plan: Plan) -> tuple[str, ...]:
    """Return the note on a cache of latents from which K and V are read in expanded form."""
    problem = plan.problem.attention
    note = "" if problem is None or plan.tensors is not None else plan.workload.expanded_cache(problem)
    return (note,) if note else ()


def with_evidence(result: RunData) -> RunData:
    """Return a run with the evidence for its time and its row sums, taken from the device's file, the roofline and
    measurements.
    """
    timing, bits = result.timing, result.numerics
    return replace(
        result,
        timing=None if timing is None else _completed(result, timing),
        numerics=None if bits is None else _stated(bits, result.device),
    )


def _stated(bits: NumericResult, device: DeviceSpec) -> NumericResult:
    arithmetic = arithmetic_evidence(bits.arithmetic, device)
    return replace(bits, arithmetic=arithmetic, row_sums=row_sum_evidence(bits.row_sum_orders, device))


def _completed(result: RunData, timing: TimingResult) -> TimingResult:
    """Return a run's time with those numbers that do not come from the simulation."""
    uses = timing.uses_of_groups()
    return replace(
        timing,
        flops=result.program.flops,
        uses=uses,
        constants=_constants(result.device, timing, sum(q.busy_cycles for q in units_of(uses))),
        overlap=timing if isinstance(timing, OverlapRecord) else None,
        roofline=roofline_of(result),
        validated=expected_errors(result.device, result.schedule, result.problem, result.tiling, result.program),
    )


def expected_errors(
    device: DeviceSpec, schedule: str, problem: AnyProblem, tiling: Tiling, program: TileProgram
) -> Validated:
    """Return the errors of predicted times of similar programs."""
    is_estimated, is_spilled = any(f"registers {ESTIMATED}" in note for note in program.notes), program.is_spilled
    launch = launch_kind(has_products=program.flops > 0, is_spilled=is_spilled) if is_launch(schedule) else ""
    return validated(device, schedule, problem, tiling, launch=launch, is_estimated=is_estimated, is_spilled=is_spilled)


def _constants(device: DeviceSpec, timing: TimingResult, busy_cycles: int) -> tuple[ConstantRecord, ...]:
    """Return the constants that determine the busy cycles, the largest share first."""
    basis = {key: fact.basis for key, fact in device.facts()}
    constants = [ConstantRecord(key, basis.get(key, "unknown"), cycles) for key, cycles in timing.term_cycles.items()]
    stretched = busy_cycles - sum(c.cycles for c in constants)
    if stretched > 0:
        of_links = {basis.get(f"links.{name}.bytes_per_s") for name in device.links}
        weakest = next((b for b in _WEAKEST_FIRST if b in of_links), "unknown")
        constants.append(ConstantRecord(SHARED_LINKS, weakest, stretched))
    return tuple(sorted(constants, key=lambda c: (-c.cycles, c.key)))


def roofline_of(result: RunData) -> Roofline | None:
    """Return a run's position under the roofline; None for nodes, copies, and devices without matrix unit or time."""
    timing, device = result.timing, result.device
    if timing is None or not (timing.cycles and timing.compulsory_bytes):
        return None
    device = device.clocked(result.program.flops)
    peak = device.peak_flops_per_s(result.formats.get("operands") or str(getattr(result.problem, "dtype", "")))
    moved = timing.link_bytes.get("hbm", 0)
    if not (peak and result.program.flops and moved):
        return None
    return Roofline(
        intensity=result.program.flops / timing.compulsory_bytes,
        moved_intensity=result.program.flops / moved,
        peak_flops_per_s=peak,
        memory_bytes_per_s=device.link("hbm").rate,
        attained_flops_per_s=result.program.flops * timing.clock_hz / timing.cycles,
    )


def row_sum_evidence(orders: Iterable[str], device: DeviceSpec) -> dict[str, str]:
    """Return ``{order of row sums: basis in the device's file}``; the basis is ``chosen`` for an order of another
    device.
    """
    fact = device.row_sum
    return {order: fact.basis if fact is not None and fact.value == order else "chosen" for order in orders}


def arithmetic_evidence(arithmetic: Mapping[str, str], device: DeviceSpec) -> dict[str, str]:
    """Return the matrix arithmetics with their evidence, which is ``measured`` if the device's file says so.

    An arithmetic whose name states its parameters (``stated``) has the basis that the file states, whatever it is.
    """
    bases = {str(choice.value): choice.basis for choice in device.arithmetic_choices.values()}
    return {
        name: bases[name] if name in bases and (bases[name] == "measured" or evidence == "stated") else evidence
        for name, evidence in arithmetic.items()
    }
