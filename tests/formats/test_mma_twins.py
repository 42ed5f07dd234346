"""The kernels and the plain integers agree on every unit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.errors import FormatError
from npusim.formats import ARITHMETICS, cast, get_arithmetic, matmul
from npusim.formats.mma_arithmetic import sums_key
from tests.formats.mma_reference import matmul_reference

from .families import FAMILIES, operands

UNITS = sorted(ARITHMETICS)


def by_sums(name: str) -> str:
    return repr(sums_key(name))


def patterns(array: Any, unit: Any) -> Any:
    return array.view(unit.acc.bits_dtype)


@pytest.mark.parametrize("name", UNITS)
def test_kernels_and_integers_agree_on_every_family(name: str) -> None:
    unit = get_arithmetic(name)
    depth = 2 * unit.k if unit.k > 1 else 6
    for family in FAMILIES:
        a, b, c = operands(family, unit, (5, depth, 20), 1)
        fast = patterns(matmul(a, b, c, arithmetic=unit), unit)
        exact = matmul_reference(a[:2], b[:, :3], c[:2, :3], arithmetic=unit)
        np.testing.assert_array_equal(fast[:2, :3], patterns(exact, unit), err_msg=family)


ALIKE = [names for _, same in groupby(sorted(UNITS, key=by_sums), by_sums) if len(names := list(same)) > 1]


@pytest.mark.parametrize("names", ALIKE, ids=lambda names: names[0])
def test_units_with_equal_sums_have_equal_bits(names: list[str]) -> None:
    first = get_arithmetic(names[0])
    for family in FAMILIES:
        a, b, c = operands(family, first, (3, 2 * first.k, 5), 2)
        expected = patterns(matmul(a, b, c, arithmetic=first), first)
        for other in names[1:]:
            np.testing.assert_array_equal(patterns(matmul(a, b, c, arithmetic=other), first), expected, err_msg=other)


def test_units_differ_in_sums_if_a_parameter_or_a_row_for_two_formats_does() -> None:
    """Hopper adds 16 products at once, Ampere 8; wgmma has FP8 rows of 13 fraction bits, mma.sync of 25."""
    for one, other in (
        ("ampere.mma.k16.f16.f32", "hopper.mma.k16.f16.f32"),
        ("hopper.mma.k16.f16.f32", "hopper.mma.k16.f16.f16"),
        ("hopper.mma.k32.e4m3.f32", "hopper.wgmma.k32.e4m3.f32"),
        ("ascend.cube.k16.f16.f32", "ascend.cube_fma.k16.f16.f32"),
    ):
        assert sums_key(one) != sums_key(other)
    assert sums_key("hopper.mma.k16.f16.f32") == sums_key("hopper.wgmma.k16.f16.f32")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(UNITS),
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 3),
)
def test_kernels_and_integers_agree_on_any_seed(name: str, family: str, seed: int, blocks: int) -> None:
    unit = get_arithmetic(name)
    a, b, c = operands(family, unit, (2, blocks * unit.k, 3), seed)
    fast = matmul(a, b, c, arithmetic=unit)
    exact = matmul_reference(a, b, c, arithmetic=unit)
    np.testing.assert_array_equal(patterns(fast, unit), patterns(exact, unit))


@pytest.mark.parametrize(
    "change",
    [
        {"min_alignment_exponent": None},
        {"kept_fraction_bits": 20},
        {"k": 32, "index_groups": (tuple(range(0, 32, 2)), tuple(range(1, 32, 2)))},
        {"c_mode": "late"},
    ],
    ids=str,
)
def test_units_outside_the_registry_agree_too(change: dict[str, Any]) -> None:
    unit = replace(get_arithmetic("hopper.mma.k16.f16.f32"), **change)
    for family in FAMILIES:
        a, b, c = operands(family, unit, (3, 2 * unit.k, 17), 4)
        fast = patterns(matmul(a, b, c, arithmetic=unit), unit)
        exact = matmul_reference(a[:1], b[:, :4], c[:1, :4], arithmetic=unit)
        np.testing.assert_array_equal(fast[:1, :4], patterns(exact, unit), err_msg=family)


@pytest.mark.parametrize("change", [{"fraction_bits": 35}, {"rounding": "nearest_even"}, {"k": 12, "block": 6}])
def test_what_no_kernel_computes_is_refused(change: dict[str, Any]) -> None:
    unit = replace(get_arithmetic("hopper.mma.k16.f16.f32"), **change)
    with pytest.raises(FormatError, match="no compiled kernel computes it; supported are blocks of 4"):
        matmul(*operands(FAMILIES[0], unit, (3, 2 * unit.k, 17), 4), arithmetic=unit)


@pytest.mark.parametrize("name", ["ascend.cube.k16.f16.f32", "ascend.cube.k16.bf16.f32"])
def test_ascend_cube_is_the_exact_block_sum(name: str) -> None:
    """Independent oracle: Fractions, and numpy's float64 -> float32 rounding of the exact sum."""
    unit = get_arithmetic(name)
    rng = np.random.default_rng(6)
    a, b = (cast(rng.integers(-40, 40, shape) / 8.0, unit.a) for shape in ((4, 16), (16, 4)))
    got = matmul(a, b, arithmetic=unit)
    for i, j in np.ndindex(4, 4):
        total = sum(Fraction(float(a[i, k])) * Fraction(float(b[k, j])) for k in range(16))
        assert got[i, j] == np.float32(float(total))  # small integers over 64: exact in float64


