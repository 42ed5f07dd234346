"""What stands between the products of a layer: norm with residual, rotary embedding, the FFN's activation.

Row by row, no product.  A norm's weights are part of the product that follows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.cells import grid
from npusim.algorithms.phase import Loop, Phase, name
from npusim.algorithms.table import Stage, row
from npusim.ir.op import Opcode
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Name, Role
    from npusim.algorithms.table import Table

O = Opcode  # noqa: E741 - tables read best with one letter
WIDE = "float32"

#: Root mean square norm (Zhang, Sennrich 2019) of the residual sum; 1 / sqrt is exp(-ln / 2).
NORM = (
    row(O.ADD, "sum", "x", "update"),
    row(O.CAST, "wide", "sum"),
    row(O.MUL, "wide", "wide", "wide"),
    row(O.ROW_SUM, "square", "wide"),
    row(O.MUL, "square", "square", "mean"),
    row(O.ADD, "square", "square", "epsilon"),
    row(O.LOG, "square", "square"),
    row(O.MUL, "square", "square", "minus_half"),
    row(O.EXP, "square", "square"),
    row(O.CAST, "wide", "sum"),
    row(O.MUL, "wide", "wide", "square"),
    row(O.CAST, "y", "wide"),
)
#: Halves of a head turned by an angle a row and column (Su et al. 2021).
ROTARY = (
    row(O.MUL, "a", "x", "cos"),
    row(O.MUL, "b", "update", "sin"),
    row(O.SUB, "sum", "a", "b"),
    row(O.MUL, "a", "update", "cos"),
    row(O.MUL, "b", "x", "sin"),
    row(O.ADD, "y", "a", "b"),
)


def _weighted(slope: str) -> Table:
    """Return y = x / (1 + exp(slope x)): x times its sigmoid."""
    return (
        row(O.CAST, "wide", "x"),
        row(O.MUL, "low", "wide", slope),
        row(O.EXP, "low", "low"),
        row(O.ADD, "low", "low", "one"),
        row(O.DIV, "wide", "wide", "low"),
        row(O.CAST, "y", "wide"),
    )


#: SiLU of the gate times the other half (Shazeer 2020).
GATE = (*_weighted("minus_one"), row(O.MUL, "y", "y", "update"))
#: GELU as x sigmoid(1.702 x) (Hendrycks, Gimpel 2016).
GELU = _weighted("steep")
TABLES: Mapping[str, Table] = MappingProxyType({"norm": NORM, "rotary": ROTARY, "gate": GATE, "gelu": GELU})
CONSTANTS: Mapping[str, float] = MappingProxyType(
    {
        "epsilon": 1e-5,  # source: rms_norm_eps of Llama-2's config.json
        "minus_half": -0.5,  # source: 1 / sqrt(x) = exp(-ln(x) / 2)
        "minus_one": -1.0,
        "one": 1.0,
        "steep": -1.702,  # source: Hendrycks and Gimpel 2016, section 2
    }
)
#: Names that are read from and written to global memory, where a table has them.
READ, WRITTEN, SHARED = ("x", "update"), ("sum", "y"), ("cos", "sin")


def pointwise(what: str, shape: tuple[int, int, int], fmt: str, tile: tuple[int, int]) -> Phase:
    """Return ``what`` of ``shape`` (heads, rows, columns), a ``tile`` of rows and columns a cell."""
    heads, rows, cols = shape
    table = TABLES[what]
    used = {n for r in table for n in (r.dst, *r.srcs)}

    def tensor(n: str) -> GlobalTensor:
        where = (n, 1, 1 if n in SHARED else heads, rows, cols, fmt)
        return GlobalTensor(*where, "output") if n in WRITTEN else GlobalTensor(*where, "input")

    tensors = {n: tensor(n) for n in (*READ, *SHARED, *WRITTEN) if n in used}
    names: dict[str, Name] = {}
    for n in (*READ, *SHARED, *WRITTEN, "wide", "low", "a", "b", "square"):
        if n in used:
            role: Role = "result" if n in WRITTEN else "operand" if n in tensors else "work"
            form = fmt if n in tensors or n in ("a", "b") else WIDE
            names[n] = name(role, "row" if n == "square" else "row col", form, label=n)
    return Phase(
        name=what, names=names, cells=grid(tensors["y"], ("row", tile[0]), ("col", tile[1])),
        sizes={"row": tile[0], "col": min(tile[1], cols)}, loops=(Loop((Stage(what, table),)),), tensors=tensors,
        constants={n: v for n, v in {**CONSTANTS, "mean": 1.0 / cols}.items() if n in used},
    )  # fmt: skip
