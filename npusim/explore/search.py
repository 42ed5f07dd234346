"""Searches: each point of a space is simulated, proved to be no winner, merged with an equal one, or does not fit.

Points are built and bounded first; then those that may still win are simulated, the most promising first, in
batches that depend on earlier results alone: any number of workers gives the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import npusim
from npusim.config.node import NodeDevice
from npusim.errors import SpecError, TilingError
from npusim.explore.executors import Lost, executor
from npusim.explore.points import Bits, Job, PointTask, Surveyed, compute_bits, evaluate, narrow, prove, survey
from npusim.explore.space import SearchSpec, chunks, spec_of
from npusim.explore.store import PointOutcome, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from npusim.explore.executors import Executor
    from npusim.explore.space import AxisSpan, Point, Value
    from npusim.explore.store import Store
    from npusim.simulation.request import Request

__all__ = ["Options", "Search", "run_search"]

Result = TypeVar("Result")
#: Points simulated before the bounds of the others are compared with anything, of each group.
SEEDS = 4
#: Points of a batch, of one task of it, and how many have their bounds narrowed for each that is simulated.
BATCH, TASK, NARROWED = 64, 8, 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a search is done; `npusim.explore` describes them."""

    jobs: int = 1
    cluster: str | None = None
    store: Path | None = None
    resume: bool = False
    exhaustive: bool = False
    pareto: bool = False
    max_rmse: float | None = None
    finite: bool = False
    studies: bool = True
    check_all: bool = False
    on_outcome: Callable[[PointOutcome, int], None] | None = None

    def __post_init__(self) -> None:
        if self.max_rmse is not None and not 0 <= self.max_rmse < math.inf:
            raise SpecError(f"--max-rmse {self.max_rmse}: must be a finite number, and at least 0")

    @property
    def limits(self) -> list[object]:
        """What verdicts on points depend on, besides their bits and times."""
        return [self.pareto, self.max_rmse, self.finite]

    @property
    def needs_bits(self) -> bool:
        """Whether bits are computed."""
        return self.pareto or self.finite or self.max_rmse is not None


