"""Searches inputs for those on which a schedule is furthest from float64, and says where its numbers break."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from npusim.config.problem import NormalData, Problem
from npusim.errors import NpusimError, SpecError
from npusim.explore.executors import executor
from npusim.numerics.evaluate import KernelOutput
from npusim.numerics.inputs import array_source, drawn_source, kernel_source, recipe_source, with_padding, without_padding
from npusim.simulation.plan import ComputedBits, plan_of
from npusim.simulation.request import BitsOptions, Request, takes_options
from npusim.simulation.robustness import other_schedules
from npusim.simulation.tile import program_of
from npusim.stress.inputs import ASPECTS, Aspect, Point, bounded, of_call, stressed, words
from npusim.stress.ledger import Entry, Ledger
from npusim.units import ascii_digits
from npusim.validate.diff import alternatives

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.result import NumericResult
    from npusim.simulation.plan import Plan

#: An error breaks a schedule where it is so many times the error on calm inputs: spreads of errors between correct
#: kernels and inputs stay below (measured: `reports/stress`).
FACTOR = 2.0
#: Calm inputs: scores of this spread, on so many keys at most, none of them hidden.
CALM_STD, CALM_KEYS = 0.5, 256
#: Aspects whose worst values are tried together, steps towards the edge, and points tried about the worst one.
JOINED, EDGE_STEPS, AROUND = 4, 5, 16
#: Powers of two by which inputs grow, or shrink, for the margin.
GROWN, SHRUNK = 6, 4
#: The largest error of an output that is finite.
FINITE = sys.float_info.max
#: Share of the budget that the search for the worst input may take, and that up to which choices are tried.
SEARCH_SHARE, CHOICE_SHARE = 0.55, 0.95


@dataclass(frozen=True)
class Outcome:
    """Error of a schedule at one point: relative to float64, None where an output is NaN or Inf."""

    point: Mapping[str, float]
    rmse: float | None

    @property
    def badness(self) -> float:
        """The error, infinite where there is none."""
        return math.inf if self.rmse is None else self.rmse

    def __str__(self) -> str:
        error = "not finite" if self.rmse is None else f"error {self.rmse:.2g}"
        return f"{error} at {words(self.point)}"


class Trial:
    """Computes the rows of a request at points of a search; pickles as its request."""

    def __init__(self, request: Request, seed: int) -> None:
        self.request, self.seed = replace(request, progress=None), seed
        self._programs: dict[int, tuple[Plan, TileProgram]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Trial, (self.request, self.seed)

    @cached_property
    def base(self) -> tuple[Plan, TileProgram]:
        """The plan of the request as a run has it, and its program."""
        plan = plan_of(self.request, is_bare=True)
        if not isinstance(plan.problem, Problem) and "o" not in plan.program().tensors:
            raise SpecError(f"stress: schedule {self.request.schedule} has no attention's output")
        return program_of(plan)

    @cached_property
    def calm(self) -> Outcome:
        """The error on calm inputs: few keys, none hidden, scores close together."""
        plan, program = self.base
        if not isinstance(p := plan.problem, Problem):
            return self.outcome(plan, program, {})
        sizes = {"seq_kv": min(p.seq_kv, CALM_KEYS), "seq_q": min(p.seq_q, CALM_KEYS), "batch": 1}
        hidden = dict.fromkeys(("window", "chunk"), None) | {"sinks": 0, "prefix": 0, "documents": (), "causal": False}
        given = {"data": NormalData(), "lengths": (), "query_lengths": (), "causal_offset": 0}
        small = p.model_copy(update={**sizes, **hidden, **given, **dict.fromkeys(("q_scale", "k_scale", "v_scale"), 1.0)})
        point = {"logit_std": CALM_STD}
        try:
            return self.outcome(*self.built(replace(plan, problem=small, tensors=None)), point)
        except NpusimError:  # a kernel that takes no such sizes
            return self.outcome(plan, program, point)

    def built(self, plan: Plan) -> tuple[Plan, TileProgram]:
        """Return a plan and its program, sizes that nobody named shrunk where they do not fit."""
        tiling, program = plan.schedule.fitted(plan.problem, plan.tiling, plan.device, plan.precision)
        return replace(plan, tiling=tiling), program

    def at(self, point: Point) -> tuple[Plan, TileProgram]:
        """Return the plan and program for a point: those of the request, with its tail left out."""
        tail = int(point.get("tail", 0))
        if not tail:
            return self.base
        if tail not in self._programs:
            plan, p = self.base[0], cast("Problem", self.base[0].problem)
            queries = p.seq_q - tail if p.seq_q == p.seq_kv else p.seq_q
            if min(queries, p.seq_kv - tail) < 1:
                raise SpecError(f"tail: {tail} of {p.seq_kv} keys leaves none")
            sizes = {"seq_kv": p.seq_kv - tail, "seq_q": queries, "causal_offset": p.seq_kv - tail - queries}
            self._programs[tail] = self.built(replace(plan, problem=p.model_copy(update=sizes)))
        return self._programs[tail]

    def source(self, plan: Plan, subject: Problem | KernelOutput, point: Point) -> HeadSource:
        """Return the inputs of a plan at a point."""
        if isinstance(subject, KernelOutput):
            return stressed(kernel_source(subject.inputs, self.seed, plan.tensors), subject, point, self.seed)
        if plan.tensors is None:
            base = recipe_source(subject, self.seed)
        else:
            base = without_padding(array_source(plan.tensors, subject.data), subject)
        source = drawn_source(subject, stressed(base, subject, point, self.seed))
        return with_padding(source, subject) if point.get("padding") or self.request.padding else source

    def bits(self, plan: Plan, program: TileProgram, point: Point, **how: Any) -> NumericResult:
        """Return the bits of a plan's program at a point."""
        subject = plan.subject(program)
        plan = replace(plan, exact={}, sources={subject: self.source(plan, subject, point)})
        heads = self.request.heads
        if isinstance(heads, str) and heads == "sample":
            heads = [0]
        return plan.bits(program, rows=self.request.rows, heads=heads, **how)

    def outcome(self, plan: Plan, program: TileProgram, point: Point) -> Outcome:
        """Return the error of a plan's program at a point."""
        return Outcome(point, self.bits(plan, program, point).error.rmse)

    def __call__(self, point: Point) -> Outcome:
        return self.outcome(*self.at(point), point)


