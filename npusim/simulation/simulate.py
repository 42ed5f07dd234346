"""The one place where numerics and timing meet: a request in, a `RunData` out."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from npusim.config.outside import with_origin
from npusim.errors import TilingError
from npusim.kernels.declare.define import machine_of
from npusim.kernels.triton import is_launch
from npusim.late_methods import dataclass
from npusim.program.ir.check import check, take_all_by_shape
from npusim.program.timing import auto, method_named
from npusim.program.timing.precompile import compiled_before, compiled_meanwhile
from npusim.program.timing.stream import Streams
from npusim.program.timing.summary import check_sanity
from npusim.program.timing.trace_head import first_spans
from npusim.simulation.chosen_tile import program_of, remembered, starting_with
from npusim.simulation.evaluation import bits_of, compared_variants
from npusim.simulation.figures import figures
from npusim.simulation.other_process import done_apart
from npusim.simulation.plan import Plan, estimate, plan_of, refuse_beyond, traced_groups, without_effect
from npusim.simulation.robustness import (
    ROUNDED,
    Compared,
    arithmetic_uncertainty,
    assumed_roundings,
    assumed_variants,
    finite_choices,
    rows_under,
)
from npusim.simulation.run_result import (
    ComputedBits,
    PresetOutcome,
    RunData,
    arithmetic_evidence,
    result_of,
    row_sum_evidence,
)
from npusim.simulation.tensor_files import inputs_notes, padding_note
from npusim.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.ir.walk import Templates
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.program.timing.timing_result import TimingResult
    from npusim.simulation.request import Groups, Request


#: Number of output rows of all heads above which a single run takes almost half a gigabyte.
LONG_ROWS = 1 << 23

Result = TypeVar("Result")


def run_request(request: Request) -> RunData:
    """Predict bits and cycles of a request; `npusim.run` describes it."""
    return run_plan(plan_of(request))


def run_plan(plan: Plan) -> RunData:
    """Predict bits and cycles of one plan, on a device or a node."""
    r, parts = plan.request, parts_of(plan)
    refuse_beyond(r.limit_s, parts.estimate(plan))
    groups = traced_groups(r.trace_groups, plan.device.group_count.value)
    with ExitStack() as stack:
        is_compiling = stack.enter_context(_compiled(plan))
        plan, program = program_of(plan)
        if r.progress is not None:
            r.progress(0.0)
        built = BuiltPlan(plan, program)
        built.check()
        is_much = r.numerics and r.presets and plan.schedule.beside and not is_compiling
        others = stack.enter_context(done_apart(partial(_others, plan, program))) if is_much else None
        timing = built.timing(groups, r.progress, r.timeline)
        bits = parts.bits(plan, program, others) if r.numerics else parts.no_bits
        presets = _beside(plan, bits.numerics, timing, others) if r.presets and bits.numerics else ()
    notes = (
        *parts.notes(plan, program, bits.numerics, timing),
        *_without_effect(built, timing),
        *_other_layers(plan, timing),
    )
    return result_of(plan, program, timing, bits, notes, presets)


def _compiled(plan: Plan) -> AbstractContextManager[object]:
    """Return a context in which another process compiles code that a run will need."""
    r, device, problem = plan.request, plan.device, plan.problem
    if not device.is_timed or r.method == "des" or "device" not in plan.features:
        return nullcontext()
    words = (r.schedule, device.name if r.hw is None else r.hw, plan.precision.name, getattr(problem, "dtype", ""))
    if r.numerics and all(isinstance(word, str) for word in words):
        return compiled_meanwhile("npusim.simulation.warm", *map(str, words))
    is_long = problem.output_rows() > LONG_ROWS
    return compiled_before("npusim.simulation.warm") if is_long else nullcontext()


def _without_effect(built: BuiltPlan, timing: TimingResult | None) -> Iterator[str]:
    """Yield a note for each changed number without effect, and one for the clock, if products have a separate clock."""
    if timing is None:
        return
    plan, clock = built.plan, (built.plan.request.overrides or {}).get("clock_hz")
    if clock is not None and plan.device.products_clock_hz is not None and built.program.flops:
        yield f"-C clock_hz={clock}: the clock of a run with products is products_clock_hz; change that key"

    def seconds_on(device: DeviceSpec) -> float | None:
        _, program = plan.schedule.fitted(plan.problem, plan.tiling, device, plan.precision)
        other = BuiltPlan(replace(plan, device=device), starting_with(program, device, plan.request.l2))
        timing = other.timing(progress=plan.request.progress)
        return None if timing is None else timing.latency_s

    yield from without_effect(plan, timing.latency_s, seconds_on)


def _other_layers(plan: Plan, timing: TimingResult | None) -> tuple[str, ...]:
    """Return a note on the time of attention in a model's layers of the other kind, and on the mean time over all
    layers.
    """
    r, kinds = plan.request, plan.workload.kinds
    if (
        "device" not in plan.features
        or r.problem is not None
        or r.kind is not None
        or timing is None
        or len(kinds) == 1
    ):
        return ()
    of_run, other = kinds
    problem = plan.workload.problem(**{**r.sizes(), "kind": other}) if r.tensors is None else plan.problem
    if problem == plan.problem:
        return ()
    try:
        built = replace(r, kind=other, numerics=False, trace_groups=(), presets=False)
        times = timing.latency_s, run_request(built).timing
    except TilingError as error:
        why = f"the {kinds[other]} {other} layers cannot be simulated: {error}"
        return (f"layers: this is one of {kinds[of_run]} {of_run} layers; {why}",)
    assert times[1] is not None
    each = {of_run: times[0], other: times[1].latency_s}
    total = sum(kinds[kind] * seconds for kind, seconds in each.items())
    listed = ", ".join(f"{kinds[kind]} {kind} of {seconds * 1e6:,.2f} us" for kind, seconds in each.items())
    return (
        f"layers: {listed}; attention of all {sum(kinds.values())}: {total * 1e3:,.3f} ms (--kind {other} runs it)",
    )


@dataclass(frozen=True)
class BuiltPlan:
    """A plan whose tiling fits, and its program."""

    plan: Plan
    program: TileProgram

    def check(self) -> None:
        """Raise an error if the program has a fault: a race, or another fault of a run.

        A proof that there is none is stored in the cache folder; its key is everything from which the program is built.
        """

        def proved() -> bool:
            with with_origin(self.plan.schedule.origin):
                return check(self.program, self.plan.machine.flags)

        if not self._stored("proof", (), proved):
            take_all_by_shape(self.program)

    def latency_us(self) -> float | None:
        """Return the time of the program in microseconds, after a check; None on a device without times.

        Times are stored, as the proof is.
        """

        def timed() -> float | None:
            timing = self.timing()
            return None if timing is None else timing.latency_s * 1e6

        self.check()
        return self._stored("latency", (self.plan.request.method, self.program.l2), timed)

    def _stored(self, kind: str, more: tuple[object, ...], make: Callable[[], Result]) -> Result:
        """Return the result of ``make``, which depends on the program and on ``more``, stored by `remembered`."""
        plan, program, tiling = self.plan, self.program, self.plan.tiling
        # the program is built from more than the fields of a plan
        if plan.machine.node is not None or is_launch(plan.schedule.name):
            return make()
        blocks = [(phase.name, len(phase.blocks), phase.dealt) for phase in program.phases]
        call = plan.problem, plan.precision, tiling, sorted(tiling.model_fields_set), program.rings, blocks, more
        result: Result = remembered(kind, plan.schedule, plan.device, call, make)
        return result

    def timing(
        self,
        trace_groups: Groups = (),
        progress: Callable[[float], None] | None = None,
        window: tuple[float, float] | None = None,
    ) -> TimingResult | None:
        """Return the time of the program as `simulate_program`; None on a device without times."""
        return parts_of(self.plan).timing(self.plan, self.program, trace_groups, progress, window)


class RunParts(Protocol):
    """The parts of a run that differ between a device and a node; `run_plan` has the common part."""

    #: The bits of a run that computes no bits.
    no_bits: ComputedBits

    def estimate(self, plan: Plan) -> Mapping[str, float]:
        """Return the estimated seconds of the run itself by purpose, if the run may be refused because it is long."""

    def timing(
        self,
        plan: Plan,
        program: TileProgram,
        groups: Groups,
        progress: Callable[[float], None] | None,
        window: tuple[float, float] | None,
    ) -> TimingResult | None:
        """Return the time of a plan's program as `simulate_program`; None without times."""

    def bits(self, plan: Plan, program: TileProgram, others: Callable[[], Others] | None) -> ComputedBits:
        """Return the bits of a plan's program; ``others``: as for `evaluate_plan`."""

    def notes(
        self, plan: Plan, program: TileProgram, bits: NumericResult | None, timing: TimingResult | None
    ) -> Iterable[str]:
        """Return notes on a run's program, bits and time."""


