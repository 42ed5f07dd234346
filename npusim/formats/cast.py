"""Convert arrays between number formats: one rounding, every mode, explicit overflow and NaN."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from npusim.errors import FormatError
from npusim.formats.float_format import FORMATS, FloatFormat, format_of_dtype, get_format, lookup
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]
Overflow = Literal["inf", "nan", "saturate", "ascend_saturate", "low_bits"]

#: Names of rounding modes and their numbers in the kernels.  ``none`` and ``rint`` are the Ascend names (CAST_NONE,
#: CAST_RINT) of nearest even.
ROUNDINGS: Mapping[str, int] = MappingProxyType(
    {"nearest_even": 0, "nearest_away": 1, "toward_zero": 2, "floor": 3, "ceil": 4, "odd": 5, "none": 0, "rint": 0}
)
#: Codes of scales that are powers of two: the code of 1, the largest code, and NaN.
E8M0_BIAS, E8M0_TOP, E8M0_NAN = 127, 254, 255
OVERFLOWS: tuple[str, ...] = ("inf", "nan", "saturate", "ascend_saturate", "low_bits")
NAN_RULES: tuple[str, ...] = ("canonical", "keep_sign", "truncate")


@dataclass(frozen=True, eq=False)
class CastPlan:
    """The target side of one conversion, as the integers that the kernels read."""

    target: FloatFormat
    over_code: int  #: codes of a value that is too large, and of Inf
    nan_code: int
    over_keeps_sign: bool
    nan_keeps_sign: bool

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Kernel arguments, in the order the kernels unpack them."""
        return (
            self.target.mantissa_bits,
            self.target.min_exponent,
            self.target.max_code,
            self.over_code,
            self.nan_code,
            self.target.bits - 1,
            int(self.over_keeps_sign),
            int(self.nan_keeps_sign),
            self.target.storage_shift,
        )


def natural_overflow(fmt: FloatFormat) -> Overflow:
    """Return the default overflow of ``fmt``: Inf, else NaN, else saturation."""
    if fmt.has_infinity:
        return "inf"
    return "saturate" if fmt.nan == "none" else "nan"


def natural_rounding(fmt: FloatFormat) -> str:
    """Return the default rounding of a cast to ``fmt``: to nearest even; for HiF8, ties away from zero."""
    return "nearest_even" if fmt.table is None else "nearest_away"


@functools.cache
def plan_cast(fmt: FloatFormat, overflow: str | None, nan: str) -> CastPlan:
    """Return the codes that overflow, Inf and NaN become in ``fmt``.

    Raises `FormatError` if the policy or NaN rule is unknown or the format cannot express it.
    """
    policy = natural_overflow(fmt) if overflow is None else overflow
    if policy not in OVERFLOWS:
        raise FormatError(f"unknown overflow policy {policy!r}; known: {', '.join(OVERFLOWS)}")
    if nan not in NAN_RULES:
        raise FormatError(f"unknown NaN rule {nan!r}; known: {', '.join(NAN_RULES)}")
    if nan == "truncate" and fmt.name != "tf32":
        raise FormatError(f"NaN rule 'truncate' is for tf32 only, not {fmt.name}")
    if policy == "inf" and not fmt.has_infinity:
        raise FormatError(f"overflow 'inf': {fmt.name} has no infinity; use 'nan' or 'saturate'")
    if policy == "nan" and fmt.nan == "none":
        raise FormatError(f"overflow 'nan': {fmt.name} has no NaN; use 'saturate'")
    if policy == "low_bits":
        if fmt.name != "int8":
            raise FormatError(f"overflow 'low_bits': {fmt.name} is not int8; use 'saturate'")
        policy = "saturate"  # `_to_integer` applies the rule
    keep = nan != "canonical"
    canonical = fmt.canonical_nan_bits >> fmt.storage_shift
    if fmt.nan == "ieee" and keep:
        canonical = (fmt.max_code + 1) | (1 << (fmt.mantissa_bits - 1))
    if policy == "ascend_saturate":
        return CastPlan(fmt, fmt.max_code, 0, True, False)
    over = {"inf": fmt.max_code + 1, "nan": canonical, "saturate": fmt.max_code}[policy]
    return CastPlan(fmt, over, canonical, keep or policy != "nan", keep)


