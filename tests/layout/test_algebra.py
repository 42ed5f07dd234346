"""The laws of the layout algebra, at every coordinate; `tensor-layouts` beside it where installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from npusim.errors import LayoutError
from npusim.formats.layout.algebra import Layout, coalesce, fitted

LAYOUTS = [
    Layout(1, 0),
    Layout(1, 1),
    Layout(4, 1),
    Layout(4, 2),
    Layout(8, 3),
    Layout((2, 4), (1, 2)),
    Layout((2, 4), (4, 1)),
    Layout((8, 4), (4, 1)),
    Layout((2, 4, 6), (1, 2, 8)),
    Layout((2, 4, 6), (4, 1, 8)),
    Layout((2, (4, 6)), (1, (2, 8))),
    Layout((2, (1, 6)), (1, (6, 2))),
    Layout(((2, 2), (2, 2)), ((1, 4), (8, 32))),
    Layout(((2, 2, 2), (2, 2, 2)), ((1, 16, 4), (8, 2, 32))),
    Layout((4, 1, 1), (1, 4, 4)),
    Layout((2, 3, 4), (12, 4, 1)),
    Layout((4, 2), (2, 16)),
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    """`tensor-layouts` (test extra), an independent implementation."""
    pytest.importorskip("tensor_layouts")
    return import_module("tensor_layouts")


def spell(layout: Layout) -> str:
    return str(layout)


def theirs(oracle: Any, layout: Layout) -> Any:
    return oracle.Layout(layout.shape, layout.stride)


def same(layout: Layout, other: Any) -> bool:
    """Whether both are the same function of the integers."""
    return layout.size == oracle_size(other) and all(layout(i) == other(i) for i in range(layout.size))


def oracle_size(other: Any) -> int:
    return int(import_module("tensor_layouts").size(other))


def test_a_layout_is_an_inner_product_and_mode_0_runs_fastest() -> None:
    layout = Layout((4, (2, 3)), (10, (1, 100)))
    for place in range(24):
        i, j, k = place % 4, place // 4 % 2, place // 8
        assert layout(place) == layout(i, j + 2 * k) == 10 * i + j + 100 * k
    assert Layout((4, 2), (1, 10))(4 * 5 + 3) == 53, "beyond its shape the last extent goes on"


@pytest.mark.parametrize("layout", LAYOUTS, ids=spell)
def test_calls_agree_with_the_oracle(oracle: Any, layout: Layout) -> None:
    assert same(layout, theirs(oracle, layout))


@pytest.mark.parametrize(("shape", "stride"), [((2, 3), 1), ((2, 3), (1, (2,)))])
def test_a_layout_that_is_none_is_refused(shape: Any, stride: Any) -> None:
    with pytest.raises(LayoutError, match="must have the same nesting"):
        Layout(shape, stride)
    with pytest.raises(LayoutError, match=r"3 coordinates do not match layout \(4,8\):\(1,4\)"):
        Layout((4, 8), (1, 4))(1, 2, 3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=spell)
def test_coalesce_keeps_the_function_and_has_no_mode_to_merge(oracle: Any, layout: Layout) -> None:
    dense = coalesce(layout)
    assert [dense(i) for i in range(layout.size)] == [layout(i) for i in range(layout.size)]
    assert coalesce(dense) == dense
    assert same(dense, oracle.coalesce(theirs(oracle, layout)))


def test_fitted_finds_a_layout_or_names_where_there_is_none() -> None:
    found = fitted(lambda i: i % 4 * 8 + i // 4, ((2, 2), (2, 4)))
    assert str(found) == "(4,8):(8,1)"
    with pytest.raises(LayoutError, match="at 2 "):
        fitted(lambda i: i ^ (i >> 1), (4, 2))
