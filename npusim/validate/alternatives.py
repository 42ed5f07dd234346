"""What a kernel may have done otherwise: every choice that a schedule states, changed one at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from npusim.algorithms.flash import Accumulate
from npusim.formats import ARITHMETICS
from npusim.numerics.evaluate import named_choices
from npusim.schedules import find_schedule
from npusim.schedules.precision import NAMED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.config.tiling import Tiling
    from npusim.schedules.precision import Precision
    from npusim.simulation.request import Request
    from npusim.simulation.result import RunData

#: Formats that an intermediate may have, scales of an FP8 P, keys of a tile and splits that are tried.
FORMATS = ("float32", "float16", "bfloat16")
SCALES = (1.0, 256.0, 448.0)
TILES = (16, 32, 64, 128, 256, 512)
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Change:
    """One stated choice made otherwise: a field of the precision or of the tiling, and its value."""

    kind: Literal["precision", "tiling"]
    field: str
    value: object

    def __str__(self) -> str:
        return f"{self.field}={self.value}"

    def on(self, request: Request) -> Request:
        """Return the request with this choice."""
        if self.kind == "tiling":
            return replace(request, tiling={**cast("Any", request.tiling or {}), self.field: self.value})
        kept = [p for p in (request.precision or "").split(",") if p and p.partition("=")[0] != self.field]
        return replace(request, precision=",".join((*kept, str(self))))


def alternatives(base: RunData) -> tuple[Change, ...]:
    """Return every single change to the choices of a run that its schedule states."""
    schedule = find_schedule(base.schedule, base.device.family)
    precision = schedule.precision(base.precision)
    changes = [*_of_precision(base, precision), *_of_tiling(base, schedule.tiling)]
    return tuple(dict.fromkeys(changes))


def _of_precision(base: RunData, precision: Precision) -> Iterator[Change]:
    formats = precision.formats()
    for field in dataclasses.fields(cast("Any", precision)):
        stated = getattr(precision, field.name)
        for value in _values(base, field.name, stated, is_format=field.name in formats):
            if value != stated:
                yield Change("precision", field.name, value)


def _values(base: RunData, name: str, stated: object, *, is_format: bool) -> tuple[object, ...]:
    if is_format:
        return FORMATS
    if name == "arithmetic":
        return _arithmetics(base)
    if name == "accumulate":
        return get_args(Accumulate)
    if isinstance(stated, bool):
        return (not stated,)
    return SCALES if isinstance(stated, float) else NAMED.get(name, ())


def _arithmetics(base: RunData) -> tuple[str, ...]:
    """Return the other matrix arithmetics for the operands of the run's products."""
    used = [ARITHMETICS[name] for name in named_choices(base.program)[0]]
    operands = {(a.a_format, a.b_format) for a in used}
    return tuple(n for n, a in ARITHMETICS.items() if (a.a_format, a.b_format) in operands and a not in used)


def _of_tiling(base: RunData, tiling: type[Tiling]) -> Iterator[Change]:
    keys = getattr(base.problem, "seq_kv", 0)
    for name, field in tiling.model_fields.items():
        stated = getattr(base.tiling, name, None)
        kind = field.annotation
        if get_origin(kind) is Literal:
            values: tuple[object, ...] = get_args(kind)
        elif kind is bool:
            values = (True, False)
        else:
            sizes = {"block_kv": TILES, "block": TILES, "splits": SPLITS}.get(name, ())
            values = tuple(size for size in sizes if size <= keys)
        yield from (Change("tiling", name, value) for value in values if value != stated)
