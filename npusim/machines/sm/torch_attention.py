"""The attention that PyTorch's scaled_dot_product_attention takes on a GPU, which a layer runs where none is named.

Source: pytorch/pytorch 001f694, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: from cuDNN 9.15.1 on cuDNN's
attention comes first on compute capability 9 (check_prefer_cudnn_attention), for 16 bits and heads of up to 128 in
steps of 8 without a mask but the causal one; FlashAttention-2 comes next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.formats import get_format
from npusim.machines.published_kernel import GpuKernel
from npusim.machines.published_kernels import kernels

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem

#: Largest head dim, and the step of head dims, of PyTorch's calls of cuDNN (as above, check_cudnn_tensor_shapes).
MOST_HEAD_DIM, STEP = 128, 8


def torch_attention(problem: Problem, device: DeviceSpec) -> str:
    """Return the attention of a prefill as a schedule with its fields."""
    cudnn = kernels(GpuKernel, "flash")["cudnn"]
    sizes = problem.head_dim, problem.value_head_dim
    fits = max(sizes) <= MOST_HEAD_DIM and not any(size % STEP for size in sizes)
    is_plain = problem.seen.is_plain and problem.softcap is None and problem.bias is None and not problem.alibi
    is_taken = fits and is_plain and get_format(problem.dtype).size_bytes == 2 and not problem.page  # bytes
    return "flash:kernel=cudnn" if is_taken and not cudnn.needs(device) else "flash"
