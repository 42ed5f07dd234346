"""The bounded check of an expert program: the core groups and outcomes of conditions that are examined, faults,
corrections, and redundant barriers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.kernels.tilelang.expert import GroupWalk
from npusim.kernels.tilelang.program import Language, PrimFunc, load_program
from npusim.studies.flags.every_length import Proof, prove
from npusim.studies.flags.mends import mended
from npusim.studies.flags.order import Cores, Fault, HappensBefore, Overlaps
from npusim.studies.flags.walked_paths import MOST_PATHS, walks_of
from npusim.units import plural

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.kernels.tilelang.expert import Issued
    from npusim.kernels.tilelang.tiles import Box

#: Largest number of instructions on one path.
MOST_INSTRUCTIONS = 60_000


@dataclass(frozen=True, slots=True)
class FoundFault:
    """A fault, the core group and the outcomes of conditions for which it was detected first, and a correction."""

    fault: Fault
    group: int
    answers: str
    mend: str


@dataclass(frozen=True, slots=True)
class FlagReport:
    """The result of a check.

    ``redundant``: lines of barriers, each of which can be removed alone without a fault; ``removable``: such lines that
    can be removed together.  Both are empty if there are faults.  ``bounds``: the examined part of the program;
    ``notes``: the assumptions.  ``proof``: the facts about longer programs, if they were requested.
    """

    program: str
    faults: tuple[FoundFault, ...]
    redundant: tuple[int, ...]
    removable: tuple[int, ...]
    barriers: int
    instructions: int
    bounds: tuple[str, ...]
    notes: tuple[str, ...]
    proof: Proof | None = None


def check_every_length(
    path: Path, name: str, arguments: Mapping[str, object], length: str, step: int = 1
) -> FlagReport:
    """Check a program as `check_program` does, and prove it for each longer ``length`` in steps of ``step``.

    The report is that of the present length, or of the shortest longer length that has a fault.  Raises errors as
    `check_program` does, and if ``arguments`` has no integer of the name ``length``.
    """
    report = check_program(path, name, arguments)
    proof = prove(path, name, arguments, length, step)
    if report.faults or proof.fault is None:
        return replace(report, proof=None if report.faults else proof)
    number, text = proof.fault
    longer = check_program(path, name, {**arguments, length: number})
    if longer.faults:
        return replace(longer, bounds=(f"{length} = {number:,}", *longer.bounds))
    return replace(report, proof=replace(proof, fault=None, reasons=(f"{length} = {number:,}: {text}",)))


def check_program(
    path: Path, name: str, arguments: Mapping[str, object] | None = None, *, vector_in_order: bool = True
) -> FlagReport:
    """Check the explicit flags and barriers of ``path::name``, called with ``arguments``.

    Loops run in full for the first two core groups and the last one, with both answers to each condition on a value
    that is known only at run time.  ``vector_in_order``: whether the vector pipe ends an instruction before it starts
    the next one; False for code that is compiled without automatic barriers of that pipe.  Raises `SpecError` if the
    program cannot be read, or if its flags are added by the compiler.
    """
    language, arguments = Language(), dict(arguments or {})
    kernel = load_program(path, name, arguments, language)
    is_direct = kernel.name == name
    scalars = arguments if is_direct else {}
    walked = _walked(kernel, language, scalars)
    walks = walked.walks
    found, seen = list[FoundFault](), dict[object, Fault]()
    for walk, answers in walks:
        overlaps = Overlaps(walk.cores)
        faults = HappensBefore(walk.cores, overlaps, vector_in_order=vector_in_order).complete()
        for fault in faults:
            if fault.key not in seen:
                seen[fault.key] = fault
                mend = mended(walk.cores, fault, faults, overlaps, vector_in_order=vector_in_order)
                found.append(FoundFault(fault, walk.group, answers, mend))
    found += _between_groups(walked.firsts)
    lines = sorted({x.line for w, _ in walks for i in w.cores.values() for x in i if x.kind == "barrier"})
    cores = [walk.cores for walk, _ in walks]
    safe = [(c, Overlaps(c)) for c in cores] if not found else []
    redundant = [n for n in lines if safe and _is_safe(safe, {n}, vector_in_order=vector_in_order)]
    together = set[int]()
    for line in redundant:
        if _is_safe(safe, together | {line}, vector_in_order=vector_in_order):
            together.add(line)
    return FlagReport(
        program=f"{path}::{name}",
        faults=tuple(found),
        redundant=tuple(redundant),
        removable=tuple(sorted(together)),
        barriers=len(lines),
        instructions=sum(len(i) for w, _ in walks for i in w.cores.values()),
        bounds=tuple(walked.bounds),
        notes=(*walked.notes, *_assumed(cores, vector_in_order=vector_in_order)),
    )


@dataclass(frozen=True, slots=True)
class _Walked:
    """``walks`` with the outcomes of conditions, the first walk of each core group, and the bounds and assumptions of
    the walks.
    """

    walks: list[tuple[GroupWalk, str]]
    firsts: list[GroupWalk]
    bounds: list[str]
    notes: list[str]


def _walked(kernel: PrimFunc, language: Language, scalars: Mapping[str, object]) -> _Walked:
    """Return the walks of the first two core groups and of the last one along all paths."""
    firsts, walks, known = list[GroupWalk](), list[tuple[GroupWalk, str]](), set[object]()
    notes, paths = dict[str, None](), 0
    for one in walks_of(kernel, language, scalars):
        walk, paths = one.walk, paths + 1
        notes |= dict.fromkeys(walk.notes)
        if sum(map(len, walk.cores.values())) > MOST_INSTRUCTIONS:
            raise SpecError(f"{kernel.path}: more than {MOST_INSTRUCTIONS:,} instructions; set smaller sizes with -a")
        if one.number == 0:
            firsts.append(walk)
        if one.form not in known:  # the same instructions of another group differ only in tensors' offsets
            known.add(one.form)
            walks.append((walk, one.answers))
        if one.is_cut:
            why = f"only {MOST_PATHS} paths through its conditions are checked; other paths are not"
            notes[f"core group {walk.group}: {why}"] = None
    groups = [walk.group for walk in firsts]
    listed = ", ".join(map(str, groups))
    bounds = [f"core {plural(len(groups), 'group')} {listed} of {walk.groups}", f"{paths} {plural(paths, 'path')}"]
    return _Walked(walks, firsts, bounds, list(notes))


def _between_groups(walks: Sequence[GroupWalk]) -> Iterator[FoundFault]:
    """Yield pairs of accesses of two core groups to common bytes of a tensor, one of them a write."""
    uses = [_of_tensors(walk) for walk in walks]
    seen = set[object]()
    for (one, mine), (other, theirs) in combinations(zip(walks, uses, strict=True), 2):
        for (box, is_write), x in mine.items():
            for (near, near_writes), y in theirs.items():
                key = (x.line, y.line)
                if (is_write or near_writes) and key not in seen and box.overlaps(near):
                    seen.add(key)
                    words = {True: "writes", False: "reads"}
                    text = f"{x} of core group {one.group} {words[is_write]} {box}, "
                    text += f"{y} of core group {other.group} {words[near_writes]} {near}"
                    fault = Fault("race", text, x, y)
                    yield FoundFault(fault, one.group, "", "none by flags: no flag orders two core groups")


def _of_tensors(walk: GroupWalk) -> dict[tuple[Box, bool], Issued]:
    """Return the parts of tensors that a core group accesses, and whether it writes them, with the first access."""
    accesses: dict[tuple[Box, bool], Issued] = {}
    for x in (x for issued in walk.cores.values() for x in issued):
        for is_write, boxes in ((False, x.reads), (True, x.writes)):
            for box in boxes:
                if box.space == "GM" and box.is_exact:
                    accesses.setdefault((box, is_write), x)
    written = {box.buffer for box, is_write in accesses if is_write}
    return {use: x for use, x in accesses.items() if use[0].buffer in written}


def _is_safe(walks: Sequence[tuple[Cores, Overlaps]], without: set[int], *, vector_in_order: bool) -> bool:
    """Return whether no walk has a fault without the barriers of some lines."""
    for cores, overlaps in walks:
        left = {c: [x for x in i if x.kind != "barrier" or x.line not in without] for c, i in cores.items()}
        if HappensBefore(left, overlaps, vector_in_order=vector_in_order).complete():
            return False
    return True


def _assumed(walks: Sequence[Cores], *, vector_in_order: bool) -> list[str]:
    boxes = {b for cores in walks for i in cores.values() for x in i for b in (*x.reads, *x.writes) if b.space != "GM"}
    notes = []
    if any(b.address is None for b in boxes):
        notes.append(
            "buffers without T.annotate_address are assumed not to share bytes: the compiler chooses their places"
        )
    order = (
        "ends an instruction before it starts the next" if vector_in_order else "needs barriers between instructions"
    )
    notes.append(f"the vector pipe {order}; flags that the C++ compiler adds (cce-auto-sync) are not in the source")
    return notes
