"""Statements of a TileLang kernel before any pass of a compiler: buffers of tiles, and the statements that write them.

Copies, fills and ``T.Parallel`` nests are one kind, `Elementwise`: each element of a part of a buffer is an expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from npusim.errors import ProgramError
from npusim.kernels.triton.ttir_text import Line

#: Formats of numbers by TileLang's names, and their names in TTIR.
TYPES: Mapping[str, str] = MappingProxyType(
    {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    | {"float8_e4m3": "f8E4M3FN", "float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2", "bool": "i1"}
    | {f"{sign}int{bits}": f"i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
#: Bytes of an element of a floating-point format.
FLOATS: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
    | dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e5m2"), 1)
)


@dataclass(frozen=True, eq=False, slots=True)
class TileBuffer:
    """A buffer: a tile (in shared memory or registers), or a tensor in global memory with its strides in elements."""

    name: str
    shape: tuple[int, ...]
    fmt: str
    strides: tuple[int, ...] = ()
    is_global: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes of the value of a tile: the axes with more than one element."""
        return tuple(i for i, n in enumerate(self.shape) if n != 1)

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of the value of a tile."""
        return tuple(n for n in self.shape if n != 1)


@dataclass(frozen=True, slots=True)
class Literal:
    """A number."""

    value: float
    fmt: str = "int32"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: the index of a program, of a loop or of a parallel loop; a number that the launch passes; or a bound
    value.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Applied:
    """A function of expressions by its word: ``+``, ``lt``, ``select``, ``exp2``.

    The format of ``cast`` and ``reinterpret`` is stated.
    """

    word: str
    operands: tuple[Expression, ...]
    fmt: str = ""


@dataclass(frozen=True, slots=True)
class BufferElement:
    """One element of a buffer."""

    buffer: TileBuffer
    indices: tuple[Expression, ...]


Expression = Literal | Variable | Applied | BufferElement


@dataclass(frozen=True, slots=True)
class BufferPart:
    """A part of a buffer: its first element, and its elements along each axis."""

    buffer: TileBuffer
    start: tuple[Expression, ...]
    extent: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tile."""
        return all(self.extent[d] == self.buffer.shape[d] for d in self.buffer.dims)


@dataclass(frozen=True, slots=True)
class BoundValue:
    """A name for the value of an expression."""

    name: str
    value: Expression
    line: Line


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Elements of a buffer under parallel loops: ``axes`` has each loop's variable and length.

    ``condition``: elements for which it is false do not change.  ``is_added``: values are added to a tensor's elements,
    by atomic additions.
    """

    axes: tuple[tuple[str, int], ...]
    buffer: TileBuffer
    indices: tuple[Expression, ...]
    value: Expression
    condition: Expression | None
    line: Line
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class ParallelNest:
    """Parallel loops around several statements, and values that are bound between them."""

    axes: tuple[tuple[str, int], ...]
    body: tuple[Elementwise | BoundValue, ...]
    line: Line


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """``c += a @ b``; ``clears``: the condition under which c is 0 before."""

    a: BufferPart
    b: BufferPart
    c: BufferPart
    transposes: tuple[bool, bool]
    clears: Expression
    line: Line


@dataclass(frozen=True, slots=True)
class TileReduction:
    """A sum, maximum or minimum along an axis; without ``clears`` the target is included.

    ``cumulates``: the result is the sums up to each element.
    """

    source: BufferPart
    target: BufferPart
    word: str
    axis: int
    clears: bool
    line: Line
    cumulates: bool = False


@dataclass(frozen=True, slots=True)
class SerialLoop:
    """A loop of whole numbers from ``low`` to below ``high``."""

    variable: str
    low: Expression
    high: Expression
    body: tuple[Statement, ...]
    line: Line


@dataclass(frozen=True, slots=True)
class Conditional:
    """An ``if`` with a condition that is the same for all elements."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]
    line: Line


@dataclass(frozen=True, slots=True)
class CrossFlag:
    """A flag that a core sets for the cores of the other kind, or for which it waits; `cores_joined` removes it."""

    number: int
    is_wait: bool
    line: Line


