"""Buffers of a TileLang program and parts of them, with integers where the program's loops run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from npusim.errors import SpecError
from npusim.kernels.tilelang.lengths import Move

#: Bytes of an element, by the name of its format.
WIDTHS = MappingProxyType(
    {
        **dict.fromkeys(("float64", "int64", "uint64"), 8),
        **dict.fromkeys(("float32", "float", "int32", "uint32", "int", "uint"), 4),
        **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
        **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), 1),
    }
)


@dataclass(frozen=True, slots=True)
class Box:
    """The part of a buffer that an instruction accesses: half-open ranges of its axes.

    ``space`` is the memory (``GM`` is shared by all cores), ``core`` the core whose memory it is, empty for ``GM``.
    ``address`` is the byte at which the buffer begins, if the program states it (`T.annotate_address`). ``is_exact`` is
    False if an index is known only at run time: the ranges then cover all its values. ``moves``: how each range moves
    with an iteration of a loop whose number of iterations grows (`lengths`); empty if no range moves.
    """

    buffer: str
    space: str
    core: str
    ranges: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    fmt: str
    address: int | None = None
    is_exact: bool = True
    moves: tuple[Move, ...] = field(default=(), compare=False)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.fmt]

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the byte after the last, in the memory, or within a buffer without an address."""
        pairs = list(zip(self.ranges, self.strides, strict=True))
        low = sum(a * s for (a, _), s in pairs)
        high = sum((b - 1) * s for (_, b), s in pairs) + 1
        start = self.address or 0
        return start + low * self.width, start + high * self.width

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(b - a for a, b in self.ranges) * self.width

    def overlaps(self, other: Box) -> bool:
        """Return whether two boxes may have a byte in common."""
        if (self.space, self.core) != (other.space, other.core):
            return False
        if self.buffer == other.buffer:
            return all(a < d and c < b for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True))
        if self.space == "GM" or self.address is None or other.address is None:
            return False  # tensors of a call, and buffers whose places the compiler chooses, have no byte in common
        (a, b), (c, d) = self.span, other.span
        return a < d and c < b

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{b}" if b - a != 1 else str(a) for a, b in self.ranges)
        first, end = self.span
        where = f"bytes {first:,} to {end - 1:,} of " if self.address is not None else ""
        of_core = f" of {self.core}" if self.core else ""
        return f"{self.buffer}[{ranges}] ({where}{self.space}{of_core}, {self.size:,} bytes)"


class Scalar:
    """An operand of a program's scalar arithmetic that is known only at run time; its text identifies it."""

    def text(self) -> str:
        """Return the expression as text; equal texts are equal values."""
        raise NotImplementedError

    def compared(self, how: str, other: object) -> OpenCondition:
        """Return a comparison with an operand."""
        raise NotImplementedError

    def combined(self, sign: str, *operands: object) -> Scalar:
        """Return an expression of operands."""
        raise NotImplementedError

    def __add__(self, other: object) -> Scalar:
        return self.combined("+", self, other)

    def __radd__(self, other: object) -> Scalar:
        return self.combined("+", other, self)

    def __sub__(self, other: object) -> Scalar:
        return self.combined("-", self, other)

    def __rsub__(self, other: object) -> Scalar:
        return self.combined("-", other, self)

    def __mul__(self, other: object) -> Scalar:
        return self.combined("*", self, other)

    def __rmul__(self, other: object) -> Scalar:
        return self.combined("*", other, self)

    def __floordiv__(self, other: object) -> Scalar:
        return self.combined("//", self, other)

    def __rfloordiv__(self, other: object) -> Scalar:
        return self.combined("//", other, self)

    def __truediv__(self, other: object) -> Scalar:
        return self.combined("/", self, other)

    def __rtruediv__(self, other: object) -> Scalar:
        return self.combined("/", other, self)

    def __mod__(self, other: object) -> Scalar:
        return self.combined("%", self, other)

    def __neg__(self) -> Scalar:
        return self.combined("-", 0, self)

    def __lt__(self, other: object) -> OpenCondition:
        return self.compared("<", other)

    def __le__(self, other: object) -> OpenCondition:
        return self.compared("<=", other)

    def __gt__(self, other: object) -> OpenCondition:
        return self.compared(">", other)

    def __ge__(self, other: object) -> OpenCondition:
        return self.compared(">=", other)

    def __eq__(self, other: object) -> OpenCondition:  # type: ignore[override]  # a comparison of values, as in the program
        return self.compared("==", other)

    def __ne__(self, other: object) -> OpenCondition:  # type: ignore[override]
        return self.compared("!=", other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self != 0)


class OpenCondition:
    """A condition; an ``if`` calls ``decide`` for the answer, which is inverted if ``negated``."""

    def __init__(self, key: str, decide: Callable[[str], bool], *, negated: bool = False) -> None:
        self.key, self.decide, self.negated = key, decide, negated

    def __bool__(self) -> bool:
        return self.decide(self.key) is not self.negated


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor of a call (``space`` is ``GM``) or a buffer of a core; ``writes`` counts the writes to the tile."""

    name: str
    shape: tuple[int, ...]
    fmt: str
    space: str
    part: Callable[[Buffer, object], object] = field(repr=False)
    put: Callable[[Buffer, object, object], None] = field(repr=False)
    address: int | None = None
    writes: int = 0
    #: Elements between neighbours of each axis.
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    @property
    def dtype(self) -> str:
        """The format, under the name that programs read."""
        return self.fmt

    def __getitem__(self, index: object) -> object:
        return self.part(self, index)

    def __setitem__(self, index: object, value: object) -> None:
        self.put(self, index, value)


def width_of(fmt: str) -> int:
    """Return the bytes of an element; raise `SpecError` for a format that is not read."""
    if fmt not in WIDTHS:
        raise SpecError(f"format {fmt}; allowed: {', '.join(WIDTHS)}")
    return WIDTHS[fmt]