@dataclass(frozen=True)
class Choice:
    """Another choice of precision, or another schedule, on the worst input; ``holds``: its error is allowed."""

    name: str
    rmse: float | None
    holds: bool


@dataclass(frozen=True)
class Stress:
    """The worst input that a search found for a schedule, where its error begins, and what would hold.

    verdict
        ``holds``; ``loses`` (the error is above ``limit``); ``not finite``.
    worst, calm, limit
        The worst point, that of calm inputs, and `FACTOR` times the error there.
    first
        The first value that float64 does not give from what its step read; empty where there is none, and the error is
        the algorithm's or that of many roundings.
    ledger, lost_mass, clipped_mass
        Steps that saturated, flushed or overflowed values; shares of a row's sum whose P became 0, or that saturation
        cut, means over rows (None where an exponential was NaN).
    edge, margin
        The point towards the worst one at which it breaks; the power of two by which Q (of plain tensors, all inputs)
        may be larger than in the base, None where not even smaller ones hold.
    choices
        Choices that hold on the worst input, in the order tried; else the one that comes nearest.
    outcomes, is_whole
        All points that were tried, in their order; whether the budget was enough for all that were meant to be.
    command
        Words of `npusim run` for the worst input, once it is written to a file, whose name is to be added.
    """

    name: str
    schedule: str
    device: str
    precision: str
    seed: int
    verdict: str
    worst: Outcome
    calm: Outcome
    limit: float
    first: str
    ledger: tuple[Entry, ...]
    lost_mass: float | None
    clipped_mass: float | None
    edge: Outcome | None
    margin: float | None
    choices: tuple[Choice, ...]
    outcomes: tuple[Outcome, ...]
    is_whole: bool
    command: tuple[str, ...]
    inputs: Mapping[str, NDArray[Any]] = field(repr=False, compare=False)

    def requirement_met(self, require: str) -> bool:
        """Return whether the worst input meets ``finite`` or ``max-rmse=X``; raise `SpecError` for other words."""
        return self.worst.badness <= check_requirement(require)


