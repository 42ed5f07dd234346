"""The bytes that come from L2, and the bytes that come from the memory beyond it: a property of the program, not of the
order of events.

Core groups are assumed to work in step: the r-th blocks of all groups run together and access memory in the same order,
so that a region that several of them read is fetched once.  A region is still in L2 (least recently used) if the cache
holds all bytes that are accessed between two of its accesses.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from functools import cached_property
from itertools import pairwise
from math import ceil, expm1, inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.identity import Itself
from npusim.late_methods import dataclass
from npusim.program.ir.columns import BlockColumns, ColumnScan, distinct, numbered
from npusim.program.ir.content import MOST_BLOCKS, SameBlocks, kept_by_blocks
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from npusim.program.ir.columns import Integers, Touches
    from npusim.program.ir.tile import GlobalTensor, Role
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram, Touch

    Scan = Callable[[Sequence[Any]], Iterable[Touch]]

#: Number of blocks above which a computation on columns of all blocks is faster than one block by block.
LEAST_BLOCKS = 1024
#: A region of a head: tensor, batch, head, first row and column, number of columns (the number of rows may grow).
Key = tuple[str, int, int, int, int, int]
#: Shares of L2 for device files that do not state them: up to the first share, all inputs stay from one launch to the
#: next; from the second on, no input stays. With random placement, the probability that a line stays is 1 - 2 x to
#: first order, where x is the excess over the first share; no line stays if the excess is half of that share.
#: Writes do not change these shares.
STAYING = 0.885, 1.3275, 0.0
#: Share of a row that has been evicted at a second pass, if as many bytes as L2 holds are read and written between the
#: two passes. It is fitted on the 48 two-pass loops of reports/silicon/passes.json (in place and not, rows of 16 to 256
#: KiB in 2 to 16 resident blocks). Without any one tile of them the fit gives .65 to .70; the error of the tile that is
#: left out is 5.5 % on average, and 25 % for one with two resident blocks of 16 KiB. Single loops give .2 to .9. If
#: evicted lines were at random places, .35 and .66 would be lost when .66 and 1.32 of L2 pass.
LOST = 0.67


@dataclass(frozen=True, slots=True)
class Residency:
    """Share of each tensor's accesses that reaches memory beyond L2, 0 to 1, by tensor name.

    ``compulsory_bytes`` are the bytes that any cache must fetch or write back once: inputs that were not in L2, and
    outputs that do not stay in L2.  ``shared_reads`` is the fraction of the other core groups that read the same region
    in the same step, averaged over a tensor's bytes: 0: none, 1: all.  ``read_waits`` and ``new_writes`` are the shares
    of a tensor's reads and writes whose lines are not in L2: groups in step wait for one fetch. ``read_pushes`` and
    ``write_pushes`` are the bytes, written by others or by the program before, that each byte of a tensor's reads and
    writes evicts from L2.
    """

    read_misses: Mapping[str, float]
    write_misses: Mapping[str, float]
    compulsory_bytes: int = 0
    shared_reads: Mapping[str, float] = field(default_factory=dict)
    read_waits: Mapping[str, float] = field(default_factory=dict)
    new_writes: Mapping[str, float] = field(default_factory=dict)
    read_pushes: Mapping[str, float] = field(default_factory=dict)
    write_pushes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def without_misses(cls, tensors: Iterable[str]) -> Residency:
        """Return the residency of a program all of whose accesses to these tensors hit L2."""
        none = dict.fromkeys(tensors, 0.0)
        return cls(none, none, 0, none, none, none, none, none)


def residency(
    program: TileProgram,
    group_count: int,
    capacity_bytes: int,
    writes_back: bool = False,
    dirty_bytes: float | None = None,
    in_a_stream: bool = False,
    staying: tuple[float, float, float] = STAYING,
    most_dirty_bytes: float = inf,
) -> Residency:
    """Return the accesses that miss an L2 of ``capacity_bytes``.

    The slots between the cores are in L2 too and are subtracted. With a write-through cache an output is always written
    to memory once; a tensor that is read later is written if it does not stay in L2. With a write-back cache, written
    lines stay until L2 is full; then each new byte evicts its share of the lines that must still be written back (as
    measured on an H200: of 35 MB, 7 are written back while 16 MiB are read, 26 while 64 are, and all while 128 are).
    With ``dirty_bytes`` L2 is full of other data when the program starts, and this number of bytes must still be
    written back; None: L2 is empty. ``in_a_stream``: launches like it have left L2 full of lines, of which the share
    that was written is still to be written back (H200, reports/silicon/turnover.json: copies of a row of 64 KiB a
    multiprocessor read for 6,700 cycles, of which 4,900 are the bytes read), and the next launch evicts the lines that
    this one leaves. ``staying``: two shares of L2; launches on the same bytes find all inputs in L2 up to the first
    share, and none from the second on; and how far the first share falls with the written share of the bytes.
    ``most_dirty_bytes``: number of written bytes in a full L2 at most; L2 writes further bytes back immediately.
    """
    slots = program.used_bytes.get("gm", 0) * group_count
    inputs = sum(t.size_bytes for t in program.tensors.values() if t.role == "input" and t.of is None)
    phases = tuple([_scan_of(phase, group_count) for phase in program.phases])
    residents = tuple([min(p.place_count, ceil_div(len(p.blocks), group_count)) for p in program.phases])
    tensors = tuple([(t.name, t.role, t.size_bytes) for t in program.tensors.values()])
    capacity = max(0, capacity_bytes - slots)
    warm_bytes = inputs if program.l2 == "warm" else None
    left = _left(program, capacity, staying) if program.l2 == "repeated" else 0.0
    if sum(len(phase.blocks) for phase in program.phases) <= MOST_BLOCKS:  # with more blocks, regions are not stored
        touched = sum(_touched_bytes(phase, group_count) for phase in phases)
        most = touched + sum(size for _, _, size in tensors) + (warm_bytes or 0)
        if most <= capacity:  # a cache that holds all bytes is equivalent to any larger cache, and evicts nothing
            capacity, residents = most, tuple(0 for _ in phases)
    if in_a_stream:
        dirty_bytes = capacity_bytes * dirty_share(program, 1 - left)
    room, stays = (capacity if dirty_bytes is None else 0), (0 if in_a_stream else capacity_bytes)
    back = _WriteBack(capacity_bytes, room, dirty_bytes or 0.0, stays, most_dirty_bytes) if writes_back else None
    return _residency(phases, residents, tensors, group_count, capacity, (warm_bytes, left), back)


def dirty_share(program: TileProgram, fetched: float = 1.0) -> float:
    """Return the share of written lines among the lines that a program brings into L2; ``fetched``: the share of its
    inputs that it fetches.
    """
    written, read = (sum(t.size_bytes for t in program.tensors.values() if t.role == r) for r in ("output", "input"))
    return written / max(1.0, written + read * fetched)


def _left(program: TileProgram, capacity: int, staying: tuple[float, float, float]) -> float:
    """Return the share of the inputs that launches on the same tensors find in L2.

    A parameter that a launch reads and stores in place has its bytes once.  ``staying``: `memory.l2.stays` of a device
    file.
    """
    read, written = defaultdict[str, int](int), defaultdict[str, int](int)
    for t in program.tensors.values():
        (read if t.role == "input" else written)[t.parameter or t.name] += t.size_bytes
    size = sum(max(read[n], written[n]) for n in {*read, *written})
    whole, none, falls = staying
    whole -= falls * sum(written.values()) / max(1, sum(read.values()) + sum(written.values()))
    return max(0.0, min(1.0, (none - size / max(1, capacity)) / (none - whole)))


@kept_by_blocks(lambda _held, phases, *_: sum(scan.block_count for scan in phases))
def _residency(
    phases: tuple[_BlockScan | _ColumnScan, ...],
    residents: tuple[int, ...],
    tensors: tuple[tuple[str, Role, int], ...],
    group_count: int,
    capacity: int,
    warm: tuple[int | None, float],
    back: _WriteBack | None,
) -> Residency:
    """Return the misses, for all programs whose blocks access the same regions in the same order."""
    cache = _Cache(capacity, *warm, back)
    for number, phase in enumerate(phases):
        if isinstance(phase, _BlockScan) and phase.block_count <= MOST_BLOCKS:
            scan: Iterable[_Step] = _scanned(phase, group_count)[0]
        else:
            scan = phase.steps(group_count, [other.tensors for other in (*phases[:number], *phases[number + 1 :])])
        for touched in scan:
            cache.step(touched, residents[number])
    through = {name: 0.0 if role == "workspace" and size <= capacity else 1.0 for name, role, size in tensors}
    read, used = {name: cache.traffic[name] for name, _, _ in tensors}, cache.traffic.items()
    workspaces = {name for name, role, _ in tensors if role == "workspace"}
    put_out = {name: t.put_out for name, t in used if t.put_out}
    outputs = sum(int(n * (1 if back else through[name])) for name, n in put_out.items() if name not in workspaces)
    others_count = max(1, group_count - 1)
    pushed = sum(t.read_pushes + t.write_pushes for _, t in used)
    # In a stream, a launch evicts as many written bytes as it writes; the next launch writes a workspace that fits into
    # L2 again before its lines are evicted.
    evicted = outputs + sum(n * through[name] for name, n in put_out.items() if name in workspaces)
    scale = evicted / pushed if back and not back.staying_bytes and pushed else 1.0
    return Residency(
        {name: min(1.0, t.missed / t.read) if t.read else 0.0 for name, t in read.items()},
        {name: 0.0 if back else share for name, share in through.items()},
        cache.compulsory + (max(0, outputs - back.staying_bytes) if back else outputs),
        {name: min(1.0, t.met / t.read / others_count) if t.read else 0.0 for name, t in read.items()},
        {name: t.waited / t.read if t.read else 0.0 for name, t in read.items()},
        {name: t.placed / t.written for name, t in used if t.written},
        {name: scale * t.read_pushes / t.read for name, t in used if t.read},
        {name: scale * t.write_pushes / t.written for name, t in used if t.written},
    )


@dataclass(slots=True)
class _Traffic:
    read: int = 0
    missed: int = 0
    waited: float = 0.0  #: bytes that any group reads and that are not in L2
    met: float = 0.0  #: the same bytes, multiplied by the number of other groups that read them
    written: int = 0
    placed: int = 0  #: bytes that are written while no part of them is in L2
    put_out: int = 0  #: bytes of written outputs and workspaces, each counted once
    read_pushes: float = 0.0
    write_pushes: float = 0.0


class _WriteBack(NamedTuple):
    """A write-back L2, in bytes: the size up to which written lines stay, and the free part of it; other data that must
    still be written back; the largest number of output bytes of a program that are never evicted; the largest number of
    written bytes that a full L2 has.
    """

    capacity_bytes: int
    free_bytes: int
    dirty_bytes: float
    staying_bytes: int
    most_dirty_bytes: float


#: Rows, step and largest number of rows of a region that has not been accessed.
_NEVER = (0, 0, 0)


class _Cache:
    """Least recently used, by regions; stores the step of each region's last access.

    ``warm_bytes``: bytes of inputs that are in L2 from the start; None: the share ``left`` of them.  ``back``: None if
    the cache is write-through.
    """

    def __init__(self, capacity: int, warm_bytes: int | None, left: float, back: _WriteBack | None) -> None:
        self.capacity, self.warm_bytes, self.left = capacity, warm_bytes, left
        back = back or _WriteBack(0, 0, 0.0, 0, 0.0)
        self._back_capacity, self._free, self._dirty_bytes, _, self._most_dirty = back
        self._passed = 0  # bytes that have entered L2 since it became full
        self._written_at: dict[Key, int] = {}  # the value of this number when a region was last written
        self.traffic: dict[str, _Traffic] = defaultdict(_Traffic)
        self.compulsory = 0
        # (rows, step) of the last access, and the rows accessed so far
        self._last: dict[Key, tuple[int, int, int]] = {}
        self._step_bytes: list[int] = []  # bytes whose last access was in that step
        self._kept_from = self._kept_bytes = 0  # number of bytes in L2 whose last access was in that step or later
        self._new_bytes = 0  # bytes of regions that are not inputs
        self._begun: dict[str, int] = {}  # step of a tensor's first access
        self._written = defaultdict[str, int](int)  # bytes that a step writes, by tensor

    def step(self, touched: _Step, residents: int) -> None:
        """Add the accesses of all groups in one step; each region is fetched at most once, or once in each of several
        passes.

        ``residents``: blocks of a group that run at the same time, each block between its passes over its own region.
        """
        now, kept_from, capacity, back = len(self._step_bytes), self._kept_from, self.capacity, self._back_capacity
        last, traffic_of, step_bytes, gone = self._last, self.traffic, self._step_bytes, -1.0
        new_reads, new_writes = defaultdict[str, int](int), defaultdict[str, int](int)
        kept, of_step = self._kept_bytes, 0
        step_bytes.append(0)
        for key, use, count in touched:
            traffic, height, row_bytes, role = traffic_of[use.name], use.rows, use.row_bytes, use.role
            size = height * row_bytes
            rows, at, furthest = last.get(key, _NEVER)
            last[key] = height, now, max(height, furthest)
            begun = self._begun.setdefault(key[0], now)
            # If another phase divides a tensor into other regions, these are in L2 if the complete tensor is.
            is_cut = not rows and role == "workspace" and begun < now
            is_kept = (rows > 0 and at >= kept_from) or (is_cut and begun >= kept_from)
            step_bytes[at] -= rows * row_bytes
            of_step += size * count
            kept += (height - (rows if at >= kept_from else 0)) * row_bytes * count
            new = (height - furthest) * row_bytes if height > furthest else 0
            if role != "input":
                self._new_bytes += new * count
            known = height if is_cut else min(rows, height)
            if read_bytes := use.read_bytes:
                traffic.read += read_bytes * count
                if read_bytes > size * use.times:  # other groups also read it
                    traffic.met = _added(traffic.met, read_bytes * (use.readers - 1), count)
            if use.is_write:
                traffic.written += size * count
                placed = (height - (known if is_kept else 0)) * row_bytes * count
                traffic.placed += placed
                new_writes[use.name] += placed
                if back:
                    self._dirtied(key, height, row_bytes, count, use.name)
                if role != "input":
                    traffic.put_out += new * count
                continue
            # the share of rows that have not been accessed yet, also for a region that grows
            warm = self.warm_share(role) if new else 0.0
            if role == "input" and new:
                self.compulsory += ceil(new * (1 - warm)) * count
            hit_bytes = (known * row_bytes if is_kept else 0) + int(warm * new)
            # Every pass over a region fetches it again if it is too large to stay, as it does data that others evict in
            # the meantime.
            passes = use.times if size > capacity else 1
            absent = (size - hit_bytes) * passes
            if passes < use.times and use.readers == 1:  # in the meantime, other blocks access data that they also read
                gone = self._gone(touched, residents) if gone < 0 else gone
                absent += int((use.times - 1) * size * gone)
            if absent:
                traffic.missed += absent * count
                new_reads[use.name] += absent * count
                traffic.waited = _added(traffic.waited, read_bytes * absent / max(1, size * use.times), count)
        step_bytes[now] += of_step
        self._keep(kept)
        self._push_out(new_reads, new_writes)

    def _gone(self, touched: _Step, residents: int) -> float:
        """Return the share of the regions of a step that L2 has evicted when the blocks access them again.

        Between two passes over a byte, every resident block of every group has advanced by one pass: by all bytes that
        it reads, and by the bytes that it writes in a pass.
        """
        most = max(use.times for _, use, _ in touched)
        of_reads = sum(use.rows * use.row_bytes * count for _, use, count in touched if not use.is_write)
        read = {key for key, use, _ in touched if not use.is_write}
        of_writes = sum(u.rows * u.row_bytes * n for key, u, n in touched if u.is_write and key not in read)
        return min(1.0, LOST * residents * (of_reads + of_writes / most) / max(1, self.capacity))

    def warm_share(self, role: str) -> float:
        """Return the share of a region with that role that was in L2 before the start and is still there, if the region
        has not been accessed.
        """
        if role != "input" or self.warm_bytes is None:
            return self.left if role == "input" else 0.0
        return float(self.warm_bytes + self._new_bytes <= self.capacity)

    def _cleaned(self, key: Key) -> float:
        """Return the share of a region that has been written back, or was never written."""
        at = self._written_at.get(key)
        return 1.0 if at is None else -expm1((at - self._passed) / self._back_capacity)

    def _dirtied(self, key: Key, rows: int, row_bytes: int, count: int, name: str) -> None:
        """Mark a region as written: its parts that were written back must be written back again."""
        self._dirty_bytes = _added(self._dirty_bytes, self._cleaned(key) * rows * row_bytes, count)
        self._written_at[key] = self._passed
        self._written[name] += rows * row_bytes * count

    def _write_back(self) -> None:
        """Let the writes of a step evict what a full L2 has beyond the largest number of written bytes."""
        beyond, written = self._dirty_bytes - self._most_dirty, sum(self._written.values())
        if beyond > 0 and written and not self._free:
            self._dirty_bytes = self._most_dirty
            for name, count in self._written.items():
                self.traffic[name].write_pushes += beyond * count / written
        self._written.clear()

    def _push_out(self, reads: Mapping[str, int], writes: Mapping[str, int]) -> None:
        """Let the bytes that enter L2, by tensor, evict their share of the lines that must be written back."""
        new = sum(reads.values()) + sum(writes.values())
        self._free, beyond = max(0, self._free - new), max(0, new - self._free)
        if beyond and self._back_capacity:
            self._passed += beyond
            pushed = self._dirty_bytes * -expm1(-beyond / self._back_capacity)
            self._dirty_bytes -= pushed
            for name, count in reads.items():
                self.traffic[name].read_pushes += pushed * count / new
            for name, count in writes.items():
                self.traffic[name].write_pushes += pushed * count / new
        self._write_back()

    def _keep(self, kept: int) -> None:
        """Advance the first step whose bytes are in L2, until these bytes (``kept``) are no more than fit.

        If blocks scan in step, all regions that were accessed since a byte's last access are accessed again before the
        byte is.
        """
        step_bytes, first = self._step_bytes, self._kept_from
        while kept > self.capacity:
            kept -= step_bytes[first]
            first += 1
        while first and kept + step_bytes[first - 1] <= self.capacity:
            first -= 1
            kept += step_bytes[first]
        self._kept_bytes, self._kept_from = kept, first


@dataclass(slots=True)
class _Use:
    """The extent of a region that one step touches, and the bytes of it that all groups read.

    ``name``: the tensor's name; the tensor may be a view of the tensor that owns the memory.
    """

    name: str
    rows: int
    row_bytes: int
    times: int
    read_bytes: int
    is_write: bool
    role: str

    @property
    def readers(self) -> float:
        """Number of groups that read the tensor, averaged over its bytes; at least one."""
        return max(1.0, self.read_bytes / max(1, self.rows * self.row_bytes * self.times))


def _added(total: float, value: float, count: int) -> float:
    """Return ``total`` with ``value`` added ``count`` times, rounded each time."""
    if count == 1 or (float(total).is_integer() and float(value).is_integer()):  # either exact, or processed once
        return total + value * count
    for _ in range(count):
        total += value
    return total


#: The accesses of all groups in a step.  A region with a count represents this number of successive equal regions, all
#: accessed in this step only.
_Step = list[tuple[Key, _Use, int]]


@kept_by_blocks(lambda _steps, scan, *_: scan.block_count)
def _scanned(scan: _BlockScan, group_count: int) -> tuple[list[_Step], int]:
    """Return the accesses of all groups, step after step, and the bytes of all regions, once each."""
    steps, largest = list(scan.steps(group_count)), dict[Key, int]()
    for touched in steps:
        for key, use, _ in touched:
            if (size := use.rows * use.row_bytes) > largest.get(key, 0):
                largest[key] = size
    return steps, sum(largest.values())


@dataclass(frozen=True, slots=True)
class _BlockScan:
    """The regions that blocks access, computed block by block: equal for equal blocks with an equal footprint."""

    blocks: Itself
    footprint: Scan

    @property
    def block_count(self) -> int:
        return len(self.blocks.thing)

    @property
    def tensors(self) -> None:
        """Names of the accessed tensors: not known."""

    def steps(self, group_count: int, _elsewhere: object = None) -> Iterator[_Step]:
        """Yield the accesses of all groups in each step."""
        payloads: dict[tuple[int, int, int], int] = {}  # by tensor and size: thousands of regions have few sizes
        for start in range(0, len(self.blocks.thing), group_count):
            turns: dict[int, dict[Key, _Use]] = {}
            for touch in self.footprint(self.blocks.thing[start : start + group_count]):
                region = touch.region
                batch = region.batch // max(1, region.tensor.added)
                key = region.tensor.place, batch, region.head, region.row, region.col, region.cols
                sizes = id(region.tensor), region.rows, region.cols
                payload = payloads.get(sizes)
                if payload is None:
                    payload = payloads[sizes] = region.payload_bytes
                size = payload * touch.times if touch.read_bytes is None else touch.read_bytes
                touched = turns.setdefault(touch.turn, {})
                use = touched.get(key)
                if use is None:
                    each, of = payload // region.rows, (touch.is_write, region.tensor.role)
                    touched[key] = _Use(region.tensor.name, region.rows, each, touch.times, size, *of)
                else:
                    use.rows = max(use.rows, region.rows)
                    use.times = max(use.times, touch.times)
                    use.read_bytes += size
            yield from ([(key, use, 1) for key, use in turns[turn].items()] for turn in sorted(turns))


@dataclass(frozen=True, eq=False)
class _ColumnScan:
    """The regions that blocks access, in columns: equal if all regions are equal, independent of the order of
    blocks.
    """

    touches: Sequence[Touches]
    block_count: int

    def __hash__(self) -> int:
        return hash((self.block_count, *((t.tensor.name, t.rows, t.cols) for t in self.touches)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ColumnScan) or len(self.touches) != len(other.touches):
            return False
        return self.block_count == other.block_count and all(map(_are_equal, self.touches, other.touches))

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the accessed tensors, and of the tensors that own their memory."""
        return frozenset(t.tensor.place for t in self.touches)

    def steps(self, _group_count: int, elsewhere: Sequence[frozenset[str] | None]) -> Iterator[_Step]:
        """Yield the accesses of all groups in each step; ``elsewhere``: tensors of the program's other phases."""
        rows, tensors = self._regions
        others = frozenset[str]().union(*(self.tensors if names is None else names for names in elsewhere))
        return _steps_of(rows, tensors, others)

    @cached_property
    def _regions(self) -> tuple[Integers, list[GlobalTensor]]:
        return _joined(self.touches)

    @cached_property
    def touched_bytes(self) -> int:
        """Bytes of all regions, once each."""
        rows, _ = self._regions
        _, which = np.unique(rows[:, _CODE], return_inverse=True)
        largest = np.zeros(int(which.max(initial=-1)) + 1, np.int64)
        np.maximum.at(largest, which, rows[:, _ROWS] * rows[:, _ROW_BYTES])
        return int(largest.sum())


