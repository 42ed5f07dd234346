"""What a worker of a search does: builds points, bounds them, simulates those that may win, computes their bits."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from npusim.config.node import NodeDevice, is_node
from npusim.config.tiling import build_tiling, tiling_fields
from npusim.errors import NpusimError, TilingError
from npusim.explore.bounds import alone_bound, content_of, work_bound
from npusim.explore.store import PointOutcome
from npusim.ir.check import check
from npusim.schedules import find_schedule
from npusim.schedules.plugins import with_origin
from npusim.simulation.plan import plan_of
from npusim.simulation.sensitivity import sensitivity
from npusim.simulation.simulate import run_request, simulate_program, warmed
from npusim.timing.block_code import Code
from npusim.timing.stream import Streams
from npusim.timing.summary import times_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npusim.explore.space import Point
    from npusim.ir.program import TileProgram
    from npusim.schedules import Schedule
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Request
    from npusim.simulation.result import RunData
    from npusim.timing.result import TimingResult

__all__ = [
    "PRECISION",
    "SIZES",
    "Bits",
    "Job",
    "SearchRequest",
    "Surveyed",
    "Swayed",
    "at",
    "compute_bits",
    "evaluate",
    "narrow",
    "precision_fields",
    "prove",
    "survey",
    "swayed",
    "why_not",
]

#: The axis whose values are presets of the precision.
PRECISION = "precision"
#: Axes that are options of a run besides its tiling and precision.
SIZES = ("schedule", "workload", "hw", "seq", "seq_q", "seq_kv", "batch", "tensor_parallel", "causal", "dtype")
#: Seconds of a core's work behind which no launch is hidden.
LONG_S = 1.0
#: Methods that go through a program's blocks compiled: a core group alone is a bound for them.
_COMPILED = ("auto", "block", "fold", "steady")


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What every task of a search is about, pickled once: the request, and the axes that are keys of the device."""

    pickled: bytes
    device_keys: tuple[str, ...]

    @classmethod
    def of(cls, request: Request, device_keys: tuple[str, ...]) -> SearchRequest:
        """Return it; what cannot be pickled is left out."""
        return cls(pickle.dumps(replace(request, progress=None)), device_keys)


@dataclass(frozen=True, slots=True)
class Job:
    """Points of one task, by number; ``cutoffs`` are latencies in microseconds that they would have to beat."""

    asking: SearchRequest
    points: tuple[tuple[int, Point], ...]
    cutoffs: tuple[float, ...]
    needs_bits: bool = False
    surveyed: tuple[Surveyed | None, ...] = ()


class Surveyed(NamedTuple):
    """A point that fits: a bound of its latency in us, which point of its task it equals, what its bits hang on.

    ``groups`` are the core groups whose time alone is a better bound: none where that is no bound, or is it already.
    """

    bound_us: float
    same_as: int | None = None
    bits: str = ""
    groups: tuple[int, ...] = ()


# ---------------------------------------------------------------- requests


def precision_fields(schedule: Schedule) -> tuple[str, ...]:
    """Return what may vary besides the tiling: the preset, as ``precision``, and its fields."""
    preset = cast("Any", schedule.precision())
    own = {field.name for field in tiling_fields(schedule.tiling)}
    parts = (field.name for field in dataclasses.fields(preset) if field.name != "name")
    return tuple(name for name in (PRECISION, *parts) if name not in own)


def at(request: Request, point: Point, device_keys: tuple[str, ...] = ()) -> Request:
    """Return the request of one point: its options, tiling fields, preset and changes to it; no bits, no timeline."""
    given = {k: v for k, v in point.items() if v is not None}
    sizes: dict[str, Any] = {k: given.pop(k) for k in SIZES if k in given}
    keys = {k: str(given.pop(k)) for k in device_keys if k in given}
    if "causal" in sizes:
        sizes["causal"] = str(sizes["causal"]).lower() == "true"
    changed = replace(request, **sizes)
    if keys:
        changed = replace(changed, overrides={**(changed.overrides or {}), **keys})
    own = {f.name for f in tiling_fields(_schedule(changed).tiling)}
    tiling = {**cast("Any", request.tiling or {}), **{k: v for k, v in given.items() if k in own}}
    changes = [str(v) if k == PRECISION else f"{k}={v}" for k, v in given.items() if k not in own]
    precision = ",".join(filter(None, (request.precision, *changes))) or None
    return replace(changed, tiling=tiling, precision=precision, numerics=False, trace_groups=(), presets=False)


