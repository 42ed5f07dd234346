"""What comparing needs of a run: its inputs, and where the time of every unit goes, to the cycle.

A `Sheet` is made of a result, of a run's folder, or of the ``PipeUtilization.csv`` that a vendor's
profiler wrote on the hardware; that says no more than how long each pipe was busy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.report.bottleneck import deciding_group, queues_of
from npusim.report.pipes import read_pipes
from npusim.report.record import RunRecord, record_of
from npusim.report.result_json import load_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npusim.report.record import TimingRecord
    from npusim.simulation.result import RunData
    from npusim.timing.result import QueueUse

#: What a unit's time goes to: the kind of it, and which.
Row = tuple[str, str]
BUSY: Row = ("work", "all operations")
SHARED: Row = ("links", "others on shared links or pipes")
END: Row = ("end", "its last operation is over, others are not")
UNKNOWN: Row = ("idle", "not busy")


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
        spent_on: dict[Row, int] = {}
        if works and self.work is not None:
            spent_on.update({("work", label): spent for label, (_, spent) in self.work.items()})
            spent_on[SHARED] = self.busy - sum(spent_on.values())
        else:
            spent_on[BUSY] = self.busy
        if waits and self.waits is not None:
            spent_on.update({("wait", cause): spent for cause, spent in self.waits.items()})
            spent_on.update({("phase", name): spent for name, spent in self.phases.items()})
        spent_on[END if waits else UNKNOWN] = cycles - sum(spent_on.values())
        return spent_on


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


def sheets_of(runs: Iterable[RunData | RunRecord | str | Path]) -> tuple[Sheet, ...]:
    """Return the sheets of results, run folders, ``result.json`` or ``PipeUtilization.csv`` files.

    Labels are those of the folders, and differ: two folders of one name bring their parents' along.
    Raises `SpecError` as `load_result`, and for a CSV file without the columns that are needed.
    """
    listed = list(runs)
    labels = _labels(listed)
    return tuple(sheet_of(run, label) for run, label in zip(listed, labels, strict=True))


def sheet_of(run: RunData | RunRecord | str | Path, label: str) -> Sheet:
    """Return the sheet of one run; see :func:`sheets_of`."""
    if isinstance(run, str | Path):
        if Path(run).suffix == ".csv":
            return _measured(Path(run), label)
        run = load_result(run)
    record = run if isinstance(run, RunRecord) else record_of(run)
    timing = record.timing
    return Sheet(
        label,
        dict(_inputs(record)),
        record,
        record.device.clock_hz,
        None if timing is None else timing.cycles,
        0.0 if timing is None else round(timing.launch_us, 6),  # a difference of floats: to the picosecond
        {} if timing is None else {u.name: u for u in _units(timing)},
    )


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
        ring = _unprefixed(queue)
        yield Unit(
            queue.queue,
            queue.busy_cycles,
            queue.is_pipe,
            {w.label: (w.times, w.cycles) for w in account.work if w.unit == queue.queue},
            None if queue.is_pipe else {ring(cause): cycles for cause, cycles in queue.stalls.items()},
            {p.name: p.cycles for p in account.phases if queue.queue in p.idle},
            {ring(cause): who for cause, who in account.givers.get(queue.queue, {}).items()},
        )


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


def _measured(file: Path, label: str) -> Sheet:
    """Return the sheet of a ``PipeUtilization.csv``: its block that takes longest."""
    pipes = read_pipes(file)
    units = {name: Unit(name, busy) for name, busy in pipes.busy.items()}
    return Sheet(label, {"measured by": file.name}, None, pipes.clock_hz, pipes.cycles, 0.0, units)
