"""cuDNN's attention on sm_120 and sm_121: one warp copies for four or eight warps that multiply; these hold Q in
registers.

The kernel copies complete tiles (TMA) and multiplies with instructions of single warps (mma.sync).  It is an assumption
that keys are visited from the first to the last.

Source: NVIDIA/cudnn-frontend, python/cudnn/sdpa/fwd: config_sm120.py, kernels/sm120/prefill_f16.py.
"""

from __future__ import annotations

from npusim.kernel import DeviceSpec, GpuDecisions, GpuKernel, Problem, ceil_div, get_format, layout
from npusim.machine import Layouts

#: Head dims with known layouts.
HEAD_DIMS = 64, 128, 192, 256
#: Rows of its blocks, and the number of warps that multiply; keys of a tile, of which there are fewer if K and V do not
#: fit into a block (prefill_f16.py).
LARGE_ROWS, SMALL_ROWS, KEYS = (128, 8), (64, 4), (128, 64)
#: Limits for the choice between two numbers of rows of a block.  The smaller number is chosen up to a number of blocks
#: (with the larger number of rows) per multiprocessor, if the number of tiles of keys exceeds a limit (with a causal
#: mask: at least reaches it).  The smaller number is also chosen if twice as many blocks still have a multiprocessor
#: each.  Inferred from the test of tile_choice, in which 240 blocks on 188 multiprocessors have the smaller number of
#: rows and 320 do not.
FILLED, FEW_TILES = 1.5, 8


def _needs(device: DeviceSpec) -> str:
    is_there = device.architecture in ("sm_120", "sm_121")
    return "" if is_there else f"is a kernel of sm_120 and sm_121, and {device.name} is {device.architecture}"


def _refuses(problem: Problem, _precision: object) -> str:
    return "does not support pages: it needs a contiguous K and V" if problem.page else ""


def _tiles(problem: Problem, device: DeviceSpec) -> Layouts:
    cores, size = device.group_count.value, get_format(problem.dtype).size_bytes
    memory = device.core("sm").buffer("SMEM").capacity_bytes.value
    blocks = ceil_div(problem.seq_q, LARGE_ROWS[0]) * problem.heads * problem.batch
    tiles = ceil_div(problem.seq_kv, KEYS[0])
    is_long = tiles >= FEW_TILES if problem.causal else tiles > FEW_TILES
    is_fine = 2 * blocks <= cores or (blocks < FILLED * cores and is_long)
    rows, warps = SMALL_ROWS if is_fine else LARGE_ROWS
    fits = {dim: next((n for n in KEYS if 2 * n * dim * size <= memory), 0) for dim in HEAD_DIMS}
    return {dim: layout(rows, keys, warps=warps) for dim, keys in fits.items() if keys}


CUDNN_SM120 = GpuKernel(
    name="cudnn_sm120",
    whose="cuDNN's for sm_120",
    computes=("flash",),
    decides=GpuDecisions(is_whole=True, roles="copying", holds_in_registers=True),
    tiles={2: {dim: layout(LARGE_ROWS[0], KEYS[0], warps=LARGE_ROWS[1]) for dim in HEAD_DIMS}},
    variants=_tiles,
    fields=lambda _device: {"stages": None},
    leaves=frozenset({"launch"}),
    needs=_needs,
    refuses=_refuses,
)
