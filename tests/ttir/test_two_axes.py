"""Blocks of two axes whose masks leave other lanes in other tensors, rows and programs: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _checked(kernel: str, grid: tuple[int, ...], hw: str, wanted: dict[str, Any], **words: Any) -> Any:
    return checked("two_axis_kernels", kernel, grid, words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("last", [3, 9])
def test_masks_end_at_other_columns_than_the_sums(hw: str, last: int) -> None:
    x, w, count, n = _drawn(5, 11), _drawn(last, seed=1), 5, 11
    lanes, weights = np.full((count, 16), 1.5), np.full(16, 2.0)
    lanes[:, 2:n], weights[:last] = x[:, 2:], w
    total = np.where(np.arange(16) <= last, lanes * weights, 0.0).sum(1, keepdims=True)
    words = {"X": x, "W": w, "Y": np.zeros_like(x), "T": np.zeros(count, np.float32), "R": count, "n": n}
    words |= {"first": 2, "last": last, "OTHER": 1.5, "BR": 4, "B": 16}
    wanted = np.where(np.arange(n) < last, lanes[:, :n] + total, np.nan)
    done = _checked("of_unlike_masks", (2,), hw, {"Y": wanted, "T": total[:, 0]}, **words)
    assert any("also those that a mask hides; the time includes these" in note for note in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [16, 21])
def test_rows_of_a_tile_end_at_columns_of_their_own(hw: str, n: int) -> None:
    x, lengths = _drawn(6, n), np.array([n, 3, 0, 9, 1, 12], np.int32)
    whole = np.full((6, -(-n // 8) * 8), 0.25)
    for row, length in enumerate(lengths):
        whole[row, :length] = x[row, :length]
    most = np.maximum.accumulate(np.maximum(whole.reshape(6, -1, 8).max(2), -9.0), 1)
    words = {"X": x, "Y": np.zeros_like(x), "R": 6, "n": n, "lengths": lengths, "OTHER": 0.25, "BR": 4, "B": 8}
    _checked("of_a_loop", (2,), hw, {"Y": (whole + np.repeat(most, 8, 1))[:, :n]}, **words)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_tile_beside_the_one_across_the_diagonal(hw: str) -> None:
    n = 11
    x = _drawn(n, n)
    wanted = np.full((2 * n, n), np.nan)
    wanted[::2] = np.where(np.arange(n) % 3 != 1, x + np.where(np.eye(n) > 0, 0.5, x.T), np.nan)
    _checked("beside_its_transpose", (2, 2), hw, {"Y": wanted}, X=x, Y=np.zeros((2 * n, n), np.float32), n=n, B=8)


@pytest.mark.parametrize("hw", DEVICES)
def test_addresses_by_quotients_of_rows_and_columns(hw: str) -> None:
    n, half = 10, 5
    g, taken = _drawn(2, half, half), np.random.default_rng(3).integers(0, 4, (2, half, half))
    rows, columns = (2 * np.arange(half)[:, None] + taken // 2), 2 * np.arange(half) + taken % 2
    wanted = np.zeros((2, n * n))
    index = (rows * n + columns).astype(np.int64)
    np.put_along_axis(wanted, index.reshape(2, -1), g.reshape(2, -1).astype(np.float64), 1)
    words = {"G": g, "Index": index, "Y": np.zeros((2, n, n), np.float32), "n": n, "B": 8}
    _checked("unpooled", (2, 2, 2), hw, {"Y": wanted.reshape(2, n, n)}, **words)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_mask_of_values_or_of_places(hw: str) -> None:
    x = _drawn(11, 11)
    rows, columns = np.arange(11)[:, None], np.arange(11)
    wanted = np.where((x > np.float32(0.3)) | (rows % 3 == columns % 2), x, 2.0 * x)
    _checked("of_values_and_places", (1,), hw, {"Y": wanted}, X=x, Y=np.zeros_like(x), n=11, B=16)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_branch_stores_where_the_program_loaded(hw: str) -> None:
    h, g = _drawn(2, 3, 16, 16), _drawn(2, 3, seed=1)
    wanted, total = np.full(h.shape, np.nan), np.zeros((2, 16, 16))
    for tile in range(3):
        total = total + h[:, tile]
        wanted[:, tile] = total if tile else np.nan
        total = total * g[:, tile, None, None]
    words = {"H": h, "G": g, "Last": np.zeros((2, 16, 16), np.float32), "tiles": 3, "BEHIND": 0, "D": 16}
    done = _checked("states_in_place", (2,), hw, {"H": wanted, "Last": total}, **words)
    assert any("executes its statements in all of them, with masked stores" in note for note in done.notes)


def test_a_tile_that_an_earlier_iteration_stored_is_refused() -> None:
    from ttir import two_axis_kernels as kernels

    h, last = _drawn(2, 4, 16, 16), np.zeros((2, 16, 16), np.float32)
    with npusim.record(floats=True) as calls:
        kernels.states_in_place[(2,)](h, _drawn(2, 3), last, 3, BEHIND=1, D=16)
    with pytest.raises(ProgramError, match="an if whose condition differs"):
        npusim.run(calls[0], rows="all")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("few", [0, 3])
def test_a_store_of_which_a_mask_hides_all_stores_nothing(hw: str, few: int) -> None:
    x = _drawn(5, 7)
    lanes = np.full((5, 8), 0.5)
    lanes[:, :2] = x[:, :2]
    wanted = {"Y": (lanes - lanes.sum(1, keepdims=True))[:, :7]}
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros_like(x), "R": 5, "few": few, "n": 7, "BR": 4, "B": 8}
    if few:
        wanted["Z"] = np.where(np.arange(5)[:, None] < few, lanes[:, :7], np.nan)
    done = _checked("of_few_rows", (2,), hw, wanted, **words)
    assert any("hides all elements in every program" in note for note in done.notes) == (few == 0)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_result_of_more_programs_than_the_first_one_is_judged(hw: str) -> None:
    x, n = _drawn(8, 13), 13
    rows, columns = np.arange(8)[:, None], np.arange(n)
    lanes = np.full((8, 16), 0.5)
    lanes[:, :n] = np.where(columns < n - rows, x, 0.5)
    wanted = {"Y": np.where(rows // 2 % 2 == 0, 2 * lanes[:, :n], np.nan)}
    wanted["Z"] = np.where(columns < n - 2, (lanes - lanes.sum(1, keepdims=True))[:, :n], np.nan)
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros_like(x), "n": n, "B": 16, "BR": 2}
    done = _checked("of_some_programs", (4,), hw, wanted, **words)
    (other,) = done.numerics.others.values()
    assert other.nan_count == 0
    assert other.rmse < 1e-6
