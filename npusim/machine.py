"""The public surface for core families of one's own: what a machine needs beside `npusim.kernel`.

A machine is a class with ``build(name, phases, flops, notes)`` that returns a `TileProgram`. An installed package
brings it as an entry point of the group ``npusim.machines``, its device file says ``family: NAME``; README.md
beside this file has the recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.phase import WHOLE
from npusim.algorithms.table import bind
from npusim.config.device import DeviceSpec
from npusim.formats import get_format
from npusim.ir.buffers import AddressSpace, Allocator, Ring
from npusim.ir.cost import Cost, Pricing
from npusim.ir.op import Source, Step, TileOp
from npusim.ir.program import Item, Queue, TileProgram
from npusim.ir.program import Loop as ProgramLoop
from npusim.ir.program import Phase as ProgramPhase
from npusim.ir.tile import Operand, RingTile, Tile
from npusim.machines.ascend.pricing import EnginePricing
from npusim.machines.frame import Frame, body
from npusim.machines.moves import Moves
from npusim.machines.touches import once, touches
from npusim.schedules import SCHEDULES
from npusim.schedules.attention import flash_phase
from npusim.schedules.pasa import GpuPasaTiling as PasaTiling
from npusim.schedules.pasa_phases import pasa_phases

if TYPE_CHECKING:
    from npusim.config.tiling import Tiling
    from npusim.schedules import Schedule
    from npusim.schedules.registry import Builder

__all__ = [
    "WHOLE", "AddressSpace", "Allocator", "Cost", "DeviceSpec", "EnginePricing", "Frame", "Item", "Moves", "Operand",
    "PasaTiling", "Pricing", "ProgramLoop", "ProgramPhase", "Queue", "Ring", "RingTile", "Source", "Step", "Tile",
    "TileOp", "TileProgram", "bind", "body", "flash_phase", "get_format", "on_family", "once", "pasa_phases", "touches",
]  # fmt: skip


def on_family(called: str, family: str, tiling: type[Tiling], build: Builder) -> Schedule:
    """Return one of npusim's schedules for a core family of one's own: its presets and checks, another mapping.

    ``build(problem, tiling, device, precision)`` returns the program; an entry point of ``npusim.schedules`` under
    the schedule's name makes it known.
    """
    ours = next(schedule for (name, _), schedule in SCHEDULES.items() if name == called)
    return replace(ours, family=family, tiling=tiling, build=build)
