"""Loops with a tile apart, integers that loops carry, and elements gathered for each row: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError, ProgramError
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import peeled_kernels as kernels
DEVICES = ("ascend_910b2", "h200")
INFINITY = float("inf")


def _output(name: str, grid: int, hw: str, **words: Any) -> Any:
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[(grid,)](**words)
    return np.asarray(npusim.run(calls[0], hw=hw, rows="all").output, np.float64)


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [40, 48])
def test_a_masked_last_tile_is_one_of_the_loop(hw: str, n: int) -> None:
    x = _drawn(3, n)
    words = {"n": n, "HIDES": 0, "OTHER": -INFINITY, "SCALE": 1.0, "B": 16}
    weights = np.exp(x.astype(np.float64))
    output = _output("peeled_softmax", 3, hw, X=x, Y=np.zeros_like(x), **words).reshape(x.shape)
    assert np.abs(output - weights / weights.sum(1, keepdims=True)).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("hides", "other"), [(1, -INFINITY), (0, 0.0)])
def test_hidden_elements_and_lanes_that_count_are_read_lane_by_lane(hw: str, hides: int, other: float) -> None:
    """Fewer elements than are stored are in the sum, or a number in each of the 8 hidden lanes of the last tile."""
    x = _drawn(3, 40)
    weights = np.exp(x.astype(np.float64))
    total = weights[:, : 40 - hides].sum(1, keepdims=True) + 8 * np.exp(other)
    words = {"X": x, "Y": np.zeros_like(x), "n": 40, "HIDES": hides, "OTHER": other, "SCALE": 1.0, "B": 16}
    checked("peeled_kernels", "peeled_softmax", (3,), words, {"Y": weights / total}, hw)


@pytest.mark.parametrize(
    ("hides", "scale"),
    [
        (0, 2.0),  # the last tile does other than the loop
        (40, 1.0),  # nothing of it is loaded
    ],
)
def test_a_last_tile_that_is_none_of_the_loop_is_read_iteration_by_iteration(hides: int, scale: float) -> None:
    x = _drawn(3, 40)
    weights = np.exp(x.astype(np.float64))
    total = weights[:, :32].sum(1) + scale * weights[:, 32 : max(32, 40 - hides)].sum(1)
    words = {"X": x, "Y": np.zeros_like(x), "n": 40, "HIDES": hides, "OTHER": -INFINITY, "SCALE": scale, "B": 16}
    checked("peeled_kernels", "peeled_softmax", (3,), words, {"Y": weights / total[:, None]}, "h200")


@pytest.mark.parametrize(("hw", "n"), [("ascend_910b2", 40), ("ascend_910b2", 48), ("h200", 48)])
def test_counters_of_lanes(hw: str, n: int) -> None:
    x = _drawn(3, n)
    output = _output("counted_mean", 3, hw, X=x, MEAN=np.zeros(3, np.float32), n=n, B=16)
    assert np.abs(output.reshape(-1) - x.astype(np.float64).mean(1)).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [40, 48, 9])
def test_the_index_of_a_running_maximum_is_that_of_the_first(hw: str, n: int) -> None:
    x = np.random.default_rng(1).integers(0, 3, (10, n)).astype(np.float32)
    x[3] = -1
    output = _output("running_place", 3, hw, X=x, Y=np.zeros(10, np.int64), rows=10, n=n, R=4, B=16)
    assert np.array_equal(output.reshape(-1), x.argmax(1))


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("programs", [3, 5])
def test_an_element_is_gathered_for_each_row(hw: str, programs: int) -> None:
    x, w, labels = _drawn(20, 7), _drawn(7, seed=1), np.random.default_rng(2).integers(0, 7, 20)
    labels[[2, 3, 11, 19]] = -100
    y = np.zeros(20, np.float32)
    output = _output("label_losses", programs, hw, X=x, L=labels, W=w, Y=y, n=20, C=7, IGNORED=-100, B=8)
    known = labels >= 0
    wide = -w.astype(np.float64)[labels * known] * x[np.arange(20), labels * known] * known
    assert np.abs(output.reshape(-1)[:20] - wide).max() < 1e-6


def test_a_label_beyond_the_classes_is_refused() -> None:
    x, w, labels = _drawn(20, 7), _drawn(7, seed=1), np.full(20, 3)
    labels[4] = 70
    y = np.zeros(20, np.float32)
    with pytest.raises(
        ProgramError, match=r"peeled_kernels\.py:\d+: W: loaded integers address elements beyond its end"
    ):
        _output("label_losses", 3, "h200", X=x, L=labels, W=w, Y=y, n=20, C=7, IGNORED=-100, B=8)


@pytest.mark.parametrize("hw", DEVICES)
def test_labels_of_rows_choose_among_columns(hw: str) -> None:
    x, labels = _drawn(10, 7), np.random.default_rng(2).integers(0, 7, 10)
    expected = x.astype(np.float64)
    expected[np.arange(10), labels] -= 1
    output = _output("label_gradients", 3, hw, X=x, L=labels, Y=np.zeros_like(x), n=10, C=7, R=4, B=8)
    assert np.abs(output.reshape(x.shape) - expected).max() < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_an_index_of_any_of_equal_maxima_is_refused(hw: str) -> None:
    x = np.random.default_rng(1).integers(0, 3, (3, 20)).astype(np.float32)
    words = {"X": x, "Y": np.zeros(3, np.int32), "n": 20, "B": 32}
    assert np.array_equal(_output("place_of_any", 3, hw, LEFT=True, **words).reshape(-1), x.argmax(1))
    with pytest.raises(
        ProgramError, match=r"peeled_kernels\.py:\d+: tl.argmax and tl.argmin must choose .*tie_break_left"
    ):
        _output("place_of_any", 3, hw, LEFT=False, **words)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("n", [40, 48])
def test_loaded_integers_mask_any_elements_of_a_loops_tiles(hw: str, n: int) -> None:
    x, seen = _drawn(3, n), np.random.default_rng(1).integers(0, 2, n).astype(np.int32)
    output = _output("sum_of_seen", 3, hw, X=x, S=seen, Y=np.zeros(3, np.float32), n=n, B=16)
    assert np.abs(output.reshape(-1) - (x.astype(np.float64) * seen).sum(1)).max() < 1e-5


def test_a_loop_that_stores_behind_a_store_is_a_kernel_of_its_own() -> None:
    from ttir.peeled_kernels import stored_before_a_loop
    from ttir.stored import stored

    x, ends = _drawn(3, 32), np.array([32, 16, 32], np.int32)
    words = {"X": x, "L": ends, "Y": np.zeros_like(x), "n": 32, "B": 16}
    with npusim.record(floats=True) as calls:
        stored_before_a_loop[(3,)](**words)
    done = npusim.run(calls[0], hw="h200", rows="all")
    wanted = x * np.where(np.arange(32) < 16, np.float32(3), np.float32(2))
    wanted[1, 16:] = np.nan
    assert np.array_equal(stored(done, words)["Y"], wanted, equal_nan=True)
    assert any("treats the kernel as 2 kernels, one for each store" in note for note in done.notes)


def test_lanes_behind_a_gpus_loop_are_refused_by_their_line() -> None:
    x = _drawn(3, 48)
    words = {"X": x, "Y": np.zeros(3, np.float32), "n": 48, "B": 16}
    output = _output("weighted_behind", 3, "ascend_910b2", **words)
    expected = x.astype(np.float64).reshape(3, 3, 16).sum(1) @ np.arange(16)
    assert np.abs(output.reshape(-1) - expected).max() < 1e-4
    with pytest.raises(NpusimError, match=r"line \d+: indices is read after the loop along its axis, but on"):
        _output("weighted_behind", 3, "h200", **words)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("seen", [38, 32])
def test_a_tile_that_loads_its_elements_under_two_masks_is_read_by_itself(hw: str, seen: int) -> None:
    x = _drawn(3, 40)
    wide, cols = x.astype(np.float64), np.arange(40)
    wanted = (wide + np.where(cols >= seen, 1.0, wide)) * wide.sum(1, keepdims=True)
    words = {"X": x, "Y": np.zeros_like(x), "n": 40, "SEEN": seen, "B": 16}
    checked("peeled_kernels", "doubled", (3,), words, {"Y": wanted}, hw)
