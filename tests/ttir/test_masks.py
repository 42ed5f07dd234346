"""Masks that differ between programs, that are no bounds, and elements that a mask hides: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from ttir.stored import stored

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import mask_kernels as kernels
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _run(name: str, grid: tuple[int, ...], hw: str, **words: Any) -> Any:
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[grid](**words)
    return npusim.run(calls[0], hw=hw, rows="all")


def _is_near(done: Any, expected: Any) -> bool:
    """Return whether the first result is the expected one to float32's rounding, and its stated error too.

    Lanes behind the row, which a mask hides, are of no element.
    """
    output = np.asarray(done.output, np.float64).reshape(*expected.shape[:-1], -1)
    output = output[..., : expected.shape[-1]]
    known = ~np.isnan(output)
    scale = np.abs(expected).max()
    return bool(known.any() and np.abs(output - expected)[known].max() < 2e-6 * scale)


@pytest.mark.parametrize("hw", DEVICES)
def test_elements_that_a_mask_hides_without_a_number_are_0(hw: str) -> None:
    x = _drawn(5, 20)
    done = _run("centred", (5,), hw, X=x, Y=np.zeros_like(x), n=20, B=32, KIND=0)
    wide = x.astype(np.float64)
    assert _is_near(done, wide - wide.mean(1, keepdims=True))
    assert any("a masked load without other" in n for n in done.notes)
    x = -np.abs(x)
    done = _run("centred", (5,), hw, X=x, Y=np.zeros_like(x), n=20, B=32, KIND=1)
    assert _is_near(done, x.astype(np.float64))  # the largest is a hidden 0
    done = _run("centred", (5,), hw, X=x, Y=np.zeros_like(x), n=20, B=32, KIND=2)
    assert done.numerics.rmse < 1e-6  # twelve hidden lanes of -1 in a sum


@pytest.mark.parametrize("hw", DEVICES)
def test_a_hidden_0_times_a_number_of_the_row_is_0(hw: str) -> None:
    dy, x, w, r, mu = _drawn(6, 40), _drawn(6, 40, seed=1), _drawn(40, seed=2), _drawn(6, seed=3), _drawn(6, seed=4)
    words = {"DY": dy, "X": x, "W": w, "R": r, "MU": mu, "DX": np.zeros_like(x), "n": 40, "B": 64}
    normed = (x - mu[:, None].astype(np.float64)) * r[:, None]
    dyw = dy.astype(np.float64) * w
    done = _run("norm_gradient", (6,), hw, **words, SHIFT=False)
    assert _is_near(done, dyw - normed * (dyw * normed).sum(1, keepdims=True) / 40)
    done = _run("norm_gradient", (6,), hw, **words, SHIFT=True)  # the hidden number less one of the row is no 0
    assert done.numerics.rmse < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_a_label_of_each_program_chooses(hw: str) -> None:
    x, labels = _drawn(7, 70), np.array([3, 69, 0, 31, 32, 5, 64], np.int64)
    expected = x.astype(np.float64)
    expected[np.arange(7), labels] -= 1
    assert _is_near(_run("labelled", (7, 3), hw, X=x, L=labels, Y=np.zeros_like(x), n=70, B=32), expected)


@pytest.mark.parametrize("hw", DEVICES)
def test_masks_of_rows_and_columns_differ_between_programs(hw: str) -> None:
    x, labels = _drawn(2, 40, 40), np.array([3, 40, 18], np.int32)
    rows, cols = np.arange(40)[:, None], np.arange(40)
    of = labels[np.arange(40) // 16][:, None]
    wide = x.astype(np.float64)
    least = 20 - cols // 16
    depth = np.arange(2)[:, None, None]
    expected = (
        np.where(cols > rows, -5.0, wide),
        np.where(cols > rows, wide * 2, 3 - wide),
        np.where(rows >= of, wide, 7.0),
        np.where(cols >= of, wide * 2, wide),
        np.where(cols >= least, wide * 2, wide) - (rows + depth),
    )
    for kind, right in enumerate(expected):
        words = {"X": x, "Y": np.zeros_like(x), "L": labels, "m": 40, "n": 40, "R": 16, "B": 16}
        done = _run("triangle", (3, 3, 2), hw, **words, KIND=kind)
        assert _is_near(done, right), kind
        assert done.numerics.error.rmse < 1e-6


def test_masks_that_differ_between_programs_are_read_lane_by_lane() -> None:
    x = _drawn(4, 64)
    shifted = _run("shifted_load", (4,), "h200", X=x, Y=np.zeros_like(x), n=64, S=3, B=64)
    assert _is_near(shifted, np.pad(x.astype(np.float64), ((0, 0), (3, 0)))[:, :64])  # lanes alike in all programs
    given = {"X": x, "L": _drawn(4, 60), "Y": _drawn(4, 60)}
    done = _run("labelled_sum", (4, 4), "h200", **given, n=60, B=16, N=64)
    wide, blocks = x.astype(np.float64), np.arange(60) // 16
    sums = [np.where(np.arange(64) >= 4 * b, wide, 0.5 - wide).sum(1) for b in range(4)]
    expected = given["L"] * np.stack(sums, 1)[:, blocks]
    assert np.abs(stored(done, given)["Y"] - expected).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_branches_that_programs_answer_by_their_number_are_kinds(hw: str) -> None:
    x = _drawn(2, 5, 32)
    done = _run("shifted_rows", (2, 5), hw, X=x, Y=np.zeros_like(x), T=5, D=32)
    expected = np.concatenate([-x[:, :1], x[:, :-1] - x[:, 1:]], 1).astype(np.float64)
    assert _is_near(done, expected)
    assert any("treats the kernel as 2 kernels" in n for n in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
def test_pages_are_at_another_distance_in_each_program(hw: str) -> None:
    q, k, v = (_drawn(*shape, seed=i).astype(np.float16) for i, shape in enumerate(((48, 32), (96, 32), (96, 32))))
    table = np.array([[0, 3], [5, 1], [2, 4]], np.int32)
    words = {"Q": q, "K": k, "V": v, "T": table, "O": np.zeros((48, 32), np.float32), "n": 2, "D": 32, "B": 16}
    done = _run("two_pages", (3,), hw, **words)
    seen = (table[:, :, None] * 16 + np.arange(16)).reshape(3, 32)
    scores = np.exp2(np.einsum("prd,pkd->prk", q.reshape(3, 16, 32).astype(np.float64), k[seen].astype(np.float64)))
    expected = np.einsum("prk,pkd->prd", scores / scores.sum(2, keepdims=True), v[seen].astype(np.float64))
    assert np.abs(np.reshape(done.output, expected.shape) - expected).max() < 3e-3


@pytest.mark.parametrize("hw", DEVICES)
def test_a_row_that_a_later_loop_stores_in_place_is_read_before(hw: str) -> None:
    x = _drawn(4, 100)
    done = _run("in_place", (4,), hw, X=x.copy(), n=100, B=32, KIND=0)
    wide = x.astype(np.float64)
    expected = wide * (wide**2).sum(1, keepdims=True)
    assert np.abs(np.reshape(done.output, x.shape) - expected).max() < 1e-4
    with pytest.raises(ProgramError, match=r"mask_kernels\.py:\d+: X"):
        _run("in_place", (4,), hw, X=x.copy(), n=100, B=32, KIND=1)  # which program comes first is free


@pytest.mark.parametrize("hw", DEVICES)
def test_rows_of_a_block_are_tokens_and_heads(hw: str) -> None:
    lengths = np.array([0, 23, 40], np.int32)
    q = _drawn(40, 8, 32).astype(np.float16)
    k, v = (_drawn(128, 32, seed=i).astype(np.float16) for i in (1, 2))
    table = np.array([[5, 2], [0, 7]], np.int32)
    words = {"Q": q, "K": k, "V": v, "T": table, "LENGTHS": lengths, "O": np.zeros((40, 8, 32), np.float32)}
    sizes = {"heads": 8, "pages": 2, "G": 8, "M": 64, "D": 32, "B": 16, "PAGE": 16}
    expected = np.zeros((40, 8, 32))
    for number in range(2):
        low, high = lengths[number : number + 2]
        keys = (table[number][:, None] * 16 + np.arange(16)).reshape(-1)[: high - low]
        scores = np.einsum("thd,kd->thk", q[low:high].astype(np.float64), k[keys].astype(np.float64))
        causal = np.arange(high - low)[None, None] <= np.arange(high - low)[:, None, None]
        weights = np.where(causal, np.exp2(scores), 0.0)
        expected[low:high] = (weights / weights.sum(2, keepdims=True)) @ v[keys].astype(np.float64)
    done = _run("grouped_rows", (2, 1, 3), hw, **words, **sizes)
    assert np.abs(stored(done, words)["O"] - expected).max() < 3e-3


@pytest.mark.parametrize("hw", DEVICES)
def test_a_product_that_a_sum_alone_takes_in_is_no_statement(hw: str) -> None:
    x, weights = _drawn(4, 32), np.abs(_drawn(4, 32, seed=1))
    done = _run("rescaled", (4,), hw, X=x, L=weights, Y=np.zeros(4, np.float32), N=32)
    expected = (weights.astype(np.float64) * np.exp(x.astype(np.float64))).sum(1)
    assert np.abs(np.reshape(done.output, 4) - expected).max() < 1e-4


@pytest.mark.parametrize("hw", DEVICES)
def test_a_number_of_a_row_is_chosen_column_by_column(hw: str) -> None:
    x, cols = _drawn(4, 21), np.arange(21)
    total = x.astype(np.float64).sum(1, keepdims=True)
    wanted = (
        np.where(cols < 3, total, 0),
        np.where(cols == 3, total, 1),
        np.where((cols < 3) | (cols >= 9), total, -1) * x,
        np.where(cols >= 3, total, -np.inf),
        np.where(cols % 3 == 1, total, 2),
    )
    for kind, values in enumerate(wanted):
        words = {"X": x, "Y": np.zeros_like(x), "n": 21, "low": 3, "high": 9}
        done = _run("number_by_column", (4,), hw, **words, B=32, KIND=kind)
        assert np.allclose(np.reshape(done.output, x.shape), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hw", DEVICES)
def test_numbers_of_rows_are_chosen_element_by_element(hw: str) -> None:
    x = _drawn(7, 13)
    rows, cols, total = np.arange(7)[:, None], np.arange(13), x.astype(np.float64).sum(1, keepdims=True)
    done = _run("number_by_key", (2,), hw, X=x, Y=np.zeros_like(x), R=7, n=13, low=2, BR=4, B=16)
    assert _is_near(done, np.where(cols >= rows, total, 0) + np.where(cols < 2, total, 1))


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_choice_of_the_first_tile_is_what_the_loop_begins_with_or_computed(hw: str, kind: int) -> None:
    x = _drawn(3, 48) - 5
    words = {"X": x, "Y": np.zeros_like(x), "n": 48, "B": 16, "KIND": kind}
    weights = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    done = _run("first_tile_apart", (3,), hw, **words, START=-float("inf"))
    assert _is_near(done, weights / weights.sum(1, keepdims=True))
    done = _run("first_tile_apart", (3,), hw, **words, START=-1.0)
    assert done.numerics.rmse < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_lanes_that_a_mask_leaves_and_no_load_reads_have_the_number_of_the_load(hw: str) -> None:
    x = _drawn(4, 21)
    words = {"X": x, "Y": np.zeros_like(x), "n": 21, "B": 32}
    wide = x.astype(np.float64)
    wanted = (wide.sum(1), wide.max(1), np.exp(wide).sum(1))
    for kind, of in enumerate(wanted):
        assert _is_near(_run("summed_beyond", (4,), hw, **words, most=21, OTHER=1.5, KIND=kind), wide - of[:, None])
        done = _run("summed_beyond", (4,), hw, **words, most=22, OTHER=1.5, KIND=kind)
        more = (of + 1.5, np.maximum(of, 1.5), of + np.exp(1.5))[kind]
        assert _is_near(done, wide - more[:, None])
    assert _is_near(_run("summed_beyond", (4,), hw, **words, most=23, OTHER=0.0, KIND=0), wide - wanted[0][:, None])
    words = {"X": x, "T": np.zeros(4, np.float32), "n": 21, "B": 16}
    assert _is_near(_run("added_beyond", (4,), hw, **words, most=21, OTHER=1.5), wanted[0])
    assert _is_near(_run("added_beyond", (4,), hw, **words, most=22, OTHER=1.5), wanted[0] + 1.5)


@pytest.mark.parametrize(("group", "hw"), [(4, "ascend_910b2"), (4, "h200"), (0, "h200")])
def test_each_of_several_loops_has_its_own_mask(group: int, hw: str) -> None:
    size, dim, block = 64, 16, 16
    q, k, v = (_drawn(size, dim, seed=i).astype(np.float16) for i in range(3))
    words = {"Q": q, "K": k, "V": v, "O": np.zeros((size, dim), np.float32), "S": size}
    done = _run("masked_in_two_loops", (size // block,), hw, **words, D=dim, B=block, G=group)
    rows, keys = np.arange(size)[:, None], np.arange(size)[None]
    before = rows // group % 2 == keys // group % 2 if group else rows >= keys + 8
    kept = np.where(keys < rows // block * block, before, rows + block >= keys)
    scores = (q.astype(np.float32) @ k.astype(np.float32).T * kept).astype(np.float16)
    assert _is_near(done, scores.astype(np.float64) @ v.astype(np.float64))
