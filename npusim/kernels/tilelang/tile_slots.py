"""Tiles with several slots, one for each iteration of a loop in turn, as tiles without slots.

A kernel that copies ahead writes slot ``(k + 1) % 2`` while it reads slot ``k % 2``.  If an iteration writes a slot
before it reads it, the slot is a tile of the iteration; a slot that is copied ahead equals the copy that its own
iteration would make; a slot that the previous iteration has written is a tile that the loop carries.  Other slots are
unchanged, and are refused as parts of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from npusim.kernels.tilelang.cores_joined import elements_of
from npusim.kernels.tilelang.loops import Access, accesses
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    Variable,
    linear,
    number_of,
    only_assignment,
    parts_of,
    substituted,
    variables_of,
    walked,
    with_bodies,
    written_buffers,
)
from npusim.kernels.tilelang.tiles_in_place import TilesInPlace

Body = tuple[Statement, ...]


def with_invariant_slots(body: Sequence[Statement]) -> Body:
    """Return statements with ``if k < 2: a[k % 2] = x`` as an assignment in each iteration, if x is always equal."""

    def one(s: Statement) -> Statement:
        s = with_bodies(s, with_invariant_slots)
        return replace(s, body=tuple(_unconditional(x, s, s.body) for x in s.body)) if isinstance(s, SerialLoop) else s

    return tuple(map(one, body))


def _unconditional(s: Statement, loop: SerialLoop, body: Body) -> Statement:
    """Return the assignment of an if that fills each slot of a tile once; any other statement is returned unchanged."""
    if not isinstance(s, Conditional) or s.otherwise or len(s.then) != 1 or not isinstance(s.then[0], ParallelNest):
        return s
    (nest,), x = s.then, only_assignment(s.then[0])
    if x is None or x.buffer.is_global:
        return s
    slots = [n for i, n in zip(x.indices, x.buffer.shape, strict=True) if _offset(i, loop.variable, n) == 0]
    first = Applied("lt", (Variable(loop.variable), Literal(slots[0] if slots else 0)))
    written = written_buffers(body)
    sources = {e.buffer for e in elements_of(replace(x, indices=()))}
    is_alike = loop.variable not in variables_of([x.value]) and not sources & set(written)
    others = [y for y in accesses(body) if y.buffer is x.buffer and y.is_write]
    is_once = len(others) == 1 and loop.low == Literal(0)
    return nest if len(slots) == 1 and s.condition == first and is_alike and is_once else s


def _offset(index: Expression, variable: str, slots: int) -> int | None:
    """Return n of an index ``(variable + n) % slots``; None for another index."""
    if isinstance(index, Applied) and index.word == "%" and index.operands[1] == Literal(slots):
        terms = linear(index.operands[0], {})
        rest = set(terms) - {Variable(variable), Literal(1)}
        if terms.get(Variable(variable)) == 1 and not rest:
            return int(terms.get(Literal(1), 0)) % slots
    terms = linear(index, {})
    inner = [t for t in terms if isinstance(t, Applied) and t.word == "%"]
    if slots == 2 and len(inner) == 1 and terms == {Literal(1): 1, inner[0]: -1}:  # 1 - k % 2
        own = _offset(inner[0], variable, slots)
        return None if own is None else (own + 1) % 2
    return None


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A statement without inner statements, the loops around it, and the conditions around it in the innermost loop."""

    statement: Statement
    loops: tuple[SerialLoop, ...]
    conditions: tuple[Expression, ...]


def _leaves(
    body: Iterable[Statement], loops: tuple[SerialLoop, ...] = (), rules: tuple[Expression, ...] = ()
) -> Iterator[_Leaf]:
    for s in body:
        if isinstance(s, SerialLoop):
            yield from _leaves(s.body, (*loops, s), ())
        elif isinstance(s, Conditional):
            yield from _leaves(s.then, loops, (*rules, s.condition))
            yield from _leaves(s.otherwise, loops, (*rules, Applied("not", (s.condition,))))
        else:
            yield _Leaf(s, loops, rules)


def without_slots(body: Sequence[Statement], others: Set[TileBuffer] = frozenset()) -> Body:
    """Return statements with tiles in place of slots of tiles; ``others``: tiles that statements elsewhere access."""
    result, known = _with_branches(body, others), set[tuple[TileBuffer, int]]()
    while True:
        candidate = next((c for c in _candidates(result) if c not in known and c[0] not in others), None)
        if candidate is None:
            return result
        known.add(candidate)
        ring = _Ring(result, *candidate)
        result = ring.removed() or result


