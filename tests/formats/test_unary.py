from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from npusim import formats
from npusim.errors import FormatError
from npusim.formats import VARIANTS, get_format
from npusim.formats.exact_rounding import function_value
from npusim.formats.exponential import RELATIVE_ERROR
from npusim.formats.unary import FUNCTIONS, POLYNOMIALS, unary_table
from tests.formats.reference import decode, encode, fma_reference

CALLS = {name: getattr(formats, name) for name in FUNCTIONS}
SMALL = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Value at -Inf, -0, +0 and +Inf of each function (IEEE 754-2019 §9.2.1); nan = invalid.
LIMITS: dict[str, tuple[float, float, float, float]] = {
    "exp": (0.0, 1.0, 1.0, math.inf),
    "exp2": (0.0, 1.0, 1.0, math.inf),
    "log": (math.nan, -math.inf, -math.inf, math.inf),
    "log2": (math.nan, -math.inf, -math.inf, math.inf),
    "log1p": (math.nan, -0.0, 0.0, math.inf),
    "rcp": (-0.0, -math.inf, math.inf, 0.0),
    "rsqrt": (math.nan, -math.inf, math.inf, 0.0),
    "sqrt": (math.nan, -0.0, 0.0, math.inf),
    "tanh": (-1.0, -0.0, 0.0, 1.0),
    "erf": (-1.0, -0.0, 0.0, 1.0),
}


def oracle(name: str, pattern: int, fmt: formats.FloatFormat) -> int | None:
    """The correctly rounded pattern by exact arithmetic; None where no real value exists."""
    number = decode(pattern, fmt)
    if not number.is_finite or (number.significand == 0 and name in ("rcp", "rsqrt")):
        return None
    x = number.value
    if (x <= 0 and name in ("log", "log2", "rsqrt")) or (x < 0 and name == "sqrt") or (x <= -1 and name == "log1p"):
        return None
    # Beyond these both a float32 and the exact value are 0 or Inf; decimal need not be asked.
    limited = max(min(x, Fraction(500)), Fraction(-500)) if name in ("exp", "exp2") else x
    value = function_value(name, limited)
    return encode(value, value < 0 or (value == 0 and number.is_negative), fmt)


def check_patterns(name: str, patterns: Any, fmt: formats.FloatFormat) -> None:
    x = patterns.astype(fmt.bits_dtype).view(fmt.dtype)
    got = CALLS[name](x, fmt).view(fmt.bits_dtype).tolist()
    for pattern, result in zip(patterns.tolist(), got, strict=True):
        wanted = oracle(name, pattern, fmt)
        if wanted is not None:
            assert result == wanted, f"{name}({pattern:#x})"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fmt", SMALL)
