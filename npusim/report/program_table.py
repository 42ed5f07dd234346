"""A tile program as a table, as JSON, and the differences of two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from npusim.late_methods import dataclass
from npusim.program.ir.listing import ListedLoop, ListedOp, ListedRing, listing_of, operations_of
from npusim.report.charts import Figure
from npusim.report.text import Block, Column, Columns, Facts, Heading, cells, document, keyed
from npusim.units import format_bytes

if TYPE_CHECKING:
    from npusim.program.ir.listing import ListedItem, ListedPhase, Listing
    from npusim.program.ir.tile_program import TileProgram

#: A row of a table of rings or operations.
Row = tuple[str, ...]

_OF_RINGS = "rings"
#: A ring in the form of tables and of JSON.
RINGS = Columns(
    Column("ring", "name", key="name"),
    Column("memory", "space", key="space"),
    Column("slots", lambda ring: f"{ring.depth} x {format_bytes(ring.slot_bytes)}"),
    *keyed("depth", "slot_bytes"),
    Column("from", "producers", "+".join, key="producers"),
    Column("to", lambda ring: "+".join([*ring.consumers, *(f"{queue} (reads)" for queue in ring.peeks)])),
    *keyed("consumers", "peeks"),
    Column("flags", "flag", key="flag"),
)
#: An operation of a block.
OPERATIONS = Columns(
    Column(None, lambda _: "operation", key="kind"),
    Column("queue", "queue", key="queue"),
    Column("operation", "label", key="label"),
    Column("computes", "computes", key="computes"),
    Column("region", "regions", " ".join, key="regions"),
    Column("waits for", "waits", ", ".join, key="waits"),
    Column("gives", "gives", ", ".join, key="gives"),
)
#: A loop and a phase; in JSON their items are nested.
LOOPS = Columns(
    Column(None, lambda _: "loop", key="kind"),
    *keyed("name", "first", "count", "step"),
    Column(None, lambda loop: _items(loop.items), key="items"),
)
PHASES = Columns(
    *keyed("name", "blocks", "shapes", "block", "block_count"),
    Column(None, lambda phase: _items(phase.items), key="items"),
)
#: Largest number of operations of a period that is folded: each of them has one line.
LONGEST_PERIOD = 8
#: The same queue in two cores.
_SAME_QUEUE = re.compile(r"\b([A-Za-z_]+)(\d+)\.(\w+)\+\1(\d+)\.\3\b")
#: Resident blocks of a GPU's core have separate queues and rings, equal except for this number.
_RESIDENT = re.compile(r"\bB\d+")


def _table(header: Row) -> Columns:
    return Columns(*(Column(title, number) for number, title in enumerate(header)))


@dataclass(frozen=True)
class Printed:
    """A program to print: its name, as a command names it, the device, and its listing."""

    name: str
    device: str
    listing: Listing

    @classmethod
    def of(cls, name: str, program: TileProgram, device: str) -> Printed:
        """Return a program's listing under a name; raises `ProgramError` if a body reads the value of its
        loop's index.
        """
        return cls(name, device, listing_of(program))


def program_table(printed: Printed) -> Iterator[Block]:
    """Yield the table of a program: its rings, then the operations of the most frequent block of each phase."""
    rings = printed.listing.rings
    inner = sum(is_inner(ring) for ring in rings)
    also = f"; {inner} from a queue to itself are not listed" if inner else ""
    yield Heading(f"{printed.name}: {len(rings)} rings{also}", printed.device)
    for name, about, header, rows in _sections(printed.listing):
        if name != _OF_RINGS:
            yield Heading(name, about)
        yield _table(header).grid(rows)


def program_tables(program: TileProgram) -> list[dict[str, Any]]:
    """Return the tables of a program as JSON data: a title, a line on it, the titles of columns, and rows of text."""
    return [
        {"title": name[0].upper() + name[1:], "text": about, "header": header, "rows": rows}
        for name, about, header, rows in _sections(listing_of(program))
    ]


def _sections(listing: Listing) -> list[tuple[str, str, Row, list[Row]]]:
    """Return the sections of a listing: a name, a line on it, the titles of columns, and rows."""
    phases = [(f"phase {p.name}", _about(p), OPERATIONS.titles, operation_rows(p)) for p in listing.phases]
    return [(_OF_RINGS, "Slots that one queue passes to another, in order.", RINGS.titles, ring_rows(listing)), *phases]


def program_figures(tables: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the folded figures of a page from the tables of `program_tables`."""
    for number, table in enumerate(tables):
        grid = _table(tuple(table["header"])).grid(table["rows"])
        yield Figure(f"program-{number}", table["title"], table["text"], None, grid, is_folded=True)


def program_document(printed: Printed) -> dict[str, object]:
    """Return a program as JSON data: every ring, and the operations of the most frequent block of each phase."""
    rings, phases = RINGS.records(printed.listing.rings), PHASES.records(printed.listing.phases)
    return document("program", schedule=printed.name, device=printed.device, rings=rings, phases=phases)


