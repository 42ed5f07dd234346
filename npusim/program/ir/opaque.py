"""Opaque coordinates, which a body receives instead of the numbers on which it must not depend.

A loop's index, and the differences between blocks of one shape, may only be added and multiplied into
coordinates of global memory and into constants.  ``ir.check`` calls every body with such
coordinates once; the result holds for all iterations and blocks.

A body must be pure in its index: its operations follow only from its arguments, by the same computation for every
value.  A body that compares, converts, copies or prints a coordinate, or reads one of its attributes, is refused, even
if the body catches the error. For ``isinstance`` and ``match`` a coordinate has the type of the number that it
represents (the result of `varying` is a float).  Python does not let an object detect ``type(i)``, ``i is 0``,
``id(i)``, or a C function that accepts only an ``int``; and a body that counts its own calls needs no index. Such
bodies violate the rule, and npusim does not detect it.
"""

from __future__ import annotations

import functools
import numbers
import operator
import sys
from dataclasses import field, fields, is_dataclass
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn, SupportsInt, TypeVar, cast

from npusim.errors import ProgramError
from npusim.late_methods import dataclass
from npusim.program.ir.content import exact

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from types import FrameType

Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class Symbol:
    """One unknown: the index of a loop (``loop kv``), or ``row`` of the blocks of a shape.

    ``refusal``: the first error that a body got by reading the coordinate, even if the body caught the error.
    ``bounds``: its smallest and largest value, if they are known: then a comparison with the same result for all values
    is allowed. ``ends``: its first and last value, if they are coordinates themselves.
    """

    name: str
    refusal: OpaqueError | None = field(default=None, repr=False)
    bounds: tuple[int, int] | None = None
    ends: tuple[Any, Any] | None = None


class OpaqueError(ProgramError):
    """A body read a coordinate on which it must not depend; ``symbols`` are the symbols of the coordinate."""

    def __init__(self, message: str, symbols: frozenset[Symbol]) -> None:
        super().__init__(message)
        self.symbols = symbols


def _refused(verb: str) -> Callable[..., Any]:
    def method(self: Coordinate, *_others: object) -> NoReturn:
        self._refuse(verb)

    return method


def _compared(answer: Callable[[int, int], bool | None]) -> Callable[..., bool]:
    """Return a comparison: ``answer`` receives the smallest and the largest difference to the other number; the
    comparison is refused if the two give different results.
    """

    def method(self: Coordinate, other: object) -> bool:
        difference: Coordinate = self - other if isinstance(other, Coordinate) or type(other) is int else self * 1.0
        ends = bounds_of(difference)
        known = None if ends is None else answer(*ends)
        if known is None:
            difference._refuse("compares")
        return known

    return method


