"""What numbers of a hardware file may be, by the unit that their key ends in.

The ranges are far wider than any machine: they keep a slip (a missing exponent, another unit) from
becoming an overflow, a deadlock that is none, or a day of simulation.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.model import fault_at
from npusim.config.quantity import Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import PydanticCustomError

    from npusim.config.quantity import Sourced

#: Least and largest value by unit, the longest ending first; 0 is its key's own affair.
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "group_count": (1, 4096),
        "_per_group_count": (1, 1024),
        "_count": (1, 65536),
        "_bytes_per_cycle": (2**-10, 2**20),
        "_elements_per_cycle": (2**-10, 2**20),
        "_flops_per_s": (1, 1e24),
        "_bytes_per_s": (1, 1e24),
        "_per_s": (1, 1e24),
        "_elements": (1, 65536),
        "_factor": (1e-3, 1e3),
        "_cycles": (0, 1e9),
        "_cycles_per_repeat": (0, 1e6),
        "_cycles_per_element": (0, 1e6),
        "_cycles_per_fractal": (0, 1e6),
        "_bytes": (1, 2**50),
        "_hz": (1e6, 1e12),
        "_s": (0, 3600),
    }
)
#: Links are simulated in 2**-20 byte a cycle: below this, a rate would be rounded by more than a thousandth.
SLOWEST_BYTES_PER_CYCLE = 2**-10


def fault_in(facts: Iterable[tuple[str, Sourced]]) -> PydanticCustomError | None:
    """Return what is wrong with the first number out of its unit's range, or None."""
    for key, fact in facts:
        if not isinstance(fact, Quantity) or not fact.value:
            continue
        low, high = _range(key.rpartition(".")[2])
        if not low <= fact.value <= high:
            return fault_at(key, f"{fact.value!r} must lie between {_number(low)} and {_number(high)}")
    return None


def slow_link(key: str, bytes_per_s: float, clock_hz: float) -> PydanticCustomError | None:
    """Return what is wrong with a shared link that carries less than the clock resolves, or None."""
    least = SLOWEST_BYTES_PER_CYCLE * clock_hz
    if bytes_per_s >= least:
        return None
    return fault_at(
        key,
        f"{bytes_per_s!r} is less than the clock resolves: at {clock_hz / 1e9:g} GHz at least "
        f"{_number(least)}, 1/{1 / SLOWEST_BYTES_PER_CYCLE:.0f} byte a cycle",
    )


def _range(key: str) -> tuple[float, float]:
    return next((limits for unit, limits in RANGES.items() if f"_{key}".endswith(unit)), (0, float("inf")))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 or not value else f"{value:.3g}"
