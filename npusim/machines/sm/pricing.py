"""What operations of warps cost on a multiprocessor, which one of its shared pipes executes."""

from __future__ import annotations

from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from npusim.config.engine import DmaEngine
from npusim.ir.program import Cost
from npusim.ir.tile import GlobalTile
from npusim.machines.sm.core import SM, warp_issue
from npusim.machines.sm.group_cost import GroupModel
from npusim.machines.sm.lane_cost import LaneModel
from npusim.machines.transfers import Transfers

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.engine import RouteSpec
    from npusim.ir.op import Step, TileOp
    from npusim.ir.program import TileProgram


class SmPricing(Transfers):
    """Costs of a program's operations on one GPU."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self.sharing = warp_issue(device).sharing
        self._cold = cold_reads(program, self.sharing.new_head_factor.value)

    @cached_property
    def _groups(self) -> GroupModel:
        return GroupModel(self.device)

    @cached_property
    def _lanes(self) -> LaneModel:
        return LaneModel(self.device)

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation: of its one move, or of a warp's instructions."""
        if op.group is not None:
            return self._groups.cost(op)
        spec = self.device.engine(SM, op.engine)
        if not isinstance(spec, DmaEngine):
            return self._lanes.cost(op)
        (step,) = op.steps
        moved = self.move(step, spec, f"cores.{SM}.engines.{op.engine}")
        latency = moved.latency_cycles  # the last of many accesses waits for less than the first
        latency = max(ceil(latency * self.sharing.arrival_factor.value), latency - moved.occupancy_cycles)
        pipes = ((f"{SM}.{op.engine}", moved.occupancy_cycles),)
        return moved._replace(latency_cycles=latency, pipe_cycles=pipes)

    def _miss_share(self, tensor: str) -> float:
        return self._cold.get(tensor, 0.0)

    def _links(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        """Return the bytes on each link: those of L2 count for less where many cores read them together."""
        sizes, source, l2 = super()._links(step, route), step.srcs[0], self.device.memory.l2
        if l2.same_data_factor is None or l2.same_data_cores_count is None or not isinstance(source, GlobalTile):
            return sizes
        readers = self.residency.shared_reads[source.tensor.name] * (self.device.group_count.value - 1)
        share = min(1.0, readers / l2.same_data_cores_count.value)
        factor = 1 - share + share / l2.same_data_factor.value
        return tuple((link, ceil(n * factor) if link == "l2" else n) for link, n in sizes)


def cold_reads(program: TileProgram, new_head: float) -> dict[str, float]:
    """Return the share of each tensor's loads that wait for memory beyond L2, averaged over blocks.

    Blocks that share a head run in step, so that a miss of the first is everybody's: all of the first
    wave wait, later blocks by ``new_head`` if their head is read for the first time (hopper.md section 3.5).
    """
    shares: dict[str, float] = {}
    written: set[str] = set()
    for phase in program.phases:
        touched = {t.region.tensor.name: t.region.tensor for t in phase.footprint(phase.blocks[:1])}
        heads = max((t.heads for t in touched.values()), default=1)
        places = max((b.place for b in phase.blocks), default=0) + 1
        first = places * max(1, len(phase.dealt))
        for name, tensor in touched.items():
            if name in shares:
                continue
            share = heads // tensor.heads
            read = [(block.batch, block.head // share) for block in phase.blocks]
            waits = min(first, len(read)) + new_head * (len(set(read)) - len(set(read[:first])))
            shares[name] = 0.0 if name in written else waits / len(read)
        written |= set(touched)
    return shares
