"""cuDNN's attention on Hopper: warp groups take turns at exponentials, so that one group multiplies while another
computes exponentials.

Source: NVIDIA/cudnn-frontend 3929da2, generated/sdpa/sm90/prefill; tiles are in its kernels' names
(64x128x{64,128,256}).  Head dims 64 and 128 are published; that others differ only in their buffers is inferred.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from npusim.kernel import Charge, DeviceSpec, GpuDecisions, GpuKernel, KernelUse, Phase, Problem, get_format, layout
from npusim.machine import GradientKernel, gradient_charges, needs_tma, specialised_charges

#: Head dims, and rows and keys of all tiles, according to the kernels' names.
HEAD_DIMS, TILE = (64, 128, 192, 256), (128, 128)
#: Queries of a tile and keys of a block of the gradient kernel: 64 x 64 per warp group; a block has two adjacent groups
#: (its name and grid in a profile, torch 2.11 with cuDNN 9.15: ..._bprop_wgmma_f16_knob_26_64x64x{64,128}_1x4x1, 384
#: threads, one block per multiprocessor).
GRADIENT_TILE = (64, 128)
#: Largest head dim, and the step of head dims, of PyTorch's calls (see `_is_torchs`).
TORCHS_HEAD_DIM, TORCHS_STEP = 128, 8
#: Warps and elements of a block that converts dQ: 128 threads and 30 registers; 8,192 blocks for 16.8 million elements
#: of heads of 64 and of 128 (reports/recurrences/h200_backward.csv).
SUM_BLOCK = 4, 2048
#: Instructions for each score if keys end within a tile and nothing is masked: fitted on three cases of h200_cudnn
#: (s1000, s3000, s5676).
BOUNDS = Charge("ALU.ops.compare", 2.0, "score")
#: Architectures for which cuDNN has another kernel.
OTHERS = "sm_120", "sm_121"


def _charges(use: KernelUse) -> tuple[Charge, ...]:
    is_ragged = not use.phase.masks and any(r.cols % use.keys for b in use.phase.cells for r in b.runs)
    return (*specialised_charges(use), *((BOUNDS,) if is_ragged else ()))


def _last_keys_first(phase: Phase) -> Phase:
    """Return a phase in which the blocks of a head's last keys start first.

    Among four orders and two ways to assign blocks, this combination has the smallest errors on 18 causal calls on an
    H200.
    """
    heads = (list(of) for _, of in groupby(phase.cells, key=lambda b: (b.batch, b.head, b.span("member"))))
    return replace(phase, cells=tuple(b for of in heads for b in reversed(of)))


def _needs(device: DeviceSpec) -> str:
    is_other = device.architecture in OTHERS
    return f"is a kernel for Hopper; use kernel=cudnn_sm120 on {device.name}" if is_other else needs_tma(device)


def _is_torchs(problem: Problem) -> bool:
    """Return whether PyTorch uses cuDNN: 16-bit formats, head dims up to 128 in steps of 8, and no mask other than a
    causal one.

    Source: pytorch/pytorch 001f694, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: cuDNN is the first choice on
    compute capability 9 with cuDNN 9.15.1 or later (check_prefer_cudnn_attention; head dims:
    check_cudnn_tensor_shapes).
    """
    sizes = problem.head_dim, problem.value_head_dim
    fits = max(sizes) <= TORCHS_HEAD_DIM and not any(size % TORCHS_STEP for size in sizes)
    is_plain = problem.seen.is_plain and problem.softcap is None and problem.bias is None and not problem.alibi
    return fits and is_plain and get_format(problem.dtype).size_bytes == 2 and not problem.page  # source: as above


CUDNN = GpuKernel(
    name="cudnn",
    whose="cuDNN's",
    computes=("flash", "flash_backward"),
    decides=GpuDecisions(roles="alternating", depth=2, held_depth=2, turns="exponentials", meets=True, counts="always"),
    tiles={2: dict.fromkeys(HEAD_DIMS, layout(*TILE))},
    needs=_needs,
    order=lambda phase: phase,
    turn_dims={2: (0, max(HEAD_DIMS))},
    charges=_charges,
    is_torchs=_is_torchs,
    gradients=GradientKernel(
        name="cudnn",
        whose="cuDNN's",
        decides=GpuDecisions(roles="alternating", depth=2, meets=True, counts="always"),
        tiles={2: dict.fromkeys(HEAD_DIMS[:2], layout(*GRADIENT_TILE, warps=8))},
        fields=lambda _device: {"method": "added", "stages": None},
        leaves=frozenset({"gradient"}),
        needs=_needs,
        order=_last_keys_first,
        charges=gradient_charges,
        sum_block=SUM_BLOCK,
    ),
)
