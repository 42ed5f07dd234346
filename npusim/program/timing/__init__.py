"""Cycles of a tile program on a device, by several methods with one signature.

``METHODS`` maps a name to ``simulate(program, device, *, trace_groups) -> TimingResult``:

``des``
    SimPy, with every core group and shared link: the reference.
``block``
    The processes of ``des`` in compiled form (`npusim.program.timing.engine`), each run to its next wait: exact.
``fold``
    The same engine with one core group of each class of equal groups; transfers have weights, and the result is exact.
``steady``
    ``fold`` that skips periods after the joint state repeats: exact.
``reserved``
    A mean field (`npusim.program.timing.mean_field`): each core group runs with the mean traffic of the others, and
    each block is simulated once: approximate, for groups that all differ.
``auto``
    Chooses ``steady`` or, if this is slow and the measured difference is small, ``reserved``.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.program.timing import auto, des, engine, mean_field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.program.timing.timing_result import TimingResult

__all__ = ["METHODS", "method_named"]

METHODS: Mapping[str, Callable[..., TimingResult]] = MappingProxyType(
    {
        "auto": auto.simulate,
        "des": des.simulate,
        **{method: partial(engine.simulate, method=method) for method in ("block", "fold", "steady")},
        "reserved": mean_field.simulate,
    }
)


def method_named(name: str) -> Callable[..., TimingResult]:
    """Return the method with this name; raise `SpecError` if there is none."""
    if name not in METHODS:
        raise SpecError(f"method {name!r}; allowed: {', '.join(METHODS)}")
    return METHODS[name]
