"""Block-scaled numbers: elements that share a scale, and the rules by which a block's scale is chosen.

A value is ``element * scale of its block * scale of the tensor``.  Formats and rules are data (`BLOCK_FORMATS`,
`SCALE_RULES`); every operation that rounds is float32, in the order of the source that a rule names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import E8M0_BIAS, E8M0_NAN, E8M0_TOP, Array, cast, scale_values, widen
from npusim.formats.float_format import FloatFormat, get_format, lookup, stored_format
from npusim.formats.mma_arithmetic import E8M0
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

E4M3 = "float8_e4m3fn"
_FLOAT_MAX = np.finfo(np.float32).max
_f = np.float32


@dataclass(frozen=True)
class BlockFormat:
    """Numbers in blocks along one axis; each block has a scale.

    Attributes
    ----------
    name
        Registry name.
    element, scale
        Formats of elements and of scales: ``float8_e8m0fnu`` (powers of two, 0xFF is NaN), ``float8_e4m3fn`` without
        sign, or ``float32``.
    block
        Elements that share a scale.
    rule
        The default rule; ``rules`` lists all rules of the format.
    unit
        The value of an element 1: 1/64 for MXINT8, else 1.
    pads
        Whether an axis that ``block`` does not divide ends with a shorter block (as if padded with zeros).
    source
        The document that defines the format.
    """

    name: str
    element: str
    scale: str
    block: int
    rule: str
    source: str
    unit: float = 1.0
    pads: bool = True

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules for scales of this format."""
        return tuple(rule.name for rule in SCALE_RULES.values() if rule.fits(self))

    @property
    def max_element(self) -> float:
        """Largest element, in its unit; for int8 127, so that the range is symmetric."""
        return get_format(self.element).max_finite * self.unit

    @property
    def bits_per_value(self) -> float:
        """Bits of storage per value, including its share of the scale."""
        scale_bits = 32 if self.scale == "float32" else 8
        return get_format(self.element).bits + scale_bits / self.block

    def store(self, x: Array) -> Array:
        """Return float32 or float64 ``x`` in the element's format: nearest, saturating, NaN as 0."""
        fmt = get_format(self.element)
        finite = np.where(np.isnan(x), 0.0, x) / self.unit
        if fmt.is_integer:
            finite = np.clip(finite, -127.0, 127.0)
        return cast(finite, fmt, overflow="saturate")


@dataclass(frozen=True, eq=False)
class BlockArray:
    """An array in a block format, as hardware stores it.

    Attributes
    ----------
    fmt, rule, axis
        Format, the rule that chose the scales, and the axis of the blocks.
    elements
        The shape of the quantised array, dtype of the element's format.
    scales
        The same shape, except for ``ceil(length / block)`` along ``axis``; dtype of the scale's format.
    tensor_scale
        float32 by which all values are multiplied; 1 if the rule has no such factor.
    """

    fmt: BlockFormat
    rule: str
    axis: int
    elements: Array
    scales: Array
    tensor_scale: np.float32

    @property
    def block_scales(self) -> Array:
        """The scales as float32, NaN included."""
        return scale_values(self.scales)

    def values(self) -> Array:
        """Return the values as float64: exact except for the tensor scale (rounded once); NaN in blocks whose scale is
        NaN.
        """
        wide = np.repeat(self.block_scales.astype(np.float64), self.fmt.block, axis=self.axis)
        length = self.elements.shape[self.axis]
        wide = np.take(wide, np.arange(length), axis=self.axis)
        exact = widen(self.elements).astype(np.float64) * self.fmt.unit * wide
        result: Array = exact * np.float64(self.tensor_scale)
        return result

    def stored(self) -> Array:
        """Return the elements with their scales, in the storage format of a program's tiles (`stored_format`).

        Raises `FormatError` for a format that tiles cannot have, and for a tensor scale other than 1.
        """
        dtype = stored_format(self.fmt.name).dtype
        if self.tensor_scale != 1:
            raise FormatError(
                f"{self.fmt.name}: tiles have no scale of a whole tensor, and here it is {self.tensor_scale}"
            )
        result = np.empty(self.elements.shape, dtype)
        length = self.elements.shape[self.axis]
        result["element"] = self.elements
        spread = np.repeat(self.scales, self.fmt.block, axis=self.axis)
        result["scale"] = np.take(spread, np.arange(length), axis=self.axis)
        return result