def widen(x: Array) -> Array:
    """Return ``x`` as float32 (float64 stays float64, int32 becomes float64): always exact.

    ``x`` has any shape and the dtype of some format, or an integer of at most 32 bits.  Elements with scales
    (`stored_format`) become float64, and NaN where the scale is NaN.

    Raises `FormatError` for any other dtype.
    """
    if x.dtype == np.float32 or x.dtype == np.float64:  # noqa: PLR1714 - a tuple's comparison makes dtypes of both
        return x
    if x.dtype == np.float16:
        return _widen_float16(x)
    if x.dtype.kind in "iub" and x.dtype.itemsize <= 4:
        return x.astype(np.float32 if x.dtype.itemsize <= 2 else np.float64)
    if x.dtype.names == ("element", "scale"):
        return widen(x["element"]).astype(np.float64) * scale_values(x["scale"])
    fmt = format_of_dtype(x.dtype)
    if fmt is None:
        names = ", ".join(FORMATS)
        raise FormatError(f"dtype {x.dtype} is not a number format; formats: {names}")
    if fmt.size_bytes == 1:
        return np.take(fmt.values, x.view(np.uint8))
    return np.left_shift(x.view(np.uint16), 16, dtype=np.uint32).view(np.float32)  # bfloat16


def _widen_float16(x: Array) -> Array:
    from npusim.formats import cast_kernels

    out = np.empty(x.shape, np.float32)
    patterns = np.ascontiguousarray(x).reshape(-1).view(np.int16)
    cast_kernels.widen_float16(patterns, out.reshape(-1).view(np.int32))
    return out


def scale_values(scales: Array) -> Array:
    """Return E8M0, E4M3 or float32 scales as float32; the sign of E4M3 scales is ignored, as by the matrix unit."""
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        codes = scales.view(np.uint8)
        powers = np.ldexp(np.float32(1.0), np.minimum(codes, E8M0_TOP).astype(np.int32) - E8M0_BIAS)
        return np.where(codes == E8M0_NAN, np.float32(np.nan), powers)
    wide = widen(scales)
    return np.abs(wide) if scales.dtype == ml_dtypes.float8_e4m3fn else wide


def cast(
    x: ArrayLike,
    fmt: str | FloatFormat,
    *,
    rounding: str | None = None,
    overflow: str | None = None,
    nan: str = "canonical",
) -> Array:
    """Return ``x`` converted to ``fmt`` with exactly one rounding.

    Parameters
    ----------
    x
        Any shape; dtype of any format in ``FORMATS`` or an integer of at most 32 bits.
    fmt
        Target format or its name; the result has shape ``x.shape`` and dtype ``fmt.dtype``.
    rounding
        ``nearest_even`` (also ``none`` and ``rint``, Ascend's CAST_NONE and CAST_RINT), ``nearest_away`` (CAST_ROUND,
        ``cvt.rna``), ``toward_zero``, ``floor``, ``ceil``, ``odd`` (von Neumann: an inexact result has its last bit
        set).  Default: ``nearest_even``, but ``nearest_away`` for hifloat8, which has no other mode (the 950's
        CAST_ROUND).
    overflow
        ``inf``; ``nan``; ``saturate`` (``cvt.satfinite``: Inf becomes the largest finite value too, NaN stays NaN);
        ``ascend_saturate`` (as ``saturate``, and NaN becomes +0); ``low_bits`` (only int8: the number saturates to 16
        bits, of which the low 8 are stored, as on GPUs: PTX ``cvt.rzi.s16.f32``, ``st.b8``). Default: ``inf``, but
        ``nan`` for float8_e4m3fn and ``saturate`` for int8, FP6 and FP4, where NaN becomes the largest value (PTX
        ``cvt``).  As in IEEE 754, a mode that rounds inwards returns the largest finite value instead of overflowing.
    nan
        The result for a NaN: ``canonical`` (sign 0, all bits 1: NVIDIA), ``keep_sign`` (quiet NaN
        with the source's sign: ml_dtypes), ``truncate`` (NVIDIA ``cvt.rna.tf32``: the pattern
        with its low bits cleared; tf32 only).

    Returns
    -------
    ndarray
        -0 stays -0, and negative underflow gives -0, except in int8 and hifloat8.

    Raises `FormatError` for an unknown format, mode or policy, or a source dtype that is no format.

    Notes
    -----
    Checked against H200 ``cvt`` for all 2**32 float32 inputs (``golden/hashes.npz``).

    Examples
    --------
    >>> cast([0.1, 1e6], "float8_e4m3fn", overflow="saturate").astype(float).tolist()
    [0.1015625, 448.0]
    """
    target = get_format(fmt)
    mode = lookup(ROUNDINGS, rounding or natural_rounding(target), "rounding mode")
    source = _as_array(x)
    plan = plan_cast(target, overflow, nan)
    if target.is_integer:
        return _to_integer(widen(source), target, rounding=mode, has_low_bits=overflow == "low_bits")
    if target.table is not None:
        return _to_table(widen(source), plan, mode)
    natural = overflow in (None, natural_overflow(target))
    if natural and source.dtype == target.dtype and target.name != "tf32":
        return _with_nan(source.copy(), plan)
    return _convert(source, plan, mode, truncates=nan == "truncate")


