"""``tl.dot`` of float32 and of FP8: the units of compiled code, and refusals of other precisions and devices."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ml_dtypes  # noqa: F401  (names of formats)
import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError
from npusim.formats import matmul

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
M, N, K = 32, 64, 128
RANDOM = np.random.default_rng(0)
WORDS = {
    "A": RANDOM.standard_normal((M, K)).astype(np.float32),
    "B": RANDOM.standard_normal((K, N)).astype(np.float32),
    "C": np.zeros((M, N), np.float32),
}


def _call(precision: str) -> Any:
    from ttir import precision_kernels

    with npusim.record(floats=True) as calls:
        precision_kernels.product[(1,)](**WORDS, K=K, P=precision, M=M, N=N, BK=32)
    return calls[0]


def test_factors_are_truncated_to_tf32() -> None:
    """Bits of an H200: cases ``matmul_f32`` of test_silicon.py."""
    from ttir.stored import stored

    result = npusim.run(_call("tf32"), hw="h200", rows="all")
    a, b = ((WORDS[n].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for n in "AB")
    made, exact = stored(result, WORDS)["C"], WORDS["A"].astype(np.float64) @ WORDS["B"].astype(np.float64)
    assert np.linalg.norm(made - a @ b) < 1e-6 * np.linalg.norm(exact) < np.linalg.norm(a @ b - exact)
    assert any("factors of float32 are multiplied as TF32" in note for note in result.notes)


def test_ieee_products_are_chains_of_fma_on_lanes() -> None:
    """Bits of an H200: from the accumulator on, one fused multiply-add after the other, in ascending k."""
    from ttir.stored import stored

    result = npusim.run(_call("ieee"), hw="h200", rows="all")
    a, b = (WORDS[n].astype(np.float64) for n in "AB")
    sums = np.zeros((M, N), np.float32)
    for k in range(K):
        sums = (sums + a[:, k, None] * b[k]).astype(np.float32)  # of 48 bits: float64 rounds few of these sums
    made = stored(result, WORDS)["C"]
    assert np.mean(made == sums) > 0.999
    assert np.array_equal(made, matmul(WORDS["A"], WORDS["B"], arithmetic="ieee.f32"))
    assert any("products of float32 run in the lanes" in note for note in result.notes)
    assert result.cycles > npusim.run(_call("tf32"), hw="h200", rows="all").cycles
    assert result.cycles > M * N * K / 128  # the multiprocessor's lanes


@pytest.mark.parametrize("device", ["v100", "t4"])
def test_ieee_products_need_no_matrix_unit_of_float32(device: str) -> None:
    bits = npusim.run(_call("ieee"), hw=device, rows="all").numerics
    assert bits is not None
    assert bits.rmse is not None
    assert bits.rmse < 1e-6


def test_other_precisions_are_refused_at_their_line() -> None:
    with pytest.raises(NpusimError, match=r"precision_kernels\.py:\d+: .*input_precision='tf32x3'"):
        npusim.run(_call("tf32x3"), hw="h200", rows="all")


@pytest.mark.parametrize("device", ["ascend_910b2", "v100", "t4"])
def test_a_device_without_tf32_refuses(device: str) -> None:
    with pytest.raises(NpusimError, match="float32"):
        npusim.run(_call("tf32"), hw=device, rows="all")


EIGHT = "float8_e4m3fn"


def _eights(rows: int, most: int | None, *, fmt: str = EIGHT, other: int = -1, hw: str = "h200") -> tuple[Any, ...]:
    """Return factors of FP8 and what a kernel computes from them."""
    from ttir import precision_kernels
    from ttir.stored import stored

    rng = np.random.default_rng(1)
    a, b = ((rng.standard_normal((n, 256)) * 2.0 ** rng.integers(-4, 3, (n, 256))).astype(fmt) for n in (rows, 64))
    words = {"A": a, "B": b, "C": np.zeros((rows, 64), np.float32)}
    with npusim.record(floats=True) as calls:
        precision_kernels.product_of_eights[(1,)](**words, K=256, MOST=most, OTHER=other, M=rows, N=64, BK=128)
    return a, b, np.float32(stored(npusim.run(calls[0], hw=hw, rows="all"), words)["C"])


@pytest.mark.parametrize(("rows", "most", "fmt"), [(16, None, EIGHT), (64, 0, EIGHT), (32, 64, "float8_e5m2")])
def test_fp8_that_no_warp_group_multiplies_is_multiplied_as_float16(rows: int, most: int | None, fmt: str) -> None:
    """Each lane's register has four factors, of which one instruction multiplies two and the next the others."""
    a, b, made = _eights(rows, most, fmt=fmt)
    sums = np.zeros((rows, 64), np.float32)
    for pair in np.arange(256).reshape(8, 8, 2, 2).transpose(0, 2, 1, 3).reshape(16, 16):
        factors = (np.ascontiguousarray(x) for x in (a[:, pair].astype(np.float16), b[:, pair].T.astype(np.float16)))
        sums = matmul(*factors, sums, arithmetic="hopper.mma.k16.f16.f32")
    assert np.array_equal(made, sums)
    alike = matmul(a, np.ascontiguousarray(b.T), arithmetic=f"hopper.wgmma.k32.{'e5m2' if '5' in fmt else 'e4m3'}.f32")
    assert not np.array_equal(made, alike)


@pytest.mark.parametrize("most", [64, None])
def test_partial_sums_of_fp8_are_added_in_float32(most: int | None) -> None:
    a, b, made = _eights(64, most)
    sums, unit = np.zeros((64, 64), np.float32), {"arithmetic": "hopper.wgmma.k32.e4m3.f32"}
    for k in range(0, 256, 64):
        left, right = (np.ascontiguousarray(x) for x in (a[:, k : k + 64], b[:, k : k + 64].T))
        sums = sums + matmul(left, right, **unit) if most else matmul(left, right, sums, **unit)
    assert np.array_equal(made, sums)


def test_products_of_fp8_in_two_ways_are_refused() -> None:
    with pytest.raises(NpusimError, match=rf"precision_kernels\.py:\d+: .*products of {EIGHT} .* as two different"):
        _eights(64, 64, other=32)
    with pytest.raises(NpusimError, match=r"not known \(wgmma_late\.k96\).*allowed: the same max_num_imprecise_acc"):
        _eights(64, 96)


def test_a_chip_that_multiplies_fp8_itself_has_its_own_arithmetic() -> None:
    a, b, made = _eights(16, None, hw="rtx_pro_6000")
    unit = "rtx_blackwell.mma.k32.e4m3.f32"
    assert np.array_equal(made, matmul(a, np.ascontiguousarray(b.T), arithmetic=unit))
