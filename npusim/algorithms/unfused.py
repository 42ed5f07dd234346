"""Attention without fusion, and kernels that prepare inputs: rows in, rows out, phase by phase.

Scores are stored in the inputs' format after each kernel, as frameworks do; softmax works in
float32 inside its kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import MASKED, grid, with_columns
from npusim.algorithms.flash import chosen
from npusim.algorithms.phase import Loop, Phase, name
from npusim.algorithms.table import Stage, row
from npusim.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Mask
    from npusim.algorithms.table import Table
    from npusim.ir.program import Serves
    from npusim.ir.tile import GlobalTensor

O = Opcode  # noqa: E741 - tables read best with one letter


@dataclass(frozen=True, slots=True)
class UnfusedPrecision:
    """What frameworks store between kernels; ``input`` stands for the format of Q, K and V.

    scores
        S after each kernel that writes it; softmax itself works in float32.
    operand
        P as softmax stores it.
    output
        The result.
    exp_variant, sum_order, arithmetic
        Named choices: an exponential to the base e, the order of row sums, the matrix arithmetic
        (both empty: the device's own).
    """

    name: str
    scores: str = "input"
    operand: str = "input"
    output: str = "input"
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        return {
            "scores": self.scores, "softmax": "float32", "operand": self.operand, "output": self.output
        }  # fmt: skip


#: S / sqrt(d), then masked, in the scores' own format.
SCALE_MASK = (
    row(O.MUL, "S", "S_in", "scale"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
)
#: The same and the casts around softmax as frameworks run them: an operator a kernel.
SCALE = (row(O.MUL, "S", "S_in", "scale"),)
MASK = (row(O.SELECT, "S", "mask", "S_in", "masked", only="mask"),)
WIDEN = (row(O.CAST, "S", "S_in"),)
NARROW = (row(O.CAST, "P", "P_in"),)
#: Inputs on their way to a narrower format; the vector unit goes through float32 (no instruction
#: turns bfloat16 into float16), and a scale is applied to what the kernel would have read.
CAST_INPUT = (
    row(O.CAST, "X_wide", "X_in"),
    row(O.CAST, "X", "X_wide"),
    row(O.MUL, "X", "X", "scale", only="scale"),
)
SCALE_INPUT = (row(O.MUL, "X", "X_in", "scale"),)
#: Softmax of whole rows.
SOFTMAX = (
    row(O.CAST, "X", "S_in"),
    row(O.ROW_MAX, "m", "X"),
    row(O.SUB, "X", "X", "m"),
    row(O.EXP, "X", "X"),
    row(O.ROW_SUM, "l", "X"),
    row(O.DIV, "X", "X", "l"),
    row(O.CAST, "P", "X"),
)
#: Softmax of rows that do not fit: statistics chunk by chunk ...
STATISTICS = (
    row(O.CAST, "X", "S_in"),
    row(O.ROW_MAX, "m_part", "X"),
    row(O.MAX, "m_new", "m", "m_part"),
    row(O.SUB, "m", "m", "m_new"),
    row(O.EXP, "m", "m"),
    row(O.MUL, "l", "l", "m"),
    row(O.SUB, "X", "X", "m_new"),
    row(O.EXP, "X", "X"),
    row(O.ROW_SUM, "l_part", "X"),
    row(O.ADD, "l", "l", "l_part"),
    row(O.COPY, "m", "m_new"),
)
#: ... then the probabilities.
NORMALISE = (
    row(O.CAST, "X", "S_in"),
    row(O.SUB, "X", "X", "m"),
    row(O.EXP, "X", "X"),
    row(O.DIV, "X", "X", "l"),
    row(O.CAST, "P", "X"),
)


def element_wise(
    label: str, table: Table, source: GlobalTensor, out: GlobalTensor, sizes: tuple[int, int],
    constants: Mapping[str, float], *, work: Mapping[str, str] | None = None, mask: Mask | None = None,
    offset: int | None = None, serves: Serves = "rows",
) -> Phase:  # fmt: skip
    """Return one table over all elements, ``what`` from ``what_in``: ``sizes`` = (rows of a cell, columns).

    ``what`` is what the table writes last; ``work`` gives the formats of further tiles it names,
    ``offset`` how far right of its own number a row sees past the mask's diagonal.
    """
    axes, what = "row col", table[-1].dst
    names = {
        f"{what}_in": name("operand", axes, source.fmt, label=what),
        what: name("result", axes, out.fmt),
        **({"mask": name("mask", axes, "int8")} if mask else {}),
        **{n: name("work", axes, fmt) for n, fmt in (work or {}).items()},
    }
    rows = tuple(replace(c, causal_offset=offset) for c in grid(source, ("row", sizes[0])))
    return Phase(
        name=label, names=names,
        cells=with_columns(rows, source.cols, sizes[1], MASKED if mask else frozenset()),
        sizes={"row": sizes[0], "col": sizes[1]}, loops=(Loop((Stage(label, table),), "col"),),
        tensors={f"{what}_in": source, what: out}, constants=constants,
        masks={"mask": mask} if mask else {}, serves=serves,
    )  # fmt: skip


def softmax(
    source: GlobalTensor, out: GlobalTensor, sizes: tuple[int, int], p: UnfusedPrecision
) -> Phase:
    """Return the softmax of stored scores: rows of ``sizes[1]`` columns whole, longer ones in two passes."""
    is_whole = source.cols <= sizes[1]
    tile, vector, fmt = "row col", "row", "float32"
    names = {
        "S_in": name("operand", tile, source.fmt, label="S"),
        "P": name("result", tile, out.fmt),
        "X": name("work", tile, fmt),
        "m": name("max", vector, fmt, start=None if is_whole else -math.inf),
        "m_new": name("max", vector, fmt),
        "m_part": name("max", vector, fmt),
        "l": name("sum", vector, fmt, start=None if is_whole else 0.0),
        "l_part": name("sum", vector, fmt),
    }
    passes = (SOFTMAX,) if is_whole else (STATISTICS, NORMALISE)
    stages = chosen((Stage("softmax", t) for t in passes), p.exp_variant, p.sum_order)
    return Phase(
        name="softmax", names=names, cells=with_columns(grid(source, ("row", sizes[0])), source.cols, sizes[1]),
        sizes={"row": sizes[0], "col": sizes[1]}, loops=tuple(Loop((s,), "col") for s in stages),
        tensors={"S_in": source, "P": out},
    )  # fmt: skip