def _with_branches(body: Sequence[Statement], others: Set[TileBuffer]) -> Body:
    """Return statements with tiles in place of slots that only one branch of an if accesses."""
    used = [{x.buffer for x in accesses([s])} for s in body]
    result = list(body)
    for i, s in enumerate(body):
        if isinstance(s, Conditional):
            outside = set(others).union(*used[:i], *used[i + 1 :])
            ways = [{x.buffer for x in accesses(b)} for b in (s.then, s.otherwise)]
            then, otherwise = without_slots(s.then, outside | ways[1]), without_slots(s.otherwise, outside | ways[0])
            result[i] = replace(s, then=then, otherwise=otherwise)
    return tuple(result)


def _candidates(body: Body) -> Iterator[tuple[TileBuffer, int]]:
    """Yield the tiles, each with an axis along which the tile has several elements and some access has one index."""
    seen = set[tuple[TileBuffer, int]]()
    for x in accesses(body):
        for d, n in enumerate(x.buffer.shape):
            if n > 1 and not x.buffer.is_global and not x.moves(d) and (x.buffer, d) not in seen:
                seen.add((x.buffer, d))
                yield x.buffer, d


class _Ring:
    """A tile with slots along an axis: its accesses, and the loop, each iteration of which has one slot."""

    def __init__(self, body: Body, buffer: TileBuffer, axis: int) -> None:
        self.body, self.buffer, self.axis, self.slots = body, buffer, axis, buffer.shape[axis]
        self.leaves = [leaf for leaf in _leaves(body) if any(x.buffer is buffer for x in accesses([leaf.statement]))]
        shape = tuple(1 if i == axis else n for i, n in enumerate(buffer.shape))
        self.tile = replace(buffer, shape=shape)

    def own(self, leaf: _Leaf) -> list[Access]:
        """Return the accesses of the tile by a statement."""
        return [x for x in accesses([leaf.statement]) if x.buffer is self.buffer]

    def removed(self) -> Body | None:
        """Return the statements without the slots; None if the slots cannot be removed."""
        inner = [leaf for leaf in self.leaves if not any(x.moves(self.axis) for x in self.own(leaf))]
        indices = {frozenset(linear(x.indices[self.axis], {}).items()) for leaf in inner for x in self.own(leaf)}
        filled = [leaf for leaf in self.leaves if leaf not in inner]
        if any(not self.is_filled(leaf) for leaf in filled):
            return None
        names = {n for leaf in inner for x in self.own(leaf) for n in variables_of([x.indices[self.axis]])}
        loops = {loop.variable: loop for leaf in inner for loop in leaf.loops}
        if not names & loops.keys():
            return self.of_numbers(indices) if not names and not filled else None
        if names - loops.keys():
            return None
        loop = next(x for leaf in inner for x in reversed(leaf.loops) if x.variable in names)
        within = [leaf for leaf in inner if loop in leaf.loops]
        if self.is_of_each_iteration(inner, names):
            return self.of_one_place()
        if names != {loop.variable} or any(
            s not in self.before(loop) for leaf in inner if leaf not in within for s in [leaf]
        ):
            return None
        offsets = [
            (leaf, x, _offset(x.indices[self.axis], loop.variable, self.slots))
            for leaf in within
            for x in self.own(leaf)
        ]
        if any(o is None for _, _, o in offsets):
            return None
        writes, reads = ({o for _, x, o in offsets if x.is_write is is_write} for is_write in (True, False))
        if len(writes) != 1 or None in reads:
            return None
        (at,) = writes
        assert at is not None
        outside = [leaf for leaf in inner if leaf not in within]
        return self.copied_ahead(loop, at, within, outside) or (
            None if outside else self.carried(loop, at, {o for o in reads if o is not None}, filled)
        )

    def is_filled(self, leaf: _Leaf) -> bool:
        """Return whether a statement gives all slots equal numbers."""
        x = only_assignment(leaf.statement)
        return x is not None and x.buffer is self.buffer and isinstance(x.value, Literal) and not leaf.conditions

    def is_of_each_iteration(self, inner: Sequence[_Leaf], names: set[str]) -> bool:
        """Return whether each iteration of some loops has its own slot, and writes the slot before it reads it.

        A loop inside another of these loops would overwrite the slot of the outer iteration.
        """
        of_loop = dict[SerialLoop, set[frozenset[tuple[Expression, float]]]]()
        outer = set[SerialLoop]()
        for leaf in inner:
            around = [x for x in leaf.loops if x.variable in names]
            if not around:
                return False
            outer |= set(around[:-1])
            own = {frozenset(linear(x.indices[self.axis], {}).items()) for x in self.own(leaf)}
            of_loop.setdefault(around[-1], set()).update(own)
        return not outer & of_loop.keys() and all(
            len(own) == 1 and not self.is_exposed(x) for x, own in of_loop.items()
        )

    def is_exposed(self, loop: SerialLoop) -> bool:
        """Return whether an iteration reads the tile before it writes it."""
        return self.buffer in Exposed(loop.body).reads

    def before(self, loop: SerialLoop) -> list[_Leaf]:
        """Return the statements that come before a loop, at its level and without a condition."""
        found = list[_Leaf]()
        for leaf in _leaves(self.body):
            if loop in leaf.loops:
                return [x for x in found if x.loops == leaf.loops[: leaf.loops.index(loop)] and not x.conditions]
            found.append(leaf)
        return []

    def of_one_place(self) -> Body:
        """Return the statements with a tile in place of the only slot that is used."""
        return self.replaced(self.body, lambda x: self.tile)

    def of_numbers(self, indices: Set[frozenset[tuple[Expression, float]]]) -> Body | None:
        """Return the statements with a tile in place of each slot, if all accesses state its number."""
        if len(indices) == 1:
            return self.of_one_place()
        if any(t != Literal(1) for terms in indices for t, _ in terms):
            return None
        numbers = sorted(int(dict(terms).get(Literal(1), 0)) for terms in indices)
        tiles = {n: replace(self.tile, name=f"{self.tile.name}_{n}") for n in numbers}
        return self.replaced(self.body, lambda x: tiles[int(linear(x, {}).get(Literal(1), 0))])

    # ------------------------------------------------------------ copies ahead
    def copied_ahead(self, loop: SerialLoop, at: int, within: list[_Leaf], outside: list[_Leaf]) -> Body | None:
        """Return the statements with a copy at the beginning of each iteration in place of a copy in an earlier one."""
        copies = [leaf for leaf in within if any(x.is_write for x in self.own(leaf))]
        if len(copies) != 1 or copies[0].loops[-1] is not loop or len(copies[0].conditions) > 1 or at == 0:
            return None
        x = only_assignment(copies[0].statement)
        if x is None or not self.is_constant(x.value):
            return None
        reads = {
            _offset(y.indices[self.axis], loop.variable, self.slots)
            for leaf in within
            for y in self.own(leaf)
            if not y.is_write
        }
        low, high = number_of(loop.low, {}), number_of(loop.high, {})
        if reads != {0} or low != 0 or high is None:
            return None
        rules = [number_of(c, {loop.variable: k}) for c in copies[0].conditions for k in range(int(high) - at)]
        if any(r is None or not r for r in rules):
            return None
        firsts = [self.moved(x, loop.variable, Literal(slot - at)) for slot in range(min(at, int(high)))]
        starts = [s for leaf in outside if isinstance(s := leaf.statement, ParallelNest)]
        if not len(starts) == len(outside) == len(firsts) or not all(
            any(_are_equal(s, f, self.axis, slot) for s in starts) for slot, f in enumerate(firsts)
        ):
            return None
        own = self.moved(x, loop.variable, Applied("-", (Variable(loop.variable), Literal(at))))
        first = ParallelNest(own.axes, (own,), own.line)
        gone = [id(leaf.statement) for leaf in (*copies, *outside)]

        def without(statements: Iterable[Statement]) -> Body:
            result = list[Statement]()
            for s in statements:
                if id(s) in gone:
                    continue
                if isinstance(s, SerialLoop):
                    result.append(replace(s, body=(*([first] if s is loop else []), *without(s.body))))
                elif isinstance(s, Conditional):
                    then, otherwise = without(s.then), without(s.otherwise)
                    result += [replace(s, then=then, otherwise=otherwise)] if then or otherwise else []
                else:
                    result.append(s)
            return tuple(result)

        return self.replaced(without(self.body), lambda x: self.tile)

    def is_constant(self, value: Expression) -> bool:
        """Return whether a value is computed only from tensors that the kernel does not write."""
        read = {e.buffer for e in parts_of(value) if isinstance(e, BufferElement)}
        return all(b.is_global for b in read) and not read & set(written_buffers(self.body))

    def moved(self, x: Elementwise, variable: str, to: Expression) -> Elementwise:
        """Return an assignment in the form that it has in another iteration."""
        by = {variable: to}
        return replace(x, indices=tuple(substituted(i, by) for i in x.indices), value=substituted(x.value, by))

    # ------------------------------------------------------------ values of the iteration before
    def carried(self, loop: SerialLoop, at: int, reads: set[int], filled: list[_Leaf]) -> Body | None:
        """Return the statements with one tile of the iteration, and one of the previous iteration."""
        ages = {(at - r) % self.slots for r in reads}
        if ages - {0, 1} or any(leaf not in self.before(loop) for leaf in filled) or self.slots < 2 or not filled:
            return None
        older = replace(self.tile, name=f"{self.tile.name}_before")

        def of(index: Expression) -> TileBuffer:
            return self.tile if _offset(index, loop.variable, self.slots) in (at, None) else older

        result = self.replaced(self.body, of, fills=older)
        inside = next(s for s in walked(result) if isinstance(s, SerialLoop) and s.variable == loop.variable)
        exposed = Exposed(inside.body)
        if self.tile in exposed.reads or self.tile not in exposed.writes:
            return None
        axes = tuple((f"#{i}", n) for i, n in enumerate(n for n in self.tile.shape if n != 1))
        names = iter(axes)
        indices = tuple(Variable(next(names)[0]) if n != 1 else Literal(0) for n in self.tile.shape)
        copied = Elementwise(axes, older, indices, BufferElement(self.tile, indices), None, loop.line)
        last = ParallelNest(axes, (copied,), loop.line)

        def ended(statements: Iterable[Statement]) -> Body:
            return tuple(
                replace(s, body=(*s.body, last) if s is inside else ended(s.body)) if isinstance(s, SerialLoop) else s
                for s in statements
            )

        return ended(result)

    def replaced(self, body: Body, of: Callable[[Expression], TileBuffer], fills: TileBuffer | None = None) -> Body:
        """Return statements with other tiles in place of slots; ``fills``: a second tile, which a fill of all slots
        also fills.
        """
        tiles = (self.tile,) if fills is None else (self.tile, fills)
        return _SlotTiles(self.buffer, self.axis, of, tiles).statements(body)


