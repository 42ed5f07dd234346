"""cuDNN's attention on Hopper: groups take turns around exponentials, so that one multiplies while another computes.

Source: NVIDIA/cudnn-frontend 3929da2, generated/sdpa/sm90/prefill; tiles are in its kernels' names
(64x128x{64,128,256}).  Head dims 64 and 128 are published; that others differ in buffers alone is inferred.
"""

from __future__ import annotations

from npusim.kernel import Charge, DeviceSpec, GpuDecisions, GpuKernel, KernelUse, layout
from npusim.machine import needs_tma, specialised_charges

#: Head dims, and rows and keys of all tiles, as the kernels are called.
HEAD_DIMS, TILE = (64, 128, 192, 256), (128, 128)
#: Instructions for each score where keys end within a tile and nothing is masked: fitted, decided by three of
#: h200_cudnn's cases (s1000, s3000, s5676).
BOUNDS = Charge("ALU.ops.compare", 2.0, "score")
#: Architectures with another kernel of cuDNN's.
OTHERS = "sm_120", "sm_121"


def _charges(use: KernelUse) -> tuple[Charge, ...]:
    is_ragged = not use.phase.masks and any(r.cols % use.keys for b in use.phase.cells for r in b.runs)
    return (*specialised_charges(use), *((BOUNDS,) if is_ragged else ()))


def _needs(device: DeviceSpec) -> str:
    is_other = device.architecture in OTHERS
    return f"is a kernel of Hopper; {device.name} has kernel=cudnn_sm120" if is_other else needs_tma(device)


CUDNN = GpuKernel(
    name="cudnn",
    whose="cuDNN's",
    computes=("flash",),
    decides=GpuDecisions(roles="alternating", depth=2, held_depth=2, turns="exponentials", meets=True, counts="always"),
    tiles={2: dict.fromkeys(HEAD_DIMS, layout(*TILE))},
    needs=_needs,
    order=lambda phase: phase,
    turn_dims={2: (0, max(HEAD_DIMS))},
    charges=_charges,
)
