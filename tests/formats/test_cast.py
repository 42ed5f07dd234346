from __future__ import annotations

from fractions import Fraction
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.errors import FormatError
from npusim.formats import ROUNDINGS, cast, get_format
from tests.formats.reference import cast_reference, decode, round_fraction

NARROW = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
#: Instruction of unary.npz and hashes.npz: target and policies of ``cast``.
INSTRUCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "F32_E4M3": ("float8_e4m3fn", {"overflow": "saturate"}),
    "F32_E5M2": ("float8_e5m2", {"overflow": "saturate"}),
    "F32_F16": ("float16", {}),
    "F32_BF16": ("bfloat16", {}),
    "F32_TF32": ("tf32", {"rounding": "nearest_away", "nan": "truncate"}),
}


def bits(values: Any, name: str) -> Any:
    return np.ascontiguousarray(values).view(get_format(name).bits_dtype)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_float32_conversions_equal_the_h200(instruction: str, unary_golden: Any) -> None:
    target, policies = INSTRUCTIONS[instruction]
    x = unary_golden[f"{instruction}/x"].view(np.float32)
    got = bits(cast(x, target, **policies), target)
    np.testing.assert_array_equal(got, unary_golden[f"{instruction}/y"])


def _chunk_hashes(chunks: Any, instruction: str) -> Any:
    """The hash of golden/README.md for each high half-word in ``chunks``."""
    target, policies = INSTRUCTIONS[instruction]
    low = np.arange(65536, dtype=np.uint64)
    weights = (2 * low + 1) * np.uint64(0x9E3779B97F4A7C15)
    out = np.empty(len(chunks), np.uint64)
    for index, high in enumerate(chunks):
        patterns = (np.uint32(high) << np.uint32(16)) | low.astype(np.uint32)
        result = bits(cast(patterns.view(np.float32), target, **policies), target)
        out[index] = ((result.astype(np.uint64) + np.uint64(1)) * weights).sum(dtype=np.uint64)
    return out


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_one_float32_chunk_in_64_hashes_as_on_the_h200(instruction: str, golden: Any) -> None:
    wanted = np.load(golden("hashes.npz"))[instruction]
    # Every 64th high half-word, from 37: all signs and, over the exponents, all residues.
    chunks = np.arange(37, 65536, 64)
    np.testing.assert_array_equal(_chunk_hashes(chunks, instruction), wanted[chunks])


@pytest.mark.exhaustive
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_all_float32_inputs_hash_as_on_the_h200(instruction: str, golden: Any) -> None:
    wanted = np.load(golden("hashes.npz"))[instruction]
    np.testing.assert_array_equal(_chunk_hashes(np.arange(65536), instruction), wanted)


@pytest.mark.parametrize(("instruction", "target"), [("F16_E4M3", "float8_e4m3fn"), ("F16_E5M2", "float8_e5m2")])
def test_all_float16_to_fp8_equal_the_h200(instruction: str, target: str, unary_golden: Any) -> None:
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = bits(cast(x, target, overflow="saturate"), target)
    np.testing.assert_array_equal(got, unary_golden[f"{instruction}/y"])


@pytest.mark.parametrize(("instruction", "source"), [("E4M3_F16", "float8_e4m3fn"), ("E5M2_F16", "float8_e5m2")])
def test_all_fp8_to_float16_equal_the_h200(instruction: str, source: str, unary_golden: Any) -> None:
    x = np.arange(256, dtype=np.uint8).view(get_format(source).dtype)
    np.testing.assert_array_equal(bits(cast(x, "float16"), "float16"), unary_golden[f"{instruction}/y"])


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_float32_casts_equal_ml_dtypes(target: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = np.concatenate((x, rng.standard_normal(1 << 16, np.float32) * np.float32(100)))
    x = x[~np.isnan(x)]
    got = bits(cast(x, target, nan="keep_sign"), target)
    with np.errstate(all="ignore"):
        wanted = bits(x.astype(get_format(target).dtype), target)
    np.testing.assert_array_equal(got, wanted)


def test_nan_keep_sign_is_the_quiet_nan_of_ml_dtypes() -> None:
    x = np.array([np.nan, -np.nan], np.float32)
    for target in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        with np.errstate(all="ignore"):
            wanted = bits(x.astype(get_format(target).dtype), target)
        np.testing.assert_array_equal(bits(cast(x, target, nan="keep_sign"), target), wanted)


_GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "floor": gfloat.RoundMode.TowardNegative,
    "ceil": gfloat.RoundMode.TowardPositive,
}
_GFLOAT_FORMATS = {
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "float16": gfloat.formats.format_info_binary16,
    "float8_e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "float8_e5m2": gfloat.formats.format_info_ocp_e5m2,
}