def parts_of(plan: Plan) -> RunParts:
    """Return the parts of a plan's run."""
    if plan.machine.node is None:
        return DeviceParts()
    from npusim.simulation.node_run import NodeParts

    return NodeParts()


class DeviceParts:
    """The parts of a run on one device; see `RunParts`."""

    no_bits = ComputedBits()

    def estimate(self, plan: Plan) -> Mapping[str, float]:
        """Return the estimate of program, time and bits."""
        r = plan.request
        return estimate(plan.problem, plan.tiling, r.method, (r.rows, r.heads) if r.numerics else None)

    def timing(
        self,
        plan: Plan,
        program: TileProgram,
        groups: Groups,
        progress: Callable[[float], None] | None,
        window: tuple[float, float] | None,
    ) -> TimingResult | None:
        """Return the time of the program; None on a device without times."""
        if not plan.device.is_timed:
            return None
        return simulate_program(program, plan.device, plan.request.method, groups, progress, window)

    def bits(self, plan: Plan, program: TileProgram, others: Callable[[], Others] | None) -> ComputedBits:
        """Return the bits, with their uncertainty and finite alternatives."""
        return evaluate_plan(plan, program, others)

    def notes(
        self, plan: Plan, program: TileProgram, bits: NumericResult | None, timing: TimingResult | None
    ) -> Iterable[str]:
        """Return the program's notes, and notes on the timeline and on assumed arithmetic."""
        return _notes(program, plan, bits, timing)