@dataclass(frozen=True, slots=True)
class _SlotTiles(TilesInPlace):
    """Tiles in place of the slots of a buffer along an axis: ``of`` returns the tile for the index of a slot, and
    ``every`` all tiles.
    """

    of: Callable[[Expression], TileBuffer]
    every: tuple[TileBuffer, ...]

    def at(self, indices: tuple[Expression, ...]) -> tuple[Expression, ...]:
        """Return the indices of a slot's element in its tile."""
        return tuple(Literal(0) if i == self.axis else x for i, x in enumerate(indices))

    def element(self, indices: tuple[Expression, ...], nest: ParallelNest | None) -> BufferElement:
        """Return an element of a slot as an element of the slot's tile."""
        return BufferElement(self.of(indices[self.axis]), self.at(indices))

    def tile_part(self, part: BufferPart) -> BufferPart:
        """Return the tile that replaces a slot."""
        extent = tuple(1 if i == self.axis else n for i, n in enumerate(part.extent))
        return BufferPart(self.of(part.start[self.axis]), self.at(part.start), extent)

    def nests(self, nest: ParallelNest) -> list[ParallelNest]:
        """Return a fill of all slots as fills of all tiles."""
        targets = [x for x in nest.body if isinstance(x, Elementwise) and x.buffer is self.buffer]
        moved = [n for x in targets for n, _ in x.axes if n in variables_of([x.indices[self.axis]])]
        if not moved:
            return [nest]
        (one,) = targets
        axes = tuple(a for a in one.axes if a[0] not in moved)
        filled = (replace(one, axes=axes, buffer=t, indices=self.at(one.indices)) for t in self.every)
        return [ParallelNest(axes, (x,), nest.line) for x in filled]


