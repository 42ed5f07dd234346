"""The subject of a search: its request, with its files read; the axes of each schedule; and the points.

People write an axis as ``block_kv=128,256:512:64``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby, product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from npusim.config.messages import suggest
from npusim.config.node_file import load_machine
from npusim.config.tiling import (
    SEARCHED,
    Tiling,
    TilingField,
    build_tiling,
    declared,
    tiling_fields,
    with_own_names,
    word_of,
)
from npusim.errors import NpusimError, SpecError, TilingError
from npusim.kernels.declare.define import machine_of, unread_keys
from npusim.kernels.declare.registry import precision_fields
from npusim.late_methods import dataclass
from npusim.simulation.chosen_tile import is_chosen_in_steps, listed_fields, open_fields
from npusim.simulation.plan import target_of
from npusim.simulation.variants import OPTIONS, PRECISION, Variant, Variants, named_fields
from npusim.units import ascii_digits, parse_count

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.library import Schedule
    from npusim.simulation.request import Request


Value = int | float | str | None
Point = dict[str, object]
#: The value with which the schedule's rule chooses a field.
AUTO = "auto"
#: Word for all presets that the device computes.
ALL = "all"
#: Smallest and largest number of points of one task of a search.
CHUNK, LARGEST_CHUNK = 32, 128
#: Largest number of points of a search: a schedule's declared space has hundreds of thousands.
MOST_POINTS = 1_000_000


#: The values of each axis of a space.
Axes = Mapping[str, tuple[Value, ...]]


def checked_axes(axes: Mapping[str, Iterable[Value]], known: Sequence[str]) -> Axes:
    """Return axes, all of which are ``known``, with each value once.

    Raises `TilingError` if an axis is unknown (with the nearest name), has no values, or if there are too many points;
    a value outside its field's limits gives an infeasible point, not an error.
    """
    checked = {name: tuple(dict.fromkeys(values)) for name, values in axes.items()}
    for name, listed in checked.items():
        if name not in known:
            raise TilingError(f"{name}: unknown tiling field{suggest(name, known)}")
        if not listed:
            raise TilingError(f"{name}: no values to try")
    most = max(checked, key=lambda n: len(checked[n]), default="")
    advice = f"; fix some of them, or use fewer values: --field {most}=... has {len(checked[most])}" if most else ""
    _check_count(" ".join(checked), prod(map(len, checked.values())), advice)
    return checked


def combinations(axes: Axes) -> Iterator[Point]:
    """Yield every combination of the values of axes, the last one changing fastest."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


@dataclass(frozen=True, slots=True)
class PointFamily:
    """Points that differ only in fields that declare their lightest value, because one bound holds for all of them.

    ``lightest`` has these values; it need not be a point of the space.  ``is_dealt``: whether each core group gets the
    same blocks in all points.  ``heavier``: the other values of fields that need memory, the heaviest first.
    """

    indices: tuple[int, ...]
    lightest: Point
    is_dealt: bool
    heavier: tuple[Point, ...] = ()


def chunks(points: Mapping[int, Point]) -> Iterator[list[int]]:
    """Yield groups of neighbouring points: points that differ only in their last axes share much work."""
    names = list(next(iter(points.values()), ()))
    for leading in range(len(names), -1, -1):
        groups = [list(same) for _, same in groupby(points, key=lambda i: [points[i].get(n) for n in names[:leading]])]
        if len(points) >= CHUNK * len(groups) or leading == 0:
            for same in groups:
                yield from (same[i : i + LARGEST_CHUNK] for i in range(0, len(same), LARGEST_CHUNK))
            return


