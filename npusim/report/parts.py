"""A difference of latency in parts that add up to it, by construction.

The core group that ends last takes the kernel's time, and each unit of it spends all of that time on
something: its operations, what others on shared links or pipes add to them, waits by cause, phases in which it has
nothing to do, and the end.  One unit's account in both runs is therefore a split of the difference.  The
unit is the queue that is busiest in all runs: where it cannot be busier, what it waits for costs time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.report.sheet import Row, Sheet

#: Links of a chain of waits that are followed at most.
LONGEST = 12


@dataclass(frozen=True)
class Part:
    """Something that a unit spends cycles on, in each run; ``givers`` are the queues that a wait is for.

    The launch is a part of the latency, not of the kernel: it has no cycles (`Breakdown.us`).
    """

    kind: str
    name: str
    cycles: tuple[int, ...]
    givers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it in words: ``softmax``, ``waits for S ready (aiv0.MTE2)``."""
        match self.kind:
            case "wait":
                by = f" ({', '.join(self.givers)})" if self.givers else ""
                return f"waits: {self.name}{by}"
            case "phase":
                return f"nothing to do in {self.name}"
        return self.name


LAUNCH = Part("launch", "launch", ())


@dataclass(frozen=True)
class PartStep:
    """One step along a chain of waits: what moved most in the same direction, in the queue waited for."""

    unit: str
    part: Part


@dataclass(frozen=True)
class Breakdown:
    """Every run's latency in parts: ``sum(p.cycles[i] for p in parts)`` are run i's cycles, the launch beside.

    ``units`` is the unit whose account it is, in each run.
    """

    sheets: tuple[Sheet, ...]
    units: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def is_one_clock(self) -> bool:
        """Whether cycles of all runs are as long as each other."""
        return len({s.clock_hz for s in self.sheets}) == 1

    def us(self, part: Part, run: int) -> float:
        """Return a part's time in one run, in microseconds; all of them are its latency."""
        sheet = self.sheets[run]
        return sheet.launch_us if part.kind == LAUNCH.kind else sheet.us(part.cycles[run])

    def change_us(self, part: Part, run: int) -> float:
        """Return how much longer a part is in run ``run`` than in the first, in microseconds."""
        return self.us(part, run) - self.us(part, 0)

    @property
    def ranked(self) -> tuple[Part, ...]:
        """The parts, the one that differs most from the first run's in any other before all else."""
        runs = range(1, len(self.sheets))
        return tuple(sorted(self.parts, key=lambda p: -max(abs(self.change_us(p, i)) for i in runs)))

    def moved(self, run: int) -> tuple[Part, ...]:
        """Return the parts that differ from the first run's, the largest difference first."""
        parts = [p for p in self.parts if self.change_us(p, run)]
        return tuple(sorted(parts, key=lambda p: -abs(self.change_us(p, run))))

    def causes(self, run: int) -> tuple[Part, ...]:
        """Return the parts that make the difference: the largest with its sign, three at most.

        They are enough to be four fifths of all that have its sign.
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
    """Return the runs' times in parts; None where one of them has no time."""
    if any(s.cycles is None or not s.units for s in sheets):
        return None
    units = _units(sheets)
    launch = replace(LAUNCH, cycles=(0,) * len(sheets))
    return Breakdown(tuple(sheets), units, (*parts_of(sheets, units), launch))


def parts_of(sheets: Sequence[Sheet], units: Sequence[str]) -> tuple[Part, ...]:
    """Return what one unit of each run spends its time on, as far as all runs say; nothing where it is missing.

    Operations come first, the end last.
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


def _units(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """Return the busiest unit that all runs have, or each run's own where none is in all of them."""

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


def chain(old: Sheet, new: Sheet, unit: str, cause: str) -> tuple[PartStep, ...]:
    """Follow a wait to who is waited for, and what moved most there in the same direction, and so on.

    It ends at something that is no wait, or where it comes back to a queue it has been at: waits in a ring
    are the pace of a loop of hand-overs, which its depth and the work in it decide.
    """
    seen, steps = {unit}, list[PartStep]()
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
        steps.append(PartStep(unit, Part(kind, cause, cycles)))
        if kind != "wait" or unit in seen:
            break
        seen.add(unit)
    return tuple(steps)


def _change(old: Sheet, new: Sheet, unit: str) -> dict[Row, int]:
    before, after = old.rows(unit), new.rows(unit)
    rows = dict.fromkeys([*before, *after])
    return {row: after.get(row, 0) - before.get(row, 0) for row in rows}
