"""Straight runs of operations as short loops: slices that do the same over and over, one after the other.

What an operation touches is widened to all that its queue touches of that slot, of that memory, while it
holds it: slices of a tile become one operation repeated.  More bytes can only add races, never hide one,
so what passes like this is proved; what does not is looked at again as it is (``ir.check``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.ir.opaque import Symbol
from npusim.ir.structure import Bytes, LoopPart, Operation, Part, Piece

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from npusim.ir.program import TileProgram
    from npusim.ir.structure import Shape

#: Operations of a slice at most: loads with masks, the work, stores; pieces of a product have as many.
LONGEST = 12
#: Repetitions from which on a loop is shorter than what it stands for: the automaton goes around twice.
FEWEST = 3


def condensed(run: Sequence[Operation]) -> Iterator[Part]:
    """Yield operations as pieces and loops of pieces, with widened accesses."""
    wide = list(_widened(run))
    numbers: dict[Operation, int] = {}
    # Regions of global memory are compared by themselves: operations with some repeat nothing.
    ids = [-n if op.regions else numbers.setdefault(op, len(numbers)) for n, op in enumerate(wide, 1)]
    at = begun = 0
    while at < len(ids):
        period, times = _repeated(ids, at)
        if times < FEWEST:
            at += 1
            continue
        if begun < at:
            yield Piece(tuple(wide[begun:at]))
        body = Piece(tuple(wide[at : at + period]))
        yield LoopPart("", range(times), (body,), Symbol("the number of a slice"), ())
        at = begun = at + period * times
    if begun < len(ids):
        yield Piece(tuple(wide[begun:]))


def _repeated(ids: Sequence[int], at: int) -> tuple[int, int]:
    """Return the period that repeats most from ``at`` on, and how often it comes."""
    best = (1, 1)
    for period in range(1, min(LONGEST, (len(ids) - at) // FEWEST) + 1):
        end = at + period
        while end < len(ids) and ids[end] == ids[end - period]:
            end += 1
        times = (end - at) // period
        if times >= FEWEST and period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best


def _widened(run: Sequence[Operation]) -> Iterator[Operation]:
    held: dict[object, list[Bytes]] = defaultdict(list)
    kept: dict[object, list[Bytes]] = defaultdict(list)
    turns: dict[int, int] = defaultdict(int)
    places = []
    for op in run:
        slots = [(s, (s.endpoint, turns[s.endpoint], s.is_write)) for s in op.slots]
        tiles = [(t, (t.space, op.queue, t.is_write)) for t in op.tiles]
        for access, turn in slots:
            held[turn].append(access.where)
        for tile, memory in tiles:
            kept[memory].append(tile.where)
        places.append((op, slots, tiles))
        for endpoint, _, last in op.uses:
            turns[endpoint] += last
    hulls = {key: _hull(found) for key, found in held.items()}
    spans = {key: _joined(found) for key, found in kept.items()}
    for op, slots, tiles in places:
        yield replace(
            op,
            slots=tuple(dict.fromkeys(replace(s, where=hulls[key]) for s, key in slots)),
            tiles=tuple(dict.fromkeys(replace(t, where=spans[key][t.where]) for t, key in tiles)),
        )


def _hull(found: Sequence[Bytes]) -> Bytes:
    """Return one run of bytes around all."""
    first = found[0]
    if all(f == first for f in found):
        return first
    start, end = min(f.start for f in found), max(f.end for f in found)
    return Bytes(start, end - start, end - start, 1)


def _joined(found: Iterable[Bytes]) -> dict[Bytes, Bytes]:
    """Return for each run of bytes those that it makes one run with, touching or overlapping."""
    joined: dict[Bytes, Bytes] = {}
    group: list[Bytes] = []
    end = 0
    for where in sorted(set(found), key=lambda b: (b.start, b.end)):
        if group and where.start > end:
            joined |= dict.fromkeys(group, _hull(group))
            group = []
        group.append(where)
        end = max(end, where.end)
    return joined | dict.fromkeys(group, _hull(group))


# ---------------------------------------------------------------- pieces that are alike


def alike(program: TileProgram, shapes: Iterable[Shape], contested: frozenset[str]) -> Mapping[int, Piece]:
    """Return for each piece, by its id, one that stands for all that make and meet the same dangers.

    Two uses of a slot by one queue that overlap the same uses of others are one use: which of them came
    last is known wherever the earlier one is.  So tiles cut short by a mask are no pieces of their own.
    """
    pieces = {id(p): p for shape in shapes for p in _pieces(shape.parts)}
    slots: dict[int, dict[tuple[int, bool, Bytes], None]] = defaultdict(dict)
    tiles: dict[str, dict[tuple[int, bool, Bytes], None]] = defaultdict(dict)
    for op in (op for p in pieces.values() for op in p.operations):
        for s in op.slots:
            slots[s.ring][op.queue, s.is_write, s.where] = None
        for t in op.tiles:
            tiles[t.space][op.queue, t.is_write, t.where] = None
    rings = {ring: _classes(list(uses)) for ring, uses in slots.items()}
    spaces = {}
    for space, uses in tiles.items():
        within = [r for r in program.rings if r.space == space]
        whole = [(-1, True, Bytes(r.offset_bytes, r.depth * r.slot_bytes, r.depth * r.slot_bytes, 1)) for r in within]
        spaces[space] = _classes([*uses, *whole])
    found: dict[Hashable, Piece] = {}
    same = {}
    for number, piece in pieces.items():
        key: Hashable = tuple(
            (
                op.queue,
                op.uses,
                tuple({(s.ring, s.endpoint, rings[s.ring][op.queue, s.is_write, s.where]): None for s in op.slots}),
                tuple({(t.space, spaces[t.space][op.queue, t.is_write, t.where]): None for t in op.tiles}),
            )
            for op in piece.operations
        )
        if contested and any(a.region.tensor.name in contested for op in piece.operations for a in op.regions):
            key = number
        same[number] = found.setdefault(key, piece)
    return same


def _pieces(parts: Iterable[Part]) -> Iterator[Piece]:
    for part in parts:
        if isinstance(part, Piece):
            yield part
        else:
            yield from _pieces(part.parts)


def _classes(uses: Sequence[tuple[int, bool, Bytes]]) -> dict[tuple[int, bool, Bytes], int]:
    """Return a number for each use, the same for those of one queue that meet the same others."""
    numbers: dict[Hashable, int] = {}
    found = {}
    for use in uses:
        queue, is_write, where = use
        met = tuple(
            n for n, (q, w, other) in enumerate(uses) if q != queue and (w or is_write) and where.overlaps(other)
        )
        found[use] = numbers.setdefault((queue, is_write, met), len(numbers))
    return found
