"""Tiles of FlashAttention-2 and xformers, and how FlashAttention-2 and -3 cut keys and pack heads: published rules.

Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp and src/flash_fwd_launch_template.h;
hopper/heuristics.h; facebookresearch/xformers, csrc/attention/cuda/fmha/kernel_forward.h (also CUTLASS's example 41,
and PyTorch's memory-efficient attention).  The rules of splits are `npusim.algorithms.split_rules`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.algorithms.split_rules import RULES, call_of
from npusim.errors import TilingError
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.core import SM, warp_issue
from npusim.units import round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.device import DeviceSpec

#: Rows, keys and warps of a block by head dim (flash_fwd_launch_template.h), others filled up to the next; on sm_86 and
#: sm_89 otherwise: causal, and plain.
FA2_TILES: Mapping[int, tuple[int, int, int]] = MappingProxyType(
    {32: (128, 128, 4), 64: (128, 128, 4), 96: (128, 64, 4), 128: (128, 64, 4), 192: (128, 64, 8), 256: (128, 64, 8)}
)
#: As above.
FA2_SMALL = MappingProxyType({(96, True): (64, 64, 4), (128, True): (64, 64, 4), (128, False): (128, 32, 4)})
#: As above: from so many bytes of shared memory on two blocks of 64 rows fit where one of 128 does, for heads of 256.
TWO_BLOCKS, TWO_BLOCKS_TILE = 4 * 256 * (64 + 128), (64, 64, 4)
#: Instructions of a kernel's loop by head dim and tile, and those around it: plain, with ragged rows or keys, causal,
#: and both; 0: there is none (cuobjdump -sass of flash_fwd_kernel, below of flash_fwd_splitkv_kernel, for float16 and
#: sm_90 in torch 2.11.0's libtorch_cuda.so; from 192 on all are for ragged ones).
FA2_INSTRUCTIONS: Mapping[tuple[int, int, int], tuple[int, int, int, int, int]] = MappingProxyType(
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
#: Rows and warps of a block whose keys are cut, and its keys by head dim (flash_api.cpp, num_splits).
FA2_SPLIT_ROWS, FA2_SPLIT_WARPS, FA2_SPLIT_KEYS = 64, 4, ((64, 256), (128, 128), (256, 64))


#: Of xformers, for float16 before sm_80: rows and keys of a block up to a head dim, and four warps on 32 x 32 each
#: (kernel_forward.h, kNumWarpsPerBlock).
XFORMERS, XFORMERS_TILES, XFORMERS_WARPS = "xformers", ((64, 64, 64), (128, 32, 128)), 4
#: Warps that are to fit a multiprocessor, which bounds registers (kernel_forward.h, getWarpsPerSm).
XFORMERS_RESIDENT = 12
#: Operands come 32 elements of the sum at a time (ThreadK).  Instructions of a slice beside products and accesses, and
#: barriers outside of slices: of CUTLASS's example 41 compiled for sm_70 (reports/silicon/xformers.json).
XFORMERS_COUNTS: Mapping[str, Any] = MappingProxyType({"slice_elements": 32, "slice_instructions": 111, "barriers": 11})


def chosen_xformers(tiling: Any, problem: Any, precision: Any, device: DeviceSpec) -> Any:
    """Return a tiling with xformers' tile, which lies in registers and shared memory by itself.

    Raises `TilingError` for fields that say another tile, heads that it has no layout for, and devices on which it
    copies asynchronously.
    """
    issue, dim = warp_issue(device), max(problem.head_dim, problem.value_head_dim)
    if issue.copies.value != "staged":
        raise TilingError(f"kernel: {XFORMERS} is described for sm_70 and sm_75, not for {device.name}")
    if problem.dtype != "float16":
        raise TilingError(f"dtype: kernel={XFORMERS} multiplies float16 here, not {problem.dtype}")
    if (precision.scores, precision.product) != ("float32", "float32"):
        raise TilingError(f"kernel: {XFORMERS} adds up in float32; --precision acc_fp32, or fa2_fp32 of flash")
    tile = next((t[1:] for t in XFORMERS_TILES if dim <= t[0]), None)
    if tile is None:
        raise TilingError(f"kernel: {XFORMERS} keeps O in registers up to head_dim {XFORMERS_TILES[-1][0]}, not {dim}")
    unit = issue.register_unit_count.value
    registers = issue.registers_count.value // XFORMERS_RESIDENT // unit * unit // WARP_LANES
    own = {"block_q": tile[0], "block_kv": tile[1], "warps": XFORMERS_WARPS, "stages": 1, "kernel": XFORMERS}
    for name in sorted(tiling.model_fields_set - {"launch", "residents"}):
        if name not in own or getattr(tiling, name) != own[name]:
            has = f"kernel={XFORMERS} has tiles of {tile[0]} x {tile[1]} with {XFORMERS_WARPS} warps"
            raise TilingError(f"{name}: {getattr(tiling, name)}; {has} and decides the rest; leave it out")
    return tiling.model_copy(update={**own, "registers": registers, "spilled_registers": 0})


def fa2_tile(problem: Any, device: DeviceSpec) -> tuple[int, int, int]:
    """Return rows, keys and warps of FlashAttention-2's block; raise `TilingError` where it has none."""
    if warp_issue(device).copies.value != "asynchronous":
        raise TilingError(f"kernel: fa2 needs asynchronous copies (sm_80 and later), which {device.name} has not")
    dim = max(problem.head_dim, problem.value_head_dim)
    if dim > max(FA2_TILES):
        raise TilingError(f"kernel: fa2 has no layout for head_dim {dim}; the largest is {max(FA2_TILES)}")
    dim = min(d for d in FA2_TILES if d >= dim)
    if device.architecture in ("sm_86", "sm_89"):
        return FA2_SMALL.get((dim, problem.causal), FA2_TILES[dim])
    is_large = device.core(SM).buffer("SMEM").capacity_bytes.value >= TWO_BLOCKS
    return TWO_BLOCKS_TILE if dim == max(FA2_TILES) and is_large else FA2_TILES[dim]


