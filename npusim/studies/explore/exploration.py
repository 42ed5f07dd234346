"""`npusim.explore`: a search of tilings from Python, and its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

from npusim.errors import TilingError, one_line
from npusim.frames import frame
from npusim.late_methods import dataclass
from npusim.simulation.request import Request, TensorOptions, command, schedule_name, takes_options
from npusim.simulation.variants import PRECISION, named_fields
from npusim.studies.explore.search import Options, Search, run_search
from npusim.studies.explore.space import SearchRequest, SearchSpec
from npusim.studies.explore.store import PointOutcome, check_table, export

Ranked = TypeVar("Ranked")


def _order(outcome: PointOutcome) -> tuple[float, int]:
    return outcome.latency_us or outcome.bound_us or 0.0, outcome.index


def undominated(points: Iterable[Ranked], errors: Callable[[Ranked], tuple[float, float]]) -> list[Ranked]:
    """Return the points, the fastest first, whose error is smaller than that of all faster points by more than either
    sampling error.

    ``errors`` returns a point's error and its sampling error.
    """
    best: list[Ranked] = []
    least, sampled = math.inf, 0.0
    for point in points:
        error, sampling_error = errors(point)
        if error + max(sampling_error, sampled) < least:
            best.append(point)
            least, sampled = error, sampling_error
    return best


def front(outcomes: Iterable[PointOutcome]) -> list[PointOutcome]:
    """Return the finite points that no other point beats in both latency and error, the fastest first.

    Errors that differ by less than their sampling error are equal.  The fastest simulated
    point of each precision is included in any case.
    """
    finite = [o for o in outcomes if o.status == "ok" and o.relative_rmse is not None]
    finite.sort(key=lambda o: (_order(o)[0], o.relative_rmse, o.index))
    best = undominated(finite, lambda o: (o.relative_rmse or 0.0, o.sampling_error or 0.0))
    others_of = {str(o.point.get(PRECISION)): o for o in reversed(finite)}
    missing = others_of.keys() - {str(o.point.get(PRECISION)) for o in best}
    return sorted([*best, *(others_of[name] for name in missing)], key=_order)


def best_of(outcomes: Iterable[PointOutcome]) -> PointOutcome | None:
    """Return the fastest simulated point; the first one, if several are equal."""
    return min((o for o in outcomes if o.status == "ok"), key=_order, default=None)


@dataclass(frozen=True, repr=False)
class Exploration:
    """The result of `npusim.explore`: the outcomes of all points of a search, in the order of its points.

    Attributes
    ----------
    outcomes : tuple of PointOutcome
        One outcome per point: ``status``, ``cycles``, ``latency_us``, ``relative_rmse``, ``reason``.
    best : PointOutcome or None
        The fastest point; no other is faster if ``undecided`` is empty.  None if no point fits.
    feasible, infeasible : tuple of PointOutcome
        Points that were simulated, the fastest first, and points that do not fit.
    front : tuple of PointOutcome
        Points that no other point beats in latency and in error, where bits were computed.
    undecided : mapping of int to float or None
        Numbers of points without a verdict because the search's time was over, with a lower bound of each latency in
        microseconds (None: no bound yet).
    remaining_us : float or None
        The smallest of these bounds in microseconds.
    checked, unseen : int, tuple of str
        Number of pruned points that were checked for races, and the values that this check did not see.
    setting, request, options
        The search, its request and its options.

    Examples
    --------
    >>> import npusim
    >>> search = npusim.explore("flash", {"block_kv": [128, 256]}, seq=256)
    >>> search.best.status, len(search.outcomes)
    ('ok', 2)
    """

    setting: SearchSpec
    outcomes: tuple[PointOutcome, ...]
    options: Options
    checked: int = 0
    unseen: tuple[str, ...] = ()
    undecided: Mapping[int, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, done: Search) -> Exploration:
        """Return the result of a search."""
        outcomes = tuple(done.outcomes[i] for i in sorted(done.outcomes))
        return cls(done.setting, outcomes, done.options, done.checked, done.unseen, done.undecided())

    def to_pandas(self) -> Any:
        """Return the points as a `pandas.DataFrame`: with a row for each point, and its axes and figures as columns.

        Raises `NpusimError` if pandas is not installed.
        """
        return frame(outcome.row() for outcome in self.outcomes)

    @property
    def request(self) -> Request:
        """The request of the search."""
        return self.setting.request

    @property
    def feasible(self) -> tuple[PointOutcome, ...]:
        """Points that were simulated, the fastest first (ties in the order of the space)."""
        return tuple(sorted((o for o in self.outcomes if o.status == "ok"), key=_order))

    @property
    def infeasible(self) -> tuple[PointOutcome, ...]:
        """Points that do not fit, with their reasons."""
        return tuple(o for o in self.outcomes if o.status == "infeasible")

    @property
    def best(self) -> PointOutcome | None:
        """The fastest point, None if none fits; if `undecided` is empty, no other point of its problem is faster."""
        return best_of(self.outcomes)

    @property
    def remaining_us(self) -> float | None:
        """Lower bound of the latency of points without a verdict; None if every point has a verdict, or if some points
        have no bound.
        """
        bounds = list(self.undecided.values())
        return None if None in bounds else min(cast("list[float]", bounds), default=None)

    @property
    def front(self) -> tuple[PointOutcome, ...]:
        """Points that no other beats in latency and in error, where bits were computed."""
        return tuple(front(self.outcomes))

    def counts(self) -> dict[str, int]:
        """Return, by status, the number of points that were simulated, pruned, infeasible, merged, ..."""
        return dict(Counter(o.status for o in self.outcomes))

    def tiling(self, outcome: PointOutcome) -> dict[str, object]:
        """Return an outcome's tiling with its device, workload, problem and precision, for a build script."""
        fixed = named_fields(self.request.tiling)
        point = {"schedule": self.request.schedule, **fixed, **outcome.point}
        of_point = self.setting.variants.named(outcome.point).on(self.request)
        precision = of_point.changed_precision() or of_point.find_schedule().precision().name
        about = {**of_point.about(), "precision": precision, **self.chosen(outcome)}
        return {**about, **point, "latency_us": outcome.latency_us}

    def command(self, outcome: PointOutcome) -> str:
        """Return the command that runs a point; empty where no command line can state its request."""
        request = self.setting.variants.named(outcome.point).on(self.setting.asked)
        asked = request.asked()
        return "" if asked is None else command("run", request.schedule, asked, ())

    def chosen(self, outcome: PointOutcome) -> dict[str, object]:
        """Return the tiling fields of an outcome that are neither axes nor named, so that npusim chose them, as a run
        does.
        """
        return self.setting.variants.chosen(outcome.point)

    def why_none(self) -> str:
        """Return the reason why the search has no best point, in words."""
        rejected = [o.reason for o in self.outcomes if o.status == "rejected"]
        if not rejected:
            return "no point fits"
        kinds = ("bits:", "the bits cannot be computed"), ("relative RMSE", "--max-rmse"), ("", "not finite")
        counts = Counter(next(word for start, word in kinds if reason.startswith(start)) for reason in rejected)
        causes = [f"{n} rejected by {word}" if word.startswith("--") else f"{n} {word}" for word, n in counts.items()]
        if self.infeasible:
            causes.append(f"{len(self.infeasible)} do{'es' if len(self.infeasible) == 1 else ''} not fit")
        return f"no point is left: {', '.join(causes)}"

    def closest_misfit(self) -> str:
        """Return the point nearest to the defaults that does not fit, with the reason."""
        misfit = min(self.infeasible, key=lambda o: (self.setting.distance(o.point), o.index), default=None)
        if misfit is None:
            return ""
        variants, reason = self.setting.variants, misfit.reason
        try:
            variants.build(variants.named(misfit.point))
        except TilingError as error:  # with a value that would fit
            reason = one_line(error)
        return f"{misfit.label()}: {reason}"

    def __repr__(self) -> str:
        """Return the subject of the search and the best point, on one line."""
        best, device = self.best, self.request.machine()
        winner = "none fits"
        if best is not None:
            winner = f"best {best.label()}: {best.cycles:,} cycles, {best.latency_us:,.2f} us"
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        return f"<Exploration of {'+'.join(self.setting.schedules)} on {device.name}: {counts}; {winner}>"

    def columns(self) -> dict[str, list[object]]:
        """Return the outcomes as columns by name, for a frame of any library."""
        rows = [o.row() for o in self.outcomes]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}


