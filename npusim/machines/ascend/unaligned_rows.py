"""CANN's matrix product, whose vector cores rearrange unaligned rows as fractals before the product.

Source: ops-transformer c29bc10, mat_mul_v3, matmul_v3_base_tiling.cpp: nd2nzA and nd2nzB, Is256BAlign,
SUPPORT_ND2NZ_GM2L0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.formats import stored_format

if TYPE_CHECKING:
    from npusim.config.problem import GemmProblem

#: Number of rows that a vector core rearranges at a time, and number of columns (VECTOR_D_BASE).
ROWS_REARRANGED, COLUMNS_REARRANGED = 16, 2048
#: Rows are rearranged if their size is not a multiple of the first number and exceeds the second.
ALIGNED_BYTES, SHORT_BYTES = 256, 384


def is_off(cols: int, fmt: str) -> bool:
    """Return whether rows are rearranged: their size is not a multiple of `ALIGNED_BYTES`, and they are not short."""
    size = stored_format(fmt).row_bytes(cols)
    return size % ALIGNED_BYTES != 0 and size > SHORT_BYTES


def off_rows(problem: GemmProblem) -> list[str]:
    """Return the operands of a product whose rows are unaligned; empty if operands are stored as fractals."""
    sizes = {"nd": (("A", problem.k), ("B", problem.n)), "nt": (("A", problem.k), ("B", problem.k))}
    return [n for n, cols in sizes.get(problem.operands, ()) if is_off(cols, problem.dtype)]
