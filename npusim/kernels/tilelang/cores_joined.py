"""First, first + step, ...

The matrix core and the vector cores run separate statements, which flags between cores order.  The result is one
sequence of both, in an order that these flags allow.  If each of two vector cores has a tile with half of the rows, and
accesses tensors at ``vid`` times this half, both tiles form one tile of all rows; a workspace that is written and read
at one place is this tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from npusim.errors import ProgramError
from npusim.kernels.tilelang.statements import (
    BoundValue,
    BufferElement,
    BufferPart,
    Change,
    Conditional,
    CoreScope,
    CrossFlag,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    expressions_in,
    linear,
    number_of,
    parts_of,
    refused,
    substituted,
    variables_of,
    walked,
    with_inner,
)
from npusim.kernels.triton.ttir_text import Line

_PART_OF_HALF = (
    "a statement accesses only some rows of {name}, which is split between the vector cores: access all of its rows"
)

# ---------------------------------------------------------------- one sequence


def one_sequence(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements of both cores in one order that the flags between the cores allow.

    Raises `ProgramError` with a line for a wait that no set ends, for loops of the two cores that do not correspond,
    and for flags whose state changes from one iteration to the next.
    """
    return tuple(_Sequencer().level(body))


#: Number of loop iterations for which the order of flags is followed.
_MOST_FOLLOWED = 1 << 12
Flags = Counter[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Followed:
    """Numbers of the enclosing loops, and the flags that are set for these numbers, by the waiting core and the flag's
    number.
    """

    known: Mapping[str, int]
    set: Flags


class _Sequencer:
    """Orders statements for all numbers of the enclosing loops at once."""

    def __init__(self) -> None:
        self.followed = [_Followed({}, Counter())]

    def level(self, body: Sequence[Statement]) -> list[Statement]:
        """Return one level's statements in order; statements outside of scopes come between the statements of
        scopes.
        """
        result, waiting = list[Statement](), dict[str, list[Statement]]({"C": [], "V": []})
        for s in body:
            if isinstance(s, CoreScope):
                waiting[s.core] += s.body
                continue
            result += self.merged(waiting["C"], waiting["V"])
            waiting = {"C": [], "V": []}
            if isinstance(s, CrossFlag):
                raise refused(s.line, "a flag between cores must be in a T.Scope")
            is_of_both = any(isinstance(x, CoreScope) for x in walked([s]))
            one = self.branch(s) if isinstance(s, Conditional) and is_of_both else s
            result.append(self.loop(s) if isinstance(s, SerialLoop) and is_of_both else one)
        return result + self.merged(waiting["C"], waiting["V"])

    def branch(self, s: Conditional) -> Conditional:
        """Return an if around the scopes of both cores; each branch must leave the flags unchanged."""
        ways = list[tuple[Statement, ...]]()
        for body in (s.then, s.otherwise):
            starts = [+x.set for x in self.followed]
            ways.append(tuple(self.level(body)))
            if any(start != +x.set for start, x in zip(starts, self.followed, strict=True)):
                raise refused(
                    s.line,
                    "an if leaves a flag between cores set, or clears one, for the statements after it; this is not "
                    "supported",
                )
        return replace(s, then=ways[0], otherwise=ways[1])

    def loop(self, s: SerialLoop) -> SerialLoop:
        """Return a loop around the scopes of both cores."""
        return replace(s, body=tuple(self.iteration(s, lambda: self.level(s.body))))

    def iteration(self, s: SerialLoop, made: Callable[[], list[Statement]]) -> list[Statement]:
        """Return the statements of an iteration, which must leave the flags unchanged."""
        before, self.followed = self.followed, [x for one in self.followed for x in self.numbered(one, s)]
        starts = [+x.set for x in self.followed]
        statements = made()
        if any(start != +x.set for start, x in zip(starts, self.followed, strict=True)):
            raise refused(
                s.line,
                "an iteration leaves a flag between cores set, or clears one, for the next iteration; this is "
                "not supported",
            )
        self.followed = before
        return statements

    def numbered(self, one: _Followed, s: SerialLoop) -> list[_Followed]:
        """Return the state that is followed for each number of a loop; nothing if the numbers are only known at run
        time.
        """
        low, high = (number_of(x, one.known) for x in (s.low, s.high))
        if not isinstance(low, int) or not isinstance(high, int) or high - low > _MOST_FOLLOWED // len(self.followed):
            return [replace(one, set=Counter(one.set))]
        return [_Followed({**one.known, s.variable: k}, Counter(one.set)) for k in range(low, high)]

    def merged(self, matrix: Sequence[Statement], vector: Sequence[Statement]) -> list[Statement]:
        """Return the statements of both cores; each runs until it waits for a flag, or for a loop of the other."""
        result, rest = list[Statement](), {"C": list(matrix), "V": list(vector)}
        while rest["C"] or rest["V"]:
            before = len(rest["C"]) + len(rest["V"])
            for core in ("C", "V"):
                self.advanced(core, rest[core], result)
            if len(rest["C"]) + len(rest["V"]) == before:
                result.append(self.next_loop(rest))
        return result

    def advanced(self, core: str, rest: list[Statement], made: list[Statement]) -> None:
        """Move the statements of a core until a flag or a loop stops it."""
        while rest:
            s = rest[0]
            if isinstance(s, CrossFlag):
                if not all(self.passed(core, s, x.set) for x in self.followed):
                    return
            elif any(isinstance(x, CrossFlag) for x in walked([s])):
                return
            else:
                made.append(s)
            rest.pop(0)

    def passed(self, core: str, s: CrossFlag, flags: Flags) -> bool:
        """Set or clear a flag; return False if it is awaited and not set."""
        if s.is_wait and not flags[core, s.number]:
            return False
        other = {"C": "V", "V": "C"}[core]
        flags[(core, s.number) if s.is_wait else (other, s.number)] += -1 if s.is_wait else 1
        return True

    def next_loop(self, rest: dict[str, list[Statement]]) -> Statement:
        """Return the next loop of both cores as one loop, or the loop of one core if all flags for which it waits are
        set before it.
        """
        before, waiting = copied(self.followed), {core: list(rest[core]) for core in rest}
        try:
            return self.loop_of_both(rest)
        except ProgramError:
            for core in ("C", "V"):
                self.followed = copied(before)
                rest[core][:] = waiting[core]
            for core in ("C", "V"):
                if rest[core] and not isinstance(rest[core][0], CrossFlag) and self.runs(core, rest[core][0]):
                    return without_flags([rest[core].pop(0)])[0]
                self.followed = copied(before)
            raise

    def runs(self, core: str, s: Statement) -> bool:
        """Return whether a loop or if of a core can run without a wait; the flags then have the state after the
        statement.
        """
        return all(self.ran(core, [s], x.known, x.set) for x in self.followed)

    def ran(self, core: str, body: Iterable[Statement], known: Mapping[str, int], flags: Flags) -> bool:
        """Set and clear the flags of statements; return False if a statement waits, or if it is known only at run time
        which statements run.
        """
        for s in body:
            if isinstance(s, CrossFlag):
                if not self.passed(core, s, flags):
                    return False
            elif not any(isinstance(x, CrossFlag) for x in walked([s])):
                continue
            elif isinstance(s, SerialLoop):
                low, high = (number_of(x, known) for x in (s.low, s.high))
                if low is None or high is None or high - low > _MOST_FOLLOWED:
                    return False
                if not all(self.ran(core, s.body, {**known, s.variable: k}, flags) for k in range(int(low), int(high))):
                    return False
            elif isinstance(s, Conditional):
                answer = number_of(s.condition, known)
                if answer is None or not self.ran(core, s.then if answer else s.otherwise, known, flags):
                    return False
        return True

    def loop_of_both(self, rest: Mapping[str, list[Statement]]) -> Statement:
        """Return the next loop of both cores as one loop."""
        ones = [rest[core][0] for core in ("C", "V") if rest[core]]
        stopped = next((s for s in ones if isinstance(s, CrossFlag)), None)
        first, second = ones[0], ones[-1]
        loops = [s for s in ones if isinstance(s, SerialLoop)]
        if stopped is not None and not loops:
            raise refused(stopped.line, f"wait_cross_flag {stopped.number}: no set_cross_flag precedes it")
        if len(loops) < 2 or not isinstance(first, SerialLoop) or not isinstance(second, SerialLoop):
            raise refused(
                first.line,
                "a loop or if has flags between cores, but the other core has no such loop or if; write it for "
                "both cores",
            )
        if (first.low, first.high) != (second.low, second.high):
            raise refused(
                second.line,
                "a loop with flags between cores has different bounds from those of the loop in line "
                f"{first.line.number}",
            )
        renamed = changed(second.body, lambda e: substituted(e, {second.variable: Variable(first.variable)}))
        for core in ("C", "V"):
            rest[core].pop(0)
        body = self.iteration(first, lambda: self.merged(first.body, renamed))
        return replace(first, body=tuple(body))


def copied(followed: Iterable[_Followed]) -> list[_Followed]:
    """Return copies of the followed iterations, with separate flags."""
    return [replace(x, set=Counter(x.set)) for x in followed]


def without_flags(body: Iterable[Statement]) -> tuple[Statement, ...]:
    """Return statements without flags between cores, and without ifs that have nothing else."""
    result = list[Statement]()
    for s in body:
        if isinstance(s, SerialLoop):
            result.append(replace(s, body=without_flags(s.body)))
        elif isinstance(s, Conditional):
            then, otherwise = without_flags(s.then), without_flags(s.otherwise)
            result += [replace(s, then=then, otherwise=otherwise)] if then or otherwise else []
        elif not isinstance(s, CrossFlag):
            result.append(s)
    return tuple(result)


# ---------------------------------------------------------------- halves of tiles


def joined_halves(body: Sequence[Statement], vector: str) -> tuple[Statement, ...]:
    """Return statements of two vector cores, numbered by a variable, on whole tiles.

    Raises `ProgramError` with the line if the two halves of a tile are not the halves of one part of a tensor.
    """
    if vector not in variables_of(expressions_in(body)):
        return tuple(body)
    return _HalfJoiner(vector).joined(body)


class _HalfJoiner:
    """Finds the tiles that are halves in all statements, and the axis along which the number of a vector core moves in
    each.
    """

    def __init__(self, vector: str) -> None:
        self.vector, self.halves = vector, dict[TileBuffer, int]()
        self.buffers = dict[TileBuffer, TileBuffer]()

    def joined(self, body: Sequence[Statement]) -> tuple[Statement, ...]:
        known = -1
        while known != len(self.halves):
            known = len(self.halves)
            for s in walked(body):
                self.follow(s)
        for b, axis in self.halves.items():
            shape = tuple(2 * n if i == axis else n for i, n in enumerate(b.shape))
            self.buffers[b] = replace(b, shape=shape)
        return tuple(self.whole(s) for s in body)

    def half(self, buffer: TileBuffer, axis: int, line: Line) -> None:
        """Record a tile as a half along an axis."""
        if self.halves.setdefault(buffer, axis) != axis:
            raise refused(line, f"{buffer.name} is half of a tile along two axes, which is not supported")

    def row_of(self, x: Elementwise) -> str:
        """Return the parallel loop along which each vector core has its own elements; empty if each core has all
        elements.
        """
        names, rows = dict(x.axes), set[str]()
        elements = [BufferElement(x.buffer, x.indices), *elements_of(x)]
        for e in elements:
            if e.buffer in self.halves:
                index = e.indices[self.halves[e.buffer]]
                if not isinstance(index, Variable) or index.name not in names:
                    raise refused(x.line, _PART_OF_HALF.format(name=e.buffer.name))
                rows.add(index.name)
            for index in e.indices:
                rows |= self.moved_with(index, names, x.line)
        if len(rows) > 1:
            raise refused(x.line, "the number of a vector core indexes two axes, which is not supported")
        return next(iter(rows), "")

    def moved_with(self, index: Expression, names: Mapping[str, int], line: Line) -> set[str]:
        """Return the parallel loop that an index adds to the multiple of the vector core's number."""
        terms = linear(index, {})
        number = terms.get(Variable(self.vector), 0)
        if self.vector not in variables_of([index]):
            return set()
        rows = {n for n, count in names.items() if terms.get(Variable(n)) == 1 and count == number}
        if len(rows) != 1:
            why = f"{self.vector} is not multiplied by the number of rows of a half; "
            raise refused(line, f"{why}a vector core's rows begin at {self.vector} times that number")
        return rows

    def follow(self, s: Statement) -> None:
        """Record which tiles of a statement are halves."""
        if isinstance(s, ParallelNest):
            for x in s.body:
                if isinstance(x, Elementwise) and (row := self.row_of(x)):
                    for e in (BufferElement(x.buffer, x.indices), *elements_of(x)):
                        at = [i for i, index in enumerate(e.indices) if index == Variable(row)]
                        if at and not e.buffer.is_global:
                            self.half(e.buffer, at[0], x.line)
        elif isinstance(s, TileReduction):
            self.follow_reduction(s)

    def follow_reduction(self, s: TileReduction) -> None:
        a, b = s.source.buffer, s.target.buffer
        left = [i for i, n in enumerate(s.source.extent) if n != 1 and i != s.axis]
        pairs = dict(zip(left, [i for i, n in enumerate(s.target.extent) if n != 1], strict=False))
        if a in self.halves:
            if self.halves[a] == s.axis:
                raise refused(
                    s.line, f"T.reduce_{s.word} along the axis that is split between the vector cores is not supported"
                )
            self.half(b, pairs[self.halves[a]], s.line)
        elif b in self.halves:
            self.half(a, next(i for i, j in pairs.items() if j == self.halves[b]), s.line)

    # ------------------------------------------------------------ whole tiles
    def whole(self, s: Statement) -> Statement:
        """Return a statement on whole tiles."""
        if isinstance(s, SerialLoop):
            return replace(
                s, body=tuple(map(self.whole, s.body)), low=self.other(s.low, s.line), high=self.other(s.high, s.line)
            )
        if isinstance(s, Conditional):
            then, otherwise = (tuple(map(self.whole, b)) for b in (s.then, s.otherwise))
            return Conditional(self.other(s.condition, s.line), then, otherwise, s.line)
        if isinstance(s, ParallelNest):
            return self.whole_nest(s)
        if isinstance(s, MatrixProduct):
            parts = [self.part(x, s.line) for x in (s.a, s.b, s.c)]
            return replace(s, a=parts[0], b=parts[1], c=parts[2], clears=self.other(s.clears, s.line))
        if isinstance(s, TileReduction):
            return replace(s, source=self.part(s.source, s.line), target=self.part(s.target, s.line))
        if isinstance(s, BoundValue):
            return replace(s, value=self.other(s.value, s.line))
        return s

    def whole_nest(self, s: ParallelNest) -> ParallelNest:
        rows = {self.row_of(x) for x in s.body if isinstance(x, Elementwise)}
        if len(rows) > 1:
            raise refused(
                s.line,
                "a T.Parallel nest has statements on halves of tiles and on complete tiles; write a separate nest "
                "for each",
            )
        row = next(iter(rows), "")
        axes = tuple((n, 2 * count if n == row else count) for n, count in s.axes)
        body = list[Elementwise | BoundValue]()
        for x in s.body:
            if isinstance(x, BoundValue):
                body.append(replace(x, value=self.other(x.value, x.line)))
                continue
            self.check_tensors(x, row)
            indices = tuple(self.without_number(i) for i in x.indices)
            value = self.element(self.without_number(x.value))
            condition = None if x.condition is None else self.other(x.condition, x.line)
            body.append(
                replace(
                    x,
                    axes=axes,
                    buffer=self.buffers.get(x.buffer, x.buffer),
                    indices=indices,
                    value=value,
                    condition=condition,
                )
            )
        return ParallelNest(axes, tuple(body), s.line)

    def check_tensors(self, x: Elementwise, row: str) -> None:
        """Refuse a tensor if both vector cores access the same rows of it in a statement on halves."""
        for e in (BufferElement(x.buffer, x.indices), *elements_of(x)):
            for index in e.indices:
                if (
                    e.buffer.is_global
                    and row
                    and row in variables_of([index])
                    and self.vector not in variables_of([index])
                ):
                    raise refused(
                        x.line,
                        f"both vector cores access the same rows of {e.buffer.name} in a nest that also "
                        "accesses halves of tiles",
                    )
        outside = [i for e in elements_of(x) for i in e.indices]
        if self.vector in variables_of([x.value]) - variables_of(outside):
            raise refused(x.line, f"{self.vector}, a vector core's number, is used as a value, which is not supported")

    def without_number(self, e: Expression) -> Expression:
        return substituted(e, {self.vector: Literal(0)})

    def other(self, e: Expression, line: Line) -> Expression:
        """Return an expression that must not contain the number of a vector core."""
        if self.vector in variables_of([e]):
            raise refused(
                line,
                f"{self.vector}, a vector core's number, is used in a condition or a bound, which is not supported",
            )
        if any(isinstance(x, BufferElement) and x.buffer in self.halves for x in parts_of(e)):
            return self.element(e)
        return e

    def part(self, x: BufferPart, line: Line) -> BufferPart:
        """Return a part of a vector core's tile as a part of the whole tile."""
        if x.buffer not in self.halves:
            return x
        axis, whole = self.halves[x.buffer], self.buffers[x.buffer]
        if x.extent[axis] != x.buffer.shape[axis]:
            raise refused(line, _PART_OF_HALF.format(name=x.buffer.name))
        return BufferPart(whole, x.start, tuple(whole.shape[i] if i == axis else n for i, n in enumerate(x.extent)))

    def element(self, e: Expression) -> Expression:
        """Return an expression with whole tiles in place of halves."""
        return with_buffers(e, self.buffers)


# ---------------------------------------------------------------- workspaces


def without_workspaces(body: Sequence[Statement], names: Iterable[str]) -> tuple[Statement, ...]:
    """Return statements with tiles in place of tensors that the kernel writes and reads again.

    ``names``: workspaces, which are not read after the kernel.  Raises `ProgramError` with the line at which a tensor
    is read at a place other than the place where it was written.
    """
    written = {b for s in walked(body) if isinstance(s, ParallelNest) for b in stored_tensors(s)}
    read = {e.buffer for x in expressions_in(body) for e in parts_of(x) if isinstance(e, BufferElement)}
    result = tuple(body)
    for tensor in sorted(written & read, key=lambda b: b.name):
        if is_read_first(body, tensor):
            continue
        result = _Workspace(tensor, is_dropped=tensor.name in set(names)).joined(result)
    return result


def is_read_first(body: Sequence[Statement], tensor: TileBuffer) -> bool:
    """Return whether all statements that read a tensor come before those that write it."""
    reads, writes = list[int](), list[int]()
    for i, s in enumerate(body):
        inside = list(walked([s]))
        if any(isinstance(x, ParallelNest) and tensor in stored_tensors(x) for x in inside):
            writes.append(i)
        every = (e for x in expressions_in([s]) for e in parts_of(x))
        if any(isinstance(e, BufferElement) and e.buffer is tensor for e in every):
            reads.append(i)
    return max(reads, default=-1) < min(writes, default=len(body))


def stored_tensors(s: ParallelNest) -> set[TileBuffer]:
    """Return the tensors that a nest writes."""
    return {x.buffer for x in s.body if isinstance(x, Elementwise) and x.buffer.is_global}


@dataclass(frozen=True, slots=True)
class _Place:
    """The place at which a tensor is accessed: each index without parallel loops, and the length of each axis along
    which parallel loops move.
    """

    first: tuple[frozenset[tuple[Expression, float]], ...]
    lengths: tuple[int, ...]


class _Workspace:
    """One tensor that is written and read at one place."""

    def __init__(self, tensor: TileBuffer, *, is_dropped: bool) -> None:
        self.tensor, self.is_dropped, self.place = tensor, is_dropped, _Place((), ())
        self.tile = tensor

    def joined(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        for s in walked(body):
            for x in s.body if isinstance(s, ParallelNest) else ():
                elements = [e for e in elements_of(x) if e.buffer is self.tensor]
                if isinstance(x, Elementwise) and x.buffer is self.tensor:
                    elements.append(BufferElement(x.buffer, x.indices))
                for e in elements:
                    self.seen(e, x)
        lengths = self.place.lengths
        self.tile = TileBuffer(f"{self.tensor.name}_tile", lengths, self.tensor.fmt)
        result = tuple(x for s in body for x in self.replaced(s))
        moved = variables_of(t for index in self.place.first for t, _ in index)
        for s in walked(result):
            if isinstance(s, SerialLoop) and s.variable in moved and self.tile in Exposed(s.body).reads:
                raise refused(
                    s.line,
                    f"{self.tensor.name} is read at a position that moves, where it has values of an earlier iteration",
                )
        return result

    def seen(self, e: BufferElement, x: Elementwise | BoundValue) -> None:
        """Record the place of an access; all accesses must have the same place."""
        axes = dict(x.axes) if isinstance(x, Elementwise) else {}
        first, lengths = list[frozenset[tuple[Expression, float]]](), list[int]()
        for index in e.indices:
            terms = linear(index, {})
            moving = [n for n in axes if n in variables_of([index])]
            if len(moving) > 1 or any(terms.get(Variable(n)) != 1 for n in moving):
                raise refused(
                    x.line,
                    f"{self.tensor.name}, which the kernel writes and reads, is accessed with a step, which is not "
                    "supported",
                )
            first.append(frozenset((t, n) for t, n in terms.items() if t not in [Variable(m) for m in moving]))
            lengths += [axes[n] for n in moving]
        place = _Place(tuple(first), tuple(lengths))
        if self.place.first and self.place != place:
            why = f"the kernel reads {self.tensor.name} at a different place from where it writes it: "
            raise refused(x.line, f"{why}read and write all of it at the same place")
        self.place = place

    def replaced(self, s: Statement) -> list[Statement]:
        """Return a statement with the tile in place of the tensor; a store of a result also remains."""
        if isinstance(s, SerialLoop):
            return [replace(s, body=tuple(x for inner in s.body for x in self.replaced(inner)))]
        if isinstance(s, Conditional):
            then, otherwise = (tuple(x for i in b for x in self.replaced(i)) for b in (s.then, s.otherwise))
            return [replace(s, then=then, otherwise=otherwise)]
        if not isinstance(s, ParallelNest):
            return list(changed([s], self.read))
        tiles, stores = list[Elementwise | BoundValue](), list[Elementwise]()
        for x in s.body:
            new = replace(x, value=self.read(x.value))
            if isinstance(new, Elementwise) and new.buffer is self.tensor:
                if new.condition is not None or new.is_added:
                    raise refused(
                        x.line, f"the kernel writes only a part of {self.tensor.name}, and then reads it again"
                    )
                names = {n for n, _ in new.axes}
                moving = tuple(Variable(n) for i in new.indices for n in names & variables_of([i]))
                tiles.append(replace(new, buffer=self.tile, indices=moving))
                stored = BufferElement(self.tile, moving)
                stores.append(replace(new, value=stored))
            else:
                tiles.append(new)
        nests: list[Statement] = [ParallelNest(s.axes, tuple(tiles), s.line)]
        return nests + ([ParallelNest(s.axes, tuple(stores), s.line)] if stores and not self.is_dropped else [])

    def read(self, e: Expression) -> Expression:
        """Return an expression with the tile's elements in place of the tensor's."""
        if not isinstance(e, BufferElement) or e.buffer is not self.tensor:
            return with_inner(e, self.read)
        known = {t for index in self.place.first for t, _ in index}
        moving = [[t for t in linear(i, {}) if isinstance(t, Variable) and t not in known] for i in e.indices]
        return BufferElement(self.tile, tuple(m[0] for m in moving if m))


def without_overwritten(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements without stores that a later store of the same level overwrites; they are not read between the
    two stores.
    """
    places = [_stored_place(s) for s in body]
    return tuple(s for i, s in enumerate(body) if places[i] is None or places[i] not in places[i + 1 :])


def _stored_place(s: Statement) -> tuple[object, ...] | None:
    """Return which elements of a tensor a statement stores; None for another statement."""
    if not isinstance(s, ParallelNest) or len(s.body) != 1 or not isinstance(s.body[0], Elementwise):
        return None
    x = s.body[0]
    if not x.buffer.is_global or x.condition is not None or x.is_added:
        return None
    names: dict[str, Expression] = {n: Variable(f"#{i}") for i, (n, _) in enumerate(x.axes)}
    indices = (linear(substituted(i, names), {}) for i in x.indices)
    return x.buffer, tuple(n for _, n in x.axes), tuple(frozenset(i.items()) for i in indices)


# ---------------------------------------------------------------- places of buffers


def check_places(body: Sequence[Statement], together: Mapping[TileBuffer, set[TileBuffer]]) -> None:
    """Refuse a tile that is read after another tile with the same bytes was written; ``together``: tiles with common
    bytes.
    """
    gone = dict[TileBuffer, TileBuffer]()

    def read(buffer: TileBuffer, line: Line) -> None:
        if buffer in gone:
            other = gone[buffer].name
            raise refused(
                line, f"the kernel reads {buffer.name} after {other} has overwritten its bytes (T.annotate_address)"
            )

    def follow(statements: Iterable[Statement]) -> None:
        for s in statements:
            for b in sorted(Exposed([s]).reads, key=lambda b: b.name):
                if not isinstance(s, SerialLoop | Conditional):
                    read(b, s.line)
            if isinstance(s, SerialLoop):
                follow(s.body)
                follow(s.body)
            elif isinstance(s, Conditional):
                follow(s.then)
                follow(s.otherwise)
            else:
                for b in Exposed([s]).writes:
                    gone.pop(b, None)
                    gone.update(dict.fromkeys(together.get(b, ()), b))

    if together:
        follow(body)


# ---------------------------------------------------------------- expressions of statements


def elements_of(x: Elementwise | BoundValue) -> list[BufferElement]:
    """Return the elements of buffers that a statement of a nest reads."""
    read = [x.value]
    if isinstance(x, Elementwise):
        read += [*x.indices, *(() if x.condition is None else (x.condition,))]
    return [e for value in read for e in parts_of(value) if isinstance(e, BufferElement)]


def with_buffers(e: Expression, by: Mapping[TileBuffer, TileBuffer]) -> Expression:
    """Return an expression with other buffers."""
    result = with_inner(e, lambda x: with_buffers(x, by))
    return replace(result, buffer=by.get(result.buffer, result.buffer)) if isinstance(result, BufferElement) else result


def changed(statements: Iterable[Statement], change: Change) -> tuple[Statement, ...]:
    """Return statements with all their expressions changed."""

    def part(x: BufferPart) -> BufferPart:
        return replace(x, start=tuple(map(change, x.start)))

    def of_nest(x: Elementwise | BoundValue) -> Elementwise | BoundValue:
        if isinstance(x, BoundValue):
            return replace(x, value=change(x.value))
        condition = None if x.condition is None else change(x.condition)
        return replace(x, indices=tuple(map(change, x.indices)), value=change(x.value), condition=condition)

    def one(s: Statement) -> Statement:
        if isinstance(s, ParallelNest):
            return replace(s, body=tuple(map(of_nest, s.body)))
        if isinstance(s, MatrixProduct):
            return replace(s, a=part(s.a), b=part(s.b), c=part(s.c), clears=change(s.clears))
        if isinstance(s, TileReduction):
            return replace(s, source=part(s.source), target=part(s.target))
        if isinstance(s, SerialLoop):
            return replace(s, low=change(s.low), high=change(s.high), body=tuple(map(one, s.body)))
        if isinstance(s, Conditional):
            then, otherwise = (tuple(map(one, b)) for b in (s.then, s.otherwise))
            return Conditional(change(s.condition), then, otherwise, s.line)
        return replace(s, value=change(s.value)) if isinstance(s, BoundValue) else s

    return tuple(map(one, statements))
