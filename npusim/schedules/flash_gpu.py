"""FlashAttention-2 on multiprocessors: with warps whose lanes are described, beside one another, or values alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.cells import masked_throughout
from npusim.algorithms.precision import for_inputs
from npusim.errors import TilingError
from npusim.machines.sm import SmMachine, SmTiling
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.fields import GROUPS
from npusim.machines.sm.fit import fitted, lanes_of
from npusim.machines.sm.groups import group_tiling, plain_tiling
from npusim.schedules.attention import flash_phase

if TYPE_CHECKING:
    from npusim.algorithms.flash import FlashPrecision
    from npusim.algorithms.phase import Phase
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.machines.sm.fields import SmFields
    from npusim.schedules.attention import Made, Make

EXPONENTIAL = "bits of the hardware's EX2 are not public: powers of two are taken as correctly rounded"
#: Keys of a step where the device's file says nothing of registers.
GPU_KEYS = 64


def build_on_gpu(
    problem: Problem, tiling: SmFields, device: DeviceSpec, precision: FlashPrecision, name: str = "flash",
    make: Make | None = None,
) -> TileProgram:  # fmt: skip
    """Return FlashAttention-2 of ``problem`` as a tile program for one GPU: for its values alone, or with warps."""
    p = for_inputs(precision, problem.dtype)
    if works_beside(device):
        return build_with_groups(problem, tiling, device, p, name, make)
    if device.is_timed:
        return build_with_warps(problem, tiling, device, p, name, make)
    tiling.check_no_lanes(device.name)
    sizes = tiling.block_q, tiling.block_kv or GPU_KEYS
    phases, notes = _made(problem, sizes, p, device, make)
    return SmMachine(device).build(name, [(ph, SmTiling()) for ph in phases], problem.flops(), notes)


def _made(
    problem: Problem, sizes: tuple[int, int], p: FlashPrecision, device: DeviceSpec, make: Make | None
) -> Made:
    """Return the phases, on as many places as multiprocessors.

    Residents share one: more of them are no more places where work goes on at full speed.
    """
    return make(problem, sizes, p, device.group_count.value) if make else ((flash_phase(problem, sizes, p),), ())


def build_with_warps(
    problem: Problem, tiling: SmFields, device: DeviceSpec, precision: FlashPrecision, name: str,
    make: Make | None = None,
) -> TileProgram:  # fmt: skip
    """Return the program with its tiles in the lanes of warps; fields left open are the largest that fit."""
    tiling, found = fitted(problem, tiling, device, precision)
    if tiling.residents and tiling.residents > found.blocks:
        raise TilingError(f"residents: {tiling.residents} blocks, but {found}")
    sizes = tiling.block_q, tiling.keys
    lanes = lanes_of(tiling, precision, problem)
    fields = replace(lanes, residents=tiling.residents or found.blocks)
    (first, *rest), said = _made(problem, sizes, precision, device, make)
    where = "registers" if lanes.holds_in_registers else "shared memory"
    quads = "" if tiling.arrangement == "4x1" else f" by {tiling.arrangement}"
    notes = (f"{found}; tiles of {sizes[0]} x {sizes[1]}{quads}, Q in {where}", EXPONENTIAL, *said)
    phases = [(phase, fields) for phase in (_ordered(first, tiling), *rest)]
    return SmMachine(device).build(name, phases, problem.flops(), notes)


def build_with_groups(
    problem: Problem, tiling: SmFields, device: DeviceSpec, precision: FlashPrecision, name: str,
    make: Make | None = None,
) -> TileProgram:  # fmt: skip
    """Return the program where warp groups work beside one another: a compiler's kernel, or a library's."""
    tiling.check_no_lanes(device.name, GROUPS)
    sizes = tiling.block_q, tiling.block_kv or GPU_KEYS
    (first, *rest), said = _made(problem, sizes, precision, device, make)
    fields, room = group_tiling(name, first, tiling, device)
    if tiling.stages and problem.causal:  # a compiled loop masks every tile
        first = replace(first, cells=tuple(map(masked_throughout, first.cells)))
    phases = [(_ordered(first, tiling), fields), *((phase, plain_tiling(device)) for phase in rest)]
    return SmMachine(device).build(name, phases, problem.flops(), (room, EXPONENTIAL, *said))


def _ordered(phase: Phase, tiling: SmFields) -> Phase:
    """Return the phase with its blocks in the order of the launch."""
    if tiling.launch == "in_order":
        return phase
    return replace(phase, cells=tuple(sorted(phase.cells, key=lambda c: c.first - c.last)))