@pytest.mark.parametrize("mode", _GFLOAT_MODES)
@pytest.mark.parametrize("target", _GFLOAT_FORMATS)
def test_rounding_modes_equal_gfloat(target: str, mode: str) -> None:
    rng = np.random.default_rng(11)
    fmt = get_format(target)
    exponents = rng.integers(fmt.min_exponent - fmt.mantissa_bits - 2, fmt.bias, 400)
    x = rng.choice([-1.0, 1.0], 400) * rng.integers(64, 128, 400) / 64 * 2.0**exponents
    x = x[np.abs(x) <= fmt.max_finite]
    got = cast(x, target, rounding=mode).astype(np.float64)
    info = _GFLOAT_FORMATS[target]
    wanted = [gfloat.round_float(info, float(item), _GFLOAT_MODES[mode]) for item in x]
    np.testing.assert_array_equal(got, np.array(wanted))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def _expected(x: np.ndarray, target: str, **rules: str) -> list[int]:
    source = get_format("float64")
    patterns = x.astype(np.float64).view(np.uint64)
    return [cast_reference(decode(int(item), source), get_format(target), **rules) for item in patterns]


@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("mode", sorted(ROUNDINGS))
def test_cast_equals_its_scalar_twin(target: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    fmt = get_format(target)
    scales = rng.integers(fmt.min_exponent - fmt.mantissa_bits - 3, fmt.bias + 3, 250)
    doubles = rng.standard_normal(250) * 2.0 ** scales.astype(np.float64)
    ties = rng.integers(-64, 64, 100) * (fmt.min_subnormal / 2)
    for x in (doubles, ties, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])):
        for overflow in ("inf", "nan", "saturate", "ascend_saturate"):
            if overflow == "inf" and not fmt.has_infinity:
                continue
            for nan in ("canonical", "keep_sign"):
                rules = {"rounding": mode, "overflow": overflow, "nan": nan}
                got = bits(cast(x, target, **rules), target).tolist()
                assert got == _expected(x, target, **rules), (overflow, nan)
                narrow = x.astype(np.float32) if target != "float32" else x
                got = bits(cast(narrow, target, **rules), target).tolist()
                assert got == _expected(narrow, target, **rules), (overflow, nan, "float32")


@settings(max_examples=200, deadline=None)
@given(
    pattern=st.integers(0, 2**64 - 1),
    target=st.sampled_from(NARROW),
    mode=st.sampled_from(sorted(ROUNDINGS)),
    overflow=st.sampled_from(["nan", "saturate", "ascend_saturate"]),
)
def test_cast_of_any_float64_equals_its_scalar_twin(pattern: int, target: str, mode: str, overflow: str) -> None:
    x = np.array([pattern], np.uint64).view(np.float64)
    got = bits(cast(x, target, rounding=mode, overflow=overflow), target).tolist()
    assert got == _expected(x, target, rounding=mode, overflow=overflow)


def test_float64_to_fp8_rounds_once() -> None:
    # 1 + 2**-4 is the tie between 1 and 1.125; 2**-30 more must round up.  Through float32 the
    # excess is lost and the tie goes to even: 1.0, which is what ml_dtypes gives.
    x = np.array([1 + 2.0**-4 + 2.0**-30])
    assert cast(x, "float8_e4m3fn").astype(float).item() == 1.125
    assert x.astype(ml_dtypes.float8_e4m3fn).astype(float).item() == 1.0


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        # -1.5, -0.5, 0.5, 1.5, 2.5 in a format whose spacing at these values is 1 (int8).
        ("nearest_even", [-2, 0, 0, 2, 2]),
        ("none", [-2, 0, 0, 2, 2]),
        ("rint", [-2, 0, 0, 2, 2]),
        ("nearest_away", [-2, -1, 1, 2, 3]),
        ("toward_zero", [-1, 0, 0, 1, 2]),
        ("floor", [-2, -1, 0, 1, 2]),
        ("ceil", [-1, 0, 1, 2, 3]),
        ("odd", [-1, -1, 1, 1, 3]),
    ],
)
def test_int8_rounds_in_every_mode(mode: str, wanted: list[int]) -> None:
    assert cast([-1.5, -0.5, 0.5, 1.5, 2.5], "int8", rounding=mode).tolist() == wanted


def test_int8_saturates_and_nan_is_zero() -> None:
    x = np.array([127.4, 127.5, 1e9, np.inf, -128.6, -np.inf, np.nan, -0.0], np.float32)
    assert cast(x, "int8").tolist() == [127, 127, 127, 127, -128, -128, 0, 0]


def test_int8_nearest_away_does_not_carry_what_is_just_below_a_half() -> None:
    assert cast([0.49999999999999994], "int8", rounding="nearest_away").tolist() == [0]


def test_int8_widens_exactly() -> None:
    x = np.arange(-128, 128, dtype=np.int8)
    assert cast(x, "float16").tolist() == x.tolist()


