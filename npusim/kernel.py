"""The public surface for schedules of one's own: what a file needs, and nothing else of npusim.

A schedule is an algorithm (phases of named stages over names, `Phase`) and a few fields of tiling; a
machine runs it on a core family.  ``npusim run my_file.py:NAME`` takes what :func:`schedule` returns;
the README has a worked example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.algorithms import flash as _flash
from npusim.algorithms.cells import (
    MASKED,
    attention_cells,
    dealt,
    grid,
    kv_runs,
    with_columns,
)
from npusim.algorithms.flash import (
    FlashPrecision,
    attention_phase,
    exponent_factor,
    flash,
    flash_names,
)
from npusim.algorithms.phase import (
    Cell,
    Loop,
    Mask,
    Name,
    Phase,
    Run,
    Stacked,
    Visit,
    name,
    nothing_per_tile,
)
from npusim.algorithms.precision import for_inputs
from npusim.algorithms.split import SplitPrecision, split_kv, tiles_of
from npusim.algorithms.table import Row, Stage, choose, product, row
from npusim.algorithms.tensors import AttentionTensors, attention_tensors
from npusim.algorithms.tiling_mask import TilingMask
from npusim.config.device import FAMILIES, MACHINES
from npusim.config.installed import installed
from npusim.config.kernels import CopyProblem, GemmProblem
from npusim.config.problem import Problem
from npusim.config.tiling import Field, Tiling
from npusim.errors import ProgramError, SpecError, TilingError
from npusim.ir.op import Attributes, Opcode
from npusim.ir.opaque import varying
from npusim.ir.tile import GlobalTensor, GlobalTile
from npusim.machines.ascend import AscendMachine, AscendTiling, ProductPlan, slice_elements
from npusim.machines.sm import SmMachine, SmTiling
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.fields import GroupFields
from npusim.machines.sm.groups import group_tiling
from npusim.numerics.reference import attention_scores
from npusim.schedules import plugins
from npusim.schedules.attention import causal_mask
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.model import SpecModel
    from npusim.ir.program import TileProgram
    from npusim.schedules.precision import Precision

__all__ = [
    "FLASH", "MASKED", "AscendTiling", "AttentionTensors", "AttentionTiling", "Attributes", "Cell", "CopyProblem",
    "Field", "FlashPrecision", "GemmProblem", "GlobalTensor", "GlobalTile", "Loop", "Mask", "Name", "Opcode",
    "Phase", "Problem", "ProductPlan", "ProgramError", "Row", "Run", "Schedule", "SplitPrecision", "Stacked",
    "Stage", "Tiling", "TilingError", "TilingMask", "Visit", "attention_cells", "attention_phase",
    "attention_scores", "attention_tensors", "causal_mask", "choose", "dealt", "exponent_factor", "flash",
    "flash_names", "for_inputs", "grid", "kv_runs", "name", "product", "replace", "row", "schedule", "split_kv",
    "tiles_of", "varying", "with_columns",
]  # fmt: skip

#: The stages of FlashAttention-2 by name, to change one of them: ``FLASH["softmax"].rows``.
FLASH: Mapping[str, Stage] = MappingProxyType(
    {
        s.name: s
        for s in (_flash.SCORES, _flash.SOFTMAX, *_flash.UPDATES["fresh"], _flash.FINISH)
    }
)
#: One phase, or a phase with the tiling of an Ascend device where the fields do not say all.
Phases = Sequence["Phase | tuple[Phase, AscendTiling]"]


class AttentionTiling(Tiling):
    """Tiling fields that the machines know what to do with."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=128, ge=16, multiple_of=16, description="keys of a tile")
    vector_rows: int | None = Field(
        default=None, ge=1, description="rows of a slice on an AIV; default: 8192 elements a slice"
    )
    depth: int = Field(
        default=2, ge=0, le=14, description="tiles that stages run ahead of a product that reads rows"
    )


def schedule(
    called: str, phases: Callable[[Any, Any, Any], Phases], *, precisions: Sequence[Precision],
    tiling: type[Tiling] = AttentionTiling, problem: type[SpecModel] = Problem, summary: str = "",
    families: Sequence[str] = (), reference: Callable[..., Any] | None = None,
) -> tuple[Schedule, ...]:  # fmt: skip
    """Return a schedule for each core family, ready for ``npusim run FILE.py:NAME``.

    called
        Its name in results.
    phases
        ``phases(problem, tiling, precision)`` returns the phases in order; a kernel's results have the
        role ``output`` in their tensors, what one phase leaves for another ``workspace``.
    precisions
        Presets, frozen dataclasses with ``name`` and ``formats()``; the first is the default.
    tiling
        The fields; ``vector_rows`` and ``depth`` mean on Ascend what :class:`AttentionTiling` says.
    problem
        What it computes: `Problem`, `GemmProblem` or `CopyProblem`.
    families
        Core families it is for; none: all there are, those that installed packages bring too. The machine of one
        of these is given the tiling.
    reference
        ``reference(q, k, v, problem, row)`` returns what it computes, (rows, dv), in float64: errors are against it.
        q (rows, d) are a head's queries from ``row`` on, k (keys, d) and v (keys, dv) all of its keys, float64;
        `attention_scores` gives their scores, scaled and masked.  None: softmax(QK^T)V.
    """
    presets = MappingProxyType({p.name: p for p in precisions})
    if not presets:
        raise SpecError(f"schedule {called}: it needs at least one precision")
    return tuple(
        Schedule(
            name=called, family=family, summary=summary, tiling=tiling, precisions=presets,
            default_precision=precisions[0].name, build=partial(_build, called, phases), problem=problem,
            origin=plugins.origin_of(phases), reference=reference,
        )
        for family in families or (*FAMILIES, *installed(MACHINES))
    )  # fmt: skip


