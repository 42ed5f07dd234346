"""The decoupled Ascend core group: CUBE and vector cores that meet in global memory."""

from npusim.machines.ascend.group import PING_PONG, SLICE_ELEMENTS
from npusim.machines.ascend.machine import AscendMachine
from npusim.machines.ascend.plan import (
    AscendTiling,
    Barriers,
    ProductPlan,
    gemm_tiling,
    loaded_k,
    slice_elements,
    slice_rows,
)

__all__ = [
    "PING_PONG",
    "SLICE_ELEMENTS",
    "AscendMachine",
    "AscendTiling",
    "Barriers",
    "ProductPlan",
    "gemm_tiling",
    "loaded_k",
    "slice_elements",
    "slice_rows",
]
