"""Masks with lower bounds, last chunks that are shorter, and blocks wider than what is stored: values by numpy."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError
from tests.turns import in_turn
from ttir.checked_launches import checked
from ttir.test_engines import normal

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
check = partial(checked, "window_kernels")


def windows(x: Any, p: int, stride: int, k: int, beyond: float) -> Any:
    """Return all windows of the images of ``x``, (images, rows, columns, k * k)."""
    wide = np.pad(x, ((0, 0), (p, p), (p, p)), constant_values=beyond)
    every = np.lib.stride_tricks.sliding_window_view(wide, (k, k), axis=(1, 2))
    return every[:, ::stride, ::stride].reshape(*every[:, ::stride, ::stride].shape[:3], k * k)


@pytest.mark.parametrize(("p", "stride", "k", "hw"), [(1, 1, 3, "h200"), (1, 2, 3, "h200"), (1, 1, 2, "ascend_910b2")])
def test_windows_of_a_padded_image(p: int, stride: int, k: int, hw: str) -> None:
    x = normal(1, 2, 20, 13)
    wanted = windows(x.astype(np.float64), p, stride, k, -np.inf).max(-1)
    _, rows, columns = wanted.shape
    words = {"X": x, "Y": np.zeros(wanted.shape, np.float32), "n": 20, "m": 13, "rows": rows, "columns": columns}
    blocks = -(-rows // 16) * -(-columns // 16)
    done = check("pooled", (2, blocks), {**words, "P": p, "STRIDE": stride, "K": k, "B": 16}, {"Y": wanted}, hw)
    assert any("elements that the mask hides are timed as loaded ones" in note for note in done.notes)


def test_means_of_what_an_image_has_of_a_window() -> None:
    x = normal(1, 3, 12, 9)
    total, count = (windows(v, 1, 1, 3, 0.0).sum(-1) for v in (x.astype(np.float64), np.ones(x.shape)))
    words = {"X": x, "Y": np.zeros_like(x), "n": 12, "m": 9, "B": 16}
    check("averaged", (3,), words, {"Y": total / count}, "h200")


def test_a_window_that_leaves_the_tensor_is_refused() -> None:
    words = {"X": normal(1, 10, 12), "Y": np.zeros((16, 16), np.float32), "n": 10, "m": 12, "B": 16}
    with pytest.raises(ProgramError, match=r"window_kernels\.py:\d+: .*no mask prevents it"):
        check("beyond", (1,), words, {}, "h200")


def chunks(safe: bool) -> tuple[dict[str, Any], Any]:
    """Return the launch of `window_kernels.chunk_products` on 50 rows in chunks of 32, and its result."""
    x, z = normal(1, 2, 50, 16).astype(np.float16), normal(2, 2, 2, 32, 32).astype(np.float16)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 14), (0, 0))).reshape(2, 2, 32, 16)
    wanted = np.einsum("bcij,bcjd->bcid", z.astype(np.float64), wide).reshape(2, 64, 16)[:, :50]
    words = {"X": x, "Z": z, "Y": np.zeros((2, 50, 16), np.float32), "n": 50, "D": 16, "C": 32, "B": 16, "SAFE": safe}
    return words, wanted


@pytest.mark.parametrize("hw", DEVICES)
def test_a_last_chunk_that_is_shorter(hw: str) -> None:
    words, wanted = chunks(safe=True)
    done = check("chunk_products", (2, 2), words, {"Y": wanted}, hw)
    assert not any("of them never" in note for note in done.notes)


def test_a_last_chunk_that_reads_beyond_its_end_is_refused() -> None:
    words, _ = chunks(safe=False)
    with pytest.raises(ProgramError, match=r"window_kernels\.py:\d+: X: .*no mask prevents it"):
        check("chunk_products", (2, 2), words, {}, "h200")


@pytest.mark.parametrize(("plus", "hw"), [(0.0, "h200"), (1.0, "h200")])
def test_numbers_of_hidden_rows_are_added(plus: float, hw: str) -> None:
    x = normal(1, 1, 50, 16)
    sums = np.pad(x.astype(np.float64).sum(-1), ((0, 0), (0, 14))).reshape(1, 4, 16) + plus
    words = {"X": x, "A": np.zeros((1, 4, 16), np.float32), "Y": np.zeros_like(x), "n": 50, "PLUS": plus}
    check("chunk_numbers", (4, 1), {**words, "D": 16, "C": 16}, {"A": sums, "Y": 3.0 * x.astype(np.float64)}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_columns_that_no_program_stores(hw: str) -> None:
    x, w = normal(1, 48, 20), normal(2, 16)
    words = {"X": x, "W": w, "Y": np.zeros((48, 7), np.float32), "m": 7, "n": 20, "B": 16}
    check("first_columns", (3,), {**words, "HOW": "row"}, {"Y": x[:, :7].astype(np.float64) * w[:7]}, hw)
    less = x[:, :7].astype(np.float64) - x[:, :16].max(1, keepdims=True)
    check("first_columns", (3,), {**words, "HOW": "maximum"}, {"Y": less}, hw)


@pytest.mark.parametrize(("other", "hw"), [(0.0, "h200"), (1.0, "ascend_910b2")])
def test_rows_behind_a_sequence_are_the_number_of_the_load(other: float, hw: str) -> None:
    x = normal(1, 2, 50, 16).astype(np.float16)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 14), (0, 0)), constant_values=other).reshape(2, 4, 16, 16)
    words = {"X": x, "Y": np.zeros((2, 4, 16, 16), np.float32), "n": 50, "OTHER": other, "D": 16, "C": 16}
    wanted = {"Y": np.einsum("bcid,bcjd->bcij", wide, wide)}
    check("chunk_pairs", (4, 2), {**words, "LESS": 0}, wanted, hw)
    left = np.minimum(16, 50 - 16 * np.arange(4)) - 3  # it hides rows of the sequence too
    fewer = np.where(np.arange(16)[None, :, None] < left[:, None, None], wide, other)
    check("chunk_pairs", (4, 2), {**words, "LESS": 3}, {"Y": np.einsum("bcid,bcjd->bcij", fewer, fewer)}, hw)


@pytest.mark.parametrize(("n", "hw"), [(50, "h200"), (64, "ascend_910b2")])
def test_numbers_by_rows_and_by_columns_of_a_programs_own_part(n: int, hw: str) -> None:
    g = normal(1, 2, n)
    wide = np.pad(g.astype(np.float64), ((0, 0), (0, 64 - n)), constant_values=5.0).reshape(2, 4, 16)
    words = {"G": g, "Y": np.zeros((2, 4, 16, 16), np.float32), "n": n, "OTHER": 5.0, "C": 16}
    check("chunk_differences", (4, 2), words, {"Y": np.exp(wide[..., :, None] - wide[..., None, :])}, hw)
