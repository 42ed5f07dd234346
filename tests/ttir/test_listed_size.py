"""Integers of all programs that npusim would have to evaluate one by one: more than a limit are refused, not stored."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import npusim
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


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
def test_rows_of_flat_indices_that_are_too_many_for_a_list_say_so() -> None:
    """The sentence was that a division of indices is not supported."""
    from ttir.row_kernels import add_one_flat

    x = np.empty((1000, 5000), np.float16)
    with npusim.record() as calls:
        add_one_flat[(4883,)](x, np.empty_like(x), 5000, x.size, 5000, 1024)
    with pytest.raises(ProgramError, match=r"row_kernels\.py:22: the programs have 5,000,192 indices in .* 4,194,304"):
        npusim.run(calls[0], hw="h200", numerics=False)
