"""FlashInfer's FlashAttention-2 prefill, and its decode on tensor cores: two blocks per multiprocessor if they fit.

The rows of a block are the heads of a KV head, query by query. Here they are the queries of one head if these fill more
than half a block; such a block visits more masked keys, at most as many as it has rows.  With blocks of 16 rows, each
of the four warps has a quarter of the keys.  Blocks start in the order of FlashInfer's plan, which divides all keys,
visible or not, among the blocks of the same rows.  FlashInfer's decode without tensor cores
(BatchDecodeWithPagedKVCacheKernel) is not described.

Source: flashinfer-ai/flashinfer, include/flashinfer/utils.cuh (FA2DetermineCtaTileQ) and attention/prefill.cuh
(BatchPrefillWithPagedKVCacheDispatched).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import MappingProxyType

from npusim.kernel import (
    Charge,
    DeviceSpec,
    GlobalTensor,
    GpuDecisions,
    GpuKernel,
    KernelUse,
    Phase,
    Problem,
    WorkTile,
    get_format,
    layout,
    split_rules,
)
from npusim.machine import Layouts, warps_of

#: Head dims with known layouts.
DIMS = 64, 128, 256
#: For each number of rows of a block, the largest number of rows of a KV head; for more rows, head dims below WIDE have
#: blocks of 128 (utils.cuh, FA2DetermineCtaTileQ).
FEW, SOME, WIDE = 16, 64, 256
#: Warps of a block (prefill.cuh, get_num_warps_q and get_num_warps_kv).
WARPS = 4
#: Keys of a matrix instruction's operand; largest number of such operands that fit in registers, divided by the number
#: of a warp's fragments of rows.
KEYS, MOST = 16, 8
#: The number of keys of a block is KEYS times one of these powers of two (DISPATCH_NUM_MMA_KV).
COUNTS = (8, 4, 2, 1)
#: Barriers of an iteration after the first: K has arrived, all warps have read K, V has arrived, all have read V
#: (prefill.cuh, block.sync of BatchPrefillWithPagedKVCacheDevice).
BARRIERS = 3
#: Number of blocks that should be resident on a multiprocessor.
BLOCKS = 2


def _rows(head_dim: int, packed: int) -> int:
    """Return the rows of a block for a given number of rows of a KV head."""
    if packed > SOME and head_dim < WIDE:
        return 2 * SOME
    return SOME if packed > FEW else FEW


def _keys(head_dim: int, rows: int, memory_bytes: int, size_bytes: int) -> int:
    """Return the keys of a block; 0 if none fit."""
    down = min(WARPS, rows // FEW)
    across = WARPS // down
    held, each = rows * head_dim * size_bytes, 2 * head_dim * KEYS * across * size_bytes
    blocks = BLOCKS if memory_bytes >= BLOCKS * (held + each) else 1
    most = min((memory_bytes // blocks - held) // each, MOST // (rows // down // FEW))
    return KEYS * across * next((count for count in COUNTS if count <= most), 0)


def _variants(problem: Problem, device: DeviceSpec) -> Layouts:
    memory_bytes = device.core("sm").buffer("SMEM").capacity_bytes.value
    return _layouts(min(problem.queries) * problem.group_size, memory_bytes, get_format(problem.dtype).size_bytes)


def _layouts(packed: int, memory_bytes: int, size_bytes: int) -> Layouts:
    rows = {dim: _rows(dim, packed) for dim in DIMS}
    keys = {dim: _keys(dim, count, memory_bytes, size_bytes) for dim, count in rows.items()}
    return {dim: layout(rows[dim], count, warps=WARPS) for dim, count in keys.items() if count}


#: Layouts in which registers limit the number of keys of a block; in others shared memory does.
TILES: Layouts = MappingProxyType(_layouts(sys.maxsize, sys.maxsize, 2))


def _needs(device: DeviceSpec) -> str:
    issue = warps_of(device)
    is_there = issue is not None and issue.copies.value == "asynchronous"
    return "" if is_there else f"needs asynchronous copies (sm_80 and later), which {device.name} does not have"


def _charges(_use: KernelUse) -> tuple[Charge, ...]:
    each = "WARPS.sharing.barrier"
    return Charge(f"{each}_cycles", BARRIERS), Charge(f"{each}_warp_cycles", BARRIERS * WARPS)


def _launched(phase: Phase) -> Phase:
    """Return a phase with its blocks in launch order: by KV head, sequence, rows, and part of the keys.

    The heads of a KV head have the same queries one after another, like the rows of one block of the kernel.
    """
    # scheduler.cuh, PrefillSplitQOKVIndptr, and prefill.cuh: blockIdx.z is the KV head
    group = _heads(phase, "q") // _heads(phase, "k")

    def place(block: WorkTile) -> tuple[int, ...]:
        part, *_ = block.span("split") or (0,)
        return block.head // group, block.batch, block.row, block.head, part

    return replace(phase, cells=tuple(sorted(phase.cells, key=place)))


def _heads(phase: Phase, name: str) -> int:
    tensor = phase.tensors[name]
    assert isinstance(tensor, GlobalTensor)
    return tensor.heads


FLASHINFER = GpuKernel(
    name="flashinfer",
    whose="FlashInfer's",
    computes=("flash",),
    # prefill.cuh: m16k16_rowsum_f16f16f32, write_o_reg_gmem; a block visits its keys from the first on.
    decides=GpuDecisions(is_whole=True, sums_in_products=True, stores_wide_at_once=True),
    tiles={2: TILES},
    variants=_variants,
    fields=lambda _device: {"stages": None},
    needs=_needs,
    split_rule=split_rules.flashinfer,
    has_unseen_parts=True,  # scheduler.cuh: all keys are divided into chunks, for each block of rows
    order=_launched,
    charges=_charges,
    packs=lambda problem, _rows: problem.group_size > 1,  # prefill.cuh: rows are queries times the heads of a KV head
    is_fused=True,
)
