"""Loops around products whose kernel was compiled: their time by machine code.

A table of steps does not show decisions of a compiler: which scores wait for a product and which are computed
concurrently with it, whether a scaled Q comes from shared memory in every tile, where masks are applied, and which
registers are spilled.  `loops_of` reads the code of each loop, and `LoopWalk` follows the warps of a core through it,
instruction by instruction: first the warps of one block, which gives the time of an iteration without other blocks;
then the warps of all resident blocks, which gives the time that each block takes from the others.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, deque
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.core_units import DmaEngine, GroupMatrixEngine, LanePipe, LocalMemoryPipe, SharedMemoryPipe
from npusim.formats.layout.fragment import WARP_LANES
from npusim.machines.decisions import LoopWork
from npusim.machines.sm.compiled_rows import (
    AWAIT,
    COMMIT,
    COPY,
    LOCAL,
    NARROW,
    SCOREBOARDS,
    awaited_groups,
    bytes_of,
    control_fields,
    instructions_of,
)
from npusim.machines.sm.core import ALU, FMA, LDG, LSU, MUFU, SM, SPILL, TENSOR, engine_of, warp_issue
from npusim.machines.sm.group_cost import GROUP_ROWS, MATRIX_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.core_units import LoopSpec
    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Phase
    from npusim.machines.decisions import Generation
    from npusim.machines.sm.core import SmTiling

#: Instructions on a pipe of half the width: those of rows, and multiplications of integers.  source: CUDA C++
#: Programming Guide, throughput of arithmetic instructions, compute capability 9.0.
HALF_RATE = NARROW - {"UMOV"} | {"IMAD"}
#: Accesses of a warp to shared memory, and its loads from global memory.
SHARED, LOAD = frozenset({"LDS", "STS", "LDSM", "STSM", "SHFL"}), "LDG"
#: A product of one warp; and an instruction whose only effect is that a warp waits for such a product.
WARP_PRODUCT, PAUSE = "HMMA", "NOP"
#: How much earlier loads of a loop have read near the places of a load: nothing of their line; other parts of the line,
#: but not of the bytes that L2 reads from memory together; a part of these, but not of the bytes that L1 reads
#: together; or the places themselves.
BEYOND, IN_LINE, BESIDE, AGAIN = range(4)
#: Used instead of a warp's number if there is no warp.
NONE = -1
#: All kinds of accesses.
ACCESSES = SHARED | LOCAL | {COPY, LOAD}
#: Stores: their operands are free only when memory has them; other instructions read their operands immediately.
STORES = frozenset({"STS", "STL", "STSM"})
#: Smallest number of bytes of a lane in loads of rows; smaller loads read places.  Number of bytes that a load brings
#: to L1; number that L2 reads from memory at once; bytes of a line of L1.  source: CUDA C++ Programming Guide, global
#: memory (sectors); reports/silicon/decode_loops.json: a loop of SGLang's grouped decode waits for each load of 64
#: bytes of places, and for memory with each.
ROW_BYTES, SECTOR_BYTES, READ_BYTES, LINE_BYTES = 16, 32, 64, 128
#: Bytes along the sum of the product of one warp to which `pipe_cycles` refers (PTX ISA, mma.m16n8k16 of 16 bits).
DEPTH_BYTES = 32
#: Largest number of registers of a lane that an instruction writes.  source: PTX ISA, mma.m16n8k16, ldmatrix.x4 and
#: loads of v4
MOST_RESULTS = 4
#: Base of the numbers in a disassembler's output (nvdisasm, CUDA binary utilities).
HEXADECIMAL = 16
#: Number of simulated rounds of a loop, and number of the first rounds, in which scoreboards and products settle.
ROUNDS, SETTLING = 5, 2
#: Number of bytes that a lane of a warp reads or writes for each matrix of LDSM and STSM (PTX ISA, ldmatrix).
LANE_MATRIX_BYTES = 4


class LoopCore(NamedTuple):
    """The properties of a multiprocessor that determine the time of warps in a loop.

    ``memory_bytes``, ``local_bytes``, ``load_bytes``, ``fill_bytes``: bytes per cycle of shared memory, of spilled
    registers, of loads from L2, and of the part of shared memory's pipe that such loads occupy; ``near``, ``hit``,
    ``far``, ``copied``, ``shuffle``, ``function``, ``drain``: cycles until there is a result from shared memory, from
    L1, from L2, of a copy from L2, from another lane, of a special function, and of a product; ``product``, ``copy``,
    ``fence``: cycles of a warp to issue a product or a copy, and to make stored data visible to products; ``elements``:
    columns of a product per cycle; ``warp_product``: cycles of a sub-core for a product of one warp; ``issue_beside``,
    ``narrow_beside``, ``special_beside``: additional cycles of instructions that run concurrently with a product;
    ``product_delay``: cycles by which each of these delays the product. The other fields are those of
    `compiled_rows.RowCore`.
    """

    warps: int
    subcores: int
    narrow: float
    special: float
    memory_bytes: float
    local_bytes: float
    load_bytes: float
    fill_bytes: float
    near: float
    hit: float
    far: float
    copied: float
    shuffle: float
    function: float
    elements: float
    warp_product: float
    product: float
    drain: float
    copy: float
    fence: float
    barrier: float
    barrier_warp: float
    issue_beside: float
    narrow_beside: float
    special_beside: float
    product_delay: float


class LoopInstruction(NamedTuple):
    """An instruction of a loop: `compiled_rows.MachineInstruction`, with the properties that `loops_of` adds.

    ``is_product``: whether it is a product of a warp group; ``is_of_warp``: whether it is a product of one warp;
    ``is_narrow``: whether its pipe has half the width.
    """

    name: str
    stall: int
    result: int
    operands: int
    waits: int
    details: tuple[int, ...] = ()
    is_product: bool = False
    is_of_warp: bool = False
    is_narrow: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of a lane that an access moves; 0 for other instructions."""
        return self.details[0] if self.details and self.name in ACCESSES else 0

    @property
    def is_place(self) -> bool:
        """Whether the instruction loads places of rows."""
        return self.name == LOAD and self.size_bytes < ROW_BYTES

    @property
    def found(self) -> int:
        """If it loads places: how much of the data near them earlier loads have read."""
        return self.details[1] if self.is_place and len(self.details) > 1 else BEYOND


