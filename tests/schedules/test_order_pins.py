"""Defaults that move bits but no error measure: orders of sums, starts and masks, against scalar sums.

Values are made visible with V = I: the output of key j is its probability.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from npusim.library.pasa import ShiftingMatrix
from npusim.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("declared_tiles")

KEYS = 256
#: Head size 16: the scale 1/4 rounds nothing.
SIZE = 16


def attend(schedule: str, hw: str, tensors: dict[str, Any], **options: Any) -> Any:
    shaped = {name: x[None, None] for name, x in tensors.items()}
    options = {"rows": "all", "causal": False, "trace_groups": (), **options}
    return run(schedule, hw=hw, tensors=shaped, **options).output[0, 0]


def scored(scores: Any, dtype: Any) -> dict[str, Any]:
    """Q, K and V whose scaled scores are exactly ``scores`` (rows, keys), and V = I."""
    rows, keys = scores.shape
    q, k = np.zeros((rows, keys), dtype), np.zeros((keys, keys), dtype)
    assert keys == KEYS  # a head size whose root is 16
    q[...], k[np.arange(keys), np.arange(keys)] = scores * 16, 1
    assert (q.astype(float) == scores * 16).all()
    return {"q": q, "k": k, "v": np.eye(keys, dtype=dtype)}


def left_to_right(row: Any) -> Any:
    return reduce(np.add, row)


def halves(row: Any) -> Any:
    while len(row) > 1:
        row = row[: len(row) // 2] + row[len(row) // 2 :]
    return row[0]


def neighbours(row: Any) -> Any:
    while len(row) > 1:
        row = row[::2] + row[1::2]
    return row[0]


def lanes_of_32_bytes(row: Any) -> Any:
    """Blocks of 32 bytes, each a tree of neighbours; their sums again, until one is left."""
    width = 32 // row.dtype.itemsize
    while len(row) > 1:
        blocks = [neighbours(row[i : i + width]) for i in range(0, len(row), width)]
        row = np.array(blocks, row.dtype)
    return row[0]


ORDERS: dict[str, Callable[[Any], Any]] = {
    "sequential": left_to_right,
    "tree_halves": halves,
    "vector_lanes": lanes_of_32_bytes,
}


def exponentials(scores: Any) -> Any:
    """e^(s - max) rounded to float32; scores are multiples of 1/64, so that s - max is exact."""
    return np.exp(scores - scores.max(axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def scores() -> Any:
    return np.random.default_rng(12).integers(-256, 256, (192, KEYS)) / 64.0


def test_standard_adds_rows_as_the_vector_unit_does(scores: Any) -> None:
    """P = e / l in float32, stored as float16: a sum in another order shows in a few values."""
    got = attend("standard", "ascend_910b2", scored(scores, np.float16))
    e = exponentials(scores)
    differing = {}
    for name, order in ORDERS.items():
        sums = np.array([order(row) for row in e])[:, None]
        differing[name] = int(((e / sums).astype(np.float16) != got).sum())
    assert differing.pop("vector_lanes") == 0
    assert min(differing.values()) > 0


@pytest.mark.parametrize("schedule", ["flash", "two_level"])
def test_flash_adds_rows_as_the_vector_unit_does(schedule: str, scores: Any) -> None:
    """The preset's own order (asked for nothing but an output that shows float32)."""
    got = attend(
        schedule,
        "ascend_910b2",
        scored(scores, np.float16),
        precision="output=float32",
        tiling={"block_q": 32, "block_kv": KEYS},
    )
    e = exponentials(scores)
    differing = {}
    for name, order in ORDERS.items():
        sums = np.array([order(row) for row in e])[:, None]
        differing[name] = int((e.astype(np.float16).astype(np.float32) / sums != got).sum())
    assert differing.pop("vector_lanes") == 0
    assert min(differing.values()) > 0


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
@pytest.mark.parametrize("variant", ["exp.correct", "exp2.exp2p", "exp2.correct"])
def test_a_folded_scale_is_the_scale_whatever_the_base(variant: str, hw: str) -> None:
    """P S = e^(s - m + ln S) reaches S = 256 in E4M3, with powers of two as with those of e."""
    codes = np.arange(0x08, 0x78, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    held = codes[codes.astype(float) < 256].astype(float)
    # A third of the way to a tie: no rounding of the exponential reaches it.  The last key, which
    # is visited first, has the largest score.
    p = np.append(held + (held - np.append(0.0, held[:-1])) / 6, 256.0)
    p = np.append(np.full(KEYS - len(p), 2.0**-12), p)
    dtype = np.float32 if hw == "h200" else np.float16
    size = 16
    q, k = np.zeros((1, size), dtype), np.zeros((KEYS, size), dtype)
    q[0, 0], k[:, 0] = 4, np.log(p / 256)
    p = 256 * np.exp(k[:, 0].astype(float))
    got = attend(
        "fp8_attention",
        hw,
        {"q": q, "k": k, "v": np.eye(KEYS, dtype=dtype)},
        precision=f"fa3,output=float32,exp_variant={variant}",
    )
    cast = p.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_allclose(got[0], cast / p.sum(), rtol=1e-5)


def pasa_with_a_fixed_reference(q: Any, k: Any, v: Any, keys: int, beta: float) -> Any:
    """One line after the other in float16, F the mean of the first tile (reports/pasa_numerics)."""
    half = np.float16
    matrix = ShiftingMatrix(keys, beta, math.sqrt(q.shape[1]))
    inverse, per_key = half(matrix.correction(is_ideal=False)), half(1 / keys)
    m, total, reference = half(-np.inf), half(0), half(0)
    out = np.zeros(v.shape[1], half)
    for first in range(0, len(k), keys):
        tile = slice(first, first + keys)
        shifted = (matrix.values()[0, 0].astype(float) @ k[tile].astype(float)).astype(half)
        s = (shifted.astype(float) @ q[0].astype(float)).astype(half)
        if first == 0:
            reference = halves(s * per_key)
        mean = halves((s - reference) * per_key)
        top = s.max()
        p = np.exp((s - top).astype(float)).astype(half)
        candidate = (top - reference) + mean * inverse
        new = max(m, candidate)
        old_factor = half(np.exp(float(m - new)))
        factor = half(np.exp(float(candidate - new)))
        total = old_factor * total + factor * halves(p)
        product = (p.astype(float) @ v[tile].astype(float)).astype(np.float32).astype(half)
        out = product * factor + out * old_factor
        m = new
    return out / total


def test_a_fixed_reference_starts_from_the_first_mean_alone() -> None:
    rng = np.random.default_rng(5)
    # Whole numbers keep the float64 products of the scalar version exact.
    tensors = {
        "q": rng.integers(-8, 9, (64, SIZE)).astype(np.float16),
        "k": rng.integers(1, 5, (48, SIZE)).astype(np.float16),
        "v": rng.integers(-16, 17, (48, SIZE)).astype(np.float16),
    }
    beta = 1 - 2.0**-4
    got = attend(
        "pasa",
        "ascend_910b2",
        tensors,
        precision="fixed_reference,sum_order=tree_halves",
        tiling={"block_q": 64, "block_kv": 16, "beta": beta},
    )
    rows = [
        pasa_with_a_fixed_reference(tensors["q"][i : i + 1], tensors["k"], tensors["v"], 16, beta) for i in range(64)
    ]
    np.testing.assert_array_equal(got.view(np.uint16), np.array(rows).view(np.uint16))


@pytest.mark.parametrize("precision", ["fp16_mean", "fp32_mean", "fixed_reference"])
def test_a_masked_key_of_pasa_loses_to_scores_of_minus_4500(precision: str) -> None:
    """Row 0 sees key 0 alone, whose scaled score is 20 * -20 * 128 / sqrt(128) = -4525."""
    q, k = np.full((128, 128), 20, np.float16), np.zeros((128, 128), np.float16)
    k[0] = -20
    v = np.repeat(np.arange(128, dtype=np.float16)[:, None], 128, axis=1)
    got = attend("pasa", "ascend_910b2", {"q": q, "k": k, "v": v}, precision=precision, causal=True)
    assert (got[0] == 0).all()
    assert np.isfinite(got).all()
