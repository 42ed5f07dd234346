"""What a search is about: its request with files read, its schedules, the axes that each of them has, its points."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from npusim.config.node import NodeDevice, load_machine
from npusim.config.tiling import tiling_fields
from npusim.errors import SpecError, TilingError
from npusim.explore.points import SIZES, at, precision_fields
from npusim.explore.space import Space, declared
from npusim.schedules import find_schedule, unread_keys
from npusim.simulation.plan import target_of
from npusim.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.explore.space import AxisSpan, Point, Value
    from npusim.schedules import Schedule
    from npusim.simulation.request import Request

__all__ = ["SearchSpec", "auto_axes", "setting_of"]


@dataclass(frozen=True)
class SearchSpec:
    """A request whose device and workload are read, and its spaces by schedule."""

    request: Request
    schedules: tuple[str, ...]
    axes: Mapping[str, tuple[Value | AxisSpan, ...]]
    spaces: Mapping[str, Space]
    device_keys: tuple[str, ...]
    content: str
    notes: tuple[str, ...] = ()

    @property
    def scene_names(self) -> tuple[str, ...]:
        """Axes that say what is computed and on what: points that differ in them are no rivals."""
        return ("schedule", *(n for n in self.axes if (n in SIZES and n != "schedule") or n in self.device_keys))

    def points(self) -> list[Point]:
        """Return every combination, schedule by schedule; with several, ``schedule`` is an axis."""
        if len(self.schedules) == 1:
            return list(self.spaces[self.schedules[0]].points())
        return [{"schedule": name, **p} for name, space in self.spaces.items() for p in space.points()]

    def config(self, point: Point) -> dict[str, object]:
        """Return all that a point's result hangs on."""
        r = self.request
        fixed = {**r.sizes(), "schedule": r.schedule, "method": r.method, "tiling": dict(cast("Any", r.tiling or {}))}
        return {**fixed, "precision": r.precision, "arithmetic": r.arithmetic, "content": self.content, "point": point}

    def key(self, point: Point) -> str:
        """Return a digest of :meth:`config`."""
        return _digest(self.config(point))

    def digest(self, *more: object) -> str:
        """Return a digest of the search."""
        axes = {n: [str(v) for v in values] for n, values in self.axes.items()}
        return _digest([self.config({}), self.schedules, axes, more])

    def distance(self, point: Point) -> float:
        """Return how far a point is from its schedule's defaults, in doublings."""
        schedule = _schedule(replace(self.request, schedule=str(point.get("schedule", self.request.schedule))))
        defaults = {f.name: f.default for f in tiling_fields(schedule.tiling)}
        found = 0.0
        for name, value in point.items():
            default = defaults.get(name)
            if isinstance(value, int) and isinstance(default, int):
                found += abs(math.log2((abs(value) + 1) / (abs(default) + 1)))
            elif name in defaults and default is not None:
                found += value != default
        return found


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _schedule(request: Request) -> Schedule:
    return find_schedule(request.schedule, request.machine().family)


def setting_of(request: Request, axes: Mapping[str, Iterable[Value | AxisSpan]], *, studies: bool = True) -> SearchSpec:
    """Return the setting; raise what every point would raise.

    That is an axis that no schedule has, a preset or value of the precision that there is not, sizes that make
    no problem, or a device without times.  Schedules whose times here are those of no real kernel are noted or, where
    no ``studies`` are asked for, left out; that is an error where none is left.
    """
    given = {name: _read(name, tuple(values)) for name, values in axes.items()}
    schedules = tuple(str(s) for s in given.pop("schedule", (request.schedule,)))
    for name in schedules:
        target_of(replace(request, schedule=name), has_bits=True)
    schedules, notes = _chosen(request, schedules, studies=studies)
    tiling = dict(cast("Any", request.tiling) or {})
    request = replace(
        request,
        schedule=schedules[0],
        hw=request.machine() if "hw" not in given else request.hw,
        overrides=None if "hw" not in given else request.overrides,
        tiling=tiling,
        workload=request.load() if request.problem is None else None,
    )
    free = {name: _known(replace(request, schedule=name)) for name in schedules}
    keys = tuple(n for n in given if n not in (*SIZES, *chain(*free.values())) and _is_key(request, n))
    # What one schedule has and another has not is an axis of that one; what none has is refused.
    everywhere = {*chain(*free.values()), *SIZES, *keys}
    spaces = {}
    for name, own in free.items():
        here = {n: v for n, v in given.items() if n in (*own, *SIZES, *keys) or n not in everywhere}
        if not given and len(schedules) > 1:  # schedules alone are compared by what each of them can compute in
            here = {"precision": tuple(_schedule(replace(request, schedule=name)).precisions)}
        fields = [f.name for f in tiling_fields(_schedule(replace(request, schedule=name)).tiling)]
        spaces[name] = _space(here, fields, [n for n in own if n not in fields], keys)
    for name in schedules:
        _check(replace(request, schedule=name), spaces[name], keys)
    return SearchSpec(request, schedules, given, spaces, keys, _content(request), notes)


