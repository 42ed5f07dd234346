"""Parameters of tests, a part by default and all with ``-m exhaustive``: axes in turn, and one of so many."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def in_turn(*axes: Sequence[Any], start: int = 0) -> list[Any]:
    """Return `pytest.param` of every combination of values; entries of ``axes`` that are `pytest.param` have its id and
    marks.

    By default a combination of all axes but the last has the value of the last axis whose turn it is: the positions on
    the other axes and ``start``, added up.  All its other values run with ``-m exhaustive``.
    """
    found = []
    for places in product(*(range(len(axis)) for axis in axes)):
        chosen = [_known(axis[place], place) for axis, place in zip(axes, places, strict=True)]
        is_its_turn = (sum(places[:-1]) + start) % len(axes[-1]) == places[-1]
        marks = [mark for x in chosen for mark in x.marks]
        found.append(
            pytest.param(
                *(v for x in chosen for v in x.values),
                id="-".join(x.id for x in chosen),
                marks=marks if is_its_turn else [*marks, pytest.mark.exhaustive],
            )
        )
    return found


def _known(value: Any, place: int) -> Any:
    """Return a value of an axis as a `pytest.param` with an id."""
    known = value if hasattr(value, "marks") else pytest.param(value)
    words = [str(v) if isinstance(v, str | int | float | None) else f"{type(v).__name__}{place}" for v in known.values]
    return pytest.param(*known.values, id=known.id or "-".join(words), marks=known.marks)


def every(step: int, values: Iterable[Any], start: int = 0) -> list[Any]:
    """Return `pytest.param` of all values, of which each ``step``-th from ``start`` on runs by default.

    A tuple is the values of several parameters.  Values that are `pytest.param` have its id and marks; those that are
    exhaustive already are not counted.
    """
    found, number = [], 0
    for value in values:
        known = value if hasattr(value, "marks") else pytest.param(*(value if isinstance(value, tuple) else (value,)))
        marks = list(known.marks)
        if all(mark.name != "exhaustive" for mark in marks):
            marks += [pytest.mark.exhaustive] * (number % step != start)
            number += 1
        found.append(pytest.param(*known.values, id=known.id, marks=marks))
    return found