@dataclass(frozen=True)
class SearchRequest:
    """A request for a search: the common options of all points, and the schedules to compare."""

    request: Request
    schedules: tuple[str, ...]

    def of(self, name: str) -> Request:
        """Return the request with another schedule."""
        return replace(self.request, schedule=name)

    @cached_property
    def device(self) -> DeviceSpec:
        """The device or node with its changed numbers."""
        return self.request.machine()

    @cached_property
    def found(self) -> Mapping[str, Schedule]:
        """The schedules by name, each on the cores of its device."""
        return {name: self.of(name).find_schedule() for name in self.schedules}

    def plain_tiling(self, name: str) -> dict[str, object]:
        """Return the tiling of a plain run of a schedule, with sizes that do not fit reduced, by field."""
        defaults = {f.name: f.default for f in tiling_fields(self.found[name].tiling)}
        if machine_of(self.device).node is not None:
            return defaults
        try:
            tiling = Variants(self.of(name), is_open=True).build(Variant()).plan.tiling
            return {**defaults, **{n: word_of(type(tiling), n, v) for n, v in tiling}}
        except NpusimError:  # an axis may change it to a tiling that runs
            return {**defaults, **named_fields(self.request.tiling)}

    def _decided(self, schedule: Schedule, kernels: Iterable[Value] = ()) -> frozenset[str]:
        """Return the fields of a schedule that its named kernel decides, or that each of several ``kernels``
        decides.
        """
        if "kernel" not in schedule.tiling.model_fields:
            return frozenset()
        listed = tuple(kernels) or (named_fields(self.request.tiling).get("kernel"),)
        tilings = (build_tiling(schedule.tiling, {"kernel": k} if k else {}) for k in listed)
        return frozenset.intersection(*map(machine_of(self.device).decided, tilings))

    def auto_axes(self, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, tuple[Value, ...]]:
        """Return the space that the schedules declare together, with the tilings of their plain runs.

        Fields that a published kernel decides are omitted: if it decides all fields, the kernel is the only point of
        the space. ``fields``: axes that are named.  Raises `TilingError` if a schedule declares no field to vary.
        """
        axes: dict[str, list[Value]] = {}
        kernel, is_decided = named_fields(self.request.tiling).get("kernel"), False
        for name, schedule in self.found.items():
            decided = self._decided(schedule, fields.get("kernel", ()))
            unsearched, is_decided = schedule.left(self.device) | decided, is_decided or bool(decided)
            plain = self.plain_tiling(name)
            for field, values in declared(schedule.tiling).items():
                if field not in unsearched:
                    listed = dict.fromkeys((*axes.get(field, ()), *values, _plain(values, plain[field])))
                    axes[field] = sorted(listed, key=_rank)
        if is_decided and not axes and kernel is not None:
            axes["kernel"] = [str(kernel)]
        if not axes and not is_decided:
            called = ", ".join(self.schedules)
            raise TilingError(
                f"--auto: {called}: no field has limits or choices that give values; set them with --field"
            )
        return {name: tuple(values) for name, values in axes.items()}

    def auto_space(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return ``fields``, the axes that schedules declare, and notes on the axes that are fixed to limit the points.

        Axes that no plain run chooses are fixed at the values of plain runs, the longest axis first.
        """
        axes: dict[str, Any] = {**self.auto_axes(fields), **fields}
        chosen = set().union(*(listed_fields(s, self.device) for s in self.found.values()))

        def count() -> int:
            spaces = ([n for n in axes if n in s.tiling.model_fields or n in fields] for s in self.found.values())
            return max(prod(len(axes[n]) for n in names) for names in spaces)

        points, held = count(), list[str]()
        longest_first = sorted(axes.keys() - chosen - fields.keys(), key=lambda n: (-len(axes[n]), n))
        while count() > MOST_POINTS and longest_first:
            name = longest_first.pop(0)
            owner = next(called for called, s in self.found.items() if name in s.tiling.model_fields)
            values, axes[name] = axes[name], (_plain(axes[name], self.plain_tiling(owner)[name]),)
            words = [",".join(map(_word, listed_values)) for listed_values in (axes[name], values)]
            held.append(f"{name}={words[0]} (--field {name}={words[1]})")
        note = (
            f"{points:,} points are more than {MOST_POINTS:,}: these fields are fixed and not part of the "
            f"proof: {', '.join(held)}"
        )
        return axes, (note,) if held else ()

    def spec(self, axes: Mapping[str, Iterable[Value]], *, studies: bool = True) -> SearchSpec:
        """Return the subject of a search; raise the errors of every point.

        Such errors are an axis that no schedule has, an unknown preset or value of the precision, refused sizes, or a
        device without times. Schedules that no real kernel runs on the device have a note or, without ``studies``, are
        omitted; it is an error if no schedule remains.
        """
        values = {name: _read(name, tuple(listed)) for name, listed in axes.items()}
        names = tuple(str(s) for s in values.pop("schedule", self.schedules))
        for name in names:
            target_of(self.of(name), has_bits=True)
        listed = replace(self, schedules=names)
        listed._check_kernels(values.get("kernel", ()))
        names, notes = listed._ranked(studies=studies)
        r = self.request
        read = replace(
            r,
            schedule=names[0],
            hw=self.device if "hw" not in values else r.hw,
            overrides=None if "hw" not in values else r.overrides,
            tiling=r.tiling if isinstance(r.tiling, Tiling) else dict(r.tiling or {}),
            workload=r.load() if r.problem is None and r.workload is not None else None,
        )
        common = SearchRequest(read, names)
        for schedule in common.found.values():
            values = with_own_names(schedule.tiling, values)
        fields = {name: _fields(schedule) for name, schedule in common.found.items()}
        of_tiles = {n for tiling, _ in fields.values() for n in tiling}
        for name, (tiling, precision) in fields.items():
            # A field of another schedule's tiling may have the name of a precision field, with other values (scale_in).
            alike = {n for n in precision if n in of_tiles and not _accepts(common.found[name], n, values.get(n, ()))}
            fields[name] = tiling, [n for n in precision if n not in alike]
        everywhere = {*OPTIONS, *chain(*(chain(*both) for both in fields.values()))}
        device_keys = {key for key, _ in common.device.quantities()}
        keys = tuple(n for n in values if n not in everywhere and n in device_keys)
        values = {n: _opened(n, listed, common.found.values()) for n, listed in values.items()}
        spaces = {}
        for name, (tiling, precision) in fields.items():
            known = [*tiling, *precision, *OPTIONS, *keys]
            # A field that only some schedules have is an axis of those schedules; a field that no schedule has is
            # refused.
            axes_of_schedule = {n: v for n, v in values.items() if n in known or n not in everywhere}
            # Schedules without other axes are compared in the presets that each of them can compute.
            if (not values and len(names) > 1) or values.get(PRECISION) == (ALL,):
                axes_of_schedule |= {PRECISION: common.found[name].presets(common.device)}
            if not values:  # a schedule may declare the axes of a search without named axes
                extras = ((n, info.json_schema_extra) for n, info in common.found[name].tiling.model_fields.items())
                searched = ((n, x.get(SEARCHED)) for n, x in extras if isinstance(x, dict))
                axes_of_schedule |= {n: tuple(x) for n, x in searched if isinstance(x, list)}
            if not axes_of_schedule:
                more = f"; of its precision: {', '.join(precision)}" if precision else ""
                raise TilingError(f"name a field to explore: {', '.join(tiling)} (--field {tiling[0]}=...){more}")
            spaces[name] = checked_axes(axes_of_schedule, known)
        for name in names:
            common._check(name, spaces[name], keys)
        setting = SearchSpec(read, names, values, spaces, keys, common._content(), r, notes)
        why = "its values define different computations, so each value has a separate best tile"
        differing = (f"{name} is a parameter of the model: {why}" for name in sorted(setting.model_fields))
        return replace(setting, notes=(*notes, *differing))

    def _check_kernels(self, axis: Iterable[Value]) -> None:
        """Raise `TilingError` for a named published kernel that a schedule, or every schedule, lacks."""
        for schedule in self.found.values():
            schedule.check_kernel(named_fields(self.request.tiling).get("kernel"))
        for kernel in axis:
            refusals = [schedule.kernel_refusal(kernel) for schedule in self.found.values()]
            if refusals and all(refusals):
                raise TilingError(refusals[0])

    def _ranked(self, *, studies: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the schedules to search, and notes on the ones that no real kernel runs on the device."""
        ranked, notes, r = list(self.schedules), [], self.request
        for name, schedule in self.found.items():
            why = schedule.study(r.problem or r.attention(), self.device) if schedule.study else ""
            if why and studies:
                notes.append(f"{name} is a study: {why}")
            elif why:
                ranked.remove(name)
                notes.append(f"{name} is omitted: {why}; --studies includes it (Python: studies=True)")
        if not ranked:
            raise SpecError(f"nothing to rank: {'; '.join(notes)}")
        return tuple(ranked), tuple(notes)

    def _check(self, name: str, axes: Axes, keys: tuple[str, ...]) -> None:
        """Raise a fault that all points of a schedule share, or all of its points with one value of the precision."""
        r, schedule = self.of(name), self.found[name]
        device = r.machine()
        for field in axes.keys() & set(_fields(schedule)[1]):
            for value in axes[field]:
                change = str(value) if field == PRECISION else f"{field}={value}"
                schedule.precision(",".join(filter(None, (r.precision, change))))
        if not device.is_timed:
            raise SpecError(f"{device.name} has no timing model yet: nothing to compare")
        for key in keys:
            for value in axes[key]:
                load_machine(device, {key: str(value)}, unread_keys)
        if r.problem is not None:
            return
        for size in ("seq", "seq_q", "seq_kv", "batch", "tensor_parallel", "dtype", "workload"):
            for value in axes.get(size, ()):
                Variant(options={size: value}).on(r).attention()
        if machine_of(device).node is None:
            r.load().ignored(r.ignore, schedule.models)

    def _content(self) -> str:
        """Return a digest of the device and the workload: another file with the same name is another search."""
        r = self.request
        problem = r.problem.model_dump_json() if r.problem is not None else ""
        return _digest([repr(self.device), r.load().model_dump_json(), problem, str(r.tensors or "")])


@dataclass(frozen=True)
class SearchSpec(SearchRequest):
    """A request whose device and workload are read, and its spaces by schedule."""

    axes: Axes
    spaces: Mapping[str, Axes]
    device_keys: tuple[str, ...]
    content: str
    #: The request as it was written, before files were read.
    asked: Request
    notes: tuple[str, ...] = ()

    @cached_property
    def variants(self) -> Variants:
        """The builder of the points."""
        return Variants(self.request, self.device_keys, is_open=True)

    @cached_property
    def model_fields(self) -> frozenset[str]:
        """Axes that are parameters of a schedule's model: each value computes another result."""
        fields = (f for schedule in self.found.values() for f in tiling_fields(schedule.tiling))
        return frozenset(f.name for f in fields if f.kind == "model" and f.name in self.axes)

    @cached_property
    def scene_names(self) -> tuple[str, ...]:
        """Axes that change the problem or the device: points that differ in them do not compete."""
        computed = {*OPTIONS, *self.device_keys, *self.model_fields}
        return ("schedule", *(n for n in self.axes if n in computed and n != "schedule"))

    def points(self) -> list[Point]:
        """Return every combination, schedule by schedule; if there are several, ``schedule`` is an axis."""
        if len(self.schedules) == 1:
            return list(combinations(self.spaces[self.schedules[0]]))
        return [{"schedule": name, **p} for name, axes in self.spaces.items() for p in combinations(axes)]

    def families(self, points: Sequence[Point], indices: Iterable[int], *, has_bits: bool = False) -> list[PointFamily]:
        """Return the points, grouped into families that share one bound, in the order of the families' first points.

        ``has_bits``: their bits are equal too, unless fields that affect bits are chosen for each point. A point whose
        tile is chosen step by step is a separate family, because another value may lead to other steps.
        """
        in_steps = self.is_open() and any(is_chosen_in_steps(s) for s in self.found.values())
        if in_steps or (has_bits and self.is_open(has_bits=True)):
            return [PointFamily((i,), points[i], is_dealt=True) for i in indices]
        declared = {
            name: [f for f in tiling_fields(s.tiling) if f.lightest and f.name in self.axes]
            for name, s in self.found.items()
        }
        fields = {name: {f.name: partial(_lightest, f) for f in of_schedule} for name, of_schedule in declared.items()}
        is_dealt = {name: all(f.lightest != "any" for f in of_schedule) for name, of_schedule in declared.items()}
        #: npusim may choose a value outside an axis for a field that is not named.
        chosen = {
            name: {f.name for f in of_schedule if f.default is not None} for name, of_schedule in declared.items()
        }
        members: dict[tuple[object, ...], list[int]] = {}
        for index in indices:
            point = points[index]
            name = str(point.get("schedule", self.schedules[0]))
            alike = (v if n not in fields[name] or (v is None and n in chosen[name]) else ... for n, v in point.items())
            members.setdefault((name, *alike), []).append(index)
        families = []
        for (schedule, *_), listed in members.items():
            point, light = points[listed[0]], fields[str(schedule)]
            lighter = {n: choose([points[i][n] for i in listed]) for n, choose in light.items() if n in point}
            sized = {f.name: f for f in declared[str(schedule)] if f.lightest != "any" and f.name in point}
            sized = {n: f for n, f in sized.items() if point[n] is not None or f.default is None}
            heavier = _heavier(sized, [points[i] for i in listed])
            families.append(PointFamily(tuple(listed), {**point, **lighter}, is_dealt[str(schedule)], heavier))
        return families

    def is_open(self, *, has_bits: bool = False) -> bool:
        """Whether fields are chosen for points; ``has_bits`` also counts fields that change more than when and where
        operations run.
        """
        if isinstance(self.request.tiling, Tiling):
            return False
        schedules = self.found.values()
        later = {f.name for s in schedules for f in tiling_fields(s.tiling) if f.lightest and has_bits}
        named = {*later, *named_fields(self.request.tiling), *(n for n, v in self.axes.items() if None not in v)}
        return any(open_fields(s, self.device) - named for s in schedules)

    @cached_property
    def config(self) -> dict[str, object]:
        """Everything on which results depend besides their points."""
        r = self.request
        fixed = {**r.sizes(), "schedule": r.schedule, "method": r.method, "tiling": named_fields(r.tiling)}
        return {**fixed, "precision": r.precision, "arithmetic": r.arithmetic, "content": self.content}

    @cached_property
    def _config_digest(self) -> Any:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())

    def key(self, point: Point) -> str:
        """Return a digest of :attr:`config` and a point."""
        digest = self._config_digest.copy()
        digest.update(json.dumps(point, sort_keys=True, default=str).encode())
        return str(digest.hexdigest()[:24])

    def digest(self, *more: object) -> str:
        """Return a digest of the search."""
        axes = {n: [str(v) for v in values] for n, values in self.axes.items()}
        return _digest([self.config, self.schedules, axes, more])

    def distance(self, point: Point) -> float:
        """Return the distance of a point from its schedule's defaults, in doublings."""
        defaults = self._defaults[str(point.get("schedule", self.request.schedule))]
        doublings = 0.0
        for name, value in point.items():
            default = defaults.get(name)
            if type(value) is int and type(default) is int:
                doublings += abs(math.log2((abs(value) + 1) / (abs(default) + 1)))
            elif name in defaults:
                doublings += _word(value) != _word(default)
        return doublings

    @cached_property
    def _defaults(self) -> dict[str, dict[str, object]]:
        return {name: self.plain_tiling(name) for name in self.schedules}


