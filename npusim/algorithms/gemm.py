"""A matrix product, and a copy: the two kernels that no attention is needed for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import grid, with_columns
from npusim.algorithms.phase import Loop, Phase, Run, Stacked, name, tensor_of
from npusim.algorithms.split import cut_runs, tiles_of
from npusim.algorithms.table import Stage, product, row
from npusim.ir.op import Opcode

if TYPE_CHECKING:
    from npusim.algorithms.phase import Role
    from npusim.ir.tile import GlobalTensor


def gemm(
    label: str, a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, tile: tuple[int, int], *,
    is_transposed: bool = False, arithmetic: str = "", result: str = "c", role: Role = "result",
) -> Phase:  # fmt: skip
    """Return C = A B, or A B^T, for every head of a batch, a tile of C a cell; A's heads may share B's.

    ``result`` is what the algorithm calls C, ``role`` what it is to it.
    """
    m, n = tile
    names = {
        "a": name("operand", "m k", a.fmt),
        "b": name("operand", "n k" if is_transposed else "k n", b.fmt),
        result: name(role, "m n", c.fmt, label=label),
    }
    return Phase(
        name=label, names=names, cells=grid(c, ("m", m), ("n", n)), sizes={"m": m, "n": n, "k": a.cols},
        loops=(Loop((Stage(label, (product(result, "a", "b"),)),)),), tensors={"a": a, "b": b, result: c},
        arithmetic=arithmetic,
    )  # fmt: skip


def gemm_tiles(
    a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, tile: tuple[int, int, int], *, label: str = "gemm",
    is_transposed: bool = False, arithmetic: str = "", splits: int = 1, result: str = "c", role: Role = "result",
) -> tuple[Phase, ...]:  # fmt: skip
    """Return C = A B, or A B^T, by tiles of ``tile`` = (m, n, k) that add up in float32, k piece by piece.

    ``splits`` > 1: so many cells share a tile's k, and a phase more adds what they leave, in float32.
    """
    m, n, k = tile
    whole = with_columns(grid(c, ("m", m), ("n", n)), a.cols, k)
    splits = min(splits, tiles_of(whole[0]))
    out: GlobalTensor | Stacked = c
    if splits > 1:
        parts = replace(c, name=f"{c.name}_parts", batch=c.batch * splits, fmt="float32", role="workspace")
        out = Stacked("split", splits, replace(parts, is_interleaved=False))
    cells = whole if splits == 1 else tuple(
        replace(cell, runs=runs, spans=(*cell.spans, ("split", i, 1)))
        for cell in whole
        for i, runs in enumerate(cut_runs(cell.runs, splits))
    )  # fmt: skip
    names = {
        "a": name("operand", "m k", a.fmt, label=a.name),
        "b": name("operand", "n k" if is_transposed else "k n", b.fmt, label=b.name),
        "sum": name("output", "m n", "float32", start=0.0),
        result: name(role, "m n", tensor_of(out).fmt, label=label),
    }  # fmt: skip
    first = Phase(
        name=label, names=names, cells=cells, sizes={"m": m, "n": n, "k": k, "split": 1},
        loops=(Loop((Stage(label, (product("sum", "a", "b", accumulate=True),)),), "k"),),
        finish=(Stage("store", (row(Opcode.CAST, result, "sum"),)),), tensors={"a": a, "b": b, result: out},
        arithmetic=arithmetic,
    )  # fmt: skip
    if not isinstance(out, Stacked):
        return (first,)
    names = {
        "part": name("operand", "m n", "float32"), "sum": name("output", "m n", "float32", start=0.0),
        result: name(role, "m n", c.fmt, label=label),
    }  # fmt: skip
    last = Phase(
        name=f"{label}_sum", names=names, cells=tuple(replace(cell, runs=(Run(0, 1, splits, 1),)) for cell in whole),
        sizes={"m": m, "n": n, "split": 1},
        loops=(Loop((Stage("add", (row(Opcode.ADD, "sum", "sum", "part"),)),), "split"),),
        finish=(Stage("store", (row(Opcode.CAST, result, "sum"),)),), tensors={"part": out, result: c},
    )  # fmt: skip
    return first, last


def copy(source: GlobalTensor, target: GlobalTensor, rows: int, label: str = "copy") -> Phase:
    """Return a copy of a tensor, ``rows`` rows a cell; heads of ``target`` may share those of ``source``."""
    names = {
        "x": name("operand", "row col", source.fmt, label=label),
        "y": name("result", "row col", target.fmt, label=label),
    }
    return Phase(
        name=label, names=names, cells=grid(target, ("row", rows)), sizes={"row": rows, "col": source.cols},
        loops=(Loop((Stage(label, (row(Opcode.COPY, "y", "x"),)),)),), tensors={"x": source, "y": target},
    )  # fmt: skip