def _as_array(x: ArrayLike) -> Array:
    """Return ``x`` as an array; Python integers become float64 if that is exact."""
    source = np.asarray(x)
    if source.dtype != np.int64 or isinstance(x, np.ndarray):
        return source
    doubles: Array = source.astype(np.float64)
    if np.any(np.abs(doubles) > 2.0**53):
        raise FormatError("integers beyond 2**53 would be rounded twice; pass Python floats")
    return doubles


def _convert(source: Array, plan: CastPlan, mode: int, *, truncates: bool) -> Array:
    """Widen exactly, then round once if the target is narrower."""
    target, wide = plan.target, widen(source)
    if target.name == "float64" or (target.name == "float32" and wide.dtype == np.float32):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return _apply_policy(wide.astype(target.dtype), plan)
    out = _narrow(np.ascontiguousarray(wide), plan, mode).reshape(source.shape)
    if truncates:
        is_nan = np.isnan(wide)
        out[is_nan] = wide[is_nan].astype(np.float32)
        out = (out.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return out


def _narrow(wide: Array, plan: CastPlan, mode: int) -> Array:
    """Round contiguous float32 or float64 values of any shape to a narrower format."""
    from npusim.formats import cast_kernels

    target = plan.target
    out = np.empty(wide.size, target.bits_dtype)
    if wide.dtype == np.float32 and mode == cast_kernels.NEAREST_EVEN:
        cast_kernels.narrow_float32_nearest(wide.reshape(-1).view(np.int32), out, plan.numbers)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaN
            doubles = wide.astype(np.float64, copy=False).reshape(-1)
        narrow: Any = cast_kernels.narrow_float64
        narrow = narrow if out.size > 1 else narrow.function  # machine code is not worth while for a constant
        narrow(doubles.view(np.int64), out, plan.numbers, mode)
    return out.view(target.dtype)


def _to_table(wide: Array, plan: CastPlan, mode: int) -> Array:
    """Round to the nearest value of a table, ties away from zero; a result of 0 has no sign.

    Raises `FormatError` for another rounding.
    """
    fmt = plan.target
    if mode != ROUNDINGS["nearest_away"] or fmt.table is None:
        raise FormatError(f"the only rounding of {fmt.name} is nearest_away")
    codes = np.argsort(np.where(fmt.values[:128] >= 0, fmt.values[:128], np.inf))  # Inf last
    steps = fmt.values[codes].astype(np.float64)
    steps[-1] = 1.5 * steps[-2]  # the value that the code of Inf would represent: one more bit of mantissa
    with np.errstate(invalid="ignore"):  # a signalling NaN
        magnitude = np.abs(wide.astype(np.float64))
    code = codes[np.searchsorted((steps[:-1] + steps[1:]) / 2, magnitude, side="right")]
    code = np.where(np.isinf(magnitude) | (code == codes[-1]), plan.over_code, code)
    code |= np.where((wide < 0) & (code > 0), 1 << (fmt.bits - 1), 0)
    code = np.where(np.isnan(magnitude), plan.nan_code, code)
    return code.astype(np.uint8).view(fmt.dtype)


def _with_nan(values: Array, plan: CastPlan) -> Array:
    """Return ``values`` (a separate copy in the target's dtype) with every NaN replaced according to the rule."""
    if plan.target.nan == "none":
        return values
    is_nan = np.isnan(values)
    if not is_nan.any():
        return values
    bits = values.view(plan.target.bits_dtype)
    sign_bit = plan.target.bits - 1
    signs = (bits[is_nan] >> sign_bit) << sign_bit if plan.nan_keeps_sign else 0
    bits[is_nan] = np.asarray(plan.nan_code, bits.dtype) | signs
    return values


def _apply_policy(values: Array, plan: CastPlan) -> Array:
    """Return ``values`` with Inf and NaN replaced according to ``plan``; values need no rounding."""
    if plan.over_code != plan.target.max_code + 1:
        is_infinite = np.isinf(values)
        code = np.asarray(plan.over_code, plan.target.bits_dtype).view(plan.target.dtype)
        signed = np.copysign(code, values) if plan.over_keeps_sign else code
        values = np.where(is_infinite & ~np.isnan(values), signed, values)
    return _with_nan(values, plan)


#: Dtypes whose elements numpy tests for Inf and NaN as they are: the tests raise no floating-point flag.
_NATIVE = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
#: Largest number of elements for which a mask is faster than `numpy.errstate` and a search for the smallest.
FEW_VALUES = 8192


def is_all_finite(values: Array) -> bool:
    """Return whether no element of an array in a format's dtype is Inf or NaN."""
    if values.dtype in _NATIVE:
        return bool(np.isfinite(values).all())
    if values.dtype != np.float16:
        with np.errstate(invalid="ignore"):
            return bool(np.isfinite(widen(values) if values.dtype.names else values).all())
    # numpy would examine float16 values one by one; the patterns of magnitudes have the order of the numbers.
    return values.size == 0 or bool((values.view(np.uint16) & 0x7FFF).max() < FORMATS["float16"].max_code + 1)


def with_canonical_nan(values: Array, fmt: FloatFormat) -> Array:
    """Return float32 or float64 ``values``, overwritten where NaN: machines differ in its sign."""
    if values.size <= FEW_VALUES:
        if not (is_nan := np.isnan(values)).any():
            return values
    else:
        # The smallest element is NaN if any element is; for many elements this is faster than a mask.
        with np.errstate(invalid="ignore"):
            if not np.isnan(values.min()):
                return values
        is_nan = np.isnan(values)
    values.view(fmt.bits_dtype)[is_nan] = fmt.canonical_nan_bits
    return values


def _to_integer(wide: Array, target: FloatFormat, *, rounding: int, has_low_bits: bool) -> Array:
    """Round to whole numbers; NaN becomes 0, -0 becomes 0.

    The values saturate to the format's limits, or, for int8, to 16 bits, of which the result has the low 8.
    """
    with np.errstate(invalid="ignore"):
        values = wide.astype(np.float64)
        low, whole = np.floor(values), np.trunc(values)
        lost = values - low
        match rounding:
            case 0:
                whole = np.rint(values)
            case 1:
                # Not floor(abs + 0.5), which rounds up the number just below a half.
                whole += np.where(np.abs(values - whole) >= 0.5, np.sign(values), 0.0)
            case 3:
                whole = low
            case 4:
                whole = np.ceil(values)
            case 5:
                whole = np.where((lost > 0) & (np.fmod(low, 2.0) == 0), low + 1.0, low)
        whole = np.where(np.isnan(whole), 0.0, whole)
    if has_low_bits:
        return np.clip(whole, -32768.0, 32767.0).astype(np.int16).astype(np.int8)
    return np.clip(whole, -target.max_finite - 1.0, target.max_finite).astype(target.dtype)