@dataclass(frozen=True)
class Others:
    """Results of a run's other programs for `compared_rows`: of its variants, and of other presets with their latencies
    in us.
    """

    variants: dict[str, NDArray[Any]]
    presets: tuple[tuple[str, NDArray[Any], float | None], ...]


def _others(plan: Plan, program: TileProgram) -> Others:
    """Return the function for results that another process computes while this process computes the run's."""
    at, count, variants = compared_variants(plan, program, assumed_variants(program, plan))
    return Others(variants, tuple(_presets(plan, at, count)))


def evaluate_plan(plan: Plan, program: TileProgram, others: Callable[[], Others] | None = None) -> ComputedBits:
    """Return the bits of a program, with their uncertainty and finite alternatives.

    ``others`` returns variants that another process computes.
    """
    r = plan.request
    if not plan.problem.has_bits:
        return ComputedBits()
    variants = None if others else assumed_variants(program, plan)
    bits = bits_of(
        plan, program, rows=r.rows, heads=r.heads, diagnose=r.diagnose, progress=r.progress, variants=variants
    )
    if others:
        bits = replace(bits, variants=others().variants)
    spread, finite = arithmetic_uncertainty(bits), finite_choices(bits, plan)
    compared = str(Compared.of(bits)) if bits.rows else ""
    padding = (padding_note(p, bits),) if r.padding and (p := plan.problem.attention) else ()
    notes = (*padding, *inputs_notes(program, plan.tensors, bits))
    bits = replace(bits, against=plan.schedule.against)
    return ComputedBits(bits, spread, finite=finite, compared=compared, notes=notes)


def _beside(
    plan: Plan, bits: NumericResult, own_timing: TimingResult | None, others: Callable[[], Others] | None
) -> tuple[PresetOutcome, ...]:
    """Return the results of the run's precision and of the schedule's other presets, with the same matrix arithmetic.

    Their errors cover the same rows (`Compared`), a sample of the run's rows.
    """
    if not bits.rows:
        return ()
    compared = Compared.of(bits)
    presets = list(others().presets if others else _presets(plan, compared.at, len(compared.rows)))
    if presets:
        presets.insert(0, (plan.precision.name, compared.rows, _in_us(own_timing)))
    errors = ((name, *compared.rmse(rows, plan), latency_us) for name, rows, latency_us in presets)
    return tuple(PresetOutcome(name, rmse, latency_us, error) for name, rmse, error, latency_us in errors)


