"""Objects that are compared by identity."""

from __future__ import annotations

from typing import Any


class Itself:
    """Represents an object that is too large for a comparison: equal only to itself."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.thing is self.thing

    def __repr__(self) -> str:
        return repr(self.thing)
