"""PTO's kernels of the gated delta rule, chunk by chunk.

Source: huawei-csl/megagdn-pto, kernels/pto (scaled_dot_kkt, wy_fast, chunk_h, chunk_o: flags, slots and barriers);
pto-isa, include/pto/npu/a2a3 (TROWEXPAND, TCOLEXPAND).
"""

from __future__ import annotations

from npusim.machines.published.kernel import AscendChunkKernel

PTO_CHUNKS = AscendChunkKernel(
    name="pto_chunks",
    whose="PTO's, for chunks of the gated delta rule",
    computes=("gated_delta",),
    barriers="needed",
    expands=True,
    one_slot=True,
    handed={"kkt": 2},
    until_left=frozenset({"wy"}),
    serial=frozenset({"outputs"}),
)
