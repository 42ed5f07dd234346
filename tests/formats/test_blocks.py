"""Block formats: golden vectors, an independent reading of each rule on random blocks, corner cases, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest

from npusim.errors import FormatError
from npusim.formats import (
    ARITHMETICS,
    BLOCK_FORMATS,
    FORMATS,
    SCALE_RULES,
    ScaleRule,
    cast,
    get_arithmetic,
    get_block_format,
    get_format,
    matmul,
    quantize,
)
from tests.formats.mma_reference import matmul_reference


def test_scales_that_are_nan_are_refused_by_name() -> None:
    """Below 2688 x 2^-150 the tensor's scale is 0 in float32, and torchao's quotients are 0 / 0."""
    least = np.full(32, 2.0**-149, np.float32)
    with pytest.raises(
        FormatError, match=r"nvfp4: rule torchao_two_level: scales are NaN, .* magnitude is 1.4013e-45;"
    ):
        quantize(least, "nvfp4", rule="torchao_two_level")
    for rule in get_block_format("nvfp4").rules:
        assert np.isfinite(quantize(least * 4096, "nvfp4", rule=rule).values()).all(), rule
        assert (quantize(least * 0, "nvfp4", rule=rule).values() == 0).all(), rule


def test_zeros_of_a_tensor_whose_scale_has_no_inverse_are_refused() -> None:
    """0 times Inf is NaN: the elements were 0, as neither the instruction nor the library has them."""
    x = np.where(np.arange(32) % 4, 2.0**-130, 0.0).astype(np.float32)
    with pytest.raises(
        FormatError, match=r"torchao_two_level: zeros become NaN, .* magnitude is 7.34684e-40; scale the"
    ):
        quantize(x, "nvfp4", rule="torchao_two_level")
    without = x[x > 0][:16]
    assert (quantize(without, "nvfp4", rule="torchao_two_level").values() > 0).all()
    for rule in get_block_format("nvfp4").rules:
        if rule != "torchao_two_level":
            assert (quantize(x, "nvfp4", rule=rule).values()[x == 0] == 0).all(), rule


#: Random blocks a rule: some, and (python -m pytest -m exhaustive) a million, in parts.
PARTS = pytest.mark.parametrize("parts", [1, pytest.param(500, marks=pytest.mark.exhaustive)])
COUNT = 2000
MX = {fmt.element: name for name, fmt in BLOCK_FORMATS.items() if fmt.scale == "float8_e8m0fnu"}
E8M0 = ml_dtypes.float8_e8m0fnu
GFLOAT = {
    "float8_e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "float8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "float6_e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "float6_e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "float4_e2m1fn": gfloat.formats.format_info_ocp_e2m1,
}


@pytest.fixture(scope="module")
def vectors(golden: Any) -> Any:
    return json.loads(golden("block_formats.json").read_text())


def float32(text: str) -> Any:
    return np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32).view(np.float32)


def codes(array: Any) -> bytes:
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def unpacked(text: str) -> bytes:
    """Bytes of 4-bit codes, a digit each."""
    return bytes(int(digit, 16) for digit in text)


def test_code_points_are_those_of_the_specifications(vectors: Any) -> None:
    for name in FORMATS.keys() & vectors["code_points"].keys():
        wanted = [float.fromhex(v) if "x" in v else float(v) for v in vectors["code_points"][name]]
        unit = 1 / 64 if name == "int8" else 1.0
        got = FORMATS[name].values[: len(wanted)] * unit
        np.testing.assert_array_equal(got, np.array(wanted, np.float32), err_msg=name)
        zeros = got == 0
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(wanted)[zeros], err_msg=name)


@pytest.mark.parametrize("name", GFLOAT)
def test_code_points_equal_gfloat_and_ml_dtypes(name: str) -> None:
    fmt = FORMATS[name]
    count = 1 << fmt.bits
    np.testing.assert_array_equal(fmt.values[:count], [gfloat.decode_float(GFLOAT[name], i).fval for i in range(count)])
    numbers = np.arange(count, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
    np.testing.assert_array_equal(fmt.values[:count], numbers)


def test_casts_at_every_midpoint(vectors: Any) -> None:
    for name, case in vectors["casts"].items():
        if name not in FORMATS or name == "int8":
            continue
        rules = {"code": None if name == "hifloat8" else "saturate", "saturated": "ascend_saturate"}
        for key in rules.keys() & case.keys():
            got = codes(cast(float32(case["x"]), name, overflow=rules[key]))
            assert got == bytes.fromhex(case[key]), (name, key)


def test_hifloat8_has_one_zero_and_one_rounding() -> None:
    assert codes(cast([0.0, -0.0, -(2.0**-24), np.nan, -np.inf, 40960.0, -40959.0], "hifloat8")).hex() == (
        "000000" + "80" + "ef" + "6f" + "ee"
    )
    with pytest.raises(FormatError, match="the only rounding of"):
        cast([1.0], "hifloat8", rounding="toward_zero")


def test_every_code_casts_to_itself() -> None:
    for fmt in FORMATS.values():
        if fmt.size_bytes == 1 and not fmt.is_integer:
            every = np.arange(1 << fmt.bits)
            x = fmt.values[: len(every)]
            np.testing.assert_array_equal(
                np.frombuffer(codes(cast(x, fmt)), np.uint8)[~np.isnan(x)], every[~np.isnan(x)]
            )


def test_mx_rules_equal_the_vectors(vectors: Any) -> None:
    blocks = np.stack([float32(text) for text in vectors["mx32"]["x"]])
    for key, case in vectors["mx32"]["rules"].items():
        element, rule = key.split("/")
        if rule == "exact_ceil":  # what rceil is in exact arithmetic
            continue
        made = quantize(blocks, MX[element], rule=rule)
        assert codes(made.scales) == bytes.fromhex(case["scale"]), key
        for row, wanted in zip(made.elements, case["codes"], strict=True):
            assert not wanted or codes(row).hex() == wanted, key


def test_nvfp4_rules_equal_the_vectors(vectors: Any) -> None:
    cases = vectors["nvfp4"]
    for name, tensors in cases["rules"].items():
        rule = name.replace("te_4over6", "four_over_six").replace("sage3_one_level", "sage3")
        if rule == "exact_two_level":
            continue
        for text, case in zip(cases["tensors"], tensors, strict=True):
            made = quantize(np.concatenate([float32(block) for block in text]), "nvfp4", rule=rule)
            assert codes(made.scales) == bytes.fromhex(case["scale"]), name
            assert codes(made.elements) == b"".join(map(unpacked, case["codes"])), name
    case = vectors["sage3_p"]
    made = quantize(np.concatenate([float32(block) for block in case["x"]]), "nvfp4", rule="sage3_p")
    assert codes(made.scales) == bytes.fromhex(case["scale"])
    assert codes(made.elements) == b"".join(map(unpacked, case["codes"]))


def random_blocks(length: int, seed: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.integers(-110, 110, (COUNT, 1))
    return (rng.standard_normal((COUNT, length)) * spread * 2.0 ** rng.integers(-3, 4, (COUNT, length))).astype(
        np.float32
    )


def is_scale(rule: str, amax: Any, scale: Any, element: Any, largest: float) -> Any:
    """Whether a power of two is the scale of a block, by inequalities that are exact in float64."""
    emax = 2.0 ** int(np.log2(largest))
    if rule == "floor":
        return (scale * emax <= amax) & (amax < 2 * scale * emax)
    if rule == "ceil":
        return (scale * emax >= amax) & (amax > scale * emax / 2)
    if rule == "even":
        step = 2.0**-element.mantissa_bits  # half a step below a power of two rounds up to it
        return (amax >= scale * emax * (1 - step / 4)) & (amax < 2 * scale * emax * (1 - step / 4))
    return (scale * largest >= amax) & (amax > scale * largest / 2)


@PARTS
@pytest.mark.parametrize("element", GFLOAT)
def test_mx_rules_on_random_blocks(element: str, parts: int) -> None:
    for part in range(parts):
        check_mx_rules(element, random_blocks(32, 5 + part))


def check_mx_rules(element: str, blocks: Any) -> None:
    fmt = get_block_format(MX[element])
    amax = np.abs(blocks).max(axis=1).astype(np.float64)
    for rule in fmt.rules:
        made = quantize(blocks, fmt, rule=rule)
        scale = made.scales[:, 0].astype(np.float64)
        if rule == "even":  # amax is rounded to the element's mantissa, half up
            kept = get_format(element).mantissa_bits
            exponent = np.floor(np.log2(amax.astype(np.longdouble))).astype(np.float64)
            exponent -= amax < 2.0**exponent
            steps = np.floor(amax / 2.0 ** (exponent - kept) + 0.5)
            assert (
                2.0 ** (exponent + (steps == 2.0 ** (kept + 1))) == scale * 2.0 ** int(np.log2(fmt.max_element))
            ).all()
        else:
            assert is_scale(rule, amax, scale, get_format(element), fmt.max_element).all(), rule
        wanted = gfloat.round_ndarray(GFLOAT[element], blocks / scale[:, None], gfloat.RoundMode.TiesToEven, sat=True)
        np.testing.assert_array_equal(made.elements.astype(np.float64), wanted)


F = np.float32


def stored_scale(x: Any) -> Any:
    return np.minimum(x, F(448)).astype(ml_dtypes.float8_e4m3fn)


def stored_elements(x: Any) -> Any:
    return np.clip(x, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn)


def scaled_tensor(amax: Any, top: float) -> Any:
    return min(F(top * 6) / amax, np.finfo(F).max)


def transformer_engine(x: Any, amax: Any, base: Any, stretch: Any) -> tuple[Any, Any]:
    """Return scales and elements from a block's quotient before it is rounded to E4M3."""
    scales = stored_scale(base)
    inverse = np.minimum(F(1) / (scales.astype(F) * (F(1) / stretch)), np.finfo(F).max)
    return scales, stored_elements(x * inverse[:, None])


