"""Tiling fields that an Ascend device takes of a schedule."""

from __future__ import annotations

from typing import Literal

from npusim.algorithms.cells import BlockOrder
from npusim.config.tiling import Field, Tiling
from npusim.machines.ascend.plan import Barriers

#: Whose published kernel is meant.
KernelName = Literal["cann", "pto", "tilelang"]


class VectorFields(Tiling):
    """How rows are cut into slices, how far stages run ahead, and which core gets which block."""

    vector_rows: int | None = Field(
        default=None, ge=1, description="rows of a softmax slice on an AIV; default: 8192 elements a slice"
    )
    depth: int = Field(
        default=2,
        ge=0,
        le=14,
        description="tiles that Q K^T and softmax run ahead of P V; the flag counter allows 15 slots",
    )
    deal: BlockOrder = Field(
        default="round_robin", description="blocks to cores: as vendor kernels do, or longest first"
    )


class KernelFields(VectorFields):
    """The same, and what published kernels do differently."""

    kernel: KernelName | None = Field(
        default=None,
        description="whose kernel: CANN's, PTO's or TileLang's; default: whose the preset is, printed with the result",
    )
    barriers: Barriers | None = Field(
        default=None, description="between vector instructions: every, or where needed; default: the kernel's"
    )
    together: int | None = Field(
        default=None, ge=1, description="tiles that cores hand one another at a time; default: the kernel's"
    )
    running: Literal["core", "gm"] = Field(
        default="core", description="where O stays between tiles: on the core, or in global memory: larger blocks fit"
    )
