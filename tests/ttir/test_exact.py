"""Integers of tiles that float32 does not have: random ones by philox, and those that wrap in 32 bits."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

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
check = partial(checked, "exact_kernels")
LOW = np.uint64(0xFFFFFFFF)


def philox(seed: Any, offsets: Any) -> list[Any]:
    """Return four unsigned integers of 32 bits of each counter, by ten rounds (Salmon et al. 2011)."""
    offsets = np.asarray(offsets, np.uint64)
    c = [offsets & LOW, *(np.zeros_like(offsets) for _ in range(3))]
    key = [np.asarray(seed, np.uint64) & LOW, np.asarray(seed, np.uint64) >> np.uint64(32)]
    for _ in range(10):
        one, other = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(other >> np.uint64(32)) ^ c[1] ^ key[0], other & LOW, (one >> np.uint64(32)) ^ c[3] ^ key[1], one & LOW]
        key = [(key[0] + np.uint64(0x9E3779B9)) & LOW, (key[1] + np.uint64(0xBB67AE85)) & LOW]
    return c


def uniform(drawn: Any) -> Any:
    """Return numbers in [0, 1) as Triton makes them of integers: of a negative one, -x - 1 in its place."""
    signed = drawn.astype(np.uint32).view(np.int32).astype(np.int64)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def test_the_generator_beside_known_answers() -> None:
    # Random123's kat_vectors: philox4x32, 10 rounds, counter and key 0.
    assert [int(x) for x in philox(0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_dropout_by_random_numbers_of_known_offsets(hw: str) -> None:
    x, seed = normal(1, 300), 1234567
    keeps = uniform(philox(seed, np.arange(300))[0]) > np.float32(0.3)
    words = {"X": x, "Y": np.zeros_like(x), "M": np.zeros(300, bool), "n": 300, "p": 0.3, "seed": seed, "B": 128}
    check("dropped", (3,), words, {"Y": np.where(keeps, 2 * x, 0), "M": keeps}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_four_random_numbers_of_an_offset(hw: str) -> None:
    x = normal(1, 2 * 4 * 32)
    wanted = np.concatenate([np.stack(list(map(uniform, philox(7, p * 128 + np.arange(32))))) for p in (0, 1)])
    wanted[[0, 4]] += x.reshape(8, 32)[[0, 4]]
    words = {"X": x, "Y": np.zeros_like(x), "n": len(x), "seed": 7, "B": 32}
    check("drawn_four", (2,), words, {"Y": wanted.reshape(-1)}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_random_and_wrapping_integers_are_stored_exactly(hw: str) -> None:
    at = np.arange(100)
    drawn = philox((5 << 32) + 3, at)[0].astype(np.uint32).view(np.int32)
    wrapped = (at * 100003 + 7).astype(np.int32)
    words = {"Y": np.zeros(100, np.int32), "Z": np.zeros(100, np.int32), "n": 100, "seed": (5 << 32) + 3, "B": 64}
    check("drawn_integers", (2,), words, {"Y": drawn, "Z": wrapped}, hw)
    assert np.abs(drawn.astype(np.int64)).max() > 1 << 24


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_integers_without_a_sign_are_stored_as_negative_ones_of_their_bits(hw: str) -> None:
    at = np.arange(100)
    drawn = philox(42, at)[0].astype(np.uint32)
    words = {"Y": np.zeros(100, np.uint32), "Z": np.zeros(100, np.uint32), "n": 100, "seed": 42, "B": 64}
    wanted = {"Y": drawn.view(np.int32), "Z": at * 100003 + 7}
    done = check("drawn_integers", (2,), words, wanted, hw)
    assert drawn.max() >= 1 << 31
    assert sum("as negative integers with the same bits" in n for n in done.notes) == 1  # all of Z are below 2^24


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_random_numbers_of_rows_by_a_loaded_seed(hw: str) -> None:
    x, seeds = normal(1, 7, 50), np.array([3, 99], np.int32)
    drawn = np.stack([uniform(philox(seeds[i // 4], i * 50 + np.arange(50))[0]) for i in range(7)])
    words = {"X": x, "Y": np.zeros_like(x), "Seeds": seeds, "rows": 7, "n": 50, "R": 4, "B": 64}
    check("drawn_in_rows", (2,), words, {"Y": np.where(drawn > 0.5, x, 0)}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_attention_with_dropout_of_its_weights(hw: str) -> None:
    q, k, v = (normal(i, 2, 64, 16).astype(np.float16) for i in range(3))
    scores = np.einsum("hmd,hnd->hmn", q.astype(float), k.astype(float))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    keeps = uniform(philox(11, np.arange(2 * 64 * 64))[0]).reshape(2, 64, 64) > 0.25
    wanted = np.where(keeps, weights, 0) @ v.astype(float) / weights.sum(-1, keepdims=True)
    words = {"Q": q, "K": k, "V": v, "O": np.zeros((2, 64, 16), np.float32), "n": 64, "seed": 11, "D": 16}
    check("attended", (2, 2), {**words, "M": 32, "N": 32, "DROPS": True}, {"O": wanted}, hw, close=6e-4)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_places_in_a_row_as_numbers_in_a_loop(hw: str) -> None:
    x = normal(1, 3, 200)
    words = {"X": x, "Y": np.zeros(3, np.float32), "n": 200, "B": 64}
    check("weighted_by_place", (3,), words, {"Y": (x.astype(float) * np.arange(200.0) ** 2).sum(1)}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_exponents_are_read_from_bits_and_made_of_them(hw: str) -> None:
    x = normal(1, 100)
    mantissa, exponent = np.frexp(x)
    words = {"X": x, "E": np.zeros(100, np.int32), "Y": np.zeros_like(x), "n": 100, "B": 64}
    check("exponents", (2,), words, {"E": exponent - 1, "Y": mantissa * 2}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_bits_rounded_by_hand_to_bfloat16(hw: str) -> None:
    x = normal(1, 100)
    words = {"X": x, "Y": np.zeros_like(x), "n": 100, "B": 64}
    check("rounded_by_hand", (2,), words, {"Y": x.astype(bfloat16).astype(np.float32)}, hw, close=1e-12)


@pytest.mark.parametrize("hw", DEVICES)
def test_scales_of_powers_of_two_are_stored_as_bytes(hw: str) -> None:
    x = normal(1, 4, 32).astype(np.float16)
    exponent = np.ceil(np.log2(np.abs(x.astype(float)).max(1)))
    words = {"X": x, "Y": np.zeros((4, 32), np.float32), "S": np.zeros(4, np.uint8), "G": 32}
    check("scaled_by_powers", (4,), words, {"S": exponent + 127, "Y": x / 2.0 ** exponent[:, None]}, hw, close=1e-12)


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_of_32_bits_wrap_and_are_divided_toward_0(hw: str) -> None:
    x = normal(1, 100)
    bits = (x.view(np.int32).astype(np.int64) * 16777619).astype(np.int32).astype(np.int64)
    mixed = bits ^ (bits >> 15)
    mixed = (np.sign(mixed) * (np.abs(mixed) // 7) + np.fmod(bits, 5)).astype(np.int32)
    upper = x.view(np.uint32)
    wanted = upper.astype(np.float32) * np.where(upper > 0x80000000, 1, 2).astype(np.float32)
    words = {"X": x, "Y": np.zeros(100, np.int32), "Z": np.zeros_like(x), "n": 100, "B": 64}
    check("hashed", (2,), words, {"Y": np.where(mixed > 100, mixed, -mixed), "Z": wanted}, hw, close=1e-12)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_sums_of_integers_of_any_magnitude(hw: str) -> None:
    x = normal(1, 3, 50)
    whole = (x * np.float32(1e8)).astype(np.int64)
    words = {"X": x, "Y": np.zeros(3, np.int32), "Z": np.zeros((3, 50), np.int64), "n": 50, "B": 64}
    check("summed_integers", (3,), words, {"Y": whole.sum(1).astype(np.int32), "Z": whole - 1}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_integers_that_a_row_packs_into_one(hw: str) -> None:
    w = np.random.default_rng(1).integers(0, 16, (6, 8)).astype(np.uint8)
    wanted = (w.astype(np.int64) << (4 * np.arange(8))).sum(1).astype(np.int32)
    check("packed", (6,), {"W": w, "Y": np.zeros(6, np.int32), "N": 8, "BITS": 4}, {"Y": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_bits_of_halves(hw: str) -> None:
    x = normal(1, 100).astype(np.float16)
    words = {"X": x, "E": np.zeros(100, np.int32), "n": 100, "B": 64}
    check("halves", (2,), words, {"E": np.frexp(x.astype(float))[1] - 1}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_counts_that_a_loop_carries(hw: str) -> None:
    x = normal(1, 3, 200)
    words = {"X": x, "Y": np.zeros(3, np.int32), "Z": np.zeros(3, np.int32), "n": 200, "B": 64}
    check("counted", (3,), words, {"Y": (x > 0.5).sum(1), "Z": (x < -0.5).sum(1)}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_histogram_by_atomic_additions_of_integers(hw: str) -> None:
    x, before = np.random.default_rng(1).integers(0, 16, 300).astype(np.int32), np.arange(16, dtype=np.int32)
    words = {"X": x, "Counts": before.copy(), "n": 300, "B": 128}
    done = check("histogram", (3,), words, {"Counts": before + np.bincount(x, minlength=16)}, hw)
    assert any("the time covers the stores of the results" in note for note in done.notes)


@pytest.mark.parametrize("hw", in_turn(DEVICES, start=1))
def test_a_loop_over_integers_that_stores_some_of_them(hw: str) -> None:
    lengths = np.random.default_rng(2).integers(0, 9, 16).astype(np.int32)
    wanted, which, extra = list[int](), list[int](), 0
    for i, length in enumerate(lengths.tolist()):
        own = (length + extra) // 4 + ((length + extra) % 4 > 1)
        if own:
            wanted.append(own)
            which.append(i)
        extra += length - own * 4
    rest = [0] * (16 - len(wanted))
    words = {"In": lengths, "Out": np.zeros(16, np.int32), "Which": np.zeros(16, np.int32)}
    given = {**words, "N": 16, "SIZE": 4, "RANK": 1}
    check("dealt_out", (1,), given, {"Out": wanted + rest, "Which": which + rest}, hw)


def refused(kernel: str, grid: tuple[int, ...], **words: Any) -> str:
    from ttir import exact_kernels

    with npusim.record(floats=True) as calls:
        getattr(exact_kernels, kernel)[grid](**words)
    with pytest.raises(ProgramError) as error:
        npusim.run(calls[0], hw="h200")
    return str(error.value)


def test_what_a_kernel_of_only_integers_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton import known_kernels

    x, y = (np.arange(4, dtype=np.int32) for _ in "xy")
    assert "the atomic operation exch of integers is not supported" in refused("exchanged", (4,), X=x, Y=y)
    monkeypatch.setattr(known_kernels, "MOST_OPERATIONS", 20)
    assert "more than 20 operations in all programs" in refused("added_up", (4,), X=x, Y=y)


def test_integers_that_depend_on_the_order_of_programs_are_refused() -> None:
    x, y = (np.arange(4, dtype=np.int32) for _ in "xy")
    assert "another program" in refused("overtaken", (4,), X=x, Y=y, n=4)
    counts = np.zeros(2, np.int32)
    message = refused("numbered", (4,), X=np.array([0, 1, 0, 1], np.int32), Counts=counts, Y=y)
    assert "depends on the order of programs" in message


@pytest.mark.parametrize("hw", DEVICES)
def test_an_if_between_values_of_blocks_that_a_loop_stores(hw: str) -> None:
    x, first = normal(1, 3, 16, 32), normal(2, 3, 4, 32)
    wanted = x * x
    wanted[:, :4] = x[:, :4] + first
    words = {"X": x, "First": first, "Y": np.zeros_like(x), "n": 32, "T": 4, "R": 4, "B": 32}
    check("first_block_added", (3,), words, {"Y": wanted}, hw, close=1e-12)


@pytest.mark.parametrize(("kind", "hw"), in_turn(("first", "last", "branch", "lanes", "row"), DEVICES))
def test_choices_between_values_by_the_iteration_of_a_loop(kind: str, hw: str) -> None:
    rows, count, n = 3, 4, 21
    x = normal(1, rows, count, n)
    wanted, column, row = np.full((rows, n), 2, np.float32), np.arange(n), np.arange(rows)[:, None]
    for i in range(count):
        one = x[:, i]
        match kind:
            case "first":
                wanted = one if i == 0 else wanted * one
            case "last":
                wanted = wanted * one if i == count - 1 else wanted + one
            case "branch":
                wanted = one if i == 0 else wanted + one
            case "lanes":
                wanted = np.where((column + i) % 3 == 0, wanted + one, wanted)
            case _:
                wanted = np.where(row + i < 3, wanted + one, wanted)
    words = {"X": x, "Y": np.zeros((rows, n), np.float32), "n": n, "N": count, "KIND": kind, "B": 32}
    check("unlike_tiles", (rows,), words, {"Y": wanted}, hw)


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_a_pointer_that_moves_by_a_computed_step(hw: str) -> None:
    x = normal(1, 3, 256)
    words = {"X": x, "Y": np.zeros(3, np.float32), "n": 256, "N": 8, "B": 32}
    check("stepped", (3,), words, {"Y": x.astype(float).sum(1)}, hw)
