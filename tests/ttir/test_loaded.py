"""Masks and rows by loaded integers: results beside float64, on an NPU and a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.kernels.triton.listed import lowest_bit, unlike_rows
from npusim.kernels.triton.ttir_text import Line, Op
from npusim.kernels.triton.values import Affine, Listed, constant
from ttir.test_engines import Launch, check, in_turns, normal

if find_spec("triton") is not None:
    from ttir import loaded_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]


def masks() -> Iterator[tuple[str, Launch]]:
    rng, x = np.random.default_rng(3), normal(0, 10, 50)
    wide = x.astype(np.float64)
    elements = rng.integers(0, 2, (10, 50))
    rows, columns = rng.integers(0, 4, 10).astype(np.int32), rng.integers(-1, 2, 50).astype(np.int8)
    given: dict[str, tuple[Any, Any]] = {
        "elements": (elements.astype(np.bool_), np.where(elements, wide, -1.0)),
        "not elements": (elements.astype(np.int8), np.where(elements == 0, wide, -1.0)),
        "rows": (rows, np.where(rows[:, None] > 1, wide, 2 * wide)),
        "columns": (columns, np.where(columns != 0, wide, 0.0)),
        "factors": (columns, wide * (columns != 0)),
    }
    for how, (mask, wanted) in given.items():
        words = {"X": x, "Mask": mask, "Y": np.zeros_like(x), "M": 10, "N": 50, "BM": 4, "BN": 64, "HOW": how}
        yield how, Launch("chosen", (3,), words, "Y", wanted)


def attention() -> Iterator[tuple[str, Launch]]:
    size, scale, rng = 64, 0.17, np.random.default_rng(5)
    q, k, v = (normal(seed, 2, size, 32, fmt="float16") for seed in range(3))
    matrix = rng.integers(0, 2, (size, size)).astype(np.int8)
    matrix[:, 0] = 1
    keys = rng.integers(0, 2, (2, size)).astype(np.int32)
    keys[:, 0] = 1
    for how, mask in (("matrix", matrix), ("keys", keys)):
        seen = matrix[None] if how == "matrix" else keys[:, None, :]
        scores = np.where(seen, q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
        words = {"Q": q, "K": k, "V": v, "Mask": mask, "O": np.zeros_like(q), "S": size, "scale": scale}
        words |= {"D": 32, "BM": 32, "BN": 32, "HOW": how}
        yield how, Launch("masked_attention", (2, 2), words, "O", wanted)


def sorted_tokens() -> Iterator[tuple[str, Launch]]:
    tokens, top, experts, block, n, k = 20, 2, 4, 16, 48, 64
    rng = np.random.default_rng(7)
    of = np.concatenate([rng.permutation(experts)[:top] for _ in range(tokens)])
    listed, blocks = list[int](), list[int]()
    for expert in range(experts):
        own = [int(i) for i in np.flatnonzero(of == expert)]
        own += [tokens * top] * (-len(own) % block)
        listed += own
        blocks += [expert] * (len(own) // block)
    a, b = normal(0, tokens, k, fmt="float16"), normal(1, experts, n, k, fmt="float16")
    scale = normal(2, tokens * top)
    product = np.stack([a[i // top].astype(np.float64) @ b[of[i]].T.astype(np.float64) for i in range(tokens * top)])
    words = {"A": a, "B": b, "C": np.zeros((tokens * top, n), np.float16), "Scale": scale}
    words |= {"Tokens": np.array(listed, np.int32), "Experts": np.array(blocks, np.int32), "count": tokens * top}
    words |= {"N": n, "K": k, "top": top, "BM": block, "BN": 32, "BK": 32}
    for is_weighted, wanted in ((False, product), (True, product * scale[:, None])):
        launch = Launch("experts", (len(blocks), 2), {**words, "WEIGHTED": is_weighted}, "C", wanted)
        yield "weighted" if is_weighted else "plain", launch


def rows() -> Iterator[tuple[str, Launch]]:
    rng, x = np.random.default_rng(11), normal(0, 30, 40)
    listed = rng.integers(0, 30, 10)
    words = {"X": x, "Rows": listed, "Y": np.zeros((10, 40), np.float32), "M": 10, "N": 40, "BM": 4, "BN": 64}
    yield "rows", Launch("chosen_rows", (3,), words, "Y", 2.0 * x[listed])
    order, moved = rng.permutation(64), np.zeros(64)
    moved[order] = x.ravel()[:64]
    words = {"X": x.ravel()[:64], "Rows": order, "Y": np.zeros(64, np.float32), "B": 32}
    yield "elements", Launch("scattered", (2,), words, "Y", moved)
    batch, heads, size, each = 2, 2, 48, 16
    q = normal(0, batch * each, heads, 32, fmt="float16")
    k, v = (normal(seed, 128, heads, 32, fmt="float16") for seed in (1, 2))
    slots = rng.permutation(128)[: batch * size].reshape(batch, size).astype(np.int32)
    wanted = np.zeros((batch * each, heads, 32))
    for b in range(batch):
        for h in range(heads):
            own = slice(b * each, (b + 1) * each)
            scores = q[own, h].astype(np.float64) @ k[slots[b], h].T.astype(np.float64) * 0.17
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            wanted[own, h] = weights @ v[slots[b], h].astype(np.float64) / weights.sum(-1, keepdims=True)
    words = {"Q": q, "K": k, "V": v, "Slots": slots, "O": np.zeros_like(q), "S": size, "scale": 0.17}
    yield "keys", Launch("listed_keys", (batch, heads), {**words, "D": 32, "BM": each, "BN": 32}, "O", wanted)


@in_turns(masks(), 20)
def test_a_loaded_mask_chooses_elements(launch: Launch, hw: str) -> None:
    check(launch, hw)


@in_turns(attention(), 20)
def test_a_loaded_mask_hides_keys(launch: Launch, hw: str) -> None:
    assert check(launch, hw).numerics.error.rmse < 1e-3


@in_turns(sorted_tokens(), 20)
def test_rows_of_a_product_go_by_sorted_tokens(launch: Launch, hw: str) -> None:
    assert check(launch, hw).numerics.error.rmse < 1e-2


@in_turns(rows(), 20)
def test_rows_go_by_loaded_numbers(launch: Launch, hw: str) -> None:
    assert check(launch, hw).numerics.error.rmse < 1e-3


def test_single_elements_by_a_list_are_said_to_be_timed_as_neighbours() -> None:
    launches = dict(rows())
    why = "single elements that a list selects: memory is timed as if they were adjacent"
    assert [n for n in check(launches["elements"], "h200").notes if why in n]
    assert not [n for n in check(launches["rows"], "h200").notes if why in n]


def test_single_elements_that_follow_one_another_read_each_sector_once() -> None:
    near = np.arange(1 << 14, dtype=np.int32)
    near[5] = 6  # else the numbers are linear
    far, cycles = np.random.default_rng(0).permutation(near), list[int]()
    for i in (near, far):
        words = {"X": np.zeros(i.size + 8, np.float32), "I": i, "Y": np.zeros(i.size, np.float32)}
        with npusim.record() as calls:
            loaded_kernels.offset_elements[(4,)](**words, B=i.size // 4, N=32, HOW="constant")
        timing = npusim.run(calls[0], hw="h200", l2="repeated", numerics=False).timing
        assert timing is not None
        cycles.append(timing.cycles)
    assert cycles[0] < cycles[1]


@pytest.mark.parametrize("how", ["constant", "rows"])
def test_an_offset_is_added_to_loaded_numbers_of_a_flat_tensor(how: str) -> None:
    x, i = normal(0, 128), np.random.default_rng(0).permutation(100 if how == "constant" else 32).astype(np.int32)
    wanted = x[i[:64] + 5] if how == "constant" else x.reshape(4, 32)[:, i[:16]].ravel()
    words = {"X": x, "I": i, "Y": np.zeros(64, np.float32), "B": 16, "N": 32, "HOW": how}
    check(Launch("offset_elements", (4,), words, "Y", wanted), "h200")


def masked_words(i: Any) -> dict[str, Any]:
    return {"X": normal(0, 64, 16), "I": i, "Y": np.zeros((32, 16), np.float32), "n": 27, "B": 16, "D": 16}


def test_numbers_that_a_mask_replaces_are_chosen_from() -> None:
    i = np.random.default_rng(0).permutation(64)[:32].astype(np.int32)
    i[3] = -1
    known = i.copy()
    known[27:] = 5
    words = masked_words(i)
    wanted = words["X"][np.where(known >= 0, known, np.arange(32))]
    check(Launch("rows_of_masked_numbers", (2,), words, "Y", wanted), "h200")


@pytest.mark.parametrize("is_unsigned", [False, True])
def test_numbers_that_a_mask_replaces_are_compared_with_places(*, is_unsigned: bool) -> None:
    i = (np.arange(32) + 1 + np.arange(32) ** 2 % 3).astype(np.int32)
    i[27:] = 0
    words = masked_words(i) | {"UNSIGNED": is_unsigned}
    check(Launch("masked_by_places", (2,), words, "Y", words["X"][:32]), "h200")


def test_numbers_below_0_are_not_compared_without_a_sign() -> None:
    words = masked_words(-1 - np.random.default_rng(0).permutation(32).astype(np.int32)) | {"UNSIGNED": True}
    with pytest.raises(
        ProgramError, match=r"loaded_kernels\.py:\d+: .*are negative, and the kernel compares them as unsigned"
    ):
        check(Launch("masked_by_places", (2,), words, "Y", words["X"][:32]), "h200")


def test_the_last_bit_of_a_list_has_the_constant_that_is_added() -> None:
    op, at = Op("arith.trunci", [], [], "", "", Line("k.py", 7)), Affine(np.zeros((1, 1), np.int64), (1,), (3,))
    listed = Listed(constant(1, (3,), 32), np.array([0, 1, 4]), at, beyond=6)
    mask = lowest_bit(op, listed)
    assert (mask.holds.tolist(), mask.beyond) == ([True, False, True], True)
    with pytest.raises(ProgramError, match=r"k\.py:7: .*takes the last bit of a sum of loaded integers"):
        lowest_bit(op, replace(listed, rest=replace(at, bits=32)))


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_number_below_0_in_place_of_hidden_ones_is_no_address(hw: str) -> None:
    i = np.random.default_rng(0).permutation(64)[:32].astype(np.int32)
    words = masked_words(i)
    wanted = np.where(np.arange(32)[:, None] < words["n"], words["X"][i], 0.0)
    check(Launch("widened_numbers", (2,), words, "Y", wanted), hw)


def test_rows_that_a_loop_omits_are_not_fetched() -> None:
    x = normal(0, 8, 64)
    words = {"X": x, "Y": np.zeros(64, np.float32), "B": 64}
    done = check(Launch("omitted_rows", (1,), words, "Y", x[::3].astype(np.float64).sum(0)), "h200")
    assert done.timing.compulsory_bytes == 3 * 64 * 4


def _losses(hw: str, how: str, label: int = 7) -> tuple[Any, dict[str, Any], Any]:
    """Run a loss whose label's gradient is stored over the tiles; return it, its arguments and both results."""
    from ttir.loaded_kernels import loss_in_place

    x, labels = normal(3, 4, 40), np.array([0, 39, 16, label])
    words = {"X": x.copy(), "L": labels, "LOSS": np.zeros(4, np.float32), "n": 40, "HOW": how, "B": 16}
    with npusim.record(floats=True) as calls:
        loss_in_place[(4,)](**words)
    wide, rows = x.astype(np.float64), np.arange(4)
    total = np.exp(wide).sum(1)
    gradients = np.exp(wide) / total[:, None]
    gradients[rows, labels % 40] -= 1
    done = npusim.run(calls[0], hw=hw, rows="all")
    return done, words, (gradients, np.log(total) - wide[rows, labels % 40])


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_an_element_that_is_stored_over_the_tiles_of_a_loop_is_the_last(hw: str) -> None:
    from ttir.stored import stored

    done, words, wanted = _losses(hw, "")
    made = stored(done, words)
    assert np.abs(made["X"] - wanted[0]).max() < 1e-6
    assert np.abs(made["LOSS"] - wanted[1]).max() < 2e-6


