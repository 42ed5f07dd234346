"""Values that a kernel computes with while it is translated: their types, and the names that LLVM's text has for them.

Types are those of numba, whose rules the kernels follow: arithmetic on whole numbers has 64 bits, a comparison is a
truth value, and a number of Python's source has 64 bits.  Combinations for which numba's rule would surprise a reader
(int64 and uint64: float64) are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from npusim.formats.kernel_parts import ArgumentType, TableKind, is_array
from npusim.late_methods import dataclass

#: Bits of an address and of a length.
WORD_BITS = 64


class TranslationError(TypeError):
    """A kernel has an expression or a statement that is not part of the language of kernels."""


class NumberType(NamedTuple):
    """The type of a number: LLVM's name, its bits, its kind (``b``: truth value, ``i``, ``u``, ``f``)."""

    text: str
    bits: int
    kind: str

    @property
    def stored(self) -> str:
        """LLVM's type of an element of an array."""
        return "i8" if self.kind == "b" else self.text

    @property
    def item_bytes(self) -> int:
        """The bytes of an element of an array."""
        return max(self.bits, 8) // 8


BOOL = NumberType("i1", 1, "b")
INT16, INT32, INT64 = (NumberType(f"i{bits}", bits, "i") for bits in (16, 32, 64))
UINT32, UINT64 = (NumberType(f"i{bits}", bits, "u") for bits in (32, 64))
FLOAT32, FLOAT64 = NumberType("float", 32, "f"), NumberType("double", 64, "f")
#: Types by name: of NumPy's functions, and of intrinsics.
NUMBERS: Mapping[str, NumberType] = MappingProxyType(
    {
        "bool": BOOL,
        "int8": NumberType("i8", 8, "i"),
        "int16": INT16,
        "int32": INT32,
        "int64": INT64,
        "uint8": NumberType("i8", 8, "u"),
        "uint16": NumberType("i16", 16, "u"),
        "uint32": UINT32,
        "uint64": UINT64,
        "float32": FLOAT32,
        "float64": FLOAT64,
    }
)
_OF_LETTERS = MappingProxyType({"i": INT64, "d": FLOAT64, "b": BOOL})


class KernelValue:
    """What an expression of a kernel has as its result."""

    __slots__ = ()


@dataclass(frozen=True)
class NumberValue(KernelValue):
    """A number: its type, its text, and its value if the translation knows it."""

    number: NumberType
    text: str
    known: float | None = None


@dataclass(frozen=True)
class NoValue(KernelValue):
    """None."""


@dataclass(frozen=True)
class Several(KernelValue):
    """A tuple, which exists only during the translation."""

    entries: tuple[KernelValue, ...]


@dataclass(frozen=True)
class Array(KernelValue):
    """An array whose last axis has neighbours next to one another: its address, shape, and strides in elements."""

    item: NumberType
    data: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class Rows(KernelValue):
    """An array of a table: of records with these fields, or of int64 if there are none."""

    fields: tuple[str, ...]
    data: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Record(KernelValue):
    """A record of int64: its fields and its address."""

    fields: tuple[str, ...]
    data: str


@dataclass(frozen=True)
class TableAt(KernelValue):
    """A table: its kind, and the address of its words."""

    kind: TableKind
    data: str


@dataclass(frozen=True)
class VariableAt(KernelValue):
    """A variable: the type and the address of its number."""

    number: NumberType
    pointer: str


def constant(value: float, number: NumberType | None = None) -> NumberValue:
    """Return a number of the source, as a number of some type."""
    if number is None:
        number = BOOL if isinstance(value, bool) else INT64 if isinstance(value, int) else FLOAT64
    if number.kind == "f":
        value = float(np.float32(value)) if number == FLOAT32 else float(value)
        return NumberValue(number, f"0x{struct.unpack('>Q', struct.pack('>d', value))[0]:016X}", value)
    if number.kind == "b":
        return NumberValue(number, "true" if value else "false", bool(value))
    whole = int(value) & ((1 << number.bits) - 1)
    if number.kind == "i" and whole >> (number.bits - 1):
        whole -= 1 << number.bits
    if number == INT64 and whole != value:
        raise TranslationError(f"{value}: beyond int64")
    return NumberValue(number, str(whole), whole)


