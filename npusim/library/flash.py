"""FlashAttention-2 in the form of the vendors' kernels.

On Ascend: blocks of 128 queries and 512 keys; scores, P and O_tmp pass through slots in global memory; the pre-launch
depth is 2; the two AIVs share the rows; softmax processes slices of 16 rows (CATLASS, ascend.md section 2.1).
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
