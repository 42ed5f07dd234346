"""FlashAttention-2 in the form of the vendors' kernels.

On Ascend: Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth 2, rows
split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).
"""

from __future__ import annotations

from npusim.kernel import ATTENTION_PRECISIONS, attention, by_published_rule, flash

FLASH = attention(
    "flash",
    flash,
    precisions=ATTENTION_PRECISIONS,
    by_rule=by_published_rule,
    summary="FlashAttention-2, online softmax",
)
