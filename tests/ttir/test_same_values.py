"""Elements that several programs store to: the same values in all of them, or a refusal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _of_groups(how: str, hw: str) -> Any:
    x, g = _drawn(3, 2, 37), _drawn(3, 4, seed=1)
    y, z = np.zeros_like(x), np.zeros((3, 4, 37), np.float32)
    wide = x.astype(np.float64)
    wanted = {"Y": wide - wide.sum(2, keepdims=True), "Z": np.repeat(wide, 2, 1) * np.arange(4)[:, None]}
    words = {"X": x, "Y": y, "Z": z, "G": g, "n": 37, "HOW": how, "B": 64}
    return checked("same_value_kernels", "of_groups", (3, 4), words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_heads_of_a_group_store_the_group_s_row(hw: str) -> None:
    done = _of_groups("", hw)
    assert any("several programs store the same values" in note for note in done.notes)


@pytest.mark.parametrize("how", ["heads", "numbers", "masks", "branches", "lanes"])
def test_values_that_may_differ_are_refused(how: str) -> None:
    with pytest.raises(ProgramError, match=r"same_value_kernels\.py:\d+: "):
        _of_groups(how, "h200")


@pytest.mark.parametrize("hw", DEVICES)
def test_tiles_of_a_loop_that_both_heads_store(hw: str) -> None:
    x, p = _drawn(2, 40), _drawn(2, 16, seed=1)
    first = np.concatenate([p, np.zeros((2, 24), np.float32)], 1).astype(np.float64)
    wanted = {"Y": x + first, "Z": np.stack([2.0 * x[row] + first for row in range(2)])}
    words = {"X": x, "P": p, "Y": np.zeros_like(x), "Z": np.zeros((2, 2, 40), np.float32), "n": 40, "B": 16}
    checked("same_value_kernels", "of_loops", (2, 2), words, wanted, hw)
