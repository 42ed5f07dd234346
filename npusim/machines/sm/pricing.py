"""What operations of warps cost on a multiprocessor, which one of its shared pipes executes."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from npusim.config.engine import DmaEngine, WarpIssue
from npusim.ir.program import Cost
from npusim.ir.tile import GlobalTile
from npusim.machines.sm.group_cost import GroupModel
from npusim.machines.sm.plan import SM, WARPS
from npusim.machines.sm.warp_cost import warp_cost
from npusim.machines.transfers import Transfers

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.engine import RouteSpec
    from npusim.ir.op import Source, Step, TileOp
    from npusim.ir.program import TileProgram


class SmPricing(Transfers):
    """Costs of a program's operations on one GPU."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self._models: dict[str, GroupModel] = {}
        issue = device.core(SM).engines.get(WARPS)
        self.sharing = issue.sharing if isinstance(issue, WarpIssue) else None
        self._cold = {} if self.sharing is None else cold_reads(program, self.sharing.new_head_factor.value)

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation: of its one move, or of a warp's instructions."""
        core = self.queues[op.queue].core
        if op.group is not None:
            if core not in self._models:
                self._models[core] = GroupModel(self.device, core)
            return self._models[core].cost(op)
        spec = self.device.engine(core, op.engine)
        if not isinstance(spec, DmaEngine):
            return Cost(*warp_cost(op, self.device, core))
        (step,) = op.steps
        moved = self.move(step, spec, f"cores.{core}.engines.{op.engine}")
        latency = moved.latency_cycles
        if self.sharing is not None:  # the last of many accesses waits for less than the first
            latency = max(ceil(latency * self.sharing.arrival_factor.value), latency - moved.occupancy_cycles)
        pipes = ((f"{core}.{op.engine}", moved.occupancy_cycles),)
        return moved._replace(latency_cycles=latency, pipe_cycles=pipes)

    def _miss_latency(self, source: Source) -> int:
        if self.sharing is None or not isinstance(source, GlobalTile):
            return super()._miss_latency(source)
        extra = self.device.memory.l2.miss_extra_latency_cycles.value
        return ceil(self._cold.get(source.tensor.name, 0.0) * extra)

    def _links(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        """Return the bytes on each link: those of L2 count for less where many cores read them together."""
        found, source, l2 = super()._links(step, route), step.srcs[0], self.device.memory.l2
        if l2.same_data_factor is None or l2.same_data_cores_count is None or not isinstance(source, GlobalTile):
            return found
        readers = self.residency.shared_reads[source.tensor.name] * (self.device.group_count.value - 1)
        share = min(1.0, readers / l2.same_data_cores_count.value)
        factor = 1 - share + share / l2.same_data_factor.value
        return tuple((link, ceil(n * factor) if link == "l2" else n) for link, n in found)


def cold_reads(program: TileProgram, new_head: float) -> dict[str, float]:
    """Return the share of each tensor's loads that wait for memory beyond L2, averaged over blocks.

    Blocks that share a head run in step, so that a miss of the first is everybody's: all of the first
    wave wait, later blocks by ``new_head`` if their head is read for the first time (hopper.md section 3.5).
    """
    found: dict[str, float] = {}
    written: set[str] = set()
    for phase in program.phases:
        touched = {t.region.tensor.name: t.region.tensor for t in phase.touches(phase.blocks[:1])}
        heads = max(t.heads for t in touched.values())
        places = max((b.place for b in phase.blocks), default=0) + 1
        first = places * max(1, len(phase.dealt))
        for name, tensor in touched.items():
            if name in found:
                continue
            share, seen = heads // tensor.heads, set[tuple[int, int]]()
            waits = 0.0
            for number, block in enumerate(phase.blocks):
                head = block.batch, block.head // share
                waits += 1.0 if number < first else new_head * (head not in seen)
                seen.add(head)
            found[name] = 0.0 if name in written else waits / len(phase.blocks)
        written |= set(touched)
    return found