def _are_equal(one: Touches, other: Touches) -> bool:
    content = [(t.name, t.tile, t.tensor, t.rows, t.cols, t.payload_bytes) for t in (one, other)]
    columns = [(t.steps, t.order, *t.corner, t.times, t.read_bytes) for t in (one, other)]
    return content[0] == content[1] and all(map(np.array_equal, *columns))


def _scan_of(phase: ProgramPhase, group_count: int) -> _BlockScan | _ColumnScan:
    """Return the regions that a phase's blocks access, in columns if the footprint has them."""
    blocks, footprint = phase.alone, phase.footprint
    key = (SameBlocks if len(blocks) <= MOST_BLOCKS else Itself)(blocks)
    known = None
    if isinstance(footprint, ColumnScan) and (isinstance(blocks, BlockColumns) or len(blocks) >= LEAST_BLOCKS):
        known = _in_columns(key, footprint, group_count)
    return _BlockScan(key, footprint) if known is None else known


@kept_by_blocks(lambda _scan, blocks, *_: len(blocks.thing))
def _in_columns(blocks: Itself, footprint: ColumnScan, group_count: int) -> _ColumnScan | None:
    touches = footprint.of_columns(blocks.thing, group_count)
    return _ColumnScan(tuple(touches), len(blocks.thing)) if touches else None


