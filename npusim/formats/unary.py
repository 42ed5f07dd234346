"""Elementary functions in a named format: correctly rounded, or as a machine computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import FormatError
from npusim.formats import cuda_functions, exponential
from npusim.formats.cast import Array, cast, widen, with_canonical_nan
from npusim.formats.elementwise import add, check_operands, div, mul
from npusim.formats.exact_rounding import function_value, round_fraction
from npusim.formats.float_format import FloatFormat, get_format, lookup
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: float64 evaluation of each function, within ``exponential.RELATIVE_ERROR``.
FUNCTIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "exp": exponential.exp64,
        "exp2": exponential.exp2_64,
        "log": exponential.log64,
        "log2": exponential.log2_64,
        "log1p": exponential.log1p64,
        "rcp": np.reciprocal,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "sqrt": np.sqrt,
        "tanh": exponential.tanh64,
        "erf": exponential.erf64,
    }
)


@dataclass(frozen=True)
class UnaryVariant:
    """One implementation of a function: its formats, and the evidence for its results.

    Attributes
    ----------
    formats
        Formats of its arguments and results.
    table
        Key of the packaged difference table against the correctly rounded result, if any.
    evidence, source
        As in ``MmaArithmetic``.
    """

    formats: tuple[str, ...]
    table: str | None
    evidence: str
    source: str


_ALL = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_CORRECT = UnaryVariant(_ALL, None, "assumed", "IEEE 754-2019 §9.2: correctly rounded")


def _measured(formats: tuple[str, ...], table: str | None, instruction: str) -> UnaryVariant:
    source = f"{instruction} on an H200, every input (golden/unary.npz)"
    return UnaryVariant(formats, table, "hardware-vectors", source)


#: Each polynomial of 2**x: coefficients from the highest power to the first, then the largest x for which the result is
#: 0.
POLYNOMIALS: Mapping[str, tuple[tuple[float, ...], float]] = MappingProxyType(
    {
        "exp2p": (
            (
                float.fromhex("0x1.c3c16ap-13"),
                float.fromhex("0x1.4739acp-10"),
                float.fromhex("0x1.3d0428p-7"),
                float.fromhex("0x1.c68922p-5"),
                float.fromhex("0x1.ebfd64p-3"),
                float.fromhex("0x1.62e42ap-1"),
            ),
            -126.0,
        ),
        "fa4_degree3": ((0.077119089663028717, 0.227564394474029541, 0.695146143436431885), -127.0),
        "fa4_degree5": (
            (
                0.00186810153536498547,
                0.00901452265679836274,
                0.0558021888136863709,
                0.24016360938549041,
                0.693151414394378662,
            ),
            -127.0,
        ),
    }
)
#: Ascend C's Erf: x limited to 3.92, times one polynomial of its square divided by another polynomial, with
#: coefficients from the highest power to the lowest.
ASCEND_ERF = (
    (0.053443748819, 0.75517016694e1, 0.10162808918e3, 0.13938061484e4, 0.50637915060e4, 0.29639384698e5),
    (1.0, 0.31212858877e2, 0.39856963806e3, 0.30231248150e4, 0.13243365831e5, 0.26267224157e5),
)
_LIBDEVICE = "libdevice's function: the PTX that Triton 3.6 compiles; its ex2.approx and rcp.approx as on an H200"
_ASCEND_ERF = "Ascend C, Erf: asc-devkit, adv_api/math/erf.h, its default PADE_APPROXIMATION; NaN assumed to stay"
_SQRT = "sqrt.approx.ftz.f32 on an H100, every input (reports/silicon/special_functions.py)"
_UNIT = "on an H200, every input (reports/silicon/special_functions.py)"
_FA4 = "FlashAttention-4, flash_attn/cute/utils.py: ex2_emulation"


def _library() -> UnaryVariant:
    return UnaryVariant(("float32",), None, "derived", _LIBDEVICE)


def _of_unit(instruction: str) -> UnaryVariant:
    return UnaryVariant(("float32",), None, "hardware-vectors", f"{instruction} {_UNIT}")


_OTHERS: Mapping[str, Mapping[str, UnaryVariant]] = MappingProxyType(
    {
        "exp": {"hopper_hexp": _measured(("float16",), None, "hexp"), "libdevice": _library()},
        "exp2": {
            "exp2p": UnaryVariant(("float32",), None, "hardware-vectors", "golden/README.md, exp2p"),
            **{f"fa4_degree{degree}": UnaryVariant(("float32",), None, "published-model", _FA4) for degree in (3, 5)},
            "hopper_ex2": _measured(("float16", "bfloat16", "float32"), "ex2", "ex2.approx(.ftz)"),
            "hopper_ex2_subnormal": _of_unit("ex2.approx.f32"),
            "hopper_hexp2": _measured(("float16",), None, "hexp2"),
        },
        "log": {"libdevice": _library()},
        "log2": {"libdevice": _library()},
        "log1p": {"libdevice": _library()},
        "rcp": {"hopper_hrcp": _measured(("float16",), None, "hrcp"), "hopper_approx": _of_unit("rcp.approx.ftz.f32")},
        "rsqrt": {"hopper_approx": _of_unit("rsqrt.approx.ftz.f32")},
        "tanh": {"hopper_tanh": _measured(("float16",), "tanh", "tanh.approx"), "libdevice": _library()},
        "sqrt": {"hopper_approx": UnaryVariant(("float32",), None, "hardware-vectors", _SQRT)},
        "erf": {"libdevice": _library(), "ascend_c": UnaryVariant(("float32",), None, "published-model", _ASCEND_ERF)},
    }
)
#: Origins of the implementations of functions and divisions of float32 in compiled code.
LIBRARIES = ("correct", "cuda", "ascend_c")
#: Divisions by name: rounded once, and a GPU's ``div.full.f32`` (`npusim.formats.cuda_functions.div_full`).
DIVISIONS = ("div.correct", "div.hopper_full")
VARIANTS: Mapping[str, Mapping[str, UnaryVariant]] = MappingProxyType(
    {name: MappingProxyType({"correct": _CORRECT, **_OTHERS.get(name, {})}) for name in FUNCTIONS}
)


def _rounded(name: str, x: Array, fmt: FloatFormat) -> Array:
    """Return ``name(x)`` correctly rounded to ``fmt``; ``x`` flat, float32 or float64 values."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        value = FUNCTIONS[name](wide)
        out = cast(value, fmt)
        bits = out.view(fmt.bits_dtype)
        low = cast(value * (1.0 - exponential.RELATIVE_ERROR), fmt).view(fmt.bits_dtype)
        high = cast(value * (1.0 + exponential.RELATIVE_ERROR), fmt).view(fmt.bits_dtype)
    _settle(name, wide, np.flatnonzero((low != high) & np.isfinite(wide)), bits, fmt)
    return out


