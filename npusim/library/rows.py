"""Operations between a layer's products: norm, rotary embedding, activation, routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from npusim.kernel import (
    STORED,
    WIDE,
    FlashPrecision,
    GlobalTensor,
    Kernel,
    Phase,
    Phases,
    RowsProblem,
    Stacked,
    Value,
    ceil_div,
    exp,
    full,
    grid,
    kernel,
    needs_groups,
    round_up,
    rsqrt,
    schedule,
    sum_of_parts,
    tiles,
    with_columns,
)
from npusim.machine import Machine

#: Factor of the difference of two probabilities; it is so large that the exponential of the product is negligible.
STEEP = 1e6


EPSILON = 1e-5  # source: rms_norm_eps of Llama-2's config.json


@kernel(results="sum y", x="row col", update="row col")
def norm(x: Value, update: Value, fmt: str, mean: float) -> tuple[Value, Value]:
    """Root mean square norm (Zhang, Sennrich 2019) of the residual sum."""
    total = x + update
    wide = total.to(WIDE)
    square = (wide * wide).sum() * mean + EPSILON
    return total, (total.to(WIDE) * rsqrt(square)).to(fmt)


@kernel(results="sum y", x="row col", update="row col")
def norm_by_pieces(x: Value, update: Value, fmt: str, mean: float) -> Iterator[tuple[Value, Value]]:
    """The same norm for rows that do not fit: the sums of squares are computed piece by piece; then the inputs are read
    again for the results.
    """
    square = full("row", 0.0, WIDE)
    for xj, uj in tiles(x, update):
        wide = (xj + uj).to(WIDE)
        square = square + (wide * wide).sum()
    for xj, uj in tiles(x, update):
        total = xj + uj
        yield total, (total.to(WIDE) * rsqrt(square * mean + EPSILON)).to(fmt)


@kernel(results="sum y", x="row col", update="row col", cos="row col", sin="row col")
def rotary(x: Value, update: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Halves of a head, rotated by an angle for each row and column (Su et al. 2021)."""
    a, b = x * cos, update * sin
    low = a - b
    a, b = update * cos, x * sin
    return low, a + b


def times_sigmoid(x: Value, slope: float, fmt: str) -> Value:
    """Return x / (1 + exp(-slope x)): x times the sigmoid of slope x."""
    wide = x.to(WIDE)
    return (wide / (exp(wide * -slope) + 1.0)).to(fmt)


@kernel(results="y", x="row col", update="row col")
def gate(x: Value, update: Value, fmt: str) -> Value:
    """SiLU of the gate, times the other half (Shazeer 2020)."""
    return times_sigmoid(x, 1.0, fmt) * update


@kernel(results="y", x="row col")
def gelu(x: Value, fmt: str) -> Value:
    """GELU as x sigmoid(1.702 x)."""
    return times_sigmoid(x, 1.702, fmt)  # source: Hendrycks and Gimpel 2016, section 2


@kernel(results="y", x="row col")
def route(x: Value, fmt: str, parts: int) -> Value:
    """The ``parts`` largest values of a row's softmax: they are selected one after another; a selected value is reduced
    by 1.
    """
    wide = x.to(WIDE)
    e = exp(wide - wide.max())
    share = e / e.sum()
    left = share
    for _ in range(parts):
        left = left - exp((left - left.max()) * STEEP)  # 1 at the largest value, nearly 0 elsewhere
    return (share * (share - left)).to(fmt)


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"norm": norm, "rotary": rotary, "gate": gate, "gelu": gelu, "route": route}
)


#: Operands that all heads share.
SHARED = ("cos", "sin")


#: Kernels that need complete rows.
WHOLE_ROWS = ("norm", "route")


def pointwise(what: str, shape: tuple[int, int, int], fmt: str, tile: tuple[int, int], parts: int = 1) -> Phase:
    """Return the elementwise operation ``what`` of ``shape`` (heads, rows, columns), with a ``tile`` of rows and
    columns per block.

    A norm's block has complete rows; with a narrower ``tile`` it processes them column by column.
    """
    heads, rows, cols = shape
    if what == "sum":
        total = GlobalTensor("y", 1, heads, rows, cols, fmt, "output")
        stacked = Stacked("split", parts, replace(total, name="x", batch=parts, role="input"))
        return sum_of_parts("sum", stacked, total, tile)
    is_cut = what == "norm" and tile[1] < cols
    one = norm_by_pieces if is_cut else KERNELS[what]

    def tensor(n: str) -> GlobalTensor:
        role: Literal["input", "output"] = "output" if n in one.results else "input"
        return GlobalTensor(n, 1, 1 if n in SHARED else heads, rows, cols, fmt, role)

    out = [tensor(n) for n in one.results]
    by_rows = ("row", tile[0])
    return one.phase(
        what,
        with_columns(grid(out[-1], by_rows), cols, tile[1]) if is_cut else grid(out[-1], by_rows, ("col", tile[1])),
        {"row": tile[0], "col": min(tile[1], cols)},
        out,
        **dict[str, Any]((n, tensor(n)) for n in one.axes),
        fmt=fmt,
        mean=1.0 / cols,
        parts=parts,
    )


#: A piece of a row has a multiple of this number of columns: 32 bytes at 16 bits.
COLUMNS = 16


def rows_of_layer(problem: RowsProblem, tiling: Any, _precision: FlashPrecision, machine: Machine) -> Phases:
    """Return a norm, rotary embedding or activation between the products of a layer."""
    p = problem
    width = p.cols if p.what in WHOLE_ROWS else min(p.cols, tiling.elements)
    in_slices = bool(machine.slice_elements)
    if p.what == "norm" and in_slices and p.cols > tiling.piece:
        width = round_up(ceil_div(p.cols, ceil_div(p.cols, tiling.piece)), COLUMNS)
    rows = max(1, tiling.elements // width)
    # a few rows are distributed over all cores
    most = ceil_div(p.rows * p.heads * ceil_div(p.cols, width), machine.places)
    height = min(p.rows, max(1, min(rows * (tiling.slices if in_slices else 1) * machine.row_cores, most)))
    phase = pointwise(p.what, (p.heads, p.rows, p.cols), p.dtype, (height, width), p.parts)
    return [replace(phase, slice_elements=rows * width)]


SCHEDULES = schedule(
    "rows",
    rows_of_layer,
    problem=RowsProblem,
    precisions=[STORED],
    tiling=None,
    kind="rows",
    unsupported=needs_groups,
    summary="norm, rotary embedding or activation of a layer",
)
