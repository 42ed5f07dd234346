"""Attention with P cast to E4M3 before the second product, and where its scale goes (P-Cast).

FlashAttention's steps, with P S cast to E4M3 (saturating, as the conversion instructions do) and
the row sum taken before the cast.  ``fold`` moves S into the exponent instead: e^(s - m + ln S), so
that the row sum carries it and it cancels in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.algorithms.flash import (
    FINISH,
    MAXIMUM,
    PROBABILITIES,
    SCORES,
    SUMS,
    UPDATES,
    FlashPrecision,
    attention_phase,
    chosen,
    exponent_factor,
    flash_names,
)
from npusim.algorithms.phase import Loop, Phase, name
from npusim.algorithms.table import Row, Stage, row
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.ir.op import Attributes, Opcode

if TYPE_CHECKING:
    from npusim.algorithms.phase import Cell, Mask
    from npusim.algorithms.precision import Accumulate
    from npusim.algorithms.tensors import AttentionTensors
    from npusim.config.problem import Problem

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
#: Between the exponential and the cast: the sum of what the cast has not touched, then the scale.
CAST = (
    row(O.ROW_SUM, "l_tile", "P"),
    row(O.MUL, "P_scaled", "P", "p_scale", only="p_scale"),
    CAST_P,
    row(O.CAST, "P_out", "P_fp8"),
)
SOFTMAX = Stage(
    "softmax",
    (
        *MAXIMUM,
        row(O.SUB, "m_new", "m_new", "log_scale", only="log_scale"),
        *PROBABILITIES,
        *CAST,
        *SUMS,
    ),
)
SCALED_FINISH = Stage(
    "finish",
    (
        *FINISH.rows[:-1],
        row(O.MUL, "O_normal", "O_normal", "unscale", only="unscale"),
        FINISH.rows[-1],
    ),
)


def _constants(p: Fp8Precision, problem: Problem) -> dict[str, float]:
    """Return the constants; what stored values of V are multiplied by joins the division by S (papers.md section 4)."""
    factor = exponent_factor(p.exp_variant)
    constants = {"scale": problem.score_scale * factor, "masked": -math.inf}
    unscale = problem.v_scale
    if p.fold:
        constants["log_scale"] = math.log(p.scale) * factor
    elif p.scale != 1:
        constants["p_scale"] = p.scale
        unscale = problem.v_scale / p.scale
    if unscale != 1:
        constants["unscale"] = unscale
    return constants


def fp8_attention(
    problem: Problem, sizes: tuple[int, int], cells: tuple[Cell, ...], p: Fp8Precision,
    tensors: AttentionTensors, mask: Mask | None,
) -> Phase:  # fmt: skip
    """Return FlashAttention-2 with P cast to E4M3, blocks of ``sizes`` = (rows, keys)."""
    fmt = "float32"
    wide = FlashPrecision(
        p.name, scores=fmt, softmax=fmt, exponential=fmt, operand=p.operand, running=fmt, product=fmt,
        output=p.output, accumulate=p.accumulate,
    )  # fmt: skip
    flash = flash_names(wide, problem.dtype, is_masked=mask is not None)
    names = {
        **flash,
        "m": replace(flash["m"], start=lowest_start(problem.causal and p.is_reverse)),
        "P_scaled": name("weight", "row key", "float32", over="P"),
        "P_fp8": name("weight", "row key", E4M3),
    }
    constants = _constants(p, problem)
    body = chosen((SCORES, SOFTMAX, *UPDATES[p.accumulate]), p.exp_variant, p.sum_order)
    phase = attention_phase(problem, sizes, cells, names, tensors, constants, mask)
    return replace(
        phase, loops=(Loop(body, "key"),), finish=(SCALED_FINISH,), arithmetic=p.arithmetic
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