def test_small_formats_are_correctly_rounded(fmt: str, name: str) -> None:
    target = get_format(fmt)
    step = 1 if target.bits == 8 else 97
    check_patterns(name, np.arange(5 % step, 1 << target.bits, step), target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_all_16_bit_inputs_are_correctly_rounded(fmt: str, name: str) -> None:
    check_patterns(name, np.arange(1 << 16), get_format(fmt))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_is_correctly_rounded(name: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal(150) * 2.0 ** rng.integers(-20, 7, 150)
    x = np.abs(x) if name in ("log", "log2", "log1p", "rsqrt", "sqrt") else x
    patterns = np.concatenate((x.astype(np.float32).view(np.uint32), rng.integers(0, 2**32, 50)))
    check_patterns(name, patterns.astype(np.int64), get_format("float32"))


#: Of all float32 patterns those whose result the first error bound leaves open.
HARD = {
    "exp": (
        0x33800000,
        0x36FDFFC1,
        0x377EFF81,
        0x383A3EF1,
        0x38E69CC1,
        0x39C6BE5B,
        0x39E5BB1D,
        0x3D1A274E,
        0x3FE67199,
        0x4001B249,
        0x40315B33,
        0x41CBF87B,
        0x4288942B,
        0xB3000000,
        0xBAE0E25C,
        0xBBB70EE8,
        0xBBF0EDF1,
        0xBC2A461A,
        0xC13D6631,
        0xC16912CD,
    ),
    "exp2": (
        0x33B8AA3B,
        0x36879CF7,
        0x3A07857C,
        0x3B429D37,
        0x3C02A9AD,
        0x3DC9ABE2,
        0xB338AA3B,
        0xB338AA3C,
        0xB466D4CB,
        0xB4FDEA14,
        0xB5160A52,
        0xB52D1F9A,
        0xB63B8CF0,
        0xB8ACAD70,
        0xB8BBD3A2,
        0xB8D3D026,
        0xBAE36F38,
        0xBAEC2B40,
        0xBCAF4D02,
        0xBCF3A937,
        0xBE1F29DE,
        0xC3160000,
    ),
}


def undecided(name: str, patterns: Any) -> tuple[Any, Any]:
    """Those of ``patterns`` that the first error bound, and then the closer one, leaves open."""
    from npusim.formats import elementwise_kernels

    x = np.asarray(patterns, np.uint32).view(np.float32)
    for kernel in (elementwise_kernels.exp_float32, elementwise_kernels.exp_float32_closer):
        open_still, out = np.empty(x.size, np.bool_), np.empty(x.size, np.float32)
        kernel(x, out, open_still, name == "exp2")
        x = x[open_still]
        if kernel is elementwise_kernels.exp_float32:
            first = x
    return first.view(np.uint32), x.view(np.uint32)


@pytest.mark.parametrize("name", HARD)
def test_hard_float32_inputs_are_correctly_rounded(name: str) -> None:
    first, second = undecided(name, HARD[name])
    assert first.tolist() == list(HARD[name])
    # What takes the exact way: 2**x of one input (-0.0297...), e**x of none.
    assert second.tolist() == ([0xBCF3A937] if name == "exp2" else [])
    near = np.concatenate([np.array(HARD[name], np.int64) + step for step in (-1, 0, 1)])
    check_patterns(name, near, get_format("float32"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HARD)
def test_no_other_float32_inputs_are_hard(name: str) -> None:
    found = []
    for high in range(1 << 12):
        patterns = np.uint32(high << 20) | np.arange(1 << 20, dtype=np.uint32)
        found += undecided(name, patterns)[0].tolist()
    assert found == list(HARD[name])


def test_equal_inputs_are_worked_out_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one input of exp2 that takes the exact way asks the oracle once, however many there are."""
    from npusim.formats import unary

    asked = []

    def counted(name: str, x: float, fmt: Any) -> int:
        asked.append(x)
        return original(name, x, fmt)

    original = unary._exact_bits
    monkeypatch.setattr(unary, "_exact_bits", counted)
    x = np.full((10, 100), 0xBCF3A937, np.uint32).view(np.float32)
    x[3, 4] = 1
    got = formats.exp2(x, "float32")
    assert asked == [float(x[0, 0])]
    assert got[3, 4] == 2
    assert np.unique(got).tolist() == [got[0, 0], 2]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fmt", [*SMALL, "float32", "tf32", "float64"])
def test_limits_are_ieee(fmt: str, name: str) -> None:
    target = get_format(fmt)
    x = formats.cast(np.array([-math.inf, -0.0, 0.0, math.inf, math.nan]), target)
    got = CALLS[name](x, target)
    wanted = formats.cast(np.array([*LIMITS[name], math.nan]), target)
    if not target.has_infinity:  # float8_e4m3fn: an Inf operand is NaN already
        wanted[0] = wanted[3] = wanted[4]
    np.testing.assert_array_equal(np.isnan(got.astype(float)), np.isnan(wanted.astype(float)))
    is_number = ~np.isnan(wanted.astype(float))
    bits = target.bits_dtype
    np.testing.assert_array_equal(got[is_number].view(bits), wanted[is_number].view(bits))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_evaluation_keeps_its_error_bound(name: str) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal(200) * 2.0 ** rng.integers(-30, 6, 200)
    x = np.abs(x) if name in ("log", "log2", "log1p", "rsqrt", "sqrt") else x
    for argument, value in zip(x, FUNCTIONS[name](x), strict=True):
        exact = function_value(name, Fraction(float(argument)))
        assert abs(Fraction(float(value)) / exact - 1) < Fraction(RELATIVE_ERROR) / 4


def test_float64_exp_is_reproducible_and_close() -> None:
    x = np.array([-745.2, -700.5, -1.0, 0.0, 1e-9, 1.0, 700.0, 709.7, 710.0, -800.0, np.nan])
    got = formats.exp(x, "float64")
    for argument, value in zip(x[1:8], got[1:8], strict=True):
        exact = function_value("exp", Fraction(float(argument)))
        assert abs(Fraction(float(value)) / exact - 1) < RELATIVE_ERROR
    assert got[8] == np.inf
    assert got[9] == 0.0
    assert np.isnan(got[10])


@pytest.mark.parametrize(
    ("key", "name", "fmt", "variant"),
    [
        ("HEXP", "exp", "float16", "hopper_hexp"),
        ("HEXP2", "exp2", "float16", "hopper_hexp2"),
        ("HRCP", "rcp", "float16", "hopper_hrcp"),
        ("EX2_F16", "exp2", "float16", "hopper_ex2"),
        ("EX2_BF16", "exp2", "bfloat16", "hopper_ex2"),
        ("TANH_F16", "tanh", "float16", "hopper_tanh"),
    ],
)
def test_hopper_functions_equal_the_h200_for_all_inputs(
    key: str, name: str, fmt: str, variant: str, unary_golden: Any
) -> None:
    target = get_format(fmt)
    x = np.arange(1 << 16, dtype=np.uint16).view(target.dtype)
    got = CALLS[name](x, fmt, variant=variant).view(np.uint16)
    np.testing.assert_array_equal(got, unary_golden[f"{key}/y"])


def _exp2p(pattern: int, coefficients: tuple[float, ...] = (), lowest: int = -126) -> int:
    """golden/README.md, transcribed: Horner in exact fma, floor added to the exponent."""
    fmt = get_format("float32")
    x = decode(pattern, fmt)
    if not x.is_finite or x.value <= lowest:
        return 0
    whole = math.floor(x.value)
    f = encode(x.value - whole, False, fmt)
    first = ("0x1.c3c16ap-13", "0x1.4739acp-10", "0x1.3d0428p-7", "0x1.c68922p-5", "0x1.ebfd64p-3", "0x1.62e42ap-1")
    top, *others = [int(np.float32(c).view(np.uint32)) for c in coefficients or map(float.fromhex, first)]
    p = top
    for c in (*others, int(np.float32(1.0).view(np.uint32))):
        p = fma_reference(p, f, c, fmt)
    return p + (whole << 23)


def test_exp2p_equals_its_description() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate((-np.abs(rng.standard_normal(200)) * 20, rng.standard_normal(100)))
    x = np.append(x, [0.0, -0.0, -125.99999, -126.0, -127.0, -np.inf, np.nan]).astype(np.float32)
    got = formats.exp2(x, "float32", variant="exp2p").view(np.uint32).tolist()
    assert got == [_exp2p(int(pattern)) for pattern in x.view(np.uint32)]


@pytest.mark.parametrize("degree", [3, 5])
def test_polynomials_of_flash_attention_4(degree: int, golden: Any) -> None:
    """Their largest error on [0, 1) is what the paper's method gives; every vector equal."""
    variant = f"fa4_degree{degree}"
    x = np.random.default_rng(3).uniform(-127.0, 8.0, 300).astype(np.float32)
    got = formats.exp2(x, "float32", variant=variant)
    wanted = [_exp2p(int(p), POLYNOMIALS[variant][0], -127) for p in x.view(np.uint32)]
    assert got.view(np.int32).tolist() == [int(np.array(w, np.int64).astype(np.int32)) for w in wanted]
    steps = np.arange(1 << 16, dtype=np.float64) / (1 << 16)
    error = np.abs(formats.exp2(steps.astype(np.float32), "float32", variant=variant) / 2.0**steps - 1).max()
    assert error == pytest.approx({3: 8.8e-5, 5: 1.9e-7}[degree], rel=0.3)
    case = json.loads(golden("block_formats.json").read_text())["fa4_exp2"]
    pattern = {
        key: np.frombuffer(bytes.fromhex(case[key]), ">u4").astype(np.uint32) for key in ("x", f"degree{degree}")
    }
    got = formats.exp2(pattern["x"].view(np.float32), "float32", variant=variant)
    np.testing.assert_array_equal(got.view(np.uint32), pattern[f"degree{degree}"])


#: Coefficients in the order of CUDA's PTX (Triton 3.6, sm_90): below and from 1.003 on.
PTX = (
    (0x38B1E96A, 0xBA574D20, 0x3BAAD5EA, 0xBCDC1BE7, 0x3DE718AF, 0xBEC093AC, 0x3E0375D3),
    (0x3789CA3C, 0xB9F560B9, 0x3BAC840B, 0xBD0C8162, 0x3E1CF906, 0x3F6A937E, 0x3F20D842),
)


def _erff(x: Any) -> int:
    """The PTX of libdevice's __nv_erff for one float32, its multiply-adds exact and without subnormals."""
    fmt, bits = get_format("float32"), int(x.view(np.uint32))
    sign, size = bits & 0x80000000, bits & 0x7FFFFFFF
    is_large = size >= 0x3F8060FE
    argument = size if is_large else encode(Fraction(float(x)) ** 2, False, fmt)
    p, *others = PTX[is_large]
    for c in others:
        p = fma_reference(p, argument, c, fmt)
    times = size | 0x80000000 if is_large else bits
    if size < 0x00800000:
        return sign
    power = fma_reference(p, times, times, fmt)
    if not is_large:
        return power
    e = formats.exp2(np.array([power], np.uint32).view(np.float32), "float32", variant="hopper_ex2")
    return encode(1 - decode(int(e.view(np.uint32)[0]), fmt).value, False, fmt) | sign


def test_cudas_error_function_is_its_ptx_and_close_to_the_true_one() -> None:
    rng = np.random.default_rng(4)
    x = np.concatenate((rng.standard_normal(300) * 2.0 ** rng.integers(-20, 2, 300), rng.uniform(-4, 4, 300)))
    x = np.append(x, [0.0, -0.0, 1e-40, -1e-40, 1.0029599, 1.00296, -1.00296, 9.0, -30.0]).astype(np.float32)
    got = formats.erf(x, "float32", variant="libdevice")
    assert got.view(np.uint32).tolist() == [_erff(v) for v in x]
    assert formats.erf(np.float32([np.inf, -np.inf]), "float32", variant="libdevice").tolist() == [1.0, -1.0]
    assert np.isnan(formats.erf(np.float32([np.nan]), "float32", variant="libdevice"))
    is_normal = np.abs(x) >= np.finfo(np.float32).tiny
    ulps = got.view(np.int32)[is_normal] - formats.erf(x, "float32").view(np.int32)[is_normal]
    assert np.abs(ulps).max() <= 2  # CUDA C++ Programming Guide, erff: 2 ulp


def test_ascend_cs_error_function_rounds_each_step() -> None:
    x = np.append(np.random.default_rng(5).uniform(-4.5, 4.5, 300), [0.0, np.inf, -np.inf, np.nan]).astype(np.float32)
    got = formats.erf(x, "float32", variant="ascend_c")
    f = np.float32
    for value, result in zip(x[:-1], got[:-1], strict=True):
        v = min(max(value, f(-3.92)), f(3.92))
        s = v * v
        p = (f(0.053443748819) * s + f(7.5517016694)) * s + f(101.62808918)
        p = ((p * s + f(1393.8061484)) * s + f(5063.7915060)) * s + f(29639.384698)
        q = ((s + f(31.212858877)) * s + f(398.56963806)) * s + f(3023.1248150)
        assert result == p * v / ((q * s + f(13243.365831)) * s + f(26267.224157))
    assert np.isnan(got[-1])
    assert np.abs(got[:-1] - formats.erf(x[:-1], "float32")).max() < 4e-7


def test_shape_is_kept_and_tables_are_read_only() -> None:
    x = np.zeros((2, 3, 4), np.float16).transpose(2, 0, 1)
    assert formats.exp(x, "float16").shape == (4, 2, 3)
    assert formats.exp(x.astype(np.float32), "float32").shape == (4, 2, 3)
    with pytest.raises(ValueError, match="read-only"):
        unary_table("exp", get_format("float16"), "correct")[0] = 0


def test_unknown_variants_and_formats_are_refused() -> None:
    x = np.zeros(1, np.float16)
    with pytest.raises(FormatError, match="unknown variant of exp 'fast'; known names: correct"):
        formats.exp(x, "float16", variant="fast")
    with pytest.raises(FormatError, match="'hopper_hexp' is for float16, not bfloat16"):
        formats.exp(x, "bfloat16", variant="hopper_hexp")
    with pytest.raises(FormatError, match="float32 needs float32"):
        formats.exp(x, "float32")


def test_variants_are_frozen() -> None:
    with pytest.raises(TypeError):
        VARIANTS["exp"]["mine"] = VARIANTS["exp"]["correct"]  # type: ignore[index]


def test_the_approximate_root_of_a_gpu_is_as_measured() -> None:
    """All of `reports/silicon/special_functions.py` on an H100: counts by ulp, and single patterns that it gave."""
    patterns = np.arange(0x3F800000, 0x40800000, dtype=np.int64).astype(np.uint32)[::16]
    for shift in (0, -(100 << 23), 120 << 23):  # of other pairs of binades the same
        x = (patterns.astype(np.int64) + shift).astype(np.uint32).view(np.float32)
        near = formats.sqrt(x, "float32", variant="hopper_approx").view(np.int32)
        correct = np.sqrt(x.astype(np.float64)).astype(np.float32).view(np.int32)
        counts = dict(zip(*(c.tolist() for c in np.unique(near - correct, return_counts=True)), strict=True))
        assert counts == {-1: 166_131, 0: 869_423, 1: 13_022}
    given = {0: 0, 1: 0, 0x80000000: 0x80000000, 0x80000001: 0x80000000, 0x807FFFFF: 0x80000000, 0x80800000: 0x7FFFFFFF}
    given |= {0xFF800000: 0x7FFFFFFF, 0x7F800000: 0x7F800000, 0x7FC00000: 0x7FFFFFFF, 0x3F800000: 0x3F800000}
    given |= {0x40800000: 0x40000000, 0x40000000: 0x3FB504F3, 0x3F7FFFFF: 0x3F7FFFFF, 0xBF800000: 0x7FFFFFFF}
    for one in given.items():
        pattern, wanted = (np.array([n], np.uint32).view(np.float32) for n in one)
        got = formats.sqrt(pattern, "float32", variant="hopper_approx")
        assert np.isnan(got) == np.isnan(wanted)
        assert np.isnan(got) or got.view(np.uint32) == wanted.view(np.uint32), one


def test_log1p_is_accurate_near_zero_and_that_of_libdevice_within_one_unit_in_the_last_place() -> None:
    """``np.log1p`` in float64 is the reference; CUDA documents a largest error of 1 ulp, and subnormals are flushed."""
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal(4000) * np.exp(rng.uniform(-40, 40, 4000))
    x = np.concatenate([drawn[drawn > -1], -rng.uniform(0, 1, 2000)]).astype(np.float32)
    wanted = np.log1p(x.astype(np.float64))
    assert np.array_equal(formats.log1p(x, "float32"), wanted.astype(np.float32))
    assert np.abs(formats.log1p(x.astype(np.float64), "float64") / wanted - 1).max() < 2.0**-49
    got, unit = formats.log1p(x, "float32", variant="libdevice"), np.abs(np.spacing(wanted.astype(np.float32)))
    assert (np.abs(got - wanted) / unit).max() < 1
    ends = np.float32([0.0, -0.0, -1.0, np.inf, -2.0, -np.inf, np.nan])
    for variant in ("correct", "libdevice"):
        made = formats.log1p(ends, "float32", variant=variant)
        assert np.array_equal(made, np.float32([0, 0, -np.inf, np.inf, np.nan, np.nan, np.nan]), equal_nan=True)
        assert np.signbit(made[1]) and not np.signbit(made[0])
