"""Loops that split or join neighbours, and rows that several programs store a part of."""

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


def launched(kernel: str, grid: tuple[int, ...], words: dict[str, Any], hw: str) -> Any:
    from ttir import pair_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(pair_kernels, kernel)[grid](**words)
    return stored(npusim.run(calls[0], hw=hw, rows="all"), words)["Y"]


def drawn(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_loop_splits_neighbours_and_stores_them_interleaved(hw: str) -> None:
    x = drawn(4, 64)
    made = launched("rotated", (4,), {"X": x, "Y": np.zeros_like(x), "N": 64, "B": 8}, hw)
    assert np.array_equal(made, np.stack([-x[:, 1::2], x[:, ::2]], -1).reshape(4, 64))


def test_a_loop_with_a_pointer_that_it_moves_splits_neighbours_under_a_mask(hw: str) -> None:
    x = drawn(4, 56)
    made = launched("gated", (4,), {"X": x, "Y": np.zeros((4, 28), np.float32), "N": 56, "B": 8}, hw)
    gate, up = x[:, ::2].astype(np.float64), x[:, 1::2]
    assert np.allclose(made, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_each_program_stores_a_part_of_a_row_that_it_sums_in_a_loop(hw: str) -> None:
    x = np.abs(drawn(4, 64))
    made = launched("parts_of_rows", (4, 4), {"X": x, "Y": np.zeros_like(x), "N": 64, "B": 16}, hw)
    assert np.allclose(made, x / x.sum(1, keepdims=True, dtype=np.float64), rtol=1e-6)