def test_exact_kernel_settles_ties() -> None:
    # 2**24 + 1 is a tie of float32 (to 2**24); one more product of 2**-20 must round it up.
    a = np.zeros((1, 16), np.float16)
    b = np.zeros((16, 64), np.float16)
    a[0, :3] = 4096, 1, 2.0**-10
    b[0], b[1] = 4096, 1
    b[2, ::2] = 2.0**-10
    unit = get_arithmetic("ascend.cube.k16.f16.f32")
    got = matmul(a, b, None, arithmetic=unit)
    assert got[0, :2].tolist() == [2.0**24 + 2, 2.0**24]


def test_truncation_drops_what_a_large_term_pushes_out() -> None:
    # F = 24: aligned to 2**10 the unit is 2**-14; 2**-15 is dropped, even 16 times.
    a = np.full((1, 8), 2.0**-8, np.float16)
    b = np.full((8, 1), 2.0**-7, np.float16)
    a[0, 0], b[0, 0] = 32, 32
    got = matmul(a, b, arithmetic="ampere.mma.k8.f16.f32")
    assert got.item() == 1024.0


def test_wgmma_fp8_keeps_thirteen_fraction_bits() -> None:
    # 1 + 2**-13 survives in E8M13, 1 + 2**-14 does not (DeepSeek's "14 bits").
    a = np.zeros((1, 32), cast([0], "float8_e4m3fn").dtype)
    b = np.zeros((32, 2), a.dtype)
    a[0, :2] = cast([1.0, 2.0**-6], "float8_e4m3fn")
    b[0] = 1
    b[1] = cast([2.0**-7, 2.0**-8], "float8_e4m3fn")
    got = matmul(a, b, arithmetic="hopper.wgmma.k32.e4m3.f32")
    assert got.tolist() == [[1 + 2.0**-13, 1.0]]


def test_float16_accumulator_rounds_directly() -> None:
    # 2049 + 2**-10: through float32 (exact here) to float16 2050 is right; a tie would give 2048.
    a = np.zeros((1, 4), np.float16)
    b = np.ones((4, 1), np.float16)
    a[0] = 2048, 1, 2.0**-10, 0
    assert matmul(a, b, arithmetic="volta.mma.k4.f16.f16").item() == 2050.0
