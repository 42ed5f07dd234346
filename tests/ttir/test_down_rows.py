"""Reductions down the rows of a block that is reduced along them too, or whose sums are reduced behind it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError
from npusim.formats import reduce_sum
from npusim.program.ir.op import DOWN, Attributes, Opcode
from npusim.program.numerics.semantics import apply

DEVICES = ("h200", "ascend_910b2", "ascend_950")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")


def drawn(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def launched(kernel: str, grid: tuple[int, ...], words: dict[str, Any], hw: str, **how: Any) -> tuple[Any, Any]:
    from ttir import down_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(down_kernels, kernel)[grid](**words, **how)
    done = npusim.run(calls[0], hw=hw, rows="all")
    return stored(done, words), done


@pytest.mark.parametrize("order", ["sequential", "lanes_2x4x2", "tree_halves"])
def test_a_sum_down_the_rows_has_the_bits_of_the_sum_of_the_transposed_tile(order: str) -> None:
    x, y = drawn(3, 16, 5), drawn(3, 16, 1)
    down = Attributes(order=order, axis=DOWN)
    made = apply(Opcode.ROW_SUM, [x], x[:, :1], "float32", down)
    assert made.shape == (3, 1, 5)
    assert np.array_equal(made[:, 0], reduce_sum(np.ascontiguousarray(x.swapaxes(1, 2)), "float32", order))
    assert np.array_equal(apply(Opcode.ROW_MAX, [x], x[:, :1], "float32", down)[:, 0], x.max(1))
    if order != "tree_halves":  # of products, of which one has one column
        made = apply(Opcode.ROW_SUM, [y, x], x[:, :1], "float32", down)
        assert np.allclose(made[:, 0], (x * y).sum(1), rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.usefixtures("without_warp_code")
@pytest.mark.parametrize("hw", DEVICES)
class TestKernels:
    def test_rows_and_columns_are_normalised_in_turn(self, hw: str) -> None:
        x, wanted = drawn(6, 4, 4), np.exp(drawn(6, 4, 4))
        for _ in range(2):
            wanted = wanted / wanted.sum(2, keepdims=True, dtype=np.float32)
            columns = [wanted[:, i] for i in range(4)]
            pairs = (columns[0] + columns[2]) + (columns[1] + columns[3])
            rows = ((columns[0] + columns[1]) + columns[2]) + columns[3]
            wanted = wanted / (rows if hw != "h200" else pairs)[:, None]
        made, done = launched("sinkhorn", (6,), {"X": x, "Y": np.zeros_like(x), "N": 4, "STEPS": 2}, hw)
        assert np.allclose(made["Y"], wanted, rtol=1e-6)
        assert done.numerics.error.rmse < 1e-6

    def test_maxima_of_columns_and_rows_are_exact(self, hw: str) -> None:
        x = drawn(4, 8, 16)
        wanted = x * x.max(1, keepdims=True) - x.max(2, keepdims=True)
        words = {"X": x, "Y": np.zeros_like(x), "N": 16, "M": 8}
        made, done = launched("largest_each_way", (4,), words, hw)
        assert done.numerics.error.rmse < 1e-6
        assert np.allclose(made["Y"], wanted, atol=1e-6)

    @pytest.mark.parametrize("warps", [4, 8])
    def test_attention_of_one_query_sums_scores_along_rows_and_values_down_them(self, hw: str, warps: int) -> None:
        q, k, v = drawn(4, 32), drawn(4, 100, 32), drawn(4, 101, 32)[:, 1:]
        words = {"Q": q, "K": k, "V": np.ascontiguousarray(v), "O": np.zeros_like(q), "n": 100, "D": 32, "B": 16}
        made, done = launched("decode", (4,), words, hw, num_warps=warps)
        scores = np.einsum("hd,hnd->hn", q, k, dtype=np.float64)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        wanted = np.einsum("hn,hnd->hd", weights, v) / weights.sum(1, keepdims=True)
        assert np.allclose(made["O"], wanted, atol=1e-5)
        assert done.numerics.error.rmse < 1e-5

    def test_a_loop_adds_up_columns_of_rows_that_it_normalises(self, hw: str) -> None:
        x, dy, w = drawn(32, 64), drawn(33, 64)[1:].copy(), drawn(64)
        words = {"DY": dy, "X": x, "W": w, "DX": np.zeros_like(x), "DW": np.zeros((2, 64), np.float32)}
        made, _ = launched("norm_backward", (2,), {**words, "N": 64, "B": 8, "ROWS": 16}, hw)
        rstd = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
        hat, scaled = x * rstd, w * dy.astype(np.float64)
        assert np.allclose(made["DX"], (scaled - hat * (hat * scaled).mean(1, keepdims=True)) * rstd, atol=1e-5)
        assert np.allclose(made["DW"], (dy * hat).reshape(2, 16, 64).sum(1), atol=1e-5)

    def test_a_row_that_is_reduced_and_meets_itself_down_a_block_is_refused(self, hw: str) -> None:
        words = {"X": drawn(4, 16), "Y": np.zeros((4, 16, 16), np.float32), "N": 16}
        with pytest.raises(ProgramError, match=r"down_kernels\.py:\d+: "):
            launched("centred_products", (4,), words, hw)

    def test_rows_and_columns_beyond_a_tensor_are_zero_in_sums_each_way(self, hw: str) -> None:
        x = drawn(6, 5, 3)
        wanted = np.exp(x - x.max(2, keepdims=True)).astype(np.float64)
        for _ in range(2):
            wanted /= wanted.sum(2, keepdims=True) + 1e-6
            wanted /= wanted.sum(1, keepdims=True) + 1e-6
        words = {"X": x, "Y": np.zeros_like(x), "M": 5, "N": 3, "B": 8, "STEPS": 2}
        made, done = launched("padded_sinkhorn", (6,), words, hw)
        assert np.allclose(made["Y"], wanted, rtol=1e-5)
        assert done.numerics.error.rmse < 1e-6


@needs_triton
@pytest.mark.parametrize("hw", DEVICES[:2])
def test_sums_along_rows_of_sums_down_them_are_refused(hw: str) -> None:
    """A scan's result has the axes of its operand: both are turned, or none of them."""
    from ttir import down_kernels

    x = np.ones((16, 16), np.float32)
    with npusim.record(floats=True) as calls:
        down_kernels.sums_of_sums_down[(2,)](x, np.zeros(16, np.float32), 16, 8)
    with pytest.raises(ProgramError, match=r"down_kernels\.py:\d+: tl\.cumsum down the rows of this block is not"):
        npusim.run(calls[0], hw=hw)
