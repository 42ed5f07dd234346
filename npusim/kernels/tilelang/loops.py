"""Loops of tile programs in a simpler form with the same results: one loop for several, and a program for each task.

An expert kernel computes several tiles ahead: it has a loop for each stage of a batch of tiles, loops over batches, and
a loop over the tasks of a core.  Each change here is applied only if inputs and results remain the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from npusim.kernels.tilelang.cores_joined import changed
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    BufferPart,
    Conditional,
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
    only_assignment,
    parts_of,
    refused,
    substituted,
    variables_of,
    walked,
    with_bodies,
    with_inner,
    written_buffers,
)

#: Largest number of iterations of a loop, of a batch or of all cores, that are counted individually.
_MOST = 1 << 20
_ZERO = Literal(0)


@dataclass(frozen=True, slots=True)
class Access:
    """An access of a buffer: its indices, and the names of the parallel loops around it."""

    buffer: TileBuffer
    indices: tuple[Expression, ...]
    parallel: frozenset[str]
    is_write: bool

    def moves(self, axis: int) -> bool:
        """Return whether a parallel loop runs along an axis."""
        return bool(variables_of([self.indices[axis]]) & self.parallel)


def accesses(statements: Iterable[Statement]) -> Iterator[Access]:
    """Yield the accesses of statements; an access to a part of a tile has a parallel loop for each axis."""
    for s in walked(statements):
        parallel = frozenset[str]()
        if isinstance(s, ParallelNest):
            parallel = frozenset(n for x in s.body if isinstance(x, Elementwise) for n, _ in x.axes)
            targets = [x for x in s.body if isinstance(x, Elementwise)]
            yield from (Access(x.buffer, x.indices, parallel, is_write=True) for x in targets)
        elif isinstance(s, MatrixProduct):
            yield from (_of_part(p, is_write=p is s.c) for p in (s.a, s.b, s.c))
        elif isinstance(s, TileReduction):
            yield from (_of_part(p, is_write=p is s.target) for p in (s.source, s.target))
        for e in _own_expressions(s):
            for x in parts_of(e):
                if isinstance(x, BufferElement):
                    yield Access(x.buffer, x.indices, parallel, is_write=False)


def _own_expressions(s: Statement) -> Iterator[Expression]:
    """Yield the expressions of a statement without those of statements in it."""
    if isinstance(s, SerialLoop):
        yield from (s.low, s.high)
    elif isinstance(s, Conditional):
        yield s.condition
    else:
        yield from expressions_in([s])


def _of_part(x: BufferPart, *, is_write: bool) -> Access:
    names = tuple(f"#part {i}" for i in range(len(x.extent)))
    pairs = zip(x.start, x.extent, names, strict=True)
    indices = tuple(first if n == 1 else Applied("+", (first, Variable(name))) for first, n, name in pairs)
    return Access(x.buffer, indices, frozenset(names), is_write=is_write)


# ---------------------------------------------------------------- several loops as one


def fused(body: Sequence[Statement], live: Set[TileBuffer] = frozenset()) -> tuple[Statement, ...]:
    """Return statements with neighbouring loops of equal bounds as one loop, if no iteration of a loop reads what
    another iteration of the other loop writes.

    ``live``: the tiles that may be read after the statements.
    """
    result = list[Statement]()
    for i, s in enumerate(body):
        rest = Exposed(body[i + 1 :]).reads | live
        own = rest | (Exposed(s.body).reads if isinstance(s, SerialLoop) else set())
        one = with_bodies(s, partial(fused, live=own))
        before = result[-1] if result else None
        is_pair = isinstance(one, SerialLoop) and isinstance(before, SerialLoop)
        both = _as_one(before, one, rest) if is_pair else None  # type: ignore[arg-type]
        if both is not None:
            result[-1] = both
        else:
            result.append(one)
    return tuple(result)


def _as_one(a: SerialLoop, b: SerialLoop, live: Set[TileBuffer]) -> SerialLoop | None:
    """Return two loops as one; None if an iteration of one loop needs a result that the other has not computed at that
    point.
    """
    if (a.low, a.high) != (b.low, b.high):
        return None
    renamed = changed(b.body, lambda e: substituted(e, {b.variable: Variable(a.variable)}))
    listed = [list(accesses(x)) for x in (a.body, renamed)]
    exposed = Exposed(a.body).reads | Exposed(renamed).reads
    for buffer in {x.buffer for x in listed[0]} & {x.buffer for x in listed[1]}:
        own = [x for each in listed for x in each if x.buffer is buffer]
        is_private = not buffer.is_global and buffer not in exposed | live and _is_of_one_slot(own)
        if any(x.is_write for x in own) and not is_private and not _is_of_iteration(own, a.variable):
            return None
    return replace(a, body=(*a.body, *renamed))


def _is_of_one_slot(own: Sequence[Access]) -> bool:
    """Return whether all accesses of a buffer begin at the same element."""
    return len({tuple(first_of(x, d) for d in range(len(x.indices))) for x in own}) <= 1


def first_of(x: Access, axis: int) -> tuple[bool, frozenset[tuple[Expression, float]]]:
    """Return whether a parallel loop runs along an axis, and the index of its first iteration as a sum."""
    index = substituted(x.indices[axis], dict.fromkeys(x.parallel, _ZERO))
    return x.moves(axis), frozenset(linear(index, {}).items())


def _is_of_iteration(own: Sequence[Access], variable: str) -> bool:
    """Return whether each iteration has a separate part of a buffer, because one index of all accesses distinguishes
    iterations.
    """
    for axis in range(len(own[0].indices)):
        if any(x.moves(axis) for x in own):
            continue
        terms = [linear(x.indices[axis], {}) for x in own]
        is_moved = all(t == terms[0] for t in terms) and terms[0].get(Variable(variable))
        if is_moved and not any(variable in variables_of([t]) for t in terms[0] if t != Variable(variable)):
            return True
    return False


# ---------------------------------------------------------------- loops of batches


def flattened(body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements in which each loop over batches, with an inner loop over a batch's elements, is one loop over
    all elements.
    """
    written, uses = set(written_buffers(body)), Counter(x.buffer for x in accesses(body))

    def inside(statements: Iterable[Statement]) -> tuple[Statement, ...]:
        return tuple(_one_loop(_without_copies(with_bodies(s, inside), written, uses)) for s in statements)

    return inside(body)


