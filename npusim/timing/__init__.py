"""Cycles of a tile program on a device, by several methods of one signature.

``METHODS`` maps a name to ``simulate(program, device, *, trace_groups) -> TimingResult``:

``des``
    SimPy, every core group and shared link: the reference.
``block``
    The processes of ``des`` compiled, run to their next wait: exact.
``fold``
    One representative for each class of core groups with equal programs, its transfers weighted: exact.
``steady``
    ``fold`` that skips whole periods once the joint state repeats: exact.
``reserved``
    Each core group beside a mean of the others, a block simulated once: approximate, for groups that
    all differ.
``auto``
    Chooses ``steady`` or, where that takes long and its measured difference is small, ``reserved``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.timing import auto, block, des, fold, reserved, steady

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.timing.result import TimingResult

__all__ = ["METHODS"]

METHODS: Mapping[str, Callable[..., TimingResult]] = MappingProxyType(
    {
        "auto": auto.simulate,
        "des": des.simulate,
        "block": block.simulate,
        "fold": fold.simulate,
        "steady": steady.simulate,
        "reserved": reserved.simulate,
    }
)
