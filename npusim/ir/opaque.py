"""Opaque coordinates: what a body is given in place of the numbers it must not depend on.

A loop's index, and what differs between blocks of one shape, may only be added and multiplied into
coordinates of global memory and into constants.  ``ir.check`` calls every body with such
coordinates once: what comes out stands for all iterations and blocks, since nothing that compares,
converts or hashes one gets past it.
"""

from __future__ import annotations

import functools
import numbers
import sys
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from npusim.errors import ProgramError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """One unknown: ``loop kv``'s index, or ``row`` of the blocks of a shape."""

    name: str


class OpaqueError(ProgramError):
    """A body looked at a coordinate it must not depend on; ``symbols`` are what it consists of."""

    def __init__(self, message: str, symbols: frozenset[Symbol]) -> None:
        super().__init__(message)
        self.symbols = symbols


class Coordinate:
    """``constant`` + the sum of ``terms`` (coefficient by symbol); not affine if ``is_affine`` is false."""

    __array_ufunc__ = None  # numpy's scalars leave arithmetic with a coordinate to it
    __slots__ = ("constant", "is_affine", "terms")

    def __init__(
        self, terms: Mapping[Symbol, int], constant: int = 0, *, is_affine: bool = True
    ) -> None:
        self.terms, self.constant, self.is_affine = terms, constant, is_affine

    def __repr__(self) -> str:
        return f"<opaque {' '.join(s.name for s in self.terms)}>"

    # ---------------------------------------------------------------- what a body may do

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return Coordinate(self.terms, self.constant + other, is_affine=self.is_affine)
        if isinstance(other, Coordinate) and self.is_affine and other.is_affine:
            terms = dict(self.terms)
            for symbol, factor in other.terms.items():
                terms[symbol] = terms.get(symbol, 0) + factor
            return Coordinate(terms, self.constant + other.constant)
        return self._unknown(other)

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and self.is_affine:
            return Coordinate({s: f * other for s, f in self.terms.items()}, self.constant * other)
        return self._unknown(other)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def _unknown(self, other: Any) -> Any:
        """Return a coordinate of which only the symbols it hangs on are known."""
        if not isinstance(other, (Coordinate, numbers.Number)):
            return NotImplemented  # so that a list times a coordinate asks for a number, and is refused
        return Coordinate(_symbols(self, other), is_affine=False)

    __radd__, __rmul__ = __add__, __mul__
    __floordiv__ = __mod__ = __truediv__ = __pow__ = _unknown
    __rfloordiv__ = __rmod__ = __rtruediv__ = __rpow__ = _unknown

    # ---------------------------------------------------------------- what it may not

    def _refuse(self, verb: str) -> NoReturn:
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename in (__file__, "<string>"):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        names = " and ".join(dict.fromkeys(s.name for s in self.terms))
        raise OpaqueError(
            f"{place}: the body {verb} {names}, by which iterations and blocks would differ; it may only be added "
            "and multiplied into coordinates of global memory and constants (varying() computes other ones)",
            frozenset(self.terms),
        )

    def _compare(self, _other: object) -> NoReturn:
        self._refuse("compares")

    def _hash(self) -> NoReturn:
        self._refuse("hashes")

    def _branch(self) -> NoReturn:
        self._refuse("branches on")

    def _print(self, *_spec: str) -> NoReturn:
        self._refuse("converts to text")

    def _convert(self, *_digits: object) -> NoReturn:
        self._refuse("converts")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__, __bool__, __str__, __format__ = _hash, _branch, _print, _print
    __int__ = __float__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _convert
    __abs__ = __divmod__ = __rdivmod__ = __complex__ = _convert


def varying(function: Callable[..., Value], *values: Any) -> Value:
    """Return ``function(*values)``, or an opaque value if one of ``values`` is opaque.

    For constants and for coordinates of tensors that no one writes, where they are no sums of
    products: the shifted corner of a mask, a factor that depends on the tile's number.
    """
    if any(isinstance(v, Coordinate) for v in values):
        return Coordinate(_symbols(*values), is_affine=False)  # type: ignore[return-value]
    return function(*values)


def _symbols(*values: Any) -> dict[Symbol, int]:
    """Return the symbols that ``values`` hang on, without factors."""
    return {s: 0 for v in values if isinstance(v, Coordinate) for s in v.terms}


def substituted(value: Any, given: Mapping[Symbol, Any]) -> Any:
    """Return ``value`` with every symbol of ``given`` replaced by its number or coordinate."""
    if not isinstance(value, Coordinate) or not any(s in given for s in value.terms):
        return value
    if not value.is_affine:
        return Coordinate(
            _symbols(value, *(given[s] for s in value.terms if s in given)), is_affine=False
        )
    kept = {s: f for s, f in value.terms.items() if s not in given}
    result: Any = Coordinate(kept, value.constant) if kept else value.constant
    for symbol, factor in value.terms.items():
        if symbol in given:
            result = result + given[symbol] * factor
    return result


def opaque(value: Any, name: str, found: list[tuple[Symbol, Any]]) -> Any:
    """Return ``value`` with a new symbol for every integer in it; ``found`` gets symbol and integer."""
    if isinstance(value, Coordinate) or type(value) is int:
        symbol = Symbol(name)
        found.append((symbol, value))
        return Coordinate({symbol: 1})
    if isinstance(value, tuple):
        return _like(value, [opaque(v, f"{name}[{i}]", found) for i, v in enumerate(value)])
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            f.name: opaque(getattr(value, f.name), f"{name}.{f.name}", found) for f in fields(value)
        }
        return _remade(value, parts)
    return value


def numbers_of(value: Any) -> list[Any]:
    """Return the integers and coordinates in ``value``, in the order in which `opaque` finds them."""
    found: list[Any] = []
    _add_numbers(value, found)
    return found


def _add_numbers(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is int or kind is Coordinate:
        found.append(value)
    elif issubclass(kind, tuple):
        for part in value:
            _add_numbers(part, found)
    else:
        for name in _field_names(kind):  # type: ignore[arg-type]
            _add_numbers(getattr(value, name), found)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass; none of any other type."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


def twin(values: Sequence[Any], name: str, found: dict[Symbol, Sequence[int]]) -> Any:
    """Return what ``values`` have in common, with a symbol for every integer in which they differ.

    ``found`` gets each symbol's integers, one a value.  Raises `TypeError` where they differ in
    anything else.
    """
    first = values[0]
    if len(values) == 1 or values.count(first) == len(values):
        return first
    kind = type(first)
    if kind is int and all(type(v) is int for v in values):
        symbol = Symbol(name)
        found[symbol] = values
        return Coordinate({symbol: 1})
    if any(type(v) is not kind for v in values):
        raise TypeError(name)
    if isinstance(first, tuple) and all(len(v) == len(first) for v in values):
        parts = zip(*values, strict=True)
        return _like(first, [twin(p, f"{name}[{i}]", found) for i, p in enumerate(parts)])
    if is_dataclass(first):
        changed = {
            f.name: twin([getattr(v, f.name) for v in values], f"{name}.{f.name}", found)
            for f in fields(first)
        }
        return _remade(first, changed)
    raise TypeError(name)


def _like(value: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _remade(value: Any, parts: Mapping[str, Any]) -> Any:
    """Return a dataclass like ``value`` with these fields, without what its initialiser would compute."""
    made = object.__new__(type(value))
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made
