"""The tasks of a search's worker: it builds points, computes their lower bounds, simulates points that may win,
and computes their bits.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, cast

from npusim.config.node_file import is_node
from npusim.errors import NpusimError, TilingError, one_line
from npusim.identity import Itself
from npusim.late_methods import dataclass
from npusim.program.ir.sameness import ProgramContent
from npusim.program.timing.engine_code import Code
from npusim.program.timing.stream import Streams, clocked
from npusim.program.timing.summary import times_of
from npusim.simulation.evaluation import bits_of
from npusim.simulation.figures import figures
from npusim.simulation.plan import plan_of
from npusim.simulation.simulate import BuiltPlan, run_request
from npusim.simulation.variants import Variants, bits_key
from npusim.studies.explore.bounds import Bound, alone_bound, work_bound
from npusim.studies.explore.store import PointOutcome

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import NumericResult
    from npusim.program.timing.engine_arrays import Ints
    from npusim.program.timing.timing_result import TimingResult
    from npusim.simulation.run_result import RunData
    from npusim.studies.explore.space import Point

#: Seconds of core time above which the host no longer hides the launch.
LONG_S = 1.0
#: Methods that simulate a program's blocks in compiled code: with them, the time of a core group alone is a bound.
_COMPILED = ("auto", "block", "fold", "steady")


@dataclass(frozen=True, slots=True)
class PointTask:
    """One point by number; the point must be faster than ``cutoff_us`` to win.

    ``heavier``: the other values in the family that the point represents (`PointFamily`); None: the point represents
    only itself.
    """

    index: int
    point: Point
    cutoff_us: float = 0.0
    surveyed: Surveyed | None = None
    heavier: tuple[Point, ...] | None = None
    is_dealt: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """One task of a worker.

    ``variants`` are the search's `Variants`, pickled once: one object, with its stored data, for all jobs of a worker.
    ``deadline``, in seconds of `time.time`: no bound is computed after this time.
    """

    variants: bytes
    tasks: tuple[PointTask, ...]
    needs_bits: bool = False
    deadline: float = math.inf


class Surveyed(NamedTuple):
    """A point that fits: a lower bound of its latency in us, an earlier point with its program, the key of its bits.

    ``groups``: core groups whose simulation alone gives a better bound; empty if it gives no better bound, or was
    already done.  ``work``: the work of the loop bodies in the family's program, which all points of the family share.
    Open fields are not chosen yet, and the bound is the minimum over all their tiles.
    """

    bound_us: float
    same_as: int | None = None
    bits: str = ""
    groups: tuple[int, ...] = ()
    work: Mapping[Hashable, Ints] | None = None


@lru_cache(maxsize=4)
def _variants(pickled: bytes) -> Variants:
    return cast("Variants", pickle.loads(pickled))


def _built(job: Job, task: PointTask) -> BuiltPlan:
    """Return a point's program; raise `TilingError` if it does not fit."""
    return _variants(job.variants).built(tuple(task.point.items()))


#: Forgets the stored data of earlier searches.
forget = _variants.cache_clear


def _run(job: Job, task: PointTask, *, has_bits: bool = False) -> RunData:
    return run_request(replace(_variants(job.variants).request_of(task.point), numerics=has_bits))


def latency_us(built: BuiltPlan, cycles: float) -> float:
    """Return the least latency of a call with this number of cycles, launches included."""
    device = clocked(built.program, built.plan.device)
    times, _ = times_of(built.program, device, device.seconds(cycles))
    return times["call"] * 1e6


def cycles_within(built: BuiltPlan, us: float) -> float:
    """Return the number of cycles of a call with this latency; it is valid from `LONG_S` on, where the host hides no
    launch.
    """
    clock = float(clocked(built.program, built.plan.device).clock_hz.value)
    hidden = LONG_S * 1e6 - latency_us(built, LONG_S * clock)
    return (us + hidden) * 1e-6 * clock


# ---------------------------------------------------------------- tasks


