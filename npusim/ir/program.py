"""The tile program: phases of blocks, each a sequence of operations and loops in program order.

Program order is itself a legal order of execution: ``numerics`` walks it and computes values.
``timing`` deals the same operations to queues and honours only queues, engines, flags and links.

Costs are plain data: `timing` asks a program's own pricing, adds them up and knows neither opcodes nor core families.
They are rounded to whole cycles once, where they are made (`npusim.machines`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from npusim.ir.content import exact, record
from npusim.ir.op import TileOp
from npusim.ir.opaque import form_of
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec, L2State
    from npusim.ir.buffers import AddressSpace, Ring
    from npusim.ir.residency import Residency
    from npusim.ir.tile import GlobalTensor, GlobalTile


@record
class Body:
    """A loop's body that other loops have too: ``function(static, at, index)``.

    ``static`` is what its operations depend on, hashable; ``at`` holds coordinates: integers, in
    tuples or dataclasses, of which ``function`` may know no more than of the index.  So loops of one
    ``key`` in one phase have one body, apart from coordinates and constants, by construction.
    """

    function: Callable[[Any, Any, Any], Iterable[Item]]
    static: Hashable
    at: Any

    def __call__(self, index: Any) -> Iterable[Item]:
        """Return the items of one iteration."""
        return self.function(self.static, self.at, index)

    @property
    def key(self) -> Hashable:
        """What bodies that are one share; raises `ProgramError` where ``at`` holds other than integers."""
        return self.function, exact(self.static), form_of(self.at)


@record
class Loop:
    """Iterations that differ only in global-memory coordinates and in constants.

    ``body`` is a pure function of its index, which it may only add and multiply into those (``ir.check`` gives it an
    opaque one; ``ir.opaque`` says what that cannot see): all iterations have the same operations, handshakes and costs,
    so a timing backend may run any of them for any other.  An iteration of another shape (a ragged or masked tile) is
    an item of its own.  A :class:`Body` is shared with the loops of other blocks.  Without a name it is a part of a
    body that is kept for its key alone: no place of its own on the path of its operations.
    """

    name: str
    indices: Sequence[int]
    body: Callable[[Any], Iterable[Item]]

    @property
    def key(self) -> Hashable:
        """What loops with the same body share; None where the body is this loop's own."""
        return self.body.key if isinstance(self.body, Body) else None


def repeated(times: int, items: Callable[[], Iterable[Item]]) -> Loop:
    """Return the items so many times over, in a body that is looked at for its costs alone."""
    return Loop("", range(times), lambda _index: items())


Item = TileOp | Loop
#: A block is whatever a phase's body understands: a frozen value with its coordinates.
Block = Any
Serves = Literal["rows", "kv_head", "none"]


@dataclass(frozen=True, slots=True)
class Queue:
    """An in-order instruction queue of a core group.

    ``issuer`` is the scalar unit that fills it in program order, ``engine`` the unit that executes
    its entries (on an Ascend core each queue has its own), ``core`` the device file's core.  ``turn``: how many blocks
    that the core holds as well have their turn before the queue's.  ``is_awaited``: whether the next of launches that
    follow one another begins only when the queue has ended.
    """

    name: str
    core: str
    engine: str
    issuer: str
    turn: int = 0
    is_awaited: bool = True


@record
class Touch:
    """A region of a global tensor that blocks read, the keenest ``times`` over, or write (``times`` 0).

    ``read_bytes`` is what all of them read of it together; ``None``: one block, ``times`` the region.
    ``turn``: in which of its parts, of a block that goes through them one after the other.
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
    """How blocks follow one another on a core group where one begins before the one before it is through.

    ``alone``: a block as it is by itself, which its values are computed by.  ``meets``: keys of the blocks that are
    under way when it begins, and when it hands on; a block follows those alone that leave what it meets.  ``blocks``
    are those of the phase by themselves; from them, who deals and ``meets`` the others follow.
    """

    alone: Callable[[Block], Block]
    meets: Callable[[Block], tuple[Hashable, Hashable]]
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class ProgramPhase:
    """A part of a program that ends in a launch or an all-core barrier.

    ``shape`` maps a block to a key: blocks of one key run the same operations, apart from
    global-memory coordinates.  ``family``, where there is one, maps it to what blocks have in common that differ in
    how often their loops run, too.  ``body`` yields a block's items.  ``serves`` says which rows of the
    output need a block's result: those it covers itself, or all rows of heads on its KV head.
    ``footprint`` lists what blocks that run in step read and write in global tensors, region by region.
    ``roles`` says what each name of its tables means (``score``, ``weight``, ``sum``): for those who watch.
    ``dealt`` gives the numbers of each core group's blocks, where they are not dealt round robin.
    ``body_counts`` gives bodies that blocks do, each with a key of its own in the phase, and how often each of the
    blocks does them, in whatever order, ``bits`` what stands for all that values depend on; None where a machine does
    not say.  ``succession``: where blocks overlap one another.  ``is_joined``: it is of the launch of the phase before,
    behind a barrier of all cores.
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

    @property
    def alone(self) -> Sequence[Block]:
        """Its blocks as they are by themselves: one object however far they overlap one another."""
        return self.succession.blocks if self.succession else self.blocks

    def blocks_of_group(self, group: int, group_count: int) -> Sequence[Block]:
        """Return the blocks that core group ``group`` of ``group_count`` runs, in order."""
        if self.dealt:
            return [self.blocks[number] for number in self.dealt[group]]
        return self.blocks[group::group_count]

    def numbers_of_group(self, group: int, group_count: int) -> slice | list[int]:
        """Return the places of the blocks of `blocks_of_group` among the phase's, as an index of arrays."""
        return list(self.dealt[group]) if self.dealt else slice(group, None, group_count)


