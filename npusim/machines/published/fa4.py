"""FlashAttention-4, which the schedule ``fa4`` computes; its powers of two by a polynomial.

Source: Dao-AILab/flash-attention, flash_attn/cute.
"""

from __future__ import annotations

from npusim.formats.unary import POLYNOMIALS
from npusim.machines.decisions import GpuDecisions
from npusim.machines.published.kernel import PublishedKernel

#: FlashAttention-4's ex2_emulation_2, beside a multiply-add a power: the whole part by an addition that rounds down and
#: what is left; a maximum with -127, a shift and an integer addition.
POLYNOMIAL_ADDITIONS, POLYNOMIAL_COMPARISONS = 3, 3


def polynomial_multiplies(variant: str) -> int:
    """Return the multiply-adds and additions of a power of two by FlashAttention-4's polynomial, 0 of another way."""
    name = variant.partition(".")[2]
    return POLYNOMIAL_ADDITIONS + len(POLYNOMIALS[name][0]) if name.startswith("fa4") else 0


FA4 = PublishedKernel(
    name="fa4",
    whose="FlashAttention-4's",
    computes=("fa4",),
    decides=GpuDecisions(),
    is_fused=True,
    output_of_8_bits="bfloat16",
)
