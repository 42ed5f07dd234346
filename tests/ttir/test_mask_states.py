"""Masks that a loop carries, and masks that are joined along an axis: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from ttir.stored import stored

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code", "declared_tiles"),
]
if find_spec("triton") is not None:
    from ttir import mask_state_kernels as kernels
DEVICES = ("ascend_910b2", "h200")
X = np.random.default_rng(0).standard_normal((12, 300)).astype(np.float32)


def _stored(name: str, programs: int, hw: str, **words: Any) -> Any:
    given = {"X": X, "Y": np.full(len(X), -1, np.int32)}
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[(programs,)](**given, N=300, B=64, **words)
    return stored(npusim.run(calls[0], hw=hw, rows="all"), given)["Y"]


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_joins_masks_by_or(hw: str) -> None:
    assert np.array_equal(_stored("any_of_row", 12, hw, limit=3.0), (X > 3).any(1))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_joins_masks_by_and(hw: str) -> None:
    assert np.array_equal(_stored("all_of_row", 12, hw, limit=-2.8), (np.float32(-2.8) < X).all(1))


def test_rows_of_masks_are_joined() -> None:
    assert np.array_equal(_stored("any_of_rows", 2, "h200", M=12, R=8, limit=3.0), (X > 3).any(1))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_counts_by_the_mask_that_it_carries(hw: str) -> None:
    x = X[:, :32].reshape(3, 4, 32).copy()
    given = {"X": x, "Y": np.zeros((3, 32), np.int32)}
    with npusim.record(floats=True) as calls:
        kernels.counted_until_met[(3,)](**given, n=4, B=32)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), given)["Y"]
    is_met = np.logical_or.accumulate(x > 0.8, 1)
    assert np.array_equal(made, np.where(is_met[:, -1], 1 + (~is_met[:, :-1]).sum(1), -1))