@dataclass(frozen=True, slots=True)
class BarrierStep:
    """A step of a warp group at one of several barriers; `warp_groups` removes it.

    With a ``parity``, the group waits for a phase; with a ``copy``, the phase ends after the copy; otherwise the
    group's threads arrive.
    """

    barrier: str
    index: Expression
    parity: Expression | None
    copy: ParallelNest | None
    line: Line


@dataclass(frozen=True, slots=True)
class CoreScope:
    """Statements of one kind of core, ``C`` or ``V``, or of the threads ``first:end``.

    `cores_joined` and `warp_groups` remove it.
    """

    core: str
    body: tuple[Statement, ...]
    line: Line


Statement = (
    BoundValue
    | ParallelNest
    | MatrixProduct
    | TileReduction
    | SerialLoop
    | Conditional
    | CrossFlag
    | BarrierStep
    | CoreScope
)


@dataclass(frozen=True, slots=True)
class TileKernel:
    """A kernel: parameters (tensors, and numbers as name and format), grid, the program's numbers, and statements.

    ``notes``: constructs that change only times and are not modelled.
    """

    name: str
    parameters: tuple[TileBuffer | tuple[str, str], ...]
    grid: tuple[int, ...]
    numbers: tuple[str, ...]
    body: tuple[Statement, ...]
    options: Mapping[str, int]
    notes: tuple[str, ...]
    line: Line
    is_guarded: bool = True


def only_assignment(s: Statement) -> Elementwise | None:
    """Return the only assignment of a nest of parallel loops, if it writes all elements; None for another statement."""
    x = s.body[0] if isinstance(s, ParallelNest) and len(s.body) == 1 else None
    return x if isinstance(x, Elementwise) and x.condition is None else None


def refused(line: Line, why: str) -> ProgramError:
    """Return the error of a statement that is not read, at its line."""
    return ProgramError(f"{line}: {why}")


