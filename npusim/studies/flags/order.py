"""The order of a core group's instructions that follows from flags, barriers and pipes, and the remaining faults.

An instruction precedes another if every execution ends it before the other starts.  Pipes execute in order; a wait
follows its set; a barrier follows everything that its core issued before it and precedes everything later; an
instruction that stops the scalar unit (a cross-core wait, a wait of pipe S, a scalar read) precedes everything that its
core issues later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from npusim.kernels.tilelang.expert import Flag, Issued
    from npusim.kernels.tilelang.tiles import Box

#: Sets of one cross-core flag that may be open at a time (Ascend C API, CrossCoreSetFlag: a counter of 4 bits).
MOST_CROSS_SETS = 15
FaultKind = Literal["race", "wait without a set", "lost set", "left set", "cycle"]
Cores = Mapping[str, Sequence["Issued"]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a program's flags, with the two instructions that it concerns."""

    kind: FaultKind
    text: str
    first: Issued | None
    second: Issued | None
    flag: Flag = ()
    core: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for faults that differ only in the iteration: lines, cores, flag."""
        places = [(x.core[0], x.line, x.pipe) for x in (self.first, self.second) if x is not None]
        return (self.kind, *sorted(places), self.flag, self.core[:1])


class Overlaps:
    """The boxes of a walk that have bytes in common; they do not depend on the flags."""

    def __init__(self, cores: Cores) -> None:
        self.number: dict[Box, int] = {}
        places = defaultdict[object, list[int]](list)
        for issued in cores.values():
            for x in issued:
                for box in (*x.reads, *x.writes):
                    if box not in self.number:
                        places[box.space, box.core].append(len(self.number))
                        self.number[box] = len(self.number)
        self.boxes = list(self.number)
        self.near = [[k for k in places[a.space, a.core] if a.overlaps(self.boxes[k])] for a in self.boxes]


class HappensBefore:
    """The instructions of all cores, each with those that directly precede it."""

    def __init__(self, cores: Cores, overlaps: Overlaps | None = None, *, vector_in_order: bool = True) -> None:
        self.cores, self.vector_in_order = cores, vector_in_order
        self.overlaps = overlaps or Overlaps(cores)
        self.all = [x for issued in cores.values() for x in issued]
        self.before: list[list[int]] = [[] for _ in self.all]
        self.faults: list[Fault] = []
        self._pairs: list[tuple[int, int, Flag]] = []  # a wait, and the set that must follow it
        start = 0
        for issued in cores.values():
            self._core(start, issued)
            self._flags(start, issued)
            start += len(issued)
        self._cross_flags()
        self.rank = self._ranks()

    def _core(self, start: int, issued: Sequence[Issued]) -> None:
        """Add the orders that pipes, barriers and the scalar unit give within one core."""
        last, gate, opened = dict[str, int](), list[int](), list[int]()
        for i, x in enumerate(issued, start):
            before = self.before[i]
            before += gate
            if x.pipe == "ALL":
                before += [*last.values(), *opened]
                last, gate, opened = {}, [i], []
                continue
            if x.pipe == "V" and not self.vector_in_order and x.kind == "access":
                before += [last["V"]] if "V" in last else []
                opened.append(i)
                continue
            before += [last[x.pipe]] if x.pipe in last else []
            if x.pipe == "V" and x.kind != "wait" and not self.vector_in_order:
                before += opened
                # a set follows all earlier operations of its pipe; later ones do not wait for the set
                if x.kind != "barrier":
                    before += [last["sets of V"]] if "sets of V" in last else []
                    last["sets of V"] = i
                    continue
                opened = []
            last[x.pipe] = i
            if x.flag[:1] == ("product",) and x.pipe == "M":
                before.append(i - 1)
            if x.stops_scalar_unit:
                gate = [i]

    def _flags(self, start: int, issued: Sequence[Issued]) -> None:
        """Join the sets and waits of each flag of a core, in order."""
        sets, waits = defaultdict[tuple[object, ...], list[int]](list), defaultdict[tuple[object, ...], list[int]](list)
        for i, x in enumerate(issued, start):
            if x.kind in ("set", "wait"):
                (sets if x.kind == "set" else waits)[x.flag].append(i)
        for flag in dict.fromkeys([*sets, *waits]):
            a, b = sets[flag], waits[flag]
            self._join(flag, a, b, 1)
            self._missing(flag, a, b, "")

    def _cross_flags(self) -> None:
        """Join cross-core flags: a set by C reaches both vector cores, and a wait by C needs a set from each of
        them.
        """
        sets, waits = (defaultdict[tuple[str, tuple[object, ...]], list[int]](list) for _ in range(2))
        for i, x in enumerate(self.all):
            if x.kind in ("cross set", "cross wait"):
                (sets if x.kind == "cross set" else waits)[x.core, x.flag].append(i)
        flags = dict.fromkeys(flag for _, flag in (*sets, *waits))
        for flag in flags:
            for source in self.cores:
                for target in self.cores:
                    if source[0] != target[0]:
                        a, b = sets[source, flag], waits[target, flag]
                        self._join(flag, a, b, MOST_CROSS_SETS)
                        self._missing(flag, a, b, f" from {source} to {target}")

    def _join(self, flag: Flag, sets: list[int], waits: list[int], depth: int) -> None:
        for a, b in zip(sets, waits, strict=False):
            self.before[b].append(a)
        self._pairs += [(b, a, flag) for b, a in zip(waits, sets[depth:], strict=False)]

    def _missing(self, flag: Flag, sets: list[int], waits: list[int], where: str) -> None:
        name, count = " ".join(map(str, flag)), f"{len(sets)} sets, {len(waits)} waits"
        if len(waits) > len(sets):
            x = self.all[waits[len(sets)]]
            self.faults.append(Fault("wait without a set", f"{x}: flag {name}{where}: {count}", None, x, flag, x.core))
        if len(waits) < len(sets):
            x = self.all[sets[len(waits)]]
            self.faults.append(Fault("left set", f"{x}: flag {name}{where}: {count}", x, None, flag, x.core))

    def _ranks(self) -> list[int]:
        """Return the instructions in an order that respects all precedences; report a cycle."""
        after, open_ = [list[int]() for _ in self.all], [len(set(b)) for b in self.before]
        for i, before in enumerate(self.before):
            for j in set(before):
                after[j].append(i)
        ready, order = [i for i, n in enumerate(open_) if not n], list[int]()
        while ready:
            i = heappop(ready)
            order.append(i)
            for j in after[i]:
                open_[j] -= 1
                if not open_[j]:
                    heappush(ready, j)
        if len(order) < len(self.all):
            self._cycle({i for i, n in enumerate(open_) if n})
        return order

    def _cycle(self, left: set[int]) -> None:
        i, seen = min(left), list[int]()
        while i not in seen:
            seen.append(i)
            i = next(j for j in self.before[i] if j in left)
        around = [self.all[j] for j in seen[seen.index(i) :]]
        waits = [x for x in around if "wait" in x.kind] or around
        text = "each waits for the next: " + ", ".join(map(str, waits[:4]))
        self.faults.append(Fault("cycle", text, waits[-1], waits[0]))

    @property
    def is_cyclic(self) -> bool:
        """Whether no order exists; the check then does not look for races."""
        return len(self.rank) < len(self.all)

    def complete(self) -> list[Fault]:
        """Return all faults; the first of each pair of lines."""
        if self.is_cyclic:
            return _first_of_each(self.faults)
        place = {i: n for n, i in enumerate(self.rank)}
        known = [0] * len(self.all)  # by rank: the preceding instructions
        for n, i in enumerate(self.rank):
            mask = 0
            for j in self.before[i]:
                mask |= known[place[j]] | 1 << place[j]
            known[n] = mask
        faults = list(self.faults)
        for wait, later, flag in self._pairs:
            if not known[place[later]] >> place[wait] & 1:
                a, b = self.all[later], self.all[wait]
                name = " ".join(map(str, flag))
                text = f"flag {name} may be set again at {a} before the wait at {b} has ended"
                faults.append(Fault("lost set", text, a, b, flag, a.core))
        faults += self._races(known)
        return _first_of_each(faults)

    def _races(self, known: list[int]) -> list[Fault]:
        """Return pairs of unordered accesses to common bytes, one of them a write: one pair for each two lines."""
        boxes, numbers, near = self.overlaps.boxes, self.overlaps.number, self.overlaps.near
        masks = [[0, 0] for _ in boxes]  # by box: instructions that read it, and that write it
        uses = list[list[tuple[bool, int]]]()
        for n, i in enumerate(self.rank):
            x = self.all[i]
            uses.append([(False, numbers[box]) for box in x.reads] + [(True, numbers[box]) for box in x.writes])
            for is_write, number in uses[n]:
                masks[number][is_write] |= 1 << n
        faults = dict[object, Fault]()
        for n, i in enumerate(self.rank):
            x, unordered = self.all[i], (1 << n) - 1 & ~known[n]
            for is_write, number in uses[n]:
                for other in near[number]:
                    for other_writes in (True, False) if is_write else (True,):
                        mask = masks[other][other_writes] & unordered
                        while mask:
                            low = mask & -mask
                            mask ^= low
                            j = self.rank[low.bit_length() - 1]
                            y = self.all[j]
                            key = (x.core[0], x.line, x.pipe, y.core[0], y.line, y.pipe)
                            if key not in faults:
                                uses_of = [(j, y, boxes[other], other_writes), (i, x, boxes[number], is_write)]
                                faults[key] = _race(*sorted(uses_of, key=itemgetter(0)))
        return list(faults.values())


def _race(first: tuple[int, Issued, Box, bool], second: tuple[int, Issued, Box, bool]) -> Fault:
    (_, a, a_box, a_writes), (_, b, b_box, b_writes) = first, second
    words = {True: "writes", False: "reads"}
    maybe = "" if a_box.is_exact and b_box.is_exact else "; an index is known only at run time and may differ"
    text = f"{a} {words[a_writes]} {a_box}, {b} {words[b_writes]} {b_box}{maybe}"
    return Fault("race", text, a, b)


def _first_of_each(faults: Sequence[Fault]) -> list[Fault]:
    first = dict[object, Fault]()
    for fault in faults:
        first.setdefault(fault.key, fault)
    return list(first.values())
