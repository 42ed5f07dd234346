"""``result.json``: the record of a run, with all data of tables, comparisons and advice.

A `RunRecord` comes from a live result (`record_of`) or from a file (`load_result`); code that prints or compares uses
records, so that old and new runs are treated in the same way.
"""

from __future__ import annotations

import json
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim import __version__
from npusim.config.json_record import read_record, record_document
from npusim.config.tiling import word_of
from npusim.errors import SpecError
from npusim.kernels.declare.define import machine_of
from npusim.kernels.triton import is_recorded
from npusim.late_methods import dataclass
from npusim.library import find_schedule
from npusim.program.numerics.bits_result import NumericRecord
from npusim.program.timing.timing_result import TimingRecord
from npusim.sanitize import regular_file
from npusim.simulation.request import short_name
from npusim.simulation.run_result import FiniteChoice, PresetOutcome, RunData, Spread
from npusim.units import MIB

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

SCHEMA_VERSION = 1
RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
KIND = "npusim.run"
#: Size of a file of results, figures or a table: a result has some 100 KiB, a table a few hundred bytes a point.
MOST_BYTES = 256 * MIB


@dataclass(frozen=True)
class DeviceRecord:
    """The device of a run; ``digest`` is the hash of its file's content.

    ``scale``: factors of the rates of units and links that its file states, as ``--scale`` sets them.
    """

    name: str
    digest: str
    clock_hz: float
    group_count: int
    link_bytes_per_s: dict[str, float]
    scale: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """One run; the keys of ``result.json`` are these fields.

    ``timing`` is None on a device described for its values only, ``numerics`` if no bits were computed; ``orders``: the
    results of adding a node's partial sums in other orders; ``ignored``: omitted features of the workload's attention;
    ``digest``: hash of everything that affected the prediction.
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
    digest: str = ""
    compared: str = ""

    @property
    def called(self) -> str:
        """The schedule's name in sentences: for a launch the kernel."""
        return short_name(self.schedule)

    def to_document(self) -> dict[str, object]:
        """Return it as JSON data; ``schema_version`` changes when a key changes its meaning."""
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **record_document(RunRecord, self)}


def record_of(result: RunData) -> RunRecord:
    """Return the record of a result."""
    values: dict[str, Any] = {f.name: getattr(result, f.name, None) for f in fields(RunRecord)}
    values |= {"npusim_version": __version__, "device": _device(result.device)}
    values |= {name: values[name].model_dump(mode="json") for name in ("problem", "tiling")}
    if is_recorded(result.schedule):
        values["problem"] |= find_schedule(result.schedule, result.device.family).shapes
    decided = machine_of(result.device).decided(result.tiling, result.problem)
    shown = {n: v for n, v in values["tiling"].items() if n not in decided}
    values["tiling"] = {n: word_of(type(result.tiling), n, v) for n, v in shown.items()}
    return RunRecord(**values)


def _device(device: DeviceSpec) -> DeviceRecord:
    return DeviceRecord(
        name=device.name,
        digest=device.digest(),
        clock_hz=float(device.clock_hz.value),
        group_count=device.group_count.value,
        link_bytes_per_s={name: link.rate for name, link in device.links.items()},
        scale=device.scale,
    )


def load_result(path: str | Path) -> RunRecord:
    """Return the record of a run folder or of a ``result.json``.

    Raises `SpecError` if there is no such file, if it is not a result of npusim or has another schema version, or if a
    key is missing or of the wrong kind (``file  key: ``).
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULT_FILE
    text, data = read_json(file)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{file}: not a result of `npusim run` (no key kind: {KIND!r})")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SpecError(f"{file}: schema_version {version!r}; this npusim reads {SCHEMA_VERSION}")
    return read_record(RunRecord, text, file)


def read_json(file: Path) -> tuple[str, Any]:
    """Return a JSON file's text and its data; raise `SpecError` if it cannot be read or is not JSON."""
    try:
        text = regular_file(file, MOST_BYTES, SpecError).read_text(encoding="utf-8")
        return text, json.loads(text)
    except OSError as error:
        raise SpecError(
            f"{file}: cannot be read: {error.strerror}; a run folder or a {RESULT_FILE} is needed"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(f"{file}: not a JSON file: it is not text; a run folder or a {RESULT_FILE} is needed") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file}: not a JSON file: {error}") from None