def _without_copies(s: Statement, written: set[TileBuffer], uses: Mapping[TileBuffer, int]) -> Statement:
    """Return a loop around another one; if only these loops read tiles that are copies of tensors, the tensors replace
    the tiles.

    ``written``: the tensors that the kernel writes, whose copies are not omitted; ``uses``: the kernel's accesses of
    buffers.
    """
    if not isinstance(s, SerialLoop) or len(s.body) < 2 or not isinstance(s.body[-1], SerialLoop):
        return s
    *copies, inner = s.body
    origins = dict[TileBuffer, Elementwise]()
    for x in map(only_assignment, copies):
        value = x.value if x is not None else None
        if x is None or not isinstance(value, BufferElement) or x.buffer.is_global or x.buffer in origins:
            return s
        moving = [(i, n) for i, n in zip(x.indices, x.buffer.shape, strict=True) if n != 1]
        is_whole = [(Variable(name), n) for name, n in x.axes if n != 1] == moving
        is_read_only = value.buffer.is_global and value.buffer not in written
        if not is_whole or not is_read_only or value.buffer.fmt != x.buffer.fmt:
            return s
        origins[x.buffer] = x
    own = [x for x in accesses([inner]) if x.buffer in origins]
    parts = [b for y in walked([inner]) for b in _parts_of(y) if b.buffer in origins]
    is_elsewhere = any(uses[b] != 1 + sum(x.buffer is b for x in own) for b in origins)
    if parts or any(x.is_write for x in own) or not own or is_elsewhere:
        return s

    def element(e: Expression) -> Expression:
        if not isinstance(e, BufferElement) or e.buffer not in origins:
            return with_inner(e, element)
        x = origins[e.buffer]
        pairs = zip(x.indices, e.indices, strict=True)
        return substituted(x.value, {i.name: j for i, j in pairs if isinstance(i, Variable)})

    return replace(s, body=changed([inner], element))


