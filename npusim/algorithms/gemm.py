"""Kernels besides attention: a matrix product, a copy, and the operations between a layer's products.

The last are norm with residual, rotary embedding and the FFN's activation, row by row; a norm's weights are part of
the product that follows.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.blocks import grid, in_bands, with_columns
from npusim.algorithms.language import Value, exp, full, rsqrt, tiles
from npusim.algorithms.lowering import Kernel, kernel
from npusim.algorithms.phase import Phase, Stacked, TileRun, tensor_of
from npusim.algorithms.split import even, split_blocks, tiles_of
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def product(a: Value, b: Value, fmt: str, role: str) -> Value:
    """C = A B, or A B^T where B is stored so."""
    return (a @ (b if b.axes[0] == "k" else b.T)).to(fmt).role(role)


def product_by_tiles(a: Value, b: Value, fmt: str) -> Value:
    """C = A B, or A B^T, adding up in the matrix unit piece by piece of k."""
    total = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        total = total + ak @ (bk if bk.axes[0] == "k" else bk.T)
    return total.to(fmt)


#: By whether B is stored transposed.
WHOLE, BY_TILES = (
    tuple(kernel(results="c", a="m k", b=axes)(function) for axes in ("k n", "n k"))
    for function in (product, product_by_tiles)
)


@kernel(results="c", parts="m n")
def add_parts(parts: Value, fmt: str) -> Value:
    """The sum of the results of splits of k, or of a token's experts."""
    total = full("m n", 0.0, "float32")
    for part in tiles(parts, axis="split"):
        total = total + part.to("float32")
    return total.to(fmt)


@kernel(results="y", x="row col")
def copied(x: Value) -> Value:
    """X as it is."""
    return x


def gemm(
    label: str,
    a: GlobalTensor,
    b: GlobalTensor,
    c: GlobalTensor,
    tile: tuple[int, int],
    *,
    is_transposed: bool = False,
    arithmetic: str = "",
    role: str = "result",
) -> Phase:
    """Return C = A B, or A B^T, for every head of a batch, a tile of C a block; A's heads may share B's.

    ``role`` is C's role in the algorithm.
    """
    return WHOLE[is_transposed].phase(
        label,
        grid(c, ("m", tile[0]), ("n", tile[1])),
        {"m": tile[0], "n": tile[1], "k": a.cols},
        [c],
        a=a,
        b=b,
        fmt=c.fmt,
        role=role,
        arithmetic=arithmetic,
    )


def gemm_tiles(
    a: GlobalTensor,
    b: GlobalTensor,
    c: GlobalTensor,
    tile: tuple[int, int, int],
    *,
    label: str = "gemm",
    is_transposed: bool = False,
    arithmetic: str = "",
    splits: int = 1,
    bands: tuple[int, bool] = (1, False),
) -> tuple[Phase, ...]:
    """Return C = A B, or A B^T, by tiles of ``tile`` = (m, n, k) that add up in float32, k piece by piece.

    ``splits`` > 1: so many blocks share a tile's k, and a further phase adds their results, in float32.
    ``bands``: how many rows of tiles blocks go through together, and whether they are columns of tiles (`in_bands`).
    """
    (m, n, k), (together, are_columns) = tile, bands
    whole = with_columns(in_bands(grid(c, ("m", m), ("n", n)), together, are_columns=are_columns), a.cols, k)
    splits = min(splits, tiles_of(whole[0]))
    out: GlobalTensor | Stacked = c
    if splits > 1:
        parts = replace(c, name=f"{c.name}_parts", batch=c.batch * splits, fmt="float32", role="workspace")
        out = Stacked("split", splits, replace(parts, is_interleaved=False))
    first = BY_TILES[is_transposed].phase(
        label,
        whole if splits == 1 else split_blocks(whole, lambda block: even(tiles_of(block), splits)),
        {"m": m, "n": n, "k": k, "split": 1},
        [out],
        a=a,
        b=b,
        fmt=tensor_of(out).fmt,
        arithmetic=arithmetic,
    )
    if splits == 1:
        return (first,)
    assert isinstance(out, Stacked)
    return first, _sum_of(f"{label}_sum", out, c, (m, n))


def copy(source: GlobalTensor, target: GlobalTensor, rows: int, label: str = "copy", cols: int = 0) -> Phase:
    """Return a copy of a tensor, ``rows`` rows a block, ``cols`` columns (0: all).

    Heads of ``target`` may share those of ``source``.
    """
    width = min(cols or source.cols, source.cols)
    blocks = grid(target, ("row", rows), ("col", width)) if cols else grid(target, ("row", rows))
    return copied.phase(label, blocks, {"row": rows, "col": width}, [target], x=source)


# ---------------------------------------------------------------- between the products of a layer

WIDE = "float32"
#: Factor of a difference of probabilities beyond which its exponential counts for nothing.
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
    """The same of rows that do not fit: their squares piece by piece, then the results, of inputs read again."""
    square = full("row", 0.0, WIDE)
    for xj, uj in tiles(x, update):
        wide = (xj + uj).to(WIDE)
        square = square + (wide * wide).sum()
    for xj, uj in tiles(x, update):
        total = xj + uj
        yield total, (total.to(WIDE) * rsqrt(square * mean + EPSILON)).to(fmt)


@kernel(results="sum y", x="row col", update="row col", cos="row col", sin="row col")
def rotary(x: Value, update: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Halves of a head turned by an angle a row and column (Su et al. 2021)."""
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
    """SiLU of the gate times the other half (Shazeer 2020)."""
    return times_sigmoid(x, 1.0, fmt) * update


@kernel(results="y", x="row col")
def gelu(x: Value, fmt: str) -> Value:
    """GELU as x sigmoid(1.702 x)."""
    return times_sigmoid(x, 1.702, fmt)  # source: Hendrycks and Gimpel 2016, section 2


@kernel(results="y", x="row col")
def route(x: Value, fmt: str, parts: int) -> Value:
    """The ``parts`` largest of a row's softmax: one after the other is selected, and lowered by 1."""
    wide = x.to(WIDE)
    e = exp(wide - wide.max())
    share = e / e.sum()
    left = share
    for _ in range(parts):
        left = left - exp((left - left.max()) * STEEP)  # 1 at the largest, next to nothing elsewhere
    return (share * (share - left)).to(fmt)


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"norm": norm, "rotary": rotary, "gate": gate, "gelu": gelu, "route": route}
)
#: Operands that all heads share.
SHARED = ("cos", "sin")
#: Kernels that need a row whole.
WHOLE_ROWS = ("norm", "route")


def pointwise(what: str, shape: tuple[int, int, int], fmt: str, tile: tuple[int, int], parts: int = 1) -> Phase:
    """Return the elementwise operation ``what`` of ``shape`` (heads, rows, columns), a ``tile`` of rows and columns a
    block.

    A norm's block has whole rows; with a narrower ``tile`` it processes them column by column.
    """
    heads, rows, cols = shape
    if what == "sum":
        total = GlobalTensor("y", 1, heads, rows, cols, fmt, "output")
        stacked = Stacked("split", parts, replace(total, name="x", batch=parts, role="input"))
        return _sum_of("sum", stacked, total, tile)
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


def _sum_of(label: str, parts: Stacked, out: GlobalTensor, tile: tuple[int, int]) -> Phase:
    (m, n), run = tile, TileRun(0, 1, parts.count, 1)
    blocks = tuple(replace(b, runs=(run,)) for b in grid(out, ("m", m), ("n", n)))
    return add_parts.phase(label, blocks, {"m": m, "n": n, "split": 1}, [out], parts=parts, fmt=out.fmt)
