"""What comparing needs of a run: its inputs, and where the time of every unit goes, to the cycle.

A `Sheet` is made of a result, of a run's folder, or of the ``PipeUtilization.csv`` that a vendor's
profiler wrote on the hardware; that says no more than how long each pipe was busy.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.errors import SpecError, reason_of
from npusim.machines.tracks import PROFILED_PIPES
from npusim.report.bottleneck import deciding_group, queues_of
from npusim.report.pipes import NOT_APPLICABLE
from npusim.report.record import RunRecord, record_of
from npusim.report.result_json import load_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npusim.report.record import TimingRecord
    from npusim.run_result import RunResult
    from npusim.timing.result import QueueUse

__all__ = ["Row", "Sheet", "Unit", "sheet_of", "sheets_of"]

#: What a unit's time goes to: the kind of it, and which.
Row = tuple[str, str]
BUSY: Row = ("work", "all operations")
SHARED: Row = ("links", "others on shared links")
END: Row = ("end", "its last operation is over, others are not")
UNKNOWN: Row = ("idle", "not busy")
#: The first row of a file that the vendor's profiler writes, as far as it is needed.
_NEEDED = ("block_id",)
_TOTAL = "_total_cycles"
_VENDOR = MappingProxyType({vendor: pipe for pipe, vendor in PROFILED_PIPES.items()})


@dataclass(frozen=True)
class Unit:
    """A queue or a shared pipe of the core group that ends last; cycles by operation, wait and idle phase.

    ``work`` maps operations to how often they ran and their cycles; None where the run does not say, as
    ``waits``.  ``givers`` are the queues that a wait is for.
    """

    name: str
    busy: int
    is_pipe: bool = False
    work: Mapping[str, tuple[int, int]] | None = None
    waits: Mapping[str, int] | None = None
    phases: Mapping[str, int] = field(default_factory=dict)
    givers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rows(self, cycles: int, *, works: bool = True, waits: bool = True) -> dict[Row, int]:
        """Return what the unit spends ``cycles`` on; they add up to it.

        Without ``works`` operations are one row, without ``waits`` all else is.
        """
        found: dict[Row, int] = {}
        if works and self.work is not None:
            found.update({("work", label): spent for label, (_, spent) in self.work.items()})
            found[SHARED] = self.busy - sum(found.values())
        else:
            found[BUSY] = self.busy
        if waits and self.waits is not None:
            found.update({("wait", cause): spent for cause, spent in self.waits.items()})
            found.update({("phase", name): spent for name, spent in self.phases.items()})
        found[END if waits else UNKNOWN] = cycles - sum(found.values())
        return found


@dataclass(frozen=True)
class Sheet:
    """One run as it is compared; ``record`` is None for a profiler's file.

    ``cycles`` are the kernel's, without its launch of ``launch_us``; None where there is no time.
    """

    label: str
    inputs: Mapping[str, object]
    record: RunRecord | None
    clock_hz: float
    cycles: int | None
    launch_us: float
    units: Mapping[str, Unit]

    def us(self, cycles: int) -> float:
        """Return cycles of the run's clock in microseconds."""
        return cycles / self.clock_hz * 1e6

    def rows(self, unit: str, *, works: bool = True, waits: bool = True) -> dict[Row, int]:
        """Return what a unit spends the kernel's cycles on; nothing where the run has no such unit."""
        known = self.units.get(unit)
        return {} if known is None or self.cycles is None else known.rows(self.cycles, works=works, waits=waits)


def sheets_of(runs: Iterable[RunResult | RunRecord | str | Path]) -> tuple[Sheet, ...]:
    """Return the sheets of results, run folders, ``result.json`` or ``PipeUtilization.csv`` files.

    Labels are those of the folders, and differ: two folders of one name bring their parents' along.
    Raises `SpecError` as `load_result`, and for a CSV file without the columns that are needed.
    """
    listed = list(runs)
    labels = _labels(listed)
    return tuple(sheet_of(run, label) for run, label in zip(listed, labels, strict=True))


def sheet_of(run: RunResult | RunRecord | str | Path, label: str) -> Sheet:
    """Return the sheet of one run; see :func:`sheets_of`."""
    if isinstance(run, str | Path):
        if Path(run).suffix == ".csv":
            return _measured(Path(run), label)
        run = load_result(run)
    record = run if isinstance(run, RunRecord) else record_of(run)
    timing = record.timing
    return Sheet(
        label, dict(_inputs(record)), record, record.device.clock_hz,
        None if timing is None else timing.cycles,
        0.0 if timing is None else round(timing.launch_us, 6),  # a difference of floats: to the picosecond
        {} if timing is None else {u.name: u for u in _units(timing)},
    )  # fmt: skip


def _labels(runs: list[Any]) -> list[str]:
    """Return a name for each run: its folder's, or its own; told apart where they are alike."""
    paths = [_place(Path(run)).parts if isinstance(run, str | Path) else (run.name,) for run in runs]
    depth = 1
    while depth < max(map(len, paths)) and len({p[-depth:] for p in paths}) < len(set(paths)):
        depth += 1
    names = ["/".join(p[-depth:]) for p in paths]
    return [n if names.count(n) == 1 else f"{n} #{names[: i + 1].count(n)}" for i, n in enumerate(names)]