class Coordinate:
    """``constant`` plus the sum of ``terms`` (coefficient by symbol); not affine if ``is_affine`` is false.

    ``kind`` is the type of the number that it represents.
    """

    __array_ufunc__ = None  # numpy's scalars leave arithmetic with a coordinate to the coordinate
    __slots__ = ("constant", "is_affine", "kind", "terms")

    def __init__(
        self, terms: Mapping[Symbol, int], constant: int = 0, *, is_affine: bool = True, kind: type = int
    ) -> None:
        self.terms, self.constant, self.is_affine, self.kind = terms, constant, is_affine, kind

    # ---------------------------------------------------------------- what a body may do

    def __add__(self, other: object) -> Any:
        if type(other) is int and self.is_affine:
            return Coordinate(self.terms, self.constant + other)
        if isinstance(other, Coordinate) and self.is_affine and other.is_affine:
            terms = dict(self.terms)
            for symbol, factor in other.terms.items():
                terms[symbol] = terms.get(symbol, 0) + factor
            return Coordinate(terms, self.constant + other.constant)
        return self._unknown(other)

    def __mul__(self, other: object) -> Any:
        if type(other) is int and self.is_affine:
            return Coordinate({s: f * other for s, f in self.terms.items()}, self.constant * other)
        return self._unknown(other)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: float | Coordinate) -> Any:
        return self + -other

    def __rsub__(self, other: float | Coordinate) -> Any:
        return -self + other

    def _unknown(self, other: object) -> Any:
        """Return a coordinate whose symbols are known, but not its value."""
        if not isinstance(other, (Coordinate, numbers.Number)):
            return NotImplemented  # so that a list multiplied by a coordinate asks for a number, which is refused
        is_whole = self.kind is int and isinstance(other, int)
        return Coordinate(_symbols(self, other), is_affine=False, kind=int if is_whole else float)

    def _fraction(self, other: object) -> Any:
        value = self._unknown(other)
        return value if value is NotImplemented else value * 1.0

    def __pos__(self) -> Coordinate:
        return self

    def __invert__(self) -> Any:
        return -self - 1

    __radd__, __rmul__ = __add__, __mul__
    __floordiv__ = __mod__ = __pow__ = __rfloordiv__ = __rmod__ = __rpow__ = _unknown
    __truediv__ = __rtruediv__ = _fraction
    __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = _unknown
    __rlshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = _unknown

    # ---------------------------------------------------------------- what a body may not do

    def _refuse(self, verb: str) -> NoReturn:
        frame = sys._getframe(2)
        while frame.f_back and (frame.f_code.co_filename in (__file__, "<string>") or _is_python(frame)):
            frame = frame.f_back
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        names = " and ".join(dict.fromkeys(s.name for s in self.terms))
        error = OpaqueError(
            f"{line}: the body {verb} {names}, so that iterations or blocks would differ; it may only be added and "
            "multiplied to give coordinates of global memory and constants (varying() computes others)",
            frozenset(self.terms),
        )
        for symbol in self.terms:
            symbol.refusal = symbol.refusal or error
        raise error

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"asks for {name!r} of")

    __lt__ = _compared(lambda low, high: True if high < 0 else False if low >= 0 else None)
    __le__ = _compared(lambda low, high: True if high <= 0 else False if low > 0 else None)
    __gt__ = _compared(lambda low, high: True if low > 0 else False if high <= 0 else None)
    __ge__ = _compared(lambda low, high: True if low >= 0 else False if high < 0 else None)
    __eq__ = _compared(lambda low, high: True if low == high == 0 else None if low <= 0 <= high else False)
    __ne__ = _compared(lambda low, high: False if low == high == 0 else None if low <= 0 <= high else True)
    __hash__ = _refused("hashes")
    __bool__ = _refused("branches on")
    __str__ = __repr__ = __format__ = _refused("converts to text")
    __int__ = __float__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _refused("converts")
    __abs__ = __divmod__ = __rdivmod__ = __complex__ = _refused("converts")
    __copy__ = __deepcopy__ = __reduce_ex__ = __sizeof__ = _refused("copies")
    __class__ = property(lambda self: self.kind)