def fa2_instructions(head_dim: int, rows: int, keys: int, *, causal: bool, is_ragged: bool) -> tuple[int, int]:
    """Return the instructions of the loop of FlashAttention-2's kernel for a tile, and around it; 0 if not known."""
    dim = min((d for d in FA2_TILES if d >= head_dim), default=0)
    if (counted := FA2_INSTRUCTIONS.get((dim, rows, keys))) is None:
        return 0, 0
    loop, *around = counted
    return loop, around[2 * causal + is_ragged]


def fa2_cuts(head_dim: int, rows: int, keys: int) -> bool:
    """Return whether a tile is that of FlashAttention-2's kernel for cut keys."""
    return (rows, keys) == (FA2_SPLIT_ROWS, next((size for dim, size in FA2_SPLIT_KEYS if head_dim <= dim), 0))


def chosen_fa2(tiling: Any, problem: Any, device: DeviceSpec) -> Any:
    """Return a tiling with FlashAttention-2's tile: that of whole keys, or where its rule cuts them another.

    Raises `TilingError` for fields that say another tile of whole keys: what the kernel is compiled for is fixed.
    """
    rows, keys, warps = fa2_tile(problem, device)
    own = {"block_q": rows, "block_kv": keys, "warps": warps, "stages": None}
    fixed = {*own, "registers", "spilled_registers", "residents"} & tiling.model_fields_set
    for name in sorted(fixed):
        if name not in own or getattr(tiling, name) != own[name]:
            has = f"kernel=fa2 has tiles of {rows} x {keys} with {warps} warps and registers of its own"
            raise TilingError(f"{name}: {getattr(tiling, name)}; {has}; leave it out")
    cut = FA2_SPLIT_ROWS, next(size for dim, size in FA2_SPLIT_KEYS if problem.head_dim <= dim)
    if cuts_keys("fa2", problem, cut, device):
        own |= {"block_q": cut[0], "block_kv": cut[1], "warps": FA2_SPLIT_WARPS}
    return tiling.model_copy(update=own)


def cuts_keys(called: str, problem: Any, tile: tuple[int, int], device: DeviceSpec) -> bool:
    """Return whether a kernel's rule cuts the keys of a call among blocks of ``tile``."""
    parts = RULES[called](call_of(problem, *tile, device.group_count.value))
    return any(len(cut) > 1 for cut in parts)


def packs_heads(called: str, problem: Any, rows: int) -> bool:
    """Return whether a kernel takes the query heads of a KV head as rows of one block of ``rows``."""
    queries, group = problem.seq_q, problem.group_size
    if called == "fa2":
        return group > 1 and bool(queries == 1) and problem.window is None and not problem.alibi
    # hopper/heuristics.h, should_pack_gqa: where rows are filled less than 0.9 times as well without.
    alone, packed = (n / round_up(n, rows) for n in (queries, queries * group))
    # As above.
    return group > 1 and bool(alone < 0.9 * packed)
