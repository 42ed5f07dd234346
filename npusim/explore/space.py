"""The points of a search: axes with their values, and how people write one: ``block_kv=128,256:512:64``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from math import prod
from typing import TYPE_CHECKING

from npusim.config.messages import suggest
from npusim.config.tiling import tiling_fields
from npusim.errors import TilingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from npusim.config.tiling import Tiling, TilingField

__all__ = ["AxisSpan", "Point", "Space", "declared", "parse_field"]

Value = int | float | str | None
Point = dict[str, object]
#: Points that one task of a search has at least, and at most.
CHUNK, LARGEST_CHUNK = 32, 128
#: Points that a search has at most: a schedule's declared space has hundreds of thousands.
MOST_POINTS = 1_000_000
#: Rows, keys and depths that a declared space goes up to where a field has no limit of its own.
MOST_ELEMENTS, MOST = 1024, 64


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """``start:stop:step``, the end included if it is met; an end may be the name of an axis before."""

    start: int | str
    stop: int | str
    step: int

    def values(self, point: Point) -> Sequence[int]:
        """Return the values at a point, whose earlier axes are known."""
        start, stop = (point[end] if isinstance(end, str) else end for end in (self.start, self.stop))
        if not isinstance(start, int) or not isinstance(stop, int):
            raise TilingError(f"range {self}: its ends must be whole numbers, not {start!r} and {stop!r}")
        return _listed(str(self), start, stop, self.step)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}:{self.step}"


@dataclass(frozen=True)
class Space:
    """Every combination of the values of its axes, the last one changing fastest."""

    axes: dict[str, tuple[Value | AxisSpan, ...]]

    @classmethod
    def of(cls, axes: Mapping[str, Iterable[Value | AxisSpan]], known: Sequence[str], example: str = "") -> Space:
        """Return the space over axes that are all ``known``.

        Raises `TilingError` if there are none, one is unknown (with the nearest), has no values, or a range
        names no axis before it; a value out of its field's limits makes an infeasible point, not an error.
        """
        if not axes:
            raise TilingError(f"no field to explore; there are: {', '.join(known)} (--field {example or known[0]}=...)")
        made: dict[str, tuple[Value | AxisSpan, ...]] = {}
        for name, values in axes.items():
            if name not in known:
                raise TilingError(f"{name}: unknown tiling field{suggest(name, known)}")
            listed = tuple(dict.fromkeys(values))
            if not listed:
                raise TilingError(f"{name}: no values to try")
            for span in (v for v in listed if isinstance(v, AxisSpan)):
                for end in (span.start, span.stop):
                    if isinstance(end, str) and end not in made:
                        raise TilingError(f"{name}={span}: {end} is no axis before it{suggest(end, list(made))}")
            made[name] = listed
        _check_count(" ".join(made), prod(map(len, made.values())))
        return cls(made)

    def points(self) -> Iterator[Point]:
        """Yield every combination; raise `TilingError` where there are more than a search can have."""
        found = self._from(list(self.axes), {})
        yield from islice(found, MOST_POINTS)
        _check_count(" ".join(self.axes), MOST_POINTS + len(list(islice(found, 1))))

    def _from(self, names: Sequence[str], point: Point) -> Iterator[Point]:
        if not names:
            yield dict(point)
            return
        values: dict[Value, None] = {}
        for value in self.axes[names[0]]:
            values |= dict.fromkeys(value.values(point) if isinstance(value, AxisSpan) else (value,))
        for value in values:
            yield from self._from(names[1:], {**point, names[0]: value})


def chunks(points: Sequence[tuple[int, Point]]) -> Iterator[list[tuple[int, Point]]]:
    """Yield neighbouring points together: those that differ in their last axes alone share what they are built of."""
    names = list(points[0][1]) if points else []
    for leading in range(len(names), -1, -1):
        found = [list(same) for _, same in groupby(points, key=lambda p: [p[1].get(n) for n in names[:leading]])]
        if len(points) >= CHUNK * len(found) or leading == 0:
            for same in found:
                yield from (same[i : i + LARGEST_CHUNK] for i in range(0, len(same), LARGEST_CHUNK))
            return


def declared(tiling: type[Tiling]) -> dict[str, tuple[Value, ...]]:
    """Return the space that a schedule's fields declare: choices, and doublings between a field's limits."""
    found = {field.name: _declared(field, type(field.default)) for field in tiling_fields(tiling)}
    return {name: values for name, values in found.items() if len(values) > 1}


def _declared(field: TilingField, kind: type) -> tuple[Value, ...]:
    if field.choices and field.default is not None:  # what is left to a preset stays with it
        return tuple(c for c in field.choices if isinstance(c, str | int))
    if kind is bool:
        return ("false", "true")
    if kind not in (int, type(None)) or field.minimum is None:
        return ()
    step = field.multiple_of or 1
    limit = min(field.maximum or MOST_ELEMENTS, MOST_ELEMENTS if field.multiple_of else MOST)
    values = [field.minimum] if field.minimum == 0 else []
    value = max(step, field.minimum)
    while value <= limit:
        values.append(value)
        value *= 2
    return tuple(values)


def parse_field(text: str) -> tuple[str, tuple[Value | AxisSpan, ...]]:
    """Return an axis and its values from ``name=value,value,...``; a value may be a range.

    ``128:1024:128`` is every 128 from 128 to 1024, the end included if it is met; an end may be the name of an
    axis given before: ``block_kv=block_q:1024:64``.

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
    values: list[Value | AxisSpan] = []
    for item in listed.split(","):
        part = item.strip()
        if not part:
            raise TilingError(f"field {text!r}: a value is empty")
        if ":" in part and "/" not in part and not part.endswith((".py", ".yaml")):
            values += _range(text, part)
        else:
            values.append(_value(part))
        _check_count(f"field {text!r}", len(values))
    return name, tuple(values)


def _range(field: str, text: str) -> Sequence[int | AxisSpan]:
    ends = text.split(":")
    try:
        start, stop = (int(end) if not end.isidentifier() else end for end in ends[:2])
        (step,) = map(int, ends[2:])
    except ValueError:
        raise TilingError(f"field {field!r}: {text!r} is no range; write start:stop:step with whole numbers") from None
    if step <= 0 or (isinstance(start, int) and isinstance(stop, int) and start > stop):
        raise TilingError(f"field {field!r}: {text!r} is an empty range; start <= stop and step > 0 are needed")
    if isinstance(start, int) and isinstance(stop, int):
        return _listed(f"field {field!r}", start, stop, step)
    return (AxisSpan(start, stop, step),)


def _listed(said: str, start: int, stop: int, step: int) -> range:
    _check_count(said, (stop - start) // step + 1)
    return range(start, stop + 1, step)


def _check_count(said: str, count: int) -> None:
    if count > MOST_POINTS:
        raise TilingError(f"{said}: {count:,} points or more; a search has {MOST_POINTS:,} at most")


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