def slot_tiles(body: Body, buffer: TileBuffer, axis: int, tile: TileBuffer) -> Body:
    """Return statements with one tile in place of every slot of a buffer along an axis."""
    return _SlotTiles(buffer, axis, lambda _index: tile, (tile,)).statements(body)


def _are_equal(s: ParallelNest, wanted: Elementwise, axis: int, slot: int) -> bool:
    """Return whether a copy before a loop is the copy that an iteration would make for a slot."""
    x = only_assignment(s)
    if x is None or x.axes != wanted.axes or number_of(x.indices[axis], {}) != slot:
        return False
    pairs = [p for i, p in enumerate(zip(x.indices, wanted.indices, strict=True)) if i != axis]
    return _are_alike(x.value, wanted.value) and all(_are_alike(a, b) for a, b in pairs)


def _are_alike(a: Expression, b: Expression) -> bool:
    """Return whether two expressions are equal, if whole numbers are compared as sums."""
    if isinstance(a, BufferElement) and isinstance(b, BufferElement):
        return a.buffer is b.buffer and all(map(_are_alike, a.indices, b.indices))
    if isinstance(a, Applied) and isinstance(b, Applied) and (a.word, a.fmt) == (b.word, b.fmt):
        pairs = zip(a.operands, b.operands, strict=True)
        if len(a.operands) == len(b.operands) and all(_are_alike(x, y) for x, y in pairs):
            return True
    floats = [x for e in (a, b) for x in parts_of(e) if isinstance(x, Literal) and x.fmt.startswith(("float", "bf"))]
    return a == b or (not floats and linear(a, {}) == linear(b, {}))
