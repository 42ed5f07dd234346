"""The tile program: phases of blocks, each a sequence of operations and loops in program order.

Program order is itself a legal order of execution: ``numerics`` walks it and computes values. ``timing`` distributes
the same operations to queues, and obeys only queues, engines, flags and links.

Costs are plain data: `timing` receives them from the program's own pricing and adds them up; it knows neither opcodes
nor core families. Costs are rounded to whole cycles once, where they are computed (`npusim.machines`).
"""

from __future__ import annotations

from dataclasses import field
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from npusim.late_methods import dataclass
from npusim.program.ir.columns import BlockColumns
from npusim.program.ir.content import exact, record
from npusim.program.ir.op import TileOp
from npusim.program.ir.opaque import form_of
from npusim.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec, L2State
    from npusim.program.ir.buffers import AddressSpace, Ring
    from npusim.program.ir.families import Families
    from npusim.program.ir.residency import Residency
    from npusim.program.ir.tile import GlobalTensor, GlobalTile


@record
class Body:
    """A loop's body that several loops share: ``function(static, at, index)``.

    ``static`` determines its operations, and is hashable; ``at`` holds coordinates: integers, in tuples or dataclasses,
    which ``function`` may use only in the way in which it may use the index.  Thus loops with one ``key`` in one phase
    have, by construction, one body apart from coordinates and constants.
    """

    function: Callable[[Any, Any, Any], Iterable[Item]]
    static: Hashable
    at: Any

    def __call__(self, index: Any) -> Iterable[Item]:
        """Return the items of one iteration."""
        return self.function(self.static, self.at, index)

    @property
    def key(self) -> Hashable:
        """The key that equal bodies share; raises `ProgramError` if ``at`` contains values other than integers."""
        return self.function, exact(self.static), form_of(self.at)


@record
class Loop:
    """Iterations that differ only in global-memory coordinates and in constants.

    ``body`` is a pure function of its index, which it may only add and multiply into coordinates and constants
    (``ir.check`` passes an opaque index; ``ir.opaque`` lists the limits of this check). All iterations have the same
    operations, handshakes and costs, so that a timing backend may run any iteration in place of any other. An iteration
    of another shape (a ragged or masked tile) is a separate item. Loops of several blocks may have one :class:`Body`. A
    loop without a name exists only for its key; the path of its operations has no entry for it.
    """

    name: str
    indices: Sequence[int]
    body: Callable[[Any], Iterable[Item]]

    @property
    def key(self) -> Hashable:
        """Key of loops with the same body; None if no other loop has this body."""
        return self.body.key if isinstance(self.body, Body) else None


def repeated(times: int, items: Callable[[], Iterable[Item]]) -> Loop:
    """Return the repeated items, for a body whose costs are the only part that is used."""
    return Loop("", range(times), lambda _index: items())


Item = TileOp | Loop
#: A block is an immutable value that a phase's body understands; it has the block's coordinates.
Block = Any
Serves = Literal["rows", "kv_head", "none"]


@dataclass(frozen=True, slots=True)
class Queue:
    """An in-order instruction queue of a core group.

    ``issuer`` is the scalar unit that fills it in program order, ``engine`` the unit that executes its entries (on an
    Ascend core each queue has its own), ``core`` the device file's core. ``turn``: the number of resident blocks that
    have their turn before the queue's block. ``is_awaited``: whether the next launch in a sequence begins only after
    the queue has ended.
    """

    name: str
    core: str
    engine: str
    issuer: str
    turn: int = 0
    is_awaited: bool = True


@record
class Touch:
    """A region of a global tensor that blocks read, each at most ``times`` times, or write (``times`` 0).

    ``read_bytes`` is the sum of the bytes of all reads; ``None``: one block reads the region ``times`` times. ``turn``:
    the index of the part of the tensor, for a block that processes its parts one after another.
    """

    region: GlobalTile
    times: int = 1
    read_bytes: int | None = None
    turn: int = 0

    @property
    def is_write(self) -> bool:
        """Whether the region is written."""
        return self.times == 0