def _items(items: Sequence[ListedItem]) -> list[dict[str, Any]]:
    return [(OPERATIONS if isinstance(item, ListedOp) else LOOPS).record(item) for item in items]


def _about(phase: ListedPhase) -> str:
    shapes = f", {phase.block_count} of them as block {phase.block}" if phase.shapes > 1 else ", all alike"
    alike = [f"{core} runs the same operations as {other}" for core, other in alike_cores(phase).items()]
    return "; ".join([f"{phase.blocks} blocks{shapes if phase.blocks > 1 else ''}", *alike])


# ---------------------------------------------------------------- rings


def is_inner(ring: ListedRing) -> bool:
    """Return whether one queue both fills and empties a ring; its order then suffices, and it never waits."""
    return ring.producers == ring.consumers and not ring.peeks


def ring_rows(listing: Listing) -> list[Row]:
    """Return the rows of rings; equal cores, and resident blocks, share a row, which has their names."""
    alike = {core: other for phase in listing.phases for core, other in alike_cores(phase).items()}
    named: dict[Row, list[Row]] = {}
    for ring in (ring for ring in listing.rings if not is_inner(ring)):
        name, space, *row = (_RESIDENT.sub("B0", _listed_core(text, alike)) for text in RINGS.texts(ring))
        named.setdefault(tuple(row), []).append((name, space))
    return [
        (*(", ".join(dict.fromkeys(names)) for names in zip(*ends, strict=True)), *map(_of_neighbours, row))
        for row, ends in named.items()
    ]


def _of_neighbours(text: str) -> str:
    """Return the names of queues; those of two neighbouring cores are combined so that a row fits into 80 columns.

    >>> _of_neighbours("aiv0.MTE2+aiv1.MTE2"), _of_neighbours("aic.MTE2+aic.FIXP")
    ('aiv0-1.MTE2', 'aic.MTE2+aic.FIXP')
    """
    return _SAME_QUEUE.sub(lambda m: f"{m[1]}{m[2]}-{m[4]}.{m[3]}" if int(m[4]) == int(m[2]) + 1 else m[0], text)


def _listed_core(text: str, alike: Mapping[str, str]) -> str:
    """Return the name of a memory or of queues; a core has the name of the core that it equals, unless both occur."""
    for core, other in alike.items():
        if other not in text:
            text = re.sub(rf"\b{re.escape(core)}\b", other, text)
    return text


# ---------------------------------------------------------------- operations


def operation_rows(phase: ListedPhase) -> list[Row]:
    """Return the rows of a phase's operations; a loop that repeats most of the longest one lists only its differences
    from it.
    """
    items = _without(phase.items, alike_cores(phase))
    loops = [i for i in items if isinstance(i, ListedLoop)]
    longest = max(loops, key=lambda loop: (loop.count != "1", sum(1 for _ in operations_of(loop.items))), default=None)
    return list(_rows(items, longest, 0))


def _rows(items: Sequence[ListedItem], longest: ListedLoop | None, depth: int) -> Iterator[Row]:
    for item, count in _folded(items):
        indent = "  " * depth
        if isinstance(item, ListedOp):
            times = f"{count} x " if count > 1 else ""
            queue, label, *others = OPERATIONS.texts(item)
            if any(others):  # otherwise the task takes no time, and only has a position in its queue
                yield (f"{indent}{queue}", f"{times}{label}", *others)
            continue
        text, listed = ("", item.items) if longest in (None, item) else _difference(item, longest)
        if item.count == "1" and not text and not _depends(item):
            yield from _rows(listed, longest, depth)
        else:
            yield (f"{indent}{item.bounds}:", text, *[""] * (len(OPERATIONS.titles) - 2))
            yield from _rows(listed, longest, depth + 1)


def _depends(loop: ListedLoop) -> bool:
    """Return whether a region of a loop names its index."""
    return any(re.search(rf"\b{re.escape(loop.name)}\b", r) for op in operations_of(loop.items) for r in op.regions)


def _difference(loop: ListedLoop, longest: ListedLoop) -> tuple[str, Sequence[ListedItem]]:
    """Return the operations of a loop that differ from those of the longest loop; all operations if the two share less
    than half.
    """
    operations, others = (list(operations_of(of.items)) for of in (loop, longest))
    does = {(op.queue, op.label, op.computes) for op in others}
    extra = [op for op in operations if (op.queue, op.label, op.computes) not in does]
    if len(extra) * 2 >= len(operations):
        return "", loop.items
    labels = {(op.queue, op.label) for op in operations}
    without = _ranges([(op.queue, op.label) not in labels for op in others], [op.label for op in others])
    words = f"as {longest.bounds}{' without ' if without else ''}{without}{', but' if extra else ''}"
    return words, extra


