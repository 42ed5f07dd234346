"""Runs a schedule at every point of a grid; keeps the times, and why some points do not fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from npusim.errors import NpusimError, SpecError, TilingError
from npusim.explore.executors import executor
from npusim.explore.space import Point, Space
from npusim.explore.store import Outcome, csv_store
from npusim.run import DEFAULT_HW, DEFAULT_WORKLOAD, run
from npusim.schedules import default_hw, find_schedule
from npusim.spec.device import DeviceSpec
from npusim.spec.load import load_workload
from npusim.spec.node import NodeDevice, NodeSpec, load_machine
from npusim.spec.tiling import tiling_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from npusim.run_result import RunResult
    from npusim.schedules import Schedule
    from npusim.spec.kernels import AnyProblem
    from npusim.spec.model import SpecModel
    from npusim.spec.problem import Dtype
    from npusim.spec.workload import Workload

__all__ = ["Exploration", "Request", "explore", "precision_fields"]

#: The field whose values are presets of the precision.
PRECISION = "precision"


@dataclass(frozen=True)
class Request:
    """What all points of a search have in common."""

    schedule: str
    device: DeviceSpec
    workload: Workload
    problem: AnyProblem | None = None
    seq: int | None = None
    seq_q: int | None = None
    seq_kv: int | None = None
    batch: int | None = None
    tensor_parallel: int | None = None
    causal: bool | None = None
    dtype: Dtype | None = None
    tiling: tuple[tuple[str, object], ...] = ()
    precision: str | None = None
    method: str = "auto"
    ignore: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise what every point would raise: sizes that make no problem, an unknown preset."""
        if not self.device.is_timed:
            raise SpecError(f"{self.device.name} has no timing model yet: nothing to compare")
        if self.problem is not None:
            return
        problem = self.workload.problem(
            seq=self.seq,
            seq_q=self.seq_q,
            seq_kv=self.seq_kv,
            batch=self.batch,
            tensor_parallel=self.tensor_parallel,
            causal=self.causal,
            dtype=self.dtype,
        )
        self.workload.ignored(problem.seq_kv, self.ignore)

    def __getstate__(self) -> dict[str, object]:
        # A device holds classes that pydantic makes while running, which do not pickle.
        parts: tuple[SpecModel, ...] = (self.device,)
        if isinstance(self.device, NodeDevice):
            parts = (self.device.each, self.device.node)
        return {**self.__dict__, "device": [part.model_dump_json(by_alias=True) for part in parts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        each, *node = state["device"]
        device = DeviceSpec.model_validate_json(each)
        if node:
            device = NodeDevice.of(NodeSpec.model_validate_json(node[0]), device)
        self.__dict__.update({**state, "device": device})

    def run(self, point: Point) -> RunResult:
        """Return the time of one point; no bits, no timeline."""
        tiling, precision = self.split(point)
        return run(
            self.schedule,
            hw=self.device,
            workload=self.workload,
            problem=self.problem,
            seq=self.seq,
            seq_q=self.seq_q,
            seq_kv=self.seq_kv,
            batch=self.batch,
            tensor_parallel=self.tensor_parallel,
            causal=self.causal,
            dtype=self.dtype,
            tiling=tiling,
            precision=precision,
            method=self.method,
            ignore=self.ignore,
            numerics=False,
            trace_groups=(),
        )

    def grid(self, fields: Mapping[str, Iterable[int | float | str]]) -> Space:
        """Return the points to try; raise what is no field, or no preset or value of the precision."""
        schedule = find_schedule(self.schedule, self.device.family)
        free = precision_fields(schedule)
        space = Space.of(schedule.tiling, fields, free)
        for name in space.fields.keys() & set(free):
            for value in space.fields[name]:
                schedule.precision(self.split({name: value})[1])
        return space

    def split(self, point: Point) -> tuple[dict[str, object], str | None]:
        """Return the tiling fields of a point, and its precision: a preset and changes to it."""
        schedule = find_schedule(self.schedule, self.device.family)
        own = {field.name for field in tiling_fields(schedule.tiling)}
        tiling = {**dict(self.tiling), **{k: v for k, v in point.items() if k in own}}
        changes = [
            str(v) if k == PRECISION else f"{k}={v}" for k, v in point.items() if k not in own
        ]
        return tiling, ",".join(filter(None, (self.precision, *changes))) or None


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
        r, best = self.request, self.best
        found = "none fits"
        if best is not None:
            at = " ".join(f"{name}={value}" for name, value in best.point.items())
            found = f"best {at}: {best.cycles:,} cycles, {best.latency_us:,.2f} us"
        fits = f"{len(self.feasible)} of {len(self.outcomes)} points fit"
        return f"<Exploration of {r.schedule} on {r.device.name}: {fits}, {found}>"

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
    overrides: Mapping[str, str] | None = None,
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
    device = load_machine(default_hw(schedule, DEFAULT_HW) if hw is None else hw, overrides)
    load = load_workload(workload) if isinstance(workload, str | Path) else workload
    request = Request(
        schedule, device, load, problem, seq, seq_q, seq_kv, batch, tensor_parallel, causal, dtype,
        tuple((tiling or {}).items()), precision, method, tuple(ignore),
    )  # fmt: skip
    space = request.grid(fields)
    request.check()
    if csv_path is None:
        return _search(request, space, jobs, on_outcome)
    with csv_store(Path(csv_path), list(space.fields)) as add:
        return _search(request, space, jobs, on_outcome, add)


def evaluate(request: Request, task: tuple[int, Point]) -> Outcome:
    """Return the outcome of one point; a tiling that does not fit is one, with its reason."""
    index, point = task
    try:
        result = request.run(point)
    except TilingError as error:
        return Outcome(index, point, "infeasible", reason=" ".join(str(error).split()))
    busiest, share = _busiest(result)
    timing = result.timing
    assert timing is not None  # `Request.check` refused devices without
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
    return top.name.rpartition(".")[2], top.busy_cycles / result.cycles
