"""Lines of a program's text whose numbers are sums, so that two texts that differ only in numbers become one.

The texts of cores with the numbers 0 and 1 become one text with the number as a variable; so do the texts for a length
and for the next length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from npusim.errors import ProgramError
from npusim.late_methods import dataclass

_INDENT = "    "


class UnlikeError(ProgramError):
    """Raised if two texts differ in more than numbers."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A constant plus multiples of variables."""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, constant: int, terms: Mapping[str, int]) -> Sum:
        """Return a sum; its terms are in the order of their names."""
        return cls(constant, tuple(sorted((name, n) for name, n in terms.items() if n)))

    def plus(self, other: Sum | int, times: int = 1) -> Sum:
        """Return this sum plus a multiple of another."""
        more = Sum(other) if isinstance(other, int) else other
        terms = dict(self.terms)
        for name, n in more.terms:
            terms[name] = terms.get(name, 0) + n * times
        return Sum.of(self.constant + more.constant * times, terms)

    @property
    def is_constant(self) -> bool:
        """Whether no variable remains."""
        return not self.terms

    def __str__(self) -> str:
        text = ""
        for name, n in self.terms:
            one = name if abs(n) == 1 else f"{name} * {abs(n)}"
            text += (f" {'-' if n < 0 else '+'} " if text else "-" if n < 0 else "") + one
        if not text:
            return str(self.constant)
        return text + (f" {'-' if self.constant < 0 else '+'} {abs(self.constant)}" if self.constant else "")


@dataclass(frozen=True, slots=True)
class Slot:
    """``first`` plus the remainder of dividing a number by a number of slots."""

    number: Sum
    slots: int
    first: int = 0

    def __str__(self) -> str:
        number = Sum.of(self.number.constant % self.slots, {name: n % self.slots for name, n in self.number.terms})
        if number.is_constant:
            return str(self.first + number.constant)
        text = str(number)
        whole = f"({text}) % {self.slots}" if " " in text else f"{text} % {self.slots}"
        return f"{self.first} + {whole}" if self.first else whole


Number = Sum | Slot


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line: a text with ``{}`` in place of each number."""

    text: str
    numbers: tuple[Number, ...] = ()

    def __str__(self) -> str:
        return self.text.format(*self.numbers)

    def then(self, text: str, *numbers: Number) -> TextLine:
        """Return the text followed by another text."""
        return TextLine(self.text + text, (*self.numbers, *numbers))


@dataclass(frozen=True, slots=True)
class Indented:
    """A line, and the lines of the block that it begins."""

    head: TextLine
    body: tuple[Node, ...]


Node = TextLine | Indented


def lines_of(nodes: Sequence[Node], depth: int = 0) -> Iterator[str]:
    """Yield the lines of a text."""
    for node in nodes:
        line = str(node if isinstance(node, TextLine) else node.head)
        yield f"{_INDENT * depth}{line}" if line else ""
        if isinstance(node, Indented):
            yield from lines_of(node.body, depth + 1)


def as_one(
    first: Sequence[Node], second: Sequence[Node], variable: str, start: int = 0, steps: int = 1
) -> tuple[Node, ...]:
    """Return the text that equals ``first`` if a variable is ``start``, and ``second`` if it is larger by ``steps``.

    Raises `UnlikeError` if the texts differ in more than numbers.
    """
    if len(first) != len(second):
        longer = (first if len(first) > len(second) else second)[min(len(first), len(second))]
        raise UnlikeError(f"only one of two texts has {next(lines_of([longer]))!r}")
    return tuple(_node(a, b, variable, start, steps) for a, b in zip(first, second, strict=True))


def _node(a: Node, b: Node, variable: str, start: int, steps: int) -> Node:
    if isinstance(a, Indented) and isinstance(b, Indented):
        return Indented(_line(a.head, b.head, variable, start, steps), as_one(a.body, b.body, variable, start, steps))
    if isinstance(a, TextLine) and isinstance(b, TextLine):
        return _line(a, b, variable, start, steps)
    raise UnlikeError(f"{next(lines_of([a]))!r} and {next(lines_of([b]))!r} differ")


def _line(a: TextLine, b: TextLine, variable: str, start: int, steps: int) -> TextLine:
    if a.text != b.text or len(a.numbers) != len(b.numbers):
        raise UnlikeError(f"{str(a)!r} and {str(b)!r} differ")
    pairs = zip(a.numbers, b.numbers, strict=True)
    return TextLine(a.text, tuple(_number(x, y, variable, start, steps) for x, y in pairs))


def _number(a: Number, b: Number, variable: str, start: int, steps: int) -> Number:
    if isinstance(a, Slot) and isinstance(b, Slot) and (a.slots, a.first) == (b.slots, b.first):
        return Slot(_sum(a.number, b.number, variable, start, steps), a.slots, a.first)
    if isinstance(a, Sum) and isinstance(b, Sum):
        return _sum(a, b, variable, start, steps)
    raise UnlikeError(f"the numbers {a} and {b} differ in more than a constant")


def _sum(a: Sum, b: Sum, variable: str, start: int, steps: int) -> Sum:
    if a.terms != b.terms:
        raise UnlikeError(f"the numbers {a} and {b} differ in more than a constant")
    by, rest = divmod(b.constant - a.constant, steps)
    if rest:
        raise UnlikeError(f"the number {a.constant} grows by {b.constant - a.constant} in {steps} steps")
    return a.plus(Sum.of(-by * start, {variable: by}))
