"""``tl.dot`` of float32 and of FP8: the units of compiled code, and refusals of other precisions and devices."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from pathlib import Path
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


#: Factors and sums of an H200, as bit patterns, by FORMAT/STORED FORMAT OF B/FORMAT OF SUMS/(joined|alone)/DEPTH OF A
#: TILE/WARPS, computed by the kernel ``product_of_bytes`` (Triton 3.6.0).
CHIP = np.load(Path(__file__).with_name("turns_h200.npz"))
CHIP_CASES = sorted({name.rpartition("/")[0] for name in CHIP.files})


def _turns(case: str, *, depth: int = 0, hw: str = "h200") -> tuple[Any, ...]:
    """Return a chip's factors, as they are multiplied, what npusim computes from them, and the chip's sums."""
    import triton.language as tl

    from ttir import precision_kernels
    from ttir.stored import stored

    fmt, narrow, total, how, tile, warps = case.split("/")
    a, b, c = (CHIP[f"{case}/{n}"].view(of) for n, of in zip("ABC", (fmt, narrow, total), strict=True))
    words = {"A": a, "B": b, "C": np.zeros_like(c)}
    sizes = {"K": a.shape[1], "M": len(a), "N": c.shape[1], "BK": depth or int(tile)}
    options = {"OF": getattr(tl, fmt), "SUM": getattr(tl, total), "HALF": how == "joined", "num_warps": int(warps)}
    with npusim.record(floats=True) as calls:
        precision_kernels.product_of_bytes[(1,)](**words, **sizes, **options)
    call: Any = calls[0]
    made = stored(npusim.run(call, hw=hw, rows="all"), words)["C"].astype(total)
    wide = b.astype(np.float32)
    wide = np.stack([wide * 0.5, wide], -1).reshape(len(b), -1) if how == "joined" else wide
    return a, wide.astype(fmt), made, c


@pytest.mark.parametrize("case", CHIP_CASES)
def test_neighbours_that_a_lane_holds_are_multiplied_in_turns(case: str) -> None:
    """A lane holds more neighbours along k of each factor than a register does if elements are narrower in memory, or
    joined; an instruction then multiplies one register of each.
    """
    a, b, made, chip = _turns(case)
    assert np.array_equal(made, chip)
    fmt, narrow, total, how, tile, warps = case.split("/")
    unit = {"float16": "k16.f16", "bfloat16": "k16.bf16", "float32": "k8.tf32"}[fmt]
    ascending = matmul(a, b, arithmetic=f"hopper.mma.{unit}.{'f16' if total == 'float16' else 'f32'}")
    # warp groups read B from shared memory; four lanes with four elements each hold 16, all of one instruction
    is_plain = warps == "4" or (fmt != "float32" and tile == "16") or (fmt, narrow, how) == (fmt, fmt, "alone")
    assert np.array_equal(ascending, chip) == is_plain


def test_turns_on_another_chip_have_its_own_sums() -> None:
    """An A100 adds 8 products at a time, the first turn's first sixteen neighbours before its other ones."""
    a, b, made, _ = _turns("float16/int8/float16/alone/64/1", hw="a100")
    k, sums = np.arange(256), np.zeros(made.shape, np.float16)
    for start, turn, half in product(range(0, 256, 32), (0, 1), (0, 16)):
        of = (k // 16 * 16 == start + half) & (k % 4 // 2 == turn)
        sums = matmul(
            np.ascontiguousarray(a[:, of]), np.ascontiguousarray(b[of]), sums, arithmetic="ampere.mma.k8.f16.f16"
        )
    assert np.array_equal(made, sums)


def test_products_in_two_orders_are_noted() -> None:
    """A mask of bytes is loaded for P, the left factor of the second product, so that only this one has turns."""
    from ttir import loaded_kernels

    rng, shape = np.random.default_rng(3), (1, 64, 32)
    words = {n: rng.standard_normal(shape).astype(np.float16) for n in "QKVO"} | {"Mask": np.ones((1, 64), np.int8)}
    with npusim.record(floats=True) as calls:
        loaded_kernels.masked_attention[(4, 1)](**words, S=64, scale=0.125, D=32, BM=16, BN=32, HOW="keys")
    call: Any = calls[0]
    result = npusim.run(call, hw="h200", rows="all")
    assert any("some products of float16 with k ascending and others in turns" in note for note in result.notes)


@pytest.mark.parametrize("hw", ["a100", "l40s"])
def test_a_loop_whose_rows_are_factors_runs_without_warp_groups(hw: str) -> None:
    """The walk of compiled loops needs a device with products of warp groups; others price the loop by its steps."""
    from ttir import loaded_kernels

    rng, shape = np.random.default_rng(3), (1, 64, 32)
    words = {n: rng.standard_normal(shape).astype(np.float16) for n in "QKVO"} | {"Mask": np.ones((1, 64), np.int32)}
    with npusim.record(floats=True) as calls:
        loaded_kernels.masked_attention[(2, 1)](**words, S=64, scale=0.125, D=32, BM=32, BN=32, HOW="keys")
    call: Any = calls[0]
    result = npusim.run(call, hw=hw, rows="all")
    assert result.numerics is not None
    assert result.numerics.rmse is not None
    assert result.numerics.rmse < 1e-3


def test_a_tile_less_deep_than_its_lanes_is_refused() -> None:
    """Triton 3.6 multiplies a part of such a tile twice: an H200's sums are not the product's."""
    where = r"precision_kernels\.py:\d+: .*not known \(mma_half\.k64/16\).*a depth of 32 or more"
    with pytest.raises(NpusimError, match=where):
        _turns("float16/int8/float16/joined/64/1", depth=16)


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float8e5"])
def test_conversions_toward_zero_are_refused(fmt: str) -> None:
    import triton.language as tl

    from ttir import precision_kernels

    with npusim.record() as calls:
        precision_kernels.rounded_down[(1,)](np.ones(16, np.float32), np.ones(16, np.float32), getattr(tl, fmt), 16)
    with pytest.raises(NpusimError, match=r'precision_kernels\.py:\d+: fp_downcast_rounding="rtz" is not supported'):
        npusim.run(calls[0], hw="h200")
