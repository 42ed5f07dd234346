"""Attention with P cast to E4M3 before the second product, and where its scale goes (P-Cast).

FlashAttention's steps, with P S cast to E4M3 (saturating, as the conversion instructions do) and
the row sum taken before the cast.  ``fold`` moves S into the exponent instead: e^(s - m + ln S), so
that the row sum carries it and it cancels in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.algorithms.flash import FlashPrecision, attend, attention_phase, exponent_factor, unchanged
from npusim.algorithms.lowering import kernel
from npusim.errors import TilingError
from npusim.formats import get_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.algorithms.cells import AttentionTensors
    from npusim.algorithms.language import Value
    from npusim.algorithms.phase import Mask, Phase, WorkTile
    from npusim.algorithms.precision import Accumulate
    from npusim.config.problem import Problem

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
            "scores": "float32",
            "softmax": "float32",
            "exponential": "float32",
            "cast": E4M3,
            "operand": self.operand,
            "running": "float32",
            "product": "float32",
            "output": self.output,
        }


@kernel(q="row head", k="key head", v="key value", mask="row key")
def fp8(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: FlashPrecision,
    scale: float,
    start: float,
    p_scale: float,
    log_scale: float,
    unscale: float,
    score: Callable[[Value], Value] = unchanged,
) -> Value:
    """FlashAttention-2 with P cast to E4M3, saturating as the conversion instructions do, after its row sum."""

    def narrow(e: Value) -> Value:
        scaled = e * p_scale if p_scale != 1 else e
        return scaled.to(E4M3, overflow="saturate").role("weight").to(p.operand)

    o, _, l = attend(q, k, v, mask, p, scale, score, narrow, log_scale, (start, 0.0))
    result = o / l
    return (result * unscale if unscale != 1 else result).to(p.output)


def fp8_attention(
    problem: Problem,
    sizes: tuple[int, int],
    cells: tuple[WorkTile, ...],
    p: Fp8Precision,
    tensors: AttentionTensors,
    mask: Mask | None,
) -> Phase:
    """Return FlashAttention-2 with P cast to E4M3, blocks of ``sizes`` = (rows, keys).

    What stored values of V are multiplied by joins the division by S (papers.md section 4).
    """
    wide = FlashPrecision(
        p.name,
        "float32",
        "float32",
        "float32",
        p.operand,
        "float32",
        "float32",
        p.output,
        p.exp_variant,
        p.sum_order,
        p.accumulate,
        p.arithmetic,
    )
    factor, p_scale = exponent_factor(p.exp_variant), 1.0 if p.fold else p.scale
    return attention_phase(
        fp8,
        problem,
        sizes,
        cells,
        tensors,
        mask,
        wide,
        scale=problem.score_scale * factor,
        p_scale=p_scale,
        start=lowest_start(problem.causal and p.is_reverse),
        log_scale=math.log(p.scale) * factor if p.fold else 0.0,
        unscale=problem.v_scale / p_scale,
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
