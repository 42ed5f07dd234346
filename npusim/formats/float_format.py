"""Number formats as data: widths, limits and NaN convention of every format in which npusim computes."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from npusim.errors import FormatError
from npusim.late_methods import dataclass
from npusim.units import ceil_div

NanConvention = Literal["ieee", "all_ones", "none", "minus_zero"]


@dataclass(frozen=True)
class FloatFormat:
    """A binary number format: sign, exponent and mantissa widths, and the codes of NaN and Inf.

    Attributes
    ----------
    name, bits
        Registry name and the width of an encoding (tf32: 19 bits, stored in 32).
    exponent_bits, mantissa_bits, bias
        Field widths; a normal value is ``(1 + m / 2**mantissa_bits) * 2**(e - bias)``.
    has_infinity
        False for ``float8_e4m3fn``, ``int8`` and formats narrower than 8 bits.
    nan
        ``ieee``: exponent all ones, mantissa not 0; ``all_ones``: exponent and mantissa all ones (OCP E4M3); ``none``:
        no NaN (int8, FP6, FP4); ``minus_zero``: the code that would otherwise be -0 (HiF8).
    dtype
        The numpy dtype in which arrays of this format are stored, with at least one byte per element; if ml_dtypes has
        none, one field of a byte that contains the code.
    canonical_nan_bits
        The NaN of a computed result: sign 0, all other bits 1, as NVIDIA hardware returns
        (measured on H200 for float16, bfloat16, FP8 and float32); the IEEE default for float64.  Without NaN: the
        largest value, as PTX ``cvt`` to FP6 and FP4 gives for NaN.
    table
        Values of the codes of a format whose fields have no fixed widths (HiF8), and whose ``exponent_bits`` and
        ``mantissa_bits`` are the widest; for other formats None.
    scale_block
        Number of elements that share a scale of a byte (`stored_format`), 0 if there are no scales; ``dtype`` then has
        the fields ``element`` and ``scale``; each element is stored with the scale of its block.

    Notes
    -----
    Source: IEEE 754-2019 (float16/32/64), OCP 8-bit Floating Point Specification 1.0 (FP8), OCP Microscaling Formats
    1.0 (FP6, FP4), PTX ISA (tf32: the float32 layout with 10 mantissa bits, low 13 bits zero), CANN ``DynamicMxQuant``
    (E1M2), arXiv 2409.16626 and CANN's converter ``hif8_t`` (HiF8).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool
    nan: NanConvention
    dtype: np.dtype[Any]
    canonical_nan_bits: int
    table: tuple[float, ...] | None = None
    scale_block: int = 0

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers (int8, int32)."""
        return self.exponent_bits == 0

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of one stored element (tf32 is stored as float32: 4)."""
        return int(self.dtype.itemsize) - (self.scale_block > 0)

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the scales of some elements."""
        return ceil_div(elements, self.scale_block) if self.scale_block else 0

    @functools.cached_property
    def per_byte(self) -> int:
        """Number of elements in a byte of a tile: two of 4 bits in blocks, else one."""
        return 2 if self.scale_block and self.bits == 4 else 1

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of some elements of a row, without their scales."""
        return elements * self.size_bytes if self.per_byte == 1 else ceil_div(elements, self.per_byte)

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of some elements, including their scales."""
        size = self.row_bytes(elements)
        return size + self.scale_bytes(elements) if self.scale_block else size

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value (and of every subnormal)."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Encoding of the largest finite value, without unused storage bits."""
        if self.is_integer:
            return (1 << (self.bits - 1)) - 1
        if self.table is not None:
            return max((c for c, v in enumerate(self.table) if math.isfinite(v)), key=self.table.__getitem__)
        all_ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.nan in ("all_ones", "none"):
            return all_ones - (self.nan == "all_ones")
        return all_ones - (1 << self.mantissa_bits)

    @property
    def storage_shift(self) -> int:
        """Unused low bits of the stored pattern (13 for tf32 in float32, else 0)."""
        return 8 * self.size_bytes - self.bits if self.size_bytes > 1 else 0

    @property
    def max_finite(self) -> float:
        """Largest finite value."""
        if self.is_integer:
            return float(self.max_code)
        if self.table is not None:
            return self.table[self.max_code]
        significand = (1 << self.mantissa_bits) | (self.max_code & ((1 << self.mantissa_bits) - 1))
        exponent = (self.max_code >> self.mantissa_bits) - self.bias
        return significand * 2.0 ** (exponent - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value (1 for int8)."""
        return 1.0 if self.is_integer else 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, the spacing of all subnormals (1 for int8)."""
        if self.table is not None:
            return min(v for v in self.table if v > 0)
        return 1.0 if self.is_integer else self.min_normal * 2.0**-self.mantissa_bits

    @functools.cached_property
    def values(self) -> np.ndarray[Any, Any]:
        """float32 values of all 256 codes of a byte, for formats of at most 8 bits; codes of more than ``bits`` bits
        repeat the values.
        """
        codes = np.arange(256) % (1 << self.bits)
        if self.table is not None or self.is_integer:
            result = np.array(self.table if self.table is not None else codes.astype(np.int8), np.float32)
        else:
            magnitude = codes % (1 << (self.bits - 1))
            field, fraction = magnitude >> self.mantissa_bits, magnitude % (1 << self.mantissa_bits)
            significand = np.where(field > 0, fraction + (1 << self.mantissa_bits), fraction)
            result = np.ldexp(np.float32(significand), np.maximum(field, 1) - self.bias - self.mantissa_bits)
            result[magnitude > self.max_code] = np.nan
            if self.has_infinity:
                result[magnitude == self.max_code + 1] = np.inf
            result = np.copysign(result, np.where(codes >> (self.bits - 1), -1.0, 1.0)).astype(np.float32)
        result.setflags(write=False)
        return result

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Unsigned integer dtype of the same size as ``dtype``, for bit patterns."""
        return np.dtype(f"u{self.size_bytes}")


def _ieee(name: str, exponent_bits: int, mantissa_bits: int, dtype: Any) -> FloatFormat:
    """Return a format with Inf and IEEE NaN; bias is half the exponent range."""
    bits, bias = 1 + exponent_bits + mantissa_bits, (1 << (exponent_bits - 1)) - 1
    nan_bits = ((1 << (bits - 1)) - 1) << (8 * np.dtype(dtype).itemsize - bits)
    return FloatFormat(name, bits, exponent_bits, mantissa_bits, bias, True, "ieee", np.dtype(dtype), nan_bits)


def _finite(name: str, exponent_bits: int, mantissa_bits: int, dtype: Any) -> FloatFormat:
    """Return a format narrower than a byte: every code is a number."""
    bits, bias = 1 + exponent_bits + mantissa_bits, max((1 << (exponent_bits - 1)) - 1, 1)
    largest = (1 << (bits - 1)) - 1
    return FloatFormat(name, bits, exponent_bits, mantissa_bits, bias, False, "none", np.dtype(dtype), largest)


def _code_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a format that ml_dtypes does not have: a byte with the code, in a field that has the format's
    name.
    """
    return np.dtype([(name, np.uint8)])


def _hifloat8(code: int) -> float:
    """Return the value of a HiF8 code: a prefix states the number of exponent bits, the rest is mantissa."""
    body = code & 0x7F
    if body in (0, 0x6F):
        special = math.inf if body else math.nan if code else 0.0
        return -special if code == 0xEF else special
    if body < 8:  # the DML numbers: powers of two below the others
        magnitude = 2.0 ** (body - 23)
    else:
        exponent_bits = 4 if body >= 0x60 else 3 if body >= 0x40 else 2 if body >= 0x20 else int(body >= 0x10)
        left = 7 - (2 if exponent_bits > 1 else 4 - exponent_bits)  # exponent and mantissa
        rest = body & ((1 << left) - 1)
        width = left - exponent_bits
        field, fraction = rest >> width, rest & ((1 << width) - 1)
        exponent = 0
        if exponent_bits:  # sign and magnitude, whose top bit is not stored
            top = 1 << (exponent_bits - 1)
            exponent = (top | (field & (top - 1))) * (-1 if field & top else 1)
        magnitude = (1.0 + fraction / (1 << width)) * 2.0**exponent
    return -magnitude if code & 0x80 else magnitude


def _all_formats() -> Mapping[str, FloatFormat]:
    float64 = FloatFormat("float64", 64, 11, 52, 1023, True, "ieee", np.dtype(np.float64), 0x7FF8 << 48)
    e4m3 = FloatFormat("float8_e4m3fn", 8, 4, 3, 7, False, "all_ones", np.dtype(ml_dtypes.float8_e4m3fn), 0x7F)
    int8 = FloatFormat("int8", 8, 0, 7, 0, False, "none", np.dtype(np.int8), 0)
    hif8 = FloatFormat(
        "hifloat8", 8, 4, 3, 15, True, "minus_zero", _code_dtype("hifloat8"), 0x80, tuple(map(_hifloat8, range(256)))
    )
    formats = (
        float64,
        _ieee("float32", 8, 23, np.float32),
        _ieee("tf32", 8, 10, np.float32),
        _ieee("bfloat16", 8, 7, ml_dtypes.bfloat16),
        _ieee("float16", 5, 10, np.float16),
        e4m3,
        _ieee("float8_e5m2", 5, 2, ml_dtypes.float8_e5m2),
        int8,
        _finite("float6_e2m3fn", 2, 3, ml_dtypes.float6_e2m3fn),
        _finite("float6_e3m2fn", 3, 2, ml_dtypes.float6_e3m2fn),
        _finite("float4_e2m1fn", 2, 1, ml_dtypes.float4_e2m1fn),
        _finite("float4_e1m2", 1, 2, _code_dtype("float4_e1m2")),
        hif8,
    )
    return MappingProxyType({item.name: item for item in formats})


FORMATS: Mapping[str, FloatFormat] = _all_formats()


#: Formats of tiles that hold integers of a kernel exactly; no tensor of a problem has such a format.
_WHOLE: Mapping[str, FloatFormat] = MappingProxyType(
    {"int32": FloatFormat("int32", 32, 0, 31, 0, False, "none", np.dtype(np.int32), 0)}
)


def get_format(name: str | FloatFormat) -> FloatFormat:
    """Return the format called ``name``; a :class:`FloatFormat` is returned unchanged.

    Raises `FormatError` if the name is unknown; the message lists near names.

    Examples
    --------
    >>> get_format("float8_e4m3fn").max_finite
    448.0
    """
    if type(name) is str and name in FORMATS:
        return FORMATS[name]
    if type(name) is str and name in _WHOLE:
        return _WHOLE[name]
    return name if isinstance(name, FloatFormat) else lookup(FORMATS, name, "number format")


_E8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)
#: Block formats that tiles may have: elements and scales of one byte each.
_STORED_BLOCKS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        name: replace(
            FORMATS[element],
            name=name,
            scale_block=block,
            dtype=np.dtype([("element", FORMATS[element].dtype), ("scale", scale)]),
        )
        for name, element, block, scale in (
            ("mxfp8", "float8_e4m3fn", 32, _E8M0_DTYPE),
            ("mxfp8_e5m2", "float8_e5m2", 32, _E8M0_DTYPE),
            ("mxfp4", "float4_e2m1fn", 32, _E8M0_DTYPE),
            ("nvfp4", "float4_e2m1fn", 16, FORMATS["float8_e4m3fn"].dtype),
        )
    }
)


