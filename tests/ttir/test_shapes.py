"""Loops that store their states, and blocks along other axes than a tensor's last two: every result beside float64."""

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
#: Relative RMSE of results by format.
CLOSE = {"float32": 1e-6, "float16": 6e-4}


def normal(seed: int, *shape: int, fmt: str = "float32", scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(fmt)


def zeros(*shape: int, fmt: str = "float32") -> Any:
    return np.zeros(shape, fmt)


def check(
    name: str,
    grid: tuple[int, ...],
    words: dict[str, Any],
    wanted: dict[str, Any],
    hw: str,
    close: float = 0,
    **how: Any,
) -> Any:
    """Run a launch; every element of each result is near its value in float64, NaN where no program stores."""
    from ttir import shape_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(shape_kernels, name)[grid](**words, **how)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made = stored(done, words)
    assert made.keys() == wanted.keys()
    for result, exact in wanted.items():
        x, right = made[result], np.asarray(exact, np.float64)
        assert np.array_equal(np.isnan(x), np.isnan(right)), result
        is_number = ~np.isnan(right)
        error = np.sqrt(((x - right)[is_number] ** 2).mean() / (right[is_number] ** 2).mean())
        assert error < (close or CLOSE[str(words[result].dtype)]), result
    assert done.latency_us > 0
    view = done.program.tensors["o"].view  # errors are those of the first result, of all of its splits
    others = (t for n, t in done.program.tensors.items() if t.role == "output" and n != "o")
    if view.parameter not in {t.view.parameter for t in others}:
        assert done.numerics.error.count == np.count_nonzero(~np.isnan(made[view.parameter])), view.parameter
    return done


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("is_back", [False, True])
def test_a_state_is_stored_for_each_token_of_sequences(is_back: bool, hw: str) -> None:
    starts, count = np.array([0, 7, 7, 12], np.int32), 40  # one of them is empty
    x, g = normal(0, 12, count, fmt="float16"), -np.abs(normal(1, 12, count, fmt="float16"))
    wide, decay, exact = x.astype(np.float64), np.exp(g.astype(np.float64)), np.zeros((12, count))
    for first, last in ((0, 7), (7, 12)):
        state, tokens = np.zeros(count), range(first, last)
        for t in reversed(tokens) if is_back else tokens:
            state = decay[t] * state + wide[t]
            exact[t] = state
    words = {"X": x, "G": g, "Y": np.zeros_like(x), "Starts": starts, "D": count, "B": 32, "BACK": is_back}
    check("decayed", (2, 3), words, {"Y": exact}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_states_of_chunks_are_stored_before_each_and_behind_the_last(hw: str) -> None:
    k, v = (normal(seed, 2, 112, 2, 32, fmt="float16") for seed in range(2))
    states, last = np.zeros((2, 4, 2, 32, 32)), np.zeros((2, 2, 32, 32))
    for c in range(4):
        states[:, c] = last
        here = slice(32 * c, min(112, 32 * c + 32))
        last = last + np.einsum("bthk,bthv->bhkv", *(x[:, here].astype(np.float64) for x in (k, v)))
    words = {"K": k, "V": v, "H": zeros(*states.shape, fmt="float16"), "Last": zeros(*last.shape)}
    words |= {"T": 112, "N": 2, "D": 32, "BT": 32}
    check("states_of_chunks", (2, 2), words, {"H": states, "Last": last}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_stores_its_state_and_what_it_computes_with_it(hw: str) -> None:
    k, v, w = (normal(seed, 96, 32, fmt="float16", scale=0.3) for seed in range(3))
    states, values, state = np.zeros((3, 32, 32)), np.zeros((96, 32)), np.zeros((32, 32))
    for c in range(3):
        here = slice(32 * c, 32 * c + 32)
        states[c] = state
        rounded = state.astype(np.float16).astype(np.float64)
        values[here] = v[here].astype(np.float64) - w[here].astype(np.float64) @ rounded
        fed = values[here].astype(np.float16).astype(np.float64)
        state = state + k[here].astype(np.float64).T @ fed
    words = {"K": k, "V": v, "W": w, "H": zeros(3, 32, 32, fmt="float16"), "U": np.zeros_like(v)}
    words |= {"T": 96, "D": 32, "BV": 16, "BT": 32}
    check("corrected", (2,), words, {"H": states, "U": values}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_rows_are_stored_beside_a_sum_of_each_programs_rows(hw: str) -> None:
    x, w, r = normal(0, 11, 50, fmt="float16"), normal(1, 50), normal(2, 11)
    wide, weights = x.astype(np.float64), w.astype(np.float64)
    exact = wide * weights * r[:, None] - (wide * weights).sum(1, keepdims=True) * wide
    sums = np.array([(wide * r[:, None])[i : i + 4].sum(0) for i in (0, 4, 8)])
    words = {"X": x, "W": w, "R": r, "Y": np.zeros_like(x), "P": zeros(3, 50), "rows": 11, "n": 50, "EACH": 4, "B": 64}
    check("gradients", (3,), words, {"Y": exact, "P": sums}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_stores_tiles_and_leaves_a_sum(hw: str) -> None:
    x, z = normal(0, 5, 300), normal(1, 5, 300)
    words = {"X": x, "Z": z, "Y": np.zeros_like(x), "L": zeros(5), "n": 300, "B": 128}
    exact = np.abs(x.astype(np.float64) - z).sum(1)
    check("distances", (5,), words, {"Y": np.where(x > z, 0.25, -0.25), "L": exact}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_sums_down_a_state_token_by_token(hw: str) -> None:
    q, k, v = (normal(seed, 9, 16, scale=0.3) for seed in range(3))
    beta, state, exact = np.abs(normal(3, 9)), np.zeros((16, 16)), np.zeros((9, 16))
    for t in range(9):
        kt = k[t].astype(np.float64)
        state = state + np.outer(kt, (v[t] - kt @ state) * beta[t])
        exact[t] = q[t].astype(np.float64) @ state
    words = {"Q": q, "K": k, "V": v, "Beta": beta, "O": np.zeros_like(q), "Last": zeros(16, 16)}
    check("delta_of_tokens", (2,), {**words, "T": 9, "D": 16, "BV": 8}, {"O": exact, "Last": state}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_weights_are_summed_down_queries_tile_by_tile(hw: str) -> None:
    q, k = (normal(seed, 64, 32, fmt="float16") for seed in range(2))
    scores = q.astype(np.float64) @ k.astype(np.float64).T * 0.125
    largest = (scores.max(1) + 1).astype(np.float32)
    exact = np.where(np.tri(64), np.exp(scores - largest[:, None]), 0).sum(0)
    words = {"Q": q, "K": k, "L": largest, "Y": zeros(64), "rows": 64, "D": 32, "BM": 16, "BN": 32}
    check("weights_of_keys", (2,), words, {"Y": exact}, hw, 5e-6)


def test_values_summed_down_keys_beside_numbers_that_the_loop_carries() -> None:
    scores, v = normal(0, 3, 50), normal(1, 50, 16, fmt="float16")
    words = {"P": scores, "V": v, "O": zeros(3, 16), "n": 50, "D": 16, "BN": 32}
    weights = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    wanted = weights @ v.astype(np.float64) / weights.sum(1, keepdims=True)
    check("weighted_values", (3,), words, {"O": wanted}, "h200")


@pytest.mark.parametrize("hw", DEVICES)
def test_cumulative_sums_down_rows(hw: str) -> None:
    x = normal(0, 30, 50)
    words = {"X": x, "Y": np.zeros_like(x), "M": 30, "n": 50, "BM": 32, "BN": 32}
    check("summed_down", (2,), words, {"Y": np.cumsum(x.astype(np.float64), 0)}, hw, 3e-6)


@pytest.mark.parametrize("hw", DEVICES)
def test_blocks_across_the_rows_of_a_tensor(hw: str) -> None:
    x, b = normal(0, 20, 50), normal(1, 50)
    exact = x.astype(np.float64) + b
    exact = exact / (1 + (exact**2).sum(0))
    words = {"X": x, "B": b, "Y": np.zeros_like(x), "M": 20, "n": 50, "BM": 32, "BN": 32}
    done = check("across", (2,), words, {"Y": exact}, hw)
    assert any("X: a block across the rows of its tensor is timed as a block along the rows" in n for n in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
def test_blocks_of_three_axes_are_those_of_two_for_each_head(hw: str) -> None:
    x, c, s, scale = normal(0, 20, 3, 32), normal(1, 20, 16), normal(2, 20, 16), normal(3, 4)
    a, b = (x.astype(np.float64)[..., i : i + 16] for i in (0, 16))
    cos, sin = c[:, None], s[:, None]
    exact = np.concatenate([a * cos - b * sin, a * sin + b * cos], -1) * scale[:3, None]
    words = {"X": x, "Cos": c, "Sin": s, "Scale": scale, "Y": np.zeros_like(x), "T": 20, "heads": 3}
    done = check("rotated_heads", (2,), {**words, "BS": 16, "BH": 4, "HALF": 16}, {"Y": exact}, hw)
    assert any("npusim treats a block of three axes as 4 programs with blocks of two axes" in n for n in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_sum_along_one_of_three_axes(hw: str) -> None:
    x = normal(0, 20, 3, 32)
    words = {"X": x, "Y": zeros(20, 3), "T": 20, "heads": 3, "BS": 16, "BH": 4, "D": 32}
    check("norms_of_heads", (2,), words, {"Y": (x.astype(np.float64) ** 2).sum(2)}, hw)


def test_sums_over_more_than_one_of_three_axes_are_refused() -> None:
    words = {"X": normal(0, 8, 4, 16), "Y": zeros(16), "BS": 8, "BH": 4, "D": 16}
    with pytest.raises(ProgramError, match=r"shape_kernels\.py:\d+: "):
        check("joined_heads", (1,), words, {"Y": words["X"].sum((0, 1))}, "h200")


@pytest.mark.parametrize("hw", DEVICES)
def test_every_second_element_of_a_row(hw: str) -> None:
    x, c, s = normal(0, 7, 32), normal(1, 7, 16), normal(2, 7, 16)
    a, b, exact = x[:, ::2].astype(np.float64), x[:, 1::2].astype(np.float64), np.empty((7, 32))
    exact[:, ::2], exact[:, 1::2] = a * c - b * s, a * s + b * c
    words = {"X": x, "Cos": c, "Sin": s, "Y": np.zeros_like(x), "HALF": 16}
    notes = check("turned_pairs", (7,), words, {"Y": exact}, hw).notes
    assert (
        sum(n.endswith(": the block's elements are 2 apart, but the time is that of adjacent elements") for n in notes)
        == 2
    )


@pytest.mark.parametrize("hw", DEVICES)
def test_groups_of_a_row_are_rows_of_a_block(hw: str) -> None:
    x = normal(0, 6, 3, 32)
    groups = x.astype(np.float64).reshape(6, 3, 4, 8)
    largest = np.abs(groups).max(-1)
    words = {"X": x, "Y": np.zeros_like(x), "S": zeros(6, 3, 4), "heads": 3, "G": 4, "D": 8}
    exact = (groups / largest[..., None]).reshape(x.shape)
    check("groups_of_a_row", (6, 3), words, {"Y": exact, "S": largest}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_pieces_of_a_row_of_which_the_last_is_smaller(hw: str) -> None:
    x = normal(0, 5, 200)
    parts = [x[:, i : i + 128].astype(np.float64) for i in (0, 128)]
    exact = np.stack([np.log(np.exp(p).sum(1)) for p in parts], 1)
    check("pieces", (5, 2), {"X": x, "Z": zeros(5, 2), "n": 200, "B": 128}, {"Z": exact}, hw)


def scores_of(q: Any, k: Any) -> Any:
    """Return the scores of queries and keys in float64."""
    return q.astype(np.float64) @ k.astype(np.float64).T * 0.2


def cached(hides: int) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    q, k, v = (normal(seed, n, 32, fmt="float16") for seed, n in ((0, 50), (1, 70), (2, 70)))
    scores = scores_of(q, k)
    scores = np.where(np.arange(50)[:, None] + 20 >= np.arange(70), scores, -np.inf)
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    exact = weights @ v.astype(np.float64) / weights.sum(1, keepdims=True)
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "Cached": np.array([20], np.int32), "S": 70}
    if hides:  # one key more, which is 0 where the loads of the query's block end
        ends = np.minimum(np.arange(50) // 32 * 32 + 52, 70)[:, None]
        keys, every = np.arange(71), np.pad(scores_of(q, k), ((0, 0), (0, 1)))
        every = np.where(np.arange(50)[:, None] + 21 >= keys, np.where(keys < ends, every, 0.0), -np.inf)
        weights = np.exp2(every - every.max(1, keepdims=True))
        exact = np.where(keys < ends, weights, 0.0)[:, :70] @ v.astype(np.float64) / weights.sum(1, keepdims=True)
    return (2,), {**words, "scale": 0.2, "HIDES": hides, "D": 32, "BM": 32, "BN": 32}, {"O": exact}


@pytest.mark.parametrize("hw", DEVICES)
def test_a_causal_mask_hides_the_keys_that_loads_leave_out(hw: str) -> None:
    check("behind_a_cache", *cached(0), hw, 2e-3)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_mask_shows_keys_that_loads_leave_out(hw: str) -> None:
    grid, words, wanted = cached(1)
    checked("shape_kernels", "behind_a_cache", grid, words, wanted, hw, close=2e-3)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_of_one_store_is_an_if(hw: str) -> None:
    x, counts = normal(0, 3, 128), np.array([20, 64, 100], np.int32)
    sums, largest = np.full((3, 2), np.nan), np.full((3, 2), np.nan)
    for row, count in enumerate(counts):
        for split in range(2):
            part = x[row, split * 64 : min(split * 64 + 64, count)].astype(np.float64)
            if len(part):
                sums[row, split], largest[row, split] = part.sum(), part.max()
    words = {"X": x, "Y": zeros(3, 2), "L": zeros(3, 2), "Counts": counts, "n": 128, "B": 32}
    check("some_splits", (3, 2), words, {"Y": sums, "L": largest}, hw)


def test_a_loop_stores_a_vector_before_a_tile() -> None:
    x = normal(0, 4, 16)
    words = {"X": x, "Y": np.zeros_like(x), "S": zeros(4), "T": 4, "D": 16}
    check("vector_before_tile", (1,), words, {"Y": np.cumsum(x, 0), "S": x.sum(1)}, "h200")


def test_sums_down_the_rows_of_a_product_are_refused_at_the_product() -> None:
    a, b = normal(0, 32, 16, fmt="float16"), normal(1, 16, 64, fmt="float16")
    words = {"A": a, "B": b, "Y": zeros(64), "M": 32, "K": 16, "N": 32}
    with pytest.raises(ProgramError, match=r"shape_kernels\.py:\d+: .*: a product needs tiles with two axes"):
        check("products_down", (2,), words, {"Y": zeros(64)}, "h200")


def _hand_sum(x: Any, *, in_rows: bool) -> Any:
    """Return the sum of 8 rows of 16 as code for an H200 adds it: an element in each of 32 lanes of 4 warps."""

    def halves(values: Any) -> Any:
        while values.shape[-1] > 1:
            middle = values.shape[-1] // 2
            values = values[..., :middle] + values[..., middle:]
        return values[..., 0]

    if in_rows:  # rows; the two rows of each warp, and then the warps
        return halves(halves(halves(x).reshape(-1, 4, 2)))
    return halves(halves(x.reshape(-1, 4, 32)))


@pytest.mark.parametrize("in_rows", [True, False])
def test_a_sum_along_both_axes_adds_as_compiled_code_does(in_rows: bool) -> None:
    """A block of several rows is one row of its elements; its last rows may be hidden."""
    for rows in (8, 6):
        words = {"X": normal(0, 40, rows, 16), "W": normal(1, rows), "Y": zeros(40, rows, 16), "SUMS": zeros(40)}
        x = np.zeros((40, 8, 16), np.float32)
        x[:, :rows] = words["X"]
        sums = _hand_sum(x, in_rows=in_rows)
        made = (words["X"] - sums[:, None, None]) * words["W"][:, None]
        how = {"rows": rows, "columns": 16, "ROWS": 8, "COLUMNS": 16, "IN_ROWS": in_rows}
        done = check("centred_groups", (40,), words, {"Y": made, "SUMS": sums}, "h200", 1e-9, **how)
        assert any("as one row of elements" in note for note in done.notes)
    assert not np.array_equal(_hand_sum(x, in_rows=True), _hand_sum(x, in_rows=False))
    wanted = {"Y": made, "SUMS": sums}
    check("centred_groups", (40,), words, wanted, "ascend_910b2", **how)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_sum_along_both_axes_of_hidden_columns_is_stored_element_by_element(hw: str) -> None:
    x, w = normal(0, 4, 8, 15), normal(1, 8)
    words = {"X": x, "W": w, "Y": zeros(4, 8, 15), "SUMS": zeros(4)}
    how = {"rows": 8, "columns": 15, "ROWS": 8, "COLUMNS": 16, "IN_ROWS": True}
    total = x.astype(np.float64).sum((1, 2))
    wanted = {"Y": (x - total[:, None, None]) * w[:, None].astype(np.float64), "SUMS": total}
    checked("shape_kernels", "centred_groups", (4,), words | how, wanted, hw)


def test_a_row_with_an_axis_of_one_is_added_where_its_threads_have_it() -> None:
    """``tl.sum`` of a block of one row leaves four neighbours in each thread, as they were loaded."""
    words = {"X": normal(0, 20, 1, 1024), "W": normal(1, 1), "Y": zeros(20, 1, 1024), "SUMS": zeros(20)}
    parts = words["X"].reshape(20, 2, 4, 32, 4).transpose(0, 2, 3, 1, 4).reshape(20, 4, 32, 8)
    own = parts[..., 0]
    for i in range(1, 8):
        own = own + parts[..., i]
    while own.ndim > 1:
        middle = own.shape[-1] // 2
        own = own[..., :middle] + own[..., middle:] if middle else own[..., 0]
    how = {"rows": 1, "columns": 1024, "ROWS": 1, "COLUMNS": 1024, "IN_ROWS": False}
    made = (words["X"] - own[:, None, None]) * words["W"]
    check("centred_groups", (20,), words, {"Y": made, "SUMS": own}, "h200", 1e-9, **how)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("block", [32, 64])
def test_each_group_has_its_own_weights_beside_tiles_that_a_loop_stores(hw: str, block: int) -> None:
    """Of one iteration, the weights of a second one are none that the reference reads."""
    words = {"X": normal(0, 1, 4, 64), "W": normal(1, 16), "Y": zeros(1, 4, 64)}
    x = words["X"].astype(np.float64)
    made = (x - x.sum(2, keepdims=True)) * words["W"].repeat(16).reshape(4, 64)
    check("groups_in_tiles", (4,), words, {"Y": made}, hw, SIZE=64, EACH=16, CHANNELS=4, B=block)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (1, 20), (4, 32)])
def test_split_and_joined_neighbours_are_even_and_odd_elements(hw: str, rows: int, size: int) -> None:
    """``tl.split`` of pairs, ``tl.interleave`` and ``tl.join``; a mask hides the last pairs."""
    words = {"X": normal(0, 8, size, fmt="float16"), "C": normal(1, 8, size // 2), "S": normal(2, 8, size // 2)}
    words["Y"] = zeros(8, size, fmt="float16")
    (a, b), c, s = (words["X"][:, i::2].astype(np.float64) for i in (0, 1)), words["C"], words["S"]
    made = np.stack([a * c - b * s, b * c + a * s], -1).reshape(8, size)
    check("rotated_neighbours", (8 // rows,), words, {"Y": made}, hw, D=size, B=32, ROWS=rows)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_two_products_read_one_tile_of_the_last_columns(hw: str) -> None:
    from ttir import shape_kernels

    draw = np.random.default_rng(0)
    a, w = (draw.standard_normal(shape).astype(np.float16) for shape in ((32, 32), (32, 45)))
    words = {"A": a, "W": w, "C": np.zeros((32, 45), np.float32), "M": 32, "N": 45, "K": 32}
    with npusim.record(floats=True) as calls:
        shape_kernels.two_products_of_one_pair[(1, 2)](**words, BM=32, BN=32, BK=16)
    first, last = (a[:, k : k + 16].astype(float) @ w[k : k + 16].astype(float) for k in (0, 16))
    done = npusim.run(calls[0], hw=hw, rows="all")
    assert np.abs(np.reshape(done.output, (32, 45)) - (first + 2 * last)).max() < 1e-4
