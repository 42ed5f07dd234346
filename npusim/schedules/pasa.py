"""PASA: online pseudo-average shifting attention, all in float16 (PASA, Algorithm 1).

Phase one multiplies every block of keys by the shifting matrix M; phase two is FlashAttention's
loop over the shifted keys, with steps that undo the shift exactly.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.cells import Deal
from npusim.algorithms.pasa import PasaPrecision
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.machines.ascend import AscendMachine, AscendTiling
from npusim.machines.sm import SmMachine
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.fields import GroupFields, left_alone
from npusim.machines.sm.groups import group_tiling
from npusim.schedules.attention import ascend_tiling
from npusim.schedules.pasa_lanes import NO_LANES, in_lanes
from npusim.schedules.pasa_phases import pasa_phases
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram


class PasaTiling(Tiling):
    """Tiling fields and options of PASA; ``block_kv`` is also the block whose mean is shifted away."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(
        default=256,
        ge=16,
        le=256,
        multiple_of=16,
        description="keys of a block; PASA 2.1: 256 at most",
    )
    vector_rows: int | None = Field(
        default=None,
        ge=1,
        description="rows of a softmax slice on an AIV; default: 8192 elements a slice",
    )
    depth: int = Field(
        default=2, ge=0, le=14, description="tiles that Q K'^T and softmax run ahead of P V"
    )
    deal: Deal = Field(
        default="round_robin", description="blocks to cores: as vendor kernels do, or longest first"
    )
    # PASA Table 3: the optimum next to 0.984375 for blocks of 128.
    beta: float = Field(
        default=0.984497, ge=0, description="fraction of the block's mean taken from K; not 1"
    )
    optimise: bool = Field(
        default=False,
        description="move beta to the optimum next to it, M rounded as the inputs are (equations 20, 21)",
    )
    correction: Literal["rounded", "ideal"] = Field(
        default="rounded", description="Inva from the float16 entries of M, or beta / (1 - beta)"
    )
    scale_in: Literal["matrix", "queries", "scores"] = Field(
        default="matrix",
        description="where 1/sqrt(d) goes: into M, onto Q before the products, or onto S' after its store",
    )


class GpuPasaTiling(GroupFields, PasaTiling):
    """The same on a GPU, with fewer rows: every tile of a block sits in one multiprocessor's registers."""

    block_q: int = Field(default=64, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(
        default=128,
        ge=16,
        le=256,
        multiple_of=16,
        description="keys of a block; PASA 2.1: 256 at most",
    )


PRECISIONS = MappingProxyType(
    {
        "fp16_mean": PasaPrecision("fp16_mean"),
        "fp32_mean": PasaPrecision("fp32_mean", mean="float32"),
        "fixed_reference": PasaPrecision("fixed_reference", is_fixed_reference=True),
        # For checking the algorithm only: nothing is rounded but by float64.
        "float64": PasaPrecision(
            "float64",
            shifted="float64",
            scores="float64",
            vector="float64",
            mean="float64",
            operand="float64",
            product="float64",
            output="float64",
            arithmetic="ieee.f64",
        ),
    }
)
#: The golden kernel of an H200 adds up a row as a tree of halves (golden/README.md).
GPU_PRECISIONS = MappingProxyType(
    {name: replace(p, sum_order="tree_halves") for name, p in PRECISIONS.items()}
)


def build_on_ascend(
    problem: Problem, tiling: PasaTiling, device: DeviceSpec, precision: PasaPrecision
) -> TileProgram:
    """Return PASA of ``problem`` as a tile program for one Ascend device."""
    (*before, attention), notes = pasa_phases(problem, tiling, precision, device.group_count.value)
    machine = AscendMachine(device)
    fields = ascend_tiling(machine, (tiling.block_q, tiling.block_kv), tiling.vector_rows, tiling.depth)
    phases = [*((phase, AscendTiling()) for phase in before), (attention, fields)]
    return machine.build("pasa", phases, problem.flops(), notes)


def build_on_gpu(
    problem: Problem, tiling: GpuPasaTiling, device: DeviceSpec, precision: PasaPrecision
) -> TileProgram:
    """Return PASA of ``problem`` as a tile program for one GPU: for its values alone, or with warps."""
    if works_beside(device):
        phases, notes = pasa_phases(problem, tiling, precision, device.group_count.value)
        built = [(phase, *group_tiling("pasa", phase, tiling, device)) for phase in phases]
        said = (*(room for *_, room in built if room), *notes)
        return SmMachine(device).build("pasa", [(ph, fields) for ph, fields, _ in built], problem.flops(), said)
    if device.is_timed and tiling.scale_in == "queries":
        raise TilingError(f"scale_in=queries: {device.name} has no kernel that only scales; take matrix or scores")
    before_it, attention, said = in_lanes(problem, tiling, device, precision) if device.is_timed else NO_LANES
    (*before, last), notes = pasa_phases(problem, tiling, precision, device.group_count.value)
    placed = [*((phase, before_it) for phase in before), (last, attention)]
    return SmMachine(device).build("pasa", placed, problem.flops(), (*said, *notes))


SUMMARY = "PASA: keys shifted by their block's pseudo-average, all float16"
ASCEND = Schedule(
    name="pasa", family="ascend", summary=SUMMARY, tiling=PasaTiling, precisions=PRECISIONS,
    default_precision="fp16_mean", build=build_on_ascend,
    beside=tuple(name for name in PRECISIONS if name != "float64"),
)  # fmt: skip
GPU = replace(
    ASCEND, family="nvidia", tiling=GpuPasaTiling, precisions=GPU_PRECISIONS, build=build_on_gpu,
    left=lambda device: left_alone(device) | {"vector_rows", "depth", "deal"},
)  # fmt: skip
SCHEDULES = (ASCEND, GPU)
