"""Forms that kernels of engines and libraries have, beside values in float64."""

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


def normal(seed: int, *shape: int, fmt: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


def refused(name: str, grid: tuple[int, ...], match: str, hw: str = "h200", **words: Any) -> None:
    """Record a launch of a kernel, which npusim refuses."""
    from ttir import library_kernels

    with npusim.record(floats=True) as calls:
        getattr(library_kernels, name)[grid](**words)
    with pytest.raises(ProgramError, match=match):
        npusim.run(calls[0], hw=hw, rows="all")


@pytest.mark.parametrize("hw", DEVICES)
def test_a_tensor_that_the_program_chooses(hw: str) -> None:
    a, b, c = (normal(i, rows, 32, fmt="float16") for i, rows in enumerate((8, 3, 5)))
    words = {"A": a, "B": b, "C": c, "Y": np.zeros((16, 32), np.float16), "columns": 32, "BLOCK": 128}
    words |= {"rows_a": 8, "rows_b": 3, "rows_c": 5}
    checked("library_kernels", "stacked", (2, 3), words, {"Y": np.concatenate([a, b, c])}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_results_that_the_program_chooses_have_the_errors_of_their_own_tensors(hw: str) -> None:
    q, k = normal(0, 6, 96, fmt="float16"), normal(1, 6, 32, fmt="float16")
    wq, wk = normal(2, 96), normal(3, 32)
    words = {"Q": q, "K": k, "OutQ": np.zeros_like(q), "OutK": np.zeros_like(k), "WQ": wq, "WK": wk}
    words |= {"eps": 1e-6, "NQ": 96, "NK": 32, "BLOCK": 128}
    wanted = {
        name: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w
        for name, x, w in (("OutQ", q.astype(np.float64), wq), ("OutK", k.astype(np.float64), wk))
    }
    done = checked("library_kernels", "either_norm", (6, 2), words, wanted, hw)
    assert all(x.rmse < 1e-3 for x in (done.numerics, *done.numerics.others.values()))


@pytest.mark.parametrize(("shape", "n", "first"), [((8, 64), 512, 1024), ((8, 64), 500, 704), ((512,), 512, 1000)])
def test_flat_elements_behind_others_of_a_tensor(shape: tuple[int, ...], n: int, first: int) -> None:
    x, y = normal(0, *shape), np.zeros((24, 64), np.float32)
    wanted = np.full(y.size, np.nan)
    wanted[first : first + n] = x.reshape(-1)[:n]
    words = {"X": x, "Y": y, "n": n, "first": first, "BLOCK": 256}
    checked("library_kernels", "behind", (2,), words, {"Y": wanted.reshape(y.shape)}, "h200")


def test_parts_of_a_tensor_that_other_programs_store_to() -> None:
    refused("further", (2,), "accessed elsewhere", X=normal(0, 1100), n=512, first=128, BLOCK=256)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_part_of_a_tensor_that_only_its_own_program_stores_to(hw: str) -> None:
    x, wanted = normal(0, 1100), np.full(1100, np.nan)
    wanted[:256], wanted[256:512] = x[512:768], x[256:512]
    words = {"X": x, "n": 512, "first": 256, "BLOCK": 256}
    checked("library_kernels", "further", (2,), words, {"X": wanted}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_blocks_that_are_loaded_down_columns_and_converted(hw: str) -> None:
    x, s, y = normal(0, 2, 64, 64), normal(1, 2, 64), normal(2, 2, 64, 32, fmt="float16")
    words = {"X": x, "S": s, "Y": y, "Z": np.zeros((2, 64, 32), np.float32), "T": 64, "C": 64, "D": 32, "BC": 16}
    factor = np.where(x > 0, x, x * 0.5) * s[:, :, None]
    exact = np.swapaxes(factor.astype(np.float16).astype(np.float64), 1, 2) @ y.astype(np.float64)
    checked("library_kernels", "converted_columns", (2,), words, {"Z": exact}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_that_a_program_loads_and_stores(hw: str) -> None:
    rng = np.random.default_rng(0)
    lengths, table = rng.integers(1, 60, 8).astype(np.int32), rng.integers(0, 99, (8, 4)).astype(np.int32)
    lengths[3] = 63
    words = {"Lengths": lengths, "Table": table, "Slots": np.zeros(8, np.int64), "stride": 4, "most": 64, "PAGE": 16}
    slots = np.where(lengths + 1 >= 64, -1, table[np.arange(8), lengths // 16].astype(np.int64) * 16 + lengths % 16)
    wanted = {"Slots": slots, "Lengths": np.minimum(lengths + 1, 64)}
    checked("library_kernels", "advanced", (8,), words, wanted, hw)


def test_integers_that_another_program_stores() -> None:
    words: dict[str, Any] = {"Lengths": np.arange(8, dtype=np.int32), "Slots": np.zeros(8, np.int64)}
    refused("passed_on", (8,), "a program stores an element that another program accesses, in any order", **words)


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_that_an_earlier_store_of_the_program_changes(hw: str) -> None:
    lengths = np.arange(8, dtype=np.int32)
    words = {"Lengths": lengths, "Slots": np.zeros(8, np.int64)}
    wanted = {"Lengths": lengths + 1, "Slots": (lengths + 1) * 2}
    checked("library_kernels", "counted_twice", (8,), words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_cumulative_sums_of_integers_that_are_known_at_launch(hw: str) -> None:
    counts = np.array([3, 0, 7, 1, 5], np.int32)
    words = {"Counts": counts, "First": np.zeros(5, np.int32), "Last": np.zeros(5, np.int32), "n": 5, "B": 8}
    padded = np.concatenate([counts, np.zeros(3, np.int32)])
    wanted = {"First": np.cumsum(counts) - counts, "Last": np.cumsum(counts[::-1])[::-1]}
    wanted |= {"Ends": np.tile(np.cumsum(padded), (5, 1))}
    checked("library_kernels", "placed_counts", (5,), words | {"Ends": np.zeros((5, 8), np.int32)}, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_of_few_iterations_within_a_loop(hw: str) -> None:
    x = normal(0, 32, 128)
    words = {"X": x, "Y": np.zeros(32, np.float32), "T": 128, "BT": 32, "TIMES": 3}
    wanted = (((x * 0.5) * 0.5 + 1) * 0.5 + 2).astype(np.float64).sum(1)
    checked("library_kernels", "scaled_twice", (2,), words, {"Y": wanted}, hw)


def test_a_loop_of_many_iterations_within_a_loop() -> None:
    words: dict[str, Any] = {"X": normal(0, 32, 128), "Y": np.zeros(32, np.float32), "T": 128, "BT": 32, "TIMES": 9}
    refused("scaled_twice", (2,), "a loop within a loop .* at most 4", **words)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("hw", DEVICES)
def test_products_of_all_heads_and_atomic_additions_of_each(hw: str, adds: bool) -> None:
    x, s, g = normal(0, 64, 4, 32, fmt="float16"), normal(1, 4, 32, 16, fmt="float16"), normal(2, 4, 64)
    words = {"X": x, "S": s, "G": g, "Y": np.zeros((64, 16), np.float32), "Z": np.zeros((4, 64), np.float32)}
    made = np.einsum("mhp,hpn->hmn", x.astype(np.float64), s.astype(np.float64)) * g[:, :, None]
    wanted = {"Y": made.sum(0)} | ({"Z": made.sum(2)} if adds else {})
    words |= {"H": 4, "P": 32, "N": 16, "BM": 32, "ADDS": adds}
    checked("library_kernels", "summed_heads", (2,), words, wanted, hw)


def _sorted_pairs(rows: Any) -> tuple[dict[str, Any], Any]:
    """Return a launch's arguments for pairs of tokens and experts, and the result in float64."""
    pairs, ids, experts = 20, np.full(64, 20, np.int32), np.array([2, 0, 1, -1], np.int32)
    ids[:12], ids[16:19], ids[32:37] = range(12), range(12, 15), range(15, 20)
    x, w, y = (
        normal(0, pairs, 16, fmt="float16"),
        normal(1, 3, 16, 64, fmt="float16"),
        normal(2, pairs, 64, fmt="float16"),
    )
    wanted = np.full(y.shape, np.nan)
    for place, pair in enumerate(ids.tolist()):
        if pair < pairs:
            made = x[pair].astype(np.float64) @ w[experts[place // 16]].astype(np.float64)
            wanted[rows[pair]] = y[rows[pair]].astype(np.float64) + made
    words = {"X": x, "W": w, "Y": y, "Ids": ids, "Experts": experts, "Rows": rows, "pairs": pairs}
    return words | {"R": 16, "N": 64, "BM": 16}, wanted


@pytest.mark.parametrize("hw", DEVICES)
def test_rows_by_two_tables_are_loaded_and_stored_in_place(hw: str) -> None:
    words, wanted = _sorted_pairs(np.random.default_rng(0).permutation(20).astype(np.int32))
    done = checked("library_kernels", "added_to_rows", (8,), words, {"Y": wanted}, hw)
    assert done.numerics.nan_count == 0


def test_rows_that_two_programs_store_are_not_loaded_in_place() -> None:
    rows = np.random.default_rng(0).permutation(20).astype(np.int32)
    rows[19] = rows[0]
    refused(
        "added_to_rows",
        (8,),
        "loads an element that another program may store to|writes the same row",
        **_sorted_pairs(rows)[0],
    )


@pytest.mark.parametrize("hw", DEVICES)
def test_atomic_additions_of_one_program_to_each_number_of_a_row(hw: str) -> None:
    x, z = normal(0, 4, 64, 16), normal(1, 4, 64)
    words = {"X": x, "Z": z, "R": 64, "N": 16, "BM": 32}
    checked("library_kernels", "row_sums_added", (2, 4), words, {"Z": z + x.astype(np.float64).sum(2)}, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_right_factors_that_are_computed_outside_of_loops(hw: str) -> None:
    a, k, v = (normal(i, 2, 32, n, fmt="float16") for i, n in enumerate((32, 64, 32)))
    s = normal(3, 2, 32, fmt="float16")
    words = {"A": a, "K": k, "V": v, "S": s, "W": np.zeros_like(k), "U": np.zeros_like(v)}
    words |= {"T": 32, "DK": 64, "DV": 32, "B": 32}
    matrix, scale = a.astype(np.float64), s[:, :, None]
    wanted = {"W": matrix @ (k * scale * 2).astype(np.float64), "U": matrix @ (v * scale).astype(np.float64)}
    checked("library_kernels", "scaled_factors", (2,), words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kernel", ["split_product", "added_product"])
def test_parts_of_a_products_terms(kernel: str, hw: str) -> None:
    a, b, adds = normal(0, 64, 128, fmt="float16"), normal(1, 128, 32, fmt="float16"), kernel == "added_product"
    words = {"A": a, "B": b, "C": np.zeros((64, 32) if adds else (4, 64, 32), np.float32), "M": 64, "N": 32, "K": 128}
    x, y = a.astype(np.float64), b.astype(np.float64)
    parts = np.stack([x[:, i : i + 32] @ y[i : i + 32] for i in range(0, 128, 32)])
    words |= {"BM": 32, "BK": 16, "PARTS": 4}
    done = checked("library_kernels", kernel, (2, 4), words, {"C": parts.sum(0) if adds else parts}, hw)
    assert done.numerics.rmse < 1e-6


def test_values_that_go_on_from_the_loop_before() -> None:
    x = normal(0, 32, 128)
    most, squares = x.max(1).astype(np.float64), (x.astype(np.float64) ** 2).reshape(32, 4, 32).sum(2).max(1)
    words = {"X": x, "Y": np.zeros(32, np.float32), "Z": np.zeros(32, np.float32), "T": 128, "B": 32}
    wanted = {"Y": most + x.astype(np.float64).sum(1), "Z": np.maximum(most, squares)}
    checked("library_kernels", "goes_on", (2,), words, wanted, "ascend_910b2")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("rows", [40, 64, 72])
def test_rows_behind_the_last_one_are_stored_as_zeros(rows: int, hw: str) -> None:
    o, d = normal(0, 3, rows, 16), normal(1, 3, rows, 16)
    words = {"O": o, "D": d, "Y": np.ones((3, 96), np.float32), "S": rows, "R": 96, "N": 16, "BM": 32}
    wanted = np.zeros((3, 96))
    wanted[:, :rows] = (o.astype(np.float64) * d).sum(2)
    checked("library_kernels", "filled_sums", (3, 3), words, {"Y": wanted}, hw)
