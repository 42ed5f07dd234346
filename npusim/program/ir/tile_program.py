"""The tile program: phases of blocks, each a sequence of operations and loops in program order.

Program order is itself a legal order of execution: ``numerics`` walks it and computes values.
``timing`` deals the same operations to queues and honours only queues, engines, flags and links.

Costs are plain data: `timing` asks a program's own pricing, adds them up and knows neither opcodes nor core families.
They are rounded to whole cycles once, where they are computed (`npusim.machines`).
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
    """A loop's body that other loops have too: ``function(static, at, index)``.

    ``static`` determines its operations, and is hashable; ``at`` holds coordinates: integers, in tuples or dataclasses,
    which ``function`` may use only as it uses the index.  So loops of one ``key`` in one phase have one body, apart
    from coordinates and constants, by construction.
    """

    function: Callable[[Any, Any, Any], Iterable[Item]]
    static: Hashable
    at: Any

    def __call__(self, index: Any) -> Iterable[Item]:
        """Return the items of one iteration."""
        return self.function(self.static, self.at, index)

    @property
    def key(self) -> Hashable:
        """The key that equal bodies share; raises `ProgramError` where ``at`` contains other values than integers."""
        return self.function, exact(self.static), form_of(self.at)


@record
class Loop:
    """Iterations that differ only in global-memory coordinates and in constants.

    ``body`` is a pure function of its index, which it may only add and multiply into coordinates and constants
    (``ir.check`` passes an opaque index; ``ir.opaque`` lists the limits of this check).  All iterations have the same
    operations, handshakes and costs, so a timing backend may run any iteration for any other.  An iteration of another
    shape (a ragged or masked tile) is a separate item.  A :class:`Body` is shared with the loops of other blocks.  A
    loop without a name exists for its key alone: the path of its operations has no entry for it.
    """

    name: str
    indices: Sequence[int]
    body: Callable[[Any], Iterable[Item]]

    @property
    def key(self) -> Hashable:
        """Key of loops with the same body; None if no other loop has this body."""
        return self.body.key if isinstance(self.body, Body) else None


def repeated(times: int, items: Callable[[], Iterable[Item]]) -> Loop:
    """Return the items so many times, for a body of which only the costs are read."""
    return Loop("", range(times), lambda _index: items())


Item = TileOp | Loop
#: A block is whatever a phase's body understands: a frozen value with its coordinates.
Block = Any
Serves = Literal["rows", "kv_head", "none"]


@dataclass(frozen=True, slots=True)
class Queue:
    """An in-order instruction queue of a core group.

    ``issuer`` is the scalar unit that fills it in program order, ``engine`` the unit that executes its entries (on an
    Ascend core each queue has its own), ``core`` the device file's core.  ``turn``: the number of resident blocks with
    a turn before the queue's.  ``is_awaited``: whether the next launch in a sequence begins only after the queue has
    ended.
    """

    name: str
    core: str
    engine: str
    issuer: str
    turn: int = 0
    is_awaited: bool = True


@record
class Touch:
    """A region of a global tensor that blocks read, at most ``times`` each, or write (``times`` 0).

    ``read_bytes`` is the sum of their reads of it; ``None``: one block, ``times`` the region.
    ``turn``: the part of the tensor, for a block that processes its parts one after the other.
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
    """The succession of blocks on a core group where one begins before the previous one has ended.

    ``alone``: the block without overlap, from which its values are computed.  ``meets``: keys of the blocks that are in
    progress when it begins, and when it ends; a block follows only blocks that leave the ones that it meets.
    ``blocks`` are the blocks of the phase by themselves, from which the deal and ``meets`` of the others follow.
    """

    alone: Callable[[Block], Block]
    meets: Callable[[Block], tuple[Hashable, Hashable]]
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class ProgramPhase:
    """A part of a program that ends with its launch or an all-core barrier.

    ``shape`` maps a block to a key: blocks of one key run the same operations, apart from
    global-memory coordinates.  ``family``, if present, maps a block to a key of blocks that differ at most in the
    iteration counts of their loops too.  ``body`` yields a block's items.  ``serves`` names the rows of the
    output that need a block's result: the rows that it covers, or all rows of heads on its KV head.
    ``footprint`` lists the regions of global tensors that blocks running in step read and write.
    ``roles`` maps each name of the phase's tables to its meaning (``score``, ``weight``, ``sum``), for observers.
    ``dealt`` lists the numbers of each core group's blocks, if they are not assigned round robin.
    ``body_counts`` yields the bodies that blocks run, each with a key unique in the phase, and the runs in each block,
    in any order; the operations of a body follow one another in each queue, in the order of the body.  ``bits`` returns
    a key of everything that determines values; None if the machine does not provide it.
    ``succession``: overlap of successive blocks.  ``is_joined``: the phase belongs to the launch of the previous
    phase, after a barrier of all cores.  ``grouped`` stores the families of the blocks after their first use, and ends
    with the phase.
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
    def place_count(self) -> int:
        """Slots of a core group that the blocks use; one of blocks without a place."""
        if isinstance(self.blocks, BlockColumns):
            return self.blocks.place_count
        return max((getattr(b, "place", 0) for b in self.blocks), default=0) + 1

    def blocks_of_group(self, group: int, group_count: int) -> Sequence[Block]:
        """Return the blocks that core group ``group`` of ``group_count`` runs, in order."""
        if self.dealt:
            return [self.blocks[number] for number in self.dealt[group]]
        return self.blocks[group::group_count]

    def numbers_of_group(self, group: int, group_count: int) -> slice | list[int]:
        """Return the indices of the blocks of `blocks_of_group` among the phase's blocks, to index arrays."""
        return list(self.dealt[group]) if self.dealt else slice(group, None, group_count)


