"""Bytes without a sign as floats, stored constants of bool, and the largest few of a row in a loop."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
    pytest.mark.parametrize("hw", ["h200", "ascend_910b2"]),
]


def launched(kernel: str, grid: tuple[int, ...], words: dict[str, Any], hw: str) -> dict[str, Any]:
    from ttir import byte_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(byte_kernels, kernel)[grid](**words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    assert done.numerics.error.rmse < 1e-6
    return stored(done, words)


def drawn_bytes(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_bytes_become_floats_without_a_sign_and_a_constant_of_bool_is_stored(hw: str) -> None:
    x, zeros, scale = drawn_bytes(6, 100), drawn_bytes(6), np.linspace(0.5, 3, 6, dtype=np.float32)
    words = {"X": x, "ZEROS": zeros, "SCALE": scale, "Y": np.zeros((6, 100), np.float32)}
    words |= {"SEEN": np.zeros((6, 100), np.bool_), "n": 100, "B": 128}
    made = launched("bytes_to_floats", (6,), words, hw)
    assert np.array_equal(made["Y"], (x.astype(np.float32) - zeros[:, None].astype(np.float32)) * scale[:, None])
    assert (made["SEEN"] == 1).all()


def test_a_sum_of_bytes_has_zeros_where_a_mask_hides_them(hw: str) -> None:
    words = {"X": drawn_bytes(6, 100), "Y": np.zeros(6, np.float32), "n": 100, "B": 128}
    made = launched("sum_of_bytes", (6,), words, hw)
    assert np.array_equal(made["Y"], words["X"].astype(float).sum(1))


def test_bytes_that_are_read_with_a_sign_have_it(hw: str) -> None:
    x = drawn_bytes(100)
    words = {"X": x, "Y": np.zeros(100, np.float32), "n": 100, "B": 128}
    assert np.array_equal(launched("signed_bytes", (1,), words, hw)["Y"], x.view(np.int8))


def test_the_largest_few_of_a_row_are_found_one_after_another_in_a_loop(hw: str) -> None:
    x = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    words = {"X": x, "W": np.zeros((8, 3), np.float32), "I": np.zeros((8, 3), np.int32), "N": 32, "K": 3}
    made = launched("largest_few", (8,), words, hw)
    order = np.argsort(-x, 1, kind="stable")[:, :3]
    weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    assert np.array_equal(made["I"], order)
    assert np.allclose(made["W"], np.take_along_axis(weights, order, 1), rtol=1e-6)


def test_the_largest_few_of_each_row_and_their_indices_are_put_into_lanes(hw: str) -> None:
    x = np.abs(np.random.default_rng(2).standard_normal((8, 32))).astype(np.float32)
    words = {"X": x, "W": np.zeros((8, 3), np.float32), "I": np.zeros((8, 3), np.int32)}
    made = launched("gated_experts", (2,), {**words, "n": 8, "E": 32, "K": 3, "B": 4, "KP": 4}, hw)
    order = np.argsort(-x, 1, kind="stable")[:, :3]
    weights = np.take_along_axis(x, order, 1)
    assert np.array_equal(made["I"], order)
    assert np.allclose(made["W"], weights / weights.sum(1, keepdims=True), rtol=1e-6)


def test_a_mask_of_compared_values_down_the_rows_hides_what_a_load_loads(hw: str) -> None:
    x, keep = np.random.default_rng(3).random((48, 32)), np.random.default_rng(4).random(48)
    x, keep = x.astype(np.float32), keep.astype(np.float32)
    words = {"X": x, "KEEP": keep, "Y": np.zeros_like(x), "D": 32, "B": 16}
    loaded = np.where(keep[:, None] > 0.5, x, -2)
    wanted = np.where((keep[:, None] > 0.5) | (np.arange(32) < 4), loaded, 1)
    assert np.array_equal(launched("rows_by_weight", (3,), words, hw)["Y"], wanted.astype(np.float32))


def test_values_of_a_large_block_take_turns_in_a_buffer(hw: str) -> None:
    """On a 910B2, the values of a block of 64 x 64 need more bytes than UB has unless dead values give theirs up."""
    x = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float16)
    words = {"X": x, "Y": np.zeros((128, 64), np.int8), "SCALE": np.zeros(2, np.float32), "D": 64, "B": 64}
    made = launched("rounded_by_the_largest", (2,), words, hw)
    blocks = x.astype(np.float32).reshape(2, -1)
    scales = np.abs(blocks).max(1) / np.float32(127)
    y = blocks / scales[:, None]
    rounded = np.trunc(y + np.where(y >= 0, np.float32(0.5), np.float32(-0.5))).reshape(128, 64)
    assert np.array_equal(made["SCALE"], scales)
    assert np.array_equal(made["Y"], rounded)
