"""Kernels in forms that public libraries have: results beside float64, on an NPU and a GPU."""

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


check = partial(checked, "public_kernels")


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_state_that_some_programs_do_not_read(hw: str) -> None:
    rows, n = 8, 70
    x, labels = normal(1, rows, n), np.arange(rows, dtype=np.int64) * 7
    labels[[2, 5]] = -100
    wide = x.astype(np.float64)
    loss = np.log(np.exp(wide).sum(1)) - 0.1 * wide.mean(1) - 0.9 * wide[np.arange(rows), labels.clip(0)]
    words = {"Loss": np.zeros(rows, np.float32), "Logits": x, "Labels": labels, "smoothing": 0.1}
    words |= {"ignored": -100, "n": n, "B": 32}
    check("smoothed_loss", (rows,), words, {"Loss": np.where(labels == -100, 0.0, loss)}, hw)


def int8_product(largest: int, k: int) -> dict[str, Any]:
    m, n = 40, 48
    a, b = (np.random.default_rng(i).integers(-largest, largest + 1, (rows, k)) for i, rows in enumerate((m, n)))
    a[:, 0] = largest
    words = {"A": a.astype(np.int8), "B": b.astype(np.int8), "C": np.zeros((m, n), np.float32)}
    words |= {"Row": np.abs(normal(3, m)), "Column": np.abs(normal(4, n))}
    return words | {"M": m, "N": n, "K": k, "BM": 32, "BN": 32, "BK": 32}


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_int8_products_that_a_loop_adds_up(hw: str) -> None:
    words = int8_product(127, 90)
    wide = words["A"].astype(np.float64) @ words["B"].T.astype(np.float64)
    check("int8_product", (2, 2), words, {"C": wide * words["Row"][:, None] * words["Column"]}, hw)


def test_more_int8_products_than_float32_adds_exactly_are_refused() -> None:
    with pytest.raises(ProgramError, match="adds 2,048 products; float32 adds only 1,04"):
        check("int8_product", (2, 2), int8_product(127, 2048), {}, "h200")
    check("int8_product", (2, 2), int8_product(7, 1088), {}, "h200")


@pytest.mark.parametrize(("hw", "b"), in_turn(DEVICES, (32, 128)))
def test_what_a_program_stores_and_loads_again_is_the_stored_value(hw: str, b: int) -> None:
    rows, n = 6, 70
    x, r, w = normal(1, rows, n, fmt="float16"), normal(2, rows, n, fmt="float16"), normal(3, n, fmt="float16")
    words = {"X": x, "R": r, "Y": np.zeros_like(x), "W": w, "n": n, "eps": 1e-6, "B": b}
    added = x.astype(np.float64) + r
    wanted = added.astype(np.float16) / np.sqrt((added**2).mean(1, keepdims=True) + 1e-6) * w
    done = check("added_norm", (rows,), words, {"X": added, "Y": wanted}, hw)
    assert any("is not loaded again" in note for note in done.notes)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_values_of_one_loop_that_the_next_loads_again(hw: str) -> None:
    rows, n = 6, 70
    x = normal(1, rows, n)
    words = {"X": x, "Normed": np.zeros_like(x), "Y": np.zeros_like(x), "Scale": np.zeros(rows, np.float32)}
    words |= {"n": n, "eps": 1e-6, "SHIFT": 0, "B": 32}
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
    largest = np.abs(normed).max(1)
    wanted = {"Normed": normed, "Scale": largest, "Y": normed / largest[:, None]}
    check("quantised_norm", (rows,), words, wanted, hw)
    with pytest.raises(ProgramError, match="public_kernels"):  # the neighbours of what it has stored
        check("quantised_norm", (rows,), words | {"SHIFT": 1}, {}, hw)


