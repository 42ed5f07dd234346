"""Integers of all programs that npusim would have to evaluate one by one: more than a limit are refused, not stored."""

from __future__ import annotations

import numpy as np
import pytest

from npusim.errors import ProgramError
from npusim.kernels.triton.listed import compared_by_table, elements_of
from npusim.kernels.triton.ttir_text import Op
from npusim.kernels.triton.values import Affine, Listed

OP = Op("arith.cmpi", ["m"], ["a", "b"], "arith.cmpi slt, %a, %b : tensor<1024x1024xi32>", "", "k.py:3")


def _along(axis: int, programs: int = 1) -> Affine:
    return Affine(np.zeros((programs, 1), np.int64), (axis == 0, axis == 1), (1024, 1024))


def test_a_list_whose_elements_are_too_many_together_is_refused() -> None:
    # Rows, programs and columns are few; their combinations are 2^27.
    listed = Listed(_along(0, 128), np.arange(1024), _along(1))
    with pytest.raises(ProgramError, match=r"k\.py:3: .*134,217,728 integers.*allowed: 67,108,864"):
        elements_of(OP, listed)


def test_so_is_a_comparison_of_a_list_by_rows_with_columns_of_many_programs() -> None:
    listed = Listed(Affine(np.zeros((1, 1), np.int64), (0, 0), (1024, 1024)), np.arange(1024), _along(0))
    with pytest.raises(ProgramError, match=r"k\.py:3: .*134,217,728 integers"):
        compared_by_table(OP, "slt", listed, _along(1, 128))
