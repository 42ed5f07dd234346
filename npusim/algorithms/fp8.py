"""Attention with P cast to E4M3 before the second product, and where its scale goes (P-Cast).

FlashAttention's steps, with P S cast to E4M3 (saturating, as the conversion instructions do) and
the row sum taken before the cast.  ``fold`` moves S into the exponent instead: e^(s - m + ln S), so
that the row sum carries it and it cancels in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.algorithms.flash import attend, unchanged
from npusim.algorithms.lowering import kernel
from npusim.errors import TilingError
from npusim.formats import get_format

if TYPE_CHECKING:
    from npusim.algorithms.flash import Accumulate
    from npusim.algorithms.language import Value

E4M3 = "float8_e4m3fn"
#: P Scale -> P-Cast's "saturation": the largest finite E4M3 value (papers.md section 1.1).
E4M3_MAX = 448.0
#: Beyond it a scale or its inverse is no normal float32 number (IEEE 754: exponents -126 to 127).
MAX_SCALE = 2.0**126
#: Where a tile may mask a row before any other tile has given it a maximum, this is what the running maximum starts
#: at, not -Inf: float32's lowest number, so that a masked -Inf stays the lower one.
LOWEST = -get_format("float32").max_finite


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
    scores = softmax = exponential = running = product = "float32"
    cast = E4M3

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        names = ("scores", "softmax", "exponential", "cast", "operand", "running", "product", "output")
        return {n: getattr(self, n) for n in names}


@kernel(q="row head", k="key head", v="key value", mask="row key")
def fp8(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: Fp8Precision,
    scale: float,
    start: float,
    p_scale: float,
    log_scale: float,
    unscale: float,
) -> Value:
    """FlashAttention-2 with P cast to E4M3, saturating as the conversion instructions do, after its row sum."""

    def narrow(e: Value) -> Value:
        scaled = e * p_scale if p_scale != 1 else e
        return scaled.to(E4M3, overflow="saturate").role("weight").to(p.operand)

    o, _, l = attend(q, k, v, mask, p, scale, unchanged, narrow, log_scale, (start, 0.0))
    result = o / l
    return (result * unscale if unscale != 1 else result).to(p.output)


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
