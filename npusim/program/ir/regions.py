"""Regions of global memory. Blocks of one phase may run at the same time, so no block may access a region that another
block writes.

A region's coordinates are sums of block coordinates, loop indices and constants (``ir.opaque``), so the footprint over
a loop is an interval in closed form; the footprints of all blocks of a shape are one expression, which is evaluated at
once. Sorting detects overlaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError, RaceError
from npusim.program.ir.content import record
from npusim.program.ir.families import values_of
from npusim.program.ir.opaque import Coordinate, OpaqueError, Symbol, constant_of, terms_of
from npusim.program.ir.structure import Piece, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from npusim.program.ir.structure import Operation, Part, RegionAccess, Shape
    from npusim.program.ir.tile import GlobalTile
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram

Ranges = dict[Symbol, tuple[int, int]]
Places = Mapping[Symbol, Any]
ANYWHERE: Places = MappingProxyType({})
AXES = ("batch", "head", "row", "col")


@record
class Touched:
    """One region that every block of a shape accesses, with the operation that accesses it."""

    shape: Shape
    operation: Operation
    access: RegionAccess


def check_regions(program: TileProgram, phase: ProgramPhase, shapes: Sequence[Shape]) -> tuple[frozenset[str], Ranges]:
    """Return the tensors for which queues of one block contend (happens-before decides about them).

    Raises `ProgramError` if a region of a tensor that may be written exceeds its head; `RaceError` if two blocks access
    common elements of a tensor and one of them writes; `OpaqueError` if a region of a tensor that the phase writes is
    not a sum of coordinates.
    """
    ranges: Ranges = {}
    by_tensor: dict[str, list[Touched]] = defaultdict(list)
    silent: dict[int, bool] = {}
    for shape in shapes:
        for operation, access in _accesses(shape.parts, {}, ranges, silent):
            by_tensor[access.region.tensor.name].append(Touched(shape, operation, access))
    contested = set()
    for name, touched in by_tensor.items():
        is_written = any(t.access.is_write for t in touched)
        for t in touched if is_written else ():
            _check_affine(program, t)
        _check_blocks(program, phase, [t for t in touched if _is_affine(*t.access.region.corner)], ranges)
        if is_written and _is_contested(touched, ranges):
            contested.add(name)
    return frozenset(contested), ranges


def _accesses(
    parts: Sequence[Part], values: Mapping[Symbol, object], ranges: Ranges, silent: dict[int, bool]
) -> Iterator[tuple[Operation, RegionAccess]]:
    """Yield the accesses of operations, at the coordinates of this call; ``silent`` collects the bodies that have no
    accesses.
    """
    for part in parts:
        if isinstance(part, Piece):
            for operation in part.operations:
                for access in operation.regions:
                    yield operation, access.placed(values)
            continue
        if id(part.parts) not in silent:
            silent[id(part.parts)] = not any(o.regions for p in pieces_of(part.parts) for o in p.operations)
        if not silent[id(part.parts)]:
            yield from _accesses(part.parts, part.values(values, ranges), ranges, silent)


def _check_affine(program: TileProgram, touched: Touched) -> None:
    r, op = touched.access.region, touched.operation
    for name, value in zip(AXES, r.corner, strict=True):
        if not _is_affine(value):
            hangs = " and ".join(s.name for s in terms_of(value))
            raise OpaqueError(
                f"{op.prefix}{program.name}: {op.label} on {program.queues[op.queue].name} accesses a region of "
                f"tensor {r.tensor.name} that cannot be expressed: its {name} depends on {hangs} in a way other "
                "than sums and products with constants",
                frozenset(terms_of(value)),
            )


def _is_affine(*values: object) -> bool:
    return all(not isinstance(v, Coordinate) or v.is_affine for v in values)


# ---------------------------------------------------------------- within a block


def _is_contested(touched: Sequence[Touched], ranges: Ranges) -> bool:
    """Return whether two queues of one block may access the same bytes of a tensor; shapes with equal accesses are
    examined once.
    """
    by_shape: dict[int, tuple[Shape, dict[tuple[Any, ...], list[GlobalTile]]]] = {}
    for t in touched:
        _, uses = by_shape.setdefault(id(t.shape), (t.shape, defaultdict(list)))
        uses[t.operation.queue, t.access.is_write, _terms(t.access.region)].append(t.access.region)
    seen = set()
    for number, (shape, uses) in by_shape.items():
        alike = tuple((q, w, _named(terms, ranges), *map(_extents, r)) for (q, w, terms), r in uses.items())
        # Blocks that several queues access in different ways are examined individually, by their coordinates.
        places = {tuple(tuple((s, f) for s, f in axis if s not in ranges) for axis in terms) for *_, terms in uses}
        key = (alike, number if len(places) > 1 else None)
        if key not in seen and _meets_itself(uses, ranges, _by_block(shape)):
            return True
        seen.add(key)
    return False


def _by_block(shape: Shape) -> dict[Symbol, Any]:
    """Return a shape's coordinates, (blocks, 1, 1), with two lists of regions."""
    return {symbol: np.asarray(values, np.int64)[:, None, None] for symbol, values in shape.coordinates.items()}


