"""A node program: operations on the queues of every device, as a tile program.

Core groups of the program are the node's devices.  A device has a queue for its cores and one for its collectives; if a
host takes part, it also has queues for copies in each direction and for its share of the host's cores.  Operations have
no steps: a :class:`KernelOp` stands for a complete program of one device, a :class:`CollectiveOp` for one rank's part
in a collective. Results go from queue to queue through rings, so that ``ir.check`` and the walker treat a node like a
core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.machines.node.collective import Algorithm, CollectiveCall, Kind
from npusim.program.ir.buffers import AddressSpace, Allocator, Ring
from npusim.program.ir.op import TileOp
from npusim.program.ir.tile_program import Item, ProgramPhase, Queue, TileProgram
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.problem import CopyProblem, GemmProblem, OperatorProblem, Problem, RowsProblem
    from npusim.program.ir.tile import RingTile

    ChildProblem = Problem | GemmProblem | RowsProblem | OperatorProblem | CopyProblem

COMPUTE = "npu.COMPUTE"
UP, DOWN, CPU = "npu.UP", "npu.DOWN", "host.CPU"
MEMORY = "gm"
#: Number of rows in a block of the attention: cuts inside a block would split its tiles (ascend.md section 2.1).
ROW_GRAIN = 128
#: The role of a kernel in a layer: its part in the table of a run, and in the node file's table of times.
KernelRole = Literal["attention", "decode", "linear", "rows"]


@dataclass(frozen=True, slots=True)
class Child:
    """One program of one device inside a kernel: a schedule, its problem, its precision as text, tiling fields.

    ``is_named``: the caller named this schedule, so that no time of another schedule in a node's file replaces its own.
    ``is_near``: the child reads the results of the kernels directly before it; the part of these that fits is in L2.
    """

    schedule: str
    problem: ChildProblem
    precision: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    is_named: bool = False
    is_near: bool = False

    @classmethod
    def named(cls, text: str, default: str, problem: ChildProblem) -> Child:
        """Return the program that ``text`` names, ``schedule:field=value:...``; ``auto`` is ``default``."""
        name, *fields = (default if text == "auto" else text).split(":")
        pairs = ((key, value) for key, _, value in (field.partition("=") for field in fields))
        return cls(name, problem, fields=tuple(pairs), is_named=text != "auto")


@dataclass(frozen=True, slots=True)
class NodeKernel:
    """Kernels that run one after another; with ``is_fused`` they belong to the launch of the previous kernel."""

    role: KernelRole
    children: tuple[Child, ...]
    is_fused: bool = False
    name: str = ""

    @property
    def label(self) -> str:
        """Name in tables: the part of the layer, or the role."""
        return self.name or self.role


@dataclass(frozen=True, slots=True)
class Waves:
    """A kernel as equal blocks on cores: ``resident`` blocks share a core and then take ``block_fs`` each; a single
    block uses its core less efficiently.

    Blocks are not pre-empted: a core that is assigned stays assigned until its blocks are done.
    """

    block_count: int
    block_fs: int
    resident: int
    core_count: int
    alone_factor: float = 1.0
    #: Work after the blocks: a kernel that joins their parts, or the part of a simulated time that exceeds the time of
    #: equal blocks.
    merge_fs: int = 0

    def core_fs(self, blocks: int) -> int:
        """Return the time of a core for ``blocks`` that start together."""
        return round(self.block_fs * (self.alone_factor if blocks == 1 else blocks))

    @classmethod
    def of_time(cls, whole_fs: int, block_count: int, resident: int, core_count: int) -> Waves:
        """Return equal blocks that take ``whole_fs`` if they have all cores.

        Model: blocks of unequal lengths (causal) have their mean.
        """
        rounds = cls(block_count, 1, resident, core_count).whole_fs
        block_fs, rest = divmod(whole_fs, rounds)
        return cls(block_count, block_fs, resident, core_count, merge_fs=rest)

    @property
    def whole_fs(self) -> int:
        """Return the time of the blocks if they have all cores."""
        full, rest = divmod(self.block_count, self.core_count * self.resident)
        each = ceil_div(rest, self.core_count)
        return full * self.core_fs(self.resident) + (self.core_fs(each) if each else 0) + self.merge_fs


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A kernel's time alone and its use of each shared resource, 0 to 1 of the device.

    ``launch_fs`` passes on the device before any work, ``gap_fs`` of it between its ``launches`` kernels; ``issue_fs``
    passes on the host.  ``demand`` names resources as claims do: kinds of core, ``hbm``. With ``waves``, one for each
    launch, cores are occupied completely.  ``terms`` are the constants on which the time depends, with their shares of
    it; ``methods`` are the methods that computed it, and ``band`` their relative distance from the exact time;
    ``bound_fs`` is a lower bound of the time.
    """

    alone_fs: int
    launch_fs: int
    issue_fs: int
    demand: tuple[tuple[str, float], ...] = ()
    waves: tuple[Waves, ...] = ()
    terms: tuple[tuple[str, float], ...] = ()
    methods: tuple[str, ...] = ()
    band: float = 0.0
    bound_fs: int = 0
    gap_fs: int = 0
    launches: int = 1

    @property
    def whole_fs(self) -> int:
        """Return the time of a call by itself."""
        return self.issue_fs + self.launch_fs + self.alone_fs


