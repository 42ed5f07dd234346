"""Cases and their outcomes; comparison of cycles with accepted ones, which states the pipes, operations and waits that
changed.

Numbers of cycles are integers and deterministic, so any difference counts unless a tolerance is given.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from npusim import __version__
from npusim.config.cases import BaselineFile, DecisionFile, ExpectedCycles, UnitCycles, accepted_text
from npusim.config.problem import launch_problem
from npusim.library import takes_sizes
from npusim.report.comparison import reason
from npusim.report.output import write_whole
from npusim.report.sheet import Sheet, Unit, breakdown, sheet_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from npusim.config.cases import Candidate, Case, ExpectedDecision
    from npusim.errors import NpusimError
    from npusim.program.timing.timing_result import TimingResult
    from npusim.simulation.run_result import RunData


Status = Literal["ok", "changed", "new", "failed", "updated"]
#: Reason that is stored with a first acceptance.
FIRST = "first accepted"


@dataclass(frozen=True)
class Row:
    """One comparison with an accepted result: cycles, or a choice in words; ``change`` is relative."""

    name: str
    old: int | str | None
    new: int | str | None
    change: float | None = None
    why: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one case.

    ``status``: ``ok``; ``changed``; ``new`` (the file expects nothing yet); ``failed`` (it no longer runs, see
    ``reason``); ``updated`` (changed or new, and accepted).  ``rows`` have old and new results: the cores' cycles, or a
    decision's winner and each candidate's changed best point.  ``moved`` are the parts of units that changed (unit,
    kind and name, old, new cycles), the largest first; ``method`` and ``band`` describe the new cycles.
    """

    kind: Literal["cycles", "decision"]
    name: str
    path: Path
    status: Status
    rows: tuple[Row, ...] = ()
    reason: str = ""
    moved: tuple[tuple[str, str, int, int], ...] = ()
    device_changed: bool = False
    method: str = ""
    band: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the case has the expected result, or was updated."""
        return self.status in ("ok", "updated")


@dataclass(frozen=True)
class Update:
    """Accepts the result of a case: writes it into the case's file, with the reason."""

    path: Path
    case: BaselineFile | DecisionFile
    reason: str

    def accept(self, status: Status, new: ExpectedCycles | ExpectedDecision) -> Status:
        """Write a new result and return the status after it; an accepted result is replaced only with a reason."""
        old = self.case.expect
        if old is None:
            self._write(new, self.reason or FIRST)
            return "updated"
        accepted_reason = None if old.accepted is None else old.accepted.reason
        is_equal = new.model_copy(update={"device_digest": old.device_digest, "accepted": old.accepted}) == old
        if is_equal and new.device_digest != old.device_digest:
            # nothing else changed, and the file now names the current device
            self._write(new, accepted_reason or FIRST)
        elif not is_equal and self.reason:
            self._write(new, self.reason)
            return "updated" if status == "changed" else status
        return status

    def _write(self, new: ExpectedCycles | ExpectedDecision, reason: str) -> None:
        write_whole(self.path, accepted_text(self.path, self.case, new, __version__, reason).encode())


#: Compares the result of a case with the accepted one, within a tolerance, and accepts it if there is an update.
Comparison = Callable[[float, Update | None], CheckOutcome]


def request_of(case: Case, candidate: BaselineFile | Candidate, folder: Path) -> Request:
    """Return a case's request for a schedule; paths, a schedule's too, are relative to the case's ``folder``."""
    schedule = candidate.schedule
    schedule = str(folder / schedule) if re.match(r"[^:]*\.py:", schedule) else schedule
    fields = {
        "hw": _resolved(case.hw, folder),
        "workload": case.workload and _resolved(case.workload, folder),
        "schedule": schedule,
        "problem": case.problem and launch_problem(case.problem, is_plain=takes_sizes(schedule)),
        "tiling": dict(candidate.tiling),
        "precision": candidate.precision,
    }
    return Request.of({**dict(case), **fields, "numerics": False, "trace_groups": ()})


def fault_text(error: NpusimError) -> str:
    """Return an error's text in the terms of the file: text about `-C` becomes text about an override of the file."""
    text = re.sub(r"^-C ", "overrides: ", str(error), flags=re.MULTILINE)
    return re.sub(r"^--scale ", "scale: ", text, flags=re.MULTILINE)


def _resolved(name: str, folder: Path) -> str | Path:
    return folder / name if name.endswith((".yaml", ".yml")) else name


def cycles_of(result: RunData) -> ExpectedCycles:
    """Return the cycles of a result in the form of a baseline; raise `SpecError` for a result without a time."""
    cycles, sheet = result.cycles, sheet_of(result, "today")
    units = {name: _unit(unit) for name, unit in sheet.units.items() if not sheet.repeats(name)}
    assert result.timing is not None
    return ExpectedCycles(
        device_digest=result.device.digest(), cycles=cycles, busy_cycles=busy_cycles(result.timing), units=units
    )


