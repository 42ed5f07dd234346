"""Kernels that were once read to wrong values, or whose runs ended in a fault of npusim's own: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import fault_kernels as kernels
    from ttir.stored import stored_by
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(7).integers(-12, 13, shape).astype(np.float32) / 4


@pytest.mark.parametrize("hw", DEVICES)
def test_bytes_between_the_tiles_of_a_loop_are_not_read(hw: str) -> None:
    x = _drawn(4, 2, 16)
    made = stored_by(kernels.second_loop_later, (4,), hw, {"X": x, "O": np.zeros_like(x)}, N=16, P=2, B=8)["O"]
    assert np.array_equal(made[:, 1, :8], x[:, 1, :8] - x[:, :, :8].sum((1, 2))[:, None])


@pytest.mark.parametrize("hw", DEVICES)
def test_a_block_with_which_a_state_starts_is_read_once(hw: str) -> None:
    x, h, lengths = _drawn(2, 7, 8), _drawn(2, 8), np.array([3, 1], np.int32)
    given = {"X": x, "O": np.zeros_like(x), "H": h, "L": lengths}
    made = stored_by(kernels.few_iterations, (2,), hw, given, T=7, N=8, B=16)["O"]
    w = np.arange(8) % 4
    after = np.where(x[0, 1] > 0, h[0] + x[0, 1], h[0])
    assert np.array_equal(made[0, 1:3], np.stack([h[0] + x[0, 1] * w, after + x[0, 2] * w]))
    assert np.isnan(made[1]).all()


@pytest.mark.parametrize("hw", DEVICES)
def test_a_second_result_of_rows_may_be_called_o(hw: str) -> None:
    x = _drawn(4, 12)
    made = stored_by(kernels.in_place_and_o, (4,), hw, {"X": x, "O": np.zeros_like(x)}, N=12, B=16)
    assert np.array_equal(made["X"], 2 * x) and np.array_equal(made["O"], 2 * x + 1)


@pytest.mark.parametrize("hw", DEVICES)
def test_an_index_of_the_least_element_along_one_of_three_axes(hw: str) -> None:
    x = _drawn(2, 2, 8, 16)
    made = stored_by(kernels.least_of_groups, (2,), hw, {"X": x, "O": np.zeros((2, 2, 8), np.int32)}, A=2, B=8, C=16)
    assert np.array_equal(made["O"], x.argmin(3))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_maximum_of_integers_under_a_mask_in_a_loop(hw: str) -> None:
    x = _drawn(3, 20)
    given = {"X": x, "E": np.zeros_like(x), "R": np.zeros(3, np.float32)}
    made = stored_by(kernels.last_above, (3,), hw, given, N=20, B=32)["R"]
    assert np.array_equal(made, np.where(x > 0, np.arange(20), -1).max(1))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_mask_of_tiles_has_a_shorter_last_group(hw: str) -> None:
    x = _drawn(1, 7, 20)
    made = stored_by(kernels.every_second, (3,), hw, {"X": x, "O": np.zeros_like(x)}, T=7, N=20, B=8)["O"]
    added = np.where((np.arange(7) % 2 == 0)[:, None], x[0], 0)
    assert np.array_equal(made[0], np.where(x[0] > 0, added.cumsum(0) - added, x[0]))


def test_a_cumulative_sum_of_computed_integers_is_refused_by_its_name() -> None:
    x = _drawn(2, 16)
    with pytest.raises(ProgramError, match=r"a tl\.cumsum of computed i32 is not supported; convert it to tl\.float32"):
        stored_by(kernels.counted_so_far, (2,), "h200", {"X": x, "O": np.zeros((2, 16), np.int32)}, N=16, B=16)