def _settle(name: str, x: Array, where: Array, bits: Array, fmt: FloatFormat) -> None:
    """Write the exact results of ``x[where]``; each different value is computed once, because millions may be equal."""
    values, index = np.unique(x[where], return_inverse=True)
    exact = [_exact_bits(name, float(value), fmt) for value in values]
    bits[where] = np.array(exact, bits.dtype)[index]


def _exact_bits(name: str, x: float, fmt: FloatFormat) -> int:
    value = function_value(name, Fraction(x))
    code = round_fraction(value, fmt)
    if code > fmt.max_code:
        code = fmt.max_code + 1 if fmt.has_infinity else fmt.canonical_nan_bits
    return (code | (int(value < 0) << (fmt.bits - 1))) << fmt.storage_shift


@functools.cache
def unary_table(name: str, fmt: FloatFormat, variant: str) -> Array:
    """Return the result pattern of every pattern of an 8- or 16-bit format (read-only)."""
    patterns = np.arange(1 << fmt.bits, dtype=fmt.bits_dtype)
    table = _rounded(name, widen(patterns.view(fmt.dtype)), fmt).view(fmt.bits_dtype)
    difference_key = VARIANTS[name][variant].table
    if difference_key is not None:
        table = table + cuda_functions.difference(f"{difference_key}_{fmt.name}").astype(table.dtype)
    table.setflags(write=False)
    return table


def _apply(name: str, x: ArrayLike, fmt: str | FloatFormat, variant: str) -> Array:
    """Check the arguments and compute by table, kernel or the general path."""
    target = get_format(fmt)
    chosen = lookup(VARIANTS[name], variant, f"variant of {name}")
    if target.name not in chosen.formats:
        places = ", ".join(chosen.formats)
        raise FormatError(f"{name} variant {variant!r} is for {places}, not {target.name}")
    (values,) = check_operands((x,), target)
    if target.bits <= 16:
        table = unary_table(name, target, variant)
        return _gathered(table, values, target)
    flat = np.ascontiguousarray(values).reshape(-1)
    if variant in POLYNOMIALS:
        return _polynomial(flat, variant).reshape(values.shape)
    if (of_cuda := cuda_functions.FUNCTIONS.get(f"{name}.{variant}")) is not None:
        with np.errstate(all="ignore"):
            return with_canonical_nan(of_cuda(flat), target).reshape(values.shape)
    if name == "erf" and variant != "correct":
        return _ascend_erf(flat).reshape(values.shape)
    if target.name == "float64":
        return _float64(name, flat).reshape(values.shape)
    if target.name == "float32" and name in ("exp", "exp2"):
        return _exp_float32(name, flat).reshape(values.shape)
    return _rounded(name, flat, target).reshape(values.shape)


def _gathered(table: Array, values: Array, target: FloatFormat) -> Array:
    from npusim.formats import elementwise_kernels

    patterns = np.ascontiguousarray(values).reshape(-1).view(target.bits_dtype)
    out = np.empty_like(patterns)
    elementwise_kernels.gather(table, patterns, out)
    return out.view(target.dtype).reshape(values.shape)