def four_over_six(x: Any, amax: Any, power: int, top: int) -> tuple[Any, Any]:
    stretch = scaled_tensor(amax.max(), top)
    base, tried = (amax / F(6)) * stretch, []
    for factor in (F(1), F(1.5)):
        scales, elements = transformer_engine(x, amax, base * factor, stretch)
        error = np.zeros(len(x), F)
        for i in range(16):  # left to right
            back = elements[:, i].astype(F) * scales.astype(F) * amax.max() / F(6 * top)
            lost = back - x[:, i]
            error = error + (np.abs(lost) if power == 1 else lost * lost)
        tried.append((scales, elements, error))
    wins = tried[1][2] < tried[0][2]
    return np.where(wins, tried[1][0], tried[0][0]), np.where(wins[:, None], tried[1][1], tried[0][1])


def torchao(x: Any, amax: Any, *, is_two_level: bool) -> tuple[Any, Any]:
    share = amax.max() / F(2688) if is_two_level else F(1)
    quotient = (amax / F(6)) / share if is_two_level else amax / F(6)
    scales = stored_scale(np.clip(quotient, F(2**-6), F(448)))
    inverse = (F(1) / share) / scales.astype(F) if is_two_level else F(1) / scales.astype(F)
    return scales, stored_elements(x * inverse[:, None])


