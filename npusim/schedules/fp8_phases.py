"""What FP8 attention is before any machine: its scale, checked, the formats of its operands, and its phase."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import attention_cells
from npusim.algorithms.fp8 import E4M3_MAX, MAX_SCALE, Fp8Precision, fp8_attention, widened
from npusim.algorithms.tensors import attention_tensors
from npusim.errors import TilingError
from npusim.schedules.attention import causal_mask

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.config.problem import Problem


def scale_warnings(precision: Fp8Precision) -> tuple[str, ...]:
    """Return warnings about the scale; raise `TilingError` for one that is none."""
    if not 1 / MAX_SCALE <= precision.scale <= MAX_SCALE:
        raise TilingError(f"scale: {precision.scale} of P must be positive and finite, 2^-126 to 2^126")  # fmt: skip
    if precision.scale > E4M3_MAX:
        return (
            f"saturation: P reaches {precision.scale:g}, but E4M3 ends at {E4M3_MAX:g}; larger values are cut to it",
        )
    return ()


def fp8_phase(problem: Problem, sizes: tuple[int, int], precision: Fp8Precision) -> Phase:
    """Return the attention with blocks of ``sizes`` = (rows, keys).

    Products of float32 are plain IEEE sums unless the precision names an arithmetic.
    """
    chosen = widened(precision, problem.dtype)
    if problem.dtype == "float32" and not chosen.arithmetic:
        chosen = replace(chosen, arithmetic="ieee.f32")
    cells = attention_cells(problem, *sizes, is_reverse=chosen.is_reverse)
    tensors = attention_tensors(problem, chosen.output)
    return fp8_attention(problem, sizes, cells, chosen, tensors, causal_mask(problem, sizes))
