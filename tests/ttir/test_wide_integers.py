"""Integers of 64 bits beyond 2^24 that a kernel stores: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from tests.turns import in_turn
from ttir.stored import stored

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code", "declared_tiles"),
]
if find_spec("triton") is not None:
    from ttir import wide_integer_kernels as kernels


def _stored(name: str, grid: tuple[int, ...], hw: str, x: Any, **words: Any) -> Any:
    given = {"X": x, "Y": np.zeros(x.shape, np.int64)}
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[grid](**given, **words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    assert done.numerics is not None
    assert done.numerics.rmse == 0
    return stored(done, given)["Y"]


def _drawn(*shape: int, high: int = 1 << 40) -> Any:
    return np.random.default_rng(0).integers(-high, high, shape)


CASES = [
    ("copied", (2,), _drawn(100), lambda x: x, {"B": 64}),
    ("packed", (2,), _drawn(100, high=1 << 30).astype(np.int32), lambda x: x << 20 | np.arange(100), {"B": 64}),
    ("packed_in_loop", (3,), _drawn(3, 100, high=1000).astype(np.int32), lambda x: x * 1000000007, {"B": 32}),
]


@pytest.mark.parametrize(("case", "hw"), in_turn(CASES, ("ascend_910b2", "h200")))
def test_integers_of_64_bits_are_stored(case: Any, hw: str) -> None:
    name, grid, x, wanted, words = case
    assert np.array_equal(_stored(name, grid, hw, x, n=100, **words), wanted(x.astype(np.int64)).astype(np.float64))


def test_integers_beyond_float64_are_refused() -> None:
    x = _drawn(100, high=1 << 62)
    with pytest.raises(
        ProgramError, match=r"wide_integer_kernels\.py:\d+: Y: storing integers of 64 bits beyond 2\^53"
    ):
        _stored("copied", (2,), "h200", x, n=100, B=64)


@pytest.mark.parametrize("m", [25, 26])
def test_integers_that_only_one_of_two_masks_hides_are_their_other_number(m: int) -> None:
    rng = np.random.default_rng(1)
    x, z = (rng.integers(0, 16, (2, 32)).astype(np.int32) for _ in range(2))
    given = {"X": x, "Z": z, "Y": np.zeros_like(x)}
    with npusim.record(floats=True) as calls:
        kernels.joined_bits[(2,)](**given, n=26, m=m, B=32)
    at = np.arange(32)
    expected = np.where(at < 26, x, 5) | np.where(at < m, z, 9)
    assert np.array_equal(stored(npusim.run(calls[0], hw="h200", rows="all"), given)["Y"], expected)
