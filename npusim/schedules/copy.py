"""A copy through the vector cores' UB, to validate the memory side of the machine."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.gemm import copy
from npusim.config.kernels import CopyProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import SpecError
from npusim.ir.tile import GlobalTensor
from npusim.machines.ascend import AscendMachine, AscendTiling
from npusim.machines.sm import SmMachine
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.groups import plain_tiling
from npusim.schedules.gemm import STORED
from npusim.schedules.registry import Schedule
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram


class CopyFields(Tiling):
    """Bytes of one transfer; from 16 KiB on the vendor's guide promises full bandwidth."""

    block_bytes: int = Field(
        default=32768, ge=512, le=65536, multiple_of=512, description="bytes of one transfer of a core"
    )  # fmt: skip


def build(
    problem: CopyProblem, tiling: CopyFields, device: DeviceSpec, _precision: FlashPrecision
) -> TileProgram:
    """Return a copy of ``problem.bytes`` (rounded up to whole transfers) for one Ascend device."""
    machine = AscendMachine(device)
    rows = ceil_div(problem.bytes, tiling.block_bytes)
    source = GlobalTensor("source", 1, 1, rows, tiling.block_bytes, "int8", "input")
    target = GlobalTensor("target", 1, 1, rows, tiling.block_bytes, "int8", "output")
    phase = copy(source, target, len(machine.group.vector_cores))
    return machine.build("copy", [(phase, AscendTiling(elements=tiling.block_bytes))], 0)


class GpuCopyFields(Tiling):
    """Bytes of one block."""

    block_bytes: int = Field(default=32768, ge=512, le=262144, multiple_of=512, description="bytes of one block")


def build_on_gpu(
    problem: CopyProblem, tiling: GpuCopyFields, device: DeviceSpec, _precision: FlashPrecision
) -> TileProgram:
    """Return a copy of ``problem.bytes`` (rounded up to whole blocks) for one GPU."""
    if not works_beside(device):
        raise SpecError(f"copy: {device.name}'s file says nothing of warp groups beside one another; h200's does")
    rows = ceil_div(problem.bytes, tiling.block_bytes)
    source = GlobalTensor("source", 1, 1, rows, tiling.block_bytes, "int8", "input")
    target = GlobalTensor("target", 1, 1, rows, tiling.block_bytes, "int8", "output")
    return SmMachine(device).build("copy", [(copy(source, target, 1), plain_tiling(device))], 0)


ASCEND = Schedule(
    name="copy", family="ascend", summary="a copy through a core's memory, to validate the machine", tiling=CopyFields,
    precisions=MappingProxyType({"stored": STORED}), default_precision="stored", build=build,
    problem=CopyProblem,
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuCopyFields, build=build_on_gpu, hw="h200", runs_on=works_beside
)
SCHEDULES = (ASCEND, GPU)