def _named(terms: Iterable[Iterable[tuple[Symbol, int]]], ranges: Ranges) -> object:
    """Return terms in which this shape's symbols replace another shape's, if their loops have equal lengths."""
    return tuple(tuple((s.name, ranges.get(s), f) for s, f in axis) for axis in terms)


def _extents(r: GlobalTile) -> tuple[int, ...]:
    return (r.rows, r.cols, *map(constant_of, r.corner))


def _meets_itself(uses: Mapping[tuple[Any, ...], Sequence[GlobalTile]], ranges: Ranges, places: Places) -> bool:
    """Return whether two queues access the same bytes and one of them writes: the hulls of regions are compared first,
    then the regions themselves.
    """
    groups = [(key, _hull(regions), regions) for key, regions in uses.items()]
    for i, (a, hull, regions) in enumerate(groups):
        for b, other, others in groups[:i]:
            if a[0] == b[0] or not (a[1] or b[1]) or not may_meet(hull, other, ranges, places):
                continue
            if _any_meet(regions, others, ranges, places):
                return True
    return False


def _any_meet(regions: Sequence[GlobalTile], others: Sequence[GlobalTile], ranges: Ranges, places: Places) -> bool:
    """Return whether a region of one list may overlap one of another; the regions of a list differ by constants."""
    meet: Any = True
    for axis in range(len(AXES)):
        columns = [
            [(constant_of(at), size) for at, size in (r.extents[axis] for r in some)] for some in (regions, others)
        ]
        (first, size), (start, length) = (np.array(c, np.int64).T for c in columns)
        at, to = regions[0].extents[axis][0], others[0].extents[axis][0]
        meet = meet & _may_overlap((at, first[:, None], size[:, None]), (to, start, length), ranges, places)
    return bool(np.any(meet))


def _hull(regions: Sequence[GlobalTile]) -> GlobalTile:
    """Return the smallest region that contains all regions, which differ by constants; its rows and columns are limited
    only if the heads agree.
    """
    first = regions[0]
    same = len({(constant_of(r.batch), constant_of(r.head)) for r in regions}) == 1
    row, rows = _span([(r.row, r.rows) for r in regions])
    col, cols = _span([(r.col, r.cols) for r in regions])
    # Regions of several heads have no common hull: a region whose head is unknown may overlap all regions.
    anywhere: Any = Coordinate({Symbol("any head"): 1})
    batch, head = (first.batch, first.head) if same else (anywhere, anywhere)
    return type(first)(first.tensor, batch, head, row, rows, col, cols)


def _span(extents: Sequence[tuple[Any, int]]) -> tuple[Any, int]:
    low = min(constant_of(at) for at, _ in extents)
    high = max(constant_of(at) + size for at, size in extents)
    return extents[0][0] + (low - constant_of(extents[0][0])), high - low


