"""Published rules, as data, by which the kernels of other libraries split the keys of each sequence among blocks.

A rule returns, for each sequence of a call, the number of key tiles of each part.  Part sizes determine bits; in all
rules except ``vllm`` and a fixed size they depend on the other sequences and on the number of cores.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate, pairwise
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.kernels.attention.split import sized
from npusim.late_methods import dataclass
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from npusim.config.problem import Problem

#: Tiles of each part of each sequence.
Parts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SplitCall:
    """The properties of a call that rules read: keys and queries of each sequence, heads, tiles, and cores of the
    device.

    ``head_dim``: number of columns of V, 0 if not known. ``page``: keys of a page, 0 for none.  ``kv_bytes``: bytes of
    K and V of the longest sequence for one KV head.  ``window``: keys that a query sees around its own, 0 for all.
    ``is_causal``: causal or windowed.
    """

    keys: tuple[int, ...]
    queries: int
    heads: int
    kv_heads: int
    block_q: int
    block_kv: int
    cores: int
    head_dim: int = 0
    page: int = 0
    kv_bytes: int = 0
    is_causal: bool = False
    window: int = 0
    alibi: bool = False

    def shortened(self, rows: int) -> SplitCall:
        """Return the call with the number of keys that a kernel counts under a window: at most the window and ``rows``
        keys.
        """
        if not self.window:
            return self
        return replace(self, keys=tuple(min(n, self.window + rows) for n in self.keys))

    @property
    def rows(self) -> int:
        """Rows of a KV head: queries of all heads that share it."""
        return self.queries * self.heads // self.kv_heads

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of keys of each sequence."""
        return tuple(ceil_div(n, self.block_kv) for n in self.keys)


def call_of(problem: Problem, block_q: int, block_kv: int, cores: int) -> SplitCall:
    """Return the properties that rules read, for a problem in tiles of this number of rows and keys."""
    before, after = problem.sides
    is_windowed = before is not None and after is not None and max(before, after) < problem.seq_kv - 1
    return SplitCall(
        keys=problem.keys,
        queries=problem.seq_q,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        block_q=block_q,
        block_kv=block_kv,
        cores=cores,
        head_dim=problem.value_head_dim,
        page=problem.page,
        kv_bytes=problem.kv_bytes() * problem.seq_kv // (problem.key_count * problem.kv_heads),
        is_causal=problem.causal or is_windowed,
        window=before + after + 1 if before is not None and after is not None and is_windowed else 0,
        alibi=problem.alibi,
    )


def _counted(tiles: Iterable[int], splits: Iterable[int]) -> Parts:
    """Return parts of ceil(tiles / splits) tiles each; if these are fewer than ``splits`` parts, the remaining parts
    are empty.
    """
    return tuple(sized(n, ceil_div(n, s)) for n, s in zip(tiles, splits, strict=True))


def _chunked(call: SplitCall, keys: int) -> Parts:
    """Return parts of this number of keys, rounded up to whole tiles."""
    return tuple(sized(n, ceil_div(keys, call.block_kv)) for n in call.tiles)


def num_splits_heuristic(blocks: int, places: int, tiles: int, *, skips_equal: bool) -> int:
    """Return FlashAttention's number of splits for ``blocks`` on ``places``: the smallest with at least 85 % of the
    best efficiency.

    Efficiency is the filled share of waves, in float32.  ``skips_equal`` (FlashAttention-2): a number is not considered
    if its parts are as long as those of the next smaller number.
    """
    # csrc/flash_attn/flash_api.cpp, num_splits_heuristic
    if blocks >= 0.8 * places:
        return 1
    # at most 128, as in that function
    most, counts = min(128, places, tiles), list[int]()
    for s in range(1, most + 1):
        if not skips_equal or s == 1 or ceil_div(tiles, s) != ceil_div(tiles, s - 1):
            counts.append(s)
    waves = np.array([blocks * s for s in counts], np.float32) / np.float32(places)
    efficiency = waves / np.ceil(waves)
    # 85 % of the best, in double precision, as in that function
    return counts[int(np.argmax(efficiency.astype(np.float64) >= 0.85 * float(efficiency.max())))]


