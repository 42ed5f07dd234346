"""Number formats as tables: fields, code points, scale rules, and a block quantised step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from npusim.formats import (
    BLOCK_FORMATS,
    FORMATS,
    SCALE_RULES,
    BlockArray,
    BlockFormat,
    FloatFormat,
    cast,
    get_format,
    quantize,
)
from npusim.formats.mma_arithmetic import E8M0
from npusim.report.text import Block, Column, Columns, Facts, Heading, cells, document

#: Largest number of code points that a format may have for them to be printed.
FEW_CODES = 256

_ALL = Columns(
    Column("format", "name", style="label"),
    Column("bits", "bits", ">g", ">"),
    Column("largest", "largest", ".6g", ">"),
    Column("smallest", "smallest", ".3g", ">"),
    Column("", "what"),
)
_RULES = Columns(Column("rule", "name", style="label"), Column("scale of a block", "says"), Column("source", "source"))
_STEPS = Columns(
    Column("x", 0, ".6g", ">", key="x"),
    Column("over scale", 1, ".6g", ">", key="over scale"),
    Column("element", 2, "g", ">", key="element"),
    Column("code", 3, "#04x", ">", key="code"),
    Column("value", 4, ".6g", ">", key="value"),
    Column("error", 5, "+.3g", ">", key="error"),
)


def _rows() -> Iterator[dict[str, Any]]:
    for fmt in FORMATS.values():
        yield {
            "name": fmt.name,
            "bits": fmt.bits,
            "largest": fmt.max_finite,
            "smallest": fmt.min_subnormal,
            "what": _fields(fmt),
        }
    for block in BLOCK_FORMATS.values():
        yield {
            "name": block.name,
            "bits": block.bits_per_value,
            "largest": None,
            "smallest": None,
            "what": f"blocks of {block.block} {block.element}, {block.scale} scales",
        }


def _fields(fmt: FloatFormat) -> str:
    """Return the fields of a format's bits, and its special values."""
    if fmt.is_integer:
        return "two's complement"
    if fmt.table is not None:
        fields = f"a prefix, an exponent of 0 to {fmt.exponent_bits} bits and a mantissa of {fmt.mantissa_bits} to 1"
    else:
        fields = f"1 sign, {fmt.exponent_bits} exponent (bias {fmt.bias}), {fmt.mantissa_bits} mantissa"
    special = ", ".join([*(["Inf"] if fmt.has_infinity else []), *(["NaN"] if fmt.nan != "none" else [])])
    return f"{fields}; {special or 'no Inf, no NaN'}"


def formats_table() -> list[Block]:
    """Return every format, of numbers and of blocks."""
    return [Heading("Number formats", "`npusim format NAME` shows one of them"), _ALL.grid(_rows())]


def formats_document() -> dict[str, object]:
    """Return the same as JSON data."""
    return document("formats", formats=list(_rows()))


def element_table(fmt: FloatFormat, values: Sequence[float]) -> list[Block]:
    """Return a format's fields, its code points if they are few, and ``values`` cast to it."""
    facts = [
        ("fields", cells(_fields(fmt))),
        ("largest", cells(f"{fmt.max_finite:.6g}")),
        ("smallest", cells(f"{fmt.min_subnormal:.6g} (normal from {fmt.min_normal:.6g})")),
    ]
    if fmt.bits <= int(math.log2(FEW_CODES)):
        facts.append(("codes", cells(*_code_points(fmt))))
    stored = cast(list(values), fmt)
    rounded = stored.astype(np.float64) if not stored.dtype.names else fmt.values[stored.view(np.uint8)]
    facts.append(("casts", cells(*(f"{x:g} -> {float(y):g}" for x, y in zip(values, rounded, strict=True)))))
    return [Heading(fmt.name, f"{fmt.bits} bits"), Facts(tuple(facts))]


def _code_points(fmt: FloatFormat) -> Iterator[str]:
    """Yield lines of 16 codes; codes of negative numbers differ only in the sign bit."""
    count = 1 << (fmt.bits - (not fmt.is_integer))
    for first in range(0, count, 16):
        row = (f"{value:g}" for value in fmt.values[first : min(first + 16, count)])
        yield f"{first:#04x}  {' '.join(row)}"
    if not fmt.is_integer:
        yield f"{count:#04x}  the same, negative" + (" (0x80: NaN)" if fmt.nan == "minus_zero" else "")


