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