def _decoded(word: str) -> LoopInstruction:
    name, _, text = word.partition(":")
    name, _, listed = name.partition("*")
    details = tuple(map(int, filter(None, listed.split(","))))
    fields = control_fields(int(text, HEXADECIMAL))
    return LoopInstruction(name, *fields, details, name.endswith("GMMA"), name == WARP_PRODUCT, name in HALF_RATE)


def has_loops(ptx: str) -> bool:
    """Return whether, according to the PTX from which the code was assembled, `loops_of` may find loops around
    products.
    """
    return "wgmma" in ptx or "mma.sync" in ptx


def loops_of(sass: str) -> list[str]:
    """Return the code of each innermost loop around products, in the order of the code.

    There is a word for each instruction, as in `compiled_rows`.  It states, for a product of warp groups, the product's
    columns, 1 if its left operand is in shared memory, and 1 if it is the last of the products for which warps wait
    together; for a product of one warp, the bytes along its sum; for a wait for products or copies, the number of
    groups that may remain; for an access, the bytes of a lane; for a load of places, how much earlier loads have read
    near these.  Code with products of warps that are not of 16 bits or TF32 has no loops.  If a compiler has made one
    loop of the loop over tiles and that over their sum (``flatten``), most iterations skip the code between tiles,
    which is left out.
    """
    code = instructions_of(sass)
    targets = [(at, re.search(r"0x([0-9a-f]+)\s*$", rest)) for at, name, rest, _ in code if name == "BRA"]
    spans = [(int(to[1], HEXADECIMAL), at) for at, to in targets if to and int(to[1], HEXADECIMAL) < at]
    products = [at for at, name, *_ in code if name.endswith("MMA")]
    of_warps = [(name, rest) for _, name, rest, _ in code if name.endswith("MMA") and not name.endswith("GMMA")]
    if any(name != WARP_PRODUCT or not _depth_bytes(rest) for name, rest in of_warps):
        return []
    around = [(a, b) for a, b in spans if any(a <= at <= b for at in products)]
    inner = [x for x in around if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in around)]
    bodies = ([x for x in code if a <= x[0] <= b and (of_warps or x[1] != PAUSE)] for a, b in sorted(inner))
    bodies = (_without_skipped(body, [to for to in targets if to[1]]) for body in bodies)
    return [" ".join(map(_word, body, _found([(name, rest) for _, name, rest, _ in body]))) for body in bodies]