def _is_python(frame: FrameType) -> bool:
    """Return whether a frame belongs to the standard library: if ``copy`` reads the coordinate, then because a body
    calls ``copy``.
    """
    return frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that applies ``function`` to the numbers of each lane."""

    def method(self: Lanes, *others: object) -> Any:
        for x in others:
            kind = type(x)
            if kind is Coordinate or not (kind is int or kind is Lanes or isinstance(x, numbers.Number)):
                return NotImplemented
        columns = [x.values if type(x) is Lanes else repeat(x, len(self.values)) for x in others]
        return Lanes.of(list(map(function, self.values, *columns)))

    return method


class Lanes:
    """One number for each block of a set that runs in step: the operations of `Coordinate`, with known results.

    A body that compares such a number gets a `TypeError`, or the result if it is the same for all blocks.
    """

    __array_ufunc__ = None
    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    @staticmethod
    def of(values: Sequence[Any]) -> Any:
        """Return the number if all lanes have the same number, else one number per lane."""
        return values[0] if values.count(values[0]) == len(values) else Lanes(values)

    def __bool__(self) -> bool:
        raise TypeError("a body asks how blocks of one shape differ")

    __add__ = __radd__ = _each(operator.add)
    __mul__ = __rmul__ = _each(operator.mul)
    __sub__, __truediv__ = _each(operator.sub), _each(operator.truediv)
    __floordiv__, __mod__, __neg__ = _each(operator.floordiv), _each(operator.mod), _each(operator.neg)
    __rsub__ = _each(lambda x, y: y - x)
    __lt__, __le__, __gt__, __ge__ = map(_each, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _each(operator.eq), _each(operator.ne)
    __hash__ = None  # type: ignore[assignment]
    __class__ = property(lambda self: type(self.values[0]))


def at_lane(value: object, number: int) -> Any:
    """Return the number of a lane: its entry of `Lanes`, else the number that all lanes share."""
    return value.values[number] if type(value) is Lanes else value


def varying(function: Callable[..., Value], *values: object) -> Value:
    """Return ``function(*values)``, or an opaque value if one of ``values`` is opaque.

    Used for constants, and for coordinates of tensors that no operation writes, if they are not sums of products: the
    shifted corner of a mask, or a factor that depends on the tile's number.
    """
    several: Lanes | None = None
    is_opaque = False
    for v in values:  # without generators, because every block calls this function
        if type(v) is Lanes:
            several = v
        elif isinstance(v, Coordinate):
            is_opaque = True
    if several is not None:
        each = [function(*(at_lane(v, n) for v in values)) for n in range(len(several.values))]
        return cast("Value", Lanes.of(each))
    if is_opaque:
        return Coordinate(_symbols(*values), is_affine=False, kind=float)  # type: ignore[return-value]
    return function(*values)


def _symbols(*values: object) -> dict[Symbol, int]:
    return {s: 0 for v in values if isinstance(v, Coordinate) for s in v.terms}


def terms_of(value: object) -> Mapping[Symbol, int]:
    """Return the coefficient of each symbol in a coordinate; a number has none."""
    return value.terms if isinstance(value, Coordinate) else {}


def constant_of(value: SupportsInt) -> int:
    """Return the constant part of a coordinate; a number is returned unchanged."""
    return int(value.constant if isinstance(value, Coordinate) else value)


def bounds_of(value: SupportsInt) -> tuple[int, int] | None:
    """Return the smallest and the largest value of a coordinate; None if one of its symbols has no bounds."""
    low = high = constant_of(value)
    if not isinstance(value, Coordinate):
        return low, high
    for symbol, factor in value.terms.items():
        if symbol.bounds is None or not value.is_affine:
            return None
        ends = factor * symbol.bounds[0], factor * symbol.bounds[1]
        low, high = low + min(ends), high + max(ends)
    return low, high


def hull_of(value: SupportsInt) -> tuple[int, int]:
    """Return `bounds_of` a value; raise `OpaqueError` if it has no bounds."""
    ends = bounds_of(value)
    if ends is None:
        assert isinstance(value, Coordinate)
        value._refuse("takes as an end of a loop")
    return ends


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueRange:
    """The indices of a loop from ``start`` up to but not including ``end``, in place of a range if one of them is
    opaque.
    """

    start: int | Coordinate
    end: int | Coordinate

    @property
    def count(self) -> Any:
        """The number of iterations."""
        return self.end - self.start

    def __bool__(self) -> bool:
        return bool(self.start < self.end)

    def __getitem__(self, number: int) -> Any:
        return self.start + number


def indices(start: int | Coordinate, end: int | Coordinate) -> Any:
    """Return the indices of a loop: a range, or an `OpaqueRange` if an end is opaque."""
    return range(start, end) if type(start) is int and type(end) is int else OpaqueRange(start, end)


def substituted(value: object, replacements: Mapping[Symbol, Any]) -> Any:
    """Return ``value`` with every symbol of ``replacements`` replaced by its number or coordinate."""
    if not isinstance(value, Coordinate) or not any(s in replacements for s in value.terms):
        return value
    if not value.is_affine:
        symbols = _symbols(value, *(replacements[s] for s in value.terms if s in replacements))
        return Coordinate(symbols, is_affine=False, kind=value.kind)
    terms = {s: f for s, f in value.terms.items() if s not in replacements}
    result: int | Coordinate = Coordinate(terms, value.constant) if terms else value.constant
    for symbol, factor in value.terms.items():
        if symbol in replacements:
            result = result + replacements[symbol] * factor
    return result


def opaque(value: object, name: str, symbols: list[Symbol]) -> Any:
    """Return ``value`` with a new symbol for every integer in it, added to ``symbols``."""
    kind: type = type(value)
    if kind is int or kind is Coordinate:
        symbols.append(Symbol(name))
        return Coordinate({symbols[-1]: 1})
    if isinstance(value, tuple):
        return _like(kind, [opaque(v, f"{name}[{i}]", symbols) for i, v in enumerate(value)])
    parts = {n: opaque(getattr(value, n), f"{name}.{n}", symbols) for n in _field_names(kind) or ()}
    return _remade(kind, parts)


def form_of(value: object) -> Hashable:
    """Return the part of a value that `opaque` does not replace: tuples and dataclasses, without their integers.

    Raises `ProgramError` for any other value, which would be neither opaque nor part of a key.
    """
    kind: type = type(value)
    if kind is int or kind is Coordinate:
        return None
    if kind is tuple or (isinstance(value, tuple) and _is_tuple(kind)):
        return kind, *[None if type(v) is int else form_of(v) for v in cast("tuple[object, ...]", value)]
    names = _field_names(kind)
    if names is None:
        raise ProgramError(
            f"the coordinates of a body contain {value!r} ({kind.__name__}); they may contain only integers, in "
            "tuples or dataclasses; put other values into the static values, on which the operations may depend"
        )
    return kind, *[form_of(getattr(value, name)) for name in names]


def numbers_of(value: object) -> list[Any]:
    """Return the integers and coordinates in ``value``, in the order in which `opaque` visits them."""
    kind: type = type(value)
    if kind is int or kind is Coordinate:
        return [value]
    parts: Iterable[object] = (
        value if isinstance(value, tuple) else [getattr(value, n) for n in _field_names(kind) or ()]
    )
    return [number for part in parts for number in numbers_of(part)]


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None


def _is_tuple(kind: type) -> bool:
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def symbols_in(integers: dict[Symbol, Sequence[int]], *, is_bounded: bool = False) -> Callable[[str, Any], Coordinate]:
    """Return the function that creates symbols for `twin`: ``integers`` collects the integers of each; bounded symbols
    have their smallest and largest integer as bounds.
    """

    def symbol_of(name: str, values: Sequence[int]) -> Coordinate:
        symbol = Symbol(name, bounds=(min(values), max(values)) if is_bounded else None)
        integers[symbol] = values
        return Coordinate({symbol: 1})

    return symbol_of


def twin(values: Sequence[Any], name: str, made: Callable[[str, Sequence[int]], Any]) -> Any:
    """Return the common part of ``values``, with ``made(name, integers)`` in place of integers that differ.

    Raises `TypeError` if they differ, or may differ, in other parts: the ``==`` of a user's class is not called.
    """
    first, kinds = values[0], set(map(type, values))
    kind = kinds.pop()
    if kinds:
        raise TypeError(name)
    if kind is int:
        if values.count(first) == len(values):
            return first
        return made(name, values)
    if len(set(map(id, values))) == 1:
        return first
    if _is_tuple(kind) and len(set(map(len, values))) == 1:
        parts = zip(*values, strict=True)
        return _like(kind, [twin(p, f"{name}[{i}]", made) for i, p in enumerate(parts)])
    if (names := _field_names(kind)) is not None:
        columns = ((n, [getattr(v, n) for v in values]) for n in names)
        return _remade(kind, {n: twin(c, f"{name}.{n}", made) for n, c in columns})
    if (kind in _PLAIN or issubclass(kind, Enum)) and len(set(map(exact, values))) == 1:
        return first
    raise TypeError(name)


#: Types for which `exact` distinguishes any two values.
_PLAIN = frozenset({str, bytes, bool, float, complex, frozenset, type(None)})


def _like(kind: Callable[..., Any], parts: list[Any]) -> Any:
    return tuple(parts) if kind is tuple else kind(*parts)


def _remade(kind: type, parts: Mapping[str, Any]) -> Any:
    """Return a dataclass with these fields, without running its initialiser."""
    instance: object = object.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(instance, name, part)
    return instance
