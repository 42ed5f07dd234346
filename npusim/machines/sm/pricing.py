"""What operations of warps cost on a multiprocessor, which one of its shared pipes executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.engine import DmaEngine
from npusim.ir.cost import Cost
from npusim.machines.moves import Moves
from npusim.machines.sm.warp_cost import warp_cost

if TYPE_CHECKING:
    from npusim.ir.op import TileOp


class SmPricing(Moves):
    """Costs of a program's operations on one GPU."""

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation: of its one move, or of a warp's instructions."""
        core = self.queues[op.queue].core
        spec = self.device.engine(core, op.engine)
        if not isinstance(spec, DmaEngine):
            return Cost(*warp_cost(op, self.device, core))
        (step,) = op.steps
        moved = self.move(step, spec, f"cores.{core}.engines.{op.engine}")
        return moved._replace(pipe_cycles=((f"{core}.{op.engine}", moved.occupancy_cycles),))