def scales_of(stored: Array, block: int, axis: int) -> Array:
    """Return the scales of an array that `BlockArray.stored` returned, one for each ``block`` elements
    along ``axis``.
    """
    return np.take(stored["scale"], np.arange(0, stored.shape[axis], block), axis=axis)


@dataclass(frozen=True)
class ScaleRule:
    """A rule that computes the scale of a block from its largest magnitude, and elements from both.

    ``apply(blocks, amax, fmt, tensor_amax)`` takes float32 blocks (..., blocks, block), their largest magnitudes (...,
    blocks), the format and the largest magnitude of the tensor; it returns the quotients (not yet rounded to the
    element's format), the scales in their dtype, and the tensor's scale.  ``reads_tensor``: the scales depend on the
    magnitude of the whole tensor, so that a single tile cannot be converted.
    """

    name: str
    scale: str
    apply: Callable[[Array, Array, BlockFormat, Any], tuple[Array, Array, Any]]
    says: str
    source: str
    elements: tuple[str, ...] = ()
    reads_tensor: bool = False

    def fits(self, fmt: BlockFormat) -> bool:
        """Whether the rule chooses scales for ``fmt``."""
        return self.scale == fmt.scale and (not self.elements or fmt.element in self.elements)


def _powers(
    exponent: Callable[[Array, FloatFormat, float], Array], infinity: int
) -> Callable[[Array, Array, BlockFormat, Any], tuple[Array, Array, Any]]:
    """Return a rule that scales by a power of two; ``infinity``: the code for a block with Inf."""

    def apply(blocks: Array, amax: Array, fmt: BlockFormat, _: object) -> tuple[Array, Array, Any]:
        element = get_format(fmt.element)
        safe = np.where(np.isfinite(amax) & (amax > 0), amax, _f(1.0))
        raw = exponent(safe, element, fmt.max_element) + E8M0_BIAS
        code = np.where(raw > E8M0_NAN, E8M0_NAN, np.clip(raw, 0, E8M0_TOP))
        code = np.where(amax == 0, 0, np.where(np.isinf(amax), infinity, np.where(np.isnan(amax), E8M0_NAN, code)))
        inverse = np.ldexp(1.0, E8M0_BIAS - code)
        quotients = blocks.astype(np.float64) * np.where(code == E8M0_NAN, 0.0, inverse)[..., None]
        return quotients, code.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu), 1.0

    return apply


def _top_exponent(amax: Array, round_up: bool = False) -> Array:
    """Return floor(log2 amax), or ceil, exactly: a logarithm is wrong just below powers of two."""
    fraction, exponent = np.frexp(np.maximum(amax.astype(np.float64), 2.0**-200))
    return np.asarray(exponent - 1 + (round_up & (fraction > 0.5)))


def _floor(amax: Array, element: FloatFormat, largest: float) -> Array:
    return _top_exponent(amax) - _top_exponent(np.array(largest))


def _ceil(amax: Array, element: FloatFormat, largest: float) -> Array:
    return _top_exponent(amax, round_up=True) - _top_exponent(np.array(largest))


def _even(amax: Array, element: FloatFormat, largest: float) -> Array:
    half = np.uint32(1 << (22 - element.mantissa_bits))
    rounded = (amax.view(np.uint32) + half) & np.uint32(0x7F800000)
    field = (rounded >> 23).astype(np.int64)
    # Rounded to Inf: the only remaining scale is NaN.
    return np.where(field == E8M0_NAN, 2 * E8M0_NAN, field - E8M0_BIAS - _top_exponent(np.array(largest)))


def _rceil(amax: Array, element: FloatFormat, largest: float) -> Array:
    return _top_exponent(amax * (_f(1.0) / _f(largest)), round_up=True)


def _rceil_div(amax: Array, element: FloatFormat, largest: float) -> Array:
    return _top_exponent(amax / _f(largest), round_up=True)


def _ue4m3(x: Array) -> Array:
    return cast(x, E4M3, overflow="saturate")


def _inverse(x: Array) -> Array:
    return np.asarray(np.minimum(_f(1.0) / x, _FLOAT_MAX))