def _chosen(request: Request, schedules: tuple[str, ...], *, studies: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the schedules that are searched, and notes on those whose times are those of no real kernel."""
    left, notes = list(schedules), []
    for name in schedules:
        study = _schedule(replace(request, schedule=name)).study
        why = study(request.problem or request.attention(), request.machine()) if study else ""
        if why and studies:
            notes.append(f"{name} is a study: {why}")
        elif why:
            left.remove(name)
            notes.append(f"{name} is left out: {why}; --studies ranks it all the same (Python: studies=True)")
    if not left:
        raise SpecError(f"nothing to rank: {'; '.join(notes)}")
    return tuple(left), tuple(notes)


def _space(axes: Mapping[str, tuple[Any, ...]], fields: list[str], more: list[str], keys: tuple[str, ...]) -> Space:
    if not axes:
        said = f"; of its precision: {', '.join(more)}" if more else ""
        raise TilingError(f"no field to explore; there are: {', '.join(fields)} (--field {fields[0]}=...){said}")
    return Space.of(axes, [*fields, *more, *SIZES, *keys])


def _read(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an axis's values; tokens and sequences as people write them: 8k."""
    if name not in ("seq", "seq_q", "seq_kv", "batch"):
        return values
    try:
        return tuple(parse_count(v) if isinstance(v, str) else v for v in values)
    except ValueError:
        said = ",".join(map(str, values))
        raise SpecError(f"{name}={said}: write positive whole numbers: 4096, 8k (8,192)") from None


def _known(request: Request) -> tuple[str, ...]:
    schedule = _schedule(request)
    return (*(f.name for f in tiling_fields(schedule.tiling)), *precision_fields(schedule))


def _is_key(request: Request, name: str) -> bool:
    """Return whether a name is a key of the device's file, as ``-C`` takes it."""
    device = request.machine()
    return any(key == name for key, _ in device.quantities())


def _check(request: Request, space: Space, keys: tuple[str, ...]) -> None:
    """Raise what is wrong with every point of one schedule, or with a value of its precision, whatever the point."""
    schedule, device = _schedule(request), request.machine()
    for name in space.axes.keys() & set(precision_fields(schedule)):
        for value in space.axes[name]:
            schedule.precision(at(request, {name: cast("Any", value)}).precision)
    if not device.is_timed:
        raise SpecError(f"{device.name} has no timing model yet: nothing to compare")
    for key in keys:
        for value in space.axes[key]:
            load_machine(device, {key: str(value)}, unread_keys)
    for size in ("seq", "seq_q", "seq_kv", "batch", "tensor_parallel", "dtype", "workload"):
        for value in space.axes.get(size, ()):
            if request.problem is None:
                at(request, {size: cast("Any", value)}).attention()
    if request.problem is None and not isinstance(device, NodeDevice):
        request.load().ignored(request.attention().seq_kv, request.ignore)


def _content(request: Request) -> str:
    """Return a digest of the device and the workload: another file of the same name is another search."""
    device, load = request.machine(), request.load()
    problem = request.problem.model_dump_json() if request.problem is not None else ""
    return _digest([repr(device), load.model_dump_json(), problem, str(request.tensors or "")])


def auto_axes(request: Request, schedules: Iterable[str]) -> dict[str, tuple[Value, ...]]:
    """Return the space that schedules declare together, presets of their precision included."""
    found: dict[str, dict[Value, None]] = {}
    for name in schedules:
        schedule = _schedule(replace(request, schedule=name))
        machine = request.machine()
        left = frozenset() if isinstance(machine, NodeDevice) else schedule.left(machine)
        for field, values in declared(schedule.tiling).items():
            if field not in left:
                found.setdefault(field, {}).update(dict.fromkeys(values))
    return {name: tuple(values) for name, values in found.items()}
