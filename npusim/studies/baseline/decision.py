"""The schedule and tile that win a space, compared with the accepted winner: its margin, and whether it is finite.

Cycles may change here as long as the choice does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.cases import Candidate, DecisionFile, ExpectedChoice, ExpectedDecision
from npusim.errors import SpecError
from npusim.report.comparison import compare, reason
from npusim.report.text import percent
from npusim.simulation.simulate import run_request
from npusim.studies.baseline.cycles import CheckOutcome, Comparison, Row, Status, Update, request_of
from npusim.studies.explore.exploration import Exploration, search
from npusim.studies.explore.search import Options
from npusim.studies.explore.space import SearchRequest

if TYPE_CHECKING:
    from npusim.studies.explore.store import PointOutcome


class CandidateOutcome(NamedTuple):
    """The result of one candidate's space; ``finite`` refers to the best point's output, None if no bits
    were computed.
    """

    name: str
    found: Exploration
    finite: bool | None = None

    @property
    def best(self) -> PointOutcome | None:
        """The point with the smallest time."""
        return self.found.best

    @property
    def margin(self) -> float | None:
        """Time of the next point relative to that of the best one, minus 1."""
        ranked = self.found.feasible
        return _longer(ranked[0].latency_us, ranked[1].latency_us) if len(ranked) > 1 else None

    def choice(self) -> ExpectedChoice:
        """Return the part of the outcome that a decision stores."""
        best = self.best
        return ExpectedChoice(
            candidate=self.name,
            point=None if best is None else dict(best.point),
            margin=_rounded(self.margin),
            latency_us=None if best is None else best.latency_us,
            finite=self.finite,
            cycles=tuple(o.cycles for o in self.found.outcomes),
        )

    def tried(self, point: Mapping[str, object]) -> PointOutcome | None:
        """Return the outcome of a point."""
        return next((o for o in self.found.outcomes if o.point == point), None)


class Decision(NamedTuple):
    """The result of every candidate, and the relative slowdown of the second best against the winner."""

    candidates: tuple[CandidateOutcome, ...]
    margin: float | None

    @property
    def winner(self) -> CandidateOutcome:
        """The candidate whose best point needs the least time; the first one, if several are equal."""
        return min(self.candidates, key=lambda f: _time(f.best))

    def expected(self) -> ExpectedDecision:
        """Return the decision in the form of its file."""
        return ExpectedDecision(
            device_digest=self.candidates[0].found.request.machine().digest(),
            winner=self.winner.name,
            margin=_rounded(self.margin),
            choices=tuple(f.choice() for f in self.candidates),
        )


def decide(candidates: Sequence[CandidateOutcome]) -> Decision:
    """Return the winning candidate; raise `SpecError` if no point of any candidate fits."""
    times = sorted(_time(f.best) for f in candidates)
    if not times or times[0] == float("inf"):
        raise SpecError("no point of any candidate fits")
    return Decision(tuple(candidates), _longer(times[0], times[1]) if times[1:] and times[1] != float("inf") else None)


def decision_today(file: Path, case: DecisionFile) -> Comparison:
    """Search a case's space, and return the comparison of its decision; see `check_baselines`."""
    return partial(_compared, file, case.expect, decide([_search(case, c, file.parent) for c in case.candidates]))


def _compared(
    file: Path, accepted: ExpectedDecision | None, today: Decision, tolerance: float, update: Update | None
) -> CheckOutcome:
    """Return the outcome of a case from the accepted decision and the new one."""
    new = today.expected()
    rows = tuple(_changes(accepted, today, tolerance)) if accepted is not None else ()
    status: Status = "new" if accepted is None else "changed" if rows else "ok"
    if update is not None:
        status = update.accept(status, new)
    margin = today.winner.margin if today.margin is None else today.margin
    winner = Row(
        "winner",
        None if accepted is None else _won(accepted.winner, _choice(accepted, accepted.winner)),
        _won(today.winner.name, today.winner.choice()),
        why="" if margin is None else f"by {percent(margin)}",
    )
    return CheckOutcome(
        "decision",
        file.stem,
        file,
        status,
        (winner, *rows),
        device_changed=accepted is not None and accepted.device_digest != new.device_digest,
        method=", ".join(dict.fromkeys(f.best.method for f in today.candidates if f.best)),
    )