def _parts_of(s: Statement) -> tuple[BufferPart, ...]:
    """Return the parts of tiles that a product or reduction uses as a whole."""
    if isinstance(s, MatrixProduct):
        return s.a, s.b, s.c
    return (s.source, s.target) if isinstance(s, TileReduction) else ()


def _one_loop(s: Statement) -> Statement:
    """Return a loop around another one as one loop, if only the number of the element among all elements is used."""
    if not isinstance(s, SerialLoop) or len(s.body) != 1 or not isinstance(s.body[0], SerialLoop):
        return s
    inner = s.body[0]
    bounds = number_of(s.low, {}), number_of(s.high, {})
    if bounds[0] != 0 or bounds[1] is None or not 0 < bounds[1] < _MOST:
        return s
    outer = np.arange(int(bounds[1]))
    low, high = number_of(inner.low, {s.variable: outer}), number_of(inner.high, {s.variable: outer})
    if low is None or high is None or np.any(low):
        return s
    counts = np.broadcast_to(high, outer.shape)
    size, total = int(counts[0]), int(counts.sum())
    if size < 1 or np.any(counts[:-1] != size) or not 0 < counts[-1] <= size:
        return s
    if len(outer) == 1:
        only = changed(inner.body, lambda e: _known(substituted(e, {s.variable: _ZERO})))
        return replace(inner, body=only, high=Literal(total))
    both = _Flattened(s.variable, inner.variable, size)
    result = changed(inner.body, both.element)
    if {s.variable, inner.variable} - {both.number} & variables_of(expressions_in(result)) or both.is_left:
        return s
    return SerialLoop(both.number, _ZERO, Literal(total), result, s.line)


def _known(e: Expression) -> Expression:
    """Return a condition without the parts of it that are always true."""
    if not isinstance(e, Applied):
        return with_inner(e, _known)
    if e.word == "eq" and number_of(e, {}):
        return Literal(1, "bool")
    operands = tuple(map(_known, e.operands))
    if e.word == "and" and Literal(1, "bool") in operands:
        return operands[1] if operands[0] == Literal(1, "bool") else operands[0]
    return replace(e, operands=operands)


class _Flattened:
    """Replaces expressions of a batch and of the element in it with expressions of the element's number among all
    elements, which has the name of the element.
    """

    def __init__(self, batch: str, element: str, size: int) -> None:
        self.batch, self.number, self.size, self.is_left = batch, element, size, False

    def element(self, e: Expression) -> Expression:
        """Return an expression with the number of the element; ``is_left`` states whether another number remains."""
        if not {self.batch, self.number} & variables_of([e]):
            return e
        if isinstance(e, BufferElement):
            return with_inner(e, self.element)
        if (first := self.is_first(e)) is not None:
            return first
        if isinstance(e, Applied) and e.word in ("+", "-", "*"):
            terms = linear(e, {})
            factors = [terms.get(Variable(n), 0) for n in (self.batch, self.number)]
            rest = {t: n for t, n in terms.items() if t not in (Variable(self.batch), Variable(self.number))}
            if factors[0] == factors[1] * self.size and not {self.batch, self.number} & variables_of(rest):
                return sum_of({Variable(self.number): factors[1], **rest})
        if isinstance(e, Applied) and e.word == "%" and isinstance(e.operands[1], Literal):
            terms, by = linear(e.operands[0], {}), int(e.operands[1].value)
            rest = {t: n for t, n in terms.items() if t != Variable(self.number)}
            if by and self.size % by == 0 and not {self.batch, self.number} & variables_of(rest):
                return e
        self.is_left |= isinstance(e, Variable)
        return with_inner(e, self.element)

    def is_first(self, e: Expression) -> Expression | None:
        """Return "batch is 0 and element is 0" as "number is 0"; None for another condition."""
        zeros = [Applied("eq", (Variable(n), _ZERO)) for n in (self.batch, self.number)]
        if isinstance(e, Applied) and e.word == "and" and list(e.operands) in (zeros, zeros[::-1]):
            return zeros[1]
        return None


def sum_of(terms: Mapping[Expression, float]) -> Expression:
    """Return a sum of terms as an expression."""
    result: Expression | None = None
    for t, n in sorted(terms.items(), key=lambda x: isinstance(x[0], Literal)):
        one = Literal(int(n)) if t == Literal(1) else t if n == 1 else Applied("*", (t, Literal(int(n))))
        result = one if result is None else Applied("+", (result, one))
    return result if result is not None else _ZERO