def _transformer_engine(
    blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]
) -> tuple[Array, Array, Any]:
    """Scale the tensor to 448 times the largest element, blocks by E4M3 quotients."""
    largest = _f(fmt.max_element)
    stretch = _stretch(tensor, 448.0 * fmt.max_element)
    scales = _ue4m3(amax * (stretch * (_f(1.0) / largest)))
    back = _f(1.0) / stretch
    return blocks * _inverse(widen(scales) * back)[..., None], scales, back


def _stretch(tensor: np.floating[Any], top: float) -> Any:
    return np.minimum(_f(top) / tensor, _FLOAT_MAX) if tensor > 0 else _f(1.0)


def _four_over_six(power: int, top: float) -> Callable[[Array, Array, BlockFormat, Any], tuple[Array, Array, Any]]:
    """Return the rule that tries 6 and 4 for a block's maximum and uses the one with the smaller error."""

    def apply(blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]) -> tuple[Array, Array, Any]:
        stretch = _stretch(tensor, top * fmt.max_element)
        back = _f(1.0) / stretch
        base = (amax / _f(fmt.max_element)) * stretch
        best: tuple[Array, Array, Array] | None = None
        for factor in (1.0, 1.5):
            scales = _ue4m3(base * _f(factor))
            quotients = blocks * _inverse(widen(scales) * back)[..., None]
            wide = widen(fmt.store(quotients)) * widen(scales)[..., None]
            lost = wide * tensor / _f(fmt.max_element * top) - blocks
            # Added from left to right: numpy would add in pairs.
            error = np.add.accumulate(np.abs(lost) if power == 1 else lost * lost, axis=-1, dtype=np.float32)[..., -1]
            if best is None:
                best = quotients, scales, error
            else:
                wins = error < best[2]
                best = np.where(wins[..., None], quotients, best[0]), np.where(wins, scales, best[1]), error
        assert best is not None
        return best[0], best[1], back

    return apply


def _torchao(blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]) -> tuple[Array, Array, Any]:
    largest = _f(fmt.max_element)
    share = tensor / _f(448.0 * fmt.max_element) if tensor > 0 else _f(1.0)
    scales = _ue4m3(np.clip((amax / largest) / share, _f(2.0**-6), _f(448.0)))
    inverse = (_f(1.0) / share) / widen(scales)
    return np.clip(blocks * inverse[..., None], -largest, largest), scales, share


def _torchao_one_level(
    blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]
) -> tuple[Array, Array, Any]:
    scales = _ue4m3(np.clip(amax / _f(fmt.max_element), _f(2.0**-6), _f(448.0)))
    return blocks * (_f(1.0) / widen(scales))[..., None], scales, 1.0


def _sage3(blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]) -> tuple[Array, Array, Any]:
    scales = _ue4m3(amax / _f(fmt.max_element))
    wide = widen(scales)
    inverse = np.where(wide == 0, _f(0.0), _f(1.0) / wide)
    return blocks * inverse[..., None], scales, 1.0


def _sage3_p(blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]) -> tuple[Array, Array, Any]:
    """Divide by the scale before the scale is rounded: the kernel computes it as a power of two of a difference."""
    exact = amax / _f(fmt.max_element)
    quotients = np.where(exact[..., None] == 0, _f(0.0), blocks / exact[..., None])
    return quotients, _ue4m3(exact), 1.0


def _largest(blocks: Array, amax: Array, fmt: BlockFormat, tensor: np.floating[Any]) -> tuple[Array, Array, Any]:
    scales = np.where(amax > 0, amax / _f(fmt.max_element), _f(1.0))
    return blocks / scales[..., None], scales, 1.0


