"""Errors of every tensor that a launch stores, beside those by NumPy in float64."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.kernels.triton.float64_walk import ExactLaunch
from npusim.report.bits_table import bits_facts
from npusim.report.result_json import load_result, record_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
ROWS, COLUMNS, BLOCK = 6, 40, 64
F16, F32 = np.float16, np.float32


def launch(name: str, hw: str, *, rows: str = "all", **results: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return the run of a launch, what it stores by tensor, and its input in float64."""
    from ttir import result_kernels
    from ttir.stored import stored

    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(F16)
    words = {"X": x, **{n: np.zeros(shape, fmt) for n, (shape, fmt) in results.items()}, "n": COLUMNS, "B": BLOCK}
    with npusim.record(floats=True) as calls:
        getattr(result_kernels, name)[(ROWS,)](**words)
    done = npusim.run(calls[0], hw=hw, rows=rows)
    return done, stored(done, words), x.astype(np.float64)


def relative(made: Any, wanted: Any) -> float:
    return float(np.sqrt(((made - wanted) ** 2).sum() / (wanted**2).sum()))


NUMBERS = {"Y": ((ROWS, COLUMNS), F16), "Mean": ((ROWS,), F32), "Rstd": ((ROWS,), F16)}


@pytest.mark.parametrize("hw", DEVICES)
def test_each_stored_tensor_has_its_error(hw: str) -> None:
    done, made, x = launch("norm_with_numbers", hw, **NUMBERS)
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)
    assert done.numerics.rmse == pytest.approx(relative(made["Y"], (x - mean[:, None]) * rstd[:, None]), rel=1e-3)
    assert list(done.numerics.others) == ["Mean", "Rstd"]
    for name, wanted in (("Mean", mean), ("Rstd", rstd)):
        error = done.numerics.others[name]
        assert error.count == ROWS
        assert error.rmse == pytest.approx(relative(made[name], wanted), rel=1e-3)
    assert done.numerics.others["Rstd"].rmse > 1e-5 > done.numerics.others["Mean"].rmse > 0


def test_a_sample_has_the_errors_of_the_rows_computed() -> None:
    done, _, _ = launch("norm_with_numbers", "h200", rows="4", **NUMBERS)
    assert [x.count for x in done.numerics.others.values()] == [1, 1]


def test_errors_are_in_the_table_and_in_json(tmp_path: Path) -> None:
    done, _, _ = launch("norm_with_numbers", "ascend_910b2", **NUMBERS)
    record = record_of(done)
    lines = [cell.text for name, cells in bits_facts(record) if name == "numerics" for cell in cells]
    rmse = done.numerics.others["Rstd"].rmse
    assert any(line.startswith(f"Rstd: relative RMSE {rmse:.2e}") for line in lines)
    (tmp_path / "result.json").write_text(json.dumps(record.to_document()))
    assert load_result(tmp_path).numerics.others == done.numerics.others


