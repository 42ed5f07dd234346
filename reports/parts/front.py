"""Which of several points no other one beats in both time and error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["unbeaten"]


def unbeaten(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names of (time, error) that no other one is as good as in both and better in one."""
    return {
        n for n, at in points.items() if not any(o[0] <= at[0] and o[1] <= at[1] and o != at for o in points.values())
    }