def check_requirement(require: str) -> float:
    """Return the largest error that a requirement allows, ``finite`` or ``max-rmse=X``; ``finite`` without one.

    Raises `SpecError` for other words.
    """
    name, _, text = require.partition("=")
    try:
        bound = float(ascii_digits(text)) if name == "max-rmse" else math.nan
    except ValueError:
        bound = math.nan
    if require in ("", "finite"):
        bound = FINITE
    if not bound >= 0:
        raise SpecError(f"--require {require}: write finite, or max-rmse=X")
    return bound


@takes_options(BitsOptions)
def stress(
    schedule: str,
    over: Sequence[str] = (),
    *,
    budget_s: float = 30.0,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[BitsOptions],
) -> Stress:
    """Search inputs for those on which a schedule is worst, and name the step at which its numbers break.

    Parameters
    ----------
    schedule, options
        What runs, as `npusim.run` has it; ``seed`` draws base inputs and the points that are tried, ``tensors`` are
        base inputs of one's own, ``rows`` and ``heads`` what is computed (by default the last 128 rows of head 0).
    over
        Aspects that vary, ``"logit_std=0.25:4"``, ``"late=8,16"``, ``"outliers"``; none: all, within default bounds.
    budget_s
        Seconds; points are tried in one order, so that a budget which is enough gives the same result each time.
    jobs
        Processes that compute.

    Raises
    ------
    NpusimError
        As `npusim.run`; `SpecError` for an aspect that there is not, or one that the call does not have.
    """
    return examine(Request(schedule, **options), over, budget_s=budget_s, jobs=jobs, progress=progress)


