"""Rows whose kernel was compiled: a block's cost by its machine code, not by a table of steps.

A compiler's code differs from a step's usual instructions: a quotient by a number of the row is one reciprocal a row,
conversions from float16 are multiplications, loads are as wide as addresses allow.  The time of one warp alone follows
from the code too: each instruction states its stall, and the results that it waits for.

Source of these fields: bits 105 to 125 of an instruction's 128 on sm_70 to sm_90, which NVIDIA does not document: 4
with the cycles until the next instruction, 1 that lets another warp go first, 3 with the scoreboard that is set when
the result exists, 3 with the one set when operands are read, 6 with a mask of scoreboards to wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.core_units import LanePipe, SharedMemoryPipe
from npusim.machines.decisions import Charge, CodeWork
from npusim.machines.sm.core import LSU, MUFU, RETIRE, counts_turnover, engine_of, warp_issue
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.kernels.form.phase import Phase
    from npusim.machines.sm.core import SmTiling

#: Architectures whose instructions have these fields, scoreboards of a warp (a field of 7 names none).
FIRST, LAST, SCOREBOARDS = 70, 90, 6
#: Instructions on a pipe of half the width.  source: CUDA C++ Programming Guide, throughput of arithmetic instructions,
#: compute capability 9.0: 64 results a cycle of integer additions, logic, shifts, comparisons and conversions.
NARROW = frozenset(
    {"LOP3", "ISETP", "IADD3", "SHF", "LEA", "FMNMX", "FSETP", "FSEL", "SEL", "P2R", "R2P", "PRMT", "F2FP", "VOTE"}
    | {"POPC", "IMNMX", "PLOP3", "UMOV"}
)
#: Accesses to shared memory, and to registers that were spilled.
SHARED, LOCAL = frozenset({"LDS", "STS", "SHFL"}), frozenset({"LDL", "STL"})
#: Cycles that a read of global memory takes in the walk, whose wait the engine has: any number far above others.
FAR = float(1 << 14)
#: Rounds in which a loop's scoreboards settle.
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

    ``stall``: cycles until the next; ``result``, ``operands``: scoreboards that it sets, 7: none; ``waits``: a mask.
    """

    name: str
    stall: int
    result: int
    operands: int
    waits: int


def has_body(ptx: str, architecture: str) -> bool:
    """Return whether `body_of` finds the code of a warp, by the PTX that the code was assembled from."""
    return _is_known(architecture) and not re.search(r"\b(?:wgmma|mma|tcgen05)\b", ptx)


def _is_known(architecture: str) -> bool:
    return FIRST <= int(architecture.rpartition("_")[2] or 0) <= LAST


def body_of(sass: str, architecture: str) -> str:
    """Return the code of a warp for a block or a row, as text for `code_work`; empty where it is unknown.

    The body is the loop that loads from global memory, with ``loop`` before its instructions, else all up to the last
    EXIT.  Code with products, and code for architectures outside `FIRST` to `LAST`, has none.
    """
    code = [(int(at, 16), name, rest, int(high, 16)) for at, name, rest, high in _LINE.findall(sass)]
    if not _is_known(architecture) or not code or any(name.endswith("MMA") for _, name, *_ in code):
        return ""
    targets = [(at, re.search(r"0x([0-9a-f]+)\s*$", rest)) for at, name, rest, _ in code if name == "BRA"]
    spans = [(int(to[1], 16), at) for at, to in targets if to and int(to[1], 16) < at]
    loads = [at for at, name, *_ in code if name == "LDG"]
    loop = next(((first, last) for first, last in spans if any(first <= at <= last for at in loads)), None)
    first, last = loop or (0, max((at for at, name, *_ in code if name == "EXIT"), default=code[-1][0]))
    body = [(name, high >> _CONTROL_BIT) for at, name, _, high in code if first <= at <= last and name != "NOP"]
    return " ".join(["loop" if loop else "once", *(f"{name}:{control & _ALL[1]:x}" for name, control in body)])


def _decoded(word: str) -> MachineInstruction:
    name, _, text = word.partition(":")
    control = int(text, 16)
    return MachineInstruction(name, *(control >> at & mask for at, mask in (_STALL, _RESULT, _OPERANDS, _WAITS)))


