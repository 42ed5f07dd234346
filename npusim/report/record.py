"""What is kept of a run: plain numbers, all that tables, comparisons and advice need.

A `RunRecord` is made from a live result (`record_of`) or read back from ``result.json``; whatever
prints or compares takes records, so that a run of last week is treated like one of this minute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim import __version__
from npusim.node.result import NodeTiming
from npusim.report.roofline import Roofline, roofline_of
from npusim.spread import row_sum_evidence

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.numerics.result import NumericEvent, NumericResult
    from npusim.run_result import RunResult
    from npusim.spread import Spread
    from npusim.timing.result import TimingResult

__all__ = [
    "ConstantRecord",
    "DeviceRecord",
    "EventRecord",
    "FiniteRecord",
    "NumericRecord",
    "OverlapRecord",
    "PresetRecord",
    "QueueRecord",
    "RunRecord",
    "SpreadRecord",
    "TimingRecord",
    "record_of",
    "units_of",
]

#: Key of cycles that no constant of a queue explains: transfers slowed by others on their link.
SHARED_LINKS = "links"

# Weakest first: where two constants share the blame, the weaker one names the basis.
_WEAKEST_FIRST = ("assumed", "fitted", "derived", "measured", "vendor")


@dataclass(frozen=True)
class DeviceRecord:
    """The device a run was for; ``digest`` is the hash of its file's content."""

    name: str
    digest: str
    clock_hz: float
    group_count: int
    link_bytes_per_s: dict[str, float]


@dataclass(frozen=True)
class QueueRecord:
    """Use of one queue of one core group, in cycles; or of a pipe (``is_pipe``) that queues share."""

    group: int
    queue: str
    busy_cycles: int
    operations: int
    end_cycles: int
    stalls: dict[str, int]
    is_pipe: bool = False


@dataclass(frozen=True)
class ConstantRecord:
    """A number of the device file, and the busy cycles of all queues that rest on it."""

    key: str
    basis: str
    cycles: float


@dataclass(frozen=True)
class OverlapRecord:
    """A node's kernels and collectives alone, and how far they run side by side (`NodeTiming`)."""

    attention_us: float
    linear_us: float
    allreduce_us: float
    closed_form_us: float
    exposed_us: float
    overlap_efficiency: float
    modes: tuple[str, ...]
    parts_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TimingRecord:
    """Predicted time: ``cycles`` and ``kernel_us`` without the launch, ``latency_us`` with it.

    ``overlap`` is there on nodes only, ``roofline`` where the device's matrix units are described;
    ``compulsory_bytes`` are those of inputs and outputs.  ``band``: the exact cycles lie within ``1 - band``
    to ``1 + band`` times ``cycles``; 0 where ``method`` is exact.
    """

    method: str
    cycles: int
    latency_us: float
    kernel_us: float
    launch_us: float
    operations: int
    flops: int
    bound_cycles: dict[str, int]
    link_bytes: dict[str, int]
    queues: tuple[QueueRecord, ...]
    constants: tuple[ConstantRecord, ...]
    overlap: OverlapRecord | None = None
    compulsory_bytes: int = 0
    roofline: Roofline | None = None
    band: float = 0.0


@dataclass(frozen=True)
class EventRecord:
    """The first place where something numeric happened: ``overflow`` or ``nan``."""

    kind: str
    operation: str
    queue: str
    phase: str
    block: str
    path: dict[str, int]
    row: int
    col: int

    def __str__(self) -> str:
        where = " ".join(f"{name}={index}" for name, index in self.path.items())
        place = f"{self.block} {where}".strip()
        return f"{self.kind} in {self.operation} ({place} row {self.row} col {self.col})"


@dataclass(frozen=True)
class NumericRecord:
    """What the computed bits look like beside float64; errors are None where an output is not finite.

    ``diagnosis`` has the figures of `npusim.numerics.diagnosis.Diagnosis` that have a meaning; None
    where none was asked for.  ``row_sums`` maps the orders of row sums to their basis.
    """

    sample: str
    rmse: float | None
    max_abs_error: float | None
    max_ulp: int | None
    ulp_histogram: dict[str, int]
    count: int
    nan_count: int
    inf_count: int
    nan_row_fraction: float
    overflow_counts: dict[str, int]
    nan_counts: dict[str, int]
    first_events: tuple[EventRecord, ...]
    arithmetic: dict[str, str]
    diagnosis: dict[str, float] | None = None
    row_sums: dict[str, str] | None = None


@dataclass(frozen=True)
class SpreadRecord:
    """The same bits under another arithmetic: distance, and the share of outputs that differ.

    Both are None where an output is not finite.
    """

    arithmetic: str
    rmse: float | None
    differing: float | None


@dataclass(frozen=True)
class FiniteRecord:
    """A schedule and preset that is finite on the sample where the run is not."""

    schedule: str
    precision: str
    rmse: float


@dataclass(frozen=True)
class PresetRecord:
    """What another preset of the schedule gave on the same rows; None where there is no figure."""

    precision: str
    relative_rmse: float | None
    latency_us: float | None


@dataclass(frozen=True)
class RunRecord:
    """One run; the keys of ``result.json`` are these fields.

    ``timing`` is None on a device described for its values only, ``numerics`` where no bits were
    computed; ``orders``: a node's partial sums added in other orders; ``ignored``: what of the
    workload's attention was left out.
    """

    npusim_version: str
    name: str
    schedule: str
    precision: str
    formats: dict[str, str]
    workload: str
    problem: dict[str, object]
    tiling: dict[str, object]
    device: DeviceRecord
    timing: TimingRecord | None
    numerics: NumericRecord | None
    spread: tuple[SpreadRecord, ...]
    notes: tuple[str, ...]
    orders: tuple[SpreadRecord, ...] = ()
    finite: tuple[FiniteRecord, ...] = ()
    ignored: tuple[str, ...] = ()
    presets: tuple[PresetRecord, ...] = ()


