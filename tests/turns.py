"""Parameters of tests in turn: each combination of all axes but the last one once, all with ``-m exhaustive``."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_turn(*axes: Sequence[Any], start: int = 0) -> list[Any]:
    """Return `pytest.param` of every combination of values; entries of ``axes`` that are `pytest.param` have its id and
    marks.

    By default a combination of all axes but the last has the value of the last axis whose turn it is: the positions on
    the other axes and ``start``, added up.  All its other values run with ``-m exhaustive``.
    """
    found = []
    for places in product(*(range(len(axis)) for axis in axes)):
        chosen = [axis[place] for axis, place in zip(axes, places, strict=True)]
        is_its_turn = (sum(places[:-1]) + start) % len(axes[-1]) == places[-1]
        values = [v for x in chosen for v in (x.values if hasattr(x, "values") else (x,))]
        marks = [mark for x in chosen for mark in getattr(x, "marks", ())]
        found.append(
            pytest.param(
                *values,
                id="-".join(str(x.id if hasattr(x, "values") else x) for x in chosen),
                marks=marks if is_its_turn else [*marks, pytest.mark.exhaustive],
            )
        )
    return found
