"""Element-wise kernels of their own, as step tables: attention without fusion, inputs prepared.

Scores are stored in the inputs' format after each kernel, as frameworks do; softmax works in
float32 inside its kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.ir.op import Attributes, Opcode
from npusim.schedules.steps.table import row

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def choices(self) -> Mapping[Opcode, Attributes]:
        """Return the attributes of exponentials and row sums."""
        exponential, order = Attributes(variant=self.exp_variant), Attributes(order=self.sum_order)
        return {O.EXP: exponential, O.ROW_SUM: order}


#: S / sqrt(d), then masked, in the scores' own format.
SCALE_MASK = (
    row(O.MUL, "S", "S_in", "scale"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
)
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
