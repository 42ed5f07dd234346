"""What a node's operations carry: kernels with work, collectives with bytes.

A node program is a tile program whose core groups are devices.  Its operations have no steps: a
:class:`KernelOp` stands for a whole program of one device, a :class:`CollectiveOp` for one rank's
part in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from npusim.ir.op import TileOp

if TYPE_CHECKING:
    from npusim.config.problem import GemmProblem, Problem, RowsProblem
    from npusim.node.collective import Algorithm, Kind
    from npusim.timing.result import Approximation

#: What a kernel is to a layer: its parts in the table of a run, and in the node file's table of times.
KernelRole = Literal["attention", "decode", "linear", "rows"]


@dataclass(frozen=True, slots=True)
class Child:
    """One program of one device inside a kernel: a schedule, its problem, and its precision as text."""

    schedule: str
    problem: Problem | GemmProblem | RowsProblem
    precision: str = ""


@dataclass(frozen=True, slots=True)
class NodeKernel:
    """Children that run one after the other; with ``is_fused`` in the launch of the kernel before."""

    role: KernelRole
    children: tuple[Child, ...]
    is_fused: bool = False
    name: str = ""

    @property
    def label(self) -> str:
        """What a table calls it: its part of the layer, or its role."""
        return self.name or self.role


@dataclass(frozen=True, slots=True)
class Waves:
    """A kernel as equal blocks on cores: ``resident`` share a core, a block alone takes ``block_fs``.

    Blocks are not pre-empted: a core given away is given away until its blocks are done.
    """

    block_count: int
    block_fs: int
    resident: int
    core_count: int


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A kernel's time alone and what it uses of each shared resource, 0 to 1 of the device.

    ``launch_fs`` passes on the device before any work, ``issue_fs`` on the host.  ``demand`` names
    resources as claims do: kinds of core, ``hbm``.  With ``waves`` the cores are given away whole.
    ``terms`` are the constants behind the time and their shares of it, ``methods`` how it was found,
    ``approximation`` how far they are from exact; ``bound_fs`` is the least time of the work.
    """

    alone_fs: int
    launch_fs: int
    issue_fs: int
    demand: tuple[tuple[str, float], ...] = ()
    waves: Waves | None = None
    terms: tuple[tuple[str, float], ...] = ()
    methods: tuple[str, ...] = ()
    approximation: Approximation | None = None
    bound_fs: int = 0

    @property
    def whole_fs(self) -> int:
        """Return the time of a call by itself."""
        return self.issue_fs + self.launch_fs + self.alone_fs


#: Gives a kernel's work: ``run_node`` makes one from ``npusim.timing.METHODS`` or a node's table.
KernelTimer = Callable[[NodeKernel], KernelWork]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective over all ranks: what, how, by whom, and how many bytes each rank holds.

    With several ``servers`` each rank also meets its counterparts in the others, between the
    reduce-scatter and the all-gather within a server.
    """

    kind: Kind
    algorithm: Algorithm
    driver: str
    size_bytes: int
    #: The host joins two streams by events before it.
    is_overlapped: bool = False
    servers: int = 1
    #: What no transfer cuts apart.
    element_bytes: int = 1


@dataclass(slots=True)
class KernelOp(TileOp):
    """A launch in a queue of a device, for ``rows`` rows from ``row`` over batch and sequence."""

    kernel: NodeKernel = field(default=NodeKernel("linear", ()))
    row: int = 0
    rows: int = 0


@dataclass(slots=True)
class CollectiveOp(TileOp):
    """A rank's part in a collective over the partial sums of ``rows`` rows from ``row``."""

    call: CollectiveCall = field(default=CollectiveCall("allreduce", "mesh", "", 1))
    row: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class CopyCall:
    """Bytes over one device's host link; ``is_bulk``: keys and values of a layer, not a few rows."""

    way: Literal["up", "down"]
    size_bytes: int
    is_bulk: bool = False


@dataclass(frozen=True, slots=True)
class HostCall:
    """One device's share of attention on the host: what is computed, and what it reads from DRAM."""

    child: Child
    size_bytes: int
    elements: int


@dataclass(slots=True)
class CopyOp(TileOp):
    """A copy between host and device, beside what the device computes."""

    call: CopyCall = field(kw_only=True)


@dataclass(slots=True)
class HostOp(TileOp):
    """A rank's heads on the host's cores."""

    call: HostCall = field(kw_only=True)


def progress_rate(demand: tuple[tuple[str, float], ...], claims: dict[str, float]) -> float:
    """Return the rate, 0 to 1, of work that uses ``demand`` while others hold ``claims``.

    What is left of a resource serves the work at ``left / demand`` of its own speed, and the
    scarcest decides.  Something is always left: 1 % of a resource claimed whole.
    """
    # Model: linear in what is left; a pipeline that hides latency with cores taken away loses more.
    least = 0.01  # source: ours, so that work claimed to a stop still ends
    rates = [max(least, 1.0 - claims.get(name, 0.0)) / used for name, used in demand if used > 0.0]
    return min([1.0, *rates])