def _polynomial(flat: Array, variant: str) -> Array:
    """Return a polynomial of `POLYNOMIALS`, with one fused multiply-add per power."""
    from npusim.formats import elementwise_kernels

    coefficients, lowest = POLYNOMIALS[variant]
    out = np.empty(flat.size, np.int32)
    elementwise_kernels.exp2_polynomial(flat, out, np.array(coefficients, np.float32), np.float32(lowest))
    return out.view(np.float32)


def _ascend_erf(x: Array) -> Array:
    """Return Ascend C's Erf of flat float32, each product and sum rounded."""
    x = np.clip(x, np.float32(-3.92), np.float32(3.92))
    square = mul(x, x, "float32")
    above, below = (
        functools.reduce(lambda total, c: add(mul(total, square, "float32"), c, "float32"), coefficients)
        for coefficients in np.array(ASCEND_ERF, np.float32)
    )
    return div(mul(above, x, "float32"), below, "float32")


def _float64(name: str, flat: Array) -> Array:
    """Return the float64 evaluation itself: reproducible, within 2**-49, not correctly rounded."""
    if name == "exp":
        from npusim.formats import elementwise_kernels

        out = np.empty(flat.size)
        elementwise_kernels.exp_float64(flat, out)
    else:
        with np.errstate(all="ignore"):
            out = FUNCTIONS[name](flat)
    return with_canonical_nan(out, get_format("float64"))


def _exp_float32(name: str, flat: Array) -> Array:
    """Return exp or exp2 correctly rounded to float32; undecided inputs are computed exactly."""
    from npusim.formats import elementwise_kernels

    fmt = get_format("float32")
    out = np.empty(flat.size, np.float32)
    undecided = np.empty(flat.size, np.bool_)
    elementwise_kernels.exp_float32(flat, out, undecided, name == "exp2")
    bits = out.view(np.uint32)
    where = np.flatnonzero(undecided)
    if where.size:
        closer, open_still = np.empty(where.size, np.float32), undecided[: where.size]
        elementwise_kernels.exp_float32_closer(flat[where], closer, open_still, name == "exp2")
        out[where] = closer
        _settle(name, flat, where[open_still], bits, fmt)
    return with_canonical_nan(out, fmt)


def exp(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return e**x in ``fmt``; any shape, dtype of the format.

    ``correct`` is correctly rounded in every format but float64 (there: reproducible, within
    2**-49).  Variants are listed in ``VARIANTS``; ``hopper_hexp`` is the H200's half intrinsic,
    which was measured to be correctly rounded for all inputs.  exp(-Inf) is +0, NaN is canonical.

    Raises `FormatError` for an unknown format or variant, or an operand of another dtype.

    Examples
    --------
    >>> exp(np.float16([0, 1]), "float16").tolist()
    [1.0, 2.71875]
    """
    return _apply("exp", x, fmt, variant)


def exp2(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return 2**x in ``fmt``; see :func:`exp`.

    ``exp2p`` (float32) is the polynomial of the golden attention kernels: 0 unless x > -126 (so
    NaN gives 0), Horner in float32 fma, exponent added as an integer; not meant for x >= 128.
    ``hopper_ex2`` (float16, bfloat16) is the H200's ``ex2.approx``.
    """
    return _apply("exp2", x, fmt, variant)


def log(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the natural logarithm in ``fmt``; -Inf for ±0, NaN for negatives; see :func:`exp`."""
    return _apply("log", x, fmt, variant)


def log2(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the binary logarithm in ``fmt``; -Inf for ±0, NaN for negatives; see :func:`exp`."""
    return _apply("log2", x, fmt, variant)


def log1p(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the natural logarithm of 1 + x in ``fmt``; log1p(-0) is -0, -Inf for -1, NaN below it; see :func:`exp`.

    ``libdevice`` (float32) is CUDA's ``log1pf``.
    """
    return _apply("log1p", x, fmt, variant)


def rcp(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return 1/x in ``fmt``; 1/±0 is ±Inf, 1/±Inf ±0; see :func:`exp`."""
    return _apply("rcp", x, fmt, variant)


def rsqrt(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return 1/sqrt(x) in ``fmt``; ±Inf for ±0, NaN for negative numbers; see :func:`exp`."""
    return _apply("rsqrt", x, fmt, variant)


def sqrt(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the square root in ``fmt``; sqrt(-0) is -0, NaN for other negatives; see :func:`exp`.

    ``hopper_approx`` (float32) is a GPU's ``sqrt.approx.ftz``: within 1 ulp, 0 for subnormals.
    """
    return _apply("sqrt", x, fmt, variant)


def tanh(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the hyperbolic tangent in ``fmt``; tanh(-0) is -0; see :func:`exp`."""
    return _apply("tanh", x, fmt, variant)


def erf(x: ArrayLike, fmt: str | FloatFormat, *, variant: str = "correct") -> Array:
    """Return the error function in ``fmt``; erf(-0) is -0, erf(±Inf) is ±1; see :func:`exp`.

    ``libdevice`` (float32) is CUDA's ``erff``, ``ascend_c`` (float32) Ascend C's ``Erf``.
    """
    return _apply("erf", x, fmt, variant)
