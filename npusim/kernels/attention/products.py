"""Kernels other than attention: a matrix product, a copy, and the operations between a layer's products.

The latter are a norm with residual, rotary embedding and the FFN's activation, row by row; a norm's weights are part of
the next product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.kernels.attention.call_blocks import grid, in_bands, with_columns
from npusim.kernels.attention.split import even, split_blocks, tiles_of
from npusim.kernels.form.language import Value, full, tiles
from npusim.kernels.form.lowering import kernel
from npusim.kernels.form.phase import Phase, Stacked, TileRun, tensor_of

if TYPE_CHECKING:
    from npusim.program.ir.tile import GlobalTensor


def product(a: Value, b: Value, fmt: str, role: str) -> Value:
    """C = A B, or A B^T if B is stored transposed."""
    return (a @ (b if b.axes[0] == "k" else b.T)).to(fmt).role(role)


def product_by_tiles(a: Value, b: Value, fmt: str) -> Value:
    """C = A B, or A B^T, accumulated in the matrix unit over pieces of k."""
    total = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        total = total + ak @ (bk if bk.axes[0] == "k" else bk.T)
    return total.to(fmt)


#: Forms of the product kernel: B stored as it is, and B stored transposed.
WHOLE, BY_TILES = (
    tuple(kernel(results="c", a="m k", b=axes)(function) for axes in ("k n", "n k"))
    for function in (product, product_by_tiles)
)


@kernel(results="c", parts="m n")
def add_parts(parts: Value, fmt: str) -> Value:
    """The sum of the results of splits of k, or of the experts of a token."""
    total = full("m n", 0.0, "float32")
    for part in tiles(parts, axis="split"):
        total = total + part.to("float32")
    return total.to(fmt)


@kernel(results="y", x="row col")
def copied(x: Value) -> Value:
    """Return the tile unchanged."""
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
    """Return C = A B, or A B^T, for every head of a batch, with one tile of C per block; A's heads may share B's.

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
    """Return C = A B, or A B^T, in tiles of ``tile`` = (m, n, k), whose pieces along k are added up in float32.

    ``splits`` > 1: this number of blocks share a tile's k, and a further phase adds their results in float32.
    ``bands``: number of rows of tiles that blocks process together, and whether these are columns of tiles instead
    (`in_bands`).
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
    return first, sum_of_parts(f"{label}_sum", out, c, (m, n))


def copy(source: GlobalTensor, target: GlobalTensor, rows: int, label: str = "copy", cols: int = 0) -> Phase:
    """Return a copy of a tensor, with ``rows`` rows and ``cols`` columns (0: all) per block.

    Several heads of ``target`` may share one head of ``source``.
    """
    width = min(cols or source.cols, source.cols)
    blocks = grid(target, ("row", rows), ("col", width)) if cols else grid(target, ("row", rows))
    return copied.phase(label, blocks, {"row": rows, "col": width}, [target], x=source)


def sum_of_parts(label: str, parts: Stacked, out: GlobalTensor, tile: tuple[int, int]) -> Phase:
    """Return the sum of parts of a matrix, in tiles of (rows, columns)."""
    (m, n), run = tile, TileRun(0, 1, parts.count, 1)
    blocks = tuple(replace(b, runs=(run,)) for b in grid(out, ("m", m), ("n", n)))
    return add_parts.phase(label, blocks, {"m": m, "n": n, "split": 1}, [out], parts=parts, fmt=out.fmt)
