"""The public interface for user-defined core families, in addition to `npusim.kernel`.

A machine is a `Machine` with ``build(name, phases, flops, notes)`` that returns a `TileProgram`. An installed package
provides the manifest of its family, a `CoreFamily`, as an entry point of the group ``npusim.machines``, and its device
file has ``family: NAME``; schedules of the kinds in the manifest run on it unchanged. README.md in this folder has the
recipe.
"""

from __future__ import annotations

from npusim.algorithms.phase import WHOLE, bind
from npusim.config.device import DeviceSpec
from npusim.config.family import CoreFamily
from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator, Ring
from npusim.ir.op import Source, Step, TileOp
from npusim.ir.program import Cost, Item, Pricing, ProgramPhase, Queue, TileProgram
from npusim.ir.program import Loop as ProgramLoop
from npusim.ir.tile import Operand, RingTile, Tile
from npusim.machines.ascend.pricing import EnginePricing
from npusim.machines.base import Machine, memories, program_phase
from npusim.machines.footprint import Footprint
from npusim.machines.frame import Frame, body
from npusim.machines.transfers import Transfers

__all__ = [
    "WHOLE",
    "AddressSpace",
    "Allocator",
    "CoreFamily",
    "Cost",
    "DeviceSpec",
    "EnginePricing",
    "Footprint",
    "Frame",
    "Item",
    "Machine",
    "Operand",
    "Pricing",
    "ProgramLoop",
    "ProgramPhase",
    "Queue",
    "Ring",
    "RingTile",
    "Source",
    "Step",
    "Tile",
    "TileOp",
    "TileProgram",
    "Transfers",
    "bind",
    "body",
    "get_format",
    "memories",
    "program_phase",
]