def sage3(x: Any, amax: Any, *, is_of_p: bool) -> tuple[Any, Any]:
    exact = amax / F(6)
    scales = stored_scale(exact)
    if is_of_p:
        return scales, stored_elements(np.where(exact[:, None] == 0, F(0), x / exact[:, None]))
    inverse = np.where(scales == 0, F(0), F(1) / scales.astype(F))  # of a negative number it leaves -0
    return scales, stored_elements(x * inverse[:, None])


#: Rules of 16 elements with E4M3 scales, written anew from block_scaled.md section 2.2 with ml_dtypes' casts.
NVFP4_RULES: dict[str, Any] = {
    "te": lambda x, amax: transformer_engine(
        x, amax, amax * (scaled_tensor(amax.max(), 448) * (F(1) / F(6))), scaled_tensor(amax.max(), 448)
    ),
    "four_over_six_mae_256": lambda x, amax: four_over_six(x, amax, 1, 256),
    "four_over_six_mse_256": lambda x, amax: four_over_six(x, amax, 2, 256),
    "four_over_six_mse_448": lambda x, amax: four_over_six(x, amax, 2, 448),
    "torchao_two_level": lambda x, amax: torchao(x, amax, is_two_level=True),
    "torchao_one_level": lambda x, amax: torchao(x, amax, is_two_level=False),
    "sage3": lambda x, amax: sage3(x, amax, is_of_p=False),
    "sage3_p": lambda x, amax: sage3(x, amax, is_of_p=True),
}


