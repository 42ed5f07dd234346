"""Tensors with an axis of one index: a block along it, of which a mask hides all but one element, has its stride."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

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
check = partial(checked, "one_index_kernels")


@pytest.mark.parametrize(
    ("m", "n", "k", "wraps"), [(1, 28, 40, False), (1, 16, 32, True), (20, 1, 32, False), (18, 12, 1, False)]
)
@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_products_of_one_row_one_column_and_one_term(m: int, n: int, k: int, wraps: bool, hw: str) -> None:
    a, b = normal(1, m, k).astype(np.float16), normal(2, k, n).astype(np.float16)
    words = {"A": a, "B": b, "C": np.zeros((m, n), np.float16), "M": m, "N": n, "K": k}
    words |= {"BM": 16, "BN": 16, "BK": 16, "WRAPS": wraps}
    check("product", (-(-m // 16), -(-n // 16)), words, {"C": a.astype(float) @ b.astype(float)}, hw)


def test_lanes_that_read_the_only_row_again_are_added_up() -> None:
    a, b = normal(1, 1, 32).astype(np.float16), normal(2, 32, 16).astype(np.float16)
    words = {"A": a, "B": b, "C": np.zeros(16, np.float16), "M": 1, "N": 16, "K": 32, "BM": 16, "BN": 16, "BK": 16}
    check("summed", (1,), words, {"C": 16 * (a.astype(float) @ b.astype(float))[0]}, "h200")
    with pytest.raises(ProgramError, match="a product needs tiles with two axes"):
        check("summed", (1,), words, {}, "ascend_910b2")


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_a_column_of_numbers_and_one_row_for_all(rows: int, hw: str) -> None:
    x, s, bias = normal(1, rows, 20), normal(2, rows, 1), normal(3, 1, 20)
    words = {"X": x, "S": s, "Bias": bias, "Y": np.zeros_like(x), "R": rows, "n": 20, "steps": 1, "BR": 4, "B": 32}
    check("with_bias", (-(-rows // 4),), words, {"Y": x * s + bias}, hw)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("hw", DEVICES)
def test_rows_in_blocks_are_added_up(rows: int, hw: str) -> None:
    x = normal(1, rows, 20)
    words = {"X": x, "Y": np.zeros(20, np.float32), "R": rows, "n": 20, "BR": 4, "B": 32}
    check("added_up", (1,), words, {"Y": x.sum(0)}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_block_that_begins_behind_the_first_element_of_the_only_row(hw: str) -> None:
    x = normal(1, 1, 16)
    following = np.append(x[0, 1:], np.float32(1.25))
    words = {"X": x, "Y": np.zeros(1, np.float32), "R": 1, "n": 16, "BR": 2, "B": 16}
    check("next_ones", (1,), words, {"Y": np.array([max(0.0, (x[0] * following).max())])}, hw)
