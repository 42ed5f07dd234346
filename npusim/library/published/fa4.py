"""FlashAttention-4, which the schedule ``fa4`` computes.

Source: Dao-AILab/flash-attention, flash_attn/cute.
"""

from __future__ import annotations

from npusim.kernel import GpuDecisions
from npusim.machine import PublishedKernel

FA4 = PublishedKernel(
    name="fa4",
    whose="FlashAttention-4's",
    computes=("fa4",),
    decides=GpuDecisions(),
    is_fused=True,
    output_of_8_bits="bfloat16",
)
