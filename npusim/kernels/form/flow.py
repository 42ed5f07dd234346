"""The place of each name of a phase, which follows only from the algorithm: from the name's writer and readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Literal, NamedTuple

from npusim.errors import ProgramError
from npusim.kernels.form.phase import BySize, Ends, Stacked, TileLoop, tensor_of
from npusim.program.ir.op import PLAIN, Opcode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npusim.kernels.form.phase import Name, Phase, Stage

#: ``global``: an operand.  ``down``: a product writes it, rows read it.  ``up``: rows write it, a product reads it.
#: ``out``: a result.  ``state``: lives as long as the block.  ``carried``: passed from one rows stage to another of the
#: same tile.  ``work``: used within one stage.  ``mask``: a part of a constant.
Place = Literal["global", "down", "up", "out", "state", "carried", "work", "mask"]


def flow(phase: Phase) -> dict[str, Place]:
    """Return the place of every name; a machine's routes turn it into storage.

    A name bound to a tensor is global or out, whatever its role.  Raises `ProgramError` for an input or mask that a
    stage writes, for operands and results that are not bound to a tensor, and for undeclared names.
    """
    stages, names, places = phase.stages, phase.names, dict[str, Place]()
    for stage in stages:
        if unknown := [n for n in stage.written if n not in names]:
            raise ProgramError(
                f"{phase.name}: stage {stage.name} writes {unknown[0]!r}, which is not a name of the phase"
            )
    for n, what in names.items():
        writers = [s for s in stages if n in s.written]
        readers = [s for s in stages if n in s.read]
        bound = phase.tensors.get(n)
        is_fixed = isinstance(bound, BySize) or (bound and tensor_of(bound).role not in ("output", "workspace"))
        if writers and (n in phase.masks or is_fixed):
            raise ProgramError(f"{phase.name}: stage {writers[0].name} writes {n}, which is an input")
        if bound is None and what.role in ("operand", "result"):
            raise ProgramError(f"{phase.name}: no tensor is bound to {what.role} {n}")
        if n in phase.masks:
            places[n] = "mask"
        elif bound is not None:
            places[n] = "out" if writers else "global"
        elif what.start is not None:
            places[n] = "state"
        elif any(s.is_product for s in writers):
            places[n] = "down"
        elif any(s.is_product for s in readers):
            places[n] = "up"
        elif any(s not in writers for s in readers):
            loops = [loop.stages for loop in (*phase.loops, TileLoop(phase.finish))]
            of_writers = {at for at, run in enumerate(loops) for s in writers if s in run}
            is_kept = any(s in run for at, run in enumerate(loops) for s in readers if at not in of_writers)
            places[n] = "state" if is_kept else "carried"
        else:
            places[n] = "work"
    _check_views(phase, places)
    return places


def _check_views(phase: Phase, places: Mapping[str, Place]) -> None:
    """Raise `ProgramError` for a view that the phase writes, or that it reads while it writes the tensor that owns the
    view's memory: blocks may run at the same time. The phase may write a view if the phase's writers add to the view
    and to its owner, and if no other tensor of the phase has its place.
    """
    bound = {n: tensor_of(t) for n, t in phase.tensors.items() if not isinstance(t, BySize)}
    written = {t.name for n, t in bound.items() if places[n] == "out"}
    shared = Counter(t.place for t in bound.values())
    for n, t in bound.items():
        if t.of is None or (t.added and t.added == t.of.added and shared[t.place] == 1):
            continue
        if places[n] == "out" or t.of.name in written:
            why = "is written" if places[n] == "out" else f"is read while the phase writes {t.of.name}"
            raise ProgramError(f"{phase.name}: {n}, a view of {t.of.name}, {why}; do it in a separate phase")


def summed(phase: Phase) -> tuple[Phase, frozenset[str]]:
    """Return the phase for a machine whose accumulators hold sums of products for a whole block, and the names of these
    sums.

    A state that starts at 0, and that only one product of the loop writes, is this product's result at the end of the
    block; a result that is a cast of such a sum is the sum itself, converted when it is stored.
    """
    rows = [r for s in phase.stages for r in s.rows]
    inner = {id(r) for loop in phase.loops if loop.axis for s in loop.stages for r in s.rows}
    writers = {n: [r for r in rows if r.dst == n] for n, what in phase.names.items() if what.start == 0}
    sums = {
        n
        for n, (first, *more) in writers.items()
        if len(phase.names[n].axes) > 1 and not more and first.opcode is Opcode.MATMUL and first.attributes.accumulate
        if id(first) in inner and not any(id(r) in inner for r in rows if n in r.srcs)
    }
    readers = {n: [r for r in rows if n in r.srcs] for n in sums}
    stored = {
        n: r.dst
        for n, (r, *more) in readers.items()
        if not more and r.opcode is Opcode.CAST and r.attributes == PLAIN and not r.only and r.dst in phase.tensors
    }
    if not sums:
        return phase, frozenset()

    def of(stage: Stage) -> Stage:
        left = [r for r in stage.rows if not (r.opcode is Opcode.CAST and stored.get(r.srcs[0]) == r.dst)]
        return replace(stage, rows=tuple(replace(r, dst=stored.get(r.dst, r.dst)) for r in left))

    loops = tuple(replace(loop, stages=tuple(map(of, loop.stages))) for loop in phase.loops)
    names = {n: replace(what, start=None if n in sums else what.start) for n, what in phase.names.items()}
    finish = tuple(s for s in map(of, phase.finish) if s.rows)
    names = {n: what for n, what in names.items() if n not in stored}
    return replace(phase, loops=loops, finish=finish, names=names), frozenset(stored.get(n, n) for n in sums)


def is_visited(phase: Phase, n: str, axis: str) -> bool:
    """Return whether a loop along ``axis`` visits an operand or result tile by tile."""
    bound = phase.tensors.get(n)
    if n in phase.by_tile:
        return axis == phase.loop_axis
    along = phase.walked if axis == phase.loop_axis else (axis,)
    axes = *phase.names[n].axes, bound.axis if isinstance(bound, Stacked | Ends) else None
    return n not in phase.still and not set(along).isdisjoint(axes)


def widest(phase: Phase, n: str) -> str:
    """Return the operand that reads the most rows of an operand's tensor: other readers of the tensor read a part."""
    same = (m for m, bound in phase.tensors.items() if bound is phase.tensors[n])
    return max(same, key=lambda m: phase.sizes[phase.names[m].axes[-1]])