def examine(
    request: Request,
    over: Sequence[str] = (),
    *,
    budget_s: float = 30.0,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Stress:
    """Return what `stress` does for a request."""
    if not budget_s > 0:
        raise SpecError(f"--budget {budget_s}: give seconds above 0")
    start, seed = time.monotonic(), request.seed or 0
    trial = Trial(request, seed)
    plan, _ = trial.base
    named = [a for text in over for a in bounded(text)]
    if len({a.name for a in named}) < len(named):
        raise SpecError(f"--over {', '.join(over)}: an aspect is there twice")
    is_drawn = plan.tensors is None and isinstance(plan.problem, Problem) and _is_open(plan.problem, request)
    aspects = of_call(named or tuple(ASPECTS.values()), is_attention=isinstance(plan.problem, Problem), is_drawn=is_drawn)
    if not aspects or (over and "all" not in over and len(aspects) < len(named)):
        gone = [a.name for a in named if a not in aspects]
        raise SpecError(f"--over {', '.join(gone)}: inputs of this call have no such aspect")
    limit = FACTOR * trial.calm.badness
    search = _Search(trial, aspects, start, budget_s, progress)
    with executor(jobs) as workers:
        search.run(workers)
    worst = max(search.outcomes, key=lambda o: o.badness)
    return _explained(search, worst, limit)


def _is_open(problem: Problem, request: Request) -> bool:
    """Return whether keys may be left out at the end of a call's sequences."""
    return not (problem.lengths or problem.documents) and isinstance(request.rows, str)


@dataclass
class _Search:
    trial: Trial
    aspects: Sequence[Aspect]
    start: float
    budget_s: float
    progress: Callable[[int, int], None] | None
    outcomes: list[Outcome] = field(default_factory=list)
    is_whole: bool = True

    def is_over(self, share: float) -> bool:
        """Return whether a share of the budget is spent."""
        return time.monotonic() - self.start > share * self.budget_s

    def run(self, workers: Any) -> None:
        """Try the base, each aspect alone, the worst ones together, and points about the worst."""
        each = [[v for v in (*a.values[::-1][:1], *a.values[:-1]) if v != a.neutral] for a in self.aspects]
        ends = zip_longest(*each)  # the ends of all aspects first, should the budget not reach
        singles = [{a.name: v} for row in ends for a, v in zip(self.aspects, row, strict=True) if v is not None]
        self._try(workers, [{}, *singles])
        alone = [max((o for o in self.outcomes if a.name in o.point), key=lambda o: o.badness, default=None) for a in self.aspects]
        ranked = sorted((o for o in alone if o), key=lambda o: -o.badness)[:JOINED]
        self._try(workers, [{**a.point, **b.point} for n, a in enumerate(ranked) for b in ranked[:n]])
        self._try(workers, list(self._around()))

    def _around(self) -> Iterator[dict[str, float]]:
        """Yield points about the worst: its values, and now and then another aspect's, drawn within bounds."""
        worst = max(self.outcomes, key=lambda o: o.badness)
        if worst.rmse is None:
            return
        rng = np.random.default_rng([self.trial.seed, len(self.aspects)])
        for _ in range(AROUND):
            point = dict(worst.point)
            for a in self.aspects:
                if len(a.values) > 2 and rng.random() < (0.7 if a.name in point else 1 / len(self.aspects)):
                    share = rng.random()
                    low, high = min(a.values), max(a.values)
                    drawn = low * (high / low) ** share if a.is_factor else low + (high - low) * share
                    point[a.name] = drawn if a.name != "tail" else float(round(drawn))
            yield point

    def _try(self, workers: Any, points: Sequence[Point]) -> None:
        """Compute the outcomes of points not tried before, as far as the budget goes."""
        fresh = [p for n, p in enumerate(points) if p not in points[:n] and all(p != o.point for o in self.outcomes)]
        done: dict[int, Outcome] = {}
        for number, outcome in workers.run(self.trial, fresh):
            if not isinstance(outcome, Outcome):
                raise NpusimError(f"stress: {words(fresh[number])}: {outcome.reason}")
            done[number] = outcome
            if self.progress:
                self.progress(len(self.outcomes) + len(done), len(self.outcomes) + len(fresh))
            if self.is_over(SEARCH_SHARE) and len(done) < len(fresh):
                self.is_whole = False
                break
        self.outcomes += [done[n] for n in sorted(done)]


def _explained(search: _Search, worst: Outcome, limit: float) -> Stress:
    """Return the result: the worst input run once more with its ledger, its edge, the margin and what holds."""
    trial, point = search.trial, worst.point
    plan, program = trial.at(point)
    is_attention, breaks = isinstance(plan.problem, Problem), worst.badness > limit
    ledger = Ledger(limit)
    diagnose = is_attention and not point.get("padding") and not trial.request.padding
    bits = trial.bits(plan, program, point, observers=(ledger,), diagnose=diagnose)
    subject = plan.subject(program)
    source = trial.source(plan, subject, point)
    inputs = {n: _heads(source, n, plan.problem) for n in "qkv"} if is_attention else _tensors(source, subject)
    return Stress(
        name=plan.folder(),
        schedule=trial.request.schedule,
        device=plan.device.name,
        precision=plan.precision.name,
        seed=trial.seed,
        verdict="holds" if not breaks else "not finite" if worst.rmse is None else "loses",
        worst=worst,
        calm=trial.calm,
        limit=limit,
        first=ledger.first if breaks else "",
        ledger=tuple(ledger.worth()),
        lost_mass=_share(bits, "zeroed_mass_percent"),
        clipped_mass=_share(bits, "clipped_mass_percent"),
        edge=_edge(search, worst, limit) if breaks and point else None,
        margin=_margin(search, limit),
        choices=_choices(search, worst, limit) if breaks else (),
        outcomes=tuple(search.outcomes),
        is_whole=search.is_whole,
        command=_command(trial.request, plan),
        inputs=inputs,
    )


def _share(bits: NumericResult, name: str) -> float | None:
    """Return a figure of the diagnosis as a share; None where there is none, or it is no number."""
    percent = getattr(bits.diagnosis, name, None)
    return None if percent is None or not math.isfinite(percent) else percent / 100


#: Options that tensors say, in place of a command line.
_OF_TENSORS = ("--seq", "--seq-q", "--seq-kv", "--batch", "--phase", "--dtype", "--lengths", "-w", "-t", "--tiling")


def _command(request: Request, plan: Plan) -> tuple[str, ...]:
    """Return the words of a run that reads the worst input in place of the request's, with the same tile."""
    asked = [(option, value) for option, value in request.asked() or () if option not in _OF_TENSORS]
    tile = [f"{n}={v}" for n, v in plan.tiling if v is not None and v != type(plan.tiling).model_fields[n].default]
    causal = [("--causal" if plan.problem.causal else "--no-causal", "")] if isinstance(plan.problem, Problem) else []
    options = [*asked, *(c for c in causal if c not in asked and not {("--causal", ""), ("--no-causal", "")} & {*asked})]
    words = [w for pair in options for w in pair if w]
    return ("npusim", "run", request.schedule, *words, *(("-t", ",".join(tile)) if tile else ()), "--tensors")


def _heads(source: HeadSource, name: str, problem: Any) -> NDArray[Any]:
    """Return the first KV head's tensor and its query heads', (1, heads, rows, columns)."""
    heads = range(problem.group_size if name == "q" else 1)
    return np.stack([source(name, 0, head) for head in heads])[None]


def _tensors(source: HeadSource, subject: Any) -> dict[str, NDArray[Any]]:
    return {
        t.name: np.stack([np.stack([source(t.name, b, h) for h in range(t.heads)]) for b in range(t.batch)])
        for t in subject.inputs
    }


def _edge(search: _Search, worst: Outcome, limit: float) -> Outcome:
    """Return the first point on the way from the base to the worst at which it breaks, to one in 32."""
    known = {a.name: a for a in search.aspects}
    low, edge, share = 0.0, worst, 1.0
    for _ in range(EDGE_STEPS):
        if search.is_over(CHOICE_SHARE):
            break
        middle = (low + share) / 2
        point = {n: _towards(known[n], v, middle) for n, v in worst.point.items()}
        outcome = search.trial(point)
        if outcome.badness > limit:
            edge, share = outcome, middle
        else:
            low = middle
    return edge


def _towards(aspect: Aspect, value: float, share: float) -> float:
    """Return the value at a share of the way from an aspect's base; one that is there or not stays."""
    if len(aspect.values) < 2:
        return value
    if aspect.is_factor and value > 0:
        return float(value**share)
    between = aspect.neutral + (value - aspect.neutral) * share
    return float(round(between)) if aspect.name == "tail" else between


def _margin(search: _Search, limit: float) -> float | None:
    """Return the power of two by which inputs may be larger: of those tried, the last before it breaks."""
    is_attention = isinstance(search.trial.base[0].problem, Problem)
    name = "logit_std" if is_attention else "scale"

    def holds(power: int) -> bool:
        return search.trial({name: 2.0**power}).badness <= limit

    if search.is_over(CHOICE_SHARE):
        return None
    if holds(0):
        grown = next((n - 1 for n in range(1, GROWN + 1) if search.is_over(CHOICE_SHARE) or not holds(n)), GROWN)
        return 2.0**grown
    return next((2.0**-n for n in range(1, SHRUNK + 1) if not search.is_over(CHOICE_SHARE) and holds(-n)), None)


def _choices(search: _Search, worst: Outcome, limit: float) -> tuple[Choice, ...]:
    """Return what holds on the worst input: presets, single changes of the precision, other schedules.

    Where none does, the one that comes nearest, if it comes nearer.
    """
    trial, point, tried = search.trial, worst.point, list[Choice]()
    for name, of in _alternatives(*trial.at(point)):
        if search.is_over(CHOICE_SHARE):
            break
        try:
            rmse = trial.outcome(*trial.built(of()), point).rmse
        except NpusimError:  # this call or device has no such choice
            continue
        tried.append(Choice(name, rmse, rmse is not None and rmse <= limit))
    nearest = sorted((c for c in tried if c.rmse is not None and c.rmse < worst.badness), key=lambda c: c.rmse or 0.0)
    return tuple(c for c in tried if c.holds) or tuple(nearest[:1])


def _alternatives(plan: Plan, program: TileProgram) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield other choices of a plan's precision by name, and other schedules with their usual one."""
    own = plan.precision.name
    for preset in plan.schedule.precisions:
        if preset != own:
            yield preset, partial(_changed, plan, preset)
    for change in alternatives(plan.result(program, None, ComputedBits(), ())):
        if change.kind == "precision":
            kept = [part for part in own.split(",") if part.partition("=")[0] != change.field]
            yield str(change), partial(_changed, plan, ",".join((*kept, str(change))))
    for other in other_schedules(plan) if isinstance(plan.problem, Problem) else ():
        yield other.schedule.name, partial(_changed, other, "")


def _changed(plan: Plan, text: str) -> Plan:
    return replace(plan, precision=plan.schedule.precision(text))
