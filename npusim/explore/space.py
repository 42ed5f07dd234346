"""The points of a grid over tiling fields, and how people write one: ``block_kv=128,256,512``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from npusim.config.messages import suggest
from npusim.config.tiling import tiling_fields
from npusim.errors import TilingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from npusim.config.tiling import Tiling

__all__ = ["Point", "Space", "parse_field"]

Value = int | float | str
Point = dict[str, object]


@dataclass(frozen=True)
class Space:
    """A grid: every combination of the values of its fields, the last field changing fastest."""

    fields: dict[str, tuple[Value, ...]]

    @classmethod
    def of(
        cls,
        tiling: type[Tiling],
        fields: Mapping[str, Iterable[Value]],
        precision: Sequence[str] = (),
    ) -> Space:
        """Return the grid over fields of ``tiling`` and of its precision, which are named besides.

        Raises `TilingError` if there are none, one is unknown (with the nearest), or one has no
        values; a value out of its field's limits makes an infeasible point, not an error.
        """
        known = [field.name for field in tiling_fields(tiling)]
        if not fields:
            more = f"; of its precision: {', '.join(precision)}" if precision else ""
            raise TilingError(
                f"no field to explore; there are: {', '.join(known)} (--field {known[0]}=...){more}"
            )
        known += precision
        made: dict[str, tuple[Value, ...]] = {}
        for name, values in fields.items():
            if name not in known:
                raise TilingError(f"{name}: unknown tiling field{suggest(name, known)}")
            made[name] = tuple(dict.fromkeys(values))
            if not made[name]:
                raise TilingError(f"{name}: no values to try")
        return cls(made)

    def __len__(self) -> int:
        count = 1
        for values in self.fields.values():
            count *= len(values)
        return count

    def points(self) -> Iterator[Point]:
        """Yield every combination."""
        for values in product(*self.fields.values()):
            yield dict(zip(self.fields, values, strict=True))


def parse_field(text: str) -> tuple[str, tuple[Value, ...]]:
    """Return a field and its values from ``name=value,value,...``; a value may be a range.

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
        values += _range(text, part) if ":" in part else [_value(part)]
    return name, tuple(values)


def _range(field: str, text: str) -> Sequence[int]:
    try:
        start, stop, step = (int(part) for part in text.split(":"))
    except ValueError:
        raise TilingError(
            f"field {field!r}: {text!r} is no range; write start:stop:step with whole numbers"
        ) from None
    if step <= 0 or start > stop:
        raise TilingError(
            f"field {field!r}: {text!r} is an empty range; start <= stop and step > 0 are needed"
        )
    return range(start, stop + 1, step)


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