@dataclass
class Search:
    """One search under way."""

    setting: SearchSpec
    options: Options
    points: list[Point]
    outcomes: dict[int, PointOutcome] = field(default_factory=dict)
    bounds: dict[int, Surveyed] = field(default_factory=dict)
    bits: dict[int, Bits] = field(default_factory=dict)
    narrowed: set[int] = field(default_factory=set)
    checked: int = 0
    store: Store | None = None

    def __post_init__(self) -> None:
        self.variants = self.setting.pickled()
        self.groups: dict[int, tuple[object, ...]] = {i: self.group(p) for i, p in enumerate(self.points)}
        self.keys = [self.setting.key(point) for point in self.points]

    def group(self, point: Point) -> tuple[object, ...]:
        """Return the group in which a point is ranked: its problem, device and (but for fronts) schedule."""
        names = self.setting.scene_names
        return tuple(point.get(n) for n in names if n != "schedule" or not self.options.pareto)

    # ---------------------------------------------------------------- what is known

    def cutoff(self, index: int) -> float:
        """Return the latency that a point would have to beat: of those in its group with bits no worse than its own."""
        if self.options.exhaustive:
            return math.inf
        error = self.error(index)
        return min(
            (
                o.latency_us
                for i, o in self.outcomes.items()
                if o.status == "ok"
                and o.latency_us is not None
                and self.groups[i] == self.groups[index]
                and self.error(i) <= error
            ),
            default=math.inf,
        )

    def error(self, index: int) -> float:
        """Return the error of a point's bits; 0 where none are wanted, infinity where they are not finite."""
        # A resumed search has the outcome alone.
        bits = self.bits.get(index) or self.outcomes.get(index)
        if not self.options.needs_bits or bits is None:
            return 0.0
        return math.inf if bits.relative_rmse is None else bits.relative_rmse

    def resume(self, about: Mapping[str, object]) -> None:
        """Take in what the store has; verdicts by other limits are given anew, and kept so."""
        assert self.store is not None
        known = self.store.done()
        self.outcomes = {i: known[key] for i, key in enumerate(self.keys) if key in known}
        if self.store.about.get("limits") != self.options.limits:
            judged = {i: self._judged(o) for i, o in self.outcomes.items()}
            self.outcomes = {i: o for i, o in judged.items() if o is not None}
            self.store.replace(about, map(self._row, self.outcomes.values()))
        self._report(self.outcomes.values())

    def _judged(self, outcome: PointOutcome) -> PointOutcome | None:
        """Return a stored outcome judged by these limits; None where the store has a verdict alone."""
        if outcome.status in ("infeasible", "failed"):
            return outcome
        if outcome.status not in ("ok", "rejected") or outcome.cycles is None:
            return None
        why = self._rejected(Bits(outcome.relative_rmse))
        return replace(outcome, status="rejected" if why else "ok", reason=why)

    def _row(self, outcome: PointOutcome) -> tuple[str, dict[str, object], PointOutcome]:
        return self.keys[outcome.index], self.setting.config(outcome.point), outcome

    def keep(self, outcomes: Iterable[PointOutcome]) -> None:
        """Take in outcomes and store them."""
        new = {o.index: self._with_bits(o) for o in outcomes if o.index not in self.outcomes}
        self.outcomes |= new
        if self.store is not None and new:
            self.store.add(map(self._row, new.values()))
        self._report(new.values())

    def _report(self, outcomes: Iterable[PointOutcome]) -> None:
        if self.options.on_outcome is not None:
            for outcome in outcomes:
                self.options.on_outcome(outcome, len(self.points))

    def _with_bits(self, outcome: PointOutcome) -> PointOutcome:
        bits = self.bits.get(outcome.index)
        if bits is None:
            return outcome
        return replace(outcome, relative_rmse=bits.relative_rmse, is_finite=bits.relative_rmse is not None)

    # ---------------------------------------------------------------- tasks

    def job(self, indices: Sequence[int]) -> Job:
        """Return a job of these points."""
        tasks = tuple(PointTask(i, self.points[i], self.cutoff(i), self.bounds.get(i)) for i in indices)
        return Job(self.variants, tasks, self.options.needs_bits)

    def done(
        self, workers: Executor, function: Callable[[Job], list[Result]], parts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Sequence[int], list[Result]]]:
        """Yield the results of jobs; one that loses its worker is repeated point by point, without those that fail."""
        jobs, lost = [self.job(part) for part in parts], []
        for number, results in workers.run(function, jobs):
            if isinstance(results, Lost):
                lost.append(number)
            else:
                yield parts[number], results
        alone = [self.job([i]) for number in lost for i in parts[number]] if lost else []
        for number, results in workers.run(function, alone) if alone else ():
            (task,) = alone[number].tasks
            if isinstance(results, Lost):
                self.keep([PointOutcome(task.index, task.point, "failed", reason=results.reason)])
            else:
                yield [task.index], results

    def run(self, workers: Executor) -> None:
        """Do all of it."""
        remaining = [i for i in range(len(self.points)) if i not in self.outcomes]
        if self.options.exhaustive and not self.options.needs_bits:
            whole = self._chunks(remaining)
            parts = [some for part in whole for some in _parts(part, TASK)]
            for _, outcomes in self.done(workers, evaluate, parts):
                self.keep(outcomes)
            return
        if not self.options.needs_bits:
            self._seed(workers, remaining)
        self._survey(workers, [i for i in remaining if i not in self.outcomes])
        if self.options.needs_bits:
            self._compute_bits(workers)
        self._simulate(workers)
        self._merge()
        chosen = self._unchecked()
        for part, _ in self.done(workers, prove, _parts(chosen, 1)):
            self.checked += len(part)

    def _unchecked(self) -> list[int]:
        """Return pruned points to check for races: all, or as few as have every value of an axis that no other has."""
        values = {i: self._values(i) for i, o in sorted(self.outcomes.items()) if o.status == "pruned"}
        if self.options.check_all:
            return list(values)
        seen = set().union(*(self._values(i) for i, o in self.outcomes.items() if o.status == "ok"))
        chosen: list[int] = []
        while values := {i: new for i, values_of_point in values.items() if (new := values_of_point - seen)}:
            chosen.append(max(values, key=lambda i: (len(values[i]), -i)))
            seen |= values[chosen[-1]]
        return chosen

    def _values(self, index: int) -> set[tuple[object, ...]]:
        point = self.points[index]
        return {(point.get("schedule"), name, value) for name, value in point.items()}

    def _seed(self, workers: Executor, remaining: Sequence[int]) -> None:
        """Simulate the points nearest to the defaults: without a time to beat no bound says anything."""
        by_group: dict[object, list[int]] = defaultdict(list)
        for index in remaining:
            by_group[self.groups[index]].append(index)
        far = {index: (self.setting.distance(self.points[index]), index) for index in remaining}
        nearest = [i for group in by_group.values() for i in sorted(group, key=lambda i: far[i])[:SEEDS]]
        for _, outcomes in self.done(workers, evaluate, [[i] for i in nearest]):
            self.keep(outcomes)

    def _chunks(self, indices: Sequence[int]) -> list[list[int]]:
        """Return points in the parts that are surveyed together."""
        return [[i for i, _ in part] for part in chunks([(i, self.points[i]) for i in indices])]

    def _survey(self, workers: Executor, remaining: Sequence[int]) -> None:
        for _, surveyed in self.done(workers, survey, self._chunks(remaining)):
            self.bounds |= {i: bound for i, bound in surveyed if isinstance(bound, Surveyed)}
            misfits = {i: reason for i, reason in surveyed if isinstance(reason, str)}
            self.keep(PointOutcome(i, self.points[i], "infeasible", reason=reason) for i, reason in misfits.items())

    def _compute_bits(self, workers: Executor) -> None:
        """Compute bits once for all points that cannot differ in them, and reject those whose error is too large."""
        indices_by_bits: dict[object, list[int]] = defaultdict(list)
        for index, surveyed in sorted(self.bounds.items()):
            scene = tuple(self.points[index].get(n) for n in self.setting.scene_names)
            indices_by_bits[scene, surveyed.bits].append(index)
        classes = {indices[0]: indices for indices in indices_by_bits.values()}
        for (first, *_), (bits, *_) in self.done(workers, compute_bits, [[index] for index in classes]):
            self.bits |= dict.fromkeys(classes[first], bits)
        rejected = ((i, self._rejected(bits)) for i, bits in sorted(self.bits.items()))
        self.keep(PointOutcome(i, self.points[i], "rejected", reason=why) for i, why in rejected if why)

    def _rejected(self, bits: Bits) -> str:
        if bits.problem:
            return f"bits: {bits.problem}"
        if bits.relative_rmse is None:
            return "not finite" if self.options.finite or self.options.max_rmse is not None else ""
        error, most = bits.relative_rmse, self.options.max_rmse
        return f"relative RMSE {error:.2e} > {most:.2e}" if most is not None and error > most else ""

    def _simulate(self, workers: Executor) -> None:
        """Simulate batch after batch what may still win, the lowest bound first.

        Of points with the lowest bounds those whose bound can be narrowed are put back with the better one.
        """
        waiting: dict[object, list[int]] = defaultdict(list)
        for index, surveyed in self.bounds.items():
            if surveyed.same_as is None and index not in self.outcomes:
                waiting[self.groups[index]].append(index)
        each = max(1, BATCH // max(1, len(waiting)))
        while any(waiting.values()):
            wide: list[int] = []
            chosen: list[int] = []
            for group in waiting.values():
                group.sort(key=lambda i: (self.bounds[i].bound_us, i))
                self._prune(group)
                wide += (unnarrowed := [i for i in group[:each] if self.bounds[i].groups])
                ready = [i for i in group[:each] if not self.bounds[i].groups]
                # A narrow bound says nearly the time: the first few will do away with the others.
                few = max(1, each // NARROWED) if unnarrowed or self.narrowed.intersection(ready) else each
                chosen += ready[:few]
                group[:] = [i for i in group if i not in ready[:few]]
            self.narrowed.update(wide)
            for _, narrowed in self.done(workers, narrow, _parts(sorted(wide), TASK)):
                for index, bound in narrowed:
                    self.bounds[index] = self.bounds[index]._replace(bound_us=bound, groups=())
            for _, outcomes in self.done(workers, evaluate, _parts(chosen, 1)):
                self.keep(outcomes)

    def _prune(self, group: list[int]) -> None:
        """Take out of points by bounds those that cannot beat their cutoff."""
        if self.options.needs_bits:
            pruned = [i for i in group if self.bounds[i].bound_us > self.cutoff(i)]
        else:
            limit = self.cutoff(group[0]) if group else math.inf
            pruned = [i for i in group if self.bounds[i].bound_us > limit]
        removed = set(pruned)
        group[:] = [i for i in group if i not in removed]
        self.keep(PointOutcome(i, self.points[i], "pruned", bound_us=self.bounds[i].bound_us) for i in pruned)

    def _merge(self) -> None:
        """Give points that are the same program what that one gave."""
        for index, surveyed in sorted(self.bounds.items()):
            same_as, point = surveyed.same_as, self.points[index]
            if same_as is not None and same_as in self.outcomes:
                outcome = self.outcomes[same_as]
                self.keep([replace(outcome, index=index, point=point, status="merged", same_as=same_as)])


def _parts(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[n : n + size] for n in range(0, len(indices), size)]


def _subject(request: Request) -> dict[str, object]:
    """Return what is computed, and on what device, for who reads the store."""
    about: dict[str, object] = {"device": request.machine().name}
    if request.problem is None:
        about["workload"] = request.title(request.load())
    if request.problem is not None or request.tensors is None:  # else the tensors' sizes are the problem
        about["problem"] = (request.problem or request.attention()).model_dump(mode="json")
    return about


def run_search(request: Request, axes: Mapping[str, Iterable[Value | AxisSpan]], options: Options) -> Search:
    """Search; raise what every point would raise before anything is written.

    When it is interrupted, what is done stays in the store.
    """
    setting = spec_of(request, axes, studies=options.studies)
    points = setting.points()
    if not points:
        axes_text = " ".join(f"{n}={','.join(map(str, values))}" for n, values in setting.axes.items())
        raise TilingError(f"the space is empty: no combination of {axes_text} has a value on each axis")
    if isinstance(setting.request.machine(), NodeDevice):
        options = replace(options, exhaustive=True)  # whose blocks nobody bounds
    search = Search(setting, options, points)
    with ExitStack() as stack:
        # A store is begun when there is somebody to fill it.
        workers = stack.enter_context(executor(min(options.jobs, len(points)), options.cluster))
        if options.store is not None:
            about = {
                "version": npusim.__version__,
                "request": setting.digest(options.needs_bits, options.exhaustive),
                "schedules": list(setting.schedules),
                **_subject(setting.request),
                "points": len(points),
                "axes": {name: [str(v) for v in values] for name, values in setting.axes.items()},
                "limits": options.limits,
            }
            search.store = stack.enter_context(open_store(options.store, about, resume=options.resume))
            search.resume(about)
        search.run(workers)
    return search
