"""FlexAttention's kernel as PyTorch compiles it with Triton (served.md section 1)."""

from __future__ import annotations

from npusim.kernel import Charge, DeviceSpec, GpuDecisions, GpuKernel, KernelUse
from npusim.machine import WarpMatrixEngine, warps_of

#: Number of instructions for each score with which FlexAttention tests for the ends of rows and keys; if any tile needs
#: the test, every tile has it.
BOUNDS = Charge("ALU.ops.compare", 4.0, "score")
#: An iteration reads the index of the next tile from a list in memory.
LIST = Charge("WARPS.sharing.lookup_cycles")


def _needs(device: DeviceSpec) -> str:
    is_there = warps_of(device) is not None and not isinstance(device.engine("sm", "TENSOR"), WarpMatrixEngine)
    return "" if is_there else f"is described for sm_75 and later, not for {device.name}"


def _charges(use: KernelUse) -> tuple[Charge, ...]:
    return (*((LIST,) if use.phase.masks else ()), *((BOUNDS,) if use.is_ragged else ()))


TRITON = GpuKernel(
    name="triton",
    whose="the kernel of Triton's FlexAttention, with a mask by blocks of 128 x 128",
    computes=("flash",),
    decides=GpuDecisions(mask_block=128),  # queries and keys of a block of its mask
    needs=_needs,
    charges=_charges,
)