def _presets(plan: Plan, at: BlockRows, count: int) -> Iterator[tuple[str, NDArray[Any], float | None]]:
    """Yield the schedule's other presets: name, result for the same rows, and latency in us."""
    arithmetic = getattr(plan.precision, "arithmetic", "")

    def built(name: str) -> TileProgram:
        preset = f"{name},arithmetic={arithmetic}" if arithmetic else name
        return replace(plan, precision=plan.schedule.precision(preset)).program()

    others = (name for name in plan.schedule.beside if name != plan.precision.name)
    # presets that do not fit with the run's tile are omitted
    for name, program in figures(others, built, (TilingError,)):
        timing = None
        if plan.device.is_timed:
            timing = simulate_program(program, plan.device, plan.request.method)
        yield name, rows_under(program, plan, at, count), _in_us(timing)


def _in_us(timing: TimingResult | None) -> float | None:
    return None if timing is None else timing.latency_s * 1e6


def simulate_program(
    program: TileProgram,
    device: DeviceSpec,
    method: str,
    trace_groups: Groups = (),
    progress: Callable[[float], None] | None = None,
    window: tuple[float, float] | None = None,
    templates: Templates | None = None,
) -> TimingResult:
    """Return the time of a program by a named method, checked for sanity.

    ``trace_groups`` may be ``"last"``: the core group that ends last.  A run that is too long for a complete trace has
    the operations of its beginning, up to the end of ``window`` (us).  ``templates``: the templates of the program from
    a device on which it was timed before.

    Raises `SpecError` for an unknown method, `ProgramError` for an impossible result.
    """
    simulate, quickly = method_named(method), method_named("auto")
    if machine_of(device).node is not None:
        from npusim.simulation.node_run import time_on_node

        return time_on_node(program, device, method, trace_groups)
    streams = Streams(program, device, templates)
    more = {"progress": progress} if method == "des" else {}
    known, groups = None, trace_groups
    if isinstance(groups, str) and method == "des":  # this is slow, and therefore done once for all
        known = simulate(program, device, trace_groups=range(device.group_count.value), streams=streams, **more)
        groups = _last_group(known)
        known = replace(known, spans=tuple(s for s in known.spans if s.group in groups))
    elif isinstance(groups, str):
        quick = quickly(program, device, streams=streams)
        groups = _last_group(quick)
        known = quick if method == "auto" and not auto.keeps_spans(streams) else None
    result = known or simulate(program, device, trace_groups=groups, streams=streams, **more)
    check_sanity(result)
    if not groups or result.spans or not result.operations:
        return result
    until = None if window is None else round(window[1] * 1e-6 * result.clock_hz)
    spans, traced = first_spans(streams, groups, until)
    return replace(result, spans=spans, traced_cycles=traced)


def _last_group(timing: TimingResult) -> tuple[int, ...]:
    return (0 if timing.account is None else timing.account.group,)


def _notes(
    program: TileProgram, plan: Plan, bits: NumericResult | None, timing: TimingResult | None
) -> tuple[str, ...]:
    notes, device = [*program.notes, *filter(None, (plan.reading,))], plan.device
    if timing and timing.traced_cycles is not None:
        traced = format_duration(timing.traced_cycles / timing.clock_hz)
        notes.append(f"timeline: the first {traced}; --timeline 0:END extends it to END us")
    if bits is not None:
        notes += [
            f"matrix arithmetic {name} is assumed: no public source states it bit by bit"
            for name, evidence in arithmetic_evidence(bits.arithmetic, device).items()
            if evidence == "assumed"
        ]
        notes += [
            f"order of row sums {order} is assumed: {device.row_sum.source}"
            for order, evidence in row_sum_evidence(bits.row_sum_orders, device).items()
            if device.row_sum is not None and evidence == "assumed"
        ]
        notes += [f"{ROUNDED[n]} rounded {c.value}: assumed, {c.source}" for n, c in assumed_roundings(plan)]
    return tuple(notes)
