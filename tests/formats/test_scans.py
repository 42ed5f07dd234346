"""Cumulative sums and the inverse of a triangular tile: values, and each order of sums by its own definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim.errors import FormatError
from npusim.formats import cast, cumulative_sum, inverse, matmul
from npusim.formats.scans import INVERSE_ORDERS, SCAN_ORDERS, of_float32

F32 = "float32"
Array = np.ndarray[Any, Any]


def _drawn(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("every", [0, 40, 64])
@pytest.mark.parametrize("order", SCAN_ORDERS)
def test_cumulative_sums_are_near_and_begin_anew(order: str, every: int) -> None:
    x = _drawn(3, 100)
    each = every or 100
    expected = np.concatenate([x[:, at : at + each].astype(float).cumsum(-1) for at in range(0, 100, each)], -1)
    assert np.allclose(cumulative_sum(x, F32, order, every=every), expected, rtol=0, atol=2e-5)


def test_sequential_sums_are_numpys_and_those_of_warps_are_doublings() -> None:
    x = _drawn(2, 80)
    assert np.array_equal(cumulative_sum(x, F32, "sequential"), x.cumsum(-1, dtype=np.float32))
    found = cumulative_sum(x, F32, "warps")
    runs = [x[:, at : at + 32].copy() for at in (0, 32, 64)]
    for run in runs:
        for step in (1, 2, 4, 8, 16):
            before = run.copy()
            for lane in range(step, run.shape[1]):
                run[:, lane] = before[:, lane - step] + before[:, lane]
    total = runs[0][:, -1:]
    assert np.array_equal(found[:, :32], runs[0])
    assert np.array_equal(found[:, 32:64], total + runs[1])
    assert np.array_equal(found[:, 64:], (total + runs[1][:, -1:]) + runs[2])
    assert not np.array_equal(found, cumulative_sum(x, F32, "sequential"))


def test_sums_from_the_end_are_mirrored_and_keep_the_groups_of_lanes() -> None:
    x = _drawn(2, 64)
    for order in SCAN_ORDERS:
        mirrored = cumulative_sum(np.ascontiguousarray(x[:, ::-1]), F32, order)[:, ::-1]
        assert np.array_equal(cumulative_sum(x, F32, order, reverse=True), mirrored)
    # A row of 40 ends within the second group of 32: its last 8 are summed alone, then added to the first group's.
    found = cumulative_sum(x[:, :40], F32, "warps", reverse=True)
    last = cumulative_sum(np.ascontiguousarray(x[:, 39:31:-1]), F32, "warps")[:, ::-1]
    first = cumulative_sum(np.ascontiguousarray(x[:, 31::-1]), F32, "warps")[:, ::-1]
    assert np.array_equal(found, np.concatenate([last[:, :1] + first, last], 1))


def test_narrow_sums_are_rounded_at_every_step() -> None:
    ones = np.ones((1, 4096), np.float16)
    assert cumulative_sum(ones, "float16", "sequential").max() == 2048
    assert cumulative_sum(ones, "float16", "warps")[0, -1] == 4096


@pytest.mark.parametrize("n", [1, 16, 40, 64])
@pytest.mark.parametrize("order", INVERSE_ORDERS)
def test_an_inverse_is_that_of_what_lies_below_the_diagonal(order: str, n: int) -> None:
    x = _drawn(2, n, n) * np.float32(0.1)
    below = np.tril(x, -1)
    found = inverse(x, F32, order)
    assert np.array_equal(found, inverse(below, F32, order))  # nothing else is read
    assert np.allclose(found @ (np.eye(n) + below), np.eye(n), atol=1e-5)
    assert np.array_equal(np.triu(found), np.broadcast_to(np.eye(n, dtype=np.float32), found.shape))


def test_squares_lie_below_one_another_and_the_last_may_lack_rows() -> None:
    x = _drawn(40, 16) * np.float32(0.2)
    found = inverse(x, F32, "rows")
    for at in (0, 16):
        assert np.array_equal(found[at : at + 16], inverse(x[at : at + 16], F32, "rows"))
    assert np.array_equal(found[32:, :8], inverse(x[32:, :8], F32, "rows"))
    assert not found[32:, 8:].any()


def test_a_block_of_16_is_substituted_row_by_row_as_a_warp_does() -> None:
    a = np.tril(_drawn(16, 16) * np.float32(0.3), -1)
    x = -a
    for i in range(2, 16):
        row = x[i].copy()
        late = row[8:, None] * x[8:]
        pairs = np.float32(row[:8, None].astype(float) * x[:8] + late.astype(float))  # exact in float64, rounded once
        for half in (4, 2, 1):
            pairs = pairs[:half] + pairs[half:]
        x[i] = row + pairs[0]
    assert np.array_equal(inverse(a, F32, "blocks"), x + np.eye(16, dtype=np.float32))


def test_blocks_below_the_diagonal_are_products_of_a_unit() -> None:
    unit = "hopper.mma.k8.tf32.f32"
    a = np.tril(_drawn(32, 32) * np.float32(0.3), -1)
    found = inverse(a, F32, "blocks", arithmetic=unit)
    first, last = inverse(a[:16, :16], F32, "blocks"), inverse(a[16:, 16:], F32, "blocks")
    below = np.ascontiguousarray(a[16:, :16])
    expected = -matmul(matmul(last, below, arithmetic=unit), first, arithmetic=unit)
    assert np.array_equal(found[16:, :16], expected)
    assert not np.array_equal(found, inverse(a, F32, "blocks"))


def test_nan_and_inf_go_on_as_ieee_has_them() -> None:
    x = np.zeros((4, 4), np.float32)
    x[2, 0] = np.inf
    found = inverse(x, F32, "rows")
    assert found[2, 0] == -np.inf
    assert np.isnan(found[3]).any() or np.isfinite(found[3]).all()
    sums = cumulative_sum(np.float32([[1, np.nan, 1]]), F32)
    assert sums[0, 0] == 1
    assert np.isnan(sums[0, 1:]).all()


def test_tensor_cores_that_multiply_float32_do_so_as_tf32() -> None:
    assert of_float32("ampere.mma.k16.f16.f32") == "ampere.mma.k8.tf32.f32"
    assert of_float32("volta.mma.k4.f16.f32") == "ieee.f32"


@pytest.mark.parametrize(
    ("function", "x", "order", "message"),
    [
        (cumulative_sum, np.zeros((2, 2), np.float32), "tree", "unknown order of cumulative sums 'tree'"),
        (inverse, np.zeros((2, 2), np.float32), "lu", "unknown order of an inverse 'lu'"),
        (inverse, np.zeros(2, np.float32), "rows", "it needs at least two axes"),
    ],
)
def test_others_are_refused(function: Any, x: Array, order: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        function(x, F32, order)


def test_blocks_of_another_format_are_refused() -> None:
    with pytest.raises(FormatError, match="'blocks' of float16: its products need float32"):
        inverse(np.zeros((4, 4), np.float16), "float16", "blocks")


# ---------------------------------------------------------------- an H100's outputs


@pytest.fixture(scope="module")
def recorded() -> dict[str, Array]:
    """An H100's (Triton 3.6): ``tl.cumsum`` of a lane an element, and solve_tril's without gates."""
    with np.load(Path(__file__).parent.parent / "golden" / "recurrences_h100_cut.npz") as file:
        return dict(file)


@pytest.mark.parametrize("n", [32, 64, 128])
def test_cumulative_sums_have_the_bits_of_an_h100(n: int, recorded: dict[str, Array]) -> None:
    assert np.array_equal(cumulative_sum(recorded[f"x_{n}"], F32, "warps"), recorded[f"sums_{n}"])


def test_an_inverse_has_the_bits_of_an_h100(recorded: dict[str, Array]) -> None:
    """All of blocks on the diagonal; below them one row of 256, whose product before may differ, does not."""
    k = cast(recorded["k"].astype(np.float32), "bfloat16").reshape(4, 64, 64)
    beta = recorded["beta"].reshape(4, 64, 1)
    a = matmul(k, np.ascontiguousarray(k.swapaxes(-1, -2)), arithmetic="hopper.mma.k16.bf16.f32")
    found = inverse((a * beta).astype(np.float32), F32, "blocks", arithmetic="hopper.mma.k8.tf32.f32")
    expected = recorded["inverse"].reshape(4, 64, 64)
    lower, blocks = np.tri(64, dtype=bool), np.kron(np.eye(4, dtype=bool), np.ones((16, 16), bool))
    same = found == expected
    assert same[:, lower & blocks].all()
    assert same[:, lower & ~blocks].mean() > 0.994
    assert np.allclose(found[:, lower], expected[:, lower], rtol=0, atol=1e-4)