def _touched_bytes(scan: _BlockScan | _ColumnScan, group_count: int) -> int:
    return scan.touched_bytes if isinstance(scan, _ColumnScan) else _scanned(scan, group_count)[1]


#: Columns of `_joined`.
_STEP, _CODE, _TENSOR, _IS_WRITE, _ROWS, _COLS, _ROW_BYTES, _TIMES, _READ, _CORNER = range(10)


def _joined(touches: Sequence[Touches]) -> tuple[Integers, list[GlobalTensor]]:
    """Return a row for each region of each block, in the order of accesses, and the tensors by number.

    Rows contain step, code of the region, number of the tensor, whether it is written, rows, columns, bytes of a row,
    reads, bytes read, batch, head, row and column.
    """
    tensors = list({id(t.tensor): t.tensor for t in touches}.values())
    numbers, names = {id(t): n for n, t in enumerate(tensors)}, list(dict.fromkeys(t.place for t in tensors))
    most_names, most_tiles = (1 + max(n) for n in ([t.name for t in touches], [t.tile for t in touches]))
    most_order = 1 + max(int(t.order.max(initial=0)) for t in touches)
    ends = np.cumsum([0, *(len(t.steps) for t in touches)]).tolist()
    rows = np.empty((ends[-1], _CORNER + 4), np.int64)
    for t, start, end in zip(touches, ends, ends[1:], strict=False):
        batch, *corner = t.corner
        read = t.rows, t.cols, t.payload_bytes // t.rows, t.times, t.read_bytes
        order = ((t.steps * most_names + t.name) * most_order + t.order) * most_tiles + t.tile
        is_write = np.equal(t.times, 0)
        of_all = t.steps, order, numbers[id(t.tensor)], is_write, *read, batch // max(1, t.tensor.added), *corner
        for column, values in enumerate(of_all):
            rows[start:end, column] = values
    rows = rows[np.argsort(rows[:, _CODE], kind="stable")]
    of_names = np.array([names.index(t.place) for t in tensors])[rows[:, _TENSOR]]
    regions = np.column_stack([of_names, rows[:, _COLS], rows[:, _CORNER:]])
    codes = numbered(regions)
    rows[:, _CODE] = distinct(regions)[1] if codes is None else codes
    return rows, tensors


