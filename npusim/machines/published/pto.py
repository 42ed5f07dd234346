"""PTO's FlashAttention, whose tiles cost more to hand over than others' (``flags.tile_extra_cycles``).

Source: pto-isa, kernels/manual/a2a3/flash_atten; pto_macro_fa_softmax.hpp.  And PTO's kernels of the gated delta rule:
huawei-csl/megagdn-pto, kernels/pto (scaled_dot_kkt, wy_fast, chunk_h, chunk_o), on pto-isa's TROWEXPAND and TCOLEXPAND.
"""

from __future__ import annotations

from npusim.machines.published.kernel import AscendChunkKernel, AscendKernel

PTO = AscendKernel(
    name="pto", whose="PTO's, with barriers where they are needed", barriers="needed", has_extra=True, is_by_name=True
)

PTO_CHUNKS = AscendChunkKernel(
    name="pto_chunks",
    whose="PTO's, for chunks of the gated delta rule",
    barriers="needed",
    expands=True,
    one_slot=True,
    handed={"kkt": 2},
    until_left=frozenset({"wy"}),
    serial=frozenset({"outputs"}),
)
