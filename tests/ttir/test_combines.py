"""Reductions and scans by a kernel's own functions: their bits are an H200's, and what is not known is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import FormatError, ProgramError
from npusim.formats import combine_text, cumulative_sum, folded, reduce_sum, scanned

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
CASES = json.loads((Path(__file__).parent / "combines_h200.json").read_text())


def array(stored: list[Any]) -> Any:
    shape, text = stored
    return np.frombuffer(bytes.fromhex(text), np.float32).reshape(shape).copy()


def launched(kernel: str, grid: tuple[int, ...], words: dict[str, Any], hw: str, **how: Any) -> tuple[Any, Any]:
    from ttir import combine_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(combine_kernels, kernel)[grid](**words, **how)
    done = npusim.run(calls[0], hw=hw, rows="all")
    return stored(done, words), done


@pytest.mark.parametrize("name", CASES)
def test_reductions_and_scans_by_own_functions_have_the_bits_of_an_h200(name: str) -> None:
    case = CASES[name]
    kernel = "reduced" if name.startswith("red1") else "scanned"
    results = {n: array(x) for n, x in case["results"].items()}
    words = {n: array(x) for n, x in case["arrays"].items()} | {n: np.zeros_like(x) for n, x in results.items()}
    made, done = launched(kernel, (3,), {**words, "n": case["n"]}, "h200", **case["options"])
    for result, chip in results.items():
        assert np.array_equal(made[result], chip), result
    assert not any("assumed" in note and "order" in note for note in done.notes)
    if "sc1_2" not in name:  # in float64 elements follow one another, and this function depends on its order
        assert done.numerics.error.rmse < 1e-6


def test_on_a_vector_unit_elements_are_combined_one_after_another() -> None:
    case = CASES["sc1_1_64_1_False"]
    words = {n: array(x) for n, x in case["arrays"].items()}
    words |= {"Y": np.zeros_like(words["X"]), "n": case["n"]}
    made, done = launched("scanned", (3,), words, "ascend_910b2", **case["options"])
    wanted = np.zeros_like(words["X"])
    for i in range(case["n"]):
        before = wanted[:, i - 1] if i else np.float32(0)
        wanted[:, i] = before * words["G"][:, i] + words["X"][:, i]
    assert np.allclose(made["Y"], wanted, rtol=1e-5)
    assert any(
        "order of this reduction or scan with a custom combine function is assumed: sequential" in n for n in done.notes
    )


def test_a_function_that_depends_on_its_order_is_refused_where_the_lane_decides() -> None:
    words = {"X": np.ones((64, 128), np.float32), "Y": np.zeros(64, np.float32)}
    with pytest.raises(ProgramError, match=r"combine_kernels\.py:\d+: in lanes other than the first, "):
        launched("faded_rows", (1,), words, "h200", R=64, B=128)


def test_a_division_by_a_constant_is_a_product_with_its_inverse_as_ptxas_folds_it() -> None:
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    made, _ = launched("thirds", (4,), {"X": x, "Y": np.zeros(4, np.float32), "N": 128}, "h200", num_warps=4)
    lanes = x.reshape(4, 4, 32)
    for axis in (2, 1):  # halves of the lanes, then of the warps
        while (n := lanes.shape[axis]) > 1:
            first, second = np.split(lanes, [n // 2], axis)
            lanes = (first + second) * (np.float32(1) / np.float32(3))
    assert np.array_equal(made["Y"], lanes.reshape(4))


@pytest.mark.parametrize("order", ["sequential", "mma_lanes", "lanes_1x32x4", "lanes_4x16x2", "trees_4x32x2"])
def test_sums_as_a_function_are_sums(order: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    text = combine_text("(a0 + b0)", take=0, size=256, pads=(0.0,))
    assert np.array_equal(folded([x], "float32", text, order), reduce_sum(x, "float32", order))


def test_a_scan_in_lanes_is_the_sums_of_warps_and_fills_rows_up() -> None:
    x = np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32)
    text = combine_text("(a0 + b0)", take=0, size=128, pads=(0.0,))
    for order, usual in (("lanes_1x32x4", "warps"), ("lanes_1x32x1", "warps"), ("sequential", "sequential")):
        assert np.array_equal(scanned([x], "float32", text, order), cumulative_sum(x, "float32", usual))
    wide = scanned([x.astype(np.float64)], "float64", text, "lanes_4x8x2")
    assert np.allclose(wide, np.cumsum(x.astype(np.float64), -1))


def test_a_function_of_other_words_is_refused() -> None:
    x = np.ones((1, 4), np.float32)
    with pytest.raises(FormatError, match="is not a function of two elements"):
        folded([x], "float32", "a0 + b0", "sequential")
    with pytest.raises(FormatError, match="a function of two elements cannot call it"):
        folded([x], "float32", combine_text("print(a0)", take=0, size=4, pads=(0.0,)), "sequential")
    with pytest.raises(FormatError, match="order 'four_chains'"):
        folded([x], "float32", combine_text("(a0 + b0)", take=0, size=4, pads=(0.0,)), "four_chains")


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("fmt", [np.float16, np.float32])
def test_a_function_with_branches_that_rounds_nothing_is_of_any_format(hw: str, fmt: Any) -> None:
    x = (3 * np.random.default_rng(0).standard_normal((4, 50))).astype(fmt)
    made, _ = launched("of_narrow_rows", (4,), {"X": x, "Y": np.zeros(4, fmt), "n": 50}, hw, ADDS=False, B=64)
    assert np.array_equal(made["Y"], np.abs(x).max(1))


def test_a_function_with_branches_that_adds_is_refused() -> None:
    words = {"X": np.ones((4, 50), np.float32), "Y": np.zeros(4, np.float32), "n": 50}
    with pytest.raises(ProgramError, match=r"combine_kernels\.py:\d+: "):
        launched("of_narrow_rows", (4,), words, "h200", ADDS=True, B=64)