def views(phase: Phase, axis: str) -> dict[str, str]:
    """Return the right operands of products that need no load, because they consist of the first columns of another
    product's right operand, each with that other operand.

    Only one product reads each of the two operands, in the loop along ``axis``: with latent heads V is a part of K.
    """
    rights = [s.rows[0].srcs[1] for s in phase.stages if s.is_product]
    read = Counter(n for s in phase.stages for n in s.read)
    cut = [along for along, *_ in phase.cells[0].spans]
    parts = {n: widest(phase, n) for n in rights if n in phase.tensors and is_visited(phase, n, axis)}
    return {
        n: whole
        for n, whole in parts.items()
        if whole in rights[: rights.index(n)] and read[n] == read[whole] == 1
        if phase.names[n].axes[0] == phase.names[whole].axes[0] and phase.names[n].axes[1] not in cut
    }


#: For each name, the names of other values that are alive at the same time and therefore need separate storage.
Conflicts = Mapping[str, Set[str]]


class _Access(NamedTuple):
    """The accesses of a row, as bits of names: the values whose life the row ends, its sources, and the names that may
    share their storage.
    """

    dst: str
    ends: int
    reads: int
    shares: int = 0


def conflicts(phase: Phase) -> Conflicts:
    """Return, for each name, the names that are alive when it is written; these follow from the reads of later stages.

    A state is alive from its start to the last row that reads it, a result until it is stored.
    """
    bits = _bits(phase)
    met = dict.fromkeys(bits, 0)
    for access, alive in _moments(phase, bits):
        met[access.dst] |= alive & ~access.shares
    return {n: {m for m in bits if met[n] & bits[m] or met[m] & bits[n]} for n in bits}


def most_alive(phase: Phase, sizes: Mapping[str, float], roots: Mapping[str, str]) -> float:
    """Return the largest total size of the names that are alive at one time.  ``sizes`` are given by name; names with
    the same root share their storage.
    """
    bits, most = _bits(phase), 0.0
    for alive in {alive | bits[access.dst] for access, alive in _moments(phase, bits)}:
        held: dict[str, float] = {}
        for n in (n for n in sizes if alive & bits[n]):
            held[roots.get(n, n)] = max(sizes[n], held.get(roots.get(n, n), 0.0))
        most = max(most, sum(held.values()))
    return most


def _bits(phase: Phase) -> dict[str, int]:
    return {n: 1 << i for i, n in enumerate(phase.names)}


