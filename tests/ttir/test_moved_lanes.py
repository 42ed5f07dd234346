"""Blocks of three axes, and blocks that are reshaped, joined, split or transposed, are read lane by lane."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
HARDWARE = pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng


def rotated() -> tuple[Any, ...]:
    x = RNG(0).standard_normal((4, 8, 32)).astype(np.float16)
    a, b = np.split(x.astype(np.float64), 2, -1)
    return (4,), {"x_ptr": x, "o_ptr": np.zeros_like(x), "H": 8, "D": 32}, np.concatenate([a - b, a + b], -1)


def of_three_axes(right: Callable[[Array], Array]) -> tuple[Any, ...]:
    x = RNG(1).standard_normal((3, 4, 8, 16)).astype(np.float32)
    wanted = right(x.astype(np.float64))
    return (3,), {"x_ptr": x, "o_ptr": np.zeros(wanted.shape, np.float32), "A": 4, "B": 8, "C": 16}, wanted


def middle_softmax() -> tuple[Any, ...]:
    return of_three_axes(lambda x: np.exp(x) / np.exp(x).sum(2, keepdims=True))


def middle_sums() -> tuple[Any, ...]:
    """A mask along two axes hides the last rows."""
    seen = (np.arange(32) < 27).reshape(1, 4, 8, 1)
    grid, words, wanted = of_three_axes(lambda x: np.asarray(((x * seen) ** 2).sum(2)))
    return grid, words | {"n": 27}, wanted


def shifted_scans() -> tuple[Any, ...]:
    return of_three_axes(lambda x: np.cumsum(x, 2))


def transposed_cast() -> tuple[Any, ...]:
    x = RNG(2).standard_normal((100, 72)).astype(np.float16)
    words = {"x_ptr": x, "o_ptr": np.zeros((72, 100), np.float16), "M": 100, "N": 72, "BM": 32, "BN": 32}
    return (4, 3), words, 2.0 * x.T.astype(np.float64)


def hadamard() -> tuple[Any, ...]:
    x, signs = RNG(3).standard_normal((2, 64)).astype(np.float16), np.array([[1, 1], [1, -1]])
    wanted = (x.astype(np.float64).reshape(-1, 4) @ np.kron(signs, signs)).reshape(x.shape)
    return (2,), {"x_ptr": x, "o_ptr": np.zeros_like(x), "N": 64}, wanted


def joined() -> tuple[Any, ...]:
    """A number and another one computed from it, side by side."""
    x = RNG(7).standard_normal((2, 64)).astype(np.float32)
    both = np.stack([x, 2 * x + 1], -1).astype(np.float64)
    words = {"x_ptr": x, "o_ptr": np.zeros((2, 64, 2), np.float32), "N": 64}
    return (2,), words, np.where(both > 0.25, both * 0.5, both - 1)


def unpacked() -> tuple[Any, ...]:
    """Eight integers of 4 bits in each of 32, in the order of AWQ."""
    packed = RNG(4).integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    scales = np.abs(RNG(5).standard_normal(64)).astype(np.float16)
    each = ((packed[:, :, None] >> (4 * np.array([0, 4, 1, 5, 2, 6, 3, 7]))) & 15).reshape(16, 64)
    words = {"q_ptr": packed, "s_ptr": scales, "o_ptr": np.zeros((16, 64), np.float16), "NC": 8, "BX": 4, "BY": 8}
    return (2, 2), words, (each - 8.0) * scales.astype(np.float64)


def unpacked_product() -> tuple[Any, ...]:
    """A product by integers of 4 bits, with a scale for each column and group of 32 rows, as AWQ's."""
    rng, (m, n, k) = RNG(6), (40, 64, 64)
    a = rng.standard_normal((m, k)).astype(np.float16)
    packed = rng.integers(-(2**31), 2**31, (k, n // 8)).astype(np.int32)
    scales = np.abs(rng.standard_normal((2, n)) * 0.1).astype(np.float16)
    each = ((packed[:, :, None] >> (4 * np.array([0, 4, 1, 5, 2, 6, 3, 7]))) & 15).reshape(k, n) - 8
    words = {"a_ptr": a, "q_ptr": packed, "s_ptr": scales, "o_ptr": np.zeros((m, n), np.float16)}
    factor = (each * np.repeat(scales, 32, 0)).astype(np.float16)  # exact, but for one rounding of each product
    wanted = a.astype(np.float64) @ factor.astype(np.float64)
    return (2, 2), words | {"M": m, "N": n, "K": k, "BM": 32, "BN": 32, "BK": 32}, wanted


@HARDWARE
@pytest.mark.parametrize(
    "case",
    [
        rotated,
        middle_softmax,
        middle_sums,
        shifted_scans,
        transposed_cast,
        hadamard,
        joined,
        unpacked,
        unpacked_product,
    ],
    ids=lambda case: case.__name__,
)
def test_lanes_that_are_moved_have_the_values_of_float64(case: Callable[[], tuple[Any, ...]], hw: str) -> None:
    from ttir.checked_launches import checked

    grid, words, wanted = case()
    checked("moved_kernels", case.__name__, grid, words, {"o_ptr": wanted}, hw)


def test_a_reshape_in_an_undefined_order_is_refused() -> None:
    from ttir import moved_kernels

    x = np.zeros(64, np.float32)
    with npusim.record(floats=True) as calls:
        moved_kernels.reordered[1,](x, np.zeros_like(x), 64)
    call: Any = calls[0]
    with pytest.raises(NpusimError, match="cannot be reshaped"):
        npusim.run(call, hw="h200")
