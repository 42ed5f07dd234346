"""Programs for a GPU: blocks on the places of its multiprocessors.

Several blocks are resident at a time; whenever one ends, its place takes the next block of the launch.
A device without a model of time computes values only, by one warp group.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from npusim.ir.program import Phase as BuiltPhase
from npusim.ir.program import Queue, TileProgram
from npusim.machines.frame import Frame
from npusim.machines.sm.beside import GroupPlace
from npusim.machines.sm.core import SmCore
from npusim.machines.sm.place import SmPlace
from npusim.machines.sm.plan import SM, WARPS
from npusim.machines.sm.pricing import SmPricing
from npusim.machines.touches import once, touches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from npusim.algorithms.phase import Cell, Phase
    from npusim.config.device import DeviceSpec
    from npusim.ir.program import Item
    from npusim.machines.sm.plan import SmTiling

UNTIMED = "this device has no timing model yet: values only"


class SmMachine:
    """The family of streaming multiprocessors on one device, for one program."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def build(
        self, name: str, phases: Iterable[tuple[Phase, SmTiling]], flops: int, notes: tuple[str, ...] = ()
    ) -> TileProgram:
        """Return the program.

        Raises :class:`~npusim.errors.TilingError` (or its ``BufferOverflowError``) where a phase does not
        fit a memory, `SpecError` for a phase without warps on a device that times them.
        """
        listed = list(phases)
        most = max(tiling.residents * tiling.groups for _, tiling in listed)
        core = SmCore(self.device, most * self.device.memory.gm.capacity_bytes.value)
        queues: dict[str, Queue] = {}
        built = []
        for phase, tiling in listed:
            core.check_lanes(name, tiling.lanes)
            core.allocator.start_phase()
            kind = GroupPlace if core.works_beside else SmPlace
            frame = Frame(phase)
            places = [kind(i, frame, core, tiling) for i in range(tiling.residents)]
            core.allocator.check()
            for place in places:
                queues |= {q: Queue(q, SM, WARPS, q) for q in (place.loader, *place.warps)}
            built.append(self._phase(phase, tiling, places))
        return TileProgram(
            name=name, queues=tuple(queues.values()), rings=tuple(core.allocator.rings),
            spaces=dict(core.allocator.spaces), used_bytes=dict(core.allocator.peak_bytes),
            tensors={t.name: t for phase, _ in listed for t in phase.all_tensors()}, phases=tuple(built), flops=flops,
            constants={n: v for phase, _ in listed for n, v in phase.all_values().items()},
            notes=(*(() if self.device.is_timed else (UNTIMED,)), *notes),
            pricing=SmPricing,
        )  # fmt: skip

    def _phase(self, phase: Phase, tiling: SmTiling, places: list[SmPlace]) -> BuiltPhase:
        cells, shares = phase.cells, tuple[tuple[int, ...], ...]()
        if self.device.is_timed:
            cells, shares = dealt_out(phase.cells, self.device.group_count.value, tiling.residents)

        def items(cell: Cell) -> Iterator[Item]:
            return places[cell.place].items(cell)

        return BuiltPhase(
            phase.name, cells, items, _shape, partial(touches, places[0].frame, once), serves=phase.serves,
            dealt=shares, roles=places[0].frame.roles,
        )  # fmt: skip


def dealt_out(
    cells: Sequence[Cell], cores: int, residents: int
) -> tuple[tuple[Cell, ...], tuple[tuple[int, ...], ...]]:
    """Return the cells with their places, and the numbers of each core's cells in order.

    Cells start in the order given, each at the place that is free first (the first place of every
    core before any second one), as the hardware's dispatcher does it.  How long a cell takes is
    estimated: one unit a tile, and one for its start and end.
    """
    free = [(0, place, core) for place in range(residents) for core in range(cores)]
    found: list[Cell] = []
    shares: list[list[int]] = [[] for _ in range(cores)]
    for number, cell in enumerate(cells):
        work, place, core = free[0]
        tiles = sum(run.count for run in cell.runs)
        heapq.heapreplace(free, (work + tiles + 1, place, core))
        shares[core].append(number)
        found.append(replace(cell, place=place))
    return tuple(found), tuple(tuple(share) for share in shares)


def _shape(cell: Cell) -> object:
    return cell.shape