def _candidates(job: Job, task: PointTask) -> Sequence[BuiltPlan] | str:
    """Return the candidate programs of a point; raise `TilingError` if none fits."""
    return list(_variants(job.variants).candidates(task.point, task.heavier))


def survey(job: Job) -> list[tuple[int, Surveyed | str]]:
    """Return, for each point, the reason why it does not fit, or its bound and the earlier point of the same program.

    A task may represent a family of points: if its lightest values do not fit, no point of the family does.
    """
    surveyed: list[tuple[int, Surveyed | str]] = []
    first: dict[Hashable, int] = {}
    works: dict[int, dict[Hashable, Ints]] = {}  # one mapping for each family, which its points share
    is_narrowed = _variants(job.variants).request.method in _COMPILED
    in_time = takewhile(lambda _: time.time() <= job.deadline, job.tasks)
    every = figures(in_time, partial(_candidates, job), (TilingError,), refused=lambda _, error: one_line(error))
    for task, candidates in every:
        if isinstance(candidates, str):
            surveyed.append((task.index, candidates))
            continue
        is_one, of_family = len(candidates) == 1, task.surveyed and task.surveyed.work
        known = works.setdefault(id(of_family), dict(of_family)) if of_family else {}
        bounds = [_bound(task, built, known if is_one else None) for built in candidates]
        latency = min(latency_us(built, bound.cycles) for built, bound in zip(candidates, bounds, strict=True))
        same = task.index
        if is_one and latency <= task.cutoff_us:  # the other points lose, even if they equal another point
            device, content = candidates[0].plan.device, ProgramContent(candidates[0].program)
            same = first.setdefault((Itself(device), bounds[0], content), same)
        bits = _bits_hang_on(job, task, candidates) if job.needs_bits else ""
        groups, earlier = bounds[0].groups if is_narrowed else (), None if same == task.index else same
        work = known if is_one and task.heavier is not None else None
        surveyed.append((task.index, Surveyed(latency, earlier, bits, groups, work)))
    return surveyed


def _bodies_of(built: BuiltPlan) -> Hashable:
    """Return a key that is equal for programs whose blocks run the same loop bodies, in any order."""
    return tuple([Itself(built) if phase.body_counts is None else phase.body_counts for phase in built.program.phases])


def _bits_hang_on(job: Job, task: PointTask, candidates: Sequence[BuiltPlan]) -> str:
    """Return the key that points with equal bits share; if the bits depend on an open field, the field is
    chosen first.
    """
    keys = {bits_key(built) for built in candidates}
    return (keys.pop() if len(keys) == 1 else bits_key(_built(job, task))) or f"point {task.index}"


def _bound(task: PointTask, built: BuiltPlan, known: dict[Hashable, Ints] | None = None) -> Bound:
    """Return a lower bound of a program's time by its work; it stops at the latency that its point must beat.

    ``known``: the work of the program of its family, or an empty mapping that receives it.
    """
    device = built.plan.device
    if built.plan.machine.node is not None:
        return Bound(0)
    cutoff = cycles_within(built, task.cutoff_us)
    # The rings of a family's other points have other depths.
    is_alone = task.heavier is None
    return work_bound(built.program, device, cutoff, is_dealt=task.is_dealt, waits=is_alone, known=known)


def narrow(job: Job) -> list[tuple[int, float]]:
    """Return a better bound of each point's latency in us: the time of its busiest core groups, without the others."""
    bounds = []
    for task in job.tasks:
        assert task.surveyed is not None
        candidates = list(_variants(job.variants).candidates(task.point))
        least = min(_alone_us(task, built, is_only=len(candidates) == 1) for built in candidates)
        bounds.append((task.index, max(task.surveyed.bound_us, least)))
    return bounds


def _alone_us(task: PointTask, built: BuiltPlan, *, is_only: bool) -> float:
    """Return the latency of a program's busiest core groups without the others: a lower bound."""
    assert task.surveyed is not None
    groups = task.surveyed.groups
    if not is_only:
        bound = _bound(task, built)
        if not bound.groups or latency_us(built, bound.cycles) > task.cutoff_us:
            return latency_us(built, bound.cycles)
        groups = bound.groups
    streams = Streams(built.program, built.plan.device)
    return latency_us(built, 0 if streams.scalar_waits else alone_bound(Code(streams), groups))