@pytest.mark.parametrize(("hw", "n"), in_turn(DEVICES, (64, 96)))
def test_groups_of_a_row_that_a_reshape_makes(hw: str, n: int) -> None:
    m, size = 5, 32
    x = normal(1, m, n, fmt="float16")
    words = {"X": x, "Y": np.zeros((m, n), np.float32), "Scale": np.zeros((m, n // size), np.float32)}
    words |= {"m": m, "n": n, "GROUPS": 2, "SIZE": size}
    groups = x.astype(np.float64).reshape(m, -1, size)
    largest = np.abs(groups).max(2)
    wanted = {"Y": (groups / largest[..., None]).reshape(m, n), "Scale": largest}
    check("quantised_groups", (-(-n // 64), 3), words, wanted, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_two_results_that_have_no_tensor_in_common(hw: str) -> None:
    rows, heads = 10, 6
    a, b, bias = normal(1, rows, heads), normal(2, rows, heads), normal(3, heads)
    words = {"G": np.zeros_like(a), "Beta": np.zeros_like(a), "A": a, "B": b, "Bias": bias}
    x, wide = a.astype(np.float64) + bias, b.astype(np.float64)
    wanted = {"G": np.where(x <= 2.0, np.log1p(np.exp(x)), x), "Beta": 1 / (1 + np.exp(-wide))}
    check("gates", (3,), words | {"rows": rows, "heads": heads, "BR": 4, "BH": 8}, wanted, hw)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Return halves of the last axis, (tokens, heads, dim), turned by each token's angles."""
    low, high = np.split(x.astype(np.float64), 2, -1)
    cos, sin = (y.astype(np.float64)[:, None] for y in (cos, sin))
    return np.concatenate([low * cos - high * sin, low * sin + high * cos], -1)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_rotation_in_blocks_with_an_axis_of_one_head(hw: str) -> None:
    tokens, heads, d = 7, 4, 32
    q, k, cos, sin = normal(1, tokens, heads, d), normal(2, tokens, 2, d), *(normal(i, tokens, d // 2) for i in (3, 4))
    words = {"Q": q, "K": k, "Cos": cos, "Sin": sin, "tokens": tokens, "HEADS": heads, "GROUP": 2, "D": d, "B": 4}
    check("rotated", (heads, 2), words, {"Q": turned(q, cos, sin), "K": turned(k, cos, sin)}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_pairs_that_are_loaded_as_one_block_and_split(hw: str) -> None:
    tokens, heads, d = 5, 3, 32
    x, turns = normal(1, tokens, heads, d), normal(2, tokens, d // 2, 2)
    pairs = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    halves = turned(pairs, turns[..., 0], turns[..., 1]).reshape(tokens, heads, 2, d // 2)
    words = {"X": x, "Turns": turns, "n_heads": heads, "tokens": tokens, "HEADS": heads, "D": d}
    check("rotated_pairs", (tokens, heads), words, {"X": halves.swapaxes(2, 3).reshape(x.shape)}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_flat_indices_of_tensors_with_other_axes(hw: str) -> None:
    x, y = normal(1, 16, 80), normal(2, 2, 8, 80)
    words = {"X": x, "Y": y, "Z": np.zeros((2, 8, 80), np.float32), "n": x.size, "B": 32}
    check("flat_product", (40,), words, {"Z": x.astype(np.float64).reshape(2, 8, 80) * y}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_mask_hides_elements_before_the_first(hw: str) -> None:
    tokens, d = 11, 32
    x = normal(1, tokens, d)
    words = {"X": x, "Y": np.zeros_like(x), "tokens": tokens, "D": d, "B": 4}
    wide = x.astype(np.float64)
    check("shifted_difference", (3,), words, {"Y": wide - np.concatenate([np.zeros((1, d)), wide[:-1]])}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_maximum_by_a_choice_that_returns_nan(hw: str) -> None:
    x = normal(1, 4, 64)
    x[2, 5] = np.nan
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    words = {"X": x, "Y": np.zeros_like(x), "M": np.zeros(4, np.float32), "n": 64}
    wanted = {"Y": wide / wide.sum(1, keepdims=True), "M": x.max(1)}
    assert np.isnan(wanted["M"]).sum() == 1
    check("softmax_of_graph", (4,), words, wanted, hw)
