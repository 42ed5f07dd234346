"""Kernels in further forms that public libraries have: results beside numpy's, on an NPU and a GPU."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

import npusim
from npusim.errors import ProgramError
from tests.turns import in_turn
from ttir.checked_launches import checked
from ttir.test_engines import normal

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


check = partial(checked, "form_kernels")


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_products_of_tiles_times_a_number_computed_in_the_loop(hw: str) -> None:
    # On a 910B2 each vector core needs the number, not the first core alone.
    m, n, k, group = 64, 64, 128, 64
    a, b = (normal(i, rows, k).astype(np.float16) for i, rows in ((1, m), (2, n)))
    row, one = np.abs(normal(3, 2, k // group)), np.abs(normal(4, k // group))
    parts = np.einsum("mgk,ngk->gmn", *(x.astype(np.float64).reshape(-1, k // group, group) for x in (a, b)))
    wanted = np.einsum("gmn,mg,g->mn", parts, row.repeat(m // 2, 0).astype(np.float64), one.astype(np.float64))
    words = {"A": a, "B": b, "C": np.zeros((m, n), np.float32), "ScaleA": row}
    words |= {"ScaleB": one, "K": k, "N": n, "GROUP": group, "M": m // 2, "W": n, "B_K": 32}
    check("scaled_tiles", (2, 1), words, {"C": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_parts_of_a_row_of_unequal_widths(hw: str) -> None:
    rows, heads, d, half = 5, 3, 40, 12
    x, w = normal(1, rows, heads, d), normal(2, rows, half)
    a, b, angle = (v.astype(np.float64) for v in (x[..., :half], x[..., half : 2 * half], w[:, None]))
    wanted = np.concatenate([a * angle - b, b * angle + a, x[..., 2 * half :]], -1)
    words = {"X": x, "Y": np.zeros_like(x), "Angle": w, "heads": heads, "D": d, "HALF": half, "H": 4, "W": 16}
    check("turned_in_part", (rows,), {**words, "REST": 16}, {"Y": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_two_loops_that_store_to_tensors_of_unlike_widths(hw: str) -> None:
    x, z = normal(1, 4, 70), normal(2, 4, 40)
    words = {"X": x, "Z": z, "Y": np.zeros_like(x), "Sums": np.zeros_like(z), "n": 70, "m": 40, "B": 32}
    check("two_loops", (4,), words, {"Y": 2.0 * x.astype(np.float64), "Sums": z.astype(np.float64) + 1.0}, hw)


def test_an_element_that_one_program_stores_twice_is_refused() -> None:
    from ttir.form_kernels import stored_twice

    x = normal(1, 4, 30)
    with npusim.record(floats=True) as calls:
        stored_twice[(4,)](X=x, Y=np.zeros_like(x), n=30, B=32, FEW=8)
    with pytest.raises(ProgramError, match=r"stored to and also accessed elsewhere|stores to an element"):
        npusim.run(calls[0], hw="h200")


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_bytes_of_fp8_numbers_are_the_numbers(hw: str) -> None:
    x = normal(1, 4, 70)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(448.0)
    y = (x / scale).astype(float8_e4m3fn).astype(np.float64)
    words = {"X": x, "Y": np.zeros(x.shape, np.uint8), "Scale": np.zeros(4, np.float32), "First": np.zeros(1, np.int32)}
    wanted = {"Y": y, "Scale": scale[:, 0], "First": [4]}
    done = check("bytes_of_rows", (4,), {**words, "n": 70, "B": 128}, wanted, hw)
    assert any("bytes are FP8 numbers" in note for note in done.notes)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_rows_between_two_bounds_are_stored(hw: str) -> None:
    block, d = 8, 16
    begin, end = np.array([3, 0, 9], np.int32), np.array([18, 7, 16], np.int32)
    first = np.concatenate([[0], np.cumsum(end - begin)[:-1]]).astype(np.int32)
    pages = np.array([[4, 2, 7], [1, 0, 0], [5, 3, 6]], np.int32)
    x = normal(1, int((end - begin).sum()), d)
    wanted = np.full((8, block, d), np.nan)
    for i in range(3):
        for at in range(begin[i], end[i]):
            wanted[pages[i, at // block], at % block] = x[first[i] + at - begin[i]]
    words = {"X": x, "Cache": np.zeros((8, block, d), np.float32), "Page": pages, "Begin": begin, "End": end}
    check("filled_pages", (3, 3), {**words, "First": first, "D": d, "B": block}, {"Cache": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_cumulative_sums_from_the_end(hw: str) -> None:
    x = normal(1, 2, 70, 3)
    words = {"X": x, "Y": np.zeros_like(x), "length": 70, "heads": 3, "B": 32}
    check("sums_from_the_end", (6,), words, {"Y": x.astype(np.float64)[:, ::-1].cumsum(1)[:, ::-1]}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_numbers_of_a_table_by_bytes_of_a_ragged_row(hw: str) -> None:
    n, group = 150, 16
    code = np.random.default_rng(1).integers(0, 256, n).astype(np.uint8)
    table, scale = normal(2, 256), normal(3, -(-n // group))
    words = {"X": code, "Table": table, "Scale": scale, "Y": np.zeros(n, np.float32), "n": n, "GROUP": group, "B": 64}
    wanted = table[code].astype(np.float64) * scale.astype(np.float64)[np.arange(n) // group]
    check("numbers_of_bytes", (3,), words, {"Y": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_numbers_that_move_up_in_place(hw: str) -> None:
    rows, d, n = 3, 12, 4
    x, cache, w = normal(1, rows, d), normal(2, rows, d, n), normal(3, d, n)
    moved = np.concatenate([cache[..., 1:], x[..., None]], -1)
    words = {"X": x, "Cache": cache, "W": w, "Y": np.zeros_like(x), "d": d, "B": 16, "N": n}
    wanted = {"Cache": moved, "Y": (moved.astype(np.float64) * w).sum(-1)}
    check("moved_up", (rows,), words, wanted, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_elements_by_an_index_that_a_choice_makes(hw: str) -> None:
    rows, heads, half = 3, 2, 12
    x, w = normal(1, rows, heads, 2 * half), normal(2, rows, half)
    words = {"X": x, "Angle": w, "Y": np.zeros_like(x), "heads": heads, "D": 2 * half, "HALF": half, "B": 32}
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    wanted = np.concatenate([a * w[:, None] - b, b * w[:, None] + a], -1)
    check("turned_by_partner", (rows * heads,), words, {"Y": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_rows_from_the_last_element_on(hw: str) -> None:
    n, m = 40, 37
    x = normal(1, 3, n)
    words = {"X": x, "Y": np.zeros((3, m), np.float32), "n": n, "m": m, "B": 64}
    check("turned_round", (3,), words, {"Y": 2.0 * x[:, : n - m - 1 : -1].astype(np.float64)}, hw)


def test_a_cumulative_sum_of_one_element_is_the_element() -> None:
    x = normal(1, 2, 1, 3)
    words = {"X": x, "Y": np.zeros_like(x), "length": 1, "heads": 3, "B": 1}
    check("sums_from_the_end", (6,), words, {"Y": x.astype(np.float64)}, "h200")


@pytest.mark.parametrize("hw", DEVICES)
def test_groups_of_a_row_that_is_stored_block_after_block(hw: str) -> None:
    x, scale = normal(1, 4, 128), normal(2, 4, 8)
    words = {"X": x, "Scale": scale, "Y": np.zeros_like(x), "SIZE": 128, "GROUP": 16, "B": 64}
    check("scaled_groups", (4,), words, {"Y": x.astype(np.float64) * scale.repeat(16, 1)}, hw)


def test_a_division_by_a_constant_is_a_product_with_its_inverse_rounded_once() -> None:
    """Triton writes div.full.f32 for both, and ptxas a product for the first: 255 of quantization on an H200."""
    from ttir.form_kernels import by_a_constant
    from ttir.stored import stored

    x = normal(1, 256)
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros_like(x), "d": 255.0, "D": 255.0, "B": 128}
    with npusim.record(floats=True) as calls:
        by_a_constant[(2,)](**words)
    made = stored(npusim.run(calls[0], hw="h200", rows="all"), words)
    inverse = np.float32(1.0) / np.float32(255.0)
    assert np.array_equal(made["Y"].astype(np.float32), x * inverse)
    assert not np.array_equal(made["Z"], made["Y"])
    assert np.allclose(made["Z"], made["Y"], rtol=3e-7)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_branches_that_share_a_return(hw: str) -> None:
    block, d, size = 8, 16, 30
    begin, count = np.array([0, 11], np.int32), np.array([11, 13], np.int32)
    pages, cache = np.array([[3, 1], [0, 4]], np.int32), normal(1, 6, block, d)
    wanted = np.zeros((size, d))
    for i in range(2):
        for at in range(count[i]):
            wanted[begin[i] + at] = 2.0 * cache[pages[i, at // block], at % block]
    words = {"Cache": cache, "Out": np.zeros((size, d), np.float32), "Begin": begin, "Count": count, "Page": pages}
    check("cache_and_tail", (2, 3), {**words, "SIZE": size, "D": d, "B": block}, {"Out": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_programs_that_store_nothing_are_left_out(hw: str) -> None:
    x, mark = normal(1, 8, 60), np.array([0, 3, -1, 2, 5, -1, -1, -1], np.int32)
    wanted = np.where(
        (mark >= 0)[:, None] & (np.arange(8) < 6)[:, None], np.maximum(x.astype(np.float64), 0) ** 2, np.nan
    )
    words = {"X": x, "Y": np.zeros_like(x), "Mark": mark, "used": 6, "rows": 8, "N": 60, "B": 64, "PROGRAMS": 8}
    done = check("marked_rows", (8,), words, {"Y": wanted}, hw)
    assert any("4 of 8 programs store nothing" in note for note in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
def test_more_results_than_flags(hw: str) -> None:
    x, names = normal(1, 256), "ABCDEFGHJ"
    words = {"X": x, **{n: np.zeros_like(x) for n in names}, "BLOCK": 64}
    wanted = {n: x.astype(np.float64) + i for i, n in enumerate(names, 1)}
    done = check("many_results", (4,), words, wanted, hw)
    assert any("results share" in note for note in done.notes) == (hw != "h200")
