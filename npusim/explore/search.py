"""Runs a schedule at every point of a grid; keeps the times, and why some points do not fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from npusim.config.tiling import tiling_fields
from npusim.errors import NpusimError, SpecError, TilingError
from npusim.explore.executors import executor
from npusim.explore.space import Point, Space
from npusim.explore.store import Outcome, csv_store
from npusim.request import DEFAULT_WORKLOAD, Request
from npusim.schedules import find_schedule
from npusim.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.kernels import AnyProblem
    from npusim.config.problem import Dtype
    from npusim.config.workload import Workload
    from npusim.run_result import RunResult
    from npusim.schedules import Schedule

__all__ = ["Exploration", "explore", "precision_fields", "search"]

#: The field whose values are presets of the precision.
PRECISION = "precision"


def _grid(request: Request, fields: Mapping[str, Iterable[int | float | str]], *, studies: bool) -> Space:
    """Return the points to try; raise what every point would raise.

    That is what is no field, no preset or value of the precision, sizes that make no problem, or, where no
    ``studies`` are asked for, times of no real kernel.
    """
    device, schedule = cast("DeviceSpec", request.hw), _schedule(request)
    free = precision_fields(schedule)
    space = Space.of(schedule.tiling, fields, free)
    for name in space.fields.keys() & set(free):
        for value in space.fields[name]:
            schedule.precision(at(request, {name: value}).precision)
    if not device.is_timed:
        raise SpecError(f"{device.name} has no timing model yet: nothing to compare")
    if request.problem is None:
        request.load().ignored(request.attention().seq_kv, request.ignore)
    if schedule.study and not studies and (why := schedule.study(request.problem or request.attention(), device)):
        raise SpecError(f"nothing to rank: {why}; --studies ranks it all the same (Python: studies=True)")
    return space


def _schedule(request: Request) -> Schedule:
    return find_schedule(request.schedule, cast("DeviceSpec", request.hw).family)


def at(request: Request, point: Point) -> Request:
    """Return the request of one point: its tiling fields, a preset and changes to it; no bits, no timeline."""
    own = {field.name for field in tiling_fields(_schedule(request).tiling)}
    tiling = {**cast("Any", request.tiling), **{k: v for k, v in point.items() if k in own}}
    changes = [str(v) if k == PRECISION else f"{k}={v}" for k, v in point.items() if k not in own]
    precision = ",".join(filter(None, (request.precision, *changes))) or None
    return replace(request, tiling=tiling, precision=precision, numerics=False, trace_groups=())


def precision_fields(schedule: Schedule) -> tuple[str, ...]:
    """Return what may vary besides the tiling: the preset, as ``precision``, and its fields."""
    preset = cast("Any", schedule.precision())
    own = {field.name for field in tiling_fields(schedule.tiling)}
    parts = (field.name for field in dataclasses.fields(preset) if field.name != "name")
    found = (PRECISION, *parts)
    return tuple(name for name in found if name not in own)


@dataclass(frozen=True, repr=False)
class Exploration:
    """All outcomes of a search, in the order of the grid."""

    request: Request
    space: Space
    outcomes: tuple[Outcome, ...]

    @property
    def feasible(self) -> tuple[Outcome, ...]:
        """Points that fit, the fastest first (ties in the order of the grid)."""
        found = [o for o in self.outcomes if o.status == "ok"]
        return tuple(sorted(found, key=lambda o: (o.cycles or 0, o.index)))

    @property
    def infeasible(self) -> tuple[Outcome, ...]:
        """Points that do not fit, with their reasons."""
        return tuple(o for o in self.outcomes if o.status == "infeasible")

    @property
    def best(self) -> Outcome | None:
        """The fastest point, or None if none fits."""
        return next(iter(self.feasible), None)

    def __repr__(self) -> str:
        """Return what was searched and the best point, on one line."""
        best, device = self.best, cast("DeviceSpec", self.request.hw)
        found = "none fits"
        if best is not None:
            at = " ".join(f"{name}={value}" for name, value in best.point.items())
            found = f"best {at}: {best.cycles:,} cycles, {best.latency_us:,.2f} us"
        fits = f"{len(self.feasible)} of {len(self.outcomes)} points fit"
        return f"<Exploration of {self.request.schedule} on {device.name}: {fits}, {found}>"

    def to_pandas(self) -> Any:
        """Return `columns` as a pandas DataFrame; pandas has to be installed."""
        try:
            import pandas as pd
        except ImportError:
            raise NpusimError("pandas is not installed: python -m pip install pandas") from None
        return pd.DataFrame(self.columns())

    def columns(self) -> dict[str, list[object]]:
        """Return the outcomes as columns by name, for a frame of any library."""
        rows = [o.row() for o in self.outcomes]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def explore(
    schedule: str,
    fields: Mapping[str, Iterable[int | float | str]],
    *,
    hw: str | Path | DeviceSpec | None = None,
    workload: str | Path | Workload = DEFAULT_WORKLOAD,
    problem: AnyProblem | None = None,
    seq: int | None = None,
    seq_q: int | None = None,
    seq_kv: int | None = None,
    batch: int | None = None,
    tensor_parallel: int | None = None,
    causal: bool | None = None,
    dtype: Dtype | None = None,
    ignore: Iterable[str] = (),
    tiling: Mapping[str, object] | None = None,
    precision: str | None = None,
    method: str = "auto",
    overrides: Mapping[str, object] | None = None,
    studies: bool = False,
    jobs: int = 1,
    csv_path: str | Path | None = None,
    on_outcome: Callable[[Outcome, int], None] | None = None,
) -> Exploration:
    """Run ``schedule`` at every combination of the fields' values and return all times.

    Parameters
    ----------
    fields
        Values to try by tiling field, by field of the precision (``acc_qk``), or presets by
        ``precision``; ``tiling`` and ``precision`` fix others.  The rest is as for `npusim.run`.
    studies
        Rank times too that are those of no real kernel (FP8 attention without an FP8 matrix unit).
    jobs
        Processes; above 1 the call of a script stands under ``if __name__ == "__main__":``.
    csv_path
        A file that gets each point as it is done, and keeps it when the work is interrupted.
    on_outcome
        Called with each outcome as it is done, and the number of points.

    Raises
    ------
    NpusimError
        What is wrong for every point.  One that alone does not fit is an outcome with its reason.

    Examples
    --------
    >>> found = explore("flash", {"block_kv": [256, 512]}, seq=512)
    >>> len(found.outcomes)
    2
    """
    return search(Request.of(locals()), fields, jobs, csv_path, on_outcome, studies=studies)


def search(
    request: Request, fields: Mapping[str, Iterable[int | float | str]], jobs: int = 1,
    csv_path: str | Path | None = None, on_outcome: Callable[[Outcome, int], None] | None = None,
    *, studies: bool = False,
) -> Exploration:  # fmt: skip
    """Run a request at every combination of the fields' values; see :func:`explore`."""
    r = request
    tiling = dict(cast("Any", r.tiling) or {})
    request = replace(r, hw=r.machine(), overrides=None, workload=r.load(), tiling=tiling)
    space = _grid(request, fields, studies=studies)
    if csv_path is None:
        return _search(request, space, jobs, on_outcome)
    with csv_store(Path(csv_path), list(space.fields)) as add:
        return _search(request, space, jobs, on_outcome, add)


