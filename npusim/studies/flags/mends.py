"""Changes of a program's flags that remove a fault, each tested on the instructions before it is offered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.kernels.tilelang.expert import Issued
from npusim.studies.flags.order import Cores, Fault, HappensBefore, Overlaps

if TYPE_CHECKING:
    from npusim.kernels.tilelang.expert import Flag, Kind

#: Event ids of a pair of pipes (Ascend C API, SetFlag), and ids of cross-core flags (CrossCoreSetFlag).
EVENT_IDS, CROSS_IDS = range(8), range(11)


@dataclass(frozen=True, slots=True)
class _Insert:
    """An instruction before or after every execution of a line, or (``line`` 0) at the start or end of a core."""

    core: str  # the kind of core: C or V
    line: int
    is_before: bool
    pipe: str
    kind: Kind
    flag: Flag
    count: int = 1

    def made(self, core: str, run: int) -> list[Issued]:
        name = self.kind if self.kind != "barrier" else "barrier_all"
        return [Issued(core, self.pipe, self.kind, name, 0, run, flag=self.flag)] * self.count


def mended(cores: Cores, fault: Fault, faults: Sequence[Fault], overlaps: Overlaps, *, vector_in_order: bool) -> str:
    """Return the smallest change that removes a fault and adds none, or a sentence which states that there is no such
    change.
    """
    keys = {f.key for f in faults}
    for text, inserts in _candidates(cores, fault):
        left = {
            f.key
            for f in HappensBefore(_inserted(cores, inserts), overlaps, vector_in_order=vector_in_order).complete()
        }
        if fault.key not in left and not left - keys:
            return text
    return "no tested change of one flag or one barrier removes it"


def _inserted(cores: Cores, inserts: Sequence[_Insert]) -> Cores:
    changed = dict[str, list[Issued]]()
    for core, issued in cores.items():
        mine = [x for x in inserts if x.core == core[0]]
        out = [result for x in mine if not x.line and x.is_before for result in x.made(core, 0)]
        for statement in _statements(issued):
            here = [x for x in mine if x.line == statement[0].line]
            out += [result for x in here if x.is_before for result in x.made(core, statement[0].run)]
            out += statement
            out += [result for x in here if not x.is_before for result in x.made(core, statement[0].run)]
        changed[core] = out + [result for x in mine if not x.line and not x.is_before for result in x.made(core, 0)]
    return changed


def _waits(cores: Cores, a: Issued, b: Issued) -> Iterator[tuple[str, list[_Insert]]]:
    """Yield a wait before the second access for each flag between the two pipes that is set and never waited for."""
    flags = dict.fromkeys(x.flag for x in cores[a.core] if x.kind == "set" and x.flag[:2] == (a.pipe, b.pipe))
    for flag in flags:
        if not _count(cores, a.core, "wait", flag):
            text = f"T.wait_flag({_word(flag)}) before line {b.line}"
            yield text, [_Insert(b.core[0], b.line, True, b.pipe, "wait", flag)]


def _statements(issued: Sequence[Issued]) -> Iterator[list[Issued]]:
    """Yield the instructions that one execution of a line issues: a product is two instructions, and a scalar operand
    adds a preceding read.
    """
    part, seen = list[Issued](), set[tuple[str, str]]()
    for x in issued:
        if part and (x.line != part[0].line or (x.pipe, x.name) in seen):
            yield part
            part, seen = [], set()
        part.append(x)
        seen.add((x.pipe, x.name))
    if part:
        yield part


def _candidates(cores: Cores, fault: Fault) -> Iterator[tuple[str, list[_Insert]]]:
    """Yield changes, the smallest first."""
    if fault.kind == "race" and fault.first is not None and fault.second is not None:
        a, b = fault.first, fault.second
        if a.core[0] == b.core[0]:
            yield from _waits(cores, a, b)
            yield from _pairs(cores, a, b)
            yield from _pairs(cores, b, a)
            yield from _at_once(cores, a, b)
            for x in (b, a):
                text = f"T.barrier_all() before line {x.line}"
                yield text, [_Insert(x.core[0], x.line, True, "ALL", "barrier", ())]
        else:
            yield from _cross_pairs(cores, a, b)
            yield from _cross_pairs(cores, b, a)
    elif fault.kind == "left set" and fault.first is not None and fault.flag[0] == "cross":
        x, number = fault.first, fault.flag[1]
        other = "V" if x.core == "C" else "C"
        counts = {kind: [_count(cores, c, kind, fault.flag) for c in cores] for kind in ("cross set", "cross wait")}
        count = max(counts["cross set"]) - max(counts["cross wait"])
        times = f", {count} times" if count > 1 else ""
        insert = _Insert(other, 0, False, "S", "cross wait", fault.flag, count)
        yield f"T.wait_cross_flag({number}) at the end of {other}{times}", [insert]
    elif fault.kind == "left set" and fault.first is not None:
        x, word = fault.first, _word(fault.flag)
        count = _count(cores, x.core, "set", fault.flag) - _count(cores, x.core, "wait", fault.flag)
        times = f", {count} times" if count > 1 else ""
        insert = _Insert(x.core[0], 0, False, str(fault.flag[1]), "wait", fault.flag, count)
        yield f"T.wait_flag({word}) at the end of {x.core[0]}{times}", [insert]
        for line in _lines(cores, x.core, str(fault.flag[1])):
            insert = _Insert(x.core[0], line, True, str(fault.flag[1]), "wait", fault.flag)
            yield f"T.wait_flag({word}) before line {line}", [insert]
    elif fault.kind == "wait without a set" and fault.second is not None and len(fault.flag) == 3:
        x, word = fault.second, _word(fault.flag)
        count = _count(cores, x.core, "wait", fault.flag) - _count(cores, x.core, "set", fault.flag)
        times = f", {count} times" if count > 1 else ""
        insert = _Insert(x.core[0], 0, True, str(fault.flag[0]), "set", fault.flag, count)
        yield f"T.set_flag({word}) at the start of {x.core[0]}{times}", [insert]
        for line in _lines(cores, x.core, str(fault.flag[0])):
            insert = _Insert(x.core[0], line, False, str(fault.flag[0]), "set", fault.flag)
            yield f"T.set_flag({word}) after line {line}", [insert]


def _lines(cores: Cores, core: str, pipe: str) -> list[int]:
    return list(dict.fromkeys(x.line for x in cores[core] if x.pipe == pipe and x.kind == "access"))


def _word(flag: Flag) -> str:
    return f'"{flag[0]}", "{flag[1]}", {flag[2]}'


def _count(cores: Cores, core: str, kind: str, flag: Flag) -> int:
    return sum(x.kind == kind and x.flag == flag for x in cores[core])


def _pairs(cores: Cores, a: Issued, b: Issued) -> Iterator[tuple[str, list[_Insert]]]:
    """A flag from the pipe of ``a`` to the pipe of ``b``: in the same iteration, or for the next one."""
    core = a.core[0]
    if a.pipe == b.pipe:
        yield f'T.pipe_barrier("{a.pipe}") before line {b.line}', [_Insert(core, b.line, True, a.pipe, "barrier", ())]
        return
    used = {x.flag for issued in cores.values() for x in issued}
    flag = next((f for i in EVENT_IDS if (f := (a.pipe, b.pipe, i)) not in used), None)
    if flag is None:
        return
    word = _word(flag)
    both = [_Insert(core, a.line, False, a.pipe, "set", flag), _Insert(core, b.line, True, b.pipe, "wait", flag)]
    text = f"T.set_flag({word}) after line {a.line}, T.wait_flag({word}) before line {b.line}"
    yield text, both
    ends = [_Insert(core, 0, True, a.pipe, "set", flag), _Insert(core, 0, False, b.pipe, "wait", flag)]
    yield f"{text}; set the flag once at the start of {core} and wait for it once at its end", [*both, *ends]


def _at_once(cores: Cores, a: Issued, b: Issued) -> Iterator[tuple[str, list[_Insert]]]:
    """A flag that the pipe of ``b`` waits for immediately after ``a``, for any number of executions."""
    used, core = {x.flag for issued in cores.values() for x in issued}, a.core[0]
    flag = next((f for i in EVENT_IDS if (f := (a.pipe, b.pipe, i)) not in used), None)
    if flag is None or a.pipe == b.pipe:
        return
    word = _word(flag)
    pair = [_Insert(core, a.line, False, a.pipe, "set", flag), _Insert(core, a.line, False, b.pipe, "wait", flag)]
    yield f"T.set_flag({word}) and T.wait_flag({word}) after line {a.line}", pair


def _cross_pairs(cores: Cores, a: Issued, b: Issued) -> Iterator[tuple[str, list[_Insert]]]:
    """A cross-core flag from the pipe of ``a`` to the core of ``b``."""
    used = {x.flag for issued in cores.values() for x in issued}
    flag = next((f for i in CROSS_IDS if (f := ("cross", i)) not in used), None)
    if flag is None:
        return
    number, one, other = flag[1], a.core[0], b.core[0]
    both = [
        _Insert(one, a.line, False, a.pipe, "cross set", flag),
        _Insert(other, b.line, True, "S", "cross wait", flag),
    ]
    text = (
        f'T.set_cross_flag("{a.pipe}", {number}) after line {a.line}, T.wait_cross_flag({number}) before line {b.line}'
    )
    yield text, both
    ends = [_Insert(one, 0, True, a.pipe, "cross set", flag), _Insert(other, 0, False, "S", "cross wait", flag)]
    yield f"{text}; set the flag once at the start of {one} and wait for it once at the end of {other}", [*both, *ends]
