"""The public interface for user-defined core families, in addition to `npusim.kernel`.

A machine is a `Machine` with ``build(name, phases, flops, notes)`` that returns a `TileProgram`. An installed package
provides the manifest of its family, a `CoreFamily`, as an entry point of the group ``npusim.machines``, and its device
file has ``family: NAME``; schedules of the kinds in the manifest run on it unchanged. README.md in this folder has the
recipe.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.core_units import WarpMatrixEngine
from npusim.config.device import DeviceSpec
from npusim.config.family import CoreFamily
from npusim.config.load import list_devices, load_device
from npusim.formats import get_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.kernels.form.phase import WHOLE, bind
from npusim.machines.base import Machine, memories, program_phase
from npusim.machines.footprint import Footprint
from npusim.machines.frame import Frame, body
from npusim.machines.published_kernel import (
    AscendKernel,
    GradientKernel,
    KernelTile,
    Layouts,
    PublishedKernel,
    gradient_charges,
    needs_tma,
    specialised_charges,
    warps_of,
)
from npusim.machines.published_kernels import find_kernel, kernels
from npusim.machines.transfers import Transfers
from npusim.program.ir.buffers import AddressSpace, Allocator, Ring
from npusim.program.ir.op import Source, Step, TileOp
from npusim.program.ir.tile import Operand, RingTile, Tile
from npusim.program.ir.tile_program import Cost, Item, Pricing, ProgramPhase, Queue, TileProgram
from npusim.program.ir.tile_program import Loop as ProgramLoop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.machines.ascend.ascend_pricing import EnginePricing
    from npusim.machines.node.node_program import NodeKernel, RowBlock, cut_rows, node_program

#: Names whose modules are imported on first use: a run imports only the modules of its family, and those of nodes only
#: on nodes.
_LATE: Mapping[str, str] = MappingProxyType(
    {
        "EnginePricing": "npusim.machines.ascend.ascend_pricing",
        "NodeKernel": "npusim.machines.node.node_program",
        "RowBlock": "npusim.machines.node.node_program",
        "cut_rows": "npusim.machines.node.node_program",
        "node_program": "npusim.machines.node.node_program",
    }
)

__all__ = [
    "WARP_LANES",
    "WHOLE",
    "AddressSpace",
    "Allocator",
    "AscendKernel",
    "CoreFamily",
    "Cost",
    "DeviceSpec",
    "EnginePricing",
    "Footprint",
    "Frame",
    "GradientKernel",
    "Item",
    "KernelTile",
    "Layouts",
    "Machine",
    "NodeKernel",
    "Operand",
    "Pricing",
    "ProgramLoop",
    "ProgramPhase",
    "PublishedKernel",
    "Queue",
    "Ring",
    "RingTile",
    "RowBlock",
    "Source",
    "Step",
    "Tile",
    "TileOp",
    "TileProgram",
    "Transfers",
    "WarpMatrixEngine",
    "bind",
    "body",
    "cut_rows",
    "find_kernel",
    "get_format",
    "gradient_charges",
    "kernels",
    "list_devices",
    "load_device",
    "memories",
    "needs_tma",
    "node_program",
    "program_phase",
    "specialised_charges",
    "warps_of",
]


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