def evaluate(request: Request, task: tuple[int, Point]) -> Outcome:
    """Return the outcome of one point; a tiling that does not fit is one, with its reason."""
    index, point = task
    try:
        result = run_request(at(request, point))
    except TilingError as error:
        return Outcome(index, point, "infeasible", reason=" ".join(str(error).split()))
    busiest, share = _busiest(result)
    timing = result.timing
    assert timing is not None  # `_grid` refused devices without
    return Outcome(
        index, point, "ok",
        cycles=result.cycles, latency_us=result.latency_us, method=timing.method, band=timing.band,
        busiest=busiest, busy_share=share, ignored=", ".join(result.ignored),
    )  # fmt: skip


def _search(
    request: Request,
    space: Space,
    jobs: int,
    on_outcome: Callable[[Outcome, int], None] | None,
    store: Callable[[Outcome], None] | None = None,
) -> Exploration:
    outcomes: list[Outcome] = []
    tasks = list(enumerate(space.points()))
    for outcome in executor(min(jobs, len(space))).evaluate(partial(evaluate, request), tasks):
        outcomes.append(outcome)
        if store is not None:
            store(outcome)
        if on_outcome is not None:
            on_outcome(outcome, len(space))
    return Exploration(request, space, tuple(sorted(outcomes, key=lambda o: o.index)))


def _busiest(result: RunResult) -> tuple[str, float]:
    timing = result.timing
    queues = [queue for group in timing.queues for queue in group] if timing is not None else []
    if not queues or not result.cycles:
        return "", 0.0
    pipes = [queue for queue in queues if queue.is_pipe]
    top = max(pipes or queues, key=lambda queue: queue.busy_cycles)
    return top.queue.rpartition(".")[2], top.busy_cycles / result.cycles
