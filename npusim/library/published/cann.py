"""CANN's attention: FlashAttentionScore, and FlashAttention Lite on vector units with registers.

Sources: ops-transformer flash_attention_score (ring of three tasks: stages continue across blocks); ascend.md sections
2.1 and 2.4, ascend_950.md section 5.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.kernel import CHAINS, AscendDecisions, AscendKernel, Problem, round_up, split_rules

if TYPE_CHECKING:
    from collections.abc import Mapping


NAME = "cann"
#: Causal blocks are balanced by the number of tiles that they visit; CATLASS assigns them in turn.
FIELDS: Mapping[str, object] = MappingProxyType({"pipeline": "core", "deal": "balanced"})
#: From UB to UB: CANN 8.0's rows and keys of a tile in full precision (ascend.md 2.1 and 2.4).
MEMORY_TILE: Mapping[str, int] = MappingProxyType({"block_q": 128, "block_kv": 512})
#: Elements of a slice of its softmax, by the smallest head dim of each (prompt_flash_attention_tiling.cpp,
#: AdjustCVTilingCVDiff).
SLICE_ELEMENTS = ((128, 8 * 512), (32, 16 * 512), (0, 32 * 512))
#: With registers: tile and order of FlashAttention Lite's last version (ascend_950.md 5).
REGISTER_TILE: Mapping[str, object] = MappingProxyType({"block_q": 128, "block_kv": 128, "vector_rows": 64, "depth": 4})
#: Layout of the code of the kernel's rows: one function per stage, transposed, in four chains.
REGISTER_CODE: Mapping[str, Any] = MappingProxyType({"vector": "fused", "layout": "dn", "chains": CHAINS})
#: A call with a mask does not transpose its rows, because masks are stored row by row.  This is an assumption about
#: CANN's kernel: with it, the errors of the causal and the full long prefill are equal on each of the two boards
#: (reports/ascend_950).
MASKED_LAYOUT = "nd"


def memory_fields(problem: Problem, keys: int) -> Mapping[str, object]:
    """Return the fields of CANN's prefill from UB to UB, with at most ``keys`` keys per tile, in multiples of 16.

    Source: ops-transformer, prompt_flash_attention_s1s2_bns1_x910.h, Bmm1VecInputCopyIn: a tile with fewer keys has
    slices with more rows, in multiples of 8.
    """
    keys = min(keys, round_up(problem.seq_kv, 16))
    rows = next(elements for least, elements in SLICE_ELEMENTS if problem.head_dim >= least) // keys
    rows = max(rows // 8 * 8, min(rows, 8), 1)
    return {**FIELDS, **MEMORY_TILE, "block_kv": keys, "vector_rows": rows, "kernel": NAME}


def decode_fields(problem: Problem, cores: int) -> Mapping[str, object]:
    """Return the fields of CANN's decode from UB to UB: its rule for splits, and the keys of a tile.

    Source: ops-transformer, incre_flash_attention_tiling.cpp, CalcInnerSize: a tile has up to 8192, 4096 or 2048 keys,
    depending on the query heads of a KV head, in multiples of 16 keys.
    """
    most = (8192, 4096, 2048)[min(problem.group_size // 5, 2)]
    parts = split_rules.cann(split_rules.call_of(problem, 1, 1, cores))
    return {"kernel": NAME, "splits": "cann", "block_kv": min(most, round_up(max(map(max, parts)), 16))}


CANN = AscendKernel(
    name=NAME,
    whose="the kernel of CANN, with a barrier between all vector instructions",
    computes=("flash", "split_kv", "two_level"),
    decides=AscendDecisions(is_vendors=True),
    deal="balanced",
    fields=FIELDS,
    memory_tile=MEMORY_TILE,
    prefill=memory_fields,
    decode=decode_fields,
    register_tile=REGISTER_TILE,
    register_code=REGISTER_CODE,
    masked_layout=MASKED_LAYOUT,
)
