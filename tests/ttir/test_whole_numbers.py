"""Programs that do unlike things, integers as values of tiles, choices by indices: against float64, or refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim import formats
from npusim.errors import ProgramError
from ttir.interpreter import Open, interpret
from ttir.stored import stored

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _run(kernel: str, grid: tuple[int, ...], hw: str = "h200", **words: Any) -> tuple[Any, dict[str, Any]]:
    from ttir import whole_kernels as kernels

    with npusim.record(floats=True) as calls:
        getattr(kernels, kernel)[grid](**words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    return done, stored(done, words)


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_row_that_another_program_stores_by_another_name_is_not_read() -> None:
    x = _drawn(128)
    why = r"X and Y share memory, and program \(0, 0, 0\) loads an element that program \(1, 0, 0\) stores to at"
    with pytest.raises(ProgramError, match=why):
        _run("doubled_by_name", (7,), X=x[16:], Y=x, B=16)
    for source in (x, x[16:].copy()):
        _, made = _run("doubled_by_name", (7,), X=source, Y=x, B=16)
        assert np.array_equal(made["Y"][:112], 2 * source[:112])


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_from_the_last_tile_to_the_first_stores_all_of_them(hw: str) -> None:
    x = _drawn(8, 64)
    _, made = _run("from_the_last", (8,), hw, X=x, Y=np.zeros_like(x), N=64, B=16)
    tiles = x.astype(np.float64).reshape(8, 4, 16)
    wanted = np.cumsum(tiles[:, ::-1], 1)[:, ::-1].reshape(8, 64)
    assert np.abs(made["Y"] - wanted).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_choices_between_blocks_by_indices(hw: str) -> None:
    x, z, j = _drawn(8, 60), _drawn(8, 60, seed=1), np.arange(60)
    by_program = (j + np.arange(8)[:, None]) % 2 == 0
    wanted = (
        np.where(j % 2 == 0, -x, x.astype(np.float64) * z),
        np.where(j < 16, 2.0, 5.0) * x,
        np.where(by_program, x, z),
    )
    for kind, values in enumerate(wanted):
        _, made = _run("chosen_blocks", (8,), hw, X=x, Z=z, Y=np.zeros_like(x), N=60, B=64, KIND=kind)
        assert np.abs(made["Y"] - values).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_that_do_unlike_things_are_read_kind_by_kind(hw: str) -> None:
    x, z, p = _drawn(8, 60), _drawn(8, 60, seed=1), np.arange(8)[:, None]
    done, made = _run("by_program", (8,), hw, X=x, Z=z, Y=np.zeros_like(x), N=60, B=64)
    wanted = np.where(p % 3 == 0, x - x.max(1, keepdims=True), np.where(p % 3 == 1, 2 * z, 0))
    assert np.array_equal(made["Y"], wanted)
    assert [n for n in done.notes if "treats the kernel as 3 kernels, of 3, 2, 3 programs" in n]
    _, made = _run("stored_by_program", (8,), hw, X=x, Z=z, Y=np.zeros_like(x), N=60, B=64)
    assert np.array_equal(made["Y"], np.where(p >= 5, 2 * x, x - z))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (0, r"Y: program \(1, 0, 0\) loads an element that program \(0, 0, 0\) stores to at .*:\d+: the order"),
        (1, r"Y: program \(1, 0, 0\) stores to an element that program \(0, 0, 0\) stores to at .*:\d+: the last"),
        (2, r"Y: program \(1, 0, 0\) stores to an element that program \(0, 0, 0\) stores to at .*:\d+: the last"),
        (4, "Q: some programs load these integers, and others store to them at"),
    ],
)
def test_kinds_of_programs_that_meet_in_a_tensor_are_refused(kind: int, why: str) -> None:
    words = {"X": _drawn(6, 20), "Y": np.full((6, 20), 7, np.float32), "Z": np.zeros((3, 20), np.float32)}
    with pytest.raises(ProgramError, match=rf"whole_kernels\.py:\d+: {why}"):
        _run("kinds_that_meet", (6,), **words, Q=np.full(3, 9, np.int32), N=20, B=32, KIND=kind)


def test_kinds_of_programs_that_never_meet_in_a_tensor_are_read() -> None:
    x, y = _drawn(6, 20), _drawn(6, 20, seed=1)
    words = {"X": x, "Y": y, "Z": np.zeros((3, 20), np.float32), "Q": np.zeros(3, np.int32)}
    _, made = _run("kinds_that_meet", (6,), **words, N=20, B=32, KIND=3)
    assert np.array_equal(made["Z"], y[3:] + np.float32(1))
    assert np.array_equal(made["Y"][:3], 2 * x[::2])


def test_kinds_of_programs_whose_elements_are_too_many_to_look_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton import shared_memory

    words = {"X": _drawn(6, 20), "Y": _drawn(6, 20), "Z": np.zeros((3, 20), np.float32), "Q": np.zeros(3, np.int32)}
    monkeypatch.setattr(shared_memory, "MOST_ELEMENTS", 10)
    _run("kinds_that_meet", (6,), **words, N=20, B=32, KIND=3)  # ranges that do not meet are known without
    with pytest.raises(
        ProgramError,
        match=r"programs take different branches, and npusim does not check whether a program stores to an element",
    ):
        _run("kinds_that_meet", (6,), **words, N=20, B=32, KIND=1)


def test_programs_whose_loop_has_no_iteration_store_what_it_begins_with() -> None:
    x, count = _drawn(5, 100), np.array([100, 0, 37, 64, 0], np.int32)
    words = {"X": x, "COUNT": count, "Y": np.ones(5, np.float32), "L": np.ones(5, np.float32), "N": 100, "B": 32}
    _, made = _run("sums_of_some", (5,), **words)
    rows = [x[i, :n].astype(np.float64) for i, n in enumerate(count)]
    assert np.array_equal(made["L"], [r.max(initial=-np.inf) for r in rows])
    wanted = [np.exp(r - r.max()).sum() if len(r) else 0.0 for r in rows]
    assert np.abs(made["Y"] - wanted).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(
    ("kind", "function"),
    list(enumerate((np.ceil, np.floor, lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v), np.rint))),
)
def test_functions_to_whole_numbers_have_all_bits(hw: str, kind: int, function: Any) -> None:
    edges = [0.0, -0.0, -0.3, 0.3, -0.5, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e30, 0.49999997, -0.49999997]
    edges += [8388607.5, -8388607.5, 8388608.0, 4194304.5, 4194303.5]
    x = np.concatenate([np.array(edges, np.float32), 10 * _drawn(200), 1e6 * _drawn(36)]).astype(np.float32)
    _, made = _run("whole", (4,), hw, X=x, Y=np.zeros_like(x), B=64, KIND=kind)
    got, wanted = made["Y"].astype(np.float32), function(x.astype(np.float64)).astype(np.float32)
    is_nan = np.isnan(wanted)
    assert np.array_equal(got.view(np.uint32)[~is_nan], wanted.view(np.uint32)[~is_nan]) and np.isnan(got[is_nan]).all()


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("rounds", [True, False])
def test_floats_as_int8_are_cut_toward_0(hw: str, rounds: bool) -> None:
    x = _drawn(6, 100)
    words = {"X": x, "Q": np.zeros((6, 100), np.int8), "S": np.zeros(6, np.float32), "N": 100, "B": 128}
    _, made = _run("quantized", (6,), hw, **words, ROUNDS=rounds)
    divided = formats.div_full if hw == "h200" else np.divide  # a GPU's is an instruction that does not round correctly
    scale = divided(np.abs(x).max(1), np.full(6, 127, np.float32))
    ratio = divided(x, np.broadcast_to(scale[:, None], x.shape).copy())
    whole = np.copysign(np.floor(np.abs(ratio) + 0.5), ratio) if rounds else np.trunc(ratio)
    assert np.array_equal(made["S"], scale)
    assert np.array_equal(made["Q"], whole)


@pytest.mark.parametrize("hw", DEVICES)
def test_products_of_int8_are_exact(hw: str) -> None:
    rng = np.random.default_rng(0)
    a, w = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((64, 128), (128, 64)))
    words = {"A": a, "W": w, "S": np.ones(64, np.float32), "C": np.zeros((64, 64), np.float32), "N": 64}
    _, made = _run("integer_product", (2, 2), hw, **words, K=128, BM=32, BN=32)
    assert np.array_equal(made["C"], a.astype(np.int64) @ w.astype(np.int64))
    _, made = _run("integer_sum", (2, 2), hw, A=a, W=w, C=words["C"], N=64, K=128, BM=32, BN=32, BK=32)
    assert np.array_equal(made["C"], a.astype(np.int64) @ w.astype(np.int64))


@pytest.mark.parametrize("hw", DEVICES)
def test_loaded_integers_as_floats_and_as_a_mask(hw: str) -> None:
    x, count = _drawn(3, 100), np.random.default_rng(1).integers(-1, 4, (3, 100)).astype(np.int32)
    _, made = _run("counted", (3,), hw, X=x, COUNT=count, Y=np.zeros_like(x), N=100, B=128)
    assert np.abs(made["Y"] - (np.where(count > 1, x * 0.5, x) - 3.0 * count)).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("least", [True, False])
def test_the_index_of_an_extremum_is_that_of_the_first(hw: str, least: bool) -> None:
    x = np.random.default_rng(0).integers(-5, 5, (8, 60)).astype(np.float32)
    words = {"X": x, "V": np.zeros(8, np.float32), "I": np.zeros(8, np.int32), "N": 60, "B": 64, "LEAST": least}
    _, made = _run("best", (8,), hw, **words)
    assert np.array_equal(made["V"], x.min(1) if least else x.max(1))
    assert np.array_equal(made["I"], x.argmin(1) if least else x.argmax(1))


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_extremum_may_be_at_an_element_that_a_mask_hides(hw: str, kind: int) -> None:
    x = np.abs(_drawn(4, 20)) * np.array([[-1], [1], [-1], [1]], np.float32)
    words = {"X": x, "COUNT": np.arange(1, 5, dtype=np.int32), "V": np.zeros(4, np.float32), "I": np.ones(4, np.int32)}
    lanes = np.pad(x, ((0, 0), (0, 12)))
    lanes = np.abs(lanes) if kind == 2 else lanes
    _, made = _run("best_of_all_lanes", (4,), hw, **words, N=20, B=32, KIND=kind)
    assert np.array_equal(made["V"], lanes.min(1) if kind else lanes.max(1))
    assert np.array_equal(made["I"], lanes.argmin(1) if kind else lanes.argmax(1))
    some = np.where(np.arange(32) < words["COUNT"][:, None], np.pad(x, ((0, 0), (0, 12))), 0)
    _, made = _run("best_of_all_lanes", (4,), hw, **words, N=20, B=32, KIND=3)
    assert np.array_equal(made["V"], some.max(1))
    assert np.array_equal(made["I"], some.argmax(1))


def test_the_second_best_is_found_where_the_index_of_the_best_is_hidden_by_a_mask_or_not() -> None:
    """A hidden element may be chosen again, which a note says; two that are the maximum for certain are lanes."""
    x = np.abs(_drawn(4, 20))
    done, made = _run("best_again", (4,), X=x, I=np.zeros(4, np.int32), N=20, B=32, OTHER=0.0)
    assert np.array_equal(made["I"], np.argsort(-x, 1, kind="stable")[:, 1])
    assert [
        n for n in done.notes if "the index of a masked element counts as the index of the first masked element" in n
    ]
    done, made = _run("best_again", (4,), X=-x, I=np.zeros(4, np.int32), N=20, B=32, OTHER=-np.inf)
    assert np.array_equal(made["I"], np.argsort(x, 1, kind="stable")[:, 1])
    assert not [n for n in done.notes if "counts as the index of the first masked element" in n]
    _, made = _run("best_again", (4,), X=x, I=np.zeros(4, np.int32), N=20, B=32, OTHER=np.inf)
    assert np.array_equal(made["I"], np.full(4, 21))


def test_an_index_may_be_one_of_hidden_elements_where_it_is_compared_with_other_indices() -> None:
    x = _drawn(4, 20)
    _, made = _run("other_index", (4,), X=x, Y=np.zeros(4, np.float32), N=20, B=32, BY=0)
    assert np.array_equal(made["Y"], x.max(1))
    _, made = _run("other_index", (4,), X=x, Y=np.zeros(4, np.float32), N=20, B=32, BY=20)
    assert np.array_equal(made["Y"], np.where(x.argmax(1) + 20 < 32, -np.inf, 0))


def test_the_index_of_an_extremum_that_nothing_reads_is_not_computed() -> None:
    x = _drawn(4, 20)
    done, made = _run("least", (4,), X=x, V=np.zeros(4, np.float32), N=20, B=32, KIND=0)
    assert np.array_equal(made["V"], x.min(1))
    assert not [n for n in done.notes if "index" in n or "never read" in n or "uses indices as data" in n]


@pytest.mark.parametrize("kind", [1, 2])
def test_minima_over_hidden_lanes_and_over_some_elements(kind: int) -> None:
    x = _drawn(4, 20)
    sums = np.cumsum(np.pad(x, ((0, 0), (0, 12))), 1)
    _, made = _run("least", (4,), X=x, V=np.zeros(4, np.float32), N=20, B=32, KIND=kind)
    assert np.abs(made["V"] - (sums.min(1) if kind == 1 else x[:, :10].min(1))).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_floats_beyond_an_integer_type_are_its_limits_and_zero_has_no_sign(hw: str, bits: int) -> None:
    edges = [300.0, -300.0, 4e4, -4e4, 3e9, -3e9, 1e20, np.inf, -np.inf, 2147483647, 2147483520, 16777217, np.nan]
    x = np.array([*edges, 127.9, -128.9, 0.7, -0.5, -0.0, 0.0, 1.5], np.float32)
    done, made = _run("cut_to_integers", (1,), hw, X=x, Y=np.ones_like(x), N=20, B=32, BITS=bits)
    # Values on an H200: what is converted to int8 and then to float32 was an integer of 16 bits.
    converted = 16 if (bits, hw) == (8, "h200") else bits
    low, high = -(1 << (converted - 1)), (1 << (converted - 1)) - 1
    whole = [0 if np.isnan(v) else high if v > high else low if v < low else int(v) for v in x.tolist()]
    assert np.array_equal(made["Y"], np.array(whole).astype(np.float32))
    assert not np.signbit(made["Y"][made["Y"] == 0]).any()
    why = f"floats beyond {low} and {high} are converted to these limits, and NaN to 0"
    why = (
        why
        if converted == bits
        else "floats are converted to integers of 16 bits (values beyond the range to its limits, NaN to 0)"
    )
    assert [n for n in done.notes if why in n]


@pytest.mark.parametrize("hw", DEVICES)
def test_numbers_that_float32_has_not_are_refused_as_integers_of_a_tile(hw: str) -> None:
    words = {"Y": np.zeros((2, 20), np.int32), "N": 20, "B": 32}
    for number in (16777216, -(1 << 30), 16777218):
        assert np.all(_run("stored_number", (2,), hw, **words, NUMBER=number)[1]["Y"] == number)
    why = r"whole_kernels\.py:\d+: 16777217 is an integer of a tile"
    with pytest.raises(ProgramError, match=why):
        _run("stored_number", (2,), hw, **words, NUMBER=16777217)
    with pytest.raises(ProgramError, match=why):
        x = _drawn(2, 20)
        _run("compared_number", (2,), hw, X=x, Y=np.zeros_like(x), N=20, B=32, NUMBER=16777217)


@pytest.mark.parametrize("hw", DEVICES)
def test_the_largest_weights_and_their_indices(hw: str) -> None:
    x = _drawn(8, 60)
    words = {"X": x, "V": np.zeros((8, 3), np.float32), "I": np.zeros((8, 3), np.int32), "N": 60, "K": 3, "B": 64}
    _, made = _run("best_weights", (8,), hw, **words)
    weights = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    weights /= weights.sum(1, keepdims=True)
    order = np.argsort(-weights, 1, kind="stable")[:, :3]
    assert np.array_equal(made["I"], order)
    assert np.abs(made["V"] - np.take_along_axis(weights, order, 1)).max() < 1e-6


def test_integers_that_a_kernel_loads_and_stores_are_refused() -> None:
    words = {"X": _drawn(4, 32), "Q": np.arange(4, dtype=np.int32), "N": 32, "B": 32}
    with pytest.raises(ProgramError, match=r"whole_kernels\.py:\d+: "):
        _run("integers_again", (4,), **words)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_tensor_that_a_loop_stores_where_it_loads_it_is_in_place(hw: str) -> None:
    x = _drawn(6, 100)
    weights = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    weights /= weights.sum(1, keepdims=True)
    for again in (False, True):  # the second load reads the elements that the same thread has stored
        _, made = _run("normed_in_place", (6,), hw, X=x, N=100, B=32, AGAIN=again)
        assert np.abs(made["X"] - (1 + again) * weights).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_state_begins_with_a_loaded_or_a_computed_value(hw: str, kind: int) -> None:
    x, s = _drawn(8, 100), _drawn(4, seed=1)
    done, made = _run("summed_from", (8,), hw, X=x, S=s, Y=np.zeros(8, np.float32), N=100, H=4, B=32, KIND=kind)
    start = np.tile(s, 2).astype(np.float64) * (1 + kind) + kind
    wanted = np.log(np.exp(x.astype(np.float64)).sum(1) + np.exp(start))
    assert np.abs(made["Y"] - wanted).max() < 1e-6
    assert done.numerics.error.rmse < 1e-6
    assert bool([n for n in done.notes if "a loop starts from a computed value" in n]) is bool(kind)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_product_is_the_start_of_a_sum_of_products(hw: str) -> None:
    c, s, a, x = (_drawn(*n, seed=i).astype(np.float16) for i, n in enumerate(((64, 32), (32, 64), (64, 96), (96, 64))))
    d = _drawn(64, seed=5)
    words = {"C": c, "S": s, "D": d, "A": a, "X": x, "Y": np.zeros((64, 64), np.float32)}
    done, made = _run("added_from", (2, 2), hw, **words, K=32, L=96, N=64, BM=32, BN=32, BK=32)
    wide = [v.astype(np.float64) for v in (c, s, a, x)]
    wanted = wide[0] @ wide[1] * np.exp(d.astype(np.float64))[:, None] + wide[2] @ wide[3]
    assert np.abs(made["Y"] - wanted).max() < 1e-4
    assert done.numerics.error.rmse < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_a_factor_that_each_tile_computes_of_operands(hw: str) -> None:
    a, d, x = _drawn(64, 96).astype(np.float16), _drawn(96, seed=1), _drawn(96, 64, seed=2).astype(np.float16)
    words = {"A": a, "D": d, "X": x, "Y": np.zeros((64, 64), np.float32), "L": 96, "N": 64}
    _, made = _run("decayed_products", (2, 2), hw, **words, BM=32, BN=32, BK=32)
    wanted = (a.astype(np.float64) * np.exp(d.astype(np.float64))) @ x.astype(np.float64)
    assert np.abs(made["Y"] - wanted).max() < 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("count", "fmt"), [(1, "float32"), (5, "float32"), (5, "float16")])
def test_states_that_are_passed_on_are_stored_before_and_behind_the_loop(hw: str, count: int, fmt: str) -> None:
    new, decay = _drawn(3, count, 50), _drawn(3, count, seed=1)
    out, last = np.zeros((3, count, 50)), np.zeros((3, 50))
    for t in range(count):
        out[:, t] = last
        last = np.exp(decay[:, t].astype(np.float64))[:, None] * last + new[:, t]
    words = {"S": new, "A": decay, "OUT": np.zeros(new.shape, fmt), "LAST": np.zeros((3, 50), np.float32)}
    _, made = _run("states_passed", (3,), hw, **words, N=50, T=count, B=64)
    assert np.abs(made["OUT"] - out).max() < 1e-4 + np.finfo(fmt).eps * np.abs(out).max()
    assert np.abs(made["LAST"] - last).max() < 1e-4


@pytest.mark.parametrize("hw", DEVICES)
def test_rows_by_loaded_numbers_of_which_some_are_none(hw: str) -> None:
    w, i = _drawn(20, 100), np.array([3, -1, 7, 19, 0, 3], np.int32)
    _, made = _run("rows_by_number", (6, 2), hw, W=w, I=i, Y=np.ones((6, 100), np.float32), N=100, B=64)
    assert np.array_equal(made["Y"], np.where(i[:, None] >= 0, w[i], 0))


@pytest.mark.parametrize("hw", DEVICES)
def test_sums_of_rows_by_loaded_numbers(hw: str) -> None:
    x, w, i = _drawn(10, 100), _drawn(4, 2, seed=1), np.array([[0, 3], [2, 1], [9, 8], [4, 4]], np.int32)
    words = {"X": x, "I": i, "W": w, "Y": np.ones((4, 100), np.float32), "N": 100, "K": 2, "B": 64}
    _, made = _run("combined", (4, 2), hw, **words)
    wanted = (x[i].astype(np.float64) * w[..., None]).sum(1)
    assert np.abs(made["Y"] - wanted).max() < 1e-6


def test_the_interpreter_of_other_tests_knows_minima_and_joined_masks_and_refuses_what_it_does_not_know() -> None:
    from ttir import whole_kernels as kernels

    x, unit = _drawn(3, 16), Open("ascend.cube.k16.f16.f32", "vector_lanes", "correct", "")
    chosen = (np.abs(x) <= 1, (np.arange(16) < 4) | (np.arange(16) >= 12))
    for kind in range(3):
        memory = {"X": x.reshape(-1).copy(), "Y": np.zeros(3, np.float32)}
        with npusim.record(floats=True) as calls:
            kernels.least_of_some[(3,)](**memory, N=16, KIND=kind)
        run = calls[0].configurations[0].ttir, dict.fromkeys(memory), (3,), memory, unit
        if kind < 2:
            interpret(*run)
            assert np.array_equal(memory["Y"], np.where(chosen[kind], x, np.float32(9)).min(1))
        else:
            with pytest.raises(NotImplementedError, match=r"whole_kernels\.py:\d+: .*tt\.scan"):
                interpret(*run)


@pytest.mark.parametrize("kind", range(4))
def test_elements_that_a_mask_hides_count_behind_operations_with_other_blocks(kind: int) -> None:
    x, z = -np.abs(_drawn(4, 20)), _drawn(4, 32, seed=1)
    lanes = z + np.pad(x, ((0, 0), (0, 12)))
    _, made = _run("best_of_sum", (4,), X=x, Z=z, Y=np.zeros(4, np.float32), N=20, B=32, KIND=kind)
    assert np.abs(made["Y"] - (lanes.max(1) if kind % 2 else lanes.sum(1))).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_indices_are_values_of_a_tile(hw: str) -> None:
    x = _drawn(64)
    _, made = _run("indices_of_positive", (2,), hw, X=x, Y=np.zeros_like(x), C=np.zeros(64, np.int8), B=32)
    assert np.array_equal(made["Y"], np.where(x > 0, np.arange(64), 0))
    whole = np.trunc(np.float32(100) * x).astype(np.int32)
    assert np.any(abs(whole) > 128)
    low = whole.astype(np.int8) if hw == "h200" else np.clip(whole, -128, 127).astype(np.int8)
    assert np.array_equal(made["C"], low)


def test_a_sum_of_one_element_is_contracted_on_gpus() -> None:
    x = _drawn(64)
    _, made = _run("normalised_alone", (64,), X=x, Y=np.zeros_like(x), B=1)
    wide = x.astype(np.float64)
    assert np.array_equal(made["Y"], (wide - wide * wide).astype(np.float32))
    assert np.any(made["Y"] != x - x * x)


def test_results_of_8_bits_without_a_sign_are_the_low_bits_of_16() -> None:
    x = _drawn(64)
    words = {"X": x, "C": np.zeros(64, np.uint8), "B": 32}
    done, made = _run("in_unsigned_bytes", (2,), **words)
    whole = np.trunc(np.float32(100) * x)
    assert whole.min() < 0
    assert 128 < whole.max() < 256
    assert np.array_equal(made["C"], np.maximum(whole, 0))
    assert done.numerics.error.rmse == 0
    x[:2] = 3.0, 700.0  # 300, and 70,000, which becomes 65,535
    _, made = _run("in_unsigned_bytes", (2,), **words)
    assert made["C"][:2].tolist() == [300 % 256, 65535 % 256]
    why = r"whole_kernels\.py:\d+: converting floats to unsigned integers .* to uint8, on GPUs"
    with pytest.raises(ProgramError, match=why):
        _run("in_unsigned_bytes", (2,), "ascend_910b2", **words)


@pytest.mark.parametrize(("hw", "columns", "half"), [("h200", 32, 16), ("h200", 64, None), ("ascend_910b2", 32, None)])
def test_a_sum_of_products_in_one_warp_that_columns_read_has_other_halves(
    hw: str, columns: int, half: int | None
) -> None:
    x = _drawn(2 * columns)
    done, _ = _run("normalised_alone", (2,), hw, X=x, Y=np.zeros_like(x), B=columns)
    said = [n for n in done.notes if "use another sum, whose last bits may differ" in n]
    assert len(said) == (half is not None)
    assert all(f"in compiled code, columns {half} and up" in n for n in said)
