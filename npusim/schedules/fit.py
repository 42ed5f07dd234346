"""What fits: defaults made smaller where a buffer overflows, and what an error may offer."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from typing import TYPE_CHECKING, Any

from npusim.config.tiling import tiling_fields
from npusim.errors import TilingError
from npusim.machines.ascend.plan import slice_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.config.tiling import Tiling
    from npusim.ir.program import TileProgram

    Build = Callable[[Any], TileProgram]

#: Fields whose defaults may shrink, the one that costs least first: rows of a slice are only handled
#: one after the other, smaller blocks load K and V more often.
SHRINKING = ("vector_rows", "block_kv", "block_q", "block")
#: Halvings of one field that are tried.
_HALVINGS = 4
#: Values of one field that are tried one by one, from the largest.
_TRIED = 1024


def fitted_defaults(build: Build, tiling: Tiling) -> Tiling | None:
    """Return ``tiling`` with the fewest halvings of sizes that nobody chose, so that ``build`` fits.

    None where no such tiling fits: then an error says what would.
    """
    free = [f for f in SHRINKING if f in type(tiling).model_fields and f not in tiling.model_fields_set]
    choices = [list(_halved(tiling, field)) for field in free]

    ranked = sorted(product(*(range(len(c)) for c in choices)), key=lambda at: (sum(at), at[::-1]))
    for at in ranked[1:]:
        values = {f: c[i] for f, c, i in zip(free, choices, at, strict=True) if i}
        smaller = tiling.model_copy(update=values)
        if _fits(build, smaller):
            return smaller
    return None


def largest_that_fit(build: Build, tiling: Tiling) -> str:
    """Return, for each block size and for slices, its largest value that fits with the others as they are."""
    found = []
    for field in tiling_fields(type(tiling)):
        if field.name not in SHRINKING and not field.name.startswith("block"):
            continue
        now, step = effective(tiling, field.name) or 0, field.multiple_of or 1
        values: Sequence[int] = range(now - now % step, 0, -step) if now else ()

        def does_fit(value: int, name: str = field.name) -> bool:
            return _fits(build, tiling.model_copy(update={name: value}))

        if len(values) > _TRIED:  # of so many, what fits is taken to fit in all that are smaller
            values = values[bisect_left(values, True, key=does_fit) :]
        fitting = next(filter(does_fit, values), now)
        if fitting and fitting < now:
            found.append(f"{field.name}={fitting}")
    if not found:
        return "no smaller block alone makes it fit"
    return f"largest that fits, the other fields unchanged: {' or '.join(found)}"


def _fits(build: Build, tiling: Tiling) -> bool:
    try:
        build(tiling)
    except TilingError:
        return False
    return True


def effective(tiling: Tiling, field: str) -> int | None:
    """Return the number a field has, or the rows of a slice that none chosen stands for; None for neither."""
    value = getattr(tiling, field, None)
    if value is None and field == "vector_rows" and field in type(tiling).model_fields:
        return slice_rows(None, int(getattr(tiling, "block_kv", 0) or 1))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _halved(tiling: Tiling, field: str) -> Iterator[int | None]:
    """Yield the value a field has and its halves, as far as its limits go."""
    value, limits = effective(tiling, field) or 0, type(tiling).model_fields[field].metadata
    step = next((m.multiple_of for m in limits if hasattr(m, "multiple_of")), 1)
    yield getattr(tiling, field)
    for _ in range(_HALVINGS):
        value //= 2
        if value < step or value % step:
            return
        yield value
