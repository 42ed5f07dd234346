"""Tiling fields of an Ascend device, and how products run on its AIC: tiles in L0, what waits in L1, loop order."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.blocks import BlockOrder
from npusim.config.tiling import Field, Tiling, lightest
from npusim.formats import get_format
from npusim.machines.ascend.group import PING_PONG, SLICE_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Stage
    from npusim.machines.ascend.group import AscendGroup
    from npusim.machines.frame import Frame


#: Barriers between a vector core's instructions: PTO's kernels have them where needed, CANN 8.0's and CATLASS's
#: behind every one (pto_macro_fa_softmax.hpp; block_epilogue_online_softmax_no_mask.hpp).
Barriers = Literal["needed", "every"]
#: The part of an operand that is loaded into L1 at once.  ``held``: all of it, from the start of the block to its
#: end; ``whole``: all of it, for one product; ``panel``: a piece of N a whole depth deep; ``piece``:
#: what one accumulation reads.
Staging = Literal["held", "whole", "panel", "piece"]


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """One product: ``m`` x ``n`` x ``k`` at a time in L0, and how its operands wait in L1.

    ``load``: how much of k is loaded into L1 at once, a multiple of ``k`` (0: ``k``).  ``halves``: of an
    accumulator, each drained while the next still adds up (the unit flag).  ``panels_outside``: every band of
    A meets a panel of B before the next panel is loaded.
    ``loops_over_k``: the pieces of k are a loop of the program, not listed.
    """

    m: int
    n: int
    k: int
    left: Staging
    right: Staging
    panels_outside: bool = False
    loops_over_k: bool = False
    left_depth: int = PING_PONG
    right_depth: int = PING_PONG
    load: int = 0
    halves: int = 1

    @property
    def load_k(self) -> int:
        """How much of k is loaded into L1 at once."""
        return self.load or self.k


@dataclass(frozen=True, slots=True)
class AscendTiling:
    """What the machine needs of a schedule's tiling for one phase.

    plans
        By stage, where the rule of :func:`default_plan` is not wanted.
    elements
        Of a slice of rows on a vector core.
    ahead
        Tiles that stages run ahead of a product that reads what rows left; slots between the cores
        number one more.
    period
        Releases of such a slot that one flag acknowledges.
    barriers
        Between the instructions of a vector core: where one needs what another leaves, or everywhere.
    together
        Tiles that cores hand one another at a time: they share what a tile costs (``flags.tile_cycles``).
    extra
        Whether a tile handed over costs the kernel what PTO's is seen to pay beyond the device's own cost.
    spilled
        States that stay in global memory between tiles, where UB has no space.
    is_work_list
        Whether each block goes to the core group that is free first.
    """

    plans: Mapping[str, ProductPlan] = field(default_factory=dict)
    elements: int = SLICE_ELEMENTS
    ahead: int = 0
    period: int = 1
    spilled: tuple[str, ...] = ()
    barriers: Barriers = "every"
    together: int = 1
    extra: bool = False
    is_work_list: bool = False


def gemm_tiling(stage: str, m: int, n: int, k: int, load_k: int = 0, halves: int = 1) -> AscendTiling:
    """Return the tiling of a plain product: operands stream through L1 in pieces of ``load_k`` (0: ``k``)."""
    plan = ProductPlan(m, n, k, "piece", "piece", loops_over_k=True, load=load_k, halves=halves)
    return AscendTiling({stage: plan})


#: Of k in one load of the vendor's products: four pieces of 64 (stepK 4 of the Ascend C guide's MDL template).
LOADED_K = 256


def loaded_k(m: int, n: int, k: int, fmt: str, group: AscendGroup) -> int:
    """Return how much of k a product loads at once: whole pieces of `LOADED_K`, in ping-pong in L1."""
    room = group.capacity_bytes("L1") // PING_PONG // ((m + n) * get_format(fmt).size_bytes)
    return max(1, min(LOADED_K, room) // k) * k


def slice_rows(chosen: int | None, width: int, elements: int = SLICE_ELEMENTS) -> int:
    """Return the rows of a slice of tiles ``width`` wide: as chosen, or as many as make ``elements``."""
    return chosen or max(1, elements // width)


def slice_elements(chosen: int | None, share: int, width: int, elements: int = SLICE_ELEMENTS) -> int:
    """Return the elements of a slice of :func:`slice_rows`, at most a vector core's ``share`` of rows."""
    return min(slice_rows(chosen, width, elements), share) * width


def default_plan(frame: Frame, stage: Stage, group: AscendGroup) -> ProductPlan:
    """Return how a product runs where the tiling does not say.

    N along the loop's axis (Q K^T): A is held for the whole block, B comes panel by panel.  Contraction
    along the loop's axis (P V): both piece by piece.  No loop: both whole where L1 holds them (M K),
    else they stream through it, loaded by :func:`loaded_k`, in pieces of what L0 holds in ping-pong (a GEMM).
    """
    phase, edge = frame.phase, group.edge
    (row,) = stage.rows
    (m_axis, k_axis), n_axis = phase.names[row.srcs[0]].axes, phase.names[row.dst].axes[1]
    m, n, k = (min(edge, phase.sizes[a]) for a in (m_axis, n_axis, k_axis))
    if n_axis == phase.loop_axis:
        return ProductPlan(m, n, k, "held", "panel", panels_outside=True, left_depth=1)
    if k_axis == phase.loop_axis:
        return ProductPlan(m, n, k, "piece", "piece")
    left, right = (frame.size_bytes(x, prod(phase.sizes[a] for a in frame.axes(x))) for x in row.srcs)
    if left + PING_PONG * right <= group.capacity_bytes("L1"):
        return ProductPlan(m, n, k, "whole", "whole", left_depth=1)
    m, n = phase.sizes[m_axis], phase.sizes[n_axis]
    rows = min(
        group.capacity_bytes(a) // PING_PONG // frame.size_bytes(x, size)
        for a, x, size in (("L0A", row.srcs[0], m), ("L0B", row.srcs[1], n))
    )
    piece = max(1, rows // group.fractal) * group.fractal
    load = loaded_k(m, n, piece, phase.names[row.srcs[0]].fmt, group)
    return ProductPlan(m, n, piece, "piece", "piece", loops_over_k=True, load=load)


#: Whose published kernel is taken.
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
        json_schema_extra=lightest("least"),
    )
    deal: BlockOrder = Field(
        default="round_robin",
        description="blocks to cores: in turn, longest first, or a persistent kernel's list",
        json_schema_extra=lightest("any"),
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
        default=None,
        ge=1,
        description="tiles that cores hand one another at a time; default: the kernel's",
        json_schema_extra=lightest("most"),
    )
    running: Literal["core", "gm"] = Field(
        default="core", description="where O stays between tiles: on the core, or in global memory: larger blocks fit"
    )
