"""FlashInfer's FlashAttention-2 prefill: its blocks are chosen so that two fit a multiprocessor.

Rows of a block are the heads of a KV head, query by query; here they are a head's queries where these are more than
half a block, which sees up to a block's rows of masked keys more.

Source: flashinfer-ai/flashinfer, include/flashinfer/utils.cuh (FA2DetermineCtaTileQ) and attention/prefill.cuh
(BatchPrefillWithPagedKVCacheDispatched).
"""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.kernel import (
    Charge,
    DeviceSpec,
    GpuDecisions,
    GpuKernel,
    KernelUse,
    Problem,
    get_format,
    layout,
    split_rules,
)
from npusim.machine import Layouts, warps_of

if TYPE_CHECKING:
    from collections.abc import Mapping


#: Rows of a block by head dim for more than 64 packed rows (utils.cuh, FA2DetermineCtaTileQ).
ROWS: Mapping[int, int] = MappingProxyType({64: 128, 128: 128, 256: 64})
#: Warps of such a block (prefill.cuh, get_num_warps_q).
WARPS = 4
#: Rows of a KV head up to which other kernels run (utils.cuh, FA2DetermineCtaTileQ).
FEW = 64
#: Keys of a matrix instruction's operand; the most of them that registers allow, over fragments of rows of a warp.
KEYS, MOST = 16, 8
#: Keys of a block are such a power of two times KEYS (DISPATCH_NUM_MMA_KV).
COUNTS = (8, 4, 2, 1)
#: Barriers of an iteration beyond the first: K has arrived, all warps have read K, V has arrived, all have read V
#: (prefill.cuh, block.sync of BatchPrefillWithPagedKVCacheDevice).
BARRIERS = 3
#: Blocks that a multiprocessor is to hold.
BLOCKS = 2


def _keys(head_dim: int, memory_bytes: int, size_bytes: int) -> int:
    """Return the keys of a block; 0 where none fit."""
    rows = ROWS[head_dim]
    held, each = rows * head_dim * size_bytes, 2 * head_dim * KEYS * size_bytes
    blocks = BLOCKS if memory_bytes >= BLOCKS * (held + each) else 1
    most = min((memory_bytes // blocks - held) // each, MOST // (rows // WARPS // KEYS))
    return KEYS * next((count for count in COUNTS if count <= most), 0)


def _variants(problem: Problem, device: DeviceSpec) -> Layouts:
    memory_bytes = device.core("sm").buffer("SMEM").capacity_bytes.value
    return _layouts(memory_bytes, get_format(problem.dtype).size_bytes)


def _layouts(memory_bytes: int, size_bytes: int) -> Layouts:
    keys = {dim: _keys(dim, memory_bytes, size_bytes) for dim in ROWS}
    return {dim: layout(ROWS[dim], count, warps=WARPS) for dim, count in keys.items() if count}


#: Layouts where shared memory does not limit the keys of a block: registers do.
TILES: Layouts = MappingProxyType(dict(_layouts(sys.maxsize, 2)))


def _needs(device: DeviceSpec) -> str:
    issue = warps_of(device)
    is_there = issue is not None and issue.copies.value == "asynchronous"
    return "" if is_there else f"needs asynchronous copies (sm_80 and later), which {device.name} has not"


def _refuses(problem: Problem, _precision: Any) -> str:
    packed = min(problem.queries) * problem.group_size
    return "" if packed > FEW else f"is described for more than {FEW} rows of a KV head, not for {packed}"


def _charges(_use: KernelUse) -> tuple[Charge, ...]:
    each = "WARPS.sharing.barrier"
    return Charge(f"{each}_cycles", BARRIERS), Charge(f"{each}_warp_cycles", BARRIERS * WARPS)


FLASHINFER = GpuKernel(
    name="flashinfer",
    whose="FlashInfer's",
    computes=("flash",),
    # prefill.cuh: m16k16_rowsum_f16f16f32, write_o_reg_gmem; a block visits its keys from the first on.
    decides=GpuDecisions(is_whole=True, sums_in_products=True, stores_wide_at_once=True),
    tiles={2: TILES},
    variants=_variants,
    fields=lambda _device: {"stages": None},
    leaves=frozenset({"launch"}),
    needs=_needs,
    refuses=_refuses,
    split_rule=split_rules.flashinfer,
    charges=_charges,
    packs=lambda problem, _rows: problem.group_size > 1,  # prefill.cuh: rows are queries times the heads of a KV head
    is_fused=True,
)