def _search(case: DecisionFile, candidate: Candidate, folder: Path) -> CandidateOutcome:
    """Return the result of a search and whether the best point's output is finite, for the last rows of one head."""
    asked = request_of(case, candidate, folder)
    searched = search(SearchRequest(asked, (asked.schedule,)).spec(candidate.fields), Options(exhaustive=True))
    # A product or a copy has no sample.
    if not case.numerics or searched.best is None or searched.request.problem is not None:
        return CandidateOutcome(candidate.name, searched)
    looked_at = searched.setting.variants.request_of(searched.best.point)
    bits = run_request(replace(looked_at, numerics=True, heads=[0])).numerics
    return CandidateOutcome(candidate.name, searched, None if bits is None else bits.is_finite)


def _changes(old: ExpectedDecision, today: Decision, tolerance: float) -> Iterator[Row]:
    """Yield the choices that changed or no longer fit, with the reason."""
    for candidate in today.candidates:
        was = _choice(old, candidate.name)
        if was is not None:
            yield from _of_candidate(was, candidate, tolerance)
    before, after = next((f for f in today.candidates if f.name == old.winner), None), today.winner
    if before is None or before.name == after.name or before.best is None or after.best is None:
        return
    if (_longer(after.best.latency_us, before.best.latency_us) or 0.0) > tolerance:
        latencies = [f"{f.name} {_us(_choice(old, f.name))} -> {_time(f.best):,.2f} us" for f in (before, after)]
        why = _why(before, before.best, after, after.best)
        yield Row("schedule", before.name, after.name, why="; ".join((*latencies, why)))


def _of_candidate(was: ExpectedChoice, candidate: CandidateOutcome, tolerance: float) -> Iterator[Row]:
    """Yield the changes of one candidate: its best tile, whether that tile fits, and whether its output is finite."""
    best = candidate.best
    point = None if best is None else best.point
    then = None if was.point is None else candidate.tried(was.point)
    if best is None or then is None or then.latency_us is None:
        if was.point is not None or best is not None:
            why = "a point fits" if then is None else then.reason
            yield Row(candidate.name, _at(was.point), _at(point), why=why)
        return
    slower = _longer(best.latency_us, then.latency_us) or 0.0
    if was.point != point and slower > tolerance:
        yield Row(candidate.name, _at(was.point), _at(point), why=_why_tile(was, candidate, then, best))
    if None not in (was.finite, candidate.finite) and was.finite != candidate.finite:
        yield Row(candidate.name, _finite(was.finite), _finite(candidate.finite), why=f"at {_at(point)}")


def _why_tile(was: ExpectedChoice, candidate: CandidateOutcome, then: PointOutcome, best: PointOutcome) -> str:
    """Return the changes in both points' cycles, and the unit on which one of them now needs less time."""
    cycles = [
        f"{_at(o.point)}: {was.cycles[o.index]:,} -> {o.cycles:,} cycles"
        for o in (then, best)
        if o.index < len(was.cycles) and was.cycles[o.index] is not None
    ]
    return "; ".join((*cycles, _why(candidate, then, candidate, best)))


def _why(old: CandidateOutcome, then: PointOutcome, new: CandidateOutcome, best: PointOutcome) -> str:
    """Return the units on which the new winner needs less time than the old one would need now."""
    runs = [run_request(c.found.setting.variants.request_of(o.point)) for c, o in ((old, then), (new, best))]
    latency = compare(*runs).latency
    return "" if latency is None else f"today {reason(latency, 1)}"


def _choice(decision: ExpectedDecision, name: str) -> ExpectedChoice | None:
    return next((c for c in decision.choices if c.candidate == name), None)


def _won(name: str, choice: ExpectedChoice | None) -> str:
    if choice is None or choice.point is None:
        return name
    finite = "" if choice.finite is None else f", {_finite(choice.finite)}"
    return f"{name} {_at(choice.point)}{finite}"


def _at(point: Mapping[str, object] | None) -> str:
    return "none fits" if point is None else " ".join(f"{n}={v}" for n, v in point.items())


def _us(choice: ExpectedChoice | None) -> str:
    return "-" if choice is None or choice.latency_us is None else f"{choice.latency_us:,.2f}"


def _finite(finite: bool | None) -> str:
    return "finite" if finite else "not finite"


def _time(tried: PointOutcome | None) -> float:
    return float("inf") if tried is None or tried.latency_us is None else tried.latency_us


def _longer(first: float | None, second: float | None) -> float | None:
    return None if not first or second is None else second / first - 1


def _rounded(margin: float | None) -> float | None:
    return None if margin is None else round(margin, 6)
