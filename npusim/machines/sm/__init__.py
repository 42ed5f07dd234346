"""Streaming multiprocessors, Volta to Hopper: warps, registers, shared memory, tensor cores."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.family import CoreFamily
from npusim.machines.decisions import GpuDecisions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.family import Settings

_ASCEND = "schedules of ascend devices"
_UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "flags.cross_core_*": f"{_ASCEND}, whose cores meet through flags",
        "memory.gm.request_min_bytes": f"routes with an unaligned_factor: {_ASCEND}",
        "memory.gm.alignment_bytes": f"{_ASCEND}, which keep rings in global memory",
        "memory.gm.capacity_bytes": f"{_ASCEND}, which keep rings in global memory",
        "cores.sm.engines.WARPS.queue_depth_count": f"{_ASCEND}: warps wait in order anyway",
        "cores.sm.engines.TENSOR.queue_depth_count": f"{_ASCEND}: warps issue products",
        "cores.sm.engines.TENSOR.startup_cycles": f"{_ASCEND}: a product of warps has steps",
        "cores.sm.engines.TENSOR.arithmetic.*": "devices without steps of a product",
        "cores.sm.engines.LDG.queue_depth_count": f"{_ASCEND}: a block's stages bound its loads",
        "cores.sm.engines.LSU.phases.32.*": "accesses of 32 bits, which no schedule makes",
    }
)
_LONGEST = MappingProxyType({"launch": "longest_first"})


def _tile(block_q: int, block_kv: int, warps: int, stages: int | None) -> Mapping[str, object]:
    return {"block_q": block_q, "block_kv": block_kv, "warps": warps, "stages": stages, **_LONGEST}


#: Tiles whose best number of stages is known: first other numbers of keys, then other rows and keys with their warps.
_NEARBY: Settings = (
    ({"block_kv": 64}, {"block_kv": 128}, {"block_kv": 256}),
    (
        {"block_q": 64, "warps": 4},
        {"block_q": 128, "warps": 8},
        {"block_q": 128, "block_kv": 256, "warps": 8},
        {"block_q": 128, "block_kv": 32, "warps": 8},
    ),
)
#: Settings that an attention tries if warp groups run concurrently, causal blocks with the most keys first: tiles of a
#: software pipeline, from those that Triton's tutorial on fused attention tunes over (triton-lang.org,
#: 06-fused-attention: 64 or 128 rows, 32 to 128 keys, 4 or 8 warps, 2 to 4 stages), and of a library's kernel (stages:
#: none).
PIPELINED: Settings = (
    # Rows, keys, warps, stages.
    (
        _tile(64, 128, 4, 3),
        _tile(128, 128, 8, 3),
        _tile(256, 64, 8, 3),
        _tile(64, 64, 4, 3),
        _tile(64, 32, 4, 3),
        _tile(64, 128, 4, None),
        _tile(64, 64, 4, None),
        _LONGEST,
    ),
    *_NEARBY,
)
#: Settings for devices without asynchronous copies; these have one stage.
STAGED: Settings = (
    # Rows, keys, warps, stages.
    (_tile(64, 64, 4, 1), _tile(64, 128, 4, 1), _tile(128, 128, 8, 1), _tile(64, 64, 4, None), _LONGEST),
    *_NEARBY,
)
#: Settings in Volta's lanes: if two or four adjacent quad pairs share the rows of a warp, more blocks can be resident.
LANES: Settings = (
    (
        {"block_q": 64, "warps": 4, "arrangement": "2x2", **_LONGEST},
        {"block_q": 64, "block_kv": 32, "warps": 4, "arrangement": "2x2", **_LONGEST},
        {"block_q": 64, "warps": 8, "arrangement": "1x4", **_LONGEST},
        {"block_q": 128, "block_kv": 64, "warps": 8, "arrangement": "2x2", **_LONGEST},
        _LONGEST,
    ),
    (
        {"block_kv": 32},
        {"block_kv": 64},
        {"block_kv": 128},
        {"block_q": 128, "block_kv": 128, "warps": 8, "arrangement": "2x2"},
    ),
)


#: The fields of warps in a compiler's layout, and those of attention.
_GROUPS, _ATTENTION = "npusim.machines.sm.core:GroupFields", "npusim.machines.sm.core:SmFields"

NVIDIA = CoreFamily(
    name="nvidia",
    machine="npusim.machines.sm.sm_machine:SmMachine",
    processor="gpu",
    decisions=GpuDecisions,
    fields={
        "attention": _ATTENTION,
        "splits": _ATTENTION,
        "stages": _GROUPS,
        "chunks": _GROUPS,
        "compiled": _GROUPS,
        "product": "npusim.machines.sm.groups:GpuGemmFields",
        "rows": "npusim.machines.sm.groups:GpuRowsFields",
        "operators": "npusim.machines.sm.groups:GpuOperatorFields",
        "plain": "",
    },
    usual="fa2",
    # Powers of two come from a polynomial, as in FlashAttention-4; P V is chained on the tensor core, and the row sum
    # runs from left to right, as in the golden kernel of an H200 (golden/README.md).
    presets={"exp_variant": "exp2.exp2p", "sum_order": "sequential", "accumulate": "chained"},
    layer_attention="npusim.machines.sm.torch_attention:torch_attention",
    settings={"pipelined": PIPELINED, "staged": STAGED, "lanes": LANES},
    unread=_UNREAD,
    cores=("sm",),
)
#: The cores of a host, which compute only values.
CPU = CoreFamily(
    name="cpu",
    machine="npusim.machines.sm.sm_machine:SmMachine",
    processor="cpu",
    decisions=GpuDecisions,
    fields={"attention": _ATTENTION, "compiled": _GROUPS},
    presets={"sum_order": "tree_halves"},  # sums have the order of the lanes
    unread=_UNREAD,
    cores=("sm",),
)