@pytest.mark.parametrize("hw", DEVICES)
def test_results_of_unlike_shapes_have_their_errors(hw: str) -> None:
    done, made, x = launch("halves", hw, Left=((ROWS, COLUMNS // 2), F16), Right=((ROWS, COLUMNS), F16))
    (other,) = done.numerics.others.values()
    assert done.numerics.rmse == 0  # twice a number
    assert other.count == x.size
    assert other.rmse == pytest.approx(relative(made["Right"], x + 1), rel=1e-3)


@pytest.mark.parametrize("hw", DEVICES)
def test_each_kind_of_programs_has_its_error(hw: str) -> None:
    done, made, x = launch("by_program", hw, Y=((ROWS, COLUMNS), F16))
    (other,) = done.numerics.others.values()
    assert (done.numerics.count, other.count) == (4 * COLUMNS, 2 * COLUMNS)
    assert done.numerics.rmse == pytest.approx(relative(made["Y"][2:], x[2:] / 2), abs=1e-5)
    assert other.rmse == pytest.approx(relative(made["Y"][:2], 4 * x[:2] ** 2), rel=1e-3)


def test_a_sample_says_which_result_it_has_none_of() -> None:
    done, _, _ = launch("by_program", "h200", rows="5", Y=((ROWS, COLUMNS), F16))
    lines = [cell.text for name, cells in bits_facts(record_of(done)) if name == "numerics" for cell in cells]
    assert done.numerics.others == {"Y_2": None}
    assert any(
        line.startswith("Y_2: no error: the run computes no part of this output (use --rows all)") for line in lines
    )


def test_a_wrong_second_result_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = ExactLaunch.results

    def wrong(*of: Any) -> Any:
        return {at: x + 1.0 if at[0] == "Rstd" else x for at, x in of_all(*of).items()}

    monkeypatch.setattr(ExactLaunch, "results", wrong)
    done, _, _ = launch("norm_with_numbers", "h200", **NUMBERS)
    assert done.numerics.others["Rstd"].rmse > 0.1
    assert done.numerics.others["Mean"].rmse < 1e-3


def test_a_refusal_is_of_the_way_of_reading_that_came_furthest(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton import launch_ways as launches

    fails, asks = count(31), ("lists_elements", "parts_by_loops", "cuts")

    def fail(*of: Any) -> Any:
        of[-1].asked.update(asks)
        line = next(fails)
        raise ProgramError(f"result_kernels.py:{line if line < 34 else 30}: not read")

    monkeypatch.setattr(launches, "read_launch", fail)
    with pytest.raises(ProgramError, match=r"result_kernels\.py:33: not read"):
        launch("by_program", "h200", Y=((ROWS, COLUMNS), F16))


def test_what_a_reading_did_not_ask_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton import launch_ways as launches

    tried = list[tuple[bool, bool]]()

    def fail(*of: Any) -> Any:
        tried.append((of[-1].lists_elements, of[-1].cuts))
        of[-1].way("cuts")
        raise ProgramError("result_kernels.py:31: not read")

    monkeypatch.setattr(launches, "read_launch", fail)
    with pytest.raises(ProgramError, match=r"result_kernels\.py:31: not read"):
        launch("by_program", "h200", Y=((ROWS, COLUMNS), F16))
    assert tried == [(False, False), (False, True)]


def test_a_state_is_stored_before_a_product_is_added_to_it() -> None:
    from ttir import result_kernels as kernels

    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((64, 16)).astype(np.float16) for _ in range(2))
    h, ht = np.zeros((2, 16, 16), np.float32), np.zeros((16, 16), np.float32)
    with npusim.record(floats=True) as calls:
        for late in (False, True):
            kernels.states_of_chunks[(1,)](K=k, V=v, H=h, HT=ht, C=32, D=16, T=64, LATE=late)
    done = npusim.run(calls[0], hw="h200", rows="all")
    each = np.einsum("ctk,ctv->ckv", *(x.astype(np.float64).reshape(2, 32, 16) for x in (k, v)))
    assert np.abs(np.asarray(done.output).reshape(h.shape) - np.stack([0 * each[0], each[0]])).max() < 1e-4
    assert done.numerics.others["HT"].rmse < 1e-6
    with pytest.raises(ProgramError, match="is read after a product was added to it in place"):
        npusim.run(calls[1], hw="h200", rows="all")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("stores", ["before", "product", "behind", "sums"])
def test_a_state_or_what_is_added_to_it_is_stored_by_the_loop_and_the_last_one_behind_it(stores: str, hw: str) -> None:
    from ttir import result_kernels as kernels

    k, v = (np.random.default_rng(i).standard_normal((64, 16)).astype(np.float16) for i in range(2))
    words = {"K": k, "V": v, "H": np.zeros((2, 16, 16), np.float32), "HT": np.zeros((16, 16), np.float32)}
    words |= {"C": 32, "D": 16, "T": 64}
    with npusim.record(floats=True) as calls:
        if stores == "sums":
            kernels.summed_states[(1,)](**words)
        else:
            kernels.scaled_states[(1,)](**words, STORES=stores)
    done = npusim.run(calls[0], hw=hw, rows="all")
    first, second = np.einsum("ctk,ctv->ckv", *(x.astype(np.float64).reshape(2, 32, 16) for x in (k, v)))
    wanted = {
        "before": [0 * first, first / 2],
        "product": [first, second],
        "behind": [first, first / 2 + second],
        "sums": [first, first + second],
    }
    assert np.abs(np.asarray(done.output).reshape(2, 16, 16) - np.stack(wanted[stores])).max() < 1e-4
    assert done.numerics.others["HT"].rmse < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_numbers_and_tiles_of_unlike_rows_are_all_stored(hw: str) -> None:
    from ttir import result_kernels
    from ttir.stored import stored

    x = np.random.default_rng(0).standard_normal((7, 13)).astype(F32)
    total = x.astype(np.float64).sum(1)
    for tiles, numbers in ((7, 5), (4, 7), (6, 7)):
        words = {"X": x, "Y": np.zeros_like(x), "T": np.zeros(7, F32)}
        with npusim.record(floats=True) as calls:
            result_kernels.numbers_of_other_rows[(2,)](**words, R=7, n=13, tiles=tiles, numbers=numbers, BR=4, B=16)
            result_kernels.number_beside_some_tiles[(7,)](**words, n=13, rows=tiles, B=16)
        for call, last in zip(calls, (numbers, 7), strict=True):
            made = stored(npusim.run(call, hw=hw, rows="all"), words)
            assert not np.isnan(made["T"][:last]).any()
            assert np.isnan(made["T"][last:]).all()
            assert np.isnan(made["Y"][tiles:]).all()
            assert np.allclose(made["T"][:last], total[:last], rtol=1e-5, atol=1e-5)
            assert np.allclose(made["Y"][:tiles], (x - total[:, None])[:tiles], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("kind", "block"), [(0, 16), (1, 64), (2, 64)])
def test_a_copy_beside_computed_results_leaves_none_out(hw: str, kind: int, block: int) -> None:
    from ttir import result_kernels
    from ttir.stored import stored

    x = np.random.default_rng(0).standard_normal((3, 37)).astype(F32)
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros_like(x), "T": np.zeros(3, F32)}
    with npusim.record(floats=True) as calls:
        result_kernels.copied_beside[(3,)](**words, n=37, B=block, KIND=kind)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), words)
    assert np.array_equal(made["Y"], x)
    assert kind == 0 or np.array_equal(made["Z"], kind * x)
    assert kind == 1 or np.allclose(made["T"], x.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", ["tiles", "rows"])
def test_a_store_behind_an_if_in_a_loop_is_of_every_tile(hw: str, kind: str) -> None:
    from ttir.checked_launches import checked

    x = np.random.default_rng(0).standard_normal((3, 29)).astype(F32)
    some = np.arange(29) > 7 if kind == "tiles" else np.arange(3)[:, None] > 1
    wanted = {"Y": np.where(some, 2.0 * x, np.nan), "Z": 3.0 * x}
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros_like(x), "n": 29, "B": 8, "KIND": kind}
    checked("result_kernels", "stored_in_some_tiles", (3,), words, wanted, hw)


def test_tiles_that_a_loop_in_a_loop_overwrites_are_refused_by_name() -> None:
    from ttir import result_kernels

    x, y = np.zeros((2, 3, 13), F32)
    with npusim.record(floats=True) as calls:
        result_kernels.stored_in_inner_tiles[(3,)](x, y, 13, 3, B=8, BLOCK=16)
    with pytest.raises(ProgramError, match=r"result_kernels\.py:\d+: (?!.*ValueError)"):
        npusim.run(calls[0], hw="h200", rows="all")
