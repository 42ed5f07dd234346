"""FlashAttention-4 on sm_120 and sm_121: FlashAttention-2's algorithm, with one warp that copies for four that
multiply.

The kernel copies complete tiles (TMA) and multiplies with instructions of single warps (mma.sync).  Calls with pages,
packed heads or split keys use another kernel, which npusim does not describe.

Source: Dao-AILab/flash-attention, flash_attn/cute: interface.py (tiles of sm_120), flash_fwd_sm120_tma.py.
"""

from __future__ import annotations

from types import MappingProxyType

from npusim.kernel import DeviceSpec, GpuDecisions, GpuKernel, Problem, layout
from npusim.machine import Layouts

#: Rows, keys and multiplying warps of a block, by head dim (interface.py).
TILES: Layouts = MappingProxyType({64: layout(128, 128, warps=4), 128: layout(128, 64, warps=4)})


def _needs(device: DeviceSpec) -> str:
    is_there = device.architecture in ("sm_120", "sm_121")
    return "" if is_there else f"is a kernel of sm_120 and sm_121, and {device.name} is {device.architecture}"


def _refuses(problem: Problem, _precision: object) -> str:
    return (
        "does not support pages: such calls use another kernel, which npusim does not describe" if problem.page else ""
    )


FA4_SM120 = GpuKernel(
    name="fa4_sm120",
    whose="FlashAttention-4's for sm_120",
    computes=("flash",),
    # flash_fwd_sm120_tma.py: one warp copies, K and V have two tiles each; the loop begins with n_block_max - 1
    decides=GpuDecisions(is_whole=True, roles="copying", depth=2, from_last=True),
    tiles={2: TILES},
    fields=lambda _device: {"stages": None},
    leaves=frozenset({"launch"}),
    needs=_needs,
    refuses=_refuses,
    is_fused=True,
)