class Succession(NamedTuple):
    """The succession of blocks on a core group if each begins before the previous one has ended.

    ``alone``: the block without overlap, from which its values are computed. ``meets``: keys of the blocks that run
    when the block begins, and when it ends; a block may follow another only if the blocks that run at the end of the
    other are those that run at its own beginning. ``blocks`` are the blocks of the phase without overlap; the
    assignment and ``meets`` follow from them.
    """

    alone: Callable[[Block], Block]
    meets: Callable[[Block], tuple[Hashable, Hashable]]
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class ProgramPhase:
    """A part of a program that ends with its launch or with a barrier of all cores.

    blocks, body
        Blocks, and the function that yields the items of a block.
    shape
        Function from a block to a key; blocks with equal keys run the same operations at other global-memory
        coordinates.
    family
        Function from a block to a key; blocks with equal keys differ at most in coordinates and in the iteration counts
        of their loops. None: unknown.
    footprint
        Function that yields the regions of global tensors that blocks read and write while they run in step.
    serves
        Rows of the output that need a block's result: those that the block covers, or all rows of the heads that share
        its KV head.
    dealt
        Indices of the blocks of each core group, if the blocks are not assigned round robin.
    roles
        Meaning of each name in the tables of the phase (``score``, ``weight``, ``sum``), for observers.
    body_counts
        Function that yields the bodies that blocks run, each with a key that is unique in the phase and the number of
        runs in each block, in any order. The operations of a body follow one another in each queue, in the order of the
        body.
    bits
        Function that returns a key of everything that determines values. None: the machine does not provide it.
    succession
        Overlap of successive blocks.
    is_joined
        Whether the phase belongs to the launch of the previous phase, after a barrier of all cores.
    grouped
        Families of the blocks, stored at their first use for the lifetime of the phase.
    """

    name: str
    blocks: Sequence[Block]
    body: Callable[[Block], Iterable[Item]]
    shape: Callable[[Block], Hashable]
    footprint: Callable[[Sequence[Block]], Iterable[Touch]]
    serves: Serves = "rows"
    dealt: Sequence[Sequence[int]] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    body_counts: Callable[[Sequence[Block]], Iterable[tuple[Hashable, Body, Sequence[int]]]] | None = None
    bits: Callable[[], Hashable] | None = None
    family: Callable[[Block], Hashable] | None = None
    succession: Succession | None = None
    is_joined: bool = False
    grouped: list[Families] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def alone(self) -> Sequence[Block]:
        """The phase's blocks without overlap: the same object for every depth of overlap."""
        return self.succession.blocks if self.succession else self.blocks

    @property
    def tile_counts(self) -> Sequence[int]:
        """Number of tiles that the loop of each block visits."""
        if isinstance(self.blocks, BlockColumns):
            counts: list[int] = self.blocks.tile_counts.tolist()
            return counts
        return [block.tile_count for block in self.blocks]

    @property
    def place_count(self) -> int:
        """Number of slots of a core group that the blocks use; 1 for blocks without a slot."""
        if isinstance(self.blocks, BlockColumns):
            return self.blocks.place_count
        return max((getattr(b, "place", 0) for b in self.blocks), default=0) + 1

    def blocks_of_group(self, group: int, group_count: int) -> Sequence[Block]:
        """Return the blocks that core group ``group`` of ``group_count`` runs, in order."""
        if self.dealt:
            return [self.blocks[number] for number in self.dealt[group]]
        return self.blocks[group::group_count]

    def numbers_of_group(self, group: int, group_count: int) -> slice | list[int]:
        """Return the indices of the blocks of `blocks_of_group` among the phase's blocks, as indices of arrays."""
        return list(self.dealt[group]) if self.dealt else slice(group, None, group_count)


#: Shares of cycles by constant, each constant by its key in the device file.
Terms = tuple[tuple[str, float], ...]


class Share(NamedTuple):
    """Work of a warp group that runs concurrently with the other groups of its core; all work of the same kind has the
    same speed.

    ``is_product``: whether it is work of the tensor cores or arithmetic.  Without other groups it takes ``cycles``; the
    other numbers are the fractions of this time in which units are busy, in 2^-20: the issue slots, the fuller of the
    pipes that are narrower than a warp (comparisons and conversions, and on 16 lanes multiply-adds), the pipe of
    special functions, the tensor cores, and shared memory.
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

    occupancy_cycles
        Cycles during which the engine is busy.
    latency_cycles
        Cycles from the end of the occupancy until results are available.
    link_bytes
        Bytes by which shared links are busy; the links may lengthen the occupancy.
    terms
        Keys in the device file of the constants that determine the shares of the cycles.
    pipe_cycles
        Busy cycles of pipes that several queues share. An operation begins when all of its pipes are free.
    share
        Work of the warps that a core processes concurrently with the work of other warps (processor sharing); the
        occupancy begins when this work has ended. None: the operation waits for free pipes instead.
    idle_bytes
        Bytes of ``link_bytes`` that are not transferred: the links could carry them while memory answers more slowly.
        A negative number is transferred in addition: memory takes less time for them than for other bytes.
    """

    occupancy_cycles: int
    latency_cycles: int = 0
    link_bytes: tuple[tuple[str, int], ...] = ()
    terms: Terms = ()
    pipe_cycles: tuple[tuple[str, int], ...] = ()
    share: Share | None = None
    idle_bytes: tuple[tuple[str, int], ...] = ()

    def at_rate(self, rate: float) -> Cost:
        """Return the cost on a unit whose rate is ``rate`` times the stated one; latencies and bytes on links do not
        change.
        """
        if rate == 1.0:
            return self
        terms = tuple((key, cycles / rate) for key, cycles in self.terms)
        cycles = ceil(round(self.occupancy_cycles / rate, 6))  # 21 / 0.7 is above 30 in binary floating point
        return self._replace(occupancy_cycles=cycles, terms=terms)


