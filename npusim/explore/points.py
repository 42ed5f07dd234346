"""What a worker of a search does: builds points, bounds them, simulates those that may win, computes their bits."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from npusim.config.node import NodeDevice, is_node
from npusim.errors import NpusimError, TilingError, one_line
from npusim.explore.bounds import alone_bound, work_bound
from npusim.explore.store import PointOutcome
from npusim.simulation.sensitivity import sensitivity
from npusim.simulation.simulate import run_request
from npusim.timing.engine_code import Code
from npusim.timing.stream import Streams
from npusim.timing.summary import times_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npusim.explore.space import Point
    from npusim.ir.program import TileProgram
    from npusim.simulation.result import RunData
    from npusim.simulation.variants import BuiltVariant, Variants
    from npusim.timing.result import TimingResult

__all__ = ["Bits", "Job", "Sensitive", "Surveyed", "compute_bits", "evaluate", "narrow", "prove", "sensitive", "survey"]

#: Seconds of a core's work behind which no launch is hidden.
LONG_S = 1.0
#: Methods that go through a program's blocks compiled: a core group alone is a bound for them.
_COMPILED = ("auto", "block", "fold", "steady")


@dataclass(frozen=True, slots=True)
class Job:
    """Points of one task, by number; ``cutoffs`` are latencies in microseconds that they would have to beat.

    ``variants`` are the search's `Variants`, pickled once: one object, with what it keeps, for all tasks of a worker.
    """

    variants: bytes
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


@lru_cache(maxsize=4)
def _variants(pickled: bytes) -> Variants:
    return cast("Variants", pickle.loads(pickled))


def _built(job: Job, point: Point) -> BuiltVariant:
    """Return a point's program; raise `TilingError` where it does not fit."""
    variants = _variants(job.variants)
    return variants.build(variants.named(point), is_hinted=False)


def _run(job: Job, point: Point, *, has_bits: bool = False) -> RunData:
    """Return the whole run of a point."""
    return run_request(replace(_variants(job.variants).request_of(point), numerics=has_bits))


def latency_us(built: BuiltVariant, cycles: float) -> float:
    """Return the least that a call of so many cycles takes, launches included."""
    device = built.plan.device
    times, _ = times_of(built.program, device, device.seconds(cycles))
    return times["call"] * 1e6


def cycles_within(built: BuiltVariant, us: float) -> float:
    """Return how many cycles make a call as long as that, and no shorter one: beyond what the host hides."""
    clock = float(built.plan.device.clock_hz.value)
    hidden = LONG_S * 1e6 - latency_us(built, LONG_S * clock)
    return (us + hidden) * 1e-6 * clock


# ---------------------------------------------------------------- tasks


def survey(job: Job) -> list[tuple[int, Surveyed | str]]:
    """Return of each point why it does not fit, or its bound, and which earlier one is the same program."""
    surveyed: list[tuple[int, Surveyed | str]] = []
    first: dict[Hashable, int] = {}
    is_narrowed = _variants(job.variants).request.method in _COMPILED
    for (number, point), cutoff in zip(job.points, job.cutoffs, strict=True):
        try:
            built = _built(job, point)
        except TilingError as error:
            surveyed.append((number, one_line(error)))
            continue
        key = built.program_key
        same = None if key is None else first.setdefault(key, number)
        bound = work_bound(built.program, built.plan.device, cycles_within(built, cutoff))
        bits = (built.bits_key or f"point {number}") if job.needs_bits else ""
        latency, earlier = latency_us(built, bound.cycles), None if same == number else same
        surveyed.append((number, Surveyed(latency, earlier, bits, bound.groups if is_narrowed else ())))
    return surveyed


def narrow(job: Job) -> list[tuple[int, float]]:
    """Return of each point a better bound of its latency in us: its busiest core groups alone."""
    bounds = []
    for (number, point), known in zip(job.points, job.surveyed, strict=True):
        assert known is not None
        built = _built(job, point)
        streams = Streams(built.program, built.plan.device)
        cycles = 0 if streams.scalar_waits else alone_bound(Code(streams), known.groups)
        bounds.append((number, max(known.bound_us, latency_us(built, cycles))))
    return bounds


def evaluate(job: Job) -> list[PointOutcome]:
    """Return what each point gives: its time, or why it has none."""
    outcomes = []
    for number, (index, point) in enumerate(job.points):
        known = job.surveyed[number] if job.surveyed else None
        try:
            outcomes.append(_evaluated(job, index, point, known.bound_us if known else 0.0))
        except TilingError as error:
            outcomes.append(PointOutcome(index, point, "infeasible", reason=one_line(error)))
    return outcomes


def _evaluated(job: Job, index: int, point: Point, bound: float) -> PointOutcome:
    request = _variants(job.variants).request
    if is_node(request.named_device()) or isinstance(request.hw, NodeDevice):
        result = _run(job, point)
        timing, program, ignored = result.timing, result.program, result.ignored
    else:
        built = _built(job, point)
        timing, program, ignored = built.timing(), built.program, built.plan.ignored
    assert timing is not None  # devices without times are refused before
    return _outcome(index, point, timing, program, ignored, bound)


def prove(job: Job) -> list[int]:
    """Check points for races and all else that a run is checked for; raise what is wrong with one."""
    for _, point in job.points:
        _built(job, point).check()
    return [number for number, _ in job.points]


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
    computed = []
    for _, point in job.points:
        try:
            bits = _run(job, point, has_bits=True).numerics
        except NpusimError as error:
            computed.append(Bits(None, one_line(error)))
            continue
        computed.append(Bits(None if bits is None else bits.error.rmse))
    return computed


class Sensitive(NamedTuple):
    """A point's latency in us, and with each doubtful constant that it uses a fifth lower, and a fifth higher."""

    latency_us: float
    sides: dict[str, tuple[float, float]]


def sensitive(job: Job) -> list[Sensitive]:
    """Return how latencies move with constants that are assumed or fitted."""
    latencies = []
    for _, point in job.points:
        result = _run(job, point)
        latency = result.latency_us
        sides = {s.key: (latency * (1 + s.lower), latency * (1 + s.higher)) for s in sensitivity(result)}
        latencies.append(Sensitive(latency, sides))
    return latencies
