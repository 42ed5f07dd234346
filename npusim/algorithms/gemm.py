"""A matrix product, and a copy: the two kernels that no attention is needed for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.algorithms.cells import grid
from npusim.algorithms.phase import Loop, Phase, name
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


def copy(source: GlobalTensor, target: GlobalTensor, rows: int) -> Phase:
    """Return a copy of a tensor, ``rows`` rows a cell."""
    names = {
        "x": name("operand", "row col", source.fmt, label="copy"),
        "y": name("result", "row col", target.fmt, label="copy"),
    }
    return Phase(
        name="copy", names=names, cells=grid(source, ("row", rows)), sizes={"row": rows, "col": source.cols},
        loops=(Loop((Stage("copy", (row(Opcode.COPY, "y", "x"),)),)),), tensors={"x": source, "y": target},
    )  # fmt: skip