def record_of(result: RunResult) -> RunRecord:
    """Return what is kept of ``result``."""
    return RunRecord(
        npusim_version=__version__,
        name=result.name,
        schedule=result.schedule,
        precision=result.precision,
        formats=dict(result.formats),
        workload=result.workload,
        problem=result.problem.model_dump(mode="json"),
        tiling=result.tiling.model_dump(mode="json"),
        device=_device(result.device),
        timing=None if result.timing is None else _timing(result, result.timing),
        numerics=None if result.numerics is None else _numerics(result.numerics, result.device),
        spread=_spreads(result.spread),
        orders=_spreads(result.orders),
        notes=tuple(result.notes),
        finite=tuple(FiniteRecord(f.schedule, f.precision, f.rmse) for f in result.finite),
        ignored=tuple(result.ignored),
        presets=tuple(
            PresetRecord(p.precision, p.relative_rmse, p.latency_us) for p in result.presets
        ),
    )


def _spreads(found: tuple[Spread, ...]) -> tuple[SpreadRecord, ...]:
    return tuple(SpreadRecord(s.arithmetic, _finite(s.rmse), _finite(s.differing)) for s in found)


def _device(device: DeviceSpec) -> DeviceRecord:
    return DeviceRecord(
        name=device.name,
        digest=device.digest(),
        clock_hz=float(device.clock_hz.value),
        group_count=device.group_count.value,
        link_bytes_per_s={
            name: float(link.bytes_per_s.value)
            for name, link in device.links.items()
        },
    )


def _timing(result: RunResult, timing: TimingResult) -> TimingRecord:
    queues = tuple(
        QueueRecord(group, u.name, u.busy_cycles, u.operations, u.end_cycles, dict(u.stalls), u.is_pipe)
        for group, uses in enumerate(timing.queues)
        for u in uses
    )
    return TimingRecord(
        method=timing.method,
        cycles=timing.cycles,
        latency_us=timing.latency_s * 1e6,
        kernel_us=timing.cycles / timing.clock_hz * 1e6,
        launch_us=timing.launch_s * 1e6,
        operations=timing.operations,
        flops=result.program.flops,
        bound_cycles=dict(timing.bound_cycles),
        link_bytes=dict(timing.link_bytes),
        queues=queues,
        constants=_constants(result.device, timing, sum(q.busy_cycles for q in units_of(queues))),
        compulsory_bytes=timing.compulsory_bytes,
        roofline=roofline_of(result),
        band=timing.band,
        overlap=_overlap(timing) if isinstance(timing, NodeTiming) else None,
    )


def _overlap(timing: NodeTiming) -> OverlapRecord:
    return OverlapRecord(
        attention_us=timing.attention_s * 1e6,
        linear_us=timing.linear_s * 1e6,
        allreduce_us=timing.allreduce_s * 1e6,
        closed_form_us=timing.closed_form_s * 1e6,
        exposed_us=timing.exposed_s * 1e6,
        overlap_efficiency=timing.overlap_efficiency,
        modes=timing.modes,
        parts_us={name: seconds * 1e6 for name, seconds in timing.parts_s.items()},
    )


def units_of(queues: tuple[QueueRecord, ...]) -> tuple[QueueRecord, ...]:
    """Return what executes: the queues, or the pipes if they share some (then a queue only issues)."""
    return tuple(q for q in queues if q.is_pipe) or queues


def _constants(
    device: DeviceSpec, timing: TimingResult, busy_cycles: int
) -> tuple[ConstantRecord, ...]:
    """Return the constants behind the busy cycles, the largest share first."""
    basis = {key: fact.basis for key, fact in device.facts()}
    found = [
        ConstantRecord(key, basis.get(key, "unknown"), cycles)
        for key, cycles in timing.term_cycles.items()
    ]
    stretched = busy_cycles - sum(c.cycles for c in found)
    if stretched > 0:
        of_links = {basis.get(f"links.{name}.bytes_per_s") for name in device.links}
        weakest = next((b for b in _WEAKEST_FIRST if b in of_links), "unknown")
        found.append(ConstantRecord(SHARED_LINKS, weakest, stretched))
    return tuple(sorted(found, key=lambda c: (-c.cycles, c.key)))


def _numerics(numerics: NumericResult, device: DeviceSpec) -> NumericRecord:
    error = numerics.error
    return NumericRecord(
        sample=numerics.sample,
        rmse=_finite(error.rmse),
        max_abs_error=_finite(error.max_abs_error),
        max_ulp=error.max_ulp,
        ulp_histogram=dict(error.ulp_histogram),
        count=int(error.count),
        nan_count=int(error.nan_count),
        inf_count=int(error.inf_count),
        nan_row_fraction=float(error.nan_row_fraction),
        overflow_counts=dict(numerics.overflow_counts),
        nan_counts=dict(numerics.nan_counts),
        first_events=tuple(_event(event) for event in numerics.first_events),
        arithmetic=dict(numerics.arithmetic),
        row_sums=row_sum_evidence(numerics, device),
        diagnosis=None if numerics.diagnosis is None else numerics.diagnosis.figures(),
    )


def _event(event: NumericEvent) -> EventRecord:
    return EventRecord(
        kind=event.kind,
        operation=event.operation,
        queue=event.queue,
        phase=event.phase,
        block=event.block,
        path=dict(event.path),
        row=event.row,
        col=event.col,
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
