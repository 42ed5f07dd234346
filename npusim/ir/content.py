"""Equal contents as one object: what is built of them is compared at every operation."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["Itself", "interned", "known_at", "methods_of", "uncollected"]


class Itself:
    """Stands for an object too large to be compared: equal where it is the same one."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.thing is self.thing

    def __repr__(self) -> str:
        return repr(self.thing)


@contextmanager
def uncollected() -> Iterator[None]:
    """Let nobody look for garbage in cycles meanwhile.

    What builds structures keeps them: looking through all of them over and over took half its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@lru_cache(maxsize=2048)
def interned(content: Hashable) -> Hashable:
    """Return one object for all equal contents."""
    return Itself(content)


def methods_of(kind: Any) -> tuple[object, ...]:
    """Return the functions of a class as it is now: one that is changed in a running process is another."""
    return tuple(f for base in getattr(kind, "__mro__", ()) for f in vars(base).values() if callable(f)) or (kind,)


@lru_cache(maxsize=48)
def known_at(home: Hashable, ends: Hashable, kind: str) -> dict[Any, Any]:
    """Return what is known by now of the bodies of one home, in programs of these queues and rings, to be added to."""
    return {}