def _without_skipped(
    body: list[tuple[int, str, str, int]], targets: Sequence[tuple[int, re.Match[str] | None]]
) -> list[tuple[int, str, str, int]]:
    """Return the code of a loop without what its branches skip, if some of that stores results and none multiplies."""
    first, last = body[0][0], body[-1][0]
    skips = [(at, int(to[1], HEXADECIMAL)) for at, to in targets if to]
    skips = [(at, to) for at, to in skips if first <= at < to <= last]
    skipped = [[x for x in body if at < x[0] < to] for at, to in skips]
    is_between_tiles = any(x[1] == "STG" for part in skipped for x in part)
    if not is_between_tiles or any(x[1].endswith("MMA") for part in skipped for x in part):
        return body
    left_out = {x[0] for part in skipped for x in part}
    return [x for x in body if x[0] not in left_out]


def _word(instruction: tuple[int, str, str, int], found: int | None) -> str:
    _, name, rest, control = instruction
    return f"{name}{_details(name, rest)}{'' if found is None else f',{found}'}:{control:x}"


def _found(code: Sequence[tuple[str, str]]) -> list[int | None]:
    """Return, for each load of places, how much earlier loads have read near these places; None for all other
    instructions.

    Loads whose addresses are sums with the same registers read equal or neighbouring bytes; tiles begin at the
    beginning of a line.
    """
    sectors, found = set[tuple[str, int]](), list[int | None]()
    for name, rest in code:
        is_place = name == LOAD and bytes_of(rest) < ROW_BYTES
        at = re.search(r"\[(R\d+)[^\]]*?(?:\+(-?0x[0-9a-f]+))?\]\s*$", rest)
        if at is None or not is_place:
            found.append(None)
        else:
            place = int(at[2] or "0", HEXADECIMAL)
            read = [p for r, p in sectors if r == at[1]]
            nearer = [any(p // size == place // size for p in read) for size in (LINE_BYTES, READ_BYTES, SECTOR_BYTES)]
            found.append((BEYOND, IN_LINE, BESIDE, AGAIN)[sum(nearer)])
            sectors.add((at[1], place))
        sectors = {x for x in sectors if x[0] not in _written(name, rest)}
    return found


def _written(name: str, rest: str) -> set[str]:
    """Return the registers in which an instruction may change an address: that of its first operand, and the one before
    it.
    """
    kind = rest.partition(" ")[0]
    first = re.match(r"[.\w]*\s+(?:!?U?P\w+,\s*)*R(\d+)\b(?!\S*\])", rest)
    if first is None or name in STORES or name == COPY:
        return set()
    is_wide = name.endswith("MMA") or name == "LDSM" or ".128" in kind
    count = MOST_RESULTS if is_wide else 2 if ".64" in kind or ".WIDE" in kind else 1
    return {f"R{int(first[1]) + i}" for i in range(-1, count)}


def _depth_bytes(rest: str) -> int:
    """Return the bytes along the sum of a product of a warp; 0 if they are unknown."""
    if ".16816." in rest:
        return DEPTH_BYTES
    return (DEPTH_BYTES if "TF32" in rest else DEPTH_BYTES // 2) if ".1688." in rest else 0


def _details(name: str, rest: str) -> str:
    if name.endswith("GMMA") and (columns := re.search(r"64x(\d+)x", rest)):
        left = rest.split(",")[1] if "," in rest else ""
        return f"*{columns[1]},{int('gdesc' in left)},{int('gsb' in rest)}"
    if name == AWAIT:
        return f"*{awaited_groups(rest)}"
    if name == "WARPGROUP":
        groups = re.search(r"DEPBAR.*0x([0-9a-f]+)\s*$", rest)
        return f"*{int(groups[1], HEXADECIMAL)}" if groups else ""
    if name in ("LDSM", "STSM"):
        matrices = re.search(r"M88\.(\d)", rest) or re.search(r"\.(\d)\b", rest)
        return f"*{LANE_MATRIX_BYTES * int(matrices[1] if matrices else 1)}"
    if name == WARP_PRODUCT:
        return f"*{_depth_bytes(rest)}"
    return f"*{bytes_of(rest)}" if name in ACCESSES else ""


class _WarpState:
    """The progress of a warp: its next instruction, the time at which this may begin, scoreboards, copies
    and products.
    """

    __slots__ = ("arrivals", "at", "committed", "ended", "now", "queue", "ready", "sent", "until")

    def __init__(self, now: float) -> None:
        self.now, self.at, self.ready = now, 0, [0.0] * SCOREBOARDS
        #: Products that have not begun, the number of groups of products that were issued, and the times at which
        #: groups ended.
        self.queue, self.sent, self.ended = deque[LoopInstruction](), 0, list[float]()
        #: The group of products for which the warp waits; 0: none.
        self.until = 0
        #: The time at which the last copy arrives, and the time of the last copy in each group of copies for which a
        #: warp may wait.
        self.arrivals, self.committed = 0.0, list[float]()


class LoopWalk:
    """The warps of some blocks on a sub-core, in a loop, instruction by instruction.

    Each block begins ``apart`` cycles after the previous one.  All sub-cores do the same work, so that each has its
    share of the pipe of shared memory.  A warp's instruction begins when the stall of the previous one is over, its
    scoreboards are ready, its sub-core issues no other instruction, and its pipe is free; the warp that could begin
    first has precedence.  Products of several warp groups alternate.  Instructions that run concurrently with a product
    take longer and delay it, and so do accesses to the shared memory that it reads.  Waits for copies are counted only
    for several blocks; for a single block the engine simulates them.  ``beyond``: additional cycles of places from
    memory, compared with places from L2.
    """

    def __init__(
        self, code: Sequence[LoopInstruction], core: LoopCore, blocks: int = 1, apart: float = 0.0, beyond: float = 0.0
    ) -> None:
        self.code, self.core, self.is_alone, self.beyond = code, core, blocks == 1, beyond
        self.each = max(1, core.warps // core.subcores)
        self.warps = [_WarpState(0.0) for _ in range(blocks * self.each)]
        self.issue = self.narrow = self.tensor = self.special = self.memory = self.loads = 0.0
        #: The warp whose product is in progress, the product, and the time at which it ends.
        self.multiplies, self.product, self.end = NONE, code[0], 0.0
        #: The shares of the product's time in which it uses shared memory, and tensor cores, which share register ports
        #: with other instructions.
        self.ports = self.share = 0.0
        self.turn = 0
        self.meeting: dict[int, list[tuple[float, int]]] = {}
        self.ends: list[list[float]] = [[] for _ in self.warps]
        #: The time at which the first copy of each round is issued; if loads of places delay copies, the last copy.
        self.copied: list[float] = []
        self.delays = any(x.is_place and x.found != AGAIN for x in code)
        #: The time at which a warp may begin its next instruction, the time at which it could if nothing were in use,
        #: and the warp's number.
        self.events = [(apart * (i // self.each), 0.0, i) for i in range(len(self.warps))]

    def cycles(self) -> tuple[float, float]:
        """Return the cycles of an iteration of all blocks, and of its part before the first copy of a later tile."""
        while self.events:
            now, since, i = heapq.heappop(self.events)
            if i == NONE:
                self._end_product(now)
            else:
                self._step(now, since, i)
        whole = sum(e[-1] - e[SETTLING - 1] for e in self.ends) / len(self.ends) / (ROUNDS - SETTLING)
        before = self.copied[-1] - max(e[-2] for e in self.ends) if len(self.copied) == ROUNDS else whole
        return whole, min(whole, max(0.0, before))

    def _step(self, now: float, since: float, i: int) -> None:
        """Issue a warp's next instruction, or queue the warp again for the time at which the instruction may begin."""
        warp, core = self.warps[i], self.core
        x = self.code[warp.at]
        begin = max(now, self.issue, self.narrow if x.is_narrow else 0.0, self.tensor if x.is_of_warp else 0.0)
        if begin > now:
            heapq.heappush(self.events, (begin, since, i))
            return
        self.issue = now + 1
        if self.ports:
            self.issue += core.issue_beside * self.ports
            self.end += core.product_delay * self.ports
        if x.is_of_warp:
            self.tensor = now + _warp_product_cycles(x, core)
        if x.is_narrow:
            self.narrow = now + core.narrow + core.narrow_beside * self.ports
        if x.name == "BAR":
            self._meet(now, i)
            return
        free, came = self._executed(x, warp, now, i)
        if x.result < SCOREBOARDS:
            warp.ready[x.result] = max(warp.ready[x.result], came)
        if x.operands < SCOREBOARDS:
            read = came if x.name in STORES else now + core.function
            warp.ready[x.operands] = max(warp.ready[x.operands], read)
        if not warp.until:
            self._go_on(i, max(free, self.issue, now + x.stall))

    def _meet(self, now: float, i: int) -> None:
        """Let a warp wait for the others of its block."""
        met, core = self.meeting.setdefault(i // self.each, []), self.core
        met.append((now, i))
        if len(met) == self.each:
            end = max(at for at, _ in met) + core.barrier + core.barrier_warp * core.warps
            for _, j in met:
                self._go_on(j, end)
            met.clear()

    def _go_on(self, i: int, now: float) -> None:
        """Queue a warp for its next instruction, or end it after its last round."""
        warp = self.warps[i]
        warp.at += 1
        if warp.at == len(self.code):
            warp.at = 0
            self.ends[i].append(now)
            if len(self.ends[i]) == ROUNDS:
                return
        waits = self.code[warp.at].waits
        if waits:
            now = max([now, *(warp.ready[k] for k in range(SCOREBOARDS) if waits >> k & 1)])
        heapq.heappush(self.events, (now, now, i))

    def _executed(self, x: LoopInstruction, warp: _WarpState, now: float, i: int) -> tuple[float, float]:
        """Return the times at which the warp may continue after an instruction, and at which its result exists."""
        core, name = self.core, x.name
        if x.is_product:
            return self._multiplied(x, warp, now), now + core.function
        if name == "WARPGROUP":
            return self._waited(x, warp, now), now + core.function
        if name == "MUFU":
            begin = max(now, self.special)
            self.special = begin + core.special + core.special_beside * self.ports
            return now, begin + core.function
        if name in ACCESSES:
            return self._accessed(x, warp, now, i)
        if name == COMMIT:
            warp.committed.append(warp.arrivals)
        elif name == AWAIT and not self.is_alone:
            done = max(0, len(warp.committed) - x.details[0])
            now = max([now, *warp.committed[:done]])
            del warp.committed[:done]
        return now + (core.fence if name == "MEMBAR" else 0.0), now + core.function

    def _accessed(self, x: LoopInstruction, warp: _WarpState, now: float, i: int) -> tuple[float, float]:
        """Return these times for an access to memory."""
        core, name = self.core, x.name
        moved = WARP_LANES * x.size_bytes * core.subcores  # bytes of all sub-cores, because all do the same work
        if name in SHARED:
            begin = self._through_memory(moved / core.memory_bytes, now)
            return now, begin + (core.shuffle if name == "SHFL" else core.near)
        if name in LOCAL:
            begin = self._through_memory(moved / core.local_bytes, now)
            return now, self.memory + core.near
        if x.is_place and x.found == AGAIN:
            return now, self._through_memory(moved / core.memory_bytes, now) + core.hit
        self._filled(moved / core.fill_bytes, now)
        self.loads = max(now, self.loads) + moved / core.load_bytes
        if name == LOAD:
            is_beyond = x.is_place and x.found <= IN_LINE
            return now, self.loads + core.far + (self.beyond if is_beyond else 0.0)
        if i == 0 and len(self.copied) == len(self.ends[0]):
            self.copied.append(now)
        elif i == 0 and self.delays:
            self.copied[-1] = now
        warp.arrivals = self.loads + core.copied
        return now + core.copy, now + core.function

    def _through_memory(self, cycles: float, now: float) -> float:
        """Occupy the pipe of shared memory, which delays a product that reads shared memory; return the time at which
        this begins.
        """
        begin = max(now, self.memory)
        self.memory = begin + cycles * (1 + self.share)
        self.end += cycles * self.share
        return begin

    def _filled(self, cycles: float, now: float) -> None:
        """Occupy the same pipe with data from L2, which have precedence over a product."""
        self.memory = max(now, self.memory) + cycles
        self.end += cycles * self.share

    # ---------------------------------------------------------------- products

    def _multiplied(self, x: LoopInstruction, warp: _WarpState, now: float) -> float:
        """Queue a product; return the time at which its warp continues."""
        warp.queue.append(x)
        warp.sent += x.details[2]
        if self.multiplies == NONE:
            self._begin_product(now)
        return now + self.core.product

    def _waited(self, x: LoopInstruction, warp: _WarpState, now: float) -> float:
        """Return the time at which the products for which a warp waits have ended; if the time is unknown, the warp
        continues at their end.
        """
        group = warp.sent - x.details[0] if x.details else 0
        if group <= 0:
            return now
        if len(warp.ended) >= group:
            return max(now, warp.ended[group - 1])
        warp.until = group
        return now

    def _begin_product(self, now: float) -> None:
        """Begin the next product of the next warp that has one."""
        count = len(self.warps)
        for i in (j % count for j in range(self.turn, self.turn + count)):
            if self.warps[i].queue:
                self.multiplies, self.product, self.turn = i, self.warps[i].queue.popleft(), i + 1
                tensor, memory = _product_cycles(self.product, self.core)
                whole = max(tensor, memory)
                self.end, self.ports, self.share = now + whole, tensor / whole, memory / whole
                heapq.heappush(self.events, (self.end, 0.0, NONE))
                return

    def _end_product(self, now: float) -> None:
        """End a product, unless it was delayed; let a warp that waited for it continue, and begin the next product."""
        if self.end > now:
            heapq.heappush(self.events, (self.end, 0.0, NONE))
            return
        i, self.multiplies, self.ports, self.share = self.multiplies, NONE, 0.0, 0.0
        warp = self.warps[i]
        if self.product.details[2]:
            warp.ended.append(now + self.core.drain)
            if warp.until and len(warp.ended) >= warp.until:
                warp.until = 0
                self._go_on(i, warp.ended[-1])
        self._begin_product(now)


def _product_cycles(x: LoopInstruction, core: LoopCore) -> tuple[float, float]:
    """Return the cycles of tensor cores and of shared memory for one product."""
    columns, is_near, _ = x.details
    return columns / core.elements, MATRIX_BYTES * (columns + is_near * GROUP_ROWS) / core.memory_bytes


def _warp_product_cycles(x: LoopInstruction, core: LoopCore) -> float:
    """Return the cycles of a sub-core's tensor cores for a product of one warp."""
    return core.warp_product * x.details[0] / DEPTH_BYTES


def _first_loaded(code: Sequence[LoopInstruction], core: LoopCore) -> float:
    """Return the bytes that a block loads into registers for its first product; they belong to at most one of the two
    operands.
    """
    first = next((i for i, x in enumerate(code) if x.is_product or x.is_of_warp), 0)
    loads = [(i, x.size_bytes) for i, x in enumerate(code) if x.name == LOAD]
    before, every = (sum(n for i, n in loads if i < until) for until in (first, len(code)))
    return WARP_LANES * core.warps * min(before, every / 2)


@lru_cache(maxsize=256)  # a few entries for each kernel
def loop_work(body: str, core: LoopCore, blocks: int, *, is_placed: bool = False, is_known: bool = False) -> LoopWork:
    """Return the work of a block in an iteration of a loop according to its code, if this number of blocks is resident.

    ``is_placed``: whether its small loads read places of rows; ``is_known``: whether earlier blocks of the same
    multiprocessor have read these places, so that L1 has all but the first load of each line.
    """
    code = [_decoded(word) for word in body.split()]
    if is_known:
        # Mean error for 9 tiles of LightLLM on an H200 (reports/tune/recorded.csv): 6.3 %; with only sectors it is 11.3
        # %.
        code = [x._replace(details=(x.size_bytes, AGAIN)) if x.is_place and x.found != BEYOND else x for x in code]
    each, names = core.warps / core.subcores, Counter(x.name for x in code)
    whole, before = held, _ = LoopWalk(code, core).cycles()
    # blocks are out of step: they are distributed over an iteration; blocks of few warps are side by side
    if blocks > 1:
        beside = max(1, round(blocks * min(1.0, each)))
        held = min(held, LoopWalk(code, core, beside, whole / beside).cycles()[0] / blocks)
    lookups = 0
    if is_placed:  # the engine simulates these waits, as it does for rows
        lookups = round((LoopWalk(code, core, beyond=core.far).cycles()[1] - before) / core.far)
        before, whole = before - lookups * core.far, whole - lookups * core.far
    if (loads := _first_loaded(code, core)) and not names[COPY]:
        before = whole = max(0.0, whole - core.copied - loads / core.load_bytes)
    moved = {kind: sum(x.size_bytes for x in code if x.name in kind) for kind in (SHARED | {COPY}, LOCAL)}
    product = sum(_product_cycles(x, core)[0] for x in code if x.is_product)
    return LoopWork(
        before=before,
        after=whole - before,
        held=whole if blocks == 1 else held,
        issued=len(code) * each,
        narrow=sum(n for name, n in names.items() if name in HALF_RATE) * core.narrow * each,
        special=names["MUFU"] * core.special * each,
        product=(product + sum(_warp_product_cycles(x, core) for x in code if x.is_of_warp)) * each,
        memory=WARP_LANES * core.warps * moved[SHARED | {COPY}] / core.memory_bytes,
        local=WARP_LANES * core.warps * moved[LOCAL] / core.local_bytes,
        lookups=lookups,
    )


def with_loops(tiling: SmTiling, loops: Sequence[str], phase: Phase, device: DeviceSpec) -> SmTiling:
    """Return the tiling of a compiled kernel with the work of its loops according to their code, if the code is known.

    This applies if products read results that rows of the same tile compute, as in attention, and if the code waits in
    each iteration for an operand that it loads into registers while it copies the other one ahead.  (For other loops of
    only products, which continue from one iteration to the next, the walk is 15 % too slow: 17 products of the H100's
    sweep.)  A single loop processes all tiles; of two loops, the longer one has the masks, and processes the masked
    tiles.  Any other tiling, and that of a device without ``sharing.loops`` or without products of warp groups, for
    which the walk was measured, is unchanged.
    """
    decided, spec = tiling.decided, warp_issue(device).sharing.loops
    is_read = spec is not None and decided.roles == "alike" and decided.stages > 0
    is_walked = _feeds_products(phase) or any(map(_awaits_an_operand, loops))
    if not is_read or not is_walked or not 0 < len(loops) <= 1 + bool(phase.masks):
        return tiling
    if engine_of(device, TENSOR, GroupMatrixEngine).wgmma is None:
        return tiling
    assert spec is not None
    core = _core_of(device, spec, decided.warps * decided.groups, decided.generation)
    bodies = sorted(loops, key=lambda body: body.count(" "))
    is_known = bool(phase.looked_up) and _reads_of_a_place(phase) >= device.group_count.value
    works = tuple(
        loop_work(body, core, tiling.residents, is_placed=bool(phase.looked_up), is_known=is_known) for body in bodies
    )
    # The code states how often it waits for places that it loads.
    return replace(tiling, decided=decided._replace(loops=works, awaits_places=False))


def _awaits_an_operand(body: str) -> bool:
    """Return whether a loop loads rows into registers, beside those that it copies to shared memory."""
    code = [_decoded(word) for word in body.split()]
    return any(x.name == COPY for x in code) and any(x.name == LOAD and not x.is_place for x in code)


def _reads_of_a_place(phase: Phase) -> float:
    """Return the average number of blocks that read each key of a sequence."""
    keys: dict[int, tuple[int, int]] = {}
    for cell in phase.cells:
        for run in cell.runs:
            first, last = keys.get(cell.batch, (run.first, run.last))
            keys[cell.batch] = min(first, run.first), max(last, run.last)
    read = sum(run.cols * run.count for cell in phase.cells for run in cell.runs)
    return read / max(1, sum(last - first for first, last in keys.values()))


def _feeds_products(phase: Phase) -> bool:
    """Return whether a phase is one loop over tiles, in which rows compute what its products read."""
    looped = [loop.stages for loop in phase.loops if loop.axis and any(s.is_product for s in loop.stages)]
    read = {n for stages in looped for s in stages if s.is_product for n in s.rows[0].srcs}
    return len(looped) == 1 and any(read.intersection(s.written) for s in looped[0] if not s.is_product)


def _core_of(device: DeviceSpec, spec: LoopSpec, warps: int, generation: Generation) -> LoopCore:
    """Return a device's multiprocessor with one block of this number of warps."""
    issue, memory, copies = warp_issue(device), engine_of(device, LSU, SharedMemoryPipe), device.engine(SM, LDG)
    special, tensor = engine_of(device, MUFU, LanePipe), engine_of(device, TENSOR, GroupMatrixEngine)
    narrow = engine_of(device, ALU if ALU in device.core(SM).engines else FMA, LanePipe)
    local, sharing = device.core(SM).engines.get(SPILL), issue.sharing
    assert isinstance(copies, DmaEngine)
    assert tensor.wgmma is not None
    load, memory_bytes = copies.route("GM", "RF"), memory.banks_count.value * memory.bank_bytes.value * memory.rate
    return LoopCore(
        warps=warps,
        subcores=issue.subcores_count.value,
        narrow=WARP_LANES / (narrow.lanes_count.value * narrow.rate),
        special=WARP_LANES / (special.lanes_count.value * special.rate),
        memory_bytes=memory_bytes,
        local_bytes=local.bytes_per_cycle.value * local.rate if isinstance(local, LocalMemoryPipe) else memory_bytes,
        load_bytes=load.bytes_per_cycle.value * copies.rate,
        fill_bytes=spec.fill_bytes_per_cycle.value * copies.rate,
        near=float(memory.latency_cycles.value),
        hit=float(spec.hit_cycles.value),
        far=float(sharing.lookup_cycles.value),
        copied=float(load.latency_cycles.value),
        shuffle=float(memory.shuffle_latency_cycles.value),
        function=float(special.latency_cycles.value),
        warp_product=tensor.mma.pipe_cycles.value / tensor.rate,
        elements=tensor.wgmma.elements_per_cycle.value * tensor.rate,
        product=float(tensor.wgmma.issue_cycles.value),
        drain=float(tensor.wgmma.drain_cycles.value),
        copy=float(sharing.copy_cycles[generation].value),
        fence=float(sharing.fence_cycles.value),
        barrier=sharing.barrier_cycles.value,
        barrier_warp=sharing.barrier_warp_cycles.value,
        issue_beside=spec.issue_beside_cycles.value,
        narrow_beside=spec.narrow_beside_cycles.value,
        special_beside=spec.special_beside_cycles.value,
        product_delay=spec.product_delay_cycles.value,
    )
