"""Runs in the form that `compare` needs: their inputs, and an account of every unit's time, exact to the cycle.

A `Sheet` comes from a result, a run's folder, or the ``PipeUtilization.csv`` of a vendor's
profiler on the hardware, which has only the busy time of each pipe.

The latency is divided into parts that add up to it, and so is a difference of latencies.  The core group that ends last
determines the cores' time, and the time of each of its units is divided completely: operations, delays by others on
shared links or pipes, waits by cause, phases without operations, and the end.  The account of one unit in both runs
therefore divides the difference.  This unit is the queue that is busiest in all runs: if it cannot be busier, its waits
cost time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from npusim.late_methods import dataclass
from npusim.report.pipes import read_pipes
from npusim.report.result_json import RunRecord, load_result, record_of
from npusim.report.run_inputs import problem_text

if TYPE_CHECKING:
    from npusim.program.timing.timing_result import QueueUse, TimingRecord
    from npusim.simulation.run_result import RunData

#: An activity of a unit: its kind and its name.
Item = tuple[str, str]
BUSY: Item = ("work", "all operations")
SHARED: Item = ("links", "others on shared links or pipes")
END: Item = ("end", "ended before the last group")
UNKNOWN: Item = ("idle", "not busy")


@dataclass(frozen=True)
class Unit:
    """A queue or a shared pipe of the core group that ends last; cycles by operation, wait and idle phase.

    ``work`` maps operations to how often they are executed and how many cycles they take; None if the run does not
    state them; ``waits`` does the same for waits. ``givers`` are the queues that cause a wait.
    """

    name: str
    busy: int
    is_pipe: bool = False
    work: Mapping[str, tuple[int, int]] | None = None
    waits: Mapping[str, int] | None = None
    phases: Mapping[str, int] = field(default_factory=dict)
    givers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rows(self, cycles: int, *, works: bool = True, waits: bool = True) -> dict[Item, int]:
        """Return the account of the unit's ``cycles``; its parts add up to these cycles.

        Without ``works`` all operations are one row; without ``waits`` everything else is one row.
        """
        spent_on: dict[Item, int] = {}
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
    """One run in a comparison; ``record`` is None for a profiler's file.

    ``cycles`` are the cycles of the cores, without the launch of ``launch_us``; None without a time.  ``time`` names
    the compared time: a call's ``latency``, or, if one of the runs is a profiler's file, only the ``core`` time without
    launches (``launch_us`` is then 0).
    """

    label: str
    inputs: Mapping[str, object]
    record: RunRecord | None
    clock_hz: float
    cycles: int | None
    launch_us: float
    units: Mapping[str, Unit]
    time: Literal["latency", "core"] = "latency"

    @property
    def time_us(self) -> float:
        """The time that is compared, in microseconds."""
        return self.us(self.cycles or 0) + self.launch_us

    def us(self, cycles: int) -> float:
        """Return cycles of the run's clock in microseconds."""
        return cycles / self.clock_hz * 1e6

    def rows(self, unit: str, *, works: bool = True, waits: bool = True) -> dict[Item, int]:
        """Return the account of a unit for the cores' cycles; empty if the run has no such unit."""
        known = self.units.get(unit)
        return {} if known is None or self.cycles is None else known.rows(self.cycles, works=works, waits=waits)

    def repeats(self, unit: str) -> bool:
        """Return whether a unit belongs to another core of a kind, which repeats the first."""
        core, _, pipe = unit.partition(".")
        first = f"{core.rstrip('0123456789')}0.{pipe}"
        return first in self.units and first != unit and self.rows(first) == self.rows(unit)


def sheets_of(runs: Iterable[RunData | RunRecord | str | Path]) -> tuple[Sheet, ...]:
    """Return the sheets of results, run folders, ``result.json`` or ``PipeUtilization.csv`` files.

    Labels are the folders' names, and are unique: for two folders with the same name, the names of their parents are
    added.  A profiler's file has the time of cores without launch; with such a file all runs are compared by this time.
    Raises `SpecError` like `load_result`, and for a CSV file without the needed columns.
    """
    listed = list(runs)
    labels = _labels(listed)
    sheets = tuple(sheet_of(run, label) for run, label in zip(listed, labels, strict=True))
    if all(s.record is not None for s in sheets):
        return sheets
    return tuple(replace(s, launch_us=0.0, time="core") for s in sheets)


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
        record.device.clock_hz if timing is None else timing.clock(record.device.clock_hz),
        None if timing is None else timing.cycles,
        0.0 if timing is None else round(timing.launch_us, 6),  # the difference of floats is rounded to the picosecond
        {} if timing is None else {u.name: u for u in _units(timing)},
    )