def _schedule(request: Request) -> Schedule:
    return find_schedule(request.schedule, request.machine().family)


@lru_cache(maxsize=4)
def _request(asking: SearchRequest) -> Request:
    return cast("Request", pickle.loads(asking.pickled))


class Scene(NamedTuple):
    """A point's plan but for tiling and precision: one device object for all points of a task, who share its bodies."""

    plan: Plan
    own: frozenset[str]


@lru_cache(maxsize=32)
def _scene(asking: SearchRequest, sizes: tuple[tuple[str, object], ...]) -> Scene:
    request = at(_request(asking), dict(sizes), asking.device_keys)
    device, load = request.machine(), request.load() if request.problem is None else None
    request = replace(request, hw=device, overrides=None, workload=load, tiling=None, precision=None)
    plan = replace(plan_of(request, is_bare=True), tensors=None)  # bits are computed by runs of their own
    return Scene(plan, frozenset(f.name for f in tiling_fields(_schedule(request).tiling)))


class Built(NamedTuple):
    """One point's program and plan."""

    plan: Plan
    program: TileProgram

    def latency_us(self, cycles: float) -> float:
        """Return the least that a call of so many cycles takes, launches included."""
        times, _ = times_of(self.program, self.plan.device, self.plan.device.seconds(cycles))
        return times["call"] * 1e6

    def cycles(self, latency_us: float) -> float:
        """Return how many cycles make a call as long as that, and no shorter one: beyond what the host hides."""
        clock = float(self.plan.device.clock_hz.value)
        hidden = LONG_S * 1e6 - self.latency_us(LONG_S * clock)
        return (latency_us + hidden) * 1e-6 * clock


def _built(asking: SearchRequest, point: Point, *, is_hinted: bool = False) -> Built:
    """Return a point's program; raise `TilingError` where it does not fit."""
    request = _request(asking)
    scene = _scene(asking, tuple((k, v) for k, v in point.items() if k in SIZES or k in asking.device_keys))
    given = {k: v for k, v in point.items() if v is not None and k not in SIZES and k not in asking.device_keys}
    tiling = {**cast("Any", request.tiling or {}), **{k: v for k, v in given.items() if k in scene.own}}
    changes = [str(v) if k == PRECISION else f"{k}={v}" for k, v in given.items() if k not in scene.own]
    schedule = scene.plan.schedule
    arithmetic = request.arithmetic and f"arithmetic={request.arithmetic}"
    precision = schedule.precision(",".join(filter(None, (request.precision, *changes, arithmetic))))
    plan = replace(scene.plan, tiling=build_tiling(schedule.tiling, tiling), precision=precision)
    fitted, program = schedule.fitted(plan.problem, plan.tiling, plan.device, precision, is_hinted=is_hinted)
    return Built(replace(plan, tiling=fitted), warmed(program, plan.device) if request.warm else program)


# ---------------------------------------------------------------- tasks


def survey(job: Job) -> list[tuple[int, Surveyed | str]]:
    """Return of each point why it does not fit, or its bound, and which earlier one is the same program."""
    found: list[tuple[int, Surveyed | str]] = []
    seen: dict[Hashable, int] = {}
    for (number, point), cutoff in zip(job.points, job.cutoffs, strict=True):
        try:
            built = _built(job.asking, point)
        except TilingError as error:
            found.append((number, " ".join(str(error).split())))
            continue
        content = content_of(built.program)
        key = None if content is None else (built.plan.device.name, content)
        same = None if key is None else seen.setdefault(key, number)
        bound = work_bound(built.program, built.plan.device, built.cycles(cutoff))
        bits = _digest(built, number) if job.needs_bits else ""
        is_narrowed = _request(job.asking).method in _COMPILED
        latency, earlier = built.latency_us(bound.cycles), None if same == number else same
        found.append((number, Surveyed(latency, earlier, bits, bound.groups if is_narrowed else ())))
    return found


def narrow(job: Job) -> list[tuple[int, float]]:
    """Return of each point a better bound of its latency in us: its busiest core groups alone."""
    found = []
    for (number, point), known in zip(job.points, job.surveyed, strict=True):
        assert known is not None
        built = _built(job.asking, point)
        streams = Streams(built.program, built.plan.device)
        cycles = 0 if streams.scalar_waits else alone_bound(Code(streams), known.groups)
        found.append((number, max(known.bound_us, built.latency_us(cycles))))
    return found