#: Shares of some cycles by the constant behind each, its key in the device file.
Terms = tuple[tuple[str, float], ...]


class Share(NamedTuple):
    """Work that a warp group does beside the others of its core, each kind of work at one speed.

    ``is_product``: for the tensor cores, else arithmetic.  Alone it takes ``cycles``, of which the other
    numbers are the parts that it keeps busy, in 2^-20: issue slots, the fuller of the pipes narrower than a
    warp (comparisons and conversions, and on 16 lanes multiply-adds), that of special functions, the tensor
    cores, shared memory.
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

    #: How many of the other core groups work beside one, by phase: what costs of a tile handed on depend on.
    crowds: dict[str, float]
    #: Whether costs depend on where tiles lie; else conflicts of banks are left out, for bounds.
    is_placed: bool

    @property
    def residency(self) -> Residency:
        """Which share of each tensor's bytes comes from beyond L2."""

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; raise `UnknownOpcodeError` for one that has none."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many ``blocks`` a core holds, as many as the tightest of ``limits`` (blocks, by what bounds them).

    ``memories``: bytes that a block takes of each memory, and bytes there.  ``spilled_registers``: of a thread.
    """

    blocks: int
    warps: int
    thread_registers: int
    shared_bytes: int
    limits: Mapping[str, int]
    memories: Mapping[str, tuple[int, int]]
    spilled_registers: int = 0

    def occupied(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that resident blocks take of each memory, and the bytes there."""
        return {name: (self.blocks * of_block, there) for name, (of_block, there) in self.memories.items()}

    @property
    def limit(self) -> str:
        """What allows no further block (the first of several)."""
        return min(self.limits, key=lambda name: self.limits[name])

    def __str__(self) -> str:
        return (
            f"{self.blocks} resident blocks of {self.warps} warps (limit: {self.limit}), "
            f"{self.thread_registers} registers a thread, {format_bytes(self.shared_bytes)} shared memory a block"
        )


@dataclass(frozen=True)
class TileProgram:
    """One schedule on one device for one problem.

    ``queues`` are those of one core group (all groups are alike); ``rings`` and ``spaces`` likewise.  ``flops`` counts
    the multiply-adds of the matrix products twice, without padding; ``constants`` compute the tensors of role
    ``constant`` (masks, shifting matrices) when values are wanted; ``pricing`` says what its operations cost on a
    device like the one it was built for.  ``l2``: what L2 holds when it starts.  ``consumers``: warp groups
    of a GPU's block whose warps specialise; 0: they do not.  ``clears``: launches of memsets before, which a call pays.
    ``has_own_rows``: blocks read rows that no other block reads.
    ``occupied``: bytes used and there of memories that hold more than tiles (registers), in place of what tiles use.
    ``occupancy``: blocks of the last phase that says so which a core holds at a time.
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
    occupied: dict[str, tuple[int, int]] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    #: What is found of it in L2, by the device's numbers that this hangs on; a program made of this one has its own.
    residencies: dict[Hashable, Residency] = field(default_factory=dict, init=False, repr=False, compare=False)

    def occupancy_bytes(self) -> dict[str, tuple[int, int]]:
        """Return ``{memory: (bytes used, bytes there)}`` of one core group."""
        of_tiles = {name: (self.used_bytes.get(name, 0), space.capacity_bytes) for name, space in self.spaces.items()}
        return of_tiles | self.occupied