def _labels(runs: list[Any]) -> list[str]:
    """Return a name for each run: that of its folder, or of the run; equal names get a suffix."""
    paths = [_named_path(Path(run)).parts if isinstance(run, str | Path) else (run.name,) for run in runs]
    depth = 1
    while depth < max(map(len, paths)) and len({p[-depth:] for p in paths}) < len(set(paths)):
        depth += 1
    names = ["/".join(p[-depth:]) for p in paths]
    return [n if names.count(n) == 1 else f"{n} #{names[: i + 1].count(n)}" for i, n in enumerate(names)]


def _named_path(path: Path) -> Path:
    """Return the path after which the run is named: the folder of its result, or the file itself if it has another
    name.
    """
    has_usual_name = path.name in ("result.json", "PipeUtilization.csv", "pipes.csv") and path.parent.name
    return path.parent if has_usual_name else path


def _units(timing: TimingRecord) -> Iterator[Unit]:
    account = timing.account
    group = timing.last_group if account is None else account.group
    for queue in timing.uses_of(group):
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


def _unprefixed(use: QueueUse) -> Callable[[str], str]:
    """Return a function that strips the resident block (``B0``) from names of its rings."""
    slot = re.match(r"B\d+", use.pipe)
    return lambda cause: cause.removeprefix(f"{slot[0]} ") if slot else cause


def _inputs(record: RunRecord) -> Iterator[tuple[str, object]]:
    yield from {
        "npusim_version": record.npusim_version,
        "schedule": record.schedule,
        "precision": record.precision,
        "device.name": record.device.name,
        "device.digest": record.device.digest,
        "workload": record.workload,
        "ignored": ", ".join(record.ignored) or None,
    }.items()
    yield from _flat("device.scale", record.device.scale)
    tensors = {"tensors": problem_text(record.problem)} if "tensors" in record.problem else {}
    yield from _flat("problem", {**record.problem, **tensors})
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
    """Return the sheet of a ``PipeUtilization.csv``: of the block that takes longest."""
    pipes = read_pipes(file)
    units = {name: Unit(name, busy) for name, busy in pipes.busy.items()}
    return Sheet(label, {"measured by": file.name}, None, pipes.clock_hz, pipes.cycles, 0.0, units)


# ---------------------------------------------------------------- a difference in parts

#: Largest number of steps in a chain of waits.
LONGEST = 12


@dataclass(frozen=True)
class Part:
    """An activity on which a unit spends cycles, in each run; ``givers`` are the queues that cause a wait.

    The launch is a part of the latency, not of the cores' time: it has no cycles (`Breakdown.us`).
    """

    kind: str
    name: str
    cycles: tuple[int, ...]
    givers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the activity in words: ``softmax``, ``waits for S ready (aiv0.MTE2)``."""
        match self.kind:
            case "wait":
                by = f" ({', '.join(self.givers)})" if self.givers else ""
                return f"waits: {self.name}{by}"
            case "phase":
                return f"no work in {self.name}"
        return self.name


LAUNCH = Part("launch", "launch", ())


@dataclass(frozen=True)
class Moved:
    """An operation or a wait of some unit whose cycles differ between runs; ``times`` is the number of
    its executions.
    """

    unit: str
    part: Part
    times: tuple[int, ...] = ()


@dataclass(frozen=True)
class Breakdown:
    """Every run's latency in parts: ``sum(p.cycles[i] for p in parts)`` are run i's cycles, without the launch.

    ``units`` has the unit whose time is divided, in each run.
    """

    sheets: tuple[Sheet, ...]
    units: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def is_one_clock(self) -> bool:
        """Whether all runs have the same clock."""
        return len({s.clock_hz for s in self.sheets}) == 1

    def us(self, part: Part, run: int) -> float:
        """Return a part's time in one run, in microseconds; the sum over all parts is the latency."""
        sheet = self.sheets[run]
        return sheet.launch_us if part.kind == LAUNCH.kind else sheet.us(part.cycles[run])

    def change_us(self, part: Part, run: int) -> float:
        """Return how much longer a part is in run ``run`` than in the first, in microseconds."""
        return self.us(part, run) - self.us(part, 0)

    @property
    def ranked(self) -> tuple[Part, ...]:
        """The parts, sorted by their largest difference from the first run."""
        runs = range(1, len(self.sheets))
        return tuple(sorted(self.parts, key=lambda p: -max(abs(self.change_us(p, i)) for i in runs)))

    def moved(self, run: int) -> tuple[Part, ...]:
        """Return the parts that differ from the first run's, the largest difference first."""
        parts = [p for p in self.parts if self.change_us(p, run)]
        return tuple(sorted(parts, key=lambda p: -abs(self.change_us(p, run))))

    def causes(self, run: int) -> tuple[Part, ...]:
        """Return the parts that cause the difference: the largest parts with the same sign as the difference, at most
        three.

        Together they are at least four fifths of all parts with this sign.
        """
        total = sum(self.change_us(p, run) for p in self.parts)
        same = [p for p in self.moved(run) if self.change_us(p, run) * total > 0]
        whole, explained = sum(abs(self.change_us(p, run)) for p in same), 0.0
        chosen: list[Part] = []
        for part in same[:3]:
            if explained >= 0.8 * whole:
                break
            chosen.append(part)
            explained += abs(self.change_us(part, run))
        return tuple(chosen)


