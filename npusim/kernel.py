"""The public interface for user-defined schedules; the packaged schedules are written with it too.

An algorithm is a plain function on tiles (:func:`kernel`); :func:`attention` builds a schedule from a kernel of q, k, v
and a mask, :func:`schedule` from any phases.  ``npusim run my_file.py:NAME`` runs the returned schedules;
``npusim help schedule`` has a worked example.
"""

from __future__ import annotations

from npusim.algorithms.blocks import (
    MASKED,
    AttentionTensors,
    attention_cells,
    attention_tensors,
    dealt,
    grid,
    kv_runs,
    with_columns,
)
from npusim.algorithms.flash import FlashPrecision, attend, flash, online_softmax
from npusim.algorithms.language import (
    compare,
    erf,
    exp,
    fma,
    full,
    initial,
    inverse,
    log,
    maximum,
    minimum,
    per_tile,
    rsqrt,
    sqrt,
    tanh,
    tiles,
    where,
)
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import (
    Ends,
    Instruction,
    Mask,
    Name,
    Phase,
    Stacked,
    Stage,
    TileLoop,
    TileRun,
    Visit,
    WorkTile,
    choose,
)
from npusim.algorithms.scores import exponent_factor
from npusim.algorithms.split import SplitPrecision, split_kv, tiles_of
from npusim.algorithms.tiling_mask import TilingMask, mask_of
from npusim.config.family import AS_FAMILY
from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem, Problem
from npusim.config.tiling import Blocks, Field, Tiling, on, part_of
from npusim.errors import ProgramError, TilingError
from npusim.ir.op import Attributes, Opcode
from npusim.ir.tile import GlobalTensor, GlobalTile
from npusim.machines.ascend.plan import AscendTiling, FlashTiling, ProductPlan
from npusim.machines.decisions import AscendDecisions, Charge, GpuDecisions
from npusim.machines.published.kernel import AscendKernel, GpuKernel, KernelUse, layout
from npusim.numerics.reference import attention_scores
from npusim.schedules.define import attention, schedule
from npusim.schedules.registry import Schedule, for_inputs

__all__ = [
    "AS_FAMILY",
    "MASKED",
    "AscendDecisions",
    "AscendKernel",
    "AscendTiling",
    "AttentionTensors",
    "Attributes",
    "Blocks",
    "Charge",
    "CopyProblem",
    "Ends",
    "Field",
    "FlashPrecision",
    "FlashTiling",
    "GemmProblem",
    "GlobalTensor",
    "GlobalTile",
    "GpuDecisions",
    "GpuKernel",
    "Instruction",
    "KernelProblem",
    "KernelUse",
    "Mask",
    "Name",
    "Opcode",
    "Phase",
    "Problem",
    "ProductPlan",
    "ProgramError",
    "Schedule",
    "SplitPrecision",
    "Stacked",
    "Stage",
    "TileLoop",
    "TileRun",
    "Tiling",
    "TilingError",
    "TilingMask",
    "Visit",
    "WorkTile",
    "attend",
    "attention",
    "attention_cells",
    "attention_scores",
    "attention_tensors",
    "choose",
    "compare",
    "dealt",
    "erf",
    "exp",
    "exponent_factor",
    "flash",
    "fma",
    "for_inputs",
    "full",
    "grid",
    "initial",
    "inverse",
    "kernel",
    "kv_runs",
    "layout",
    "log",
    "mask_of",
    "maximum",
    "minimum",
    "on",
    "online_softmax",
    "part_of",
    "per_tile",
    "rsqrt",
    "schedule",
    "split_kv",
    "sqrt",
    "tanh",
    "tiles",
    "tiles_of",
    "where",
    "with_columns",
]
