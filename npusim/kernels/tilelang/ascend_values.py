"""Values of a TileLang-Ascend kernel while its text is read: buffers, parts of buffers, numbers and conditions.

Python's operators create expressions of these values, so that helper functions of a program run unchanged.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from npusim.errors import ProgramError
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    BufferPart,
    Expression,
    Literal,
    TileBuffer,
    Variable,
    linear,
    simpler,
)
from npusim.kernels.tilelang.tiles import OpenCondition, Scalar

#: Formats by TileLang-Ascend's names, where these differ.
ALIASES = MappingProxyType({"float": "float32", "int": "int32", "uint": "uint32", "e4m3_float8": "float8_e4m3fn"})
_RELATIONS = MappingProxyType({"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"})


class TracedValue(Scalar):
    """A number of the kernel that is known only at run time, as an expression."""

    def __init__(self, expression: Expression, refuse: Callable[[str], ProgramError]) -> None:
        self.expression, self.refuse = expression, refuse

    def text(self) -> str:
        """Return the expression as text."""
        return str(self.expression)

    def compared(self, how: str, other: object) -> TracedCondition:
        """Return a comparison with a number."""
        return TracedCondition(Applied(_RELATIONS[how], (self.expression, expression_of(other))), self.refuse)

    def combined(self, sign: str, *operands: object) -> TracedValue:
        """Return an expression of numbers."""
        return TracedValue(simpler(Applied(sign, tuple(map(expression_of, operands)))), self.refuse)

    def __rmod__(self, other: object) -> TracedValue:
        return self.combined("%", other, self)

    def __and__(self, other: object) -> TracedValue:
        return self.combined("and", self, other)

    def __or__(self, other: object) -> TracedValue:
        return self.combined("or", self, other)

    def __lshift__(self, other: object) -> TracedValue:
        return self.combined("<<", self, other)

    def __rshift__(self, other: object) -> TracedValue:
        return self.combined(">>", self, other)

    def __index__(self) -> int:
        raise self.refuse("a constant is needed here, but this number is known only at run time")

    def __int__(self) -> int:
        return self.__index__()

    def __float__(self) -> float:
        return float(self.__index__())

    def __bool__(self) -> bool:
        raise self.refuse(
            "a condition on a number that is known only at run time must be the condition of an if statement in "
            "the kernel"
        )

    __hash__ = None


class TracedCondition(OpenCondition):
    """A condition that is known only at run time."""

    def __init__(self, expression: Expression, refuse: Callable[[str], ProgramError]) -> None:
        def decide(_key: str) -> bool:
            raise refuse(
                "a condition that is known only at run time must be the condition of an if statement in the kernel"
            )

        super().__init__("", decide)
        self.expression, self.refuse = expression, refuse

    def joined(self, word: str, other: object) -> TracedCondition:
        """Return both conditions joined by ``and`` or ``or``."""
        return TracedCondition(Applied(word, (self.expression, expression_of(other))), self.refuse)

    def negation(self) -> TracedCondition:
        """Return the opposite condition."""
        return TracedCondition(Applied("not", (self.expression,)), self.refuse)

    def __and__(self, other: object) -> TracedCondition:
        return self.joined("and", other)

    def __or__(self, other: object) -> TracedCondition:
        return self.joined("or", other)

    def __invert__(self) -> TracedCondition:
        return self.negation()


class TracedElement(TracedValue):
    """One element of a buffer: a number, or, if a copy states a size, the first element of a block."""

    def __init__(
        self, buffer: TracedBuffer, indices: tuple[Expression, ...], refuse: Callable[[str], ProgramError]
    ) -> None:
        super().__init__(BufferElement(buffer.tile, indices), refuse)
        self.buffer, self.indices = buffer, indices

    @property
    def part(self) -> BufferPart:
        """The element as a part."""
        return BufferPart(self.buffer.tile, self.indices, (1,) * len(self.indices))


@dataclass(frozen=True, eq=False, slots=True)
class TracedPart:
    """A part of a buffer under slices."""

    buffer: TracedBuffer
    part: BufferPart

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.part.extent


@dataclass(frozen=True, eq=False, slots=True)
class TracedBuffer:
    """A buffer or a tensor of the kernel; ``space``: ``GM``, or the word that allocates it."""

    tile: TileBuffer
    space: str
    refuse: Callable[[str], ProgramError] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.tile.shape

    @property
    def dtype(self) -> str:
        """The format, under the name that programs use."""
        return self.tile.fmt

    @property
    def part(self) -> BufferPart:
        """The buffer as a part."""
        return BufferPart(self.tile, (Literal(0),) * len(self.shape), self.shape)

    def __getitem__(self, index: object) -> TracedElement | TracedPart:
        """Return an element, or a part if a slice or fewer indices than axes are given."""
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) > len(self.shape):
            raise self.refuse(
                f"{self.tile.name} has {len(self.shape)} axes and is accessed with {len(entries)} indices"
            )
        start, extent = list[Expression](), list[int]()
        is_element = len(entries) == len(self.shape) and not any(isinstance(x, slice) for x in entries)
        whole = (slice(None),) * (len(self.shape) - len(entries))
        for n, entry in zip(self.shape, (*entries, *whole), strict=True):
            if not isinstance(entry, slice):
                start.append(expression_of(entry if isinstance(entry, Scalar) else operator.index(entry)))
                extent.append(1)
                continue
            if entry.step not in (None, 1):
                raise self.refuse(f"a slice of {self.tile.name} has a step, which is not supported")
            first = expression_of(0 if entry.start is None else entry.start)
            start.append(first)
            extent.append(self.distance(first, expression_of(n if entry.stop is None else entry.stop)))
        if is_element:
            return TracedElement(self, tuple(start), self.refuse)
        return TracedPart(self, BufferPart(self.tile, tuple(start), tuple(extent)))

    def distance(self, first: Expression, end: Expression) -> int:
        """Return the number of elements of a slice; everything in it that is not a number must cancel."""
        terms = linear(Applied("-", (end, first)), {})
        if set(terms) - {Literal(1)} or (n := int(terms.get(Literal(1), 0))) < 1:
            raise self.refuse(f"a slice of {self.tile.name} is empty, or its length is known only at run time")
        return n


def expression_of(x: object) -> Expression:
    """Return a number of the text, or a value of the kernel, as an expression."""
    if isinstance(x, TracedValue | TracedCondition):
        return x.expression
    if isinstance(x, bool):
        return Literal(int(x), "bool")
    if isinstance(x, int):
        return Literal(x)
    if isinstance(x, float):
        return Literal(x, "float32")
    raise TypeError(f"{x!r:.60} is not a number")


def moved(first: Expression, by: Expression) -> Expression:
    """Return the sum of two indices."""
    return simpler(Applied("+", (first, by)))


def axes_of(extent: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Return parallel loops for the axes of more than one element."""
    return tuple((f"#{i}", n) for i, n in enumerate(n for n in extent if n != 1))


def indices_in(part: BufferPart, axes: tuple[tuple[str, int], ...]) -> tuple[Expression, ...]:
    """Return the indices of a part's elements under parallel loops, one for each axis of more than one element."""
    names = iter(axes)
    return tuple(
        moved(first, Variable(next(names)[0])) if n != 1 else first
        for first, n in zip(part.start, part.extent, strict=True)
    )


def size_of(part: BufferPart) -> int:
    """Return the number of elements."""
    return math.prod(part.extent)
