"""PASA's steps on one tile of shifted scores (PASA, Algorithm 1), for any allocation of formats.

K' = M K holds keys from which the fraction beta of their block's mean was taken, so scores S' need
no scale and stay small.  The row mean of S' says how far a block was shifted; its running mean F
is what all blocks are corrected to.

The first block has nothing before it to correct: F^1 is its own mean (equation 7) and Delta m'_0
stays 0 (line 9).  m starts at minus infinity.  With the printed 0 the first maximum is
max(0, rowmax S'): the same result while exp(rowmax S') is above 0, which in float64 it is down to
-745, but in float16 only down to -17; rows of scores below that end as 0/0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import cast, get_format
from npusim.ir.op import Attributes, Opcode
from npusim.ir.opaque import varying
from npusim.schedules.steps.attention import Accumulate, AttentionSteps
from npusim.schedules.steps.table import choose, row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

O = Opcode  # noqa: E741 - tables read best with one letter


@dataclass(frozen=True, slots=True)
class PasaPrecision:
    """Format of every intermediate; ``input`` stands for the format of Q, K and V.

    vector
        S', m, P, l, the rescaling factors, O: float16 in the paper.
    mean
        Row mean of S', its running mean F, and the corrections Delta m'.
    shifted
        The entries of M, and K' as the matrix unit's output path stores it.
    is_fixed_reference
        Correct all blocks to the first block's mean, kept as small differences, instead of to a
        running mean (papers.md section 2.5).
    exp_variant, sum_order, accumulate, arithmetic
        Named choices, as in `FlashPrecision`.
    """

    name: str
    shifted: str = "float16"
    scores: str = "float16"
    vector: str = "float16"
    mean: str = "float16"
    operand: str = "float16"
    product: str = "float16"
    output: str = "float16"
    is_fixed_reference: bool = False
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        names = ("shifted", "scores", "vector", "mean", "operand", "product", "output")
        return {n: getattr(self, n) for n in names}


#: Mean of S' over the block's keys, before any mask: it says how far the block was shifted.  The sum
#: is taken of S' / n, since a sum of n scores could leave float16's range (papers.md section 2.4).
MEAN = (
    row(O.CAST, "S", "S_in"),
    row(O.MUL, "S", "S", "scale", only="scale"),
    row(O.CAST, "S_wide", "S"),
    row(O.MUL, "S_part", "S_wide", "per_key"),
    row(O.ROW_SUM, "mean", "S_part"),
)
PROBABILITIES = (
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
    row(O.ROW_MAX, "m_tile", "S"),
    # A row that the mask takes wholly has P = 0 and keeps its m of minus infinity out of every maximum.
    row(O.MAX, "m_floor", "m_tile", "lowest", only="mask"),
    row(O.SUB, "S", "S", "m_floor"),
    row(O.EXP, "P", "S"),
    row(O.CAST, "P_out", "P"),
    row(O.ROW_SUM, "l_tile", "P"),
)
SUMS = (
    row(O.MUL, "l", "e_old", "l"),
    row(O.MUL, "l_part", "e_tile", "l_tile"),
    row(O.ADD, "l", "l", "l_part"),
    row(O.COPY, "m", "m_new"),
)
RUNNING_MEAN = (
    *MEAN,
    *PROBABILITIES,
    # F = ((j - 1) F + mean) / j; both the old sums and this tile are corrected to the new F.
    row(O.MUL, "F_new", "F", "tiles_before"),
    row(O.ADD, "F_new", "F_new", "mean"),
    row(O.DIV, "F_new", "F_new", "tiles"),
    row(O.SUB, "d_old", "F", "F_new"),
    row(O.MUL, "d_old", "d_old", "inva_old"),
    row(O.SUB, "d_tile", "mean", "F_new"),
    row(O.MUL, "d_tile", "d_tile", "inva"),
    row(O.CAST, "shift_old", "d_old"),
    row(O.CAST, "shift_tile", "d_tile"),
    row(O.ADD, "m_candidate", "m_tile", "shift_tile"),
    row(O.ADD, "m_new", "m", "shift_old"),
    row(O.MAX, "m_new", "m_new", "m_candidate"),
    row(O.SUB, "e_old", "m", "m_new"),
    row(O.ADD, "e_old", "e_old", "shift_old"),
    row(O.EXP, "e_old", "e_old"),
    row(O.SUB, "e_tile", "m_tile", "m_new"),
    row(O.ADD, "e_tile", "e_tile", "shift_tile"),
    row(O.EXP, "e_tile", "e_tile"),
    *SUMS,
    row(O.COPY, "F", "F_new"),
)
FIXED_REFERENCE = (
    *MEAN,
    # F keeps the first tile's mean: later tiles add 0 to it.
    row(O.MUL, "mean", "mean", "is_first"),
    row(O.ADD, "F", "F", "mean"),
    # This tile's distance from it, a small number, in place of its mean.
    row(O.SUB, "S_part", "S_wide", "F"),
    row(O.MUL, "S_part", "S_part", "per_key"),
    row(O.ROW_SUM, "mean", "S_part"),
    *PROBABILITIES,
    row(O.CAST, "F_near", "F"),
    row(O.SUB, "m_candidate", "m_tile", "F_near"),
    row(O.MUL, "d_tile", "mean", "inva"),
    row(O.CAST, "shift_tile", "d_tile"),
    row(O.ADD, "m_candidate", "m_candidate", "shift_tile"),
    row(O.MAX, "m_new", "m", "m_candidate"),
    row(O.SUB, "e_old", "m", "m_new"),
    row(O.EXP, "e_old", "e_old"),
    row(O.SUB, "e_tile", "m_candidate", "m_new"),
    row(O.EXP, "e_tile", "e_tile"),
    *SUMS,
)
UPDATE = (
    row(O.CAST, "T", "T_in"),
    row(O.MUL, "T", "T", "e_tile"),
    row(O.MUL, "O", "O", "e_old"),
    row(O.ADD, "O", "T", "O"),
)
FINISH = (
    row(O.DIV, "O_normal", "O", "l"),
    row(O.CAST, "out", "O_normal"),
)


def row_positions(names: tuple[str, ...]) -> dict[int, str]:
    """Return ``{position among the bound steps: name}`` of each name's last row, all in one format.

    With float16 throughout every cast of the recurrence's table is left out, and so are the rows of
    a scale and of a mask.
    """
    kept = [r for r in RUNNING_MEAN if not r.only and (r.opcode is not O.CAST)]
    last = {r.dst: position for position, r in enumerate(kept)}
    return {last[name]: name for name in names}


@dataclass(frozen=True, slots=True)
class ShiftingMatrix:
    """M = (I - (beta / n) J) / alpha with entries rounded to ``fmt``, and the correction it needs.

    ``alpha`` is 1 where the scale 1/sqrt(d) is applied elsewhere.
    """

    keys: int
    beta: float
    alpha: float
    fmt: str = "float16"

    @property
    def diagonal(self) -> float:
        """Entry on the diagonal, rounded once."""
        return float(cast(np.float64((1 - self.beta / self.keys) / self.alpha), self.fmt))

    @property
    def off_diagonal(self) -> float:
        """Entry beside the diagonal, rounded once."""
        return -float(cast(np.float64(self.beta / self.keys / self.alpha), self.fmt))

    @property
    def mean_kept(self) -> float:
        """What is left of a block's mean, times 1 / alpha: a - bn of the rounded entries.

        a is the diagonal plus b, b the off-diagonal's size: what M really does to a row
        (papers.md section 2.2).  Zero or less where rounding takes beta to 1 or beyond.
        """
        b = -self.off_diagonal
        return self.diagonal + b - b * self.keys

    def values(self) -> NDArray[Any]:
        """Return M, (1, 1, keys, keys) in the format's dtype."""
        shape = (1, 1, self.keys, self.keys)
        matrix = np.full(shape, self.off_diagonal, get_format(self.fmt).dtype)
        index = np.arange(self.keys)
        matrix[..., index, index] = self.diagonal
        return matrix

    def correction(self, *, is_ideal: bool) -> float:
        """Return Inva: bn / (a - bn) of the rounded entries, or beta / (1 - beta)."""
        if is_ideal:
            return self.beta / (1 - self.beta)
        return -self.off_diagonal * self.keys / self.mean_kept