@PARTS
@pytest.mark.parametrize("rule", get_block_format("nvfp4").rules)
def test_nvfp4_rules_on_random_blocks(rule: str, parts: int) -> None:
    for part in range(parts):
        rng = np.random.default_rng(part)
        x = (rng.standard_normal((COUNT, 16)) * 2.0 ** rng.integers(-9, 10, (COUNT, 1))).astype(F)
        with np.errstate(all="ignore"):
            scales, elements = NVFP4_RULES[rule](x, np.abs(x).max(axis=1))
        made = quantize(x, "nvfp4", rule=rule)
        assert codes(made.scales) == codes(scales)
        assert codes(made.elements) == codes(elements)


@PARTS
@pytest.mark.parametrize("rule", get_block_format("nvfp4").rules)
def test_nvfp4_rules_on_subnormal_tensors(rule: str, parts: int) -> None:
    """Multiples of 2^-149, zeros among them: codes as written in the reference, or refused where one of them is NaN."""
    refused = 0
    for part in range(parts * 100):
        rng = np.random.default_rng(part)
        top = 2 ** rng.integers(1, 24)
        x = (rng.integers(-top, top + 1, (4, 16)) * 2.0**-149 * (rng.random((4, 1)) < 0.8)).astype(F)
        with np.errstate(all="ignore"):
            scales, elements = NVFP4_RULES[rule](x, np.abs(x).max(axis=1)) if x.any() else (None, None)
        if scales is None:
            continue
        if rule == "torchao_two_level" and (np.isnan(scales.astype(F)).any() or (x == 0).any()):
            with pytest.raises(FormatError, match="NaN"):
                quantize(x, "nvfp4", rule=rule)
            refused += 1
            continue
        made = quantize(x, "nvfp4", rule=rule)
        assert codes(made.scales) == codes(scales)
        assert codes(made.elements) == codes(elements)
    assert (refused > 0) == (rule == "torchao_two_level")


#: Blocks, and numbers in each: as the format has them, and a million short ones.
SIZES = pytest.mark.parametrize(("count", "length"), [(2000, None), (10**6, 2)])


def short_blocks(count: int, length: int) -> Any:
    """Return float32 blocks of scales far apart; every other one has few bits, so that ties occur."""
    rng = np.random.default_rng(length)
    blocks = rng.standard_normal((count, length), F) * np.exp2(rng.integers(-90, 90, (count, 1))).astype(F)
    blocks.view(np.uint32)[::2] &= np.uint32(0xFFFF0000)
    return blocks


@SIZES
def test_mxint8_on_random_blocks_equals_integers(count: int, length: int | None) -> None:
    """A significand shifted by how far its exponent lies below the block's largest, half to even."""
    fmt = get_block_format("mxint8")
    blocks = short_blocks(count, length or fmt.block)
    made = quantize(blocks, replace(fmt, block=blocks.shape[1]))
    bits = blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest = bits.max(axis=1) >> 23
    np.testing.assert_array_equal(made.scales.view(np.uint8)[:, 0], largest)
    significand = (bits & np.uint32(0x7FFFFF) | np.uint32(0x800000)).astype(np.int64)
    shift = np.minimum(largest[:, None].astype(np.int64) - (bits >> 23) + 17, 40)
    whole, rest, half = significand >> shift, significand & ((1 << shift) - 1), np.int64(1) << (shift - 1)
    whole += (rest > half) | ((rest == half) & (whole % 2 == 1))
    assert ((rest == half).any(), (whole > 127).any()) == (True, True)
    wanted = np.where(np.signbit(blocks), -1, 1) * np.minimum(whole, 127)
    np.testing.assert_array_equal(made.elements, wanted)