def parts_of(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all expressions in it."""
    yield expression
    inside = expression.operands if isinstance(expression, Applied) else ()
    for x in expression.indices if isinstance(expression, BufferElement) else inside:
        yield from parts_of(x)


def variables_of(expressions: Iterable[Expression]) -> set[str]:
    """Return the names of the variables in some expressions."""
    return {x.name for e in expressions for x in parts_of(e) if isinstance(x, Variable)}


def tiles_read(expressions: Iterable[Expression]) -> set[TileBuffer]:
    """Return the tiles that some expressions read."""
    elements = (x for e in expressions for x in parts_of(e) if isinstance(x, BufferElement))
    return {x.buffer for x in elements if not x.buffer.is_global}


def walked(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Yield statements and all statements in them."""
    for s in statements:
        yield s
        if isinstance(s, SerialLoop | CoreScope):
            yield from walked(s.body)
        elif isinstance(s, Conditional):
            yield from walked((*s.then, *s.otherwise))


def expressions_in(statements: Iterable[Statement]) -> Iterator[Expression]:
    """Yield the expressions of statements: values, indices, conditions and bounds."""
    for s in walked(statements):
        if isinstance(s, BoundValue):
            yield s.value
        elif isinstance(s, ParallelNest):
            for x in s.body:
                yield x.value
                if isinstance(x, Elementwise):
                    yield from (*x.indices, *(() if x.condition is None else (x.condition,)))
        elif isinstance(s, MatrixProduct):
            yield from (*s.a.start, *s.b.start, *s.c.start, s.clears)
        elif isinstance(s, TileReduction):
            yield from (*s.source.start, *s.target.start)
        elif isinstance(s, SerialLoop):
            yield from (s.low, s.high)
        elif isinstance(s, Conditional):
            yield s.condition


Change = Callable[[Expression], Expression]


def with_inner(e: Expression, change: Change) -> Expression:
    """Return an expression with its direct parts changed: the operands, or the indices of an element."""
    if isinstance(e, Applied):
        return replace(e, operands=tuple(map(change, e.operands)))
    return replace(e, indices=tuple(map(change, e.indices))) if isinstance(e, BufferElement) else e


def with_bodies(s: Statement, change: Callable[[tuple[Statement, ...]], tuple[Statement, ...]]) -> Statement:
    """Return a loop or if with the statements in it changed; any other statement unchanged."""
    if isinstance(s, SerialLoop):
        return replace(s, body=change(s.body))
    if isinstance(s, Conditional):
        return replace(s, then=change(s.then), otherwise=change(s.otherwise))
    return s


def substituted(e: Expression, by: Mapping[str, Expression]) -> Expression:
    """Return an expression with others in place of some variables."""
    return by.get(e.name, e) if isinstance(e, Variable) else with_inner(e, lambda x: substituted(x, by))


def simpler(e: Applied) -> Expression:
    """Return a sum or product of integers without its neutral element (+ 0, * 1)."""
    a, b = e.operands
    for x, y in ((a, b), (b, a)):
        neutral = {"+": 0, "*": 1}.get(e.word)
        if isinstance(x, Literal) and x.fmt in ("int32", "int64") and x.value == neutral:
            return y
    return e


def linear(e: Expression, bound: Mapping[str, Expression]) -> dict[Expression, float]:
    """Return a whole number as a sum: the factor of each term, or of ``Literal(1)`` for the constant; terms with factor
    0 are omitted.

    ``bound``: the values of variables.
    """
    if isinstance(e, Literal):
        return {Literal(1): e.value} if e.value else {}
    if isinstance(e, Variable) and e.name in bound:
        return linear(bound[e.name], bound)
    if isinstance(e, Applied) and e.word == "cast":
        return linear(e.operands[0], bound)
    if not isinstance(e, Applied) or e.word not in ("+", "-", "*", "//"):
        return {e: 1}
    a, b = (linear(x, bound) for x in e.operands)
    if e.word == "//":
        by = b.get(Literal(1), 0)
        is_exact = set(b) == {Literal(1)} and by > 0 and all(n % by == 0 for n in a.values())
        return {t: n // by for t, n in a.items()} if is_exact else {e: 1}
    if e.word == "*":
        one, other = (a, b) if set(a) <= {Literal(1)} else (b, a)
        factor = one.get(Literal(1), 0)
        return {e: 1} if set(one) - {Literal(1)} else {t: n * factor for t, n in other.items() if factor}
    sign = 1 if e.word == "+" else -1
    total = {t: a.get(t, 0) + sign * b.get(t, 0) for t in {**a, **b}}
    return {t: n for t, n in total.items() if n}


Numbers = int | float | np.ndarray[tuple[int], np.dtype[np.int64]]
_OPERATIONS: Mapping[str, Callable[..., Numbers]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
    | {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "not": np.logical_not}
    | {"xor": np.bitwise_xor}
    | {"select": np.where, "cast": lambda x: x, "<<": operator.lshift, ">>": operator.rshift}
    | {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)


def number_of(e: Expression, known: Mapping[str, Numbers]) -> Numbers | None:
    """Return the value of an expression of whole numbers; None if it has a variable that is not known."""
    if isinstance(e, Literal):
        return int(e.value) if float(e.value).is_integer() else None
    if isinstance(e, Variable):
        return known.get(e.name)
    if isinstance(e, BufferElement) or e.word not in _OPERATIONS or (e.word == "cast" and "int" not in e.fmt):
        return None
    every = [number_of(x, known) for x in e.operands]
    operands = [x for x in every if x is not None]
    if len(operands) < len(every) or (e.word in ("//", "%") and np.any(np.less(operands[1], 1))):
        return None
    return _OPERATIONS[e.word](*operands)


def interval(x: Expression, ranges: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the bounds of a whole number, both inclusive, from the bounds of variables; infinite if they
    are unknown.
    """
    unknown = (-math.inf, math.inf)
    if isinstance(x, Literal):
        return (x.value, x.value)
    if isinstance(x, Variable):
        return ranges.get(x.name, unknown)
    if isinstance(x, BufferElement):
        return unknown
    if x.word == "cast":
        return interval(x.operands[0], ranges)
    if x.word == "select":
        (a, b), (c, d) = (interval(o, ranges) for o in x.operands[1:])
        return min(a, c), max(b, d)
    if x.word not in ("+", "-", "*", "//", "%", "min", "max"):
        return unknown
    (a, b), (c, d) = (interval(o, ranges) for o in x.operands)
    if x.word == "%":
        return unknown if c <= 0 else (a, b) if a >= 0 and b < c else (0, min(b, d - 1) if a >= 0 else d - 1)
    if x.word == "//":
        if c <= 0 or math.isinf(d):
            return unknown
        return (a if math.isinf(a) else a // (d if a >= 0 else c), b if math.isinf(b) else b // (c if b >= 0 else d))
    if x.word == "*":
        corners = [0 if 0 in (p, q) else p * q for p in (a, b) for q in (c, d)]
        return min(corners), max(corners)
    return {"+": (a + c, b + d), "-": (a - d, b - c), "min": (min(a, c), min(b, d)), "max": (max(a, c), max(b, d))}[
        x.word
    ]


TRUE = Literal(1, "bool")


class Exposed:
    """The tiles that statements read before they write them (``reads``), and the tiles that they certainly write."""

    def __init__(self, statements: Iterable[Statement], before: Iterable[TileBuffer] = ()) -> None:
        self.reads, self.writes = set[TileBuffer](), set(before)
        for s in statements:
            self._follow(s)

    def _read(self, *expressions: Expression) -> None:
        self.reads |= tiles_read(expressions) - self.writes

    def _written(self, buffer: TileBuffer, *, is_whole: bool) -> None:
        if not buffer.is_global and not is_whole:
            self.reads |= {buffer} - self.writes
        elif not buffer.is_global:
            self.writes.add(buffer)

    def _follow(self, s: Statement) -> None:
        if isinstance(s, BoundValue):
            self._read(s.value)
        elif isinstance(s, ParallelNest):
            for x in s.body:
                self._read(x.value)
                if isinstance(x, Elementwise):
                    self._read(*x.indices, *([] if x.condition is None else [x.condition]))
                    self._written(x.buffer, is_whole=x.condition is None)
        elif isinstance(s, MatrixProduct):
            sources = [s.a.buffer, s.b.buffer, *([] if s.clears == TRUE else [s.c.buffer])]
            self.reads |= set(sources) - self.writes
            self._read(s.clears)
            self._written(s.c.buffer, is_whole=True)
        elif isinstance(s, TileReduction):
            self.reads |= {s.source.buffer, *([] if s.clears else [s.target.buffer])} - self.writes
            self._written(s.target.buffer, is_whole=True)
        elif isinstance(s, SerialLoop):
            self._read(s.low, s.high)
            first = Applied("eq", (Variable(s.variable), s.low))  # a product that clears its result does not read it
            body = [
                replace(x, clears=TRUE) if isinstance(x, MatrixProduct) and x.clears == first else x for x in s.body
            ]
            self.reads |= Exposed(body, self.writes).reads - self.writes
        elif isinstance(s, Conditional):
            self._read(s.condition)
            then, otherwise = Exposed(s.then, self.writes), Exposed(s.otherwise, self.writes)
            self.reads |= (then.reads | otherwise.reads) - self.writes
            self.writes |= then.writes & otherwise.writes


def written_buffers(statements: Iterable[Statement]) -> list[TileBuffer]:
    """Return the tiles and tensors that statements may write, in their order, each once."""
    written = list[TileBuffer]()
    for s in statements:
        if isinstance(s, ParallelNest):
            written += [x.buffer for x in s.body if isinstance(x, Elementwise)]
        elif isinstance(s, MatrixProduct):
            written.append(s.c.buffer)
        elif isinstance(s, TileReduction):
            written.append(s.target.buffer)
        elif isinstance(s, SerialLoop):
            written += written_buffers(s.body)
        elif isinstance(s, Conditional):
            written += written_buffers((*s.then, *s.otherwise))
    return list(dict.fromkeys(written))


def written_tiles(statements: Iterable[Statement]) -> list[TileBuffer]:
    """Return the tiles that statements may write, in their order, each once."""
    return [b for b in written_buffers(statements) if not b.is_global]
