"""Loops of one kernel whose tiles have different sizes, beside NumPy, and beside tiles of one size."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import unlike_tile_kernels as kernels
DEVICES = ("ascend_910b2", "h200")
N, D, BM = 128, 32, 64


def _drawn() -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    q, k, v = ((draw((N, D)) / 4).astype(np.float16) for _ in range(3))
    return {"Q": q, "K": k, "V": v, "M": draw(N).astype(np.float32), "O": np.zeros((N, D), np.float32)}


def _run(given: dict[str, Any], hw: str, small: int, large: int) -> Any:
    with npusim.record(floats=True) as calls:
        kernels.masked_first[(N // BM,)](**given, D=D, BM=BM, SMALL=small, LARGE=large)
    return npusim.run(calls[0], hw=hw, rows="all")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("small", "large"), [(16, 32), (32, 16)])
def test_a_masked_part_in_tiles_of_its_own_size(hw: str, small: int, large: int) -> None:
    given = _drawn()
    done = _run(given, hw, small, large)
    q, k, v, m = (given[n].astype(np.float64) for n in "QKVM")
    rows, columns = np.arange(N)[:, None], np.arange(N)[None]
    scores = np.where(rows >= columns, q @ k.T - m[None], 0.0)
    wanted = scores.astype(np.float16).astype(np.float64) @ v
    output = np.asarray(done.output, np.float64).reshape(N, D)
    assert np.abs(output - wanted).max() < 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("hw", DEVICES)
def test_both_loops_visit_as_many_tiles_as_they_load(hw: str) -> None:
    """Tiles of the kernel take at least the time of larger tiles alone, and at most that of smaller tiles alone."""
    given = _drawn()
    small, both, large = (_run(given, hw, *sizes).cycles for sizes in ((16, 16), (16, 32), (32, 32)))
    assert large < both < small


@pytest.mark.parametrize("hw", DEVICES)
def test_sums_along_tiles_of_two_sizes_are_refused(hw: str) -> None:
    """The order of the smaller tiles' sums would be that of the larger ones."""
    given, out = _drawn(), np.zeros(N, np.float32)
    keys = np.concatenate([given["K"], given["K"]])
    with npusim.record(floats=True) as calls:
        kernels.summed[(N // BM,)](given["Q"], keys, out, D=D, BM=BM, SMALL=16, LARGE=32)
    with pytest.raises(ProgramError, match=r"unlike_tile_kernels\.py:\d+: .*use the same sizes"):
        npusim.run(calls[0], hw=hw)
