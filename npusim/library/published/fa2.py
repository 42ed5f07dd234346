"""FlashAttention-2.

Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp and src/flash_fwd_launch_template.h.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.kernel import (
    Charge,
    DeviceSpec,
    GlobalTensor,
    GpuDecisions,
    GpuKernel,
    KernelUse,
    Phase,
    Problem,
    ceil_div,
    layout,
    split_rules,
)
from npusim.machine import KernelTile, Layouts, warps_of

if TYPE_CHECKING:
    from collections.abc import Mapping


#: Rows, keys and warps of a block by head dim (flash_fwd_launch_template.h).
TILES: Layouts = MappingProxyType(
    {
        **dict.fromkeys((32, 64), layout(128, 128, warps=4)),
        **dict.fromkeys((96, 128), layout(128, 64, warps=4)),
        **dict.fromkeys((192, 256), layout(128, 64, warps=8)),
    }
)
#: Bytes of an element for which these tiles are tried.
SIZES = 1, 2, 4
#: No other tile.
NONE: Layouts = MappingProxyType({})
#: Tiles on sm_86 and sm_89: without a mask, and causal (as above).
SMALL: tuple[Layouts, Layouts] = ({128: layout(128, 32, warps=4)}, dict.fromkeys((96, 128), layout(64, 64, warps=4)))
#: As above, for head dim 256: bytes of shared memory that a block of 128 rows needs, and bytes that two blocks of 64
#: rows need together.  Blocks of 64 rows are chosen if two of them fit a multiprocessor and a block of 128 rows does
#: not fit.
ONE_BLOCK, TWO_BLOCKS, HALF_TILE = 2 * 256 * (128 + 128), 4 * 256 * (64 + 128), layout(64, 64, warps=4)
#: For calls with split keys: rows and warps of a block, and its number of keys by head dim
#: (flash_fwd_launch_template.h, run_mha_fwd_splitkv_dispatch).  Calls with a block table use these too (flash_api.cpp,
#: force_split_kernel).
SPLIT_ROWS, SPLIT_WARPS, SPLIT_KEYS = 64, 4, ((64, 256), (128, 128), (256, 64))
#: Number of rows in a block of the merge, for heads of 128 (flash_fwd_launch_template.h, run_flash_splitkv_fwd).
MERGE_ROWS = 4
#: Number of instructions by head dim and tile: of a kernel's loop, and of the code around the loop without a mask, with
#: ragged rows or keys, with a causal mask, and with both; 0: no such code (cuobjdump -sass of flash_fwd_kernel, below
#: of flash_fwd_splitkv_kernel, for float16 and sm_90 in torch 2.11.0's libtorch_cuda.so; for head dims of 192 and more,
#: all numbers are for ragged sizes).
INSTRUCTIONS: Mapping[tuple[int, int, int], tuple[int, int, int, int, int]] = MappingProxyType(
    {
        (32, 128, 128): (1377, 2010, 2691, 2438, 4771),
        (64, 128, 128): (1625, 2357, 3273, 2870, 5784),
        (96, 128, 64): (978, 1690, 2269, 3149, 4611),
        (96, 64, 64): (530, 0, 0, 1285, 2109),
        (128, 128, 64): (1171, 2170, 2991, 4182, 6854),
        (128, 64, 64): (600, 0, 0, 1444, 2459),
        (128, 128, 32): (661, 1428, 2154, 0, 0),
        (192, 128, 64): (726, 1833, 1833, 3610, 3610),
        (256, 128, 64): (862, 2071, 2071, 4372, 4372),
        (256, 64, 64): (873, 2172, 2172, 3703, 3703),
        (32, 64, 256): (1523, 2176, 2651, 2518, 4579),
        (64, 64, 256): (1793, 2465, 3246, 2812, 5460),
        (96, 64, 128): (1104, 1766, 2060, 1942, 3381),
        (128, 64, 128): (1244, 1958, 2357, 2136, 3820),
        (192, 64, 64): (886, 1897, 1897, 2915, 2915),
    }
)


def _variants(problem: Problem, device: DeviceSpec) -> Layouts:
    issue, small = warps_of(device), NONE
    if device.architecture in ("sm_86", "sm_89"):  # is_sm8x: only compute capability 8, not 12
        # With a window, a causal mask is a local one, and one query sees all keys (flash_api.cpp, is_causal).
        is_one = problem.seq_q == 1 and not problem.alibi
        small = SMALL[problem.causal and problem.seen.is_plain and not is_one]
    fits_two = device.core("sm").buffer("SMEM").capacity_bytes.value >= TWO_BLOCKS
    fits_one = issue is None or issue.block_memory_bytes.value >= ONE_BLOCK
    return small if fits_one and not fits_two else {**small, max(TILES): HALF_TILE}


def _needs(device: DeviceSpec) -> str:
    issue = warps_of(device)
    is_there = issue is not None and issue.copies.value == "asynchronous"
    return "" if is_there else f"needs asynchronous copies (sm_80 and later), which {device.name} does not have"


def _cut_tile(problem: Problem) -> KernelTile:
    return KernelTile(SPLIT_ROWS, _cut_keys(problem.head_dim), SPLIT_WARPS)


def _cut_keys(head_dim: int) -> int:
    return next((size for dim, size in SPLIT_KEYS if head_dim <= dim), 0)


def _packs(problem: Problem, _rows: int) -> bool:
    return problem.group_size > 1 and problem.seq_q == 1 and problem.window is None and not problem.alibi


def _by_head(phase: Phase) -> Phase:
    """Return a phase with unsplit, paged keys whose blocks are ordered by head, then by sequence.

    A head's keys of all sequences are then read before those of the next head.  The blocks of other phases are ordered
    by sequence, then by head.
    """
    # flash_fwd_launch_template.h, run_flash_splitkv_fwd: blockIdx.z is the head, or sequence and head of split keys
    keys = phase.tensors.get("k")
    if not isinstance(keys, GlobalTensor) or not keys.stretch_rows or phase.cells[0].span("split"):
        return phase
    return replace(phase, cells=tuple(sorted(phase.cells, key=lambda b: (b.head, b.batch))))


def instructions(head_dim: int, rows: int, keys: int, *, causal: bool, is_ragged: bool) -> tuple[int, int]:
    """Return the number of instructions of a tile's loop, and that of the code around the loop; 0 if not known."""
    dim = min((d for d in TILES if d >= head_dim), default=0)
    loop, *around = INSTRUCTIONS.get((dim, rows, keys), (0, 0, 0, 0, 0))
    return loop, around[2 * causal + is_ragged]


