"""Loops with a condition that count, and integers that differ between programs: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError
from ttir.stored import stored_by

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code", "declared_tiles"),
]
if find_spec("triton") is not None:
    from ttir import counted_loop_kernels as kernels
DEVICES = ("ascend_910b2", "h200")


def _stored(name: str, grid: tuple[int, ...], hw: str, given: dict[str, Any], **words: Any) -> Any:
    return stored_by(getattr(kernels, name), grid, hw, given, **words)


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_programs_of_a_fixed_number_go_over_all_rows() -> None:
    x = _drawn(23, 32)
    given = {"X": x, "Y": np.zeros_like(x)}
    assert np.array_equal(_stored("doubled_rows", (4,), "h200", given, n=23, G=4, B=32)["Y"], 2 * x)


def test_such_a_loop_may_carry_other_states() -> None:
    x = _drawn(23, 32)
    given = {"X": x, "Y": np.zeros((4, 32), np.float32)}
    made = _stored("summed_rows", (4,), "ascend_910b2", given, n=23, G=4, B=32)["Y"]
    wanted = np.stack([x[p::4].astype(np.float64).sum(0) + x[p::4].max(0) for p in range(4)])
    assert np.abs(made - wanted).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_such_a_loop_may_have_a_loop_inside(hw: str) -> None:
    draw, x = np.random.default_rng(1), _drawn(40, 100)
    rows, places = (draw.permutation(40)[:13].astype(np.int64) for _ in range(2))
    given = {"X": x, "I": rows, "J": places, "Y": np.full_like(x, np.nan)}
    made = _stored("moved_rows", (4,), hw, given, n=13, width=100, G=4, B=64)["Y"]
    wanted = np.full(x.shape, np.nan)
    wanted[places] = x[rows]
    assert np.array_equal(made, wanted, equal_nan=True)


def test_a_step_of_0_is_refused() -> None:
    given = {"X": _drawn(23, 32), "Y": np.zeros((23, 32), np.float32)}
    with pytest.raises(ProgramError, match=r"counted_loop_kernels\.py:\d+: a loop has a step of 0 or less"):
        _stored("doubled_rows", (4,), "ascend_910b2", given, n=23, G=0, B=32)


def test_the_last_count_of_such_a_loop_is_evaluated() -> None:
    x = _drawn(32)
    given = {"X": x, "Y": np.zeros((4, 32), np.float32)}
    made = _stored("last_row", (4,), "ascend_910b2", given, n=23, G=4, B=32)["Y"]
    assert np.allclose(made, np.array([24, 25, 26, 23])[:, None] * x, rtol=1e-6)


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_store_their_numbers_to_groups_of_other_sizes(hw: str) -> None:
    counts = np.array([5, 0, 33, 16], np.int32)
    padded = -(-counts // 16) * 16
    given = {"C": counts, "Y": np.zeros(padded.sum(), np.int32), "P": np.zeros(padded.sum(), np.int32)}
    made = _stored("groups_of_experts", (4,), hw, given, E=4, B=16)
    assert np.array_equal(made["Y"], np.repeat(np.arange(4), padded))
    inside = np.concatenate([np.arange(n) for n in padded])
    assert np.array_equal(made["P"], inside >= np.repeat(counts, padded))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_of_one_iteration_in_every_program_is_that_iteration(hw: str) -> None:
    """One iteration does not show along which axis of a tensor of planes a loop goes."""
    x = _drawn(3, 8, 9)
    given = {"X": x, "Y": np.zeros((8, 9), np.float32)}
    assert np.array_equal(_stored("once_in_each_program", (1,), hw, given, plane=72, n=9, M=8, N=16)["Y"], x[0])


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("steps", [2, 4])
def test_an_if_may_leave_one_iteration_of_a_loop(hw: str, steps: int) -> None:
    x = _drawn(4, 2, 16)
    given = {"X": x, "Y": np.zeros((2, 16), np.float32)}
    made = _stored("later_iterations", (2,), hw, given, plane=32, steps=steps, FIRST=steps - 2, N=16)["Y"]
    is_seen = (np.arange(16) ^ np.arange(2)[:, None]) % 3 != 1
    assert np.array_equal(made, np.where(is_seen, x[steps - 1], np.float32(0.5)))


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_choose_between_blocks(hw: str) -> None:
    """Triton writes the if as a choice whose condition is one number."""
    x = _drawn(12, 16)
    made = _stored("other_rows_of_later_programs", (3,), hw, {"X": x, "Y": 0 * x, "Z": 0 * x}, D=16, B=4)
    assert np.array_equal(made["Y"], x + (np.arange(12) < 4)[:, None].astype(np.float32))
    assert np.array_equal(made["Z"], x)
