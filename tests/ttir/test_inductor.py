"""Kernels in the form of torch.compile: every stored element has the bits that numpy has of it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npusim

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
BF16 = ml_dtypes.bfloat16


def normal(seed: int, *shape: int, fmt: Any = BF16) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


def launched(name: str, grid: tuple[int, ...], words: dict[str, Any], hw: str, **how: Any) -> tuple[Any, Any]:
    """Run a launch; return what it stores to the last tensor, and the result."""
    from ttir import inductor_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(inductor_kernels, name)[grid](**words, **how)
    done = npusim.run(calls[0], hw=hw, rows="all")
    assert done.latency_us > 0
    return stored(done, words)["out_ptr0"], done


def heads(x: Any) -> Any:
    """Return (batch, 4, 16, 64): each of two heads of 64 columns twice."""
    return np.repeat(x.astype(np.float32).reshape(-1, 16, 2, 64).transpose(0, 2, 1, 3), 2, axis=1)


@pytest.mark.parametrize("hw", DEVICES)
def test_heads_that_are_repeated_are_rows_by_a_list(hw: str) -> None:
    x = normal(0, 16, 128)
    made, _ = launched("repeated", (16,), {"in_ptr0": x, "out_ptr0": np.zeros((4, 16, 64), BF16)}, hw, XBLOCK=256)
    assert np.array_equal(made, heads(x)[0])


@pytest.mark.parametrize("hw", DEVICES)
def test_halves_of_a_row_change_places_in_parts_of_its_half(hw: str) -> None:
    x, cos, sin = (normal(i, *shape) for i, shape in enumerate(((32, 128), (16, 64), (16, 64))))
    words = {"in_ptr0": x, "in_ptr1": cos, "in_ptr2": sin, "out_ptr0": np.zeros((2, 4, 16, 64), np.float32)}
    made, done = launched("rotated", (32,), words, hw, XBLOCK=256)
    k = heads(x)
    turned = np.concatenate([-k[..., 32:], k[..., :32]], -1)
    one, other = k * cos.astype(np.float32), turned * sin.astype(np.float32)
    exact = one.astype(np.float64) + other.astype(np.float64)  # products of bfloat16 are exact
    assert np.array_equal(made, exact.astype(np.float32))
    assert any("as 8 blocks; the time is that" in note for note in done.notes)


def test_halves_along_rows_change_places_in_programs_of_two_kinds() -> None:
    x, y = normal(0, 128, 16), normal(1, 128, 16)
    words = {"in_ptr0": x, "in_ptr1": y, "out_ptr0": np.zeros((16, 128), np.float32)}
    made, _ = launched("back_rotated", (1, 4), words, "h200", YBLOCK=32, XBLOCK=16)
    each = y.astype(np.float32).reshape(2, 64, 16)
    turned = np.concatenate([each[:, 32:], -each[:, :32]], 1).reshape(128, 16)
    assert np.array_equal(made, (x.astype(np.float32) + turned).T)


def test_tiles_of_many_tensors_are_loaded_as_far_ahead_as_there_are_flags() -> None:
    words: dict[str, Any] = {n: np.full((32, 64), i + 1.0, np.float32) for i, n in enumerate("abcdefghi")}
    words |= {"out_ptr0": np.zeros(64, np.float32), "n": 32}
    made, _ = launched("summed_of_nine", (2,), words, "h200", XBLOCK=32, R0_BLOCK=16)
    assert np.array_equal(made, np.full(64, 32 * 45.0))


@pytest.mark.parametrize("n", [128, 200])
def test_means_and_deviations_are_joined_by_the_compilers_function(n: int) -> None:
    x = normal(0, 8, n, fmt=np.float32)
    words: dict[str, Any] = {"in_ptr0": x, "out_ptr0": np.zeros(8, np.float32), "out_ptr1": np.zeros(8, np.float32)}
    made, done = launched("mean_and_deviations", (8,), {**words, "n": n}, "h200", XBLOCK=1, R0_BLOCK=64)
    exact = x.astype(np.float64)
    assert np.allclose(made, exact.mean(1), rtol=1e-5, atol=1e-7)
    assert done.numerics.error.rmse < 1e-6
    assert done.numerics.others["out_ptr1"].rmse < 1e-6
    assert any("the branch of the first tile equals the other one" in note for note in done.notes)


@pytest.mark.parametrize("n", [128, 200])
def test_a_maximum_and_a_sum_that_go_together_are_states(n: int) -> None:
    x = normal(0, 8, n, fmt=np.float32)
    words: dict[str, Any] = {"in_ptr0": x, "out_ptr0": np.zeros(8, np.float32), "out_ptr1": np.zeros(8, np.float32)}
    made, done = launched("online_softmax", (8,), {**words, "n": n}, "h200", XBLOCK=1, R0_BLOCK=64)
    assert np.array_equal(made, x.max(1))
    assert done.numerics.others["out_ptr1"].rmse < 1e-6
