"""Cycles of a tile program on a device, by several methods of one signature.

``METHODS`` maps a name to ``simulate(program, device, *, trace_groups) -> TimingResult``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.timing import des, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.timing.result import TimingResult

__all__ = ["METHODS"]

METHODS: Mapping[str, Callable[..., TimingResult]] = MappingProxyType(
    {"auto": des.simulate, "des": des.simulate, "replay": replay.simulate}
)