#: A function that returns a kernel's work: ``run_node`` derives one from ``npusim.program.timing.METHODS`` or from a
#: node's table.
KernelTimer = Callable[[NodeKernel], KernelWork]


@dataclass(slots=True)
class KernelOp(TileOp):
    """A launch in a queue of a device, for ``rows`` rows of all sequences together, beginning with ``row``."""

    kernel: NodeKernel = field(default=NodeKernel("linear", ()))
    row: int = 0
    rows: int = 0


@dataclass(slots=True)
class CollectiveOp(TileOp):
    """A rank's part in a collective over the partial sums of ``rows`` rows, beginning with ``row``."""

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
    """One device's share of attention on the host: its computation, and its reads from DRAM."""

    child: Child
    size_bytes: int
    elements: int


@dataclass(slots=True)
class CopyOp(TileOp):
    """A copy between host and device, concurrent with the device's kernels."""

    call: CopyCall = field(kw_only=True)


@dataclass(slots=True)
class HostOp(TileOp):
    """A rank's heads on the host's cores."""

    call: HostCall = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows ``row .. row + rows`` of all sequences together, and the kernels that compute them."""

    row: int
    rows: int
    kernels: tuple[NodeKernel, ...]


@dataclass(frozen=True, slots=True)
class Communication:
    """The collective after each block: its kind, its algorithm, and the row of the result that it transfers."""

    driver: str
    algorithm: Algorithm
    row_bytes: int
    kind: Kind = "allreduce"
    servers: int = 1
    element_bytes: int = 1

    @property
    def queue(self) -> str:
        """Return the queue to which the copy is issued: the queue of the copy engines, or that of kernels that move
        bytes.
        """
        return "npu.SDMA" if self.driver in ("sdma", "mc2") else "npu.COLLECTIVE"

    def op(self, index: int, block: RowBlock, *, is_overlapped: bool) -> CollectiveOp:
        """Return the collective over a block's rows."""
        size = block.rows * self.row_bytes
        call = CollectiveCall(
            self.kind, self.algorithm, self.driver, size, is_overlapped, self.servers, self.element_bytes
        )
        engine = self.queue.partition(".")[2]
        return CollectiveOp(f"{self.kind} {index}", self.queue, engine, (), call=call, row=block.row, rows=block.rows)


@dataclass(frozen=True, slots=True)
class Task:
    """An operation, and the indices of the tasks whose results it needs, each with ``size_bytes``."""

    op: TileOp
    after: tuple[int, ...] = ()
    size_bytes: int = 1


def cut_rows(total: int, blocks: int, first_share: float | None) -> list[tuple[int, int]]:
    """Return ``(row, rows)`` of each block: the first block has its share of all rows, and the other blocks are equal.

    Cuts are between attention blocks of 128 rows if each block then has some.

    Raises `TilingError` for more blocks than rows, or if the first block leaves another block without a row.
    """
    if blocks > total:
        raise TilingError(f"blocks: {blocks} blocks, but there are only {total} rows")
    share = 1.0 / blocks if first_share is None or blocks == 1 else first_share
    ends = [share + (1.0 - share) * i / max(1, blocks - 1) for i in range(blocks)]
    sizes: list[int] = []
    for grain in (ROW_GRAIN, 1) if total >= 2 * blocks * ROW_GRAIN else (1,):
        cuts = [0, *(min(total, round(total * e / grain) * grain) for e in ends[:-1]), total]
        sizes = [b - a for a, b in pairwise(cuts)]
        if min(sizes) >= 1:
            return list(zip(cuts[:-1], sizes, strict=True))
    raise TilingError(f"first_share: {share} of {total} rows in {blocks} blocks gives a block without rows: {sizes}")


