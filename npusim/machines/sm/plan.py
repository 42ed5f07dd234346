"""What the machine of streaming multiprocessors needs of a schedule's tiling, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.ir.op import GroupWork, WarpPlan

SM = "sm"
#: ``FUSED``: element-wise runs work through their tile fragment by fragment; their values live in a few
#: registers (the overhead of the device file), not in tiles.
RF, SMEM, FUSED = "sm.RF", "sm.SMEM", "sm.FUSED"
TENSOR, FMA, MUFU, LSU, LDG, WARPS = "TENSOR", "FMA", "MUFU", "LSU", "LDG", "WARPS"
#: From Turing on: comparisons and conversions have a pipe of half the width; spilled registers go to SPILL.
ALU, SPILL = "ALU", "SPILL"


@dataclass(frozen=True, slots=True)
class SmTiling:
    """Warps, places and shared memory of one phase.

    groups
        Warp groups of a block; each is a queue and owns a share of the rows.
    residents
        Blocks that a multiprocessor holds at a time.
    lanes
        How a stage's tiles lie in the lanes, by the axis of its columns; none: tiles as a whole.
    padding
        Elements after each row in shared memory.
    depth
        Tiles of each operand of the loop in shared memory.
    exchanges
        Whether what rows leave for a product crosses lanes on its way.
    holds_in_registers
        Whether operands that stay for the whole block do so in registers, not in shared memory.
    work
        How warp groups execute it, where they work beside one another.
    stages
        Tiles under way of a software pipeline: 1 goes through registers; none: operands are let go when read.
    spilled_bytes, far_bytes
        Registers of a warp group that an iteration stores to local memory and loads: in the cache, and beyond.
    """

    groups: int = 1
    residents: int = 1
    lanes: Mapping[str, WarpPlan] = field(default_factory=dict)
    padding: int = 0
    depth: int = 1
    exchanges: bool = False
    holds_in_registers: bool = False
    work: GroupWork | None = None
    stages: int = 0
    spilled_bytes: int = 0
    far_bytes: int = 0
