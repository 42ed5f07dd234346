"""Masks of blocks of one axis that leave other lanes in other programs, tensors and iterations: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.kernels.triton.known_tiles import known_tiles
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _checked(kernel: str, grid: tuple[int, ...], hw: str, wanted: dict[str, Any], **words: Any) -> Any:
    return checked("whole_lane_kernels", kernel, grid, words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [32, 37])
def test_a_loop_stores_lanes_that_its_program_does_not_load(hw: str, n: int) -> None:
    x, lengths = _drawn(4, n), np.array([n, 3, 1, 20], np.int32)
    whole = np.full((4, -(-n // 16) * 16), 1.5)
    for row, length in enumerate(lengths):
        whole[row, :length] = x[row, :length]
    totals = np.repeat(np.cumsum(whole.reshape(4, -1, 16).sum(2), 1), 16, 1)
    words = {"X": x, "Y": np.zeros_like(x), "Lengths": lengths, "n": n, "B": 16}
    done = _checked("of_lengths", (4,), hw, {"Y": (whole + totals)[:, :n]}, **words)
    assert any("also those that a mask hides; the time includes these" in note for note in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("n", "m"), [(37, 20), (40, 7)])
def test_weights_end_before_the_row(hw: str, n: int, m: int) -> None:
    x, w = _drawn(3, n), _drawn(m, seed=1)
    total = x.astype(np.float64).sum(1) + w.astype(np.float64).sum() + 2.0 * (-(-n // 16) * 16 - m)
    _checked("beside_weights", (3,), hw, {"Y": total}, X=x, W=w, Y=np.zeros(3, np.float32), n=n, m=m, B=16)


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_that_return_early_have_no_lanes(hw: str) -> None:
    x, y = _drawn(3, 2, 37), np.zeros((3, 2), np.float32)
    wanted = np.array([[x[row, head, row:].max() for head in range(2)] for row in range(3)])
    _checked("some_programs", (5, 2), hw, {"Y": wanted}, X=x, Y=y, n=37, count=3, B=16)


@pytest.mark.parametrize("hw", DEVICES)
def test_every_second_lane_is_stored(hw: str) -> None:
    x = _drawn(3, 21)
    lanes = np.full((3, 32), 0.25)
    lanes[:, :21] = np.where(np.arange(21) % 3 != 1, x, 0.25)
    wanted = np.where(np.arange(21) % 2 == 0, lanes[:, :21] - lanes.sum(1, keepdims=True), np.nan)
    _checked("by_parity", (3,), hw, {"Y": wanted}, X=x, Y=np.zeros_like(x), n=21, TWICE=False, B=32)


def test_an_element_that_two_lanes_store_is_refused() -> None:
    from ttir import whole_lane_kernels as kernels

    x = _drawn(3, 21)
    with npusim.record(floats=True) as calls:
        kernels.by_parity[(3,)](x, np.zeros_like(x), 21, TWICE=True, B=32)
    with pytest.raises(ProgramError, match="in an undefined order"):
        npusim.run(calls[0], rows="all")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [16, 70])
def test_numbers_are_chosen_by_iteration(hw: str, n: int) -> None:
    x, most = _drawn(3, n), -(-n // 16)
    parts = np.array(
        [[x[row, i * 16 : (i + 1) * 16].astype(np.float64).sum() for i in range(most)] for row in range(3)]
    )
    totals = [parts[row, row if row < most else 0 :].sum() for row in range(3)]
    scale = np.prod([-0.5 if i % 2 else 2.0 for i in range(most)])
    wanted = {"Y": np.array(totals), "Z": np.full(3, scale)}
    zeros = {"Y": np.zeros(3, np.float32), "Z": np.zeros(3, np.float32)}
    _checked("by_iteration", (3,), hw, wanted, X=x, **zeros, n=n, B=16)


@pytest.mark.parametrize("hw", DEVICES)
def test_lanes_beside_a_tile_that_a_mask_cuts_elsewhere(hw: str) -> None:
    x, w = _drawn(8, 37), _drawn(32, seed=1)
    total = x.astype(np.float64).sum(1) + w.astype(np.float64).sum() + (48 - 32)
    _checked("beside_rows", (2,), hw, {"Y": total}, X=x, W=w, Y=np.zeros(8, np.float32), n=37, B=16)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("n", "kind"), [(40, 0), (64, 1), (40, 1)])
def test_a_softmax_has_its_sum_beside_the_output(hw: str, n: int, kind: int) -> None:
    k, v = _drawn(3, n, 16), _drawn(3, n, 16, seed=1)
    scores = k.astype(np.float64).sum(2)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1)
    wanted = {"O": (weights[..., None] * v).sum(1) / total[:, None]}
    wanted |= {"L": scores.max(1) + np.log(total)} if kind else {}
    words = {"K": k, "V": v, "O": np.zeros((3, 16), np.float32), "L": np.zeros(3, np.float32), "n": n}
    _checked("decode", (3,), hw, wanted, **words, KIND=kind, D=16, B=32)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_column_is_turned_and_a_bias_may_be_missing(hw: str, has_bias: bool) -> None:
    x, scale, bias = _drawn(8, 20), _drawn(20, seed=1), _drawn(20, seed=2) if has_bias else None
    wanted = x.astype(np.float64) * scale + (bias if bias is not None else 0.0)
    _checked("beside_bias", (2,), hw, {"Y": wanted}, X=x, S=scale, Bias=bias, Y=np.zeros_like(x), n=20, B=32)


def test_numbers_of_tiles_are_loaded_from_the_last_one() -> None:
    x, g = _drawn(2, 64, 16).astype(np.float16), _drawn(2, 64, seed=1)
    state = np.zeros((2, 16, 16))
    for tile in (3, 2, 1, 0):
        part = x[:, tile * 16 : tile * 16 + 16].astype(np.float64)
        state = state * g[:, tile * 16 + 15, None, None] + part.transpose(0, 2, 1) @ part
    words = {"X": x, "G": g, "Y": np.zeros((2, 16, 16), np.float32), "T": 64, "D": 16, "B": 16}
    _checked("from_the_last", (2,), "h200", {"Y": state}, **words)


def test_an_axis_along_which_programs_have_the_same_lanes_is_one_row() -> None:
    ids = np.array([[x, y, 0] for y in range(2) for x in range(3)])
    places = np.broadcast_to(np.arange(4), (6, 1, 4))
    same = known_tiles("w", ids, places, (None,), is_along=True, missing=-1)
    apart = known_tiles("x", ids, places + ids[:, :1, None] * 4, (None,), is_along=True, missing=-1)
    assert same is not None and same.sizes == (4,) and not np.any(same.pointer.base)
    assert apart is not None and apart.sizes == (3, 4) and np.array_equal(apart.holds, np.arange(12))


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("q", [0, 30])
def test_a_sum_is_a_result_and_what_is_computed_from_it_too(hw: str, q: int) -> None:
    from ttir.stored import stored

    x = _drawn(4, 30)
    total = x[:, :q].astype(np.float64).sum(1)
    words = {"X": x, "Y": np.zeros_like(x), "T": np.zeros(4, np.float32), "n": 30, "q": q, "B": 8}
    made = stored(_checked("square_beside_sum", (4,), hw, {}, **words), words)
    assert np.abs(made["T"] - total).max() < 1e-5
    assert np.abs(made["Y"] - (total * total)[:, None]).max() < 1e-4


@pytest.mark.parametrize("hw", DEVICES)
def test_a_second_loop_visits_other_tiles(hw: str) -> None:
    x, q = _drawn(4, 21), 12
    acc = np.full((4, 8), 1.3, np.float32)
    for start in range(0, q, 8):
        at = start + 1 + np.arange(8)
        one = np.where(at < 21, x[:, np.minimum(at, 20)], np.float32(1.25))
        # one rounding of each product and sum: of 64 bits, the product of two floats of 32 has all digits
        acc = (acc.astype(np.float64) * np.float32(0.7) + one).astype(np.float32)
    total = acc.astype(np.float64).sum(1)
    words = {"X": x, "Y": np.zeros_like(x), "T": np.zeros(4, np.float32), "n": 21, "q": q, "B": 8}
    done = _checked("over_other_tiles", (4,), hw, {"Y": x * total[:, None], "T": total}, **words, KIND=0)
    assert any("one after another" in note for note in done.notes)


def test_a_product_that_the_next_iteration_adds_to_is_refused() -> None:
    from ttir import whole_lane_kernels as kernels

    calls: Any
    x = _drawn(4, 21)
    with npusim.record(floats=True) as calls:
        kernels.over_other_tiles[(4,)](x, np.zeros_like(x), np.zeros(4, np.float32), 21, 12, KIND=1, B=8)
    with pytest.raises(ProgramError, match=r"whole_lane_kernels\.py:\d+: "):
        npusim.run(calls[0], hw="h200", rows="all")


@pytest.mark.parametrize("hw", DEVICES)
def test_two_loops_over_the_same_tiles_have_unlike_masks(hw: str) -> None:
    x = np.abs(_drawn(6, 16)) + 1
    total = np.where(np.arange(6) < 2, x[:, 2], 0.0)
    wanted = {"Y": np.where(np.arange(16) != 5, x, 0.0) * total[:, None], "T": total}
    words = {"X": x, "Y": np.zeros_like(x), "T": np.zeros(6, np.float32), "R": 6, "n": 16, "lo": 5}
    done = _checked("with_unlike_masks", (6,), hw, wanted, **words, BR=1, B=16)
    assert (done.numerics.rmse or 0.0) < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("first", [0, 2])
def test_a_loop_may_read_nothing_that_it_loads(hw: str, first: int) -> None:
    w, q = _drawn(16), 10
    most = (np.where(np.arange(16) < q, w, np.float32(1.25)) - w).max()
    wanted = np.where(np.arange(3) < first, max(0.5, most), 0.5)
    words = {"W": w, "T": np.zeros(3, np.float32), "n": 16, "q": q, "first": first, "B": 16}
    _checked("of_hidden_rows", (3,), hw, {"T": wanted}, **words)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [21, 32])
def test_a_sum_runs_along_an_axis_that_only_masks_have(hw: str, n: int) -> None:
    x = _drawn(3, n)
    least = x.min(1).astype(np.float64)
    wanted = {"Y": np.broadcast_to(least[:, None], x.shape), "T": least + n - 1}
    _checked("numbers_by_mask", (3,), hw, wanted, X=x, Y=np.zeros_like(x), T=np.zeros(3, np.float32), n=n, B=32)
