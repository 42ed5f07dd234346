"""Loads that nothing reads, values of hidden lanes that a device computes, and tensors that are stored in parts."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from ttir.checked_launches import checked
from ttir.test_engines import normal

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
check = partial(checked, "unread_kernels")


@pytest.mark.parametrize("first", [0, 4])
def test_a_tensor_whose_loads_are_never_chosen_is_not_read(first: int) -> None:
    x, z = normal(1, 4, 20), normal(2, 4, 20)
    words = {"X": x, "Z": z, "T": np.zeros(4, np.float32), "n": 20, "first": first, "B": 8}
    done = check("chosen", (4,), words, {"T": np.maximum((z if first else x).max(1), 0)}, "h200")
    assert {t.name for t in done.program.tensors.values()} == {"Z" if first else "X", "o"}


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_maximum_may_be_a_hidden_exponential(hw: str) -> None:
    z = normal(1, 4, 20)
    words = {"Z": z, "T": np.zeros((4, 1), np.float32), "n": 20, "BR": 2, "B": 32}
    largest = np.maximum(z.astype(np.float64).max(1, keepdims=True), 1.5)
    check("largest", (2,), words, {"T": np.exp(largest * 0.3)}, hw)


def test_errors_of_a_tensor_that_is_stored_in_parts_are_those_of_each_part() -> None:
    x = normal(1, 500)
    words = {"X": x, "M": np.zeros(500, bool), "n": 500, "B": 64}
    done = check("signs", (4,), words, {"M": x > 0}, "h200")
    assert (done.numerics.rmse, done.numerics.nan_count) == (0.0, 0)
    assert [(other.rmse, other.nan_count) for other in done.numerics.others.values()] == [(0.0, 0)]