#: Shares of cycles by constant, each constant by its key in the device file.
Terms = tuple[tuple[str, float], ...]


class Share(NamedTuple):
    """Work of a warp group that runs concurrently with the other groups of its core, each kind at one speed.

    ``is_product``: for the tensor cores, else arithmetic.  Alone it takes ``cycles``; the other numbers are the
    fractions of this time in which units are busy, in 2^-20: issue slots, the fuller of the pipes narrower than a warp
    (comparisons and conversions, and on 16 lanes multiply-adds), that of special functions, the tensor cores, shared
    memory.
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

    The engine is busy for ``occupancy_cycles``; results are available ``latency_cycles`` later.
    ``link_bytes`` cross shared links, which may lengthen the occupancy.  ``terms`` names the
    constant behind each share of the cycles, by its key in the device file.  ``pipe_cycles`` are the busy cycles of
    pipes that several queues share: an operation begins when all of them are free.  An operation with a ``share``
    waits for no pipe: its warps run concurrently with others, and the occupancy begins when they have finished.
    """

    occupancy_cycles: int
    latency_cycles: int = 0
    link_bytes: tuple[tuple[str, int], ...] = ()
    terms: Terms = ()
    pipe_cycles: tuple[tuple[str, int], ...] = ()
    share: Share | None = None

    def at_rate(self, rate: float) -> Cost:
        """Return the cost on a unit with ``rate`` of its stated rate; latencies and the bytes on links stay."""
        if rate == 1.0:
            return self
        terms = tuple((key, cycles / rate) for key, cycles in self.terms)
        cycles = ceil(round(self.occupancy_cycles / rate, 6))  # 21 / 0.7 is above 30 in binary
        return self._replace(occupancy_cycles=cycles, terms=terms)


class Pricing(Protocol):
    """Costs of a program's operations on one device."""

    #: Number of other core groups at work at the same time, by phase: costs of a handed-over tile depend on it.
    crowds: dict[str, float]
    #: Whether costs depend on the addresses of tiles; if not, bank conflicts and misses of L2 are omitted, as bounds
    #: require.
    is_placed: bool

    @property
    def residency(self) -> Residency:
        """Share of each tensor's bytes that is read from memory behind L2."""

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; raise `UnknownOpcodeError` for one that has none."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resident ``blocks`` of a core, the smallest of ``limits`` (numbers of blocks, by the limiting resource).

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
        """The resource that limits the number of blocks (the first of several)."""
        return min(self.limits, key=lambda name: self.limits[name])

    def __str__(self) -> str:
        return (
            f"{self.blocks} resident {plural(self.blocks, 'block')} of {self.warps} warps (limit: {self.limit}), "
            f"{self.thread_registers} registers a thread, {format_bytes(self.shared_bytes)} shared memory a block"
        )


@dataclass(frozen=True)
class TileProgram:
    """One schedule on one device for one problem.

    ``queues``, ``rings`` and ``spaces`` describe one core group (all groups are alike).  ``flops`` counts
    the multiply-adds of the matrix products twice, without padding; ``constants`` compute the tensors of role
    ``constant`` (masks, shifting matrices) for runs with values; ``pricing`` returns the costs of the operations on a
    device like the one the program was built for.  ``l2``: state of L2 at the start.  ``consumers``: warp groups
    of a GPU's block whose warps specialise; 0: they do not.  ``clears``: memset launches before the kernel, which a
    call pays.  ``has_own_rows``: blocks read rows that no other block reads; ``goes_on``: a program of a launch
    continues with the work of further ones.  ``is_attention``: the first launch is the vendor's fused attention.
    ``occupied``: used and total bytes of memories that hold more than tiles (registers), in place of the tiles' bytes.
    ``occupancy``: resident blocks per core in the last phase that has them.
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
    is_attention: bool = False
    occupied: dict[str, tuple[int, int]] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    #: The program's residency in L2, by the device's numbers on which it depends; a derived program has a separate one.
    residencies: dict[Hashable, Residency] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_spilled(self) -> bool:
        """Whether threads of its blocks spill registers."""
        return self.occupancy is not None and self.occupancy.spilled_registers > 0

    def occupancy_bytes(self) -> dict[str, tuple[int, int]]:
        """Return ``{memory: (used bytes, total bytes)}`` of one core group, of physical memories."""
        physical = {name: space for name, space in self.spaces.items() if space.is_physical}
        of_tiles = {name: (self.used_bytes.get(name, 0), space.capacity_bytes) for name, space in physical.items()}
        return of_tiles | self.occupied