def prove(job: Job) -> list[int]:
    """Check points for races and all other faults that a run checks; raise the first fault.

    Return the points that fit; points that were pruned with their family are built here for the first time.  A point
    with open fields is checked with the first of its tiles that fits.
    """

    def first(task: PointTask) -> BuiltPlan:
        return next(_variants(job.variants).candidates(task.point))

    fitting = []
    for task, built in figures(job.tasks, first, (TilingError,)):
        built.check()
        fitting.append(task.index)
    return fitting


def evaluate(job: Job) -> list[PointOutcome]:
    """Return the outcome of each point: its time, or the reason why the point has no time."""

    def misfit(task: PointTask, error: NpusimError) -> PointOutcome:
        return PointOutcome(task.index, task.point, "infeasible", reason=one_line(error))

    timed = figures(job.tasks, partial(_outcome, job), (TilingError,), refused=misfit)
    return [outcome for _, outcome in timed]


def _outcome(job: Job, task: PointTask) -> PointOutcome:
    request = _variants(job.variants).request
    if is_node(request.named_device()):
        result = _run(job, task)
        timing, program, ignored = result.timing, result.program, result.ignored
    else:
        built = _built(job, task)
        built.check()
        timing, program, ignored = built.timing(), built.program, built.plan.ignored
    assert timing is not None  # devices without times are refused before this
    busiest, share = _busiest(timing)
    # L0 is full by design; slots in global memory never are.
    occupancy = {n: both for n, both in program.occupancy_bytes().items() if n != "gm" and ".L0" not in n}
    free = {n: 1 - used / capacity for n, (used, capacity) in occupancy.items() if capacity}
    tightest = min(free, key=lambda n: free[n], default="")
    return PointOutcome(
        task.index,
        task.point,
        "ok",
        cycles=timing.cycles,
        latency_us=timing.latency_s * 1e6,
        method=timing.method,
        band=timing.band,
        busiest=busiest,
        busy_share=share,
        ignored=", ".join(ignored),
        bound_us=(task.surveyed.bound_us or None) if task.surveyed else None,
        hbm_bytes=timing.link_bytes.get("hbm"),
        head_room=free.get(tightest),
        tightest=tightest,
    )


def _busiest(timing: TimingResult) -> tuple[str, float]:
    queues = [queue for group in timing.queues for queue in group]
    if not queues or not timing.cycles:
        return "", 0.0
    pipes = [queue for queue in queues if queue.is_pipe]
    top = max(pipes or queues, key=lambda queue: queue.busy_cycles)
    return top.queue.rpartition(".")[2], top.busy_cycles / timing.cycles


class Bits(NamedTuple):
    """Relative RMSE of the points that share one key of bits; None where an output is not finite.

    ``sampling_error``: its standard error, if only some rows were computed.
    """

    relative_rmse: float | None
    problem: str = ""
    sampling_error: float = 0.0


def compute_bits(job: Job) -> list[Bits]:
    """Return the error of each point's bits."""

    def bits(task: PointTask) -> Bits:
        computed = _bits_of(job, task)
        return Bits(None) if computed is None else Bits(computed.rmse, sampling_error=computed.sampling_error)

    return [found for _, found in figures(job.tasks, bits, refused=lambda _, error: Bits(None, one_line(error)))]


def _bits_of(job: Job, task: PointTask) -> NumericResult | None:
    """Return a point's bits alone, without its time or the results of other arithmetic."""
    request = _variants(job.variants).request_of(task.point)
    if is_node(request.named_device()):
        return _run(job, task, has_bits=True).numerics
    built = _built(job, task)
    plan = replace(plan_of(request, is_bare=True), tiling=built.plan.tiling)
    return bits_of(plan, built.program) if plan.problem.has_bits else None
