from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npusim.errors import FormatError
from npusim.formats import cast, get_arithmetic, matmul, mma_paths
from tests.formats.mma_reference import matmul_reference

HOPPER = "hopper.mma.k16.f16.f32"


def halves(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def test_leading_axes_broadcast() -> None:
    a, b = halves(2, 3, 8, 32), halves(3, 32, 40, seed=1)
    got = matmul(a, b, arithmetic=HOPPER)
    assert got.shape == (2, 3, 8, 40)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(got[i, j], matmul(a[i, j], b[j], arithmetic=HOPPER))


@pytest.mark.parametrize("name", [HOPPER, "ascend.cube.k16.f16.f32", "ascend.cube_fma.k16.f16.f32"])
@pytest.mark.parametrize("columns", [40, 300])
def test_a_named_b_is_as_one_of_its_own(name: str, columns: int) -> None:
    a, b, of = halves(5, 8, 64), halves(2, 64, columns, seed=1), np.array([1, 0, 1, 1, 0])
    c = np.random.default_rng(2).standard_normal((5, 8, columns)).astype(np.float32)
    got = matmul(a, b, c, arithmetic=name, b_of=of)
    np.testing.assert_array_equal(got, matmul(a, b[of], c, arithmetic=name))


@pytest.mark.parametrize("name", [HOPPER, "ascend.cube.k16.f16.f32", "ascend.cube_fma.k16.f16.f32"])
def test_tiles_and_views_change_nothing(name: str) -> None:
    a, b = halves(130, 48), halves(48, 300, seed=1)
    whole = matmul(a, b, arithmetic=name)
    np.testing.assert_array_equal(whole[70:90], matmul(a[70:90], b, arithmetic=name))
    np.testing.assert_array_equal(whole[:, 250:270], matmul(a, b[:, 250:270], arithmetic=name))
    turned = np.ascontiguousarray(b.T).T
    np.testing.assert_array_equal(whole, matmul(a[::1], turned, arithmetic=name))


@pytest.mark.parametrize(
    "name", [HOPPER, "ascend.cube.k16.f16.f32", "ieee.f32", "rtx_blackwell.mma_mxf8f6f4.k32.e4m3.f32"]
)
@pytest.mark.parametrize("shared", ["none", "a", "b"])
def test_parts_of_a_batch_change_no_bit(name: str, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of small matrices is multiplied in parts; each part has the operands and scales of its own matrices."""
    unit = get_arithmetic(name)
    a = cast(halves(1 if shared == "a" else 7, 3, 64), unit.a)
    b = cast(halves(1 if shared == "b" else 7, 64, 5, seed=1), unit.b)
    scales: dict[str, Any] = {}
    if unit.scale_block:
        powers = np.ldexp(1.0, np.random.default_rng(2).integers(-3, 4, (7, 3 + 5, 64 // unit.scale_block)))
        of_a, of_b = powers[: len(a), :3], powers[: len(b), 3:].swapaxes(1, 2)
        scales = {n: x.astype(ml_dtypes.float8_e8m0fnu) for n, x in (("a_scale", of_a), ("b_scale", of_b))}
    one = matmul(a, b, arithmetic=unit, **scales)
    each = a[0].size + b[0].size + one[0].size
    parts = list(mma_paths.MmaProblem(unit, a, b, one, np.arange(7) % len(a), np.arange(7) % len(b)).parts(3 * each))
    assert [len(part.out) for part in parts] == [3, 3, 1]
    assert [len(part.a) for part in parts] == ([1, 1, 1] if shared == "a" else [3, 3, 1])
    monkeypatch.setattr(mma_paths, "TOGETHER", 3 * each)
    np.testing.assert_array_equal(one, matmul(a, b, arithmetic=unit, **scales))
    alone = [matmul(a[n % len(a)], b[n % len(b)], arithmetic=unit, **_of(scales, n)) for n in range(7)]
    np.testing.assert_array_equal(one, np.array(alone))


def _of(scales: dict[str, Any], number: int) -> dict[str, Any]:
    return {n: x[number % len(x)] for n, x in scales.items()}


@pytest.mark.parametrize("name", ["volta.mma.k4.f16.f16", HOPPER, "ascend.cube.k16.f16.f32", "ieee.f32"])
def test_threads_change_no_bit(name: str) -> None:
    unit = get_arithmetic(name)
    a, b = cast(halves(3, 200, 64), unit.a), cast(halves(3, 64, 260, seed=1), unit.b)
    one = matmul(a, b, arithmetic=unit, threads=1)
    np.testing.assert_array_equal(one, matmul(a, b, arithmetic=unit, threads=3))


@pytest.mark.parametrize("name", [HOPPER, "volta.mma.k4.f16.f16", "ascend.cube.k16.f16.f32"])
def test_k_is_chained_in_ascending_order(name: str) -> None:
    unit = get_arithmetic(name)
    a, b = halves(20, 96), halves(96, 40, seed=1)
    c = None
    for start in range(0, 96, unit.k):
        part = slice(start, start + unit.k)
        c = matmul(a[:, part], b[part], c, arithmetic=unit)
    np.testing.assert_array_equal(c, matmul(a, b, arithmetic=unit))


def test_nan_and_inf_reach_only_their_row_and_column() -> None:
    a, b = halves(40, 32), halves(32, 50, seed=1)
    clean = matmul(a, b, arithmetic=HOPPER)
    a[3, 5], b[7, 11] = np.nan, np.inf
    got = matmul(a, b, arithmetic=HOPPER)
    assert (got[3].view(np.uint32) == 0x7FFFFFFF).all()
    rows = np.arange(40) != 3
    assert np.isinf(got[rows, 11]).all()
    columns = np.arange(50) != 11
    np.testing.assert_array_equal(got[np.ix_(rows, columns)], clean[np.ix_(rows, columns)])


@pytest.mark.parametrize(
    "name", ["hopper.mma.k16.f16.f16", HOPPER, "hopper.mma.k16.bf16.f32", "ascend.cube.k16.f16.f32"]
)
def test_special_operands(name: str) -> None:
    unit = get_arithmetic(name)
    rng = np.random.default_rng(4)
    a, b, c = (
        cast(rng.standard_normal(shape), fmt)
        for shape, fmt in (((24, 32), unit.a), ((32, 40), unit.b), ((24, 40), unit.acc))
    )
    a[rng.random(a.shape) < 0.01] = np.inf
    b[rng.random(b.shape) < 0.01] = -np.inf
    b[rng.random(b.shape) < 0.005] = np.nan
    b[rng.random(b.shape) < 0.1] = 0
    c[rng.random(c.shape) < 0.05] = np.inf
    c[rng.random(c.shape) < 0.05] = -np.inf
    got = matmul(a, b, c, arithmetic=unit)
    exact = matmul_reference(a[:6], b[:, :9], c[:6, :9], arithmetic=unit)
    bits = unit.acc.bits_dtype
    np.testing.assert_array_equal(got[:6, :9].view(bits), exact.view(bits))
    assert len(np.unique(np.isnan(got))) == 2


def test_float32_overflow_is_inf_even_toward_zero() -> None:
    unit = "hopper.mma.k16.bf16.f32"
    big = cast(np.full((1, 16), 3e38), "bfloat16")
    assert matmul(big, big.T, arithmetic=unit).item() == np.inf
    # Products beyond float32 that cancel do not overflow.
    other = big.copy()
    other[0, ::2] *= -1
    assert matmul(big, other.T, arithmetic=unit).item() == 0.0


def test_an_exact_zero_is_plus_zero() -> None:
    zeros = np.zeros((1, 16), np.float16)
    c = np.full((1, 1), -0.0, np.float32)
    for name in (HOPPER, "ascend.cube.k16.f16.f32"):
        assert not np.signbit(matmul(-zeros, zeros.T, c, arithmetic=name)).any()


def test_tf32_ignores_the_low_thirteen_bits() -> None:
    a = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    cut = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    unit = "hopper.mma.k8.tf32.f32"
    np.testing.assert_array_equal(matmul(a, a.T, arithmetic=unit), matmul(cut, cut.T, arithmetic=unit))


def test_empty_shapes_are_allowed() -> None:
    assert matmul(halves(0, 16), halves(16, 4), arithmetic=HOPPER).shape == (0, 4)
    c = np.full((2, 3), 5, np.float32)
    got = matmul(halves(2, 0), halves(0, 3), c, arithmetic=HOPPER)
    np.testing.assert_array_equal(got, c)


def test_arguments_are_not_changed() -> None:
    a, b, c = halves(16, 16), halves(16, 16, seed=1), np.ones((16, 16), np.float32)
    before = [item.copy() for item in (a, b, c)]
    matmul(a, b, c, arithmetic=HOPPER)
    for item, copy in zip((a, b, c), before, strict=True):
        np.testing.assert_array_equal(item, copy)


@pytest.mark.parametrize(
    ("a", "b", "c", "name", "message"),
    [
        (halves(2, 24), halves(24, 2), None, HOPPER, "K = 24 is not a multiple of the instruction"),
        (halves(2, 16), halves(32, 2), None, HOPPER, "A has K = 16, B has K = 32"),
        (halves(2, 16).astype("f4"), halves(16, 2), None, HOPPER, "A is float16, needs dtype"),
        (halves(2, 16), halves(16, 2), halves(2, 2), HOPPER, "C is float32, needs dtype float32"),
        (halves(16), halves(16, 2), None, HOPPER, "needs at least two axes"),
        (halves(2, 2, 16), halves(3, 16, 2), None, HOPPER, "do not broadcast"),
        (halves(2, 16), halves(16, 2), np.zeros((3, 2), "f4"), HOPPER, r"C has shape \(3, 2\)"),
        (halves(2, 16), halves(16, 2), np.zeros((1, 2, 2), "f4"), HOPPER, "C has shape"),
        (halves(2, 16), halves(16, 2), None, "hopper.mma.k16.f16.f64", "near names: hopper"),
    ],
)
def test_bad_operands_are_refused(a: Any, b: Any, c: Any, name: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        matmul(a, b, c, arithmetic=name)


@pytest.mark.parametrize("threads", [0, -1])
def test_bad_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(FormatError, match="must be a positive integer"):
        matmul(halves(2, 16), halves(16, 2), arithmetic=HOPPER, threads=threads)


def test_thread_count_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPUSIM_THREADS", "two")
    with pytest.raises(FormatError, match="NPUSIM_THREADS"):
        matmul(halves(2, 16), halves(16, 2), arithmetic=HOPPER)
    monkeypatch.setenv("NPUSIM_THREADS", "2")
    matmul(halves(2, 16), halves(16, 2), arithmetic=HOPPER)
