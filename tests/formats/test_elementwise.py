from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim import formats
from npusim.errors import FormatError
from npusim.formats import get_format
from tests.formats.reference import fma_reference, operation_reference

NAMES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "tf32", "float32")
BINARY = {
    "add": formats.add,
    "sub": formats.sub,
    "mul": formats.mul,
    "div": formats.div,
    "max": formats.maximum,
    "min": formats.minimum,
}


def patterns_of(name: str, count: int, seed: int) -> Any:
    """Stored patterns: half of them any, half near one another, so that sums are inexact."""
    fmt = get_format(name)
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 1 << fmt.bits, count // 2)
    one = fmt.bias << fmt.mantissa_bits
    near = one + rng.integers(-(6 << fmt.mantissa_bits), 6 << fmt.mantissa_bits, count - count // 2)
    near |= rng.integers(0, 2, near.size) << (fmt.bits - 1)
    return (np.concatenate((any_bits, near)) << fmt.storage_shift).astype(fmt.bits_dtype)


def same(got: Any, wanted: list[int], name: str) -> None:
    """Equal bits; float32's NaN payload is numpy's own."""
    fmt = get_format(name)
    bits = got.view(fmt.bits_dtype).tolist()
    if name == "float32":
        nan = np.isnan(got)
        bits = np.where(nan, fmt.canonical_nan_bits, got.view(np.uint32)).tolist()
    assert bits == wanted


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div", "max"])
def test_float16_binary_operations_equal_the_h200(operation: str, golden: Any) -> None:
    rows = np.load(golden("half3.npz"))
    x, y = (rows[f"{operation}/{role}"].view(np.float16) for role in "xy")
    got = BINARY[operation](x, y, "float16")
    np.testing.assert_array_equal(got.view(np.uint16), rows[f"{operation}/o"])


def test_float16_fma_equals_the_h200(golden: Any) -> None:
    rows = np.load(golden("half3.npz"))
    x, y, z = (rows[f"fma/{role}"].view(np.float16) for role in "xyz")
    got = formats.fma(x, y, z, "float16")
    np.testing.assert_array_equal(got.view(np.uint16), rows["fma/o"])


def test_float16_sqrt_equals_the_h200(golden: Any) -> None:
    rows = np.load(golden("half3.npz"))
    got = formats.sqrt(rows["sqrt/x"].view(np.float16), "float16")
    np.testing.assert_array_equal(got.view(np.uint16), rows["sqrt/o"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", BINARY)
def test_binary_operations_equal_their_scalar_twin(operation: str, name: str) -> None:
    fmt = get_format(name)
    x, y = patterns_of(name, 600, 1), patterns_of(name, 600, 2)
    got = BINARY[operation](x.view(fmt.dtype), y.view(fmt.dtype), name)
    wanted = [operation_reference(operation, int(a), int(b), fmt) for a, b in zip(x, y, strict=True)]
    same(got, wanted, name)


@pytest.mark.parametrize("name", NAMES)
def test_sqrt_equals_its_scalar_twin(name: str) -> None:
    fmt = get_format(name)
    x = patterns_of(name, 300, 3)
    got = formats.sqrt(x.view(fmt.dtype), name)
    same(got, [operation_reference("sqrt", int(a), 0, fmt) for a in x], name)


@pytest.mark.parametrize("name", NAMES)
def test_fma_equals_its_scalar_twin(name: str) -> None:
    fmt = get_format(name)
    x, y, z = (patterns_of(name, 800, seed) for seed in (4, 5, 6))
    got = formats.fma(*(item.view(fmt.dtype) for item in (x, y, z)), name)
    rows = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    same(got, [fma_reference(*row, fmt) for row in rows], name)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]),
    operation=st.sampled_from(sorted(BINARY)),
    data=st.data(),
)
def test_any_patterns_equal_the_scalar_twin(name: str, operation: str, data: Any) -> None:
    fmt = get_format(name)
    top = (1 << fmt.bits) - 1
    x, y, z = (data.draw(st.integers(0, top)) for _ in range(3))
    arrays = [np.array([item], fmt.bits_dtype).view(fmt.dtype) for item in (x, y, z)]
    got = BINARY[operation](arrays[0], arrays[1], name)
    assert got.view(fmt.bits_dtype).tolist() == [operation_reference(operation, x, y, fmt)]
    got = formats.fma(*arrays, name)
    assert got.view(fmt.bits_dtype).tolist() == [fma_reference(x, y, z, fmt)]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("operation", ["add", "mul", "div"])