def optimal_beta(beta: float, keys: int, fmt: str = "float16", *, rounds: int = 16) -> float:
    """Return the beta next to ``beta`` whose ideal correction equals that of the rounded matrix.

    Fixed point of beta = 1 - (a - b n) with the entries of M at alpha = 1 rounded to ``fmt``, in
    float64 (PASA, equations 20 to 22, simplified in papers.md section 2.1); one step unless the
    entries round anew.  1 or more where they take the whole mean.
    """
    for _ in range(rounds):
        found = 1 - ShiftingMatrix(keys, beta, 1.0, fmt).mean_kept
        if found == beta:
            break
        beta = found
    return beta


def pasa_steps(
    precision: PasaPrecision,
    beta: float,
    *,
    alpha_in_matrix: float,
    scale: float | None,
    is_ideal: bool,
) -> AttentionSteps:
    """Return Algorithm 1's tables with the formats and choices of ``precision``.

    ``alpha_in_matrix`` is the factor folded into M (1 for none), ``scale`` a factor applied to S'
    instead, ``is_ideal`` the choice of correction.
    """
    p = precision
    choices = {O.EXP: Attributes(variant=p.exp_variant), O.ROW_SUM: Attributes(order=p.sum_order)}

    def per_tile(index: int, keys: int) -> Mapping[str, float]:
        matrix = ShiftingMatrix(keys, beta, alpha_in_matrix, p.shifted)
        correction = matrix.correction(is_ideal=is_ideal)
        return {
            "tiles_before": varying(float, index), "tiles": varying(float, index + 1),
            "is_first": varying(lambda i: float(i == 0), index),
            "per_key": 1 / keys, "inva": correction,
            # Before the first tile there is no F: Delta m'_0 = 0.
            "inva_old": varying(lambda i: correction if i else 0.0, index),
        }  # fmt: skip

    constants = {"masked": -math.inf, "lowest": -get_format(p.vector).max_finite}
    if scale is not None:
        constants["scale"] = scale
    return AttentionSteps(
        softmax=choose(FIXED_REFERENCE if p.is_fixed_reference else RUNNING_MEAN, choices),
        update=UPDATE,
        finish=FINISH,
        formats={
            "S_in": p.scores, "P_out": p.operand, "T_in": p.product, "out": p.output,
            **dict.fromkeys(NARROW, p.vector), **dict.fromkeys(WIDE, p.mean),
        },
        state={"m": -math.inf, "l": 0.0, "F": 0.0},
        carried=("e_old", "e_tile"),
        overlays={"P": "S", "O_normal": "O", "m_floor": "m_new"},
        score_tiles=("S_in", "S", "S_wide", "S_part", "P", "P_out"),
        constants=constants,
        per_tile=per_tile,
        accumulate=p.accumulate,
        arithmetic=p.arithmetic,
    )  # fmt: skip


#: Names in the vector format, and names of the mean chain.
NARROW = (
    "S", "P", "T", "O", "O_normal", "m", "m_tile", "m_new", "m_floor", "m_candidate", "shift_old",
    "shift_tile", "F_near", "e_old", "e_tile", "l", "l_tile", "l_part",
)  # fmt: skip
WIDE = ("S_wide", "S_part", "mean", "F", "F_new", "d_old", "d_tile")
