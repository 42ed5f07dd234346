"""Searches over tilings, precisions, devices and problems: the fastest point, its proof, and its store.

``explore`` is the Python side of ``npusim explore``; it and `Exploration` are loaded when first
used, so that importing this package costs nothing.  ``store`` reads the rows of a search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.studies.explore.exploration import Exploration, explore

__all__ = ["Exploration", "explore"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from npusim.studies.explore import exploration

    return getattr(exploration, name)
