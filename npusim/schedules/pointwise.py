"""Norm, rotary embedding and activation of a layer on the vector cores, between its products."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.pointwise import pointwise
from npusim.config.kernels import RowsProblem
from npusim.config.tiling import Field, Tiling
from npusim.machines.ascend import AscendMachine, AscendTiling
from npusim.schedules.gemm import STORED
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram


class RowsFields(Tiling):
    """Elements that a vector core works on at a time."""

    elements: int = Field(default=4096, ge=256, description="of a slice; a norm's is one row at least")
    slices: int = Field(default=16, ge=1, description="of a vector core in a block")


def build(
    problem: RowsProblem, tiling: RowsFields, device: DeviceSpec, _precision: FlashPrecision
) -> TileProgram:
    """Return rows of a layer as a tile program for one Ascend device."""
    machine, p = AscendMachine(device), problem
    width = p.cols if p.what == "norm" else min(p.cols, tiling.elements)
    rows = max(1, tiling.elements // width)
    most = -(-p.rows * p.heads * -(-p.cols // width) // device.group_count.value)  # few rows on all cores
    height = min(p.rows, max(1, min(rows * tiling.slices * len(machine.group.vector_cores), most)))
    phase = pointwise(p.what, (p.heads, p.rows, p.cols), p.dtype, (height, width))
    return machine.build(p.what, [(phase, AscendTiling(elements=rows * width))], p.flops())


SCHEDULES = (
    Schedule(
        name="rows", family="ascend", summary="norm, rotary embedding or activation of a layer", tiling=RowsFields,
        precisions=MappingProxyType({"stored": STORED}), default_precision="stored", build=build, problem=RowsProblem,
    ),
)  # fmt: skip
