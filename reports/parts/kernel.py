"""Kernels with their authors' tiles: fields that a study does not name have their declared values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule

if TYPE_CHECKING:
    from npusim.config.tiling import Tiling


def declared_tiling(schedule: str, hw: str, **fields: object) -> Tiling:
    """Return a schedule's tiling on a device with ``fields``; a run does not change this tiling."""
    return build_tiling(find_schedule(schedule, load_device(hw).family).tiling, fields)
