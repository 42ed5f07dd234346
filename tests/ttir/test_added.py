"""Atomic additions as parts, and factors of FP8 where a unit multiplies none: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.kernels.triton import latest_readings, ttir_text

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
if find_spec("triton") is not None:
    from ttir import added_kernels as kernels
    from ttir.stored import stored
DEVICES = ("ascend_910b2", "h200")


def _run(name: str, grid: tuple[int, ...], hw: str, **words: Any) -> Any:
    with npusim.record(floats=True) as calls:
        getattr(kernels, name)[grid](**words)
    return npusim.run(calls[0], hw=hw, rows="all")


def test_programs_add_products_of_parts_of_k() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 192)).astype(np.float16), rng.standard_normal((192, 64)).astype(np.float16)
    c = rng.standard_normal((64, 64)).astype(np.float32)
    sizes = {"M": 64, "N": 64, "K": 192, "BM": 32, "BN": 32, "BK": 32, "SPLIT": 3}
    done = _run("split_product", (2, 2, 3), "h200", A=a, B=b, C=c, **sizes)
    expected = c + a.astype(np.float64) @ b
    assert np.abs(np.reshape(done.output, c.shape) - expected).max() < 1e-4
    assert done.numerics.error.rmse < 1e-5
    assert any("atomic additions: " in n for n in done.notes)


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_add_rows_to_one(hw: str) -> None:
    rng = np.random.default_rng(1)
    x, w, dw = (rng.standard_normal(s).astype(np.float32) for s in ((7, 40), 40, 40))
    words = {"X": x, "W": w, "Y": np.zeros_like(x), "DW": dw, "N": 40, "B": 64}
    done = _run("column_sums", (7,), hw, **words, KIND=0)
    expected = dw + x.astype(np.float64).sum(0)
    assert np.abs(np.reshape(done.output, 40) - expected).max() < 1e-5
    assert done.numerics.error.rmse < 1e-6
    # The tile that each program stores by itself has its error, too.
    (beside,) = done.numerics.others.values()
    wide = x.astype(np.float64) * w
    assert beside.count == x.size
    assert beside.rmse == pytest.approx(np.linalg.norm(x * w - wide) / np.linalg.norm(wide), rel=1e-6)


def test_other_atomic_operations_are_refused() -> None:
    x, w, dw = np.ones((6, 40), np.float32), np.ones(40, np.float32), np.zeros(64, np.float32)
    words = {"X": x, "W": w, "Y": np.zeros_like(x), "DW": dw, "N": 40, "B": 64}
    for kind, why in ((1, "only supported atomic"), (2, "use of the old value|only one tl.atomic_add")):
        with pytest.raises(
            ProgramError, match=rf"added_kernels\.py:\d+: .*({why}|use of the old value that it returns)"
        ):
            _run("column_sums", (6,), "h200", **words, KIND=kind)
    with pytest.raises(ProgramError, match=r"added_kernels\.py:\d+: "):  # blocks that overlap, not the same ones
        _run("column_sums", (6,), "h200", **words, KIND=3)


@pytest.mark.parametrize("hw", DEVICES)
def test_factors_of_fp8_have_all_of_their_numbers(hw: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.float8_e4m3fn) for s in ((64, 128), (32, 128)))
    words = {"C": np.zeros((64, 32), np.float32), "N": 32, "K": 128, "BM": 32, "BN": 32, "BK": 64}
    done = _run("narrow_product", (2,), hw, A=a, B=b, **words)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    error = np.abs(np.reshape(done.output, expected.shape) - expected).max()
    assert error < (2e-5 if hw == "ascend_910b2" else 2e-2)  # a GPU's unit adds FP8 up to fewer bits
    assert any("the matrix unit does not multiply FP8" in n for n in done.notes) == (hw == "ascend_910b2")


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (4,), (2, 2)])
def test_programs_add_numbers_to_elements_of_a_tensor_of_any_shape(hw: str, shape: tuple[int, ...]) -> None:
    """Elements to which no program adds stay as they are."""
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((8, 13)).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    expected = y.astype(np.float64)
    np.add.at(expected.reshape(-1), np.arange(8) % 2, x.astype(np.float64).sum(1))
    done = _run("numbers_added", (8,), hw, X=x, Y=y, N=13, K=2, B=16)
    assert np.abs(np.reshape(done.output, shape) - expected).max() < 1e-5


def _gradients(kind: int) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(4)
    q, k, d = (rng.standard_normal((64, 16)).astype(np.float16) for _ in range(3))
    dq, dk = (rng.standard_normal((64, 16)).astype(np.float32) for _ in range(2))
    with npusim.record(floats=True) as calls:
        kernels.gradients[(2,)](Q=q, K=k, D=d, DQ=dq, DK=dk, T=64, BM=32, BN=16, C=16, KIND=kind)
    return calls[0], {"Q": q, "K": k, "D": d, "DQ": dq, "DK": dk}


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", [0, 1])
def test_programs_add_to_several_tensors_inside_and_behind_a_loop(kind: int, hw: str) -> None:
    call, x = _gradients(kind)
    s = (x["K"].astype(np.float64) @ x["Q"].astype(np.float64).T * 0.125).astype(np.float16).astype(np.float64)
    dk = s @ x["D"].astype(np.float64) + (x["DK"] if kind else 0)
    made = stored(npusim.run(call, hw=hw, rows="all"), x)
    for name, wanted in (("DQ", x["DQ"] + s.T @ x["K"].astype(np.float64)), ("DK", dk)):
        assert np.abs(made[name] - wanted).max() < 5e-3 * np.abs(wanted).max(), name


@pytest.mark.parametrize("kind", [2, 3])
def test_a_tensor_that_is_added_to_twice_or_also_loaded_is_refused(kind: int) -> None:
    call, _ = _gradients(kind)
    with pytest.raises(ProgramError, match=r"added_kernels\.py:\d+: a kernel may have only one tl.atomic_add"):
        npusim.run(call, hw="h200", rows="all")


def _content(operations: list[ttir_text.Op]) -> list[Any]:
    fields = ("name", "results", "operands", "text", "type", "line", "place")
    return [[*(getattr(o, n) for n in fields), _content(o.body), _content(o.otherwise)] for o in operations]


def test_a_text_is_read_once_and_no_reader_changes_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list[str]()
    monkeypatch.setattr(latest_readings, "read", lambda text: texts.append(text) or ttir_text.read(text))
    x, w, dw = np.ones((7, 40), np.float32), np.ones(40, np.float32), np.zeros(40, np.float32)
    _run("column_sums", (7,), "h200", X=x, W=w, Y=np.zeros_like(x), DW=dw, N=40, B=64, KIND=0)
    assert len(texts) > len(set(texts))
    for text in set(texts):
        assert ttir_text.read(text) is ttir_text.read(text)
        assert _content(ttir_text.read(text).operations) == _content(ttir_text.read.__wrapped__(text).operations)


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("kind", "count"), [(0, 2), (1, 2), (2, 1)])
def test_a_sum_of_columns_is_not_read_as_one_of_rows_where_every_row_has_it(kind: int, count: int, hw: str) -> None:
    x = np.random.default_rng(4).standard_normal((count * 32, 32)).astype(np.float32)
    y = np.zeros((16 if kind > 1 else 32, 32), np.float32)
    sums = x.reshape(count, 32, 32).astype(np.float64).sum(1)
    wanted = {0: x.reshape(count, 32, 32).sum(0) + sums.sum(0), 1: sums.sum(0), 2: sums[0]}[kind]
    words = {"X": x, "Y": y}
    try:
        done = _run("added_down", (count,), hw, **words, R=32, C=32, KIND=kind)
    except ProgramError as error:
        assert "rows npusim reads as columns" in str(error) or "their axes differ" in str(error)
        return
    assert np.abs(stored(done, words)["Y"] - np.broadcast_to(wanted, y.shape)).max() < 1e-4


@pytest.mark.parametrize(("kind", "hw"), [(0, "h200"), (0, "ascend_910b2"), (1, "h200"), (2, "ascend_910b2")])
def test_a_condition_of_an_atomic_addition_hides_elements(kind: int, hw: str) -> None:
    """A part that only a list of elements selects was once added up as zeros."""
    x = np.random.default_rng(2).standard_normal((6, 16)).astype(np.float32)
    done = _run("chosen_sums", (6,), hw, X=x, O=np.ones(16, np.float32), N=16, B=16, KIND=kind)
    chosen = (np.arange(16) > 2) & np.ones_like(x, bool) if kind == 0 else x > 0
    assert np.abs(np.ravel(done.output) - 1 - np.where(chosen, x, 0).astype(np.float64).sum(0)).max() < 1e-5


def test_rows_of_a_block_that_are_added_to_one_row_are_refused() -> None:
    words = {"X": np.ones((8, 16), np.float32), "O": np.zeros(16, np.float32)}
    with pytest.raises(ProgramError, match="several elements of one block are added to one element"):
        _run("rows_onto_one", (2,), "h200", **words, N=16, B=16, R=4)
