"""The attention kernel that PyTorch's scaled_dot_product_attention selects on a GPU, which a layer runs if the user
names no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.machines.published_kernel import GpuKernel
from npusim.machines.published_kernels import kernels

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem


def torch_attention(problem: Problem, device: DeviceSpec) -> str:
    """Return the attention of a prefill as a schedule with its fields."""
    selected = (n for n, k in kernels(GpuKernel, "flash").items() if k.is_torchs(problem) and not k.needs(device))
    return f"flash:kernel={name}" if (name := next(selected, "")) else "flash"