def fa2(call: SplitCall) -> Parts:
    """FlashAttention-2 (csrc/flash_attn, 2 blocks a multiprocessor): the parts of all sequences have one length, which
    follows from the longest sequence.

    With pages the rule is that of the interface for packed sequences, which vLLM calls (flash_api.cpp, mha_varlen_fwd):
    keys are split if the rows of a block are only the query heads of a KV head.
    """
    swaps = call.queries == 1 and not call.window and not call.alibi
    if call.page and not (swaps and call.heads > call.kv_heads):
        return tuple((n,) for n in call.tiles)
    heads, rows = (call.kv_heads, call.rows) if swaps else (call.heads, call.queries)
    longest = max(call.tiles)
    # blocks of 64 rows, as in that function
    blocks = len(call.keys) * heads * ceil_div(rows, 64)
    each = ceil_div(longest, num_splits_heuristic(blocks, 2 * call.cores, longest, skips_equal=True))
    return tuple(sized(n, each) for n in call.tiles)


def _fa3_count(call: SplitCall, sequences: int) -> int:
    # Only keys within the window are counted, although all keys are in memory.
    row_blocks, longest = ceil_div(call.rows, call.block_q), max(call.shortened(call.block_q).tiles)
    # hopper/heuristics.h: 50 MiB of L2
    blocks, l2 = sequences * call.kv_heads * row_blocks, 50 << 20
    # the condition of hopper/heuristics.h
    if blocks >= 0.8 * call.cores and call.kv_bytes > l2 and row_blocks >= 2 * call.cores and not call.is_causal:
        return min(ceil_div(call.kv_bytes, l2), 128)  # the limit of hopper/heuristics.h
    # four tiles or fewer are not split, as in that function
    return 1 if longest <= 4 else num_splits_heuristic(blocks, call.cores, longest, skips_equal=False)


def fa3(call: SplitCall) -> Parts:
    """FlashAttention-3 (hopper/heuristics.h): all sequences have the same number of splits."""
    return _counted(call.shortened(call.block_q).tiles, [_fa3_count(call, len(call.keys))] * len(call.keys))


def fa3_varlen(call: SplitCall) -> Parts:
    """FlashAttention-3 with packed or unequal sequences: parts that give each core a tenth more than its share."""
    work = ceil_div(call.rows, call.block_q) * sum(call.tiles) * call.kv_heads
    # hopper/flash_prepare_scheduler.cu: a tenth more
    each, most = ceil_div(11 * work, 10 * call.cores), _fa3_count(call, 1)
    few = len(call.keys) <= 992  # as in FlashAttention-3: this number of sequences fits into a block of threads
    counts = [max(1, min(ceil_div(n, each), most)) if few else 1 for n in call.tiles]
    return _counted(call.shortened(call.block_q).tiles, counts)


