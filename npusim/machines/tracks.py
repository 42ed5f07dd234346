"""Names of cores and pipes in other tools: in the vendor's simulator (``core0.cubecore0 CUBE``), in its profiler, and
in measurements.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "LOOP_BOUNDS",
    "MEASURED_PIPES",
    "PROFILED_CORES",
    "PROFILED_PIPES",
    "Track",
    "profiled_core",
    "profiled_times",
    "track_of",
]

#: Names of kinds of core on a timeline, where they differ from the device file's.
_CORES = MappingProxyType({"aic": "cubecore", "aiv": "veccore"})
#: The profiler's names of kinds of core in ``sub_block_id``, and of pipes, if they are not the names in lower case.
PROFILED_CORES = MappingProxyType({"aic": "cube", "aiv": "vector"})
PROFILED_PIPES = MappingProxyType({"VECTOR": "vec", "FIXP": "fixpipe"})
#: The queue whose busy time is compared with a quantity of a measurement file.
MEASURED_PIPES = MappingProxyType(
    {"mac_us": "aic.CUBE", "mte1_us": "aic.MTE1", "mte2_us": "aic.MTE2", "fixp_us": "aic.FIXP", "vec_us": "aiv0.VECTOR"}
)


def profiled_times(quantity: str) -> tuple[str, ...]:
    """Return the columns of profilers' files that may contain a quantity: ``aic_mac_time(us)``, ``aic_cube_time(us)``.

    msprof calls the matrix unit ``mac``, msprof op ``cube``.
    """
    core, pipe = MEASURED_PIPES[quantity].split(".")
    words = (PROFILED_PIPES.get(pipe, pipe.lower()), *(("mac",) if pipe == "CUBE" else ()))
    return tuple(f"{core.rstrip('0123456789')}_{word}_time(us)" for word in words)


#: Kinds of core that occur several times in a core group, numbered from 0.
_NUMBERED = frozenset({"aiv"})


class Track(NamedTuple):
    """One pipe of one core: ``core`` is a process of a timeline, ``pipe`` a thread of it."""

    core: str
    pipe: str

    def __str__(self) -> str:
        return f"{self.core} {self.pipe}"


#: What limits the interval of a hardware loop on a vector unit with registers, in words, by the constant that states
#: the limit.
LOOP_BOUNDS = MappingProxyType(
    {
        "issued_per_cycle_count": "issue",
        "singly_issued_per_cycle_count": "instructions issued alone",
        "registers_written_per_cycle_count": "register writes",
        "accesses_per_cycle_count": "accesses to UB",
        "writes_per_cycle_count": "stores to UB",
        "long_units_count": "long units",
        "function.startup_cycles": "starts and ends of functions",
        "function.drain_cycles": "starts and ends of functions",
        "function.nested_cycles": "nested loops",
    }
)


@cache
def track_of(group: int, queue: str) -> Track:
    """Return the track of a queue of core group ``group``.

    ``aic.CUBE`` is ``core0.cubecore0 CUBE``, ``aiv1.VECTOR`` is ``core0.veccore1 VECTOR``; other
    cores have their name and the group's number: ``sm.TENSOR`` of group 3 is ``sm3 TENSOR``.
    """
    core, _, pipe = queue.rpartition(".")
    kind, number = core.rstrip("0123456789"), core[len(core.rstrip("0123456789")) :]
    if kind in _CORES:
        return Track(f"core{group}.{_CORES[kind]}{number or 0}", pipe)
    return Track(f"{kind}{group}{f'.{number}' if number else ''}", pipe)


def profiled_core(kind: str, sub_block: str) -> str:
    """Return the core of a profiler's row of that kind: ``aiv1`` for ``vector1``, ``aic`` for ``cube0``."""
    number = "".join(c for c in sub_block if c.isdigit())
    return f"{kind}{number or 0}" if kind in _NUMBERED else kind
