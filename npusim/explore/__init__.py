"""Search over a schedule's tiling fields: search space, executors, result store.

``explore`` is the Python side of ``npusim explore``; it and `Exploration` are loaded when first
used, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.explore.search import Exploration, explore

__all__ = ["Exploration", "explore"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from npusim.explore import search

    return getattr(search, name)
