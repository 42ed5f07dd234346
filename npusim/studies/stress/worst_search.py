"""Searches for inputs on which a schedule is furthest from float64, and names the step where its numbers break."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np

from npusim import formats
from npusim.config.problem import NormalData
from npusim.errors import NpusimError, SpecError
from npusim.formats import get_format
from npusim.formats.cast import widen
from npusim.formats.float_format import format_of_dtype
from npusim.program.numerics.evaluate import SAMPLE_ROWS, chosen_heads
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.evaluation import Subject, bits_of, subject_of
from npusim.simulation.figures import figures
from npusim.simulation.naming import folder_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import BitsOptions, Request, takes_options
from npusim.simulation.robustness import other_schedules
from npusim.simulation.run_result import ComputedBits, result_of
from npusim.studies.stress.aspects import AMPLITUDE, Aspect, Point, aspects_of, stressed, words
from npusim.studies.stress.ledger import Entry, Ledger, coarsest_step
from npusim.studies.stress.scores import ScoreCounter, ScoreSizes, exact_scores, score_sizes
from npusim.studies.validate.diff import alternatives
from npusim.studies.workers.executors import executor
from npusim.units import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import Diagnosis, NumericResult
    from npusim.program.numerics.evaluate import Choice, References
    from npusim.program.numerics.executor import HeadSource
    from npusim.simulation.plan import Plan
    from npusim.studies.workers.tasks import Executor

#: Accuracy is lost if the error is above this multiple of the error on calm inputs: errors of correct kernels reach 1.1
#: times it (measured: `reports/stress`).
FACTOR = 2.0
#: Accuracy is also lost if the error is above this number of steps of the coarsest format, whatever the error on calm
#: inputs is.
STEPS = 4
#: Calm inputs: normal numbers, scores with this standard deviation, at most this number of keys, no mask.
CALM, CALM_KEYS = {"logit_std": 0.5}, 256
#: Number of aspects whose worst values are tried in pairs, and number of points that are tried near the worst one.
JOINED, AROUND = 4, 16
#: Powers of two by which inputs are multiplied for the margin.
GROWN, SHRUNK = 6, 4
#: Amplitudes beyond the default bounds if finite outputs are required: each factor is the square of the previous one.
GROWTH = (2.0, *(2.0**2**n for n in range(1, 8)))
#: Shares of the budget after which the search for the worst input ends, and after which everything else ends.
SEARCHED, ENDED = 0.55, 0.95


@dataclass(frozen=True)
class PointError:
    """Error of a schedule at one point, relative to float64; None if an output is NaN or Inf.

    ``is_beyond``: an exact output exceeds the output's format, so that every schedule has Inf there.
    """

    point: Mapping[str, float]
    rmse: float | None
    is_beyond: bool = False

    @property
    def badness(self) -> float:
        """The error: infinite for an output that is not finite, 0 where the exact output exceeds its format."""
        return 0.0 if self.is_beyond else math.inf if self.rmse is None else self.rmse

    def __str__(self) -> str:
        error = "not finite" if self.rmse is None else f"error {self.rmse:.2g}"
        return f"{'exact outputs beyond their format' if self.is_beyond else error} at {words(self.point)}"


@dataclass(eq=False)
class StressedRun:
    """Computes the error of a request at points of a search; its pickle contains only the request."""

    request: Request
    _tails: dict[int, tuple[Plan, TileProgram]] = field(default_factory=dict, init=False)

    @property
    def seed(self) -> int:
        """The seed of the drawn inputs."""
        return self.request.seed or 0

    def __reduce__(self) -> tuple[Any, ...]:
        return StressedRun, (self.request,)

    def __call__(self, point: Point) -> PointError:
        """Return the error at a point."""
        return self.outcome(*self.at(point), point)

    @cached_property
    def base(self) -> tuple[Plan, TileProgram]:
        """The plan and the program of the request, as in a run."""
        plan, program = program_of(plan_of(self.request, is_bare=True))
        if "o" not in program.tensors:
            raise SpecError(f"stress: schedule {self.request.schedule} has no output to compare with float64")
        return plan, program

    @cached_property
    def calm(self) -> PointError:
        """The error on calm inputs."""
        plan, program = self.base
        if (p := plan.problem.attention) is None:
            return self.outcome(plan, program, {})
        sizes = {"seq_kv": min(p.seq_kv, CALM_KEYS), "seq_q": min(p.seq_q, CALM_KEYS), "batch": 1, "causal_offset": 0}
        given = {"data": NormalData(), **dict.fromkeys(("q_scale", "k_scale", "v_scale"), 1.0)}
        unseen = {n: type(p).model_fields[n].default for n in ("window", "sinks", "prefix", "chunk", "documents")}
        small = {**sizes, **given, **unseen, "lengths": (), "query_lengths": (), "causal": False}
        try:
            return self.outcome(*built(replace(plan, problem=p.model_copy(update=small), tensors=None)), CALM)
        except NpusimError:  # a kernel that does not run with such sizes
            return self.outcome(plan, program, CALM)

    def at(self, point: Point) -> tuple[Plan, TileProgram]:
        """Return the plan and program for a point: those of the request, without the point's tail of keys."""
        plan, tail = self.base[0], int(point.get("tail", 0))
        if tail and tail not in self._tails:
            p = cast("Problem", plan.problem.attention)
            keys, queries = p.seq_kv - tail, p.seq_q - tail * (p.seq_q == p.seq_kv)
            if min(keys, queries) < 1:
                raise SpecError(f"tail: {tail} of {p.seq_kv} keys leaves no key")
            sizes = {"seq_kv": keys, "seq_q": queries, "causal_offset": keys - queries}
            self._tails[tail] = built(replace(plan, problem=p.model_copy(update=sizes)))
        return self._tails[tail] if tail else self.base

    def source(self, plan: Plan, subject: Subject, point: Point) -> HeadSource:
        """Return the inputs of a plan at a point."""

        def change(base: HeadSource) -> HeadSource:
            return stressed(base, subject, point, self.seed)

        return subject.changed_source(plan, change, self.seed, is_padded=bool(point.get("padding")))

    def bits(
        self, plan: Plan, program: TileProgram, point: Point, exact: References | None = None, **how: Any
    ) -> NumericResult:
        """Return the bits of a plan's program at a point: of the last `SAMPLE_ROWS` rows unless other rows are named.

        ``exact`` stores the float64 results.
        """
        subject, rows = subject_of(plan, program), self.request.rows
        # results on these inputs
        results: dict[str, Any] = {"exact": {} if exact is None else exact, "exact_results": {}}
        plan = replace(plan, sources={subject: self.source(plan, subject, point)}, **results)
        p = subject.attention
        if rows == "sample" and p is not None and not p.lengths:  # this holds even if a block has fewer rows
            rows = range(max(0, p.seq_q - SAMPLE_ROWS), p.seq_q)
        return bits_of(plan, program, rows=rows, heads=self.heads(subject), **how)

    def heads(self, subject: Subject) -> Choice:
        """Return the computed heads: the named ones, or as few as together have `SAMPLE_ROWS` rows."""
        heads, output = self.request.heads, subject.output
        return range(min(output.heads, ceil_div(SAMPLE_ROWS, output.query_count))) if heads == "sample" else heads

    def outcome(self, plan: Plan, program: TileProgram, point: Point) -> PointError:
        """Return the error of a plan's program at a point."""
        exact: References = {}
        rmse, fmt = self.bits(plan, program, point, exact).error.rmse, program.tensors["o"].fmt
        is_beyond = rmse is None and any(
            not np.isfinite(widen(formats.cast(rows, fmt))[np.isfinite(rows)]).all() for rows in exact.values()
        )
        return PointError(point, rmse, is_beyond)

    def exact_scores(self, plan: Plan, subject: Subject, source: HeadSource) -> Iterator[NDArray[np.float64]]:
        """Yield QK^T of the last `SAMPLE_ROWS` rows of the computed heads; nothing if there is no Q and K."""
        if (p := plan.problem.attention) is None or p.lengths:
            return
        heads = chosen_heads(subject.output, self.heads(subject))
        yield from exact_scores(source, heads, p.heads // p.kv_heads, slice(max(0, p.seq_q - SAMPLE_ROWS), None))

    def sizes(self, plan: Plan, program: TileProgram) -> dict[str, tuple[int, int]]:
        """Return batches and heads of the inputs that the computed heads read, by name."""
        subject = subject_of(plan, program)
        return subject.read_heads(chosen_heads(subject.output, self.heads(subject)))

    def room(self, point: Point) -> Literal["more", "last", "none"]:
        """Return whether amplitudes may grow beyond those of a point; otherwise they end there.

        The amplitudes end where an input reaches the largest number of its format, and before the sum of an input's
        squares exceeds float32, the widest format in which matrix units add.
        """
        plan, program = self.at(point)
        source = self.source(plan, subject_of(plan, program), point)
        stored = [source(name, 0, 0) for name in self.sizes(plan, program)]
        largest = [(x, fmt, _largest(x)) for x in stored if (fmt := format_of_dtype(x.dtype)) is not None]
        if any(x.size * most**2 > get_format("float32").max_finite for x, _, most in largest):
            return "none"
        return "last" if not largest or any(most >= fmt.max_finite for _, fmt, most in largest) else "more"


def _largest(x: NDArray[Any]) -> float:
    return float(np.nanmax(np.abs(widen(x).astype(np.float64)), initial=0.0))


def built(plan: Plan) -> tuple[Plan, TileProgram]:
    """Return a plan and its program; sizes of the tile that are not named shrink until the tile fits."""
    tiling, program = plan.schedule.fitted(plan.problem, plan.tiling, plan.device, plan.precision)
    return replace(plan, tiling=tiling), program


@dataclass(frozen=True, repr=False)
class Stress:
    """The result of `npusim.stress`: the worst tested input, the origin of its error, and formats with small errors.

    Errors are relative RMSE against float64, without a unit.

    Attributes
    ----------
    verdict : str
        ``holds``; ``loses``, if the error of ``worst`` is above ``limit``; or ``not finite``.
    worst, calm : PointError
        The worst tested point, and calm inputs: ``point`` (aspects by name) and ``rmse`` (None: not finite).
    limit : float
        Limit of the error: `FACTOR` times the error of ``calm``, and at most `STEPS` steps of the coarsest format.
    first : str
        The first value that differs from float64 on its step's operands.  Empty if there is no such value: the error is
        caused by the algorithm or by many roundings.
    lost_mass, clipped_mass : float or None
        Share of a row's sum whose P became 0, and share that saturation cut, each a mean over rows.
    margin : float or None
        Power of two by which Q (of plain tensors: all inputs) may be larger than in the base; 0 if the limit is
        exceeded even with a 16th of Q, None if the budget ended before.
    choices : mapping of str to float
        Errors on the worst input with the choices that are within the limit, else with the nearest choice.
    rounding : str
        If ``first`` is empty: the first choice of precision that is within the limit, because all roundings together
        cause the error.
    outcomes, beyond : tuple of PointError
        Tested points within the default bounds, and beyond these; ``worst`` is a point beyond them only if it is not
        finite.
    at_bound : tuple of str
        Aspects of ``worst`` at an end of their range: inputs beyond it may be worse.
    ledger : tuple of Entry
        Errors of every step.
    is_whole : bool
        Whether the budget was enough for all points.
    inputs : mapping of str to numpy.ndarray
        The worst inputs, for the computed heads.
    reading : str
        How npusim interpreted the user's tensors, if another layout is more likely.
    scores : ScoreSizes or None
        Sizes of the scores on the worst input, of QK^T and as the schedule stores them; None without such products.
    name, schedule, device, precision, tile, seed
        The names and the seed of the run.

    Examples
    --------
    >>> import npusim
    >>> result = npusim.stress("pasa", ["logit_std=1:2"], seq=64, budget_s=5)
    >>> result.verdict, result.worst.rmse < 1e-3
    ('holds', True)
    """

    name: str
    schedule: str
    device: str
    precision: str
    tile: str
    seed: int
    verdict: str
    worst: PointError
    calm: PointError
    limit: float
    first: str
    ledger: tuple[Entry, ...]
    lost_mass: float | None
    clipped_mass: float | None
    margin: float | None
    choices: Mapping[str, float]
    rounding: str
    at_bound: tuple[str, ...]
    outcomes: tuple[PointError, ...]
    beyond: tuple[PointError, ...]
    is_whole: bool
    inputs: Mapping[str, NDArray[Any]] = field(repr=False, compare=False)
    reading: str = ""
    scores: ScoreSizes | None = None

    def __repr__(self) -> str:
        """Return the subject, the verdict and the worst point, on one line."""
        return f"<Stress of {self.name} on {self.device}, {self.precision}: {self.verdict}; worst {self.worst}>"


@takes_options(BitsOptions)
def stress(
    schedule: str,
    over: Sequence[str] = (),
    *,
    is_finite: bool = False,
    budget_s: float = 30.0,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[BitsOptions],
) -> Stress:
    """Search for the inputs with the largest error of a schedule, and name the step at which its numbers break.

    ``options`` are as for `npusim.run`: ``seed`` draws base inputs and the tested points, ``tensors`` are
    user-defined base inputs, ``rows`` and ``heads`` select the computed outputs (default: the last 128 rows of head 0).
    ``over``: aspects to vary, ``"logit_std=0.25:4"``, ``"late=8,16"``, ``"outliers"``; empty: all, within default
    bounds.  ``is_finite``: finite outputs are required; amplitudes grow beyond the default bounds until an output is
    not finite, which ends the search, or the inputs reach the end of their format (`StressedRun.room`).  Points are
    tested in a fixed order: if ``budget_s`` seconds suffice for all of them, the result is reproducible.
    Raises `NpusimError` as `npusim.run`, and `SpecError` for aspects that the call does not have.
    """
    return examine(
        Request(schedule, **options), over, is_finite=is_finite, budget_s=budget_s, jobs=jobs, progress=progress
    )


def examine(
    request: Request,
    over: Sequence[str] = (),
    *,
    is_finite: bool = False,
    budget_s: float = 30.0,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Stress:
    """Return the result of `stress` for a request."""
    if not budget_s > 0:
        raise SpecError(f"--budget {budget_s}: write a number of seconds above 0")
    begun, trial = time.monotonic(), StressedRun(replace(request, progress=None))
    subject, is_given = subject_of(*trial.base), request.tensors is not None
    p = subject.attention
    has_tail = p is not None and not (is_given or p.lengths or p.documents) and request.rows == "sample"
    aspects = aspects_of(over, subject.kind, has_tail=has_tail)
    search = _Search(trial, aspects, is_finite, begun, budget_s, progress)
    with executor(jobs) as workers:
        search.run(workers)
    return search.explained()


@dataclass
class _Search:
    trial: StressedRun
    aspects: Sequence[Aspect]
    is_finite: bool
    begun: float
    budget_s: float
    progress: Callable[[int, int], None] | None
    outcomes: list[PointError] = field(default_factory=list)
    #: Outcomes beyond the default bounds; they count only if they are not finite.
    beyond: list[PointError] = field(default_factory=list)
    is_whole: bool = True

    @property
    def worst(self) -> PointError:
        broken = [o for o in self.beyond if math.isinf(o.badness)]
        return max(self.outcomes + broken, key=lambda o: o.badness)

    @cached_property
    def limit(self) -> float:
        return min(FACTOR * self.trial.calm.badness, STEPS * coarsest_step(self.trial.base[1]))

    def is_over(self, share: float = ENDED) -> bool:
        return time.monotonic() - self.begun > share * self.budget_s

    def run(self, workers: Executor) -> None:
        """Test the base, each aspect alone, the worst ones in pairs, and points near the worst.

        The ends of all aspects come first, then larger amplitudes, because the budget may end before the rest.
        """
        each = [[v for v in (*a.values[-1:], *a.values[:-1]) if v != a.neutral] for a in self.aspects]
        names = [a.name for a in self.aspects]
        rows = [[{n: v} for n, v in zip(names, row, strict=True) if v is not None] for row in zip_longest(*each)]
        self.outcomes += self._try(workers, [{}, *(point for row in rows[:1] for point in row)])
        if self.is_finite:
            self._grow(workers)
        if self.is_through:
            return
        self.outcomes += self._try(workers, [point for row in rows[1:] for point in row])
        alone = [[o for o in self.outcomes if n in o.point] for n in names]
        ranked = sorted((max(os, key=lambda o: o.badness) for os in alone if os), key=lambda o: -o.badness)[:JOINED]
        self.outcomes += self._try(workers, [{**a.point, **b.point} for n, a in enumerate(ranked) for b in ranked[:n]])
        if math.isfinite(self.worst.badness):
            self.outcomes += self._try(workers, list(self._around(self.worst)))

    @property
    def is_through(self) -> bool:
        """Whether the search may end: finite outputs are required, and an output is not finite."""
        return self.is_finite and math.isinf(self.worst.badness)

    def _grow(self, workers: Executor) -> None:
        """Try larger amplitudes of each aspect with default bounds until an output is not finite, or inputs end."""
        growing = list(self.aspects)
        for factor in GROWTH:
            if self.is_through or not growing:
                return
            points = {a: [{a.name: v} for v in a.grown(factor)] for a in growing}
            rooms = {a: [self.trial.room(p) for p in tried] for a, tried in points.items()}
            usable = [p for a in growing for p, room in zip(points[a], rooms[a], strict=True) if room != "none"]
            self.beyond += self._try(workers, usable)
            growing = [a for a in growing if rooms[a] and set(rooms[a]) == {"more"}]

    def _around(self, worst: PointError) -> Iterator[Point]:
        """Yield points near the worst one: values drawn within bounds, and sometimes one more aspect."""
        rng = np.random.default_rng([self.trial.seed, len(self.aspects)])
        for _ in range(AROUND):
            drawn = {}
            for a in self.aspects:
                if a.is_range and rng.random() < (0.7 if a.name in worst.point else 1 / len(self.aspects)):
                    drawn[a.name] = a.between(rng.random())
            yield {**worst.point, **drawn}

    def _try(self, workers: Executor, points: Sequence[Point]) -> list[PointError]:
        """Return the outcomes of points that were not tried before, until the budget ends."""
        fresh = [p for n, p in enumerate(points) if p not in points[:n] and all(p != o.point for o in self.outcomes)]
        if self.outcomes and self.is_over(SEARCHED):
            self.is_whole = self.is_whole and not fresh
            return []
        done: dict[int, PointError] = {}
        for number, outcome in workers.run(self.trial, fresh):
            if not isinstance(outcome, PointError):
                raise NpusimError(f"stress: {words(fresh[number])}: {outcome.reason}")
            done[number] = outcome
            if self.progress:
                before = len(self.outcomes) + len(self.beyond)
                self.progress(before + len(done), before + len(fresh))
            if self.is_over(SEARCHED) and len(done) < len(fresh):
                self.is_whole = False
                break
        return [done[n] for n in sorted(done)]

    def explained(self) -> Stress:
        """Return the result: the worst input is run again for its ledger, the margin and the choices follow."""
        trial, worst, ledger = self.trial, self.worst, Ledger(self.limit)
        plan, program = trial.at(worst.point)
        subject, breaks = subject_of(plan, program), worst.badness > self.limit
        diagnose = subject.attention is not None and not (worst.point.get("padding") or trial.request.padding)
        counter = ScoreCounter()
        diagnosis = trial.bits(plan, program, worst.point, observers=(ledger, counter), diagnose=diagnose).diagnosis
        source, named = trial.source(plan, subject, worst.point), type(plan.tiling).model_fields
        plain = subject.plain

        def lying(name: str, values: NDArray[Any]) -> NDArray[Any]:
            """Return a matrix of plain tensors as memory stores it: rows that share one row are stored once."""
            t = plain.get(name)
            turned = values.T if t and t.is_transposed else values
            return turned[: ceil_div(t.rows, t.shared_rows)] if t else turned

        margin = self._margin(AMPLITUDE[subject.kind])
        choices, precisions = self._choices(worst) if breaks else ({}, [])
        return Stress(
            name=folder_of(plan),
            schedule=trial.request.schedule,
            device=plan.device.name,
            precision=plan.precision.name,
            tile=",".join(f"{n}={v}" for n, v in plan.tiling if v is not None and v != named[n].default),
            seed=trial.seed,
            verdict="holds" if not breaks else "not finite" if worst.rmse is None else "loses",
            worst=worst,
            calm=trial.calm,
            limit=self.limit,
            first=ledger.first if breaks else "",
            scores=score_sizes(counter, trial.exact_scores(plan, subject, source)),
            ledger=ledger.worth(),
            lost_mass=_share(diagnosis, "zeroed_mass_percent"),
            clipped_mass=_share(diagnosis, "clipped_mass_percent"),
            margin=margin,
            choices=choices,
            rounding=next((n for n in precisions if not ledger.first and choices[n] <= self.limit), ""),
            at_bound=tuple(a.name for a in self.aspects if a.is_bound(worst.point.get(a.name, math.nan))),
            outcomes=tuple(self.outcomes),
            beyond=tuple(self.beyond),
            is_whole=self.is_whole,
            inputs={
                n: np.stack([[lying(n, source(n, b, h)) for h in range(of_batch)] for b in range(batch)])
                for n, (batch, of_batch) in trial.sizes(plan, program).items()
            },
            reading=plan.reading,
        )

    def _margin(self, name: str) -> float | None:
        """Return the largest power of two by which inputs may grow; 0 if no tested one is within the limit, None if
        unknown.
        """
        held = 0.0
        for power in (*range(GROWN + 1), *range(-1, -SHRUNK - 1, -1)):
            if power < 0 < held:
                break
            if self.is_over():
                self.is_whole = False
                return None
            if self.trial({name: 2.0**power}).badness <= self.limit:
                held = 2.0**power
            elif held:
                break
        return held

    def _choices(self, worst: PointError) -> tuple[dict[str, float], list[str]]:
        """Return the errors on the worst input with the choices within the limit; if there are none, with the nearest
        choice.

        The second result names the listed choices that change the precision and not the schedule.
        """
        plan, program = self.trial.at(worst.point)

        def within_budget() -> Iterator[tuple[str, Callable[[], Plan]]]:
            for choice in _alternatives(plan, program):
                if self.is_over():
                    self.is_whole = False
                    return
                yield choice

        def tried_with(choice: tuple[str, Callable[[], Plan]]) -> tuple[Plan, float]:
            other = choice[1]()
            return other, self.trial.outcome(*built(other), worst.point).badness

        outcomes = {name: tried for (name, _), tried in figures(within_budget(), tried_with)}
        tried = {name: error for name, (_, error) in outcomes.items()}
        precisions = [name for name, (other, _) in outcomes.items() if other.schedule.name == plan.schedule.name]
        nearest = [n for n in sorted(tried, key=lambda n: tried[n]) if tried[n] < worst.badness][:1]
        listed = [n for n, error in tried.items() if error <= self.limit] or nearest
        return {n: tried[n] for n in listed}, [n for n in precisions if n in listed]


def _share(found: Diagnosis | None, name: str) -> float | None:
    """Return a percentage of the diagnosis as a share; None where it is missing or not finite."""
    percent = getattr(found, name, None)
    return None if percent is None or not math.isfinite(percent) else percent / 100


def _alternatives(plan: Plan, program: TileProgram) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield, by name, presets, single changes of a plan's precision, and other schedules with their usual precision."""

    def changed(of: Plan, text: str) -> Plan:
        return replace(of, precision=of.schedule.precision(text))

    precision = plan.precision.name
    yield from ((preset, partial(changed, plan, preset)) for preset in plan.schedule.precisions if preset != precision)
    for change in alternatives(result_of(plan, program, None, ComputedBits(), ())):
        if change.kind == "precision":
            unchanged = [part for part in precision.split(",") if part.partition("=")[0] != change.field]
            yield str(change), partial(changed, plan, ",".join((*unchanged, str(change))))
    for other in other_schedules(plan):
        yield other.schedule.name, partial(changed, other, "")
