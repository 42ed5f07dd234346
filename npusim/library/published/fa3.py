"""FlashAttention-3: warp groups take turns at products, and Q K^T of a tile is issued before P V of the previous tile.

Source: Dao-AILab/flash-attention 0251105, hopper/tile_size.h, heuristics.h, tile_scheduler.hpp,
mainloop_fwd_sm90_tma_gmma_ws.hpp (UseSchedulerBarrier); for gradients flash_bwd_launch_template.h and
mainloop_bwd_sm90_tma_gmma_ws.hpp.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from npusim.kernel import (
    DeviceSpec,
    GlobalTensor,
    GpuDecisions,
    GpuKernel,
    Phase,
    Problem,
    WorkTile,
    get_format,
    layout,
    round_up,
    split_rules,
)
from npusim.machine import GradientKernel, KernelTile, Layouts, gradient_charges, needs_tma, specialised_charges

#: Rows of a block, and keys of a tile without a mask, with a causal mask and with any other mask (hopper/tile_size.h);
#: the second table is for V with few columns.
TILES_OF_16_BITS: Layouts = MappingProxyType(
    {
        64: layout(192, 192, 128),
        96: layout(192, 144, 144, 128),
        128: layout(128, 176, 128),
        192: layout(128, 112, 112, 96),
        256: layout(128, 80, 80, 64),
    }
)
#: As above.
NARROW: Layouts = MappingProxyType({192: layout(128, 128, 128, 96)})
#: The tile if a single warp group multiplies, and the largest number of rows of a KV head for which it does
#: (hopper/heuristics.h, use_one_mma_wg, and tile_size.h, both as of 13d0fd9).
ONE_GROUP: Layouts = MappingProxyType({128: layout(64, 176, 128)})
#: As above.
ONE_GROUP_ROWS = 64
#: As above.
TILES_OF_8_BITS: Layouts = MappingProxyType(
    {64: layout(192, 160), 96: layout(192, 128), 128: layout(128, 224), 192: layout(128, 160), 256: layout(128, 128)}
)
#: Size in bytes of an element of the sum of dQ (ElementAccum).
DQ_BYTES = 4
#: Head dims at which groups take turns, by the bytes of an element (mainloop_fwd_sm90_tma_gmma_ws.hpp).
TURN_DIMS = MappingProxyType({2: (0, 128), 1: (128, 256)})
#: Number of rows in a block of the merge, for heads of 128 (flash_fwd_combine_launch_template.h).
MERGE_ROWS = 8
#: Size in bytes of the K and V that are in L2 at one time. Among the blocks of their heads, the longest start first
#: (hopper/tile_scheduler.hpp).
L2_BYTES = 32 << 20
#: Queries of a tile and keys of a block of the gradient kernel, without and with a mask (flash_bwd_launch_template.h).
#: Omitted: with a soft-cap and a causal mask, heads of 64 have 96 queries.
GRADIENT_TILES: Layouts = MappingProxyType(
    {
        64: layout(128, 128, warps=8),
        96: layout(64, 128, warps=8),
        128: (KernelTile(80, 128, 8), KernelTile(64, 128, 8), KernelTile(64, 128, 8)),
    }
)
#: Size in bytes of the Q, dO and sums of dQ that are in L2 at one time. Their heads, whose number is a power of two,
#: form a section, in which the blocks of the first keys start first (hopper/tile_scheduler.hpp,
#: SingleTileBwdLPTScheduler).
GRADIENT_L2_BYTES = 40 << 20


def _variants(problem: Problem, _device: DeviceSpec) -> Layouts:
    tiles = TILES_OF_8_BITS
    if get_format(problem.dtype).size_bytes == 2:
        is_narrow = problem.value_head_dim <= 128  # hopper/tile_size.h
        is_one_group = problem.seq_q * problem.group_size <= ONE_GROUP_ROWS
        tiles = {**TILES_OF_16_BITS, **(NARROW if is_narrow else {}), **(ONE_GROUP if is_one_group else {})}
    dim = max(problem.head_dim, problem.value_head_dim)
    # A causal mask hides nothing from a single query; nevertheless, with pages, head dim 128 has the causal tile.
    if problem.seq_q > 1 or (problem.page and 64 < dim <= 128):  # hopper/flash_api.cpp
        return tiles
    return {n: (plain, plain, masked) for n, (plain, _causal, masked) in tiles.items()}


def _packs(problem: Problem, rows: int) -> bool:
    # hopper/heuristics.h, should_pack_gqa: heads are packed if, without packing, blocks are filled with less than 0.9
    # times as many rows.
    alone, packed = (n / round_up(n, rows) for n in (problem.seq_q, problem.seq_q * problem.group_size))
    # As above.
    return problem.group_size > 1 and bool(alone < 0.9 * packed)


def _longest_first(phase: Phase) -> Phase:
    """Return a phase in which the longest causal blocks start first."""
    if not phase.masks:
        return phase
    return replace(phase, cells=tuple(sorted(phase.cells, key=lambda b: (_section(phase, b), -b.tile_count))))


def _section(phase: Phase, block: WorkTile) -> int:
    """Return the section of a block; a section is the heads whose K and V are in L2 at one time."""
    tensors: list[Any] = [phase.tensors[n] for n in "kv"]
    head = sum(t.cols * t.rows * get_format(t.fmt).size_bytes for t in tensors)
    q: Any = phase.tensors["q"]
    number = block.batch * q.heads + block.head
    return int(number // max(1, L2_BYTES // max(1, head)))


def _first_keys_first(phase: Phase) -> Phase:
    """Return a phase in which, under a causal mask, the blocks of the first keys of all heads of a section
    start first.
    """
    if not phase.masks:
        return phase
    q, do = (phase.tensors[n] for n in ("q", "do"))
    assert isinstance(q, GlobalTensor)
    assert isinstance(do, GlobalTensor)
    size = q.rows // q.packed * ((q.cols + do.cols) * get_format(q.fmt).size_bytes + q.cols * DQ_BYTES)
    heads = 1 << max(0, (GRADIENT_L2_BYTES // max(1, size)).bit_length() - 1)

    def place(block: WorkTile) -> tuple[int, int]:
        member, *_ = block.span("member") or (0,)
        head = (block.batch * q.heads + block.head) * q.packed + member
        return head // heads, block.row

    return replace(phase, cells=tuple(sorted(phase.cells, key=place)))


FA3 = GpuKernel(
    name="fa3",
    whose="FlashAttention-3's",
    computes=("flash", "split_kv", "flash_backward"),
    # mainloop_fwd_sm90_tma_gmma_ws.hpp begins with n_block_max - 1
    decides=GpuDecisions(roles="alternating", depth=2, turns="products", ahead=1, from_last=True, meets=True),
    tiles={2: TILES_OF_16_BITS, 1: TILES_OF_8_BITS},
    variants=_variants,
    leaves=frozenset({"block_q", "block_kv"}),
    needs=needs_tma,
    split_rule=split_rules.fa3,
    merge_rows=MERGE_ROWS,
    packs=_packs,
    order=_longest_first,
    turn_dims=TURN_DIMS,
    charges=specialised_charges,
    is_fused=True,
    output_of_8_bits="bfloat16",
    gradients=GradientKernel(
        name="fa3",
        whose="FlashAttention-3's",
        decides=GpuDecisions(roles="alternating", depth=2, meets=True, counts="never"),
        tiles={2: GRADIENT_TILES},
        fields=lambda _device: {"method": "added", "stages": None},
        leaves=frozenset({"gradient"}),
        needs=needs_tma,
        order=_first_keys_first,
        charges=gradient_charges,
    ),
)
