"""Tiles of FlashAttention-2, and how FlashAttention-2 and -3 cut keys and pack heads: their published rules as data.

Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp and src/flash_fwd_launch_template.h;
hopper/heuristics.h.  The rules of splits are `npusim.algorithms.split_rules`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.algorithms.split_rules import RULES, call_of
from npusim.errors import TilingError
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
#: Rows and warps of a block whose keys are cut, and its keys by head dim (flash_api.cpp, num_splits).
FA2_SPLIT_ROWS, FA2_SPLIT_WARPS, FA2_SPLIT_KEYS = 64, 4, ((64, 256), (128, 128), (256, 64))


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
