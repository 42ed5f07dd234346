"""Rows whose kernel was compiled: a block's cost from its machine code instead of a table of steps.

A compiler's code differs from a step's usual instructions: a quotient by a number of the row is one reciprocal per row,
conversions from float16 are multiplications, and loads are as wide as addresses allow.  The time of a single warp also
follows from the code: each instruction states its stall and the results for which it waits.

Source of these fields: bits 105 to 125 of the 128 bits of an instruction on sm_70 to sm_90, which NVIDIA does not
document: 4 bits contain the cycles until the next instruction, 1 bit lets another warp issue first, 3 bits contain
the scoreboard that is set when the result exists, 3 bits the scoreboard that is set when operands are read, and 6 bits
a mask of the scoreboards for which the instruction waits.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from npusim.config.core_units import DmaEngine, LanePipe, SharedMemoryPipe
from npusim.formats import stored_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.kernels.form.flow import is_visited
from npusim.machines.decisions import Charge, CodeWork, StateLoop
from npusim.machines.sm.core import (
    ALU,
    FMA,
    LDG,
    LSU,
    MUFU,
    REGISTER_BYTES,
    RETIRE,
    SM,
    WARPS,
    counts_turnover,
    engine_of,
    warp_issue,
)
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Phase
    from npusim.machines.decisions import GpuDecisions
    from npusim.machines.sm.core import SmTiling

#: Architectures whose instructions have these fields, and the number of a warp's scoreboards (the value 7 names no
#: scoreboard).
FIRST, LAST, SCOREBOARDS = 70, 90, 6
#: Instructions on a pipe of half the width.  source: CUDA C++ Programming Guide, throughput of arithmetic instructions,
#: compute capability 9.0: integer additions, logic, shifts, comparisons and conversions have 64 results per cycle.
NARROW = frozenset(
    {"LOP3", "ISETP", "IADD3", "SHF", "LEA", "FMNMX", "FSETP", "FSEL", "SEL", "P2R", "R2P", "PRMT", "F2FP", "VOTE"}
    | {"POPC", "IMNMX", "PLOP3", "UMOV"}
)
#: Accesses to shared memory, and to registers that were spilled.
SHARED, LOCAL = frozenset({"LDS", "STS", "SHFL"}), frozenset({"LDL", "STL"})
#: The kind of a body that is executed once.
ONCE = "once"
#: A copy from global to shared memory; the instruction that combines the previous copies into a group, and the
#: instruction that waits for such groups.
COPY, COMMIT, AWAIT = "LDGSTS", "LDGDEPBAR", "DEPBAR"
#: Cycles of a read of global memory in the walk: an arbitrary number far above all others, because the engine simulates
#: this wait.
FAR = float(1 << 14)
#: Time of a load from L2 in a walk that counts waits, where a load from memory takes 1: it is small, so that the two
#: can be distinguished.
NEAR = 1 / 64
#: Rounds in which a loop's scoreboards reach a steady state.
ROUNDS = 3
#: Where the fields begin in the upper half of an instruction.  source: as above.
_CONTROL_BIT = 105 - 64
#: Places and masks of the fields in these 21 bits.  source: as above.
_STALL, _RESULT, _OPERANDS, _WAITS, _ALL = (0, 15), (5, 7), (8, 7), (11, 63), (0, (1 << 21) - 1)
_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\w+)([^;]*);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/"
)


class MachineInstruction(NamedTuple):
    """A machine instruction without its operands.

    ``stall``: cycles until the next instruction; ``result``, ``operands``: scoreboards that the instruction sets (7:
    none); ``waits``: a mask of scoreboards; ``number``: bytes that each lane moves from or to global memory, or, of a
    wait for copies, the groups of copies that may be under way after it.
    """

    name: str
    stall: int
    result: int
    operands: int
    waits: int
    number: int = 0


class RowCore(NamedTuple):
    """The properties of a multiprocessor that determine the time of the warps of one block of rows.

    ``waits``: cycles until the result of an instruction that sets a scoreboard exists, by name; ``others``: the same
    for all other instructions; ``near``: the same for a read of L2.  ``load_bytes``, ``store_bytes``: bytes per cycle
    from L2 and to L2. ``narrow``, ``special``: cycles for which an instruction uses a sub-core's pipe of half the
    width, and its pipe of special functions.  ``barrier``, ``barrier_warp``: cycles of a barrier, and its additional
    cycles for each warp.
    """

    waits: tuple[tuple[str, float], ...]
    others: float
    near: float
    load_bytes: float
    store_bytes: float
    warps: int = 1
    subcores: int = 1
    narrow: float = 1.0
    special: float = 1.0
    barrier: float = 0.0
    barrier_warp: float = 0.0


def has_body(ptx: str, architecture: str) -> bool:
    """Return whether `body_of` finds the code of a warp, judged by the PTX from which the code was assembled."""
    return _is_known(architecture) and not re.search(r"\b(?:wgmma|mma|tcgen05)\b", ptx)


def _is_known(architecture: str) -> bool:
    return FIRST <= int(architecture.rpartition("_")[2] or 0) <= LAST


def body_of(sass: str, architecture: str) -> str:
    """Return the code of a warp for a block or a row, as text for `code_work`; empty if it is unknown.

    The body is the loop that loads from global memory, with ``loop`` before its instructions: to registers, or, if no
    loop does, to shared memory; of code without loads, the loop that stores.  Without such a loop it is all
    instructions up to the last EXIT, with ``once`` before them, or ``again`` if a loop stores.  Code with products, and
    code for architectures outside `FIRST` to `LAST`, has no body.
    """
    code = instructions_of(sass)
    if not _is_known(architecture) or not code or any(name.endswith("MMA") for _, name, *_ in code):
        return ""
    kind, first, last = _span_of(code)
    body = [
        (name + _number_of(name, rest), control)
        for at, name, rest, control in code
        if first <= at <= last and name != "NOP"
    ]
    return " ".join([kind, *(f"{name}:{control:x}" for name, control in body)])


def _span_of(code: Sequence[tuple[int, str, str, int]]) -> tuple[str, int, int]:
    """Return the kind of a body, and the addresses of its first and last instruction: see `body_of`."""
    targets = [(at, re.search(r"0x([0-9a-f]+)\s*$", rest)) for at, name, rest, _ in code if name == "BRA"]
    spans = [(int(to[1], 16), at) for at, to in targets if to and int(to[1], 16) < at]

    def loop_of(access: str) -> tuple[int, int] | None:
        places = [at for at, name, *_ in code if name == access]
        return next(((a, b) for a, b in spans if any(a <= at <= b for at in places)), None)

    stored, has_loads = loop_of("STG"), any(name in ("LDG", COPY) for _, name, *_ in code)
    if loop := loop_of("LDG") or loop_of(COPY) or (None if has_loads else stored):
        return "loop", *loop
    end = max((at for at, name, *_ in code if name == "EXIT"), default=code[-1][0])
    return "again" if stored else ONCE, 0, end


def instructions_of(sass: str) -> list[tuple[int, str, str, int]]:
    """Return the instructions of machine code: address, name, the rest of the text, and the fields named above."""
    found = _LINE.findall(sass)
    return [(int(at, 16), name, rest, int(high, 16) >> _CONTROL_BIT & _ALL[1]) for at, name, rest, high in found]


def _number_of(name: str, rest: str) -> str:
    """Return the number of `MachineInstruction` as a suffix: ``*16``."""
    if name == AWAIT:
        return f"*{awaited_groups(rest)}"
    return f"*{bytes_of(rest)}" if name in ("LDG", "STG") else ""


def bytes_of(rest: str) -> int:
    """Return the bytes of a lane that an access moves, from the text after its name."""
    width = re.match(r"[.\w]*?\.(?:U|S)?(8|16|64|128)\b", rest)
    return int(width[1]) // 8 if width else REGISTER_BYTES


def awaited_groups(rest: str) -> int:
    """Return the number of groups of copies that may be under way after a wait for copies, from the text after its
    name.
    """
    groups = re.search(r"0x([0-9a-f]+)\s*$", rest)
    return int(groups[1], 16) if groups else 0


def _decoded(word: str) -> MachineInstruction:
    name, _, text = word.partition(":")
    name, _, size = name.partition("*")
    return MachineInstruction(name, *control_fields(int(text, 16)), int(size or 0))


def control_fields(control: int) -> tuple[int, int, int, int]:
    """Return stall, result, operands and waits of `MachineInstruction`."""
    stall, result, operands, waits = (control >> at & mask for at, mask in (_STALL, _RESULT, _OPERANDS, _WAITS))
    return stall, result, operands, waits


@lru_cache(maxsize=256)  # one entry per kernel
def code_work(body: str, core: RowCore, unrolled: int = 1, parts: float = 1) -> CodeWork:
    """Return the work of a block's warps for one row, from the instructions of a body that computes
    ``unrolled`` rows one after the other, or ``parts`` blocks at once (not whole if these differ).
    """
    is_loop, code = _read(body)
    rounds = ROUNDS if is_loop else 1
    of_round = BlockWalk(code, core, FAR, unrolled).last_round(rounds)
    alone, is_ahead = of_round - FAR * max(1, of_round // FAR if unrolled > 1 else 1), False
    if is_loop:
        whole = BlockWalk(code, core, 0.0, unrolled).last_round(rounds)
        # a round loads or copies the data of a later round, which hides most of the time of the loads
        if is_ahead := not _widest(code, "LDG")[1] or (2 * alone < whole and _has_loads_under_way(code)):
            alone = whole
    names = Counter(x.name for x in code)

    def count(listed: frozenset[str]) -> int:
        return ceil(sum(n for name, n in names.items() if name in listed) / (unrolled * parts))

    counted = count(frozenset(names)), count(NARROW), count(frozenset({"MUFU"})), count(SHARED)
    return CodeWork(max(1.0, alone / (unrolled * parts)), *counted, count(frozenset({"BAR"})), count(LOCAL), is_ahead)


def unrolled_rows(body: str, phase: Phase, decided: GpuDecisions) -> int:
    """Return the number of rows that one round of a body's loop stores: compilers unroll loops over rows."""
    is_loop, code = _read(body)
    width, count = _widest(code, "STG")
    if not is_loop or not count:
        return 1
    results = {n: phase.names[n] for s in phase.stages for n in s.written if n in phase.tensors}
    # a number's store may have another width
    wide = {n for n, x in results.items() if _elements(phase, n) > 1 or stored_format(x.fmt).bytes_of(1) == width}
    return max(1, count // _accesses_of(phase, wide, decided, width))


def _widest(code: Sequence[MachineInstruction], name: str) -> tuple[int, int]:
    """Return the bytes of a lane in those accesses of this name that move the most bytes, and their number."""
    sizes = Counter(x.number for x in code if x.name == name)
    width = max(sizes, key=lambda size: (size * sizes[size], size), default=0)
    return width, sizes[width]


def _elements(phase: Phase, name: str) -> int:
    return prod(phase.sizes[a] for a in phase.names[name].axes)


def _accesses_of(phase: Phase, names: Iterable[str], decided: GpuDecisions, width: int) -> int:
    """Return the number of accesses of a lane to tiles, at least 1, if each has this number of bytes."""
    each = WARP_LANES * decided.warps * decided.groups * width
    sizes = [stored_format(phase.names[n].fmt).bytes_of(_elements(phase, n)) for n in names]
    return max(1, sum(ceil_div(size, each) for size in sizes))


def _read(body: str) -> tuple[bool, list[MachineInstruction]]:
    kind, *words = body.split()
    return kind == "loop", [_decoded(word) for word in words]


class WarpState:
    """The progress of a warp: its next instruction, scoreboards, loads of the row that have not arrived."""

    __slots__ = ("at", "first", "has_come", "now", "ready")

    def __init__(self) -> None:
        self.now, self.at, self.ready = 0.0, 0, [0.0] * SCOREBOARDS
        self.first, self.has_come = set[int](), False


class BlockWalk:
    """The warps of one block on a multiprocessor, instruction by instruction; ``far``: time until a row's load arrives.

    A warp's instruction begins when the previous one's stall is over, its scoreboards are ready and its sub-core issues
    no other instruction.  Accesses to shared memory queue for the single pipe of the multiprocessor, and at a barrier a
    warp waits for the last one.  Loads that begin after the first load has arrived are served by L2: compilers put
    loads of weights, which all blocks share, after those of the row.  In code of several ``rows``, loads after the last
    store of a row are those of the next row.  A block ends when its last store has left.
    """

    def __init__(self, code: list[MachineInstruction], core: RowCore, far: float, rows: int = 1) -> None:
        self.code, self.core, self.far = code, core, far
        stores = [at for at, x in enumerate(code) if x.name == "STG"]
        self.last_stores = (
            frozenset(stores[len(stores) // rows - 1 :: len(stores) // rows]) if rows > 1 else frozenset()
        )
        self.waits = dict(core.waits)
        self.warps = [WarpState() for _ in range(core.warps)]
        self.issue, self.narrow, self.special = ([0.0] * core.subcores for _ in range(3))
        self.memory, self.meeting, self.come = 0.0, 0.0, 0

    def last_round(self, rounds: int) -> float:
        """Return the cycles of the last of this number of rounds, in which each scoreboard has reached a
        steady state.
        """
        begin = 0.0
        for _ in range(rounds - 1):
            begin = self._round()
        return self._round() - begin

    def _round(self) -> float:
        """Run the code once for all warps; return the cycle at which the last warp and its stores have ended."""
        queue = [(w.now, i) for i, w in enumerate(self.warps)]
        for w in self.warps:
            w.at, w.has_come = 0, False
            w.first.clear()
        heapq.heapify(queue)
        held: list[int] = []
        while queue:
            _, i = heapq.heappop(queue)
            warp = self.warps[i]
            if self.code[warp.at].name == "BAR":
                self.meeting = max(self.meeting, warp.now) + self.core.barrier_warp
                held.append(i)
                if len(held) == len(self.warps):
                    for j in held:
                        self.warps[j].now = self.meeting + self.core.barrier
                        self._step(j, queue)
                    held = []
                continue
            self._step(i, queue)
        return max(self.memory, *(w.now for w in self.warps))

    def _step(self, i: int, queue: list[tuple[float, int]]) -> None:
        """Issue a warp's next instruction, and queue the warp for the time when the following one may begin."""
        warp, core = self.warps[i], self.core
        x, place = self.code[warp.at], i % core.subcores
        warp.now = max(warp.now, self.issue[place])
        if x.name in NARROW:
            warp.now = max(warp.now, self.narrow[place])
            self.narrow[place] = warp.now + core.narrow
        self.issue[place] = warp.now + 1
        came = self._result(x, warp, place)
        if x.result < SCOREBOARDS:
            warp.ready[x.result] = max(warp.ready[x.result], came)
            if x.name == "LDG":  # other instructions may set the same scoreboard
                warp.first.add(x.result)
        if x.operands < SCOREBOARDS:
            warp.ready[x.operands] = max(warp.ready[x.operands], warp.now + core.others)
        warp.now += max(1, x.stall)
        if warp.at in self.last_stores:
            warp.has_come = False
        warp.at += 1
        if warp.at < len(self.code):
            awaited = {k for k in range(SCOREBOARDS) if self.code[warp.at].waits >> k & 1}
            warp.now = max([warp.now, *(warp.ready[k] for k in awaited)])
            warp.has_come |= bool(awaited & warp.first)
            warp.first -= awaited
            heapq.heappush(queue, (warp.now, i))

    def _result(self, x: MachineInstruction, warp: WarpState, place: int) -> float:
        """Return the time at which the result of an instruction exists that a warp issues now, after its turn at the
        pipe.
        """
        core = self.core
        if x.name == "LDG" and (not warp.has_come or not self.far):
            return warp.now + self.far
        taken = self.waits.get(x.name, core.near if x.name == "LDG" else core.others)
        if x.name == "MUFU":
            begin = max(warp.now, self.special[place])
            self.special[place] = begin + core.special
            return begin + taken
        lanes = WARP_LANES * x.number
        port = lanes / core.load_bytes if x.name == "LDG" else lanes / core.store_bytes if x.name == "STG" else 0.0
        if not port and x.name not in SHARED:
            return warp.now + taken
        begin = max(warp.now, self.memory)
        self.memory = begin + max(1.0, port)
        return self.memory - 1.0 + taken


def with_code(
    tiling: SmTiling, body: str, phase: Phase, programs: int, device: DeviceSpec, returned: int = 0, share: float = 1.0
) -> SmTiling:
    """Return the tiling of a compiled phase with as many blocks in progress as the launch has ``programs``.

    ``returned``: number of further programs, which end immediately: in a kernel of rows each of them costs the turnover
    of a block, in a kernel with products nothing, as measured on an H100 (reports/silicon/early.json).  Code without a
    loop whose programs are fewer than the phase's blocks computes several of them at once.  ``share``: of the code, if
    the phase is one of several that it computes; a block's turnover has the same share.  Rows without
    products and without a loop over tiles have the work of their code, stores in a separate queue, and one row at a
    time, or the number of rows that their code copies before it waits; with a loop, the number of tiles in flight is
    the number that their code loads before it waits.
    """
    each = ceil_div(programs, device.group_count.value)
    parts = _parts_of(body, phase, programs)
    is_persistent = programs < len(phase.cells) and parts == 1
    tiling = replace(tiling, residents=min(tiling.residents, each)) if is_persistent else tiling
    if not body or any(s.is_product for s in phase.stages):
        return tiling
    warps = tiling.decided.warps * tiling.decided.groups
    if phase.loop_axis:
        if (state := _state_loop(body, phase, tiling.decided)) is not None:
            ends = _turnover(device, returned, phase, warps, 1 / share) if counts_turnover(device) else ()
            charges = (*tiling.decided.charges, *ends)
            decided = tiling.decided._replace(loaded_tiles=1, state_loop=state, charges=charges)
            return replace(tiling, decided=decided, has_own_rows=True)
        loaded, is_ahead = _tiles_under_way(body, phase, tiling.decided)
        # A loop that loads no tile ahead loads the places of a tile's rows just before the rows.
        waits = bool(phase.looked_up) and not is_ahead
        tile_code = _code_of_tile(body, phase, tiling.decided, device)
        awaited: Literal["", "copies", "loads"] = "loads" if tile_code is not None else ""
        awaited = "copies" if _is_copied(body, tiling.decided) else awaited
        decided = tiling.decided._replace(
            loaded_tiles=loaded, awaits_places=waits, awaited=awaited, tile_code=tile_code
        )
        return replace(tiling, decided=decided, has_own_rows=True)
    unrolled = max(1, round(unrolled_rows(body, phase, tiling.decided) * share)) if is_persistent else 1
    work = code_work(body, _core_of(device, warps), unrolled, parts / share)
    has_turnover = counts_turnover(device) and not is_persistent
    loaded = _copied_rows(body, unrolled) or (tiling.decided.loaded_tiles if work.is_ahead else 1)
    # The walk begins with a block's first instruction: there is no other charge for its start.
    work = work._replace(goes_on=is_persistent)
    decided = tiling.decided._replace(
        code=work,
        loaded_tiles=loaded,
        charges=_turnover(device, returned, phase, warps, parts / share) if has_turnover else (),
    )
    most = max(parts, ceil_div(len(phase.cells), device.group_count.value))
    return replace(tiling, decided=decided, parts=parts, residents=min(tiling.residents * parts, most))


def _parts_of(body: str, phase: Phase, programs: int) -> int:
    """Return the number of a phase's blocks that a program computes with one execution of its code."""
    # A loop computes one block in each of its rounds.
    if phase.loop_axis or not body.startswith(ONCE):
        return 1
    return max(1, ceil_div(len(phase.cells), max(1, programs)))


def _turnover(device: DeviceSpec, returned: int, phase: Phase, warps: int, parts: float = 1) -> tuple[Charge, ...]:
    """Return the costs of a block's beginning, of which a multiprocessor has one at a time, of the beginning of its
    ``warps``, and of its end (``returned``: see `with_code`), each for one of the block's ``parts``.
    """
    issue, of_each = warp_issue(device), 1 + returned / max(len(phase.cells), device.group_count.value)
    charges = [Charge(f"{RETIRE}.block_cycles", of_each / parts, due="begin")]
    if issue.sharing.warp_start_cycles is not None:
        started = warps / issue.subcores_count.value / parts
        charges.append(Charge(f"{WARPS}.sharing.warp_start_cycles", started, due="warps"))
    if issue.sharing.turnover_cycles is not None:
        charges.append(Charge(f"{WARPS}.sharing.turnover_cycles", 1 / parts, due="end"))
    return tuple(charges)


def loads_at_once(body: str) -> tuple[int, bool, int] | None:
    """Return the number of loads that a warp issues before it waits for one, whether loads of the next round are among
    them, and the bytes of a lane that the widest load reads.

    A compiler moves no load before a store that may access the same address.  None for code without loads, and for code
    with barriers, where warps whose data have arrived continue while others wait.
    """
    is_loop, code = _read(body)
    loads = [x for x in code if x.name == "LDG"]
    if not loads or any(x.name == "BAR" for x in code):
        return None
    most, issued, pending = 0, 0, set[int]()
    for x in code * (2 if is_loop else 1):
        if any(x.waits >> board & 1 for board in pending):
            most, issued = max(most, issued), 0
            pending.clear()
        if x.name == "LDG":
            issued += 1
            pending.add(x.result)
    is_ahead = is_loop and issued > 0 and most > 0
    return max(most, issued), is_ahead, max(x.number for x in loads)


def _state_loop(body: str, phase: Phase, decided: GpuDecisions) -> StateLoop | None:
    """Return the loop of a body that stores a result for each tile and loads none ahead; None for any other.

    A compiler moves no load before a store that may access the same address, and where registers are few loads wait for
    the results of earlier loads.  Loads of another width than that of most bytes are those of a row's number, whose
    line earlier iterations have read.
    """
    is_loop, code = _read(body)
    names = Counter(x.name for x in code)
    results = {n for s in phase.stages for n in s.written if n in phase.tensors}
    is_of_tiles = any(is_visited(phase, n, phase.loop_axis) for n in results)
    if not is_loop or not is_of_tiles or decided.stages < 2 or not names["LDG"] or not names["STG"] or names[COPY]:
        return None
    width, _ = _widest(code, "LDG")
    cycles, is_ahead = _waited(code, width, 1.0, 0.0)
    near = (_waited(code, width, 1.0, NEAR)[0] - cycles) / NEAR
    if is_ahead or not cycles:
        return None
    each = max(1, names["LDG"] // _loads_of_tile(phase, decided, width))
    return StateLoop(max(1, round(cycles / each)), round(near / each), names["BAR"] // each)


def _waited(code: Sequence[MachineInstruction], width: int, far: float, near: float) -> tuple[float, bool]:
    """Return the time of a warp in the last of some rounds of a loop, if it passes only while the warp waits for loads,
    and whether loads of a later round are under way then; ``far``, ``near``: times of loads of a width and of others.
    """
    ready, now, begin = [0.0] * SCOREBOARDS, 0.0, 0.0
    for _ in range(ROUNDS):
        begin = now
        for x in code:
            now = max([now, *(ready[k] for k in range(SCOREBOARDS) if x.waits >> k & 1)])
            if x.name == "LDG" and x.result < SCOREBOARDS:
                ready[x.result] = max(ready[x.result], now + (far if x.number == width else near))
    return now - begin, max(ready) > now


def _loads_of_tile(phase: Phase, decided: GpuDecisions, width: int) -> int:
    """Return the number of loads of a lane for a tile of a loop, if each has this number of bytes."""
    read = {n for loop in phase.loops if loop.axis for s in loop.stages for n in s.read if n in phase.tensors}
    return _accesses_of(phase, read, decided, width)


def _is_ahead(body: str) -> bool:
    """Return whether loads of a loop's next round are under way when a round ends, or the code is no loop of loads."""
    is_loop, code = _read(body)
    return not is_loop or not _widest(code, "LDG")[1] or _has_loads_under_way(code)


def _has_loads_under_way(code: Sequence[MachineInstruction]) -> bool:
    return _waited(code, _widest(code, "LDG")[0], 1.0, 0.0)[1]


def _code_of_tile(body: str, phase: Phase, decided: GpuDecisions, device: DeviceSpec) -> CodeWork | None:
    """Return the work of a tile of a loop whose warps meet at barriers and load no tile ahead; None for other loops."""
    _, code = _read(body)
    if _is_copied(body, decided) or _is_ahead(body) or not any(x.name == "BAR" for x in code):
        return None
    width, count = _widest(code, "LDG")
    unrolled = max(1, count // _loads_of_tile(phase, decided, width))
    return code_work(body, _core_of(device, decided.warps * decided.groups), unrolled)


def _is_copied(body: str, decided: GpuDecisions) -> bool:
    """Return whether copies to shared memory, which belong to a pipeline, bring the tiles of a loop."""
    return COPY in body and decided.stages > 1


def _copied_rows(body: str, unrolled: int) -> int:
    """Return the number of rows whose copies to shared memory are under way before a loop's warps wait for one of them;
    0 for other code.
    """
    is_loop, code = _read(body)
    groups, waits = sum(x.name == COMMIT for x in code), [x.number for x in code if x.name == AWAIT]
    if not is_loop or not groups or not waits:
        return 0
    # A row's next copies begin after its wait.
    return min(waits) // max(1, groups // unrolled) + 1


def _tiles_under_way(body: str, phase: Phase, decided: GpuDecisions) -> tuple[int, bool]:
    """Return how many tiles of a loop without products are loaded before its warps wait for one of them, and whether
    it loads some of them an iteration ahead.
    """
    if _is_copied(body, decided):
        # a slot's next copy begins when the slot has been read, so that the present iteration's tile has no slot
        return decided.stages - 1, True
    if (loads := loads_at_once(body)) is None:
        return (decided.loaded_tiles if _is_ahead(body) else 1), False
    count, is_ahead, width = loads
    return max(1, count // _loads_of_tile(phase, decided, width)) + is_ahead, is_ahead


def _core_of(device: DeviceSpec, warps: int) -> RowCore:
    """Return a device's multiprocessor with one block of this number of warps."""
    issue, memory, copies = warp_issue(device), engine_of(device, LSU, SharedMemoryPipe), device.engine(SM, LDG)
    special = engine_of(device, MUFU, LanePipe)
    narrow = engine_of(device, ALU if ALU in device.core(SM).engines else FMA, LanePipe)
    assert isinstance(copies, DmaEngine)
    load, store = copies.route("GM", "RF"), copies.route("RF", "GM")
    return RowCore(
        waits=(("SHFL", float(memory.shuffle_latency_cycles.value)), ("MUFU", float(special.latency_cycles.value))),
        others=float(memory.latency_cycles.value),
        near=float(load.latency_cycles.value),
        warps=warps,
        subcores=issue.subcores_count.value,
        narrow=WARP_LANES / (narrow.lanes_count.value * narrow.rate),
        special=WARP_LANES / (special.lanes_count.value * special.rate),
        load_bytes=load.bytes_per_cycle.value * copies.rate,
        store_bytes=store.bytes_per_cycle.value * copies.rate,
        barrier=issue.sharing.barrier_cycles.value,
        barrier_warp=issue.sharing.barrier_warp_cycles.value,
    )
