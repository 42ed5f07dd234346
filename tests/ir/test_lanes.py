"""Numbers of blocks that run in step: each operation is that of each block's number."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest

from npusim.program.ir.opaque import Coordinate, Lanes, Symbol, at_lane

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


@pytest.mark.parametrize("function", [*OPERATIONS, *COMPARISONS])
@pytest.mark.parametrize("other", [3, 2.5, [5, 1, 2]])
def test_an_operation_is_that_of_each_lane(function: Callable[[Any, Any], Any], other: Any) -> None:
    values = [4, 7, 9]
    right = Lanes(other) if isinstance(other, list) else other
    result = function(Lanes(values), right)
    assert [at_lane(result, n) for n in range(3)] == [function(v, at_lane(right, n)) for n, v in enumerate(values)]


def test_numbers_on_the_left_and_signs() -> None:
    lanes = Lanes([4, 7])
    assert (10 - lanes).values == [6, 3]
    assert (10 + lanes).values == [14, 17]
    assert (-lanes).values == [-4, -7]


def test_lanes_with_one_number_are_that_number() -> None:
    assert Lanes([4, 7]) - Lanes([1, 4]) == 3
    assert type(Lanes([4, 7]) * 0) is int


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError):
        Lanes([4, 7]) + "1"
    with pytest.raises(TypeError, match="differ"):
        bool(Lanes([4, 7]) < 5)
    assert Lanes([4, 7]).__add__(Coordinate({Symbol("index"): 1})) is NotImplemented