@SIZES
@pytest.mark.parametrize("name", ["fp8_128", "int8_128"])
def test_float32_scales_on_random_blocks_equal_exact_quotients(name: str, count: int, length: int | None) -> None:
    """Of float32 numbers a float64 quotient rounds to float32 as the exact one: 53 bits are more than 2 * 24 + 2."""
    fmt = get_block_format(name)
    blocks = short_blocks(count, length or fmt.block)
    made, top = quantize(blocks, replace(fmt, block=blocks.shape[1])), fmt.max_element
    scale, amax = made.scales.astype(np.float64), np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    # Nearest to amax / top, which is never half way: top has an odd factor that no tie has.
    assert (np.abs(scale * top - amax) < top * np.spacing(made.scales).astype(np.float64) / 2).all()
    quotients = (blocks.astype(np.float64) / scale).astype(F)
    wanted = np.clip(np.rint(quotients), -127, 127) if fmt.element == "int8" else np.clip(quotients, -top, top)
    np.testing.assert_array_equal(made.elements, wanted.astype(get_format(fmt.element).dtype))


def test_int8_blocks_reach_alike_on_both_sides() -> None:
    made = quantize([[-1.999, 1.999, 1.0, -0.015625]], "mxint8")
    assert made.elements.tolist() == [[-127, 127, 64, -1]]
    assert made.values().tolist() == [[-127 / 64, 127 / 64, 1.0, -1 / 64]]


def test_special_blocks() -> None:
    zeros = np.zeros((1, 32), np.float32)
    for rule in get_block_format("mxfp8").rules:
        assert codes(quantize(zeros, "mxfp8", rule=rule).scales) == b"\0"
        for value, wanted in ((np.nan, 0xFF), (np.inf, 0xFE if rule.startswith("rceil") else 0xFF)):
            block = np.where(np.arange(32) == 3, value, zeros)
            made = quantize(block, "mxfp8", rule=rule)
            assert codes(made.scales) == bytes([wanted]), (rule, value)
            assert np.isnan(made.values()).all() == (wanted == 0xFF)
    huge = quantize(np.full((1, 32), 2.0**127), "mxfp8")
    assert huge.values()[0, 0] == 2.0**127
    assert not quantize(np.zeros(32), "nvfp4").values().any()


def test_axis_and_short_blocks() -> None:
    x = np.random.default_rng(2).standard_normal((40, 3)).astype(np.float32)
    made = quantize(x, "mxfp4", axis=0)
    assert (made.elements.shape, made.scales.shape) == ((40, 3), (2, 3))
    padded = quantize(np.concatenate([x, np.zeros((24, 3), np.float32)]).T, "mxfp4")
    np.testing.assert_array_equal(made.values(), padded.values().T[:40])
    np.testing.assert_array_equal(made.scales, padded.scales.T)


