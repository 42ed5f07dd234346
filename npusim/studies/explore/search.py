"""Searches: each point of a space is simulated, proved not to win, merged with an equal point, or refused because it
does not fit.

The points of plain runs are simulated first; in a large space, the neighbours of the fastest point follow, along each
axis and with decreasing distance.  Then families of points are bounded together, the nearest to the fastest point
first.  Families whose bound may win are opened and their points bounded one by one.  Points that may still win are
simulated, the most promising first, in batches that depend only on earlier results: any number of workers gives the
same result. Each verdict is stored as soon as it is known.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import npusim
from npusim.errors import SpecError
from npusim.kernels.declare.define import machine_of
from npusim.late_methods import dataclass
from npusim.simulation.variants import PRECISION
from npusim.studies.explore.points import (
    Bits,
    Job,
    PointTask,
    Surveyed,
    compute_bits,
    evaluate,
    forget,
    narrow,
    prove,
    survey,
)
from npusim.studies.explore.space import Point, PointFamily, SearchSpec, Value, chunks
from npusim.studies.explore.store import PointOutcome, Store, open_store
from npusim.studies.workers.executors import executor
from npusim.studies.workers.tasks import Executor, Lost

Result = TypeVar("Result")
#: Number of points of each group that are simulated before any bound is compared.
SEEDS = 4
#: Number of points above which a walk from point to point comes first, and largest number of points that the walk
#: simulates.
LARGE, STEPS = 2048, 96
#: Number of points of a batch, of one of its tasks, and number of points whose bounds are narrowed for each simulated
#: point.
BATCH, TASK, NARROWED = 64, 8, 16
#: Stages whose time is estimated: the bounds of families, and the simulation of points that may win.
BOUNDS, SIMULATION = "bounds", "simulation"
#: Number of families that are opened at a time, and number of pruned points that are checked for races for each value
#: that no simulated point has.
OPENED, TRIED = 16, 8
#: Number of points with an unchecked value among which the point to check is chosen; a point with further unchecked
#: values is preferred.
LOOKED_AT = 64
#: Measured seconds: for the bound of a family (5 to 60 ms), for further work on one of its points on average, for the
#: bits of one configuration, and for the simulation of a point.
FAMILY_S, POINT_S, BITS_S, RUN_S = 20e-3, 0.6e-3, 0.15, 0.06


class Progress(NamedTuple):
    """The progress of a search: points with a verdict, the best latency so far, and the current stage.

    ``remaining_us``: no point without a verdict is faster than this; None if points have no bound yet. ``remaining_s``:
    the estimated rest of the stage, from its rate so far; None if it is unknown.
    """

    stage: str
    decided: int
    points: int
    best_us: float | None = None
    remaining_us: float | None = None
    remaining_s: float | None = None


class Size(NamedTuple):
    """The size of a search: points, families with one bound each, and an estimate of its seconds."""

    points: int
    families: int
    seconds: float


class _OutOfTimeError(Exception):
    """The time of a search has ended."""


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
    check_all: bool = False
    budget_s: float | None = None
    notes: tuple[str, ...] = ()
    on_outcome: Callable[[PointOutcome, int], None] | None = None
    on_size: Callable[[Size], None] | None = None
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise SpecError(f"--budget {self.budget_s}: must be a finite number of seconds above 0")
        if self.max_rmse is not None and not 0 <= self.max_rmse < math.inf:
            raise SpecError(f"--max-rmse {self.max_rmse}: must be a finite number, and at least 0")

    @property
    def limits(self) -> list[object]:
        """The options on which, in addition to bits and times, the verdicts on points depend."""
        return [self.pareto, self.max_rmse, self.finite]

    @property
    def needs_bits(self) -> bool:
        """Whether bits are computed."""
        return self.pareto or self.finite or self.max_rmse is not None


@dataclass
class Search:
    """One search in progress."""

    setting: SearchSpec
    options: Options
    points: list[Point]
    outcomes: dict[int, PointOutcome] = field(default_factory=dict)
    bounds: dict[int, Surveyed] = field(default_factory=dict)
    bits: dict[int, Bits] = field(default_factory=dict)
    narrowed: set[int] = field(default_factory=set)
    checked: int = 0
    #: Values that occur in no point that is checked for races, as ``name=value``.
    unseen: tuple[str, ...] = ()
    store: Store | None = None

    def __post_init__(self) -> None:
        self.variants = pickle.dumps(self.setting.variants)
        #: Number of the group in which each point is ranked: its problem, device and (except for fronts) schedule.
        names = [n for n in self.setting.scene_names if n != "schedule" or not self.options.pareto]
        self.groups = {i: tuple(point.get(n) for n in names) for i, point in enumerate(self.points)}
        #: Unopened families by the number of their first point, and the waiting entries of each group by bound.
        self.families: dict[int, PointFamily] = {}
        self._waiting: dict[tuple[object, ...], list[tuple[float, int]]] = defaultdict(list)
        #: The points with which a point shares most of its work: its family, and the families that are bounded
        #: together.
        self._homes: dict[int, tuple[Hashable, ...]] = {}
        #: Latency and error of the points that no other point beats in both, by group.
        self._fronts: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
        #: Lower bounds of points or of their families, and the smallest bound among the points that are examined at
        #: present.
        self._least: dict[int, float] = {}
        self._lowest, self._is_bounded = math.inf, False
        self._later: Mapping[tuple[object, ...], list[tuple[float, int]]] = {}
        #: Classes of points with the same bits, of points that have no bound yet, and the bits of a class.
        self._classes: dict[int, Hashable] = {}
        self._bits_of: dict[Hashable, Bits] = {}
        self._stage, self._bounded, self._begun = "", 0, (0.0, 0.0)
        self._deadline = time.time() + (self.options.budget_s or math.inf)

    # ---------------------------------------------------------------- known facts

    def cutoff(self, index: int) -> float:
        """Return the latency that a point must beat: the smallest of its group, among points with no larger error."""
        if self.options.exhaustive:
            return math.inf
        error = self.error(index)
        return min((us for us, e in self._fronts[self.groups[index]] if e <= error), default=math.inf)

    def error(self, index: int) -> float:
        """Return the error of a point's bits; 0 if errors are not requested, infinity if they are not finite."""
        # A resumed search has only the outcome.
        bits = self.bits.get(index) or self.outcomes.get(index)
        if not self.options.needs_bits or bits is None:
            return 0.0
        return math.inf if bits.relative_rmse is None else bits.relative_rmse

    def undecided(self) -> dict[int, float | None]:
        """Return the points without a verdict, each with a bound of its latency in us if it has one."""
        return {i: self._least.get(i) for i in self.groups if i not in self.outcomes}

    def resume(self, about: Mapping[str, object]) -> None:
        """Load the rows of the store; verdicts under other limits are computed again, and stored."""
        assert self.store is not None
        known = self.store.done()
        keys = (self.setting.key(point) for point in self.points) if known else ()
        outcomes = {i: known[key] for i, key in enumerate(keys) if key in known}
        if self.store.about.get("limits") != self.options.limits:
            judged = {i: self._judged(o) for i, o in outcomes.items()}
            outcomes = {i: o for i, o in judged.items() if o is not None}
            self.store.replace(about, map(self._row, outcomes.values()))
        self._take(outcomes)

    def _judged(self, outcome: PointOutcome) -> PointOutcome | None:
        """Return a stored outcome, judged by these limits; None if the store has only a verdict."""
        if outcome.status in ("infeasible", "failed"):
            return outcome
        if outcome.status not in ("ok", "rejected") or outcome.cycles is None:
            return None
        why = self._rejected(Bits(outcome.relative_rmse))
        return replace(outcome, status="rejected" if why else "ok", reason=why)

    def _row(self, outcome: PointOutcome) -> tuple[str, PointOutcome]:
        return self.setting.key(outcome.point), outcome

    def keep(self, outcomes: Iterable[PointOutcome]) -> None:
        """Record outcomes, and write them to the store."""
        new = {o.index: self._with_bits(o) for o in outcomes if o.index not in self.outcomes}
        if self.store is not None and new:
            self.store.add(map(self._row, new.values()))
        self._take(new)

    def _take(self, outcomes: Mapping[int, PointOutcome]) -> None:
        self.outcomes |= outcomes
        for index, o in outcomes.items():
            if o.status == "ok" and o.latency_us is not None:
                front, error, us = self._fronts[self.groups[index]], self.error(index), o.latency_us
                if all(us < other or error < e for other, e in front):
                    front[:] = [(other, e) for other, e in front if other < us or e < error] + [(us, error)]
        if self.options.on_outcome is not None:
            for outcome in outcomes.values():
                self.options.on_outcome(outcome, len(self.points))

    def _tell(self, stage: str = "") -> None:
        """Report the progress of the search; raise `_OutOfTimeError` if its time is over."""
        if stage:
            self._stage = stage
            self._begun = time.time(), self._share()
        if self.options.on_progress is not None:
            best = min((us for front in self._fronts.values() for us, _ in front), default=None)
            bounds = (bound for e in (*self._waiting.values(), *self._later.values()) for bound, _ in e)
            done, remaining = len(self.outcomes), min(self._lowest, min(bounds, default=math.inf))
            remaining_us = remaining if self._is_bounded and math.isfinite(remaining) else None
            (begun, first), share = self._begun, self._share()
            is_paced = share > first and self._stage in (BOUNDS, SIMULATION)
            remaining_s = (time.time() - begun) * (1 - share) / (share - first) if is_paced else None
            self.options.on_progress(Progress(self._stage, done, len(self.points), best, remaining_us, remaining_s))
        if time.time() > self._deadline:
            raise _OutOfTimeError

    def _share(self) -> float:
        """Return the share of the points that have a verdict or, while families are bounded, a bound."""
        return (self._bounded if self._stage == BOUNDS else len(self.outcomes)) / len(self.points)

    def _with_bits(self, outcome: PointOutcome) -> PointOutcome:
        bits = self.bits.get(outcome.index)
        if bits is None:
            return outcome
        error, sampling_error = bits.relative_rmse, bits.sampling_error
        return replace(outcome, relative_rmse=error, is_finite=error is not None, sampling_error=sampling_error)

    # ---------------------------------------------------------------- tasks

    def job(self, indices: Sequence[int], families: Mapping[int, PointFamily] | None = None) -> Job:
        """Return a job of these points, or of ``families``, each represented by its first point."""
        tasks = tuple(PointTask(i, self.points[i], self._floor(i), self.bounds.get(i)) for i in indices)
        if families is not None:
            lightest = ((task, families[task.index]) for task in tasks)
            tasks = tuple(replace(t, point=f.lightest, heavier=f.heavier, is_dealt=f.is_dealt) for t, f in lightest)
        return Job(self.variants, tasks, self.options.needs_bits, self._deadline)

    def _floor(self, index: int) -> float:
        """Return the latency above which a point loses whatever its error is: higher bounds need not be examined."""
        if self.options.needs_bits and index not in self.bits:
            front = self._fronts[self.groups[index]]
            return max((us for us, _ in front), default=math.inf)
        return self.cutoff(index)

    def done(
        self,
        workers: Executor,
        function: Callable[[Job], list[Result]],
        parts: Sequence[Sequence[int]],
        families: Mapping[int, PointFamily] | None = None,
    ) -> Iterator[tuple[Sequence[int], list[Result]]]:
        """Yield the results of jobs; a job that loses its worker is repeated point by point, and points that fail again
        are left out.
        """
        jobs, lost = [self.job(part, families) for part in parts], []
        homes = [self._homes.get(part[0], ()) for part in parts]
        for number, results in workers.run(function, jobs, homes):
            if isinstance(results, Lost):
                lost.append(number)
            else:
                yield parts[number], results
                self._tell()
        alone = [self.job([i], families) for number in lost for i in parts[number]] if lost else []
        for number, results in workers.run(function, alone) if alone else ():
            (task,) = alone[number].tasks
            if isinstance(results, Lost):
                self.keep([PointOutcome(task.index, self.points[task.index], "failed", reason=results.reason)])
            else:
                yield [task.index], results

    def run(self, workers: Executor) -> None:
        """Run the search until it ends or its time is over."""
        try:
            self._run(workers)
        except _OutOfTimeError:
            self._merge()

    def _run(self, workers: Executor) -> None:
        remaining = [i for i in range(len(self.points)) if i not in self.outcomes]
        self._tell("first points")
        if self.options.exhaustive and not self.options.needs_bits:
            listed = chunks({i: self.points[i] for i in remaining})
            parts = [some for part in listed for some in _parts(part, TASK)]
            for _, outcomes in self.done(workers, evaluate, parts):
                self.keep(outcomes)
            return
        if not self.options.exhaustive:
            self._seed(workers, remaining)
            # No two programs are known to be equal before their fields are chosen.
            if self.setting.is_open() and not self.options.needs_bits:
                remaining = [i for i in remaining if i not in self.outcomes]
        self._survey(workers, remaining)
        if self.options.needs_bits:  # the likely fastest points come first: they exclude most of the others
            self._later = self._put_aside()
            self._compute_bits(workers, self._waiting_families())
            self._simulate(workers)
            self._waiting, self._later = self._waiting | self._later, {}
            self._compute_bits(workers, self._waiting_families())
        self._simulate(workers)
        self._merge()
        self._check(workers)

    # ---------------------------------------------------------------- stages

    def _seed(self, workers: Executor, remaining: Sequence[int]) -> None:
        """Simulate the points of plain runs and their neighbours: without a time to beat, no bound decides anything."""
        by_group: dict[object, list[tuple[float, int]]] = defaultdict(list)
        for index in remaining:
            point = self.points[index]
            apart = point.get(PRECISION) if self.options.pareto else None
            by_group[self.groups[index], point.get("schedule"), apart].append((self.setting.distance(point), index))
        count = 1 if self.options.needs_bits else SEEDS
        nearest = [sorted(near)[:count] for near in by_group.values()]
        # in parts, so that some point has a time early
        for some in _parts([near[0][1] for near in nearest], self.options.jobs):
            if self.options.needs_bits:
                self._compute_bits(workers, [(i,) for i in self._looked_at(workers, some)])
            self._evaluate(workers, some)
        self._evaluate(workers, [i for near in nearest for _, i in near[1:]])
        for listed in by_group.values():
            timed = [o for _, i in listed if (o := self.outcomes.get(i)) and o.status == "ok"]
            if timed and len(listed) > LARGE:
                self._climb(workers, min(timed, key=_speed).index)

    def _evaluate(self, workers: Executor, indices: Sequence[int]) -> None:
        for _, outcomes in self.done(workers, evaluate, [[i] for i in indices if i not in self.outcomes]):
            self.keep(outcomes)

    def _climb(self, workers: Executor, at: int) -> None:
        """Move from a point to its fastest neighbour while there is a faster one: first by many values of an axis, then
        by fewer.

        Points that do not fit, or whose bound proves that they lose, are not simulated.
        """
        axes = self.setting.spaces[str(self.points[at].get("schedule", self.setting.schedules[0]))]
        strides, stride = dict[str, int](), 1  # the steps from a point to the point with the next value of an axis
        for name, values in reversed([*axes.items()]):
            strides[name], stride = stride, stride * len(values)
        steps, most = max(map(len, axes.values())) // 2, len(self.outcomes) + STEPS
        while steps and len(self.outcomes) < most:
            start = at
            for name, values in axes.items():
                place = values.index(cast("Value", self.points[at][name]))
                beside = [at + n * strides[name] for n in (-steps, steps) if 0 <= place + n < len(values)]
                if name not in self.setting.scene_names and (name != PRECISION or not self.options.pareto):
                    at = self._fastest(workers, at, beside)
            steps //= 1 if at != start else 2

    def _fastest(self, workers: Executor, at: int, beside: Sequence[int]) -> int:
        most, new = self.outcomes[at].latency_us or math.inf, [i for i in beside if i not in self._classes]
        promising = [[i] for i, us in self._looked_at(workers, new).items() if us <= most]
        simulated = [o for _, some in self.done(workers, evaluate, promising) for o in some]
        if self.options.needs_bits:  # bits take longer than times: only for faster points
            simulated = [o for o in simulated if o.status == "ok" and _speed(o) < _speed(self.outcomes[at])]
            self._compute_bits(workers, [(o.index,) for o in simulated])
        self.keep(simulated)
        timed = [self.outcomes[i] for i in (at, *beside) if i in self.outcomes]
        return min((o for o in timed if o.status == "ok"), key=_speed).index

    def _looked_at(self, workers: Executor, indices: Iterable[int]) -> dict[int, float]:
        """Return bounds in us of points without a verdict, one by one; points that do not fit get their verdict."""
        bounds: dict[int, float] = {}
        for _, surveyed in self.done(workers, survey, [[i] for i in indices if i not in self.outcomes]):
            for index, bound in surveyed:
                if isinstance(bound, str):
                    self.keep([PointOutcome(index, self.points[index], "infeasible", reason=bound)])
                else:
                    bounds[index], self._classes[index] = bound.bound_us, bound.bits or index
        return dict(sorted(bounds.items()))

    def _survey(self, workers: Executor, remaining: Sequence[int]) -> None:
        """Bound families; decide the points that do not fit or cannot win."""
        self._tell(BOUNDS)
        fastest: dict[object, PointOutcome] = {}
        for o in sorted((o for o in self.outcomes.values() if o.status == "ok"), key=_speed):
            fastest.setdefault(self.groups[o.index], o)

        def apart(index: int) -> int:
            near = fastest.get(self.groups[index])
            return 0 if near is None else sum(self.points[index].get(n) != v for n, v in near.point.items())

        families = self.setting.families(self.points, remaining, has_bits=self.options.needs_bits)
        self.families = {f.indices[0]: f for f in families}
        self._waiting = {group: [] for group in dict.fromkeys(self.groups[i] for i in remaining)}
        parts = list(chunks({i: f.lightest for i, f in self.families.items()}))
        self._homes = {i: (first, (part[0],)) for part in parts for first in part for i in self._members(first)}
        parts.sort(key=lambda part: min(map(apart, part)))
        self._bound(workers, parts, dict(self.families))
        self._is_bounded = True

    def _open(self, workers: Executor, opened: Sequence[int]) -> None:
        parts = []
        for first in opened:
            of_family = self.bounds.pop(first)
            parts.append(sorted(i for i in self.families.pop(first).indices if i not in self.outcomes))
            self.bounds |= dict.fromkeys(parts[-1], of_family)
        self._bound(workers, [part for part in parts if part])

    def _bound(
        self, workers: Executor, parts: Sequence[Sequence[int]], families: Mapping[int, PointFamily] | None = None
    ) -> None:
        """Compute bounds of points, or of ``families``, and queue the points that fit and may win."""
        for _, surveyed in self.done(workers, survey, parts, families):
            misfits: list[PointOutcome] = []
            for index, bound in surveyed:
                members = self._members(index)
                self._bounded += len(members)
                if isinstance(bound, str):
                    misfits += (PointOutcome(i, self.points[i], "infeasible", reason=bound) for i in members)
                    self.families.pop(index, None)
                elif bound.same_as is not None and index in self.families:  # opened together; equal points are merged
                    others = self.families[bound.same_as]
                    self.families[bound.same_as] = replace(others, indices=(*others.indices, *members))
                    del self.families[index]
                else:
                    self.bounds[index] = bound
                    self._least |= dict.fromkeys(members, bound.bound_us)
                    if bound.same_as is None:
                        self._waiting[self.groups[index]].append((bound.bound_us, index))
            self.keep(misfits)
            if not self.options.needs_bits:
                self._prune()

    def _members(self, index: int) -> tuple[int, ...]:
        return self.families[index].indices if index in self.families else (index,)

    def _compute_bits(self, workers: Executor, members: Sequence[Sequence[int]]) -> None:
        """Compute bits once for all points that cannot differ in them."""
        self._tell("bits")
        classes: dict[object, list[Sequence[int]]] = defaultdict(list)
        for indices in members:
            first, scene = indices[0], tuple(self.points[indices[0]].get(n) for n in self.setting.scene_names)
            alike = self.bounds[first].bits if first in self.bounds else self._classes.get(first, first)
            classes[scene, alike].append(indices)
        of_first = {}
        for alike, listed in classes.items():
            indices = [i for family in listed for i in family]
            if known := next((self.bits[i] for i in indices if i in self.bits), self._bits_of.get(alike)):
                self._take_bits(indices, known)
            else:
                of_first[indices[0]] = alike, indices
        for (first, *_), (bits, *_) in self.done(workers, compute_bits, [[first] for first in of_first]):
            self._bits_of[of_first[first][0]] = bits
            self._take_bits(of_first[first][1], bits)

    def _take_bits(self, indices: Sequence[int], bits: Bits) -> None:
        """Record the bits of points, and reject points whose error is too large."""
        self.bits |= dict.fromkeys(indices, bits)
        if why := self._rejected(bits):
            self.keep(PointOutcome(i, self.points[i], "rejected", reason=why) for i in indices)

    def _put_aside(self) -> dict[tuple[object, ...], list[tuple[float, int]]]:
        """Remove from the queue, and return, the entries that cannot be faster than all points with a time."""
        later = {}
        for group, entries in self._waiting.items():
            fastest = min((us for us, _ in self._fronts[group]), default=math.inf)
            later[group] = sorted(entry for entry in entries if entry[0] > fastest)
            self._waiting[group] = sorted(entry for entry in entries if entry[0] <= fastest)
        return later

    def _waiting_families(self) -> list[tuple[int, ...]]:
        return [self._members(i) for entries in self._waiting.values() for _, i in sorted(entries)]

    def _rejected(self, bits: Bits) -> str:
        if bits.problem:
            return f"bits: {bits.problem}"
        if bits.relative_rmse is None:
            return "not finite" if self.options.finite or self.options.max_rmse is not None else ""
        error, most = bits.relative_rmse, self.options.max_rmse
        return f"relative RMSE {error:.2e} > {most:.2e}" if most is not None and error > most else ""

    def _simulate(self, workers: Executor) -> None:
        """Open, bound and simulate, batch after batch, the entries that may still win, the lowest bound first.

        Points with the lowest bounds return to the queue with a better bound if theirs can be narrowed.
        """
        self._tell(SIMULATION)
        self._prune()
        while groups := [group for group, entries in self._waiting.items() if entries]:
            each, families = max(1, BATCH // len(groups)), max(1, OPENED // len(groups))
            opened, wide, chosen = (
                [i for listed in kind for i in listed]
                for kind in zip(*(self._first_of(group, each, families) for group in groups), strict=True)
            )
            self._lowest = min(self._least[i] for i in (*opened, *wide, *chosen))
            self._step(workers, opened, sorted(wide), chosen)
            self._prune()
        self._lowest = math.inf

    def _first_of(self, group: tuple[object, ...], count: int, families: int) -> tuple[list[int], list[int], list[int]]:
        """Take the first entries of the queue: families to open, points to narrow, and points to simulate."""
        waiting = [i for _, i in sorted(self._waiting[group])]
        opened, wide, ready = list[int](), list[int](), list[int]()
        at = 0
        while at < len(waiting) and len(opened) < families and len(wide) + len(ready) < count:
            index, at = waiting[at], at + 1
            (opened if index in self.families else wide if self.bounds[index].groups else ready).append(index)
        # A narrow bound is close to the time: the first few points will exclude the others, and families too.
        is_narrow = opened or wide or not self.narrowed.isdisjoint(ready)
        few = max(1, count // NARROWED) if is_narrow else count
        ready = [*ready, *(i for i in waiting[at:] if i in self.narrowed)][:few]
        in_progress = {*opened, *wide, *ready}
        self._waiting[group] = [entry for entry in self._waiting[group] if entry[1] not in in_progress]
        return opened, wide, ready

    def _step(self, workers: Executor, opened: Sequence[int], wide: Sequence[int], chosen: Sequence[int]) -> None:
        """Open families, narrow bounds and simulate points; none of these waits afterwards."""
        self._open(workers, opened)
        self.narrowed.update(wide)
        of_family: dict[Hashable, list[int]] = defaultdict(list)
        for index in wide:
            of_family[self._homes[index][0]].append(index)
        parts = [part for members in of_family.values() for part in _parts(members, TASK)]
        for _, narrowed in self.done(workers, narrow, parts):
            for index, bound in narrowed:
                self.bounds[index] = self.bounds[index]._replace(bound_us=bound, groups=())
                self._least[index] = bound
                self._waiting[self.groups[index]].append((bound, index))
        for _, outcomes in self.done(workers, evaluate, _parts(chosen, 1)):
            self.keep(outcomes)

    def _prune(self) -> None:
        """Remove entries that cannot beat their cutoff from the queue."""
        pruned: list[PointOutcome] = []
        for group, entries in self._waiting.items():
            lost = sorted(entry for entry in entries if entry[0] > self.cutoff(entry[1]))
            if lost:
                self._waiting[group] = [entry for entry in entries if entry[0] <= self.cutoff(entry[1])]
            for bound, index in lost:
                pruned += (PointOutcome(i, self.points[i], "pruned", bound_us=bound) for i in self._members(index))
                if self.families.pop(index, None) is not None:
                    del self.bounds[index]
        self.keep(pruned)

    def _merge(self) -> None:
        """Give points of equal programs the outcome of one of them."""
        merged = []
        for index, surveyed in sorted(self.bounds.items()):
            same_as, point = surveyed.same_as, self.points[index]
            if same_as is not None and same_as in self.outcomes:
                merged.append(
                    replace(self.outcomes[same_as], index=index, point=point, status="merged", same_as=same_as)
                )
        self.keep(merged)

    def _check(self, workers: Executor) -> None:
        """Check pruned points for races: all of them, or so few that every value of an axis is in a checked point."""
        pruned = [i for i, o in sorted(self.outcomes.items()) if o.status == "pruned"]
        if not pruned:
            return
        self._tell("races")
        if self.options.check_all:
            for _, fitting in self.done(workers, prove, _parts(pruned, 1)):
                self.checked += len(fitting)
            return
        seen = set().union(*(self._values(i) for i, o in self.outcomes.items() if o.status == "ok"))
        candidates: dict[tuple[object, ...], list[int]] = {}
        for index in pruned:
            for value in self._values(index) - seen:
                candidates.setdefault(value, []).append(index)
        for attempt in range(TRIED):
            # If many points have a value, candidates are chosen from the middle of the list on, because the first
            # points hold the first values of the other axes. Among these, the point with the most unchecked values is
            # chosen, the rarest value first; if several are equal, the one with the lowest bound, because it is the
            # most likely to be run and has fewer operations to check.
            chosen, covered = list[int](), set(seen)
            for value, indices in sorted(candidates.items(), key=lambda item: len(item[1])):
                if value not in covered:
                    middle = len(indices) * (attempt + TRIED // 2) // TRIED % len(indices)
                    some = (*indices[middle : middle + LOOKED_AT], *indices[:: max(1, len(indices) // LOOKED_AT)])
                    news = {i: len(self._values(i) - covered) for i in some}
                    chosen.append(max(some, key=lambda i: (news[i], -(self.outcomes[i].bound_us or 0))))
                    covered |= self._values(chosen[-1])
            for _, fitting in self.done(workers, prove, [[i] for i in dict.fromkeys(chosen)]):
                self.checked += len(fitting)
                seen = seen.union(*map(self._values, fitting))
        self.unseen = tuple(f"{name}={value}" for key in candidates if key not in seen for _, name, value in (key,))

    def _values(self, index: int) -> set[tuple[object, ...]]:
        point = self.points[index]
        return {(point.get("schedule"), name, value) for name, value in point.items()}


def _speed(outcome: PointOutcome) -> tuple[float, int]:
    return outcome.latency_us or 0.0, outcome.index


def _parts(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[n : n + size] for n in range(0, len(indices), size)]


def size_of(setting: SearchSpec, points: Sequence[Point], options: Options) -> Size:
    """Return the size of a search, and its expected time by the times of earlier searches, on idle cores."""
    families = len(setting.families(points, range(len(points)), has_bits=options.needs_bits))
    if options.exhaustive:
        seconds = len(points) * (RUN_S + (BITS_S if options.needs_bits else 0))
    else:
        seconds = families * FAMILY_S + len(points) * POINT_S + (BITS_S * families / 8 if options.needs_bits else 0)
    return Size(len(points), families, seconds / max(1, options.jobs))


def run_search(setting: SearchSpec, options: Options) -> Search:
    """Search; after an interruption, finished verdicts remain in the store."""
    if options.needs_bits and (without := [name for name, s in setting.found.items() if not s.has_bits]):
        raise SpecError(
            f"--pareto, --max-rmse, --finite: {', '.join(without)} computes no bits: its points differ only in "
            "time; remove these options"
        )
    setting = replace(setting, notes=(*setting.notes, *options.notes))
    points = setting.points()
    if machine_of(setting.device).node is not None:
        options = replace(options, exhaustive=True)  # a node's blocks have no bound
    if options.on_size is not None:
        options.on_size(size_of(setting, points, options))
    search = Search(setting, options, points)
    with ExitStack() as stack:
        stack.callback(forget)
        # The store is created when there are workers to fill it.
        workers = stack.enter_context(executor(min(options.jobs, len(points)), options.cluster))
        if options.store is not None:
            about = {
                "version": npusim.__version__,
                "request": setting.digest(options.needs_bits, options.exhaustive),
                "schedules": list(setting.schedules),
                **setting.request.about(),
                "points": len(points),
                "axes": {name: [str(v) for v in values] for name, values in setting.axes.items()},
                "config": setting.config,
                "limits": options.limits,
            }
            search.store = stack.enter_context(open_store(options.store, about, resume=options.resume))
            search.resume(about)
        search.run(workers)
    return search