def may_meet(a: GlobalTile, b: GlobalTile, ranges: Mapping[Symbol, tuple[int, int]], places: Places = ANYWHERE) -> bool:
    """Return whether two regions of one block may share an element, in any two iterations.

    ``places``: coordinates of these blocks; regions that depend on other coordinates in different ways may overlap.
    """
    meet: Any = a.tensor.name == b.tensor.name
    for (at, size), (to, length) in zip(a.extents, b.extents, strict=True):
        if np.any(meet):
            of_both = (at, constant_of(at), size), (to, constant_of(to), length)
            meet = meet & _may_overlap(*of_both, ranges, places)
    return bool(np.any(meet))


def _may_overlap(
    a: tuple[Any, Any, Any], b: tuple[Any, Any, Any], ranges: Mapping[Symbol, tuple[int, int]], places: Places
) -> Any:
    """Return whether two spans may overlap; each span has a coordinate, a constant that replaces the coordinate's, and
    a size, or arrays of these.
    """
    (at, first_a, a_size), (to, first_b, b_size) = a, b
    distance, low, high, step = first_b - first_a, 0, 0, 0
    fixed: dict[Symbol, int] = defaultdict(int)
    for value, sign in ((to, 1), (at, -1)):
        for symbol, factor in terms_of(value).items():
            if symbol not in ranges:
                fixed[symbol] += sign * factor
                continue
            first, last = ranges[symbol]
            step = gcd(step, factor)
            ends = (sign * factor * first, sign * factor * last)
            low, high = low + min(ends), high + max(ends)
    for symbol, factor in fixed.items():
        if factor:
            if symbol not in places:
                return True  # the coordinate depends on the block in another way
            distance = distance + factor * places[symbol]
    meet = (distance + low < a_size) & (distance + high > -b_size)
    if not step:
        return meet
    # Loops move both by multiples of their common step, so bytes between two such positions are not accessed.
    apart = distance % step
    return meet & ((apart < a_size) | (step - apart < b_size))


def _terms(r: GlobalTile) -> object:
    return tuple(tuple((s, f) for s, f in terms_of(v).items()) for v in r.corner)


# ---------------------------------------------------------------- between blocks


def _check_blocks(program: TileProgram, phase: ProgramPhase, touched: Sequence[Touched], ranges: Ranges) -> None:
    """Raise `ProgramError` if a region exceeds its head: overlaps beyond a head are not examined.

    Raise `RaceError` if two blocks access the same bytes.  The hulls of a block's accesses are examined first, then
    region by region.
    """
    if not touched:
        return
    # Programs may share a body that was built for another length: the tensors of this program are used.
    tensor = touched[0].access.region.tensor
    tensor = program.tensors.get(tensor.name, tensor)
    sizes = np.array((tensor.batch, tensor.heads, tensor.rows, tensor.cols))
    for groups in (_hulls(touched), [[t] for t in touched]):
        boxes, owners, sources = _evaluated(groups, ranges)
        outside = np.argwhere((boxes[:, :, 0] < 0) | (boxes[:, :, 1] > sizes))
        writes = np.array([g[0].access.is_write for g in groups])[sources]
        met = None if len(outside) else _first_meeting(boxes, owners, writes)
        if met is None and not len(outside):
            return
    if met is None:
        box, axis = outside[0].tolist()
        op, (low, high) = groups[sources[box]][0].operation, boxes[box, axis].tolist()
        raise ProgramError(
            f"{op.prefix}{program.name}: phase {phase.name}: {op.label} on {program.queues[op.queue].name} of "
            f"block {phase.blocks[owners[box]]} runs out of tensor {tensor.name}: {AXES[axis]} {low} to "
            f"{high - 1}; allowed: 0 to {sizes[axis] - 1}"
        )
    written, other = sorted(met, key=lambda i: not writes[i])
    both = [(groups[sources[i]][0], int(owners[i])) for i in (written, other)]
    raise _meeting(program, phase, *both)


def _hulls(touched: Sequence[Touched]) -> list[list[Touched]]:
    """Group regions of a shape, separately for reads and writes, whose coordinates differ only by a constant."""
    groups: dict[object, list[Touched]] = defaultdict(list)
    for t in touched:
        groups[id(t.shape), t.access.is_write, _terms(t.access.region)].append(t)
    return list(groups.values())


