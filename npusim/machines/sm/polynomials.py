"""Powers of two by a polynomial beside the special functions: the instructions of each.

Source: Dao-AILab/flash-attention, flash_attn/cute, ex2_emulation_2.
"""

from __future__ import annotations

from npusim.formats.unary import POLYNOMIALS

#: Beside a multiply-add a power: the integer part by an addition that rounds down, and the rest; a maximum with -127,
#: a shift and an integer addition.
POLYNOMIAL_ADDITIONS, POLYNOMIAL_COMPARISONS = 3, 3


def polynomial_multiplies(variant: str) -> int:
    """Return the multiply-adds and additions of a power of two by a degree's polynomial, 0 of another way.

    The polynomial ``exp2p`` is the one of the special function (golden/README.md), and not a separate instruction.
    """
    name = variant.partition(".")[2]
    return POLYNOMIAL_ADDITIONS + len(POLYNOMIALS[name][0]) if name in POLYNOMIALS and "_degree" in name else 0