def _merged(rows: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the regions of each step without repetition, and whether other steps access them too."""
    _, codes = np.unique(rows[:, _CODE], return_inverse=True)
    _, first, which = np.unique(rows[:, _STEP] * (codes.max() + 1) + codes, return_index=True, return_inverse=True)
    merged = rows[first]
    np.maximum.at(merged[:, _ROWS], which, rows[:, _ROWS])
    np.maximum.at(merged[:, _TIMES], which, rows[:, _TIMES])
    merged[:, _READ] = 0
    np.add.at(merged[:, _READ], which, rows[:, _READ])
    order = np.argsort(first)
    codes = codes[first][order]
    return merged[order], (np.bincount(codes) > 1)[codes]


def _steps_of(rows: Integers, tensors: Sequence[GlobalTensor], others: frozenset[str]) -> Iterator[_Step]:
    """Yield the accesses of all groups in each step; equal regions that are accessed once are combined.

    ``others``: names of tensors whose memory other phases access too.
    """
    is_alone = np.array([tensor.place not in others for tensor in tensors])
    is_once = is_alone[rows[:, _TENSOR]]
    in_order = np.sort(rows[:, _CODE])
    if (in_order[1:] == in_order[:-1]).any():
        rows, is_shared = _merged(rows)
        is_once = ~is_shared & is_alone[rows[:, _TENSOR]]
    of_use = [_STEP, _TENSOR, _IS_WRITE, _ROWS, _COLS, _ROW_BYTES, _TIMES, _READ]
    is_same = (np.diff(rows[:, of_use], axis=0) == 0).all(1) & is_once[1:] & is_once[:-1]
    starts = np.flatnonzero(np.concatenate([[True], ~is_same]))
    counts = np.diff([*starts.tolist(), len(rows)]).tolist()
    first = rows[starts]
    used, which = distinct(first[:, of_use[1:]])
    uses = list[_Use]()
    for number, is_write, height, _, row_bytes, times, read in used.tolist():
        tensor = tensors[number]
        uses.append(_Use(tensor.name, height, row_bytes, times, read, bool(is_write), tensor.role))
    places = [tensor.place for tensor in tensors]
    names = [places[number] for number in first[:, _TENSOR].tolist()]
    keys = zip(names, *first[:, _CORNER:].T.tolist(), first[:, _COLS].tolist(), strict=True)
    listed = list(zip(keys, [uses[number] for number in which.tolist()], counts, strict=True))
    order = np.argsort(first[:, _STEP], kind="stable")
    is_next = np.flatnonzero(np.diff(first[order, _STEP])) + 1
    for start, end in pairwise([0, *is_next.tolist(), len(order)] if len(order) else []):
        yield [listed[at] for at in order[start:end].tolist()]
