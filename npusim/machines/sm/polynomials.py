"""Powers of two by a polynomial instead of special functions: the number of instructions of each power.

Source: Dao-AILab/flash-attention, flash_attn/cute, ex2_emulation_2.
"""

from __future__ import annotations

from npusim.formats.unary import POLYNOMIALS

#: In addition to one multiply-add for each power of x: the integer part, by an addition that rounds down, and the
#: fraction; a maximum with -127; a shift; and an integer addition.
POLYNOMIAL_ADDITIONS, POLYNOMIAL_COMPARISONS = 3, 3


def polynomial_multiplies(variant: str) -> int:
    """Return the numbers of multiply-adds and additions of a power of two by a polynomial of some degree; 0 if it is
    computed in another way.

    The polynomial ``exp2p`` is the one of the special function (golden/README.md), and not a separate instruction.
    """
    name = variant.partition(".")[2]
    return POLYNOMIAL_ADDITIONS + len(POLYNOMIALS[name][0]) if name in POLYNOMIALS and "_degree" in name else 0