# ---------------------------------------------------------------- a program for each task


@dataclass(frozen=True, slots=True)
class Tasks:
    """The statements of a task, the ``variable`` with the task's number, and the number of tasks."""

    body: tuple[Statement, ...]
    variable: str
    count: int


def tasks_of(body: Sequence[Statement], core: str, cores: int, variable: str) -> Tasks | None:
    """Return a loop over the tasks of ``core``, one of ``cores``, as the statements of one task.

    All cores together execute each task once, and no task reads a tile that another one writes.  None if the statements
    are not such a loop.  Raises `ProgramError` if there are statements around such a loop.
    """
    at = [i for i, s in enumerate(body) if isinstance(s, SerialLoop) and core in variables_of(expressions_in([s]))]
    if len(at) != 1:
        return None
    before, loop, after = body[: at[0]], body[at[0]], body[at[0] + 1 :]
    assert isinstance(loop, SerialLoop)
    numbers = _Numbers(core, cores, loop)
    if after or numbers.task is None or core in variables_of(expressions_in(before)):
        return None
    inner, condition = loop.body, None
    only = inner[0] if len(inner) == 1 else None
    if isinstance(only, Conditional) and not only.otherwise:
        inner, condition = only.then, only.condition
    count = numbers.count(condition)
    if count is None:
        return None
    carried = Exposed(inner).reads & set(written_buffers(inner))
    if carried:
        name = min(b.name for b in carried)
        raise refused(loop.line, f"in a loop over a core's tasks, {name} still has values of the previous task")
    result = changed(inner, lambda e: numbers.with_task(e, Variable(variable)))
    if {core, loop.variable} & variables_of(expressions_in(result)):
        return None
    return Tasks((*before, *result), variable, count)


class _Numbers:
    """The numbers of the tasks of all cores: an expression of the core's number and of the loop's."""

    def __init__(self, core: str, cores: int, loop: SerialLoop) -> None:
        self.loop, both = loop, {core, loop.variable}
        numbers = np.arange(cores)
        low, high = (number_of(x, {core: numbers}) for x in (loop.low, loop.high))
        smallest = dict.fromkeys(
            frozenset(linear(x, {}).items()) for e in expressions_in(loop.body) for x in _smallest(e, both)
        )
        self.task = next(iter(smallest)) if len(smallest) == 1 else None
        self.known = dict[str, np.ndarray]()
        if low is None or high is None or self.task is None:
            self.task = None
            return
        pairs = [(c, t) for c, a, b in np.broadcast(numbers, low, high) for t in range(int(a), int(b))]
        if not 0 < len(pairs) < _MOST:
            self.task = None
            return
        self.known = dict(zip((core, loop.variable), np.array(pairs).T, strict=True))

    def count(self, condition: Expression | None) -> int | None:
        """Return the number of tasks, if exactly one core executes each; None if a task is missing or executed
        twice.
        """
        assert self.task is not None
        result = number_of(sum_of(dict(self.task)), self.known)
        runs = number_of(condition, self.known) if condition is not None else np.True_
        if result is None or runs is None:
            return None
        length = len(next(iter(self.known.values())))
        done = np.sort(np.broadcast_to(result, length)[np.broadcast_to(runs, length)])
        return len(done) if len(done) and np.array_equal(done, np.arange(len(done))) else None

    def with_task(self, e: Expression, task: Variable) -> Expression:
        """Return an expression with the task's number in place of the expression that computes the task's number."""
        if frozenset(linear(e, {}).items()) == self.task:
            return task
        return with_inner(e, lambda x: self.with_task(x, task))


def _smallest(e: Expression, names: set[str]) -> Iterator[Expression]:
    """Yield the smallest parts of an expression that contain all names."""
    inside = e.operands if isinstance(e, Applied) else e.indices if isinstance(e, BufferElement) else ()
    found = [x for x in inside if names <= variables_of([x])]
    if found:
        for x in found:
            yield from _smallest(x, names)
    elif names <= variables_of([e]):
        yield e