def _moments(phase: Phase, bits: Mapping[str, int]) -> Iterator[tuple[_Access, int]]:
    """Yield each access that writes, with the names alive after it."""
    for is_taken in (True, False) if any(map(_stands, phase.stages)) else (True,):
        after = 0
        for loop in reversed((*phase.loops, TileLoop(phase.finish))):
            accesses = _accesses(phase, loop, bits, is_taken=is_taken)
            before = _alive_before(accesses, after)[0]
            while loop.axis and before & ~after:  # names that the next tile reads are alive at the end of this tile
                after |= before
                before = _alive_before(accesses, after)[0]
            yield from _alive_before(accesses, after)[1]
            after = before


def _alive_before(accesses: list[_Access], alive: int) -> tuple[int, list[tuple[_Access, int]]]:
    """Return the names alive before a tile's accesses, from the names alive after them, and the names alive after each
    write.
    """
    met: list[tuple[_Access, int]] = []
    for access in reversed(accesses):
        if access.dst:
            met.append((access, alive))
        alive = alive & ~access.ends | access.reads
    return alive, met


def _accesses(phase: Phase, loop: TileLoop, bits: Mapping[str, int], *, is_taken: bool) -> list[_Access]:
    """Return a tile's loads, rows and stores; its rows either include all rows that have a condition, or none
    of them.
    """

    def named(names: Iterable[str]) -> int:
        return reduce(or_, (bits.get(n, 0) for n in names), 0)

    accesses = [_Access("", named(n for n in phase.tensors if is_visited(phase, n, loop.axis)), 0)]
    for stage in loop.stages:
        stands = {} if is_taken else _stands(stage)
        for r in (r for r in stage.rows if is_taken or not r.only):
            srcs, written, dst = [stands.get(s, s) for s in r.srcs], phase.names[r.dst], bits[r.dst]
            same = srcs[0] in bits and phase.names[srcs[0]].fmt == written.fmt
            shares = dst | (bits[srcs[0]] if same and r.opcode in (Opcode.CAST, Opcode.COPY) else 0)
            reads = named((*srcs, r.dst) if r.attributes.accumulate else srcs)
            if stage.is_product:  # the sources are alive while the product writes
                accesses.append(_Access(r.dst, 0, reads, shares))
            ends = 0 if r.attributes.accumulate or written.start is not None else dst
            accesses.append(_Access(r.dst, ends, reads, shares))
        accesses.append(_Access("", 0, named(n for n in stage.written if n in phase.tensors)))
    return accesses


def _stands(stage: Stage) -> dict[str, str]:
    """Return the names that stand for another name if the condition of their row omits the row."""
    stands: dict[str, str] = {}
    for r in stage.rows:
        if r.only and r.dst not in r.srcs:
            stands[r.dst] = stands.get(r.srcs[0], r.srcs[0])
    return stands


def storage(phase: Phase, places: Mapping[str, Place], apart: Conflicts) -> dict[str, str]:
    """Return ``{name: name whose storage it shares}``.

    Names that a cast between equal formats joins share one storage, named after the name that outlives the stage.  If
    both names outlive it, the cast remains, as a copy.  Any other result of a stage uses the storage of a source of the
    same shape.  No name shares a storage that is still read after the name is written.
    """
    names = phase.names
    chosen = {n: n for n in names}

    def join(keep: str, drop: str) -> bool:
        members = [{n for n, c in chosen.items() if c == one} for one in (keep, drop)]
        if any(apart[n] & members[1] for n in members[0]):
            return False
        chosen.update(dict.fromkeys(members[1], keep))
        return True

    rows = [(s, r) for s in phase.stages if not s.is_product for r in s.rows]
    for _, r in rows:
        if r.opcode is Opcode.CAST and names[r.dst].fmt == names[r.srcs[0]].fmt:
            keep, drop = chosen[r.srcs[0]], chosen[r.dst]
            if places[drop] != "work":
                keep, drop = drop, keep
            if keep != drop and places[drop] == "work":
                join(keep, drop)
    for stage, r in rows:
        if r.opcode is Opcode.CAST or places[r.dst] != "work" or chosen[r.dst] != r.dst:
            continue
        roles = ("work", "state") if stage in phase.finish else ("work",)
        same = (s for s in r.srcs if s in names and s != r.dst and _form(names[s]) == _form(names[r.dst]))
        any(join(chosen[s], r.dst) for s in same if places[s] in roles)
    return chosen


def _form(name: Name) -> tuple[tuple[str, ...], str]:
    return name.axes, name.fmt