class Pricing(Protocol):
    """Costs of a program's operations on one device."""

    #: Number of other core groups that work at the same time, by phase: costs of a transferred tile depend on it.
    crowds: dict[str, float]
    #: Whether costs depend on the addresses of tiles; otherwise bank conflicts and misses of L2 are omitted, as bounds
    #: require.
    is_placed: bool

    @property
    def residency(self) -> Residency:
        """Share of each tensor's bytes that is read from the memory beyond L2."""

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; raise `UnknownOpcodeError` if it has no cost."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The resident ``blocks`` of a core: the smallest of ``limits`` (numbers of blocks, by the limiting resource).

    ``memories``: bytes of each memory that a block uses, and its total bytes.  ``spilled_registers``: per thread.
    """

    blocks: int
    warps: int
    thread_registers: int
    shared_bytes: int
    limits: Mapping[str, int]
    memories: Mapping[str, tuple[int, int]]
    spilled_registers: int = 0

    def occupied(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of each memory that resident blocks use, and its total bytes."""
        return {name: (self.blocks * of_block, there) for name, (of_block, there) in self.memories.items()}

    @property
    def limit(self) -> str:
        """The resource that limits the number of blocks; the first one, if several do."""
        return min(self.limits, key=lambda name: self.limits[name])

    def __str__(self) -> str:
        return (
            f"{self.blocks} resident {plural(self.blocks, 'block')} of {self.warps} warps (limit: {self.limit}), "
            f"{self.thread_registers} registers per thread, {format_bytes(self.shared_bytes)} shared memory per "
            "block"
        )


@dataclass(frozen=True)
class TileProgram:
    """One schedule on one device for one problem.

    queues, rings, spaces
        Queues, rings and memories of one core group; all groups are equal.
    flops
        Two operations for each multiply-add of the matrix products, without padding.
    constants
        Functions that compute the tensors of role ``constant`` (masks, shifting matrices), for runs with values.
    pricing
        Function that returns the costs of the operations on a device of the same kind as the program's device.
    l2
        State of L2 at the start.
    consumers
        Number of warp groups of a block with specialised warps that execute products; 0: the warps are not specialised.
    clears
        Number of memset launches before the kernel, which count in the time of the call.
    has_own_rows
        Whether each block reads rows that no other block reads.
    goes_on
        Whether a program of a launch continues with the work of further programs.
    is_in_step
        Whether blocks wait for memory together in each iteration, and load nothing ahead.
    is_attention
        Whether the first launch is the vendor's fused attention.
    occupied
        Used and total bytes of memories that contain more than tiles (registers); they replace the bytes of the tiles.
    occupancy
        Resident blocks per core in the last phase that has resident blocks.
    """

    name: str
    queues: tuple[Queue, ...]
    rings: tuple[Ring, ...]
    spaces: dict[str, AddressSpace]
    used_bytes: dict[str, int]
    tensors: dict[str, GlobalTensor]
    phases: tuple[ProgramPhase, ...]
    flops: int
    constants: dict[str, Callable[[], NDArray[Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())
    pricing: Callable[[TileProgram, DeviceSpec], Pricing] | None = None
    l2: L2State = "clean"
    consumers: int = 0
    clears: int = 0
    has_own_rows: bool = False
    goes_on: bool = False
    is_in_step: bool = False
    is_attention: bool = False
    occupied: dict[str, tuple[int, int]] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    #: The program's residency in L2, by the device's numbers on which it depends; a derived program has a separate
    #: residency.
    residencies: dict[Hashable, Residency] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: The arithmetics and orders of sums that steps of the program name, stored at their first use.
    named: list[tuple[dict[str, str], tuple[str, ...]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def is_spilled(self) -> bool:
        """Whether the threads of a block spill registers."""
        return self.occupancy is not None and self.occupancy.spilled_registers > 0

    def occupancy_bytes(self) -> dict[str, tuple[int, int]]:
        """Return ``{memory: (used bytes, total bytes)}`` of one core group, of physical memories."""
        physical = {name: space for name, space in self.spaces.items() if space.is_physical}
        of_tiles = {name: (self.used_bytes.get(name, 0), space.capacity_bytes) for name, space in physical.items()}
        return of_tiles | self.occupied