def node_program(name: str, ranks: int, blocks: Sequence[RowBlock], comm: Communication, flops: int) -> TileProgram:
    """Return the program in which each of ``ranks`` devices runs all ``blocks`` in order and reduces each block."""
    tasks: list[Task] = []
    for index, block in enumerate(blocks):
        tasks += block_tasks(index, block)
        # Without kernels the data already exist, and there is nothing to wait for.
        ready = (len(tasks) - 1,) if block.kernels else ()
        tasks.append(Task(comm.op(index, block, is_overlapped=len(blocks) > 1), ready, block.rows * comm.row_bytes))
    return task_program(name, ranks, tasks, flops, (COMPUTE, comm.queue))


def block_tasks(index: int, block: RowBlock, after: tuple[int, ...] = (), size_bytes: int = 1) -> list[Task]:
    """Return the kernels of a block of rows; the first kernel comes after other tasks."""
    tasks = []
    for number, kernel in enumerate(block.kernels):
        op = KernelOp(f"{kernel.label} {index}", COMPUTE, "COMPUTE", (), kernel=kernel, row=block.row, rows=block.rows)
        tasks.append(Task(op, () if number else after, size_bytes))
    return tasks


def task_program(name: str, ranks: int, tasks: Sequence[Task], flops: int, queues: Sequence[str] = ()) -> TileProgram:
    """Return the program in which each of ``ranks`` devices runs ``tasks`` in order; ``flops`` are the operations of
    one device.

    ``queues`` are listed first, before queues that only tasks name.
    """
    named = tuple(dict.fromkeys((*queues, *(t.op.queue for t in tasks))))
    allocator, slots = _handed_on(tasks)

    def body(_rank: int) -> Iterator[Item]:
        for task, handshake in zip(tasks, slots, strict=True):
            yield replace(task.op, handshake=handshake)

    parts = [(q, *q.split(".", 1)) for q in named]
    return TileProgram(
        name=name,
        queues=tuple(Queue(q, core, engine, "host") for q, core, engine in parts),
        rings=tuple(allocator.rings),
        spaces=dict(allocator.spaces),
        used_bytes=dict(allocator.peak_bytes),
        tensors={},
        phases=(ProgramPhase("rows", tuple(range(ranks)), body, lambda _rank: None, lambda _ranks: iter(())),),
        flops=flops * ranks,
    )


def operations(program: TileProgram) -> Iterator[Any]:
    """Yield the operations that all ranks of a node program share, in program order."""
    for phase in program.phases:
        yield from phase.body(phase.blocks[0])


def _handed_on(tasks: Sequence[Task]) -> tuple[Allocator, list[tuple[RingTile, ...]]]:
    """Return the rings from queue to queue, a slot for each result, and the slots that each task fills and reads."""
    # A queue waits once for a result, because its later tasks follow the task that waited.
    receivers: dict[tuple[int, str], int] = {}
    for number, task in enumerate(tasks):
        for source in task.after:
            if tasks[source].op.queue != task.op.queue:
                receivers.setdefault((source, task.op.queue), number)
    sizes: dict[tuple[str, str], list[int]] = {}
    for (source, queue), number in sorted(receivers.items()):
        sizes.setdefault((tasks[source].op.queue, queue), []).append(tasks[number].size_bytes)
    total = sum(max(s) * len(s) for s in sizes.values())
    space = AddressSpace(MEMORY, 2 * total + 2, get_format("float16").size_bytes)
    allocator = Allocator({MEMORY: space})
    rings: dict[tuple[str, str], Ring] = {
        (a, b): allocator.ring(MEMORY, _ring_name(a, b), max(s), len(s), producers=[a], consumers=[b])
        for (a, b), s in sizes.items()
    }
    slots: list[list[RingTile]] = [[] for _ in tasks]
    for (source, queue), number in sorted(receivers.items()):
        ring, size = rings[tasks[source].op.queue, queue], tasks[number].size_bytes
        slots[source].append(ring.fill(1, size, "int8"))
        slots[number].append(ring.front(1, size, "int8"))
    return allocator, [tuple(s) for s in slots]


def _ring_name(source: str, target: str) -> str:
    a, b = (q.partition(".")[2] for q in (source, target))
    return {"COMPUTE": "partial sums"}.get(a, "sums") if {a, b} <= {"COMPUTE", "SDMA", "COLLECTIVE"} else f"{a} to {b}"
