"""Attention with P cast to E4M3 before the second product, and where its scale goes (P-Cast).

FlashAttention's steps, with P S cast to E4M3 (saturating, as the conversion instructions do) and
the row sum taken before the cast.  ``fold`` moves S into the exponent instead: e^(s - m + ln S), so
that the row sum carries it and it cancels in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode
from npusim.schedules.steps.attention import Accumulate, AttentionSteps
from npusim.schedules.steps.flash import PROBABILITIES, SCORES, SUMS, UPDATE, exponent_factor
from npusim.schedules.steps.table import Row, choose, row

O = Opcode  # noqa: E741 - tables read best with one letter
E4M3 = "float8_e4m3fn"
#: P Scale -> P-Cast's "saturation": the largest finite E4M3 value (papers.md section 1.1).
E4M3_MAX = 448.0
#: Beyond it a scale or its inverse is no normal float32 number (IEEE 754: exponents -126 to 127).
MAX_SCALE = 2.0**126


@dataclass(frozen=True, slots=True)
class Fp8Precision:
    """Formats and choices of FP8 attention; everything on the vector side is float32.

    scale
        S, by which P is multiplied before its cast (1 for none).
    fold
        Whether S is part of the exponent instead of a product of its own.
    is_reverse
        Visit the keys from last to first.
    operand
        Format in which the second product reads the cast P: E4M3, or a wider format where the
        matrix unit has no FP8 (the values are the same).
    """

    name: str
    scale: float = 1.0
    fold: bool = False
    is_reverse: bool = False
    operand: str = E4M3
    output: str = "float32"
    exp_variant: str = "exp.correct"
    sum_order: str = "sequential"
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        return {
            "scores": "float32", "softmax": "float32", "exponential": "float32", "cast": E4M3,
            "operand": self.operand, "running": "float32", "product": "float32", "output": self.output,
        }  # fmt: skip


#: The cast saturates where it would overflow, as NVIDIA's and the vendor libraries' do.
CAST_P = Row(O.CAST, "P_fp8", ("P_scaled",), Attributes(overflow="saturate"))
STATIC = (
    *SCORES,
    *PROBABILITIES,
    row(O.ROW_SUM, "l_tile", "P"),
    row(O.MUL, "P_scaled", "P", "p_scale", only="p_scale"),
    CAST_P,
    row(O.CAST, "P_out", "P_fp8"),
    *SUMS,
)
FOLDED = (
    *SCORES,
    row(O.SUB, "m_new", "m_new", "log_scale"),
    *PROBABILITIES,
    row(O.ROW_SUM, "l_tile", "P"),
    CAST_P,
    row(O.CAST, "P_out", "P_fp8"),
    *SUMS,
)
FINISH = (
    row(O.DIV, "O_normal", "O", "l"),
    row(O.MUL, "O_normal", "O_normal", "unscale", only="unscale"),
    row(O.CAST, "out", "O_normal"),
)


def fp8_steps(
    precision: Fp8Precision, scale: float, *, is_masked: bool, value_scale: float = 1.0
) -> AttentionSteps:
    """Return the tables of FP8 attention with the choices of ``precision``.

    ``scale`` is the factor of Q K^T of stored values, ``value_scale`` what stored values of V are
    multiplied by; it joins the division by S (papers.md section 4).
    """
    p = precision
    choices = {O.EXP: Attributes(variant=p.exp_variant), O.ROW_SUM: Attributes(order=p.sum_order)}
    factor = exponent_factor(p.exp_variant)
    constants = {"scale": scale * factor, "masked": -math.inf}
    unscale = value_scale
    if p.fold:
        constants["log_scale"] = math.log(p.scale) * factor
    elif p.scale != 1:
        constants["p_scale"] = p.scale
        unscale = value_scale / p.scale
    if unscale != 1:
        constants["unscale"] = unscale
    wide = (
        "S_in", "S", "E", "P", "P_scaled", "T_in", "T", "O", "O_normal", "m", "m_tile", "m_new", "m_shift",
        "exponent", "alpha", "rescale", "l", "l_tile", "l_add",
    )  # fmt: skip
    return AttentionSteps(
        softmax=choose(FOLDED if p.fold else STATIC, choices),
        update=UPDATE,
        finish=FINISH,
        formats={
            **dict.fromkeys(wide, "float32"),
            "P_fp8": E4M3,
            "P_out": p.operand,
            "out": p.output,
        },
        state={"m": lowest_start(is_masked and p.is_reverse), "l": 0.0},
        carried=("rescale",),
        overlays={"P": "E", "P_scaled": "P", "O_normal": "O"},
        score_tiles=("S_in", "S", "E", "P", "P_scaled", "P_fp8", "P_out"),
        constants=constants,
        accumulate=p.accumulate,
        arithmetic=p.arithmetic,
    )


def lowest_start(needs_finite: bool) -> float:
    """Return what the running maximum starts at: -Inf, or where a tile may mask a row before any other
    tile has given it a maximum, float32's lowest number, so that a masked -Inf stays the lower one.
    """
    return -get_format("float32").max_finite if needs_finite else -math.inf


def widened(precision: Fp8Precision, operand: str) -> Fp8Precision:
    """Return the same choices for a matrix unit that reads P as ``operand`` instead of E4M3.

    Raises `TilingError` if ``precision`` names yet another format for P.
    """
    if precision.operand not in (E4M3, operand):
        raise TilingError(
            f"operand: P in {precision.operand}, but the matrix unit reads it beside V in {operand}; "
            f"use operand={operand} or leave it out"
        )
    return replace(precision, operand=operand)
