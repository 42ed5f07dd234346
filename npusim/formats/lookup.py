"""Look a name up in a frozen registry, with near names in the error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from npusim.errors import FormatError

Value = TypeVar("Value")


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
    words = "near names" if near else "known names"
    raise FormatError(f"unknown {kind} {name!r}; {words}: {', '.join(near or sorted(registry))}")