def _ranges(is_left: Sequence[bool], labels: Sequence[str]) -> str:
    """Return the omitted labels; three or more consecutive ones are written as a range."""
    stretches: list[list[str]] = [[]]
    for left, label in zip(is_left, labels, strict=True):
        if left:
            stretches[-1].append(label)
        elif stretches[-1]:
            stretches.append([])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(s) for s in stretches if s)


# ---------------------------------------------------------------- operations that share one line


def alike_cores(phase: ListedPhase) -> dict[str, str]:
    """Return cores (``aiv1``) whose operations equal another one's (``aiv0``), except for their regions."""
    does: dict[str, list[object]] = {}
    for op in operations_of(phase.items):
        core, _, rest = op.queue.rpartition(".")
        ends = tuple(re.sub(rf"\b{re.escape(core)}\b", "", end) for end in (*op.waits, *op.gives))
        does.setdefault(core, []).append((rest, op.label, op.computes, ends))
    first, alike = dict[object, str](), dict[str, str]()
    for core, done in does.items():
        key = (core.rstrip("0123456789"), *done)
        if core != first.setdefault(key, core):
            alike[core] = first[key]
    return alike


def _without(items: Sequence[ListedItem], cores: Mapping[str, str]) -> tuple[ListedItem, ...]:
    return tuple(
        replace(item, items=_without(item.items, cores)) if isinstance(item, ListedLoop) else item
        for item in items
        if isinstance(item, ListedLoop) or item.queue.rpartition(".")[0] not in cores
    )


def _folded(items: Sequence[ListedItem]) -> Iterator[tuple[ListedItem, int]]:
    """Yield the items, each with 1; operations that repeat in a period are yielded once each, with their number."""
    keys = [(i.queue, i.label, i.computes) if isinstance(i, ListedOp) else id(i) for i in items]
    at = 0
    while at < len(items):
        period, times = _period(keys[at:])
        for first in range(at, at + period):
            yield _joined(items[first : first + period * times : period]), times
        at += period * times


def _period(keys: Sequence[object]) -> tuple[int, int]:
    """Return the length of the period at the beginning of ``keys`` that saves most lines, and its number of
    repetitions; (1, 1) if there is none.
    """

    def times(period: int) -> int:
        count = 1
        while keys[count * period : (count + 1) * period] == keys[:period]:
            count += 1
        return count

    best = max(((p, times(p)) for p in range(1, min(LONGEST_PERIOD, len(keys)) + 1)), key=lambda p: p[0] * (p[1] - 1))
    return best if best[1] > 1 else (1, 1)


def _joined(alike: Sequence[Any]) -> ListedItem:
    """Return equal operations as one: the regions of the first, and the waits and releases of all."""
    first: ListedItem = alike[0]
    if isinstance(first, ListedLoop) or len(alike) == 1:
        return first
    waits, gives = (tuple(dict.fromkeys(n for op in alike for n in getattr(op, ends))) for ends in ("waits", "gives"))
    return replace(first, waits=waits, gives=gives)


# ---------------------------------------------------------------- two programs


@dataclass(frozen=True)
class ProgramDifference:
    """Two programs and, section by section, the rows that only one of them has (``-``: the first program, ``+``: the
    second).
    """

    names: tuple[str, str]
    sections: Mapping[str, Sequence[tuple[str, Row]]]


def program_difference(first: Printed, second: Printed) -> ProgramDifference:
    """Return the differences of the rings and the most frequent blocks of two programs."""
    a, b = ({name: rows for name, _, _, rows in _sections(p.listing)} for p in (first, second))
    sections = {name: list(_changed(a.get(name, []), b.get(name, []))) for name in dict.fromkeys((*a, *b))}
    names = first.name, second.name
    if first.device != second.device:
        names = f"{first.name} on {first.device}", f"{second.name} on {second.device}"
    return ProgramDifference(names, {name: rows for name, rows in sections.items() if rows})


def _changed(a: Sequence[Row], b: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    for tag, start, end, other_start, other_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (("-", row) for row in a[start:end])
            yield from (("+", row) for row in b[other_start:other_end])


def difference_table(difference: ProgramDifference) -> Iterator[Block]:
    """Yield the table of a difference."""
    first, second = difference.names
    yield Heading("two programs: - the first alone, + the second alone")
    yield Facts((("-", cells(first)), ("+", cells(second))))
    if not difference.sections:
        yield Facts((("equal", cells("rings and the commonest block of each phase are the same")),))
    for name, rows in difference.sections.items():
        header = ("", *(RINGS if name == _OF_RINGS else OPERATIONS).titles)
        yield Heading(name)
        yield _table(header).grid([(mark, *row) for mark, row in rows])


def difference_document(difference: ProgramDifference) -> dict[str, object]:
    """Return a difference as JSON data."""
    sections: list[dict[str, Any]] = [
        {"name": name, "rows": [{"mark": mark, "cells": list(row)} for mark, row in rows]}
        for name, rows in difference.sections.items()
    ]
    return document("program_difference", programs=list(difference.names), sections=sections)