def busy_cycles(timing: TimingResult) -> dict[str, int]:
    """Return how long each pipe is busy, over all core groups."""
    busy: Counter[str] = Counter()
    for use in (use for uses in timing.queues for use in uses):
        busy[use.queue] += use.busy_cycles
    return dict(busy)


def failed(file: Path, case: BaselineFile | DecisionFile, error: NpusimError) -> CheckOutcome:
    """Return the outcome of a case that no longer runs."""
    if not isinstance(case, BaselineFile):
        return CheckOutcome("decision", file.stem, file, "failed", reason=fault_text(error))
    rows = () if case.expect is None else (_row(case.expect.cycles, None),)
    return CheckOutcome("cycles", file.stem, file, "failed", rows, fault_text(error))


def cycles_today(file: Path, case: BaselineFile) -> Comparison:
    """Run a case of cycles, and return the comparison of its result; see `check_baselines`."""
    result = run_request(request_of(case, case, file.parent))
    return partial(_compared, file, case.expect, result, cycles_of(result))


def _compared(
    file: Path,
    old: ExpectedCycles | None,
    result: RunData,
    new: ExpectedCycles,
    tolerance: float,
    update: Update | None,
) -> CheckOutcome:
    """Return the outcome of a case from its accepted cycles and the new ones."""
    status: Status = "new" if old is None else "ok" if _is_met(old, new, tolerance) else "changed"
    if update is not None:
        status = update.accept(status, new)
    timing = result.timing
    assert timing is not None
    return CheckOutcome(
        "cycles",
        file.stem,
        file,
        status,
        (_row(None if old is None else old.cycles, new.cycles),),
        "" if old is None else why_of(old, result),
        () if old is None else tuple(_moved(old, new)),
        device_changed=old is not None and old.device_digest != new.device_digest,
        method=timing.method,
        band=timing.band,
        ignored=result.ignored,
    )


def why_of(old: ExpectedCycles, result: RunData) -> str:
    """Return a sentence on the cause of the difference from the accepted time; empty if there is none."""
    today = sheet_of(result, "today")
    if old.cycles == today.cycles or not old.units:
        return ""
    today_units = today.units
    units = {
        name: Unit(
            name,
            u.busy,
            name in today_units and today_units[name].is_pipe,
            {label: (0, cycles) for label, cycles in u.operations.items()},
            u.waits,
            u.phases,
            today_units[name].givers if name in today_units else {},
        )
        for name, u in old.units.items()
    }
    latency = breakdown([Sheet("accepted", {}, None, today.clock_hz, old.cycles, today.launch_us, units), today])
    return "" if latency is None else reason(latency, 1)


def _is_met(old: ExpectedCycles, new: ExpectedCycles, tolerance: float) -> bool:
    """Return whether a case has the accepted result: exactly, or with its cycles and busy pipes within a tolerance."""
    if not tolerance:
        is_equal = old.cycles == new.cycles and old.busy_cycles == new.busy_cycles
        return is_equal and (not old.units or old.units == new.units)
    pipes = dict.fromkeys([*old.busy_cycles, *new.busy_cycles])
    pairs = [(old.cycles, new.cycles), *((old.busy_cycles.get(p, 0), new.busy_cycles.get(p, 0)) for p in pipes)]
    return all(abs(b - a) <= tolerance * a for a, b in pairs)


def _row(old: int | None, new: int | None) -> Row:
    return Row("cycles", old, new, (new - old) / old if old and new is not None and new != old else None)


def _unit(unit: Unit) -> UnitCycles:
    return UnitCycles(
        busy=unit.busy,
        operations={label: cycles for label, (_, cycles) in (unit.work or {}).items()},
        waits=dict(unit.waits or {}),
        phases=dict(unit.phases),
    )


def _moved(old: ExpectedCycles, new: ExpectedCycles) -> Iterator[tuple[str, str, int, int]]:
    before, after = dict(_numbers(old, whole=not old.units)), dict(_numbers(new, whole=not old.units))
    pairs = {key: (before.get(key, 0), after.get(key, 0)) for key in dict.fromkeys([*before, *after])}
    ranked = sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    yield from ((unit, name, a, b) for (unit, name), (a, b) in ranked if a != b)


def _numbers(expected: ExpectedCycles, *, whole: bool) -> Iterator[tuple[tuple[str, str], int]]:
    if whole:
        yield from (((pipe, "busy"), cycles) for pipe, cycles in expected.busy_cycles.items())
        return
    for name, unit in expected.units.items():
        yield from (((name, label), cycles) for label, cycles in unit.operations.items())
        yield from (((name, f"waits: {cause}"), cycles) for cause, cycles in unit.waits.items())
        yield from (((name, f"no work in {phase}"), cycles) for phase, cycles in unit.phases.items())
    others = {pipe: cycles for pipe, cycles in expected.busy_cycles.items() if pipe not in expected.units}
    yield from (((pipe, "busy, in all core groups"), cycles) for pipe, cycles in others.items())