def arithmetic_type(a: NumberType, b: NumberType) -> NumberType:
    """Return the type of a sum."""
    if "f" in (a.kind, b.kind):
        if a == b:
            return a
        other = a if b.kind == "f" else b
        if other.kind == "f" or other.bits >= INT32.bits:
            return FLOAT64
        raise TranslationError(f"float and {other.bits} bits: convert one of them")
    if a.kind == "u" == b.kind:
        return UINT64
    if UINT64 in (a, b):
        raise TranslationError("uint64 and a signed number: convert one of them")
    return INT64


def common_type(a: NumberType, b: NumberType) -> NumberType:
    """Return the type of a value that is one of two."""
    if a == b:
        return a
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    return arithmetic_type(a, b)


def number_of(dtype: np.dtype[np.generic]) -> NumberType:
    """Return the type of an array's elements."""
    number = NUMBERS.get(dtype.name)
    if number is None:
        raise TranslationError(f"arrays of {dtype.name}")
    return number


def argument(kind: ArgumentType, new: Callable[[str], str]) -> KernelValue:
    """Return a kernel's argument; ``new`` declares a parameter of LLVM's type and returns its name.

    An array is its address and shape; a truth value has eight bits. Strides are the sizes of later axes: the caller
    multiplies them (`Array.strides` is empty).
    """
    if isinstance(kind, str):
        if kind == "n":
            return NoValue()
        number = _OF_LETTERS[kind]
        return NumberValue(number, new(number.stored))
    if isinstance(kind, TableKind):
        return TableAt(kind, new("ptr"))
    if is_array(kind):
        item = number_of(np.dtype(kind[0]))
        return Array(item, new("ptr"), tuple(new("i64") for _ in range(kind[1])), ())
    return Several(tuple(argument(entry, new) for entry in kind))


def words(value: KernelValue) -> Iterator[tuple[str, str]]:
    """Yield the types and names of the numbers and addresses of which a value consists."""
    if isinstance(value, NumberValue):
        yield value.number.text, value.text
    elif isinstance(value, Several):
        for entry in value.entries:
            yield from words(entry)
    elif isinstance(value, Array):
        yield "ptr", value.data
        yield from (("i64", size) for size in (*value.shape, *value.strides[:-1]))
    elif isinstance(value, Rows):
        yield "ptr", value.data
        yield from (("i64", size) for size in value.shape)
    elif isinstance(value, Record | TableAt):
        yield "ptr", value.data


def renamed(value: KernelValue, names: Iterator[str]) -> KernelValue:
    """Return a value of the same form with other names; its numbers are not known."""
    if isinstance(value, NumberValue):
        return NumberValue(value.number, next(names))
    if isinstance(value, Several):
        return Several(tuple([renamed(entry, names) for entry in value.entries]))
    if isinstance(value, Array):
        data, shape = next(names), tuple([next(names) for _ in value.shape])
        return Array(value.item, data, shape, (*[next(names) for _ in value.strides[:-1]], "1"))
    if isinstance(value, Rows):
        return Rows(value.fields, next(names), tuple([next(names) for _ in value.shape]))
    if isinstance(value, Record):
        return Record(value.fields, next(names))
    if isinstance(value, TableAt):
        return TableAt(value.kind, next(names))
    return value


def form_of(value: KernelValue) -> object:
    """Return what values with the same code have in common."""
    if isinstance(value, NumberValue):
        return value.number
    if isinstance(value, Several):
        return tuple([form_of(entry) for entry in value.entries])
    if isinstance(value, Array):
        return value.item, len(value.shape)
    if isinstance(value, Rows):
        return value.fields, len(value.shape)
    if isinstance(value, Record):
        return value.fields
    return value.kind if isinstance(value, TableAt) else None


def result_type(value: KernelValue) -> str:
    """Return LLVM's type of a function's result."""
    kinds = [kind for kind, _ in words(value)]
    return "void" if not kinds else kinds[0] if isinstance(value, NumberValue) else f"{{ {', '.join(kinds)} }}"