_FP8_TO_FP4 = (E4M3, "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
SCALE_RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ScaleRule(
                "floor",
                E8M0,
                _powers(_floor, E8M0_NAN),
                "2^(floor(log2 amax) - emax); values above the largest element saturate",
                "OCP Microscaling Formats 1.0, section 6.3; torchao FLOOR; aclnnDynamicMxQuant scaleAlg 0",
            ),
            ScaleRule(
                "ceil", E8M0, _powers(_ceil, E8M0_NAN), "2^(ceil(log2 amax) - emax)", "torchao CEIL", _FP8_TO_FP4
            ),
            ScaleRule(
                "even",
                E8M0,
                _powers(_even, E8M0_NAN),
                "as floor, with amax rounded to the element's mantissa",
                "torchao EVEN",
                _FP8_TO_FP4,
            ),
            ScaleRule(
                "rceil",
                E8M0,
                _powers(_rceil, E8M0_TOP),
                "the power of two not below amax * (1 / largest element), in float32",
                "cuBLAS, TransformerEngine (cvt.rp.satfinite.ue8m0x2); torchao RCEIL",
                _FP8_TO_FP4,
            ),
            ScaleRule(
                "rceil_div",
                E8M0,
                _powers(_rceil_div, E8M0_TOP),
                "the power of two not below amax / largest element, in float32",
                "aclnnDynamicMxQuant scaleAlg 1",
                _FP8_TO_FP4,
            ),
            ScaleRule(
                "te",
                E4M3,
                _transformer_engine,
                "tensor: amax to 448 * 6; block: amax * tensor scale / 6",
                "TransformerEngine NVFP4 recipe, cuBLAS",
                reads_tensor=True,
            ),
            *(
                ScaleRule(
                    f"four_over_six_{kind}_{top}",
                    E4M3,
                    _four_over_six(power, float(top)),
                    f"as te with {top} * 6, but a block's maximum becomes 4 instead of 6 where the {words} error "
                    "is then smaller",
                    "arXiv 2512.02010; TransformerEngine",
                    reads_tensor=True,
                )
                for kind, power, top, words in (
                    ("mae", 1, 256, "absolute"),
                    ("mse", 2, 256, "squared"),
                    ("mse", 2, 448, "squared"),
                )
            ),
            ScaleRule(
                "torchao_two_level",
                E4M3,
                _torchao,
                "tensor: amax / 2688; block: amax / 6 divided by the tensor's scale, at least 2^-6",
                "torchao nvfp4 with a tensor scale",
                reads_tensor=True,
            ),
            ScaleRule(
                "torchao_one_level",
                E4M3,
                _torchao_one_level,
                "amax / 6, from 2^-6 to 448; no tensor scale",
                "torchao nvfp4 without a tensor scale",
            ),
            ScaleRule("sage3", E4M3, _sage3, "amax / 6; no tensor scale", "SageAttention3, Q, K and V"),
            ScaleRule(
                "sage3_p",
                E4M3,
                _sage3_p,
                "amax / 6; elements are divided by the scale before the scale is rounded",
                "SageAttention3, P times 2688",
            ),
            ScaleRule("largest", "float32", _largest, "amax / largest element", "SageAttention, DeepSeek-V3"),
        )
    }
)

_MX = "OCP Microscaling Formats 1.0"
BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            BlockFormat("mxfp8", E4M3, E8M0, 32, "floor", _MX),
            BlockFormat("mxfp8_e5m2", "float8_e5m2", E8M0, 32, "floor", _MX),
            BlockFormat("mxfp6_e2m3", "float6_e2m3fn", E8M0, 32, "floor", _MX),
            BlockFormat("mxfp6_e3m2", "float6_e3m2fn", E8M0, 32, "floor", _MX),
            BlockFormat("mxfp4", "float4_e2m1fn", E8M0, 32, "floor", _MX),
            BlockFormat("mxint8", "int8", E8M0, 32, "floor", _MX, unit=2.0**-6),
            BlockFormat("nvfp4", "float4_e2m1fn", E4M3, 16, "te", "NVIDIA, PTX ISA kind::mxf4nvf4", pads=False),
            BlockFormat("fp8_128", E4M3, "float32", 128, "largest", "DeepSeek-V3, arXiv 2412.19437"),
            BlockFormat("int8_128", "int8", "float32", 128, "largest", "SageAttention, arXiv 2410.02367"),
        )
    }
)


def get_block_format(name: str | BlockFormat) -> BlockFormat:
    """Return the block format called ``name``; a :class:`BlockFormat` is returned unchanged.

    Raises `FormatError` if the name is unknown; the message lists near names.
    """
    return name if isinstance(name, BlockFormat) else lookup(BLOCK_FORMATS, name, "block format")