def test_a_format_and_a_rule_are_entries_of_data() -> None:
    """E3M0 has no dtype of its own; its values come from its fields, its rule is a function."""
    e3m0 = replace(FORMATS["float4_e1m2"], name="float4_e3m0", exponent_bits=3, mantissa_bits=0, bias=3)
    assert e3m0.values[:8].tolist() == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert cast([0.3, 5.0, -100.0], e3m0).view(np.uint8).tolist() == [1, 5, 15]
    halves = ScaleRule("half", "float32", lambda x, amax, fmt, _: (x / amax[..., None], amax, 1.0), "amax", "here")
    made = quantize([[2.0, -8.0]], replace(get_block_format("fp8_128"), block=2), rule=halves)
    assert (made.scales.tolist(), made.elements.astype(float).tolist()) == ([[8.0]], [[0.25, -1.0]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(np.ones(24), "nvfp4"), "nvfp4: blocks of 16 do not divide an axis of 24"),
        (lambda: quantize([np.nan] * 16, "nvfp4"), "the tensor contains nan"),
        (
            lambda: quantize([1.0], "mxfp8", rule="te"),
            "scale rule 'te' gives float8_e4m3fn scales .* floor, ceil, even",
        ),
        (lambda: quantize([1.0], "mxfp5"), "unknown block format 'mxfp5'; near names: .*mxfp"),
        (lambda: quantize([1.0], "mxfp8", rule="flor"), "unknown scale rule 'flor'; near names: floor"),
        (lambda: quantize([1.0], "mxint8", rule="ceil"), "mxint8 has float8_e8m0fnu scales of int8: floor"),
    ],
)
def test_bad_input(call: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        call()


SCALED = sorted(name for name, unit in ARITHMETICS.items() if unit.scale_block)


@pytest.mark.parametrize("name", [n for n in SCALED if len(n.split(".")[3]) == 4 or n.startswith("ascend.cube_mx.")])
def test_scaled_products_equal_plain_integers(name: str) -> None:
    unit = get_arithmetic(name)
    rng = np.random.default_rng(9)
    depth, is_power = 2 * unit.k, unit.scale_format == "float8_e8m0fnu"
    a, b = (
        cast(rng.standard_normal(s) * 2, f, overflow="saturate")
        for s, f in (((5, depth), unit.a), ((depth, 4), unit.b))
    )
    c = (rng.standard_normal((5, 4)) * 2.0 ** rng.integers(-20, 20, (5, 4))).astype(np.float32)
    blocks = depth // unit.scale_block
    low, high = (110, 140) if is_power else (0, 127)
    scales = [rng.integers(low, high, shape).astype(np.uint8) for shape in ((5, blocks), (blocks, 4))]
    scales[0][4, 0] = 255 if is_power else 127  # NaN
    scales[0][3], scales[1][:, 1] = (0, 254) if is_power else (0, 1)
    dtype = E8M0 if is_power else ml_dtypes.float8_e4m3fn
    got = matmul(a, b, c, arithmetic=unit, a_scale=scales[0].view(dtype), b_scale=scales[1].view(dtype))
    wanted = matmul_reference(a, b, c, arithmetic=unit, a_scale=scales[0], b_scale=scales[1])
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
    assert np.isnan(got[4]).all() and not np.isnan(got[:3]).any()


def test_scaled_products_equal_the_published_model(vectors: Any) -> None:
    short = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
    for case in vectors["mma_model"]["cases"]:
        if case["op"] == "mxf8f6f4.k32":
            pair = [short[case[key]] for key in ("a_format", "b_format")]
            unit = f"mxf8f6f4.k32.{''.join(dict.fromkeys(pair))}"
            formats, dtype, read = (case["a_format"], case["b_format"]), E8M0, bytes.fromhex
        else:
            unit, formats = f"{'nvf4' if 'ue4m3' in case['op'] else 'mxf4'}.k64.e2m1", ("float4_e2m1fn",) * 2
            dtype, read = ml_dtypes.float8_e4m3fn if "ue4m3" in case["op"] else E8M0, unpacked
        a, b = (np.frombuffer(read(case[key]), FORMATS[f].dtype) for key, f in zip("ab", formats, strict=True))
        s, t = (np.frombuffer(bytes.fromhex(case[f"scale_{key}"]), dtype) for key in "ab")
        c = float32(case["c"])[:, None]
        got = matmul(
            a[None], b[:, None], c, arithmetic=f"blackwell.tcgen05_{unit}.f32", a_scale=s[None], b_scale=t[:, None]
        )
        assert got.view(np.uint32).item() == int(case["d"], 16), case


def test_scales_that_do_not_fit_are_refused() -> None:
    a, b = np.zeros((2, 64), ml_dtypes.float8_e4m3fn), np.zeros((64, 2), ml_dtypes.float8_e4m3fn)
    with pytest.raises(
        FormatError, match=r"scales of A are \(2, 1\) of float8_e8m0fnu; must be \(2, 2\) of float8_e8m0fnu"
    ):
        matmul(a, b, arithmetic="ascend.cube_mx.k64.e4m3.f32", a_scale=np.ones((2, 1), E8M0))
    with pytest.raises(FormatError, match="does not support scales, but B has scales"):
        matmul(a, b, arithmetic="ascend.cube.k32.e4m3.f32", b_scale=np.ones((2, 2), E8M0))


def test_every_rule_names_its_source() -> None:
    assert all(rule.source and rule.says for rule in SCALE_RULES.values())
    assert {fmt.rule in fmt.rules for fmt in BLOCK_FORMATS.values()} == {True}
