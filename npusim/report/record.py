"""``result.json``: the record of a run, all that tables, comparisons and advice need.

A `RunRecord` comes from a live result (`record_of`) or from a file (`load_result`); whatever prints or compares takes
records, so that old and new runs are treated alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from npusim import __version__
from npusim.config.device_tables import validated
from npusim.config.node import NodeDevice
from npusim.config.record import read_record, record_document
from npusim.errors import SpecError
from npusim.numerics.result import NumericRecord
from npusim.sanitize import regular_file
from npusim.simulation.result import PresetOutcome
from npusim.simulation.robustness import FiniteChoice, Spread, row_sum_evidence
from npusim.timing.result import ConstantRecord, OverlapRecord, Roofline, TimingRecord, units_of
from npusim.units import MIB

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.simulation.result import RunData
    from npusim.timing.result import TimingResult

SCHEMA_VERSION = 1
RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
KIND = "npusim.run"
#: Size of a file of results, figures or a table: a result has some 100 KiB, a table a few hundred bytes a point.
MOST_BYTES = 256 * MIB

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

    def to_document(self) -> dict[str, object]:
        """Return it as JSON data; ``schema_version`` changes when a key changes its meaning."""
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **record_document(RunRecord, self)}


def record_of(result: RunData) -> RunRecord:
    """Return the record of a result."""
    bits = result.numerics
    return RunRecord(
        npusim_version=__version__,
        name=result.name,
        schedule=result.schedule,
        precision=result.precision,
        formats=result.formats,
        workload=result.workload,
        problem=result.problem.model_dump(mode="json"),
        tiling=result.tiling.model_dump(mode="json"),
        device=_device(result.device),
        timing=None if result.timing is None else _timing(result, result.timing),
        numerics=None if bits is None else replace(bits, row_sums=row_sum_evidence(bits, result.device)),
        spread=result.spread,
        notes=result.notes,
        orders=result.orders,
        finite=result.finite,
        ignored=result.ignored,
        presets=result.presets,
    )


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
    uses = tuple(replace(use, group=g) for g, group in enumerate(timing.queues) for use in group)
    return replace(
        timing,
        flops=result.program.flops,
        uses=uses,
        constants=_constants(result.device, timing, sum(q.busy_cycles for q in units_of(uses))),
        overlap=timing if isinstance(timing, OverlapRecord) else None,
        roofline=roofline_of(result),
        validated=validated(result.device, result.schedule),
    )


def _constants(device: DeviceSpec, timing: TimingResult, busy_cycles: int) -> tuple[ConstantRecord, ...]:
    """Return the constants behind the busy cycles, the largest share first."""
    basis = {key: fact.basis for key, fact in device.facts()}
    constants = [ConstantRecord(key, basis.get(key, "unknown"), cycles) for key, cycles in timing.term_cycles.items()]
    stretched = busy_cycles - sum(c.cycles for c in constants)
    if stretched > 0:
        of_links = {basis.get(f"links.{name}.bytes_per_s") for name in device.links}
        weakest = next((b for b in _WEAKEST_FIRST if b in of_links), "unknown")
        constants.append(ConstantRecord(SHARED_LINKS, weakest, stretched))
    return tuple(sorted(constants, key=lambda c: (-c.cycles, c.key)))


def peak_flops_per_s(device: DeviceSpec, input_format: str) -> float | None:
    """Return the matrix units' rate for a format (their fastest for one they do not multiply).

    A multiply-add is two operations.  None for a device whose file describes no matrix unit.
    """
    for name, unit in device.matrix_engines.items():
        chosen = unit.fractals.get(input_format)
        steps = [chosen] if chosen is not None else list(unit.fractals.values())
        products = max(s.m_elements.value * s.n_elements.value * s.k_elements.value for s in steps)
        cores = device.group_count.value * device.cores[name].per_group_count.value
        rate = 2 * products / unit.cycles_per_fractal.value
        return float(cores * rate * device.clock_hz.value)
    return None


def roofline_of(result: RunData) -> Roofline | None:
    """Return a run's position under the roofline; None for nodes, copies, and devices without matrix unit or time."""
    timing, device = result.timing, result.device
    if timing is None or isinstance(device, NodeDevice) or not timing.cycles:
        return None
    peak = peak_flops_per_s(device, str(getattr(result.problem, "dtype", "")))
    moved = timing.link_bytes.get("hbm", 0)
    if not (peak and result.program.flops and timing.compulsory_bytes and moved):
        return None
    return Roofline(
        intensity=result.program.flops / timing.compulsory_bytes,
        moved_intensity=result.program.flops / moved,
        peak_flops_per_s=peak,
        memory_bytes_per_s=float(device.link("hbm").bytes_per_s.value),
        attained_flops_per_s=result.program.flops * timing.clock_hz / timing.cycles,
    )


def load_result(path: str | Path) -> RunRecord:
    """Return the record of a run folder or of a ``result.json``.

    Raises
    ------
    SpecError
        There is no such file, it is no result of npusim or of another schema version, or a key is
        missing or of the wrong kind (``file  key: ``).
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULT_FILE
    try:
        text = regular_file(file, MOST_BYTES, SpecError).read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise SpecError(
            f"{file}: cannot be read: {error.strerror}; a run folder or a {RESULT_FILE} is needed"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file}: not a JSON file: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{file}: not a result of `npusim run` (no key kind: {KIND!r})")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SpecError(f"{file}: schema_version {version!r}; this npusim reads {SCHEMA_VERSION}")
    return read_record(RunRecord, text, file)
