"""What is kept of a run: plain numbers, all that tables, comparisons and advice need.

A `RunRecord` is made from a live result (`record_of`) or read back from ``result.json``; whatever
prints or compares takes records, so that a run of last week is treated like one of this minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from npusim import __version__
from npusim.config.device_tables import Validated, validated
from npusim.node.result import NodeTiming
from npusim.numerics.result import ErrorSummary, NumericEvent
from npusim.report.roofline import Roofline, roofline_of
from npusim.simulation.result import PresetOutcome
from npusim.simulation.robustness import FiniteChoice, Spread, row_sum_evidence
from npusim.timing.result import Account, QueueUse

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.numerics.result import NumericResult
    from npusim.simulation.result import RunData
    from npusim.timing.result import TimingResult

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
    """Predicted time: ``cycles`` and ``core_us`` without the launch, ``latency_us`` with it.

    ``times_us`` is the time as each kind of measurement has it (`npusim.timing.result.KINDS`).

    ``overlap`` is there on nodes only, ``roofline`` where the device's matrix units are described;
    ``compulsory_bytes`` are those of inputs, and outputs that leave L2.  ``band``: the exact cycles lie within
    ``1 - band`` to ``1 + band`` times ``cycles``; 0 where ``method`` is exact.  ``account`` is that of the core group
    that ends last, ``validated`` how far such times were from measured ones; None in files of before they were kept.
    """

    method: str
    cycles: int
    latency_us: float
    launch_us: float
    operations: int
    flops: int
    bound_cycles: dict[str, int]
    link_bytes: dict[str, int]
    queues: tuple[QueueUse, ...]
    constants: tuple[ConstantRecord, ...]
    overlap: OverlapRecord | None = None
    compulsory_bytes: int = 0
    roofline: Roofline | None = None
    band: float = 0.0
    times_us: dict[str, float] | None = None
    account: Account | None = None
    validated: Validated | None = None

    @property
    def core_us(self) -> float:
        """Time of the cores, without the launch."""
        return self.latency_us - self.launch_us


@dataclass(frozen=True)
class NumericRecord(ErrorSummary):
    """What the computed bits look like beside float64.

    ``diagnosis`` has the figures of `npusim.numerics.diagnosis.Diagnosis` that have a meaning; None
    where none was asked for.  ``row_sums`` maps the orders of row sums to their basis;
    ``against`` says what errors are against.
    """

    sample: str
    overflow_counts: dict[str, int]
    nan_counts: dict[str, int]
    first_events: tuple[NumericEvent, ...]
    arithmetic: dict[str, str]
    diagnosis: dict[str, float] | None = None
    row_sums: dict[str, str] | None = None
    against: str = "float64"


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
    spread: tuple[Spread, ...]
    notes: tuple[str, ...]
    orders: tuple[Spread, ...] = ()
    finite: tuple[FiniteChoice, ...] = ()
    ignored: tuple[str, ...] = ()
    presets: tuple[PresetOutcome, ...] = ()


def record_of(result: RunData) -> RunRecord:
    """Return what is kept of ``result``."""
    return RunRecord(
        **_named_alike(RunRecord, result)
        | {
            "npusim_version": __version__,
            "problem": result.problem.model_dump(mode="json"),
            "tiling": result.tiling.model_dump(mode="json"),
            "device": _device(result.device),
            "timing": None if result.timing is None else _timing(result, result.timing),
            "numerics": None if result.numerics is None else _numerics(result.numerics, result.device),
        }
    )


def _named_alike(kind: type[Any], *sources: object) -> dict[str, Any]:
    """Return the fields of ``kind`` that a source has under the same name."""
    names = [f.name for f in fields(kind)]
    return {name: getattr(s, name) for s in sources for name in names if hasattr(s, name)}


def _device(device: DeviceSpec) -> DeviceRecord:
    return DeviceRecord(
        name=device.name,
        digest=device.digest(),
        clock_hz=float(device.clock_hz.value),
        group_count=device.group_count.value,
        link_bytes_per_s={name: float(link.bytes_per_s.value) for name, link in device.links.items()},
    )


def _timing(result: RunData, timing: TimingResult) -> TimingRecord:
    # Groups of one class share their uses.
    queues = tuple(replace(use, group=g) for g, uses in enumerate(timing.queues) for use in uses)
    return TimingRecord(
        **_named_alike(TimingRecord, timing)
        | {
            "latency_us": timing.latency_s * 1e6,
            "launch_us": timing.launch_s * 1e6,
            "flops": result.program.flops,
            "queues": queues,
            "constants": _constants(result.device, timing, sum(q.busy_cycles for q in units_of(queues))),
            "roofline": roofline_of(result),
            "times_us": {kind: seconds * 1e6 for kind, seconds in timing.times_s.items()},
            "overlap": _overlap(timing) if isinstance(timing, NodeTiming) else None,
            "validated": validated(result.device, result.schedule),
        }
    )


def _overlap(timing: NodeTiming) -> OverlapRecord:
    seconds = ("attention", "linear", "allreduce", "closed_form", "exposed")
    return OverlapRecord(
        **_named_alike(OverlapRecord, timing),
        **{f"{name}_us": getattr(timing, f"{name}_s") * 1e6 for name in seconds},
        parts_us={name: seconds * 1e6 for name, seconds in timing.parts_s.items()},
    )


def units_of(queues: tuple[QueueUse, ...]) -> tuple[QueueUse, ...]:
    """Return what executes: the queues, or the pipes if they share some (then a queue only issues)."""
    return tuple(q for q in queues if q.is_pipe) or queues


def _constants(device: DeviceSpec, timing: TimingResult, busy_cycles: int) -> tuple[ConstantRecord, ...]:
    """Return the constants behind the busy cycles, the largest share first."""
    basis = {key: fact.basis for key, fact in device.facts()}
    found = [ConstantRecord(key, basis.get(key, "unknown"), cycles) for key, cycles in timing.term_cycles.items()]
    stretched = busy_cycles - sum(c.cycles for c in found)
    if stretched > 0:
        of_links = {basis.get(f"links.{name}.bytes_per_s") for name in device.links}
        weakest = next((b for b in _WEAKEST_FIRST if b in of_links), "unknown")
        found.append(ConstantRecord(SHARED_LINKS, weakest, stretched))
    return tuple(sorted(found, key=lambda c: (-c.cycles, c.key)))


def _numerics(numerics: NumericResult, device: DeviceSpec) -> NumericRecord:
    return NumericRecord(
        **_named_alike(NumericRecord, numerics.error, numerics)
        | {
            "row_sums": row_sum_evidence(numerics, device),
            "diagnosis": None if numerics.diagnosis is None else numerics.diagnosis.figures(),
        }
    )
