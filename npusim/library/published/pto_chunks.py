"""PTO's kernels of the gated delta rule, chunk by chunk.

Source: huawei-csl/megagdn-pto, kernels/pto (chunk_cumsum, scaled_dot_kkt, wy_fast, chunk_h, chunk_o: flags, slots and
barriers);
pto-isa, include/pto/npu/a2a3 (TROWEXPAND, TCOLEXPAND).
"""

from __future__ import annotations

from npusim.kernel import AscendDecisions, AscendKernel

#: Decisions of its phases, except the decisions below.
CHUNKS = AscendDecisions(barriers="needed", expands=True, one_slot=True)

PTO_CHUNKS = AscendKernel(
    name="pto_chunks",
    whose=(
        "the kernel of PTO for chunks of the gated delta rule; a block sums decays of all heads, and block_sums "
        "is not read"
    ),
    computes=("gated_delta",),
    of="recurrence",
    decides=CHUNKS,
    by_phase={
        "decays": AscendDecisions(one_slot=True, sums="rows"),
        "kkt": CHUNKS._replace(handed=2),
        "wy": CHUNKS._replace(until_left=True),
        "outputs": CHUNKS._replace(order="serial"),
    },
)
