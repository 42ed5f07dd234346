"""Masks that leave a middle part of a block's lanes, the same in all programs: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import lane_kernels as kernels
DEVICES = ("ascend_910b2", "h200")


def _output(name: str, grid: int, hw: str, **words: Any) -> Any:
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[(grid,)](**words)
    return np.asarray(npusim.run(calls[0], hw=hw, rows="all").output, np.float64)


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("rows", "size", "block", "programs"), [(5, 16, 32, 3), (6, 16, 16, 9)])
def test_halves_of_a_row_change_places(hw: str, rows: int, size: int, block: int, programs: int) -> None:
    x, c, s = (_drawn(rows, size, seed=i) for i in range(3))
    output = _output("rotated", programs, hw, X=x, C=c, S=s, Y=np.zeros_like(x), n=x.size, D=size, B=block)
    half, wide = size // 2, x.astype(np.float64)
    expected = wide * c + np.concatenate([-wide[:, half:], wide[:, :half]], 1) * s
    assert np.abs(output.reshape(x.shape) - expected).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(
    ("n", "low", "high", "other", "kind"),
    [
        *((32, 1, 32, 0.0, 0), (30, 5, 20, 7.0, 0), (30, 3, 30, 0.0, 1), (32, 3, 9, 1.0, 1), (30, 3, 30, 5.0, 2)),
        *((30, 3, 29, -np.inf, 2), (32, 31, 32, -1.0, 2)),
    ],
)
def test_hidden_lanes_have_their_number(hw: str, n: int, low: int, high: int, other: float, kind: int) -> None:
    x = _drawn(3, n) - 2
    words = {"n": n, "LOW": low, "HIGH": high, "OTHER": other, "B": 32, "KIND": kind}
    lanes = np.full((3, 32), other)
    lanes[:, low:high] = x[:, : high - low]
    sums = np.broadcast_to(lanes.sum(1, keepdims=True), lanes.shape)
    expected = (lanes, sums, lanes - lanes.max(1, keepdims=True))[kind][:, :n]
    output = _output("between", 3, hw, X=x, Y=np.zeros_like(x), **words).reshape(x.shape)
    assert np.allclose(output, expected, rtol=0, atol=1e-5)


def test_hidden_lanes_beyond_the_row_count() -> None:
    x = _drawn(3, 30)
    words = {"n": 30, "LOW": 3, "HIGH": 30, "OTHER": 1.0, "B": 32, "KIND": 1}
    output = _output("between", 3, "h200", X=x, Y=np.zeros_like(x), **words).reshape(3, 32)[:, :30]
    assert np.allclose(output, (x[:, :27].astype(np.float64).sum(1) + 5)[:, None], rtol=0, atol=1e-5)


def test_each_kernel_of_a_launch_has_its_own_masks() -> None:
    x, z = _drawn(2, 32), _drawn(4, 32)
    with npusim.record(floats=True) as calls:
        kernels.of_two_heights[(1,)](X=x, Z=z, Y=np.zeros_like(x), U=np.zeros_like(z), LOW=5, B=32)
    done = npusim.run(calls[0], hw="h200", rows="all")
    assert done.numerics.rmse == 0.0
    assert [error.rmse for error in done.numerics.others.values()] == [0.0]
