"""Kernels that run before an attention: conversion of Q, K and V to another format, means of columns, and kernels over
all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from npusim.errors import TilingError
from npusim.formats import BLOCK_FORMATS, cast, get_block_format, get_scale_rule
from npusim.kernels.attention.call_blocks import MASKED, AttentionTensors, grid, with_columns
from npusim.kernels.attention.online_softmax import narrow_overflow
from npusim.kernels.form.language import ONE, Value, full, tiles, where
from npusim.kernels.form.lowering import Kernel, kernel
from npusim.kernels.form.phase import Mask, Phase, Stacked, TileRun
from npusim.program.ir.tile import GlobalTensor
from npusim.units import chunks

WIDE = "float32"


#: Number of rows that are added up by one product, for a mean.
SUMMED = 256


#: Rows and columns of a tile in a kernel that prepares an input: the height of a product's tile, and the width of a
#: slice of scores.
PREPARED = (128, 8192)


@kernel(x="row col", mask="row col")
def scaled(x: Value, mask: Value | None, scale: float, fill: float = -math.inf) -> Iterator[Value]:
    """Scores S / sqrt(d), then masked, in the scores' format."""
    for xj in tiles(x):
        yield where(mask, xj * scale if scale != 1 else xj, fill)


@kernel(x="row col")
def converted(
    x: Value, fmt: str, through: str = "", scale: float = 1.0, axis: str = "", rule: str = ""
) -> Iterator[Value]:
    """Conversion to another format and multiplication by a scale, ``through`` a wider format if no instruction converts
    directly.

    ``axis``, ``rule``: axis and scale rule of a block format.
    """
    for xj in tiles(x):
        y = (xj.to(through) if through else xj).to(fmt, overflow=narrow_overflow(fmt), axis=axis, rule=rule)
        yield y * scale if scale != 1 else y


@kernel(x="row col", mean="1 col")
def smoothed(x: Value, mean: Value, fmt: str, axis: str = "", rule: str = "") -> Iterator[Value]:
    """The tensor in another format after subtraction of each column's mean, in float32."""
    for xj, mj in tiles(x, mean):
        yield (xj.to(WIDE) - mj).to(fmt, overflow=narrow_overflow(fmt), axis=axis, rule=rule)


@kernel(results="sums", ones="1 key", x="key col")
def column_sums(ones: Value, x: Value) -> Value:
    """Sums of some rows, column by column: a product with ones."""
    return (ones @ x).to(WIDE)


@kernel(results="mean", sums="1 col")
def column_means(sums: Value, count: int) -> Value:
    """Means of columns over a number of rows, whose sums are added part by part."""
    total = full("1 col", 0.0, WIDE)
    for part in tiles(sums, axis="split"):
        total = total + part
    return total * (1 / count)


def element_wise(
    label: str,
    kernel: Kernel,
    source: GlobalTensor,
    out: GlobalTensor,
    sizes: tuple[int, int],
    *,
    mask: Mask | None = None,
    offset: int | None = None,
    **more: Any,
) -> Phase:
    """Return a kernel of x over all elements: ``sizes`` = (rows of a block, columns), ``more`` has its other arguments.

    ``offset``: on the mask's diagonal, row r sees the columns up to r + offset.
    """
    rows = tuple(replace(c, causal_offset=offset) for c in grid(source, ("row", sizes[0])))
    blocks = with_columns(rows, source.cols, sizes[1], MASKED if mask else frozenset())
    return kernel.phase(
        label, blocks, {"row": sizes[0], "col": sizes[1]}, [out], x=source, mask=mask, fmt=out.fmt, **more
    )


def workspace(like: GlobalTensor, name: str, fmt: str) -> GlobalTensor:
    """Return the tensor that one kernel writes for another kernel: the same matrices, head by head."""
    return replace(like, name=name, fmt=fmt, role="workspace", is_interleaved=False)


def means(x: GlobalTensor) -> tuple[list[Phase], GlobalTensor]:
    """Return the kernels that compute the mean of each column of a tensor's heads in float32, and their result.

    Raises `TilingError` for heads of various lengths.
    """
    if x.lengths:
        raise TilingError(f"smooth: the mean of {x.name} needs sequences of equal length; these differ")
    mean = replace(workspace(x, f"{x.name}_mean", WIDE), rows=1, stretch_rows=0)
    parts, heads = list(chunks(x.rows, SUMMED)), grid(mean, (ONE, 1))
    sums = Stacked("split", len(parts), replace(mean, name=f"{x.name}_sums", batch=x.batch * len(parts)))
    spans = [(("key", at, n), ("split", i, 1)) for i, (at, n) in enumerate(parts)]
    summed = column_sums.phase(
        f"sum_{x.name}",
        tuple(replace(head, spans=(*head.spans, *part)) for head in heads for part in spans),
        {"key": SUMMED, "col": x.cols, "split": 1},
        [sums],
        ones=GlobalTensor("ones", 1, 1, 1, SUMMED, x.fmt, "constant"),
        x=x,
        values={"ones": lambda: cast(np.ones((1, 1, 1, SUMMED)), x.fmt)},
    )
    whole = tuple(replace(head, runs=(TileRun(0, 1, len(parts), 1),)) for head in heads)
    sizes = {"col": x.cols, "split": 1}
    averaged = column_means.phase(f"average_{x.name}", whole, sizes, [mean], sums=sums, count=x.rows)
    return [summed, averaged], mean


def prepared(
    inputs: AttentionTensors, fmt: str, scale: float | None = None, rule: str = "", smooth: str = "", values: str = ""
) -> tuple[list[Phase], AttentionTensors]:
    """Return the kernels that convert Q, K and V to ``fmt``, Q times a scale, and their results.

    ``values``: another format of V.  Blocks run along the axis that products contract: along the head for Q and K,
    along keys for V.  ``smooth``: tensors from which the mean of each column is subtracted first.
    """
    phases, changed, of_keys = list[Phase](), dict[str, GlobalTensor](), fmt
    if rule:
        get_scale_rule(rule, get_block_format(fmt))  # a rule for another format is refused before a kernel is built
    for n, factor in zip("qkv", (scale, None, None), strict=True):
        tensor: GlobalTensor = getattr(inputs, n)
        fmt = values if n == "v" and values else of_keys
        is_in_blocks = fmt in BLOCK_FORMATS
        if tensor.fmt == fmt and factor is None and n not in smooth:
            continue
        changed[n] = workspace(tensor, f"{n}_{fmt}" if is_in_blocks else f"{n}_prepared", fmt)
        more: dict[str, Any] = {"axis": "row" if n == "v" else "col", "rule": rule} if is_in_blocks else {}
        if n in smooth:
            averaged, more["mean"] = means(tensor)
            phases += averaged
        else:
            more |= {"scale": 1.0 if factor is None else factor, "through": WIDE}
        phases.append(
            element_wise(
                f"quantise_{n}" if is_in_blocks else f"prepare_{n}",
                smoothed if n in smooth else converted if tensor.fmt != fmt else scaled,
                tensor,
                changed[n],
                (PREPARED[0], min(tensor.cols, PREPARED[1])),
                **more,
            )
        )
    return phases, replace(inputs, **changed)
