"""Look a name up in a frozen registry, with near names in the error."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from npusim.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = TypeVar("Value")
#: Names an error lists when none is near.
SHOWN_NAMES = 10


def lookup(registry: Mapping[str, Value], name: str, kind: str) -> Value:
    """Return ``registry[name]``.

    Raises
    ------
    FormatError
        If ``name`` is not registered; the message lists the nearest names, or all of them.
    """
    if isinstance(name, str) and name in registry:
        return registry[name]
    near = difflib.get_close_matches(str(name), registry, n=6, cutoff=0.6)
    if near:
        raise FormatError(f"unknown {kind} {name!r}; near names: {', '.join(near)}")
    shown = sorted(registry)
    if len(shown) > SHOWN_NAMES:  # the least unlike
        shown = difflib.get_close_matches(str(name), registry, n=SHOWN_NAMES, cutoff=0.0)
    rest = "" if len(shown) == len(registry) else f", ... ({len(registry)} in all)"
    raise FormatError(f"unknown {kind} {name!r}; known names: {', '.join(shown)}{rest}")
