"""xformers' memory-efficient attention before sm_80: operands are copied through registers, one slice of a product's
sum at a time.

Source: facebookresearch/xformers, csrc/attention/cuda/fmha/kernel_forward.h (also CUTLASS's example 41, and PyTorch's
memory-efficient attention).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npusim.kernel import Charge, DeviceSpec, GpuDecisions, GpuKernel, KernelUse, Problem, layout
from npusim.machine import WARP_LANES, warps_of

if TYPE_CHECKING:
    from collections.abc import Mapping


#: Number of warps that should fit into a multiprocessor, which limits registers (kernel_forward.h, getWarpsPerSm).
RESIDENT = 12
#: Tiles of four warps, 32 x 32 each (kernel_forward.h, WarpShape, kNumWarpsPerBlock).
WARPS, WARP_ROWS, TILES = 4, 32, {64: layout(64, 64, warps=4), 128: layout(32, 128, warps=4)}
#: Number of elements along a product's sum that are loaded at once (kernel_forward.h, ThreadK of its default
#: configuration).
THREAD_K = 32
#: Instructions of a slice in addition to products and accesses, and barriers outside of slices: from CUTLASS's example
#: 41 compiled for sm_70 (reports/silicon/xformers.json).
SLICE_INSTRUCTIONS, BARRIERS = 111, 11


def _needs(device: DeviceSpec) -> str:
    issue = warps_of(device)
    is_staged = issue is not None and issue.copies.value == "staged"
    return "" if is_staged else f"is described for sm_70 and sm_75, not for {device.name}"


def _refuses(problem: Problem, precision: Any) -> str:
    if problem.dtype != "float16":
        return f"multiplies float16 on this device, not {problem.dtype}"
    is_wide = (precision.scores, precision.product) == ("float32", "float32")
    return "" if is_wide else "accumulates in float32; use --precision acc_fp32, or fa2_fp32 of flash"


def _fields(device: DeviceSpec) -> Mapping[str, object]:
    issue = warps_of(device)
    assert issue is not None
    unit = issue.register_unit_count.value
    registers = issue.registers_count.value // RESIDENT // unit * unit // WARP_LANES
    return {"stages": 1, "registers": registers, "spilled_registers": 0}


def _charges(_use: KernelUse) -> tuple[Charge, ...]:
    at = "WARPS.sharing"
    barriers = Charge(f"{at}.barrier_cycles", BARRIERS - 1), Charge(f"{at}.barrier_warp_cycles", WARPS * (BARRIERS - 1))
    return Charge(f"{at}.warp_issue_cycles", SLICE_INSTRUCTIONS, "slice"), *barriers


XFORMERS = GpuKernel(
    name="xformers",
    whose="xformers' memory-efficient one",
    computes=("flash", "volta_flash"),
    # Accesses beyond an end are masked; products are not.
    decides=GpuDecisions(warp_rows=WARP_ROWS, slice_elements=THREAD_K, is_whole=True),
    tiles={2: TILES},
    fields=_fields,
    leaves=frozenset({"launch", "residents"}),
    needs=_needs,
    refuses=_refuses,
    charges=_charges,
)
