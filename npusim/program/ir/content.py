"""Values that are compared by content or by identity, and results that are stored as long as their phases exist."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from functools import cache, partial, wraps
from numbers import Number
from threading import Lock
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, dataclass_transform

from npusim.identity import Itself
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[Class]) -> type[Class]:
    """Return a dataclass that is compared and hashed by its fields, and never changed.

    The class is frozen only for type checkers: a run creates millions of instances, and the creation of a frozen
    instance would take five times as long.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class SameBlocks(Itself):
    """Represents the blocks of a phase: equal if all blocks are equal, so that phases that are built twice share
    results.

    The hash includes only a few blocks, because otherwise each use would hash thousands of blocks.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        blocks = self.thing
        return hash((len(blocks), blocks[0], blocks[-1])) if blocks else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameBlocks):
            return False
        if other.thing is self.thing or len(other.thing) != len(self.thing):
            return other.thing is self.thing
        is_alike = type(other.thing) is type(self.thing)
        return bool(other.thing == self.thing if is_alike else [*other.thing] == [*self.thing])


#: Types whose values are keys of their own: no value of another type is equal to one of them.
_SIMPLE = frozenset((int, str, type(None), partial, FunctionType, MethodType))


def exact(value: object) -> Hashable:
    """Return a key that also distinguishes values that ``==`` calls equal: 1, True and 1.0 are three values, and 0.0
    and -0.0 are two.
    """
    kind: type = type(value)
    if kind in _SIMPLE:
        return value
    if type(value) is tuple:
        simple = _SIMPLE
        if simple.issuperset(map(type, value)):
            return value
        return tuple([v if type(v) in simple else exact(v) for v in value])
    if type(value) is frozenset and _SIMPLE.issuperset(map(type, value)):
        return value
    if isinstance(value, frozenset):
        return kind, frozenset(map(exact, value))
    if isinstance(value, tuple):
        return kind, *map(exact, value)
    if (names := _compared(kind)) is not None:
        return kind, *[exact(getattr(value, name)) for name in names]
    return kind, repr(value) if isinstance(value, Number) else value


@cache
def _compared(kind: type) -> tuple[str, ...] | None:
    """Return the fields that decide whether values of a dataclass are equal; None for other types, which have other
    rules.
    """
    if not is_dataclass(kind) or not getattr(kind, "__dataclass_params__").eq:  # noqa: B009
        return None
    return tuple(f.name for f in fields(kind) if f.compare)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector's search for cycles.

    Code that builds structures frees none of them before it ends; repeated searches took half of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


#: Largest number of blocks, over all phases, whose results `kept_by_blocks` stores, and the number of phases that it
#: always stores.
MOST_BLOCKS, LEAST_PHASES = 1 << 15, 4


def kept_by_blocks(count: Callable[..., int]) -> Callable[[Callable[Arguments, Value]], Callable[Arguments, Value]]:
    """Return a decorator that stores a function's results for its latest arguments: many short phases or few long ones.

    ``count(value, *arguments)`` is the number of their blocks.
    """

    def decorated(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
        values: dict[Hashable, tuple[Value, int]] = {}
        lock, total = Lock(), 0

        @wraps(function)
        def called(*args: Arguments.args, **named: Arguments.kwargs) -> Value:
            nonlocal total
            key = (args, *named.items())
            entry = values.get(key)
            if entry is None:
                value = function(*args, **named)
                entry = value, count(value, *args)
            with lock:
                total += entry[1] - values.pop(key, (None, 0))[1]
                values[key] = entry  # the most recently used entry is the last
                while total > MOST_BLOCKS and len(values) > LEAST_PHASES:
                    total -= values.pop(next(iter(values)))[1]
            return entry[0]

        return called

    return decorated