@takes_options(TensorOptions)
def explore(
    schedule: str | Sequence[str],
    fields: Mapping[str, Iterable[int | float | str]] | None = None,
    *,
    studies: bool = False,
    auto: bool = False,
    exhaustive: bool = False,
    check_all: bool = False,
    pareto: bool = False,
    max_rmse: float | None = None,
    finite: bool = False,
    jobs: int = 1,
    cluster: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    budget_s: float | None = None,
    on_outcome: Callable[[PointOutcome, int], None] | None = None,
    **call_options: Unpack[TensorOptions],
) -> Exploration:
    """Search the space of one or several schedules for the fastest point, and state the proof.

    Parameters
    ----------
    schedule
        One name, or several: each schedule is searched over the axes that it has.
    fields
        Values by axis: a field of the tiling or of the precision (``acc_qk``), ``precision`` (presets), an
        option of a run (``workload``, ``seq``, ``batch``, ``hw``, ...), or a key of the device (``group_count``).
        Points compete only within one problem and device, and within one schedule unless ``pareto`` is set.
        The other options are as for `npusim.run`.
    auto
        Search the fields that the schedules declare, with doublings between their limits.
    studies
        With ``auto``, also rank studies, that is, schedules that no real kernel runs (FP8 attention without an FP8
        matrix unit). A study that ``schedule`` names is searched in any case, with a note.
    exhaustive
        Simulate every point; otherwise points are pruned if their lower bound proves that they cannot win.
    check_all
        Check all pruned points for races; otherwise a subset that covers every value of every axis is checked.
    pareto, max_rmse, finite
        Compute bits, once for all points whose bits cannot differ: for the front of latency and relative RMSE, to
        reject points beyond an error, or to reject points whose output is not finite.
    jobs
        Number of processes; if it is above 1, a script must make the call under ``if __name__ == "__main__":``.
    cluster
        Scheduler of a Dask cluster that replaces local processes (``tcp://host:8786``; needs ``npusim[cluster]``), or
        ``local``: a cluster of ``jobs`` processes.  The rows equal the rows of one process.
    out, resume
        A store that saves each point as soon as it is evaluated (``*.sqlite``; for ``*.csv`` the table is written next
        to the store at the end), and whether to resume from the store, which must exist.
    budget_s
        Seconds after which the search ends with the best point so far; `Exploration.remaining_us` bounds the others.
    on_outcome
        Called with each outcome as soon as it is known, and the number of points.

    Raises
    ------
    NpusimError
        The request is wrong for every point.  A single point that does not fit is an outcome with its reason.

    Examples
    --------
    >>> search = explore("flash", {"block_kv": [256, 512]}, seq=512)
    >>> len(search.outcomes)
    2
    """
    schedule = schedule_name(schedule)
    schedules = [schedule] if isinstance(schedule, str) else list(map(schedule_name, schedule))
    asked = SearchRequest(Request(schedules[0], numerics=False, **call_options), tuple(schedules))
    axes, notes = asked.auto_space(fields or {}) if auto else (dict(fields or {}), ())
    studies = studies or not auto
    options = Options(
        jobs=jobs,
        cluster=cluster,
        store=None if out is None else Path(out),
        resume=resume,
        budget_s=budget_s,
        exhaustive=exhaustive,
        check_all=check_all,
        pareto=pareto,
        max_rmse=max_rmse,
        finite=finite,
        notes=notes,
        on_outcome=on_outcome,
    )
    return search(asked.spec(axes, studies=studies), options)


def search(spec: SearchSpec, options: Options) -> Exploration:
    """Search, and write the table that the ending of ``options.store`` selects; see :func:`explore`."""
    table = options.store
    if table is None or table.suffix != ".csv":
        return Exploration.of(run_search(spec, options))
    check_table(table)
    done: list[PointOutcome] = []
    watch = options.on_outcome

    def on_outcome(outcome: PointOutcome, total: int) -> None:
        done.append(outcome)
        if watch is not None:
            watch(outcome, total)

    try:
        return Exploration.of(
            run_search(spec, replace(options, store=table.with_suffix(".sqlite"), on_outcome=on_outcome))
        )
    finally:
        if done:
            export(table, sorted(done, key=lambda o: o.index))