@lru_cache(maxsize=256)  # of kernels
def code_work(body: str, waits: tuple[tuple[str, float], ...], others: float, near: float) -> CodeWork:
    """Return a warp's work for a block, by the instructions of a body.

    ``waits``: cycles until the result of an instruction that sets a scoreboard exists, by name; ``others``: for the
    rest; ``near``: for a read of L2.
    """
    is_loop, code = _read(body)
    alone = _walk(code, ROUNDS if is_loop else 1, {**dict(waits), "LDG": near}, others, FAR) - FAR
    whole = _walk(code, ROUNDS if is_loop else 1, {**dict(waits), "LDG": 0.0}, others, 0.0)
    if is_ahead := is_loop and 2 * alone < whole:  # a round's loads are the next one's, and hide most of it
        alone = whole
    names = Counter(x.name for x in code)

    def count(listed: frozenset[str]) -> int:
        return sum(n for name, n in names.items() if name in listed)

    counted = len(code), count(NARROW), names["MUFU"], count(SHARED), names["BAR"], count(LOCAL)
    return CodeWork(max(1.0, alone), *counted, is_ahead)


def _read(body: str) -> tuple[bool, list[MachineInstruction]]:
    kind, *words = body.split()
    return kind == "loop", [_decoded(word) for word in words]


def _walk(code: list[MachineInstruction], rounds: int, waits: dict[str, float], others: float, far: float) -> float:
    """Return the cycles of the last round of one warp alone; ``far``: until its first load has arrived.

    An instruction begins when the previous one's stall is over and its scoreboards are ready. Loads after the first has
    arrived are served by L2: compilers put loads of weights, which all blocks share, after those of the row.
    """
    now, begin, ready = 0.0, 0.0, [0.0] * SCOREBOARDS
    for _ in range(rounds):
        begin, first, has_come = now, set[int](), False
        for name, stall, result, operands, mask in code:
            awaited = {i for i in range(SCOREBOARDS) if mask >> i & 1}
            now = max([now, *(ready[i] for i in awaited)])
            has_come |= bool(awaited & first)
            first -= awaited
            taken = far if name == "LDG" and not has_come else waits.get(name, others)
            if result < SCOREBOARDS:
                ready[result] = max(ready[result], now + taken)
                if name == "LDG":  # others may set the same scoreboard beside it
                    first.add(result)
            if operands < SCOREBOARDS:
                ready[operands] = max(ready[operands], now + others)
            now += max(1, stall)
    return now - begin


def with_code(
    tiling: SmTiling, body: str, phase: Phase, programs: int, device: DeviceSpec, returned: int = 0
) -> SmTiling:
    """Return the tiling of a compiled phase with as many blocks in progress as the launch has ``programs``.

    ``returned``: further programs that end at once: for rows each costs the turnover of a block, with products nothing,
    as measured on an H100 (reports/silicon/early.json).  Rows without products and without a loop over tiles have the
    work of their code, stores in a separate queue, and one row at a time.
    """
    each = ceil_div(programs, device.group_count.value)
    is_persistent = programs < len(phase.cells)
    tiling = replace(tiling, residents=min(tiling.residents, each)) if is_persistent else tiling
    if not body or phase.loop_axis or any(s.is_product for s in phase.stages):
        return tiling
    sharing, memory = warp_issue(device).sharing, engine_of(device, LSU, SharedMemoryPipe)
    special, access = engine_of(device, MUFU, LanePipe).latency_cycles.value, memory.latency_cycles.value
    waits = (("SHFL", float(memory.shuffle_latency_cycles.value)), ("MUFU", float(special)))
    work = code_work(body, waits, float(access), float(sharing.lookup_cycles.value))
    of_each = 1 + returned / max(len(phase.cells), device.group_count.value)
    ends = (Charge(f"{RETIRE}.block_cycles", of_each, due="end"),)
    has_turnover = counts_turnover(device) and not is_persistent
    loaded = tiling.decided.loaded_tiles if work.is_ahead else 1
    # The walk begins with a block's first instruction: no other charge for its start.
    decided = tiling.decided._replace(code=work, loaded_tiles=loaded, charges=ends if has_turnover else ())
    return replace(tiling, decided=decided)