def test_fp8_overflow_by_policy() -> None:
    # 464 is the tie between 448 and the NaN slot 480: to even gives 448.
    x = np.array([448, 464, 464.00003, 1e30, np.inf, -np.inf, np.nan], np.float32)
    assert bits(cast(x, "float8_e4m3fn"), "float8_e4m3fn").tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F]
    assert bits(cast(x, "float8_e4m3fn", overflow="saturate"), "float8_e4m3fn").tolist() == [
        0x7E,
        0x7E,
        0x7E,
        0x7E,
        0x7E,
        0xFE,
        0x7F,
    ]
    got = cast(x, "float8_e4m3fn", overflow="ascend_saturate")
    assert bits(got, "float8_e4m3fn").tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00]


def test_float16_overflow_is_directed_inwards() -> None:
    # 65519.99 rounds to 65504, 65520 (the tie) to Inf; toward zero nothing overflows but Inf.
    x = np.array([65519.99, 65520.0, -1e9, np.inf])
    assert cast(x, "float16").tolist() == [65504.0, np.inf, -np.inf, np.inf]
    toward_zero = cast(x, "float16", rounding="toward_zero")
    assert toward_zero.tolist() == [65504.0, 65504.0, -65504.0, np.inf]
    assert cast(x, "float16", rounding="floor").tolist() == [65504.0, 65504.0, -np.inf, np.inf]


def test_signed_zero_survives_and_underflow_keeps_the_sign() -> None:
    x = np.array([-0.0, -1e-30, 0.0, 1e-30], np.float32)
    for target in ("float16", "float8_e4m3fn", "float8_e5m2"):
        assert np.signbit(cast(x, target)).tolist() == [True, True, False, False]


def test_shape_and_order_are_kept() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    got = cast(x, "float16")
    assert got.shape == (4, 2, 3)
    np.testing.assert_array_equal(got.astype(np.float32), x)
    assert cast(np.float32(1.5), "bfloat16").shape == ()
    assert cast(np.empty((0, 3), np.float32), "float16").shape == (0, 3)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", ["float32", "float64"])
def test_widening_is_exact(source: str, target: str) -> None:
    fmt = get_format(source)
    x = np.arange(1 << fmt.bits, dtype=fmt.bits_dtype).view(fmt.dtype)
    got = cast(x, target)
    for pattern in (0, 1, 2, 0x3C, 0x7E, (1 << (fmt.bits - 1)) + 1):
        number = decode(pattern, fmt)
        if number.is_finite:
            assert Fraction(float(got[pattern])) == number.value
    back = bits(cast(got, source), source)
    is_number = ~np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(back[is_number], bits(x, source)[is_number])
    assert np.isnan(got[~is_number]).all()
    assert set(bits(got, target)[~is_number].tolist()) == {get_format(target).canonical_nan_bits}


def test_same_format_only_changes_nan() -> None:
    x = np.array([0x7E01, 0xFC00, 0x8000, 0x3C00], np.uint16).view(np.float16)
    got = cast(x, "float16")
    assert bits(got, "float16").tolist() == [0x7FFF, 0xFC00, 0x8000, 0x3C00]
    assert bits(x, "float16").tolist()[0] == 0x7E01  # the argument is not touched


def test_same_format_saturates_when_asked() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1.0], np.float16)
    assert cast(x, "float16", overflow="ascend_saturate").tolist() == [65504.0, -65504.0, 0.0, 1.0]
    y = x.astype(np.float32)
    got = cast(y, "float32", overflow="saturate")
    assert got.tolist()[:2] == [float(np.finfo(np.float32).max), float(np.finfo(np.float32).min)]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"rounding": "nearest"}, "unknown rounding mode 'nearest'; near names: nearest_even"),
        ({"overflow": "wrap"}, "unknown overflow policy 'wrap'"),
        ({"nan": "drop"}, "unknown NaN rule 'drop'"),
        ({"nan": "truncate"}, "for tf32 only"),
    ],
)
def test_bad_rules_are_refused(rules: dict[str, str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        cast(np.zeros(1, np.float32), "float16", **rules)


def test_policies_a_format_cannot_express_are_refused() -> None:
    with pytest.raises(FormatError, match="float8_e4m3fn has no infinity"):
        cast([1.0], "float8_e4m3fn", overflow="inf")
    with pytest.raises(FormatError, match="int8 has no NaN"):
        cast([1.0], "int8", overflow="nan")


@pytest.mark.parametrize("bad", [np.zeros(2, np.int64), np.zeros(2, np.complex64), np.array(["a"])])
def test_arrays_of_other_dtypes_are_refused(bad: Any) -> None:
    with pytest.raises(FormatError, match="is not a number format"):
        cast(bad, "float16")


def test_round_fraction_by_hand() -> None:
    # float8_e5m2: 2 mantissa bits; 1.125 is the tie of 1 (code 0x3c) and 1.25 (0x3d).
    fmt = get_format("float8_e5m2")
    tie = Fraction(9, 8)
    assert [round_fraction(tie, fmt, mode) for mode in ("nearest_even", "nearest_away", "odd")] == [0x3C, 0x3D, 0x3D]