def test_all_pairs_of_fp8_equal_exact_arithmetic(operation: str, name: str) -> None:
    fmt = get_format(name)
    every = np.arange(256, dtype=np.uint8)
    x, y = np.meshgrid(every, every[::3])
    got = BINARY[operation](x.view(fmt.dtype), y.view(fmt.dtype), name).view(np.uint8)
    pairs = zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)
    wanted = [operation_reference(operation, a, b, fmt) for a, b in pairs]
    assert got.ravel().tolist() == wanted


def test_bfloat16_products_are_not_rounded_twice_near_the_subnormals() -> None:
    # 0x1.03p-67 * 0x1.fcp-67 is just above a tie of the bfloat16 subnormals (quantum 2**-133);
    # in float32 (quantum 2**-149) the excess is lost and the tie goes to even.
    rng = np.random.default_rng(0)
    fmt = get_format("bfloat16")
    x = rng.integers(0x1E00, 0x2000, 20000).astype(np.uint16)
    y = rng.integers(0x1E00, 0x2000, 20000).astype(np.uint16)
    got = formats.mul(x.view(fmt.dtype), y.view(fmt.dtype), "bfloat16").view(np.uint16)
    a, b = (item.view(fmt.dtype).astype(np.float32) for item in (x, y))
    twice = (a * b).astype(fmt.dtype).view(np.uint16)
    differing = np.flatnonzero(got != twice)
    for index in differing[:50]:
        wanted = operation_reference("mul", int(x[index]), int(y[index]), fmt)
        assert int(got[index]) == wanted


def test_float64_fma_rounds_once() -> None:
    # (1 + 2**-52)**2 = 1 + 2**-51 + 2**-104; minus (1 + 2**-51) leaves exactly 2**-104.
    x = np.array([1 + 2.0**-52])
    got = formats.fma(x, x, -np.array([1 + 2.0**-51]), "float64")
    assert got.tolist() == [2.0**-104]


def test_float32_fma_rounds_once() -> None:
    x = np.array([1 + 2.0**-23], np.float32)
    got = formats.fma(x, x, -np.array([1 + 2.0**-22], np.float32), "float32")
    assert got.tolist() == [2.0**-46]


def test_operands_broadcast_and_numbers_are_converted() -> None:
    x = np.ones((2, 1, 3), np.float16)
    got = formats.add(x, np.full((4, 1), 0.5, np.float16), "float16")
    assert got.shape == (2, 4, 3)
    assert (got == 1.5).all()
    assert formats.mul(x, 0.1, "float16").dtype == np.float16
    # 0.1 is rounded to float16 first: 0.0999755859375.
    assert formats.mul(x, 0.1, "float16").ravel()[0] == np.float16(0.1)


def test_max_prefers_numbers_or_propagates_nan() -> None:
    x = np.array([np.nan, 1.0, np.nan, -0.0], np.float16)
    y = np.array([2.0, np.nan, -np.nan, 0.0], np.float16)
    got = formats.maximum(x, y, "float16").view(np.uint16).tolist()
    assert got == [0x4000, 0x3C00, 0x7FFF, 0x0000]
    got = formats.maximum(x, y, "float16", nan="propagate").view(np.uint16).tolist()
    assert got == [0x7FFF, 0x7FFF, 0x7FFF, 0x0000]
    assert formats.minimum(x, y, "float16").view(np.uint16).tolist()[3] == 0x8000


def test_other_dtypes_are_refused() -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(FormatError, match="operand 1 has dtype float32; float16 needs float16"):
        formats.add(np.zeros(3, np.float16), x, "float16")
    with pytest.raises(FormatError, match="not int8"):
        formats.add(np.zeros(3, np.int8), 1, "int8")
    with pytest.raises(FormatError, match="unknown NaN rule"):
        formats.maximum(x, x, "float32", nan="drop")  # type: ignore[arg-type]


def test_the_larger_of_integers_is_exact_and_other_types_are_refused() -> None:
    x = np.array([2**31 - 1, -(2**31), 5], np.int32)
    assert formats.maximum(x, -1.0, "int32").tolist() == [2**31 - 1, -1, 5]
    assert formats.minimum(x, np.array([7], np.int32), "int32").tolist() == [7, -(2**31), 5]
    for other in (0.5, np.ones(3, np.float32)):
        with pytest.raises(FormatError, match=r"no int32|needs int32"):
            formats.maximum(x, other, "int32")