@pytest.mark.parametrize(
    ("how", "label", "why"),
    [
        ("no barrier", 7, "X is stored to and also accessed elsewhere"),  # which of two threads stores last is free
        ("loaded again", 7, "X: one access selects rows by loaded integers and another does not"),
        ("returns", 7, "some programs return, or skip a store, after an earlier store"),
        ("another row", 7, "X is stored to and also accessed elsewhere"),
        ("beyond", 7, r"after a loop, program \(1, 0, 0\) stores an element that is in none of the loop's tiles"),
    ],
)
def test_an_element_whose_order_is_free_or_that_no_tile_has_is_refused(how: str, label: int, why: str) -> None:
    with pytest.raises(ProgramError, match=rf"loaded_kernels\.py:\d+: {why}"):
        _losses("h200", how, label)


def test_matrices_of_unlike_experts_are_each_read_from_memory() -> None:
    from ttir.loaded_kernels import experts

    count, block, n, k = 64, 16, 256, 4096
    tokens = np.where(np.arange(count * block) % block, count, np.arange(count * block) // block).astype(np.int32)
    matrices = np.zeros((count, n, k), np.float16)
    words: dict[str, Any] = {
        "A": np.zeros((count, k), np.float16),
        "B": matrices,
        "C": np.zeros((count, n), np.float16),
    }
    words |= {
        "Scale": np.ones(count, np.float32),
        "Tokens": tokens,
        "Experts": np.arange(count, dtype=np.int32)[::-1] % 60,
    }
    words |= {"count": count, "N": n, "K": k, "top": 1, "BM": block, "BN": 128, "BK": 128, "WEIGHTED": False}
    with npusim.record() as calls:
        experts[(count, 2)](**words)
    rate = 4.8e12  # bytes a second that an H200's memory has
    read = matrices.nbytes * 60 / count
    assert npusim.run(calls[0], hw="h200", numerics=False).latency_us > read / rate * 1e6


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("columns", [64, 128])
def test_scales_that_several_tiles_share_are_read(hw: str, columns: int) -> None:
    from ttir.loaded_kernels import experts_by_groups
    from ttir.stored import stored

    rng, n, k, group = np.random.default_rng(5), 128, 256, 64
    a, b = rng.standard_normal((32, k)).astype(np.float16), rng.standard_normal((3, n, k)).astype(np.float16)
    left, right = (rng.random(s).astype(np.float32) + 0.5 for s in ((32, k // group), (3, n // group, k // group)))
    expert = np.array([2, 0], np.int32)
    words: dict[str, Any] = {"A": a, "B": b, "C": np.zeros((32, n), np.float32), "Experts": expert}
    words |= {"ScaleA": left, "ScaleB": right}
    with npusim.record(floats=True) as calls:
        experts_by_groups[(2, n // columns)](**words, N=n, K=k, BM=16, BN=columns, BK=32, G=group)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), words)["C"]
    wide = b.astype(np.float64) * right.repeat(group, 1).repeat(group, 2)
    rows = a.astype(np.float64) * left.repeat(group, 1)
    wanted = np.concatenate([rows[16 * i : 16 * i + 16] @ wide[e].T for i, e in enumerate(expert)])
    assert np.abs(made - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("both", [False, True])
def test_programs_that_do_not_enter_a_loop_store_what_is_behind_it(hw: str, *, both: bool) -> None:
    from ttir.loaded_kernels import in_loops
    from ttir.stored import stored

    x, flags = normal(0, 6, 20), np.array([0, 1, 0, 1, 1, 0], np.int32)
    words: dict[str, Any] = {"X": x, "F": flags, "Y": np.zeros_like(x), "S": np.zeros(6, np.float32), "n": 20}
    with npusim.record(floats=True) as calls:
        in_loops[(6,)](**words, B=32, BOTH=both)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), words)
    if both:
        assert np.array_equal(made["Y"], (x * np.where(flags, 2, 3)[:, None].astype(np.float32)).astype(np.float64))
    else:
        assert np.array_equal(made["Y"][flags == 1], 2.0 * x[flags == 1].astype(np.float64))
        assert np.abs(made["S"] - x.astype(np.float64).sum(1)).max() < 1e-5


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_block_meets_itself_by_rows_and_columns(hw: str) -> None:
    from ttir import loaded_kernels as kernels
    from ttir.stored import stored

    k, g = normal(0, 64, 2, 16).astype(np.float16), normal(1, 64, 2).astype(np.float32)
    given = {"K": k, "G": g, "A": np.zeros((64, 2, 16), np.float32), "Z": k}
    with npusim.record(floats=True) as calls:
        kernels.gated_by_itself[(4, 2)](**given, H=2, S=16, C=16, IN_PLACE=False)
    result = npusim.run(calls[0], hw=hw, rows="all")
    by_chunk = k.astype(np.float64).reshape(4, 16, 2, 16).transpose(0, 2, 1, 3)
    by = g.astype(np.float64).reshape(4, 16, 2).transpose(0, 2, 1)
    difference = by[..., :, None] - by[..., None, :]
    wanted = np.where((difference <= 0) & (np.tri(16, 16, -1) > 0), np.exp(difference), 0)
    wanted = (wanted * (by_chunk @ by_chunk.swapaxes(-1, -2))).transpose(0, 2, 1, 3).reshape(64, 2, 16)
    assert np.abs(stored(result, given)["A"] - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert sum("loads it twice and times both loads" in n for n in result.notes) == 1


def test_a_block_that_meets_itself_is_not_loaded_again_where_the_kernel_stores_to_its_tensor() -> None:
    from ttir import loaded_kernels as kernels

    k, g = normal(0, 64, 2, 16).astype(np.float16), normal(1, 64, 2).astype(np.float32)
    with npusim.record(floats=True) as calls:
        kernels.gated_by_itself[(4, 2)](K=k, G=g, A=g, Z=k, H=2, S=16, C=16, IN_PLACE=True)
    with pytest.raises(
        ProgramError, match=r"loaded_kernels\.py:\d+: the rows and the columns of a tl.dot's result are the same"
    ):
        npusim.run(calls[0], hw="h200")


def test_unlike_rows_are_in_the_order_of_their_integers() -> None:
    rows = np.random.default_rng(0).integers(-2, 2, (40, 3)) * (1 << 40)
    kinds, of_each = unlike_rows(rows)
    wanted, numbers = np.unique(rows, axis=0, return_inverse=True)
    assert np.array_equal(kinds, wanted)
    assert np.array_equal(of_each, numbers.reshape(-1))


def _groups(size: int, end: int, *, masked: bool) -> tuple[Any, dict[str, Any]]:
    from ttir import loaded_kernels as kernels

    x, w = normal(0, 12, size).astype(np.float32), normal(1, 4).astype(np.float32)
    given = {"X": x, "W": w, "Y": np.zeros((12, end), np.float32)}
    with npusim.record(floats=True) as calls:
        kernels.groups_normalized[(3,)](**given, S=size, N=end, R=4, B=16, MASKED=masked)
    return calls[0], given


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("size", [64, 56])
def test_a_block_that_a_loop_adds_up_is_summed_along_both_axes_behind_it(hw: str, size: int) -> None:
    """Of rows of 56 elements a mask hides the last columns of the last tile."""
    from ttir.stored import stored

    call, given = _groups(size, 64, masked=size < 64)
    x = given["X"].astype(np.float64)
    mean = x.reshape(3, 4 * size).mean(1).repeat(4)[:, None]
    wanted = (x - mean) * np.tile(given["W"], 3)[:, None]
    done = npusim.run(call, hw=hw, rows="all")
    assert np.abs(stored(done, given)["Y"][:, :size] - wanted).max() < 1e-5
    without = {n: replace(x, data=None) for n, x in call.tensors.items()}
    for one in (done, npusim.run(replace(call, arguments={**call.arguments, **without}), hw=hw, rows="all")):
        assert one.numerics is not None
        assert one.numerics.error.rmse is not None  # of all columns, those that the mask hides too
        assert one.numerics.error.rmse < 1e-6