def code_charges(use: KernelUse) -> tuple[Charge, ...]:
    """Return the charges for the time in which a block waits for the instructions around its loop.

    The time is 0 if the instruction cache next to the warps has space for all instructions, and if waves of equal
    blocks run through the code together. Blocks of different lengths are out of step: the code of one block evicts a
    long loop of another block.
    """
    issue, phase = warps_of(use.device), use.phase
    if issue is None or issue.library is None or (code := issue.library.code) is None:
        return ()
    dim, is_ragged = max(use.head_dim, use.value_dim), use.is_ragged
    loop, around = instructions(dim, use.rows, use.keys, causal=bool(phase.masks), is_ragged=is_ragged)
    if loop + around <= code.cached_count.value:
        return ()
    near = Charge("WARPS.library.code.fetch_cycles", around, "block")
    counts = [sum(ceil_div(r.cols, use.keys) for r in b.runs) for b in phase.cells]
    # Blocks of one wave start together, and blocks of split keys skip some of the code.
    is_cut = (use.rows, use.keys) == (SPLIT_ROWS, _cut_keys(dim))
    if use.residents == 1 or len(counts) <= use.residents * use.device.group_count.value or is_cut:
        return (near,)
    if len(set(counts)) == 1:
        return ()
    if loop + around > code.far_count.value:
        return (Charge("WARPS.library.code.far_cycles", around, "block"),)
    if loop <= code.loop_count.value:
        return (near,)
    # Tiles that are masked individually come before the loop (flash_fwd_kernel.h, n_masking_steps).
    masked = ceil_div(use.rows, use.keys) + is_ragged if phase.masks else 1
    looped = loop * max(0.0, sum(counts) / len(counts) - masked)
    return near, Charge("WARPS.library.code.crowded_cycles", around * around / (around + looped), "block")


FA2 = GpuKernel(
    name="fa2",
    whose="FlashAttention-2's",
    computes=("flash", "split_kv"),
    decides=GpuDecisions(is_whole=True, from_last=True),  # flash_fwd_kernel.h begins with n_block_max - 1
    tiles=MappingProxyType(dict.fromkeys(SIZES, TILES)),
    variants=_variants,
    fields=lambda _device: {"stages": None},
    leaves=frozenset({"launch"}),
    needs=_needs,
    split_rule=split_rules.fa2,
    cut_tile=_cut_tile,
    has_cut_pages=True,
    merge_rows=MERGE_ROWS,
    packs=_packs,
    order=_by_head,
    charges=code_charges,
    merge_charges=(Charge("WARPS.library.combine_cycles", 1, "output"),),
    is_fused=True,
    output_of_8_bits="bfloat16",
)