def breakdown(sheets: Sequence[Sheet]) -> Breakdown | None:
    """Return the runs' times in parts; None if one of the runs has no time."""
    if any(s.cycles is None or not s.units for s in sheets):
        return None
    units = _busiest_units(sheets)
    launch = replace(LAUNCH, cycles=(0,) * len(sheets))
    return Breakdown(tuple(sheets), units, (*parts_of(sheets, units), launch))


def parts_of(sheets: Sequence[Sheet], units: Sequence[str]) -> tuple[Part, ...]:
    """Return the account of one unit's time in each run, with the detail that all runs have; empty if a run lacks the
    unit.

    Operations come first, the end comes last.
    """
    accounts = [s.units.get(u) for s, u in zip(sheets, units, strict=True)]
    works = all(u is None or u.work is not None for u in accounts)
    waits = all(u is None or u.waits is not None for u in accounts)
    rows = [s.rows(u, works=works, waits=waits) for s, u in zip(sheets, units, strict=True)]
    givers = [u.givers for u in accounts if u is not None]
    order = {"work": 0, "links": 1, "wait": 2, "phase": 3, "end": 4, "idle": 4}
    keys = sorted(dict.fromkeys(key for row in rows for key in row), key=lambda key: order[key[0]])
    return tuple(
        Part(
            kind,
            name,
            tuple(row.get((kind, name), 0) for row in rows),
            tuple(dict.fromkeys(queue for by_cause in givers for queue in by_cause.get(name, ()))),
        )
        for kind, name in keys
        if any(row.get((kind, name)) for row in rows)
    )


def _busiest_units(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """Return the busiest unit that all runs have; if there is none, the busiest unit of each run."""

    def busy(sheet: Sheet, name: str) -> float:
        return sheet.units[name].busy / (sheet.cycles or 1)

    def queues(sheet: Sheet) -> list[str]:
        names = [n for n, u in sheet.units.items() if not u.is_pipe]
        return names or list(sheet.units)

    shared = [n for n in queues(sheets[0]) if all(n in queues(s) for s in sheets)]
    shared = [n for n in shared if any(s.units[n].busy for s in sheets)]
    if shared:
        return (max(shared, key=lambda n: sum(busy(s, n) for s in sheets)),) * len(sheets)
    return tuple(max(queues(s), key=lambda n: busy(s, n)) for s in sheets)


def chain(old: Sheet, new: Sheet, unit: str, cause: str) -> tuple[Moved, ...]:
    """Follow a wait to the queue that causes it, then to the largest change there in the same direction, and so on.

    The chain ends at an activity other than a wait, or at a queue that it has already visited: if queues wait for one
    another in a loop, the depth of their ring and the work in the loop determine their rate.
    """
    seen, steps = {unit}, list[Moved]()
    sign = _change(old, new, unit).get(("wait", cause), 0)
    while len(steps) < LONGEST:
        account = new.units.get(unit) or old.units.get(unit)
        producers = account.givers.get(cause, ()) if account else ()
        if not producers:
            break
        unit = producers[0]
        same = {row: change for row, change in _change(old, new, unit).items() if change * sign > 0}
        if not same:
            break
        kind, cause = max(same, key=lambda row: abs(same[row]))
        cycles = tuple(s.rows(unit).get((kind, cause), 0) for s in (old, new))
        steps.append(Moved(unit, Part(kind, cause, cycles)))
        if kind != "wait" or unit in seen:
            break
        seen.add(unit)
    return tuple(steps)


def _change(old: Sheet, new: Sheet, unit: str) -> dict[Item, int]:
    before, after = old.rows(unit), new.rows(unit)
    rows = dict.fromkeys([*before, *after])
    return {row: after.get(row, 0) - before.get(row, 0) for row in rows}
