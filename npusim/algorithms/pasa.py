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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import grid
from npusim.algorithms.flash import SCORES, attention_phase, chosen
from npusim.algorithms.phase import BySize, Loop, Name, Phase, Visit, name
from npusim.algorithms.shifting_matrix import ShiftingMatrix
from npusim.algorithms.table import Stage, product, row
from npusim.formats import get_format
from npusim.ir.op import Opcode
from npusim.ir.opaque import varying
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Cell, Mask
    from npusim.algorithms.precision import Accumulate
    from npusim.algorithms.tensors import AttentionTensors
    from npusim.config.problem import Problem

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
    Stage("PV", (product("T_in", "P_out", "v"),)),
    Stage(
        "update",
        (
            row(O.CAST, "T", "T_in"),
            row(O.MUL, "T", "T", "e_tile"),
            row(O.MUL, "O", "O", "e_old"),
            row(O.ADD, "O", "T", "O"),
        ),
    ),
)
FINISH = Stage("finish", (row(O.DIV, "O_normal", "O", "l"), row(O.CAST, "out", "O_normal")))
#: K' = M K, once before the loop.
SHIFT = Stage("shift", (product("k_shifted", "M", "k_in"),))


@dataclass(frozen=True, slots=True)
class Shift:
    """How the keys were shifted: beta, the factor folded into M, and which correction undoes it.

    ``alpha`` is 1 where the scale 1/sqrt(d) is applied elsewhere; ``scale`` is a factor of S' instead.
    """

    beta: float
    alpha: float
    scale: float | None
    is_ideal: bool


def pasa_names(p: PasaPrecision, fmt: str, *, is_masked: bool) -> dict[str, Name]:
    """Return the names of PASA's attention on inputs in ``fmt``."""
    tile, vector, out = "row key", "row", "row value"
    v, wide = p.vector, p.mean
    return {
        "q": name("operand", "row head", fmt, label="Q"),
        "k": name("operand", "key head", p.shifted, label="K"),
        "v": name("operand", "key value", fmt, label="V"),
        **({"mask": name("mask", tile, "int8")} if is_masked else {}),
        "O": name("output", out, v, start=0.0),
        "S_in": name("score", tile, p.scores, label="S"),
        "P_out": name("weight", tile, p.operand, label="P"),
        "T_in": name("partial", out, p.product, label="O_tmp"),
        "out": name("result", out, p.output, label="O"),
        "S": name("work", tile, v),
        "P": name("weight", tile, v, over="S"),
        "T": name("partial", out, v),
        "O_normal": name("output", out, v, over="O"),
        "m": name("max", vector, v, start=-math.inf),
        "m_tile": name("max", vector, v),
        "m_new": name("max", vector, v),
        "m_floor": name("max", vector, v, over="m_new"),
        "m_candidate": name("max", vector, v),
        "shift_old": name("work", vector, v),
        "shift_tile": name("work", vector, v),
        "F_near": name("mean", vector, v),
        "e_old": name("decay", vector, v),
        "e_tile": name("gain", vector, v),
        "l": name("sum", vector, v, start=0.0),
        "l_tile": name("sum", vector, v),
        "l_part": name("sum", vector, v),
        "S_wide": name("work", tile, wide),
        "S_part": name("work", tile, wide),
        "mean": name("mean", vector, wide),
        "F": name("mean", vector, wide, start=0.0),
        "F_new": name("mean", vector, wide),
        "d_old": name("work", vector, wide),
        "d_tile": name("work", vector, wide),
    }


@dataclass(frozen=True, slots=True)
class Corrections:
    """Constants of a tile: how many there are by now, and what undoes the shift of its keys."""

    shift: Shift
    fmt: str

    def __call__(self, tile: Visit) -> Mapping[str, float]:
        """Return them by name."""
        matrix = ShiftingMatrix(tile.cols, self.shift.beta, self.shift.alpha, self.fmt)
        correction = matrix.correction(is_ideal=self.shift.is_ideal)
        return {
            "tiles_before": varying(float, tile.index), "tiles": varying(float, tile.index + 1),
            "is_first": varying(lambda i: float(i == 0), tile.index),
            "per_key": 1 / tile.cols, "inva": correction,
            # Before the first tile there is no F: Delta m'_0 = 0.
            "inva_old": varying(lambda i: correction if i else 0.0, tile.index),
        }  # fmt: skip


def pasa(
    problem: Problem, sizes: tuple[int, int], cells: tuple[Cell, ...], p: PasaPrecision,
    tensors: AttentionTensors, mask: Mask | None, shift: Shift,
) -> Phase:  # fmt: skip
    """Return PASA's loop over shifted keys (Algorithm 1) with the formats and choices of ``p``.

    ``problem`` and ``tensors`` are those of prepared inputs.
    """
    constants = {"masked": -math.inf, "lowest": -get_format(p.vector).max_finite}
    if shift.scale is not None:
        constants["scale"] = shift.scale
    names = pasa_names(p, tensors.q.fmt, is_masked=mask is not None)
    table = FIXED_REFERENCE if p.is_fixed_reference else RUNNING_MEAN
    body = chosen((SCORES, Stage("softmax", table), *UPDATE), p.exp_variant, p.sum_order)
    return replace(
        attention_phase(problem, sizes, cells, names, tensors, constants, mask),
        loops=(Loop(body, "key"),), finish=(FINISH,), per_tile=Corrections(shift, p.shifted), arithmetic=p.arithmetic,
    )  # fmt: skip


def shift_keys(
    keys: GlobalTensor, shifted: GlobalTensor, matrices: Mapping[int, ShiftingMatrix], block: int,
    arithmetic: str,
) -> Phase:  # fmt: skip
    """Return K' = M K, one block of keys a cell, M by the block's length; stored once in K's format."""
    names = {
        "M": name("operand", "key other", keys.fmt),
        "k_in": name("operand", "other head", keys.fmt, label="K"),
        "k_shifted": name("result", "key head", shifted.fmt, label="K'"),
    }
    cells = tuple(
        replace(c, spans=(("key", c.row, c.rows), ("other", c.row, c.rows))) for c in grid(keys, ("key", block))
    )
    bound = {n: GlobalTensor(f"M{n}", 1, 1, n, n, keys.fmt, "constant") for n in matrices}
    return Phase(
        name="shift_keys", names=names, cells=cells,
        sizes={"key": block, "other": block, "head": keys.cols}, loops=(Loop((SHIFT,)),),
        tensors={"M": BySize("key", bound), "k_in": keys, "k_shifted": shifted},
        values={f"M{n}": m.values for n, m in matrices.items()}, arithmetic=arithmetic, serves="kv_head",
    )  # fmt: skip