def _build(
    called: str, phases: Callable[[Any, Any, Any], Phases], problem: Any, tiling: Any, device: DeviceSpec,
    precision: Any,
) -> TileProgram:  # fmt: skip
    made = [p if isinstance(p, tuple) else (p, None) for p in phases(problem, tiling, precision)]
    if getattr(precision, "exp_variant", "").startswith("exp2."):
        natural = phases(problem, tiling, replace(precision, exp_variant="exp.correct"))
        _refuse_powers_of_two(called, precision.exp_variant, [p for p, _ in made], natural)
    listed = [(_as_chosen(called, p, precision), given) for p, given in made]
    if device.family not in FAMILIES:
        return plugins.machine(device.family)(device).build(called, [(p, tiling) for p, _ in listed], problem.flops())
    if works_beside(device):
        built = [(p, *group_tiling(called, p, GroupFields(stages=None), device)) for p, _ in listed]
        said = tuple(room for *_, room in built if room)
        return SmMachine(device).build(called, [(p, fields) for p, fields, _ in built], problem.flops(), said)
    if device.family != "ascend":
        return SmMachine(device).build(called, [(p, SmTiling()) for p, _ in listed], problem.flops())
    machine = AscendMachine(device)
    fields = [(p, given or _on_ascend(machine, p, tiling)) for p, given in listed]
    return machine.build(called, fields, problem.flops())


def _refuse_powers_of_two(called: str, variant: str, made: Sequence[Phase], natural: Phases) -> None:
    """Raise `SpecError` where powers of two take what e is raised to: nothing but the exponential differs."""
    plain = [p[0] if isinstance(p, tuple) else p for p in natural]
    if any(r.opcode is Opcode.EXP for p in made for s in p.stages for r in s.rows) and all(
        a.constants == b.constants and a.per_tile is b.per_tile is nothing_per_tile and _shape(a) == _shape(b)
        for a, b in zip(made, plain, strict=True)
    ):
        raise SpecError(
            f"schedule {called}: exp_variant={variant} computes 2^x, and its scores are not times log2 e; "
            "multiply a constant by exponent_factor(precision.exp_variant)"
        )


def _shape(phase: Phase) -> list[tuple[Opcode, str, tuple[str, ...]]]:
    return [(r.opcode, r.dst, r.srcs) for s in phase.stages for r in s.rows]


def _as_chosen(called: str, phase: Phase, precision: Any) -> Phase:
    """Return a phase without names that no row uses, with the precision's named choices where it makes none.

    Raises `SpecError` for products whose arithmetic is another than the one asked for.
    """
    used = {*phase.tensors, *phase.masks, *(n for s in phase.stages for n in (*s.read, *s.written))}
    names = {n: what for n, what in phase.names.items() if n in used}
    names = {n: what if what.over in names else replace(what, over="") for n, what in names.items()}
    wanted = getattr(precision, "arithmetic", "")
    if wanted and phase.arithmetic not in ("", wanted) and any(s.is_product for s in phase.stages):
        raise SpecError(
            f"schedule {called}: arithmetic {wanted} is asked for, but its phase {phase.name} says "
            f"{phase.arithmetic}; leave it out there"
        )
    choices = {
        Opcode.EXP: Attributes(variant=getattr(precision, "exp_variant", "")),
        Opcode.ROW_SUM: Attributes(order=getattr(precision, "sum_order", "")),
    }

    def chosen(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        tables = [choose(s.rows, choices) for s in stages]
        return tuple(s if s.rows == t else replace(s, rows=t) for s, t in zip(stages, tables, strict=True))

    return replace(
        phase, names=names, arithmetic=phase.arithmetic or wanted, finish=chosen(phase.finish),
        loops=tuple(replace(loop, stages=chosen(loop.stages)) for loop in phase.loops),
    )  # fmt: skip


def _on_ascend(machine: AscendMachine, phase: Phase, tiling: Any) -> AscendTiling:
    """Return what an Ascend device needs of the fields."""
    ahead = getattr(tiling, "depth", 1)
    if not phase.loop_axis or not any(s.is_product for s in phase.stages):
        return AscendTiling(ahead=ahead)
    share = machine.group.largest_share(phase.sizes[phase.row_axis])
    width = phase.sizes[phase.loop_axis]
    return AscendTiling(elements=slice_elements(getattr(tiling, "vector_rows", None), share, width), ahead=ahead)
