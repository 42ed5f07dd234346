"""A matrix product, and a copy: the two kernels that no attention is needed for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import grid, with_columns
from npusim.algorithms.language import Value, full, tiles
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import Phase, Stacked, TileRun, tensor_of
from npusim.algorithms.split import cut_runs, tiles_of

if TYPE_CHECKING:
    from npusim.ir.tile import GlobalTensor


@kernel(results="c", a="m k", b="k n")
def product(a: Value, b: Value, fmt: str, role: str) -> Value:
    """C = A B."""
    return (a @ b).to(fmt).role(role)


@kernel(results="c", a="m k", b="n k")
def product_transposed(a: Value, b: Value, fmt: str, role: str) -> Value:
    """C = A B^T."""
    return (a @ b.T).to(fmt).role(role)


@kernel(results="c", a="m k", b="k n")
def product_by_tiles(a: Value, b: Value, fmt: str) -> Value:
    """C = A B, adding up in the matrix unit piece by piece of k."""
    total = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        total = total + ak @ bk
    return total.to(fmt)


@kernel(results="c", a="m k", b="n k")
def product_by_tiles_transposed(a: Value, b: Value, fmt: str) -> Value:
    """C = A B^T, adding up in the matrix unit piece by piece of k."""
    total = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        total = total + ak @ bk.T
    return total.to(fmt)


@kernel(results="c", parts="m n")
def add_parts(parts: Value, fmt: str) -> Value:
    """The sum of what splits of k leave."""
    total = full("m n", 0.0, "float32")
    for part in tiles(parts, axis="split"):
        total = total + part
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
    """Return C = A B, or A B^T, for every head of a batch, a tile of C a cell; A's heads may share B's.

    ``role`` is what C is to the algorithm.
    """
    return (product_transposed if is_transposed else product).phase(
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
) -> tuple[Phase, ...]:
    """Return C = A B, or A B^T, by tiles of ``tile`` = (m, n, k) that add up in float32, k piece by piece.

    ``splits`` > 1: so many cells share a tile's k, and a phase more adds what they leave, in float32.
    """
    m, n, k = tile
    whole = with_columns(grid(c, ("m", m), ("n", n)), a.cols, k)
    splits = min(splits, tiles_of(whole[0]))
    out: GlobalTensor | Stacked = c
    cells = whole
    if splits > 1:
        parts = replace(c, name=f"{c.name}_parts", batch=c.batch * splits, fmt="float32", role="workspace")
        out = Stacked("split", splits, replace(parts, is_interleaved=False))
        cells = tuple(
            replace(cell, runs=runs, spans=(*cell.spans, ("split", i, 1)))
            for cell in whole
            for i, runs in enumerate(cut_runs(cell.runs, splits))
        )
    first = (product_by_tiles_transposed if is_transposed else product_by_tiles).phase(
        label,
        cells,
        {"m": m, "n": n, "k": k, "split": 1},
        [out],
        a=a,
        b=b,
        fmt=tensor_of(out).fmt,
        arithmetic=arithmetic,
    )
    if splits == 1:
        return (first,)
    cells = tuple(replace(cell, runs=(TileRun(0, 1, splits, 1),)) for cell in whole)
    last = add_parts.phase(f"{label}_sum", cells, {"m": m, "n": n, "split": 1}, [c], parts=out, fmt=c.fmt)
    return first, last


def copy(source: GlobalTensor, target: GlobalTensor, rows: int, label: str = "copy") -> Phase:
    """Return a copy of a tensor, ``rows`` rows a cell; heads of ``target`` may share those of ``source``."""
    return copied.phase(label, grid(target, ("row", rows)), {"row": rows, "col": source.cols}, [target], x=source)