def fa4(call: SplitCall) -> Parts:
    """FlashAttention-4 (flash_attn/cute): the number of parts that fills the multiprocessors once."""
    call = call.shortened(call.block_q)
    blocks, longest = len(call.keys) * call.kv_heads * ceil_div(call.rows, call.block_q), max(call.tiles)
    # flash_attn/cute/interface.py
    count = 1 if longest <= 4 else max(1, min(call.cores // blocks, 128, longest))
    return _counted(call.tiles, [count] * len(call.keys))


def flashinfer(call: SplitCall) -> Parts:
    """FlashInfer's prefill and tensor-core decode (scheduler.cuh): the shortest chunk of pages with which all chunks
    fit on the device.
    """
    places, page = max(1, 2 * call.cores // call.kv_heads), call.page or 1
    # scheduler.cuh, FA2DetermineCtaTileQ
    rows = 128 if call.rows > 64 and call.head_dim < 256 else 64 if call.rows > 16 else 16
    # As in FlashAttention-3, the query's own key is not counted in a window.
    call = call.shortened(rows - 1)
    row_blocks, pages = ceil_div(call.rows, rows), [ceil_div(n, page) for n in call.keys]
    # scheduler.cuh: 128 tokens a chunk at least
    least, most = max(128 // page, 1), max(pages)

    def fits(chunk: int) -> bool:
        return row_blocks * sum(ceil_div(n, chunk) for n in pages) <= places

    chunk = bisect_left(range(most), x=True, lo=min(least, most), key=fits)
    return _chunked(call, max(chunk, least) * page)


def flashmla(call: SplitCall) -> Parts:
    """FlashMLA (tile scheduler): sequences are divided among the cores in order, so that each core has the same load; a
    part costs 5 tiles in addition.
    """
    # FlashMLA, get_mla_metadata.cu: 64 rows a block, 5 tiles for a part's start
    parts = max(call.cores // call.kv_heads // ceil_div(call.rows, 64), 1)
    load = ceil_div(sum(n + 5 for n in call.tiles), parts) + 5  # as there
    cuts, room = list[tuple[int, ...]](), load
    for tiles in call.tiles:
        cut, left = list[int](), tiles
        while left:
            take = left if room >= left + 5 else max(0, room - 5)  # as there
            cut += [take] if take else []
            left -= take
            room = room - take - 5 if not left else load  # as there
        cuts.append(tuple(cut))
    return tuple(cuts)


def vllm(call: SplitCall) -> Parts:
    """The Triton kernel of vLLM for decoding: 16 segments, which depend only on the sequence's length; one segment if
    batches are large.
    """
    # triton_unified_attention.py: 128 programs, 16 segments
    splits = call.queries == 1 and len(call.keys) <= 128 // call.kv_heads
    return tuple(sized(n, ceil_div(n, 16) if splits else n) for n in call.tiles)  # as there


def cann(call: SplitCall) -> Parts:
    """CANN's incremental attention (IFA): blocks fill at most half of the cores, parts have 512 keys or more."""
    blocks, longest = len(call.keys) * call.kv_heads, max(call.keys)
    # fused_infer_attention_score, IFA tiling: half of the cores, 2048 keys, 1024 if paged
    is_short = bool(call.page) and longest <= 1024
    if blocks > 0.5 * call.cores or not (call.heads == call.kv_heads or longest >= 2048) or is_short:  # as there
        return tuple((n,) for n in call.tiles)
    count = call.cores // blocks
    while count > 1 and longest // count < 512:  # as there
        count -= 1
    keys = ceil_div(longest, count)
    return _chunked(call, ceil_div(keys, call.page) * call.page if call.page else keys)


def xqa(call: SplitCall) -> Parts:
    """TensorRT-LLM's XQA: the longest sequence and the number of blocks determine the number of splits."""
    # decoderXQAImplJIT.cpp, computeMultiBlockCount
    batch, count = len(call.keys), max(call.keys) // 128
    count = max(min(count, round(sqrt(8 * count))), 1)  # as there
    waves = batch * call.kv_heads * count / call.cores / 8  # as there
    count = max(1, min(max(int(count / waves) if waves > 1 else count, 1), 6000 // batch))  # as there
    return _counted(call.tiles, [count] * batch)


def seen_parts(rule: str, parts: tuple[int, ...], tiles: Sequence[int]) -> tuple[int, ...]:
    """Return the tiles of each part of a block that visits ``tiles`` of its sequence, under a window.

    FlashAttention-3 and -4 cut the visited tiles into that number of parts, FlashInfer into parts of one length; the
    other kernels divide the sequence, and a block visits the visible tiles of its part.
    """
    if rule in ("fa3", "fa3_varlen", "fa4"):
        return sized(len(tiles), ceil_div(len(tiles), len(parts)))
    if rule == "flashinfer":
        return sized(len(tiles), parts[0])
    ends = [0, *(bisect_left(tiles, end) for end in accumulate(parts))]
    return tuple(b - a for a, b in pairwise(ends) if b > a)


#: Rules by the name that the field ``splits`` has.
RULES: Mapping[str, Callable[[SplitCall], Parts]] = MappingProxyType(
    {rule.__name__: rule for rule in (fa2, fa3, fa3_varlen, fa4, flashinfer, flashmla, vllm, cann, xqa)}
)