def block_table(fmt: BlockFormat, rule: str | None, values: Sequence[float]) -> list[Block]:
    """Return a block format, its rules, and a block of ``values`` quantised step by step."""
    element = get_format(fmt.element)
    quantised = _quantized(fmt, rule, values)
    unit = f", in steps of {fmt.unit:g}" if fmt.unit != 1 else ""
    facts = [
        ("elements", cells(f"{fmt.element}{unit}: {_fields(element)}; largest {fmt.max_element:g}")),
        ("codes", cells(*_code_points(element))),
        ("scale", cells(f"{fmt.scale} every {fmt.block} along the axis that a product contracts")),
        ("source", cells(fmt.source)),
        ("rule used", cells(f"{quantised.rule}{' (default)' if quantised.rule == fmt.rule else ''}")),
        *_scale_facts(quantised, values),
    ]
    rules = [SCALE_RULES[name] for name in fmt.rules]
    return [
        Heading(fmt.name, f"{fmt.bits_per_value:g} bits a value"),
        _RULES.grid(rules),
        Facts(tuple(facts)),
        _STEPS.grid(block_steps(quantised, values)),
    ]


def _scale_facts(made: BlockArray, values: Sequence[float]) -> Iterator[tuple[str, Any]]:
    amax = max(map(abs, values))
    if made.tensor_scale != 1:
        yield "tensor scale", cells(f"{float(made.tensor_scale):.6g}, from the tensor's largest magnitude {amax:g}")
    scale = float(made.block_scales.flat[0])
    power = f" = 2^{int(math.log2(scale))}" if made.fmt.scale == E8M0 and math.isfinite(scale) else ""
    code = f", code {made.scales.view(np.uint8).flat[0]:#04x}" if made.fmt.scale != "float32" else ""
    yield "block scale", cells(f"{scale:.6g}{power}{code}, from its largest magnitude {amax:g}")


def _quantized(fmt: BlockFormat, rule: str | None, values: Sequence[float]) -> BlockArray:
    """Return ``values`` as one block, filled up with zeros where the format itself does not pad."""
    length = len(values) if fmt.pads else fmt.block
    return quantize(np.pad(np.array(values, np.float32), (0, length - len(values))), fmt, rule=rule)


def block_steps(made: BlockArray, values: Sequence[float]) -> list[tuple[float, ...]]:
    """Return, for each of ``values``: x, x divided by its scales, the element, its code, its value and its error."""
    scale = float(made.block_scales.flat[0]) * float(made.tensor_scale)
    elements = get_format(made.fmt.element).values[made.elements.view(np.uint8)] * made.fmt.unit
    restored = made.values()
    return [
        (float(x), float(x) / scale if scale else 0.0, float(q), int(code), float(v), float(v) - float(x))
        for x, q, code, v in zip(values, elements, made.elements.view(np.uint8), restored, strict=False)
    ]


def block_document(fmt: BlockFormat, rule: str | None, values: Sequence[float]) -> dict[str, object]:
    """Return a block format and the quantised block as JSON data."""
    quantised = _quantized(fmt, rule, values)
    return document(
        "format",
        name=fmt.name,
        element=fmt.element,
        scale=fmt.scale,
        block=fmt.block,
        bits_per_value=fmt.bits_per_value,
        rule=quantised.rule,
        rules={name: SCALE_RULES[name].source for name in fmt.rules},
        tensor_scale=float(quantised.tensor_scale),
        block_scale=float(quantised.block_scales.flat[0]),
        steps=_STEPS.records(block_steps(quantised, values)),
    )


def element_document(fmt: FloatFormat) -> dict[str, object]:
    """Return a format as JSON data; with its code points if they are few (NaN and Inf as text)."""
    codes = fmt.values[: 1 << fmt.bits] if fmt.bits <= int(math.log2(FEW_CODES)) else ()
    points = [float(v) if math.isfinite(v) else str(v) for v in codes]
    return document(
        "format",
        name=fmt.name,
        bits=fmt.bits,
        fields=_fields(fmt),
        largest=fmt.max_finite,
        smallest=fmt.min_subnormal,
        code_points=points,
    )
