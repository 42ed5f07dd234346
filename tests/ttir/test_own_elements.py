"""Tensors that a program stores to and also accesses elsewhere, element by element: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _run(kernel: str, hw: str, x: Any, **words: Any) -> tuple[Any, Any]:
    """Return the result of a launch over X, and X behind it, with the earlier numbers where nothing is stored."""
    from ttir import own_element_kernels
    from ttir.stored import stored

    given = {"X": x.copy(), **words}
    calls: Any
    with npusim.record(floats=True) as calls:
        getattr(own_element_kernels, kernel)[(len(x),)](**given)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made = stored(done, given)["X"]
    return done, np.where(np.isnan(made), x, made)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [16, 21])
@pytest.mark.parametrize("how", ["part", "twice", "again", "turned", "turned behind a barrier", "positive"])
def test_rows_over_themselves(hw: str, n: int, how: str) -> None:
    x, cols = _drawn(4, n), np.arange(n)
    wanted = {
        "part": np.where(cols < n - 3, 2 * x, x),
        "twice": np.where(cols < n // 2, 3 * x, 2 * x),
        "again": 2 * x + 1,
        "turned": x + x[:, ::-1],
        "turned behind a barrier": x + x[:, ::-1],
        "positive": np.where(x > 0, 2 * x, x),
    }
    done, made = _run("in_place", hw, x, n=n, HOW=how, B=32)
    assert np.array_equal(made, wanted[how])
    assert (done.numerics.rmse or 0.0) < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_lengths_of_rows_over_themselves(hw: str) -> None:
    x, lengths = np.abs(_drawn(4, 37)) + 1, np.array([37, 3, 20, 16], np.int32)
    wide = np.where(np.arange(37) < lengths[:, None], x.astype(np.float64), 0.0)
    wanted = np.where(np.arange(37) < lengths[:, None], wide / wide.sum(1, keepdims=True), x)
    _, made = _run("in_place_of_loops", hw, x, Lengths=lengths, n=37, B=16)
    assert np.abs(made - wanted).max() < 1e-6


def test_elements_that_two_warps_access_need_a_barrier() -> None:
    with pytest.raises(ProgramError, match=r"own_element_kernels\.py:\d+: X"):
        _run("in_place", "h200", _drawn(4, 64), n=64, HOW="turned", B=64)
    x = _drawn(4, 64)
    _, made = _run("in_place", "h200", x, n=64, HOW="turned behind a barrier", B=64)
    assert np.array_equal(made, x + x[:, ::-1])


@pytest.mark.parametrize("how", ["the next row's", "one behind"])
def test_elements_of_an_undefined_order_are_refused(how: str) -> None:
    with pytest.raises(ProgramError, match=r"own_element_kernels\.py:\d+: X"):
        _run("in_place", "h200", _drawn(4, 16), n=16, HOW=how, B=16)


@pytest.mark.parametrize("hw", DEVICES)
def test_tiles_over_the_tile_before_them(hw: str) -> None:
    x, lengths = _drawn(4, 29), np.array([29, 3, 17, 8], np.int32)
    behind = np.concatenate([x[:, 8:], np.zeros((4, 8), np.float32)], 1)
    cols = np.arange(29)
    wanted = np.where(cols < lengths[:, None], np.where(cols + 8 < lengths[:, None], behind, 0) + 1, x)
    words = {"Y": np.zeros_like(x), "Lengths": lengths, "n": 29, "SHIFT": 8, "B": 8}
    _, made = _run("in_place_of_neighbours", hw, x, **words)
    assert np.array_equal(made, wanted.astype(np.float32))


def test_tiles_that_an_earlier_iteration_stored_are_refused() -> None:
    x, lengths = _drawn(4, 29), np.array([29, 3, 17, 8], np.int32)
    words = {"Y": np.zeros_like(x), "Lengths": lengths, "n": 29, "SHIFT": -8, "B": 8}
    with pytest.raises(ProgramError, match=r"own_element_kernels\.py:\d+: X"):
        _run("in_place_of_neighbours", "h200", x, **words)


@pytest.mark.parametrize("hw", DEVICES)
def test_lanes_of_a_tensor_as_it_was_before_the_launch(hw: str) -> None:
    x = _drawn(4, 29)
    inside = np.arange(29) < 29 - np.arange(4)[:, None]
    wide = np.where(inside, x.astype(np.float64), 0.0)
    left = wide - wide.sum(1, keepdims=True)
    wanted = {"X": np.where(inside, left, np.nan), "Z": np.where(inside, left, 0.0)}
    words = {"X": x, "Z": np.zeros_like(x), "n": 29, "B": 8}
    checked("own_element_kernels", "in_place_and_again", (4,), words, wanted, hw)


def test_a_barrier_before_the_second_store_of_a_line_is_none_behind_it() -> None:
    x, z = _drawn(4, 60), _drawn(4, 60, seed=1)
    with pytest.raises(ProgramError, match=r"own_element_kernels\.py:\d+: "):
        _run("put_twice", "h200", x, Z=z, n=60, BEFORE=True, BEHIND=False, B=64)
    _, made = _run("put_twice", "h200", x, Z=z, n=60, BEFORE=True, BEHIND=True, B=64)
    wanted = z[:, ::-1] + 2
    wanted[:, 57] = z[:, 57] + 1
    assert np.array_equal(made, wanted)


def test_an_element_that_is_set_to_what_is_not_computed_from_it_needs_a_barrier() -> None:
    x, z = _drawn(4, 60), _drawn(4, 60, seed=1)
    wanted = np.where(np.arange(60) == 2, x, z)
    with pytest.raises(ProgramError, match=r"own_element_kernels\.py:\d+: "):
        _run("taken_and_set", "h200", x, Y=np.zeros_like(x), Z=z, n=60, BETWEEN=False, B=64)
    _, made = _run("taken_and_set", "h200", x, Y=np.zeros_like(x), Z=z, n=60, BETWEEN=True, B=64)
    assert np.array_equal(made, wanted)
    small = x[:, :21].copy(), z[:, :21].copy()  # one warp has the block
    _, made = _run("taken_and_set", "h200", small[0], Y=np.zeros_like(small[0]), Z=small[1], n=21, BETWEEN=False, B=32)
    assert np.array_equal(made, wanted[:, :21])