def get_scale_rule(name: str | ScaleRule, fmt: BlockFormat) -> ScaleRule:
    """Return a rule for scales of ``fmt``; raise `FormatError` if it is unknown or is for another format."""
    rule = name if isinstance(name, ScaleRule) else lookup(SCALE_RULES, name, "scale rule")
    if not rule.fits(fmt):
        raise FormatError(
            f"scale rule {rule.name!r} gives {rule.scale} scales of {', '.join(rule.elements) or 'any element'}; "
            f"{fmt.name} has {fmt.scale} scales of {fmt.element}: {', '.join(fmt.rules)}"
        )
    return rule


def _lost(scales: Array, quotients: Array | None) -> str:
    """Return a description of the parts of a tensor that a rule turns into NaN; empty if there are none.

    torchao divides by the tensor's scale.  In float32 that scale is 0 below 2688 x 2^-150, and its inverse is Inf below
    2688 x 2^-128: instruction and library cast 0 times Inf to FP4 in different ways.
    """
    if np.isnan(scale_values(scales)).any():
        return "scales are NaN, because the tensor's scale is 0 in float32,"
    if quotients is not None and np.isnan(quotients).any():
        return "zeros become NaN, because the inverse of the tensor's scale is Inf in float32,"
    return ""


def quantize(
    x: ArrayLike, fmt: str | BlockFormat, *, rule: str | ScaleRule | None = None, axis: int = -1
) -> BlockArray:
    """Return ``x`` in a block format.

    Parameters
    ----------
    x
        Any shape with at least one axis; a dtype of ``FORMATS``, read as float32 (float64 is rounded to it first).
    fmt
        A name in ``BLOCK_FORMATS`` or a value of that type.
    rule
        A name in ``SCALE_RULES``, or your own `ScaleRule`; default: the format's rule.
    axis
        The axis that a product contracts, along which blocks run.

    Returns
    -------
    BlockArray
        Elements round to nearest and saturate.  A block of zeros has elements 0 and the scale that its rule gives (E8M0
        0x00, 2^-127).  If scales are E8M0, a block with NaN has the scale NaN and elements 0; the rule decides about
        Inf.

    Raises `FormatError` for an unknown format or rule, a rule for another format, an axis that ``block`` does not
    divide if the format does not pad, NaN or Inf if scales are not E8M0, and a tensor so small that scales or zeros
    become NaN under a rule with a tensor scale.

    Examples
    --------
    >>> made = quantize([0.3, -1.0, 5.0, 100.0], "mxfp4")
    >>> made.block_scales.tolist(), made.values().tolist()
    ([16.0], [0.0, -0.0, 8.0, 96.0])
    """
    chosen = get_block_format(fmt)
    found = get_scale_rule(chosen.rule if rule is None else rule, chosen)
    wide = np.moveaxis(cast(x, "float32"), axis, -1)
    length = wide.shape[-1]
    short = -length % chosen.block
    if short and not chosen.pads:
        raise FormatError(f"{chosen.name}: blocks of {chosen.block} do not divide an axis of {length}")
    blocks = np.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, short)]).reshape(*wide.shape[:-1], -1, chosen.block)
    amax = np.max(np.abs(blocks), axis=-1)
    tensor = np.max(amax, initial=0.0)
    if chosen.scale != E8M0 and not np.isfinite(tensor):
        raise FormatError(f"{chosen.name}: the tensor contains {tensor}, which no {chosen.scale} scale can represent")
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        quotients, scales, tensor_scale = found.apply(blocks, amax, chosen, tensor)
        elements = chosen.store(quotients).reshape(*wide.shape[:-1], -1)[..., :length]
        lost = "" if chosen.scale == E8M0 else _lost(scales, quotients if found.reads_tensor else None)
    if lost:
        raise FormatError(
            f"{chosen.name}: rule {found.name}: {lost} of a tensor whose largest magnitude is {tensor:g}; "
            "scale the tensor up first, or use another rule"
        )
    return BlockArray(
        fmt=chosen,
        rule=found.name,
        axis=axis,
        elements=np.moveaxis(elements, -1, axis),
        scales=np.moveaxis(scales, -1, axis),
        tensor_scale=np.float32(tensor_scale),
    )