def _place(path: Path) -> Path:
    """Return what names a run: the folder of its result, or a file of another name."""
    known = path.name in ("result.json", "PipeUtilization.csv", "pipes.csv") and path.parent.name
    return path.parent if known else path


def _units(timing: TimingRecord) -> Iterator[Unit]:
    account = timing.account
    group = deciding_group(timing) if account is None else account.group
    for queue in queues_of(timing, group):
        if account is None:
            yield Unit(queue.queue, queue.busy_cycles, queue.is_pipe, waits=None if queue.is_pipe else queue.stalls)
            continue
        own = _unprefixed(queue)
        yield Unit(
            queue.queue, queue.busy_cycles, queue.is_pipe,
            {w.label: (w.times, w.cycles) for w in account.work if w.unit == queue.queue},
            None if queue.is_pipe else {own(cause): cycles for cause, cycles in queue.stalls.items()},
            {p.name: p.cycles for p in account.phases if queue.queue in p.idle},
            {own(cause): who for cause, who in account.givers.get(queue.queue, {}).items()},
        )  # fmt: skip


def _unprefixed(queue: QueueUse) -> Any:
    """Return what strips the place of a block (``B0``) from its rings' names: they then go by what they hold."""
    place = re.match(r"B\d+", queue.queue.rpartition(".")[2])
    return lambda cause: cause.removeprefix(f"{place[0]} ") if place else cause


def _inputs(record: RunRecord) -> Iterator[tuple[str, object]]:
    """Yield what a run was given, by dotted key."""
    yield from {
        "npusim_version": record.npusim_version,
        "schedule": record.schedule,
        "precision": record.precision,
        "device.name": record.device.name,
        "device.digest": record.device.digest,
        "workload": record.workload,
        "ignored": ", ".join(record.ignored) or None,
    }.items()
    yield from _flat("problem", record.problem)
    yield from _flat("tiling", record.tiling)
    yield from _flat("formats", record.formats)
    if record.numerics is not None:
        yield "sample", record.numerics.sample
        yield "arithmetic", ", ".join(record.numerics.arithmetic)


def _flat(prefix: str, values: object) -> Iterator[tuple[str, object]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(f"{prefix}.{key}", value)
    else:
        yield prefix, values


# ---------------------------------------------------------------- a profiler's file


def _measured(file: Path, label: str) -> Sheet:
    """Return the sheet of a ``PipeUtilization.csv``: its block that takes longest."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            columns, rows = [c.strip() for c in reader.fieldnames or ()], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = reason_of(error, file) if isinstance(error, OSError) else str(error)
        raise SpecError(f"{file}: cannot be read: {why}") from None
    kinds = [c.removesuffix(_TOTAL) for c in columns if c.endswith(_TOTAL)]
    lacks = [c for c in _NEEDED if c not in columns] + ([] if kinds else ["aic_total_cycles or aiv_total_cycles"])
    if lacks:
        raise SpecError(
            f"{file}: no column {', '.join(lacks)}; a profiler's PipeUtilization.csv has block_id, sub_block_id, "
            "aic_total_cycles, aic_time(us), aic_cube_ratio, aiv_vec_ratio, ..."
        )
    blocks: dict[str, dict[str, Unit]] = {}
    totals: dict[str, int] = {}
    clock = 0.0
    for number, row in enumerate(rows):
        place = f"{file}: line {number + 2}"
        block = str(row["block_id"]).strip()
        for kind in kinds:
            total = _number(row, f"{kind}{_TOTAL}", place)
            if total is None:
                continue
            totals[block] = max(totals.get(block, 0), round(total))
            took = _number(row, f"{kind}_time(us)", place)
            clock = total / took * 1e6 if took else clock
            which = re.sub("[^0-9]", "", row.get("sub_block_id") or "") or "0"
            core = f"aiv{which}" if kind == "aiv" else kind
            blocks.setdefault(block, {}).update(_busy(row, columns, kind, core, total, place))
    if not totals:
        raise SpecError(f"{file}: no row has cycles of a core")
    if not clock:
        raise SpecError(f"{file}: no column {kinds[0]}_time(us): how long a cycle is, is not said")
    last = max(totals, key=lambda b: totals[b])
    # Its times are rounded, clocks are not that odd.
    return Sheet(label, {"measured by": file.name}, None, round(clock, -4), totals[last], 0.0, blocks[last])


def _busy(
    row: Mapping[str, str], columns: Iterable[str], kind: str, core: str, total: float, place: str
) -> Iterator[tuple[str, Unit]]:
    """Yield the pipes of one core of a row, with their busy cycles: by their times, else by their ratios."""
    took = _number(row, f"{kind}_time(us)", place)
    for column in columns:
        found = re.fullmatch(rf"{kind}_(\w+)_ratio", column)
        share = _number(row, column, place) if found else None
        if found is None or share is None:
            continue
        exactly = _number(row, f"{kind}_{found[1]}_time(us)", place)
        cycles = share * total if exactly is None or not took else exactly / took * total
        name = f"{core}.{_VENDOR.get(found[1], found[1].upper())}"
        yield name, Unit(name, round(cycles))


def _number(row: Mapping[str, Any], column: str, place: str) -> float | None:
    """Return a cell's number; None where the profiler says that it does not apply, or says nothing."""
    text = str(row.get(column) or "").strip()
    if text in ("", NOT_APPLICABLE, "N/A"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise SpecError(f"{place}: {column}: {text!r} is not a number of at least 0")
    return value