def _digest(built: Built, number: int) -> str:
    """Return what bits hang on as a digest; of a machine that does not say, a point's own."""
    program = built.program
    if any(phase.bits is None for phase in program.phases):
        return f"point {number}"
    said = [repr(built.plan.problem)]
    for phase in program.phases:
        content, cells, sums = phase.bits()  # type: ignore[misc]
        said += [repr(content), *sorted(map(repr, cells)), repr(sums)]
    # A function of a module is known by its name; what is shown by its address says nothing of its content.
    text = re.sub(r"<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", "\n".join(said))
    return f"point {number}" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()[:16]


def evaluate(job: Job) -> list[PointOutcome]:
    """Return what each point gives: its time, or why it has none."""
    found = []
    for number, (index, point) in enumerate(job.points):
        known = job.surveyed[number] if job.surveyed else None
        try:
            found.append(_evaluated(job, index, point, known.bound_us if known else 0.0))
        except TilingError as error:
            found.append(PointOutcome(index, point, "infeasible", reason=" ".join(str(error).split())))
    return found


def _evaluated(job: Job, index: int, point: Point, bound: float) -> PointOutcome:
    request = _request(job.asking)
    if is_node(request.named_device()) or isinstance(request.hw, NodeDevice):
        return _of_result(index, point, run_request(at(request, point, job.asking.device_keys)))
    built = _built(job.asking, point)
    plan, program = built.plan, built.program
    _prove(built)
    timing = simulate_program(program, plan.device, request.method)
    return _outcome(index, point, timing, program, plan.ignored, bound)


def prove(job: Job) -> list[int]:
    """Check points for races and all else that a run is checked for; raise what is wrong with one."""
    for _, point in job.points:
        _prove(_built(job.asking, point))
    return [number for number, _ in job.points]


def _prove(built: Built) -> None:
    with with_origin(built.plan.schedule.origin):
        check(built.program, built.plan.device.flags)


def _of_result(index: int, point: Point, result: RunData) -> PointOutcome:
    assert result.timing is not None  # devices without times are refused before
    return _outcome(index, point, result.timing, result.program, result.ignored, 0.0)


def _outcome(
    index: int, point: Point, timing: TimingResult, program: TileProgram, ignored: tuple[str, ...], bound: float
) -> PointOutcome:
    busiest, share = _busiest(timing)
    # L0 is full by design, slots in global memory never are.
    kept = {n: both for n, both in program.occupancy_bytes().items() if n != "gm" and ".L0" not in n}
    room = {n: 1 - used / there for n, (used, there) in kept.items() if there}
    tightest = min(room, key=lambda n: room[n], default="")
    return PointOutcome(
        index,
        point,
        "ok",
        cycles=timing.cycles,
        latency_us=timing.latency_s * 1e6,
        method=timing.method,
        band=timing.band,
        busiest=busiest,
        busy_share=share,
        ignored=", ".join(ignored),
        bound_us=bound or None,
        hbm_bytes=timing.link_bytes.get("hbm"),
        head_room=room.get(tightest),
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
    """Error of the bits of one numerically distinct configuration; None where they are not finite."""

    relative_rmse: float | None
    problem: str = ""


def compute_bits(job: Job) -> list[Bits]:
    """Return the error of each point's bits."""
    request = _request(job.asking)
    found = []
    for _, point in job.points:
        try:
            error = run_request(replace(at(request, point, job.asking.device_keys), numerics=True)).numerics
        except NpusimError as wrong:
            found.append(Bits(None, " ".join(str(wrong).split())))
            continue
        found.append(Bits(None if error is None else error.error.rmse))
    return found


def why_not(asking: SearchRequest, point: Point) -> str:
    """Return why a point does not fit, with what would."""
    try:
        _built(asking, point, is_hinted=True)
    except TilingError as error:
        return " ".join(str(error).split())
    return ""


class Swayed(NamedTuple):
    """A point's latency in us, and with each doubtful constant that it uses a fifth lower, and a fifth higher."""

    latency_us: float
    sides: dict[str, tuple[float, float]]


def swayed(job: Job) -> list[Swayed]:
    """Return how latencies move with constants that are assumed or fitted."""
    request = _request(job.asking)
    found = []
    for _, point in job.points:
        result = run_request(at(request, point, job.asking.device_keys))
        own = result.latency_us
        sides = {s.key: (own * (1 + s.lower), own * (1 + s.higher)) for s in sensitivity(result)}
        found.append(Swayed(own, sides))
    return found
