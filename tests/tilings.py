"""Tilings as they are declared: a run of one costs what the run costs, not the tiles that npusim would try for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.schedules import find_schedule

if TYPE_CHECKING:
    from npusim.config.tiling import Tiling


def declared(schedule: str, hw: str, **fields: Any) -> Tiling:
    """Return a schedule's tiling with these fields, all others as declared."""
    return build_tiling(find_schedule(schedule, load_device(hw).family).tiling, fields)