def stored_format(name: str) -> FloatFormat:
    """Return the storage format of a tile's elements: a number format, or a format in blocks.

    Raises `FormatError` if the name is neither.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name in _WHOLE:
        return _WHOLE[name]
    return lookup({**_STORED_BLOCKS, **FORMATS}, name, "number format")


_BY_DTYPE = MappingProxyType({item.dtype: item for item in FORMATS.values() if item.name != "tf32"})


def format_of_dtype(dtype: np.dtype[Any]) -> FloatFormat | None:
    """Return the format stored as ``dtype`` (float32, not tf32, for ``np.float32``), None if there is none."""
    return _BY_DTYPE.get(np.dtype(dtype))


Value = TypeVar("Value")
#: Largest number of names that an error lists completely; of more names it lists the most similar `SHOWN_NAMES`.
LISTED_NAMES = 40
SHOWN_NAMES = 10


def lookup(registry: Mapping[str, Value], name: str, kind: str) -> Value:
    """Return ``registry[name]``.

    Raises `FormatError` if ``name`` is not registered; the message lists the nearest names; if no name is near, it
    lists all of them, or `SHOWN_NAMES` of more than `LISTED_NAMES`.
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    spelled = re.sub(r"^(b?)f(?:p|loat)?(\d+)$", r"\1float\2", str(name))  # fp32, bf16, f16
    near = [spelled] if spelled in registry else difflib.get_close_matches(str(name), registry, n=6, cutoff=0.6)
    if near:
        raise FormatError(f"unknown {kind} {name!r}; near names: {', '.join(near)}")
    shown = sorted(registry)
    if len(shown) > LISTED_NAMES:
        shown = difflib.get_close_matches(str(name), registry, n=SHOWN_NAMES, cutoff=0.0)
    rest = "" if len(shown) == len(registry) else f", ... ({len(registry)} in all)"
    raise FormatError(f"unknown {kind} {name!r}; known names: {', '.join(shown)}{rest}")
