"""P's way between lanes changes no value, whatever the layouts and however ragged the tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npusim.ir.op import WarpPlan
from npusim.numerics.semantics import exchanged, filled


@pytest.mark.parametrize("arrangement", ["4x1", "2x2", "1x4"])
@pytest.mark.parametrize("accumulator", ["f16", "f32"])
@pytest.mark.parametrize("shape", [(1, 128, 64), (2, 37, 20), (1, 8, 8)])
def test_an_exchange_keeps_every_value_in_its_place(
    arrangement: str, accumulator: Any, shape: tuple[int, int, int]
) -> None:
    p = np.random.default_rng(3).normal(size=shape).astype(np.float16)
    found = exchanged(p, WarpPlan(4, arrangement, accumulator, exchange=True))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, p)


def test_tiles_are_filled_up_with_zeros() -> None:
    whole = filled(np.ones((2, 3, 5)), (4, 4))
    assert whole.shape == (2, 4, 8)
    assert whole.sum() == 2 * 3 * 5
    tile = np.ones((4, 4))
    assert filled(tile, (2, 2)) is tile
