"""PTO's FlashAttention; transfers of its tiles cost more than those of other kernels (``flags.tile_extra_cycles``).

Source: pto-isa, kernels/manual/a2a3/flash_atten; pto_macro_fa_softmax.hpp.
"""

from __future__ import annotations

from npusim.kernel import AscendDecisions, AscendKernel

PTO = AscendKernel(
    name="pto",
    whose="the kernel of PTO, with barriers where they are needed",
    computes=("flash", "split_kv"),
    decides=AscendDecisions(barriers="needed", extra=True),
    is_by_name=True,
)
