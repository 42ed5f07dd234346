"""What an operation costs, as plain data, and who says so: `timing` asks a program's own pricing.

Costs are rounded to whole cycles once, where they are made (`npusim.machines`); `timing` adds them up
and knows neither opcodes nor core families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from npusim.ir.op import TileOp
    from npusim.ir.residency import Residency

#: Shares of some cycles by the constant behind each, its key in the device file.
Terms = tuple[tuple[str, float], ...]


class Share(NamedTuple):
    """Work that a warp group does beside the others of its core, each kind of work at one speed.

    ``is_product``: for the tensor cores, else arithmetic.  Alone it takes ``cycles``, of which the other
    numbers are the parts that it keeps busy, in 2^-20: issue slots, the pipe of comparisons and
    conversions, that of special functions, the tensor cores, shared memory.
    """

    is_product: bool
    cycles: int
    issue: int = 0
    compare: int = 0
    special: int = 0
    tensor: int = 0
    memory: int = 0


class Cost(NamedTuple):
    """Cost of a step or of an entry of an instruction queue.

    ``occupancy_cycles`` the engine is busy; results are there ``latency_cycles`` after that.
    ``link_bytes`` cross shared links, which may stretch the occupancy.  ``terms`` names the
    constant behind each share of the cycles, by its key in the device file.  ``pipe_cycles`` are those
    that pipes shared by several queues are busy: an operation begins when all of them are free.  One
    with a ``share`` waits for none: its warps work beside others, and the occupancy begins when they are through.
    """

    occupancy_cycles: int
    latency_cycles: int = 0
    link_bytes: tuple[tuple[str, int], ...] = ()
    terms: Terms = ()
    pipe_cycles: tuple[tuple[str, int], ...] = ()
    share: Share | None = None


class Pricing(Protocol):
    """Costs of a program's operations on one device."""

    #: How many of the other core groups work beside one, by phase: what costs of a tile handed on hang on.
    crowds: dict[str, float]

    @property
    def residency(self) -> Residency:
        """Which share of each tensor's bytes comes from beyond L2."""

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; raise `UnknownOpcodeError` for one that has none."""