def _evaluated(
    groups: Sequence[Sequence[Touched]], ranges: Ranges
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each group's hull for each of its blocks, the blocks' numbers, and the groups' numbers.

    A hull is the first and one past the last index of batch, head, row and column: ``(hulls, 4, 2)`` int64.
    """
    counts = [len(group[0].shape.numbers) for group in groups]
    boxes, owners = np.empty((sum(counts), 4, 2), np.int64), np.empty(sum(counts), np.int64)
    for end, count, group in zip(accumulate(counts), counts, groups, strict=True):
        shape, box = group[0].shape, boxes[end - count : end]
        owners[end - count : end] = shape.numbers
        for axis in range(4):
            extents = [t.access.region.extents[axis] for t in group]
            low: Any = min(constant_of(v) for v, _ in extents)
            high: Any = max(constant_of(v) + size for v, size in extents)
            for symbol, factor in terms_of(extents[0][0]).items():
                if symbol in ranges:
                    first, last = symbol.ends or ranges[symbol]
                    if factor < 0:
                        first, last = last, first
                    low = low + factor * values_of(first, shape.coordinates)
                    high = high + factor * values_of(last, shape.coordinates)
                else:
                    base = factor * np.asarray(shape.coordinates[symbol], np.int64)
                    low, high = low + base, high + base
            box[:, axis, 0], box[:, axis, 1] = low, high
    return boxes, owners, np.repeat(np.arange(len(groups)), counts)


def _first_meeting(
    boxes: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], writes: npt.NDArray[np.bool_]
) -> tuple[int, int] | None:
    """Return two boxes of different owners that overlap, one of them written; None if no two overlap.

    Sorting divides boxes into groups that do not overlap along one axis; this is repeated along each axis until none
    separates any boxes.  The remaining boxes are compared pair by pair.
    """
    waiting = [(np.arange(len(boxes)), 0, 0)]
    while waiting:
        members, axis, idle = waiting.pop()
        if not writes[members].any() or (owners[members] == owners[members[0]]).all():
            continue
        if idle == boxes.shape[1]:
            met = _pair(members, boxes, owners, writes)
            if met:
                return met
            continue
        order = members[np.argsort(boxes[members, axis, 0], kind="stable")]
        reached = np.maximum.accumulate(boxes[order, axis, 1])
        cuts = np.flatnonzero(boxes[order[1:], axis, 0] >= reached[:-1]) + 1
        ends = np.concatenate(([0], cuts, [len(order)]))
        following = (axis + 1) % boxes.shape[1]
        waiting += [
            (order[ends[run] : ends[run + 1]], following, 0 if len(cuts) else idle + 1)
            for run in np.flatnonzero(np.diff(ends) > 1)
        ]
    return None


def _pair(
    members: npt.NDArray[np.int64],
    boxes: npt.NDArray[np.int64],
    owners: npt.NDArray[np.int64],
    writes: npt.NDArray[np.bool_],
) -> tuple[int, int] | None:
    for i in members[writes[members]]:
        meets = (boxes[members, :, 0] < boxes[i, :, 1]).all(1) & (boxes[members, :, 1] > boxes[i, :, 0]).all(1)
        others = members[meets & (owners[members] != owners[i])]
        if len(others):
            return int(i), int(others[0])
    return None


def _meeting(program: TileProgram, phase: ProgramPhase, a: tuple[Touched, int], b: tuple[Touched, int]) -> RaceError:
    (one, first), (two, second) = a, b
    names = [program.queues[t.operation.queue].name for t in (one, two)]
    verb = "writes" if two.access.is_write else "reads"
    who, other = (
        f"{t.operation.label} on {name} of block {phase.blocks[number]}"
        for t, name, number in zip((one, two), names, (first, second), strict=True)
    )
    return RaceError(
        f"{one.operation.prefix}{program.name}: phase {phase.name}: {who} writes elements of tensor "
        f"{one.access.region.tensor.name} that {other} {verb}; blocks of a phase may run at once, in any order"
    )
