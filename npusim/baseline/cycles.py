"""Cycles against accepted ones: whether a change moved any number; on which pipe, operation and wait.

Cycles are whole and deterministic, so any difference counts unless a tolerance is given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.baseline.outcome import CheckOutcome, Row, Status, Update, request_of, said
from npusim.config.cases import ExpectedCycles, UnitCycles
from npusim.errors import NpusimError
from npusim.report.compare import reason
from npusim.report.parts import breakdown
from npusim.report.sheet import Sheet, Unit, sheet_of
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npusim.config.cases import BaselineFile
    from npusim.simulation.result import RunData
    from npusim.timing.result import TimingResult


def cycles_of(result: RunData) -> ExpectedCycles:
    """Return the cycles of a result as a baseline keeps them; raise `SpecError` for one without a time."""
    cycles, sheet = result.cycles, sheet_of(result, "today")
    units = {name: _unit(unit) for name, unit in sheet.units.items() if not _repeats(sheet, name)}
    assert result.timing is not None
    return ExpectedCycles(
        device_digest=result.device.digest(), cycles=cycles, busy_cycles=busy_cycles(result.timing), units=units
    )


def busy_cycles(timing: TimingResult) -> dict[str, int]:
    """Return how long each pipe is busy, over all core groups."""
    busy: dict[str, int] = {}
    for use in (use for uses in timing.queues for use in uses):
        busy[use.queue] = busy.get(use.queue, 0) + use.busy_cycles
    return busy


def run_baseline(case: BaselineFile, beside: Path) -> RunData:
    """Run a case; paths in it are relative to the folder ``beside``."""
    request = request_of(case, case.schedule, beside)
    return run_request(replace(request, tiling=dict(case.tiling), precision=case.precision))


def check_cycles(file: Path, case: BaselineFile, tolerance: float, update: Update | None) -> CheckOutcome:
    """Run a case of cycles and return what became of it; see `check_baselines`."""
    old = case.expect
    try:
        result = run_baseline(case, file.parent)
        new = cycles_of(result)
    except NpusimError as error:
        rows = () if old is None else (_row(old.cycles, None),)
        return CheckOutcome("cycles", file.stem, file, "failed", rows, said(error))
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
    """Return in a sentence why a result takes longer or shorter than what was accepted; empty if it does not."""
    today = sheet_of(result, "today")
    if old.cycles == today.cycles or not old.units:
        return ""
    known = today.units
    units = {
        name: Unit(
            name,
            u.busy,
            name in known and known[name].is_pipe,
            {label: (0, cycles) for label, cycles in u.operations.items()},
            u.waits,
            u.phases,
            known[name].givers if name in known else {},
        )
        for name, u in old.units.items()
    }
    latency = breakdown([Sheet("accepted", {}, None, today.clock_hz, old.cycles, today.launch_us, units), today])
    return "" if latency is None else reason(latency, 1)


def _is_met(old: ExpectedCycles, new: ExpectedCycles, tolerance: float) -> bool:
    """Return whether a case is as accepted: to the last number, or its cycles and busy pipes within a tolerance."""
    if not tolerance:
        alike = old.cycles == new.cycles and old.busy_cycles == new.busy_cycles
        return alike and (not old.units or old.units == new.units)
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


def _repeats(sheet: Sheet, name: str) -> bool:
    """Return whether a unit is one of a further core that does what the first does."""
    core, _, pipe = name.partition(".")
    first = f"{core.rstrip('0123456789')}0.{pipe}"
    return first in sheet.units and first != name and sheet.rows(first) == sheet.rows(name)


def _moved(old: ExpectedCycles, new: ExpectedCycles) -> Iterator[tuple[str, str, int, int]]:
    """Yield what moved, the largest first: operations and waits, or busy pipes where the file has no more."""
    before, after = dict(_numbers(old, whole=not old.units)), dict(_numbers(new, whole=not old.units))
    pairs = {key: (before.get(key, 0), after.get(key, 0)) for key in dict.fromkeys([*before, *after])}
    ranked = sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    yield from ((unit, name, a, b) for (unit, name), (a, b) in ranked if a != b)


def _numbers(told: ExpectedCycles, *, whole: bool) -> Iterator[tuple[tuple[str, str], int]]:
    if whole:
        yield from (((pipe, "busy"), cycles) for pipe, cycles in told.busy_cycles.items())
        return
    for name, unit in told.units.items():
        yield from (((name, label), cycles) for label, cycles in unit.operations.items())
        yield from (((name, f"waits: {cause}"), cycles) for cause, cycles in unit.waits.items())
        yield from (((name, f"nothing to do in {phase}"), cycles) for phase, cycles in unit.phases.items())
    groups = set(told.units)
    yield from (((pipe, "busy, in all core groups"), n) for pipe, n in told.busy_cycles.items() if pipe not in groups)