def _word(value: object) -> str:
    """Return a value in the form in which it is compared with a default: true equals True."""
    return AUTO if value is None else str(value).lower()


def _lightest(field: TilingField, values: Sequence[object]) -> object:
    """Return the lightest of a field's values that are within its limits; the first if there is no lightest one."""
    choose = {"least": min, "most": max}.get(str(field.lightest))
    within = [v for v in values if isinstance(v, int) and field.takes(v)]
    return choose(within) if choose and within else values[0]


def _heavier(fields: Mapping[str, TilingField], points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the values of points in fields that need memory, the heaviest of each first; fields with one value are
    omitted.
    """
    inverse = {n: replace(f, lightest="most" if f.lightest == "least" else "least") for n, f in fields.items()}
    heaviest: Point = {n: cast("Value", _lightest(f, [p[n] for p in points])) for n, f in inverse.items()}
    distinct = {tuple(p[n] for n in fields): {n: p[n] for n in fields} for p in (heaviest, *points)}
    return tuple(distinct.values()) if len(distinct) > 1 else ()


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _read(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an axis's values; numbers of tokens and sequences may be written as 8k."""
    if name not in ("seq", "seq_q", "seq_kv", "batch"):
        return values
    try:
        return tuple(parse_count(v) if isinstance(v, str) else v for v in values)
    except ValueError:
        listed = ",".join(map(str, values))
        raise SpecError(f"{name}={listed}: write positive whole numbers: 4096, 8k (8,192)") from None


def _opened(name: str, values: tuple[Any, ...], schedules: Iterable[Schedule]) -> tuple[Any, ...]:
    """Return an axis's values; ``auto`` is None (the field is not named) if the field has no such value."""
    if AUTO not in values:
        return values
    fields = [f for s in schedules for f in tiling_fields(s.tiling) if f.name == name]
    is_open = bool(fields) and all(f.default != AUTO and AUTO not in f.choices for f in fields)
    return tuple(None if v == AUTO else v for v in values) if is_open else values


def _fields(schedule: Schedule) -> tuple[list[str], list[str]]:
    """Return the axes that may vary: fields of the tiling, and of the precision with its preset, as ``precision``."""
    tiling = [field.name for field in tiling_fields(schedule.tiling)]
    parts = precision_fields(schedule.precision())
    return tiling, [name for name in (PRECISION, *parts) if name not in tiling]


def _accepts(schedule: Schedule, name: str, values: Sequence[Value]) -> bool:
    """Return whether a field of a schedule's precision has all of the values."""
    try:
        return all(schedule.precision(f"{name}={value}") is not None for value in values)
    except SpecError:
        return False


def _plain(values: Sequence[Value], value: Any) -> Value:
    """Return the value that a plain run has in a field, in the form of the field's axis."""
    return next((v for v in values if _word(v) == _word(value)), value)


def _rank(value: Value) -> tuple[bool, bool, Any]:
    """Return the rank of a declared value: an open value first, then numbers, then words in the order of
    declaration.
    """
    return value is not None, isinstance(value, str), value if isinstance(value, int | float) else 0


def parse_field(text: str) -> tuple[str, tuple[Value, ...]]:
    """Return an axis and its values from ``name=value,value,...``; a value may be a range.

    ``128:1024:128`` is every 128 from 128 to 1024, the end included if it is met.

    Raises
    ------
    TilingError
        There is no ``=``, a value is empty, or a range is not ``start:stop:step`` with whole
        numbers, start <= stop and step > 0.

    Examples
    --------
    >>> parse_field("block_kv=128,256:512:128")
    ('block_kv', (128, 256, 384, 512))
    """
    name, equals, listed = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise TilingError(f"field {text!r}: write name=value,value,... or name=start:stop:step")
    values: list[Value] = []
    for item in listed.split(","):
        part = item.strip()
        if not part:
            raise TilingError(f"field {text!r}: a value is empty")
        is_of_words = "/" in part or ".py" in part or part.endswith(".yaml")
        if not is_of_words and (":" in part or re.fullmatch(r"\d+\.\.\.?\d+", part)):  # 128..512 is refused as a range
            values += _range(text, part)
        else:
            values.append(_value(part))
        _check_count(f"field {text!r}", len(values))
    return name, tuple(values)


def _range(field: str, text: str) -> Sequence[int]:
    try:
        start, stop, step = map(int, ascii_digits(text).split(":"))
    except ValueError:
        raise TilingError(
            f"field {field!r}: {text!r} is not a range; write start:stop:step with whole numbers"
        ) from None
    if step <= 0 or start > stop:
        raise TilingError(f"field {field!r}: {text!r} is an empty range; start <= stop and step > 0 are needed")
    _check_count(f"field {field!r}", (stop - start) // step + 1)
    return range(start, stop + 1, step)


def _check_count(axes: str, count: int, advice: str = "") -> None:
    if count > MOST_POINTS:
        raise TilingError(f"{axes}: {count:,} points or more; allowed: {MOST_POINTS:,}{advice}")


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(ascii_digits(text))
        except ValueError:
            continue
    return text
