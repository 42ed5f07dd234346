"""FlashAttention-2's steps on one tile (Dao 2023, Algorithm 1), for any allocation of formats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from npusim.formats.exponential import LOG2_E
from npusim.ir.op import Attributes, Opcode
from npusim.schedules.steps.attention import Accumulate, AttentionSteps
from npusim.schedules.steps.table import choose, row

O = Opcode  # noqa: E741 - tables read best with one letter


@dataclass(frozen=True, slots=True)
class FlashPrecision:
    """Format of every intermediate, and the named choices of the vector unit.

    ``input`` stands for the format of Q, K and V.

    scores
        S as the matrix unit's output path stores it.
    softmax
        S on the vector unit, the row maximum m and S - m.
    exponential
        P before its cast, and the rescaling factor.
    operand
        P as the second product reads it.
    running
        The row sum l and the output O.
    product
        P V as the matrix unit's output path stores it.
    output
        The result.
    exp_variant, sum_order, accumulate, arithmetic
        Named choices: exponential, order of the row sum and the matrix arithmetic (both empty: the
        device's own), where P V adds up.  A power-of-two exponential takes scores times log2 e.
    """

    name: str
    scores: str
    softmax: str
    exponential: str
    operand: str
    running: str
    product: str
    output: str
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        names = ("scores", "softmax", "exponential", "operand", "running", "product", "output")
        return {n: getattr(self, n) for n in names}


#: Scores scaled and masked, the new maximum and how it rescales what came before.
SCORES = (
    row(O.CAST, "S", "S_in"),
    row(O.MUL, "S", "S", "scale"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
    row(O.ROW_MAX, "m_tile", "S"),
    row(O.MAX, "m_new", "m", "m_tile"),
    row(O.SUB, "m_shift", "m", "m_new"),
    row(O.CAST, "exponent", "m_shift"),
    row(O.EXP, "alpha", "exponent"),
    row(O.CAST, "rescale", "alpha"),
    row(O.COPY, "m", "m_new"),
)
PROBABILITIES = (
    row(O.SUB, "S", "S", "m_new"),
    row(O.CAST, "E", "S"),
    row(O.EXP, "P", "E"),
)
SUMS = (
    row(O.CAST, "l_add", "l_tile"),
    row(O.MUL, "l", "l", "rescale"),
    row(O.ADD, "l", "l", "l_add"),
)
SOFTMAX = (
    *SCORES,
    *PROBABILITIES,
    row(O.CAST, "P_out", "P"),
    row(O.ROW_SUM, "l_tile", "P"),
    *SUMS,
)
UPDATE = (
    row(O.MUL, "O", "O", "rescale"),
    row(O.CAST, "T", "T_in", only="T_in"),
    row(O.ADD, "O", "O", "T", only="T_in"),
)
FINISH = (
    row(O.DIV, "O_normal", "O", "l"),
    row(O.CAST, "out", "O_normal"),
)


def exponent_factor(variant: str) -> float:
    """Return what scores are multiplied by before this exponential: log2 e for powers of two."""
    return LOG2_E if variant.startswith("exp2.") else 1.0


def flash_steps(precision: FlashPrecision, scale: float) -> AttentionSteps:
    """Return FlashAttention-2's tables with the formats and choices of ``precision``."""
    p = precision
    choices = {
        O.EXP: Attributes(variant=p.exp_variant),
        O.ROW_SUM: Attributes(order=p.sum_order),
    }
    return AttentionSteps(
        softmax=choose(SOFTMAX, choices),
        update=UPDATE,
        finish=FINISH,
        formats={
            "S_in": p.scores, "S": p.softmax, "E": p.exponential, "P": p.exponential,
            "P_out": p.operand, "T_in": p.product, "T": p.running,
            "O": p.running, "O_normal": p.running, "out": p.output,
            "m": p.softmax, "m_tile": p.softmax, "m_new": p.softmax, "m_shift": p.softmax,
            "exponent": p.exponential, "alpha": p.exponential, "rescale": p.running,
            "l": p.running, "l_tile": p.exponential, "l_add": p.running,
        },
        state={"m": -math.inf, "l": 0.0},
        carried=("rescale",),
        overlays={"P": "E", "O_normal": "O"},
        constants={"scale": scale * exponent_factor(p.exp_variant), "masked": -math.inf},
        accumulate=p.accumulate,
        arithmetic=p.arithmetic,
    )  # fmt: skip
